"""Validation: a pass's input and output run on the same miniature, and their results are compared.

Level 1 runs both in float64 under seeded random weights over a whole trace (`ktgraph/drive.py`) and
bounds the normalised mean squared error (NMSE) by what the pass declares: `exact` 0, `reorder`
1e-20, `requant(nmse)` and `lossy(nmse)`: its real error under `nmse`, and where the loss lies in
recipes of weights also what remains without them under 1e-20.  Level 2 is ktgraph/kernel_check.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ktgraph.drive import (
    DriveError,
    Trace,
    drive,
    is_language_model,
    make_trace,
    one_thread,
    vocabulary,
)
from ktgraph.ir.graph import Module
from ktgraph.ir.interp import InterpError
from ktgraph.miniature import Miniature, MiniatureError, shrink
from ktgraph.pass_api import Numerics, reorder
from ktgraph.weights.evaluate import WeightError, WeightEvaluator
from ktgraph.weights.recipes import recipe_def
from ktgraph.weights.sources import RandomSource, WeightSourceError

# [b, s] runs sequence by sequence, [T] all at once: matrix products of other row counts, and so
# other summation orders inside torch, of the same mathematics.
OTHER_CALLS = 1e-28
_FAULTS = (InterpError, DriveError, WeightError, WeightSourceError)


@dataclass(frozen=True)
class Validation:
    """What a comparison found.  `error` is None when nothing could be run: `how` says why."""

    error: float | None
    tolerance: float
    how: str
    fault: str = ""  # why the output is wrong; empty when it is right or could not be run

    @property
    def is_wrong(self) -> bool:
        return bool(self.fault)


@dataclass
class Validator:
    """Compares modules under one seed; results of a module are kept until another is compared."""

    seed: int = 0
    trace: Trace | None = None  # by default made from the seed and the miniature's vocabulary

    def __post_init__(self) -> None:
        self._kept: dict[tuple[str, str, bool], list[torch.Tensor]] = {}

    def compare(self, before: Module, after: Module, numerics: Numerics) -> Validation:
        """Run both; the output is wrong when its error exceeds what `numerics` allows."""
        try:
            small = shrink(before, after)
        except MiniatureError as error:
            return Validation(None, numerics.tolerance, f"not run: {error}")
        source = RandomSource(small.modules[0], self.seed)
        if not numerics.is_lossy:
            return self._compare(small, source, _tolerance(small, numerics), lossless=True)
        if _lossy_recipes(after) - _lossy_recipes(before):
            structure = self._compare(small, source, reorder().tolerance, lossless=True)
            if structure.is_wrong:
                return replace(structure, fault=f"with lossy recipes left out, {structure.fault}")
        return self._compare(small, source, numerics.nmse, lossless=False)

    def _compare(
        self, small: Miniature, source: RandomSource, tolerance: float, *, lossless: bool
    ) -> Validation:
        before, after = small.modules
        try:
            want = self._run(before, source, lossless)
        except _FAULTS as error:
            return Validation(None, tolerance, f"not run: the pass's input fails: {error}")
        try:
            got = self._run(after, source, lossless)
        except _FAULTS as error:
            return Validation(None, tolerance, small.how, f"the output does not run: {error}")
        error, where = worst(got, want)
        if error <= tolerance:
            return Validation(error, tolerance, small.how)
        return Validation(error, tolerance, small.how, _fault(error, tolerance, where))

    def _run(self, module: Module, source: RandomSource, lossless: bool) -> list[torch.Tensor]:
        key = (module.structural_hash(), source.fingerprint(), lossless)
        if key not in self._kept:
            weights = WeightEvaluator(module, source, torch.float64, lossless=lossless)
            trace = self.trace or make_trace(max(vocabulary(module), 2), self.seed)
            with one_thread():
                found = drive(module, weights, trace)
            recent = list(self._kept.items())[-3:]  # before and after, with and without losses
            self._kept = {**dict(recent), key: found}
        return self._kept[key]


def _tolerance(small: Miniature, numerics: Numerics) -> float:
    forms = {_is_traced(m) for m in small.modules}
    return max(numerics.tolerance, OTHER_CALLS) if len(forms) > 1 else numerics.tolerance


def _is_traced(module: Module) -> bool:
    """Whether token ids have axes [b, s]."""
    args = [a.type for f in module.functions.values() for a in f.args]
    return is_language_model(module) and any(len(getattr(t, "dims", ())) == 2 for t in args)


def _fault(error: float, tolerance: float, where: str) -> str:
    allowed = f"at most {tolerance:g}" if tolerance else "none (exact)"
    return f"results differ: NMSE {error:.3g} {where}, allowed: {allowed}"


def _lossy_recipes(module: Module) -> set[str]:
    """Weights that a lossy recipe makes."""
    made = [(w.name, w.recipe) for w in module.weights.values() if w.recipe is not None]
    return {name for name, recipe in made if not recipe_def(recipe.kind).is_exact}


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    """Squared error over squared size; inf for other shapes or values that are not finite."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    size = float(want.double().square().sum())
    error = float((got.double() - want.double()).square().sum())
    return error / size if size else (0.0 if error == 0 else float("inf"))


def worst(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> tuple[float, str]:
    """The largest NMSE over the steps of a trace, and the step it occurs in."""
    if len(got) != len(want):
        return float("inf"), f"in {len(got)} results instead of {len(want)}"
    found = [(nmse(g, w), f"in step {n}") for n, (g, w) in enumerate(zip(got, want, strict=True))]
    return max(found, default=(0.0, ""))


__all__ = ["Validation", "Validator", "nmse", "worst"]
