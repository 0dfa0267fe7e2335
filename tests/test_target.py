"""Targets: text round trip, errors with a place, probing laid-out machines, cache, builders."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktgraph import doctor as doctor_module
from ktgraph.cost import Call, op_cost
from ktgraph.ir import parse_module
from ktgraph.target import (
    CpuInfo,
    Device,
    Disk,
    Link,
    MemoryInfo,
    Provenance,
    Target,
    TargetError,
    cache_file,
    check_runs_here,
    choose,
    cpu,
    format_size,
    host,
    host_target,
    hybrid,
    load_target,
    measure,
    parse_size,
    probe_cpu,
    probe_memory,
    provenance_text,
    resolve_target,
    shipped_targets,
)
from ktgraph.target.description import EngineSpeed
from ktgraph.target.many_rows import NEVER
from ktgraph.target.probe import NumaNode, parse_cpu_list, pick_cpus

GPU = Device(
    "cuda:0", "cuda", 24 << 30, ((1, 9e11),), {"f32": 7e13, "bf16": 1.5e14}, 5e-6, isa=("sm_89",)
)
CPU = Device(
    "cpu",
    "cpu",
    (64 << 30) + 12345,
    ((1, 1.25e10), (2, 2.5e10), (8, 6.1e10)),
    {"f32": 1e12, "bf16": 2.1e12, "int8": 4.3e12},
    3.3e-6,
    model='a "quoted" CPU µ',
    isa=("avx2", "fma"),
    cores=8,
    threads=8,
)
MACHINE = Target(
    "machine",
    (CPU, GPU),
    "cuda:0",
    (Link("cpu", "cuda:0", 2.5e10, 9e-6), Link("cuda:0", "cpu", 2.4e10, 8e-6)),
    Provenance("measured", "2026-11-29", "here", "a note"),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Replaces measuring by figures that are plainly made up; the list counts its calls."""
    calls: list[int] = []

    def made_up(info: CpuInfo) -> Device:
        calls.append(1)
        return replace(CPU, memory=1, isa=info.isa)

    monkeypatch.setattr(measure, "measure_cpu", made_up)
    monkeypatch.setattr(host, "gpu_names", list)
    monkeypatch.setattr(choose, "gpu_names", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


# ---- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("80GB", 80 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["24 gigs", "", "-1GiB", "0", "GiB", "1e9"])
def test_bad_sizes_say_what_is_expected(text: str) -> None:
    with pytest.raises(TargetError, match="24GiB"):
        parse_size(text)


@given(st.integers(1, 2**50))
def test_size_text_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


# ---- description and text


def test_round_trip() -> None:
    text = MACHINE.to_toml()
    assert Target.from_toml(text) == MACHINE
    assert Target.from_toml(text).to_toml() == text


@given(
    st.floats(min_value=1e-12, max_value=1e18),
    st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_round_trip_of_any_figures(figure: float, threads: list[int], words: str) -> None:
    curve = tuple((n, figure * n) for n in sorted(threads))
    device = replace(CPU, bandwidth=curve, launch=figure, model=words)
    target = Target("x", (device,), "cpu", provenance=Provenance("described", note=words))
    assert Target.from_toml(target.to_toml()) == target


@pytest.mark.parametrize("name", shipped_targets())
def test_shipped_targets_load(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert target.home == "cuda:0"
    assert Target.from_toml(target.to_toml()) == target
    assert target.link("cpu", "cuda:0").seconds(1e9) > target.link("cpu", "cuda:0").latency


def test_three_targets_are_shipped() -> None:
    expected = {"rtx4090-24g+xeon", "h200+xeon-amx", "rtx3060-12g+desktop"}
    assert set(shipped_targets()) == expected


def test_targets_are_frozen_and_hashable() -> None:
    assert hash(MACHINE) == hash(Target.from_toml(MACHINE.to_toml()))
    with pytest.raises(FrozenInstanceError):
        MACHINE.home = "cpu"  # pyright: ignore[reportAttributeAccessIssue]


def test_hash_follows_figures_not_names() -> None:
    renamed = replace(MACHINE, name="other", provenance=Provenance("described"))
    assert renamed.hash == MACHINE.hash
    assert MACHINE.with_device(replace(GPU, memory=1 << 30)).hash != MACHINE.hash
    assert replace(MACHINE, home="cpu").hash != MACHINE.hash


def test_disk_and_reads_round_trip() -> None:
    cpu = replace(CPU, reads={"int4p": 4.5e10, "bf16": 6e10})
    target = replace(MACHINE, disk=Disk(7e9, 5e-5)).with_device(cpu)
    again = Target.from_toml(target.to_toml())
    assert (again.disk, again.cpu.reads) == (Disk(7e9, 5e-5), cpu.reads)
    assert again == target
    assert replace(target, disk=None).hash == target.hash  # placement does not read it
    assert MACHINE.hash != target.hash
    with_engine = replace(cpu, engine=(EngineSpeed(1, 1e10, 2e11), EngineSpeed(8, 6e10, 9e11)))
    text = target.with_device(with_engine).to_toml()
    assert Target.from_toml(text).cpu == with_engine
    with pytest.raises(TargetError, match=r"'engine'.*FLOP/s\], \.\.\.\] with rising threads"):
        Target.from_toml(text.replace("[8, 60000000000.0, ", "[1, 60000000000.0, "))
    text = target.to_toml().replace("int4p = 45", "int4p = -45")
    with pytest.raises(TargetError, match=r"'reads'.*bytes/s by weight format"):
        Target.from_toml(text)


def test_kernels_that_bind_before_memory_set_the_price() -> None:
    """Weights at the kernels' rate, rows at memory's; formats without a figure at memory's."""
    module = parse_module(
        "ktgraph.ir 1\nmodule @m\nweight @w : bf16[64, 256]\n"
        "func @main(%x: f32[1, 256]) -> (f32[1, 64]) {\n"
        "  %y = nn.linear %x, @w : f32[1, 64]\n  return %y\n}\n"
    )
    (op,) = module.walk()
    cost = op_cost(module, op, Call.decode(0), {})
    rows, weights, reach = (256 + 64) * 4, 64 * 256 * 2, 0.95
    assert (cost.weights, cost.read + cost.written) == (weights, rows + weights)
    plain = Target("x", (replace(CPU, launch=0.0),), "cpu")
    memory = CPU.bandwidth_at()
    assert cost.seconds(plain) == pytest.approx((rows + weights) / memory / reach)
    for reads, rate in (({"bf16": 1e10}, 1e10), ({"int8": 1e10}, memory)):
        found = plain.with_device(replace(plain.cpu, reads=reads))
        expected = (rows / memory + weights / rate) / reach
        assert cost.seconds(found) == pytest.approx(expected)


def test_figures_tell_their_age_and_how_to_renew_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(
        MACHINE, provenance=Provenance("measured", "2020-01-01", platform.node(), "busy")
    )
    text = provenance_text(here)
    assert re.match(r"measured 2020-01-01 \(\d{4} days ago\) on this machine \(busy\); renew", text)
    assert text.endswith("ktgraph doctor --remeasure")
    assert provenance_text(load_target("rtx4090-24g+xeon")).startswith("described 2026-11-29")
    assert "remeasure" not in provenance_text(MACHINE)  # another host's
    monkeypatch.setattr(os, "getloadavg", lambda: (64.0, 1.0, 1.0))
    monkeypatch.setattr(measure, "measure_cpu", lambda info: CPU)
    monkeypatch.setattr(host, "gpu_names", list)
    assert "load 64.0 on" in provenance_text(host._measured(probe_cpu()))


def test_bandwidth_between_points() -> None:
    assert CPU.bandwidth_at(2) == 2.5e10
    assert CPU.bandwidth_at(5) == pytest.approx((2.5e10 + 6.1e10) / 2)
    assert CPU.bandwidth_at() == CPU.bandwidth_at(8) == CPU.bandwidth_at(64) == 6.1e10
    assert CPU.ridge("f32") == pytest.approx(1e12 / 6.1e10)


def test_unknown_names_list_known_ones() -> None:
    with pytest.raises(TargetError, match="cpu, cuda:0"):
        MACHINE.device("cuda:1")
    with pytest.raises(TargetError, match="cpu -> cuda:0"):
        MACHINE.link("cpu", "cuda:1")
    with pytest.raises(TargetError, match="known: f32, bf16"):
        GPU.peak_for("int8")
    with pytest.raises(TargetError, match="home names device 'tpu'"):
        Target("x", (CPU,), "tpu")


# Each case: what is replaced in MACHINE's text, by what, and what the message must hold beside
# the line: that of the replaced text plus an offset.
MALFORMED = {
    "syntax": ("home =", "home", 0, ["not valid TOML"]),
    "format": ("format = 1", "format = 9", 0, ["'format'", "expected 1", "found 9"]),
    "missing": ('home = "cuda:0"\n', "", -2, ["'home'", "it is missing"]),
    "home": ('home = "cuda:0"', 'home = "tpu"', 0, ["'home'", '"cpu", "cuda:0"', "found 'tpu'"]),
    "typo": ("latency = 8e-06", "latencey = 8e-06", 0, ["latencey", "mean latency"]),
    "kind": ('kind = "cuda"', 'kind = "gpu"', 0, ["'kind'", '"cuda"', "found 'gpu'"]),
    "memory": ('"24GiB"', '"a lot"', 0, ["'memory'", '"24GiB"', "found 'a lot'"]),
    "cores": ("cores = 8", "cores = 0", 0, ["'cores'", "whole number"]),
    "curve": ("[2, 25000000000.0]", "[9, 1e9]", 0, ["'bandwidth'", "rising"]),
    "point": ("[2, 25000000000.0]", "[2]", 0, ["'bandwidth'"]),
    "peak": ("f32 = 70000000000000.0", "f32 = -1", -1, ["'peak'", "FLOP/s"]),
    "dtype": ("f32 = 70000000000000.0", "fp32 = 1.0", -1, ["'peak'", "f32"]),
    "isa": ('["sm_89"]', "[89]", 0, ["'isa'", "list of texts"]),
    "name": ('name = "cuda:0"', 'name = "GPU 0"', 0, ["'name'", "device name"]),
    "twice": ('name = "cuda:0"', 'name = "cpu"', 0, ["'name'", "no other device"]),
    "link": ('dst = "cpu"', 'dst = "cpu1"', 0, ["'dst'", "found 'cpu1'"]),
    "origin": ('origin = "measured"', "origin = 3", 0, ["'origin'", "found 3"]),
    "infinite": ("latency = 8e-06", "latency = inf", 0, ["'latency'", "0 or more"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_text_is_placed(case: str) -> None:
    old, new, offset, expected = MALFORMED[case]
    text = MACHINE.to_toml()
    line = text[: text.index(old)].count("\n") + 1 + offset
    text = text.replace('home = "cuda:0"', 'home = "cpu"') if case in ("name", "twice") else text
    with pytest.raises(TargetError) as caught:
        Target.from_toml(text.replace(old, new, 1), path="m.toml")
    for part in (f"m.toml:{line}:", *expected):
        assert part in str(caught.value)


def test_text_without_devices() -> None:
    with pytest.raises(TargetError, match=r"\[\[device\]\]"):
        Target.from_toml('format = 1\nname = "x"\nhome = "cpu"\n')
    with pytest.raises(TargetError, match=r"tables \[\[device\]\]"):
        Target.from_toml('format = 1\nname = "x"\nhome = "cpu"\ndevice = 3\n')


# ---- probing


def test_probe_this_machine() -> None:
    info = probe_cpu()
    assert info.affinity
    assert 1 <= info.cores <= len(info.affinity)
    assert 1 <= info.max_threads <= info.cores
    assert 0 < info.memory.available <= info.memory.usable <= info.memory.total
    assert set(info.isa) <= info.flags


@pytest.fixture
def lay_out(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes another machine's /proc and /sys below a folder: two cores of two threads each."""
    basics = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Made Up 9\nflags\t\t: sse2 avx2 fma\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n",
        "proc/self/status": "Name: x\nCpus_allowed_list:\t0-3\n",
        "sys/devices/system/cpu/online": "0-3\n",
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  600 kB\n",
        "sys/devices/system/node/node1/cpulist": "2-3\n",
    }
    for number in range(4):
        topology = f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        basics[topology] = "0-1" if number < 2 else "2-3"
    cache = "sys/devices/system/cpu/cpu0/cache/index3/"
    basics |= {cache + "size": "32768K", cache + "level": "3", cache + "type": "Unified"}
    basics |= {cache + "shared_cpu_list": "0-3"}

    def write(files: dict[str, str]) -> Path:
        for name, text in (basics | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_probe_laid_out_machine(lay_out: Callable[[dict[str, str]], Path]) -> None:
    info = probe_cpu(lay_out({}))
    assert (info.model, info.logical, info.cores, info.quota) == ("Made Up 9", 4, 2, None)
    assert info.isa == ("avx2", "fma")
    assert info.last_level_cache == 32 << 20
    assert info.numa == (NumaNode(0, (0, 1), 600 * 1024), NumaNode(1, (2, 3), 0))
    assert info.memory == MemoryInfo(1000 * 1024, 800 * 1024, None)


def test_probe_knows_affinity(lay_out: Callable[[dict[str, str]], Path]) -> None:
    info = probe_cpu(lay_out({"proc/self/status": "Cpus_allowed_list:\t1,3\n"}))
    assert info.affinity == (1, 3)
    assert pick_cpus(info, 3) == [1, 3, 1]


def test_cgroup_version_2(lay_out: Callable[[dict[str, str]], Path]) -> None:
    root = lay_out(
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "409600\n",
            "sys/fs/cgroup/outer/memory.current": "204800\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 102400\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        }
    )
    assert probe_memory(root) == MemoryInfo(1000 * 1024, 409600 - 102400, 409600)
    info = probe_cpu(root)
    assert info.quota == 1.5
    assert info.max_threads == 1


def test_cgroup_version_1(lay_out: Callable[[dict[str, str]], Path]) -> None:
    root = lay_out(
        {
            # As in a container: the path named is the host's, and is not below the mount.
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "512000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert probe_memory(root) == MemoryInfo(1000 * 1024, 12000, 512000)
    assert probe_cpu(root).quota == 4.0


def test_cgroup_without_limits(lay_out: Callable[[dict[str, str]], Path]) -> None:
    root = lay_out(
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert probe_memory(root).limit is None
    assert probe_cpu(root).quota is None


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("") == ()


# ---- measuring


@pytest.mark.slow
def test_measure_this_machine() -> None:
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    device = measure.measure_cpu(probe_cpu())
    assert Target.from_toml(Target("x", (device,), "cpu").to_toml()).devices == (device,)
    assert device.threads in dict(device.bandwidth)
    assert set(device.peak) == {"f32", "bf16", "int8"}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 3, 4, 6, 7])])
def test_thread_counts(most: int, counts: list[int]) -> None:
    assert measure.thread_counts(most) == counts


def test_best_threads_prefers_more_when_equal() -> None:
    assert measure.best_threads(((1, 10.0), (2, 40.0), (4, 39.0), (8, 20.0))) == 4


@pytest.mark.gpu
def test_measure_gpu() -> None:
    links = measure.measure_links()
    target = Target("x", (CPU, measure.measure_gpu()), "cuda:0", links)
    assert Target.from_toml(target.to_toml()) == target


# ---- the cache


def test_measured_once(measured: list[int]) -> None:
    first, second = host_target(), host_target()
    assert first == second
    assert len(measured) == 1
    assert host_target(remeasure=True) == first
    assert len(measured) == 2


def test_memory_is_never_cached(measured: list[int]) -> None:
    budget = measure.cpu_budget(probe_memory())
    assert host_target().cpu.memory == host_target().cpu.memory == budget


@pytest.mark.parametrize("content", [b"format = ", b"\xff\xfe", b"format = 2\n"])
def test_broken_cache_is_measured_again(
    measured: list[int], content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = host_target()
    cache_file().write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="ktgraph"):
        assert host_target() == first
    assert "measuring again" in caplog.text
    assert str(cache_file()) in caplog.text or content == b"\xff\xfe"
    assert len(measured) == 2
    assert Target.from_toml(cache_file().read_text()).name == first.name


def test_unwritable_cache_is_no_error(
    measured: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="ktgraph"):
        host_target()
    assert "not kept" in caplog.text


def test_cache_leaves_nothing_else(measured: list[int]) -> None:
    host_target()
    assert [p.name for p in cache_file().parent.iterdir()] == [cache_file().name]


def test_relative_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file().parent == tmp_path / ".cache" / "ktgraph"


# ---- builders


def test_cpu(measured: list[int]) -> None:
    target = cpu(threads=1)
    assert [d.name for d in target.devices] == ["cpu"]
    assert (target.home, target.cpu.threads, target.links) == ("cpu", 1, ())
    assert not target.is_hybrid
    with pytest.raises(TargetError, match="threads=0"):
        cpu(threads=0)


def test_simulated(measured: list[int]) -> None:
    target = hybrid("8GiB", cpu_threads=1, gpu="simulated")
    (gpu,) = target.gpus
    assert (gpu.kind, gpu.memory, target.home) == ("simulated", 8 << 30, "cuda:0")
    assert target.cpu.threads == 1
    assert target.is_hybrid
    assert len(target.links) == 2
    assert Target.from_toml(target.to_toml()) == target


def test_hybrid_with_a_described_gpu(measured: list[int], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MACHINE.to_toml())
    assert hybrid(gpu=path).gpus == hybrid(gpu=str(path)).gpus == (GPU,)
    assert hybrid(gpu="h200+xeon-amx").gpus[0].isa == ("sm_90",)
    path.write_text(Target("none", (CPU,), "cpu").to_toml())
    with pytest.raises(TargetError, match="describes no GPU"):
        hybrid(gpu=path)


@pytest.mark.parametrize("word", ["hybrid", "cuda"])
def test_without_gpu_one_error_names_the_ways_out(measured: list[int], word: str) -> None:
    with pytest.raises(TargetError) as caught:
        resolve_target(word)
    for way in ('target="cpu"', "ktgraph plan MODEL --target", 'kt.hybrid(gpu="simulated")'):
        assert way in str(caught.value)
    assert not measured


def test_hybrid_with_gpu(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host, choose):
        monkeypatch.setattr(module, "gpu_names", lambda: ["Made Up GPU"])
    monkeypatch.setattr(measure, "measure_gpu", lambda index: GPU)
    monkeypatch.setattr(measure, "measure_links", lambda index: MACHINE.links)
    target = resolve_target("auto")
    assert (target.home, target.gpus, target.links) == ("cuda:0", (GPU,), MACHINE.links)
    assert [d.name for d in resolve_target("cuda").devices] == ["cuda:0"]
    assert [d.name for d in resolve_target("cpu").devices] == ["cpu"]
    assert hybrid("1GiB").gpus[0].memory == 1 << 30
    with pytest.raises(TargetError, match="leaves ktgraph 24 GiB"):
        hybrid("48GiB")


def test_resolve(measured: list[int]) -> None:
    assert resolve_target(MACHINE) is MACHINE
    assert resolve_target("auto") == resolve_target("cpu") == cpu()
    assert resolve_target("h200+xeon-amx").name == "h200+xeon-amx"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hybird", "mean hybrid"),
        ("h200", r"mean h200\+xeon-amx"),
        ("abacus", "known: auto, cpu, cuda"),
        ("missing.toml", "target file missing.toml: No such file"),
        ("/", "target file /: Is a directory"),
        ("gpu", 'did you mean "hybrid"'),
    ],
)
def test_unknown_targets(spec: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        resolve_target(spec)


def test_a_described_gpu_is_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "gpu_names", list)
    described = load_target("rtx4090-24g+xeon")
    with pytest.raises(TargetError, match=r"4090\), and torch sees none on this machine"):
        check_runs_here(described)
    monkeypatch.setattr(choose, "gpu_names", lambda: ["a GPU"])
    check_runs_here(described)


# ---- doctor


def test_doctor(measured: list[int]) -> None:
    report = doctor_module.doctor()
    text = str(report)
    for part in ("versions", "ISA", "GB/s", "chosen", "TFLOP/s", "memory", "kernels"):
        assert part in text
    assert "\x1b" not in text
    assert all(problem in " ".join(text.split()) for problem in report.problems)


def test_doctor_shows_links() -> None:
    report = doctor_module.DoctorReport({}, probe_cpu(), MACHINE, "file.so", "", ())
    assert "links" in str(report)


def test_doctor_shows_what_the_engine_chose_from() -> None:
    speeds = (EngineSpeed(1, 1.25e10, 1e11), EngineSpeed(8, 8.75e10, 7e11))
    rows = {"amx": {"bf16": 6, "int4p": 7, "q4_k": 7, "int8": NEVER}}
    target = MACHINE.with_device(replace(CPU, engine=speeds, many_rows=rows))
    text = str(doctor_module.DoctorReport({}, probe_cpu(), target, "file.so", "", ()))
    assert re.search(r"\n +8 +87\.5 +700 +chosen\n", text)
    for shown in (r"amx +6 +bf16", r"amx +7 +int4p, q4_k", r"amx +never +int8"):
        assert re.search(shown, text)


def test_doctor_reports_a_wrong_kernel() -> None:
    checks = tuple(
        doctor_module.run_check(name, check)
        for name, check in {
            "good": lambda: "nmse 1e-9 [tiny]",
            "quiet": lambda: None,
            "bad": lambda: False,
            "broken": lambda: 1 // 0,
        }.items()
    )
    assert [c.ok for c in checks] == [True, True, False, False]
    report = doctor_module.DoctorReport({}, probe_cpu(), MACHINE, "file.so", "", checks)
    assert not report.ok
    assert "ZeroDivisionError" in report.problems[-1]
    assert "nmse 1e-9 [tiny]" in str(report)


def test_doctor_says_once_what_all_kernels_have() -> None:
    names = ("one", "two", "three")
    checks = tuple(doctor_module.KernelCheck(name, False, "wrong level") for name in names)
    report = doctor_module.DoctorReport({}, probe_cpu(), MACHINE, "file.so", "", checks)
    assert report.problems == ("kernel one (and 2 more) differs: wrong level",)


def test_doctor_without_the_extension() -> None:
    report = doctor_module.DoctorReport({}, probe_cpu(), MACHINE, "", "No module named x", ())
    assert "pip install" in report.problems[0]
