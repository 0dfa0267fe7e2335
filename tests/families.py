"""Model families: a tiny random model of each, and the table of docs/families.md.

    python tests/families.py              measure every family and write docs/families.md
    python tests/families.py gpt_oss …    measure these and print their rows

A family is a class of transformers.  None has code of its own in ktgraph: what they need comes in
through transformers' registries of attention and experts, and through numeric probes.
"""

from __future__ import annotations

import argparse
import functools
import re
import resource
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

import ktgraph as kt

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
VOCABULARY = 96
LIMIT = 1e-10  # NMSE of float32 logits against transformers' eager ones
OPTIONS: dict[str, Any] = {
    "context": 64, "max_tokens": 16, "max_batch": 5, "page_size": 4, "threads": 1,
}  # fmt: skip

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {
    "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
}  # fmt: skip
MLA: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A class of transformers at a tiny size.

    special: what it has that others lack.  is_other: nobody had it in mind; it comes in through the
    same registries and probes.
    """

    config: str  # the name of its config class
    special: str
    sizes: dict[str, Any]
    is_other: bool = False

    def make_config(self, **changes: Any) -> Any:
        """The tiny config; a class that this transformers does not have is None."""
        cls = getattr(tf, self.config, None)
        return None if cls is None else cls(**{**COMMON, **MOE, **self.sizes, **changes})

    @property
    def is_moe(self) -> bool:
        return self.special.find("dense model") < 0


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        "DeepseekV2Config",
        "latent attention, YaRN, shared experts, a dense first layer",
        {**MLA, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN},
    ),
    "deepseek_v2_grouped": Family(
        "DeepseekV2Config",
        "group-limited routing, latent queries",
        {
            **MLA, "q_lora_rank": 28, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        "sigmoid routing with a selection bias; also Kimi-K2 and Moonlight",
        {
            **MLA, "num_hidden_layers": 4, "first_k_dense_replace": 2, "q_lora_rank": 28,
            "n_group": 4, "topk_group": 2,
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        "a gated shared expert, biased queries, keys and values",
        {"num_experts": 8, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "norms of queries and keys, renormalised weights",
        {"num_experts": 8, "head_dim": 12, "norm_topk_prob": True},
    ),
    "mixtral": Family(
        "MixtralConfig", "routing over the chosen alone", {"num_local_experts": 8}
    ),
    "olmoe": Family("OlmoeConfig", "norms over all heads at once", {"num_experts": 8}),
    "glm4_moe": Family(
        "Glm4MoeConfig",
        "rope on a part of each head, norms and biases",
        {
            "n_routed_experts": 8, "head_dim": 16, "first_k_dense_replace": 1,
            "use_qk_norm": True, "attention_bias": True,
        },
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        "attention sinks, windows in turn, biases, clamped SwiGLU, interleaved experts",
        {"num_local_experts": 8, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4},
    ),
    "llama": Family("LlamaConfig", "dense model, tied embeddings", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3Config", "dense model, norms of queries and keys", {"head_dim": 16}),
    "mistral": Family(
        "MistralConfig",
        "dense model, a window in every layer",
        {"sliding_window": 9, "head_dim": 16},
    ),
    "granitemoe": Family(
        "GraniteMoeConfig", "scaled residuals, embeddings and logits",
        {"num_local_experts": 8}, is_other=True,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedConfig", "and a shared expert",
        {"num_local_experts": 8, "shared_intermediate_size": 40}, is_other=True,
    ),
    "dots1": Family(
        "Dots1Config", "sigmoid routing, a dense first layer",
        {
            "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "head_dim": 16, "n_group": 1, "topk_group": 1,
        }, is_other=True,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig", "a selection bias under another name",
        {
            "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        }, is_other=True,
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1Config", "norms behind the rope",
        {"num_experts": 8, "moe_topk": 3, "head_dim": 16}, is_other=True,
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config", "the block hands the selection bias to the router",
        {"num_local_experts": 8, "head_dim": 16}, is_other=True,
    ),
    "afmoe": Family(
        "AfmoeConfig", "windows in three layers of four, gated attention",
        {
            "num_experts": 8, "head_dim": 16, "num_dense_layers": 1, "sliding_window": 5,
            "num_hidden_layers": 4,
        }, is_other=True,
    ),
    "exaone_moe": Family(
        "ExaoneMoeConfig", "windows, layers without rope", {"num_experts": 8, "head_dim": 16},
        is_other=True,
    ),
    "flex_olmo": Family("FlexOlmoConfig", "norms behind", {"num_experts": 8}, is_other=True),
    "solar_open": Family(
        "SolarOpenConfig", "sigmoid routing",
        {"n_routed_experts": 8, "head_dim": 16, "n_group": 1, "topk_group": 1},
        is_other=True,
    ),
}  # fmt: skip


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model with weights large enough that every part matters to the logits."""
    return random_model(FAMILIES[name].make_config(), dtype)


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of this config with random weights, norms, biases and selection biases."""
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    stored = model.state_dict().keys()
    with torch.no_grad():
        for p in model.parameters():
            wide = p.dim() > 1
            p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if wide else 0.2) + (not wide))
        for key, b in model.named_buffers():
            if key in stored and b.is_floating_point():
                b.copy_(torch.randn(b.shape) * 0.2)
    return model


def eager(model: Any, ids: list[int]) -> Tensor:
    """transformers' logits of every token, f32[s, VOC]."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def nmse(got: Tensor, want: Tensor) -> float:
    """Squared error over squared size."""
    got, want = got.double(), want.double()
    return float((got - want).square().sum() / want.square().sum())


