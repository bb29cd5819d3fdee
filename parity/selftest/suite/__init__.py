"""Tests of suite."""
