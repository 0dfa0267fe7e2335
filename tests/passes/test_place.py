"""place: where things go on described machines, budgets, and that results stay equal."""

import pytest
import torch
from placed_models import FRONT, HYBRID, context, small_target, v2_lite
from placed_models import run as run_passes
from small_models import gqa_moe, mla_moe

from ktgraph.errors import MemoryBudgetError
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.repeats import inline_repeat, split_repeat
from ktgraph.ir.verify import VerifyError, verify
from ktgraph.pass_api import CompileOptions, PassContext, exact
from ktgraph.placement.decide import Settings, decide
from ktgraph.runtime.plan import Plan, PlanError
from ktgraph.runtime.runner import gpu_device
from ktgraph.target import load_target
from ktgraph.validate import Validator

_SMALL = "specialize-phases,mla-absorb,merge-linears,moe-group,fuse-norms,fuse-rope-kv"


def _devices(module: Module, name: str) -> list[str | None]:
    return [op.result.type.device for op in module.walk() if op.name == name]


def test_experts_that_do_not_fit_run_on_the_cpu() -> None:
    ctx = context()
    module = v2_lite(f"{FRONT},place", ctx)
    assert module.home == "cuda:0"
    assert module.target_hash == load_target("rtx4090-24g+xeon").hash
    assert list(module.devices) == ["cuda:0", "cpu"]
    assert set(_devices(module, "mla.attend")) == {None}
    assert _devices(module, "moe.grouped_mlp") == [None, "cpu"] * 2
    parts = [op for op in module.functions["decode"].walk() if op.body is not None]
    spans = [(p.int_attr("lo"), p.int_attr("hi")) for p in parts]
    assert spans[0][0] == 1
    assert spans[1] == (spans[0][1] + 1, 26)
    twin = module.weights["layers[].mlp.experts.down_proj.cpu"]
    assert (twin.lo, twin.hi, twin.type.device) == (*spans[1], "cpu")
    assert module.weights["layers[].mlp.experts.down_proj"].lo == 1
    verify(module)
    assert "cuda:0 is full" in ctx.artifacts["placement.txt"]


def test_experts_that_fit_stay_on_the_gpu() -> None:
    module = v2_lite(f"{FRONT},{HYBRID}", context(quantize="int8"))
    assert set(_devices(module, "moe.grouped_mlp")) == {None}
    assert not any(op.name.startswith("xfer.") for op in module.walk())


def test_experts_stream_in_prefill_where_the_host_is_slow() -> None:
    ctx = context("rtx3060-12g+desktop", quantize="int8", context=2048, max_batch=4)
    module = v2_lite(f"{FRONT},{HYBRID},pack-weights", ctx)
    verify(module)
    prefill = module.functions["prefill"]
    copies = [op for op in prefill.walk() if op.name == "xfer.copy" and op.weights]
    assert [str(op.attrs["stream"]) for op in copies] == ["1"]
    assert "tile.int8" in str(copies[0])  # the tiles that the host's kernel reads in decode
    decode = [op for op in module.functions["decode"].walk() if op.name == "moe.grouped_mlp"]
    assert [op.result.type.device for op in decode] == [None, "cpu"]


@pytest.mark.parametrize("memory", [6, 10, 16, 22])
def test_the_budget_holds(memory: int) -> None:
    target = load_target("rtx4090-24g+xeon")
    settings = Settings(CompileOptions(), gpu_memory=memory << 30)
    found = decide(v2_lite(), target, settings)
    assert found.used("cuda:0") <= memory << 30
    assert found.used("cpu") <= target.cpu.memory


def test_what_fits_nowhere_is_one_error_with_the_largest_terms() -> None:
    with pytest.raises(MemoryBudgetError, match=r"cpu has 16 GiB(.|\n)*kv(.|\n)*Compile with"):
        decide(
            v2_lite(),
            small_target(1 << 30),
            Settings(CompileOptions(cache_rows=1 << 22), gpu_memory=2 << 30),
        )


