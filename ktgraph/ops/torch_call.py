"""torch.call: what has no op of its own runs eagerly in torch, at its place in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr
from ktgraph.ir.types import DTYPES, TensorType, Type
from ktgraph.ops.bound_modules import bound_module
from ktgraph.ops.call_args import read_arguments
from ktgraph.ops.registry import op
from ktgraph.ops.signature import SignatureError
from ktgraph.ops.tensor import torch_dtype


def _result_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    dtypes, shapes = attrs["dtypes"], attrs["shapes"]
    assert isinstance(dtypes, tuple)
    assert isinstance(shapes, tuple)
    if bool(attrs["module"]) == bool(attrs["op"]):
        raise SignatureError("expected one of the attributes module and op")
    if len(dtypes) != len(shapes) or not dtypes:
        raise SignatureError(f"{len(dtypes)} dtypes for {len(shapes)} shapes")
    unknown = [d for d in dtypes if d not in DTYPES]
    if unknown:
        raise SignatureError(f"dtype {unknown[0]!r} is not one of {', '.join(DTYPES)}")
    return [TensorType(str(d), _dims(s)) for d, s in zip(dtypes, shapes, strict=True)]


def _dims(shape: Attr) -> tuple[Dim, ...]:
    if not isinstance(shape, tuple) or not all(isinstance(d, Dim) for d in shape):
        raise SignatureError(f"shapes holds {shape!r}, expected a list of sizes for each result")
    return tuple(d for d in shape if isinstance(d, Dim))


@op(
    'torch.call(xs: any[...]*; module: str = "", op: str = "", args: str = "", sizes: ints = [],'
    " dtypes: strs, shapes: lists) -> any[...]",
    infer=_result_types,
)
def torch_call(
    *xs: torch.Tensor,
    module: str,
    op: str,
    args: str,
    sizes: list[int],
    dtypes: list[str],
    shapes: list[list[int]],
) -> Any:
    """A torch module ("Net/blocks.0.moe") or operator ("aten.conv1d.default"), run as it is.

    Operands go to the places ``%k`` of `args`, `sizes` to ``#k``; results are the tensors of what
    comes back, in order.  A module is found by its name (`bound_modules`); it keeps its own weights
    and runs where they lie, without gradients, in float64 where its operands are.  Results of
    another shape or dtype than the IR says are an error.
    """
    given, named = read_arguments(args, [x.clone() for x in xs], sizes)
    with torch.no_grad():
        if module:
            found = _run_module(bound_module(module), given, named)
        else:
            found = _operator(op)(*given, **named)
    results = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
    wide = any(x.dtype == torch.float64 for x in xs)
    _check(module or op, results, dtypes, shapes, wide)
    return results[0] if len(results) == 1 else tuple(results)


def _run_module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(args)):
        return module(*args, **kwargs)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors}
    return functional_call(module, wide, tuple(args), dict(kwargs))


def _operator(name: str) -> Any:
    """``aten.conv1d.default`` of torch.ops."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ValueError(
            f"torch.call runs the operator {name}, which torch {torch.__version__} does not have"
        ) from None
    return found


def _check(
    name: str,
    results: Sequence[torch.Tensor],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    wide: bool,
) -> None:
    if len(results) != len(shapes):
        raise ValueError(f"{name} gave {len(results)} tensors, the IR says {len(shapes)}")
    for result, dtype, shape in zip(results, dtypes, shapes, strict=True):
        if list(result.shape) != list(shape):
            raise ValueError(
                f"{name} gave a tensor of shape {list(result.shape)}, the IR says {list(shape)}: "
                "its size depends on values, or on other sizes than the trace saw"
            )
        wanted = torch_dtype(dtype)
        if result.dtype != wanted and not (wide and result.is_floating_point()):
            raise ValueError(f"{name} gave {result.dtype}, the IR says {wanted}")


__all__ = ["torch_call"]
