"""`trace_module`: any `nn.Module`, from example inputs, as an IR module.

The steps: one eager run; MoE layers recognised by what they compute (`moe_layers`); torch.export
with calls left to torch where it fails (`module_export`); import (`module_import`).  The graph is
then run beside the module, at the example's sizes and at others, and must agree.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ktgraph.drive import one_thread
from ktgraph.errors import KtgraphError, UnsupportedInputError
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.module_export import TENSOR, Arguments, Exported, ModuleExporter, Opaque
from ktgraph.frontends.module_import import ImportedModule, NotAGraphError, import_module_graph
from ktgraph.frontends.moe_probe import MoeForm, nmse
from ktgraph.ir.graph import Module
from ktgraph.ir.interp import Interpreter
from ktgraph.ir.verify import verify
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import ModelSource

# Largest NMSE between the graph and the module, by the narrowest dtype of the module's weights.
BOUNDS = {torch.float64: 1e-20, torch.float32: 1e-10, torch.float16: 1e-4, torch.bfloat16: 1e-3}
_SMALL = 8_000_000  # parameters
_OTHER_SIZES = (3, 7, 5, 2, 11, 13, 4, 6, 9)


class OpaqueCallWarning(UserWarning):
    """Parts of a module that run eagerly in torch: each with its place, the reason, what to do."""


@dataclass(frozen=True)
class CallForm:
    """How the module is called and what it returns."""

    arguments: Arguments
    result: TreeSpec
    leaves: tuple[Any, ...]  # of the result, with TENSOR in place of tensors

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call like the example's; raises UnsupportedInputError."""
        form, tensors = Arguments.of(args, kwargs)
        if form.spec != self.arguments.spec or form.tensors != self.arguments.tensors:
            raise UnsupportedInputError(
                f"called with {_shown(form)}, but compiled for {_shown(self.arguments)}: give the "
                "arguments that the example_inputs had"
            )
        if form.leaves != self.arguments.leaves:
            raise UnsupportedInputError(
                f"called with other constants ({form.leaves}) than it was compiled for "
                f"({self.arguments.leaves}): compile it again with these example_inputs"
            )
        return tensors

    def results(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns, around these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if v is TENSOR else v for v in self.leaves]
        return tree_unflatten(leaves, self.result)


@dataclass
class ModuleTrace:
    """The IR of a module and what became of its parts.

    lifted: MoE layers by path.  opaque: modules left to torch.  operators: operators left to torch,
    by place.  example: sizes of the syms in the example_inputs.
    """

    module: Module
    example: dict[str, int]
    form: CallForm
    constants: dict[str, Tensor]
    lifted: dict[str, MoeForm]
    opaque: dict[str, Opaque]
    operators: dict[str, list[str]]


def trace_module(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> ModuleTrace:
    """The IR of a module called like this; ``@main`` takes and returns the tensors, in order.

    Axes whose sizes may vary are syms.  Warns (OpaqueCallWarning) of everything that stays with
    torch.  Raises UnsupportedModelError, or UnsupportedInputError for inputs that do not fit.
    """
    _check_model(model, args, kwargs or {})
    with _threads(model):
        found = _trace(model, args, kwargs or {})
    _warn(found, model)
    return found


def _threads(model: nn.Module) -> AbstractContextManager[None]:
    """Small models run on one thread: others would only wait for each other."""
    is_small = sum(p.numel() for p in model.parameters()) < _SMALL
    return one_thread() if is_small else nullcontext()


def _trace(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModuleTrace:
    exporter = ModuleExporter(model, tuple(args), dict(kwargs))
    while True:
        exported, imported = _traced(exporter, model)
        found = _checked(exporter, model, exported, imported)
        if found is not None:
            return found
        exporter.fix_more()  # at other sizes it computes something else


def _check_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = type(model).__name__
    if not any(isinstance(v, Tensor) for v in tree_flatten((tuple(args), dict(kwargs)))[0]):
        raise UnsupportedInputError(
            f"{name}: example_inputs hold no tensor: give the arguments of one call, as in "
            "kt.compile(module, example_inputs=(x,))"
        )
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    if meta:
        raise UnsupportedModelError(
            f"{name}: {meta[0]!r} and {len(meta) - 1} more are on the meta device; a plain module "
            "is checked against its own results, so load its weights first"
        )
    away = [n for n, p in model.named_parameters() if p.device.type != "cpu"]
    if away:
        raise UnsupportedModelError(
            f"{name}: {away[0]!r} is on {dict(model.named_parameters())[away[0]].device}: give the "
            "module on the CPU (module.cpu()); ktgraph places its parts itself"
        )
    noisy = [n for n, m in model.named_modules() if m.training and isinstance(m, _NOISY)]
    if noisy:
        raise UnsupportedModelError(
            f"{name}: {noisy[0]} ({type(model.get_submodule(noisy[0])).__name__}) is in training "
            "mode, where it is random or changes itself: call module.eval() first"
        )


_NOISY = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.modules.batchnorm._BatchNorm)


def _traced(exporter: ModuleExporter, model: nn.Module) -> tuple[Exported, ImportedModule]:
    """Export and import; what cannot be imported becomes opaque, and all is done again."""
    while True:
        exported = exporter.export()
        try:
            return exported, import_module_graph(exported, model, type(model).__name__.lower())
        except NotAGraphError as error:
            if not (error.of_sizes and exporter.fix_more()):
                exporter.make_opaque(error.path, error.why, error.where)


def _checked(
    exporter: ModuleExporter, model: nn.Module, exported: Exported, imported: ImportedModule
) -> ModuleTrace | None:
    """The trace, when the graph computes what the module does; None: only at other sizes not."""
    verify(imported.module)
    tensors = [v for v in tree_flatten(exporter.run.result)[0] if isinstance(v, Tensor)]
    form = CallForm(exported.arguments, exported.result, exported.result_leaves)
    error = _error(imported, model, form, exporter.tensors, imported.example, before=tensors)
    bound = max(BOUNDS.get(p.dtype, 0.0) for p in [*model.parameters(), *_floats(exporter.tensors)])
    if error > bound:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the traced graph gives other results than the module on the "
            f"example_inputs (NMSE {error:.1e}, allowed {bound:.0e}). If the module is random, or "
            "changes its own state while it runs, trace it without that part; else this is a fault "
            "of ktgraph"
        )
    lifted = {p: f for p, f in exported.forms.items() if p not in exported.opaque}
    trace = ModuleTrace(
        imported.module, imported.example, form, imported.constants, lifted, exported.opaque,
        imported.operators,
    )  # fmt: skip
    return trace if _holds_elsewhere(trace, imported, model, exporter.tensors, bound) else None


