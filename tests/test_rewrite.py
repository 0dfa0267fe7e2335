"""Rules: captures, optional operands, orders, places, families, states, reports, limits."""

from collections.abc import Mapping
from typing import ClassVar

import pytest

from ktgraph.ir import Module, ParseError, Weight, parse_module
from ktgraph.ir.graph import Attr
from ktgraph.ir.verify import verify
from ktgraph.pass_api import PassContext
from ktgraph.rewrite import (
    Match,
    Refusal,
    RewriteError,
    Rule,
    derived_weight,
    no,
    parse_pattern,
    rewrite,
)

HEADER = """ktgraph.ir 1
module @m
dim A = 8, D = 36, G = 2, H = 4, I = 20
sym C in 1..4096
sym T in 1..8192
weight @w : f32[D] from "w"
weight @lin : f32[D, D] from "lin"
weight @bias : f32[D] from "bias"
weight @layers[i in 1..4].w : f32[D] from "layers.{i}.w"
weight @layers[i in 0..3].v : f32[D] from "layers.{i}.v"

"""
KV = "kv(2 x f32[C, G, A], 2 x f32[C, G, A])"


def module(body: str, args: str = "%x: f32[T, D]", result: str = "f32[T, D]") -> Module:
    found = parse_module(f"{HEADER}func @main({args}) -> ({result}) {{\n{body}\n}}\n")
    verify(found)
    return found


def apply(found: Module, *rules: type[Rule], limit: int | None = None) -> tuple[PassContext, str]:
    """Rewrite to a fixed point; returns the context and the body's lines without types."""
    ctx = PassContext(limit=limit)
    rewrite(found, ctx, [rule() for rule in rules])
    verify(found)
    lines = [line.split(" : ")[0].strip() for line in str(found).split("{\n", 1)[1].splitlines()]
    return ctx, "\n".join(lines[:-1])


class Fuse(Rule):
    name = "fuse"
    match = """
      %s = tensor.add %x, %y
      %h = nn.rms_norm %s, @w {**norm}"""
    emit = "%s, %h = nn.add_rms_norm %x, %y, @w {**norm}"


class ScaleOfAct(Rule):
    name = "scale-of-act"
    match = """
      %a = nn.act %x {act = "relu"}
      %y = tensor.scale %a {by = $by}"""
    emit = """
      %t = tensor.scale %x {by = $by}
      %y = nn.act %t {act = "relu"}"""


# -- patterns -------------------------------------------------------------------------------------
def test_a_pattern_error_shows_the_line_of_the_rule() -> None:
    with pytest.raises(ParseError, match=r"<rule mine>:2:17: expected %value, @weight or _, got"):
        parse_pattern("%y = nn.act %x\n%z = nn.act %y, {act = $a}", "mine")


