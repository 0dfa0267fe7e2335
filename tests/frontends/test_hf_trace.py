"""trace_hf: the module computes what the model computes, and is rolled, named and readable."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from ktgraph.frontends import leaf_ops
from ktgraph.frontends.hf import HfTrace, trace_hf_full
from ktgraph.frontends.hf_build import build_twin
from ktgraph.frontends.hf_export import export_step
from ktgraph.ir import StateType, TensorType, parse_module
from ktgraph.ir.literals import literals
from ktgraph.ir.verify import verify
from ktgraph.weights.safetensors_source import SafetensorsSource
from ktgraph.weights.sources import RandomSource

FAMILIES = ("deepseek_v2", "deepseek_v2_grouped", "qwen3_moe")
CHUNKS = ([11], [7, 1, 1, 1, 1], [4, 5, 2])


@pytest.fixture(scope="module", params=FAMILIES)
def traced(request: pytest.FixtureRequest, kit: Any) -> tuple[Any, HfTrace]:
    model = kit.build(request.param)
    return model, trace_hf_full(model)


def test_module_equals_eager_model(traced: tuple[Any, HfTrace], kit: Any) -> None:
    """Prefill, decode and chunked prefill, for one and for three sequences."""
    model, trace = traced
    for rows in (1, 3):
        ids = torch.randint(3, 96, (rows, 11))
        want = kit.eager(model, ids)
        for chunks in CHUNKS:
            got = kit.run(trace.module, kit.source(model), ids, chunks)
            assert kit.nmse(got, want) < 1e-12


def test_text_round_trip(traced: tuple[Any, HfTrace]) -> None:
    text = str(traced[1].module)
    again = parse_module(text)
    verify(again)
    assert str(again) == text


def test_layers_are_rolled_and_leaves_found(traced: tuple[Any, HfTrace]) -> None:
    model, trace = traced
    repeats = [op for op in trace.module.functions["main"].body.ops if op.body is not None]
    lo = 1 if "deepseek" in model.config.model_type else 0
    assert [(r.int_attr("lo"), r.int_attr("hi")) for r in repeats] == [(lo, 2)]
    names = {op.name for op in trace.module.walk()}
    assert {"nn.rope", "kv.append", "moe.route", "moe.experts", "nn.rms_norm"} <= names
    assert "tensor.permute" not in names  # transposes around attention cancel
    assert trace.report.kept == {}


def test_layers_that_alternate_are_rolled_in_pairs(kit: Any) -> None:
    """gpt-oss: a window in the even layers, the whole text in the odd ones."""
    module = kit.trace("gpt_oss").module
    (repeat,) = [op for op in module.functions["main"].body.ops if op.body is not None]
    assert (repeat.int_attr("lo"), repeat.int_attr("hi")) == (0, 1)
    sinks = [str(op.operand(3)) for op in module.walk() if op.name == "attn.sdpa"]
    assert sinks == ["@layers[2*i].sinks", "@layers[2*i+1].sinks"]
    weight = module.weights["layers[].sinks"]
    assert (weight.lo, weight.hi, weight.source) == (0, 3, "model.layers.{i}.self_attn.sinks")
    assert str(parse_module(str(module))) == str(module)


def test_a_weight_that_every_other_layer_has_stays_unrolled(kit: Any) -> None:
    """Families are ranges without gaps: dense and expert layers in turn form no groups."""
    config = kit.config("qwen3_moe")
    config.num_hidden_layers, config.decoder_sparse_step = 4, 2
    module = trace_hf_full(config, witnesses=False).module
    assert all(op.body is None for op in module.walk())
    assert "layers[1].mlp.gate" in module.weights


def test_state_is_what_the_model_caches(traced: tuple[Any, HfTrace]) -> None:
    model, trace = traced
    type = trace.module.functions["main"].args[2].type
    assert isinstance(type, StateType)
    rows = {"deepseek_v2": ("[C, 1, 20]", "[C, 1, 8]"), "qwen3_moe": ("[C, 2, 12]",) * 2}
    want = tuple("f32" + r for r in rows[model.config.model_type])
    assert tuple(map(str, type.parts)) == want


def test_dims_are_named_and_rebind(traced: tuple[Any, HfTrace], kit: Any) -> None:
    """name-dims understands every literal; the named module runs at other sizes."""
    from ktgraph.passes.name_dims import NameDims

    class Notes:
        def note(self, text: str) -> None:
            pytest.fail(text)

    module = traced[1].module.clone()
    assert len(module.witnesses) == 2
    NameDims().run(module, Notes())  # pyright: ignore[reportArgumentType]
    verify(module)
    assert all(n < 8 for n in literals(module))
    small = module.rebind(D=32, VOC=50, E=8, F=16)
    verify(small)
    ids = torch.randint(3, 50, (2, 5))
    out = kit.run(small, RandomSource(small, seed=1), ids, [4, 1], torch.float64)
    assert out.shape == (2, 5, 50)
    assert bool(out.isfinite().all())


def test_float64_agrees_with_the_exported_graph(kit: Any) -> None:
    """In float64 the import loses nothing: errors are those of summation order alone."""
    model = kit.build("qwen3_moe")
    twin = build_twin(model)
    program = export_step(twin).program
    names = {**program.graph_signature.inputs_to_parameters}
    names |= program.graph_signature.inputs_to_buffers
    source = kit.source(model)
    values = {n: source.get(f.removeprefix("model.")).double() for n, f in names.items()}
    ids = torch.randint(3, 96, (2, 9))
    positions = torch.arange(9)[None].repeat(2, 1)
    user = iter([ids, positions, torch.zeros(2, 9, dtype=torch.int32)])
    holders = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    args = [values[n] if n in values else next(user) for n in holders]
    with leaf_ops.eager_cache(), torch.no_grad():
        want = torch.fx.Interpreter(program.graph_module).run(*args)[0]
    module = kit.trace("qwen3_moe").module
    got = kit.run(module, source, ids, [9], torch.float64)
    assert kit.nmse(got, want) < 1e-20


def test_bfloat16_model(kit: Any) -> None:
    model = kit.build("qwen3_moe", torch.bfloat16)
    module = kit.trace("qwen3_moe", torch.bfloat16).module
    assert str(module.weights["lm_head"].type) == "bf16[96, 64]"
    ids = torch.randint(3, 96, (16, 16))
    got = kit.run(module, kit.source(model), ids, [12, 1, 1, 1, 1])
    assert got.dtype == torch.bfloat16
    want = kit.eager(kit.build("qwen3_moe"), ids)
    ours, theirs = (_errors_by_token(x, want) for x in (got, kit.eager(model, ids)))
    # Rounding flips the router's choice for a few tokens of either, which says nothing: the middle
    # token must lose no more than eager in bfloat16 loses itself, in prefill and in decode.
    for part in (slice(0, 12), slice(12, 16)):
        assert ours[:, part].median() < 2 * theirs[:, part].median()


def _errors_by_token(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """NMSE of each token's logits, [b, s]."""
    difference = got.double() - want.double()
    return difference.square().sum(-1) / want.double().square().sum(-1)


