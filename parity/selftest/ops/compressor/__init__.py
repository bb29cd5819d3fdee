"""Tests of ops/compressor."""
