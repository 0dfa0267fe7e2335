"""Import rules of the leaf ops: attention, cache, experts, routers, norms, rope."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ktgraph.frontends.fx_import import Importer, arguments, rule
from ktgraph.frontends.fx_values import Imported, Positions, Rows, Tables, Tensor
from ktgraph.ir.graph import Operand, Value, WeightRef
from ktgraph.ir.types import TensorType

K = torch.ops.ktg
HEADS_INSIDE = (0, 2, 1, 3)  # [b, heads, s, A] and [b, s, heads, A], each from the other


@rule(K.rms_norm.default)
def _rms_norm(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    x = im.tensor(given["x"])
    if x.order[-1] != len(x.order) - 1:
        x = Tensor.of(_some(im.place(x)), len(x.order))
    attrs = {"eps": given["eps"], "late_cast": not given["cast_first"]}
    return Tensor(im.emit("nn.rms_norm", [x.base, im.value(given["weight"])], attrs)[0], x.order)


@rule(K.rope_tables.default)
def _rope_tables(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    _check_positions(im, given["positions"])
    freqs = im.value(given["inv_freq"])
    assert isinstance(freqs, WeightRef)
    return Tables(freqs, float(given["scaling"]))


def _check_positions(im: Importer, node: Any) -> None:
    if not isinstance(im.get(node), Positions):
        raise im.unsupported("rope or attention at positions other than the tokens' own")


@rule(K.rope.default)
def _rope(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    tables = im.get(given["tables"])
    if not isinstance(tables, Tables):
        raise im.unsupported("rope tables are computed on before they are used")
    q, k = (im.value(given[name], HEADS_INSIDE) for name in ("q", "k"))
    attrs = {"style": given["style"], "scale": tables.scaling}
    out = im.emit("nn.rope", [q, k, tables.freqs, im.batch], attrs, im.stems(2))
    return tuple(Tensor(value, HEADS_INSIDE) for value in out)


@rule(K.kv_append.default)
def _kv_append(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    layer = int(given["layer"])
    k, v = (im.value(given[name], HEADS_INSIDE) for name in ("k", "v"))
    operands = [im.state(given["state"]), k, v, im.batch]
    state = im.emit("kv.append", operands, {"layer": layer}, ["kv"])[0]
    return state, Rows(state, 0, layer), Rows(state, 1, layer)


@rule(K.attention.default)
def _attention(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    _check_positions(im, given["positions"])
    if not given["causal"]:
        raise im.unsupported("attention that is not causal")
    attrs = {name: given[name] for name in ("scale", "window", "softcap")}
    q, sinks = im.value(given["q"], HEADS_INSIDE), im.optional(given["sinks"])
    state = _cached(im, given)
    if state is not None:
        attrs = {"layer": int(given["layer"]), **attrs}
        out = im.emit("attn.sdpa", [q, state, im.batch, sinks], attrs, ["attn"])
    else:
        k, v = (im.value(given[name], HEADS_INSIDE) for name in ("k", "v"))
        out = im.emit("attn.sdpa_rows", [q, k, v, im.batch, sinks], attrs, ["attn"])
    return Tensor.of(out[0], 4)


def _cached(im: Importer, given: dict[str, Any]) -> Value | None:
    """The state whose rows are keys and values as they are, None when they are computed on."""
    k, v = im.get(given["k"]), im.get(given["v"])
    if not isinstance(k, Rows) or not isinstance(v, Rows) or k.state is not v.state:
        return None
    return k.state if (k.part, v.part) == (0, 1) and k.layer == given["layer"] else None


@rule(K.route.default)
def _route(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    weights = [im.value(given["weight"])]
    weights += [_vector(im, im.optional(given[name])) for name in ("select_bias", "bias")]
    attrs = {name: given[name] for name in _ROUTE_ATTRS}
    if given["groups"] <= 1:
        attrs.pop("mask")
    operands = [im.value(given["x"]), *weights]
    ids, picked = im.emit("moe.route", operands, attrs, ["ids", "weights"])
    return Tensor.of(ids, 2), Tensor.of(picked, 2)


def _vector(im: Importer, weight: Operand) -> Operand:
    """A weight of one number an expert; ERNIE's has a first axis of 1, undone by a recipe."""
    if not isinstance(weight, WeightRef):
        return weight
    type = im.module.weights[weight.name].type
    if type.rank == 1:
        return weight
    flat = type.dims[-1]
    return im.derived_weight(weight, "flat", "reshape", type.with_dims(flat), shape=(flat,))


_ROUTE_ATTRS = (
    "top_k", "score", "renorm", "scale", "groups", "topk_groups", "group_score", "mask",
)  # fmt: skip


@rule(K.experts.default)
def _experts(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    operands = [im.value(given[name]) for name in ("x", "ids", "weights")]
    operands += [_upright(im, given, name) for name in ("gate_up", "down")]
    operands += [im.optional(given[name]) for name in ("gate_up_bias", "down_bias")]
    attrs = {"act": given["act"], "interleaved": given["interleaved"]}
    return Tensor.of(im.emit("moe.experts", operands, attrs, ["routed"])[0], 2)


def _upright(im: Importer, given: dict[str, Any], name: str) -> Operand:
    """Expert weights as ``[E, out, in]``; a transposed checkpoint is undone by a recipe."""
    weight = im.value(given[name])
    if not given["transposed"]:
        return weight
    assert isinstance(weight, WeightRef)
    type = im.module.weights[weight.name].type
    e, rows, columns = type.dims
    turned = TensorType(type.dtype, (e, columns, rows), type.encoding)
    return im.derived_weight(weight, "t", "transpose", turned)


def _some(operand: Operand) -> Value | WeightRef:
    assert operand is not None
    return operand
