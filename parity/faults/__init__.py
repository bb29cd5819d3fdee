"""Fault models: what goes wrong in public indexer kernels, used to measure the suite and to explain a failure."""
