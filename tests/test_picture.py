"""Pictures: the networkx graph, columns that fold equal layers, a page that stands alone."""

import re
import xml.etree.ElementTree as ET

import pytest
from small_models import gqa_moe, mla_moe

from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.picture import columns, nodes_of, to_html


def many_layers(count: int) -> Module:
    """The dense layer of the small model, written out `count` times."""
    text = str(mla_moe())
    head, body = text.split("  %l0.h = ", 1)
    layer = "  %l0.h = " + body.split("  %l1.h = ", 1)[0]
    family = head.replace("[i in 0..1]", f"[i in 0..{count - 1}]").replace(
        "kv(2 x", f"kv({count} x"
    )
    family = family.replace("@layers[0].mlp", f"@layers[i in 0..{count - 1}].mlp", 0)
    lines = [family]
    for number in range(count):
        one = layer.replace("%l0.", f"%l{number}.").replace("layer = 0", f"layer = {number}")
        one = one.replace("kv(2 x", f"kv({count} x").replace("@layers[0]", f"@layers[{number}]")
        one = re.sub(r"@layers\[\d+\]\.mlp", "@layers[0].mlp", one)
        one = one.replace("%kv.0", f"%kv.{number}")
        if number:
            one = one.replace(", %kv, ", ", PAST, ").replace(
                "append_latent %kv,", "append_latent PAST,"
            )
            one = one.replace("PAST", f"%kv.{number - 1}").replace("%x,", f"%l{number - 1}.y,")
        lines.append(one)
    end = body.split("  %h = ", 1)[1].replace("%l1.y", f"%l{count - 1}.y")
    lines.append("  %h = " + end.replace("%kv.1", f"%kv.{count - 1}"))
    return parse_module("".join(lines))


def split_devices(module: Module) -> Module:
    """Everything at home on cuda:0, the experts on the CPU."""
    module.home = "cuda:0"
    for op in module.walk():
        if op.name in ("moe.experts", "moe.grouped_mlp"):
            for result in op.results:
                result.type = result.type.on("cpu")
    return module


def test_the_graph_has_devices_bytes_and_flops():
    graph = split_devices(mla_moe()).to_networkx()
    experts = graph.nodes["main:l1.routed"]
    assert (experts["op"], experts["device"], experts["layer"]) == ("moe.experts", "cpu", "1")
    assert graph.nodes["main:l0.q"]["device"] == "cuda:0"
    head = graph.nodes["main:logits"]
    assert head["flops"] == 2 * 512 * 48 * 61 or head["flops"] > 0
    assert head["bytes"] > 48 * 61 * 4
    assert graph.nodes["main:ids"]["op"] == "argument"
    assert graph.has_edge("main:l1.ids", "main:l1.routed")
    assert sorted(d["value"] for *_, d in graph.out_edges("main:l1.ids", data=True)) == [
        "l1.ids", "l1.wts",
    ]  # fmt: skip


def test_a_repeat_is_one_group_and_its_edges_pass_through():
    graph = gqa_moe().to_networkx()
    assert graph.nodes["main:routed"]["repeat"] == 2
    assert graph.nodes["main:routed"]["layer"] == "0–1"
    assert graph.has_edge("main:x.0", "main:h")
    assert graph.has_edge("main:y", "main:h.n")


def test_columns_are_layers():
    module = mla_moe()
    found = columns(nodes_of(module, module.functions["main"]))
    assert [c.title for c in found] == ["—", "layer 0", "layer 1", "—"]
    assert sum(len(c.nodes) for c in found) == sum(1 for _ in module.walk())


def test_equal_layers_fold():
    module = many_layers(60)
    found = columns(nodes_of(module, module.functions["main"]))
    assert [c.title for c in found] == ["—", "layer 0–59 ×60", "—"]


@pytest.mark.parametrize("make", [mla_moe, gqa_moe, lambda: split_devices(mla_moe())])
def test_the_page_stands_alone(make):
    page = to_html(make())
    assert "{{" not in page
    assert not re.search(r'(src|href)="|url\(|@import|fetch\(', page)
    for svg in re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL):
        root = ET.fromstring(svg)
        space = "{http://www.w3.org/2000/svg}"
        boxes = root.findall(f"{space}g")
        keys = {b.get("data-key") for b in boxes}
        assert len(keys) == len(boxes) == sum(1 for o in make().walk() if o.body is None)
        edges = root.findall(f"{space}path")
        assert edges
        assert all(e.get("data-from") in keys and e.get("data-to") in keys for e in edges)
        _no_overlap(boxes, space)


def _no_overlap(boxes, space: str) -> None:
    places = [tuple(float(b.find(f"{space}rect").get(k)) for k in ("x", "y")) for b in boxes]
    assert len(set(places)) == len(places)


def test_devices_have_lanes_and_crossings_are_marked():
    page = to_html(split_devices(mla_moe()))
    assert "cuda:0: 46 ops" in page
    assert "cpu: 1 ops" in page
    assert page.count('class="edge cross"') == 4


def test_names_are_escaped():
    module = mla_moe()
    module.name = "a<b>&c"
    assert "a&lt;b&gt;&amp;c" in to_html(module)


def test_invalid_ir_is_drawn_as_far_as_it_goes():
    module = mla_moe()
    op = next(op for op in module.walk() if op.name == "nn.linear")
    op.name = "no.such_op"
    assert "no.such_op" in to_html(module)
