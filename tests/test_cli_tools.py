"""The commands on .ktir files: opt, diff, bisect, replay, passes, fmt; errors in one message."""

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import broken_passes as broken
import pytest
from small_models import mla_moe

from ktgraph import cli
from ktgraph.cli import COMMANDS, build_parser, main
from ktgraph.ir.parser import parse_file

PLUGIN = Path(broken.__file__)


@pytest.fixture(autouse=True)
def repro_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.ktir"
    file.write_text(str(mla_moe()))
    return file


def test_every_command_has_help():
    parser = build_parser()
    for name in COMMANDS:
        assert f"\n    {name} " in parser.format_help()


def test_opt_writes_a_file_that_goes_on(model: Path, tmp_path: Path, capsys):
    out = tmp_path / "out.ktir"
    dump = tmp_path / "d"
    args = ["opt", str(model), "-p", "merge-linears,fuse-norms", "--validate", "1", "-o", str(out)]
    assert main([*args, "--dump", str(dump)]) == 0
    shown = capsys.readouterr()
    assert "fuse-norms" in shown.err
    assert shown.out == ""
    assert out.read_text().startswith("// after: merge-linears,fuse-norms\nktgraph.ir 1\n")
    first = next(dump.glob("*/01-merge-linears.ktir"))
    assert main(["opt", str(first)]) == 0
    resumed = capsys.readouterr().out
    assert resumed == out.read_text()


def test_opt_from_a_pass(model: Path, capsys):
    assert main(["opt", str(model), "-p", "merge-linears,fuse-norms", "--from", "fuse-norms"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("// after: merge-linears,fuse-norms\n")
    assert "2   fuse-norms" in shown.err
    assert "merge-linears  " not in shown.err


def test_opt_with_options_and_target(model: Path, tmp_path: Path, capsys):
    args = ["opt", str(model), "-p", "specialize-phases", "--options", "max_tokens=64"]
    assert main([*args, "--target", "rtx4090-24g+xeon", "--dump", str(tmp_path / "d")]) == 0
    assert "max_q = 64" in capsys.readouterr().out
    folder = next((tmp_path / "d").iterdir())
    assert "options{max_tokens=64}" in (folder / "pipeline.txt").read_text()
    assert 'name = "rtx4090-24g+xeon"' in (folder / "target.toml").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["opt", "missing.ktir"], "missing.ktir: No such file or directory"),
        (["opt", "MODEL", "-p", "fuse-nroms"], "did you mean fuse-norms"),
        (["opt", "MODEL", "-p", "fuse-norms{x=1}"], "it has no options, got 'x'"),
        (["opt", "MODEL", "-p", "fuse-norms", "--target", "h100"], "unknown target 'h100'"),
        (["opt", "MODEL", "-p", "fuse-norms", "--options", "exat=true"], "did you mean exact"),
        (["opt", "MODEL", "-p", "fuse-norms", "--plugin", "no.py"], "plugin no.py: no such file"),
        (["replay", "."], "no repro folder"),
        (["passes", "fuse-norm"], "did you mean fuse-norms"),
    ],
)
def test_errors_are_one_message_and_code_2(args, message, model: Path, capsys):
    assert main([str(model) if a == "MODEL" else a for a in args]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"ktgraph {args[0]}: ")
    assert message in shown
    assert "Traceback" not in shown
    assert len(shown.strip().split("\n")) == 1


def test_a_parse_error_shows_the_place(tmp_path: Path, capsys):
    file = tmp_path / "bad.ktir"
    file.write_text("ktgraph.ir 1\nmodule @m\nwat\n")
    assert main(["opt", str(file)]) == 2
    assert "bad.ktir:3:1: expected one of" in capsys.readouterr().err


def test_an_interrupt_at_the_start_is_no_traceback(monkeypatch):
    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", stopped)
    assert main(["passes"]) == 130


def test_help_does_without_torch():
    code = (
        "import sys; from ktgraph.cli import build_parser as b; b(); print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"


def test_a_warning_is_one_line():
    usual = warnings.formatwarning
    with cli._short_warnings():
        assert warnings.formatwarning("slow", UserWarning, "file.py", 3) == "UserWarning: slow\n"
    assert warnings.formatwarning is usual


def test_debug_shows_the_traceback():
    with pytest.raises(FileNotFoundError):
        main(["opt", "missing.ktir", "--debug"])


def test_diff(model: Path, tmp_path: Path, capsys):
    assert main(["diff", str(model), str(model)]) == 0
    other = tmp_path / "other.ktir"
    text = model.read_text().replace("%l0.attn", "%l0.out").replace("eps = 1e-06", "eps = 1e-05", 1)
    other.write_text(text)
    assert main(["diff", str(model), str(other), "--ignore-names", "--context", "0"]) == 1
    shown = capsys.readouterr().out.split("\n")
    assert [line for line in shown if line.startswith(("+ ", "- "))] == [
        "-  %l0.h = nn.rms_norm %x, @layers[0].input_norm {eps = 1e-06} : f32[T, D]",
        "+  %l0.h = nn.rms_norm %x, @layers[0].input_norm {eps = 1e-05} : f32[T, D]",
    ]  # fmt: skip
    assert main(["diff", str(model), str(other)]) == 1
    assert "%l0.out" in capsys.readouterr().out


def test_a_failure_its_replay_and_bisection(model: Path, capsys):
    args = ["opt", str(model), "-p", "fuse-norms,one-bad-rule", "--plugin", str(PLUGIN)]
    args[3] = f"merge-linears,{PLUGIN}:one-bad-rule"
    assert main([*args, "--validate", "1"]) == 2
    message = capsys.readouterr().err
    assert "drops-eps at: %h = nn.rms_norm" in message
    folder = message.split("show it again: ktgraph replay ")[1].strip()
    assert main(["replay", folder]) == 2
    assert "failed (validate): results differ: NMSE" in capsys.readouterr().err
    assert main(["bisect", folder]) == 1
    assert "drops-eps at: %h" in capsys.readouterr().out
    assert main(["bisect", str(model), "-p", "fuse-norms"]) == 0
    assert capsys.readouterr().out == "no pass goes wrong\n"


def test_passes(capsys):
    assert main(["passes"]) == 0
    table = capsys.readouterr().out
    assert "fuse-norms" in table
    assert "min_users: int = 2" in table
    assert main(["passes", "merge-linears"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("merge-linears: ")
    assert "option    min_users: int = 2" in shown


def test_fmt(model: Path, tmp_path: Path, capsys):
    loose = tmp_path / "loose.ktir"
    loose.write_text("// a note\n\n" + model.read_text().replace("  %", " %").replace(" : ", ": "))
    assert main(["fmt", str(loose), "--check"]) == 1
    assert main(["fmt", str(loose), "-i"]) == 0
    assert loose.read_text() == "// a note\n\n" + model.read_text()
    assert main(["fmt", str(loose), "--check"]) == 0
    inner = model.read_text().replace("func @main", "// inside\nfunc @main")
    loose.write_text(inner)
    assert main(["fmt", str(loose)]) == 2
    assert "a comment inside the module would be lost" in capsys.readouterr().err
    assert parse_file(loose).name == "mla_moe"
