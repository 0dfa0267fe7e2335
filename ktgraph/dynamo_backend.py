"""The torch dynamo backend: ``torch.compile(model, backend="ktgraph")``.

Token-wise regions of a graph (linears, activations, gated MLPs, sums) run on ktgraph's CPU engine
with packed weights; what cannot be lifted runs eagerly in its place, and a warning names it.  A
region serves every batch and length, so a graph that dynamo compiles again for other sizes finds
its packed weights where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn

from ktgraph.compile_options import part_options
from ktgraph.errors import KtgraphError, UnsupportedInputError
from ktgraph.pass_api import CompileOptions, PassContext

if TYPE_CHECKING:
    from ktgraph.frontends.fx_regions import Lifted
    from ktgraph.runtime.functions import FunctionRunner


class EagerPartsWarning(UserWarning):
    """Operators of a compiled graph that run eagerly: the message names them and their places."""


class WeightsChangedError(KtgraphError, RuntimeError):
    """Weights that were written to after they were packed."""


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of torch dynamo.

    options: quantize, activations, max_tokens and threads, as in `kt.patch`.
    Raises UnsupportedInputError for other options, TargetError for more threads than CPUs,
    MemoryBudgetError where packed weights do not fit.  Warns (EagerPartsWarning) of what runs
    eagerly.
    """
    chosen = _chosen(options or {}, mode)
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        _warn(
            "inputs or weights require gradients, which compiled regions do not have: all of it "
            "runs eagerly. Call it under torch.inference_mode() or torch.no_grad()"
        )
        return graph
    from ktgraph.frontends.fx_regions import lift_regions

    found = lift_regions(graph, list(example_inputs))
    _warn_of(found)
    if found.module.functions:
        regions = _regions(found, chosen)
        for name, positions in found.inputs.items():
            setattr(found.graph, name, CompiledRegion(regions, name, positions))
        found.graph.recompile()
    return found.graph


def _chosen(given: Mapping[str, Any], mode: str | None) -> CompileOptions:
    if mode is not None:
        raise UnsupportedInputError(
            f"mode={mode!r}: the backend ktgraph has no modes; give options"
        )
    return part_options(given)


# ---- regions that run


class Regions:
    """The compiled regions of a graph, and the weights they were made from."""

    def __init__(self, runner: FunctionRunner, found: Lifted) -> None:
        self.runner = runner
        self.weights = dict(found.weights)  # held, so that the cache's key stays theirs
        self._packed = {
            region: [(name, self.weights[name], _writes(self.weights[name])) for name in names]
            for region, names in found.reads.items()
        }

    def run(self, region: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run a region; raises WeightsChangedError when its weights are no longer those packed."""
        for name, tensor, packed in self._packed[region]:
            if _writes(tensor) != packed:
                raise WeightsChangedError(
                    f"{name} was changed after torch.compile packed it, and the compiled regions "
                    "still hold the old values: torch.compiler.reset(), then call the model again"
                )
        return self.runner(region, tensors)


def _writes(tensor: Tensor) -> int:
    """How often a tensor was written to in place; those of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


_known: WeakValueDictionary[tuple[Any, ...], Regions] = WeakValueDictionary()


def _regions(found: Lifted, options: CompileOptions) -> Regions:
    """Compiled anew, or those of an earlier graph of other sizes with the same weights."""
    held = tuple((id(t), _writes(t)) for t in found.weights.values())
    key = (str(found.module), options, held)
    regions = _known.get(key)
    if regions is None:
        _known[key] = regions = Regions(_compiled(found, options), found)
    return regions


def _compiled(found: Lifted, options: CompileOptions) -> FunctionRunner:
    from ktgraph.pass_manager import PassManager
    from ktgraph.runtime.functions import FunctionRunner, function_plan
    from ktgraph.runtime.packed import load_weights
    from ktgraph.target import resolve_target
    from ktgraph.weights.evaluate import WeightEvaluator
    from ktgraph.weights.sources import ModelSource

    threads = options.threads or resolve_target("cpu").cpu_threads
    source = ModelSource.of_tensors(found.weights, "the compiled function")
    PassManager().run(found.module, "default", PassContext(None, source, options))
    plan = function_plan(found.module, threads)
    evaluator = WeightEvaluator(found.module, source, cache_nbytes=0)
    return FunctionRunner(plan, load_weights(plan.loaded(), evaluator, threads), threads)


class CompiledRegion(nn.Module):
    """In a graph, what runs a region on the tensors of its call that are no weights."""

    def __init__(self, regions: Regions, name: str, positions: Sequence[int]) -> None:
        super().__init__()
        self.regions = regions
        self.name = name
        self.positions = tuple(positions)

    def forward(self, *args: Any) -> Any:
        """Tensors [..., k] of equal leading axes; one tensor, or a tuple."""
        given: list[Tensor] = [args[k] for k in self.positions]
        lead = given[0].shape[:-1]
        found = self.regions.run(self.name, [t.reshape(-1, t.shape[-1]) for t in given])
        results = [t.reshape(*lead, t.shape[-1]) for t in found]
        return results[0] if len(results) == 1 else tuple(results)


# ---- warnings


def _warn_of(found: Lifted) -> None:
    if not found.eager and not found.failed:
        return
    count = sum(sum(names.values()) for names in found.eager.values())
    head = (
        f"{found.compiled} operators run compiled, in {len(found.inputs)} regions; these "
        f"{count} run eagerly:"
    )
    lines = [
        f"  {place}: {', '.join(f'{name} x {n}' for name, n in names.items())}"
        for place, names in found.eager.items()
    ]
    lines += [f"  {name} as a whole: {why}" for name, why in found.failed.items()]
    advice = (
        "ktgraph.patch(model) compiles the MoE blocks of a transformers model, kt.compile(model) "
        "all of it"
    )
    _warn("\n".join([head, *lines, advice]))


_said: set[str] = set()


def _warn(text: str) -> None:
    """Once for each text: a graph that is compiled again for other sizes says nothing new."""
    if text in _said:
        return
    _said.add(text)
    warnings.warn(f'torch.compile(backend="ktgraph"): {text}', EagerPartsWarning, stacklevel=3)


__all__ = ["CompiledRegion", "EagerPartsWarning", "WeightsChangedError", "backend"]
