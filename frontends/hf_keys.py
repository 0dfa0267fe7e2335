"""Which file tensors make up each parameter of a model, by transformers' own mapping."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import extract_weight_conversions_for_model
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ktgraph.frontends.safetensors_files import CheckpointError, Recipe


@dataclass
class _Found:
    """File tensors that map to one parameter, by the converter's source pattern."""

    converter: WeightConverter | None = None
    keys: dict[str | None, list[str]] = field(default_factory=dict)


def plan(model: PreTrainedModel, folder: Path, entries: Mapping[str, object]) -> dict[str, Recipe]:
    """A recipe for each parameter and persistent buffer of `model` (which may be on meta).

    entries: the tensors of the checkpoint folder, by name; those that nothing needs are left out.
    Raises CheckpointError listing what is missing.
    """
    wanted = dict(model.state_dict())
    found = _assign(model, entries, wanted)
    recipes = {name: _recipe(name, f) for name, f in found.items()}
    _alias_tied(model, recipes)
    missing = [name for name in wanted if name not in recipes]
    if missing:
        raise _missing(folder, entries, missing)
    return recipes


def _assign(
    model: PreTrainedModel, keys: Iterable[str], wanted: Mapping[str, Tensor]
) -> dict[str, _Found]:
    transforms = extract_weight_conversions_for_model(model) or []
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    found: dict[str, _Found] = {}
    for key in sorted(keys):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, dict(wanted)
        )
        if name not in wanted:
            continue
        entry = found.setdefault(name, _Found())
        entry.keys.setdefault(pattern, []).append(key)
        entry.converter = by_pattern.get(pattern) if pattern is not None else None
    return found


def _recipe(name: str, found: _Found) -> Recipe:
    if found.converter is None:
        return Recipe([next(iter(found.keys.values()))])
    operations = list(found.converter.operations)
    kinds = [type(op) for op in operations]
    if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate]):
        shown = ", ".join(k.__name__ for k in kinds)
        raise CheckpointError(
            f"parameter {name!r}: made from file tensors by {shown}, which ktgraph cannot stream; "
            "load the model with transformers and give it to ktgraph instead of the folder"
        )
    pieces = [
        sorted(found.keys[p], key=_numbers)
        for p in found.converter.source_patterns
        if p in found.keys
    ]
    last: Any = operations[-1]
    axis = int(last.dim) if isinstance(last, Concatenate) else 0
    return Recipe(pieces, kinds[0] is MergeModulelist, axis)


def _numbers(key: str) -> list[int]:
    """Experts in the order of their numbers, not of their spelling."""
    return [int(n) for n in re.findall(r"\d+", key)]


def _alias_tied(model: PreTrainedModel, recipes: dict[str, Recipe]) -> None:
    """A tied parameter is read where its twin is stored."""
    groups: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), []).append(name)
    for names in groups.values():
        stored = next((n for n in names if n in recipes), None)
        for name in names:
            if stored is not None:
                recipes.setdefault(name, recipes[stored])


def _missing(folder: Path, entries: Iterable[str], missing: list[str]) -> CheckpointError:
    name = missing[0]
    close = difflib.get_close_matches(name, list(entries), n=1)
    near = f" (closest in the files: {close[0]!r})" if close else ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return CheckpointError(
        f"{folder}: no tensor for parameter {name!r}{near}{more}. The files do not belong "
        "to this config.json, or a shard is missing; download the checkpoint again"
    )
