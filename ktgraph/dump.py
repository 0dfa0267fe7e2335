"""The dump folder: everything a compilation did, as text, written before the next pass starts.

    NNNN-model/ README.txt · summary.txt · 00-import.ktir · NN-pass.ktir and .diff (changed passes)
    rules.txt · events.jsonl · graph.html · pipeline.txt · target.toml
    and what passes report: placement.txt cost.txt memory.txt plan.txt quantize.txt
    repro/ when a pass failed

Nothing is overwritten: a second compilation gets the next number.  Weights never enter a dump.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module
from ktgraph.ir.picture import write_html
from ktgraph.pass_api import PassContext
from ktgraph.pass_report import PassRecord, event_text, table_text, text_diff
from ktgraph.pipeline import Pipeline
from ktgraph.recorded import TARGET_FILE, with_header, write_settings
from ktgraph.repro import versions

VARIABLE = "KTGRAPH_DUMP"
_ABOUT = {
    "README.txt": "this file",
    "summary.txt": "one row per pass: changed, rewrites, ops, times, error on the miniature",
    "rules.txt": "what each rule matched, refused with its reason, or matched in part",
    "events.jsonl": "the same for tools: one JSON object per line",
    "graph.html": "a picture of the last module, by layer and device (open it in a browser)",
    "pipeline.txt": "options and passes; `ktgraph opt` reads it beside a .ktir file",
    "target.toml": "the machine compiled for",
    "placement.txt": "op by op: device, runner-up, margin",
    "cost.txt": "FLOPs, bytes and seconds by op",
    "memory.txt": "bytes by device and kind",
    "timeline.html": "the predicted timeline by device and link (open it in a browser)",
    "plan.txt": "the instructions that run",
    "quantize.txt": "which weight got which encoding",
    "repro": "the failing pass alone: `ktgraph replay repro` shows the failure again",
}


class DumpError(KtgraphError, ValueError):
    """A dump that was asked for and cannot be written."""


@dataclass(frozen=True)
class DumpRequest:
    """Where to dump, and for which passes to write files (a regex over their names)."""

    root: Path
    passes: str = ""

    @staticmethod
    def parse(text: str) -> DumpRequest:
        """Read ``dir[:pass-regex]``; raises DumpError for a malformed regex."""
        root, _, passes = text.partition(":")
        try:
            re.compile(passes)
        except re.error as error:
            raise DumpError(f"{VARIABLE}={text}: {passes!r} is no regex: {error}") from None
        return DumpRequest(Path(root or "."), passes)

    @staticmethod
    def from_environment() -> DumpRequest | None:
        """The request in KTGRAPH_DUMP, if any."""
        text = os.environ.get(VARIABLE, "")
        return DumpRequest.parse(text) if text else None


@dataclass
class DumpFolder:
    """One folder, open while the passes run."""

    path: Path
    ctx: PassContext
    passes: str = ""
    records: list[PassRecord] = field(default_factory=list[PassRecord])
    _written: dict[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def create(
        request: DumpRequest,
        module: Module,
        pipeline: Pipeline,
        ctx: PassContext,
        applied: Sequence[str] = (),
    ) -> DumpFolder:
        """Make the next free folder, write the module as it came in, and say where on stderr."""
        folder = DumpFolder(_next_folder(request.root, module.name), ctx, request.passes)
        stem = applied[-1] if applied else "import"
        folder.write(f"{len(applied):02d}-{stem}.ktir", with_header(str(module), applied))
        write_settings(folder.path, pipeline, ctx)
        folder.event("start", model=module.name, pipeline=str(pipeline), versions=versions())
        folder._write_readme()
        print(f"ktgraph: dump in {folder.path}", file=sys.stderr)
        return folder

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder and flush it."""
        with self._opened(name, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def event(self, kind: str, **values: object) -> None:
        """Append a line to events.jsonl."""
        with self._opened("events.jsonl", "a") as file:
            file.write(json.dumps({"event": kind, **values}) + "\n")

    def add(self, record: PassRecord, before: str, applied: Sequence[str]) -> None:
        """Write what a pass did: its module and diff when it changed, its rules, its row."""
        self.records.append(record)
        if record.text is not None and re.search(self.passes, record.name):
            stem = f"{record.number:02d}-{record.name}"
            self.write(f"{stem}.ktir", with_header(record.text, applied))
            old, new = f"before {record.name}", f"after {record.name}"
            self.write(f"{stem}.diff", text_diff(before, record.text, old, new))
        self._append_rules(record)
        self.event("pass", **_record_json(record))
        for item in record.events:
            self.event("rule", in_pass=record.name, **vars(item))
        self.artifacts()
        self.write("summary.txt", table_text(self.records) + "\n")
        self._write_readme()

    def artifacts(self) -> None:
        """Write what passes and later stages put into `ctx.artifacts` and has changed."""
        for name, text in self.ctx.artifacts.items():
            if self._written.get(name) != text:
                self.write(_plain_name(name), text)
                self._written[name] = text
                self.event("artifact", file=name)

    def fail(self, message: str, repro: Path, module: Module) -> None:
        """Record a failure; the module is drawn as far as it can be."""
        self.event("failure", message=message, repro=str(repro))
        self.write("failure.txt", message + "\n")
        self.close(module)

    def close(self, module: Module) -> None:
        """Write the picture and the list of files."""
        self.artifacts()
        write_html(module, self.path / "graph.html")
        self.event("end")
        self._write_readme()

    @contextmanager
    def _opened(self, name: str, mode: str) -> Generator[IO[str]]:
        try:
            # the command's arguments may hold bytes that are no UTF-8
            with open(self.path / name, mode, encoding="utf-8", errors="backslashreplace") as file:
                yield file
        except OSError as error:
            raise _cannot(self.path, error) from error

    def _append_rules(self, record: PassRecord) -> None:
        lines = [f"# {record.number} {record.step}"]
        lines += [f"note: {note}" for note in record.notes]
        lines += [event_text(e) for e in record.events]
        with self._opened("rules.txt", "a") as file:
            file.write("\n".join(lines) + "\n")

    def _write_readme(self) -> None:
        names = ["README.txt", *(p.name for p in self.path.iterdir())]
        about = {**_ABOUT, **_module_files(names, self.records)}
        listed = [f"  {n:28} {about.get(n, '')}".rstrip() for n in dict.fromkeys(sorted(names))]
        last = max((n for n in names if n.endswith(".ktir")), default="00-import.ktir")
        target = self.ctx.target.name if self.ctx.target is not None else "none"
        self.write(
            "README.txt",
            "\n".join(
                [
                    f"command   {shlex.join(sys.argv)}",
                    f"versions  {', '.join(f'{k} {v}' for k, v in versions().items())}",
                    f"target    {target}" + (f" ({TARGET_FILE})" if self.ctx.target else ""),
                    f"go on     ktgraph opt {last}   (or another .ktir file: the passes left)",
                    "",
                    *listed,
                    "",
                ]
            ),
        )


def _module_files(names: Sequence[str], records: Sequence[PassRecord]) -> dict[str, str]:
    about = {n: "the module as it came in" for n in names if n.endswith(".ktir")}
    for record in records:
        stem = f"{record.number:02d}-{record.name}"
        about[f"{stem}.ktir"] = f"the module after {record.step}"
        about[f"{stem}.diff"] = f"what {record.name} changed"
    return about


def _record_json(record: PassRecord) -> dict[str, Any]:
    return {
        "number": record.number, "name": record.name, "step": record.step,
        "changed": record.changed, "matched": record.count("matched"),
        "refused": record.count("refused"), "ops": [record.ops_before, record.ops_after],
        "ms": round(record.ms, 3), "verify_ms": round(record.verify_ms, 3),
        "nmse": record.error, "validated": record.how, "numerics": str(record.numerics),
        "notes": list(record.notes),
    }  # fmt: skip


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise DumpError(f"an artifact is a plain file name, not {name!r}")
    return name


def _next_folder(root: Path, model: str) -> Path:
    """Make NNNN-model with the next free number; raises DumpError when it cannot be made."""
    stem = re.sub(r"[^\w.-]+", "_", model)
    try:
        root.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name[:4]) for p in root.iterdir() if re.match(r"\d{4}-", p.name)]
        number = max(taken, default=0) + 1
        while True:
            path = root / f"{number:04d}-{stem}"
            if not any(root.glob(f"{number:04d}-*")) and _made(path):
                return path.resolve()
            number += 1
    except OSError as error:
        raise _cannot(root, error) from error


def _cannot(folder: Path, error: OSError) -> DumpError:
    return DumpError(f"cannot dump into {folder}: {error.strerror or error}; give another folder")


def _made(path: Path) -> bool:
    """Whether this process made the folder (another may have been faster)."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


__all__ = ["VARIABLE", "DumpError", "DumpFolder", "DumpRequest"]
