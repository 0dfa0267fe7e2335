"""Drive a module, at any stage, through one logical trace: ragged prefill, a chunk, decode steps.

A traced module ([b, s] axes) runs sequence by sequence with b = 1; a flat module (T axis) runs all
sequences of a step at once, in the phase function that the step's most new tokens choose.  Both
keep their rows in the same shuffled pages, and both give the logits of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch

from ktgraph.ir.dims import Dim
from ktgraph.ir.example import example_of
from ktgraph.ir.graph import Function, Module
from ktgraph.ir.interp import Interpreter, Observer, WeightProvider
from ktgraph.ir.types import BatchType, StateType, TensorType
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State

Step = Mapping[int, Sequence[int]]  # sequence -> its new tokens
Trace = Sequence[Step]

_PAGE = 4  # rows a page: sequences of the default trace span several
_SHAPES: tuple[Mapping[int, int], ...] = (
    {0: 5, 1: 3, 2: 9},  # ragged prefill
    {0: 4, 2: 2},  # a second chunk; sequence 1 waits
    {0: 1, 1: 1, 2: 1},  # decode
    {2: 1, 1: 1},
)
_FREE_SIZES = (3, 5, 7, 11, 13)  # for the syms of a module without batch and cache


class DriveError(ValueError):
    """A module that no trace can drive: the message names the argument and its type."""


@contextmanager
def one_thread() -> Generator[None]:
    """Torch on one thread meanwhile: on tensors this small the others only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_trace(vocabulary: int, seed: int = 0) -> list[dict[int, list[int]]]:
    """A seeded trace of three sequences: prefill, chunk, two decode steps."""
    rng = torch.Generator().manual_seed(seed)
    return [{q: _tokens(vocabulary, n, rng) for q, n in step.items()} for step in _SHAPES]


def _tokens(vocabulary: int, count: int, rng: torch.Generator) -> list[int]:
    return [int(t) for t in torch.randint(vocabulary, (count,), generator=rng)]


def vocabulary(module: Module) -> int:
    """Rows of the embedding table, 0 when the module embeds nothing."""
    for op in module.walk():
        if op.name == "nn.embedding":
            table = module.type_of(op.weight(1))
            assert isinstance(table, TensorType)
            return table.dims[0].at(module.dims)
    return 0


def is_language_model(module: Module) -> bool:
    """Whether the module takes a batch: it has caches and token ids."""
    functions = module.functions.values()
    return any(isinstance(a.type, BatchType) for f in functions for a in f.args)


def drive(
    module: Module,
    weights: WeightProvider,
    trace: Trace,
    dtype: torch.dtype | None = torch.float64,
    observe: Observer | None = None,
) -> list[torch.Tensor]:
    """Logits [tokens of the step, VOC] for each step, tokens in the step's order of sequences.

    `dtype` replaces every float dtype; None runs in the module's own.  A module without a batch
    ignores the trace: its results on seeded inputs are given, one function after another.
    """
    interpreter = Interpreter(module, weights, dtype, observe)
    if not is_language_model(module):
        return [t for f in module.functions.values() for t in _run_free(module, interpreter, f)]
    return _LanguageModel(module, interpreter, trace).run(trace)


def phase(module: Module, most_new: int) -> Function:
    """The function for a call: the smallest `max_q` that fits, else one without a bound."""
    fitting = [f for f in module.functions.values() if _bound(f) >= most_new]
    if not fitting:
        raise DriveError(f"@{module.name} has no function for {most_new} new tokens of a sequence")
    return min(fitting, key=_bound)


def _bound(function: Function) -> float:
    bound = function.attrs.get("max_q")
    return bound.const() if isinstance(bound, Dim) else float("inf")


