"""Import rules of ATen operators: views, joins, pointwise arithmetic, linear, embedding."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ktgraph.frontends import leaf_ops as leaf_ops  # registers torch.ops.ktg
from ktgraph.frontends.fx_import import Importer, arguments, rule
from ktgraph.frontends.fx_values import Buffer, BufferSlice, Imported, Tables, Tensor
from ktgraph.ir.dims import Dim
from ktgraph.ops.tensor import dtype_name

A = torch.ops.aten

# ---------------------------------------------------------------- no op at all


@rule(
    A.alias.default, A.contiguous.default, A.clone.default, A.detach.default,
    A.lift_fresh_copy.default, A.dropout.default,
)  # fmt: skip
def _same(im: Importer, node: fx.Node) -> Imported:
    if node.target is A.dropout.default and node.args[2]:
        raise im.unsupported("dropout in training mode; call model.eval()")
    return im.get(node.args[0])


@rule(A.sym_size.int, A._assert_tensor_metadata.default)
def _shape_only(im: Importer, node: fx.Node) -> Imported:
    return None  # sizes are read from the graph's own shapes


@rule(operator.getitem)
def _getitem(im: Importer, node: fx.Node) -> Imported:
    found, index = im.get(node.args[0]), node.args[1]
    assert isinstance(found, tuple)
    assert isinstance(index, int)
    return found[index]


for _name in ("mul", "add", "sub", "floordiv", "mod", "eq", "neg", "ge", "le", "lt", "gt"):
    rule(getattr(operator, _name))(_shape_only)


@rule(A.to.dtype, A.to.dtype_layout, A.to.device, A._to_copy.default, A.type_as.default)
def _cast(im: Importer, node: fx.Node) -> Imported:
    found = im.get(node.args[0])
    if isinstance(found, Tables):
        return found
    tensor = im.tensor(node.args[0])
    wanted = dtype_name(node.meta["val"].dtype)
    type = im.module.type_of(tensor.base)
    if getattr(type, "dtype", None) == wanted:
        return tensor
    return Tensor(im.emit("tensor.cast", [tensor.base], {"dtype": wanted})[0], tensor.order)


# ---------------------------------------------------------------- views


@rule(
    A.view.default, A.reshape.default, A._unsafe_view.default, A.flatten.using_ints,
    A.unflatten.int, A.unsqueeze.default, A.squeeze.dim, A.squeeze.dims, A.view_as.default,
)  # fmt: skip
def _reshape(im: Importer, node: fx.Node) -> Imported:
    tensor, shape = im.tensor(node.args[0]), im.dims(node)
    base = tensor.base if im.moves_units_only(tensor) else im.place(tensor)
    return Tensor.of(im.reshape(base, shape, im.source_stem()), len(shape))


@rule(A.transpose.int)
def _transpose(im: Importer, node: fx.Node) -> Imported:
    tensor = im.tensor(node.args[0])
    order = list(range(len(tensor.order)))
    a, b = (int(d) % len(order) for d in node.args[1:3])  # pyright: ignore[reportArgumentType]
    order[a], order[b] = order[b], order[a]
    return tensor.permuted(tuple(order))


@rule(A.t.default)
def _t(im: Importer, node: fx.Node) -> Imported:
    tensor = im.tensor(node.args[0])
    return tensor.permuted(tuple(reversed(range(len(tensor.order)))))


@rule(A.permute.default)
def _permute(im: Importer, node: fx.Node) -> Imported:
    tensor, order = im.tensor(node.args[0]), node.args[1]
    assert isinstance(order, (list, tuple))
    return tensor.permuted(tuple(int(d) % len(tensor.order) for d in order))  # pyright: ignore[reportArgumentType]


@rule(A.expand.default)
def _expand(im: Importer, node: fx.Node) -> Imported:
    tensor, shape = im.tensor(node.args[0]), im.dims(node)
    missing = len(shape) - len(tensor.order)
    if missing:
        ones = (Dim.of(1),) * missing
        tensor = Tensor.of(im.reshape(im.place(tensor), ones + im.dims_of(tensor)), len(shape))
    if im.dims_of(tensor) == shape:
        return tensor
    base = [Dim.of(0)] * len(shape)
    for axis, size in zip(tensor.order, shape, strict=True):
        base[axis] = size
    return Tensor(im.emit("tensor.expand", [tensor.base], {"shape": tuple(base)})[0], tensor.order)


@rule(A.slice.Tensor)
def _slice(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    before, after = im.dims(node.args[0]), im.dims(node)
    axis = int(given["dim"]) % len(before)
    start = given["start"] or 0
    found = im.get(node.args[0])
    if given["step"] != 1 or not isinstance(start, int) or start < 0:
        raise im.unsupported("a slice with a step, or from a start that is not a constant")
    if isinstance(found, Buffer):
        return BufferSlice(found, axis, start, after[axis])
    if before == after:
        return found
    tensor = im.tensor(node.args[0])
    at = tensor.order[axis] - len(before)
    attrs = {"start": start, "size": after[axis], "axis": at}
    return Tensor(im.emit("tensor.slice", [tensor.base], attrs)[0], tensor.order)


# ---------------------------------------------------------------- splits and joins


@rule(A.split_with_sizes.default, A.split.Tensor, A.split.sizes, A.chunk.default)
def _split(im: Importer, node: fx.Node) -> Imported:
    tensor = im.tensor(node.args[0])
    given = arguments(node)
    axis = tensor.order[int(given["dim"]) % len(tensor.order)]
    logical = tensor.order.index(axis)
    sizes = tuple(im.dim(piece.shape[logical]) for piece in node.meta["val"])
    attrs = {"sizes": sizes, "axis": axis - len(tensor.order)}
    out = im.emit("tensor.split", [tensor.base], attrs, im.stems(len(sizes)))
    return tuple(Tensor(value, tensor.order) for value in out)


@rule(A.cat.default)
def _cat(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    return im.concat([im.tensor(piece) for piece in given["tensors"]], int(given["dim"]))


@rule(A.new_empty.default, A.empty_like.default, A.empty.memory_format)
def _empty(im: Importer, node: fx.Node) -> Imported:
    return Buffer()


@rule(A.copy_.default)
def _copy(im: Importer, node: fx.Node) -> Imported:
    """A write into a slice of a new tensor is one piece of a later concat."""
    target = im.get(node.args[0])
    if not isinstance(target, BufferSlice):
        raise im.unsupported("an in-place copy into a tensor that was not just made empty")
    buffer = target.buffer
    if buffer.axis not in (None, target.axis) or target.start in buffer.pieces:
        raise im.unsupported("a new tensor is filled along two axes, or twice at one place")
    source = im.tensor(node.args[1])
    if im.dims_of(source) != im.dims(node.args[0]):
        raise im.unsupported("an in-place copy that broadcasts")
    buffer.axis = target.axis
    buffer.pieces[target.start] = (target.size, source)
    return None


# ---------------------------------------------------------------- arithmetic


@rule(A.linear.default, torch.ops.ktg.linear.default)
def _linear(im: Importer, node: fx.Node) -> Imported:
    given = arguments(node)
    x = im.tensor(node.args[0])
    rank = len(x.order)
    if x.order[-1] != rank - 1:
        x = Tensor.of(im.place(x), rank)  # pyright: ignore[reportArgumentType]
    operands = [x.base, im.value(given["weight"]), im.optional(given["bias"])]
    return Tensor(im.emit("nn.linear", operands)[0], x.order)


@rule(A.embedding.default)
def _embedding(im: Importer, node: fx.Node) -> Imported:
    table, ids = im.value(node.args[0]), im.value(node.args[1])
    out = im.emit("nn.embedding", [ids, table], stems=["embed"])[0]
    return Tensor.of(out, len(im.dims(node)))


_ACTIVATIONS = {
    A.silu.default: "silu",
    A.relu.default: "relu",
    A.sigmoid.default: "sigmoid",
    A.gelu.default: "gelu",
}


@rule(*_ACTIVATIONS)
def _act(im: Importer, node: fx.Node) -> Imported:
    x, act = im.tensor(node.args[0]), _ACTIVATIONS[node.target]  # pyright: ignore[reportArgumentType]
    if act == "gelu" and arguments(node)["approximate"] == "tanh":
        act = "gelu_tanh"
    stem = "act" if act != "sigmoid" else "sigmoid"
    return Tensor(im.emit("nn.act", [x.base], {"act": act}, [stem])[0], x.order)


@rule(A.add.Tensor, A.mul.Tensor)
def _binary(im: Importer, node: fx.Node) -> Imported:
    """Two tensors, or a tensor and a number."""
    is_add = node.target is A.add.Tensor
    a, b = node.args[:2]
    if not isinstance(b, fx.Node) or not isinstance(b.meta.get("val"), torch.Tensor):
        return _scaled(im, a, b, is_add)
    if is_add and arguments(node)["alpha"] != 1:
        raise im.unsupported("add with alpha")
    x, y = im.tensor(a), im.tensor(b)
    if x.order != y.order:
        x, y = (Tensor.of(im.place(t), len(t.order)) for t in (x, y))  # pyright: ignore[reportArgumentType]
    order = x.order if len(x.order) >= len(y.order) else y.order
    name, stems = ("tensor.add", None) if is_add else ("tensor.mul", ["gated"])
    return Tensor(im.emit(name, [x.base, y.base], stems=stems)[0], order)


def _scaled(im: Importer, x: Any, by: Any, is_add: bool) -> Imported:
    if is_add and by == 0:
        return im.get(x)
    if is_add or not isinstance(by, (int, float)):
        raise im.unsupported("a number is added to a tensor")
    tensor = im.tensor(x)
    return Tensor(im.emit("tensor.scale", [tensor.base], {"by": float(by)})[0], tensor.order)


@rule(A.div.Tensor)
def _div(im: Importer, node: fx.Node) -> Imported:
    by = node.args[1]
    if not isinstance(by, (int, float)):
        raise im.unsupported("a division by a tensor")
    return _scaled(im, node.args[0], 1.0 / by, False)
