"""moe.route on gates larger than L2 together, as a decode step meets one after another.

A case is right when the weights are and no more than one id in a thousand differs from an f64
reference: neighbours whose scores differ by less than f32 resolves may change places.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu_kernels import Case
from bench.gpu_kernels._inputs import nmse, randn, sets_over_l2
from ktgraph.ops import op_def
from ktgraph.triton_kernels import moe_route as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher

_PLAIN = {
    "score": "softmax",
    "renorm": False,
    "scale": 1.0,
    "groups": 1,
    "topk_groups": 1,
    "group_score": "max",
    "mask": "zero",
}
_V2 = {"top_k": 6, "groups": 8, "topk_groups": 3, "scale": 16.0}
_V3 = {"top_k": 8, "groups": 8, "topk_groups": 4, "score": "sigmoid", "renorm": True}
_MODELS: tuple[tuple[str, int, int, dict[str, Any], bool], ...] = (
    ("DeepSeek-V2-Lite", 2048, 64, {"top_k": 6}, False),
    ("Qwen3-30B-A3B", 2048, 128, {"top_k": 8, "renorm": True}, False),
    ("DeepSeek-V2", 5120, 160, _V2, False),
    ("DeepSeek-V3", 7168, 256, _V3 | {"group_score": "top2sum", "scale": 2.5}, True),
)


def _case(
    name: str, cols: int, experts: int, attrs: dict[str, Any], biased: bool, tokens: int
) -> Case:
    run, how = launcher("moe.route", "triton.moe_route"), _PLAIN | attrs
    reference, top_k = op_def("moe.route").reference, attrs["top_k"]
    nbytes = 2.0 * cols * (experts + tokens) + 8.0 * tokens * top_k
    sets = sets_over_l2(nbytes)
    xs = [randn(tokens, cols) for _ in range(sets)]
    gates = [2 * randn(experts, cols) / cols**0.5 for _ in range(sets)]
    bias = 0.1 * randn(experts, dtype=torch.float32) if biased else None

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((tokens, top_k), 1 << 30, dtype=torch.int32, device="cuda")
        return ids, torch.full((tokens, top_k), float("nan"), device="cuda")

    def error() -> float:
        x, gate, (ids, weights) = randn(tokens, cols), gates[0], outputs()
        run(x, gate, bias, None, out=(ids, weights), **how)
        wanted = reference(x.double(), gate.double(), bias, None, **how)
        wrong = float((ids != wanted[0]).float().mean())
        return nmse(weights, wanted[1]) if wrong <= 1e-3 else float("inf")

    outs = [outputs() for _ in range(sets)]

    def ours(i: int) -> None:
        i %= sets
        run(xs[i], gates[i], bias, None, out=outs[i], **how)

    return Case(
        "triton.moe_route",
        f"{name} T={tokens} D={cols} E={experts} K={top_k}",
        ours,
        error,
        1e-6,
        nbytes,
        2.0 * tokens * cols * experts,
        sets=sets,
        peers={
            "torch ops": lambda i: reference(xs[i % sets], gates[i % sets], bias, None, **how),
        },
    )


def cases() -> list[Case]:
    return [_case(*model, tokens) for model in _MODELS for tokens in (1, 4, 8, 16, 2048)]
