"""A correct staged implementation of the compressor and its fault models."""
