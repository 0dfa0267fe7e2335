"""Golden text of the passes that change phases, weights and experts."""

from pathlib import Path

import pytest
from golden import Case, check_case, golden_cases

HERE = Path(__file__).parent
FILES = (
    "specialize_phases",
    "mla_absorb",
    "moe_group",
    "quantize",
    "pack_weights",
    "expert_deferral",
)


@pytest.mark.parametrize(
    "case",
    [case for name in FILES for case in golden_cases(HERE / f"{name}.ktir")],
    ids=lambda c: f"{c.file.stem}-{c}",
)
def test_golden(case: Case, update_golden: bool) -> None:
    check_case(case, update_golden)
