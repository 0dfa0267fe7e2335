"""Validation: miniatures, one trace for both forms, errors found, kernels against references."""

import re
from dataclasses import replace

import pytest
import torch
from small_models import gqa_moe, mla_moe

from ktgraph.drive import DriveError, drive, make_trace, phase, vocabulary
from ktgraph.ir.graph import Module, Witness
from ktgraph.ir.literals import literals
from ktgraph.ir.parser import parse_module
from ktgraph.miniature import MiniatureError, choose_sizes, shrink
from ktgraph.pass_api import exact, pass_class, reorder, requant
from ktgraph.pass_manager import PassManager
from ktgraph.validate import Validator, nmse, worst
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

TRACED = """ktgraph.ir 1
module @traced
dim A = 64, D = 512, G = 2, H = 8, J = 32, VOC = 4096
sym C in 1..1048576
sym b in 1..64
sym s in 1..8192
sym t in 1..8192
weight @embed : f32[VOC, D] from "embed.weight"
weight @inv_freq : f32[J] from "rotary.inv_freq"
weight @q : f32[A*H, D] from "q.weight"
weight @k : f32[A*G, D] from "k.weight"
weight @v : f32[A*G, D] from "v.weight"
weight @o : f32[D, A*H] from "o.weight"

func @main(%ids: i64[b, s], %batch: batch, %kv: kv(1 x f32[C, G, A], 1 x f32[C, G, A])) -> (f32[b, s, VOC], kv(1 x f32[C, G, A], 1 x f32[C, G, A])) {
  %x = nn.embedding %ids, @embed : f32[b, s, D]
  %q = nn.linear %x, @q : f32[b, s, A*H]
  %q.1 = tensor.reshape %q {shape = [b, s, H, A]} : f32[b, s, H, A]
  %k = nn.linear %x, @k : f32[b, s, A*G]
  %k.1 = tensor.reshape %k {shape = [b, s, G, A]} : f32[b, s, G, A]
  %v = nn.linear %x, @v : f32[b, s, A*G]
  %v.1 = tensor.reshape %v {shape = [b, s, G, A]} : f32[b, s, G, A]
  %q.r, %k.r = nn.rope %q.1, %k.1, @inv_freq, %batch : f32[b, s, H, A], f32[b, s, G, A]
  %kv.1 = kv.append %kv, %k.r, %v.1, %batch {layer = 0} : kv(1 x f32[C, G, A], 1 x f32[C, G, A])
  %k.rows, %v.rows = kv.read %kv.1, %batch {layer = 0, rows = [b, t]} : f32[b, t, G, A], f32[b, t, G, A]
  %a = attn.sdpa_rows %q.r, %k.rows, %v.rows, %batch {scale = 0.125} : f32[b, s, H, A]
  %a.1 = tensor.reshape %a {shape = [b, s, A*H]} : f32[b, s, A*H]
  %y = nn.linear %a.1, @o : f32[b, s, D]
  %logits = nn.linear %y, @embed : f32[b, s, VOC]
  return %logits, %kv.1
}
"""  # noqa: E501

PLAIN = """ktgraph.ir 1
module @plain
sym b in 1..64
weight @w : f32[12, 20] from "w"

func @main(%x: f32[b, 20]) -> (f32[b, 12]) {
  %y = nn.linear %x, @w : f32[b, 12]
  %z = nn.act %y : f32[b, 12]
  return %z
}
"""


def traced() -> Module:
    return parse_module(TRACED)


def flat(module: Module) -> Module:
    copy = module.clone()
    PassManager().run(copy, "canonicalize,flatten-tokens")
    return copy


