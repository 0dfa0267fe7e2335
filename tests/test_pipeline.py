"""Pipeline strings: options by field type, edits of a named pipeline, passes from outside."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from ktgraph.errors import user_message
from ktgraph.pass_api import Pass, UnknownPassError, pass_class
from ktgraph.pass_options import PipelineError, options_text, parse_options
from ktgraph.passes.pipelines import PIPELINES
from ktgraph.pipeline import Pipeline, Step, load_plugin, parse_pipeline

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from ktgraph.pass_api import Pass, register_pass

@register_pass
@dataclass(frozen=True)
class Outside(Pass):
    name: ClassVar[str] = "outside"
    depth: int = 3
    def run(self, module, ctx): ...
"""


@dataclass(frozen=True)
class Options(Pass):
    name: ClassVar[str] = "options"
    count: int = 1
    ratio: float = 0.5
    on: bool = False
    word: str = "plain"
    maybe: str | None = None
    size: int | None = None
    form: Literal["short", "long"] = "short"
    layers: tuple[int, ...] = ()

    def run(self, module, ctx): ...


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "outside.py"
    file.write_text(PLUGIN)
    return file


def read(text: str) -> Options:
    return Options(**parse_options(Options, text, "pass options"))


def test_options_by_field_type():
    found = read("count=22GiB,ratio=1e-3,on=true,word=int4(group=32),layers=[1, 2],form=long")
    assert (found.count, found.ratio, found.on) == (22 * 2**30, 1e-3, True)
    assert (found.word, found.layers, found.form) == ("int4(group=32)", (1, 2), "long")
    assert read('maybe="a, b",size=8') == Options(maybe="a, b", size=8)
    assert read("maybe=none,size=none") == Options()


@pytest.mark.parametrize(
    "given",
    [
        Options(),
        Options(count=-3, ratio=0.25, on=True),
        Options(word="a=b", maybe="none", layers=(4, 5, 6)),
        Options(maybe="experts=int4(group=64),*=int8", size=2**34),
        Options(word=" spaced "),
    ],
)
def test_options_text_reads_back(given: Options):
    assert read(options_text(given).strip("{}")) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont=1", "unknown option 'cuont' (did you mean count?); it has: count: int = 1"),
        ("count=many", "option count takes int, got 'many'"),
        ("on=yes", "option on takes bool, got 'yes'"),
        ("form=tall", "option form takes short | long, got 'tall'"),
        ("layers=3", "option layers takes [int, …], got '3'"),
        ("count", "expected name=value, got 'count'"),
        ("count=1,count=2", "option count is given twice"),
        ("layers=[1", "a bracket or quote is not closed"),
    ],
)
def test_wrong_options_say_what_fits(text: str, message: str):
    with pytest.raises(PipelineError) as error:
        read(text)
    assert message in str(error.value)


def base() -> str:
    return "fuse-norms,canonicalize,merge-linears"


def test_a_flat_list_keeps_repeats_and_prints_back():
    found = parse_pipeline("canonicalize,merge-linears{min_users=3},canonicalize")
    assert found.names == ("canonicalize", "merge-linears", "canonicalize")
    assert str(found) == "canonicalize,merge-linears{min_users=3},canonicalize"
    assert parse_pipeline(str(found)) == found


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "trio", base())
    monkeypatch.setitem(PIPELINES, "closing", base() + ",pack-weights,lower")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trio", base()),
        ("trio,-canonicalize", "fuse-norms,merge-linears"),
        ("trio,merge-linears{min_users=4}", "fuse-norms,canonicalize,merge-linears{min_users=4}"),
        ("trio,+moe-group", base() + ",moe-group"),
        (
            "trio,+moe-group@before:canonicalize",
            "fuse-norms,moe-group,canonicalize,merge-linears",
        ),
        ("trio,+moe-group@after:fuse-norms", "fuse-norms,moe-group,canonicalize,merge-linears"),
        ("closing,+moe-group", base() + ",moe-group,pack-weights,lower"),
        ("trio,+fuse-norms,+moe-group@after:fuse-norms", base() + ",fuse-norms,moe-group"),
        ("moe-group,trio,-fuse-norms", "moe-group,canonicalize,merge-linears"),
    ],
)
def test_edits_of_a_named_pipeline(trio: None, text: str, expected: str):
    assert str(parse_pipeline(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trio,-place", "-place: no such pass in the pipeline"),
        ("trio,-fuse-norm", "did you mean fuse-norms?"),
        ("trio,+moe-group@before:fuse", "@before:fuse: no such pass in the pipeline"),
        ("trio,moe-group", "write +moe-group to add the pass"),
        ("trio,moe-group{min_users=1}", "moe-group: no such pass in the pipeline"),
        ("trio{a=1}", "options and @ go with a pass that is added"),
        ("fuse-norms{", "not closed"),
        ("fuse-norms@near:place", "expected name{option=value}"),
        ("fuse-norms,", "item ''"),
    ],
)
def test_malformed_pipelines(trio: None, text: str, message: str):
    with pytest.raises(PipelineError) as error:
        parse_pipeline(text)
    assert message in str(error.value)


