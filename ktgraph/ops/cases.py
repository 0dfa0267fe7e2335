"""Operands for an op's declared cases: one set of inputs for parity tests, doctor and bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ktgraph.ir.parser import parse_dim
from ktgraph.ops.registry import OpDef
from ktgraph.ops.sample import settings
from ktgraph.ops.signature import Param, StatePattern, TensorPattern
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State

_LAYERS, _LAYER, _PAGE = 3, 1, 16
_TYPICAL_ATTRS: dict[str, Any] = {"eps": 1e-6, "layer": _LAYER, "scale": 0.125}


@dataclass(frozen=True)
class CaseInputs:
    """Operands in signature order and all attributes: ``reference(*operands, **attrs)``."""

    operands: list[Any]
    attrs: dict[str, Any]
    sizes: dict[str, int]


def make_inputs(
    definition: OpDef,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    optional: bool = False,
) -> CaseInputs:
    """Fresh seeded operands of one case; `...` is the token axis [T], `...k` the cached rows [S].

    The batch is ragged (three sequences where T allows) over shuffled pages; unwritten cache rows
    hold NaN.  `optional` also builds the optional operands.
    """
    rng = torch.Generator().manual_seed(seed)
    bound = {"T": 1, **sizes}
    batch = _ragged_batch(bound["T"], bound.get("S", bound["T"]), rng)
    bound |= {"S": int(batch.kv_len.sum()), "O": int(batch.out_rows.numel())}
    attrs = _attrs(definition, bound)
    operands = [
        _operand(p, bound, batch, dtype, rng) if optional or not p.optional else None
        for p in definition.signature.params
    ]
    return CaseInputs(operands, attrs, bound)


def _attrs(definition: OpDef, sizes: Mapping[str, int]) -> dict[str, Any]:
    attrs: dict[str, Any] = {}
    for param in definition.signature.attrs:
        if param.name in sizes:
            attrs[param.name] = sizes[param.name]
        elif param.default is not None:
            default: Any = param.default
            attrs[param.name] = default.const() if param.kind == "int" else default
        else:
            attrs[param.name] = _TYPICAL_ATTRS[param.name]
    return attrs


def _ragged_batch(tokens: int, rows: int, rng: torch.Generator) -> Batch:
    """`tokens` new tokens and about `rows` cached rows over up to three sequences."""
    count = min(3, tokens)
    new = [tokens // count + (1 if q < tokens % count else 0) for q in range(count)]
    spare = max(rows - tokens, 0)
    past = [spare // count + (1 if q < spare % count else 0) for q in range(count)]
    if count > 1 and past[0] > 2:
        past[0], past[-1] = past[0] - 2, past[-1] + 2  # sequences of different lengths
    pages = [-(-(p + n) // _PAGE) for p, n in zip(past, new, strict=True)]
    order = [int(p) for p in torch.randperm(sum(pages) + 2, generator=rng)]
    tables = [[order.pop() for _ in range(n)] for n in pages]
    return Batch.build(past, new, tables, _PAGE)


def _operand(
    param: Param,
    sizes: Mapping[str, int],
    batch: Batch,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> Any:
    if param.pattern is None:
        return batch
    if isinstance(param.pattern, StatePattern):
        return _state(param.pattern, sizes, batch, dtype, rng)
    if param.name == "freqs":
        return 10000.0 ** -(torch.arange(sizes["J"]) / sizes["J"])
    if param.name == "ids":
        return _ids(param.pattern, sizes, rng)
    if param.name == "slots":
        return _slots(sizes["E"], rng)
    if param.name == "how":
        return _how(sizes["O"], rng)
    shape = _shape(param.pattern, sizes)
    wanted = dtype if param.pattern.dtype in ("f", "any") else torch_dtype(param.pattern.dtype)
    fan_in = shape[-1] if len(shape) > 1 and not param.pattern.dims[0].startswith("...") else 1
    return (torch.randn(shape, generator=rng) / fan_in**0.5).to(wanted)


def _ids(pattern: TensorPattern, sizes: Mapping[str, int], rng: torch.Generator) -> torch.Tensor:
    shape = _shape(pattern, sizes)
    if "VOC" in sizes:
        return torch.randint(sizes["VOC"], shape, generator=rng, dtype=torch.int32)
    scores = torch.rand(*shape[:-1], sizes["E"], generator=rng)
    ids = scores.argsort(-1)[..., : shape[-1]].to(torch.int32)
    ids[..., 0][torch.rand(ids.shape[:-1], generator=rng) < 0.1] = -1  # a skipped expert
    return ids


def _slots(experts: int, rng: torch.Generator) -> torch.Tensor:
    """Slots of about half of the experts, in any order; -1 for the others."""
    slots = torch.full((experts,), -1, dtype=torch.int32)
    hot = torch.randperm(experts, generator=rng)[: experts // 2]
    slots[hot] = torch.arange(len(hot), dtype=torch.int32)
    return slots


def _how(rows: int, rng: torch.Generator) -> torch.Tensor:
    """Settings of `sample.tokens`: a filtered row, a drawn one, a greedy one, and so on."""
    seeds = [int(s) for s in torch.randint(1 << 31, (rows,), generator=rng)]
    kinds = [(0.7, 20, 0.9, 0.01), (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    made = [settings(*kinds[n % 3], seed, n) for n, seed in enumerate(seeds)]
    return torch.as_tensor(np.stack(made))


def _shape(pattern: TensorPattern, sizes: Mapping[str, int]) -> list[int]:
    shape: list[int] = []
    for item in pattern.dims:
        if item.startswith("..."):
            shape.append(sizes["S" if item == "...k" else "T"])
        else:
            shape.append(parse_dim(item).at(sizes))
    return shape


def _state(
    pattern: StatePattern,
    sizes: Mapping[str, int],
    batch: Batch,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> State:
    capacity = (int(batch.block_table.max()) + 1) * batch.page_size
    written = torch.cat([batch.rows(q) for q in range(batch.sequences)])
    parts: list[torch.Tensor] = []
    for part in pattern.parts:
        row = [parse_dim(d).at(sizes) for d in part.dims[1:]]
        full = torch.full([_LAYERS, capacity, *row], float("nan"), dtype=dtype)
        full[_LAYER, written] = torch.randn([len(written), *row], generator=rng).to(dtype)
        parts.append(full)
    return State(tuple(parts))
