"""name-dims: turn a traced module's literal sizes into polynomials of the dim names.

Values are ambiguous (2048 = 16*128), so a name is not read off one trace: each literal is fitted to
the real module *and* to every witness, the same module traced with other sizes.

    %q = nn.linear %h, @q_proj : f32[b, s, 2048]   ->   %q = nn.linear %h, @q_proj : f32[b, s, H*A]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import ClassVar

from ktgraph.ir.dims import STANDARD_DIMS, Dim
from ktgraph.ir.graph import Module, Witness
from ktgraph.ir.literals import literal_lines, literals, set_literals
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass

Trace = tuple[int, ...]  # one number per trace: the real module, then each witness
Level = Callable[[Sequence[str]], Iterator[Dim]]  # candidates of one complexity
_SMALLEST_NAMED = 8  # smaller numbers that never change are ordinary numbers


@register_pass
@dataclass(frozen=True)
class NameDims(Pass):
    """Name literal sizes by fitting them to the witness traces, then drop the witnesses."""

    name: ClassVar[str] = "name-dims"
    numerics: ClassVar[Numerics] = exact()
    ensures: ClassVar[Sequence[str]] = ("named",)

    def run(self, module: Module, ctx: PassContext) -> None:
        if not module.witnesses:
            ctx.note("no witness traces: the module keeps its sizes as they are")
            return
        fit = Fit([module.dims, *(w.bindings for w in module.witnesses)])
        for names in fit.aliases:
            ctx.note(f"{' and '.join(names)} are equal in every trace: {names[0]} stands for both")
        traces = _traces(module)
        found = [fit.best(trace) for trace in traces]
        _report(module, ctx, traces, found)
        clear = [f[0] if len(f) == 1 else t[0] for f, t in zip(found, traces, strict=True)]
        set_literals(module, clear)
        module.witnesses.clear()


def _traces(module: Module) -> list[Trace]:
    real = literals(module)
    for number, witness in enumerate(module.witnesses):
        _check_witness(module, number, witness, len(real))
    return list(zip(real, *(w.literals for w in module.witnesses), strict=True))


def _check_witness(module: Module, number: int, witness: Witness, count: int) -> None:
    if len(witness.literals) != count:
        raise ValueError(
            f"witness {number} of @{module.name} lists {len(witness.literals)} literals, the "
            f"module has {count}: it was traced from a model of another structure"
        )
    missing = sorted(set(module.dims) - set(witness.bindings))
    if missing:
        raise ValueError(f"witness {number} of @{module.name} does not bind {', '.join(missing)}")


def _report(
    module: Module, ctx: PassContext, traces: Sequence[Trace], found: Sequence[Sequence[Dim]]
) -> None:
    open_places = {t: n for n, t in reversed(list(enumerate(traces))) if len(found[n]) != 1}
    if not open_places:
        return
    lines = literal_lines(module)
    for trace, place in sorted(open_places.items(), key=lambda item: item[1]):
        dims, shown = found[place], ", ".join(map(str, trace))
        why = f"may be {' or '.join(map(str, dims))}" if dims else "fits no polynomial of the dims"
        ctx.note(f"the literal {trace[0]} ({shown} in the traces) {why}, kept: {lines[place]}")


class Fit:
    """Finds the simplest polynomial of the names that gives a literal in every trace."""

    def __init__(self, bindings: Sequence[Mapping[str, int]]) -> None:
        self.bindings = bindings
        groups: dict[Trace, list[str]] = {}
        for name in sorted(bindings[0], key=_standard_order):
            groups.setdefault(tuple(b[name] for b in bindings), []).append(name)
        self.aliases = [names for names in groups.values() if len(names) > 1]
        self.names = [names[0] for names in groups.values()]
        self._levels: dict[Level, dict[Trace, list[Dim]]] = {}
        self._found: dict[Trace, list[Dim]] = {}

    def best(self, trace: Trace) -> list[Dim]:
        """The simplest fits: one when it is clear, several when ambiguous, [] when none fits."""
        if trace not in self._found:
            self._found[trace] = _simplest(self._search(trace))
        return self._found[trace]

    def _search(self, trace: Trace) -> list[Dim]:
        constant = len(set(trace)) == 1
        if constant and abs(trace[0]) < _SMALLEST_NAMED:
            return [Dim.of(trace[0])]
        if constant:
            return self._level(_names).get(trace, [Dim.of(trace[0])])
        for level in (_names, _products, _sums, _shared_factors):
            if trace in self._level(level):
                return self._level(level)[trace]
        return self._long_sums(trace, _names) or self._long_sums(trace, _name_sums)

    def _long_sums(self, trace: Trace, tails: Level) -> list[Dim]:
        """H*A+I, H*(N+P)+R (tails are names), H*(N+P)+P+R (tails are sums of two)."""
        found: dict[Dim, None] = {}
        for head, heads in [*self._level(_pairs).items(), *self._level(_shared_factors).items()]:
            rest = tuple(v - h for v, h in zip(trace, head, strict=True))
            for tail in self._level(tails).get(rest, []):
                found.update({dim + tail: None for dim in heads})
        return list(found)

    def _level(self, candidates: Level) -> dict[Trace, list[Dim]]:
        """Candidates by their value in every trace; built once, when first needed."""
        if candidates not in self._levels:
            level: dict[Trace, list[Dim]] = {}
            for dim in dict.fromkeys(candidates(self.names)):
                level.setdefault(tuple(dim.at(b) for b in self.bindings), []).append(dim)
            self._levels[candidates] = level
        return self._levels[candidates]


def _simplest(dims: Sequence[Dim]) -> list[Dim]:
    """Those with the fewest factors, then the fewest different names."""

    def factors(dim: Dim) -> tuple[int, int]:
        return sum(len(m) + (abs(c) != 1) for m, c in dim.terms), len(dim.names)

    least = min(map(factors, dims), default=None)
    return [d for d in dims if factors(d) == least]


def _standard_order(name: str) -> tuple[int, str]:
    known = list(STANDARD_DIMS)
    return (known.index(name) if name in known else len(known), name)


# -- candidates, simplest first -------------------------------------------------------------------
def _names(names: Sequence[str]) -> Iterator[Dim]:
    """D"""
    yield from map(Dim.of, names)


def _pairs(names: Sequence[str]) -> Iterator[Dim]:
    """H*A"""
    yield from (Dim.of(a) * b for a, b in combinations(names, 2))


def _products(names: Sequence[str]) -> Iterator[Dim]:
    """2*F, H*A"""
    yield from (Dim.of(a) * count for a in names for count in (2, 3, 4))
    yield from _pairs(names)


def _name_sums(names: Sequence[str]) -> Iterator[Dim]:
    """R+P"""
    yield from (Dim.of(a) + b for a, b in combinations(names, 2))


def _sums(names: Sequence[str]) -> Iterator[Dim]:
    """R+P, N-P, VOC+1"""
    yield from _name_sums(names)
    yield from (Dim.of(a) - b for a, b in permutations(names, 2))
    yield from (Dim.of(a) + step for a in names for step in (1, -1))


def _shared_factors(names: Sequence[str]) -> Iterator[Dim]:
    """H*(N+P), A*(H+2*G), 2*NS*F, NS*F*D"""
    for a in names:
        others = [n for n in names if n != a]
        for b, c in permutations(others, 2):
            yield from (Dim.of(a) * (Dim.of(b) + c), Dim.of(a) * (Dim.of(b) + Dim.of(c) * 2))
    yield from (dim * 2 for dim in _pairs(names))
    yield from (Dim.of(a) * b * c for a, b, c in combinations(names, 3))


__all__ = ["Fit", "NameDims"]
