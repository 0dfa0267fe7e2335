"""What travels beside a dumped module, so that another process can go on from it.

The first line of the file says which passes it has seen (``// after: name-dims,canonicalize``), a
comment to the parser.  `pipeline.txt` holds plugins, compile options and the whole pipeline,
`target.toml` the target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pass_options import PipelineError, options_text, parse_options
from ktgraph.pipeline import Pipeline, load_plugin, loaded_plugins
from ktgraph.target import Target

PIPELINE_FILE, TARGET_FILE = "pipeline.txt", "target.toml"
_HEADER = "// after:"


@dataclass(frozen=True)
class Recorded:
    """A module file with what lies beside it."""

    module: Module
    applied: tuple[str, ...] | None  # None: the file does not say
    pipeline: Pipeline | None
    options: CompileOptions
    target: Target | None

    def context(self) -> PassContext:
        return PassContext(target=self.target, options=self.options)

    @property
    def rest(self) -> Pipeline | None:
        """What is left of the recorded pipeline."""
        if self.pipeline is None:
            return None
        return self.pipeline.rest_after(self.applied or ())


def with_header(text: str, applied: Sequence[str]) -> str:
    """A module's text with the line that says which passes it has seen."""
    return f"{_HEADER} {','.join(applied)}".rstrip() + "\n" + text


def applied_passes(text: str) -> tuple[str, ...] | None:
    """The passes that a file's first line names; None when it has no such line."""
    first = text.split("\n", 1)[0]
    if not first.startswith(_HEADER):
        return None
    return tuple(p.strip() for p in first[len(_HEADER) :].split(",") if p.strip())


def write_settings(folder: Path, pipeline: Pipeline, ctx: PassContext) -> None:
    """Write pipeline.txt, and target.toml when there is a target."""
    lines = ["// what `ktgraph opt FILE.ktir` goes on with: plugins, options, then the passes"]
    lines += [f"plugin {file}" for file in loaded_plugins()]
    lines += [f"options{options_text(ctx.options)}"]
    lines += [",\n".join(map(str, pipeline.steps))]
    (folder / PIPELINE_FILE).write_text("\n".join(lines) + "\n")
    if ctx.target is not None:
        (folder / TARGET_FILE).write_text(ctx.target.to_toml())


def read_recorded(file: str | Path) -> Recorded:
    """Read a module file and, where they lie beside it, its pipeline, options and target.

    Raises ParseError, PipelineError, TargetError or OSError.
    """
    path = Path(file)
    text = path.read_text()
    pipeline, options = _read_pipeline(path.parent / PIPELINE_FILE)
    module = parse_module(text, str(path))
    return Recorded(module, applied_passes(text), pipeline, options, _read_target(path.parent))


def _read_target(folder: Path) -> Target | None:
    file = folder / TARGET_FILE
    return Target.from_toml(file.read_text(), path=file) if file.exists() else None


def _read_pipeline(file: Path) -> tuple[Pipeline | None, CompileOptions]:
    if not file.exists():
        return None, CompileOptions()
    options = CompileOptions()
    passes: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("plugin "):
            load_plugin(line.removeprefix("plugin ").strip())
        elif line.startswith("options"):
            options = _read_options(line.removeprefix("options").strip(), file)
        elif not line.startswith("//"):
            passes.append(line)
    return Pipeline.of("".join(passes)) if "".join(passes).strip() else Pipeline(()), options


def _read_options(text: str, file: Path) -> CompileOptions:
    inner = re.fullmatch(r"\{(.*)\}", text) if text else None
    if text and inner is None:
        raise PipelineError(f"{file}: expected options{{name=value,…}}, got options{text}")
    return CompileOptions(**parse_options(CompileOptions, inner[1] if inner else "", str(file)))


__all__ = [
    "PIPELINE_FILE",
    "TARGET_FILE",
    "Recorded",
    "applied_passes",
    "read_recorded",
    "with_header",
    "write_settings",
]
