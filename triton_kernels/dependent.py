# pyright: basic, reportCallIssue=false, reportRedeclaration=false, reportOptionalMemberAccess=false
"""Programmatic dependent launch: a kernel starts before the one ahead of it has ended.

On sm_90 and later the programs of a kernel may take their place on the GPU and compute addresses
while the kernel ahead still runs (CUDA programming guide, "Programmatic Dependent
Launch"; PTX ISA, `griddepcontrol`).  Three rules keep that right, for kernels that overlap in this
way see what an ordinary kernel sees:

- every program waits once, before it reads or writes what another kernel touches (`enter`, or
  `start_dependents` ... `wait_for_inputs`);
- no program returns before it has waited: the end of a kernel says that all kernels ahead ended;
- before the wait only weights are read, which no kernel writes.  Those that are streamed or moved
  into slots are written by copies, and a kernel behind a copy starts when that has ended.

Fetching weights into L2 before the wait took bandwidth from the kernel ahead: steps of DeepSeek-V2
236B on an H200 became 10 % slower.  Elsewhere, and in the interpreter, all of these are nothing.
KTGRAPH_DEPENDENT_LAUNCH=0 turns them off, to measure what they bring.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ktgraph.triton_kernels.dots import INTERPRETED

FUSED = {"enable_fp_fusion": True}  # a product and a sum are one instruction, rounded once
LEAST_CAPABILITY = (9, 0)
_LEAST_CUDA = (12, 3)  # captures such launches into graphs


@cache
def dependent_launch() -> dict[str, bool]:
    """What every launch passes on: `FUSED`, and that it is dependent where the GPU can do it.

    Triton fuses unasked up to 3.9.  Budgets here count a product and its sum as one instruction;
    kernels that must round as their reference does turn it off behind this.
    """
    if INTERPRETED or not torch.cuda.is_available() or torch.version.cuda is None:
        return FUSED
    major, minor = torch.version.cuda.split(".")[:2]
    can = torch.cuda.get_device_capability() >= LEAST_CAPABILITY
    wanted = os.environ.get("KTGRAPH_DEPENDENT_LAUNCH", "1") != "0"
    captures = (int(major), int(minor)) >= _LEAST_CUDA
    return FUSED | {"launch_pdl": can and captures and wanted}


if INTERPRETED:

    @triton.jit
    def _is_dependent():
        return False

else:

    @tl.core.builtin
    def _is_dependent(_semantic=None):
        """Whether the kernel is compiled for a dependent launch."""
        return tl.constexpr(bool(getattr(_semantic.builder.options, "launch_pdl", False)))


@triton.jit
def start_dependents():
    """The next kernel may start once all programs have come here."""
    if _is_dependent():
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    """Returns when the kernels ahead have ended and what they wrote can be read."""
    if _is_dependent():
        gdc_wait()


@triton.jit
def enter():
    """The first line of a kernel that has nothing to fetch ahead."""
    start_dependents()
    wait_for_inputs()


__all__ = [
    "FUSED",
    "LEAST_CAPABILITY",
    "dependent_launch",
    "enter",
    "start_dependents",
    "wait_for_inputs",
]
