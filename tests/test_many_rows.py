"""Row counts that change a kernel's path: measured, kept with the target, frozen into the plan."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import ktgraph as kt
from ktgraph.cpu_kernels import load_native
from ktgraph.ir import parse_module
from ktgraph.pass_api import PassContext
from ktgraph.passes.lower import Lower
from ktgraph.passes.plan_memory import PlanMemory
from ktgraph.runtime.many_rows import ManyRowsError, read_many_rows
from ktgraph.runtime.plan import Plan
from ktgraph.target import Target, TargetError, cpu, many_rows
from ktgraph.target.many_rows import COUNTS, NEVER, crossing

MODULE = """ktgraph.ir 1
module @m
sym T in 1..64
weight @a : bf16[32, 64]<tile.bf16(rows=bf16)>
weight @b : f32[64, 32]<tile.int8(rows=int8)>
weight @c : f32[16, 64]<tile.f32>
func @main(%x: f32[T, 64]) -> (f32[T, 16]) {
  %y = nn.linear %x, @a : f32[T, 32]
  %z = nn.linear %y, @b : f32[T, 64]
  %w = nn.linear %z, @c : f32[T, 16]
  return %w
}
"""


@pytest.mark.parametrize("first", [2, 12, 64])
def test_crossing(first):
    assert crossing(lambda rows: rows >= first) == first


def test_paths_that_never_cross():
    assert crossing(lambda rows: False) == NEVER
    assert crossing(lambda rows: True) == COUNTS[0]


@pytest.fixture
def level():
    return load_native().isa_info()["chosen"]


@pytest.fixture
def machine(level):
    """This machine with figures that are plainly made up, and those of a level it does not run."""
    rows = {level: {"bf16": 12, "int8": 7, "int4p": 3}, "another": {"bf16": 99}}
    host = cpu()
    return host.with_device(replace(host.cpu, many_rows=rows))


def test_target_text(machine):
    text = machine.to_toml()
    assert Target.from_toml(text) == machine
    assert "[device.many_rows.another]\nbf16 = 99\n" in text
    with pytest.raises(TargetError, match=r"'many_rows'.*as in amx\.int4p = 7; found"):
        Target.from_toml(text.replace("bf16 = 99", "bf16 = -99"))
    assert machine.hash != cpu().hash


def test_only_this_level_is_measured(level, monkeypatch):
    monkeypatch.setattr(many_rows, "SECONDS", 0.0)
    monkeypatch.setattr(many_rows, "RUNS", 1)
    monkeypatch.setattr(many_rows, "SIZE", 1 << 20)
    monkeypatch.setattr(many_rows, "COUNTS", (2, 4))
    monkeypatch.setattr(many_rows, "FORMATS", many_rows.FORMATS[:4])
    found = many_rows.measure_many_rows()
    names = {"int8", "int8_group"} | ({"bf16", "fp8"} if level in many_rows.BF16_LEVELS else set())
    assert found.keys() == {level}
    assert found[level].keys() == names
    assert set(found[level].values()) <= {2, 4, NEVER}


def lowered(machine):
    module = parse_module(MODULE)
    context = PassContext(target=machine)
    PlanMemory().run(module, context)
    Lower().run(module, context)
    return module, context


def test_lower_freezes_the_formats_that_are_read(machine):
    module, context = lowered(machine)
    assert read_many_rows(module) == {"bf16": 12, "int8": 7}
    assert 'device cpu {many_rows = ["bf16:12", "int8:7"]}' in str(module)
    assert any("bf16 12, int8 7" in note for note in context.notes)
    assert str(parse_module(str(module))) == str(module)


def test_a_target_without_figures_leaves_no_trace(machine):
    module, _ = lowered(machine)
    Lower().run(module, PassContext(target=kt.target.load_target("rtx4090-24g+xeon")))
    assert read_many_rows(module) == {}
    assert "many_rows" not in str(module)


def test_a_wrong_text_says_what_is_expected(machine):
    module, _ = lowered(machine)
    module.devices["cpu"]["many_rows"] = ("int8=7",)
    with pytest.raises(ManyRowsError, match=r"'int8=7'.*as in \"int4p:7\""):
        read_many_rows(module)


def test_a_module_runs_with_what_its_plan_says(machine, level):
    """Frozen into its instructions, explained, and of no effect on the bits of integers."""
    x = torch.randn(14, 64)
    traced = kt.trace(nn.Linear(64, 256).eval(), example_inputs=x)
    made = {}
    for count, said in ((2, "by panels or tiles from 2 rows on"), (NEVER, "from its packed bytes")):
        cpu = replace(machine.cpu, many_rows={level: {"int8": count}})
        stages = traced.lower(machine.with_device(cpu), quantize="int8", max_tokens=16)
        assert f":tile(many_rows={count})" in Plan.build(stages.module).text()
        assert f"int8 {said}" in stages.explain("nn.linear")
        made[count] = stages.compile()(x)
    assert made[2].equal(made[NEVER])
