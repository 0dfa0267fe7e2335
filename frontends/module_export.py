"""torch.export of any module; a submodule that cannot be exported becomes a call left to torch.

The model first runs eagerly once, and every call of every submodule is noted.  Then it is exported
with lifted MoE layers and opaque calls in place; when that fails, the innermost module of the model
in the traceback becomes opaque too, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ktgraph.errors import UnsupportedInputError
from ktgraph.frontends.errors import UnsupportedModelError, blame
from ktgraph.frontends.hf_export import quiet
from ktgraph.frontends.module_leaves import OpaqueCalls, SeenCall, opaque_calls
from ktgraph.frontends.moe_layers import lifted, traced_forward
from ktgraph.frontends.moe_probe import MoeForm
from ktgraph.ops.call_args import ArgumentError, ArgumentWriter

Call = tuple[tuple[Any, ...], dict[str, Any]]
TENSOR = object()  # among the leaves of a result: a tensor stands here


@dataclass(frozen=True)
class Arguments:
    """How a module is called: the tensors, and where they go among the other arguments."""

    spec: TreeSpec  # of (args, kwargs)
    leaves: tuple[Any, ...]  # with None in place of tensors
    tensors: tuple[int, ...]  # places of tensors in `leaves`

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[Tensor]]:
        """The form of a call and its tensors."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        places = tuple(i for i, v in enumerate(leaves) if isinstance(v, Tensor))
        kept = tuple(None if i in places else v for i, v in enumerate(leaves))
        return Arguments(spec, kept, places), [leaves[i] for i in places]

    def fill(self, tensors: Sequence[Tensor]) -> Call:
        """Positional and keyword arguments with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return tuple(args), dict(kwargs)


@dataclass
class Opaque:
    """A module that stays with torch, and why."""

    path: str
    where: str  # path, class, file and line
    why: str


@dataclass
class Exported:
    """An exported program, how its module is called, and what became of its parts."""

    program: ExportedProgram
    arguments: Arguments
    result: TreeSpec
    result_leaves: tuple[Any, ...]  # with TENSOR in place of tensors
    calls: OpaqueCalls
    forms: dict[str, MoeForm]
    refused: dict[str, str]
    opaque: dict[str, Opaque]


class Step(nn.Module):
    """The model under the name that parameters and paths are imported by, called with tensors."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        args, kwargs = self.arguments.fill(tensors)
        try:
            leaves, _ = tree_flatten(self.model(*args, **kwargs))
        except UnsupportedInputError:
            raise
        except Exception as error:  # here, not around export: that would print the whole graph
            raise _ModelFailedError from error
        return tuple(v for v in leaves if isinstance(v, Tensor))


class _ModelFailedError(Exception):
    """The model's code failed on symbolic sizes; the cause says how."""


@dataclass
class ModuleExporter:
    """Exports one model, again when more of it must be opaque.

    varying: how many leading axes of each input may vary; `fix_more` lowers it.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    varying: int = 99
    opaque: dict[str, Opaque] = field(default_factory=dict[str, Opaque])

    def __post_init__(self) -> None:
        self.arguments, self.tensors = Arguments.of(self.args, self.kwargs)
        self.run = _EagerRun(self.model, self.args, self.kwargs)
        self.forms, self.refused = lifted(self.model, self.run.inputs)

    def export(self) -> Exported:
        """The program; raises UnsupportedModelError when not even the whole can be opaque."""
        while True:
            try:
                return self._once()
            except UnsupportedInputError:
                raise
            except Exception as error:
                cause = error.__cause__
                self._blame(cause if isinstance(cause, Exception) else error)

    def _once(self) -> Exported:
        calls = OpaqueCalls({path: self.run.seen(path) for path in self.opaque})
        step = Step(self.model, self.arguments)
        with ExitStack() as stack:
            stack.enter_context(opaque_calls(calls))
            stack.enter_context(_patched(self.model, self._forwards(calls)))
            stack.enter_context(quiet())
            stack.enter_context(torch.no_grad())
            program = torch.export.export(
                step, tuple(self.tensors), dynamic_shapes=self._shapes(), strict=False
            )
            program = program.run_decompositions({})  # in-place ops become plain ones
        leaves, spec = tree_flatten(self.run.result)
        kept = tuple(TENSOR if isinstance(v, Tensor) else v for v in leaves)
        return Exported(
            program, self.arguments, spec, kept, calls, self.forms, self.refused, self.opaque
        )

    def _shapes(self) -> Any:
        axes = [range(min(t.dim(), self.varying)) for t in self.tensors]
        return (tuple(dict.fromkeys(a, Dim.AUTO) for a in axes),)

    def fix_more(self) -> bool:
        """Let the first axis alone vary, then none; False when none does already."""
        if self.varying == 0:
            return False
        self.varying = 1 if self.varying > 1 else 0
        return True

    def _forwards(self, calls: OpaqueCalls) -> dict[str, Any]:
        inside = [p + "." if p else "" for p in self.opaque]
        found: dict[str, Any] = {
            path: traced_forward(form)
            for path, form in self.forms.items()
            if not any(path.startswith(p) for p in inside) and path not in self.opaque
        }
        return found | {path: _opaque_forward(path, calls) for path in self.opaque}

    # -- what cannot be exported ------------------------------------------------------------------
    def _blame(self, error: Exception) -> None:
        found = blame(error, self.model)
        path = found.path if found is not None and found.path != _ROOT else ""
        lines = [ln.strip() for ln in str(error).splitlines() if ln.strip()]
        why = f"torch.export: {type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
        self.make_opaque(path, why, "" if found is None else str(found))

    def make_opaque(self, path: str, why: str, where: str = "") -> None:
        """Leave a module to torch, or the nearest one around it that can be called from a graph."""
        if path in self.opaque or any(p == "" or path.startswith(f"{p}.") for p in self.opaque):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be traced, although {path or 'all of it'} was "
                f"left to torch already: {why}"
            )
        while True:
            fault = self.run.fault(path)
            if not fault:
                break
            if not path:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} cannot be called from a graph: {fault}"
                )
            path, why, where = path.rpartition(".")[0], f"{why}; {path} itself {fault}", ""
        for inner in [p for p in self.opaque if p.startswith(f"{path}." if path else "")]:
            del self.opaque[inner]
        if path in self.refused:
            why = f"not lifted to moe.grouped_mlp: {self.refused[path]}; {why}"
        self.opaque[path] = Opaque(path, where or _describe(self.model, path), why)


_ROOT = "the model itself"


def _describe(model: nn.Module, path: str) -> str:
    """Path, class, and the file and line where the class's forward begins."""
    import inspect

    cls = type(model.get_submodule(path))
    try:
        lines = inspect.getsourcelines(cls.forward)
        at = f", {inspect.getsourcefile(cls)}:{lines[1]}"
    except (OSError, TypeError):
        at = ""
    return f"{path or _ROOT} ({cls.__name__}){at}"


