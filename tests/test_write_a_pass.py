"""docs/write-a-pass.md: its files are written, its code is run, its output is what it says."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
DOC = (REPO / "docs" / "write-a-pass.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "examples").symlink_to(REPO / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # repro folders
    return tmp_path


def test_the_document_does_what_it_says(workplace: Path):
    names: dict[str, object] = {}
    printed = ""
    for kind, file, text in BLOCKS:
        if file:
            (workplace / file).write_text(text)
        elif kind == "python":
            printed = _run(text, names)
        else:
            assert printed == text
    assert {kind for kind, _, _ in BLOCKS} == {"python", "text"}


def _run(text: str, names: dict[str, object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "write-a-pass.md", "exec"), names)
    return out.getvalue()


def test_the_example_is_the_documents_first_pass():
    example = (REPO / "examples" / "my_pass.py").read_text().split('"""\n\n', 1)[1]
    assert ("python", "my_pass.py", example) == BLOCKS[0]


def test_a_custom_pass_is_short():
    for _, file, text in BLOCKS:
        if file == "by_hand.py":
            assert len([line for line in text.splitlines() if line.strip()]) <= 25
