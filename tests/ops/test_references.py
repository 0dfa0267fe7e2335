"""Every op's reference agrees with its signature, is finite, and means the same in float64."""

import pytest
import torch

from ktgraph.ops import all_ops
from ktgraph.ops.cases import make_inputs
from ktgraph.runtime.state import State

CASES = [(name, dict(sizes)) for name, d in sorted(all_ops().items()) for sizes in d.cases]
IDS = [f"{name}-{'-'.join(f'{k}{v}' for k, v in sizes.items())}" for name, sizes in CASES]


def _tensors(found: object) -> list[torch.Tensor]:
    """Result tensors, the parts of a cache included: of those, the rows that were written."""
    results = found if isinstance(found, tuple) else (found,)
    given: list[torch.Tensor] = []
    for result in results:
        assert isinstance(result, (torch.Tensor, State))
        given += [result] if isinstance(result, torch.Tensor) else map(_written, result.parts)
    return given


def _written(part: torch.Tensor) -> torch.Tensor:
    """[rows, *row] of a cache part; rows never written are NaN throughout."""
    rows = part.flatten(0, 1)
    return rows[~rows.isnan().flatten(1).all(1)]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
@pytest.mark.parametrize("optional", [False, True], ids=["", "optional"])
def test_reference_is_finite_and_float64_agrees(name: str, sizes: dict[str, int], optional: bool):
    definition = all_ops()[name]
    single = make_inputs(definition, sizes, seed=3, optional=optional)
    double = make_inputs(definition, sizes, seed=3, dtype=torch.float64, optional=optional)
    low = _tensors(definition.reference(*single.operands, **single.attrs))
    high = _tensors(definition.reference(*double.operands, **double.attrs))
    assert low
    for a, b in zip(low, high, strict=True):
        assert a.numel()
        assert torch.isfinite(a.double()).all()
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def test_every_op_with_flops_has_cases_and_a_docstring():
    for definition in all_ops().values():
        assert definition.doc, definition.name
        assert definition.cases or definition.flops is None, definition.name


def test_every_op_that_writes_the_cache_has_cases():
    writers = [
        d for d in all_ops().values() if any(isinstance(r, str) for r in d.signature.results)
    ]
    assert {d.name for d in writers} >= {"kv.append", "kv.append_latent", "kv.rope_append"}
    for definition in writers:
        assert definition.cases, definition.name


def test_append_writes_only_its_rows():
    definition = all_ops()["kv.append_latent"]
    inputs = make_inputs(definition, {"T": 5, "R": 24, "P": 8})
    state, c, k_pe, batch = inputs.operands
    after = definition.reference(*inputs.operands, **inputs.attrs)
    assert isinstance(after, State)
    changed = (after.parts[0] != state.parts[0]) & ~torch.isnan(after.parts[0])
    rows = changed.any(-1).nonzero().tolist()
    assert sorted(rows) == sorted([1, r] for r in batch.slots().tolist())
    assert torch.equal(after.parts[0][1, batch.slots()], torch.cat([c, k_pe], -1))


def test_rope_styles_are_permutations_of_each_other():
    from ktgraph.ops.nn import rotate

    x = torch.randn(4, 2, 8)
    angle = torch.rand(4, 4)
    cos, sin = angle.cos(), angle.sin()
    pairs = torch.arange(8).reshape(4, 2).T.flatten()  # interleaved channel -> half channel
    half = rotate(x[..., pairs], cos, sin, "half")
    torch.testing.assert_close(rotate(x, cos, sin, "interleaved")[..., pairs], half)
    torch.testing.assert_close(rotate(x, cos, sin, "interleaved_to_half"), half)
