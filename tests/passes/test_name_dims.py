"""name-dims: which polynomial a literal becomes, and what stays a literal."""

import pytest
from small_models import gqa_moe, mla_moe

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, Witness
from ktgraph.ir.literals import literal_lines, literals, map_dims, set_literals
from ktgraph.ir.parser import parse_dim, parse_module
from ktgraph.ir.verify import verify
from ktgraph.pass_api import PassContext
from ktgraph.passes.name_dims import Fit, NameDims

REAL = {"D": 2048, "H": 16, "A": 128, "J": 64, "N": 128, "P": 64, "V": 112, "R": 512, "F": 1408,
        "NS": 2, "K": 6, "E": 64, "I": 10944}  # fmt: skip
OTHER = {"D": 251, "H": 6, "A": 34, "J": 17, "N": 79, "P": 46, "V": 23, "R": 101, "F": 97,
         "NS": 3, "K": 5, "E": 13, "I": 211}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["D", "H*A", "2*F", "NS*F", "2*NS*F", "H*(N+P)", "H*(N+V)", "R+P", "H*(N+P)+R+P", "I", "N-P",
     "E", "K"],
)  # fmt: skip
def test_fit_finds_the_polynomial(text: str) -> None:
    """2048 is D and H*A here: the witness tells which."""
    dim = parse_dim(text)
    assert Fit([REAL, OTHER]).best((dim.at(REAL), dim.at(OTHER))) == [dim]


def test_without_a_telling_witness_the_simplest_is_taken() -> None:
    """A witness in which D = H*A as well cannot tell them apart; fewer factors win."""
    same = {**OTHER, "D": OTHER["H"] * OTHER["A"]}
    assert Fit([REAL, same]).best((2048, same["D"])) == [Dim.of("D")]


def test_equally_simple_fits_are_all_reported() -> None:
    real, other = {"G": 4, "H": 6, "N": 12, "P": 8}, {"G": 10, "H": 15, "N": 9, "P": 6}
    assert set(Fit([real, other]).best((48, 90))) == {parse_dim("H*P"), parse_dim("G*N")}


def test_numbers_that_never_change_stay() -> None:
    fit = Fit([REAL, OTHER])
    assert fit.best((3, 3)) == [Dim.of(3)]
    assert fit.best((1000, 1000)) == [Dim.of(1000)]
    assert fit.best((1001, 12)) == []


def test_a_dim_that_no_witness_varies_is_still_named() -> None:
    assert Fit([{**REAL, "R": 512}, {**OTHER, "R": 512}]).best((512, 512)) == [Dim.of("R")]


def test_names_that_are_always_equal_are_one() -> None:
    fit = Fit([{"A": 64, "V": 64}, {"A": 22, "V": 22}])
    assert fit.aliases == [["A", "V"]]
    assert fit.best((64, 22)) == [Dim.of("A")]


def unnamed(module: Module, bindings: dict[str, int]) -> Module:
    """The module as a frontend traces it at these sizes: numbers in place of dim names."""
    copy = module.rebind(**bindings)
    map_dims(copy, lambda dim, where: dim.subst(dict(copy.dims)))
    return copy


def traced(module: Module) -> Module:
    """The module as imported: literals, and two witnesses."""
    odd = [11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61]
    out = unnamed(module, {})
    for step in (0, 3):
        other = {n: odd[(i + step) % len(odd)] for i, n in enumerate(sorted(module.dims))}
        out.witnesses.append(Witness(other, literals(unnamed(module, other))))
    return out


@pytest.mark.parametrize("named", [mla_moe(), gqa_moe()], ids=lambda m: m.name)
def test_a_traced_module_gets_its_names_back(named: Module) -> None:
    module, context = traced(named), PassContext()
    assert str(module) != str(named)
    NameDims().run(module, context)
    assert str(module) == str(named)
    assert context.notes == []
    verify(module)


def test_literals_that_fit_nothing_are_kept_and_reported() -> None:
    module, context = traced(mla_moe()), PassContext()
    place = literal_lines(module).index(next(x for x in literal_lines(module) if "@norm :" in x))
    for values in (w.literals for w in module.witnesses):
        values[place] = 777
    NameDims().run(module, context)
    assert str(module.weights["norm"].type) == "f32[48]"
    assert "48 (48, 777, 777 in the traces) fits no polynomial" in context.notes[0]
    assert "weight @norm" in context.notes[0]


def test_a_witness_of_another_structure_is_refused() -> None:
    module = traced(mla_moe())
    module.witnesses[0].literals.pop()
    with pytest.raises(ValueError, match="another structure"):
        NameDims().run(module, PassContext())


def test_literals_are_read_and_set_in_print_order() -> None:
    module = parse_module(
        "ktgraph.ir 1\nmodule @m\nsym b in 1..4\n"
        'weight @w[i in 0..7].a : f32[12, 3] from "w.{i}"\n\n'
        "func @main(%x: f32[2*b, 3], %kv: kv(9 x f32[C, 5])) -> (f32[2*b, 12]) {\n"
        "  %y = nn.linear %x, @w[2].a : f32[2*b, 12]\n  return %y\n}\n"
    )
    assert literals(module) == [12, 3, 2, 3, 1, 5, 2, 12]
    set_literals(module, [13, "D", 4, "D", 1, 6, 4, 13])  # type: ignore[list-item]
    assert "%x: f32[4*b, D], %kv: kv(9 x f32[C, 6])" in str(module)
    with pytest.raises(ValueError, match="8 literals, 2 values"):
        set_literals(module, [1, 2])
