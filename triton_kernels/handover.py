# pyright: basic, reportCallIssue=false
"""Handing a layer's tokens to the CPU and taking its answer, inside one stream (and graph).

`post` copies up to three tensors to mapped pinned memory and raises a flag; CPU threads watch it
(docs/engine.md, "Mailboxes").  `receive` waits for the flag of the answer, copies the answer in and
lowers the flag for the next time.  Copies go in 4-byte words.

Order across the link: every program writes its share, then adds to a counter in device memory with
acquire-release order at system scope; the program that comes last has seen all of them, and raises
the request with a release store at system scope (PTX ISA, "Memory Consistency Model").  The first
program of `receive` reads the reply with acquire order until it is not 0, and tells the others by
the counter; the last one to have copied lowers both.  The host must answer in the end:
`Mailboxes.release` does when nobody else will.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
_BLOCK = 1024  # words a program copies at once
_OPEN = tl.constexpr(65536)  # in the counter: the answer is there
_MOST_PROGRAMS = 64  # enough to fill the link


@triton.jit
def _copy_words(source, target, words, BLOCK: tl.constexpr):
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, words, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def post_kernel(
    source0, target0, words0,
    source1, target1, words1,
    source2, target2, words2,
    arrived, request, value,
    BLOCK: tl.constexpr,
):  # fmt: skip
    enter()
    _copy_words(source0, target0, words0, BLOCK)
    _copy_words(source1, target1, words1, BLOCK)
    _copy_words(source2, target2, words2, BLOCK)
    tl.debug_barrier()  # the whole program's stores come before its arrival
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        tl.atomic_xchg(request, value, sem="release", scope="sys")


@triton.jit
def _flag(address):
    """A word, read with acquire order at system scope; the other threads of a program get _OPEN.

    Reads of one word in the host's memory come one after the other, a microsecond each: one thread
    of one program is enough.
    """
    if _PLAIN:
        return tl.load(address)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.b32 $0, 65536;
            @first ld.acquire.sys.global.b32 $0, [$1];
            }""",
            "=&r,l",
            [address],
            tl.int32,
            False,
            1,
        )


@triton.jit
def receive_kernel(source, target, words, arrived, reply, BLOCK: tl.constexpr):
    enter()
    if tl.program_id(0) == 0:
        while _flag(reply) == 0:
            pass
        tl.debug_barrier()
        tl.atomic_add(arrived, _OPEN, sem="acq_rel")
    else:
        while _flag(arrived) < _OPEN:
            pass
    tl.debug_barrier()  # the other threads wait here for the first one
    _copy_words(source, target, words, BLOCK)
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    # The sum is on this side because Triton 3.7's interpreter compares no tensor on the other one.
    if before - tl.num_programs(0) == _OPEN - 1:
        tl.store(arrived, 0)
        tl.store(reply, 0)


def _words(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous(), "a hand-over takes dense rows"
    assert x.nbytes % 4 == 0, f"a hand-over copies words of 4 bytes, not {x.nbytes} bytes"
    return x.view(-1).view(torch.int32)


def _programs(words: int) -> int:
    return max(1, min(_MOST_PROGRAMS, triton.cdiv(words, _BLOCK)))


def post(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    arrived: torch.Tensor,
    request: torch.Tensor,
    value: int,
) -> None:
    """Copy each source to its target, of equal bytes, then write `value` to `request`.

    targets, request (int32[1]): mapped pinned memory.  arrived: int32[1] on the device, 0.
    """
    pairs = [(_words(s), _words(t)) for s, t in zip(sources, targets, strict=True)]
    nothing = (pairs[0][0], pairs[0][1])
    given = [
        (s, t, n)
        for (s, t), n in zip(
            [*pairs, nothing, nothing][:3],
            [*(p[0].numel() for p in pairs), 0, 0][:3],
            strict=True,
        )
    ]
    programs = _programs(max(n for _, _, n in given))
    flat = [x for item in given for x in item]
    post_kernel[(programs,)](
        *flat,
        arrived,
        request,
        value,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent_launch(),
    )


def receive(
    source: torch.Tensor, target: torch.Tensor, arrived: torch.Tensor, reply: torch.Tensor
) -> None:
    """Wait until `reply` is not 0, copy an answer in, and set `reply` back to 0.

    source, reply (int32[1]): mapped pinned memory.  arrived: int32[1] on the device, 0.
    """
    words, there = _words(source), _words(target)
    programs = _programs(words.numel())
    receive_kernel[(programs,)](
        words,
        there,
        words.numel(),
        arrived,
        reply,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent_launch(),
    )


_PAIR = {"source": "*i32:16", "target": "*i32:16", "words": "i32:16"}
COMPILE_CASES = [
    CompileCase(
        post_kernel,
        "handover.post",
        {
            **{f"{k}{i}": v for i in range(3) for k, v in _PAIR.items()},
            "arrived": "*i32:16",
            "request": "*i32:16",
            "value": "i32",
        },
        {"BLOCK": _BLOCK},
    ),
    CompileCase(
        receive_kernel,
        "handover.receive",
        {**_PAIR, "arrived": "*i32:16", "reply": "*i32:16"},
        {"BLOCK": _BLOCK},
    ),
]

__all__ = ["post", "receive"]
