"""Placement rules: a YAML file that overrides what `place` and `quantize` would choose.

    - match:
        name: '^model\\.layers\\.(1[0-9]|2[0-6])\\.mlp\\.experts'   # value, loc or weight name
        class: moe.*                                            # op name; * and ? as in a shell
      replace:
        device: cpu
        encoding: int4(group=64)
      phase: decode                                             # optional
    - match: {class: moe.grouped_mlp}
      replace: {device: hot, experts: 16}                       # see placement/hot.py

Of several rules that match an op the first one holds, for each layer of its own.  A rule that
matches nothing is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import yaml

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, WeightRef
from ktgraph.ir.lexer import ParseError
from ktgraph.ir.parser import parse_dim
from ktgraph.ir.repeats import split_repeat_at
from ktgraph.ir.types import Encoding
from ktgraph.ops.registry import op_def
from ktgraph.placement.graph import HOT
from ktgraph.weights.encodings import EncodingError, parse_encoding

_KEYS = {"rule": ("match", "replace", "phase"), "match": ("name", "class"),
         "replace": ("device", "encoding", "experts")}  # fmt: skip
KEEP = "keep"
RULES_FILE = "placement_rules.yaml"  # the rules that `place` read, in a dump


class RuleError(UnsupportedInputError):
    """A rules file that cannot be read, or a rule that matches nothing; says file and line."""


@dataclass(frozen=True)
class Rule:
    """One entry.  `encoding` is an `Encoding`, KEEP to leave weights as they are, or None.

    experts: of device `hot`, how many experts of a layer get slots; None: as many as fit.
    """

    where: str  # file:line
    name: str | None
    op_class: str | None
    device: str | None
    encoding: Encoding | str | None
    phase: str | None
    experts: int | None = None

    def __str__(self) -> str:
        parts = [f"name: {self.name}"] if self.name is not None else []
        parts += [f"class: {self.op_class}"] if self.op_class is not None else []
        return f"{self.where} ({', '.join(parts)})"

    def matches(self, site: OpSite) -> bool:
        """Whether the rule is about an op at a layer of a phase."""
        if self.phase is not None and site.phase not in (self.phase, "any"):
            return False
        if self.op_class is not None and not fnmatchcase(site.op.name, self.op_class):
            return False
        return self.name is None or any(re.search(self.name, n) for n in site.names)


@dataclass(frozen=True)
class OpSite:
    """An op at one layer, with every name it can be matched by."""

    func: Function
    op: Op
    layer: int | None
    names: tuple[str, ...]

    @property
    def phase(self) -> str:
        return str(self.func.attrs.get("phase", "any"))


# -- reading ---------------------------------------------------------------------------------------
def read_rules(path: str | Path) -> list[Rule]:
    """The rules of a file; raises RuleError with file and line for whatever is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RuleError(f"rules file {path}: {reason}") from None
    return parse_rules(text, str(path))


