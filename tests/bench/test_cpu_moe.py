"""What the CPU bench counts, keeps, and refuses to report. Nothing here asserts a time."""

import csv
import ctypes
import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ktgraph.bench import report
from ktgraph.bench import run as bench_run
from ktgraph.bench.cells import Cell, Key, Store
from ktgraph.bench.cpu_moe import ATTEMPTS, LEAST_SLOW_RUNS, Bench, Options
from ktgraph.bench.limits import UNITS_OF, Limits, Reader, measure_peaks, peak_unit
from ktgraph.bench.native_moe import NativeMoe
from ktgraph.bench.roofline import NoPictureError, draw
from ktgraph.bench.shapes import SHAPES, bits_of, find_shape, parse_format
from ktgraph.bench.source import Deck, errors_of, expected, make_batch, make_source
from ktgraph.bench.subject import CannotRunError
from ktgraph.cli import main as ktgraph_main
from ktgraph.cpu_kernels import load_native
from ktgraph.errors import UnsupportedInputError

native = load_native()
TINY = SHAPES["tiny"]
LIMITS = Limits(((1, 5e9), (2, 8e9)), {"f32": 1e11}, 2, 1 << 21)


class ToldReader(Reader):
    """Says the bandwidths it was told, the last one for ever."""

    def __init__(self, *speeds: float) -> None:
        self.speeds = list(speeds)
        self.asked = 0

    def read(self, threads: int, passes: int = 5) -> float:
        self.asked += 1
        return self.speeds.pop(0) if len(self.speeds) > 1 else self.speeds[0]

    def read_lately(self, threads: int) -> float:
        return self.read(threads)


def bench(subjects, store=None, tokens=(1, 3), reader=None, **changes):
    """A bench of the tiny shape on one thread; the footprint is far below what a cache has."""
    settings: dict[str, Any] = {
        "seconds": 1e9,
        "cell_seconds": 0.01,
        "footprint": 1e-9,
        "peak_seconds": 0.001,
    }
    options = Options((TINY,), tokens, (1,), **(settings | changes))
    said: list[str] = []
    made = Bench(
        subjects, options, store or Store(None), reader or ToldReader(8e9), LIMITS, said.append
    )
    return made, said


class Faulty(NativeMoe):
    """ktgraph with a fault put into the output."""

    def __init__(self, fault):
        super().__init__(parse_format("int8"))
        self.fault, self.runs = fault, 0

    def build(self, shape, source, layers, threads):
        stack = super().build(shape, source, layers, threads)
        prepare = stack.prepare

        def prepare_faulty(batch):
            runner = prepare(batch)
            run, output = runner.run, runner.output

            def counted(layers):
                self.runs += 1
                run(layers)

            runner.run = counted
            runner.output = lambda: self.fault(output().clone())
            return runner

        stack.prepare = prepare_faulty
        return stack


# ---- counting


def test_flops_and_weights():
    assert TINY.weights_of_expert == 3 * 128 * 64
    assert TINY.flops(5) == 5 * 4 * 2 * 3 * 128 * 64
    assert find_shape("dsv3").weights_of_expert == 3 * 7168 * 2048


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4:32", "int4"])
def test_a_cell_counts_what_it_touches(name):
    subject = NativeMoe(parse_format(name))
    made, _ = bench([subject], tokens=(1, 3, 40))
    assert made.run() == 0
    fmt = parse_format(name)
    gate_up = native.packed_nbytes(fmt.name, 128, 128, fmt.group, 16, True)
    down = native.packed_nbytes(fmt.name, 128, 64, fmt.group, 16, False)
    each = (gate_up + down) // 16
    cells = {c.key.tokens: c for c in made.store.measured()}
    assert set(cells) == {1, 3, 40}
    assert cells[1].bytes == 4 * each  # one token has exactly top_k experts
    assert 4 * each <= cells[3].bytes <= 12 * each
    assert cells[40].bytes == pytest.approx(16 * each, rel=0.1)
    for cell in cells.values():
        assert cell.flops == TINY.flops(cell.key.tokens)
        assert cell.footprint == cell.layers * 16 * each
        assert cell.runs >= LEAST_SLOW_RUNS
        assert cell.seconds > 0
        assert cell.bandwidth == (8e9, 8e9)
        assert cell.unit in UNITS_OF.get(fmt.name, UNITS_OF["integer"])
        assert cell.error_dequantized is not None
        assert cell.error_dequantized < 0.05
        assert cell.error_f32 < {32: 0.01, 16: 0.01, 8: 0.05, 4: 0.3}[bits_of(name)]


