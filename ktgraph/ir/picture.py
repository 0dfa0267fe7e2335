"""Pictures of a module: a networkx graph of its ops, and one HTML page that needs nothing else.

A column is a layer (equal neighbouring layers once, with ×n), a colour is a device, a box's bar is
its bytes against those of the op that moves most.  Bytes and FLOPs are those of one decode step
with 4096 cached rows, or of a prefill of 512 tokens for a function that is not for decode.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import networkx as nx

from ktgraph.cost import Call, OpCost, op_cost
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Function, Module, Op, Value
from ktgraph.ir.types import BatchType

_CONTEXT, _PREFILL = 4096, 512
_BOX, _HEIGHT, _GAP, _LANE = 172, 30, 12, 190  # px: box width and height, gap, width of a lane
_ROW = _HEIGHT + _GAP
_TOP, _LEFT = 64, 24
_COLORS = ("#3b6fb6", "#c8553d", "#4f8f4f", "#8a5aa8", "#b08a2e", "#3f8f96")
_LAYER = re.compile(r"layers\.(\d+)\b|layers\[(\d+)\]|^%?l(\d+)\.")


@dataclass(frozen=True)
class Node:
    """One op as it is drawn."""

    key: str  # function:result
    op: Op
    layer: str  # "" before, between and after layers
    repeat: int
    device: str
    bytes: float  # moved by one execution, weights included
    flops: float

    @property
    def label(self) -> str:
        return f"%{self.op.results[0].name}" if self.op.results else self.op.name


def to_networkx(module: Module) -> nx.MultiDiGraph[str]:
    """One node per op, one edge per use of a value.

    Node attributes: op, name, function, layer, repeat, device, bytes, flops, via, text.
    Edge attributes: value, type.  Arguments are nodes with op "argument".
    """
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=module.name)
    for function in module.functions.values():
        _add_function(graph, module, function)
    return graph


def _add_function(graph: nx.MultiDiGraph[str], module: Module, function: Function) -> None:
    source: dict[Value, str] = {}
    for arg in function.args:
        source[arg] = f"{function.name}:{arg.name}"
        graph.add_node(
            source[arg], op="argument", name=arg.name, function=function.name, layer="", repeat=1,
            device=module.home or "", bytes=0.0, flops=0.0, via="", text=str(arg),
        )  # fmt: skip
    for node in nodes_of(module, function):
        graph.add_node(
            node.key, op=node.op.name, name=node.label[1:], function=function.name,
            layer=node.layer, repeat=node.repeat, device=node.device, bytes=node.bytes,
            flops=node.flops, via=node.op.via or "", text=str(node.op).split("\n")[0],
        )  # fmt: skip
        source.update({r: node.key for r in node.op.results})
    _follow_repeats(function, source)
    for node in nodes_of(module, function):
        for value in node.op.values:
            if value in source:
                graph.add_edge(source[value], node.key, value=value.name, type=str(value.type))


def _follow_repeats(function: Function, source: dict[Value, str]) -> None:
    """Carried arguments come from their initial values, results of a repeat from its body."""
    for op in function.walk():
        if op.body is None:
            continue
        for arg, initial in zip(op.body.args, op.values, strict=False):
            source[arg] = source.get(initial, "")
        for result, end in zip(op.results, op.body.returns, strict=False):
            source[result] = source.get(end, "")
    for value in [v for v, key in source.items() if not key]:
        del source[value]


def nodes_of(module: Module, function: Function) -> list[Node]:
    """The ops of a function in order, with their layer and costs; a repeat's body once."""
    call = _call(function)
    sizes = {**call.bindings(module), "b": 1, "s": call.tokens, "t": call.rows}
    found: list[Node] = []
    for op, layer, count in _ops(function):
        cost = _cost(module, op, call, sizes)
        moved = cost.read + cost.written if cost is not None else 0.0
        flops = cost.flops if cost is not None else 0.0
        name = op.results[0].name if op.results else f"{op.name}.{len(found)}"
        device = _device(module, op)
        found.append(Node(f"{function.name}:{name}", op, layer, count, device, moved, flops))
    return found


