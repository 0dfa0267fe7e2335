"""Why an op runs where it does: `explain(module, "%y")` and `ktgraph explain FILE.ktir %y`.

For a value, a weight, or an op's name: device and kernel, FLOP per byte against the ridge, the time
on every device, what `place` wrote down about it, and the kernels that were not chosen.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ktgraph.errors import KtgraphError
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, Value, Weight
from ktgraph.ir.printer import print_op, print_weight
from ktgraph.ir.types import StateType
from ktgraph.ops.registry import Refusal, kernels_for, op_def
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.decide import phase_call
from ktgraph.placement.decision import Settings
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import (
    CROSSING,
    OpTimes,
    crossing,
    is_stream,
    op_device,
    source_device,
)
from ktgraph.placement.popularity import weight_name
from ktgraph.runtime.many_rows import tile_of, tile_rows
from ktgraph.target import Target, threads_text
from ktgraph.target.description import round_size
from ktgraph.target.many_rows import NEVER
from ktgraph.weights.encodings import nbytes
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

_MOST_LAYERS = 8  # whose hot experts are listed
_INTEGER_PATHS = ("from its packed bytes", "by panels or tiles")  # of few rows, of many
_MOST = 6  # ops that are explained in full; of more, the lines


class ExplainError(KtgraphError, ValueError):
    """Nothing of that name; the message lists close ones."""


@dataclass(frozen=True)
class _Place:
    """An op, its function, and the layers it stands for."""

    func: Function
    op: Op
    layers: str


def explain(
    module: Module,
    what: str,
    target: Target | None = None,
    options: CompileOptions | None = None,
    placement: str = "",
) -> str:
    """A text about ``%value``, ``@weight`` (also ``@layers[3].q_proj``) or an op name.

    target: prices; without one, devices and kernels alone.  placement: the text of placement.txt,
    whose lines about the value are quoted.  Raises ExplainError for a name that is not there.
    """
    places = list(_places(module))
    asking = _Asking(module, places, target, options or CompileOptions(), placement)
    if what.startswith("@"):
        return "\n".join(asking.weight(what[1:]))
    found = [p for p in places if _is_named(p.op, what)]
    if not found:
        raise ExplainError(_unknown(what, module, places))
    if len(found) > _MOST:
        lines = [f"{len(found)} ops {what}; ask for one of them by its value:"]
        return "\n".join(lines + [f"  @{p.func.name}{p.layers} {_line(p.op)}" for p in found])
    return "\n\n".join("\n".join(asking.op(p)) for p in found)


def _places(module: Module) -> Iterator[_Place]:
    for func in module.functions.values():
        yield from _in_block(func, func.body, "")


def _in_block(func: Function, block: Block, layers: str) -> Iterator[_Place]:
    for op in block.ops:
        if op.body is None:
            yield _Place(func, op, layers)
        else:
            span = f"{op.attrs['lo']}..{op.attrs['hi']}"
            yield from _in_block(func, op.body, f" layers {span}")


def _is_named(op: Op, what: str) -> bool:
    if what.startswith("%"):
        own = re.compile(re.escape(what[1:]) + r"(\.\d+)?$")  # also %routed.18 of a split repeat
        return any(own.match(r.name) for r in op.results)
    return what in (op.name, op.name.rpartition(".")[2]) or any(r.name == what for r in op.results)


def _unknown(what: str, module: Module, places: Sequence[_Place]) -> str:
    names = sorted({f"%{r.name}" for p in places for r in p.op.results})
    names += sorted({p.op.name for p in places}) + [f"@{n}" for n in module.weights]
    close = difflib.get_close_matches(what, names, n=4, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else "give a %value, a @weight or an op"
    return f"nothing in @{module.name} is named {what}; {hint}"


def _line(op: Op) -> str:
    return print_op(op).split("\n")[0]


def _split_of(value: Value) -> Op | None:
    """The op that told hot from cold experts, of a value that one side or both computed."""
    op = value.producer
    if op is None or op.name == "moe.split_ids":
        return op
    if op.name == "moe.grouped_mlp":
        return _split_of(op.value(1))
    if op.name in CROSSING:
        source = op.operand(op.results.index(value))
        return _split_of(source) if isinstance(source, Value) else None
    if op.name == "tensor.add":
        first, second = map(_split_of, op.values)
        return first if first is second else None
    return None


def _results(op: Op) -> str:
    return ", ".join(f"%{r.name}" for r in op.results)


@dataclass(frozen=True)
class _Asking:
    module: Module
    places: Sequence[_Place]
    target: Target | None
    options: CompileOptions
    placement: str

    # -- an op -------------------------------------------------------------------------------------
    def op(self, place: _Place) -> list[str]:
        lines = [f"@{place.func.name}{place.layers}", f"  {_line(place.op)}"]
        lines += [f"  {line}" for line in self._where(place)]
        lines += [f"  {line}" for line in self._handed_over(place)]
        lines += [f"  {line}" for line in self._hot(place)]
        lines += [f"  {line}" for line in self._prices(place)]
        lines += [f"  {line}" for line in self._written(place)]
        lines += [f"  {line}" for line in self._kernels(place.op)]
        return lines

    def _where(self, place: _Place) -> Iterator[str]:
        op = place.op
        if op.name in CROSSING:
            lane = f"{source_device(self.module, op)} to {op_device(self.module, op)}"
            yield f"crosses from {lane}"
            return
        device = op_device(self.module, op)
        if op_def(op.name).is_view:
            yield f"a view: it costs nothing and lies with its operand, on {device}"
            return
        home = " (home)" if device == self.module.home else ""
        yield f"runs on {device}{home}"
        if device == CPU and self.target is not None:
            yield threads_text(self.target, self.options.threads)
        if any(isinstance(v.type, StateType) for v in (*op.values, *op.results)):
            yield "it reads or writes the cache, and the cache never moves"

    def _handed_over(self, place: _Place) -> Iterator[str]:
        """Of an op away from home: how its operands and results cross, and what runs beside."""
        if place.op.name in CROSSING or op_device(self.module, place.op) == self.module.home:
            return
        near = [p for p in self.places if p.func is place.func and p.layers == place.layers]
        ops = [p.op for p in near]
        own = {id(r) for r in place.op.results}
        read = {id(v) for v in place.op.values}
        posts = [o for o in ops if o.name == "xfer.post" and read & {id(r) for r in o.results}]
        awaits = [o for o in ops if o.name == "xfer.await" and own & {id(v) for v in o.values}]
        for op in posts:
            yield f"its operands come by {op.via or op.name} ({_results(op)})"
        for op in awaits:
            yield f"its result goes back by {op.via or op.name} ({_results(op)})"
        if not posts or not awaits:
            return
        between = ops[ops.index(posts[-1]) + 1 : ops.index(awaits[0])]
        beside = [o for o in between if self._works_at_home(o)]
        shown = ", ".join(f"{_results(o)} ({o.via or o.name})" for o in beside)
        yield f"meanwhile {self.module.home} computes {shown or 'nothing'}"

    def _hot(self, place: _Place) -> Iterator[str]:
        """Of experts with slots: how many, and which of each layer have them at first."""
        split = next((s for s in map(_split_of, place.op.results) if s is not None), None)
        if split is None:
            return
        ref = split.weight(1)
        table = self.module.weights[ref.name]
        values = WeightEvaluator(self.module, RandomSource(self.module))  # a table reads no source
        members = range(table.lo, table.hi + 1) if table.is_family else (None,)
        slots = table.recipe.get("slots") if table.recipe is not None else None
        count = slots.at(self.module.dims) if isinstance(slots, Dim) else 0
        of = table.type.dims[0].at(self.module.dims)
        yield f"{count} of {of} experts have slots on {self.module.home}; when loaded:"
        for number in members[:_MOST_LAYERS]:
            found = values.tensor(ref, number)
            hot = [int(torch.where(found == slot)[0]) for slot in range(count)]
            yield f"  {weight_name(ref, number)}: {' '.join(map(str, hot))}"
        if len(members) > _MOST_LAYERS:
            yield f"  and {len(members) - _MOST_LAYERS} layers more"

    def _works_at_home(self, op: Op) -> bool:
        at_home = op_device(self.module, op) == self.module.home
        return at_home and op.name not in CROSSING and not op_def(op.name).is_view

    def _prices(self, place: _Place) -> Iterator[str]:
        """Roofline times on every device, at the phase's typical call."""
        op = place.op
        if self.target is None:
            yield "no target is known here: no prices (give --target)"
            return
        if op_def(op.name).is_view:
            return
        settings = Settings(self.options, context=self.options.context)
        call = phase_call(place.func, settings)
        times = OpTimes(self.module, self.target, call)
        yield f"at {call.tokens} new tokens and {call.rows} rows in the cache:"
        if op.name in CROSSING:
            yield f"  {times.seconds(op) * 1e6:.4g} µs over {crossing(self.module, op)}"
            return
        cost = times.cost(op)
        known = "" if cost.known else " (no cost rule: FLOPs unknown)"
        yield (
            f"  {cost.flops / 1e6:.4g} MFLOP, {(cost.read + cost.written) / 1e6:.4g} MB: "
            f"{cost.intensity:.3g} FLOP per byte{known}"
        )
        here = op_device(self.module, op)
        copies = [c for v in op.values if isinstance(c := v.producer, Op) and is_stream(c)]
        copied = sum(times.seconds(c) for c in dict.fromkeys(copies))
        own = cost.seconds(self.target, here, fallback=True) + copied
        for device in self.target.devices:
            dtype = cost.dtype if cost.dtype in device.peak else "f32"
            seconds = cost.seconds(self.target, device.name, fallback=True)
            bound = cost.bound(self.target, device.name, fallback=True)
            is_here = device.name == here
            mark = "chosen" if is_here else f"{(seconds - own) * 1e6:+.4g} µs"
            yield (
                f"  {device.name}: {seconds * 1e6:.4g} µs, bound by {bound} "
                f"(ridge {device.ridge(dtype):.3g} FLOP per byte), {mark}"
            )
            if is_here and copies:
                link = crossing(self.module, copies[0])
                yield (
                    f"    and {copied * 1e6:.4g} µs before it for its weights over {link}, in all "
                    f"{own * 1e6:.4g} µs; behind the work of other layers as far as that lasts"
                )

    def _written(self, place: _Place) -> Iterator[str]:
        """What `place` wrote about the op: runner-up, margin on the critical path, reason."""
        names = _results(place.op)
        lines = self.placement.splitlines()
        head = next((x for x in lines if x.startswith("value ")), "")
        wanted = f"@{place.func.name} {names} "
        found = [x for x in lines if x.startswith(wanted)]
        if not found:
            return
        yield "placement.txt:"
        yield f"  {head}"
        yield from (f"  {x}" for x in found)

    def _kernels(self, op: Op) -> Iterator[str]:
        if op.via:
            yield f"kernel {op.via}"
            yield from self._many_rows(op)
        elif op.name not in CROSSING and not op_def(op.name).is_view:
            yield f"no kernel on {op_device(self.module, op)} is chosen (yet)"
        if op_def(op.name).is_view or op.name in CROSSING:
            return
        device = op_device(self.module, op)
        for kernel in kernels_for(op.name):
            if kernel.name == op.via:
                continue
            if kernel.device != device.split(":")[0]:
                if kernel.fallback:
                    continue  # every op has one on every device
                yield f"  not {kernel.name}: it is for {kernel.device}"
                continue
            found = kernel.supports(op, self.module)
            if isinstance(found, Refusal):
                yield f"  not {kernel.name}: {found.reason}"
            elif kernel.fallback:
                yield f"  not {kernel.name}: a fallback that runs the op's reference"
            else:
                yield f"  not {kernel.name}: another comes first"

    def _many_rows(self, op: Op) -> Iterator[str]:
        """Of packed weights on the CPU: the measured count at which the kernel changes its path."""
        if op_device(self.module, op) != CPU:
            return
        tiles = (tile_of(self.module, ref) for ref in op.weights)
        for tile in dict.fromkeys(t for t in tiles if t is not None):
            rows = tile_rows(self.module, tile)
            few, many = ("as f32", "as bf16") if tile.rows == "bf16" else _INTEGER_PATHS
            if rows >= NEVER:
                yield f"  {tile.format} {few} for any rows, as measured"
            elif rows:
                yield f"  {tile.format} {many} from {rows} rows on, else {few}, as measured"

    # -- a weight ----------------------------------------------------------------------------------
    def weight(self, name: str) -> list[str]:
        weight = self._find(name)
        home = self.module.home or "cpu"
        size = nbytes(weight.type, self.module.dims)
        lines = [print_weight(weight), f"  lies on {weight.type.device or home}"]
        lines.append(f"  {round_size(size)} each, {round_size(size * weight.members)} in all")
        made = [w for w in self.module.weights.values() if self._is_from(w, weight.name)]
        lines += [f"  read for @{w.name}: {w.recipe.kind}" for w in made if w.recipe is not None]
        readers = [p for p in self.places if any(r.name == weight.name for r in p.op.weights)]
        if not readers and not made:
            lines.append("  nothing reads it")
        for place in readers:
            where = op_device(self.module, place.op)
            lines.append(f"  @{place.func.name}{place.layers} on {where}: {_line(place.op)}")
        return lines

    def _find(self, name: str) -> Weight:
        """``layers[3].q`` and ``layers[i].q`` mean the family ``layers[].q``."""
        for weight in self.module.weights.values():
            head, _, tail = weight.name.partition("[]")
            is_member = weight.is_family and name.startswith(f"{head}[") and name.endswith(tail)
            if weight.name == name or (is_member and name[len(head) :].find("]" + tail) > 0):
                return weight
        raise ExplainError(_unknown(f"@{name}", self.module, self.places))

    def _is_from(self, weight: Weight, name: str) -> bool:
        return weight.recipe is not None and any(r.name == name for r in weight.recipe.args)


__all__ = ["ExplainError", "explain"]
