"""mla-latent-cache: multi-head latent attention caches one latent row per token.

What: the cache of expanded keys and values (transformers before 5.24, remote code), or of the
latent and the shared key part apart (5.24 and later), becomes one part of rows [R+P]; keys and
values are rebuilt from the rows by `mla.attend_expanded`.  All layers of a state, or none.

Why: both readings of the cache, absorbed and expanded, then share one state, and a cache row of
DeepSeek-V2-Lite has 576 numbers in place of 5,120.  Allowed because all that lies between the
latent and the cache is computed token by token.

Before:  %kv1 = kv.append %kv0, %c, %k_pe, %batch … %o = attn.sdpa_rows %q, %k, %v, %batch
After:   %kv1 = kv.append_latent %kv0, %c, %k_pe, %batch
         %o = mla.attend_expanded %q_nope, %q_pe, %kv1, %batch, @kv_b

`canonicalize` runs it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, Function, Module, Op, Value
from ktgraph.ir.types import StateType
from ktgraph.pass_api import Numerics, Pass, PassContext, register_pass, reorder
from ktgraph.rewrite import Match, Matcher, Refusal, Rule, apply_together, find_match, no


class _LatentCache(Rule):
    """What both forms have in common; `rank` and `rope` are the sizes R and P of a row."""

    def check(self, m: Match) -> bool | Refusal:
        heads, both = m.dims("%kvh")[-2:]
        nope, value = m.dim_attr("$n"), m.dim_attr("$v")
        if m.dims("@kv_b") != (heads * both, m.dims("%c")[-1]):
            return no(f"kv_b has other sizes than {heads} heads of {nope} and {value}", m.root)
        if m.dims("%q_nope")[-2:] != (heads, nope) or m.dims("%q_pe")[-1] != self.rope(m):
            return no("the query has other heads or parts than the keys", m.op("%q"))
        if m.dims("%k_pe")[-2] != 1:
            return no("the rotated key part is not shared by all heads", m.op("%pe"))
        return True

    def values(self, m: Match) -> Mapping[str, Attr]:
        tokens = m.dims("%k_pe")[:-2]
        return {"$cs": (*tokens, self.rank(m)), "$ps": (*tokens, self.rope(m))}

    def rank(self, m: Match) -> Dim:
        return m.dims("%c")[-1]

    def rope(self, m: Match) -> Dim:
        return m.dims("%k_pe")[-1]


class LatentParts(_LatentCache):
    """transformers 5.24 and later: c and k_pe are cached, and expanded when they are read."""

    name = "latent-cache-from-parts"
    match = """
      %kv1     = kv.append %kv0, %c, %k_pe, %batch {layer = $l}
      %cr, %pr = kv.read %kv1, %batch {layer = $l, ...}
      %kvb     = nn.linear %cr, @kv_b
      %kvh     = tensor.reshape %kvb {...}
      %kn, %vr = tensor.split %kvh {sizes = [$n, $v]}
      %pe      = tensor.expand %pr {...}
      %k       = tensor.concat %kn, %pe
      %q       = tensor.concat %q_nope, %q_pe
      %o       = attn.sdpa_rows %q, %k, %vr, %batch {scale = $scale}"""
    emit = """
      %latent  = tensor.reshape %c {shape = $cs}
      %shared  = tensor.reshape %k_pe {shape = $ps}
      %kv1     = kv.append_latent %kv0, %latent, %shared, %batch {layer = $l}
      %o       = mla.attend_expanded %q_nope, %q_pe, %kv1, %batch, @kv_b
                 {layer = $l, scale = $scale}"""


class ExpandedParts(_LatentCache):
    """Before transformers 5.24 and in remote code: keys and values of every head are cached."""

    name = "latent-cache-from-heads"
    match = """
      %kvb     = nn.linear %c, @kv_b
      %kvh     = tensor.reshape %kvb {...}
      %kn, %vn = tensor.split %kvh {sizes = [$n, $v]}
      %pe      = tensor.expand %k_pe {...}
      %k       = tensor.concat %kn, %pe
      %kv1     = kv.append %kv0, %k, %vn, %batch {layer = $l}
      %q       = tensor.concat %q_nope, %q_pe
      %o       = attn.sdpa %q, %kv1, %batch {layer = $l, scale = $scale}"""
    emit = LatentParts.emit


@register_pass
@dataclass(frozen=True)
class MlaLatentCache(Pass):
    name: ClassVar[str] = "mla-latent-cache"
    numerics: ClassVar[Numerics] = reorder()
    requires: ClassVar[Sequence[str]] = ("named",)

    def run(self, module: Module, ctx: PassContext) -> None:
        for function in module.functions.values():
            for state in [a for a in function.args if isinstance(a.type, StateType)]:
                if isinstance(state.type, StateType) and len(state.type.parts) == 2:
                    _convert(module, function, state, ctx)


def _convert(module: Module, function: Function, state: Value, ctx: PassContext) -> None:
    """Bring one state to latent rows, with all its layers, or say why not."""
    chain = list(_chain(state))
    found = list(_matches(module, function, chain, ctx))
    if not found:
        return
    refusal = _not_convertible(chain, found)
    rule, first = found[0]
    if refusal is not None:
        ctx.refused(rule.name, refusal.op or first.root, refusal.reason)
        return
    if not ctx.may_rewrite(rule.name, first.root):
        return
    old = [value.type for value in chain]
    for value in chain:
        value.type = _latent_type(value, found[0])
    answer = apply_together(found)
    if isinstance(answer, Refusal):
        for value, type in zip(chain, old, strict=True):
            value.type = type
        ctx.refused(rule.name, answer.op or first.root, answer.reason)


def _chain(state: Value) -> Iterator[Value]:
    """The state and every later version of it, through appends and repeats."""
    seen: set[Value] = set()
    stack = [state]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        for user in value.users:
            stack += _next_versions(user, value)


def _next_versions(user: Op, value: Value) -> list[Value]:
    if user.body is not None:
        places = [i for i, o in enumerate(user.operands) if o is value]
        return [v for i in places for v in (user.body.args[i], user.results[i])]
    return [r for r in user.results if isinstance(r.type, StateType)]


def _matches(
    module: Module, function: Function, chain: Sequence[Value], ctx: PassContext
) -> Iterator[tuple[_LatentCache, Match]]:
    """Matches of either form; reports how far attention that does not match came."""
    appends = {id(v.producer) for v in chain if v.producer is not None}
    for rule in (LatentParts(), ExpandedParts()):
        for op in function.walk():
            if op.name != rule.pattern.ops[-1].name:
                continue
            found = find_match(rule, module, function, op)
            if found is None:
                _report(rule, Matcher(rule.pattern, module, function, op), ctx)
            elif id(found.op("%kv1")) in appends:
                yield rule, found


def _report(rule: _LatentCache, matcher: Matcher, ctx: PassContext) -> None:
    for match in matcher.matches():
        answer = rule.check(match)
        reason = answer.reason if isinstance(answer, Refusal) else "an inner value has other users"
        ctx.refused(rule.name, matcher.root, reason)
        return
    count = f"{matcher.miss.matched}/{len(rule.pattern.ops)}"
    ctx.partial(rule.name, matcher.root, f"best partial match {count} ops: {matcher.miss.reason}")


def _not_convertible(
    chain: Sequence[Value], found: Sequence[tuple[_LatentCache, Match]]
) -> Refusal | None:
    """Why the state cannot change its form: an op outside the matches, or rows of two sizes."""
    matched = {id(op) for _, match in found for op in match.ops.values()}
    for user in (u for value in chain for u in value.users):
        is_plumbing = user.body is not None or (user.name == "return" and not user.results)
        if not is_plumbing and id(user) not in matched:
            return no(f"not every layer is latent attention; the cache also goes to: {user}", user)
    sizes = {(rule.rank(m), rule.rope(m)) for rule, m in found}
    if len(sizes) > 1:
        return no(f"layers cache rows of different sizes: {sorted(map(str, sizes))}")
    return None


def _latent_type(value: Value, found: tuple[_LatentCache, Match]) -> StateType:
    rule, match = found
    state = value.type
    assert isinstance(state, StateType)
    part = state.parts[0]
    row = part.with_dims(part.dims[0], rule.rank(match) + rule.rope(match))
    return replace(state, parts=(row,))
