"""The MoE blocks of a transformers model, each as one function of a module.

A block is the module that holds a layer's experts: router, experts, and shared experts where it has
them.  Equal blocks are exported once; only their weights differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from ktgraph.frontends.errors import UnsupportedModelError, export_failed
from ktgraph.frontends.hf_build import Twin, build_twin
from ktgraph.frontends.hf_export import AXES, Export, quiet
from ktgraph.frontends.hf_leaves import LeafReport, is_experts, moe_leaves_in
from ktgraph.frontends.part_import import PartImporter, add_part
from ktgraph.ir.graph import Module, WeightRef
from ktgraph.ir.verify import verify

_EXAMPLE = (2, 3)  # batch and new tokens


@dataclass(frozen=True)
class BlockForm:
    """How a block is called, and what it gives: one tensor, or several in a tuple."""

    path: str
    cls: str
    is_tuple: bool


@dataclass
class Blocks:
    """Blocks that were traced by path; `module` has a function of that name for each.

    left: blocks that were not, and why.
    """

    module: Module
    forms: dict[str, BlockForm] = field(default_factory=dict[str, BlockForm])
    left: dict[str, str] = field(default_factory=dict[str, str])


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold experts, by path, in order."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_experts(module) and "." in path:
            parent = path.rpartition(".")[0]
            found[parent] = model.get_submodule(parent)
    return found


def trace_blocks(model: PreTrainedModel) -> Blocks:
    """The model's MoE blocks, computing in float32 with weights as they are stored.

    Each function takes hidden states f32[b, s, D].  The model is left as it is.
    """
    twin = build_twin(model, torch.float32)
    blocks = Blocks(Module(f"{twin.config.model_type}_blocks"))
    known: dict[str, Export] = {}
    with moe_leaves_in(twin.model) as report:
        for path, block in moe_blocks(twin.model).items():
            try:
                key = _structure(block)
                if key not in known:
                    known[key] = _export(block, twin.config.hidden_size, report)
                part = BlockImporter(twin, known[key], path).run()
            except UnsupportedModelError as error:
                blocks.left[path] = str(error)
                continue
            add_part(blocks.module, part, path)
            result = known[key].program.call_spec.out_spec
            is_tuple = result is not None and not result.is_leaf()
            blocks.forms[path] = BlockForm(path, type(block).__name__, is_tuple)
    verify(blocks.module)
    return blocks


def _structure(block: nn.Module) -> str:
    """What an export of the block depends on: classes, scalars, shapes and dtypes."""
    parts: list[str] = []
    for path, module in block.named_modules():
        scalars = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool))}
        parts.append(f"{path} {type(module).__qualname__} {sorted(scalars.items())}")
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return "\n".join([*parts, *(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in tensors)])


def _export(block: nn.Module, width: int, report: LeafReport) -> Export:
    b, s = _EXAMPLE
    x = torch.zeros(b, s, width, device="meta")
    axes = [Dim(name, min=AXES[name][0], max=AXES[name][1]) for name in ("b", "s")]
    with quiet(), torch.no_grad():
        try:
            program: ExportedProgram = torch.export.export(
                block, (x,), dynamic_shapes=({0: axes[0], 1: axes[1]},), strict=False
            )
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise export_failed(error, block) from error
    return Export(program, report)


class BlockImporter(PartImporter):
    """`PartImporter` for a module that is called with hidden states alone; `path`: where it is."""

    def __init__(self, twin: Twin, export: Export, path: str) -> None:
        super().__init__(twin, export, path, {n: AXES[n] for n in ("b", "s")})
        self.at = path

    def _weight(self, fqn: str) -> WeightRef:
        return super()._weight(f"{self.at}.{fqn}")

    def path(self, node: Any) -> str:
        """Module path of a node, from the model's root."""
        inner = super().path(node)
        return f"{self.at}.{inner}" if inner else self.at


__all__ = ["BlockForm", "Blocks", "moe_blocks", "trace_blocks"]
