"""How a user names a target: kt.cpu(), kt.hybrid(), kt.load_target(), or a word such as "auto"."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ktgraph.target.description import (
    Device,
    Target,
    TargetError,
    close_matches,
    parse_size,
    round_size,
)
from ktgraph.target.host import gpu_names, host_target, is_this_machine
from ktgraph.target.probe import probe_cpu
from ktgraph.target.threads import best_count

SHIPPED = Path(__file__).resolve().parent.parent / "targets"
SIMULATED_LIKE = "rtx4090-24g+xeon"  # whose GPU and links kt.hybrid(gpu="simulated") takes on
WORDS = ("auto", "cpu", "cuda", "hybrid", "simulated")
_GPU = ("gpu", "nvidia", "cuda:0")  # words that other programs take


def cpu(threads: int | None = None) -> Target:
    """This machine's CPU alone, with measured figures; `threads` overrides the measured choice."""
    host = host_target()
    device = _with_threads(host.cpu, threads)
    return replace(host, devices=(device,), home="cpu", links=())


def hybrid(
    gpu_memory: str | int | None = None,
    cpu_threads: int | None = None,
    gpu: str | Path = "auto",
) -> Target:
    """This machine's CPU with one GPU, which is the home device.

    gpu_memory: bytes or a size such as "24GiB" that ktgraph may use (default: all but a tenth).
    cpu_threads: worker threads (default: as measured, one core left to the driver).
    gpu: "auto" is the first CUDA GPU, and an error where there is none; "simulated" runs on the
        CPU, keeps a GPU's ordering rules and charges modelled time; the name or path of a target
        file takes that file's first GPU, for planning.
    """
    if gpu == "auto" and not gpu_names():
        raise _no_gpu("hybrid")
    host = host_target()
    other = host if gpu == "auto" else load_target(SIMULATED_LIKE if gpu == "simulated" else gpu)
    if not other.gpus:
        raise TargetError(f"gpu={str(gpu)!r}: target {other.name!r} describes no GPU")
    device = other.gpus[0]
    if gpu == "simulated":
        device = replace(device, kind="simulated", model=f"like {device.model}")
    if gpu == "auto" and cpu_threads is None:
        cpu_threads = max(1, min(host.cpu.threads, probe_cpu().max_threads - 1))
    return Target(
        name=f"{host.name}+{'simulated' if gpu == 'simulated' else device.model or device.name}",
        devices=(
            _with_threads(host.cpu, cpu_threads),
            _with_memory(device, gpu_memory, real=gpu == "auto"),
        ),
        home=device.name,
        links=tuple(k for k in other.links if {k.src, k.dst} == {"cpu", device.name}),
        provenance=host.provenance
        if gpu == "auto"
        else replace(host.provenance, note=f"{device.name} and its links: target {other.name}"),
        disk=host.disk,
    )


def cuda() -> Target:
    """This machine's first GPU alone: everything must fit into its memory."""
    if not gpu_names():
        raise _no_gpu("cuda")
    host = host_target()
    gpu = host.gpus[0]
    return replace(host, devices=(gpu,), home=gpu.name, links=())


