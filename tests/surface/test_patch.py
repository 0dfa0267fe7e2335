"""`ktgraph.patch`: MoE blocks of a loaded model compiled in place, everything else as it was."""

from __future__ import annotations

import gc
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import ktgraph as kt
from ktgraph.errors import MemoryBudgetError, UnsupportedInputError
from ktgraph.patched_forward import PatchError

REPO = Path(__file__).resolve().parents[2]
transformers: Any = hf  # its stubs know neither configs' fields nor `generate`

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
MOE: dict[str, Any] = {**SMALL, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**MOE, num_experts=6, head_dim=12),
    "whole-tiles": lambda: transformers.Qwen3MoeConfig(
        **{**MOE, "hidden_size": 64, "moe_intermediate_size": 32}, num_experts=6, head_dim=12
    ),
    "qwen2-moe-shared-gate": lambda: transformers.Qwen2MoeConfig(
        **MOE, num_experts=6, shared_expert_intermediate_size=32
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=5, num_experts_per_tok=2
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=5, num_experts_per_tok=2),
    "gpt-oss-tuple": lambda: transformers.GptOssConfig(
        **SMALL, num_local_experts=5, num_experts_per_tok=2, head_dim=12
    ),
    "deepseek-v3-groups": lambda: transformers.DeepseekV3Config(
        **{**MOE, "num_key_value_heads": 4}, n_routed_experts=8, n_shared_experts=2, n_group=4,
        topk_group=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=20,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
    ),
}  # fmt: skip


def small(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    config = CONFIGS[name]()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def logits(model: Any, *shape: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    ids = torch.randint(3, model.config.vocab_size, shape, generator=rng)
    with torch.inference_mode():
        return model(ids).logits


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).double().square().sum() / want.double().square().sum())


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "whole-tiles"])
def test_families_equal_eager(name: str) -> None:
    model = small(name)
    shapes = ((2, 7), (1, 1), (1, 40))
    want = [logits(model, *shape) for shape in shapes]
    patched = kt.patch(model, max_tokens=16, threads=1)
    assert patched.left == {}
    assert len(patched.blocks) == 3 - getattr(model.config, "first_k_dense_replace", 0)
    for shape, before in zip(shapes, want, strict=True):
        assert nmse(logits(model, *shape), before) <= 1e-10
    kt.unpatch(model)
    assert torch.equal(logits(model, 2, 7), want[0])


@pytest.mark.parametrize("name", ["tiny-deepseek-v2", "tiny-qwen3-moe"])
def test_trained_models_generate_the_same_text(
    name: str, tiny_deepseek: Path, tiny_qwen: Path
) -> None:
    folder = tiny_deepseek if name == "tiny-deepseek-v2" else tiny_qwen
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = tokenizer(["Once upon a time", "The sea"], return_tensors="pt", padding=True)

    def text() -> list[str]:
        found = model.generate(**prompts, max_new_tokens=24, do_sample=False)
        return tokenizer.batch_decode(found)

    before, want = text(), logits(model, 1, 60)
    patched = kt.patch(model, threads=1)
    assert text() == before
    assert nmse(logits(model, 1, 60), want) <= 1e-10
    shown = str(patched).splitlines()
    assert len(shown) == len(patched.blocks) + 2
    assert shown[1].startswith("model.layers.")
    assert shown[-1].startswith(f"{len(patched.blocks)} MoE blocks on 1 threads: ")
    assert patched.nbytes >= sum(b.before for b in patched.blocks)  # float32 as it is, in tiles
    assert "compiled by ktgraph" in repr(model)
    kt.unpatch(model)
    assert "compiled by ktgraph" not in repr(model)
    assert text() == before


def test_stored_narrower_it_still_computes_in_float32() -> None:
    """In bfloat16 the eager block rounds at every step; compiled it rounds its result only."""
    model, wide = small("whole-tiles", torch.bfloat16), small("whole-tiles", torch.bfloat16).float()
    x = torch.randn(1, 9, 64).bfloat16()
    with torch.inference_mode():
        want, rounded = wide.model.layers[1].mlp(x.float()), model.model.layers[1].mlp(x)
        patched = kt.patch(model, threads=1)
        got = model.model.layers[1].mlp(x)
    assert got.dtype == torch.bfloat16
    assert nmse(got.float(), want) < 1e-5 < nmse(rounded.float(), want)
    assert patched.nbytes < 1.3 * sum(b.before for b in patched.blocks)


def test_quantized_it_is_close_and_small() -> None:
    model = small("mixtral")
    want = logits(model, 1, 20)
    patched = kt.patch(model, quantize="int8", threads=1)
    assert 0 < nmse(logits(model, 1, 20), want) < 0.05
    assert patched.nbytes < 0.5 * sum(b.before for b in patched.blocks)


