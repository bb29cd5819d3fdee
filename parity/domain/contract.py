"""What an implementation promises about its numbers: layout, arithmetic of the dot, rounding points, tail and
invariance.

A contract is a small TOML file or a plain dict on the function (attribute ``parity_contract``); both go through
``Contract.from_dict``.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parity.numerics.arithmetic import IEEE, Arithmetic, Grouped, Ieee, named_model, stored_models
from parity.pages import layout as layouts

TAILS = ("-inf", "unspecified")
NONFINITE = ("propagate", "unspecified")
CONVERSIONS = ("nearest", "truncate")
SCHEDULES = ("fused", "published")
SCALES = ("amax", "pow2")
LENGTHS = ("any", "ascending")
TABLE_TAILS = ("any", "valid")
TIES = ("stable", "any")
CLEAN = ("any", "never", "always")
MEAN_ORDERS = ("any", "halving")
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
RESTRICTIONS = (
    *("heads", "next_n", "k", "lengths", "max_rows", "min_pages", "page_gap", "width_multiple", "table_tail"),
    *("contiguous", "storage_offset", "singleton_strides", "clean_logits", "ties", "graph", "nonfinite", "tail"),
    "flush_to_zero",
)
"""Keys that narrow what is drawn or asked; the others say how results are rounded."""
_DTYPE_KEYS = ("operand_dtype", "dot_dtype", "product_dtype", "sum_unit", "out_dtype")


@dataclasses.dataclass(frozen=True)
class Contract:
    """The promises that a verdict is measured against; defaults are the strictest common ones, IEEE float32.

    layout             name of the page layout; empty where the operation has none, or none is named yet
    op                 name of the operation that the function computes
    arithmetic         of the dot over the 128 dims: ``Ieee()`` or ``Grouped(...)``
    arithmetic_name    what a verdict calls it
    assumed            the arithmetic was measured on another architecture and is only assumed here
    named              the contract itself names the arithmetic; False where it is a default
    dot_verified       the ``Grouped`` model was checked on this very device, so the dot has no error left beside the
                       model
    operand_dtype      keys are dequantised and rounded to it before the dot (None: used as stored)
    dot_dtype          each head's dot is rounded to it (None: stays float32)
    product_dtype      each head's weighted dot is rounded to it (None: stays float32)
    sum_unit           the sum over heads is accumulated in it
    out_dtype          the logit is rounded to it before it is returned as float32 (None: float32)
    conversion         "nearest" or "truncate", how those roundings go
    tail               "-inf": positions past the length are -inf when ``clean_logits``; "unspecified": never promised
    nonfinite          "propagate": a NaN or inf in a readable slot shows in the logit; "unspecified": not promised
    batch_invariant    a row's bits do not depend on the other rows or on the table's width
    flush_to_zero      subnormal results may become zero (subnormal operands are then not drawn)
    devices            where it runs: "cpu", "cuda", "sm_90", ...
    heads, next_n, k   the head counts, rows per request and numbers of slots that it takes (empty: any)
    lengths            "ascending": the rows of a request have ascending context lengths
    max_rows           most rows of a call (None: any number)
    min_pages          least columns of the block table
    page_gap           False: pages lie one behind the other
    width_multiple     what divides the columns of the logits
    table_tail         "valid": the table names pages of the pool also past a request's last one
    contiguous         operands, as case strings name them, that have no gaps between their rows
    storage_offset     False: every operand begins where its storage does
    singleton_strides  False: axes of size one have the strides that torch gives them
    clean_logits       "never" or "always": the values of the argument that it takes
    ties               "any": which of equal scores is chosen may change from run to run
    graph              False: it cannot be captured in a CUDA graph
    schedule           of a store: "fused" (float32 up to its one rounding) or "published" (a bf16 rounding after
                       pooling, norm, rotary and Hadamard)
    scale              of a store of fp8 pages: "amax" (max(amax, 1e-4) / 448) or "pow2" (that, rounded up to a power of
                       two)
    fake_fp4           a store of bf16 or fp8 pages quantises to the fp4 grid and back first
    mean_order         of a published store's mean of squares: "any", or "halving", the order of impl/fused_store.cu
    schedule_meta      "module:function" building the ``schedule_meta`` argument (None: the function has none)
    dots               "module:function" returning the dots of every head (None: there is none)
    """

    layout: str = ""
    op: str = "paged_logits"
    arithmetic: Arithmetic = IEEE
    arithmetic_name: str = "ieee"
    assumed: bool = False
    named: bool = False
    dot_verified: bool = False
    operand_dtype: torch.dtype | None = None
    dot_dtype: torch.dtype | None = None
    product_dtype: torch.dtype | None = None
    sum_unit: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    conversion: str = "nearest"
    tail: str = "-inf"
    nonfinite: str = "propagate"
    batch_invariant: bool = False
    flush_to_zero: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    heads: tuple[int, ...] = ()
    next_n: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    lengths: str = "any"
    max_rows: int | None = None
    min_pages: int = 0
    page_gap: bool = True
    width_multiple: int = 1
    table_tail: str = "any"
    contiguous: tuple[str, ...] = ()
    storage_offset: bool = True
    singleton_strides: bool = True
    clean_logits: str = "any"
    ties: str = "stable"
    graph: bool = True
    schedule: str = "fused"
    scale: str = "amax"
    fake_fp4: bool = False
    mean_order: str = "any"
    schedule_meta: str | None = None
    dots: str | None = None

    def __post_init__(self) -> None:
        if self.layout:
            layouts.find(self.layout, "contract key 'layout'")
        if not isinstance(self.op, str):
            raise TypeError(f"contract key 'op' must be the name of an operation, got {self.op!r}")
        _one_of("tail", self.tail, TAILS)
        _one_of("nonfinite", self.nonfinite, NONFINITE)
        _one_of("conversion", self.conversion, CONVERSIONS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("scale", self.scale, SCALES)
        _one_of("mean_order", self.mean_order, MEAN_ORDERS)
        _one_of("lengths", self.lengths, LENGTHS)
        _one_of("table_tail", self.table_tail, TABLE_TAILS)
        _one_of("ties", self.ties, TIES)
        _one_of("clean_logits", self.clean_logits, CLEAN)
        for key, least in (("max_rows", 1), ("min_pages", 0), ("width_multiple", 1)):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"contract key '{key}' must be an integer of at least {least}, got {value!r}")
        for key in ("next_n", "k"):
            if any(value < 1 for value in getattr(self, key)):
                raise ValueError(f"contract key '{key}' must list integers of at least 1, got {getattr(self, key)}")
        for key, named in (("schedule_meta", self.schedule_meta), ("dots", self.dots)):
            if named is not None and (not isinstance(named, str) or ":" not in named):
                raise ValueError(f"contract key '{key}' must be module:function or file.py:function, got {named!r}")
        if self.fake_fp4 and self.layout and not layouts.find(self.layout).fake_fp4:
            raise ValueError(f"contract key 'fake_fp4' must be false for {self.layout} pages: they hold the fp4 values")
        if not isinstance(self.arithmetic, Ieee | Grouped):
            raise TypeError(f"contract key 'arithmetic' must be Ieee() or Grouped(...), got {self.arithmetic!r}")
        if self.dot_verified and not isinstance(self.arithmetic, Grouped):
            raise ValueError(
                "contract key 'dot_verified' needs a grouped arithmetic; an ieee dot of free order has no exact model"
            )
        if isinstance(self.arithmetic, Grouped) and self.operand_dtype is not None:
            # A grouped cut depends on the rounded operands' exponents; a core that keeps 24 bits meets the ieee bound.
            raise ValueError("contract key 'operand_dtype' needs an ieee arithmetic, got " + str(self.arithmetic))
        for key in _DTYPE_KEYS:
            value = getattr(self, key)
            if value is not None and value not in DTYPES.values():
                raise ValueError(f"contract key '{key}' must be float32, bf16 or fp16, got {value}")

    @classmethod
    def default(
        cls,
        layout: str,
        device: torch.device | str = "cpu",
        *,
        op: str = "paged_logits",
        capability: tuple[int, int] | None = None,
    ) -> Contract:
        """IEEE float32 everywhere; an fp8 dot on CUDA gets the sm_90 e4m3 rule, ``assumed`` on any other architecture.

        ``capability`` is the CUDA compute capability; by default the present device's."""
        layouts.find(layout, "contract key 'layout'")
        arithmetic, name, assumed = default_arithmetic(layout, device, capability=capability)
        return cls(layout=layout, op=op, arithmetic=arithmetic, arithmetic_name=name, assumed=assumed)

    @classmethod
    def from_dict(
        cls,
        given: Mapping[str, Any],
        device: torch.device | str = "cpu",
        *,
        capability: tuple[int, int] | None = None,
        layout: str | None = None,
        op: str | None = None,
    ) -> Contract:
        """A contract from plain strings, booleans and lists, as TOML or a ``parity_contract`` attribute holds them.

        ``arithmetic`` is "auto" (or absent: ``default_arithmetic``), "ieee", the name of a stored model, or a table
        ``{group, kept, final, running, product_exponent, rounding, known_order}``.
        ``layout`` and ``op`` are used where the dict has none, and must agree with it where it has. ValueError names
        the key."""
        if not isinstance(given, Mapping):
            raise TypeError(f"a contract must be a table of keys, got {type(given).__name__}")
        values = dict(given)
        for key, wanted in (("layout", layout), ("op", op)):
            if wanted is not None and values.setdefault(key, wanted) != wanted:
                raise ValueError(f"contract key '{key}' is {values[key]!r} but {wanted!r} was requested")
        known = {f.name for f in dataclasses.fields(cls)} - {"arithmetic_name", "assumed", "named", "dot_verified"}
        for key in values:
            if key not in known:
                raise ValueError(f"contract key '{key}' is unknown: expected one of {', '.join(sorted(known))}")
        for key in _DTYPE_KEYS:
            if key in values:
                values[key] = _dtype(key, values[key])
        flags = ("page_gap", "storage_offset", "singleton_strides", "graph")
        for key in ("batch_invariant", "flush_to_zero", "fake_fp4", *flags):
            if key in values and not isinstance(values[key], bool):
                raise TypeError(f"contract key '{key}' must be true or false, got {values[key]!r}")
        for key, kind in (("devices", str), ("heads", int), ("next_n", int), ("k", int), ("contiguous", str)):
            if key in values:
                values[key] = _tuple_of(key, values[key], kind)
        pages = values.get("layout", "")
        if pages:
            layouts.find(pages, "contract key 'layout'")
        wanted_arithmetic = values.pop("arithmetic", "auto")
        if wanted_arithmetic == "auto":
            arithmetic, name, assumed = default_arithmetic(pages, device, capability=capability)
        else:
            arithmetic, name, assumed = _arithmetic(wanted_arithmetic, device, capability)
        named = wanted_arithmetic != "auto"
        return cls(arithmetic=arithmetic, arithmetic_name=name, assumed=assumed, named=named, **values)

    @classmethod
    def from_toml(cls, path: str | Path, device: torch.device | str = "cpu", **keywords: Any) -> Contract:
        """``from_dict`` of a TOML file; every error names the file."""
        try:
            with Path(path).open("rb") as file:
                given = tomllib.load(file)
        except OSError as error:
            raise ValueError(f"contract file {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"contract file {path} is not valid TOML: {error}") from error
        try:
            return cls.from_dict(given.get("contract", given), device, **keywords)
        except (ValueError, TypeError) as error:
            raise type(error)(f"contract file {path}: {error}") from error

    def verified(self, arithmetic: Grouped | None = None) -> Contract:
        """This contract with its grouped model (or the given one) taken as exact, as a check on the device showed."""
        model = self.arithmetic if arithmetic is None else arithmetic
        return dataclasses.replace(self, arithmetic=model, arithmetic_name=str(model), assumed=False, dot_verified=True)

    def describe_dot(self) -> str:
        """One phrase for headers and verdicts, such as ``sm_90 e4m3 grouped(32, 13, 13), bound only``."""
        if isinstance(self.arithmetic, Ieee):
            return "ieee float32"
        state = "verified" if self.dot_verified else "bound only, assumed" if self.assumed else "bound only"
        return f"{self.arithmetic_name}, {state}"

    @property
    def restrictions(self) -> tuple[str, ...]:
        """What it takes less than any legal input, as `key = value`; a verdict is passed within these."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        return tuple(
            f"{key} = {_written(getattr(self, key))}" for key in RESTRICTIONS if getattr(self, key) != usual[key]
        )

    @property
    def coarse(self) -> str | None:
        """What describes a dot whose bound may be coarse: grouped, and no model of it verified; None for any other."""
        return self.describe_dot() if isinstance(self.arithmetic, Grouped) and not self.dot_verified else None

    @property
    def rounds(self) -> bool:
        """Whether any rounding point below float32 is declared."""
        return any(getattr(self, key) not in (None, torch.float32) for key in _DTYPE_KEYS)


def default_arithmetic(
    layout: str, device: torch.device | str, *, capability: tuple[int, int] | None = None
) -> tuple[Arithmetic, str, bool]:
    """The dot's arithmetic, its name and whether it is assumed, where a contract names none."""
    pages = layouts.find(layout) if layout else None
    if pages is None or pages.core is None or not pages.core_by_default or torch.device(device).type != "cuda":
        return IEEE, "ieee", False
    model = named_model(pages.core)
    return model.arithmetic, f"{model.name} {model.arithmetic}", _capability(device, capability) != (9, 0)


def _capability(device: torch.device | str, capability: tuple[int, int] | None) -> tuple[int, int]:
    return capability if capability is not None else torch.cuda.get_device_capability(torch.device(device))


def _arithmetic(
    given: Any, device: torch.device | str, capability: tuple[int, int] | None
) -> tuple[Arithmetic, str, bool]:
    if isinstance(given, Ieee | Grouped):
        return given, str(given), False
    if isinstance(given, Mapping):
        try:
            model = Grouped(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"contract key 'arithmetic': {error}") from error
        return model, str(model), False
    if given == "ieee":
        return IEEE, "ieee", False
    names = [model.name for model in stored_models()]
    if given not in names:
        raise ValueError(
            f"contract key 'arithmetic' is {given!r}: expected auto, ieee, a table, or one of {', '.join(names)}"
        )
    stored = named_model(given)
    here = torch.device(device).type == "cuda" and "sm_{}{}".format(*_capability(device, capability))
    return stored.arithmetic, f"{stored.name} {stored.arithmetic}", stored.hypothesis or here != stored.architecture


def _dtype(key: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if value not in DTYPES:
        raise ValueError(f"contract key '{key}' must be float32, bf16 or fp16, got {value!r}")
    return DTYPES[value]


def _written(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"contract key '{key}' must be one of {', '.join(allowed)}, got {value!r}")


def _tuple_of(key: str, value: Any, kind: type) -> tuple[Any, ...]:
    items = (value,) if isinstance(value, kind) else value
    if isinstance(items, str) or not hasattr(items, "__iter__") or not all(type(item) is kind for item in items):
        raise TypeError(f"contract key '{key}' must be a list of {kind.__name__}, got {value!r}")
    return tuple(items)
