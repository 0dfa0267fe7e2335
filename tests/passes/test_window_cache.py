"""window-cache: golden text, results on the miniature, refusals."""

from pathlib import Path

import pytest
from golden import Case, check_case, golden_cases

HERE = Path(__file__).parent


@pytest.mark.parametrize("case", golden_cases(HERE / "window_cache.ktir"), ids=str)
def test_golden(case: Case, update_golden: bool) -> None:
    check_case(case, update_golden)
