"""fix-sizes: a function whose tokens are not independent is compiled for the sizes of one call.

What: in a function without a batch, every size that varies (sym) becomes the number that the
function's attribute `example` gives; the attribute goes.  Arguments that are read as ids alone
become i32.  A flat function (T) stays as it is.

Why: attention, convolutions and calls left to torch have several axes that vary; with their sizes
known, buffers are planned, kernels chosen and prices known.  A call of other sizes is compiled
again, as `jax.jit` does.

Before:  func @main(%x: f32[b, s, 64]) {example = ["b=2", "s=5"]} -> (f32[b, s, 64])
After:   func @main(%x: f32[2, 5, 64]) {tokens = 10} -> (f32[2, 5, 64])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.example import example_of, set_example
from ktgraph.ir.graph import Attr, Block, Function, Module, attr
from ktgraph.ir.types import BatchType, TensorType
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass

TOKENS = "tokens"  # how many tokens such a call has, for prices


@register_pass
@dataclass(frozen=True)
class FixSizes(Pass):
    """Put the numbers of one call in place of the sizes that vary, where tokens are mixed."""

    name: ClassVar[str] = "fix-sizes"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[tuple[str, ...]] = ("named",)
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        for func in module.functions.values():
            sizes = {k: v for k, v in example_of(func).items() if k in module.syms}
            if any(isinstance(a.type, BatchType) for a in func.args) or not sizes:
                continue
            fix(func, sizes)
            set_example(func, {})
            func.attrs[TOKENS] = attr(_tokens(func))
            for name in sizes:
                module.syms.pop(name)
            shown = ", ".join(f"{k} = {v}" for k, v in sizes.items())
            ctx.note(f"@{func.name} is compiled for {shown}: its tokens are not independent")


def fix(func: Function, sizes: Mapping[str, int]) -> None:
    """Put numbers for syms into every type and attribute of a function, in place."""
    bound: dict[str, Dim | int | str] = dict(sizes)
    for arg in func.args:
        arg.type = arg.type.subst(bound)
        are_ids = bool(arg.users) and all(u.name == "nn.embedding" for u in arg.users)
        if are_ids and isinstance(arg.type, TensorType):
            arg.type = replace(arg.type, dtype="i32")
    _fix_block(func.body, bound)


def _fix_block(block: Block, sizes: Mapping[str, Dim | int | str]) -> None:
    for op in block.ops:
        op.attrs = {k: _fixed(v, sizes) for k, v in op.attrs.items()}
        for result in op.results:
            result.type = result.type.subst(sizes)
        if op.body is not None:
            for arg in op.body.args:
                arg.type = arg.type.subst(sizes)
            _fix_block(op.body, sizes)


def _fixed(value: Attr, sizes: Mapping[str, Dim | int | str]) -> Attr:
    if isinstance(value, Dim):
        return value.subst(sizes)
    if isinstance(value, tuple):
        return tuple(_fixed(v, sizes) for v in value)
    return value


def _tokens(func: Function) -> int:
    """Positions of the largest argument: all its axes, less the features of a float tensor."""
    counts = [1]
    for arg in func.args:
        if isinstance(arg.type, TensorType):
            is_features = arg.type.dtype in ("f32", "bf16", "f16", "f64") and arg.type.rank > 1
            count = 1
            for dim in arg.type.dims[: -1 if is_features else None]:
                count *= dim.const() if dim.is_const else 1
            counts.append(count)
    return max(counts)


__all__ = ["TOKENS", "FixSizes", "fix"]
