"""expert-deferral: the rewritten graph is a plain model of deferral, and who may ask for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import golden_cases
from hybrid_models import gqa_layers, two_groups
from lowered_models import MODELS
from placed_models import FRONT, context, run, small_target, v2_lite
from torch import Tensor

from ktgraph.analysis import CallCost, cost_analysis
from ktgraph.drive import one_thread
from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module, Op
from ktgraph.ir.interp import Interpreter
from ktgraph.ir.parser import parse_module
from ktgraph.ir.verify import verify
from ktgraph.miniature import shrink
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pass_manager import PassManager
from ktgraph.passes.expert_deferral import DeferralWarning, ExpertDeferral
from ktgraph.validate import Validator, nmse
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

GOLDEN = Path(__file__).parent / "expert_deferral.ktir"
LAYERS, TOP_K = 5, 4


def layers_only(layers: int = LAYERS) -> Module:
    """Layers of experts without attention."""
    text = golden_cases(GOLDEN)[0].before
    return parse_module(text.replace("0..4", f"0..{layers - 1}"))


def deferred(module: Module, n: int, **fields: Any) -> Module:
    """A copy after the pass, verified."""
    copy = module.clone()
    ExpertDeferral(n, **fields).run(copy, PassContext())
    verify(copy)
    return copy


# -- the same in plain torch ----------------------------------------------------------------------
class PlainLayers:
    """The layers of `layers_only`, on the same random weights."""

    def __init__(self, module: Module) -> None:
        self.source = RandomSource(module)
        self.layers = module.weights["layers[].norm"].members
        self.top_k = module.dims["K"]

    def run(self, x: Tensor, n: int) -> Tensor:
        """n of each token's experts, those with the lowest weights, are added a layer later."""
        late: Tensor | None = None
        for layer in range(self.layers):
            rows = self._norm(layer, x)
            weights, chosen = self._scores(layer, rows).topk(self.top_k, dim=-1)
            now = self.top_k if layer + 1 == self.layers else self.top_k - n
            first = self._experts(layer, rows, chosen[:, :now], weights[:, :now])
            later = self._experts(layer, rows, chosen[:, now:], weights[:, now:])
            shared = self._shared(layer, rows)
            if first is None:
                x = (x if late is None else x + late) + shared
            else:
                x = (x + first) + (shared if late is None else shared + late)
            late = later
        return x

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.source.get(f"model.layers.{layer}.{name}").float()

    def _norm(self, layer: int, x: Tensor) -> Tensor:
        size = x.square().mean(-1, keepdim=True)
        return self._weight(layer, "norm.weight") * (x * torch.rsqrt(size + 1e-6))

    def _scores(self, layer: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight(layer, "gate.weight")).softmax(-1)

    def _mlp(self, rows: Tensor, both: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(rows, both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    def _shared(self, layer: int, rows: Tensor) -> Tensor:
        names = ("shared.gate_up_proj.weight", "shared.down_proj.weight")
        return self._mlp(rows, *(self._weight(layer, n) for n in names))

    def _experts(self, layer: int, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor | None:
        if chosen.shape[1] == 0:
            return None
        both = self._weight(layer, "experts.gate_up_proj")
        down = self._weight(layer, "experts.down_proj")
        slots = torch.zeros(*chosen.shape, rows.shape[1])
        for expert in range(both.shape[0]):
            token, slot = torch.where(chosen == expert)
            found = self._mlp(rows[token], both[expert], down[expert])
            slots[token, slot] = found * weights[token, slot, None]
        return slots.sum(1)


def interpreted(module: Module, x: Tensor) -> Tensor:
    weights = WeightEvaluator(module, RandomSource(module), torch.float32)
    (found,) = Interpreter(module, weights).run("decode", [x])
    return found


def check(before: Module, after: Module, n: int) -> None:
    x = torch.randn(7, before.dims["D"], generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), one_thread():
        want = PlainLayers(before).run(x, n)
        assert torch.equal(interpreted(after, x), want)
        assert not torch.equal(interpreted(before, x), want)


@pytest.mark.parametrize("n", range(1, TOP_K + 1))
@pytest.mark.parametrize("layers", [2, 3, LAYERS])
def test_it_is_the_plain_model(layers: int, n: int) -> None:
    """To the bit, in float32; with n = 4 every expert of a token comes late."""
    before = layers_only(layers)
    check(before, deferred(before, n), n)


LAYER = """\
  %h{0} = nn.rms_norm %x{0}, @layers[{1}].norm {{eps = 1e-06}} : f32[T, D]
  %ids{0}, %w{0} = moe.route %h{0}, @layers[{1}].gate {{top_k = K}} : i32[T, K], f32[T, K]
  %routed{0} = moe.grouped_mlp %h{0}, %ids{0}, %w{0}, @layers[{1}].w13, @layers[{1}].w2 : f32[T, D]
  %shared{0} = nn.swiglu %h{0}, @layers[{1}].shared.w13, @layers[{1}].shared.w2 : f32[T, D]
  %x{2} = tensor.add3 %x{0}, %routed{0}, %shared{0} : f32[T, D]
"""
PAIRS = (
    "  %x.p = repeat i in 0..1 (%xa = %x.0) {\n" + LAYER.format("a", "2*i", "b")
    + LAYER.format("b", "2*i+1", "c") + "    yield %xc\n  } : f32[T, D]\n"
    + LAYER.format(".p", "4", ".n")
)  # fmt: skip
OUTSIDE = (
    LAYER.format(".0", "0", ".1") + LAYER.format(".1", "1", ".2")
    + "  %x.p = repeat i in 2..3 (%xa = %x.2) {\n" + LAYER.format("a", "i", "b")
    + "    yield %xb\n  } : f32[T, D]\n" + LAYER.format(".p", "4", ".n")
)  # fmt: skip


@pytest.mark.parametrize("layers", [PAIRS, OUTSIDE], ids=["pairs in a repeat", "outside and in"])
@pytest.mark.parametrize("n", [1, TOP_K])
def test_wherever_layers_stand(layers: str, n: int) -> None:
    text = str(layers_only())
    head, tail = text.index("  %x.n = repeat"), text.index("  return")
    before = parse_module(text[:head] + layers + text[tail:])
    verify(before)
    check(before, deferred(before, n), n)


def test_a_result_that_is_no_term_of_a_sum() -> None:
    """What comes late is added to the experts' result itself, before it is read."""
    text = str(layers_only()).replace(
        "%y = tensor.add3 %x, %routed, %shared", "%y = tensor.add3 %x, %once, %shared"
    )
    scaled = "    %once = tensor.scale %routed {by = 1.0} : f32[T, D]\n    %shared ="
    before = parse_module(text.replace("    %shared =", scaled))
    after = deferred(before, 2)
    x = torch.randn(7, before.dims["D"], generator=torch.Generator().manual_seed(3))
    error = nmse(interpreted(after, x), interpreted(deferred(layers_only(), 2), x))
    assert 0 < error < 1e-12  # the sum has another order
    assert str(deferred(before, TOP_K)) == str(before)


def test_it_comes_before_the_copies() -> None:
    module = run(gqa_layers(3), f"{FRONT},place", context(small_target(1 << 20)))
    assert module.home == "cuda:0"
    run(module, "insert-copies")
    with pytest.raises(UnsupportedInputError, match="expert-deferral comes before insert-copies"):
        deferred(module, 1)


def test_why_a_layer_is_not_deferred() -> None:
    reasons: list[str] = []
    for module in (layers_only(1), two_groups(), run(gqa_layers(2), f"{FRONT},place", context())):
        module = module if module.home else run(module, f"{FRONT},place")
        ctx = PassContext()
        with pytest.warns(DeferralWarning, match="defer=1 changes nothing: ") as caught:
            ExpertDeferral(1).run(module, ctx)
        (reason,) = dict.fromkeys(e.reason for e in ctx.events)
        assert reason in str(caught[0].message)
        assert ("gpu_memory" in str(caught[0].message)) == ("CPU" in reason)
        reasons += [e.reason for e in ctx.events]
    assert reasons == [
        "no experts come behind it",
        "no experts come behind it",
        "its experts are not on the CPU",
    ]


@pytest.mark.parametrize("n", [0, 2])
def test_nothing_to_defer(n: int) -> None:
    """Without n, and in a single layer, which has nothing behind it."""
    before = layers_only(1 if n else LAYERS)
    with pytest.warns(DeferralWarning) if n else nullcontext():
        after = deferred(before, n)
    assert str(after) == str(before)
    assert ExpertDeferral(n).numerics_for(after).kind == "exact"


def test_a_dense_model_has_nothing_to_defer() -> None:
    text = re.sub(r" *%(ids|routed)\S* ?= .*\n| *%ids\S*, %wts.*\n", "", str(gqa_layers(2)))
    module = run(parse_module(text.replace("%routed", "%h.1")), "specialize-phases,place")
    with pytest.warns(DeferralWarning, match="no layer that decodes has routed experts"):
        deferred(module, 2)


def test_prefill_stays() -> None:
    module = run(gqa_layers(3), f"{FRONT},place")
    prefill = str(module)[: str(module).index("func @decode")]
    after = deferred(module, 1)
    assert str(after)[: str(after).index("func @decode")] == prefill
    assert after.functions["decode"].attrs["lossy"] == ("expert-deferral{n=1}",)
    assert "lossy" not in after.functions["prefill"].attrs
    assert str(deferred(after, 1)) == str(after)  # a second run changes nothing
    both = deferred(module, 1, phases=("prefill", "decode"))
    assert "lossy" in both.functions["prefill"].attrs


def test_the_prediction_shows_the_gain(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite on the described machine: the CPU hardly pauses any more."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: moe.grouped_mlp}\n  replace: {device: cpu}\n")
    found: list[CallCost] = []
    for defer in (0, 2):
        ctx = context("h200+xeon-amx", rules=str(rules), quantize="experts=int4p", defer=defer)
        module = v2_lite(f"{FRONT},place,quantize,expert-deferral,insert-copies,overlap", ctx)
        assert ctx.target is not None
        found.append(cost_analysis(module, ctx.target).at(T=1, S=512))
    exact, late = found
    assert late.seconds < 0.9 * exact.seconds
    (busy,) = [t.seconds for t in late.by_lane() if t.lane == "cpu"]
    assert busy < late.seconds < 1.2 * busy


@pytest.mark.parametrize("defer", [0, 1, 2, 4])
def test_place_prices_it(defer: int, tmp_path: Path) -> None:
    """What `place` predicts for a step is what comes of the graph once it is deferred."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: moe.grouped_mlp}\n  replace: {device: cpu}\n")
    quantize = "experts=int4p(group=64)"
    ctx = context(
        "h200+xeon-amx", rules=str(rules), quantize=quantize, defer=defer, max_batch=1, context=512
    )
    module = v2_lite(f"{FRONT},place,quantize,expert-deferral,insert-copies,overlap", ctx)
    told = re.search(r"@decode: (\S+) ms predicted", "\n".join(ctx.notes))
    assert told is not None
    assert ctx.target is not None
    exact = cost_analysis(module, ctx.target).at(T=1, S=511)
    assert float(told[1]) / 1e3 == pytest.approx(exact.seconds, rel=0.05)
    late = [n for n in ctx.notes if "a layer later" in n]
    assert [f"{defer / 6:.0%}" in n for n in late] == [True] * (1 if defer else 0)
    assert all("@decode" in n for n in late)


# -- who may ask for it ---------------------------------------------------------------------------
@pytest.mark.parametrize("pipeline", ["expert-deferral", "expert-deferral{n=1}"])
def test_exact_refuses_it(pipeline: str) -> None:
    options = CompileOptions(exact=True, defer=0 if "{" in pipeline else 1)
    with pytest.raises(UnsupportedInputError, match=r"expert-deferral\{n=1\}: .* exact=True"):
        PassManager().run(layers_only(), pipeline, PassContext(options=options))
    PassManager().run(
        layers_only(), "expert-deferral", PassContext(options=replace(options, defer=0))
    )


@pytest.mark.parametrize("n", [-1, TOP_K + 1])
def test_a_number_that_cannot_be(n: int) -> None:
    with pytest.raises(UnsupportedInputError, match=rf"n={n}.* expected 0"):
        deferred(layers_only(), n)


def test_experts_chosen_with_a_bias_are_sorted() -> None:
    """They come in the order of their biased scores; the lowest weight is what comes late."""
    norm = "weight @layers[i in 0..4].norm"
    bias = 'weight @layers[i in 0..4].bias : f32[E] from "model.layers.{i}.bias"'
    text = str(layers_only()).replace("@layers[i].gate {", "@layers[i].gate, @layers[i].bias {")
    after = deferred(parse_module(text.replace(norm, f"{bias}\n{norm}")), 1)
    chosen: list[Tensor] = []
    late: list[Tensor] = []

    def observe(op: Op, operands: Sequence[Any], attrs: Any, results: Sequence[Any]) -> None:
        if op.name == "moe.route":
            chosen.append(results[1])
        if op.name == "moe.grouped_mlp" and op.result.name.endswith(".late"):
            late.append(operands[2])

    weights = WeightEvaluator(after, RandomSource(after), torch.float32)
    x = torch.randn(7, after.dims["D"], generator=torch.Generator().manual_seed(3))
    Interpreter(after, weights, observe=observe).run("decode", [x])
    assert len(late) == LAYERS - 1
    for weight, all_of_token in zip(late, chosen, strict=False):
        assert torch.equal(weight, all_of_token.amin(-1, keepdim=True))
    assert not torch.equal(late[0], chosen[0][:, -1:])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [1, 2])
def test_validated(model: str, n: int) -> None:
    """The whole trace, in float64: it changes results, and less than all of them."""
    module = run(MODELS[model]() if model == "mla" else gqa_layers(3), f"{FRONT},place")
    after = deferred(module, n)
    found = Validator().compare(module, after, ExpertDeferral(n).numerics_for(after))
    assert not found.is_wrong
    assert found.how == "named dims"
    assert found.error is not None
    assert (found.error > 1e-6) == (model == "gqa")  # mla has one layer of experts


def test_a_miniature_has_experts_left() -> None:
    """Its top-k of three would leave K-3 empty."""
    module = deferred(parse_module(str(layers_only()).replace("K = 4", "K = 6")), 4)
    (small,) = shrink(module).modules
    assert small.dims["K"] == 5
    verify(small)
