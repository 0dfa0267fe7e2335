"""Short comparisons of every native kernel with plain torch, on the machine at hand (``doctor``).

Operands and expected results come from the declared cases of the op that a kernel does, in
float64.  The full tests are in ``tests/cpu_kernels``; these say whether this build computes right
on this CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ktgraph.cpu_kernels import load_native, reference_layouts
from ktgraph.ops import op_def
from ktgraph.ops.cases import CaseInputs, make_inputs
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State

Check = tuple[str, Callable[[], str]]
FORMATS = (("f32", 0), ("bf16", 0), ("int8", 0), ("int4", 64))
_LIMIT = 3e-6  # relative error
_TOKENS, _OUT_ROWS = -1, -2  # first axes that a run resolves


@dataclass(frozen=True)
class _Row:
    """A kernel and its op.

    operands: in the kernel's order, each a letter and its place in the op's: t has a row per token,
    c is constant, w a packed weight, g one of gate and up rows, s the cache, b the batch; _ is
    absent.  Results follow.  attrs: those of the op that the kernel takes.
    """

    kernel: str
    op: str
    operands: str
    attrs: str = ""
    limit: float = _LIMIT

    @property
    def is_packed(self) -> bool:
        return "w" in self.operands


_ROWS = (
    _Row("cpu.embedding", "nn.embedding", "t0 c1", limit=0.0),
    _Row("cpu.rms_norm", "nn.rms_norm", "t0 c1", "eps late_cast"),
    _Row("cpu.add_rms_norm", "nn.add_rms_norm", "t0 t1 c2", "eps late_cast"),
    _Row("cpu.linear", "nn.linear", "t0 w1 _"),
    _Row("cpu.batched_linear", "nn.batched_linear", "t0 w1"),
    _Row("cpu.swiglu", "nn.swiglu", "t0 g1 w2", "act"),
    _Row("cpu.grouped_mlp", "moe.grouped_mlp", "t0 t1 t2 g3 w4 _ _", "act alpha limit"),
    _Row(
        "cpu.moe_route",
        "moe.route",
        "t0 c1 _",
        "score renorm scale groups topk_groups group_score mask",
        1e-5,
    ),
    _Row("cpu.rope", "nn.rope", "t0 t1 c2 b3", "style scale"),
    _Row("cpu.kv_append", "kv.append", "t1 t2 s0 b3", "layer", 0.0),
    _Row("cpu.kv_append_latent", "kv.append_latent", "t1 t2 s0 b3", "layer", 0.0),
    _Row("cpu.rope_append", "kv.rope_append", "t0 t1 t2 c3 s4 b5", "style scale layer"),
    _Row(
        "cpu.rope_append_latent", "kv.rope_append_latent", "t0 t1 t2 c3 s4 b5", "style scale layer"
    ),
    _Row("cpu.sdpa", "attn.sdpa", "t0 s1 b2 _", "layer scale window softcap"),
    _Row("cpu.mla_attend", "mla.attend", "t0 t1 s2 b3", "layer scale"),
    _Row("cpu.mla_attend_expanded", "mla.attend_expanded", "t0 t1 s2 b3 w4", "layer scale"),
    _Row("cpu.gather_rows", "logits.gather", "t0 b1", limit=0.0),
)

_ELEMENTWISE: Mapping[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "cpu.add": (2, lambda a, b: a + b),
    "cpu.add3": (3, lambda a, b, c: a + b + c),
    "cpu.mul": (2, lambda a, b: a * b),
    "cpu.sigmoid": (1, torch.sigmoid),
    "cpu.copy": (1, lambda a: a),
}


def checks() -> list[Check]:
    """One check of every kernel and, where it reads packed weights, format.

    They run on the ISA that would be used.  A kernel of this build that no check knows fails one.
    """
    found: list[Check] = [(f"pack.{f}", partial(_pack, f, group)) for f, group in FORMATS]
    for row in _ROWS:
        if row.is_packed:
            found += [(f"{row.kernel} {f}", partial(_check, row, f, g)) for f, g in FORMATS]
        else:
            found.append((row.kernel, partial(_check, row, "", 0)))
    found += [(kernel, partial(_elementwise, kernel)) for kernel in _ELEMENTWISE]
    known = {r.kernel for r in _ROWS} | _ELEMENTWISE.keys()
    return found + [(k, _unchecked) for k in sorted(load_native().kernels().keys() - known)]


def _unchecked() -> str:
    raise AssertionError("no check of it in cpu_kernels/checks.py")


class _Run:
    """One kernel on two threads; keeps operands alive."""

    def __init__(self) -> None:
        self.native = load_native()
        self.keep: list[Any] = []

    def view(self, t: torch.Tensor, first: int | None = None) -> Any:
        """`first`: what stands for the first size; None: the size itself."""
        self.keep.append(t)
        dtype = "i32" if t.dtype == torch.int32 else "f32"
        shape = list(t.shape) if first is None else [first, *t.shape[1:]]
        return self.native.Tensor(t.data_ptr(), dtype, shape, list(t.stride()))

    def weight(
        self, fmt: str, group: int, w: torch.Tensor, gate_up: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """A packed matrix or stack, and what its bytes mean."""
        stack = w if w.dim() == 3 else w[None]
        count, rows, cols = stack.shape
        nbytes = self.native.packed_nbytes(fmt, rows, cols, group, count, gate_up)
        data = self.native.empty_packed(nbytes)
        self.keep.append(data)
        at = data.ctypes.data
        for i in range(count):
            self.native.pack_into(at, i, fmt, rows, cols, group, count, gate_up, stack[i])
        dense = [
            reference_layouts.to_float(fmt, d, rows, cols, group, gate_up)
            for d in data.reshape(count, -1)
        ]
        packed = self.native.Weight(fmt, rows, cols, count, group, gate_up, at, nbytes)
        return packed, torch.from_numpy(np.stack(dense)).double().reshape(w.shape)

    def state(self, given: State, page_size: int) -> Any:
        self.keep.append(given)
        layers, rows = given.parts[0].shape[:2]
        widths = [p[0, 0].numel() for p in given.parts]
        at = [p.data_ptr() for p in given.parts]
        return self.native.State("f32", layers, rows // page_size, page_size, widths, at)

    def __call__(
        self,
        kernel: str,
        operands: list[Any],
        attrs: dict[str, Any],
        sizes: tuple[int, int],
        batch: Any = None,
    ) -> None:
        plan = self.native.Plan(self.native.Engine(2))
        plan.add(kernel, operands, attrs)
        plan.run(*sizes, batch)


def _check(row: _Row, fmt: str, group: int) -> str:
    """The kernel on every case of its op, against the op's reference in float64."""
    definition = op_def(row.op)
    errors = [
        _check_case(row, fmt, group, make_inputs(definition, c), _wide(row.op, c))
        for c in definition.cases
    ]
    return f"relative error {max(errors):.1e}"