def _opaque_forward(path: str, calls: OpaqueCalls) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        _, tensors = Arguments.of(args, kwargs)
        seen = calls.find(path, tensors)
        results = iter(torch.ops.ktg.module_call(tensors, path))
        leaves = [next(results) if c is TENSOR else c for c in seen.constants]
        return tree_unflatten(leaves, seen.spec)

    return forward


class _EagerRun:
    """One eager run of the model: how every submodule was called, and what it gave."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.inputs: dict[str, list[Call]] = {}
        self._outputs: dict[str, list[Any]] = {}
        hooks: list[Any] = []
        for path, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after(path)))
        given, named = tree_unflatten(*_copied((tuple(args), dict(kwargs))))
        try:
            with torch.no_grad():
                self.result = model(*given, **named)
        except Exception as error:
            found = blame(error, model)
            at = f" at {found}" if found else ""
            raise UnsupportedInputError(
                f"{type(model).__name__} fails on its example_inputs{at}: "
                f"{type(error).__name__}: {error}. Give inputs that the module itself takes"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs.setdefault(path, []).append((args, kwargs))

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: object, result: object) -> None:
            self._outputs.setdefault(path, []).append(result)

        return hook

    def fault(self, path: str) -> str:
        """Why a module cannot be a call of its own; an empty string when it can."""
        if path not in self._outputs:
            return "is not run by the example_inputs through its own forward"
        try:
            self.seen(path)
        except ArgumentError as error:
            return f"is called with {error}"
        for result in self._outputs[path]:
            leaves, _ = tree_flatten(result)
            odd = [v for v in leaves if not isinstance(v, (Tensor, int, float, str, type(None)))]
            if odd or not any(isinstance(v, Tensor) for v in leaves):
                what = type(odd[0]).__name__ if odd else "no tensor"
                return f"returns {what}, where a graph needs tensors"
        return ""

    def seen(self, path: str) -> list[SeenCall]:
        """The module's calls, each form once."""
        found: list[SeenCall] = []
        for (args, kwargs), result in zip(self.inputs[path], self._outputs[path], strict=True):
            writer = ArgumentWriter(lambda v: v if isinstance(v, Tensor) else None, lambda v: None)
            text = writer.text(args, kwargs)
            leaves, spec = tree_flatten(result)
            tensors = [v for v in leaves if isinstance(v, Tensor)]
            found.append(
                SeenCall(
                    tuple(tuple(t.shape) for t in writer.operands),
                    tuple(tuple(t.shape) for t in tensors),
                    tuple(t.dtype for t in tensors),
                    text,
                    spec,
                    tuple(TENSOR if isinstance(v, Tensor) else v for v in leaves),
                )
            )
        return found


def _copied(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a pytree, tensors copied: a module may write into its arguments."""
    leaves, spec = tree_flatten(tree)
    return [v.clone() if isinstance(v, Tensor) else v for v in leaves], spec


@contextmanager
def _patched(model: nn.Module, forwards: Mapping[str, Any]) -> Iterator[None]:
    """The forwards of instances, for the time of an export."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, forward in forwards.items():
            module = model.get_submodule(path)
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, old in reversed(before):
            if old is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = old


__all__ = ["TENSOR", "Arguments", "Exported", "ModuleExporter", "Opaque"]
