"""Numeric probes of a hand-written MoE layer: what its experts, router and sum compute.

A formula is believed only when it gives what the eager module gives, in float32 or wider, on random
tokens of several scales: few and many, one alone (most experts get nothing) and many alike (a layer
that drops tokens above a capacity shows).  Random numbers do not tie.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ktgraph.frontends.leaf_ops import GATES, gated, route

BOUND = 1e-10  # largest NMSE of a formula that is the same up to the order of sums
_SEED = 11
Order = Literal["gate_first", "up_first", "interleaved"]


class NotLiftedError(ValueError):
    """Why a layer that looks like MoE stays as it is."""


# ---------------------------------------------------------------- running a part of the model


def run_wide(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The eager module, in float32 where its own weights are narrower."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if all(
        t.dtype in (torch.float32, torch.float64) or not t.is_floating_point() for _, t in tensors
    ):
        return module(*args, **kwargs)
    wide = {n: t.float() if t.is_floating_point() else t for n, t in tensors}
    return functional_call(module, wide, args, kwargs)


def nmse(got: object, want: Tensor) -> float:
    """Squared error over squared size; infinite for another shape, or for no tensor."""
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return float("inf")
    size = float(want.double().square().sum())
    return float((got.double() - want.double()).square().sum()) / max(size, 1e-300)


def token_sets(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Tokens [n, width] to probe with: random ones of three scales, one alone, many alike."""
    rng = torch.Generator().manual_seed(_SEED)

    def draw(n: int, scale: float) -> Tensor:
        return (torch.randn(n, width, generator=rng, dtype=torch.float64) * scale).to(dtype)

    alike = draw(1, 1.0) + draw(48, 0.02)
    return [draw(40, 1.0), draw(18, 0.3), draw(18, 4.0), draw(1, 1.0), alike]


# ---------------------------------------------------------------- experts


