"""window-cache: layers that look back a window keep no more rows than that.

What: the layers of a cache whose attention has a window move to a cache of their own, with its own
batch: pages, and a table of them, apart from those of the layers that read the whole text.

Why: at 128 rows of window and 131,072 of context (gpt-oss) half of the layers would keep a thousand
times what they read.  A page is given back once no token to come looks at it.

Before:  %kv: kv(24 x f32[C, G, A], …)
         %o = attn.sdpa %q, %kv2, %batch {layer = 2*i, window = W}
After:   %kv: kv(12 x f32[C, G, A], …), %kv.w: kv(12 x f32[C, G, A], …, window = W)
         %o = attn.sdpa %q, %kv.w2, %batch.w {layer = i, window = W}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, Value
from ktgraph.ir.types import BatchType, StateType
from ktgraph.ops import no
from ktgraph.ops.registry import Refusal
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass

Window = Dim | None  # None: the whole text
Turns = Mapping[str, range]  # of each repeat around an op, by its index


@register_pass
@dataclass(frozen=True)
class WindowCache(Pass):
    name: ClassVar[str] = "window-cache"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[Sequence[str]] = ("flat",)

    def run(self, module: Module, ctx: PassContext) -> None:
        for func in module.functions.values():
            for state in [a for a in func.args if isinstance(a.type, StateType)]:
                uses = list(_uses(func.body, {}))
                split = _plan(state, uses)
                if isinstance(split, Refusal):
                    ctx.refused(self.name, split.op or func.body.ops[0], split.reason)
                elif split is not None and ctx.may_rewrite(self.name, uses[0].op):
                    _Splitting(func, state, split).run()
                    ctx.note(f"@{func.name}: {split.text}")


# -- which layer has which window ------------------------------------------------------------------
@dataclass(frozen=True)
class _Use:
    """An op that appends to a cache or reads it, and the turns it runs in."""

    op: Op
    turns: Turns

    @property
    def index(self) -> tuple[str, range]:
        """The index of the repeat around it, and its turns; one turn without a repeat."""
        return next(iter(self.turns.items()), ("", range(1)))

    @property
    def layers(self) -> list[int]:
        """The layer at every turn."""
        name, turns = self.index
        layer = self.op.attrs["layer"]
        assert isinstance(layer, Dim)
        return [layer.at({name: turn}) for turn in turns]


@dataclass
class _Split:
    """Layers of each window in order; `moved` gives every op its layer in the new cache."""

    layers: dict[Window, list[int]]
    moved: dict[int, Dim] = field(default_factory=dict[int, Dim])  # by id of the op
    window: dict[int, Window] = field(default_factory=dict[int, "Window"])

    @property
    def text(self) -> str:
        counts = {w: len(found) for w, found in self.layers.items()}
        return ", ".join(
            f"{n} layers keep {'every row' if w is None else f'the last {w} rows'}"
            for w, n in counts.items()
        )


def _uses(block: Block, turns: Turns) -> list[_Use]:
    found: list[_Use] = []
    for op in block.ops:
        if op.body is not None:
            span = range(op.int_attr("lo"), op.int_attr("hi") + 1)
            found += _uses(op.body, {**turns, str(op.attrs["index"]): span})
        elif any(isinstance(v.type, StateType) for v in op.values):
            found.append(_Use(op, turns))
    return found


def _plan(state: Value, uses: Sequence[_Use]) -> _Split | Refusal | None:
    """None: no layer has a window, or the cache has been split before."""
    readers = [u for u in uses if not _appends(u.op)]
    windows = {layer: _window(u.op) for u in readers for layer in u.layers}
    assert isinstance(state.type, StateType)
    if state.type.window is not None or not any(windows.values()):
        return None
    other = next((u.op for u in uses if u.op.name not in ("kv.append", "attn.sdpa")), None)
    if other is not None:
        return no(f"{other.name} has no window", other)
    for use in readers:
        if any(windows[layer] != _window(use.op) for layer in use.layers):
            return no("one layer is read with two windows", use.op)
    split = _Split({})
    for layer in sorted(windows, key=lambda n: (windows[n] is not None, n)):
        split.layers.setdefault(windows[layer], []).append(layer)
    for use in uses:
        kind = windows.get(use.layers[0])
        moved = _moved(use, split.layers[kind]) if kind in split.layers else None
        if moved is None:
            return no("its layers are not evenly spaced among those of one window", use.op)
        split.window[id(use.op)], split.moved[id(use.op)] = kind, moved
    return split


def _appends(op: Op) -> bool:
    return any(isinstance(r.type, StateType) for r in op.results)


def _window(op: Op) -> Window:
    window = op.attrs.get("window")
    return window if isinstance(window, Dim) and window != 0 else None


def _moved(use: _Use, layers: Sequence[int]) -> Dim | None:
    """The use's layer as a place among `layers`, linear in the turn; None when it is not."""
    if not set(use.layers) <= set(layers):
        return None
    places = [layers.index(layer) for layer in use.layers]
    name, turns = use.index
    step = places[1] - places[0] if len(places) > 1 else 0
    moved = Dim.of(places[0] - step * turns[0]) + (Dim.of(name) * step if step else 0)
    return moved if [moved.at({name: t}) for t in turns] == places else None


