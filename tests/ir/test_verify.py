"""The verifier names the op, the cause and a hint."""

import pytest

from ktgraph.ir import parse_module
from ktgraph.ir.verify import VerifyError, verify

TEXT = """ktgraph.ir 1
module @m home cpu
dim D = 32, F = 24
sym C in 1..64
sym T in 1..8
weight @norm : f32[D] from "norm"
weight @layers[i in 0..3].w : f32[D, D] from "layers.{i}.w"

func @main(%x: f32[T, D], %batch: batch, %kv: kv(4 x f32[C, D])) -> (f32[T, D], kv(4 x f32[C, D])) {
  %h = nn.rms_norm %x, @norm {eps = 1e-06} : f32[T, D]
  %y, %kv.n = repeat i in 0..3 (%a = %h, %kv.i = %kv) {
    %b = nn.linear %a, @layers[i].w : f32[T, D]
    yield %b, %kv.i
  } : f32[T, D], kv(4 x f32[C, D])
  return %y, %kv.n
}
"""


def test_the_module_is_valid():
    verify(parse_module(TEXT))


@pytest.mark.parametrize(
    ("old", "new", "cause", "hint"),
    [
        (": f32[T, D]\n  %y", ": f32[T, F]\n  %y", "the operands give f32[T, D]", "signature"),
        ("repeat i in 0..3", "repeat i in 0..4", "runs over 0..4, the family over 0..3", ""),
        ("@layers[i].w :", "@layers[j].w :", "index j is not the index", ""),
        ("f32[D] from", "f32[32] from", "the literal 32 in f32[32] equals dim D", "write D"),
        ("f32[D] from", "f32[Z] from", "Z in f32[Z] is no dim or sym", "declare"),
        ("nn.rms_norm %x", "nn.rms_nrm %x", "unknown op 'nn.rms_nrm'; did you mean", "register"),
        ("{eps = 1e-06}", "", "attribute eps (float) is missing", "signature"),
        ("{eps = 1e-06}", "{eps = 1e-06, late_cast = false}", "spell out a default", ""),
        (
            "f32[D] from",
            "f32[D]@cuda:0 from",
            "@norm is on cuda:0, the op runs on cpu",
            "insert-copies",
        ),
        ("yield %b, %kv.i", "yield %b, %kv", "from outside its block", "carry states"),
        ("return %y, %kv.n", "return %y, %kv", "after an append consumed it", "use the state"),
        (' from "norm"', "", "neither a source nor a recipe", "from"),
        (' from "norm"', " = concat(@nrm)", "@nrm is not declared", "did you mean @norm?"),
        (' from "norm"', " = concat(@norm)", "depends on the weight itself", ""),
    ],
)
def test_faults(old: str, new: str, cause: str, hint: str):
    assert old in TEXT
    with pytest.raises(VerifyError) as caught:
        verify(parse_module(TEXT.replace(old, new, 1)))
    assert cause in str(caught.value)
    assert hint in str(caught.value)
