"""Import rules for plain modules: their leaf ops, layer norms, attention without a cache."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from ktgraph.frontends import module_leaves as module_leaves  # registers torch.ops.ktg
from ktgraph.frontends.fx_import import Importer, arguments, rule
from ktgraph.frontends.fx_values import Imported, Tensor
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Operand, Recipe, Weight, WeightRef
from ktgraph.ir.types import TensorType
from ktgraph.ops.call_args import ArgumentWriter

A = torch.ops.aten
MEMBER = "*"  # in a weight's source: every member of a list, stacked on a new first axis


@rule(torch.ops.ktg.module_call.default)
def _module_call(im: Any, node: fx.Node) -> Imported:
    given = arguments(node)
    path = str(given["path"])
    shapes = tuple(tuple(map(module_leaves.hint, n.meta["val"].shape)) for n in given["inputs"])
    seen = next(c for c in im.exported.calls.seen[path] if c.inputs == shapes)
    writer = ArgumentWriter(lambda v: v, lambda v: None)
    writer.operands = [im.value(n) for n in given["inputs"]]
    name = f"{im.root}/{path}" if path else im.root
    return im.torch_call(node, {"module": name, "args": seen.args}, writer)


@rule(torch.ops.ktg.expert_list.default)
def _expert_list(im: Importer, node: fx.Node) -> Imported:
    """moe.experts on the parameters of all experts, stacked by recipes."""
    given = arguments(node)
    operands = [im.value(given[name]) for name in ("x", "ids", "weights")]
    bias = bool(given["down_bias"])
    operands += [_both(im, given, "first", "second", "w13"), _stack(im, given["down"])]
    operands += [_both(im, given, "first_bias", "second_bias", "b13")] if bias else []
    operands += [_stack(im, given["down_bias"])] if bias else []
    attrs = {"act": given["act"], "interleaved": given["order"] == "interleaved"}
    return Tensor.of(im.emit("moe.experts", operands, attrs, ["routed"])[0], 2)


def _both(im: Importer, given: dict[str, Any], first: str, second: str, leaf: str) -> Operand:
    """Gate rows, then up rows, of every expert (or alternating, as the attribute says)."""
    one = _stack(im, given[first])
    if given[second]:
        return _joined(im, [one, _stack(im, given[second])], leaf)
    if given["order"] != "up_first":
        return one
    rows = im.module.weights[one.name].type.dims[1].const() // 2
    halves = [_rows(im, one, start, rows, n) for start, n in ((rows, "gate"), (0, "up"))]
    return _joined(im, halves, leaf)


def _joined(im: Importer, parts: list[WeightRef], leaf: str) -> WeightRef:
    types = [im.module.weights[p.name].type for p in parts]
    e, *rest = types[0].dims
    dims = (e, rest[0] + types[1].dims[1], *rest[1:])
    name = f"{_common(parts[0].name)}.{leaf}"
    made = Recipe("concat", tuple(parts), (("axis", Dim.of(1)),))
    return _declare(im, name, TensorType(types[0].dtype, dims), made)


def _rows(im: Importer, ref: WeightRef, start: int, rows: int, leaf: str) -> WeightRef:
    type = im.module.weights[ref.name].type
    e, _, *rest = type.dims
    attrs = (("axis", Dim.of(1)), ("start", Dim.of(start)), ("size", Dim.of(rows)))
    name = f"{ref.name}.{leaf}"
    return _declare(
        im, name, TensorType(type.dtype, (e, Dim.of(rows), *rest)), Recipe("slice", (ref,), attrs)
    )


def _declare(im: Importer, name: str, type: TensorType, recipe: Recipe) -> WeightRef:
    if name not in im.module.weights:
        im.module.add_weight(Weight(name, type, recipe=recipe))
    return WeightRef(name)


def _stack(im: Importer, nodes: list[Any]) -> WeightRef:
    """The parameters of a list's members as one weight; their own declarations fall away."""
    refs = [im.value(n) for n in nodes]
    weights = [im.module.weights[r.name] for r in refs if isinstance(r, WeightRef)]
    sources = [w.source or "" for w in weights]
    pattern = _pattern(sources)
    if pattern is None or len(set(sources)) != len(nodes):
        raise im.unsupported(f"the experts' parameters are no list: {', '.join(sources[:3])}, …")
    name = re.sub(r"\.weight$", "", pattern).replace(f".{MEMBER}", "")
    type = weights[0].type
    if name not in im.module.weights:
        stacked = TensorType(type.dtype, (Dim.of(len(nodes)), *type.dims))
        im.module.add_weight(Weight(name, stacked, source=pattern))
    return WeightRef(name)


