"""Which choice of arithmetic costs the recall: the indexer as a list of choices, measured, and the loss shared out."""
