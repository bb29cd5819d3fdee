"""The operation compressor: tokens to pooled keys, call by call."""
