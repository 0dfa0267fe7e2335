"""WeightEvaluator: recipes on recipes, families, one matrix at a time, and stored bytes."""

from collections.abc import Sequence

import pytest
import torch
from small_models import gqa_moe, mla_moe

from ktgraph.ir.graph import Module, WeightRef
from ktgraph.ir.parser import parse_module
from ktgraph.weights.encodings import parse_encoding, round_trip, to_float
from ktgraph.weights.evaluate import WeightError, WeightEvaluator
from ktgraph.weights.sources import RandomSource

TEXT = """ktgraph.ir 1
module @m
dim D = 40, E = 3, F = 24
weight @e[i in 0..1].gate : f32[E, F, D]<bf16> from "e.{i}.gate"
weight @e[i in 0..1].up : f32[E, F, D]<bf16> from "e.{i}.up"
weight @e[i in 0..1].w13 : f32[E, 2*F, D]<bf16> = concat(@e[i].gate, @e[i].up) {axis = 1}
weight @e[i in 0..1].w13.q : f32[E, 2*F, D]<int4(group=32)> = quantize(@e[i].w13) {encoding = "int4(group=32)"}
weight @e[i in 0..1].w13.q.p : f32[E, 2*F, D]<tile.int4(group=32, gate_up=yes)> = pack(@e[i].w13.q) {encoding = "tile.int4(group=32, gate_up=yes)"}
weight @e[i in 0..1].t : f32[E, D, F]<bf16> = transpose(@e[i].gate)
weight @a : f32[F, D]<bf16> from "a"
weight @b : f32[F, D]<bf16> from "b"
weight @ab : f32[2, F, D]<bf16> = stack(@a, @b)
weight @ab.q : f32[2, F, D]<int8> = quantize(@ab) {encoding = "int8"}
weight @rows : f32[F, D]<bf16> = slice(@e[1].flat) {start = F, size = F}
weight @e[i in 0..1].flat : f32[E*F, D]<bf16> = reshape(@e[i].gate) {shape = [E*F, D]}
"""  # noqa: E501


class Counting(RandomSource):
    """Counts the elements that are read."""

    read = 0

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        found = super().get(name, expert, rows)
        self.read += found.numel()
        return found


def make() -> tuple[Module, Counting]:
    module = parse_module(TEXT)
    return module, Counting(module)


def test_recipes_of_recipes() -> None:
    module, source = make()
    values = WeightEvaluator(module, source, torch.float64)
    gate, up = source.get("e.1.gate").double(), source.get("e.1.up").double()
    joined = torch.cat([gate, up], dim=1)
    assert torch.equal(values.tensor(module.weights["e[].w13"].ref(1), 1), joined)
    rounded = round_trip(joined, parse_encoding("int4"))
    assert torch.equal(values.tensor(module.weights["e[].w13.q.p"].ref(1), 1), rounded)
    assert torch.equal(values.tensor(WeightRef("rows")), gate[1])


def test_lossless_leaves_rounding_out() -> None:
    module, source = make()
    values = WeightEvaluator(module, source, torch.float64, lossless=True)
    packed, joined = (module.weights[f"e[].{n}"].ref(0) for n in ("w13.q.p", "w13"))
    assert torch.equal(values.tensor(packed, 0), values.tensor(joined, 0))


@pytest.mark.parametrize("name", ["w13", "w13.q", "w13.q.p", "t", "gate"])
def test_matrices_are_read_one_expert_at_a_time(name: str) -> None:
    module, source = make()
    values, ref = (
        WeightEvaluator(module, source, torch.float64),
        module.weights[f"e[].{name}"].ref(0),
    )
    whole = values.tensor(ref, 0)
    source.read = 0
    seen: list[int] = []
    for number, matrix in enumerate(values.matrices(ref, 0)):
        assert torch.equal(matrix, whole[number])
        seen.append(source.read)
    assert seen == [seen[0], 2 * seen[0], 3 * seen[0]]  # never a whole stack


def test_a_stack_of_separate_experts_is_read_one_by_one() -> None:
    module, source = make()
    values, ref = WeightEvaluator(module, source, torch.float32), WeightRef("ab.q")
    next(iter(values.matrices(ref)))
    assert source.read == 24 * 40
    assert len(list(values.sample(ref, most=1))) == 1


@pytest.mark.parametrize("name", ["e[].w13.q.p", "e[].w13.q", "ab.q", "e[].w13"])
def test_stored_arrays_hold_what_the_interpreter_computes_with(name: str) -> None:
    module, source = make()
    values, weight = WeightEvaluator(module, source), module.weights[name]
    index = 1 if weight.is_family else None
    ref = weight.ref(index)
    assert weight.type.encoding is not None
    stored = values.stored(ref, index)
    back = to_float(stored, values.shape(ref), weight.type.encoding)
    assert torch.equal(back, values.tensor(ref, index))


def test_the_cache_is_bounded() -> None:
    module, source = make()
    values = WeightEvaluator(module, source, torch.float32, cache_nbytes=24 * 40 * 4)
    for name in ("a", "b", "a"):
        values.tensor(WeightRef(name))
    assert source.read == 3 * 24 * 40
    values.tensor(WeightRef("a"))
    assert source.read == 3 * 24 * 40


def test_values_come_in_the_compute_dtype() -> None:
    module, source = make()
    assert WeightEvaluator(module, source).tensor(WeightRef("a")).dtype == torch.float32
    assert (
        WeightEvaluator(module, source, torch.float64).tensor(WeightRef("a")).dtype == torch.float64
    )


def test_bindings_rebind() -> None:
    module, _ = make()
    small = module.rebind(D=16, F=4)
    values = WeightEvaluator(small, RandomSource(small), torch.float64)
    assert list(values.tensor(module.weights["e[].w13"].ref(0), 0).shape) == [3, 8, 16]


def test_a_source_of_another_shape_is_refused() -> None:
    module, source = make()
    with pytest.raises(WeightError, match=r"@a is f32\[F, D\]<bf16> = \[24, 41\], its source"):
        WeightEvaluator(module.rebind(D=41), source).tensor(WeightRef("a"))


def test_a_family_needs_a_member() -> None:
    module, source = make()
    with pytest.raises(WeightError, match="say which member"):
        WeightEvaluator(module, source).tensor(module.weights["e[].gate"].ref())


@pytest.mark.parametrize("module", [mla_moe(), gqa_moe()], ids=lambda m: m.name)
def test_every_weight_of_the_small_models_has_its_declared_shape(module: Module) -> None:
    values = WeightEvaluator(module, RandomSource(module))
    for weight in module.weights.values():
        members: Sequence[int | None] = (
            range(weight.lo, weight.hi + 1) if weight.is_family else [None]
        )
        for index in members:
            assert list(values.tensor(weight.ref(index), index).shape) == values.shape(
                weight.ref(index)
            )
