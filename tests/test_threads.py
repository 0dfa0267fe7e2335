"""The measured thread count of the engine: what is chosen from figures, and its cache."""

import json

import pytest

from ktgraph.target import threads
from ktgraph.target.host import cache_file
from ktgraph.target.threads import Speed, ThreadChoice, choose, engine_threads

CORES_ARE_BEST = {1: Speed(10.0, 1.0), 8: Speed(40.0, 8.0), 16: Speed(38.0, 6.0)}
SECOND_THREADS_HELP = {1: Speed(10.0, 1.0), 8: Speed(40.0, 8.0), 16: Speed(40.0, 10.0)}
NO_DIFFERENCE = {1: Speed(10.0, 1.0), 8: Speed(40.0, 8.0), 16: Speed(41.0, 8.1)}
ONE_CPU = {1: Speed(10.0, 1.0)}


@pytest.mark.parametrize(
    ("speeds", "best"),
    [(CORES_ARE_BEST, 8), (SECOND_THREADS_HELP, 16), (NO_DIFFERENCE, 8), (ONE_CPU, 1)],
)
def test_choice(speeds, best):
    assert choose(speeds) == ThreadChoice(best, speeds)


@pytest.fixture
def one_measurement(monkeypatch, tmp_path):
    """An empty cache, and a count of the measurements made."""
    made = []

    def measure(info):
        made.append(info)
        return choose(CORES_ARE_BEST)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(threads, "measure_threads", measure)
    return made


def test_measured_once(one_measurement):
    first = engine_threads()
    assert engine_threads() == first == choose(CORES_ARE_BEST)
    assert len(one_measurement) == 1
    engine_threads(remeasure=True)
    assert len(one_measurement) == 2


@pytest.mark.parametrize("broken", ["", "{}", '{"threads": 3, "speeds": {}}', "[1]"])
def test_a_broken_cache_is_measured_again(one_measurement, broken):
    engine_threads()
    path = cache_file().with_suffix(".threads.json")
    assert json.loads(path.read_text())["threads"] == 8
    path.write_text(broken)
    assert engine_threads().threads == 8
    assert len(one_measurement) == 2


def test_a_folder_that_cannot_be_written(one_measurement, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert engine_threads().threads == 8
    assert "not kept" in caplog.text


@pytest.mark.slow
def test_this_machine(monkeypatch):
    native = pytest.importorskip("ktgraph.cpu_kernels._native")
    monkeypatch.setattr(threads, "LARGEST", 8 << 20)
    monkeypatch.setattr(threads, "SECONDS_A_POINT", 0.01)
    monkeypatch.setattr(threads, "SMALLEST", 1 << 20)
    found = threads.measure_threads(threads.probe_cpu())
    assert 1 in found.speeds
    assert len(native.default_cpus()) in found.speeds
    assert found.threads in found.speeds
    assert all(s.read > 0 and s.compute > 0 for s in found.speeds.values())
