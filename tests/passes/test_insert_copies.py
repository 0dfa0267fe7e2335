"""insert-copies: what crosses, once, in which form."""

from placed_models import FRONT, context, run, v2_lite

from ktgraph.ir.verify import verify
from ktgraph.pass_api import PassContext
from ktgraph.target import load_target


def test_experts_of_the_host_get_a_mailbox_for_each_layer() -> None:
    module = v2_lite(f"{FRONT},place,insert-copies", context())
    verify(module)
    assert all("copies" not in f.attrs for f in module.functions.values())
    part = [op for op in module.functions["decode"].walk() if op.body is not None][1]
    assert part.body is not None
    names = [op.name for op in part.body.ops if op.name.startswith(("xfer.", "moe.grouped"))]
    assert names == ["xfer.post", "moe.grouped_mlp", "xfer.await"]
    post, experts, answer = (
        next(op for op in part.body.ops if op.name == n) for n in names
    )  # fmt: skip
    assert str(post.attrs["mailbox"]) == str(answer.attrs["mailbox"]) == "i"
    assert len(post.results) == 3  # rows, ids and weights in one
    assert experts.values == post.results
    assert answer.operands == experts.results
    assert answer.result.type.device is None


def test_a_second_run_changes_nothing() -> None:
    module = v2_lite(f"{FRONT},place,insert-copies", context())
    text = str(module)
    run(module, "insert-copies", context())
    assert str(module) == text


def test_a_value_crosses_once() -> None:
    module = v2_lite(f"{FRONT},place,insert-copies", context())
    for func in module.functions.values():
        copied = [v for op in func.walk() if op.name == "xfer.copy" for v in op.values]
        assert len(copied) == len(set(copied))


def test_cpu_alone_needs_none() -> None:
    target = load_target("rtx4090-24g+xeon")
    module = v2_lite(f"{FRONT},place", PassContext(type(target)("cpu", (target.cpu,), "cpu")))
    text = str(module)
    run(module, "insert-copies")
    assert str(module) == text