def test_sizes_are_small_distinct_and_keep_relations():
    for module in (mla_moe(), gqa_moe(), traced()):
        sizes = choose_sizes([module])
        assert len(set(sizes.values())) == len(sizes)
        assert max(sizes.values()) <= 64
        assert sizes.get("P", sizes.get("A")) == 2 * sizes["J"]
        assert sizes["H"] % sizes.get("G", 1) == 0
    grouped = mla_moe()
    grouped.dims |= {"NG": 3, "KG": 2}
    sizes = choose_sizes([grouped])
    assert sizes["E"] % sizes["NG"] == 0
    assert sizes["K"] <= sizes["KG"] * sizes["E"] // sizes["NG"]
    assert sizes["KG"] < sizes["NG"]


def test_sizes_avoid_literals_and_respect_blocks():
    text = TRACED.replace("weight @o", 'weight @extra : f32[36, 14] from "e"\nweight @o')
    sizes = choose_sizes([parse_module(text)])
    assert not {36, 14} & set(sizes.values())
    blocks = TRACED.replace("weight @q : f32[A*H, D]", "weight @q : f32[A*H, D]<int4(group=64)>")
    assert choose_sizes([parse_module(blocks)])["D"] == 64


def test_partial_rotary_keeps_unrotated_channels():
    module = parse_module(TRACED.replace("J = 32", "J = 16"))
    sizes = choose_sizes([module])
    assert sizes["A"] > 2 * sizes["J"]


def test_a_witness_gives_the_sizes_of_a_module_without_names():
    module, small = (_spell_out(m, "D", "VOC") for m in (traced(), traced().rebind(D=30, VOC=40)))
    module.witnesses.append(Witness(dict(small.dims), literals(small)))
    found = shrink(module)
    assert found.how == "witness 0"
    assert vocabulary(found.modules[0]) == 40


def _spell_out(module: Module, *names: str) -> Module:
    """The same module with numbers in its types for these dims, which stay declared."""
    head, types = re.split(r"(?<=\n)(?=sym )", str(module), maxsplit=1)
    for name in names:
        types = re.sub(rf"\b{name}\b", str(module.dims[name]), types)
    return parse_module(head + types)


def test_too_large_to_run_says_so_and_is_no_failure():
    module = parse_module(PLAIN.replace("12", "60000").replace("20", "9000"))
    with pytest.raises(MiniatureError, match="540 million weight elements"):
        shrink(module)
    found = Validator().compare(module, module, exact())
    assert (found.error, found.is_wrong) == (None, False)
    assert found.how.startswith("not run: its own sizes: 540 million")


def test_both_forms_give_the_same_logits_over_a_trace():
    """Sequence by sequence with b = 1, and all sequences of a step on one ragged axis."""
    small = shrink(traced()).modules[0]
    source = RandomSource(small)
    trace = make_trace(vocabulary(small))
    one, other = (
        drive(m, WeightEvaluator(m, source, torch.float64), trace) for m in (small, flat(small))
    )
    assert [tuple(x.shape) for x in one] == [(17, 61), (6, 61), (3, 61), (2, 61)]
    error, _ = worst(other, one)
    assert error < 1e-28


def test_a_chunk_depends_on_what_came_before():
    """Else the trace would not test the cache."""
    small = shrink(traced()).modules[0]
    weights = WeightEvaluator(small, RandomSource(small), torch.float64)
    trace = make_trace(vocabulary(small))
    changed = [{q: [*t[:-1], (t[-1] + 1) % 61] for q, t in trace[0].items()}, *trace[1:]]
    one, other = drive(small, weights, trace), drive(small, weights, changed)
    assert all(nmse(a, b) > 1e-6 for a, b in zip(one, other, strict=True))


def test_phases_are_chosen_by_their_bound():
    module = gqa_moe()
    pass_class("specialize-phases")().run(module, _context())
    assert phase(module, 1).attrs["phase"] == "decode"
    assert phase(module, 2).attrs["phase"] == "prefill"
    with pytest.raises(DriveError, match="no function for 100000 new tokens"):
        phase(module, 100_000)
    found = Validator().compare(gqa_moe(), module, exact())
    assert found.error == 0.0


def _context():
    from ktgraph.pass_api import PassContext

    return PassContext()