def _call(function: Function) -> Call:
    bound = function.attrs.get("max_q")
    if isinstance(bound, Dim) and bound == 1:
        return Call.decode(_CONTEXT)
    return Call.prefill(_PREFILL)


def _cost(module: Module, op: Op, call: Call, sizes: dict[str, int]) -> OpCost | None:
    """The op's cost; None for one that has none, or that is not valid IR (it is drawn anyway)."""
    try:
        return op_cost(module, op, call, sizes)
    except (KeyError, ValueError, TypeError, AssertionError, AttributeError):
        return None


def _device(module: Module, op: Op) -> str:
    kinds = [r.type for r in op.results if not isinstance(r.type, BatchType)]
    return next((k.device for k in kinds if k.device), None) or module.home or "unplaced"


def _ops(function: Function) -> Iterator[tuple[Op, str, int]]:
    """Ops outside repeats with the layer their names tell, and the bodies of repeats."""
    for op in function.body.ops:
        if op.body is None:
            yield op, _layer(op), 1
            continue
        lo, hi = str(op.attrs.get("lo")), str(op.attrs.get("hi"))
        count = int(hi) - int(lo) + 1 if lo.isdigit() and hi.isdigit() else 1
        label = lo if lo == hi else f"{lo}–{hi}"
        for inner in op.body.walk():
            yield inner, label, count


def _layer(op: Op) -> str:
    """The layer an op says it is in: by its module path, its result's name, or its weights."""
    texts = [op.loc or "", *(f"%{r.name}" for r in op.results), *(str(w) for w in op.weights)]
    for text in texts:
        found = _LAYER.search(text)
        if found is not None:
            return next(g for g in found.groups() if g is not None)
    return ""


# -- layout ---------------------------------------------------------------------------------------
@dataclass
class Column:
    """A layer, or what lies before, between and after; equal neighbours are folded into one."""

    layer: str
    nodes: list[Node]
    count: int = 1  # layers it stands for
    last: str = ""

    @property
    def title(self) -> str:
        if not self.layer:
            return "—"
        name = f"layer {self.layer}" + (f"–{self.last}" if self.last else "")
        repeated = self.count * max((n.repeat for n in self.nodes), default=1)
        return f"{name} ×{repeated}" if repeated > 1 else name

    @property
    def shape(self) -> list[tuple[str, str, str | None, int]]:
        """What makes two layers look the same."""
        return [(n.op.name, n.device, n.op.via, len(n.op.values)) for n in self.nodes]


def columns(nodes: Sequence[Node]) -> list[Column]:
    """Nodes by layer, in order."""
    found: list[Column] = []
    for node in nodes:
        layer = node.layer or _inherited(found, node)
        if not found or found[-1].layer != layer:
            found.append(Column(layer, []))
        found[-1].nodes.append(node)
    folded: list[Column] = []
    for column in found:
        if folded and column.layer and folded[-1].shape == column.shape:
            folded[-1].count += column.count
            folded[-1].last = column.layer
        else:
            folded.append(column)
    return folded


def _inherited(found: Sequence[Column], node: Node) -> str:
    """An op that names no layer, between two that name the same, belongs to it."""
    if not found or not found[-1].layer:
        return ""
    own = {r for n in found[-1].nodes for r in n.op.results}
    reads_weights = bool(node.op.weights)
    users = [u for r in node.op.results for u in r.users]
    stays = any(_layer(u) == found[-1].layer for u in users)
    return found[-1].layer if stays and not reads_weights and own & set(node.op.values) else ""


@dataclass
class _Place:
    x: float
    y: float
    node: Node
    column: int


@dataclass
class _Drawing:
    """Boxes of one function and the size of its picture."""

    places: dict[str, _Place] = field(default_factory=dict[str, _Place])
    heads: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])
    width: float = 0.0
    height: float = 0.0


