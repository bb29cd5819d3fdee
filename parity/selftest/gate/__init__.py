"""Tests of gate."""
