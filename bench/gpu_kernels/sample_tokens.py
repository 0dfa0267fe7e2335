"""sample.tokens on rows that the product before has just written, so they lie in L2.

Odds fall with rank^-1.5, as those of a language model roughly do; "flat" rows have nearly equal
logits, for which a filter must look at every token.  A case is right when every token is the
reference's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.gpu_kernels import Case
from ktgraph.ops import sample
from ktgraph.triton_kernels import sample_tokens as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher

_VOCABULARIES = {"DeepSeek-V2": 102_400, "Qwen3": 151_936}
_HOW: dict[str, tuple[float, int, float, float]] = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_k=50 top_p=0.95": (0.7, 50, 0.95, 0.0),
    "top_p=0.95": (0.7, 0, 0.95, 0.0),
    "top_p=0.95, hot": (1.2, 0, 0.95, 0.0),
}
_SETS = 8


def _logits(rows: int, vocabulary: int, flat: bool) -> torch.Tensor:
    if flat:
        return (torch.randn(rows, vocabulary, device="cuda") * 1e-2).bfloat16()
    ranks = torch.stack([torch.randperm(vocabulary, device="cuda") for _ in range(rows)])
    return (-1.5 * (ranks + 1).log() + 0.1 * torch.randn_like(ranks, dtype=torch.float)).bfloat16()


def _how(name: str, rows: int, seed: int) -> torch.Tensor:
    made = [sample.settings(*_HOW[name], seed=seed + n, position=n) for n in range(rows)]
    return torch.from_numpy(np.stack(made))


def _torch_draw(logits: torch.Tensor, name: str) -> torch.Tensor:
    """The same choice as it is usually written in torch."""
    temperature, top_k, top_p, _ = _HOW[name]
    if not temperature:
        return logits.argmax(-1)
    scores = logits.float() / temperature
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, places = scores.sort()
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        scores = scores.masked_fill(dropped.scatter(1, places, dropped), float("-inf"))
    return scores.softmax(-1).multinomial(1)


def _case(model: str, rows: int, name: str, flat: bool) -> Case:
    run, vocabulary = launcher("sample.tokens", "triton.sample_tokens"), _VOCABULARIES[model]
    logits = [_logits(rows, vocabulary, flat) for _ in range(_SETS)]
    hows = [_how(name, rows, 100 * s) for s in range(_SETS)]
    most = sample.most_needed(hows[0].numpy())
    there = [h.cuda() for h in hows]
    outs = [torch.full((rows,), -1, dtype=torch.int32, device="cuda") for _ in range(_SETS)]

    def ours(i: int) -> None:
        i %= _SETS
        run(logits[i], there[i], None, None, out=(outs[i],), most=most)

    def error() -> float:
        wrong: list[Any] = []
        for i, how in enumerate(hows):
            ours(i)
            wanted = sample.tokens(logits[i].cpu(), how, most=most)
            wrong.append(float((outs[i].cpu() != wanted).float().mean()))
        return max(wrong)

    return Case(
        "triton.sample_tokens",
        f"{model} B={rows} V={vocabulary} {name}{' flat' if flat else ''}",
        ours,
        error,
        0.0,
        2.0 * rows * vocabulary,
        sets=_SETS,
        peers={"torch ops": lambda i: _torch_draw(logits[i % _SETS], name)},
    )


def cases() -> list[Case]:
    each = [(m, b, h, False) for m in _VOCABULARIES for b in (1, 16) for h in _HOW]
    return [_case(*case) for case in [*each, ("Qwen3", 1, "top_p=0.95", True)]]
