"""Every stored truth: goldens, predictions, digests, compile goldens."""