def _arrange(found: Sequence[Column], devices: Sequence[str]) -> _Drawing:
    """Columns side by side; in a column one lane per device that it uses, one row per step."""
    drawing, x = _Drawing(), float(_LEFT)
    for number, column in enumerate(found):
        lanes = [d for d in devices if any(n.device == d for n in column.nodes)]
        levels = _levels(column.nodes)
        width = _LANE * max(len(lanes), 1) + 16
        drawing.heads.append((x, width - 16, column.title))
        for node in column.nodes:
            left, top = x + _LANE * lanes.index(node.device), _TOP + levels[node.key] * _ROW
            place = drawing.places[node.key] = _Place(left, top, node, number)
            drawing.height = max(drawing.height, place.y + _HEIGHT)
        x += width
    drawing.width, drawing.height = x + _LEFT, drawing.height + 28
    return drawing


def _levels(nodes: Sequence[Node]) -> dict[str, int]:
    """Rows: an op stands below its operands, and below what its own lane already holds."""
    row: dict[str, int] = {}
    defined: dict[Value, int] = {}
    used: dict[str, int] = {}
    for node in nodes:
        ready = max((defined[v] + 1 for v in node.op.values if v in defined), default=0)
        at = max(ready, used.get(node.device, 0))
        row[node.key], used[node.device] = at, at + 1
        defined.update(dict.fromkeys(node.op.results, at))
    return row


# -- SVG and HTML ---------------------------------------------------------------------------------
def to_svg(module: Module, function: Function, devices: Sequence[str]) -> str:
    """One function as an SVG element; boxes carry their figures as data attributes."""
    nodes = nodes_of(module, function)
    drawing = _arrange(columns(nodes), devices)
    most = max((n.bytes for n in nodes), default=0.0) or 1.0
    parts = [_head(*head, drawing.height) for head in drawing.heads]
    parts += _edges(nodes, drawing)
    parts += [_box(p, devices.index(p.node.device), most) for p in drawing.places.values()]
    size = f'width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
    box = f'viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>\n' + "\n".join(parts) + "\n</svg>"
    )


def _head(x: float, width: float, title: str, height: float) -> str:
    return (
        f'<rect class="column" x="{x - 8:.0f}" y="34" width="{width:.0f}" '
        f'height="{height - 40:.0f}" rx="6"/>'
        f'<text class="title" x="{x:.0f}" y="24">{html.escape(title)}</text>'
    )


def _edges(nodes: Sequence[Node], drawing: _Drawing) -> list[str]:
    source = {r: n for n in nodes for r in n.op.results}
    parts: list[str] = []
    for node in nodes:
        for value in node.op.values:
            begin = source.get(value)
            if begin is None or begin.key not in drawing.places or node.key not in drawing.places:
                continue
            crosses = " cross" if begin.device != node.device else ""
            path = _curve(drawing.places[begin.key], drawing.places[node.key])
            ends = f'data-from="{html.escape(begin.key)}" data-to="{html.escape(node.key)}"'
            parts.append(f'<path class="edge{crosses}" {ends} d="{path}"/>')
    return parts


def _curve(begin: _Place, end: _Place) -> str:
    """From the side of a box to another column, or from its foot down its own."""
    if begin.column != end.column:
        return _bezier(begin.x + _BOX, begin.y + _HEIGHT / 2, end.x, end.y + _HEIGHT / 2, 0.5)
    if begin.x != end.x:
        return _bezier(begin.x + _BOX / 2, begin.y + _HEIGHT, end.x + _BOX / 2, end.y, None)
    if end.y - begin.y <= _HEIGHT + _GAP:
        middle = begin.x + _BOX / 2
        return f"M{middle:.0f} {begin.y + _HEIGHT:.0f}L{middle:.0f} {end.y:.0f}"
    x, y0, y1 = begin.x + _BOX, begin.y + _HEIGHT / 2, end.y + _HEIGHT / 2
    bow = x + min(14.0, 4 + (y1 - y0) / 40)  # a long hop down one lane: out to its right
    return f"M{x:.0f} {y0:.0f}C{bow:.0f} {y0:.0f} {bow:.0f} {y1:.0f} {x:.0f} {y1:.0f}"