@dataclass(frozen=True)
class ExpertForm:
    """A gated MLP by the names of its parameters inside an expert.

    second: the up projection, "" where `first` holds both, in `order`.
    """

    first: str
    second: str
    down: str
    act: str
    order: Order = "gate_first"
    biases: tuple[str, ...] = ()  # of first, second (if any) and down

    def run(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """What the form says of an expert with these parameters."""
        names = [n for n in (self.first, self.second, self.down) if n]
        bias = dict(zip(names, self.biases, strict=True)) if self.biases else {}

        def linear(name: str, value: Tensor) -> Tensor:
            b = weights[bias[name]] if bias else None
            return F.linear(value, weights[name], b)

        first = linear(self.first, x)
        gate, up = (first, linear(self.second, x)) if self.second else _halves(first, self.order)
        return linear(self.down, gated(gate, up, self.act))


def _halves(both: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    if order == "interleaved":
        return both[..., ::2], both[..., 1::2]
    first, second = both.chunk(2, -1)
    return (first, second) if order == "gate_first" else (second, first)


def probe_experts(experts: Sequence[nn.Module], width: int) -> ExpertForm:
    """The one form of all experts; raises NotLiftedError."""
    for form in _expert_forms(experts[0], width):
        if all(_expert_error(e, form, width) < BOUND for e in experts):
            return form
    held = ", ".join(f"{n} {list(p.shape)}" for n, p in experts[0].named_parameters())
    raise NotLiftedError(
        f"its experts ({type(experts[0]).__name__}: {held}) are no gated MLPs "
        f"down(act(gate(x)) * up(x)) with an activation of {', '.join(GATES)}"
    )


def _expert_forms(expert: nn.Module, width: int) -> Iterator[ExpertForm]:
    named = dict(expert.named_parameters())
    matrices = [n for n, p in named.items() if p.dim() == 2]
    linears = {n: n.removesuffix("weight") + "bias" for n in matrices if n.endswith("weight")}
    for names in itertools.permutations(matrices):
        shapes = [tuple(named[n].shape) for n in names]
        biases = tuple(linears[n] for n in names if linears.get(n) in named)
        if len(named) != len(names) + len(biases) or len(biases) not in (0, len(names)):
            return
        if len(names) == 3 and shapes[0] == shapes[1] == (shapes[2][1], width):
            for act in GATES:
                yield ExpertForm(names[0], names[1], names[2], act, biases=biases)
        if len(names) == 2 and shapes[0] == (2 * shapes[1][1], width):
            orders: tuple[Order, ...] = ("gate_first", "up_first", "interleaved")
            for order, act in itertools.product(orders, GATES):
                yield ExpertForm(names[0], "", names[1], act, order, biases)


def _expert_error(expert: nn.Module, form: ExpertForm, width: int) -> float:
    weights = {n: p.detach() for n, p in expert.named_parameters()}
    wide = torch.promote_types(weights[form.down].dtype, torch.float32)
    weights = {n: p.to(wide) for n, p in weights.items()}
    if set(weights) != {n for n in (form.first, form.second, form.down) if n} | set(form.biases):
        return float("inf")
    errors = [nmse(run_wide(expert, x), form.run(x, weights)) for x in token_sets(width, wide)[:4]]
    return max(errors)


# ---------------------------------------------------------------- the whole layer


@dataclass(frozen=True)
class Candidate:
    """The parts of a layer that looks like MoE; names are paths inside the layer."""

    layer: nn.Module
    experts: str  # the ModuleList
    gate: str  # the router's weight [E, D]
    gate_bias: str  # "" for none
    select: tuple[str, ...]  # vectors [E] that might move the choice
    extras: tuple[str, ...]  # children that may be added to the routed sum: shared experts

    def tensor(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        return getattr(self.layer.get_submodule(owner), leaf).detach()

    @property
    def members(self) -> list[nn.Module]:
        return list(self.layer.get_submodule(self.experts).children())


@dataclass(frozen=True)
class MoeForm:
    """What a layer computes: the sum of its routed experts, plus `extras`, each run on x."""

    candidate: Candidate
    expert: ExpertForm
    top_k: int
    score: str
    renorm: bool
    scale: float
    select: str  # "" for none
    extras: tuple[str, ...]

    @property
    def formula(self) -> dict[str, Any]:
        """Keywords of the leaf op `route`."""
        return {
            "top_k": self.top_k, "score": self.score, "renorm": self.renorm, "scale": self.scale,
            "groups": 1, "topk_groups": 1, "group_score": "max", "mask": "zero",
        }  # fmt: skip

    def __str__(self) -> str:
        renorm = ", weights that sum to 1" if self.renorm else ""
        plus = f", plus {', '.join(self.extras)}" if self.extras else ""
        experts = len(self.candidate.members)
        return (
            f"top {self.top_k} of {experts} experts ({self.score}{renorm}, {self.expert.act}){plus}"
        )


@dataclass(frozen=True)
class _Run:
    """Tokens, what the layer makes of them, and what each expert and each extra does."""

    x: Tensor
    want: Tensor
    experts: Tensor  # [n, E, D]
    extras: Mapping[str, Tensor]


@torch.no_grad()
def probe_layer(candidate: Candidate, rank: int) -> MoeForm:
    """The formula of a layer that takes tokens [..., D] of `rank` axes; raises NotLiftedError."""
    width = candidate.tensor(candidate.gate).shape[1]
    expert = probe_experts(candidate.members, width)
    runs = [_run(candidate, expert, x, rank) for x in _inputs(candidate, width)]
    best = float("inf")
    for form in _forms(candidate, expert, runs[0]):
        scaled, error = _with_scale(form, runs)
        best = min(best, error)
        if error < BOUND:
            return scaled
    raise NotLiftedError(
        "it is no weighted sum of its top-k experts by softmax or sigmoid of a linear router on "
        f"random tokens (closest formula: NMSE {best:.1e}, allowed {BOUND:.0e}); a capacity limit, "
        "noise, or another formula is not lifted"
    )


def _inputs(candidate: Candidate, width: int) -> list[Tensor]:
    own = candidate.tensor(candidate.gate).dtype
    return token_sets(width, torch.promote_types(own, torch.float32))


def _run(candidate: Candidate, expert: ExpertForm, x: Tensor, rank: int) -> _Run:
    lead = (
        [1] * (rank - 2) + [len(x)]
        if len(x) % 2 or rank == 2
        else [*[1] * (rank - 3), 2, len(x) // 2]
    )
    given = x.reshape(*lead, x.shape[-1])
    want = run_wide(candidate.layer, given.clone())
    if not isinstance(want, Tensor) or want.shape != given.shape:
        shape = list(want.shape) if isinstance(want, Tensor) else type(want).__name__
        raise NotLiftedError(f"of tokens {list(given.shape)} it makes {shape}, no tensor like them")
    made: list[Tensor] = []
    for member in candidate.members:
        weights = {n: p.detach().to(x.dtype) for n, p in member.named_parameters()}
        made.append(expert.run(x, weights))
    extras = {n: _extra(candidate.layer.get_submodule(n), given) for n in candidate.extras}
    flat = {n: t.reshape(x.shape) for n, t in extras.items() if t is not None}
    return _Run(x, want.reshape(x.shape), torch.stack(made, 1), flat)


def _extra(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a child makes of the tokens, None where it does not take them or makes other shapes."""
    try:
        found = run_wide(module, x.clone())
    except Exception:
        return None
    return found if isinstance(found, Tensor) and found.shape == x.shape else None


def _forms(candidate: Candidate, expert: ExpertForm, run: _Run) -> Iterator[MoeForm]:
    """Formulas without their scale, the likely ones first."""
    known = tuple(run.extras)
    choices = [(), *((n,) for n in known), *([known] if len(known) > 1 else [])]
    scores = (("softmax_after_topk", False), ("softmax", False), ("softmax", True),
              ("sigmoid", True), ("sigmoid", False))  # fmt: skip
    selects = ("", *candidate.select)
    count = run.experts.shape[1]
    ks = range(1, min(count, 64) + 1)
    for extras, select, (score, renorm), k in itertools.product(choices, selects, scores, ks):
        if k == 1 and renorm and score == "softmax":
            continue  # the same as softmax_after_topk
        yield MoeForm(candidate, expert, k, score, renorm, 1.0, select, extras)


def _with_scale(form: MoeForm, runs: Sequence[_Run]) -> tuple[MoeForm, float]:
    """The form with the constant that fits the first run best, and its worst error over all."""
    scale = _scale(form, runs[0])
    if abs(scale - 1.0) < 1e-5:
        scale = 1.0
    scaled = MoeForm(**{**vars(form), "scale": scale})
    worst = 0.0
    for run in runs:
        got = _routed(scaled, run) + sum(run.extras[n] for n in form.extras)
        worst = max(worst, nmse(got, run.want))
        if worst >= BOUND:
            break
    return scaled, worst


def _scale(form: MoeForm, run: _Run) -> float:
    got = _routed(form, run).double()
    want = run.want.double() - sum(run.extras[n].double() for n in form.extras)
    return float((got * want).sum() / got.square().sum().clamp_min(1e-300))


def _routed(form: MoeForm, run: _Run) -> Tensor:
    held = form.candidate
    bias = held.tensor(held.gate_bias).to(run.x.dtype) if held.gate_bias else None
    select = held.tensor(form.select).to(run.x.dtype) if form.select else None
    gate = held.tensor(held.gate).to(run.x.dtype)
    ids, weights = route(run.x, gate, bias, select, **form.formula)
    chosen = run.experts.gather(1, ids[..., None].expand(-1, -1, run.x.shape[-1]))
    return (chosen * weights[..., None].to(chosen.dtype)).sum(1)


__all__ = [
    "BOUND",
    "Candidate",
    "ExpertForm",
    "MoeForm",
    "NotLiftedError",
    "nmse",
    "probe_experts",
    "probe_layer",
    "run_wide",
    "token_sets",
]