def test_shares_are_of_the_better_reading_and_the_peak():
    cell = Cell(
        Key("tiny", 1, "int8", "x", 1),
        seconds=2.0,
        bytes=8e9,
        flops=6e9,
        bandwidth=(4e9, 5e9),
        peak=1e10,
    )
    assert cell.of_bandwidth == pytest.approx(4e9 / 5e9)
    assert cell.of_peak == pytest.approx(0.3)
    assert cell.bound == "memory"
    assert cell.of_bound == cell.of_bandwidth


def test_layers_follow_the_footprint_and_the_memory():
    subject = NativeMoe(parse_format("int8"))
    one = subject.nbytes(TINY)
    made, _ = bench([subject], footprint=1.0)
    made._cpu = cast("Any", SimpleNamespace(last_level_cache=10 * one))
    assert made._layers(TINY, subject) == 10
    made.options = Options((TINY,), (1,), (1,), footprint=1.0, memory=3 * one)
    assert made._layers(TINY, subject) == 3
    made.options = Options((TINY,), (1,), (1,), memory=one - 1)
    with pytest.raises(CannotRunError, match="--memory"):
        made._layers(TINY, subject)


def test_layers_are_physical_copies():
    source = make_source(TINY)
    stack = NativeMoe(parse_format("int4:32")).build(TINY, source, 3, 1)
    places = {data.ctypes.data for layer in stack._data for data in layer}
    assert len(places) == 6
    runner = stack.prepare(batch := make_batch(TINY, 5, 3))
    for ids in batch.ids:
        ids.copy_(torch.arange(20).reshape(5, 4) % 16)
    outputs = []
    for layer in range(3):
        runner.output().fill_(float("nan"))
        runner.run([layer])
        outputs.append(runner.output().clone())
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# ---- routing


def test_one_token_walks_through_all_experts_before_it_repeats():
    deck, ids = Deck(TINY, 0), torch.zeros(1, 4, dtype=torch.int32)
    seen = []
    for _ in range(8):
        assert deck.draw(ids) == 4
        seen += ids[0].tolist()
    assert sorted(seen[:16]) == list(range(16))
    assert sorted(seen[16:]) == list(range(16))


@pytest.mark.parametrize("tokens", [3, 50])
def test_a_token_has_different_experts_and_all_are_counted(tokens):
    deck, ids = Deck(TINY, 1), torch.full((tokens, 4), -7, dtype=torch.int32)
    for _ in range(5):
        used = deck.draw(ids)
        assert used == len(ids.unique())
        assert ids.min() >= 0
        assert ids.max() < 16
        assert all(len(set(row)) == 4 for row in ids.tolist())


# ---- parity


def test_the_reference_layer():
    source, batch = make_source(TINY), make_batch(TINY, 3, 1)
    batch.ids[0].copy_(torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [15, 14, 13, 12]]))
    got = expected(source.expert, source.count, batch, 0, torch.arange(3))
    for t in range(3):
        x, want = batch.x[t].double(), torch.zeros(128, dtype=torch.float64)
        for k in range(4):
            gate, up, down = (w.double() for w in source.expert(int(batch.ids[0][t, k])))
            inner = torch.nn.functional.silu(gate @ x) * (up @ x)
            want += batch.weights[t, k].double() * (down @ inner)
        assert errors_of(got[t : t + 1], want[None].float())[1] < 1e-5


def spoil_one_token(y):
    y[-1] = y[-1] * 1.2
    return y


def spoil_one_value(y):
    y[0, 5] = float("nan")
    return y


@pytest.mark.parametrize("fault", [spoil_one_token, spoil_one_value])
def test_a_wrong_result_is_never_timed_or_shown(fault):
    subject = Faulty(fault)
    made, said = bench([subject], tokens=(40,), reader=(reader := ToldReader(8e9)))
    made.run()
    (cell,) = made.store.refused()
    assert "wrong result" in cell.refused
    assert "wrong result" in said[-1]
    assert subject.runs == 1  # the checked one
    assert reader.asked == 0
    assert not list(made.store.measured())
    assert "40" not in report.markdown(made.store).split("## No figures")[0]
    assert cell.seconds == 0