def test_cpu_alone_prints_no_device() -> None:
    target = load_target("rtx4090-24g+xeon")
    cpu = type(target)("cpu", (target.cpu,), "cpu")
    ctx = PassContext(cpu)
    module = v2_lite(f"{FRONT},{HYBRID}", ctx)
    assert module.home == "cpu"
    assert not module.devices
    assert "@cpu" not in str(module)
    assert "the only device" in ctx.artifacts["placement.txt"]
    assert "critical path" in ctx.artifacts["cost.txt"]


@pytest.mark.parametrize("model", [gqa_moe, mla_moe])
@pytest.mark.parametrize("memory", [5 << 20, 24 << 20, 1 << 30])
def test_results_stay_equal(model: object, memory: int) -> None:
    wide = {"D": 256, "E": 16, "F": 256, "VOC": 512, "I": 260}
    module = model()  # type: ignore[operator]
    module = run_passes(
        module.rebind(**{k: v for k, v in wide.items() if k in module.dims}), _SMALL
    )
    options = {"context": 64, "max_batch": 2, "max_tokens": 32}
    ctx = context(small_target(memory), **options)
    before = module.clone()
    run_passes(module, HYBRID, ctx)
    verify(module)
    assert str(parse_module(str(module))) == str(module)
    found = Validator().compare(before, module, exact())
    assert (found.fault, found.error) == ("", 0.0)


def test_the_whole_pipeline_plans_for_a_gpu_and_says_when_there_is_none() -> None:
    ctx = context()
    module = v2_lite(f"{FRONT},{HYBRID},pack-weights,plan-memory,lower", ctx)
    verify(module)
    host = [op.via for op in module.walk() if op.result.type.device == "cpu" and op.weights]
    assert "cpu.grouped_mlp" in host
    assert all(op.via for op in module.walk() if op.body is None)
    plan = Plan.build(module)
    assert plan.uses_gpu
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match=r"torch sees no CUDA device here.*gpu=\"simulated\""):
            gpu_device(plan)


def test_a_missing_copy_is_a_fault_once_none_is_pending() -> None:
    module = v2_lite(f"{FRONT},place", context())
    for func in module.functions.values():
        func.attrs.pop("copies")
    with pytest.raises(VerifyError, match="run the pass insert-copies"):
        verify(module)


def test_a_second_run_leaves_the_module() -> None:
    module = v2_lite(f"{FRONT},place", context())
    text = str(module)
    run_passes(module, "place", context())
    assert str(module) == text
    with pytest.raises(ValueError, match="was placed for target"):
        run_passes(module, "place", context("rtx3060-12g+desktop"))


def test_split_repeat_keeps_names_and_meaning() -> None:
    before = gqa_moe()
    module = before.clone()
    func = module.functions["main"]
    repeat = next(op for op in func.body.ops if op.body is not None)
    head, tail = split_repeat(func, repeat, 1)
    verify(module)
    assert [r.name for r in head.results] == ["x.n.1", "kv.n.1"]
    assert [r.name for r in tail.results] == ["x.n", "kv.n"]
    assert head.body is not None
    assert head.body.args[0].name == "x"
    assert Validator().compare(before, module, exact()).error == 0.0
    with pytest.raises(ValueError, match="cannot be split at 1"):
        split_repeat(func, tail, 1)


def test_inline_repeat_keeps_names_and_meaning() -> None:
    before = gqa_moe()
    module = before.clone()
    func = module.functions["main"]
    repeat = next(op for op in func.body.ops if op.body is not None)
    with pytest.raises(ValueError, match=r"repeat 0\.\.1 is no repeat of one layer"):
        inline_repeat(repeat)
    head, _ = split_repeat(func, repeat, 1)
    moved = inline_repeat(head)
    verify(module)
    assert "routed" in [r.name for op in moved for r in op.results]
    assert all(op.block is func.body for op in moved)
    assert {str(ref.index) for op in moved for ref in op.weights if ref.index} == {"0"}
    assert Validator().compare(before, module, exact()).error == 0.0
