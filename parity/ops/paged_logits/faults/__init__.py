"""A correct staged implementation of paged logits and its fault models."""
