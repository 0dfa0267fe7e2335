# pyright: basic, reportArgumentType=false
"""rope and cache appends against their references, on ragged batches over shuffled pages."""

import pytest
import torch
import triton
import triton.language as tl

from ktgraph.ops import op_def
from ktgraph.ops.cases import make_inputs
from ktgraph.ops.nn import rope_tables
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State
from ktgraph.triton_kernels import rope as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.angles import cos_sin
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.registry import launcher
from ktgraph.triton_kernels.rope import STYLES
from tests.triton_kernels.close import DTYPES, check, nmse, poisoned, strided

BOUND = 1e-6
KERNELS = {
    "nn.rope": "triton.rope",
    "kv.rope_append": "triton.rope_append",
    "kv.rope_append_latent": "triton.rope_append_latent",
    "kv.append": "triton.kv_append",
    "kv.append_latent": "triton.kv_append_latent",
}


def _same_state(got: State, wanted: State, bound: float) -> None:
    """Rows that were written agree; all others, NaN ones too, have kept their bits."""
    for a, b in zip(got.parts, wanted.parts, strict=True):
        a = a.cpu()
        known = ~b.isnan()
        assert torch.equal(a.isnan(), ~known)
        check(a[known], b[known], bound)


def _run(
    op: str, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, **attrs: object
) -> None:
    inputs = make_inputs(op_def(op), sizes, dtype=dtype)
    attrs = inputs.attrs | attrs
    wanted = op_def(op).reference(*inputs.operands, **attrs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    operands = [_on(x, device) for x in inputs.operands]
    out = tuple(
        None if isinstance(w, State) else poisoned(*w.shape, dtype=w.dtype, device=device)
        for w in wanted
    )
    launcher(op, KERNELS[op])(*operands, out=out, **attrs)
    state = next((x for x in operands if isinstance(x, State)), None)
    for got, reference in zip(out, wanted, strict=True):
        if got is None:
            assert state is not None
            _same_state(state, reference, BOUND)
        else:
            check(got.cpu(), reference, BOUND)


def _on(x: object, device: torch.device) -> object:
    if isinstance(x, State):
        return State(tuple(part.to(device) for part in x.parts))
    if isinstance(x, Batch):
        return DeviceBatch.of(x, device, slack=7)
    assert isinstance(x, torch.Tensor)
    return x.to(device) if x.dim() == 1 else strided(x.to(device))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1, "H": 3, "G": 1, "P": 8, "J": 4},
        {"T": 7, "H": 20, "G": 2, "P": 128, "J": 64},
        {"T": 17, "H": 5, "G": 5, "P": 21, "J": 9},
    ],
)
def test_rope(sizes: dict[str, int], dtype: torch.dtype, style: str, device: torch.device) -> None:
    _run("nn.rope", sizes, dtype, device, style=style, scale=1.25)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1, "S": 40, "H": 3, "G": 1, "A": 24, "V": 16, "J": 12},
        {"T": 5, "S": 70, "H": 12, "G": 3, "A": 128, "V": 72, "J": 32},
        {"T": 17, "H": 4, "G": 9, "A": 16, "V": 300, "J": 5},
    ],
)
def test_rope_append(
    sizes: dict[str, int], dtype: torch.dtype, style: str, device: torch.device
) -> None:
    _run("kv.rope_append", sizes, dtype, device, style=style, scale=0.9)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1, "S": 40, "H": 16, "R": 512, "P": 64, "J": 32},
        {"T": 7, "S": 90, "H": 33, "R": 24, "P": 20, "J": 8},
    ],
)
def test_rope_append_latent(
    sizes: dict[str, int], dtype: torch.dtype, style: str, device: torch.device
) -> None:
    _run("kv.rope_append_latent", sizes, dtype, device, style=style, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1, "S": 33, "G": 1, "G2": 1, "A": 16, "V": 16},
        {"T": 17, "S": 50, "G": 9, "G2": 2, "A": 144, "V": 130},
    ],
)
def test_append(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
    _run("kv.append", sizes, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{"T": 5, "R": 24, "P": 8}, {"T": 1, "S": 60, "R": 512, "P": 64}])
def test_append_latent(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
    _run("kv.append_latent", sizes, dtype, device)


def test_an_unknown_style_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="halves"):
        _run(
            "nn.rope",
            {"T": 1, "H": 1, "G": 1, "P": 8, "J": 4},
            torch.float32,
            device,
            style="halves",
        )


@triton.jit
def _angles(x, cosine, sine, N: tl.constexpr):
    at = tl.arange(0, N)
    c, s = cos_sin(tl.load(x + at))
    tl.store(cosine + at, c)
    tl.store(sine + at, s)


@pytest.mark.parametrize("largest", [1.0, 1e3, 1e5, 1e6])
def test_cos_and_sin_of_large_angles(largest: float, device: torch.device) -> None:
    x = (torch.rand(4096) * 2 - 1) * largest
    x[:3] = torch.tensor([0.0, largest, -largest])
    x[3:40] = torch.arange(37) * (torch.pi / 4)  # where the quadrant changes
    c, s = (poisoned(4096, dtype=torch.float32, device=device) for _ in range(2))
    _angles[(1,)](x.to(device), c, s, N=4096)
    assert float((c.cpu().double() - x.double().cos()).abs().max()) < 2e-7
    assert float((s.cpu().double() - x.double().sin()).abs().max()) < 2e-7


def test_positions_of_a_hundred_thousand(device: torch.device) -> None:
    """One-hot inputs read the tables: cos from a = 1, sin from b."""
    batch = Batch.build([99_990, 3], [10, 1], [[0], [1]], 1 << 17)
    freqs = 10000.0 ** -(torch.arange(32) / 32)
    cos, sin = rope_tables(freqs, batch, 1.0, torch.empty(0))
    q = torch.cat([torch.ones(11, 1, 32), torch.zeros(11, 1, 32)], dim=-1).to(device)
    out = poisoned(11, 1, 64, dtype=q.dtype, device=device), q.clone()
    given = DeviceBatch.of(batch, device)
    launcher("nn.rope", "triton.rope")(
        q, q, freqs.to(device), given, out=out, style="half", scale=1.0
    )
    assert nmse(out[0][:, 0, :32], cos) < 1e-13
    assert nmse(out[0][:, 0, 32:], sin) < 1e-13
