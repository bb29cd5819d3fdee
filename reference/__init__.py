"""DeepSeek-V4's sparse-attention indexer in plain PyTorch: as published (every rounding) and exact (float64)."""