def _pattern(sources: list[str]) -> str | None:
    """``moe.experts.*.w1.weight`` for members 0, 1, 2 … in order; None for other names."""
    parts = [s.split(".") for s in sources]
    width = len(parts[0])
    varying = [i for i in range(width) if len({p[i] for p in parts if len(p) == width}) > 1]
    if len(varying) != 1 or any(p[varying[0]] != str(n) for n, p in enumerate(parts)):
        return None
    return ".".join(MEMBER if i == varying[0] else part for i, part in enumerate(parts[0]))


def _common(name: str) -> str:
    return name.rpartition(".")[0] or name


@rule(A.layer_norm.default)
def _layer_norm(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    x = im.tensor(given["input"])
    rank = len(x.order)
    if len(given["normalized_shape"]) != 1:
        raise im.unsupported("a layer norm over more than the last axis")
    if x.order[-1] != rank - 1:
        x = Tensor.of(im.place(x), rank)  # pyright: ignore[reportArgumentType]
    operands = [x.base, im.optional(given["weight"]), im.optional(given["bias"])]
    return Tensor(im.emit("nn.layer_norm", operands, {"eps": float(given["eps"])})[0], x.order)


@rule(A.scaled_dot_product_attention.default)
def _attention(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    if given["dropout_p"]:
        raise im.unsupported("attention with dropout; call model.eval()")
    q, k, v = (im.value(given[n]) for n in ("query", "key", "value"))
    width = im.dims(given["query"])[-1].const()
    scale = float(width**-0.5 if given["scale"] is None else given["scale"])
    mask = im.optional(given["attn_mask"])
    attrs = {"scale": scale, "causal": bool(given["is_causal"])}
    out = im.emit("attn.attend", [q, k, v, mask], attrs, ["attn"])[0]
    return Tensor.of(out, len(im.dims(node)))


@rule(A.unbind.int)
def _unbind(im: Importer, node: fx.Node) -> Imported:
    tensor, axis = im.tensor(node.args[0]), int(arguments(node)["dim"])
    count = len(node.meta["val"])
    return tuple(_entry(im, tensor, axis % len(tensor.order), n) for n in range(count))


@rule(A.select.int)
def _select(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    tensor, index = im.tensor(given["self"]), given["index"]
    axis = int(given["dim"]) % len(tensor.order)
    size = im.dims(given["self"])[axis]
    if not isinstance(index, int) or (index < 0 and not size.is_const):
        raise im.unsupported("an entry whose place depends on sizes")
    return _entry(im, tensor, axis, index if index >= 0 else index + size.const())


def _entry(im: Importer, tensor: Tensor, axis: int, index: int) -> Tensor:
    """One entry of an axis, which goes; the others keep their order."""
    at = tensor.order[axis]
    dims = im.base_dims(tensor.base)
    attrs = {"start": index, "size": 1, "axis": at - len(dims)}
    cut = im.emit("tensor.slice", [tensor.base], attrs)[0]
    base = im.reshape(cut, (*dims[:at], *dims[at + 1 :]), im.source_stem())
    return Tensor(base, tuple(o - (o > at) for o in tensor.order if o != at))
