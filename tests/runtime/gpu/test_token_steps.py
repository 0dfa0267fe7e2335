"""Tokens chosen on the GPU, one step ahead, are those that the host chooses from the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hybrid_models import HOT, OPTIONS, bind, place
from lowered_models import MODELS, nmse, prompts

from ktgraph.errors import UnsupportedInputError
from ktgraph.generate import Decoder, Endings, Generation, Limits
from ktgraph.runtime.cache import CacheFullError
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu import phase as phase_module
from ktgraph.runtime.gpu.cuda import CudaDevice
from ktgraph.runtime.gpu.device import GpuDevice, KernelCall, Step
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.paged_runner import RunnerBusyError
from ktgraph.runtime.runner import Runner
from ktgraph.sampling import Sampling

SMALL = replace(OPTIONS, max_batch=2)
TEXTS = prompts(5, 1, 19)  # more than fit into a batch, and one longer than a call
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, seed=3)
FILTERED = Sampling(temperature=1.5, top_k=30, top_p=0.9, min_p=0.01, seed=8)
EACH = [GREEDY, DRAWN, FILTERED]


def make(model: str, experts: str, device: GpuDevice | None = None, **more: Any) -> Runner:
    module = MODELS[model]()
    place(module, experts, options=SMALL)
    return bind(module, SMALL, device, **more)


def limits(runner: Runner) -> Limits:
    return Limits(
        runner.max_tokens, runner.max_batch, runner.context, runner.cache_rows, runner.page_size,
        runner.vocabulary,
    )  # fmt: skip


class OnHost:
    """A runner whose tokens can only be chosen from logits."""

    def __init__(self, runner: Runner) -> None:
        for name in ("open", "close", "length", "truncate", "forward"):
            setattr(self, name, getattr(runner, name))


def generated(
    runner: Runner,
    sampling: Sequence[Sampling] = EACH,
    texts: Sequence[Sequence[int]] = TEXTS,
    on_host: bool = False,
    **endings: Any,
) -> Generation:
    used: Any = OnHost(runner) if on_host else runner
    given: Any = {"max_new_tokens": 8} | endings
    found, events = Decoder(used, limits(runner), None).start(texts, sampling, Endings(**given))
    for _ in events:
        pass
    is_empty(runner)
    return found


def is_empty(runner: Runner) -> None:
    assert len(runner.sequences) == 0
    assert runner.sequences.pool.free == runner.sequences.pool.pages


CASES = [("mla", "resident", "simulated"), ("gqa", "cpu", "simulated")]
ON_GPU = [(model, experts, "cuda") for model in ("mla", "gqa") for experts in ("resident", "cpu")]


@pytest.fixture(
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.gpu) for case in ON_GPU)],
    ids="-".join,
    scope="module",
)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    model, experts, kind = request.param
    made = make(model, experts, CudaDevice() if kind == "cuda" else None)
    yield made
    made.executor.close()


@pytest.fixture(scope="module")
def want(runner: Runner) -> list[list[int]]:
    """What the host chooses for TEXTS."""
    return generated(runner, on_host=True).ids


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """Calls of a method from now on."""
    calls: list[object] = []
    inner = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return inner(*given, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_tokens_are_those_of_the_host(
    runner: Runner, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged batches of greedy and drawn rows; logits stay on the GPU, most steps go ahead."""
    logits, ahead = (counted(monkeypatch, runner, n) for n in ("forward", "start_next"))
    assert generated(runner).ids == want
    assert not logits
    assert len(ahead) > 8
    assert len({tuple(ids) for ids in want}) == len(TEXTS)


def test_a_vocabulary_too_large_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host chooses, from logits."""
    monkeypatch.setattr(phase_module, "MOST_TOKENS", 60)
    made = make("mla", "resident")
    assert made.vocabulary == 61
    assert not made.samples
    assert generated(made).ids == generated(made, on_host=True).ids
    made.executor.close()


def test_alone_or_in_a_batch(runner: Runner, want: list[list[int]]) -> None:
    for text, sampling, ids in zip(TEXTS, EACH, want, strict=True):
        assert generated(runner, [sampling], [text]).ids == [ids]


def test_steps_that_are_no_graphs_give_the_same_tokens() -> None:
    made = make("gqa", "streamed prefill", capture=False)
    assert generated(made).ids == generated(made, on_host=True).ids
    made.executor.close()


def test_kinds_of_batches_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy steps launch no kernel for drawn ones."""
    device = SimulatedDevice()
    made = make("mla", "resident", device)
    kernels = counted(monkeypatch, device, "kernel")
    for sampling, most in ((GREEDY, "greedy"), (DRAWN, "draw"), (FILTERED, "filter")):
        kernels.clear()
        generated(made, [sampling], TEXTS[:1])
        calls = [c[0] for c in kernels]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]
        chosen = [c.attrs["most"] for c in calls if c.definition.name == "sample.tokens"]
        assert set(chosen) == {most}
    made.executor.close()


