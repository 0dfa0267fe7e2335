"""Hand-written MoE layers: found by their parts, probed, and traced as a router and its experts.

A layer is looked at when it holds one `nn.ModuleList` of equal experts and a router weight with a
row for each.  How its `forward` spells the dispatch (loops, masks, `index_add_`, `.item()`) plays
no part: what it computes does (`moe_probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ktgraph.frontends import leaf_ops as leaf_ops  # registers torch.ops.ktg
from ktgraph.frontends.moe_probe import Candidate, MoeForm, NotLiftedError, probe_layer


def candidates(model: nn.Module) -> dict[str, Candidate]:
    """Layers that look like MoE, by path; of nested ones the innermost that holds a router."""
    found: dict[str, Candidate] = {}
    for path, module in model.named_modules():
        candidate = _candidate(module)
        if candidate is not None:
            found[path] = candidate
    return found


def _candidate(module: nn.Module) -> Candidate | None:
    lists = [n for n, child in module.named_children() if _is_experts(child)]
    if len(lists) != 1:
        return None
    experts = lists[0]
    count = len(list(module.get_submodule(experts).children()))
    own = {n: p for n, p in _own_tensors(module, experts)}
    gates = [n for n, t in own.items() if t.dim() == 2 and t.shape[0] == count]
    if len(gates) != 1:
        return None
    gate = gates[0]
    bias = gate.removesuffix("weight") + "bias" if gate.endswith("weight") else ""
    vectors = [n for n, t in own.items() if tuple(t.shape) == (count,) and n != bias]
    parts = {experts, gate.split(".")[0]}
    extras = [n for n, child in module.named_children() if n not in parts and _has_weights(child)]
    return Candidate(
        module, experts, gate, bias if bias in own else "", tuple(vectors), tuple(extras)
    )


def _is_experts(module: nn.Module) -> bool:
    """A list of two or more modules of one class with parameters of the same shapes."""
    members = list(module.children())
    if not isinstance(module, nn.ModuleList) or len(members) < 2:
        return False
    forms = {
        (type(m), str([(n, tuple(p.shape)) for n, p in m.named_parameters()])) for m in members
    }
    return len(forms) == 1 and _has_weights(members[0])


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _own_tensors(module: nn.Module, experts: str) -> list[tuple[str, Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(n, t) for n, t in named if not n.startswith(f"{experts}.")]


def lift(candidate: Candidate, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> MoeForm:
    """The probed form of a layer that was called like this; raises NotLiftedError with why not."""
    ranks: set[int] = set()
    for args, kwargs in calls:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise NotLiftedError("it is called with more than one tensor of tokens")
        ranks.add(args[0].dim())
    if any(t.is_meta for t in candidate.layer.parameters()):
        raise NotLiftedError("its weights are on the meta device, and a probe needs values")
    if candidate.layer.training and any(
        isinstance(m, nn.Dropout) for m in candidate.layer.modules()
    ):
        raise NotLiftedError("it is in training mode, with dropout")
    if not ranks or min(ranks) < 2:
        raise NotLiftedError(
            "it is not called with tokens [..., D]" if ranks else "it is not called"
        )
    try:
        forms = {str(f): f for f in (probe_layer(candidate, rank) for rank in sorted(ranks))}
    except NotLiftedError:
        raise
    except Exception as error:  # of the user's code, on tokens that it has not seen before
        raise NotLiftedError(
            f"on random tokens it fails: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if str(error)
            else f"on random tokens it fails: {type(error).__name__}"
        ) from error
    if len(forms) > 1:
        raise NotLiftedError("called with tensors of several ranks it computes different things")
    return next(iter(forms.values()))


def traced_forward(form: MoeForm) -> Callable[[Tensor], Tensor]:
    """A forward that torch.export sees as leaf ops on the experts' own parameters."""
    held = form.candidate
    layer = held.layer

    def tensor(name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        return getattr(layer.get_submodule(owner), leaf)

    def stacked(name: str) -> list[Tensor]:
        return [_parameter(m, name) for m in held.members] if name else []

    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        bias = tensor(held.gate_bias) if held.gate_bias else None
        select = tensor(form.select) if form.select else None
        ids, weights = torch.ops.ktg.route(
            flat, tensor(held.gate), bias, select, *form.formula.values()
        )
        expert = form.expert
        biases = dict(zip(_used(expert), expert.biases, strict=True)) if expert.biases else {}
        y = torch.ops.ktg.expert_list(
            flat, ids, weights,
            stacked(expert.first), stacked(expert.second), stacked(expert.down),
            *(stacked(biases.get(n, "")) for n in ("first", "second", "down")),
            expert.act, expert.order,
        ).reshape(x.shape)  # fmt: skip
        for name in form.extras:
            y = y + layer.get_submodule(name)(x)
        return y

    return forward


def _used(expert: Any) -> list[str]:
    return ["first", "second", "down"] if expert.second else ["first", "down"]


def _parameter(module: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def lifted(
    model: nn.Module, calls: Mapping[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]
) -> tuple[dict[str, MoeForm], dict[str, str]]:
    """Forms of the layers that are what they look like, and why the others are not, by path."""
    forms: dict[str, MoeForm] = {}
    refused: dict[str, str] = {}
    for path, candidate in candidates(model).items():
        try:
            forms[path] = lift(candidate, list(calls.get(path, [])))
        except NotLiftedError as error:
            refused[path] = str(error)
    return forms, refused


__all__ = ["candidates", "lift", "lifted", "traced_forward"]
