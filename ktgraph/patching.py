"""`ktgraph.patch`: compiled MoE blocks inside a loaded transformers model; the rest stays eager.

Hidden states are taken to the CPU, computed there in float32 with packed weights, and go back in
their own dtype and to their own device; `model.generate` and everything else work as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ktgraph.compile_options import part_options
from ktgraph.errors import UnsupportedInputError
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.patched_forward import patched_forward
from ktgraph.target import Target, resolve_target
from ktgraph.target.description import round_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ktgraph.frontends.hf_blocks import Blocks
    from ktgraph.runtime.functions import FunctionRunner
    from ktgraph.runtime.operands import WeightUse

_MARK = "_ktgraph_patched"  # the attribute of a patched model that holds its `Patched`
_BEFORE = "_ktgraph_before"  # of a patched block: what its replaced attributes were
_REPLACED = ("forward", "extra_repr")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_patched(model: nn.Module) -> bool:
    """Whether `patch` compiled blocks of this model, and `unpatch` did not undo it."""
    return _MARK in model.__dict__


@dataclass(frozen=True)
class PatchedBlock:
    """One block that was replaced.  Bytes of its weights: as they were, and packed."""

    path: str
    cls: str
    before: int
    packed: int


@dataclass(frozen=True)
class Patched:
    """What `patch` did; prints as a table.

    left: MoE blocks that stay eager, and why.  is_freed: whether the original weights are gone.
    """

    blocks: tuple[PatchedBlock, ...]
    left: dict[str, str]
    is_freed: bool
    threads: int

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(b.packed for b in self.blocks)

    def __str__(self) -> str:
        width = max(len(b.path) for b in self.blocks)
        head = f"{'block':{width}}  {'class':24} {'weights':>12} {'packed':>12}"
        rows = [
            f"{b.path:{width}}  {b.cls:24} {round_size(b.before):>12} {round_size(b.packed):>12}"
            for b in self.blocks
        ]
        rows += [f"{path:{width}}  stays eager: {why}" for path, why in self.left.items()]
        held = "" if self.is_freed else ", and the originals are kept beside them"
        size = round_size(self.nbytes)
        total = f"{len(self.blocks)} MoE blocks on {self.threads} threads: {size} packed{held}"
        return "\n".join([head, *rows, total])

    __repr__ = __str__


def patch(
    model: PreTrainedModel,
    target: str | Path | Target = "cpu",
    *,
    quantize: str | None = None,
    activations: str = "auto",
    max_tokens: int = 512,
    threads: int | None = None,
    free_originals: bool = False,
) -> Patched:
    """Replace the MoE blocks of a loaded transformers model in place by compiled ones.

    target: a CPU; `kt.compile(model, "hybrid")` is what uses a GPU as well.
    quantize, activations: as in `kt.compile`; None keeps weights as they are stored, so that
        results equal the eager ones up to rounding in float32.
    max_tokens: most tokens in one call of a block; more are run in several.
    free_originals: give the memory of the original weights back, block by block; `unpatch` and
        saving the model are then no longer possible.

    Raises UnsupportedInputError for a model in training mode, without MoE blocks or of another
    dtype, TargetError for more threads than CPUs, and MemoryBudgetError when the packed weights do
    not fit; the model is then as before.
    """
    _check(model)
    options = part_options(
        {
            "quantize": quantize,
            "activations": activations,
            "max_tokens": max_tokens,
            "threads": threads,
        }
    )
    machine = _cpu(target)
    blocks = _traced(model)
    loaded = _Loading(model, blocks, machine, options)
    runner = loaded.run(free_originals)
    for path, form in blocks.forms.items():
        note = f"compiled by ktgraph, {round_size(loaded.packed[path])} packed"
        _put(
            model.get_submodule(path),
            forward=patched_forward(runner, path, form.is_tuple),
            extra_repr=lambda text=note: text,
        )
    made = tuple(
        PatchedBlock(path, form.cls, loaded.before[path], loaded.packed[path])
        for path, form in blocks.forms.items()
    )
    model.__dict__[_MARK] = patched = Patched(
        made, blocks.left, free_originals, runner.executor.threads
    )
    if free_originals:
        _refuse_saving(model)
    return patched


def unpatch(model: PreTrainedModel) -> None:
    """Give a patched model its own MoE blocks back, and the memory of the packed ones."""
    patched = model.__dict__.get(_MARK)
    if patched is None:
        raise UnsupportedInputError(f"{type(model).__name__} is not patched: nothing to undo")
    if patched.is_freed:
        raise _gone(model)
    for made in patched.blocks:
        block = model.get_submodule(made.path)
        before = block.__dict__.pop(_BEFORE)
        for name in _REPLACED:
            del block.__dict__[name]
        block.__dict__.update(before)
    del model.__dict__[_MARK]


def _put(block: nn.Module, **made: Any) -> None:
    """Give a block attributes of its own, and keep those that it had: accelerate's hooks, say."""
    assert set(made) == set(_REPLACED)
    block.__dict__[_BEFORE] = {n: block.__dict__[n] for n in made if n in block.__dict__}
    block.__dict__.update(made)


def _gone(model: nn.Module) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{type(model).__name__} was patched with free_originals=True, so its original weights "
        "are gone: load the model again"
    )