def test_sequences_that_end_leave_a_step_with_a_row_too_many(
    runner: Runner, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """End tokens in the middle of texts: the others go on as if nothing had happened."""
    ends = {want[1][4], want[2][1]}
    found = generated(runner, eos=frozenset(ends))
    cut = [next((n for n, t in enumerate(ids) if t in ends), len(ids)) for ids in want]
    assert found.ids == [ids[:n] for ids, n in zip(want, cut, strict=True)]
    assert {c.finish for c in found.continuations} == {"eos", "length"}
    new = max(n for n in range(2, 7) if want[1][n] not in want[1][:n])
    dropped = counted(monkeypatch, runner, "drop")
    lone = generated(runner, EACH[1:2], TEXTS[1:2], eos=frozenset({want[1][new]}))
    assert lone.ids == [want[1][:new]]
    assert dropped


def test_a_sequence_that_stays_open_has_no_surplus_row(
    runner: Runner, want: list[list[int]]
) -> None:
    """A turn of a chat that ends early, and one after it."""
    text = TEXTS[0]
    lengths: list[int] = []
    answers: list[list[int]] = []
    for used in (runner, OnHost(runner)):
        seq = runner.open()
        decoder = Decoder(used, limits(runner), None)  # pyright: ignore[reportArgumentType]
        ids = text
        for endings in (Endings(20, frozenset({want[0][5]})), Endings(4)):
            found, events = decoder.resume(seq, ids, GREEDY, endings)
            list(events)
            lengths.append(runner.length(seq))
            answers += found.ids
            ids = [*ids, *found.ids[0], 4, 2]
        runner.close(seq)
        is_empty(runner)
    assert answers[:2] == answers[2:]
    assert lengths[:2] == lengths[2:]
    assert lengths[0] == len(text) + len(answers[0])


def test_calls_between_two_pieces_of_a_stream(runner: Runner, want: list[list[int]]) -> None:
    """A call in between has the ids' place on the GPU: the next step brings its own again."""
    other = prompts(4, seed=5)[0]
    logits = runner.forward([(seq := runner.open(), other)])
    runner.close(seq)
    found, events = Decoder(runner, limits(runner), None).start(TEXTS, EACH, Endings(8))
    for n, _ in enumerate(events):
        if n % 4 == 1:
            seq = runner.open()
            again = runner.forward([(seq, other)])
            assert nmse(again, logits) <= 1e-10  # a graph by now
            runner.close(seq)
        if n == 7:
            assert generated_beside(runner, TEXTS[0], EACH[0]) == want[0][:4]
    assert found.ids == want


def generated_beside(runner: Runner, text: Sequence[int], sampling: Sampling) -> list[int]:
    found, events = Decoder(runner, limits(runner), None).start([text], [sampling], Endings(4))
    list(events)
    return found.ids[0]


def test_a_cache_without_room_for_a_step_ahead(
    runner: Runner, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that end before they need the rows end as they would have."""
    start_next, tried = runner.start_next, [0]

    def full(*given: object) -> None:
        raise CacheFullError("as if other sequences had every page")

    def start(*given: Any) -> Any:
        tried[0] += 1
        with monkeypatch.context() as patch:
            patch.setattr(runner.sequences, "reserve", full)
            return start_next(*given)

    monkeypatch.setattr(runner, "start_next", start)
    assert generated(runner).ids == want
    assert tried[0] > 8


def test_experts_that_move_while_a_text_streams() -> None:
    """Changes begin between two pieces; no step is started ahead of one."""
    made = make("mla", HOT)
    want = generated(made, on_host=True).ids
    found, events = Decoder(made, limits(made), None).start(TEXTS, EACH, Endings(8))
    for n, _ in enumerate(events):
        if n in (3, 4, 9):
            made.set_residency(1, [n % 4, 5])
    assert found.ids == want
    made.settle_residency()
    assert made.residency[1] == [1, 5]
    made.executor.close()


def test_leaving_a_stream_early_drops_what_was_started(
    runner: Runner, want: list[list[int]]
) -> None:
    for pieces in (1, 9):
        found, events = Decoder(runner, limits(runner), None).start(TEXTS, EACH, Endings(8))
        for _ in range(pieces):
            next(events)
        events.close()
        is_empty(runner)
        for ids, all_ids in zip(found.ids, want, strict=True):
            assert ids == all_ids[: len(ids)]


@pytest.mark.parametrize("at", [1, 5])
def test_an_interrupt_in_the_middle_of_a_step(
    runner: Runner, want: list[list[int]], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(runner.executor, GpuExecutor)
    device = runner.executor.device
    finish, calls = device.finish, [0]

    def interrupted(look: Callable[[], object], patience: float, mark: object = None) -> bool:
        calls[0] += 1
        if calls[0] == at:
            device.is_done(mark)  # works until the first answer of the CPU is missing
            raise KeyboardInterrupt
        return finish(look, patience, mark)

    found, events = Decoder(runner, limits(runner), None).start(TEXTS, EACH, Endings(8))
    with monkeypatch.context() as patch:
        patch.setattr(device, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(events)
    is_empty(runner)
    for ids, all_ids in zip(found.ids, want, strict=True):
        assert ids == all_ids[: len(ids)]
    assert generated(runner).ids == want


def test_a_kernel_that_fails_in_a_step_ahead() -> None:
    """One error; rows are those before the failed step, and the next text is right."""

    class Failing(SimulatedDevice):
        left = -1

        def kernel(self, call: KernelCall) -> Step:
            step = super().kernel(call)
            if call.definition.name != "sample.tokens":
                return step

            def run() -> object:
                self.left -= 1
                if self.left == 0:
                    raise ValueError("a kernel failed")
                return step()

            return run

    device = Failing()
    made = make("mla", "cpu", device)
    want = generated(made, EACH[:2], TEXTS[:2]).ids
    device.left = 5
    found, events = Decoder(made, limits(made), None).start(TEXTS[:2], EACH[:2], Endings(8))
    with pytest.raises((ExecutionError, ValueError), match="a kernel failed"):
        list(events)
    is_empty(made)
    assert found.ids == [ids[:4] for ids in want]
    device.left = -1
    assert generated(made, EACH[:2], TEXTS[:2]).ids == want
    made.executor.close()


def test_penalties(runner: Runner, want: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ahead know tokens that the host does not know yet; other rows draw as before."""
    mixed = [Sampling(repetition_penalty=3.0), DRAWN, replace(FILTERED, repetition_penalty=1.2)]
    penalized = generated(runner, mixed, on_host=True).ids
    logits = counted(monkeypatch, runner, "forward")
    assert generated(runner, mixed).ids == penalized
    assert not logits
    assert penalized[1] == want[1]
    assert penalized[0] != want[0]
    assert len({*penalized[0]}) == len(penalized[0])


def test_what_a_step_under_way_forbids(runner: Runner) -> None:
    from ktgraph.ops.sample import settings

    how = settings(0.0, 0, 1.0, 0.0, 0)[None]
    seq, other = runner.open(), runner.open()
    started = runner.start([(seq, [1, 2, 3])], how)
    assert runner.length(seq) == 0
    with pytest.raises(RunnerBusyError, match=f"a step of sequence {seq} is under way"):
        runner.forward([(seq, [4])])
    with pytest.raises(RunnerBusyError, match=f"a step of sequence {seq} is under way"):
        runner.truncate(seq, 0)
    runner.forward([(other, [4])])
    with pytest.raises(UnsupportedInputError, match="no longer on the GPU"):
        runner.start_next(started, how)
    (token,) = runner.tokens(started)
    assert runner.length(seq) == 3
    runner.truncate(seq, 0)
    assert int(runner.forward([(seq, [1, 2, 3])]).argmax()) == token
    runner.close(seq)
    runner.close(other)
    is_empty(runner)


def test_an_interrupt_while_tokens_are_read(runner: Runner) -> None:
    """The step counts as lost, and may be dropped."""
    from ktgraph.ops.sample import settings

    class Interrupts:
        def tolist(self) -> list[int]:
            raise KeyboardInterrupt

    seq = runner.open()
    started = runner.start([(seq, [1, 2, 3])], settings(0.0, 0, 1.0, 0.0, 0)[None])
    started.flight.where = Interrupts()  # type: ignore[assignment]  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        runner.tokens(started)
    runner.drop(started)
    assert runner.length(seq) == 0
    runner.forward([(seq, [1, 2, 3])])
    runner.close(seq)
    is_empty(runner)


def test_a_request_longer_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls but the last are run at once; tokens come in the order of the requests."""
    from ktgraph.ops.sample import settings

    made = make("mla", "cpu")
    texts = prompts(14, 40, seed=7)
    seqs = [made.open() for _ in texts]
    how = settings(0.0, 0, 1.0, 0.0, 0)[None].repeat(2, 0)
    counts: list[int] = []
    monkeypatch.setattr(made, "_count", counts.append)
    tokens = made.tokens(made.start(list(zip(seqs, texts, strict=True)), how))
    assert len(counts) > 1
    assert sum(counts) == sum(map(len, texts))  # what learning residency goes by
    for seq, text in zip(seqs, texts, strict=True):
        assert made.length(seq) == len(text)
        made.truncate(seq, 0)
    rows = made.forward(list(zip(seqs, texts, strict=True)))
    assert tokens == rows.argmax(-1).tolist()
    made.executor.close()
