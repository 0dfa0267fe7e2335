"""embedding and logits.gather: copies of rows, bit for bit."""

import pytest
import torch

from ktgraph.runtime.batch import Batch
from ktgraph.triton_kernels import embedding as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.registry import launcher
from tests.triton_kernels.close import DTYPES, poisoned, strided

EMBEDDING = launcher("nn.embedding", "triton.embedding")
GATHER = launcher("logits.gather", "triton.gather_rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "cols"), [(1, 33), (7, 256), (3, 2500), (65, 8)])
def test_embedding(count: int, cols: int, dtype: torch.dtype, device: torch.device) -> None:
    table = torch.randn(37, cols).to(device, dtype)
    for index in (torch.int32, torch.int64):
        ids = torch.randint(37, (count,), dtype=index, device=device)
        out = poisoned(count, cols, dtype=dtype, device=device)
        EMBEDDING(ids, table, out=(out,))
        assert torch.equal(out, table[ids.long()])


def test_ids_of_two_axes(device: torch.device) -> None:
    table, ids = torch.randn(11, 20, device=device), torch.tensor([[3, 10], [0, 3]], device=device)
    out = poisoned(2, 2, 20, dtype=table.dtype, device=device)
    EMBEDDING(ids, table, out=(out,))
    assert torch.equal(out, table[ids])


@pytest.mark.parametrize("rows", [[0], [6, 2, 2], []])
def test_gather(rows: list[int], device: torch.device) -> None:
    host = Batch.build([0, 3], [4, 3], [[2], [0]], 16, out_rows=rows)
    x = strided(torch.randn(7, 33, device=device))
    out = poisoned(len(rows), 33, dtype=x.dtype, device=device)
    GATHER(x, DeviceBatch.of(host, device), out=(out,))
    assert torch.equal(out, x[torch.tensor(rows, dtype=torch.long, device=device)])