def _wide(op: str, sizes: Mapping[str, int]) -> CaseInputs:
    return make_inputs(op_def(op), sizes, dtype=torch.float64)


def _check_case(row: _Row, fmt: str, group: int, inputs: CaseInputs, wide: CaseInputs) -> float:
    run, given = _Run(), inputs.operands
    batch = next((o for o in given if isinstance(o, Batch)), None)
    native: list[Any] = []
    for letter, *place in row.operands.split():
        at = int(place[0]) if place else -1
        if letter in "wg":
            packed, wide.operands[at] = run.weight(fmt, group, given[at], letter == "g")
            native.append(packed)
        elif letter == "s":
            assert batch is not None
            native.append(run.state(given[at], batch.page_size))
        else:
            plain = {"_": None, "b": run.native.BATCH}
            first = _TOKENS if letter == "t" else None
            native.append(plain[letter] if letter in plain else run.view(given[at], first))
    want = op_def(row.op).reference(*wide.operands, **wide.attrs)
    want = want if isinstance(want, tuple) else (want,)
    got = [_result(w, given) for w in want]
    first = _OUT_ROWS if row.op == "logits.gather" else _TOKENS
    native += [run.view(g, first) for g in got if isinstance(g, torch.Tensor)]
    attrs = {name: inputs.attrs[name] for name in row.attrs.split()}
    if row.kernel == "cpu.sdpa":
        attrs["kv_heads"] = inputs.sizes["G"]
    sizes = (inputs.sizes["T"], inputs.sizes["O"])
    run(row.kernel, native, attrs, sizes, None if batch is None else _native_batch(batch))
    return max(_error(g, w, row.limit) for g, w in zip(got, want, strict=True))


def _result(want: Any, given: list[Any]) -> Any:
    """Where a result will be: the cache that was given, or a tensor full of what is wrong."""
    if isinstance(want, State):
        return next(o for o in given if isinstance(o, State))
    if want.dtype == torch.int32:
        return torch.full_like(want, -77)
    return torch.full(want.shape, float("nan"))


def _native_batch(batch: Batch) -> Any:
    found = load_native().Batch()
    fields = (batch.tok_seq, batch.tok_pos, batch.seq_start, batch.kv_len, batch.block_table)
    found.set(*(t.numpy() for t in (*fields, batch.out_rows)))
    return found


def _error(got: Any, want: Any, limit: float = _LIMIT) -> float:
    """Relative error; raises AssertionError when it is too large.  Ids must be equal."""
    if isinstance(want, State):
        return max(_error(g, w, limit) for g, w in zip(got.parts, want.parts, strict=True))
    allowed = limit if got.dtype.is_floating_point else 0.0
    unwritten = got.isnan() & want.isnan()  # cache rows that nobody wrote
    got, want = (x.double().masked_fill(unwritten, 0.0) for x in (got, want))
    error = float((got - want).norm() / want.norm())
    if not error <= allowed:
        raise AssertionError(f"relative error {error:.2g}, allowed {allowed:.2g}")
    return error


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _pack(fmt: str, group: int) -> str:
    run = _Run()
    w = _randn(40, 250)
    run.weight(fmt, group, w)
    if not np.array_equal(run.keep[-1], reference_layouts.from_float(fmt, w.numpy(), group)):
        raise AssertionError("bytes differ from the layout's specification")
    return "bytes as specified"


def _elementwise(kernel: str) -> str:
    count, formula = _ELEMENTWISE[kernel]
    run = _Run()
    given = list(_randn(count, 3, 250))
    out = torch.full((3, 250), float("nan"))
    run(kernel, [run.view(t, _TOKENS) for t in (*given, out)], {}, (3, 0))
    return f"relative error {_error(out, formula(*(t.double() for t in given))):.1e}"
