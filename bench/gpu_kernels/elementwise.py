"""Elementwise ops, copies, gathers and gated products against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from bench.gpu_kernels._inputs import nmse, randn, sets_over_l2
from ktgraph.triton_kernels import elementwise as _elementwise  # noqa: F401  (registers)
from ktgraph.triton_kernels import embedding as _embedding  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher
from ktgraph.triton_kernels.silu_mul import gated_mul

Make = Callable[[], tuple[torch.Tensor, ...]]


def _case(
    kernel: str,
    label: str,
    make: Make,
    launch: Callable[..., None],
    peer: Callable[..., torch.Tensor],
) -> Case:
    """launch(*operands, out) against peer(*operands)."""
    first = make()
    result = peer(*first)
    nbytes = float(sum(x.nbytes for x in (*first, result)))
    sets = sets_over_l2(nbytes) if nbytes > 1e6 else 1
    inputs = [first, *(make() for _ in range(sets - 1))]
    outs = [torch.empty_like(result) for _ in range(sets)]

    def error() -> float:
        fresh, out = make(), torch.full_like(result, float("nan"))
        launch(*fresh, out)
        return nmse(out, peer(*fresh))

    return Case(
        kernel,
        label,
        lambda i: launch(*inputs[i % sets], outs[i % sets]),
        error,
        1e-5,
        nbytes,
        sets=sets,
        peers={"torch": lambda i: peer(*inputs[i % sets])},
    )


def _op(op: str, kernel: str, **attrs: Any) -> Callable[..., None]:
    run = launcher(op, kernel)
    return lambda *given: run(*given[:-1], out=given[-1:], **attrs)


def _gated(x13: torch.Tensor, out: torch.Tensor) -> None:
    gated_mul(x13, out)


def _silu_mul(x13: torch.Tensor) -> torch.Tensor:
    gate, up = x13.chunk(2, dim=-1)
    return F.silu(gate) * up


def _shapes(tokens: int) -> list[Case]:
    wide, width = f"T={tokens} D=5120 bf16", 5120

    def three() -> tuple[torch.Tensor, ...]:
        return tuple(randn(tokens, width) for _ in range(3))

    def ids() -> tuple[torch.Tensor, ...]:
        rows = torch.randint(4096, (tokens,), dtype=torch.int32, device="cuda")
        return rows, table

    def view() -> tuple[torch.Tensor, ...]:
        return (randn(16, tokens, 128).transpose(0, 1),)

    table = randn(4096, width)
    return [
        _case("triton.add3", wide, three, _op("tensor.add3", "triton.add3"), _sum3),
        _case(
            "triton.mul", f"{wide} by [T, 1]", lambda: (randn(tokens, width), randn(tokens, 1)),
            _op("tensor.mul", "triton.mul"), torch.mul,
        ),
        _case(
            "triton.act", wide, lambda: (randn(tokens, width),),
            _op("nn.act", "triton.act", act="silu"), F.silu,
        ),
        _case(
            "triton.copy", f"T={tokens} 16 heads of 128, transposed", view,
            _op("tensor.reshape", "triton.copy", shape=[tokens, 16, 128]), torch.Tensor.contiguous,
        ),
        _case(
            "triton.concat", f"T={tokens} 16 heads of 128 and 64",
            lambda: (randn(tokens, 16, 128), randn(tokens, 16, 64)),
            _op("tensor.concat", "triton.concat", axis=-1),
            lambda *xs: torch.cat(xs, dim=-1),
        ),
        _case(
            "gated_mul", f"T={tokens} F=1408 bf16", lambda: (randn(tokens, 2816),), _gated,
            _silu_mul,
        ),
        _embedding_case(tokens, ids),
    ]  # fmt: skip


def _sum3(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x + y + z


def _embedding_case(tokens: int, ids: Make) -> Case:
    """Reads the rows asked for, not the table."""
    rows, table = ids()
    out = torch.empty(tokens, table.shape[1], dtype=table.dtype, device="cuda")
    run = launcher("nn.embedding", "triton.embedding")

    def error() -> float:
        fresh, _ = ids()
        got = torch.full_like(out, float("nan"))
        run(fresh, table, out=(got,))
        return nmse(got, table[fresh.long()])

    return Case(
        "triton.embedding",
        f"T={tokens} D={table.shape[1]} bf16",
        lambda i: run(rows, table, out=(out,)),
        error,
        0.0,
        2.0 * out.nbytes,
        peers={"F.embedding": lambda i: F.embedding(rows, table)},
    )


def cases() -> list[Case]:
    return [case for tokens in (1, 16, 2048) for case in _shapes(tokens)]