def parse_rules(text: str, file: str = "<rules>") -> list[Rule]:
    """The rules in a YAML text."""
    try:
        root = cast("Any", yaml.compose(text))  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or "malformed YAML"
        raise RuleError(f"{file}:{line}: {problem}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.SequenceNode):
        raise RuleError(f"{file}:1: expected a list of rules, each beginning with '- match:'")
    return [_rule(node, file) for node in root.value]


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _mapping(node: Any, file: str, kind: str) -> dict[str, Any]:
    where = f"{file}:{_line(node)}"
    if not isinstance(node, yaml.MappingNode):
        raise RuleError(f"{where}: {kind} must be a mapping of {', '.join(_KEYS[kind])}")
    found: dict[str, Any] = {}
    for key, value in node.value:
        name = str(key.value)
        if name not in _KEYS[kind]:
            close = difflib.get_close_matches(name, _KEYS[kind], n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            known = ", ".join(_KEYS[kind])
            at = f"{file}:{_line(key)}"
            raise RuleError(f"{at}: unknown key {name!r} in {kind}{hint}; known: {known}")
        found[name] = value
    return found


def _text(node: Any, file: str, key: str) -> str | None:
    if node is None:
        return None
    if not isinstance(node, yaml.ScalarNode) or not str(node.value).strip():
        raise RuleError(f"{file}:{_line(node)}: {key} must be a text")
    return str(node.value)


def _rule(node: Any, file: str) -> Rule:
    where = f"{file}:{_line(node)}"
    given = _mapping(node, file, "rule")
    for key in ("match", "replace"):
        if key not in given:
            raise RuleError(f"{where}: the rule has no {key}")
    match = _mapping(given["match"], file, "match")
    replace = _mapping(given["replace"], file, "replace")
    if not match or not replace:
        raise RuleError(f"{where}: match needs name or class, replace needs device or encoding")
    name = _text(match.get("name"), file, "name")
    if name is not None:
        try:
            re.compile(name)
        except re.error as error:
            at = f"{file}:{_line(match['name'])}"
            raise RuleError(f"{at}: {name!r} is no regular expression: {error}") from None
    phase = _text(given.get("phase"), file, "phase")
    if phase not in (None, "prefill", "decode"):
        at = f"{file}:{_line(given['phase'])}"
        raise RuleError(f"{at}: phase must be prefill or decode, got {phase!r}")
    device = _text(replace.get("device"), file, "device")
    return Rule(
        where,
        name,
        _text(match.get("class"), file, "class"),
        device,
        _encoding(replace.get("encoding"), file),
        phase,
        _experts(replace.get("experts"), file, device),
    )


def _experts(node: Any, file: str, device: str | None) -> int | None:
    text = _text(node, file, "experts")
    if text is None:
        return None
    where = f"{file}:{_line(node)}"
    if device != HOT:
        raise RuleError(f"{where}: experts says how many are hot: it goes with device: {HOT}")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise RuleError(f"{where}: experts must be a whole number above 0, got {text!r}")
    return int(text)


def _encoding(node: Any, file: str) -> Encoding | str | None:
    text = _text(node, file, "encoding")
    if text is None or text == KEEP:
        return text
    try:
        return parse_encoding(text)
    except (EncodingError, ParseError) as error:
        raise RuleError(f"{file}:{_line(node)}: {error}") from None


# -- matching --------------------------------------------------------------------------------------
def op_sites(module: Module) -> Iterator[OpSite]:
    """Every op that computes, once for each layer of its repeat."""
    for func in module.functions.values():
        yield from _sites(module, func, func.body, "", (None,))


def _sites(
    module: Module, func: Function, block: Block, index: str, layers: Sequence[int | None]
) -> Iterator[OpSite]:
    for op in block.ops:
        if op.body is not None:
            span = range(op.int_attr("lo"), op.int_attr("hi") + 1)
            yield from _sites(module, func, op.body, str(op.attrs["index"]), list(span))
        elif not op_def(op.name).is_view:
            for layer in layers:
                yield OpSite(func, op, layer, _names(module, op, index, layer))


def _names(module: Module, op: Op, index: str, layer: int | None) -> tuple[str, ...]:
    """Names of an op at one turn of its repeat: of values, of the module, of its weights."""
    bound = {} if layer is None else {index: layer}
    names = [r.name for r in op.results]
    if op.loc:
        names.append(_with_numbers(op.loc, bound))
    for ref in (_member(r, bound) for r in op.weights):
        names += [str(ref)[1:], *_origins(module, ref)]
    return tuple(dict.fromkeys(names))


def _member(ref: WeightRef, bound: Mapping[str, int]) -> WeightRef:
    if ref.index is None or not ref.index.names <= bound.keys():
        return ref
    return WeightRef(ref.name, Dim.of(ref.index.at(bound)))


def _with_numbers(path: str, bound: Mapping[str, int]) -> str:
    """``model.layers.{2*i+1}.mlp`` at i = 3: ``model.layers.7.mlp``."""

    def number(found: re.Match[str]) -> str:
        index = parse_dim(found[1])
        return str(index.at(bound)) if index.names <= bound.keys() else found[0]

    return re.sub(r"\{([^{}]*)\}", number, path)


def _origins(module: Module, ref: WeightRef) -> Iterator[str]:
    """Names of what a weight was made from, and of tensors in the checkpoint."""
    weight = module.weights.get(ref.name)
    if weight is None:
        return
    is_member = weight.is_family and ref.index is not None and ref.index.is_const
    bound = {weight.var: ref.index.const()} if is_member and ref.index is not None else {}
    if weight.source is not None:
        yield _with_numbers(weight.source, bound)
    for arg in weight.recipe.args if weight.recipe is not None else ():
        yield str(_member(arg, bound))[1:]
        yield from _origins(module, _member(arg, bound))


def match_rules(
    module: Module, rules: Sequence[Rule], devices: Sequence[str] = ()
) -> dict[tuple[Op, int | None], Rule]:
    """The rule that holds for each (op, layer), the first that matches.

    Raises RuleError for a rule that matches nothing, or that names a device which is not there.
    """
    for rule in rules:
        if devices and rule.device is not None and rule.device not in devices:
            known = ", ".join(devices)
            hint = "; it needs a target with a GPU" if rule.device in ("hot", "stream") else ""
            raise RuleError(
                f"{rule.where}: device {rule.device} is not there; devices: {known}{hint}"
            )
    found: dict[tuple[Op, int | None], Rule] = {}
    hits = dict.fromkeys(range(len(rules)), 0)
    sites = list(op_sites(module))
    for site in sites:
        matching = [n for n, rule in enumerate(rules) if rule.matches(site)]
        for number in matching:
            hits[number] += 1
        if matching:
            found[site.op, site.layer] = rules[matching[0]]
    for number, count in hits.items():
        if count == 0:
            raise RuleError(_nothing(rules[number], sites))
    return found


def _nothing(rule: Rule, sites: Sequence[OpSite]) -> str:
    names = sorted({n for s in sites for n in s.names})
    classes = sorted({s.op.name for s in sites})
    wanted, known = (rule.name, names) if rule.name is not None else (rule.op_class, classes)
    plain = re.sub(r"\\(.)|[\^$*+?()|]", lambda m: m[1] or "", wanted or "")
    close = difflib.get_close_matches(plain, known, n=3, cutoff=0.3) or known[:3]
    if rule.name is not None and any(re.search(rule.name, n) for n in names):
        held = [s.op.name for s in sites if any(re.search(rule.name, n) for n in s.names)]
        return (
            f"{rule}: the rule matches nothing: ops with such names are "
            f"{', '.join(dict.fromkeys(held))}, not of class {rule.op_class} in that phase"
        )
    return f"{rule}: the rule matches nothing; close names: {', '.join(close)}"


def split_where_rules_differ(module: Module, rules: Sequence[Rule]) -> None:
    """Split repeats so that every op has one rule in all of its layers."""
    held = match_rules(module, rules)
    for func in module.functions.values():
        for op in [o for o in func.walk() if o.body is not None]:
            assert op.body is not None
            inner = [o for o in op.body.walk() if o.body is None]
            lo, hi = op.int_attr("lo"), op.int_attr("hi")
            per_layer = [[held.get((o, n)) for o in inner] for n in range(lo, hi + 1)]
            starts = [lo + n for n in range(1, len(per_layer)) if per_layer[n] != per_layer[n - 1]]
            split_repeat_at(func, op, starts)


def rule_encodings(module: Module, rules: Sequence[Rule]) -> dict[Op, Encoding | str]:
    """What rules say about the weights of each op: an encoding, or KEEP.

    Raises RuleError when the layers of one op differ (`place` splits the repeat there).
    """
    if not any(r.encoding is not None for r in rules):
        return {}
    found: dict[Op, Encoding | str | None] = {}
    for site, rule in _held_by_site(module, rules):
        wanted = rule.encoding if rule is not None else None
        if site.op in found and found[site.op] != wanted:
            raise RuleError(
                f"{rule or 'rules'}: encodings differ between layers of one op: run the pass place "
                f"with the same rules first\n  in: {site.op}"
            )
        found[site.op] = wanted
    return {op: e for op, e in found.items() if e is not None}


def _held_by_site(module: Module, rules: Sequence[Rule]) -> Iterator[tuple[OpSite, Rule | None]]:
    held = match_rules(module, rules)
    for site in op_sites(module):
        yield site, held.get((site.op, site.layer))


__all__ = [
    "KEEP",
    "RULES_FILE",
    "OpSite",
    "Rule",
    "RuleError",
    "match_rules",
    "op_sites",
    "parse_rules",
    "read_rules",
    "rule_encodings",
    "split_where_rules_differ",
]
