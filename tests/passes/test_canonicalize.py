"""canonicalize and mla-latent-cache: golden text, traces of the trained models, all or nothing."""

from pathlib import Path

import pytest
from golden import Case, check_case, golden_cases

from ktgraph.frontends.hf import trace_hf_full
from ktgraph.ir import StateType, parse_module
from ktgraph.pass_api import PassContext
from ktgraph.passes.canonicalize import Canonicalize
from ktgraph.passes.flatten_tokens import FlattenTokens
from ktgraph.passes.mla_latent_cache import MlaLatentCache
from ktgraph.properties import missing

HERE = Path(__file__).parent
CASES = golden_cases(HERE / "canonicalize.ktir")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden(case: Case, update_golden: bool) -> None:
    check_case(case, update_golden)


def test_the_limit_counts_all_layers_of_a_cache_as_one_rewrite() -> None:
    module = parse_module(next(c for c in CASES if "parts cached" in c.title).before)
    before, context = str(module), PassContext(limit=0)
    MlaLatentCache().run(module, context)
    assert (str(module), context.rewrites) == (before, 0)
    MlaLatentCache().run(module, context := PassContext(limit=1))
    assert context.rewrites == 1
    assert "kv.append_latent" in str(module)
    assert "kv.append " not in str(module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parts"), [("tiny_deepseek", ["288"]), ("tiny_qwen", ["2, 64", "2, 64"])]
)
def test_a_traced_model_comes_to_the_canonical_flat_form(
    model: str, parts: list[str], request: pytest.FixtureRequest
) -> None:
    module = trace_hf_full(request.getfixturevalue(model), witnesses=False).module
    context = PassContext()
    for step in (Canonicalize(), FlattenTokens()):
        step.run(module, context)
    assert [e for e in context.events if e.outcome == "refused"] == []
    assert missing(module, "flat") == ""
    args = module.functions["main"].args
    assert [str(a.type) for a in args[:2]] == ["i32[T]", "batch"]
    state = args[2].type
    assert isinstance(state, StateType)
    assert [", ".join(map(str, p.dims[1:])) for p in state.parts] == parts
    text = str(module)
    assert text.count("logits.gather") == 1
    assert not any(name in text for name in ("kv.read", "sdpa_rows", "[b", "*s", "tensor.permute"))
