"""Dims: integer polynomials over named sizes, compared in normal form.

A *dim name* (``D``, ``H``) is fixed for a model, a *sym name* (``T``, ``S``) is known only at run
time; both are plain names here, the module says which is which.  ``H*(N+P)`` and ``H*N + P*H`` are
the same `Dim`; the printer writes one canonical, factored spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from math import prod
from operator import mul

Monomial = tuple[str, ...]  # sorted names, repeated for powers: ("H", "N")

# The letters the project uses, documented once.  Frontends may add names, never reuse one of these.
STANDARD_DIMS: dict[str, str] = {
    "D": "hidden size",
    "VOC": "vocabulary size",
    "I": "dense MLP width",
    "F": "expert width",
    "E": "routed experts",
    "K": "experts per token (top-k)",
    "NS": "shared experts",
    "NG": "expert groups",
    "KG": "expert groups kept by the router",
    "H": "attention heads",
    "G": "key/value heads",
    "A": "head size (GQA)",
    "J": "rope frequencies, half of the rotated channels",
    "N": "query/key head part without rope (MLA)",
    "P": "query/key head part with rope (MLA)",
    "V": "value head size (MLA)",
    "R": "latent key/value rank (MLA)",
    "RQ": "latent query rank (MLA)",
    "HOT": "slots of a layer's hot experts on the GPU (HOT2 ... where layers differ)",
    "FS": "shared expert width",
    "W": "rows that a layer with a window looks back to, the token's own included",
}
SLOTS = "HOT"
STANDARD_SYMS: dict[str, str] = {
    "T": "tokens in the call, all sequences concatenated",
    "B": "sequences in the call",
    "Q": "most new tokens of one sequence in the call",
    "S": "cache rows in use, summed over sequences",
    "O": "rows whose logits are asked for",
    "C": "cache rows allocated per layer",
    "b": "batch axis of a traced module",
    "s": "sequence axis of a traced module",
    "t": "total length (past and new) in a traced module",
}


class Dim:
    """An immutable integer polynomial; build with `Dim.of` and arithmetic."""

    __slots__ = ("_hash", "terms")

    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = tuple(sorted((m, c) for m, c in terms.items() if c != 0))
        self._hash = hash(self.terms)

    @staticmethod
    def of(value: int | str | Dim) -> Dim:
        """Make a Dim from an integer, a name, or a Dim (returned unchanged)."""
        if isinstance(value, Dim):
            return value
        if isinstance(value, str):
            return Dim({(value,): 1})
        return Dim({(): int(value)})

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            other = Dim.of(other)
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: int | str | Dim) -> Dim:
        out = dict(self.terms)
        for mono, coeff in Dim.of(other).terms:
            out[mono] = out.get(mono, 0) + coeff
        return Dim(out)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return Dim({m: -c for m, c in self.terms})

    def __sub__(self, other: int | str | Dim) -> Dim:
        return self + (-Dim.of(other))

    def __rsub__(self, other: int | str) -> Dim:
        return Dim.of(other) - self

    def __mul__(self, other: int | str | Dim) -> Dim:
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in Dim.of(other).terms:
                mono = tuple(sorted(m1 + m2))
                out[mono] = out.get(mono, 0) + c1 * c2
        return Dim(out)

    __rmul__ = __mul__

    @property
    def names(self) -> frozenset[str]:
        """Every name that occurs in the polynomial."""
        return frozenset(n for m, _ in self.terms for n in m)

    @property
    def is_const(self) -> bool:
        return all(m == () for m, _ in self.terms)

    def const(self) -> int:
        """The integer value; raises ValueError when names occur."""
        if not self.is_const:
            raise ValueError(f"dim {self} is not a plain integer")
        return self.terms[0][1] if self.terms else 0

    def at(self, bindings: Mapping[str, int]) -> int:
        """Evaluate; raises KeyError naming the first unbound name."""
        return sum(c * prod(bindings[n] for n in m) for m, c in self.terms)

    def subst(self, bindings: Mapping[str, Dim | int | str]) -> Dim:
        """Replace names by dims (names without a binding stay)."""
        if not any(n in bindings for n in self.names):
            return self
        out = Dim({})
        for mono, coeff in self.terms:
            term = Dim.of(coeff)
            for name in mono:
                term = term * Dim.of(bindings.get(name, name))
            out = out + term
        return out

    def divide(self, divisor: Dim) -> Dim | None:
        """Exact polynomial quotient, or None when `divisor` does not divide evenly."""
        if not divisor.terms:
            return None
        lead_mono, lead_coeff = max(divisor.terms, key=lambda t: (len(t[0]), t[0]))
        rest, quotient = self, Dim({})
        for _ in range(len(self.terms) * 8 + 8):
            if not rest.terms:
                return quotient
            step = _divide_monomial(rest, lead_mono, lead_coeff)
            if step is None:
                return None
            quotient, rest = quotient + step, rest - step * divisor
        return None

    def __str__(self) -> str:
        return _spell(self)

    def __repr__(self) -> str:
        return f"Dim({self})"


def product(dims: Iterable[Dim]) -> Dim:
    """Of a shape: the number of elements."""
    return reduce(mul, dims, Dim.of(1))


def _divide_monomial(poly: Dim, mono: Monomial, coeff: int) -> Dim | None:
    top_mono, top_coeff = max(poly.terms, key=lambda t: (len(t[0]), t[0]))
    left = list(top_mono)
    for name in mono:
        if name not in left:
            return None
        left.remove(name)
    if top_coeff % coeff:
        return None
    return Dim({tuple(left): top_coeff // coeff})


@lru_cache(maxsize=65536)
def _spell(dim: Dim) -> str:
    """Canonical spelling: common factors pulled out (``H*(N+P)+P+R``), names before numbers."""
    if not dim.terms:
        return "0"
    factor = _best_factor(dim)
    if factor is None:
        return _join_terms(dim.terms)
    inner: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for mono, coeff in dim.terms:
        if factor in mono:
            left = list(mono)
            left.remove(factor)
            inner[tuple(left)] = coeff
        else:
            rest[mono] = coeff
    head = f"{factor}*({_spell(Dim(inner))})"
    if not rest:
        return head
    tail = _spell(Dim(rest))
    return head + tail if tail.startswith("-") else f"{head}+{tail}"


def _best_factor(dim: Dim) -> str | None:
    """The name whose multiples (at least two, none of them the bare name) are the most numerous."""
    counts: dict[str, int] = {}
    for name in dim.names:
        holders = [m for m, _ in dim.terms if name in m]
        if len(holders) >= 2 and (name,) not in holders:
            counts[name] = len(holders)
    return min(counts, key=lambda n: (-counts[n], n)) if counts else None


def _join_terms(terms: Iterable[tuple[Monomial, int]]) -> str:
    ordered = sorted(terms, key=lambda t: (-len(t[0]), t[0]))
    ordered = [t for t in ordered if t[1] > 0] + [t for t in ordered if t[1] < 0]
    out = ""
    for mono, coeff in ordered:
        sign = "-" if coeff < 0 else ("+" if out else "")
        out += sign + _spell_monomial(mono, abs(coeff))
    return out


def _spell_monomial(mono: Monomial, coeff: int) -> str:
    if not mono:
        return str(coeff)
    body = "*".join(mono)
    return body if coeff == 1 else f"{coeff}*{body}"
