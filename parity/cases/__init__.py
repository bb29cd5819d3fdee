"""Cases: what is drawn. A case is a short string that decides every bit of a test problem, see case.py."""

from parity.cases.case import DIM, HEADS, LAYOUTS, LOGITS_DATA, PAGE, TOPK_DATA, Case, parse_case
from parity.cases.operands import Operands, TopkOperands, build
from parity.cases.placement import locate, readable_slots
from parity.cases.values import exactness

__all__ = [
    "DIM",
    "HEADS",
    "LAYOUTS",
    "LOGITS_DATA",
    "PAGE",
    "TOPK_DATA",
    "Case",
    "Operands",
    "TopkOperands",
    "build",
    "exactness",
    "locate",
    "parse_case",
    "readable_slots",
]
