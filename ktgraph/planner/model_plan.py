"""`kt.plan`: forecasts of a model for a target and its what-ifs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast

from rich.console import Console, Group

from ktgraph.api import compute_dtype, trace
from ktgraph.compile_options import check_options
from ktgraph.errors import UnsupportedInputError, is_whole
from ktgraph.model_input import Model
from ktgraph.planner.forecast import Forecast, forecast
from ktgraph.planner.model import ModelSize
from ktgraph.planner.report import report
from ktgraph.planner.what_if import Setting, apply_what_if
from ktgraph.stages import Traced
from ktgraph.target import Target, resolve_target
from ktgraph.weights.policy import Policy


@dataclass(frozen=True)
class ModelPlan:
    """The forecast of the base, and one for each what-if.  Prints itself; rich draws its tables."""

    model: ModelSize
    base: Forecast
    what_ifs: tuple[Forecast, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether `kt.compile` would take the base."""
        return self.base.fits

    def what_if(self, text: str) -> Forecast:
        """The forecast of one what-if, by its text."""
        for found in self.what_ifs:
            if found.name == text:
                return found
        known = ", ".join(repr(f.name) for f in self.what_ifs) or "none"
        raise UnsupportedInputError(f"no what-if {text!r} was planned; planned: {known}")

    def __rich__(self) -> Group:
        return report(self.model, [self.base, *self.what_ifs])

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=110, color_system=None, emoji=False)
        console.print(self.__rich__())
        lines = cast("StringIO", console.file).getvalue().splitlines()
        return "\n".join(line.rstrip() for line in lines)


def plan(
    model: Model | Traced,
    target: str | Path | Target = "auto",
    *,
    what_if: str | Sequence[str] = (),
    gpu_memory: str | int | None = None,
    ram: str | int | None = None,
    quantize: str | None = None,
    dtype: str = "auto",
    context: int | None = None,
    batch: int = 1,
    **options: Any,
) -> ModelPlan:
    """Predict speed, memory and places of a model without its weights.

    model: the path of a config.json, a folder that holds one, a transformers config or model, or
        what `kt.trace` made of one, to plan it again without tracing.
    target: as `kt.compile` takes it: a word, the name or file of a described machine, a `Target`.
    what_if: other machines or calls to show beside it, e.g. "gpu_memory=+8GiB",
        "ram=384GiB,link=x2", "cpu=h200+xeon-amx"; see `ktgraph.planner.what_if`.
    gpu_memory, ram: bytes that ktgraph may use there, instead of the target's.
    quantize, dtype, context, and options such as max_tokens, rules, threads: as `kt.compile` takes
        them.  batch: sequences of a decode step, and `max_batch`.

    A model that does not fit is a plan with `fits` False and the terms in `base.refusal`.  Raises
    UnsupportedInputError for a model that cannot be traced, TargetError, WhatIfError, and errors
    of options and rules.
    """
    given = {"quantize": quantize, "context": context, **options}
    check_options(given)
    if not is_whole(batch) or batch < 1:
        raise UnsupportedInputError(f"batch={batch!r}: expected a whole number above 0")
    if quantize is not None:
        Policy.parse(quantize)  # a fault shows before anything is traced
    setting = Setting(resolve_target(target), given, batch)
    for key, size in (("gpu_memory", gpu_memory), ("ram", ram)):
        setting = setting if size is None else apply_what_if(f"{key}={size}", setting)
    texts = [what_if] if isinstance(what_if, str) else list(what_if)
    others = [(text, apply_what_if(text, setting)) for text in texts]
    traced = _traced(model, dtype, setting.target)
    found = [forecast(text, traced, other) for text, other in [("base", setting), *others]]
    return ModelPlan(ModelSize.of(traced), found[0], tuple(found[1:]))


def _traced(model: Model | Traced, asked: str, target: Target) -> Traced:
    if not isinstance(model, Traced):
        return trace(model, dtype=compute_dtype(asked, target))
    if asked not in ("auto", model.dtype):
        raise UnsupportedInputError(f"dtype={asked!r}: the model was traced in {model.dtype!r}")
    return model


__all__ = ["ModelPlan", "plan"]
