"""Tests of ops/paged_logits."""
