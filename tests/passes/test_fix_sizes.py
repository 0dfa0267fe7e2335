"""fix-sizes: golden text, results, and an example that says nothing."""

from pathlib import Path

import pytest
from golden import Case, check_case, golden_cases

from ktgraph.ir.example import example_of, set_example
from ktgraph.ir.parser import parse_module
from ktgraph.pass_manager import PassError, PassManager

HERE = Path(__file__).parent
TEXT = """ktgraph.ir 1
module @m
sym b in 1..64

func @main(%x: f32[b, 4]) {example = [WHAT]} -> (f32[b, 4]) {
  %y = nn.act %x : f32[b, 4]
  return %y
}
"""


@pytest.mark.parametrize("case", golden_cases(HERE / "fix_sizes.ktir"), ids=str)
def test_golden(case: Case, update_golden: bool) -> None:
    check_case(case, update_golden)


@pytest.mark.parametrize("what", ['"b"', '"b=x"', "", "3"])
def test_an_example_that_says_nothing_is_an_error(what: str) -> None:
    module = parse_module(TEXT.replace("WHAT", what))
    with pytest.raises(PassError, match=r'expected a list as \["b=2", "s=5"\]'):
        PassManager().run(module, "fix-sizes")


def test_place_says_which_pass_is_missing() -> None:
    module = parse_module(TEXT.replace(" {example = [WHAT]}", ""))
    with pytest.raises(PassError, match="or fix-sizes with sizes in the attribute example"):
        PassManager().run(module, "fix-sizes,specialize-phases,place")


def test_examples_are_written_and_read_back() -> None:
    (func,) = parse_module(TEXT.replace("WHAT", '"b=3"')).functions.values()
    assert example_of(func) == {"b": 3}
    set_example(func, {"b": 5, "s": 7})
    assert example_of(func) == {"b": 5, "s": 7}
    set_example(func, {})
    assert example_of(func) == {}
