"""Tests of ops/shared."""
