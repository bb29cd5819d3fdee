"""The pre-merge check."""
