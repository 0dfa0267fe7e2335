"""logits.*: from hidden states to the rows that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ktgraph.ir.graph import Attr
from ktgraph.ir.types import TensorType, Type
from ktgraph.ops.registry import case, op
from ktgraph.runtime.batch import Batch


def _gather_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    given = types[0]
    assert isinstance(given, TensorType)
    return [given.with_dims("O", given.dims[-1])]


@op(
    "logits.gather(x: f[..., D], batch) -> f[...]",
    infer=_gather_types,
    cases=[case(T=7, D=33)],
)
def gather(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The token rows whose logits are asked for (`Batch.out_rows`)."""
    return x.reshape(-1, x.shape[-1])[batch.out_rows.long()]
