"""overlap: the host's experts start first, order of data and caches is kept."""

from placed_models import FRONT, context, run, v2_lite

from ktgraph.ir.graph import Block, Module, Op
from ktgraph.ir.verify import verify

_PLACED = f"{FRONT},place,quantize,insert-copies"


def _host_part(module: Module) -> Block:
    part = [op for op in module.functions["decode"].walk() if op.body is not None][1]
    assert part.body is not None
    return part.body


def _named(block: Block, name: str) -> Op:
    return next(op for op in block.ops if op.name == name)


def test_host_experts_start_before_the_shared_expert() -> None:
    ctx = context()
    module = v2_lite(_PLACED, ctx)
    block = _host_part(module)
    shared, post = _named(block, "nn.swiglu"), _named(block, "xfer.post")
    block.ops.remove(shared)
    block.ops.insert(block.ops.index(post), shared)
    verify(module)
    run(module, "overlap", ctx)
    verify(module)
    names = [op.name for op in block.ops]
    assert names.index("xfer.post") < names.index("nn.swiglu") < names.index("xfer.await")
    assert "overlap saves" in ctx.artifacts["overlap.txt"]
    assert "<svg" in ctx.artifacts["timeline.html"]


def test_a_good_order_stays() -> None:
    ctx = context()
    module = v2_lite(f"{_PLACED},overlap", ctx)
    text = str(module)
    run(module, "overlap", ctx)
    assert str(module) == text


def test_streamed_weights_cross_from_the_start_of_their_layer() -> None:
    ctx = context("rtx3060-12g+desktop", quantize="int8", context=2048, max_batch=4)
    module = v2_lite(f"{_PLACED},overlap", ctx)
    part = [op for op in module.functions["prefill"].walk() if op.body is not None][-1]
    assert part.body is not None
    assert part.body.ops[0].name == "xfer.copy"
