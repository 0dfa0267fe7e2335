"""Names of weights and values, made from module paths and from the model's own source lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ktgraph.ir.graph import Value, WeightRef

_LAYER = re.compile(r"(?:^|\.)(layers|h|blocks)\.(\d+)(?:\.|$)")
_SHORTER = {
    "hidden_states": "x",
    "hidden_states_reshaped": "x",
    "inputs_embeds": "x",
    "residual": "x",
    "query_states": "q",
    "key_states": "k",
    "value_states": "v",
    "attn_output": "attn",
    "final_hidden_states": "routed",
    "kv_a_proj_with_mqa": "kv_a_proj",
    "act_fn": "act",
}


_OWN = re.escape(str(Path(__file__).parent))
_NOT_MODEL_CODE = re.compile(rf"/torch/|{_OWN}/|/transformers/(?!models/)")


@dataclass(frozen=True)
class Place:
    """Where an op stands: its module path, and the layer it belongs to, if any."""

    path: str
    layer: int | None


def place_of(path: str) -> Place:
    found = _LAYER.search(path)
    return Place(path, int(found.group(2)) if found else None)


def weight_name(fqn: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` becomes ``layers[3].q_proj``."""
    name = re.sub(r"^model\.", "", fqn)
    name = _LAYER.sub(lambda m: f"{'.' if m.start() else ''}{m.group(1)}[{m.group(2)}].", name, 1)
    name = re.sub(r"\bself_attn\.|\.weight$", "", name)
    name = re.sub(r"\bshared_experts?\b", "shared", name)
    name = re.sub(r"layernorm\b", "norm", name)
    name = re.sub(r"\brotary_emb\b", "rotary", name)
    for long, short in _SHORTER.items():
        name = re.sub(rf"\b{long}\b", short, name)
    return name


def family(name: str) -> tuple[str, int] | None:
    """``layers[3].q_proj`` is member 3 of ``layers[].q_proj``; None for other names."""
    found = re.search(r"\[(\d+)\]", name)
    if found is None:
        return None
    return name[: found.start()] + "[]" + name[found.end() :], int(found.group(1))


def path_stem(path: str) -> str:
    """The last component of a module path, shortened; a number with what it numbers: mlp_0."""
    parts = path.split(".")
    last = "_".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
    last = f"m{last}" if last[:1].isdigit() else last
    return _SHORTER.get(last, re.sub(r"layernorm$", "norm", last)) or "x"


def source_stems(stack_trace: str) -> list[str]:
    """Names that the innermost line of model code assigns: ``a, b = split(…)`` gives a and b."""
    lines = [ln.strip() for ln in stack_trace.splitlines()]
    code = [
        lines[i + 1]
        for i, ln in enumerate(lines[:-1])
        if ln.startswith("File ") and not _NOT_MODEL_CODE.search(ln)
    ]
    found = re.match(r"([A-Za-z_][\w, ]*?)\s*=[^=]", code[-1]) if code else None
    if found is None:
        return []
    names = [n.strip() for n in found.group(1).split(",")]
    return [_SHORTER.get(n, n) for n in names if n.isidentifier()]


def source_line(stack_trace: str) -> str:
    """``, file:line`` of the innermost line of the model's own code, "" when none is known."""
    found = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [f for f in found if not re.search(rf"/torch/|{_OWN}/", f[0])]
    return f", {own[-1][0]}:{own[-1][1]}" if own else ""


def value_stem(base: Value | WeightRef) -> str:
    """The stem a value was named by: ``l3.q_pe.1`` gives ``q_pe``."""
    return re.sub(r"^l\d+\.|\.\d+$", "", base.name) if isinstance(base, Value) else "w"


class Names:
    """Unique value names of one function; a name, once given, never changes."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """`stem`, or `stem.1`, `stem.2` … when taken."""
        name = stem
        while name in self._taken:
            self._next[stem] = self._next.get(stem, 0) + 1
            name = f"{stem}.{self._next[stem]}"
        self._taken.add(name)
        return name
