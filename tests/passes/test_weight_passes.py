"""Phases, absorption, grouping, quantization and packing: results before and after, and reports."""

from collections.abc import Callable, Sequence

import pytest
import torch
from small_models import gqa_moe, mla_moe, nmse, run_trace

from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.verify import verify
from ktgraph.pass_api import CompileOptions, Numerics, Pass, PassContext, exact
from ktgraph.pass_options import PipelineError
from ktgraph.passes.mla_absorb import MlaAbsorb
from ktgraph.passes.moe_group import MoeGroup
from ktgraph.passes.pack_weights import PackWeights
from ktgraph.passes.quantize import NothingQuantizedWarning, Quantize
from ktgraph.passes.specialize_phases import SpecializePhases
from ktgraph.weights.encodings import Tile, to_float
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.policy import PolicyError
from ktgraph.weights.sources import RandomSource

MODELS = [mla_moe, gqa_moe]


def apply(module: Module, *passes: Pass, context: PassContext | None = None) -> PassContext:
    """Run passes and verify after each; returns the context with what they reported."""
    context = context or PassContext()
    for step in passes:
        step.run(module, context)
        verify(module)
        assert str(parse_module(str(module))) == str(module)
    return context


def phased(module: Module, *, lossless: bool = False) -> torch.Tensor:
    return run_trace(module, prefill="prefill", decode="decode", lossless=lossless)


def names(module: Module, function: str) -> list[str]:
    return [op.name for op in module.functions[function].walk()]


@pytest.mark.parametrize("make", MODELS)
def test_each_pass_keeps_the_results(make: Callable[[], Module]) -> None:
    module = make()
    want = run_trace(module)
    for step in (SpecializePhases(), MlaAbsorb(), MoeGroup(), PackWeights()):
        apply(module, step)
        found = phased(module)
        assert nmse(found, want) <= step.numerics.tolerance
        want = found
    assert not any(op.name == "moe.experts" for op in module.walk())


def test_phases_share_weights_and_nothing_else() -> None:
    module = mla_moe()
    before = set(module.weights)
    apply(module, SpecializePhases(), context=PassContext(options=CompileOptions(max_tokens=64)))
    assert set(module.weights) == before
    assert {f.name: str(f.attrs["max_q"]) for f in module.functions.values()} == {
        "prefill": "64",
        "decode": "1",
    }
    prefill, decode = module.functions.values()
    assert not {id(v) for v in prefill.values()} & {id(v) for v in decode.values()}
    with pytest.raises(PipelineError, match="phases is empty"):
        apply(mla_moe(), SpecializePhases(phases=()))


def test_absorption_is_chosen_per_phase_and_noted_with_both_costs() -> None:
    module = mla_moe()
    context = apply(module, SpecializePhases(), MlaAbsorb())
    assert "mla.attend_expanded" in names(module, "prefill")
    assert "mla.attend" not in names(module, "prefill")
    assert names(module, "decode").count("mla.attend") == 2
    assert names(module, "decode").count("nn.batched_linear") == 4
    decode = next(n for n in context.notes if n.startswith("@decode"))
    assert "absorbed; per layer absorbed" in decode
    assert decode.count("MFLOP") == 2


def test_the_bisect_limit_counts_rewrites() -> None:
    module = mla_moe()
    apply(module, SpecializePhases(), MlaAbsorb(form="absorbed"), context=PassContext(limit=3))
    kinds = [op.name for op in module.walk()]
    assert (kinds.count("mla.attend"), kinds.count("mla.attend_expanded")) == (3, 1)


def test_experts_with_computed_weights_are_refused() -> None:
    module = parse_module(
        "ktgraph.ir 1\nmodule @m\ndim D = 48, E = 6, F = 20, K = 2\nsym T in 1..64\n\n"
        "func @main(%x: f32[T, D], %i: i32[T, K], %w: f32[T, K], %gu: f32[E, 2*F, D],"
        " %d: f32[E, D, F]) -> (f32[T, D]) {\n"
        "  %y = moe.experts %x, %i, %w, %gu, %d : f32[T, D]\n  return %y\n}\n"
    )
    context = apply(module, MoeGroup())
    assert names(module, "main") == ["moe.experts"]
    assert "computed, not stored" in context.events[0].reason


# -- quantize -------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    ("policy", "bound"), [("int8", 0.01), ("int4(group=32)", 0.4), ("o_proj=int4,*=int8", 0.1)]
)
def test_quantized_results_are_near_and_their_structure_is_exact(
    make: Callable[[], Module], policy: str, bound: float
) -> None:
    module = make()
    want = run_trace(module)
    apply(module, SpecializePhases(), MoeGroup(), Quantize(policy), PackWeights())
    assert 0 < nmse(phased(module), want) < bound
    assert nmse(phased(module, lossless=True), want) < 1e-28


def test_what_is_packed_is_what_the_interpreter_computes_with() -> None:
    module = mla_moe()
    apply(module, MoeGroup(), Quantize("experts=int4(group=64),*=int8"), PackWeights())
    values = WeightEvaluator(module, RandomSource(module))
    packed = [w for w in module.weights.values() if Tile.of(w.type.encoding)]
    assert len(packed) == 12
    for weight in packed:
        members: Sequence[int | None] = (
            range(weight.lo, weight.hi + 1) if weight.is_family else [None]
        )
        for index in members:
            ref, encoding = weight.ref(index), weight.type.encoding
            assert encoding is not None
            back = to_float(values.stored(ref, index), values.shape(ref), encoding)
            assert torch.equal(back, values.tensor(ref, index))


def test_without_a_policy_nothing_changes() -> None:
    module = mla_moe()
    context = apply(module, Quantize())
    assert str(module) == str(mla_moe())
    assert Quantize().numerics_for(module) == exact()
    assert (context.notes, context.artifacts) == ([], {})


