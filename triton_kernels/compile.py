# pyright: basic
"""Compile every kernel for a GPU that need not be here, and read registers, spills, shared memory.

    python -m ktgraph.triton_kernels.compile [CAPABILITY ...]

A kernel file lists what it ships in ``COMPILE_CASES``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ktgraph.triton_kernels.dependent import FUSED, LEAST_CAPABILITY

CAPABILITIES = (80, 86, 89, 90, 120)
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # bytes


@dataclass(frozen=True)
class CompileCase:
    """One launch configuration.

    signature: argument name -> Triton type; ``:16`` behind it promises divisibility by 16, as in
    "*bf16:16" and "i32:16".  constants: the constexpr arguments.  capabilities: which GPUs it is
    shipped for.  stack: bytes of local memory that a thread may take, where that measured faster
    than any configuration without.  lockstep: inline PTX is right only where element i of every
    tensor that it meets is held by thread i alone (`mma.sync` joins the numbers of a warp).
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    capabilities: Sequence[int] = CAPABILITIES
    stack: int = 0
    lockstep: bool = False


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of a multiprocessor; bytes are per thread but for `shared`."""

    case: str
    capability: int
    registers: int
    stack: int
    spills: int  # bytes of local memory stores and loads that ptxas reports, by its stack frame
    shared: int
    allowed_stack: int
    waits: int  # how often the code waits for the kernels ahead (dependent.py)


def compile_case(case: CompileCase, capability: int) -> Usage:
    """Compile to machine code; raises Triton's own error when it does not compile."""
    names = list(case.kernel.arg_names)
    given = {n: t.split(":")[0] for n, t in case.signature.items()}
    signature = {n: given.get(n, "constexpr") for n in names}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, t in case.signature.items()
        if t.endswith(":16")
    }
    constants = {(names.index(n),): v for n, v in case.constants.items()}
    source = _source_of(case.kernel)(case.kernel, signature, constants, aligned)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        **FUSED,
        "launch_pdl": capability >= 10 * LEAST_CAPABILITY[0],
    }
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if case.lockstep:
        _check_threads(made.asm["ttgir"])
    usage = _resources(made.asm["cubin"])
    return Usage(
        case.name,
        capability,
        usage["REG"],
        usage["STACK"],
        usage["LOCAL"],
        max(int(made.metadata.shared), usage["SHARED"]),
        case.stack,
        made.asm["ptx"].count("griddepcontrol.wait"),
    )


def _check_threads(ttgir: str) -> None:
    """That Triton gave all tensors of inline PTX the layout: element i for thread i."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", ttgir, re.MULTILINE))
    lines = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line]
    used = {name for line in lines for name in re.findall(r"tensor<[^>]*, (#[^>]*)>", line)}
    wanted = "sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = "
    if not used or any(not layouts.get(name, name).lstrip("{").startswith(wanted) for name in used):
        found = {name: layouts.get(name) for name in used}
        raise ValueError(f"inline PTX of a warp needs element i in thread i, Triton chose {found}")


def _source_of(kernel: Any) -> Any:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource  # not of every Triton

    return GluonASTSource


def _resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", shown)}


def all_cases() -> Iterator[CompileCase]:
    """The cases of every kernel file, in order of the files' names."""
    package = import_module("ktgraph.triton_kernels")
    for found in iter_modules(package.__path__):
        module = import_module(f"ktgraph.triton_kernels.{found.name}")
        yield from getattr(module, "COMPILE_CASES", ())


@dataclass
class Report:
    """Usages and failures, as JSON lines on stdout for other programs."""

    usages: list[Usage] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def compile_all(capabilities: Sequence[int] = CAPABILITIES) -> Report:
    report = Report()
    for case in all_cases():
        for capability in (c for c in case.capabilities if c in capabilities):
            try:
                report.usages.append(compile_case(case, capability))
            except Exception as error:
                report.failures.append(f"{case.name} for sm_{capability}: {error!r}"[:2000])
    return report


def main(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    wanted = [int(a) for a in arguments if a.isdigit()] or list(CAPABILITIES)
    report = compile_all(wanted)
    if as_json:
        print(
            json.dumps({"usages": [asdict(u) for u in report.usages], "failures": report.failures})
        )
        return 0
    print(f"{'kernel':<56} {'sm':>4} {'registers':>9} {'stack':>6} {'local':>6} {'shared':>8}")
    for u in report.usages:
        print(
            f"{u.case:<56} {u.capability:>4} {u.registers:>9} {u.stack:>6} {u.spills:>6} "
            f"{u.shared:>8}"
        )
    for failure in report.failures:
        print(failure, file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