def test_a_model_cast_as_a_whole_keeps_its_names(kit: Any) -> None:
    """`model.to(bfloat16)` casts the rope tables too; the traces at other sizes must follow."""
    model = copy.deepcopy(kit.build("qwen3_moe")).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = trace_hf_full(model)
    assert len(trace.module.witnesses) == 2
    table = next(w for name, w in trace.module.weights.items() if "inv_freq" in name)
    assert "bf16" in str(table.type)


def test_computing_wider_than_stored(kit: Any) -> None:
    """A bfloat16 model traced in float32 keeps its weights as they lie."""
    model = kit.build("deepseek_v2", torch.bfloat16)
    module = trace_hf_full(model, torch.float32, witnesses=False).module
    assert str(module.weights["lm_head"].type) == "f32[96, 64]<bf16>"
    types = [r.type for op in module.walk() for r in op.results]
    assert {t.dtype for t in types if isinstance(t, TensorType)} == {"f32", "i32"}


def test_tied_embeddings_are_one_weight(kit: Any) -> None:
    module = kit.trace("llama").module
    assert "lm_head" not in module.weights
    last = module.functions["main"].body.ops[-1]
    assert (last.name, str(last.operands[1])) == ("nn.linear", "@embed_tokens")


def test_folder_and_model_give_one_module(tmp_path: Path, kit: Any) -> None:
    model = kit.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    by_folder = trace_hf_full(tmp_path, witnesses=False).module
    assert str(by_folder) == str(kit.trace("qwen3_moe").module)
    ids = torch.randint(3, 96, (1, 6))
    got = kit.run(by_folder, SafetensorsSource(tmp_path), ids, [6])
    assert kit.nmse(got, kit.eager(model, ids)) < 1e-12


def test_large_config_is_traced_without_weights() -> None:
    """Full DeepSeek-V2 widths, few layers: shapes only, on the meta device."""
    config = tf.DeepseekV2Config(
        vocab_size=102400, hidden_size=5120, intermediate_size=12288, num_hidden_layers=2,
        moe_intermediate_size=1536, num_attention_heads=128, num_key_value_heads=128,
        n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        topk_method="group_limited_greedy", n_group=8, topk_group=3, first_k_dense_replace=1,
        routed_scaling_factor=16.0,
    )  # fmt: skip
    module = trace_hf_full(config, torch.bfloat16, witnesses=False).module
    experts = module.weights["layers[1].mlp.experts.gate_up_proj"]
    assert str(experts.type) == "bf16[160, 3072, 5120]"
    kept_wide = tf.DeepseekV2PreTrainedModel._keep_in_fp32_modules_strict or ()  # not before 5.18
    gate = "f32" if "gate.weight" in kept_wide else "bf16"
    assert str(module.weights["layers[1].mlp.gate"].type) == f"{gate}[160, 5120]"
    routes = [op for op in module.walk() if op.name == "moe.route"]
    assert str(routes[0].attrs["scale"]) == "16.0"
