"""Numerics: arithmetic models, bounds, exact data, intervals and selection, as mathematics on tensors."""