class Broken(NativeMoe):
    """Fails as a library may: with any exception, when built or when run."""

    def __init__(self, at):
        super().__init__(parse_format("int8"))
        self.name, self.at = f"broken {at}", at

    def build(self, shape, source, layers, threads):
        if self.at == "build":
            raise MemoryError
        stack = super().build(shape, source, layers, threads)
        stack.prepare = cast("Any", lambda batch: 1 // 0)
        return stack


def test_one_failing_library_does_not_end_the_run():
    subjects = [Broken("build"), Broken("run"), NativeMoe(parse_format("int8"))]
    made, _ = bench(subjects, tokens=(1,))
    assert made.run() == 0
    assert [c.key.subject for c in made.store.measured()] == ["ktgraph"]
    reasons = [c.refused for c in made.store.refused()]
    assert reasons[0].startswith("failed: MemoryError")
    assert reasons[1].startswith("failed: ZeroDivisionError")


def test_the_command_fails_where_ktgraph_does(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_run, "NativeMoe", lambda fmt, isa: Faulty(spoil_one_token))
    command = [
        "bench", "cpu", "--shapes", "tiny", "--tokens", "3", "--formats", "int8", "--threads", "1",
        "--footprint", "0.001", "--cell-seconds", "0",
    ]  # fmt: skip
    assert ktgraph_main(command) == 1
    assert "wrong result" in capsys.readouterr().out


def test_a_forced_isa_is_a_subject_of_its_own():
    made, _ = bench([NativeMoe(parse_format("int8"), isa) for isa in ("", "avx2")], tokens=(1,))
    made.run()
    assert [c.key.subject for c in made.store.measured()] == ["ktgraph", "ktgraph avx2"]
    assert all(c.is_ours for c in made.store.measured())


def test_a_right_result_passes_the_same_harness():
    made, _ = bench([Faulty(lambda y: y)], tokens=(40,))
    made.run()
    assert len(list(made.store.measured())) == 1


# ---- bandwidth around a cell


@pytest.mark.parametrize(
    ("speeds", "steady", "asked"),
    [
        ((8e9, 7.5e9), True, 2),
        ((8e9, 5e9, 8e9, 8e9), True, 4),
        ((8e9, 5e9, 8e9, 5e9, 8e9, 5e9), False, 2 * ATTEMPTS),
    ],
)
def test_a_cell_is_measured_again_until_the_bandwidth_agrees(speeds, steady, asked):
    reader = ToldReader(*speeds)
    made, _ = bench([NativeMoe(parse_format("int8"))], tokens=(1,), reader=reader)
    made.run()
    (cell,) = made.store.measured()
    assert cell.steady is steady
    assert reader.asked == asked
    assert cell.bandwidth == speeds[-2:]


# ---- resuming


class NeverBuilt(NativeMoe):
    def build(self, shape, source, layers, threads):
        raise AssertionError("measured already")


def test_a_second_call_goes_on_where_the_first_ended(tmp_path):
    path, fmt = tmp_path / "cells.jsonl", parse_format("bf16")
    first, _ = bench([NativeMoe(fmt)], Store.open(path), tokens=(1,))
    first.run()
    again, _ = bench([NeverBuilt(fmt)], Store.open(path), tokens=(1,))
    assert again.run() == 0
    assert again.store.cells == first.store.cells
    more, said = bench([NativeMoe(fmt)], Store.open(path), tokens=(1, 2))
    more.run()
    cells = [line for line in said if "T=" in line]
    assert [line.split(":")[0] for line in cells] == ["tiny T=2 bf16 ktgraph x1"]
    assert len(list(Store.open(path).measured())) == 2
    assert not Store.open(path, fresh=True).cells


def test_no_time_measures_nothing_and_says_what_is_left(tmp_path):
    made, said = bench([NeverBuilt(parse_format("bf16"))], tokens=(1, 4, 16), seconds=-1.0)
    assert made.run() == 3
    assert not said


def test_a_cell_cut_short_is_left_for_the_next_call():
    made, said = bench(
        [NativeMoe(parse_format("bf16"))], tokens=(1,), seconds=60.0, cell_seconds=0.0
    )

    def end_of_time(speed: float = 8e9) -> float:
        made._ends = 0.0
        return speed

    made.reader.read_lately = lambda threads: end_of_time()  # before the first run
    assert made.run() == 1
    assert not made.store.cells
    assert not [line for line in said if "T=" in line]


def test_a_subject_that_cannot_run_is_named_and_tried_again(tmp_path):
    path = tmp_path / "cells.jsonl"
    unknown = NativeMoe(parse_format("int3"))
    made, said = bench([unknown], Store.open(path), tokens=(1, 4))
    assert made.run() == 0
    assert len(said) == 2
    assert all("int3" in line for line in said)
    later, said = bench([unknown], Store.open(path), tokens=(1, 4))
    later.run()
    assert len(said) == 2
    assert report.markdown(later.store).count("int3") >= 1


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
    path = tmp_path / "cells.jsonl"
    made, _ = bench([NativeMoe(parse_format("bf16"))], Store.open(path), tokens=(1, 4))
    made.run()
    text = path.read_text()
    path.write_text(text[:-20])
    store = Store.open(path)
    assert [k.tokens for k in store.cells] == [1]
    store.add(made.store.cells[next(k for k in made.store.cells if k.tokens == 4)])
    assert path.read_text() == text


@pytest.mark.parametrize("line", ["not json", "[1]", '{"key": {"shape": "x"}}'])
def test_a_file_of_something_else_is_not_taken(tmp_path, line):
    path = tmp_path / "other.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UnsupportedInputError, match=r"other\.jsonl:1"):
        Store.open(path)


# ---- reports


def made_cell(subject: str, fmt: str, seconds: float, tokens: int = 1) -> Cell:
    return Cell(
        Key("dsv3", tokens, fmt, subject, 2),
        seconds=seconds,
        bytes=1e8,
        flops=1e9,
        bandwidth=(1e10, 1e10),
        unit="f32",
        peak=1e12,
    )


def test_versus_compares_equal_bits_only():
    store = Store(None)
    for cell in (
        made_cell("ktgraph", "int4:64", 0.002),
        made_cell("kt-kernel AMXInt4", "int4:row", 0.004),
        made_cell("ggml", "q4_K", 0.003),
        made_cell("ggml", "q8_0", 0.001),
        made_cell("ggml", "q4_K", 0.001, tokens=4),
    ):
        store.add(cell)
    assert report.versus_rows(store.measured()) == [
        ("dsv3", "1", "4", "int4:64", "2.000", "ggml q4_K", "3.000", "1.50")
    ]
    rows = list(csv.DictReader(io.StringIO(report.csv_text(store))))
    assert len(rows) == 5
    assert float(rows[0]["of_bandwidth"]) == pytest.approx(1e8 / float(rows[0]["seconds"]) / 1e10)


def test_roofline_draws_or_says_what_is_missing(tmp_path):
    path = tmp_path / "roofline.png"
    with pytest.raises(NoPictureError, match="no cell"):
        draw([], path)
    cells = [made_cell("ktgraph", "int8", 0.01, t) for t in (1, 4)]
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(NoPictureError, match="pip install matplotlib"):
            draw(cells, path)
        return
    draw(cells, path)
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- limits


def test_units_have_peaks_and_formats_find_theirs():
    peaks = measure_peaks(1, 0.001)
    assert list(peaks) == native.arithmetic_units()
    assert "f32" in peaks
    assert all(rate > 1e8 for rate in peaks.values())  # a loop that does nothing shows
    made_up = {"f32": 3.0, "avx512_bf16": 2.0, "avx512_vnni": 5.0}
    assert peak_unit("bf16", made_up) == "f32"
    assert peak_unit("q4_K", made_up) == "avx512_vnni"
    assert peak_unit("f32", made_up) == "f32"
    assert peak_unit("int8", made_up | {"amx_int8": 4.0}) == "amx_int8"


def test_reading_touches_the_whole_buffer():
    reader = Reader(1 << 21)
    assert reader.nbytes == 1 << 21
    assert (reader._buffer != 0).all()
    threads = len(native.default_cpus())
    at = reader._buffer.ctypes.data
    speeds = native.read_bandwidth(at, reader.nbytes, threads, 3)
    assert len(speeds) == 3
    assert min(speeds) > 0
    with pytest.raises(ValueError, match="aligned"):
        native.read_bandwidth(at + 8, 1024, 1, 1)
    with pytest.raises(ValueError, match=f"from 1 to {threads} threads"):
        native.read_bandwidth(at, 1024, threads + 1, 1)
    with pytest.raises(ValueError, match="there are: f32"):
        native.arithmetic_peak("gpu", 1)


# ---- command line


def test_the_command_measures_and_resumes(tmp_path, capsys):
    store, table = tmp_path / "cells.jsonl", tmp_path / "cells.csv"
    command = [
        "bench", "cpu", "--shapes", "tiny", "--tokens", "1", "--formats", "bf16,int4:32",
        "--threads", "1", "--cell-seconds", "0", "--footprint", "0.001", "--store", str(store),
        "--csv", str(table),
    ]  # fmt: skip
    assert ktgraph_main(command) == 0
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    assert [("note" in line) for line in lines] == [True, False, False]
    assert len(table.read_text().splitlines()) == 3
    shown = capsys.readouterr().out
    assert "GB/s" in shown
    assert "int4:32" in shown
    assert ktgraph_main([*command, "--report-only"]) == 0
    assert len(store.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt"], "no shape 'gpt'"),
        (["--tokens", "1,x"], "--tokens"),
        (["--formats", "int4:x"], "int4:32"),
        (["--threads", "100000"], "CPUs"),
        (["--report-only"], "--store"),
        (["--isa", "sse9"], 'isa="sse9" is not a known level'),
        (["--formats", "int8,q4"], "--formats q4: "),
        (["--seconds", "0"], "--seconds and --footprint: expected numbers above 0"),
        (["--csv", "nowhere/x.csv"], "--csv nowhere/x.csv: there is no folder nowhere"),
    ],
)
def test_wrong_arguments_are_one_message(arguments, message, capsys):
    assert ktgraph_main(["bench", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- peers


@pytest.fixture
def peers(monkeypatch):
    """The adapters of bench/peers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    monkeypatch.delenv("KTG_GGML", raising=False)
    return importlib.import_module("peers")


def test_torch_peers_are_right_and_counted(peers):
    subjects = peers.subjects_of(["torch"])
    made, _ = bench(subjects, tokens=(1, 30))
    made.run()
    measured = {(c.key.subject, c.key.format): c for c in made.store.measured()}
    assert ("torch loop", "bf16") in measured
    one = measured[("torch loop", "bf16")]
    assert one.footprint == one.layers * 16 * TINY.weights_of_expert * 2
    refused = [c.refused for c in made.store.refused()]
    assert not [why for why in refused if "wrong result" in why]


def test_what_is_not_installed_is_said(peers, monkeypatch):
    ggml_library = importlib.import_module("peers.ggml_library")
    monkeypatch.setitem(__import__("sys").modules, "kt_kernel", None)
    monkeypatch.setattr(ggml_library.importlib.util, "find_spec", lambda name: None)
    ggml_library.load.cache_clear()
    made, said = bench(peers.subjects_of(["kt", "ggml"]), tokens=(1,))
    made.run()
    assert not list(made.store.measured())
    assert any("pip install --no-deps kt-kernel==0.7.2" in line for line in said)
    assert any("pip install llama-cpp-python" in line for line in said)
    ggml_library.load.cache_clear()
    with pytest.raises(UnsupportedInputError, match="no peer 'vllm'"):
        peers.subjects_of(["vllm"])


def test_peers_are_chosen_by_format(peers):
    chosen = peers.subjects_of(["kt", "ggml"], {"q4_K", "int4:row"})
    assert [s.format for s in chosen] == ["int4:row", "q4_K", "q4_K"]
    with pytest.raises(UnsupportedInputError, match="no peer has int3"):
        peers.subjects_of(["ggml"], {"int3"})


def test_aliased_experts_repeat_their_sources(peers):
    AliasedStack = importlib.import_module("peers.aliased").AliasedStack
    source = torch.arange(3 * 2048, dtype=torch.int16).reshape(3, 2048).view(torch.bfloat16)
    stack = AliasedStack(source, 7)
    raw = (ctypes.c_int16 * (7 * 2048)).from_address(stack.data)
    got = torch.tensor(list(raw), dtype=torch.int16).reshape(7, 2048)
    assert torch.equal(got, source.view(torch.int16)[torch.arange(7) % 3])
    stack.close()
    with pytest.raises(ValueError, match="4096"):
        AliasedStack(source[:, :100].contiguous(), 2)
