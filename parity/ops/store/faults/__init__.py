"""A correct staged implementation of the store and its fault models."""
