"""insert-copies: copies where an operand lies on another device than its op.

Values that one op needs from one device cross together, and a value crosses once per destination.
What the host computes between ops of the GPU crosses by `xfer.post` and `xfer.await`, which do not
stop the GPU, with a mailbox number for each layer, and for each of several hand-overs of a layer.
What a repeat carries on the host stays there, and is awaited where the next layer reads it.
Streamed weights cross as `xfer.copy {stream = 1}`.  Caches never move.

Before:  %routed = moe.grouped_mlp %h, %ids, %wts, @w13, @w2 : bf16[T, D]@cpu
After:   %h.cpu, %ids.cpu, %wts.cpu = xfer.post %h, %ids, %wts {mailbox = i}
         %routed = moe.grouped_mlp %h.cpu, %ids.cpu, %wts.cpu, @w13, @w2 : bf16[T, D]@cpu
         %routed.cuda0 = xfer.await %routed {mailbox = i}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, Operand, Value, WeightRef
from ktgraph.ir.types import BatchType, StateType
from ktgraph.ir.verify import COPIES
from ktgraph.ops import build
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.placement.lanes import CROSSING, op_device

WEIGHT_STREAM = 1  # the stream of `xfer.copy` on which weights cross
_SUFFIXES = ("cpu", "q", "p")  # what passes put behind the names of weights they derive
_EXPERTS = ("moe.grouped_mlp", "moe.experts")


@register_pass
@dataclass(frozen=True)
class InsertCopies(Pass):
    """Bring every operand to where its op runs."""

    name: ClassVar[str] = "insert-copies"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[Sequence[str]] = ("placed",)
    ensures: ClassVar[Sequence[str]] = ("copied",)
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        for func in module.functions.values():
            counts = _Inserting(module, func).run()
            func.attrs.pop(COPIES, None)
            shown = [f"{count} {name}" for name, count in counts.items() if count]
            if shown:
                ctx.note(f"@{func.name}: {', '.join(shown)}")


class _Inserting:
    """The copies of one function."""

    def __init__(self, module: Module, func: Function) -> None:
        self.module = module
        self.func = func
        self.taken = {v.name for v in func.values()}
        self.boxes = _mailboxes(func, [op for op in func.walk() if self._is_handed_over(op)])
        self.counts = {"xfer.copy": 0, "xfer.post": 0, "xfer.await": 0}

    def run(self) -> dict[str, int]:
        self._block(self.func.body, [self._home] * len(self.func.body.returns))
        return self.counts

    def _block(self, block: Block, wanted: Sequence[str]) -> None:
        """`wanted`: where the block's returns are to lie."""
        copies: dict[tuple[Operand, str], Value] = {}
        for op in list(block.ops):
            if op.body is not None:
                carried = [self._at(arg) for arg in op.body.args]
                self._bring_each(block, op, op.values, carried, copies)
                self._block(op.body, carried)
                continue
            if op.name in CROSSING:
                continue
            device = op_device(self.module, op)
            if op in self.boxes:
                self._post(block, op, device, self.boxes[op], copies)
            self._stream(block, op, device)
            self._bring(block, op, op.values, device, copies)
        self._bring_each(block, block.terminator, block.returns, wanted, copies)

    def _is_handed_over(self, op: Op) -> bool:
        """Experts of the host, which the GPU goes on beside."""
        return op.name in _EXPERTS and op_device(self.module, op) != self._home

    @property
    def _home(self) -> str:
        return self.module.home or "cpu"

    def _at(self, value: Value) -> str:
        return value.type.device or self._home

    def _answer(self, value: Value) -> Dim | None:
        """The mailbox that a value is the answer of, also when a repeat carried it here."""
        maker = value.producer
        if maker is not None and maker.body is None:
            return self.boxes.get(maker)
        if maker is not None and maker.body is not None:  # carried out of the last layer
            found = self._answer(maker.body.returns[maker.results.index(value)])
            return found and found.subst({str(maker.attrs["index"]): maker.int_attr("hi")})
        block = value.owner
        if not isinstance(block, Block) or block.parent is None:
            return None
        index = str(block.parent.attrs["index"])
        found = self._answer(block.returns[block.args.index(value)])  # carried from a layer before
        return found and found.subst({index: Dim.of(index) - 1})

    # -- what crosses ------------------------------------------------------------------------------
    def _bring(
        self,
        block: Block,
        op: Op,
        values: Sequence[Value],
        device: str,
        copies: dict[tuple[Operand, str], Value],
    ) -> None:
        """Copy the op's operands that lie elsewhere, in front of it, and let it read the copies."""
        for src, group in self._elsewhere(values, device, copies):
            boxes = {v: self._answer(v) for v in group if device == self._home}
            posted = [v for v, box in boxes.items() if box is not None]
            for value in posted:
                attrs = {"mailbox": boxes[value]}
                self._insert(block, op, "xfer.await", [value], device, attrs, copies)
            rest = [v for v in group if v not in posted]
            if rest:
                self._insert(block, op, "xfer.copy", rest, device, {}, copies)
            assert src != device
        for value in dict.fromkeys(values):
            if (value, device) in copies:
                op.replace_operand(value, copies[value, device])

    def _bring_each(
        self,
        block: Block,
        op: Op,
        values: Sequence[Value],
        devices: Sequence[str],
        copies: dict[tuple[Operand, str], Value],
    ) -> None:
        """The same for operands that are wanted on different devices."""
        for device in dict.fromkeys(devices):
            wanted = [v for v, at in zip(values, devices, strict=True) if at == device]
            self._bring(block, op, wanted, device, copies)

    def _elsewhere(
        self, values: Sequence[Value], device: str, copies: dict[tuple[Operand, str], Value]
    ) -> list[tuple[str, list[Value]]]:
        """Values that must cross and have not yet, by the device they lie on."""
        found: dict[str, list[Value]] = {}
        for value in dict.fromkeys(values):
            if isinstance(value.type, (BatchType, StateType)) or (value, device) in copies:
                continue
            if self._at(value) != device:
                found.setdefault(self._at(value), []).append(value)
        return list(found.items())

    def _post(
        self,
        block: Block,
        op: Op,
        device: str,
        mailbox: Dim,
        copies: dict[tuple[Operand, str], Value],
    ) -> None:
        """Hand the operands that lie at home to the host, all in one."""
        for src, group in self._elsewhere(op.values, device, copies):
            if src == self._home:
                self._insert(block, op, "xfer.post", group, device, {"mailbox": mailbox}, copies)

    def _stream(self, block: Block, op: Op, device: str) -> None:
        """Weights that lie elsewhere cross in one copy on their own stream."""
        places = [p for p, o in enumerate(op.operands) if self._is_far(o, device)]
        if not places:
            return
        refs = [op.weight(p) for p in places]
        made = self._insert(block, op, "xfer.copy", refs, device, {"stream": WEIGHT_STREAM}, {})
        operands = list(op.operands)
        for position, value in zip(places, made.results, strict=True):
            operands[position] = value
        op.set_operands(operands)

    def _is_far(self, operand: Operand, device: str) -> bool:
        if not isinstance(operand, WeightRef):
            return False
        return (self.module.weight_of(operand).type.device or self._home) != device

    def _insert(
        self,
        block: Block,
        anchor: Op,
        name: str,
        operands: Sequence[Value | WeightRef],
        device: str,
        attrs: Mapping[str, object],
        copies: dict[tuple[Operand, str], Value],
    ) -> Op:
        at = None if device == self._home else device
        names = [self._name(o, device) for o in operands]
        made = build(self.module, name, operands, names, attrs, loc=anchor.loc, device=at)
        if anchor is block.terminator:
            block.append(made)
        else:
            block.insert_before(anchor, made)
        copies.update({(o, device): r for o, r in zip(operands, made.results, strict=True)})
        self.counts[name] += 1
        return made

    def _name(self, operand: Value | WeightRef, device: str) -> str:
        """``routed.cpu``, and for a weight its last component: ``w13.cuda0``."""
        if isinstance(operand, Value):
            stem = operand.name
        else:
            parts = operand.name.replace("[]", "").split(".")
            stem = next((p for p in reversed(parts) if p not in _SUFFIXES), parts[-1])
        stem = f"{stem}.{device.replace(':', '')}"
        name, count = stem, 0
        while name in self.taken:
            count += 1
            name = f"{stem}.{count}"
        self.taken.add(name)
        return name


def _mailboxes(func: Function, ops: Sequence[Op]) -> dict[Op, Dim]:
    """Numbers of hand-overs: ``i`` in layer i, ``2*i`` and ``2*i+1`` where layers have two.

    The layer is the member of the weights' family that the op reads; an op without one gets a
    number that no layer has.
    """
    of_layer: dict[tuple[Block | None, Dim], list[Op]] = {}
    others: list[Op] = []
    for op in ops:
        ref = op.operand(3)
        if isinstance(ref, WeightRef) and ref.index is not None:
            of_layer.setdefault((op.block, ref.index), []).append(op)
        else:
            others.append(op)
    most = max(map(len, of_layer.values()), default=1)
    found = {
        op: most * index + number
        for (_, index), held in of_layer.items()
        for number, op in enumerate(held)
    }
    free = max([0, *_last_layers(func)]) * most + most
    return found | {op: Dim.of(free + number) for number, op in enumerate(others)}


def _last_layers(func: Function) -> Iterator[int]:
    for op in func.walk():
        if op.body is not None:
            yield op.int_attr("hi")
        box = op.attrs.get("mailbox")
        if isinstance(box, Dim) and box.is_const:
            yield box.const()


__all__ = ["WEIGHT_STREAM", "InsertCopies"]
