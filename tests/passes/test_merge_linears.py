"""merge-linears: golden text, results on the miniature, refusals."""

from pathlib import Path

import pytest
from golden import Case, check_case, golden_cases

from ktgraph.passes.merge_linears import _joined_leaf  # pyright: ignore[reportPrivateUsage]

HERE = Path(__file__).parent


@pytest.mark.parametrize("case", golden_cases(HERE / "merge_linears.ktir"), ids=str)
def test_golden(case: Case, update_golden: bool) -> None:
    check_case(case, update_golden)


@pytest.mark.parametrize(
    ("names", "leaf"),
    [
        (["l.q_proj", "l.k_proj", "l.v_proj"], ("q_k_v_proj", 1)),
        (["l.q_proj.bias", "l.k_proj.bias"], ("q_k_proj.bias", 2)),
        (["bias", "bias"], ("bias_bias", 1)),
    ],
)
def test_a_joined_weight_is_named_after_what_differs(
    names: list[str], leaf: tuple[str, int]
) -> None:
    assert _joined_leaf(names) == leaf
