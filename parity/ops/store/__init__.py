"""The operation store: pooled keys to pages."""
