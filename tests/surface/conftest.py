"""One packed model with a chat template, made once a session: later starts take a moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktgraph.cli import main
from ktgraph.drive import one_thread

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def talking_model(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained Qwen3-MoE folder with a chat template, and advice on sampling."""
    folder = tmp_path_factory.mktemp("models") / "talking"
    folder.mkdir()
    for file in tiny_qwen.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = folder / "generation_config.json"
    given = json.loads(settings.read_text())
    settings.unlink()
    settings.write_text(json.dumps({**given, "do_sample": True, "top_p": 0.8}))
    return folder


@pytest.fixture(scope="session")
def packed_folder(talking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ktgraph quantize` of it."""
    folder = tmp_path_factory.mktemp("packed") / "model"
    command = ["quantize", str(talking_model), "-o", str(folder), "--target", "cpu"]
    assert main([*command, "--quantize", "int8", "--max-batch", "2"]) == 0
    return folder


@pytest.fixture(autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    """Eager models here are tiny: torch's threads would only wait for each other and for ours."""
    with one_thread():
        yield
