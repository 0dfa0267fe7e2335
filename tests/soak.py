"""Random work for a long time: no wrong token, no page lost, no memory growth, no hang.

    python tests/soak.py --seconds 1200 --target simulated

Prompts of random lengths run in random batches; some are cancelled (generators closed early, Ctrl-C
in the middle of a call), some sequences are truncated and continued; hot experts change between
jobs.  All tokens are compared with greedy references of the CPU target.  A hang dumps every
thread's stack and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import ktgraph as kt
from ktgraph.runtime.gpu.executor import GpuExecutor

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "tiny-deepseek-v2"
CONTEXT, MAX_BATCH, MAX_TOKENS = 96, 4, 32
PROMPTS, LONGEST, NEW = 24, 60, 12
EXPERTS = 16  # of a layer of the model
CLEAR = 1e-2  # a reference ends where the best two logits are closer than this: targets may differ
PATIENCE = 120.0  # seconds of one job
ALLOWED_GROWTH = 16 << 20  # bytes
_HOT_EXPERTS = "- match: {class: moe.grouped_mlp}\n  replace: {device: hot, experts: 5}\n"


class SoakError(AssertionError):
    """Something that must not happen; the message says in which job."""


@dataclass(frozen=True)
class Reference:
    """A prompt and its greedy continuation on the CPU target."""

    prompt: list[int]
    ids: list[int]


# -- setting up -----------------------------------------------------------------------------------
def compiled(traced: kt.Traced, name: str) -> kt.Compiled:
    """The model on a target by name; with a GPU, some of its routed experts live there."""
    target: Any = name
    if name == "simulated":
        target = kt.hybrid(gpu_memory="4GiB", cpu_threads=1, gpu="simulated")
    with TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.yaml"
        rules.write_text(_HOT_EXPERTS)
        given = str(rules) if name in ("simulated", "hybrid") else None
        lowered = traced.lower(
            target, rules=given, context=CONTEXT, max_batch=MAX_BATCH, max_tokens=MAX_TOKENS
        )
        return lowered.compile()


def references(exe: kt.Compiled, rng: random.Random) -> list[Reference]:
    """Random prompts, and what follows each as far as it is clear."""
    found: list[Reference] = []
    while len(found) < PROMPTS:
        prompt = [rng.randrange(exe.limits.vocabulary) for _ in range(rng.randint(1, LONGEST))]
        ids = _clear_tokens(exe, prompt)
        if len(ids) >= 2:
            found.append(Reference(prompt, ids))
    return found


def _clear_tokens(exe: kt.Compiled, prompt: list[int]) -> list[int]:
    seq, pending, ids = exe.runner.open(), prompt, list[int]()
    while len(ids) < NEW:
        values, tokens = torch.topk(exe.runner.forward([(seq, pending)])[0], 2)
        if values[0] - values[1] < CLEAR:
            break
        pending = [int(tokens[0])]
        ids += pending
    exe.runner.close(seq)
    return ids


# -- what is watched ------------------------------------------------------------------------------
def watch(seconds: float = PATIENCE) -> None:
    """End the process with every thread's stack, unless called again or cancelled in time."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: Sequence[int]) -> int:
    """Bytes by which the last quarter exceeds the second: the first one warms up."""
    quarter = len(samples) // 4
    if quarter == 0:
        return 0
    return max(samples[-quarter:]) - max(samples[quarter : 2 * quarter])


class Interrupter:
    """Raises KeyboardInterrupt in a call of the executor, as Ctrl-C does, when it is armed."""

    def __init__(self, executor: Any) -> None:
        self.calls_left = -1
        executor.call = self._counted(executor.call)
        if isinstance(executor, GpuExecutor):
            executor.land = self._counted(executor.land)
            self._is_done = executor.device.is_done
            self._finish = executor.device.finish
            executor.device.finish = self._interrupted

    @contextmanager
    def armed(self, calls: int) -> Iterator[None]:
        """The call after `calls` others is interrupted."""
        self.calls_left = calls
        try:
            yield
        finally:
            self.calls_left = -1

    def _is_due(self) -> bool:
        if self.calls_left != 0:
            return False
        self.calls_left = -1
        return True

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            if self.calls_left > 0:
                self.calls_left -= 1
                return call(*given)
            found = call(*given)
            if self._is_due():  # a CPU's executor, or a step that the GPU ended long ago
                raise KeyboardInterrupt
            return found

        return counted

    def _interrupted(
        self, look: Callable[[], object], patience: float, mark: object = None
    ) -> bool:
        """While a GPU is in the middle of the call."""
        if self._is_due():
            self._is_done(mark)  # a simulated GPU works until the first answer is missing
            raise KeyboardInterrupt
        return self._finish(look, patience, mark)


