"""What the operations over a block table have in common: metamorphic pairs, the reducer of cases, shapes."""