# -- splitting -------------------------------------------------------------------------------------
class _Splitting:
    """Threads one cache for each window through a function, in place of one for all.

    chain: the versions of the old cache, and those of the new ones that took their place.
    """

    def __init__(self, func: Function, state: Value, split: _Split) -> None:
        self.func = func
        self.state = state
        self.split = split
        self.taken = {v.name for v in func.values()}
        self.batch = next(a for a in func.args if isinstance(a.type, BatchType))
        self.batches: dict[Window, Value] = {None: self.batch}
        self.chain = {state}

    def run(self) -> None:
        body, old = self.func.body, self.state.type
        assert isinstance(old, StateType)
        self.taken.discard(self.state.name)
        now: dict[Window, Value] = {}
        for window, layers in self.split.layers.items():
            type = replace(old, layers=Dim.of(len(layers)), window=window)
            now[window] = body.add_arg(self._name(self.state.name, window), type)
            if window is not None:
                self.batches[window] = self._batch_of(window)
        self._block(body, now)
        body.set_returns([v for r in body.returns for v in self._last(r, now)])
        body.args.remove(self.state)

    def _batch_of(self, window: Dim) -> Value:
        """The batch of this window, which another cache may have brought."""
        type = BatchType(window=window)
        known = next((a for a in self.func.args if a.type == type), None)
        return known or self.func.body.add_arg(self._name(self.batch.name, window), type)

    def _last(self, returned: Value, now: Mapping[Window, Value]) -> list[Value]:
        return list(now.values()) if returned in self.chain else [returned]

    def _name(self, stem: str, window: Window) -> str:
        """The old name for the cache of the whole text, with `.w` for that of a window."""
        wanted = stem if window is None else f"{stem}.w"
        name, count = wanted, 0
        while name in self.taken:
            count += 1
            name = f"{wanted}.{count}"
        self.taken.add(name)
        return name

    def _block(self, block: Block, now: dict[Window, Value]) -> None:
        """Rewrite a block; `now` holds the caches as they are at each op."""
        for op in list(block.ops):
            if op.body is not None and any(v in self.chain for v in op.values):
                self._repeat(op, op.body, now)
            elif id(op) in self.split.moved and any(v in self.chain for v in op.values):
                self._use(op, now)

    def _use(self, op: Op, now: dict[Window, Value]) -> None:
        window = self.split.window[id(op)]
        old = next(v for v in op.values if v in self.chain)
        op.attrs["layer"] = self.split.moved[id(op)]
        op.replace_operand(old, now[window])
        op.replace_operand(self.batch, self.batches[window])
        for result in op.results:
            if isinstance(result.type, StateType):
                self.chain.add(result)
                result.type = now[window].type
                now[window] = result
        for made_by in (v.producer for v in op.values):  # positions are the same in every batch
            if made_by is not None and made_by.name == "nn.rope" and _appends(op):
                made_by.replace_operand(self.batch, self.batches[window])

    def _repeat(self, op: Op, body: Block, now: dict[Window, Value]) -> None:
        """Carry every cache where one was carried."""
        place = next(i for i, o in enumerate(op.operands) if o in self.chain)
        argument, result = body.args[place], op.results[place]
        self.chain |= {argument, result}
        self.taken -= {argument.name, result.name}
        inner = {w: body.add_arg(self._name(argument.name, w), v.type) for w, v in now.items()}
        self._block(body, inner)
        yielded = [r for i, r in enumerate(body.returns) if i != place]
        body.set_returns([*yielded, *inner.values()])
        body.args.remove(argument)
        kept = [r for r in op.results if r is not result]
        types = [(r.name, r.type) for r in kept]
        types += [(self._name(result.name, w), v.type) for w, v in now.items()]
        operands = [*(o for i, o in enumerate(op.operands) if i != place), *now.values()]
        made = Op("repeat", operands, types, op.attrs, loc=op.loc, body=body)
        assert op.block is not None
        op.block.insert_before(op, made)
        for old, new in zip(kept, made.results, strict=False):
            old.replace_by(new)
        now.update(zip(now, made.results[len(kept) :], strict=True))
        op.body = None
        op.set_operands([])
        op.block.ops.remove(op)


__all__ = ["WindowCache"]