def test_originals_are_freed_when_asked() -> None:
    model = small("deepseek-v3-groups")
    want = logits(model, 2, 5)
    patched = kt.patch(model, free_originals=True, threads=1)
    assert patched.is_freed
    for block in patched.blocks:
        assert all(p.is_meta for p in model.get_submodule(block.path).parameters())
    assert not any(p.is_meta for p in model.model.layers[0].parameters())
    assert nmse(logits(model, 2, 5), want) <= 1e-10
    with pytest.raises(UnsupportedInputError, match="original weights are gone: load the model"):
        kt.unpatch(model)


def test_a_freed_model_is_not_saved(tmp_path: Path) -> None:
    """Its file would lack the experts; refused before anything is written."""
    model = small("mixtral")
    kt.patch(model, free_originals=True, threads=1)
    for save in (
        lambda: model.save_pretrained(tmp_path / "m"),
        lambda: torch.save(model.state_dict(), tmp_path / "m.pt"),
    ):
        with pytest.raises(UnsupportedInputError, match=r"MixtralForCausalLM was patched .* gone"):
            save()
    assert not list(tmp_path.iterdir())


def test_a_patched_model_with_its_originals_is_saved(tmp_path: Path) -> None:
    model = small("mixtral")
    want = model.state_dict()
    kt.patch(model, threads=1)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert want.keys() == again.keys()
    assert all(torch.equal(want[name], again[name]) for name in want)


def test_unpatch_gives_hooked_blocks_back() -> None:
    """accelerate puts a `forward` of its own on every module of a model spread over devices."""
    model = small("qwen3-moe")
    block = model.model.layers[1].mlp
    calls: list[int] = []
    inner = block.forward

    def hooked(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return inner(*args, **more)

    block.forward = hooked
    want = logits(model, 1, 6)
    kt.patch(model, threads=1)
    assert nmse(logits(model, 1, 6), want) <= 1e-10
    assert len(calls) == 1
    kt.unpatch(model)
    assert block.forward is hooked
    assert torch.equal(logits(model, 1, 6), want)
    assert len(calls) == 2


PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["deepseek-v3-groups", "gpt-oss-tuple"])
def test_wherever_the_model_lies(name: str, place: str) -> None:
    """Rows go to the CPU and back to where they came from, in the dtype that they had."""
    model = small(name, torch.bfloat16).to(place)
    wide = small(name, torch.bfloat16).float()
    ids = torch.arange(12).view(2, 6) % 97
    with torch.inference_mode():
        want = wide(ids).logits
        first = model.model.layers[-1].mlp(torch.zeros(1, 3, 40, dtype=torch.bfloat16).to(place))
    patched = kt.patch(model, free_originals=True, threads=1)
    assert len(patched.blocks) >= 2
    with torch.inference_mode():
        got = model(ids.to(place)).logits
        again = model.model.layers[-1].mlp(torch.zeros(1, 3, 40, dtype=torch.bfloat16).to(place))
    assert (got.device.type, got.dtype) == (place, torch.bfloat16)
    assert nmse(got.cpu(), want) < 1e-3  # bf16 around the blocks
    pairs = zip(_tensors(first), _tensors(again), strict=True)
    assert all((a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape) for a, b in pairs)
    text = model.generate(ids.to(place), max_new_tokens=4, do_sample=False)
    assert (text.device.type, text.shape) == (place, (2, 10))


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.gpu
def test_freed_originals_leave_the_gpu() -> None:
    model = small("mixtral").to("cuda")
    kt.patch(small("mixtral").to("cuda"), threads=1)  # libraries take their workspaces now
    gc.collect()
    before = torch.cuda.memory_allocated()
    patched = kt.patch(model, free_originals=True, threads=1)
    assert before - torch.cuda.memory_allocated() >= 0.9 * sum(b.before for b in patched.blocks)


@pytest.mark.parametrize("place", PLACES)
def test_compiled_around_its_blocks(place: str) -> None:
    """In graphs of torch.compile a block is one operator that no CUDA graph holds."""
    model = small("qwen3-moe").to(place)
    ids = torch.arange(6).view(1, 6).to(place)
    kt.patch(model, threads=1)
    with torch.inference_mode():
        want = model(ids).logits
        fast = torch.compile(model, backend="inductor" if place == "cuda" else "eager",
                             mode="reduce-overhead" if place == "cuda" else None)  # fmt: skip
        for _ in range(3):
            assert nmse(fast(ids).logits, want) <= 1e-10
    tags = torch.ops.ktgraph.moe_block.default.tags
    assert torch.Tag.cudagraph_unsafe in tags


def test_no_tokens_at_all() -> None:
    block = small("gpt-oss-tuple").model.layers[0].mlp
    model = small("gpt-oss-tuple")
    kt.patch(model, threads=1)
    with torch.inference_mode():
        got, want = model.model.layers[0].mlp(torch.zeros(1, 0, 40)), block(torch.zeros(1, 0, 40))
    assert [t.shape for t in got] == [t.shape for t in want]


