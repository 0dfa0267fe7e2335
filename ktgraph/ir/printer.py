"""The printer: canonical text of a module, a function or an op.  It never fails on invalid IR."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import (
    Attr,
    Block,
    Function,
    Module,
    Op,
    Operand,
    Recipe,
    Value,
    Weight,
    WeightRef,
)
from ktgraph.ir.types import Type


def print_attr(value: Attr) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(print_attr(v) for v in value) + "]"
    return str(value) if isinstance(value, Dim) else repr(float(value))


def print_attrs(attrs: Mapping[str, Attr]) -> str:
    """`` {k = v, …}`` with its leading space, or nothing."""
    if not attrs:
        return ""
    return " {" + ", ".join(f"{k} = {print_attr(v)}" for k, v in attrs.items()) + "}"


class _Names:
    """How values are written: their own names, or numbered for the structural text."""

    def __init__(self, structural: bool = False) -> None:
        self.structural = structural
        self._numbers: dict[int, int] = {}

    def of(self, value: Value) -> str:
        if not self.structural:
            return f"%{value.name}"
        return f"%{self._numbers.setdefault(id(value), len(self._numbers))}"

    def operand(self, operand: Operand) -> str:
        if operand is None:
            return "_"
        return self.of(operand) if isinstance(operand, Value) else str(operand)


def print_op(op: Op) -> str:
    """The op's line(s) without indentation; used by dumps and by error messages alike."""
    return "\n".join(_op_lines(op, _Names(), ""))


def print_module(module: Module) -> str:
    """Canonical text of a module, ending in a newline."""
    return "\n".join(_module_lines(module, _Names())) + "\n"


def structural_text(module: Module) -> str:
    """The text that equality and hashes use: values numbered, no locs, weights in name order."""
    return "\n".join(_module_lines(module, _Names(structural=True)))


def _module_lines(module: Module, names: _Names) -> list[str]:
    head = f"module @{module.name}" + (f" home {module.home}" if module.home else "")
    lines = ["ktgraph.ir 1", "module" if names.structural else head]
    if names.structural and module.home:
        lines[-1] += f" home {module.home}"
    if module.target_hash:
        lines.append(f'target "{module.target_hash}"')
    if module.dims:
        lines.append("dim " + ", ".join(f"{k} = {v}" for k, v in sorted(module.dims.items())))
    lines += [f"sym {k} in {lo}..{hi}" for k, (lo, hi) in sorted(module.syms.items())]
    lines += [f"device {k}{print_attrs(v) or ' {}'}" for k, v in module.devices.items()]
    weights: Iterable[Weight] = module.weights.values()
    if names.structural:
        weights = sorted(weights, key=lambda w: w.name)
    lines += [print_weight(w) for w in weights]
    for witness in module.witnesses:
        bindings = print_attrs({k: Dim.of(v) for k, v in witness.bindings.items()}) or " {}"
        lines.append(f"witness{bindings} = [{', '.join(map(str, witness.literals))}]")
    for func in module.functions.values():
        lines += ["", *_function_lines(func, names)]
    return lines


def print_weight(weight: Weight) -> str:
    """The declaration line of a weight."""
    name = weight.name
    if weight.is_family:
        name = name.replace("[]", f"[{weight.var} in {weight.lo}..{weight.hi}]", 1)
    line = f"weight @{name} : {weight.type}"
    if weight.source is not None:
        line += f" from {print_attr(weight.source)}"
    if weight.recipe is not None:
        line += f" = {_recipe(weight.recipe)}"
    return line


def _recipe(recipe: Recipe) -> str:
    args = ", ".join(map(str, recipe.args))
    return f"{recipe.kind}({args}){print_attrs(dict(recipe.attrs))}"


def _function_lines(func: Function, names: _Names) -> list[str]:
    params = ", ".join(f"{names.of(a)}: {a.type}" for a in func.args)
    types = ", ".join(str(v.type) for v in func.body.returns)
    head = f"func @{func.name}({params}){print_attrs(func.attrs)} -> ({types}) {{"
    return [head, *_block_lines(func.body, names, "  ", "return"), "}"]


def _block_lines(block: Block, names: _Names, indent: str, end: str) -> list[str]:
    lines = [line for op in block.ops for line in _op_lines(op, names, indent)]
    ends = ", ".join(names.operand(o) for o in block.terminator.operands)
    return [*lines, f"{indent}{end} {ends}".rstrip()]


def _op_lines(op: Op, names: _Names, indent: str) -> list[str]:
    if op.body is not None:
        return _repeat_lines(op, names, indent)
    operands = ", ".join(names.operand(o) for o in op.operands)
    line = f"{op.name} {operands}".rstrip() + print_attrs(op.attrs)
    if op.results:
        results = ", ".join(names.of(r) for r in op.results)
        line = f"{results} = {line} : {_types(r.type for r in op.results)}"
    if op.via:
        line += f" via {op.via}"
    if op.loc and not names.structural:
        line += f" loc {print_attr(op.loc)}"
    return [indent + line]


def _repeat_lines(op: Op, names: _Names, indent: str) -> list[str]:
    assert op.body is not None
    attrs = {k: v for k, v in op.attrs.items() if k not in ("index", "lo", "hi")}
    results = ", ".join(names.of(r) for r in op.results)
    carried = ", ".join(
        f"{names.of(a)} = {names.operand(o)}"
        for a, o in zip(op.body.args, op.operands, strict=False)
    )
    span = f"{op.attrs.get('index')} in {op.attrs.get('lo')}..{op.attrs.get('hi')}"
    head = f"{indent}{results} = repeat {span} ({carried}){print_attrs(attrs)} {{"
    body = _block_lines(op.body, names, indent + "  ", "yield")
    return [head, *body, f"{indent}}} : {_types(r.type for r in op.results)}"]


def _types(types: Iterable[Type]) -> str:
    return ", ".join(str(t) for t in types)


__all__ = [
    "WeightRef",
    "print_attr",
    "print_attrs",
    "print_module",
    "print_op",
    "print_weight",
    "structural_text",
]
