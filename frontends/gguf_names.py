"""Which tensors of a GGUF file make up each parameter of a transformers model.

Names: llama.cpp's gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

from ktgraph.frontends.file_forms import Made
from ktgraph.frontends.gguf_file import GgufFile
from ktgraph.frontends.safetensors_files import CheckpointError

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_OF_LAYER = {  # module of a layer -> tensor of a block
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in ("q", "k", "v")},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
# llama.cpp rotates neighbouring channels for this architecture, transformers both halves of a head
_PAIRED = "llama"


def gguf_forms(
    model: PreTrainedModel, file: GgufFile
) -> tuple[Mapping[str, str], Mapping[str, Made]]:
    """Parameters' names in the file, and those made of several tensors or in another order.

    Raises CheckpointError for a tensor that is missing or has another shape.
    """
    names: dict[str, str] = {}
    made: dict[str, Made] = {}
    for parameter, tensor in model.state_dict().items():
        found = _form(file, parameter, tuple(tensor.shape))
        if isinstance(found, Made):
            made[parameter] = found
        else:
            names[parameter] = found
        sources = found.sources if isinstance(found, Made) else (found,)
        missing = [s for s in sources if s not in file.tensors]
        if missing:
            raise CheckpointError(
                f"{file.path}: no tensor {missing[0]!r}, which parameter {parameter!r} is made of. "
                "The file is incomplete, or of a variant that is not read"
            )
        _check_elements(file, parameter, tuple(tensor.shape), sources)
    return names, made


def _form(file: GgufFile, parameter: str, shape: tuple[int, ...]) -> str | Made:
    module, _, leaf = parameter.rpartition(".")
    layer = _LAYER.match(parameter)
    if layer is None:
        name = f"{_WHOLE.get(module, module)}.{leaf}"
        is_tied = parameter == "lm_head.weight" and name not in file.tensors
        return "token_embd.weight" if is_tied else name
    block, rest = f"blk.{layer.group(1)}", layer.group(2)
    if rest in _EXPERTS:
        names = tuple(f"{block}.{name}" for name in _EXPERTS[rest])
        return names[0] if len(names) == 1 else Made("concat", names)
    name = f"{block}.{_OF_LAYER.get(rest.rpartition('.')[0], rest)}.{leaf}"
    if rest == "self_attn.kv_b_proj.weight" and name not in file.tensors:
        return Made("mla_join", (f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight"))
    if file.architecture == _PAIRED and re.search(r"self_attn\.[qk]_proj\.", rest):
        heads = "num_attention_heads" if ".q_proj." in rest else "num_key_value_heads"
        return Made("split_pairs", (name,), heads)
    stored = file.tensors.get(name)
    if stored is not None and len(stored.shape) < len(shape):
        return Made("reshape", (name,))
    return name


def _check_elements(
    file: GgufFile, parameter: str, shape: tuple[int, ...], sources: tuple[str, ...]
) -> None:
    wanted, got = 1, 0
    for size in shape:
        wanted *= size
    for name in sources:
        count = 1
        for size in file.tensors[name].shape:
            count *= size
        got += count
    if wanted != got:
        shown = " and ".join(f"{n!r} {list(file.tensors[n].shape)}" for n in sources)
        raise CheckpointError(
            f"{file.path}: parameter {parameter!r} is {list(shape)} by the metadata, but its "
            f"tensor is {shown}. The file is damaged, or of a variant that is not read"
        )


__all__ = ["gguf_forms"]
