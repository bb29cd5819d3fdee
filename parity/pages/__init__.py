"""Pages: layouts, placement, pools and poison, drawn values."""

from parity.pages.bf16 import BF16
from parity.pages.fp4 import FP4
from parity.pages.fp8 import FP8
from parity.pages.layout import register

for _layout in (BF16, FP8, FP4):
    register(_layout)