def test_a_module_of_plain_tensors_runs_at_its_own_sizes():
    module = parse_module(PLAIN)
    assert Validator().compare(module, module.clone(), exact()).error == 0.0
    other = parse_module(PLAIN.replace("nn.act %y", 'nn.act %y {act = "relu"}'))
    assert Validator().compare(module, other, exact()).is_wrong


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale = 0.25", "scale = 0.24"),
        (", renorm = true", ""),
        ("{layer = i} : kv", "{layer = 1-i} : kv"),
        ("nn.rope %q.2, %k.2, @rotary.inv_freq, %batch", "nn.rope %q.2, %k.2, @rotary.inv_freq, "
         '%batch {style = "interleaved"}'),
        ("tensor.add %x.1, %routed", "tensor.add %x, %routed"),
    ],
)  # fmt: skip
def test_wrong_rewrites_are_found(old: str, new: str):
    text = str(gqa_moe())
    assert old in text
    wrong = parse_module(text.replace(old, new))
    found = Validator().compare(gqa_moe(), wrong, reorder())
    assert found.is_wrong, found


def test_exact_means_to_the_bit_and_reorder_does_not():
    text = str(mla_moe())
    turned = parse_module(
        text.replace("tensor.add %l1.routed, %l1.shared", "tensor.add %l1.x, %l1.shared").replace(
            "tensor.add %l1.x, %l1.mlp", "tensor.add %l1.routed, %l1.mlp"
        )
    )
    found = Validator().compare(mla_moe(), turned, exact())
    assert found.is_wrong
    assert found.error is not None
    assert 0 < found.error < 1e-28
    assert "allowed: none (exact)" in found.fault
    assert not Validator().compare(mla_moe(), turned, reorder()).is_wrong


QUANTIZED = (
    "weight @layers[i in 0..1].o_proj.q : f32[D, A*H]<int8> = quantize(@layers[i].o_proj) "
    '{encoding = "int8"}'
)


def quantized() -> Module:
    text = str(gqa_moe()).replace(
        "nn.linear %o.1, @layers[i].o_proj", "nn.linear %o.1, @layers[i].o_proj.q"
    )
    return parse_module(text.replace("weight @norm", QUANTIZED + "\nweight @norm"))


def test_a_lossy_pass_is_bound_twice():
    right = Validator().compare(gqa_moe(), quantized(), requant(1.0))
    assert right.error is not None
    assert 1e-9 < right.error < 1.0
    assert not right.is_wrong
    assert Validator().compare(gqa_moe(), quantized(), requant(1e-12)).is_wrong
    text = str(quantized()).replace("scale = 0.25", "scale = 0.24")
    structure = Validator().compare(gqa_moe(), parse_module(text), requant(1.0))
    assert structure.fault.startswith("with lossy recipes left out, results differ")


def test_an_output_that_does_not_run_is_wrong_and_an_input_is_not_its_fault():
    bad = parse_module(str(gqa_moe()).replace('"model.norm.weight"', '"model.nrm.weight"'))
    found = Validator().compare(gqa_moe(), bad, exact())
    assert "the output does not run" in found.fault
    assert "did you mean 'model.norm.weight'" in found.fault
    text = str(gqa_moe()).replace("transposed", "transposed")
    crash = re.sub(r"(moe.experts [^:]*?)( :)", r"\1 {transposed = true}\2", text)
    found = Validator().compare(parse_module(crash), gqa_moe(), exact())
    assert not found.is_wrong
    assert found.how.startswith("not run: the pass's input fails")


def test_values_that_are_not_finite_are_wrong():
    assert nmse(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert nmse(torch.ones(2), torch.ones(3)) == float("inf")
    assert nmse(torch.zeros(2), torch.zeros(2)) == 0.0


def test_validation_objects_are_plain_values():
    found = Validator().compare(gqa_moe(), gqa_moe(), exact())
    assert replace(found, error=1.0).how == "named dims"
