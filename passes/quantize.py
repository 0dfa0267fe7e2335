"""quantize: store matrices in fewer bits (weight-only), by a policy, with the error measured.

Decode reads every weight once per token, so its speed is bytes; int8 keeps one scale per row, int4
one per group of columns.  Each quantized weight is a derived one, so the lossy step is visible:

Before:  %q = nn.linear %h, @layers[i].q_proj : f32[T, H*A]
After:   %q = nn.linear %h, @layers[i].q_proj.q : f32[T, H*A]
         weight @layers[i in 0..3].q_proj.q : f32[H*A, D]<int8> = quantize(@layers[i].q_proj) {…}

Policies: ktgraph/weights/policy.py; placement rules with an `encoding` come first.  With weights
at hand the report holds, per weight, the NMSE of the weight and of its output on normal inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ktgraph.ir.graph import Module, Op, WeightRef
from ktgraph.ir.types import Encoding, TensorType
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass, requant
from ktgraph.placement.rules import RULES_FILE, parse_rules, read_rules, rule_encodings
from ktgraph.rewrite import derived_weight, reference
from ktgraph.weights.encodings import nbytes, with_defaults
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.measure import INPUTS, MATRICES, ROWS, EncodingErrors, measure_errors
from ktgraph.weights.policy import LADDER, Decision, Policy, PolicyError, Use
from ktgraph.weights.sources import WeightSource

_RULE = "quantize"


class NothingQuantizedWarning(UserWarning):
    """A policy was given, and every weight stays as its checkpoint stores it."""


@register_pass
@dataclass(frozen=True)
class Quantize(Pass):
    """Quantize weights by a policy; without one the module stays as it is."""

    name: ClassVar[str] = "quantize"
    # Loose: rounding that flips a router's choice replaces a token's output.  Structure is compared
    # without the rounding, and the report bounds it weight by weight.
    numerics: ClassVar[Numerics] = requant(1.0)

    policy: str | None = None  # e.g. int8, int4(group=32), experts=int4(group=64),*=int8
    measure: bool = True  # report errors on the weights, where they are at hand

    def numerics_for(self, module: Module) -> Numerics:
        """Exact when the module holds nothing quantized after the run."""
        made = [w.recipe for w in module.weights.values() if w.recipe is not None]
        return self.numerics if any(r.kind == "quantize" for r in made) else exact()

    def run(self, module: Module, ctx: PassContext) -> None:
        by_rule = _rule_encodings(module, ctx)
        policy_text = self.policy or ctx.options.quantize
        text = policy_text or "placement rules"
        if policy_text is None and not by_rule:
            return
        if ctx.options.exact:
            raise PolicyError(
                f"quantize {text!r}: the option exact=True refuses lossy steps; leave one out"
            )
        policy = Policy.parse(text) if policy_text is not None else Policy(text, ())
        source = ctx.source if self.measure else None
        if policy.budget is not None and source is None:
            raise PolicyError(f"quantize {text!r}: a budget is measured and needs the weights")
        meter = _Meter(module, source)
        decisions = [d for whole in policy.decide(module) for d in _overruled(whole, by_rule)]
        rows = [row for d in decisions for row in _apply(module, d, ctx, meter)]
        _write_report(ctx, text, rows)
        if any(encoding for _, encoding in policy.rules):
            _warn_of_no_change(text, decisions, rows)


def _warn_of_no_change(text: str, decisions: Sequence[Decision], rows: Sequence[_Row]) -> None:
    """A warning where a policy meets a quantized checkpoint and leaves all of it as it is."""
    stored = sorted({str(d.use.stored) for d in decisions if d.use.stored is not None})
    if stored and rows and all(row.encoding == "keep" for row in rows):
        warnings.warn(
            f"quantize {text!r} changes no weight: the checkpoint stores them as "
            f"{', '.join(stored)}, and they stay so. An encoding for every weight replaces one "
            'only where it takes a tenth fewer bytes, a pattern always does, as in "experts=int8"',
            NothingQuantizedWarning,
            stacklevel=2,
        )


def _rule_encodings(module: Module, ctx: PassContext) -> dict[Op, Encoding | str]:
    """What placement rules say: those that `place` read, or those of the compile options."""
    text = ctx.artifacts.get(RULES_FILE)
    if text is not None:
        return rule_encodings(module, parse_rules(text, RULES_FILE))
    path = ctx.options.rules
    return rule_encodings(module, read_rules(path)) if path is not None else {}


def _overruled(decision: Decision, by_rule: Mapping[Op, Encoding | str]) -> Iterator[Decision]:
    """The decision for ops that no rule speaks of, and one for each thing that rules say."""
    use = decision.use
    if use.kept or not any(op in by_rule for op, _ in use.ops):
        yield decision
        return
    for said in dict.fromkeys(by_rule.get(op) for op, _ in use.ops):
        part = replace(use, ops=tuple(o for o in use.ops if by_rule.get(o[0]) == said))
        if said is None:
            yield replace(decision, use=part)
        else:
            encoding = None if isinstance(said, str) else said
            yield Decision(part, encoding, None, "a placement rule")


@dataclass(frozen=True)
class _Row:
    """A line of the report; a kept weight has no encoding and says why."""

    weight: str
    encoding: str
    before: int  # bytes
    after: int
    errors: EncodingErrors | None
    reason: str


def _apply(module: Module, decision: Decision, ctx: PassContext, meter: _Meter) -> Iterator[_Row]:
    use = decision.use
    encoding, reason = decision.encoding, decision.reason
    if decision.budget is not None:
        encoding, reason = meter.cheapest(use.ref, decision.budget)
    before = module.weights[use.name].type
    size = nbytes(before, module.dims)
    if encoding is None:
        ctx.refused(_RULE, use.ops[0][0], f"@{use.name} is kept: {reason}")
        yield _Row(use.name, "keep", size, size, None, reason)
        return
    if not ctx.may_rewrite(_RULE, use.ops[0][0]):
        return
    after = nbytes(before.encoded(encoding), module.dims)
    for name, errors in meter.members(use.ref, encoding):
        yield _Row(name, str(encoding), size, after, errors, reason)
    _rewrite(module, use, before, encoding)


def _rewrite(module: Module, use: Use, before: TensorType, encoding: Encoding) -> None:
    leaf = use.name.rpartition(".")[2] + ".q"
    attrs, type = {"encoding": str(encoding)}, before.encoded(encoding)
    for op, position in use.ops:
        ref = op.weight(position)
        made = derived_weight(module, [ref], leaf, "quantize", type, attrs)
        if made.name not in module.weights:
            module.add_weight(made)
        op.set_operand(position, reference(made, [ref]))


class _Meter:
    """Errors of encodings on the real weights; measures nothing when there are none."""

    def __init__(self, module: Module, source: WeightSource | None) -> None:
        self.module = module
        self.values = None
        if source is not None:
            self.values = WeightEvaluator(module, source, torch.float32)

    def members(
        self, ref: WeightRef, encoding: Encoding
    ) -> Iterator[tuple[str, EncodingErrors | None]]:
        """Every member of a family by name, with its errors."""
        for index in self._indices(ref):
            errors = None
            if self.values is not None:
                errors = measure_errors(self.values, ref, index, encoding)
            yield _member_name(ref, index), errors

    def cheapest(self, ref: WeightRef, budget: float) -> tuple[Encoding | None, str]:
        """The first encoding of the ladder whose errors stay inside the budget everywhere."""
        worst: list[float] = []
        for encoding in map(with_defaults, LADDER):
            errors = [e for _, e in self.members(ref, encoding) if e is not None]
            worst.append(max(e.largest for e in errors))
            if worst[-1] <= budget:
                return encoding, f"NMSE {worst[-1]:.2g} is inside the budget {budget:g}"
        return None, f"int8 has NMSE {worst[-1]:.2g}, the budget is {budget:g}"

    def _indices(self, ref: WeightRef) -> Sequence[int | None]:
        weight = self.module.weight_of(ref)
        return range(weight.lo, weight.hi + 1) if weight.is_family else (None,)


def _member_name(ref: WeightRef, index: int | None) -> str:
    return ref.name if index is None else ref.name.replace("[]", f"[{index}]", 1)


# -- report ---------------------------------------------------------------------------------------
def _write_report(ctx: PassContext, text: str, rows: Sequence[_Row]) -> None:
    changed = [r for r in rows if r.encoding != "keep"]
    before, after = sum(r.before for r in changed), sum(r.after for r in changed)
    ctx.note(
        f"policy {text}: {len(changed)} matrices or stacks, {before / 1e6:.4g} MB -> "
        f"{after / 1e6:.4g} MB; {len(rows) - len(changed)} kept"
    )
    heads = [r for r in changed if r.reason.startswith("the output head")]
    for row in heads:
        ctx.note(f"@{row.weight}: int8, {row.reason}")
    measured = [r for r in changed if r.errors is not None]
    if measured:
        worst = max(measured, key=lambda r: r.errors.output if r.errors else 0.0)
        assert worst.errors is not None
        ctx.note(f"largest output NMSE {worst.errors.output:.3g}: @{worst.weight}")
    ctx.artifacts["quantize.txt"] = _table(text, rows)


def _table(text: str, rows: Sequence[_Row]) -> str:
    width = max((len(r.weight) for r in rows), default=6) + 1
    head = f"{'weight':{width}}  {'encoding':16}  {'MB before':>10}  {'MB after':>10}"
    lines = [f"policy {text}", f"{head}  {'weight NMSE':>11}  {'output NMSE':>11}  note"]
    lines += [_line(row, width) for row in rows]
    sampled = f"NMSE over at most {MATRICES} matrices of a stack, {ROWS} rows of each"
    return "\n".join([*lines, f"{sampled}, {INPUTS} normal inputs"]) + "\n"


def _line(row: _Row, width: int) -> str:
    shown = ("-", "-")
    if row.errors is not None:
        shown = (f"{row.errors.weight:.3g}", f"{row.errors.output:.3g}")
    sizes = f"{row.before / 1e6:10.4g}  {row.after / 1e6:10.4g}"
    line = f"{'@' + row.weight:{width}}  {row.encoding:16}  {sizes}  {shown[0]:>11}  {shown[1]:>11}"
    return f"{line}  {row.reason}".rstrip()


__all__ = ["Quantize"]
