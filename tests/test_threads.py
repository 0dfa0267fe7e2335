"""The measured thread count of the engine: what is chosen from figures, and who says so."""

from dataclasses import replace

import pytest

from ktgraph.target import load_target, measure, probe_cpu, threads, threads_text, with_threads
from ktgraph.target.description import EngineSpeed
from ktgraph.target.threads import best_count, measure_threads

CORES_ARE_BEST = ((1, 10.0, 1.0), (8, 40.0, 8.0), (16, 38.0, 6.0))
SECOND_THREADS_HELP = ((1, 10.0, 1.0), (8, 40.0, 8.0), (16, 40.0, 10.0))
NO_DIFFERENCE = ((1, 10.0, 1.0), (8, 40.0, 8.0), (16, 41.0, 8.1))
BESIDE_OTHERS = ((1, 40.0, 8.0), (2, 30.0, 5.0))
ONE_CPU = ((1, 10.0, 1.0),)


def speeds(rows):
    return tuple(EngineSpeed(*row) for row in rows)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        (CORES_ARE_BEST, 8),
        (SECOND_THREADS_HELP, 16),
        (NO_DIFFERENCE, 8),
        (BESIDE_OTHERS, 2),
        (ONE_CPU, 1),
    ],
)
def test_choice(rows, best):
    assert best_count(speeds(rows)) == best


def test_the_measured_count_is_the_default(monkeypatch):
    """A CPU's figures name the count that the engine's kernels are best with."""
    found = speeds(CORES_ARE_BEST)
    monkeypatch.setattr(measure, "measure_threads", lambda info: found)
    monkeypatch.setattr(measure, "_read_bandwidth", lambda info, counts: ((1, 1e9), (2, 9e9)))
    for name in ("_cpu_peaks", "_cpu_launch"):
        monkeypatch.setattr(measure, name, lambda *given: {"f32": 1.0})
    for name in ("measure_reads", "measure_many_rows"):
        monkeypatch.setattr(measure, name, lambda *given: {})
    device = measure.measure_cpu(probe_cpu())
    assert (device.threads, device.engine) == (8, found)
    monkeypatch.setattr(measure, "measure_threads", lambda info: ())  # no engine is built
    assert measure.measure_cpu(probe_cpu()).threads == 2


def test_what_explain_says():
    target = load_target("rtx4090-24g+xeon")
    count = target.cpu_threads
    assert threads_text(target) == f"{count} threads, as the target says"
    assert threads_text(target, 1) == "1 thread, as asked for"
    cpu = replace(target.cpu, threads=8, engine=speeds(CORES_ARE_BEST))
    known = target.with_device(cpu)
    assert threads_text(known).startswith("8 threads, measured to be best (1: 1e-08 GB/s and ")
    other = threads_text(with_threads(known, 4))
    assert other.startswith("4 threads, as asked for; 8 measured to be best (")


@pytest.mark.slow
def test_this_machine(monkeypatch):
    native = pytest.importorskip("ktgraph.cpu_kernels._native")
    monkeypatch.setattr(threads, "LARGEST", 8 << 20)
    monkeypatch.setattr(threads, "SECONDS_A_POINT", 0.01)
    monkeypatch.setattr(threads, "SMALLEST", 1 << 20)
    found = {s.threads: s for s in measure_threads(probe_cpu())}
    assert {1, len(native.default_cpus())} <= found.keys()
    assert best_count(list(found.values())) in found
    assert all(s.read > 0 and s.compute > 0 for s in found.values())
