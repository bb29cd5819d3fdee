"""What a fault model is: a small change to one stage of a correct implementation, with a name and a public report.

A model is data: `build` makes the faulty function, with a memory of its own, from the staged implementation of its
pipeline (`staged_logits`, `staged_topk`, `staged_store`, `staged_compressor`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS: dict[str, str] = {
    "selection": "selection loses or duplicates members",
    "formula": "a formula step is missing, doubled or on one side",
    "padding": "padding, sentinels and empty work",
    "rows": "which row uses which length, table, stride",
    "stale": "stale or uninitialised memory",
    "precision": "precision and scale rounding",
    "bytes": "writer and reader disagree on bytes",
    "launch": "launch and JIT limits",
    "memory": "memory growth",
    "chunks": "chunked differs from one-shot",
    "integers": "integer width",
    "race": "races",
    "dispatch": "dispatch took another path",
}

PIPELINES = ("logits", "topk", "store", "compressor")

Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One fault model.

    id         short name, unique in the catalogue
    stage      the stage of the computation that it spoils, as reports of kernels call it
    kind       one of KINDS
    sentence   what goes wrong, as a bug report would say it
    report     the public report that it mirrors, or "" for a variant that no listed report has
    pipeline   whose calling convention it has: logits, topk, store or compressor
    layout     the layout that it is run on
    change     stages to replace: name -> function (of the pipeline's Stages)
    wrap       a change of the whole function instead: correct function -> faulty function
    extra      facts that the runner needs: `schedule` of a store, `route` of a dispatcher, `compile` for a launch
    equivalent the proof that no input can tell the model from a correct implementation; "" for a real fault
    """

    id: str
    stage: str
    kind: str
    sentence: str
    report: str = ""
    pipeline: str = "logits"
    layout: str = "bf16"
    change: Mapping[str, Function] = field(default_factory=dict)
    wrap: Callable[[Function], Function] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    equivalent: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.pipeline not in PIPELINES:
            raise ValueError(f"pipeline: expected one of {', '.join(PIPELINES)}, got {self.pipeline!r}")
        if bool(self.change) == (self.wrap is not None) and not self.extra:
            raise ValueError(f"{self.id}: a model changes stages or wraps the function, got both or neither")

    @property
    def half(self) -> str:
        """A or B, by the name alone: the suite may be tuned on A, and its score on B is the honest one."""
        return "AB"[hashlib.sha256(self.id.encode()).digest()[0] & 1]


def collector(pipeline: str) -> tuple[list[Fault], Callable[..., None]]:
    """An empty list, and a function that adds a model of this pipeline to it; keyword arguments that are no fields of
    Fault are stages to replace."""
    models: list[Fault] = []
    own = {name for name in Fault.__dataclass_fields__ if name != "change"}

    def add(id: str, stage: str, kind: str, sentence: str, report: str = "", **more: Any) -> None:
        fields = {name: more.pop(name) for name in list(more) if name in own}
        models.append(Fault(id, stage, kind, sentence, report, pipeline=pipeline, change=more, **fields))

    return models, add
