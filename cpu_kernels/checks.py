"""Short comparisons of the native kernels with plain torch, on the machine at hand (``doctor``).

The full tests are in ``tests/cpu_kernels``; these say whether this build computes
right on this CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ktgraph.cpu_kernels import load_native, reference_layouts

Check = tuple[str, Callable[[], str]]
FORMATS = (("f32", 0), ("bf16", 0), ("int8", 0), ("int4", 64))


def checks() -> list[Check]:
    """One check per format and kernel family, on the ISA that would be used."""
    found: list[Check] = []
    for fmt, group in FORMATS:
        found.append((f"pack.{fmt}", partial(_pack, fmt, group)))
        found.append((f"cpu.linear {fmt}", partial(_linear, fmt, group)))
        found.append((f"cpu.grouped_mlp {fmt}", partial(_mlp, fmt, group)))
    return [*found, ("cpu.rms_norm", _norm), ("cpu.moe_route", _route), ("cpu.mla_attend", _mla)]


class _Run:
    """One kernel on two threads; keeps operands alive."""

    def __init__(self) -> None:
        self.native = load_native()
        self.gen = torch.Generator().manual_seed(0)
        self.keep: list[Any] = []

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.gen)

    def view(self, t: torch.Tensor, tokens: bool = True) -> Any:
        self.keep.append(t)
        dtype = "i32" if t.dtype == torch.int32 else "f32"
        shape = [-1, *t.shape[1:]] if tokens else list(t.shape)
        return self.native.Tensor(t.data_ptr(), dtype, shape, list(t.stride()))

    def weight(
        self, fmt: str, group: int, w: torch.Tensor, gate_up: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """A packed stack [count, rows, cols], and what its bytes mean."""
        count, rows, cols = w.shape
        nbytes = self.native.packed_nbytes(fmt, rows, cols, group, count, gate_up)
        data = self.native.empty_packed(nbytes)
        self.keep.append(data)
        at = data.ctypes.data
        for i in range(count):
            self.native.pack_into(at, i, fmt, rows, cols, group, count, gate_up, w[i])
        dense = [
            reference_layouts.to_float(fmt, d, rows, cols, group, gate_up)
            for d in data.reshape(count, -1)
        ]
        packed = self.native.Weight(fmt, rows, cols, count, group, gate_up, at, nbytes)
        return packed, torch.from_numpy(np.stack(dense)).double()

    def __call__(
        self, kernel: str, operands: list[Any], attrs: dict[str, Any], T: int, batch: Any = None
    ) -> None:
        plan = self.native.Plan(self.native.Engine(2))
        plan.add(kernel, operands, attrs)
        plan.run(T, 0, batch)


def _compare(got: torch.Tensor, want: torch.Tensor, limit: float = 3e-6) -> str:
    error = float((got.double() - want).norm() / want.norm())
    if not error <= limit:
        raise AssertionError(f"relative error {error:.2g}, allowed {limit:.2g}")
    return f"relative error {error:.1e}"


def _pack(fmt: str, group: int) -> str:
    run = _Run()
    w = run.randn(1, 40, 250)
    run.weight(fmt, group, w)
    if not np.array_equal(run.keep[-1], reference_layouts.from_float(fmt, w[0].numpy(), group)):
        raise AssertionError("bytes differ from the layout's specification")
    return "bytes as specified"


def _linear(fmt: str, group: int) -> str:
    run = _Run()
    x, y = run.randn(17, 250), torch.zeros(17, 40)
    w, dense = run.weight(fmt, group, run.randn(1, 40, 250))
    run("cpu.linear", [run.view(x), w, None, run.view(y)], {}, 17)
    return _compare(y, x.double() @ dense[0].T)


def _mlp(fmt: str, group: int) -> str:
    run = _Run()
    x, wts, y = run.randn(9, 96), run.randn(9, 2), torch.zeros(9, 96)
    ids = torch.arange(18, dtype=torch.int32).reshape(9, 2) % 3
    w13, gate_up = run.weight(fmt, group, run.randn(3, 80, 96) / 10, gate_up=True)
    w2, down = run.weight(fmt, group, run.randn(3, 96, 40))
    operands = [run.view(x), run.view(ids), run.view(wts), w13, w2, None, None, run.view(y)]
    run("cpu.grouped_mlp", operands, {"act": "silu"}, 9)
    h = torch.einsum("tkfd,td->tkf", gate_up[ids.long()], x.double())
    h = torch.nn.functional.silu(h[..., :40]) * h[..., 40:]
    return _compare(y, torch.einsum("tkdf,tkf,tk->td", down[ids.long()], h, wts.double()))


def _norm() -> str:
    run = _Run()
    x, w, y = run.randn(3, 250), run.randn(250), torch.zeros(3, 250)
    operands = [run.view(x), run.view(w, tokens=False), run.view(y)]
    run("cpu.rms_norm", operands, {"eps": 1e-6}, 3)
    wide = x.double()
    return _compare(y, wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double())


def _route() -> str:
    run = _Run()
    x, gate = run.randn(5, 75), run.randn(60, 75)
    ids, wts = torch.zeros(5, 4, dtype=torch.int32), torch.zeros(5, 4)
    operands = [run.view(x), run.view(gate, tokens=False), None, run.view(ids), run.view(wts)]
    run("cpu.moe_route", operands, {"score": "softmax"}, 5)
    want, best = (x.double() @ gate.double().T).softmax(-1).topk(4)
    if not torch.equal(best.int(), ids):
        raise AssertionError("other experts chosen than by torch")
    return _compare(wts, want, 1e-5)


def _mla() -> str:
    run = _Run()
    heads, latent, rope, rows = 5, 40, 8, 150
    cache, o = run.randn(1, 1, rows, latent + rope), torch.zeros(1, heads, latent)
    q, pe = run.randn(1, heads, latent), run.randn(1, heads, rope)
    state = run.native.State("f32", 1, 1, rows, [latent + rope], [cache.data_ptr()])
    batch = run.native.Batch()
    ints = ([0], [rows - 1], [0, 1], [rows], [[0]], [])
    batch.set(*(np.asarray(a, np.int32) for a in ints))
    operands = [run.view(q), run.view(pe), state, run.native.BATCH, run.view(o)]
    run("cpu.mla_attend", operands, {"scale": 0.2, "layer": 0}, 1, batch)
    kv = cache[0, 0].double()
    p = (torch.cat([q, pe], -1).double()[0] @ kv.T * 0.2).softmax(-1)
    return _compare(o[0], p @ kv[:, :latent])
