"""Op signatures: one string is the shape rule, the result type and the documentation of an op.

    mla.attend(q_lat: f[..., H, R], q_pe: f[..., H, P], kv: kv(f[C, R+P]), batch;
               layer: int, scale: float) -> f[..., H, R]

Dtypes: a concrete one, ``f`` any float, ``i`` any integer, ``any``.  A result written ``f`` has
the dtype of the first ``f`` operand.  Dims are polynomials over pattern names, bound by unification
with the operands' dims; integer attributes may be used by name.  ``...`` (or ``...k``) stands for
any number of axes.  ``?`` marks an optional operand, ``*`` a variadic one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, attr
from ktgraph.ir.parser import parse_dim
from ktgraph.ir.types import BATCH, FLOATS, BatchType, StateType, TensorType, Type

_INTS = frozenset({"i64", "i32", "i8", "u8"})
_Axes = tuple[Dim, ...]


class SignatureError(ValueError):
    """Operands do not fit an op's signature: the message says which, expected and got."""


@dataclass(frozen=True)
class TensorPattern:
    dtype: str
    dims: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.dims)}]"


@dataclass(frozen=True)
class StatePattern:
    parts: tuple[TensorPattern, ...]

    def __str__(self) -> str:
        return f"kv({', '.join(map(str, self.parts))})"


@dataclass(frozen=True)
class Param:
    name: str
    pattern: TensorPattern | StatePattern | None  # None: batch
    optional: bool = False
    variadic: bool = False


@dataclass(frozen=True)
class AttrParam:
    name: str
    kind: str  # int float bool str ints floats strs lists
    default: Attr | None = None  # None: required


@dataclass
class Bindings:
    """What unification found: dims by pattern name, axes by ellipsis, the dtype of ``f``."""

    dims: dict[str, Dim] = field(default_factory=dict[str, Dim])
    axes: dict[str, _Axes] = field(default_factory=dict[str, _Axes])
    dtype: str | None = None


