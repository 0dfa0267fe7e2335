"""Recipes: the shape each gives is the shape its type rule says, and what its values are."""

from typing import Any

import pytest
import torch

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, attr
from ktgraph.ir.interp import evaluate_attr
from ktgraph.ir.parser import parse_module, parse_type
from ktgraph.ir.types import TensorType
from ktgraph.weights.recipes import RecipeError, all_recipes, recipe_def, recipe_type

SIZES = {"H": 3, "N": 4, "V": 2, "R": 5, "D": 8, "F": 6, "E": 7}
D, E, H, N, R, V = map(Dim.of, "DEHNRV")

# kind, argument types, attributes, result type
CASES: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("identity", ["f32[D, F]<int8>"], {}, "f32[D, F]<int8>"),
    ("cast", ["f32[D, F]<bf16>"], {"dtype": "bf16"}, "bf16[D, F]"),
    ("concat", ["f32[D, F]<bf16>", "f32[R, F]<bf16>"], {"axis": 0}, "f32[D+R, F]<bf16>"),
    ("concat", ["f32[D, F]<int8>", "f32[R, F]<int8>"], {}, "f32[D+R, F]<int8>"),
    ("concat", ["f32[D, F]<bf16>", "f32[R, F]"], {}, "f32[D+R, F]"),
    ("concat", ["f32[E, F, D]", "f32[E, R, D]"], {"axis": 1}, "f32[E, F+R, D]"),
    ("concat", ["f32[D, F]<int8>", "f32[D, R]<int8>"], {"axis": -1}, "f32[D, F+R]"),
    ("slice", ["f32[D+R, F]<int8>"], {"start": D, "size": R}, "f32[R, F]<int8>"),
    ("slice", ["f32[E, D]"], {"axis": 1, "start": 2, "size": 3}, "f32[E, 3]"),
    ("stack", ["f32[D, F]<bf16>"] * 3, {}, "f32[3, D, F]<bf16>"),
    ("transpose", ["f32[E, D, F]<bf16>"], {}, "f32[E, F, D]<bf16>"),
    ("transpose", ["f32[D, F]<int8>"], {}, "f32[F, D]"),
    ("transpose", ["f32[E, D, F]<int8>"], {"axes": [1, 0, 2]}, "f32[D, E, F]<int8>"),
    ("reshape", ["f32[H*N, D]<int8>"], {"shape": [H, N, D]}, "f32[H, N, D]<int8>"),
    ("reshape", ["f32[H, N]"], {"shape": [H * N]}, "f32[H*N]"),
    ("deinterleave", ["f32[E, 2*F, D]<bf16>"], {}, "f32[E, 2*F, D]<bf16>"),
    ("deinterleave", ["f32[E, 2*F]"], {"axis": -1}, "f32[E, 2*F]"),
    ("mla_key_half", ["f32[H*(N+V), R]<bf16>"], {"H": H, "N": N, "V": V}, "f32[H, R, N]<bf16>"),
    ("mla_value_half", ["f32[H*(N+V), R]<bf16>"], {"H": H, "N": N, "V": V}, "f32[H, V, R]<bf16>"),
    ("split_pairs", ["f32[H*N, D]<int8>"], {"H": H}, "f32[H*N, D]<int8>"),
    ("split_pairs", ["f32[H*N]<bf16>"], {"H": H}, "f32[H*N]<bf16>"),
    ("mla_join", ["f32[H, R, N]", "f32[H, V, R]<int8>"], {}, "f32[H*(N+V), R]"),
    ("quantize", ["f32[D, F]"], {"encoding": "int4(group=64)"}, "f32[D, F]<int4(group=64)>"),
    ("dequantize", ["bf16[D, F]<fp8>"], {}, "bf16[D, F]"),
    ("pack", ["f32[D, F]<bf16>"], {"encoding": "tile.bf16"}, "f32[D, F]<tile.bf16>"),
    ("pack", ["f32[D, F]<f16>"], {"encoding": "tile.f32"}, "f32[D, F]<tile.f32>"),
    ("expert_slots", [], {"experts": E, "slots": 3, "hot": ["", "6 1"], "row": 1}, "i32[E]"),
    ("resident", ["f32[E, F, D]<int8>", "i32[E]"], {"slots": 4}, "f32[4, F, D]<int8>"),
]  # fmt: skip


def tensor_type(text: str) -> TensorType:
    found = parse_type(text)
    assert isinstance(found, TensorType)
    return found


def attributes(given: dict[str, Any]) -> dict[str, Attr]:
    return {k: attr(v) for k, v in given.items()}


@pytest.mark.parametrize(("kind", "types", "attrs", "result"), CASES)
def test_shapes_are_those_of_the_type_rule(
    kind: str, types: list[str], attrs: dict[str, Any], result: str
) -> None:
    definition, given = recipe_def(kind), [tensor_type(t) for t in types]
    found = definition.type(given, attributes(attrs))
    assert found == tensor_type(result)
    tensors = [torch.randn([d.at(SIZES) for d in t.dims]) for t in given]
    plain = {k: evaluate_attr(v, SIZES) for k, v in attributes(attrs).items()}
    made = definition.apply(tensors, plain)
    assert list(made.shape) == [d.at(SIZES) for d in found.dims]
    if definition.by_entry(plain, found.rank):
        parts = [definition.apply([t[e : e + 1] for t in tensors], plain) for e in range(len(made))]
        assert torch.equal(torch.cat(parts), made)