def _floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.is_floating_point()]


def _error(
    imported: ImportedModule,
    model: nn.Module,
    form: CallForm,
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int],
    before: Sequence[Tensor] = (),
) -> float:
    """The worst NMSE of the graph's results against the module's, on these tensors.

    before: what the module gave for them when it ran first.
    """
    args, kwargs = form.arguments.fill([t.clone() for t in tensors])
    with torch.no_grad():
        want = [v for v in tree_flatten(model(*args, **kwargs))[0] if isinstance(v, Tensor)]
        source = ModelSource(model, imported.constants)
        interpreter = Interpreter(imported.module, WeightEvaluator(imported.module, source))
        got = interpreter.run("main", [t.clone() for t in tensors], sizes)
    pairs = [*zip(got, want, strict=True), *zip(before, want, strict=False)]
    return max(_distance(g, w) for g, w in pairs)


def _distance(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if want.is_floating_point() and bool(want.isfinite().all()):
        return nmse(got, want)
    same = (
        torch.equal(got.nan_to_num(), want.nan_to_num())
        if want.is_floating_point()
        else torch.equal(got, want)
    )
    return 0.0 if same else float("inf")


def _holds_elsewhere(
    trace: ModuleTrace,
    imported: ImportedModule,
    model: nn.Module,
    tensors: Sequence[Tensor],
    bound: float,
) -> bool:
    """Whether graph and module agree at other sizes; sizes the module refuses are no sizes of it.

    A sym that only fails at 1 (torch specialises there) gets a range from 2.
    """
    names = list(imported.module.syms)
    if not names:
        return True
    others: dict[str, int] = dict(zip(names, _OTHER_SIZES, strict=False))
    if not _agree(trace, imported, model, tensors, others, bound):
        return False
    if not _agree(trace, imported, model, tensors, dict.fromkeys(names, 1), bound):
        imported.module.syms = {n: (2, hi) for n, (_, hi) in imported.module.syms.items()}
    return True


def _agree(
    trace: ModuleTrace,
    imported: ImportedModule,
    model: nn.Module,
    tensors: Sequence[Tensor],
    sizes: dict[str, int],
    bound: float,
) -> bool:
    resized = _resized(imported.module, tensors, sizes)
    args, kwargs = trace.form.arguments.fill([t.clone() for t in resized])
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception:
        return True  # not a call that the module takes
    try:
        return _error(imported, model, trace.form, resized, sizes) <= bound
    except (KtgraphError, RuntimeError, ValueError):
        return False


def _resized(module: Module, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    """Inputs at other sizes: floats are drawn, other values are the example's own, shuffled."""
    rng = torch.Generator().manual_seed(5)
    found: list[Tensor] = []
    for arg, tensor in zip(module.functions["main"].args, tensors, strict=True):
        shape = [d.at(sizes) for d in arg.tensor.dims]
        if tensor.is_floating_point():
            spread = float(tensor.double().std()) if tensor.numel() > 1 else 1.0
            drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
            found.append((drawn * (spread or 1.0)).to(tensor.dtype))
            continue
        count = int(torch.tensor(shape).prod()) if shape else 1
        picked = torch.randint(max(tensor.numel(), 1), (count,), generator=rng)
        found.append(tensor.reshape(-1)[picked].reshape(shape))
    return found


def _warn(trace: ModuleTrace, model: nn.Module) -> None:
    """One warning that names everything that stays with torch."""
    lines = [f"  {o.where}: {o.why}" for o in trace.opaque.values()]
    lines += [
        f"  {place}: {', '.join(names)} (no op of ktgraph)"
        for place, names in trace.operators.items()
    ]
    if not lines:
        return
    advice = (
        "They give the module's own results and are not optimised. A data-dependent loop over "
        "experts is lifted when the layer is a weighted sum of its top-k gated MLPs; an op of your "
        "own with a kernel is docs/write-a-pass.md"
    )
    text = "\n".join(
        [f"{type(model).__name__}: these parts stay with torch (torch.call):", *lines, advice]
    )
    warnings.warn(text, OpaqueCallWarning, stacklevel=5)


def _shown(form: Arguments) -> str:
    tensors = len(form.tensors)
    others = len(form.leaves) - tensors
    return f"{tensors} tensor{'s' if tensors != 1 else ''} and {others} other values"


__all__ = ["CallForm", "ModuleTrace", "OpaqueCallWarning", "trace_module"]
