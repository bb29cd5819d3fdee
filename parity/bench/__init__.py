"""Timing kernels against the ceilings of the device."""
