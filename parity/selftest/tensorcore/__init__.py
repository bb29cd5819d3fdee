"""Tests of tensorcore."""
