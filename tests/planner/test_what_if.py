"""What-if texts: what each changes of a target or a call, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from ktgraph.planner.what_if import Setting, WhatIfError, apply_what_if
from ktgraph.target import ASSUMED_DISK, Target, TargetError, load_target

BASE = load_target("rtx4090-24g+xeon")
ALONE = Target("alone", (BASE.cpu,), "cpu")
GIB = 1 << 30


def changed(text: str, target: Target = BASE) -> Setting:
    return apply_what_if(text, Setting(target, {"context": 4096}))


def test_sizes_absolute_more_less_and_times() -> None:
    assert changed("gpu_memory=+8GiB").target.device("cuda:0").memory == 30 * GIB
    assert changed("gpu_memory=24GiB").target.device("cuda:0").memory == 24 * GIB
    assert changed("ram=-60GiB").target.cpu.memory == 400 * GIB
    assert changed("ram=x0.5").target.cpu.memory == 230 * GIB


def test_rates() -> None:
    links = changed("link=x2").target.links
    assert [k.bandwidth for k in links] == [50e9, 50e9]
    assert [k.latency for k in links] == [k.latency for k in BASE.links]
    assert changed("link=50GB/s").target.links[0].bandwidth == 50e9
    assert changed("dram=x2").target.cpu.bandwidth_at() == pytest.approx(2 * 230e9)
    assert changed("disk=7GB/s").target.disk is not None
    assert changed("disk=+1GB/s", ALONE).target.disk == ASSUMED_DISK.__class__(
        ASSUMED_DISK.bandwidth + 1e9, ASSUMED_DISK.latency
    )


def test_other_devices_keep_ram_and_links(tmp_path: Path) -> None:
    other = load_target("h200+xeon-amx")
    found = changed("cpu=h200+xeon-amx").target
    assert found.cpu.peak == other.cpu.peak
    assert found.cpu.memory == BASE.cpu.memory
    assert found.links == BASE.links
    found = changed("gpu=h200+xeon-amx").target
    assert found.gpus[0].memory == other.gpus[0].memory
    assert found.links == BASE.links
    (tmp_path / "mine.toml").write_text(other.to_toml())
    assert changed(f"cpu={tmp_path / 'mine.toml'}").target.cpu.peak == other.cpu.peak
    assert changed("gpu=none").target == replace(BASE, devices=(BASE.cpu,), home="cpu", links=())
    added = changed("gpu=h200+xeon-amx", ALONE).target
    assert added.home == "cuda:0"
    assert added.link("cpu", "cuda:0").bandwidth == 55e9


def test_several_changes_and_options() -> None:
    found = changed("ram=384GiB, link=x2,batch=8,context=32768")
    assert (found.target.cpu.memory, found.target.links[0].bandwidth) == (384 * GIB, 50e9)
    assert (found.batch, found.options["context"]) == (8, 32768)
    policy = "experts=int4p(group=64),lm_head=keep,*=int8"
    found = changed(f"quantize={policy},ram=+1GiB")
    assert found.options["quantize"] == policy
    assert found.target.cpu.memory == 461 * GIB


REFUSED = {
    "gpu_memroy=+8GiB": "did you mean gpu_memory=...?",
    "speed=2": "known: gpu_memory, ram, cpu",
    "ram": "expected key=value",
    "": "expected key=value",
    "ram=": "expected key=value",
    "ram=lots": "ram=lots: expected an amount",
    "link=xfast": "expected an amount",
    "gpu_memory=-22GiB": "nothing would be left of 22GiB",
    "batch=0": "batch=0: expected a whole number",
    "context=many": "context=many: expected a whole number",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_read_is_one_message(text: str) -> None:
    with pytest.raises(WhatIfError) as caught:
        changed(text)
    assert REFUSED[text] in str(caught.value)


def test_what_does_not_suit_the_target() -> None:
    with pytest.raises(WhatIfError, match=r"gpu_memory=.*has no GPU; gpu=NAME adds one"):
        changed("gpu_memory=+8GiB", ALONE)
    with pytest.raises(WhatIfError, match="link=x2: target 'alone' has no GPU"):
        changed("link=x2", ALONE)
    with pytest.raises(WhatIfError, match="a GPU alone"):
        changed("ram=1GiB", Target("gpu", BASE.gpus, "cuda:0"))
    with pytest.raises(TargetError, match="unknown target 'xeon9'"):
        changed("cpu=xeon9")
