"""The checks of paged logits, one module per level."""