def test_every_recipe_has_a_case_and_a_docstring() -> None:
    assert {c[0] for c in CASES} == set(all_recipes())
    assert all(r.doc for r in all_recipes().values())
    assert [k for k, r in all_recipes().items() if not r.is_exact] == ["cast", "quantize"]


def test_mla_halves_are_the_rows_of_each_head() -> None:
    kv_b, sizes = torch.randn(3 * 6, 5), {"H": 3, "N": 4, "V": 2}
    q, latent = torch.randn(3, 4), torch.randn(5)
    keys = recipe_def("mla_key_half").apply([kv_b], sizes)
    per_head = (kv_b @ latent).reshape(3, 6)
    scores = torch.einsum("hn,hn->h", q, per_head[:, :4])
    assert torch.allclose(torch.einsum("hrn,hn->hr", keys, q) @ latent, scores, atol=1e-5)
    back = recipe_def("mla_value_half").apply([kv_b], sizes)
    assert torch.allclose(back @ latent, per_head[:, 4:], atol=1e-5)


def test_joined_halves_come_apart_again() -> None:
    key, value = torch.randn(3, 5, 4), torch.randn(3, 2, 5)
    kv_b = recipe_def("mla_join").apply([key, value], {})
    sizes = {"H": 3, "N": 4, "V": 2}
    assert torch.equal(recipe_def("mla_key_half").apply([kv_b], sizes), key)
    assert torch.equal(recipe_def("mla_value_half").apply([kv_b], sizes), value)


def test_split_pairs_keeps_heads_apart() -> None:
    rows = torch.arange(8.0)[:, None]
    found = recipe_def("split_pairs").apply([rows], {"H": 2})
    assert found.flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_slots_are_for_the_listed_experts_and_then_for_the_first_others() -> None:
    slots = recipe_def("expert_slots").apply
    given = {"experts": 5, "slots": 3, "hot": ["1", "4 9 2"], "row": 1}
    table = slots([], given)  # a miniature has no expert 9
    assert table.tolist() == [2, -1, 1, -1, 0]
    assert slots([], {"experts": 3, "slots": 2}).tolist() == [0, 1, -1]
    stack = torch.arange(5.0)[:, None, None].expand(5, 2, 3)
    found = recipe_def("resident").apply([stack, table], {"slots": 3})
    assert found[:, 0, 0].tolist() == [4, 2, 0]


def test_deinterleave_puts_gates_before_ups() -> None:
    rows = torch.arange(6.0)[None, :, None]
    found = recipe_def("deinterleave").apply([rows], {})
    assert found.flatten().tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    ("kind", "types", "attrs", "message"),
    [
        ("concat", ["f32[D, F]", "f32[D, R]"], {}, "differ outside axis 0"),
        ("concat", ["f32[D, F]", "bf16[D, F]"], {}, "differ in dtype or rank"),
        ("concat", ["f32[D, F]"], {"axis": 2}, "axis 2 is outside"),
        ("stack", ["f32[D, F]", "f32[F, D]"], {}, "different shapes"),
        ("slice", ["f32[D, F]"], {"start": 1}, "attribute size is missing"),
        ("reshape", ["f32[D, F]"], {"shape": [D]}, "another number of elements"),
        ("transpose", ["f32[D, F]"], {"axes": [0, 0]}, "no permutation"),
        ("mla_key_half", ["f32[D, R]"], {"H": H, "N": N, "V": V}, "kv_b is"),
        ("pack", ["f32[D, F]"], {"encoding": "tile.bf16"}, "packing is exact"),
        ("pack", ["f32[D, F]<int8>"], {"encoding": "int8"}, "packing is exact"),
        ("pack", ["f32[D, F]<int4(group=64)>"], {"encoding": "tile.int4"}, "groups of 64"),
        ("mla_join", ["f32[H, R, N]", "f32[H, V, N]"], {}, "no value half"),
        ("mla_join", ["f32[H, R, N]"], {}, "a value half"),
        ("split_pairs", ["f32[D, F]"], {}, "attribute H is missing"),
        ("dequantize", ["f32[D, F]<bf16>"], {}, "is not quantized"),
        ("cast", ["f32[D, F]"], {"dtype": "f8"}, "not one of"),
        ("expert_slots", ["f32[D, F]"], {"experts": E, "slots": 2}, "no weight expected"),
        ("resident", ["f32[E, F, D]", "f32[E]"], {"slots": 2}, "a table i32"),
        ("resident", ["f32[D, F, D]", "i32[E]"], {"slots": 2}, "different numbers of experts"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(
    kind: str, types: list[str], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_def(kind).type([tensor_type(t) for t in types], attributes(attrs))


def test_errors_name_the_weight_or_close_recipes() -> None:
    with pytest.raises(RecipeError, match="did you mean concat"):
        recipe_def("conkat")
    module = parse_module(
        'ktgraph.ir 1\nmodule @m\nweight @a : f32[3, 2] from "a"\n'
        'weight @b : f32[6] = stack(@a, @c) {}\nweight @c : f32[2, 3] from "c"\n'
    )
    with pytest.raises(RecipeError, match=r"@b = stack\(…\): .* different shapes"):
        recipe_type(module, module.weights["b"])
