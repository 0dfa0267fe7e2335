"""plan-memory: live values never share bytes, the text holds the plan, results stay the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from lowered_models import MODELS, NATIVE, OPTIONS, lower

from ktgraph.ir.graph import Function, Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.types import TensorType
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.arena import (
    ALIGN,
    Arena,
    PlanError,
    phase_sizes,
    plan_arena,
    read_arena,
)
from ktgraph.runtime.flat import Layouts, flatten

UNPLANNED = NATIVE.removesuffix(",plan-memory,lower")


def planned(name: str, pipeline: str = UNPLANNED) -> Module:
    module = MODELS[name]()
    lower(module, f"{pipeline},plan-memory")
    return module


def live_storages(module: Module, func: Function, arena: Arena) -> list[set[str]]:
    """Storages that hold something needed, while each op runs; found apart from the planner."""
    flat = flatten(module, func)
    views = Layouts(flat)

    def storage(name: str) -> str:
        root = views.views[name].root.name
        return arena.owner.get(root, root)

    born: dict[str, int] = {a.name: -1 for a in flat.args if isinstance(a.type, TensorType)}
    used: dict[str, int] = {r.name: len(flat.ops) for r in flat.returns}
    for position, step in enumerate(flat.ops):
        for slot in step.results:
            born.setdefault(slot.name, position)
        for slot in step.slots:
            used[slot.name] = max(used.get(slot.name, 0), position)
    tensors = [n for n in born if n in views.views]
    return [
        {storage(n) for n in tensors if born[n] <= at <= used.get(n, born[n])}
        for at in range(len(flat.ops))
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pipeline", ["specialize-phases", UNPLANNED])
def test_live_values_never_share_bytes(name: str, pipeline: str) -> None:
    module = planned(name, pipeline)
    for func in module.functions.values():
        arena = plan_arena(module, func, phase_sizes(func, OPTIONS))
        assert all(p.offset % ALIGN == 0 for p in arena.places.values())
        assert max(p.end for p in arena.places.values()) == arena.nbytes
        for live in live_storages(module, func, arena):
            places = sorted((arena.places[n] for n in live), key=lambda p: p.offset)
            for one, other in pairwise(places):
                assert one.end <= other.offset, (one, other)


@pytest.mark.parametrize("name", MODELS)
def test_values_fit_their_places(name: str) -> None:
    module = planned(name)
    for func in module.functions.values():
        arena = read_arena(func)
        flat = flatten(module, func)
        for slot in [*flat.args, *(r for s in flat.ops for r in s.results)]:
            root = arena.owner.get(slot.name, slot.name)
            if isinstance(slot.type, TensorType) and root in arena.places:
                count = 4
                for dim in slot.type.dims:
                    count *= dim.at(arena.sizes.bindings(module))
                assert count <= arena.places[root].nbytes


@pytest.mark.parametrize("name", MODELS)
def test_attributes_hold_the_plan(name: str) -> None:
    """Text written and read again gives the same arena, iterations of repeats included."""
    module = planned(name)
    again = parse_module(str(module))
    assert str(again) == str(module)
    for func in again.functions.values():
        want = plan_arena(module, module.functions[func.name], phase_sizes(func, OPTIONS))
        got = read_arena(func)
        assert (got.sizes, got.nbytes, got.owner) == (want.sizes, want.nbytes, want.owner)
        places = {n: (p.offset, p.nbytes) for n, p in want.places.items()}
        assert {n: (p.offset, p.nbytes) for n, p in got.places.items()} == places


def deep(layers: int) -> Module:
    return parse_module(f"""ktgraph.ir 1
module @deep
dim D = 17
sym T in 1..4096
weight @layers[i in 0..{layers - 1}].norm : f32[D] from "norm.{{i}}"

func @main(%x: f32[T, D]) -> (f32[T, D]) {{
  %z = repeat i in 0..{layers - 1} (%y = %x) {{
    %h = nn.rms_norm %y, @layers[i].norm {{eps = 1e-06}} : f32[T, D]
    %w = tensor.mul %h, %y : f32[T, D]
    %s = tensor.add3 %y, %h, %w : f32[T, D]
    yield %s
  }} : f32[T, D]
  return %z
}}
""")


def test_layers_share_their_buffers() -> None:
    sizes = []
    for layers in (3, 40):
        module = deep(layers)
        context = lower(module, "plan-memory", CompileOptions(max_tokens=32))
        attrs = module.functions["main"].attrs
        sizes.append(attrs["arena_bytes"])
        assert len(attrs["buffers"]) <= 8  # type: ignore[arg-type]
        assert "arena" in context.artifacts["memory.txt"]
    assert sizes[0] == sizes[1]


def test_arguments_are_never_written_over() -> None:
    module = deep(2)
    lower(module, "plan-memory")
    arena = read_arena(module.functions["main"])
    assert "x" not in arena.owner.values()


def test_phases_are_sized_by_their_bounds() -> None:
    module = planned("mla")
    prefill, decode = (read_arena(module.functions[n]).sizes for n in ("prefill", "decode"))
    assert (prefill.tokens, decode.tokens, decode.rows) == (16, 4, 4)


def test_reading_without_the_pass() -> None:
    with pytest.raises(PlanError, match="@main has no arena_bytes: run the pass plan-memory"):
        read_arena(deep(1).functions["main"])
