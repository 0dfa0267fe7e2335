"""The op table and the kernel table: an op is declared once, kernels register beside their code."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktgraph.ir.graph import Attr, Module, Op, Operand, Value, WeightRef
from ktgraph.ir.types import StateType, TensorType, Type
from ktgraph.ops.signature import Signature, SignatureError, parse_signature

# Shares of memory bandwidth and of the arithmetic peak that the kernels of an op reach, measured.
Reach = tuple[float, float]
Reference = Callable[..., Any]
CostRule = Callable[["CostDims"], float]
InferRule = Callable[[Sequence[Type | None], Mapping[str, Attr]], list[Type]]


class CostDims:
    """What cost rules read: dims and numeric attributes as numbers, and bytes of operands.

    ``d.T``, ``d.H`` … are the op's signature names at the sizes asked for; ``d.nbytes(i)`` is the
    size of operand i as encoded; ``d.S``, ``d.B``, ``d.tokens`` are sizes of the call.
    """

    def __init__(
        self,
        values: Mapping[str, float],
        operand_bytes: Sequence[float],
        tokens: int,
        attend: float,
    ) -> None:
        self._values = values
        self._bytes = operand_bytes
        self.tokens = tokens  # new tokens in the call
        self.attend = attend  # sum over tokens of the cache rows each one sees

    def __getattr__(self, name: str) -> float:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"cost rule asks for {name}, which is not bound") from None

    def nbytes(self, position: int) -> float:
        return self._bytes[position] if position < len(self._bytes) else 0.0

    def touched(self, experts: float, draws: float) -> float:
        """Expected number of distinct experts after `draws` uniform choices."""
        return experts * (1.0 - (1.0 - 1.0 / experts) ** draws)


@dataclass(frozen=True)
class OpDef:
    """One op: what it means, its types, its costs, and the cases kernels are tested on."""

    name: str
    signature: Signature
    reference: Reference
    doc: str
    flops: CostRule | None
    reads: CostRule | None  # bytes read; None: every operand once
    infer: InferRule | None
    is_view: bool  # the result shares its operand's storage
    has_effect: bool
    cases: tuple[Mapping[str, int], ...]
    launches: int = 1  # kernels that a GPU starts for one call of few tokens
    reach: Mapping[str, Reach] = field(default_factory=dict[str, Reach])  # by kind of device

    def result_types(self, types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
        full = self.signature.full_attrs(attrs)
        if self.infer is not None:
            self.signature.bind(types, full)
            return self.infer(types, full)
        return self.signature.result_types(types, full)


_OPS: dict[str, OpDef] = {}


class UnknownOpError(KeyError):
    """An op name that is in no table; the message lists close ones."""

    def __str__(self) -> str:
        return str(self.args[0])


def case(**dims: int) -> Mapping[str, int]:
    """Sizes of one test case."""
    return dims


def op(
    signature: str,
    *,
    flops: CostRule | None = None,
    reads: CostRule | None = None,
    infer: InferRule | None = None,
    view: bool = False,
    effect: bool = False,
    cases: Iterable[Mapping[str, int]] = (),
    launches: int = 1,
    reach: Mapping[str, Reach] | None = None,
) -> Callable[[Reference], Reference]:
    """Declare an op; the decorated plain torch function is its meaning.

    The function gets tensors (None for absent operands) and the attributes as keywords.
    """
    parsed = parse_signature(signature)

    def register(reference: Reference) -> Reference:
        if parsed.name in _OPS and _OPS[parsed.name].reference.__module__ != reference.__module__:
            raise ValueError(f"op {parsed.name} is declared twice")
        doc = (reference.__doc__ or "").strip()
        _OPS[parsed.name] = OpDef(
            parsed.name,
            parsed,
            reference,
            doc,
            flops,
            reads,
            infer,
            view,
            effect,
            tuple(cases),
            launches,
            dict(reach or {}),
        )
        return reference

    return register


def op_def(name: str) -> OpDef:
    """The declaration of an op; raises UnknownOpError."""
    if name not in _OPS:
        close = difflib.get_close_matches(name, _OPS, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise UnknownOpError(f"unknown op {name!r}{hint}")
    return _OPS[name]


def is_op(name: str) -> bool:
    return name in _OPS


def all_ops() -> dict[str, OpDef]:
    return dict(_OPS)


# -- kernels --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Refusal:
    """Why something does not apply; falsy, so ``supports`` may return it directly."""

    reason: str
    op: Op | None = None

    def __bool__(self) -> bool:
        return False


def no(reason: str, op: Op | None = None) -> Refusal:
    """Refuse with a reason that reports show."""
    return Refusal(reason, op)


@dataclass(frozen=True)
class KernelDef:
    """An implementation of an op on a kind of device."""

    op: str
    name: str
    device: str  # cpu, cuda
    launch: Callable[..., Any] | None  # None: run by the native plan under its name, or `into`
    supports: Callable[[Op, Module], bool | Refusal]
    nmse: float  # error bound against the op's reference at the op's dtype
    priority: int
    fallback: bool = False  # runs the op's reference: never chosen silently, always named
    into: Callable[..., None] | None = None  # a GPU launcher, which writes to results it is given


_KERNELS: dict[str, list[KernelDef]] = {}


def _always(op: Op, module: Module) -> bool | Refusal:
    return True


def register_kernel(
    op: str,
    name: str,
    device: str,
    *,
    launch: Callable[..., Any] | None = None,
    into: Callable[..., None] | None = None,
    supports: Callable[[Op, Module], bool | Refusal] = _always,
    nmse: float = 1e-10,
    priority: int = 0,
    fallback: bool = False,
) -> KernelDef:
    """Add a kernel for an op; registering a name again on the same device replaces it."""
    op_def(op)
    kernel = KernelDef(op, name, device, launch, supports, nmse, priority, fallback, into)
    kept = [k for k in _KERNELS.get(op, []) if (k.name, k.device) != (name, device)]
    _KERNELS[op] = sorted([*kept, kernel], key=lambda k: -k.priority)
    return kernel


def kernel(
    op: str, *, name: str, device: str, nmse: float = 1e-10, priority: int = 10
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator form of `register_kernel` for a Python launcher with the reference's signature."""

    def register(launch: Callable[..., Any]) -> Callable[..., Any]:
        register_kernel(op, name, device, launch=launch, nmse=nmse, priority=priority)
        return launch

    return register