def _bezier(x0: float, y0: float, x1: float, y1: float, sideways: float | None) -> str:
    """A smooth curve that leaves and arrives sideways, or (None) downwards."""
    if sideways is None:
        middle = (y0 + y1) / 2
        return f"M{x0:.0f} {y0:.0f}C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
    middle = x0 + (x1 - x0) * sideways
    return f"M{x0:.0f} {y0:.0f}C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"


def _box(place: _Place, color: int, most: float) -> str:
    node, x, y = place.node, place.x, place.y
    bar = node.bytes / most * _BOX
    figures = [node.device, f"{_si(node.bytes)}B moved", f"{_si(node.flops)}FLOP"]
    figures += [f"×{node.repeat}"] if node.repeat > 1 else []
    text = html.escape(str(node.op).split("\n")[0])
    return (
        f'<g class="op d{color % len(_COLORS)}" data-key="{html.escape(node.key)}" '
        f'data-text="{text}" data-figures="{html.escape(" · ".join(figures))}">'
        f"<title>{text}\n{html.escape(' · '.join(figures))}</title>"
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX}" height="{_HEIGHT}" rx="4"/>'
        f'<rect class="bar" x="{x:.0f}" y="{y + _HEIGHT - 3:.0f}" width="{bar:.1f}" '
        f'height="3"/>'
        f'<text x="{x + 7:.0f}" y="{y + 13:.0f}">{html.escape(_short(node.op.name, 26))}</text>'
        f'<text class="value" x="{x + 7:.0f}" y="{y + 24:.0f}">'
        f"{html.escape(_short(node.label, 28))}</text></g>"
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _si(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} P"


def to_html(module: Module) -> str:
    """A self-contained page: every function, a legend of devices, totals, figures on hover."""
    devices = _devices(module)
    sections = [_section(module, f, devices) for f in module.functions.values()]
    colors = "\n".join(f".d{i} rect{{fill:{c}}}" for i, c in enumerate(_COLORS))
    legend = "".join(
        f'<label class="d{i % len(_COLORS)}"><input type="checkbox" checked data-device="{i}">'
        f'<svg width="12" height="12"><rect width="12" height="12"/></svg> {html.escape(d)}</label>'
        for i, d in enumerate(devices)
    )
    page = (files("ktgraph.ir") / "picture.html").read_text()
    values = {
        "TITLE": html.escape(f"@{module.name}"),
        "COLORS": colors,
        "LEGEND": legend,
        "SECTIONS": "\n".join(sections),
        "DATA": json.dumps({"module": module.name, "devices": devices}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: values[m[1]], page)


def _devices(module: Module) -> list[str]:
    """The devices of the module, its home first."""
    used = {_device(module, op) for op in module.walk() if op.body is None}
    first = [module.home] if module.home in used else []
    return [*first, *sorted(used - set(first))] or ["unplaced"]


def _section(module: Module, function: Function, devices: Sequence[str]) -> str:
    nodes = nodes_of(module, function)
    rows = "".join(
        f"<td>{html.escape(d)}: {sum(n.repeat for n in nodes if n.device == d)} ops, "
        f"{_si(sum(n.bytes * n.repeat for n in nodes if n.device == d))}B, "
        f"{_si(sum(n.flops * n.repeat for n in nodes if n.device == d))}FLOP</td>"
        for d in devices
    )
    call = _call(function)
    what = (
        f"decode step, {_CONTEXT} rows cached" if call.tokens == 1 else f"{_PREFILL}-token prefill"
    )
    return (
        f"<section><h2>@{html.escape(function.name)} <small>{what}</small></h2>"
        f"<table><tr>{rows}</tr></table>"
        f'<div class="scroll">{to_svg(module, function, devices)}</div></section>'
    )


def write_html(module: Module, file: Path) -> None:
    """Write the page; it is drawn as far as it can be when the module is not valid IR."""
    file.write_text(to_html(module))


__all__ = [
    "Column",
    "Node",
    "columns",
    "nodes_of",
    "to_html",
    "to_networkx",
    "to_svg",
    "write_html",
]
