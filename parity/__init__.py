"""Numerical parity tests for kernels of DeepSeek-V4's sparse-attention indexer."""
