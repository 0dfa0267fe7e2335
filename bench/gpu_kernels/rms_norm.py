"""rms_norm and add_rms_norm.  With few tokens everything is in L2 and the time is latency."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from bench.gpu_kernels._inputs import nmse, randn, sets_over_l2
from ktgraph.ops import op_def
from ktgraph.triton_kernels import rms_norm as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher

_HOW = {"eps": 1e-6, "late_cast": False}


def _norm(tokens: int, cols: int) -> Case:
    run = launcher("nn.rms_norm", "triton.rms_norm")
    nbytes = 4.0 * tokens * cols
    sets = sets_over_l2(nbytes) if tokens > 16 else 1
    xs, w = [randn(tokens, cols) for _ in range(sets)], randn(cols)
    outs = [torch.empty_like(x) for x in xs]

    def error() -> float:
        x, out = randn(tokens, cols), torch.full_like(xs[0], float("nan"))
        run(x, w, out=(out,), **_HOW)
        return nmse(out, op_def("nn.rms_norm").reference(x.double(), w.double(), **_HOW))

    return Case(
        "triton.rms_norm",
        f"T={tokens} D={cols} bf16",
        lambda i: run(xs[i % sets], w, out=(outs[i % sets],), **_HOW),
        error,
        2e-5,
        nbytes + 2.0 * cols,
        sets=sets,
        peers={"F.rms_norm": lambda i: F.rms_norm(xs[i % sets], (cols,), w, 1e-6)},
    )


def _add(tokens: int, cols: int) -> Case:
    run = launcher("nn.add_rms_norm", "triton.add_rms_norm")
    nbytes = 8.0 * tokens * cols
    sets = sets_over_l2(nbytes) if tokens > 16 else 1
    xs, ys = ([randn(tokens, cols) for _ in range(sets)] for _ in range(2))
    w = randn(cols)
    outs = [(torch.empty_like(x), torch.empty_like(x)) for x in xs]

    def error() -> float:
        x, y = randn(tokens, cols), randn(tokens, cols)
        out = tuple(torch.full_like(x, float("nan")) for _ in range(2))
        run(x, y, w, out=out, **_HOW)
        wanted = op_def("nn.add_rms_norm").reference(x, y, w, **_HOW)
        return max(nmse(a, b) for a, b in zip(out, wanted, strict=True))

    def torch_ops(i: int) -> torch.Tensor:
        return F.rms_norm(xs[i % sets] + ys[i % sets], (cols,), w, 1e-6)

    return Case(
        "triton.add_rms_norm",
        f"T={tokens} D={cols} bf16",
        lambda i: run(xs[i % sets], ys[i % sets], w, out=outs[i % sets], **_HOW),
        error,
        2e-5,
        nbytes + 2.0 * cols,
        sets=sets,
        peers={"add, F.rms_norm": torch_ops},
    )


def cases() -> list[Case]:
    return [f(t, d) for f in (_norm, _add) for t in (1, 16, 2048) for d in (2048, 5120)]
