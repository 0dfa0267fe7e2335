"""Quantization policies: which weight gets which encoding, as one line of text.

    int8                               every linear and expert weight, one scale per row
    int4p(group=32)                    groups of 32; the output head gets int8.  int4p has integer
                                       factors of groups in one scale per row, int4 a float scale
                                       per group: about as exact, slower for long prompts
    int8(group=64), int4z, mxfp4, fp8, f16   what checkpoints are stored in (docs/layouts.md)
    experts=int4p(group=64),*=int8     regular expressions of weight names as the IR prints them (or
                                       of weights they are made from); the first match wins
    lm_head=keep,budget=0.01           "keep" leaves a weight; "budget" picks the cheapest encoding
                                       whose measured NMSE stays inside, weight by weight

A weight that its checkpoint stores quantized stays so, bit by bit; an encoding for every weight
replaces it only where that takes a tenth fewer bytes, a pattern that names it always does.

Never quantized: routers and other gates, norms, biases, embeddings, and MLA's kv_b with its halves
(a group along its latent axis would lie across the absorbed matrices' rows).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, Op, WeightRef
from ktgraph.ir.lexer import ParseError
from ktgraph.ir.types import Encoding
from ktgraph.pass_options import PipelineError, split_top
from ktgraph.weights.encodings import EncodingError, encoding_def, parse_encoding, shape_nbytes

# Cheapest first; a budget takes the first that fits.
LADDER = tuple(
    map(parse_encoding, ("int4p(group=128)", "int4p(group=64)", "int4p(group=32)", "int8"))
)
_HEAD_INT8 = parse_encoding("int8")

# Operands that are matrices applied to activations: the only ones that are ever quantized.
_MATRICES = {
    "nn.linear": (1,),
    "nn.swiglu": (1, 2),
    "moe.experts": (3, 4),
    "moe.grouped_mlp": (3, 4),
}
_STORED = "already stored as"
_HALVES = ("mla_key_half", "mla_value_half")


class PolicyError(UnsupportedInputError):
    """A policy that cannot be read or that names nothing; the message lists what there is."""


@dataclass(frozen=True)
class Use:
    """A weight and the ops that apply it as a matrix; `kept` says why it must stay as it is.

    `stored`: the encoding that its checkpoint has it in, None for a dense one.
    """

    name: str
    ops: tuple[tuple[Op, int], ...]  # with the operand's position
    kept: str
    is_head: bool
    names: tuple[str, ...]  # its own and its ancestors', for patterns
    stored: Encoding | None = None

    @property
    def ref(self) -> WeightRef:
        op, position = self.ops[0]
        return op.weight(position)


@dataclass(frozen=True)
class Decision:
    """What a policy says about one weight: an encoding, None to keep it, or a budget."""

    use: Use
    encoding: Encoding | None
    budget: float | None
    reason: str


@dataclass(frozen=True)
class Policy:
    """A parsed policy; `rules` are (pattern, encoding or None for keep)."""

    text: str
    rules: tuple[tuple[str, Encoding | None], ...]
    budget: float | None = None

    @staticmethod
    def parse(text: str) -> Policy:
        """Read a policy; raises PolicyError showing the part that is wrong."""
        rules: list[tuple[str, Encoding | None]] = []
        budget: float | None = None
        for item in _items(text):
            pattern, value = _split_item(item)
            if pattern == "budget":
                budget = _budget(text, value)
                continue
            if any(earlier in ("*", pattern) for earlier, _ in rules):
                raise PolicyError(
                    f"quantize {text!r}: {item!r} never holds, as the first match wins and a rule "
                    "before it takes these weights: put the narrower pattern first"
                )
            rules.append((_pattern(text, pattern), _encoding(text, value)))
        return Policy(text, tuple(rules), budget)

    def decide(self, module: Module) -> list[Decision]:
        """A decision for every matrix; raises PolicyError for a pattern that matches none."""
        uses = find_uses(module)
        self._check_patterns(uses)
        return [self._decide(use) for use in uses]

    def _decide(self, use: Use) -> Decision:
        if use.kept:
            return Decision(use, None, None, use.kept)
        for pattern, encoding in self.rules:
            if not _matches(pattern, use):
                continue
            if pattern == "*" and use.stored is not None and not _is_smaller(encoding, use.stored):
                return Decision(use, None, None, f"{_STORED} {use.stored}")
            if pattern == "*" and use.is_head and _has_4_bits(encoding):
                return Decision(use, _HEAD_INT8, None, "the output head gets int8 under int4")
            return Decision(use, encoding, None, "" if encoding else f"{pattern}=keep")
        if use.stored is not None:
            return Decision(use, None, None, f"{_STORED} {use.stored}")
        if self.budget is not None:
            return Decision(use, None, self.budget, "")
        return Decision(use, None, None, "no pattern matches")

    def _check_patterns(self, uses: Sequence[Use]) -> None:
        for pattern, encoding in self.rules:
            found = [u for u in uses if _matches(pattern, u)]
            open_ones = [u for u in found if not u.kept or u.kept.startswith(_STORED)]
            if pattern == "*" or open_ones or (found and encoding is None):
                continue
            if found:
                shown = ", ".join(f"@{u.name} ({u.kept})" for u in found[:3])
                raise PolicyError(
                    f"quantize {self.text!r}: the pattern {pattern!r} matches only weights that "
                    f"are never quantized: {shown}"
                )
            raise PolicyError(_nothing(self.text, pattern, uses))


def _items(text: str) -> list[str]:
    try:
        items = [i for i in split_top(text) if i]
    except PipelineError as error:
        raise PolicyError(f"quantize {text!r}: {error}") from None
    if not items:
        raise PolicyError('quantize: the policy is empty; write e.g. "int8" or "int4(group=32)"')
    return items


def _split_item(item: str) -> tuple[str, str]:
    """``pattern=encoding``; an encoding alone is for every weight."""
    *head, last = split_top(item, "=")
    return ("=".join(head), last) if head else ("*", last)


def _budget(text: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise PolicyError(f"quantize {text!r}: budget is an NMSE between 0 and 1, got {value!r}")
    return found


def _pattern(text: str, pattern: str) -> str:
    if pattern == "*":
        return pattern
    try:
        re.compile(pattern)
    except re.error as error:
        raise PolicyError(
            f"quantize {text!r}: {pattern!r} is no pattern: {error}. "
            "Patterns are regular expressions, found anywhere in a name: write q_proj or mlp.*up"
        ) from None
    return pattern


def _encoding(text: str, value: str) -> Encoding | None:
    if value == "keep":
        return None
    try:
        found = parse_encoding(value)
    except ParseError:
        raise PolicyError(
            f"quantize {text!r}: {value!r} is no encoding; write pattern=encoding, "
            'as in "experts=int4p(group=64),*=int8"'
        ) from None
    except EncodingError as error:
        raise PolicyError(f"quantize {text!r}: {error}") from None
    if encoding_def(found).block == 1 and found.name != "f16":
        raise PolicyError(
            f"quantize {text!r}: {value} is no quantized encoding; "
            f"write one of {', '.join(map(str, LADDER))}, or keep"
        )
    if found.name.startswith("gguf."):
        raise PolicyError(
            f"quantize {text!r}: {value} is read from a GGUF file, nothing here quantizes to it; "
            f"write one of {', '.join(map(str, LADDER))}, or keep"
        )
    return found


def _has_4_bits(encoding: Encoding | None) -> bool:
    return encoding is not None and encoding.name in ("int4", "int4p", "int4z", "mxfp4")


def _matches(pattern: str, use: Use) -> bool:
    return pattern == "*" or any(re.search(pattern, name) for name in use.names)


def _nothing(text: str, pattern: str, uses: Sequence[Use]) -> str:
    names = sorted({n for u in uses if not u.kept for n in u.names})
    short = {n.rpartition(".")[2]: n for n in reversed(names)}
    close = difflib.get_close_matches(pattern, [*names, *short], n=3, cutoff=0.4)
    shown = list(dict.fromkeys(short.get(c, c) for c in close)) or names[:8]
    return (
        f"quantize {text!r}: the pattern {pattern!r} matches no weight; "
        f"close names: {', '.join('@' + n for n in shown)}; a part of a name is enough, as in "
        f"{_parts(names)}=int8"
    )


def _parts(names: Sequence[str]) -> str:
    return "experts" if any("experts" in n for n in names) else "mlp"


# -- the weights of a module ----------------------------------------------------------------------
def find_uses(module: Module) -> list[Use]:
    """Weights that ops apply as matrices, in order of first use."""
    places: dict[str, list[tuple[Op, int]]] = {}
    for op in module.walk():
        for position in _MATRICES.get(op.name, ()):
            operand = op.operand(position)
            if isinstance(operand, WeightRef):
                places.setdefault(operand.name, []).append((op, position))
    latent = _latent_weights(module)
    return [_use(module, name, tuple(ops), latent) for name, ops in places.items()]


def _use(module: Module, name: str, ops: tuple[tuple[Op, int], ...], latent: frozenset[str]) -> Use:
    names = tuple(_names(module, name))
    is_head = module.weights[name].type.dims[-2] == Dim.of("VOC") or _is_returned(module, ops)
    stored = module.weights[name].type.encoding if _is_of_checkpoint(module, name) else None
    return Use(name, ops, _kept(module, name, latent), is_head, names, stored)


def _is_of_checkpoint(module: Module, name: str) -> bool:
    """Whether the weight is in its encoding because its checkpoint is."""
    weight = module.weights[name]
    if weight.type.encoding is None or encoding_def(weight.type.encoding).is_dense:
        return False
    made = weight.recipe
    return made is None or (
        made.kind != "quantize" and all(_is_of_checkpoint(module, ref.name) for ref in made.args)
    )


def _is_smaller(encoding: Encoding | None, stored: Encoding) -> bool:
    """Whether an encoding takes a tenth fewer bytes than the stored one; None (keep) does not."""
    if encoding is None:
        return False
    before, after = (shape_nbytes((1, 4096), e) for e in (stored, encoding))
    return after < 0.9 * before


def _names(module: Module, name: str) -> Iterator[str]:
    weight = module.weights[name]
    yield name
    for ref in weight.recipe.args if weight.recipe else ():
        yield from _names(module, ref.name)


def _kept(module: Module, name: str, latent: frozenset[str]) -> str:
    type = module.weights[name].type
    if name in latent:
        return "kv_b and its halves stay as stored"
    if type.dims[-2] in (Dim.of("E"), Dim.of(1)):
        return "a router or gate"
    is_plain = type.encoding is None or encoding_def(type.encoding).is_dense
    if not is_plain and not _is_of_checkpoint(module, name):
        return f"{_STORED} {type.encoding}"
    return ""


def _latent_weights(module: Module) -> frozenset[str]:
    """kv_b of every layer, and what is made from it."""
    roots = {op.weight(4).name for op in module.walk() if op.name == "mla.attend_expanded"}
    made = {
        w.name: w.recipe for w in module.weights.values() if w.recipe and w.recipe.kind in _HALVES
    }
    roots |= {ref.name for recipe in made.values() for ref in recipe.args}
    return frozenset(roots | made.keys())


def _is_returned(module: Module, ops: Sequence[tuple[Op, int]]) -> bool:
    """Whether the op's result is what its function returns."""
    return any(op.result in module.function_of(op).body.returns for op, _ in ops)


__all__ = ["LADDER", "Decision", "Policy", "PolicyError", "Use", "find_uses"]
