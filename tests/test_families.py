"""Every family: logits as transformers gives them, however the tokens come, wherever it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, LIMIT, eager, nmse, prompts
from torch import Tensor

import ktgraph as kt
from ktgraph.drive import one_thread
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.hf import trace_hf_full
from ktgraph.generate import Decoder, Endings
from ktgraph.ir import parse_module
from ktgraph.model_input import read_model
from ktgraph.runtime.runner import Runner
from ktgraph.sampling import Sampler, Sampling

OPTIONS = families.OPTIONS
LENGTHS = (1, 5, 33, 17, 2)
TESTED_OTHERS = ("granitemoe", "dots1", "ernie4_5_moe")  # of those that nobody had in mind
IN_E2E = ("deepseek_v2_grouped",)  # tests/e2e/test_parity.py
TESTED = [n for n, f in FAMILIES.items() if not f.is_other or n in TESTED_OTHERS]
TESTED = [n for n in TESTED if n not in IN_E2E]


@pytest.fixture(scope="module", autouse=True)
def on_one_thread() -> Iterator[None]:
    """Models this small only make threads wait for each other."""
    with one_thread():
        yield


@dataclass(frozen=True)
class Made:
    """A family compiled for the CPU, validated and dumped on the way."""

    name: str
    model: Any
    traced: kt.Traced
    exe: kt.Compiled
    dump: Path


@pytest.fixture(scope="module", params=TESTED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name = request.param
    if FAMILIES[name].make_config() is None:
        pytest.skip(f"this transformers has no {FAMILIES[name].config}")
    model, dump = families.build(name), tmp_path_factory.mktemp(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dims that stay unnamed, ops without a kernel
        traced = kt.trace(model)
        lowered = traced.lower("cpu", validate=1, dump=dump, **OPTIONS)
        return Made(name, model, traced, lowered.compile(), dump)


def compiled(model: Any) -> kt.Compiled:
    """For the CPU, from one trace: dims stay numbers."""
    ir = trace_hf_full(model, torch.float32, witnesses=False).module
    return kt.Traced(ir, read_model(model), "auto").lower("cpu", **OPTIONS).compile()


def check(exe: kt.Compiled, model: Any, steps: int) -> None:
    """A prompt in chunks, its first tokens one by one, and five texts in calls that mix both."""
    (prompt,) = prompts(37)
    want, runner = eager(model, prompt), exe.runner
    assert nmse(exe([prompt])[0], want) <= LIMIT
    seq = runner.open()
    rows = [runner.forward([(seq, [token])]) for token in prompt[:steps]]
    runner.close(seq)
    assert nmse(torch.cat(rows), want[:steps]) <= LIMIT
    ragged = prompts(*LENGTHS)
    for got, ids in zip(mixed(runner, ragged), ragged, strict=True):
        assert nmse(got, eager(model, ids)) <= LIMIT


def mixed(runner: Runner, texts: list[list[int]]) -> Iterator[Tensor]:
    """Logits of texts that go on in one call, each by pieces of its own length."""
    seqs, pieces = [runner.open() for _ in texts], (1, 4, 7, 1, 1)
    rows: list[list[Tensor]] = [[] for _ in texts]
    left = [list(text) for text in texts]
    while any(left):
        work = [n for n, rest in enumerate(left) if rest]
        taken = [left[n][: pieces[n]] for n in work]
        found = runner.forward([(seqs[n], t) for n, t in zip(work, taken, strict=True)], "all")
        for n, part in zip(work, found.split(list(map(len, taken))), strict=True):
            rows[n].append(part)
            del left[n][: len(part)]
    for seq in seqs:
        runner.close(seq)
    return map(torch.cat, rows)


def test_logits_on_the_cpu(made: Made) -> None:
    check(made.exe, made.model, 37)


def test_all_of_it_is_native(made: Made) -> None:
    phases = made.exe.runner.plan.phases
    assert [i.kernel for p in phases for i in p.instructions if not i.is_native] == []


def test_every_pass_was_validated_and_dumped(made: Made) -> None:
    passes = made.exe.passes
    assert passes is not None
    changed = [r for r in passes.records if r.changed]
    assert {r.name for r in changed if r.error is None} == set()
    files = sorted(made.dump.rglob("*.ktir"))
    assert len(files) > len(changed)
    for file in files:
        text = file.read_text().partition("\n")[2]
        assert str(parse_module(text)) == text, file.name


def test_experts_are_one_op(made: Made) -> None:
    ops = {op.name for op in made.exe.runner.module.walk()}
    assert ("moe.grouped_mlp" in ops, "moe.route" in ops) == (FAMILIES[made.name].is_moe,) * 2


def test_logits_on_the_simulated_gpu(made: Made) -> None:
    traced = made.traced.lower(kt.hybrid(gpu="simulated"), **OPTIONS)
    exe = traced.compile()
    assert exe.runner.plan.uses_gpu
    try:
        check(exe, made.model, 14)
        if exe.runner.shape.windows:
            check_steps_ahead(exe)
    finally:
        exe.runner.executor.close()


def check_steps_ahead(exe: kt.Compiled) -> None:
    """Texts drawn beyond the window, one step ahead; one ends early and goes on later."""
    texts, how = prompts(7, 12, 3), Sampling(temperature=1.0, top_p=0.9, seed=2)
    want = [drawn(exe.runner, text, how, 16) for text in texts]
    given = {"temperature": 1.0, "top_p": 0.9, "seed": 2}
    assert exe.generate(texts, 16, eos=(), **given) == want
    end = max(n for n in range(12) if want[1][n] not in want[1][:n])
    decoder = Decoder(exe.runner, exe.limits, None)
    seq = exe.runner.open()
    first, events = decoder.resume(seq, texts[1], how, Endings(16, frozenset({want[1][end]})))
    list(events)
    assert first.ids == [want[1][:end]]
    again = [*texts[1], *want[1][: end + 1]]
    second, events = decoder.resume(seq, again, how, Endings(16 - end - 1))
    list(events)
    exe.runner.close(seq)
    assert second.ids == [want[1][end + 1 :]]
    windows = exe.runner.sequences.windows.values()
    assert all(w.pool.free == w.pool.pages for w in windows)


def drawn(runner: Runner, text: list[int], how: Sampling, count: int) -> list[int]:
    """What the host draws from logits."""
    sampler, seq, found = Sampler(how, runner.vocabulary, text), runner.open(), list[int]()
    while len(found) < count:
        row = runner.forward([(seq, found[-1:] or text)])[0]
        found.append(sampler.choose(row))
    runner.close(seq)
    return found


@pytest.mark.gpu
def test_logits_on_a_gpu(made: Made) -> None:
    exe = kt.trace(made.model, dtype="f32").lower("hybrid", **OPTIONS).compile()
    try:
        check(exe, made.model, 14)
    finally:
        exe.runner.executor.close()


# ---------------------------------------------------------------- windows and partial rope


@pytest.mark.parametrize("window", [1, 4, 8, 9])  # pages have 4 rows
def test_windows_at_their_edges(window: int) -> None:
    """Texts below, at and above the window and at borders of pages, then on from there."""
    config = FAMILIES["gpt_oss"].make_config(sliding_window=window)
    model = families.random_model(config)
    exe = compiled(model)
    assert [w for w, _ in exe.runner.shape.windows] == [window]
    lengths = [max(1, window - 1), window, window + 1, 12, 13]
    runner, texts = exe.runner, prompts(*(n + 9 for n in lengths))
    seqs = [runner.open() for _ in texts]
    rows = [[part] for part in begin(runner, seqs, texts, lengths)]
    for step in range(9):
        tokens = [[text[n + step]] for text, n in zip(texts, lengths, strict=True)]
        found = runner.forward(list(zip(seqs, tokens, strict=True)))
        for mine, row in zip(rows, found, strict=True):
            mine.append(row[None])
    for mine, text in zip(rows, texts, strict=True):
        assert nmse(torch.cat(mine), eager(model, text)) <= LIMIT
    seen = -(-(window - 1) // OPTIONS["page_size"]) + 2  # pages of a window, and of the new token
    held = [len(runner.sequences[seq].windows[window].pages) for seq in seqs]
    assert max(held) <= seen < runner.sequences.shape.pages_for(22)


def begin(
    runner: Runner, seqs: list[int], texts: list[list[int]], lengths: list[int]
) -> tuple[Tensor, ...]:
    """Logits of the first tokens of each text, in calls that mix them."""
    heads = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    return runner.forward(list(zip(seqs, heads, strict=True)), "all").split(lengths)


@pytest.mark.parametrize("share", [0.125, 0.875, 1.0])
def test_partial_rope_at_its_edges(share: float) -> None:
    """Two channels of sixteen, all but two, and all."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    config = FAMILIES["glm4_moe"].make_config(
        rope_parameters=rope, num_hidden_layers=2, partial_rotary_factor=share
    )
    model = families.random_model(config)
    exe = compiled(model)
    (freqs,) = (w for n, w in exe.runner.module.weights.items() if n.endswith("inv_freq"))
    assert [d.const() for d in freqs.type.dims] == [int(16 * share) // 2]
    (prompt,) = prompts(21)
    assert nmse(exe([prompt])[0], eager(model, prompt)) <= LIMIT


# ---------------------------------------------------------------- what cannot be traced


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("PhimoeConfig", r"mlp\.router \(PhimoeTopKRouter\).*aten\.max\.dim.*no import rule"),
        ("Cohere2MoeConfig", r"input_layernorm \(Cohere2MoeLayerNorm\).*no import rule"),
        ("MiniMaxConfig", r"MiniMaxForCausalLM cannot be traced.*at model \(MiniMaxModel\)"),
    ],
)
def test_what_has_no_rule_is_named(config: str, what: str) -> None:
    family = families.Family(config, "", {"num_local_experts": 8, "num_experts": 8, "head_dim": 16})
    made = family.make_config()
    if made is None:
        pytest.skip(f"this transformers has no {config}")
    with pytest.raises(UnsupportedModelError, match=f"(?s){what}.*next: "):
        trace_hf_full(made, witnesses=False)


def test_a_model_type_that_only_names_a_known_class(tmp_path: Path) -> None:
    """Kimi-K2: `kimi_k2` is not in transformers, its class is."""
    model = families.build("deepseek_v3")
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"')
    config.write_text(text)
    assert "kimi_k2" in text
    exe = compiled(tmp_path)
    (prompt,) = prompts(9)
    assert nmse(exe([prompt])[0], eager(model, prompt)) <= LIMIT
