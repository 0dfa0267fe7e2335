"""Native code trusts the arena's numbers, so a plan whose text was edited is refused."""

import re

import pytest
from lowered_models import lower
from small_models import mla_moe

from ktgraph.ir import parse_module
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.plan import Plan


@pytest.mark.parametrize(
    ("find", "replacement"),
    [
        (r"(buffers = \[\"[^:]*:)\d+(:)", r"\g<1>68719476736\g<2>"),
        (r"(buffers = \[\"[^:]*:)\d+(:)", r"\g<1>3\g<2>"),
        (r"(max_tokens = )\d+", r"\g<1>100000"),
        (r"(arena_bytes = )\d+", r"\g<1>64"),
    ],
)
def test_an_edited_arena_is_refused(find: str, replacement: str) -> None:
    module = mla_moe()
    lower(module)
    text = str(module)
    edited = re.sub(find, replacement, text)
    assert edited != text
    with pytest.raises(PlanError, match="run plan-memory again"):
        Plan.build(parse_module(edited))
