"""Kernels under test: paged indexer logits in Triton and in PyTorch, top-k to slots, and the dispatch of a server."""