@dataclass(frozen=True)
class Signature:
    text: str
    name: str
    params: tuple[Param, ...]
    attrs: tuple[AttrParam, ...]
    results: tuple[TensorPattern | str, ...]  # a string names the state operand it continues

    def bind(self, types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> Bindings:
        """Unify operand types; raises SignatureError."""
        found = Bindings()
        pairs = self._pairs(types)
        late: list[tuple[str, str, Dim]] = []
        for param, given in pairs:  # variadic operands differ in shape: each binds on its own
            _bind_operand(param, given, Bindings() if param.variadic else found, late)
        for key, value in attrs.items():
            if isinstance(value, Dim):
                found.dims.setdefault(key, value)
        for label, pattern, dim in late:
            _bind_expression(label, pattern, dim, found)
        appends = any(isinstance(r, str) for r in self.results)
        _check_windows([t for _, t in pairs], None if appends else attrs)
        return found

    def _pairs(self, types: Sequence[Type | None]) -> list[tuple[Param, Type]]:
        pairs: list[tuple[Param, Type]] = []
        rest = list(types)
        for param in self.params:
            if param.variadic:
                pairs += [(param, t) for t in rest if t is not None]
                rest = []
                continue
            given = rest.pop(0) if rest else None
            if given is not None:
                pairs.append((param, given))
            elif not param.optional:
                raise SignatureError(f"operand {param.name} is missing")
        if rest:
            raise SignatureError(
                f"{len(types)} operands given, at most {len(self.params)} expected"
            )
        return pairs

    def result_types(self, types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
        """Types of the results; raises SignatureError."""
        found = self.bind(types, attrs)
        return [self._result(r, types, found) for r in self.results]

    def _result(
        self, result: TensorPattern | str, types: Sequence[Type | None], found: Bindings
    ) -> Type:
        if isinstance(result, str):
            position = [p.name for p in self.params].index(result)
            state = types[position]
            assert isinstance(state, StateType)
            return state.on(None)
        dtype = (found.dtype or "f32") if result.dtype == "f" else result.dtype
        dims: list[Dim] = []
        for item in result.dims:
            if item.startswith("..."):
                dims += found.axes.get(item, ())
            else:
                dims.append(_evaluate(item, found))
        return TensorType(dtype, tuple(dims))

    def normal_attrs(self, attrs: Mapping[str, object]) -> dict[str, Attr]:
        """Declared order, defaults left out; raises SignatureError for unknown or missing ones."""
        known = {a.name: a for a in self.attrs}
        unknown = [k for k in attrs if k not in known]
        if unknown:
            names = ", ".join(known) or "none"
            raise SignatureError(f"unknown attribute {unknown[0]!r} (known: {names})")
        out: dict[str, Attr] = {}
        for param in self.attrs:
            if param.name not in attrs:
                if param.default is None:
                    raise SignatureError(f"attribute {param.name} ({param.kind}) is missing")
                continue
            value = attr(attrs[param.name])
            if param.kind == "float" and isinstance(value, Dim):
                value = float(value.const())
            _check_kind(param, value)
            if value != param.default or type(value) is not type(param.default):
                out[param.name] = value
        return out

    def full_attrs(self, attrs: Mapping[str, Attr]) -> dict[str, Attr]:
        """All attributes, with defaults filled in."""
        out = {a.name: a.default for a in self.attrs if a.default is not None}
        return {**out, **attrs}


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (Dim,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
    "ints": (tuple,),
    "floats": (tuple,),
    "strs": (tuple,),
    "lists": (tuple,),  # of lists
}


def _check_kind(param: AttrParam, value: Attr) -> None:
    if not isinstance(value, _KINDS[param.kind]):
        raise SignatureError(f"attribute {param.name} is a {param.kind}, got {value!r}")


def _check_windows(types: Sequence[Type], reader: Mapping[str, Attr] | None) -> None:
    """A cache is addressed by the batch of its own window, and looked back into no further.

    reader: the attributes of an op that reads the cache, None for one that appends.
    """
    states = [t for t in types if isinstance(t, StateType)]
    batches = [t for t in types if isinstance(t, BatchType)]
    for state, batch in zip(states, batches, strict=False):
        if state.window != batch.window:
            raise SignatureError(f"{state} is addressed by a batch of its own window, got {batch}")
        back = None if reader is None else reader.get("window", Dim.of(0))
        if state.window is not None and back is not None and back != state.window:
            raise SignatureError(
                f"the cache keeps the last {state.window} rows, and the op looks back {back} "
                "(0: over all rows)"
            )


def _bind_operand(
    param: Param, given: Type, found: Bindings, late: list[tuple[str, str, Dim]]
) -> None:
    if param.pattern is None:
        if not isinstance(given, BatchType):
            raise SignatureError(f"operand {param.name} must be the batch, got {given}")
        return
    if isinstance(param.pattern, StatePattern):
        _bind_state(param, param.pattern, given, found, late)
        return
    if not isinstance(given, TensorType):
        raise SignatureError(f"operand {param.name} must be a {param.pattern}, got {given}")
    # the operands of a variadic parameter may differ in shape: the op's own rule compares them
    into = Bindings() if param.variadic else found
    _bind_tensor(param.name, param.pattern, given, into, late)
    found.dtype = found.dtype or into.dtype


def _bind_state(
    param: Param,
    pattern: StatePattern,
    given: Type,
    found: Bindings,
    late: list[tuple[str, str, Dim]],
) -> None:
    if not isinstance(given, StateType) or len(given.parts) != len(pattern.parts):
        raise SignatureError(f"operand {param.name} must be a {pattern}, got {given}")
    for part, part_type in zip(pattern.parts, given.parts, strict=True):
        _bind_tensor(param.name, part, part_type, found, late, is_state=True)


def _bind_tensor(
    label: str,
    pattern: TensorPattern,
    given: TensorType,
    found: Bindings,
    late: list[tuple[str, str, Dim]],
    is_state: bool = False,
) -> None:
    if not _dtype_fits(pattern.dtype, given.dtype):
        raise SignatureError(f"operand {label} must be a {pattern}, got {given}")
    if pattern.dtype == "f" and found.dtype is None and not is_state:
        found.dtype = given.dtype
    spread = [i for i, d in enumerate(pattern.dims) if d.startswith("...")]
    extra = given.rank - (len(pattern.dims) - len(spread))
    if extra < 0 or (not spread and extra):
        raise SignatureError(f"operand {label} must be a {pattern}, got {given}")
    axes = list(given.dims)
    for item in pattern.dims:
        if item.startswith("..."):
            # with two spreads the first takes what the second, if bound, leaves
            take = extra
            if len(spread) == 2:
                bound = {s: found.axes.get(s) for s in (pattern.dims[i] for i in spread)}
                other = next(s for s in bound if s != item)
                known = bound[item] if bound[item] is not None else None
                rest = bound[other]
                take = len(known) if known is not None else extra - len(rest or ())
                extra -= take
            taken, axes = tuple(axes[:take]), axes[take:]
            _bind_axes(label, item, taken, found)
            continue
        dim = axes.pop(0)
        if item.isidentifier() and item not in found.dims:
            found.dims[item] = dim
        elif item.isidentifier():
            _same(label, item, dim, found.dims[item])
        else:
            late.append((label, item, dim))


def _bind_axes(label: str, item: str, taken: _Axes, found: Bindings) -> None:
    before = found.axes.setdefault(item, taken)
    if before != taken:
        raise SignatureError(f"operand {label}: axes {_show(taken)} differ from {_show(before)}")


def _bind_expression(label: str, pattern: str, dim: Dim, found: Bindings) -> None:
    expression = parse_dim(pattern).subst(dict(found.dims))
    free = sorted(parse_dim(pattern).names - found.dims.keys())
    if not free:
        _same(label, pattern, dim, expression)
        return
    if len(free) > 1:
        return  # under-determined: a later operand decides
    name = free[0]
    factor = expression.subst({name: 1}) - expression.subst({name: 0})
    solved = (dim - expression.subst({name: 0})).divide(factor)
    if solved is None:
        raise SignatureError(f"operand {label}: {dim} is not of the form {pattern}")
    found.dims[name] = solved


def _same(label: str, pattern: str, got: Dim, want: Dim) -> None:
    if got != want:
        raise SignatureError(f"operand {label}: axis {pattern} is {got}, expected {want}")


def _evaluate(item: str, found: Bindings) -> Dim:
    expression = parse_dim(item)
    missing = sorted(expression.names - found.dims.keys())
    if missing:
        raise SignatureError(f"result axis {item}: {missing[0]} is not determined by the operands")
    return expression.subst(dict(found.dims))


def _dtype_fits(pattern: str, dtype: str) -> bool:
    if pattern == "any":
        return True
    if pattern == "f":
        return dtype in FLOATS
    if pattern == "i":
        return dtype in _INTS
    return pattern == dtype


def _show(axes: _Axes) -> str:
    return f"[{', '.join(map(str, axes))}]"


# -- reading a signature string -----------------------------------------------------------------
_HEAD = re.compile(r"\s*([a-z0-9_.]+)\((.*)\)\s*->\s*(.+)", re.DOTALL)


def parse_signature(text: str) -> Signature:
    """Read a signature string; raises ValueError for a malformed one (an author's mistake)."""
    found = _HEAD.fullmatch(" ".join(text.split()))
    if found is None:
        raise ValueError(f"malformed signature: {text}")
    name, inside, result = found.groups()
    params_text, _, attrs_text = inside.partition(";")
    params = tuple(_param(p) for p in _split(params_text))
    attrs = tuple(_attr_param(a) for a in _split(attrs_text))
    states = {p.name for p in params if isinstance(p.pattern, StatePattern)}
    results = tuple(
        r if r in states else _tensor_pattern(r)
        for r in _split(result.strip().strip("()") if result.strip().startswith("(") else result)
    )
    return Signature(" ".join(text.split()), name, params, attrs, results)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items: list[str] = []
    depth, current = 0, ""
    for char in text:
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            items.append(current.strip())
            current = ""
        else:
            current += char
    return [i for i in [*items, current.strip()] if i]


def _param(text: str) -> Param:
    if text == "batch":
        return Param("batch", None)
    name, _, pattern = text.partition(":")
    pattern = pattern.strip()
    optional, variadic = pattern.endswith("?"), pattern.endswith("*")
    pattern = pattern.rstrip("?*")
    if pattern.startswith("kv("):
        parts = tuple(_tensor_pattern(p) for p in _split(pattern[3:-1]))
        return Param(name.strip(), StatePattern(parts), optional)
    return Param(name.strip(), _tensor_pattern(pattern), optional, variadic)


def _tensor_pattern(text: str) -> TensorPattern:
    dtype, _, dims = text.strip().partition("[")
    if not dims.endswith("]"):
        raise ValueError(f"malformed type pattern: {text}")
    return TensorPattern(dtype, tuple(_split(dims[:-1])))


def _attr_param(text: str) -> AttrParam:
    name, _, rest = text.partition(":")
    kind, _, default = rest.partition("=")
    if not default.strip():
        return AttrParam(name.strip(), kind.strip())
    from ktgraph.ir.parser import Parser

    value = Parser(default.strip(), text).attr()
    return AttrParam(name.strip(), kind.strip(), value)


__all__ = [
    "BATCH",
    "AttrParam",
    "Bindings",
    "Param",
    "Signature",
    "SignatureError",
    "StatePattern",
    "TensorPattern",
    "parse_signature",
]