def _refuse_saving(model: PreTrainedModel) -> None:
    """Before anything is written; also for torch.save of the state, which would be empty."""

    def refuse(*_: object, **__: object) -> None:
        raise _gone(model)

    model.__dict__["save_pretrained"] = refuse
    module: Any = model
    module.register_state_dict_pre_hook(refuse)


# ---- what is refused


def _check(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedInputError(
            f"patch takes a model loaded by transformers, not {type(model).__name__}"
        )
    name = type(model).__name__
    if is_patched(model):
        raise UnsupportedInputError(f"{name} is patched already: ktgraph.unpatch(model) first")
    if model.training:
        raise UnsupportedInputError(
            f"{name} is in training mode, and compiled blocks have no gradients: call model.eval()"
        )
    if getattr(model.config, "output_router_logits", False):
        raise UnsupportedInputError(
            f"{name}: config.output_router_logits is set, and compiled blocks do not give their "
            "router's logits: set it to False"
        )


def _cpu(target: str | Path | Target) -> Target:
    machine = resolve_target(target)
    if machine.gpus:
        raise UnsupportedInputError(
            f"target={machine.name}: compiled MoE blocks run on the CPU (the rest of the model is "
            'where you put it): target="cpu"; kt.compile(model, "hybrid") uses GPU and CPU'
        )
    return machine


def _traced(model: PreTrainedModel) -> Blocks:
    from ktgraph.frontends.hf_blocks import moe_blocks, trace_blocks

    name = type(model).__name__
    found = moe_blocks(model)
    if not found:
        raise UnsupportedInputError(
            f"{name} has no MoE block: no module of it holds experts behind transformers' "
            "ExpertsInterface. kt.compile(model) compiles a dense model as a whole"
        )
    for path, block in found.items():
        _check_tensors(path, block)
    blocks = trace_blocks(model)
    if not blocks.forms:
        path, why = next(iter(blocks.left.items()))
        raise UnsupportedInputError(f"{name}: no MoE block can be compiled. {path}: {why}")
    return blocks


def _check_tensors(path: str, block: nn.Module) -> None:
    for name, tensor in block.named_parameters():
        if tensor.is_meta:
            raise UnsupportedInputError(
                f"{path}.{name} is on the meta device and holds no values: load the model without "
                "offloading, or kt.compile its folder"
            )
        if tensor.dtype not in _DTYPES:
            raise UnsupportedInputError(
                f"{path}.{name} is {str(tensor.dtype).removeprefix('torch.')}: expected "
                "float32, bfloat16 or float16. Convert the model (model.float()); in place of one "
                'that is quantized load the original and give quantize="int8" or the like'
            )


# ---- loading


class _Loading:
    """Lowers blocks and packs their weights, block by block."""

    def __init__(
        self, model: PreTrainedModel, blocks: Blocks, machine: Target, options: CompileOptions
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.options = options
        self.threads = options.threads or machine.cpu_threads
        self.before = {path: _nbytes(model.get_submodule(path)) for path in blocks.forms}
        self.packed = dict.fromkeys(blocks.forms, 0)

    def run(self, free_originals: bool) -> FunctionRunner:
        from ktgraph.pass_manager import PassManager
        from ktgraph.passes.flatten_tokens import FlattenTokens
        from ktgraph.runtime.functions import FunctionRunner, function_plan
        from ktgraph.runtime.packed import LoadedWeights, packed_weights
        from ktgraph.weights.evaluate import WeightEvaluator
        from ktgraph.weights.sources import ModelSource

        class HostSource(ModelSource):
            """Tensors are packed on the CPU, wherever the model lies."""

            def get(
                self, name: str, expert: int | None = None, rows: slice | None = None
            ) -> Tensor:
                return super().get(name, expert, rows).cpu()

        source = HostSource(self.model)
        context = PassContext(None, source, self.options)
        FlattenTokens().run(self.blocks.module, context)  # [b, s] as one axis, before all passes
        PassManager().run(self.blocks.module, "default", context)
        plan = function_plan(self.blocks.module, self.threads)
        uses = plan.loaded()
        last = self._last_uses(uses)
        evaluator = WeightEvaluator(self.blocks.module, source, cache_nbytes=0)
        tensors: dict[str, Tensor] = {}
        for number, (use, packed) in enumerate(packed_weights(uses, evaluator, self.threads)):
            tensors[use.key] = packed
            self.packed[self._owner(use)] += packed.nbytes
            for path in last.get(number, ()) if free_originals else ():
                source.release(f"{path}.")
                _free(self.model.get_submodule(path))
        return FunctionRunner(plan, LoadedWeights(tensors), self.threads)

    def _owner(self, use: WeightUse) -> str:
        """The block that reads a weight (the first, where several share one)."""
        for path, function in self.blocks.module.functions.items():
            if any(ref.name == use.ref.name for op in function.walk() for ref in op.weights):
                return path
        raise AssertionError(use.key)

    def _last_uses(self, uses: Sequence[WeightUse]) -> dict[int, list[str]]:
        last = {self._owner(use): number for number, use in enumerate(uses)}
        found: dict[int, list[str]] = {}
        for path, number in last.items():
            found.setdefault(number, []).append(path)
        return found


def _nbytes(block: nn.Module) -> int:
    return sum(p.nbytes for p in block.parameters())


def _free(block: nn.Module) -> None:
    """Parameters without values in place of the originals."""
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device="meta")
            setattr(module, name, nn.Parameter(empty, requires_grad=False))


__all__ = ["Patched", "PatchedBlock", "patch", "unpatch"]
