"""What a pass author imports: `Pass`, `PassContext`, numerics classes, and the table of passes.

A pass is one file: a docstring (what, why, before -> after), options as frozen dataclass fields,
and ``run(module, ctx)``, which edits the module in place.  The manager (ktgraph/pass_manager.py)
checks requires, hashes, verifies, validates, times, diffs and dumps around it.

    @register_pass
    @dataclass(frozen=True)
    class FuseNorms(Pass):
        name: ClassVar[str] = "fuse-norms"
        numerics: ClassVar[Numerics] = exact()
        def run(self, module: Module, ctx: PassContext) -> None: ...
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pkgutil import iter_modules
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ktgraph.ir.graph import Module, Op
from ktgraph.ir.printer import print_op

if TYPE_CHECKING:
    from ktgraph.target import Target
    from ktgraph.weights.sources import WeightSource


@dataclass(frozen=True)
class Numerics:
    """What a pass may do to results.

    `exact` nothing, `reorder` round-off, `requant` (rounds weights) and `lossy` up to nmse.
    """

    kind: str
    nmse: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}(nmse={self.nmse:g})" if self.is_lossy else self.kind

    @property
    def is_lossy(self) -> bool:
        return self.kind in ("requant", "lossy")

    @property
    def tolerance(self) -> float:
        """Largest NMSE of the outputs allowed when both sides run in float64 on the miniature."""
        return {"exact": 0.0, "reorder": 1e-20}.get(self.kind, self.nmse)


def exact() -> Numerics:
    return Numerics("exact")


def reorder() -> Numerics:
    return Numerics("reorder")


def requant(nmse: float) -> Numerics:
    return Numerics("requant", nmse)


def lossy(nmse: float) -> Numerics:
    return Numerics("lossy", nmse)


@dataclass(frozen=True)
class RuleEvent:
    """One thing a rule did or did not do."""

    rule: str
    outcome: str  # matched | refused | partial
    where: str  # function and op line
    reason: str = ""


@dataclass
class PassContext:
    """What a pass may read besides the module, and where it reports.

    `limit` (bisect) is the number of rewrites still allowed; ask `may_rewrite` before each one.
    """

    target: Target | None = None
    source: WeightSource | None = None
    options: CompileOptions = field(default_factory=lambda: CompileOptions())
    events: list[RuleEvent] = field(default_factory=list[RuleEvent])
    notes: list[str] = field(default_factory=list[str])  # lines shown in the pass's report
    artifacts: dict[str, str] = field(default_factory=dict[str, str])  # dump file name -> text
    # op -> why each of its kernels refused, for ops that `lower` left on their torch reference
    fallbacks: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    limit: int | None = None
    rewrites: int = 0

    def may_rewrite(self, rule: str, op: Op) -> bool:
        """True when the rewrite may go ahead; records it as matched."""
        if self.limit is not None and self.rewrites >= self.limit:
            return False
        self.rewrites += 1
        self.events.append(RuleEvent(rule, "matched", _where(op)))
        return True

    def refused(self, rule: str, op: Op, reason: str) -> None:
        self.events.append(RuleEvent(rule, "refused", _where(op), reason))

    def partial(self, rule: str, op: Op | None, reason: str) -> None:
        self.events.append(RuleEvent(rule, "partial", _where(op) if op else "", reason))

    def note(self, line: str) -> None:
        self.notes.append(line)


def _where(op: Op) -> str:
    return print_op(op).split("\n")[0].strip()


@dataclass(frozen=True)
class CompileOptions:
    """What the user asked for; printed with the plan and part of its key."""

    dtype: str = "auto"  # compute dtype: auto (the checkpoint's), f32, bf16
    quantize: str | None = (
        None  # policy, e.g. "int8", "int4(group=32)", "experts=int4(group=64),*=int8"
    )
    activations: str = "auto"  # rows that meet integer weights: auto (int8), f32 (as they are)
    exact: bool = False  # refuse every lossy rewrite
    defer: int = 0  # experts of a token on the CPU that come one layer later in decode (lossy)
    max_tokens: int = 512  # most new tokens in one call: the prefill chunk
    max_batch: int = 16  # most sequences in one call
    context: int = 4096  # most rows of one sequence
    cache_rows: int | None = (
        None  # rows of the paged cache; None: max_batch * context, within memory
    )
    page_size: int = 32
    rules: str | None = None  # YAML placement rules file
    threads: int | None = None


_ABOVE_ZERO = ("max_tokens", "max_batch", "context", "cache_rows", "page_size", "threads")


def option_fault(name: str, value: object) -> str | None:
    """What is wrong with the value of a `CompileOptions` field; None when nothing is."""
    if value is None:
        return None
    if name in _ABOVE_ZERO:
        fits = type(value) is int and value > 0
        return None if fits else f"{name}={value!r}: expected a whole number above 0"
    if name == "defer":
        fits = type(value) is int and value >= 0
        return None if fits else f"defer={value!r}: expected a number of experts, 0 or more"
    if name == "activations":
        return None if value in ("auto", "f32") else f"{name}={value!r}: expected 'auto' or 'f32'"
    wanted = bool if name == "exact" else str
    if isinstance(value, wanted):
        return None
    return f"{name}={value!r}: expected {'True or False' if wanted is bool else 'a text'}"


@dataclass(frozen=True)
class Pass:
    """Base class; subclasses are frozen dataclasses whose fields are the options."""

    name: ClassVar[str] = ""
    numerics: ClassVar[Numerics] = Numerics("exact")
    requires: ClassVar[Sequence[str]] = ()  # module properties, see pass_manager.PROPERTIES
    ensures: ClassVar[Sequence[str]] = ()
    required: ClassVar[bool] = False  # lowering needs it: never skipped by bisect

    def run(self, module: Module, ctx: PassContext) -> None:
        raise NotImplementedError

    def numerics_for(self, module: Module) -> Numerics:
        """The numerics of a run, asked after it; passes whose options decide override it."""
        return self.numerics


_PASSES: dict[str, type[Pass]] = {}
P = TypeVar("P", bound=type[Pass])


class UnknownPassError(ValueError):
    """A pass name that is in no table; the message lists close ones."""


def register_pass(cls: P) -> P:
    """Class decorator: add a pass to the table under its `name`."""
    if not cls.name:
        raise ValueError(f"{cls.__name__} has no name")
    _PASSES[cls.name] = cls
    return cls


def pass_class(name: str) -> type[Pass]:
    """Look a pass up by name, loading ktgraph.passes and installed entry points first."""
    table = all_passes()
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise UnknownPassError(f"unknown pass {name!r}{hint} (ktgraph passes lists all)")


def all_passes() -> dict[str, type[Pass]]:
    """Every registered pass by name."""
    package = import_module("ktgraph.passes")
    for found in iter_modules(package.__path__):
        import_module(f"ktgraph.passes.{found.name}")
    for entry in _entry_points():
        entry.load()
    return dict(_PASSES)


def _entry_points() -> Iterator[metadata.EntryPoint]:
    yield from metadata.entry_points(group="ktgraph.passes")
