"""What takes the place of a patched MoE block's `forward`, eagerly and in graphs of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ktgraph.errors import KtgraphError

if TYPE_CHECKING:
    from ktgraph.runtime.functions import FunctionRunner


class PatchError(KtgraphError, RuntimeError):
    """A call of a patched model that compiled blocks cannot serve."""


def patched_forward(runner: FunctionRunner, path: str, is_tuple: bool) -> Callable[..., Any]:
    """What takes the place of a block's `forward`."""

    def run(hidden_states: Tensor) -> list[Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        found = runner(path, [rows.to("cpu", torch.float32)])
        first, *rest = [t.to(hidden_states.device, hidden_states.dtype) for t in found]
        return [first.reshape(hidden_states.shape), *rest]

    def forward(hidden_states: Tensor) -> Any:
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise PatchError(
                f"{path} is compiled by ktgraph and has no gradients: run the model under "
                "torch.inference_mode() or torch.no_grad(), or ktgraph.unpatch(model) to train it"
            )
        return tuple(run(hidden_states)) if is_tuple else run(hidden_states)[0]

    if is_tuple:
        return _outside_dynamo(forward)
    number = next(_numbers)
    _running[number] = forward

    def traceable(hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _moe_block(hidden_states, number)
        return forward(hidden_states)

    return traceable


_numbers = itertools.count()
_running: WeakValueDictionary[int, Callable[[Tensor], Tensor]] = WeakValueDictionary()


def _run_block(hidden_states: Tensor, number: int) -> Tensor:
    return _running[number](hidden_states)


def _block_shape(hidden_states: Tensor, number: int) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


# A patched block as one operator in graphs of torch.compile.  It waits for the GPU, so that no CUDA
# graph may hold it: inductor cuts there (mode="reduce-overhead", `generate` with a static cache).
_library: Any = torch.library
_moe_block: Any = _library.custom_op(
    "ktgraph::moe_block", _run_block, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
_moe_block.register_fake(_block_shape)


def _outside_dynamo(forward: Callable[..., Any]) -> Callable[..., Any]:
    disable: Any = torch.compiler.disable  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return disable(forward)


__all__ = ["PatchError", "patched_forward"]
