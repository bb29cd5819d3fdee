"""A correct staged implementation of top-k and its fault models."""