@pytest.mark.parametrize(
    ("match_text", "emit_text", "message"),
    [
        ("%a = nn.act %x\n%b = nn.act %y", "%b = %y", "%a = nn.act does not lead to the last op"),
        ("%a = nn.act %x", "%b = %x", "emit does not define %a of the root"),
        ("%a = nn.act %x", "%a = tensor.add %x, %z", "emit reads %z, which nothing defines"),
        ("%a = nn.act %x {**r}", "%a = nn.act %x {**q}", r"emit writes \*\*q, which match lacks"),
        ("%a = %x", "%a = %x", "an alias line belongs into emit"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_when_made(
    match_text: str, emit_text: str, message: str
) -> None:
    class Broken(Rule):
        name = "broken"
        match = match_text
        emit = emit_text

    with pytest.raises(ValueError, match=message):
        Broken()


# -- matching -------------------------------------------------------------------------------------
def test_results_keep_their_names_and_the_rest_of_the_attributes_is_carried_over() -> None:
    found = module("""
      %l1.sum = tensor.add %x, %x : f32[T, D]
      %l1.n = nn.rms_norm %l1.sum, @w {eps = 1e-05, late_cast = true} : f32[T, D] loc "a.b"
      %out = tensor.add %l1.sum, %l1.n : f32[T, D]
      return %out""")
    ctx, body = apply(found, Fuse)
    assert body == (
        "%l1.sum, %l1.n = nn.add_rms_norm %x, %x, @w {eps = 1e-05, late_cast = true}\n"
        "%out = tensor.add %l1.sum, %l1.n\nreturn %out"
    )
    assert [e.outcome for e in ctx.events] == ["matched"]
    assert next(found.walk()).loc == "a.b"


def test_inner_names_are_fresh_and_in_the_layer_of_the_root() -> None:
    found = module("""
      %t = nn.act %x : f32[T, D]
      %l1.a = nn.act %t {act = "relu"} : f32[T, D]
      %l1.y = tensor.scale %l1.a {by = 2.0} : f32[T, D]
      %m = tensor.mul %l1.y, %t : f32[T, D]
      %a = nn.act %m {act = "relu"} : f32[T, D]
      %y = tensor.scale %a {by = 3.0} : f32[T, D]
      return %y""")
    _, body = apply(found, ScaleOfAct)
    assert body.splitlines()[1:3] == [
        "%l1.t = tensor.scale %t {by = 2.0}",
        '%l1.y = nn.act %l1.t {act = "relu"}',
    ]
    assert body.splitlines()[4:6] == [
        "%t.1 = tensor.scale %m {by = 3.0}",
        '%y = nn.act %t.1 {act = "relu"}',
    ]


def test_a_literal_attribute_is_required_and_a_default_counts_as_written() -> None:
    class SiluOnly(Rule):
        name = "silu-only"
        match = """
          %a = nn.act %x {act = "silu"}
          %y = tensor.scale %a {by = $by}"""
        emit = """
          %t = tensor.scale %x {by = $by}
          %y = nn.act %t"""

    body = """
      %a = nn.act %x ATTRS : f32[T, D]
      %y = tensor.scale %a {by = 2.0} : f32[T, D]
      return %y"""
    ctx, _ = apply(module(body.replace("ATTRS", "")), SiluOnly)
    assert ctx.events[0].outcome == "matched"
    ctx, _ = apply(module(body.replace("ATTRS", '{act = "relu"}')), SiluOnly)
    assert ctx.events[0].outcome == "partial"
    assert 'best partial match 1/2 ops: act is "relu", not "silu"' in ctx.events[0].reason


def test_an_attribute_that_the_rule_does_not_mention_must_be_at_its_default() -> None:
    class Strict(Fuse):
        match = Fuse.match.replace("{**norm}", "{eps = $e}")
        emit = Fuse.emit.replace("{**norm}", "{eps = $e}")

    class Loose(Strict):
        match = Fuse.match.replace("{**norm}", "{eps = $e, ...}")

    body = """
      %s = tensor.add %x, %x : f32[T, D]
      %h = nn.rms_norm %s, @w {eps = 1e-05, late_cast = true} : f32[T, D]
      %y = tensor.mul %s, %h : f32[T, D]
      return %y"""
    ctx, _ = apply(module(body), Strict)
    assert [e.outcome for e in ctx.events] == []  # no op fitted, so nothing to report
    _, after = apply(module(body), Loose)
    assert "nn.add_rms_norm %x, %x, @w {eps = 1e-05}" in after


def test_optional_operands_may_be_absent_and_unmentioned_ones_must_be() -> None:
    class Relinear(Rule):
        name = "relinear"
        match = """
          %s = tensor.scale %x {by = 1.0}
          %y = nn.linear %s, @l, @b?"""
        emit = "%y = nn.linear %x, @l, @b"

    class NoBias(Relinear):
        match = Relinear.match.replace(", @b?", "")
        emit = Relinear.emit.replace(", @b", "")

    body = """
      %s = tensor.scale %x {by = 1.0} : f32[T, D]
      %y = nn.linear %s, @linBIAS : f32[T, D]
      return %y"""
    with_bias, without = body.replace("BIAS", ", @bias"), body.replace("BIAS", "")
    assert apply(module(with_bias), Relinear)[1].startswith("%y = nn.linear %x, @lin, @bias\n")
    assert apply(module(without), Relinear)[1].startswith("%y = nn.linear %x, @lin\n")
    ctx, after = apply(module(with_bias), NoBias)
    assert after.startswith("%s = tensor.scale")
    assert ctx.events == [] or "operand @bias is not in the rule" in ctx.events[0].reason


def test_sums_and_products_match_in_both_orders() -> None:
    class Gate(Rule):
        name = "gate"
        match = """
          %a = nn.act %x
          %y = tensor.mul %a, %x"""
        emit = "%y = tensor.mul %x, %x"

    for operands in ("%a, %x", "%x, %a"):
        found = module(f"""
          %a = nn.act %x : f32[T, D]
          %y = tensor.mul {operands} : f32[T, D]
          return %y""")
        assert apply(found, Gate)[1] == "%y = tensor.mul %x, %x\nreturn %y"


def test_a_name_written_twice_means_the_same_value() -> None:
    class Twice(Rule):
        name = "twice"
        match = """
          %a = nn.act %x
          %y = tensor.mul %a, %x"""
        emit = "%y = tensor.mul %x, %x"

    found = module("""
      %z = nn.act %x {act = "relu"} : f32[T, D]
      %a = nn.act %x : f32[T, D]
      %y = tensor.mul %a, %z : f32[T, D]
      return %y""")
    ctx, _ = apply(found, Twice)
    assert "%x is both %x and %z" in ctx.events[0].reason


# -- refusals and places --------------------------------------------------------------------------
def test_inner_values_read_elsewhere_refuse_the_match_unless_kept() -> None:
    class Kept(ScaleOfAct):
        keep = ("%a",)

    body = """
      %a = nn.act %x {act = "relu"} : f32[T, D]
      %y = tensor.scale %a {by = 2.0} : f32[T, D]
      %z = tensor.add %y, %a : f32[T, D]
      return %z"""
    ctx, _ = apply(module(body), ScaleOfAct)
    assert ctx.events[0].outcome == "refused"
    assert ctx.events[0].reason.startswith("%a has other users: %z = tensor.add %y, %a")
    _, after = apply(module(body), Kept)
    assert after.startswith('%a = nn.act %x {act = "relu"}\n%t = tensor.scale %x {by = 2.0}\n%y = ')


def test_check_may_refuse_with_a_reason_or_say_that_the_place_is_none_of_its_business() -> None:
    class Careful(Fuse):
        answer: ClassVar[bool | Refusal] = False

        def check(self, m: Match) -> bool | Refusal:
            return self.answer

    class Refusing(Careful):
        answer = no("not today")

    body = """
      %s = tensor.add %x, %x : f32[T, D]
      %h = nn.rms_norm %s, @w {eps = 1e-05} : f32[T, D]
      return %h"""
    assert "not today" in [e.reason for e in apply(module(body), Refusing)[0].events]
    assert all(e.outcome != "matched" for e in apply(module(body), Careful)[0].events)


def test_emitted_ops_move_before_an_early_reader_or_the_match_is_refused() -> None:
    early = """
      %s = tensor.add %x, %x : f32[T, D]
      %a = nn.act %s : f32[T, D]
      %h = nn.rms_norm %s, @w {eps = 1e-05} : f32[T, D]
      %y = tensor.mul %a, %h : f32[T, D]
      return %y"""
    _, after = apply(module(early), Fuse)
    assert [line.split(" = ")[0] for line in after.splitlines()[:-1]] == ["%s, %h", "%a", "%y"]

    class FuseLate(Rule):  # its second operand is made after %s is read
        name = "fuse-late"
        match = """
          %s = tensor.add %x, %x
          %y = tensor.mul %s, %z"""
        emit = """
          %y = tensor.mul %x, %z
          %s = tensor.add %y, %x"""

    late = """
      %s = tensor.add %x, %x : f32[T, D]
      %z = nn.act %s : f32[T, D]
      %y = tensor.mul %s, %z : f32[T, D]
      return %y"""
    ctx, after = apply(module(late), FuseLate)
    assert "a result is read before every operand is there, by: %z = nn.act" in ctx.events[0].reason
    assert after.startswith("%s = tensor.add %x, %x\n%z")


def test_an_append_keeps_the_linear_order() -> None:
    class AppendLate(Rule):  # would read %kv again after it was consumed
        name = "append-late"
        match = """
          %k, %v = kv.read %kv, %batch {layer = $l, ...}
          %o = attn.sdpa_rows %q, %k, %v, %batch {**how}"""
        emit = "%o = attn.sdpa %q, %kv, %batch {layer = $l, **how}"

    found = module(
        f"""
      %k, %v = kv.read %kv, %batch {{layer = 0, rows = [C]}} : f32[C, G, A], f32[C, G, A]
      %kv.1 = kv.append %kv, %q, %q, %batch {{layer = 0}} : {KV}
      %o = attn.sdpa_rows %q, %k, %v, %batch {{scale = 0.5}} : f32[T, G, A]
      return %o, %kv.1""",
        f"%q: f32[T, G, A], %batch: batch, %kv: {KV}",
        f"f32[T, G, A], {KV}",
    )
    ctx, after = apply(found, AppendLate)
    assert "attn.sdpa_rows" in after
    assert "%kv is consumed before, by: %kv.1 = kv.append" in ctx.events[0].reason


def test_values_may_come_from_outside_the_block_but_matched_ops_may_not() -> None:
    found = module("""
      %s = tensor.add %x, %x : f32[T, D]
      %out = repeat i in 1..2 (%y = %x) {
        %h = nn.rms_norm %s, @w {eps = 1e-05} : f32[T, D]
        %t = tensor.add %y, %h : f32[T, D]
        %n = nn.rms_norm %t, @layers[i].w {eps = 1e-05} : f32[T, D]
        %z = tensor.mul %n, %t : f32[T, D]
        yield %z
      } : f32[T, D]
      return %out""")
    ctx, after = apply(found, Fuse)
    assert "%t, %n = nn.add_rms_norm %y, %h, @layers[i].w" in after
    assert "%s is computed outside the root's block" in ctx.events[-1].reason


def test_a_type_that_would_change_and_ops_that_do_not_fit_are_refused() -> None:
    class Narrow(Rule):
        name = "narrow"
        match = "%y = nn.act %x"
        emit = "%y = tensor.cast %x {dtype = $d}"

        def values(self, m: Match) -> Mapping[str, Attr]:
            return {"$d": "bf16"}

    class Misfit(Narrow):
        emit = "%y = nn.linear %x, @w"

        def weights(self, m: Match) -> Mapping[str, Weight]:
            type = m.type("%x").with_dims("I", "I")
            return {"@w": Weight("square", type, source="square")}

    body = "%y = nn.act %x : f32[T, D]\nreturn %y"
    found = module(body)
    ctx, after = apply(found, Narrow)
    assert ctx.events[0].reason == "%y would become a bf16[T, D], it is a f32[T, D]"
    ctx, after = apply(found, Misfit)
    assert ctx.events[0].reason.startswith("the emitted ops do not fit: nn.linear: operand w")
    assert after == "%y = nn.act %x\nreturn %y"
    assert "square" not in found.weights


# -- weights --------------------------------------------------------------------------------------
class MergeNorms(Rule):
    name = "merge-norms"
    match = """
      %a = nn.rms_norm %x, @a {eps = $e}
      %y = nn.rms_norm %a, @b {eps = $e}"""
    emit = "%y = nn.linear %x, @ab"

    def weights(self, m: Match) -> Mapping[str, Weight]:
        refs = [m.ref("@a"), m.ref("@b")]
        type = m.type("@a").with_dims("D", "D")
        return {"@ab": derived_weight(m.module, refs, "ab", "stack", type)}


def test_derived_weights_follow_the_index_of_the_matched_family() -> None:
    found = module("""
      %x.n = repeat i in 2..3 (%y = %x) {
        %a = nn.rms_norm %y, @layers[i].w {eps = 1e-06} : f32[T, D]
        %b = nn.rms_norm %a, @layers[i-1].v {eps = 1e-06} : f32[T, D]
        yield %b
      } : f32[T, D]
      %c = nn.rms_norm %x.n, @layers[4].w {eps = 1e-06} : f32[T, D]
      %d = nn.rms_norm %c, @layers[3].v {eps = 1e-06} : f32[T, D]
      %e = nn.rms_norm %d, @w {eps = 1e-06} : f32[T, D]
      %f = nn.rms_norm %e, @bias {eps = 1e-06} : f32[T, D]
      return %f""")
    ctx, after = apply(found, MergeNorms)
    assert sum(e.outcome == "matched" for e in ctx.events) == 3
    family = found.weights["layers[].ab"]
    assert (family.lo, family.hi) == (1, 4)
    assert family.recipe is not None
    assert [str(a) for a in family.recipe.args] == ["@layers[i].w", "@layers[i-1].v"]
    assert "nn.linear %y, @layers[i].ab" in after
    assert "nn.linear %x.n, @layers[4].ab" in after
    assert "nn.linear %d, @ab" in after


def test_a_derived_weight_is_declared_once_and_never_replaces_another() -> None:
    found = module("return %x")
    refs = [found.weights["w"].ref(), found.weights["bias"].ref()]
    type = found.weights["lin"].type
    first = derived_weight(found, refs, "lin", "stack", type)
    assert first.name == "lin.1"  # @lin is a weight of the checkpoint
    found.add_weight(first)
    assert derived_weight(found, refs, "lin", "stack", type) is first
    assert derived_weight(found, refs[::-1], "lin", "stack", type).name == "lin.2"


# -- reports and limits ---------------------------------------------------------------------------
def test_the_best_partial_match_names_the_op_that_differs() -> None:
    found = module("""
      %a = nn.act %x : f32[T, D]
      %y = tensor.scale %a {by = 2.0} : f32[T, D]
      %h = nn.rms_norm %x, @w {eps = 1e-05} : f32[T, D]
      %z = tensor.mul %y, %h : f32[T, D]
      return %z""")
    ctx, _ = apply(found, Fuse, ScaleOfAct)
    reasons = {e.rule: e.reason for e in ctx.events}
    assert (
        reasons["fuse"] == "best partial match 1/2 ops: %s: expected tensor.add, found an argument"
    )
    assert 'act is "silu", not "relu" in: %a = nn.act %x' in reasons["scale-of-act"]


def test_the_limit_of_rewrites_is_kept() -> None:
    body = """
      %a = nn.act %x {act = "relu"} : f32[T, D]
      %b = tensor.scale %a {by = 2.0} : f32[T, D]
      %c = nn.act %b {act = "relu"} : f32[T, D]
      %d = tensor.scale %c {by = 3.0} : f32[T, D]
      return %d"""
    done = [apply(module(body), ScaleOfAct, limit=n)[0].rewrites for n in (0, 1, 2, 9)]
    assert done == [0, 1, 2, 3]


class Endless(Rule):
    name = "endless"
    match = "%y = tensor.scale %x {by = $by}"
    emit = """
      %t = nn.act %x
      %y = tensor.scale %t {by = $by}"""


def test_a_rule_that_feeds_itself_is_named_and_ends() -> None:
    found = module("  %y = tensor.scale %x {by = 2.0} : f32[T, D]\n  return %y")
    with pytest.raises(RewriteError, match="these rules still match: endless"):
        apply(found, Endless)


class Misspelt(Rule):
    name = "misspelt"
    match = "%y = tensor.ad %x, %z"
    emit = "%y = tensor.add %x, %z"


def test_an_op_that_does_not_exist_is_named_with_close_ones() -> None:
    with pytest.raises(ValueError, match=r"rule misspelt: unknown op 'tensor.ad'; did you mean"):
        Misspelt()