class _LanguageModel:
    """One run: pages of every sequence, rows written so far, and the state."""

    def __init__(self, module: Module, interpreter: Interpreter, trace: Trace) -> None:
        self.module = module
        self.interpreter = interpreter
        self.tables, pages = _page_tables(trace)
        self.unwritten = pages  # a page for the blocks that a window has left behind
        self.past = dict.fromkeys(self.tables, 0)
        first = next(iter(module.functions.values()))
        kinds = [a.type for a in first.args if isinstance(a.type, StateType)]
        self.states = [interpreter.new_state(k, (pages + 1) * _PAGE) for k in kinds]

    def run(self, trace: Trace) -> list[torch.Tensor]:
        return [self._step(step) for step in trace]

    def _step(self, step: Step) -> torch.Tensor:
        function = phase(self.module, max(map(len, step.values())))
        if _has_rank_2_ids(function):
            found = [self._call(function, {q: tokens}) for q, tokens in step.items()]
            return torch.cat(found)
        return self._call(function, step)

    def _call(self, function: Function, step: Step) -> torch.Tensor:
        new = [len(tokens) for tokens in step.values()]
        past = [self.past[q] for q in step]
        batch = partial(self._batch, list(step), past, new)
        ids = torch.tensor([t for tokens in step.values() for t in tokens])
        results = self.interpreter.run(
            function.name, self._inputs(function, ids, batch), _sizes(new, past)
        )
        self.states = [r for r in results if isinstance(r, State)]
        for q, count in zip(step, new, strict=True):
            self.past[q] += count
        logits = next(r for r in results if isinstance(r, torch.Tensor))
        return logits.reshape(-1, logits.shape[-1])

    def _batch(self, seqs: list[int], past: list[int], new: list[int], kind: BatchType) -> Batch:
        """The batch of a window: blocks before what the first new token sees lie nowhere."""
        tables = [list(self.tables[q]) for q in seqs]
        window = 0 if kind.window is None else kind.window.at(self.module.dims)
        for table, count in zip(tables, past, strict=True):
            gone = max(0, count - window + 1) // _PAGE if window else 0
            table[:gone] = [self.unwritten] * gone
        return Batch.build(past, new, tables, _PAGE, out_rows=range(sum(new)))

    def _inputs(
        self, function: Function, ids: torch.Tensor, batch: Callable[[BatchType], Batch]
    ) -> list[Any]:
        states = iter(self.states)
        return [_argument(function, a.name, a.type, ids, batch, states) for a in function.args]


def _argument(
    function: Function,
    name: str,
    kind: object,
    ids: torch.Tensor,
    batch: Callable[[BatchType], Batch],
    states: Any,
) -> Any:
    if isinstance(kind, BatchType):
        return batch(kind)
    if isinstance(kind, StateType):
        return next(states)
    if isinstance(kind, TensorType) and kind.dtype in ("i32", "i64") and kind.rank in (1, 2):
        return ids.reshape([1, -1] if kind.rank == 2 else [-1]).to(torch_dtype(kind.dtype))
    raise DriveError(f"@{function.name}: a trace has no value for %{name}: {kind}")


def _has_rank_2_ids(function: Function) -> bool:
    return any(isinstance(a.type, TensorType) and a.type.rank == 2 for a in function.args)


def _sizes(new: Sequence[int], past: Sequence[int]) -> dict[str, int]:
    total = sum(new) + sum(past)
    return {
        "b": 1, "s": sum(new), "t": total,
        "T": sum(new), "B": len(new), "Q": max(new), "S": total, "O": sum(new),
    }  # fmt: skip


def _page_tables(trace: Trace) -> tuple[dict[int, list[int]], int]:
    """Pages for every sequence, dealt in turn so that none has neighbouring ones."""
    length: dict[int, int] = {}
    for step in trace:
        for q, tokens in step.items():
            length[q] = length.get(q, 0) + len(tokens)
    wanted = {q: -(-n // _PAGE) for q, n in length.items()}
    tables: dict[int, list[int]] = {q: [] for q in wanted}
    free = iter(reversed(range(sum(wanted.values()))))
    for turn in range(max(wanted.values(), default=0)):
        for q, count in wanted.items():
            tables[q] += [next(free)] if turn < count else []
    return tables, sum(wanted.values())


def _run_free(module: Module, interpreter: Interpreter, function: Function) -> list[torch.Tensor]:
    """Run a function of plain tensors on seeded inputs, its syms bound to small odd sizes.

    A function that records an example runs at its sizes, flat or not; results are rows [., last].
    """
    rng = torch.Generator().manual_seed(0)
    names = sorted({n for a in function.args for n in _names(a.type)} - module.dims.keys())
    sizes = dict(zip(names, _FREE_SIZES, strict=False))
    example = example_of(function)
    if example:
        sizes |= {**example, "T": prod(example.values())}
    inputs: list[torch.Tensor] = []
    for arg in function.args:
        if not isinstance(arg.type, TensorType) or len(names) > len(_FREE_SIZES):
            raise DriveError(f"@{function.name}: no value can be made for %{arg.name}: {arg.type}")
        shape = [d.at({**module.dims, **sizes}) for d in arg.type.dims]
        inputs.append(_free_input(module, arg.type, shape, rng))
    results = interpreter.run(function.name, inputs, sizes)
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    return [r.reshape(-1, r.shape[-1]) if r.dim() > 1 else r for r in tensors]


def _free_input(
    module: Module, kind: TensorType, shape: list[int], rng: torch.Generator
) -> torch.Tensor:
    wanted = torch_dtype(kind.dtype)
    if wanted.is_floating_point:
        return torch.randn(shape, generator=rng).to(wanted)
    return torch.randint(vocabulary(module) or 2, shape, generator=rng).to(wanted)


def _names(kind: object) -> frozenset[str]:
    dims = kind.dims if isinstance(kind, TensorType) else ()
    return frozenset(n for d in dims for n in d.names)


__all__ = [
    "DriveError",
    "Step",
    "Trace",
    "drive",
    "is_language_model",
    "make_trace",
    "one_thread",
    "phase",
    "vocabulary",
]