def test_every_pass_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTGRAPH_VALIDATE", "1")
    assert len(kt.patch(small("qwen2-moe-shared-gate"), quantize="int8", threads=1).blocks) == 3


def test_a_router_that_is_not_known_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen3-moe")
    router = type(model.model.layers[1].mlp.gate)

    class OddRouter(router):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights.square(), ids

    model.model.layers[1].mlp.gate.__class__ = OddRouter
    want = logits(model, 1, 6)
    patched = kt.patch(model, threads=1)
    assert [b.path for b in patched.blocks] == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert list(patched.left) == ["model.layers.1.mlp"]
    assert "stays eager" in str(patched)
    assert nmse(logits(model, 1, 6), want) <= 1e-10


def _writes_a_slice(out: torch.Tensor, x: torch.Tensor) -> None:
    out[..., :4] = x[..., :4]


def _scales_in_place(out: torch.Tensor, x: torch.Tensor) -> None:
    out.mul_(0.5)


def _scales_a_view(out: torch.Tensor, x: torch.Tensor) -> None:
    out.chunk(2, -1)[1].mul_(0.5)


@pytest.mark.parametrize("write", [_writes_a_slice, _scales_in_place, _scales_a_view])
def test_a_block_that_writes_in_place_stays_eager(
    write: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    model = small("qwen3-moe")
    block = type(model.model.layers[1].mlp)

    class Writing(block):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            out = super().forward(hidden_states)
            write(out, hidden_states)
            return out

    model.model.layers[1].mlp.__class__ = Writing
    want = logits(model, 1, 6)
    patched = kt.patch(model, threads=1)
    assert list(patched.left) == ["model.layers.1.mlp"]
    assert nmse(logits(model, 1, 6), want) <= 1e-10


def test_calls_that_want_gradients_are_refused() -> None:
    model = small("olmoe")
    kt.patch(model, threads=1)
    ids = torch.tensor([[4, 5]])
    with pytest.raises(PatchError, match=r"model.layers.0.mlp .* has no gradients.*unpatch"):
        model(ids)
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


def _training(model: Any) -> None:
    model.train()


def _patched(model: Any) -> None:
    kt.patch(model, threads=1)


def _double(model: Any) -> None:
    model.double()


def _meta(model: Any) -> None:
    model.to("meta")


def _router_logits(model: Any) -> None:
    model.config.output_router_logits = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_training, "training mode, and compiled blocks have no gradients: call model.eval"),
        (_patched, "is patched already: ktgraph.unpatch"),
        (_double, r"gate_up_proj is float64: expected float32, bfloat16 or float16"),
        (_meta, "is on the meta device and holds no values"),
        (_router_logits, "config.output_router_logits is set"),
    ],
)
def test_models_that_are_refused(change: Callable[[Any], None], message: str) -> None:
    model = small("qwen3-moe")
    change(model)
    with pytest.raises(UnsupportedInputError, match=message):
        kt.patch(model, threads=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantize": "int7"}, "int7"),
        ({"threads": 9999}, "threads=9999: this process may run on 1 to"),
        ({"max_tokens": 0}, "max_tokens=0: expected a whole number above 0"),
        ({"activations": "f16"}, "activations='f16'"),
        ({"target": "rtx4090-24g+xeon"}, "compiled MoE blocks run on the CPU"),
    ],
)
def test_arguments_that_are_refused(given: dict[str, Any], message: str) -> None:
    model = small("qwen3-moe")
    with pytest.raises((UnsupportedInputError, ValueError), match=message):
        kt.patch(model, **given)
    assert "forward" not in model.model.layers[0].mlp.__dict__


def test_other_models_are_refused() -> None:
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    with pytest.raises(UnsupportedInputError, match="LlamaForCausalLM has no MoE block"):
        kt.patch(dense)
    with pytest.raises(UnsupportedInputError, match="takes a model loaded by transformers"):
        kt.patch(torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedInputError, match="is not patched: nothing to undo"):
        kt.unpatch(dense)


def test_a_patched_model_is_not_compiled_again() -> None:
    model = small("qwen3-moe")
    kt.patch(model)
    with pytest.raises(UnsupportedInputError, match=r"is patched: .*unpatch\(model\) first"):
        kt.trace(model)


def test_too_little_memory_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktgraph.runtime import functions

    monkeypatch.setattr(functions, "available_memory", lambda plan: {"cpu": 1000})
    model = small("qwen3-moe")
    with pytest.raises(MemoryBudgetError, match="of memory, and 1000 B are available"):
        kt.patch(model, threads=1)
    assert "forward" not in model.model.layers[0].mlp.__dict__


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(REPO / "examples" / "patch_transformers.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("4 MoE blocks on ") == 2
    assert out.count("Once upon a time") == 3
