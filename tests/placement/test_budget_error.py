"""The error for a budget that is too small says what everything takes, and the least that does."""

import re
from pathlib import Path

import pytest
from placed_models import context, small_target, v2_lite

from ktgraph.errors import MemoryBudgetError
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.decide import Settings, decide
from ktgraph.placement.rules import read_rules
from ktgraph.target import load_target, parse_size

RULES = """
- match: {name: '^model\\.layers\\.(1|2)\\.mlp\\.experts$'}
  replace: {device: cuda:0}
"""
OPTIONS = CompileOptions(context=1024, max_batch=1)


@pytest.mark.parametrize("rules", ["", RULES])
def test_the_least_budget_is_the_least(rules: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(rules)
    read = tuple(read_rules(tmp_path / "r.yaml")) if rules else ()
    target = load_target("rtx4090-24g+xeon")

    def place(memory: int) -> None:
        decide(v2_lite(), target, Settings(OPTIONS, memory, read, context=1024))

    with pytest.raises(MemoryBudgetError) as caught:
        place(512 << 20)
    message = str(caught.value)
    sizes = re.search(r"needs ([\d.]+ \w+), which is the least.*take ([\d.]+ \w+)\.", message)
    assert sizes is not None
    least, everything = map(parse_size, sizes.groups())
    assert 1 << 30 < least < everything
    assert ("kept by a rule" in message) == bool(rules)
    place(least + (1 << 20))  # sizes in messages have four digits
    with pytest.raises(MemoryBudgetError):
        place(least - (1 << 20))
    assert everything > 29 << 30  # 15.7 billion weights in bf16


def test_a_host_that_is_short_says_what_it_needs() -> None:
    with pytest.raises(MemoryBudgetError, match=r"cpu has 16 GiB; this needs [\d.]+ GiB there"):
        decide(v2_lite(), small_target(1 << 30), Settings(context().options))