def prompts(*lengths: int) -> list[list[int]]:
    """Random token ids."""
    rng = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCABULARY, (n,), generator=rng).tolist() for n in lengths]


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """What was measured of one family; seconds and milliseconds of CPU time."""

    name: str
    trace_s: float
    ops: str  # as traced -> lowered, both phases
    passes_ms: float
    validated: str
    errors: tuple[float, float]  # NMSE on the CPU, on the simulated GPU

    @property
    def cells(self) -> tuple[str, ...]:
        family = FAMILIES[self.name]
        shown = f"{family.config.removesuffix('Config')} ({family.special})"
        cpu, gpu = (f"{e:.1e}" for e in self.errors)
        return (
            shown, f"{self.trace_s:.1f}", self.ops, f"{self.passes_ms:.0f}", self.validated,
            cpu, gpu,
        )  # fmt: skip


def measure(name: str) -> Row:
    """Trace, lower and run one family, on the CPU and on the simulated GPU."""
    model = build(name)
    begin = time.process_time()
    traced = kt.trace(model, dtype="f32")
    trace_s = time.process_time() - begin
    begin = time.process_time()
    lowered = traced.lower("cpu", **OPTIONS)
    passes_ms = (time.process_time() - begin) * 1e3
    checked = traced.lower("cpu", validate=1, **OPTIONS).passes.records
    changed = [r for r in checked if r.changed]
    exact = [r for r in changed if r.error is not None]
    ops = f"{_count(traced.ir)} → {_count(lowered.module)}"
    validated = f"{len(exact)} of {len(changed)}"
    simulated = traced.lower(kt.hybrid(gpu="simulated"), **OPTIONS)
    errors = (_error(lowered.compile(), model), _error(simulated.compile(), model))
    return Row(name, trace_s, ops, passes_ms, validated, errors)


def _count(module: Any) -> int:
    return sum(1 for op in module.walk() if op.body is None)


def _error(exe: kt.Compiled, model: Any) -> float:
    """The largest NMSE of a chunked prompt, of its tokens one by one, and of a ragged batch."""
    (prompt,), runner = prompts(37), exe.runner
    seq = runner.open()
    steps = torch.cat([runner.forward([(seq, [token])]) for token in prompt])
    runner.close(seq)
    ragged = prompts(1, 5, 33, 17, 2)
    found = [nmse(steps, eager(model, prompt))]
    found += [nmse(g, eager(model, p)) for g, p in zip(exe(ragged), ragged, strict=True)]
    runner.executor.close()
    return max(found)


_HEAD = (
    "family", "trace s", "ops, traced → lowered", "passes ms", "validated", "error, CPU",
    "error, simulated GPU",
)  # fmt: skip


def _table(rows: Iterable[Row]) -> str:
    lines = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *(r.cells for r in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(text: str, rows: Iterable[Row]) -> str:
    """The page with both tables replaced, and the version they were measured with."""
    rows = list(rows)
    for marker, is_other in (("named", False), ("others", True)):
        table = _table(r for r in rows if FAMILIES[r.name].is_other == is_other)
        place = re.compile(rf"<!-- {marker} -->.*?<!-- end -->", re.DOTALL)
        if len(place.findall(text)) != 1:
            raise ValueError(f"{PAGE}: expected one <!-- {marker} --> … <!-- end -->")
        text = place.sub(lambda _, t=table, m=marker: f"<!-- {m} -->\n{t}\n<!-- end -->", text)
    return re.sub(r"transformers \d+(\.\d+)*", f"transformers {tf.__version__}", text)


def main() -> None:
    """Measure, print, and write the page when every family was asked for."""
    parser = argparse.ArgumentParser(description="measure the families of docs/families.md")
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("-o", "--output", type=Path, default=PAGE, help="default: %(default)s")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - FAMILIES.keys())
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    torch.set_num_threads(1)  # of models this small the others only wait for each other
    measure("llama")  # what is loaded once does not count
    rows: list[Row] = []
    for name in given.names or FAMILIES:
        if FAMILIES[name].make_config() is None:
            print(f"{name}: not in transformers {tf.__version__}")
            continue
        rows.append(measure(name))
        print(" | ".join(rows[-1].cells), flush=True)
    if not given.names:
        text = PAGE.read_text(encoding="utf-8")
        given.output.write_text(written(text, rows), encoding="utf-8")
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{given.output} ({most:.1f} GiB at most)")


if __name__ == "__main__":
    main()
