"""The operation paged_logits: the indexer's scores over a paged cache."""
