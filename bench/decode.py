"""Decode tokens/s at batch 1: ktgraph, transformers eager, torch.compile, on one set of threads.

    python bench/decode.py                    # the trained tiny models, then the synthetic one
    python bench/decode.py tiny-qwen3-moe --threads 2 --no-compile

Every subject first runs the same prompt and the same continuation; where its logits differ from
eager's by more than the case allows, nothing is reported for the case and the exit code is 1.
Rounds are interleaved; the median step over all rounds counts.  A report goes to bench/results/.
The transformers model uses its default attention (sdpa), which is the faster one here.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

import ktgraph as kt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CONTEXT = 512
EAGER = "transformers eager"
HEADINGS = ("subject", "ms/token", "tok/s", "x eager", "best ms", "x eager's best", "NMSE")
PROMPT, CHECKED, TOKENS, ROUNDS = 24, 8, 64, 3


class Subject(Protocol):
    """Something that decodes one sequence."""

    name: str

    def start(self, prompt: Sequence[int]) -> Tensor:
        """Forget the last sequence and run a prompt; f32[VOC] of its last token."""
        ...

    def step(self, token: int) -> Tensor:
        """Run one more token; f32[VOC]."""
        ...


class Transformers:
    """The model's own forward with a static cache (torch.compile) or a dynamic one (eager)."""

    def __init__(self, model: Any, *, compiled: bool) -> None:
        self.name = "torch.compile" if compiled else EAGER
        self._model = model
        self._static = compiled
        self._forward = torch.compile(model.forward, dynamic=False) if compiled else model.forward
        self._cache: Any = None
        self._at = 0

    @torch.inference_mode()
    def start(self, prompt: Sequence[int]) -> Tensor:
        config = self._model.config
        self._cache = (
            transformers.StaticCache(config=config, max_cache_len=CONTEXT)
            if self._static
            else transformers.DynamicCache(config=config)
        )
        self._at = 0
        return self._run(self._model.forward, prompt)

    @torch.inference_mode()
    def step(self, token: int) -> Tensor:
        return self._run(self._forward, [token])

    def _run(self, forward: Callable[..., Any], tokens: Sequence[int]) -> Tensor:
        places = torch.arange(self._at, self._at + len(tokens))
        self._at += len(tokens)
        found = forward(
            input_ids=torch.tensor([tokens]),
            position_ids=places[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits[0, -1].float()


class Ktgraph:
    """A compiled model, driven through its runner."""

    name = "ktgraph"

    def __init__(self, exe: kt.Compiled) -> None:
        self._runner = exe.runner
        self._seq: int | None = None

    def start(self, prompt: Sequence[int]) -> Tensor:
        if self._seq is not None:
            self._runner.close(self._seq)
        self._seq = self._runner.open()
        return self._runner.forward([(self._seq, prompt)])[0]

    def step(self, token: int) -> Tensor:
        assert self._seq is not None
        return self._runner.forward([(self._seq, [token])])[0]


@dataclass(frozen=True)
class Case:
    """One model; `nmse` is how far logits may lie from eager's, lossy weights allowed for."""

    name: str
    load: Callable[[], Any]
    quantize: str | None
    nmse: float
    weights: str  # what the baselines compute with


@dataclass
class Outcome:
    """Seconds of every step of each subject, or why there are none."""

    case: Case
    steps: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    errors: dict[str, float] = field(default_factory=dict[str, float])
    load: float = 0.0  # processes that wanted to run in the minute before

    def median(self, subject: str) -> float:
        return statistics.median(self.steps[subject])

    @property
    def failed(self) -> list[str]:
        return [n for n, e in self.errors.items() if not e <= self.case.nmse]


def tiny(folder: str) -> Callable[[], Any]:
    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(ROOT / folder, dtype=torch.float32)

    return load


def v2_lite_4_layers() -> Any:
    """DeepSeek-V2-Lite's sizes, 4 of its 27 layers, random bf16 weights: 2.2 billion of them."""
    config = transformers.DeepseekV2Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = empty.to_empty(device="cpu").eval()
    for name, parameter in model.named_parameters():
        spread = 0.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data.normal_(float("norm" in name), spread)
    fresh = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = fresh
    return model


CASES = [
    Case("tiny-deepseek-v2", tiny("examples/models/tiny-deepseek-v2"), None, 1e-8, "f32"),
    Case("tiny-qwen3-moe", tiny("tests/models/tiny-qwen3-moe"), None, 1e-8, "f32"),
    Case("deepseek-v2-lite, 4 layers, int8", v2_lite_4_layers, "int8", 2e-2, "bf16"),
]


def measure(case: Case, threads: int, *, compiled: bool) -> Outcome:
    """Parity, then interleaved rounds."""
    model = case.load().eval()
    exe = kt.compile(
        model, target=kt.cpu(threads), quantize=case.quantize, context=CONTEXT, max_batch=1
    )
    subjects: list[Subject] = [Transformers(model, compiled=False), Ktgraph(exe)]
    if compiled:
        subjects.append(Transformers(model, compiled=True))
    prompt, rest = script(model.config.vocab_size)
    errors = parity(subjects, prompt, rest[:CHECKED])
    outcome = Outcome(case, errors=errors, load=os.getloadavg()[0])
    if outcome.failed:
        return outcome
    outcome.steps = {s.name: [] for s in subjects}
    for _ in range(ROUNDS):
        for subject in subjects:
            outcome.steps[subject.name] += step_seconds(subject, prompt, rest)
    return outcome


def script(vocabulary: int) -> tuple[list[int], list[int]]:
    """A prompt and its continuation: the same tokens for every subject."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (PROMPT + TOKENS,), generator=rng).tolist()
    return ids[:PROMPT], ids[PROMPT:]


def parity(subjects: list[Subject], prompt: list[int], rest: list[int]) -> dict[str, float]:
    """NMSE of each subject's logits against the first one's."""
    rows = {s.name: torch.stack([s.start(prompt), *map(s.step, rest)]) for s in subjects}
    want = rows.pop(subjects[0].name).double()
    return {
        name: float((got.double() - want).square().sum() / want.square().sum())
        for name, got in rows.items()
    }


def step_seconds(subject: Subject, prompt: list[int], rest: list[int]) -> Iterator[float]:
    """Seconds of each step after the first."""
    subject.start(prompt)
    subject.step(rest[0])
    for token in rest[1:]:
        began = time.perf_counter()
        subject.step(token)
        yield time.perf_counter() - began


def rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    eager, best = outcome.median(EAGER), min(outcome.steps[EAGER])
    for name, steps in outcome.steps.items():
        median, least = outcome.median(name), min(steps)
        error = f"{outcome.errors[name]:.1e}" if name in outcome.errors else "reference"
        typical = (f"{median * 1e3:.2f}", f"{1 / median:.1f}", f"{eager / median:.2f}")
        yield (name, *typical, f"{least * 1e3:.2f}", f"{best / least:.2f}", error)


def report(outcome: Outcome, threads: int) -> str:
    """Markdown with machine, date and command."""
    lines = [
        f"# Decode at batch 1: {outcome.case.name}",
        "",
        f"- machine: {processor()}, {threads} threads, {platform.system()}",
        f"- date: {date.today().isoformat()}; load average before: {outcome.load:.1f} (this "
        "process alone makes it about its threads; above that, only the best steps tell)",
        f"- command: `{' '.join(['python', 'bench/decode.py', *sys.argv[1:]])}`",
        f"- torch {torch.__version__}, transformers {transformers.__version__}; prompt of {PROMPT} "
        f"tokens, {TOKENS - 1} timed steps, median over {ROUNDS} interleaved rounds",
        f"- the baselines compute in {outcome.case.weights}; ktgraph: "
        f"{outcome.case.quantize or 'weights as stored, f32 arithmetic'}",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows(outcome)),
    ]
    return "\n".join(lines) + "\n"


def refusal(outcome: Outcome) -> str:
    """Why there are no figures."""
    wrong = ", ".join(f"{n} has NMSE {outcome.errors[n]:.2e}" for n in outcome.failed)
    return (
        f"{outcome.case.name}: no figures, logits differ from eager's: {wrong}; at most "
        f"{outcome.case.nmse:g} is allowed"
    )


def processor() -> str:
    """The CPU's name as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [ln.partition(":")[2].strip() for ln in text.splitlines() if "model name" in ln]
    return names[0] if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode tokens/s at batch 1.")
    names = [c.name for c in CASES]
    parser.add_argument("cases", nargs="*", help=f"beginnings of case names: {', '.join(names)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()
    chosen = [c for c in CASES if not args.cases or any(c.name.startswith(n) for n in args.cases)]
    if not chosen:
        parser.error(f"no case begins with {' or '.join(args.cases)}; there are: {names}")
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    failed = False
    for case in chosen:
        outcome = measure(case, args.threads, compiled=not args.no_compile)
        if outcome.failed:
            failed = True
            print(refusal(outcome))
            continue
        text = report(outcome, args.threads)
        print(text)
        RESULTS.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"\W+", "-", case.name)
        (RESULTS / f"decode-{slug}-{date.today().isoformat()}.md").write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
