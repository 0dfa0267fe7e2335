"""Text: golden round trip, hashes that ignore names, parse errors with line and column."""

import re
from pathlib import Path

import pytest

from ktgraph.ir import Op, ParseError, parse_module
from ktgraph.ir.verify import verify

DOC = Path(__file__).parents[2] / "docs" / "ir.md"
GOLDEN = re.search(r"```ktir\n(.*?)```", DOC.read_text(), re.DOTALL).group(1)  # type: ignore[union-attr]


def test_the_documents_example_is_canonical_and_valid():
    module = parse_module(GOLDEN)
    verify(module)
    assert str(module) == GOLDEN


def test_clone_prints_the_same_and_shares_nothing():
    module = parse_module(GOLDEN)
    copy = module.clone()
    assert str(copy) == GOLDEN
    copy.functions["main"].body.ops[0].attrs["x"] = True
    assert str(module) == GOLDEN


def test_hash_ignores_names_locs_and_comments_only():
    module = parse_module(GOLDEN)
    renamed = GOLDEN.replace("%routed", "%experts").replace(' loc "model.embed_tokens"', "")
    assert parse_module("// note\n" + renamed).structural_hash() == module.structural_hash()
    changed = GOLDEN.replace("eps = 1e-06", "eps = 1e-05")
    assert parse_module(changed).structural_hash() != module.structural_hash()


def test_rebind_changes_sizes_only():
    small = parse_module(GOLDEN).rebind(D=48, E=8)
    assert (small.dims["D"], small.dims["E"], small.dims["H"]) == (48, 8, 4)
    with pytest.raises(ValueError, match="rebind: XX is no dim of @two_layers"):
        parse_module(GOLDEN).rebind(XX=3)


def test_the_printer_does_not_fail_on_invalid_ir():
    module = parse_module(GOLDEN)
    block = module.functions["main"].body
    block.append(Op("no.such_op", [None, block.args[0], None], [], {"a": (1, "x")}))
    block.set_returns([])
    assert 'no.such_op _, %ids {a = [1, "x"]}' in str(module)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nn.rms_norm %x,", "nn.rms_norm %nope,", r"<text>:\d+:\d+: %nope is not defined here"),
        ("func @main", "fun @main", r"expected one of target, dim, .*, got 'fun'"),
        ("%h = nn.rms_norm", "%x = nn.rms_norm", r"%x is defined twice"),
        ("@embed_tokens : f32[T, D]", "@embed_token : f32[T, D]", r"@embed_token is not declared"),
        ("f32[VOC, D]<bf16>", "f99[VOC, D]<bf16>", r"expected a type \(f64, .*\), got 'f99'"),
        ("{eps = 1e-06}", "{eps 1e-06}", r"expected '=', got '1e-06'"),
        ("H*(N+P)", "H*(N+)", r"expected a dim, got '\)'"),
        ("ktgraph.ir 1", "ktgraph.ir 2", r"<text>:1:\d+: expected the header 'ktgraph.ir 1'"),
        ("(%ids: i32[T]", "(%ids: i32[T];", r"unexpected character ';'"),
        ("-> (f32[O, D],", "-> (f32[T, D],", r"@main declares other result types"),
        ("%ids.k, %wts = moe", "%ids.k = moe", r"1 results, but 2 types"),
    ],
)
def test_parse_errors_point_at_the_place(old: str, new: str, message: str):
    assert old in GOLDEN
    with pytest.raises(ParseError, match=message) as caught:
        parse_module(GOLDEN.replace(old, new, 1))
    line = str(caught.value).split("\n")
    assert line[1].strip()
    assert line[2].strip() == "^"


def test_a_truncated_file_is_one_parse_error():
    for cut in range(0, len(GOLDEN) - 1, 37):
        text = GOLDEN[:cut]
        try:
            parse_module(text)
        except ParseError:
            continue
        assert "func" not in text  # a header with declarations alone is a module