def kernels_for(op: str, device: str | None = None) -> list[KernelDef]:
    """Kernels of an op, best first."""
    kind = device.split(":")[0] if device else None
    return [k for k in _KERNELS.get(op, []) if kind is None or k.device == kind]


# -- building ops ---------------------------------------------------------------------------------
def build(
    module: Module,
    name: str,
    operands: Sequence[Operand],
    results: Sequence[str],
    attrs: Mapping[str, object] | None = None,
    *,
    loc: str | None = None,
    device: str | None = None,
) -> Op:
    """A new op (not yet in a block) with inferred result types and canonical attributes.

    Raises SignatureError naming the op when the operands do not fit.
    """
    definition = op_def(name)
    types = [None if o is None else operand_type(module, o) for o in operands]
    try:
        normal = definition.signature.normal_attrs(attrs or {})
        found = definition.result_types(types, normal)
    except SignatureError as error:
        raise SignatureError(f"{name}: {error} (signature: {definition.signature.text})") from None
    if len(found) != len(results):
        raise SignatureError(f"{name} has {len(found)} results, {len(results)} names given")
    typed = [(n, t.on(device)) for n, t in zip(results, found, strict=True)]
    return Op(name, operands, typed, normal, loc=loc)


def operand_type(module: Module, operand: Value | WeightRef) -> Type:
    return module.type_of(operand)


__all__ = [
    "CostDims",
    "KernelDef",
    "OpDef",
    "Refusal",
    "StateType",
    "TensorType",
    "UnknownOpError",
    "all_ops",
    "build",
    "case",
    "is_op",
    "kernel",
    "kernels_for",
    "no",
    "op",
    "op_def",
    "register_kernel",
]
