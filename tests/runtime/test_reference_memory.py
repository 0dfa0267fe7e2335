"""What references allocate is below the bound that the memory check takes, for every op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_models import MODELS, lower
from torch.profiler import ProfilerActivity, profile

from ktgraph.ir.dims import Dim
from ktgraph.ir.types import StateType, TensorType, Type
from ktgraph.ops import all_ops
from ktgraph.ops.cases import make_inputs
from ktgraph.ops.signature import TensorPattern
from ktgraph.ops.tensor import dtype_name
from ktgraph.runtime.cache import CacheShape, InPlaceState
from ktgraph.runtime.memory import memory_need
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.reference_memory import reference_nbytes
from ktgraph.runtime.state import State

MANY = {"T": 96}  # tokens, over the case's other sizes
SLACK = 4096  # bytes: indices and masks of the few tokens of a test
CASES = [(name, dict(sizes)) for name, d in sorted(all_ops().items()) for sizes in d.cases[-1:]]


def peak_nbytes(call: Any) -> int:
    """Most bytes that a call holds on top of what there is."""
    call()  # what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events: Any = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, nbytes in steps:
        held += nbytes
        most = max(most, held)
    return most


def type_of(value: Any) -> Type | None:
    if isinstance(value, torch.Tensor):
        return TensorType(dtype_name(value.dtype), tuple(map(Dim.of, value.shape)))
    if isinstance(value, (State, InPlaceState)):
        parts = [TensorType("f32", tuple(map(Dim.of, p.shape[1:]))) for p in value.parts]
        return StateType(Dim.of(len(value.parts[0])), tuple(parts))
    return None


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name for name, _ in CASES])
def test_every_reference_stays_below_its_bound(name: str, sizes: dict[str, int]) -> None:
    definition = all_ops()[name]
    made = make_inputs(definition, {**sizes, **({} if sizes["T"] == 1 else MANY)})
    operands = [InPlaceState(o.parts) if isinstance(o, State) else o for o in made.operands]
    patterns = [p.pattern for p in definition.signature.params]
    weights = [isinstance(p, TensorPattern) and "..." not in p.dims[0] for p in patterns]

    def call() -> object:
        return definition.reference(*operands, **made.attrs)

    found = call()
    results = found if isinstance(found, tuple) else (found,)
    bound = reference_nbytes(
        name, list(map(type_of, operands)), weights, [t for t in map(type_of, results) if t],
        made.sizes,
    )  # fmt: skip
    peak = peak_nbytes(call)
    assert 0 < peak <= bound + SLACK


def test_the_check_counts_them() -> None:
    """Attention on its reference holds the scores of a chunk; without fallbacks nothing is said."""
    module, rows = MODELS["mla"](), 4096
    lower(module)
    shape = CacheShape(32, 128, rows)
    terms = memory_need(Plan.build(module), shape, 1).terms
    assert not [t for t in terms if "torch reference" in t.name]
    for op in module.functions["prefill"].walk():
        if op.name.startswith("mla.attend"):
            op.via = "torch.reference"
    plan = Plan.build(module)
    (term,) = [t for t in memory_need(plan, shape, 1).terms if "torch reference" in t.name]
    tokens = plan.phase("prefill").arena.sizes.tokens
    assert term.nbytes >= 4 * 4 * module.dims["H"] * tokens * rows
    assert (term.kind, term.device) == ("workspace", "cpu")