def shipped_targets() -> list[str]:
    """Names that `load_target` finds without a path."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_target(name_or_path: str | Path) -> Target:
    """The target described in a TOML file, or one of `shipped_targets()` by its name."""
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and name_or_path in shipped_targets():
        path = SHIPPED / f"{name_or_path}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _not_found(name_or_path, error) from None
    return Target.from_toml(text, path=path)


def resolve_target(spec: str | Path | Target = "auto") -> Target:
    """What kt.compile takes as `target`: a Target, one of the words below, a name or a path.

    "auto" is "hybrid" where there is a CUDA GPU and "cpu" elsewhere; "simulated" is the hybrid path
    on a simulated GPU.
    """
    if isinstance(spec, Target):
        return spec
    if not isinstance(spec, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TargetError(
            f"target={spec!r}: expected one of {', '.join(WORDS)}, a target's name or file, or a "
            "Target"
        )
    if spec == "auto":
        return hybrid() if gpu_names() else cpu()
    if spec == "cpu":
        return cpu()
    if spec == "hybrid":
        return hybrid()
    if spec == "cuda":
        return cuda()
    if spec == "simulated":
        return hybrid(gpu="simulated")
    return load_target(spec)


def with_gpu_memory(target: Target, memory: str | int | None) -> Target:
    """The target with a budget for its first GPU; raises TargetError where it has none."""
    if memory is None:
        return target
    if not target.gpus:
        raise TargetError(
            f"gpu_memory={memory!r}: target {target.name!r} has no GPU; leave gpu_memory out, or "
            'give target="hybrid" or "simulated"'
        )
    gpu = target.gpus[0]
    return target.with_device(_with_memory(gpu, memory, real=gpu.kind == "cuda"))


def with_threads(target: Target, threads: int | None) -> Target:
    """The target with so many worker threads, which are what its CPU is priced with.

    Raises TargetError for more than this machine has, where the target is this machine.
    """
    cpus = [d for d in target.devices if d.kind == "cpu"]
    if threads is None or not cpus:
        return target
    if is_this_machine(target):
        check_threads(threads)
    return target.with_device(_on_threads(cpus[0], threads))


def check_threads(threads: int) -> None:
    """Raises TargetError when the CPUs of this process are fewer: threads would wait in turn."""
    most = most_threads()
    if not 1 <= threads <= most:
        raise TargetError(
            f"threads={threads}: this process may run on 1 to {most} CPUs; without `threads` it "
            "takes as many as were measured to be best"
        )


def check_runs_here(target: Target) -> None:
    """Raises TargetError for a target with a GPU, where torch sees none: it is to plan for."""
    cuda_gpus = [gpu for gpu in target.gpus if gpu.kind == "cuda"]
    if cuda_gpus and not gpu_names():
        raise TargetError(
            f"target {target.name!r} has a GPU ({cuda_gpus[0].model or cuda_gpus[0].name}), and "
            "torch sees none on this machine: it can be planned for and packed for (ktgraph plan, "
            'dump, quantize). To run here give target="cpu", or "simulated" for the hybrid path'
        )


def threads_text(target: Target, asked: int | None = None) -> str:
    """How many threads the CPU engine runs on, and why; `asked`: by the compile option."""
    count = asked or target.cpu_threads
    speeds = next((d.engine for d in target.devices if d.kind == "cpu"), ())
    shown = f"{count} thread{'s' * (count > 1)}"
    if not speeds:
        return f"{shown}, {'as asked for' if asked else 'as the target says'}"
    best = best_count(speeds)
    counts = ", ".join(
        f"{s.threads}: {s.read / 1e9:.3g} GB/s and {s.compute / 1e9:.3g} GFLOP/s" for s in speeds
    )
    why = "measured to be best" if count == best else f"as asked for; {best} measured to be best"
    return f"{shown}, {why} ({counts})"


def most_threads() -> int:
    """CPUs that this process may run on."""
    return len(probe_cpu().affinity)


def _with_threads(device: Device, threads: int | None) -> Device:
    if threads is None:
        return device
    check_threads(threads)
    return _on_threads(device, threads)


def _on_threads(device: Device, threads: int) -> Device:
    """With other threads than were measured, kernels read in proportion."""
    reads = {name: rate * threads / device.threads for name, rate in device.reads.items()}
    return replace(device, threads=threads, reads=reads)


def _with_memory(device: Device, memory: str | int | None, *, real: bool) -> Device:
    if memory is None:
        return device
    size = parse_size(memory)
    if real and size > device.memory:
        raise TargetError(
            f"gpu_memory={memory!r}: {device.name} ({device.model}) "
            f"leaves ktgraph {round_size(device.memory)}"
        )
    return replace(device, memory=size)


def _no_gpu(wanted: str) -> TargetError:
    return TargetError(
        f'target="{wanted}" needs a CUDA GPU, and torch sees none on this machine. Instead:\n'
        '  target="cpu"                              run on the CPU alone\n'
        '  target="simulated"                        run the hybrid path on a simulated GPU,\n'
        '                                            as kt.hybrid(gpu="simulated") gives it\n'
        "  ktgraph plan MODEL --target NAME          plan for a machine that is described"
    )


def _not_found(wanted: str | Path, error: Exception) -> TargetError:
    text = str(wanted)
    if text.endswith(".toml") or os.sep in text or not isinstance(error, FileNotFoundError):
        reason = getattr(error, "strerror", None) or str(error)
        return TargetError(f"target file {text}: {reason}; {_names()}")
    if text.lower() in _GPU:
        return TargetError(
            f'unknown target {text!r}; did you mean "hybrid" (a GPU with the CPU) or "cuda" (the '
            "GPU alone)?"
        )
    return TargetError(f"unknown target {text!r}; {close_matches(text, all_names())}")


def _names() -> str:
    return f"`ktgraph doctor --save-target FILE.toml` writes one; names: {', '.join(all_names())}"


def all_names() -> list[str]:
    """Every word and name that `resolve_target` takes."""
    return [*WORDS, *shipped_targets()]
