"""Copies of modules: deep clone, and rebinding of named dims to a miniature."""

from __future__ import annotations

from dataclasses import replace

from ktgraph.ir.graph import Block, Function, Module, Op, Operand, Value, Witness


def clone_module(module: Module) -> Module:
    """A deep copy that shares no mutable object with `module`."""
    copy = Module(module.name)
    copy.home, copy.target_hash = module.home, module.target_hash
    copy.dims, copy.syms = dict(module.dims), dict(module.syms)
    copy.devices = {k: dict(v) for k, v in module.devices.items()}
    copy.weights = {k: replace(w) for k, w in module.weights.items()}
    copy.witnesses = [Witness(dict(w.bindings), list(w.literals)) for w in module.witnesses]
    for func in module.functions.values():
        clone_function(func, copy.add_function(func.name))
    return copy


def clone_function(source: Function, target: Function) -> None:
    """Fill the empty function `target` with a copy of `source`."""
    target.attrs = dict(source.attrs)
    clone_block(source.body, target.body, {})


def clone_block(source: Block, target: Block, mapping: dict[Value, Value]) -> None:
    """Copy args, ops and returns; `mapping` maps old values to new ones and is extended."""
    for arg in source.args:
        mapping[arg] = target.add_arg(arg.name, arg.type)
    for op in source.ops:
        target.append(clone_op(op, mapping))
    target.set_returns([mapping.get(v, v) for v in source.returns])


def clone_op(op: Op, mapping: dict[Value, Value]) -> Op:
    """Copy one op with mapped operands; its results are added to `mapping`."""
    operands: list[Operand] = [
        mapping.get(o, o) if isinstance(o, Value) else o for o in op.operands
    ]
    body = None
    if op.body is not None:
        body = Block()
        clone_block(op.body, body, mapping)
    results = [(r.name, r.type) for r in op.results]
    copy = Op(op.name, operands, results, op.attrs, via=op.via, loc=op.loc, body=body)
    copy.line = op.line
    mapping.update(zip(op.results, copy.results, strict=True))
    return copy


def rebind_module(module: Module, dims: dict[str, int]) -> Module:
    """A clone whose named dims have the values given (others keep theirs).

    Raises ValueError for a name that is not a dim of the module.
    """
    unknown = sorted(set(dims) - set(module.dims))
    if unknown:
        known = ", ".join(sorted(module.dims))
        raise ValueError(
            f"rebind: {', '.join(unknown)} is no dim of @{module.name} (dims: {known})"
        )
    copy = clone_module(module)
    copy.dims.update(dims)
    return copy
