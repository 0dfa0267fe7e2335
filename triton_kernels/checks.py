"""Every GPU kernel against its op's reference on the op's own cases, for `ktgraph doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import torch

from ktgraph.ops.cases import make_inputs
from ktgraph.ops.registry import KernelDef, OpDef, all_ops, kernels_for
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.weights.encodings import Tile, from_float, to_float

Check = tuple[str, Callable[[], str]]

EXACT = 1e-10  # NMSE in float32
_DTYPES = (torch.float32, torch.bfloat16)
_FORMATS = {"int4": 32, "fp8": 128}  # of packed kernels, and their group: two ways of decoding
# Packed kernels read these operands in tiles; True: gate and up tiles alternate.
_PACKED = {
    "nn.linear": {1: False},
    "nn.swiglu": {1: True, 2: False},
    "moe.grouped_mlp": {3: True, 4: False},
}


class WrongKernelError(RuntimeError):
    """A kernel whose results are further from its reference than its bound."""


def self_check(device: torch.device) -> Iterator[Check]:
    """(name, check) of each kernel that has cases; a check gives its error, or raises."""
    from ktgraph.runtime.kernels_gpu import import_launchers

    import_launchers()
    for definition in all_ops().values():
        for kernel in kernels_for(definition.name, "cuda"):
            if kernel.into is None or not definition.cases:
                continue
            for dtype, format in product(_DTYPES, _formats(definition, kernel)):
                name = f"{kernel.name} {str(dtype).removeprefix('torch.')} {format}".rstrip()
                yield name, partial(check_kernel, definition, kernel, dtype, device, format)


def _formats(definition: OpDef, kernel: KernelDef) -> Sequence[str]:
    """Tile formats that a kernel is checked with; "" of one that reads none."""
    return tuple(_FORMATS) if _packed_operands(definition, kernel) else ("",)


def check_kernel(
    definition: OpDef,
    kernel: KernelDef,
    dtype: torch.dtype,
    device: torch.device,
    format: str = "",
) -> str:
    """The largest error over the op's cases; raises WrongKernelError beyond the kernel's bound.

    format: of the tiles that a packed kernel reads, int4 or fp8.
    """
    bound = EXACT if dtype == torch.float32 else max(kernel.nmse, EXACT)
    errors = [
        _case_error(definition, kernel, sizes, dtype, device, format, seed)
        for seed, sizes in enumerate(definition.cases)
    ]
    worst = max(errors)
    if not worst <= bound:
        raise WrongKernelError(f"NMSE {worst:.2g} against {definition.name}, at most {bound:.2g}")
    return f"NMSE {worst:.1g}"


def _case_error(
    definition: OpDef,
    kernel: KernelDef,
    sizes: Any,
    dtype: torch.dtype,
    device: torch.device,
    format: str,
    seed: int,
) -> float:
    made = make_inputs(definition, sizes, dtype=dtype, seed=seed)
    operands = list(made.operands)
    given = [_on(o, device) for o in operands]
    for position, gate_up in _packed_operands(definition, kernel).items():
        rows = "int8" if kernel.name.endswith("_int8") else "f32"
        given[position], operands[position] = _pack(
            operands[position], format, gate_up, rows, device
        )
    wanted = _as_tuple(definition.reference(*operands, **made.attrs))
    out = tuple(
        torch.full_like(w, _poison(w)).to(device) if isinstance(w, torch.Tensor) else None
        for w in wanted
    )
    assert kernel.into is not None
    kernel.into(*given, out=out, **made.attrs)
    state = next((g for g in given if isinstance(g, State)), None)
    pairs = [(state if o is None else o, w) for o, w in zip(out, wanted, strict=True)]
    return max(_error(got, want) for got, want in pairs)


def _packed_operands(definition: OpDef, kernel: KernelDef) -> dict[int, bool]:
    return _PACKED[definition.name] if "_packed" in kernel.name else {}


def _on(operand: Any, device: torch.device) -> Any:
    if isinstance(operand, Batch):
        return DeviceBatch.of(operand, device)
    if isinstance(operand, State):
        return State(tuple(p.clone().to(device) for p in operand.parts))
    return operand.to(device) if isinstance(operand, torch.Tensor) else operand


def _pack(
    values: torch.Tensor, format: str, gate_up: bool, row_form: str, device: torch.device
) -> tuple[PackedWeight, torch.Tensor]:
    """The weight in tiles, and the values that its bytes mean."""
    group = _FORMATS[format]
    encoding = Tile(format, group, gate_up).encoding
    stored = from_float(values.float(), encoding)
    rows, cols = values.shape[-2:]
    count = values.shape[0] if values.dim() == 3 else 1
    data = stored[0].to(device)
    weight = PackedWeight(data, format, rows, cols, count, group, gate_up, row_form)
    return weight, to_float(stored, values.shape, encoding)


def _poison(like: torch.Tensor) -> float:
    return float("nan") if like.is_floating_point() else -77


def _error(got: Any, want: Any) -> float:
    if isinstance(want, State):
        return max(_error(g, w) for g, w in zip(got.parts, want.parts, strict=True))
    found, wanted = got.cpu().double(), want.double()
    untouched = found.isnan() & wanted.isnan()  # cache rows that nobody wrote
    found, wanted = (x.masked_fill(untouched, 0.0) for x in (found, wanted))
    energy = float(wanted.square().sum())
    return float((found - wanted).square().sum()) / max(energy, 1e-300)


def _as_tuple(found: Any) -> Sequence[Any]:
    return cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))


__all__ = ["Check", "WrongKernelError", "check_kernel", "self_check"]
