"""Tests of ops/store."""