def test_unknown_pass_lists_close_ones():
    with pytest.raises(UnknownPassError, match="did you mean fuse-norms"):
        parse_pipeline("fuse-nroms")


def test_a_pass_in_a_file(plugin: Path):
    found = parse_pipeline(f"canonicalize,{plugin}:outside{{depth=5}}")
    assert found.names == ("canonicalize", "outside")
    assert vars(found.steps[1].instance) == {"depth": 5}
    assert str(found) == f"canonicalize,{plugin}:outside{{depth=5}}"
    with pytest.raises(UnknownPassError, match="it defines outside"):
        parse_pipeline(f"{plugin}:inside")


def test_a_plugin_makes_its_names_known(plugin: Path):
    load_plugin(plugin)
    assert parse_pipeline("outside").steps[0].ref == f"{plugin}:outside"
    assert load_plugin(plugin) is load_plugin(plugin)
    with pytest.raises(PipelineError, match="no such file"):
        load_plugin(plugin.parent / "missing.py")


def test_a_changed_plugin_is_loaded_again(plugin: Path):
    first = pass_class_of(plugin)
    plugin.write_text(PLUGIN.replace("depth: int = 3", "depth: int = 9"))
    os.utime(plugin, ns=(1, 1))
    assert vars(first()) == {"depth": 3}
    assert vars(pass_class_of(plugin)()) == {"depth": 9}


def pass_class_of(plugin: Path) -> type[Pass]:
    return type(parse_pipeline(f"{plugin}:outside").steps[0].instance)


def test_a_pass_in_a_module():
    found = parse_pipeline("ktgraph.passes.fuse_norms:FuseNorms")
    assert found.names == ("fuse-norms",)
    with pytest.raises(UnknownPassError, match="has no Pass class 'Nix'"):
        parse_pipeline("ktgraph.passes.fuse_norms:Nix")
    with pytest.raises(UnknownPassError, match="cannot import no_such_module"):
        parse_pipeline("no_such_module:Nix")


def test_entry_points_are_loaded(plugin: Path, monkeypatch: pytest.MonkeyPatch):
    class Entry:
        def load(self) -> object:
            return load_plugin(plugin)

    monkeypatch.setattr("ktgraph.pass_api._entry_points", lambda: iter([Entry()]))
    assert pass_class("outside").name == "outside"


def test_instances_and_resuming():
    pipeline = Pipeline.of([pass_class("canonicalize")(), pass_class("fuse-norms")()])
    assert str(pipeline.rest_after(["canonicalize"])) == "fuse-norms"
    assert str(pipeline.starting_at("fuse-norms")) == "fuse-norms"
    with pytest.raises(PipelineError, match="the file was written after fuse-norms"):
        pipeline.rest_after(["fuse-norms"])
    assert Step.of(Options()).ref.endswith(":Options")


def test_the_default_pipeline_is_well_formed():
    parse_pipeline("default")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", r":2: SyntaxError: "),
        ("x = 1\n\nx.y\n", r":3: AttributeError: 'int' object has no attribute 'y'"),
        ("def f():\n    return 1 / 0\nf()\n", r":2: ZeroDivisionError: division by zero"),
        ("import no_such_module\n", r":1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_an_error_in_a_plugin_names_its_line(text: str, message: str, tmp_path: Path):
    """It is the user's file that is at fault; mended, it loads."""
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(PipelineError, match=re.escape(str(file)) + message) as error:
        parse_pipeline(f"{file}:mine")
    assert user_message(error.value) is not None
    with pytest.raises(PipelineError):  # not half loaded
        load_plugin(file)
    file.write_text("x = 2\n")
    assert load_plugin(file).x == 2


def test_an_error_in_a_users_module_is_no_fault_of_ktgraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_module_of_mine.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownPassError, match="broken_module_of_mine: ZeroDivisionError: div"):
        parse_pipeline("broken_module_of_mine:Mine")
