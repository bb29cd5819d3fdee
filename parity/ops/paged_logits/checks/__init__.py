"""The checks of paged logits, one module per level."""

from parity.ops.paged_logits.checks import bits, invariance, layout, resources, rounding, selection

CHECKS = [
    *layout.CHECKS,
    *rounding.CHECKS,
    *bits.CHECKS,
    *selection.CHECKS,
    *invariance.CHECKS,
    *resources.CHECKS,
]
