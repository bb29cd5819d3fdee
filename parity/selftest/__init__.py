"""Tests of the framework itself: each comparator against its nearest wrong answer, each option, each exit code."""