def test_numerics_follow_what_was_done() -> None:
    module = mla_moe()
    apply(module, Quantize(), context=PassContext(options=CompileOptions(quantize="int8")))
    assert Quantize().numerics_for(module) == Numerics("requant", 1.0)
    assert module.weights["layers[].o_proj.q"].type.encoding is not None


STORED = """ktgraph.ir 1
module @m
sym T in 1..8
weight @w : f32[32, 32]<int8> from "w"
weight @u : f32[32, 32] from "u"

func @main(%x: f32[T, 32]) -> (f32[T, 32]) {
  %y = nn.linear %x, @w : f32[T, 32]
  return %y
}
"""


def test_a_policy_that_changes_nothing_of_a_quantized_checkpoint_is_told(
    recwarn: pytest.WarningsRecorder,
) -> None:
    context = PassContext(options=CompileOptions(quantize="int8"))
    with pytest.warns(NothingQuantizedWarning, match="'int8' changes no weight: .* as int8,"):
        apply(parse_module(STORED), Quantize(), context=context)
    for policy, text in [
        ("int4p(group=32)", STORED),
        ("*=keep", STORED),
        ("int8", STORED.replace("%x, @w", "%x, @u")),
    ]:
        apply(parse_module(text), Quantize(policy))
    assert not [w for w in recwarn if w.category is NothingQuantizedWarning]


def test_exact_compilation_refuses() -> None:
    options = CompileOptions(exact=True, quantize="int8")
    with pytest.raises(PolicyError, match="exact=True refuses lossy steps"):
        apply(mla_moe(), Quantize(), context=PassContext(options=options))


def test_the_report_measures_each_layer() -> None:
    module = mla_moe()
    context = PassContext(source=RandomSource(module))
    apply(module, Quantize("int4(group=32)"), context=context)
    table = context.artifacts["quantize.txt"].splitlines()
    row = next(line.split() for line in table if line.startswith("@layers[1].o_proj"))
    assert row[1] == "int4(group=32)"
    assert float(row[3]) < float(row[2]) / 6
    assert 1e-3 < float(row[4]) < 2e-2  # weight NMSE
    assert 1e-3 < float(row[5]) < 2e-2  # output NMSE
    assert "@lm_head: int8, the output head gets int8 under int4" in context.notes
    assert any(n.startswith("policy int4(group=32): 14 matrices or stacks") for n in context.notes)
    assert any(n.startswith("largest output NMSE") for n in context.notes)


@pytest.mark.parametrize("measure", [True, False])
def test_without_weights_or_when_told_so_nothing_is_measured(measure: bool) -> None:
    source = None if measure else RandomSource(mla_moe())
    context = PassContext(source=source)
    apply(mla_moe(), Quantize("int8", measure=measure), context=context)
    row = next(x for x in context.artifacts["quantize.txt"].splitlines() if "@lm_head" in x)
    assert row.split()[-2:] == ["-", "-"]


@pytest.mark.parametrize(("budget", "encoding"), [("0.05", "int4p(group=128)"), ("1e-3", "int8")])
def test_a_budget_takes_the_cheapest_encoding_inside(budget: str, encoding: str) -> None:
    module = mla_moe()
    apply(module, Quantize(f"budget={budget}"), context=PassContext(source=RandomSource(module)))
    assert str(module.weights["lm_head.q"].type.encoding) == encoding


def test_a_budget_that_nothing_meets_keeps_the_weight() -> None:
    module = mla_moe()
    context = PassContext(source=RandomSource(module))
    apply(module, Quantize("budget=1e-9"), context=context)
    assert not any(name.endswith(".q") for name in module.weights)
    assert "the budget is 1e-09" in context.events[0].reason
    with pytest.raises(PolicyError, match="needs the weights"):
        apply(mla_moe(), Quantize("budget=0.1"))


def test_the_limit_stops_quantization() -> None:
    module = mla_moe()
    apply(module, Quantize("int8"), context=PassContext(limit=2))
    assert sum(name.endswith(".q") for name in module.weights) == 2


# -- pack-weights ---------------------------------------------------------------------------------
def test_a_weight_read_in_both_forms_is_noted() -> None:
    module = gqa_moe()
    context = apply(module, PackWeights())
    assert context.notes == [
        "@embed_tokens is kept packed and as it was (0.005856 MB): nn.embedding reads it"
    ]
    module = gqa_moe()
    context = apply(module, Quantize("int8"), PackWeights())
    assert any(n.startswith("@embed_tokens is kept packed and as it was") for n in context.notes)


def test_tables_norms_and_routers_stay_dense() -> None:
    module = mla_moe()
    apply(module, MoeGroup(), PackWeights())
    dense = {"nn.embedding", "nn.rms_norm", "nn.rope", "moe.route"}
    for op in (o for o in module.walk() if o.name in dense):
        assert all(module.weight_of(ref).recipe is None for ref in op.weights)
    route = next(o for o in module.walk() if o.name == "moe.grouped_mlp")
    encodings = [str(module.weight_of(ref).type.encoding) for ref in route.weights]
    assert encodings == ["tile.f32(gate_up=yes)", "tile.f32"]


def test_a_form_without_tiles_is_refused() -> None:
    module = parse_module(
        "ktgraph.ir 1\nmodule @m\ndim D = 48\nsym T in 1..64\n"
        'weight @w : f64[D, D] from "w"\n\n'
        "func @main(%x: f64[T, D]) -> (f64[T, D]) {\n"
        "  %y = nn.linear %x, @w : f64[T, D]\n  return %y\n}\n"
    )
    context = apply(module, PackWeights())
    assert "no tile holds" in context.events[0].reason