# -- jobs -----------------------------------------------------------------------------------------
class Soak:
    """Runs random jobs on a compiled model and compares what they give."""

    def __init__(self, exe: kt.Compiled, known: Sequence[Reference], rng: random.Random) -> None:
        self.exe = exe
        self.known = known
        self.rng = rng
        self.interrupter = Interrupter(exe.runner.executor)
        self.tokens = 0  # compared
        self.jobs = Counter[str]()

    def job(self) -> None:
        """One random job; raises SoakError."""
        self._move()
        kinds = [self.batch, self.closed_early, self.interrupted, self.truncated, self.drawn]
        kind = self.rng.choices(kinds, weights=(4, 2, 2, 3, 1))[0]
        kind()
        self.jobs[kind.__name__] += 1
        sequences = self.exe.runner.sequences
        if len(sequences) or sequences.pool.free != sequences.pool.pages:
            raise SoakError(f"{kind.__name__} left {len(sequences)} sequences open, or lost pages")

    def _move(self) -> None:
        """Now and then, other experts of a layer get its slots on the GPU."""
        hot = self.exe.residency
        if hot and self.rng.random() < 0.5:
            experts = self.rng.sample(range(EXPERTS), self.rng.randint(0, 5))
            self.exe.set_residency(self.rng.choice(sorted(hot)), experts)

    def batch(self) -> None:
        """More prompts than fit into one batch, or fewer, run to their ends."""
        chosen, count = self._choose()
        self.exe.generate([r.prompt for r in chosen], count, eos=())
        self._compare(chosen, count)

    def drawn(self) -> None:
        """Seeded draws, twice; an end token, met or not."""
        chosen, count = self._choose()
        how: dict[str, Any] = {"temperature": self.rng.choice([0.7, 1.5]), "seed": 5, "eos": 7}
        if self.rng.random() < 0.5:
            how |= {"top_k": 40, "top_p": 0.9}
        first, again = (self.exe.generate([r.prompt for r in chosen], count, **how) for _ in "12")
        for one, other in zip(first, again, strict=True):
            self._same(other, one, "drawn again with the same seed")

    def closed_early(self) -> None:
        """A generator that is left after some pieces."""
        chosen, count = self._choose()
        pieces = self.exe.generate([r.prompt for r in chosen], count, eos=(), stream=True)
        for _ in range(self.rng.randint(0, count - 1)):
            next(pieces, None)
        pieces.close()
        self._compare(chosen)

    def interrupted(self) -> None:
        """Ctrl-C in the middle of a call, or an error of who reads the pieces."""
        chosen, count = self._choose()
        prompts = [r.prompt for r in chosen]
        try:
            with self.interrupter.armed(self.rng.randint(0, count - 1)):
                self.exe.generate(prompts, count, eos=())
        except KeyboardInterrupt:
            self._compare(chosen)
        else:
            raise SoakError("KeyboardInterrupt was swallowed")

    def truncated(self) -> None:
        """A sequence that is cut back and continued, in pieces of random sizes."""
        reference, runner = self.rng.choice(self.known), self.exe.runner
        text = [*reference.prompt, *reference.ids]
        seq = runner.open()
        for _ in range(4):
            stop = self.rng.randint(len(reference.prompt), len(text) - 1)
            runner.truncate(seq, self.rng.randint(0, min(stop - 1, runner.length(seq))))
            self._same([self._append(seq, text[:stop])], [text[stop]], "after a truncation")
        runner.close(seq)

    def _append(self, seq: int, text: list[int]) -> int:
        """Run the text from where the sequence ends; the choice behind it."""
        runner, found = self.exe.runner, -1
        while (at := runner.length(seq)) < len(text):
            size = self.rng.randint(1, len(text) - at)
            found = int(runner.forward([(seq, text[at : at + size])])[-1].argmax())
        return found

    def _choose(self) -> tuple[list[Reference], int]:
        chosen = self.rng.sample(self.known, self.rng.randint(1, MAX_BATCH + 2))
        return chosen, self.rng.randint(1, NEW)

    def _compare(self, chosen: Sequence[Reference], count: int | None = None) -> None:
        """What was generated, as far as the references go; `count`: nothing is missing."""
        for reference, ids in zip(chosen, self.exe.last.ids, strict=True):
            if count is not None and len(ids) != count:
                raise SoakError(f"{len(ids)} tokens instead of {count}")
            both = min(len(ids), len(reference.ids))
            self._same(ids[:both], reference.ids[:both], f"a prompt of {len(reference.prompt)}")

    def _same(self, got: list[int], want: list[int], where: str) -> None:
        if got != want:
            raise SoakError(f"wrong tokens, {where}: {got}, not {want}")
        self.tokens += len(want)


def soak(exe: kt.Compiled, known: Sequence[Reference], seconds: float, seed: int) -> str:
    """Jobs for a time; a line about them.  Raises SoakError."""
    work = Soak(exe, known, random.Random(seed))
    samples: list[int] = []
    begin = shown = time.monotonic()
    while time.monotonic() - begin < seconds:
        watch()
        try:
            work.job()
        except Exception as error:
            number = work.jobs.total()
            raise SoakError(f"job {number} of seed {seed}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        samples.append(resident())
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(_line(work, samples), file=sys.stderr, flush=True)
    if growth(samples) > ALLOWED_GROWTH:
        raise SoakError(f"memory grows: {_line(work, samples)}")
    return _line(work, samples)


def _line(work: Soak, samples: Sequence[int]) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(work.jobs.items()))
    return (
        f"{work.jobs.total()} jobs ({kinds}), {work.tokens} tokens compared, "
        f"{samples[-1] / 2**20:.0f} MiB resident, {growth(samples) / 2**20:+.1f} MiB"
    )


def main() -> int:
    """Run; 1 for a failure, as the watch has it too, 2 for a model or target that cannot be had."""
    parser = argparse.ArgumentParser(description="random work for a long time, watched")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--target", default="simulated", help="simulated, or what kt.compile takes")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    watch()
    try:
        traced = kt.trace(args.model)
        exe = compiled(traced, args.target)
        known = references(compiled(traced, "cpu"), random.Random(args.seed))
        watch()
        print("soak:", soak(exe, known, args.seconds, args.seed))
    except (SoakError, kt.KtgraphError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1 if isinstance(error, SoakError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
