"""Ops beside the routed experts: which they are, and that the arena keeps what both use."""

from itertools import pairwise

from lowered_models import MODELS, lower

from ktgraph.ir.graph import Module
from ktgraph.runtime.arena import PhaseSizes, plan_arena
from ktgraph.runtime.flat import Layouts, flatten
from ktgraph.runtime.side_stream import side_steps

SIZES = PhaseSizes(4, 4, 4)


def _module(home: str) -> Module:
    module = MODELS["mla"]()
    lower(module, "specialize-phases,mla-absorb,merge-linears,moe-group,fuse-norms,fuse-rope-kv")
    module.home = home
    return module


def test_nothing_runs_aside_on_the_cpu() -> None:
    module = _module("cpu")
    for func in module.functions.values():
        flat = flatten(module, func)
        assert side_steps(flat, Layouts(flat), "cpu") == []


def test_a_shared_expert_runs_beside_the_routed_ones() -> None:
    module = _module("cuda:0")
    flat = flatten(module, module.functions["decode"])
    sides = side_steps(flat, Layouts(flat), "cuda:0")
    experts = [n for n, s in enumerate(flat.ops) if s.op.name == "moe.grouped_mlp"]
    assert len(sides) == len(experts) > 0
    for side, at in zip(sides, experts, strict=True):
        assert flat.ops[side.step].op.name == "nn.swiglu"
        assert side.after < at < side.before
        assert side.after < side.step < side.before


def test_streamed_weights_are_read_on_the_main_stream() -> None:
    """That is what waits for their copy, and what the next copy waits for."""
    module = _module("cuda:0")
    flat = flatten(module, module.functions["decode"])
    layouts = Layouts(flat)
    (side, *_) = side_steps(flat, layouts, "cuda:0")
    layouts.streamed |= {slot.name for slot in flat.ops[side.step].slots}
    assert side.step not in [s.step for s in side_steps(flat, layouts, "cuda:0")]


def test_what_lives_in_the_span_shares_no_bytes_with_the_side_op() -> None:
    """Between fork and join every storage in use has bytes of its own."""
    module = _module("cuda:0")
    func = module.functions["decode"]
    flat = flatten(module, func)
    layouts = Layouts(flat)
    arena = plan_arena(module, func, SIZES)
    for side in side_steps(flat, layouts, "cuda:0"):
        used: set[str] = set()
        for step in flat.ops[side.after + 1 : side.before]:
            for slot in (*step.slots, *step.results):
                if slot.name in layouts.views:
                    root = layouts.view(slot).root.name
                    used.add(arena.owner.get(root, root))
        places = sorted((arena.places[n] for n in used), key=lambda p: p.offset)
        assert len(places) > 3
        for left, right in pairwise(places):
            assert left.end <= right.offset, (left, right)
