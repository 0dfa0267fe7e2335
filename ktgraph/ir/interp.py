"""The reference interpreter: runs a module, at any stage, on the ops' torch references.

It is slow and plain on purpose: what it computes is what the IR means.  Weights come from a
provider, so the same module runs on a checkpoint or, rebound to a miniature, on random weights in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, Block, Function, Module, Op, Operand, Value, WeightRef
from ktgraph.ir.types import StateType, TensorType, Type
from ktgraph.ops.registry import op_def
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State


class WeightProvider(Protocol):
    """Gives a weight's value in its compute dtype."""

    def tensor(self, ref: WeightRef, index: int | None) -> torch.Tensor: ...


# called after each op: the op, its operands, its attributes, its results
Observer = Callable[[Op, Sequence[Any], Mapping[str, Any], Sequence[Any]], None]


class InterpError(RuntimeError):
    """An op's reference failed or gave another type than the IR says; names the op line."""


class Interpreter:
    """Runs functions of a module; `dtype` overrides every float type (float64 to validate)."""

    def __init__(
        self,
        module: Module,
        weights: WeightProvider,
        dtype: torch.dtype | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.module = module
        self.weights = weights
        self.dtype = dtype
        self.observe = observe

    def run(
        self, function: str, inputs: Sequence[Any], sizes: Mapping[str, int] | None = None
    ) -> list[Any]:
        """Run `@function`; inputs are tensors, `Batch` and `State` in argument order.

        `sizes` binds syms that no argument shape determines.
        """
        func = self.module.functions[function]
        if len(inputs) != len(func.args):
            raise InterpError(f"@{function} takes {len(func.args)} arguments, got {len(inputs)}")
        bindings = self._sizes(func, inputs, dict(sizes or {}))
        env: dict[Value, Any] = dict(zip(func.args, map(self._cast, inputs), strict=True))
        self._run_block(func.body, env, bindings)
        return [env[v] for v in func.body.returns]

    def new_state(self, type: StateType, rows: int) -> State:
        """A cache of `rows` rows per layer, filled with NaN: reading an unwritten row shows."""
        bindings = {**self.module.dims, "C": rows}
        layers = type.layers.at(bindings)
        parts = [self._empty(p, layers, bindings) for p in type.parts]
        return State(tuple(parts))

    def _empty(self, part: TensorType, layers: int, bindings: Mapping[str, int]) -> torch.Tensor:
        shape = [layers, *(d.at(bindings) for d in part.dims)]
        return torch.full(shape, float("nan"), dtype=self.dtype or torch_dtype(part.dtype))

    def _cast(self, value: Any) -> Any:
        if self.dtype is None or not isinstance(value, torch.Tensor):
            return value
        return value.to(self.dtype) if value.is_floating_point() else value

    def _sizes(
        self, func: Function, inputs: Sequence[Any], sizes: dict[str, int]
    ) -> dict[str, int]:
        for arg, given in zip(func.args, inputs, strict=True):
            if isinstance(given, Batch):
                sizes.setdefault("T", given.tokens)
                sizes.setdefault("B", given.sequences)
                sizes.setdefault("O", int(given.out_rows.numel()))
                sizes.setdefault("S", int(given.kv_len.sum()))
            if isinstance(given, State) and isinstance(arg.type, StateType):
                sizes.setdefault("C", given.parts[0].shape[1])
            if isinstance(given, torch.Tensor) and isinstance(arg.type, TensorType):
                for dim, size in zip(arg.type.dims, given.shape, strict=True):
                    if len(dim.names) == 1 and dim == Dim.of(next(iter(dim.names))):
                        sizes.setdefault(next(iter(dim.names)), size)
        return {**self.module.dims, **sizes}

    def _run_block(self, block: Block, env: dict[Value, Any], bindings: dict[str, int]) -> None:
        for op in block.ops:
            if op.body is not None:
                self._run_repeat(op, env, bindings)
            else:
                self._run_op(op, env, bindings)

    def _run_repeat(self, op: Op, env: dict[Value, Any], bindings: dict[str, int]) -> None:
        assert op.body is not None
        carried = [env[v] for v in op.values]
        index = str(op.attrs["index"])
        for i in range(op.int_attr("lo"), op.int_attr("hi") + 1):
            inner = {**env, **dict(zip(op.body.args, carried, strict=True))}
            self._run_block(op.body, inner, {**bindings, index: i})
            carried = [inner[v] for v in op.body.returns]
        env.update(zip(op.results, carried, strict=True))

    def _run_op(self, op: Op, env: dict[Value, Any], bindings: dict[str, int]) -> None:
        definition = op_def(op.name)
        operands = [self._operand(o, env, bindings) for o in op.operands]
        full = definition.signature.full_attrs(op.attrs)
        attrs = {k: evaluate_attr(v, bindings) for k, v in full.items()}
        try:
            found = definition.reference(*operands, **attrs)
        except Exception as error:
            raise InterpError(f"{type(error).__name__}: {error}\n  in: {op}") from error
        results = cast(tuple[Any, ...], found if isinstance(found, tuple) else (found,))
        if len(results) != len(op.results):
            raise InterpError(f"{len(results)} results, {len(op.results)} declared\n  in: {op}")
        for value, result in zip(op.results, results, strict=True):
            self._check(op, value, result, bindings)
            env[value] = result
        if self.observe is not None:
            self.observe(op, operands, attrs, results)

    def _operand(self, operand: Operand, env: dict[Value, Any], bindings: dict[str, int]) -> Any:
        if operand is None:
            return None
        if isinstance(operand, Value):
            return env[operand]
        index = None if operand.index is None else operand.index.at(bindings)
        return self._cast(self.weights.tensor(operand, index))

    def _check(self, op: Op, value: Value, result: Any, bindings: Mapping[str, int]) -> None:
        if not isinstance(value.type, TensorType):
            return
        try:
            want = [d.at(bindings) for d in value.type.dims]
        except KeyError as missing:
            raise InterpError(f"size of {missing} is not known\n  in: {op}") from None
        if list(result.shape) != want:
            raise InterpError(
                f"%{value.name} has shape {list(result.shape)}, not {want}\n  in: {op}"
            )
        if not self._dtype_fits(value.type, result.dtype):
            raise InterpError(
                f"%{value.name} is {result.dtype}, not {value.type.dtype}\n  in: {op}"
            )

    def _dtype_fits(self, type: TensorType, found: torch.dtype) -> bool:
        if self.dtype is not None and found.is_floating_point:
            return found in (self.dtype, torch.float32)
        return found == torch_dtype(type.dtype)


def evaluate_attr(value: Attr, bindings: Mapping[str, int]) -> Any:
    """An attribute as a plain Python value: dims become integers, tuples lists."""
    if isinstance(value, Dim):
        return value.at(bindings)
    if isinstance(value, tuple):
        return [evaluate_attr(v, bindings) for v in value]
    return value


__all__ = ["InterpError", "Interpreter", "Observer", "Type", "WeightProvider", "evaluate_attr"]
