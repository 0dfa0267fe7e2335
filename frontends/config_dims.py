"""Config fields and the dims they are: one table, and shrunken configs that tell the dims apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

# config field -> dim letter (`ktgraph.ir.dims.STANDARD_DIMS` says what the letters mean)
FIELDS: dict[str, str] = {
    "hidden_size": "D",
    "vocab_size": "VOC",
    "intermediate_size": "I",
    "moe_intermediate_size": "F",
    "shared_expert_intermediate_size": "FS",
    "shared_intermediate_size": "FS",
    "num_attention_heads": "H",
    "num_key_value_heads": "G",
    "head_dim": "A",
    "qk_nope_head_dim": "N",
    "qk_rope_head_dim": "P",
    "v_head_dim": "V",
    "kv_lora_rank": "R",
    "q_lora_rank": "RQ",
    "n_routed_experts": "E",
    "num_experts": "E",
    "num_local_experts": "E",
    "moe_num_experts": "E",
    "num_experts_per_tok": "K",
    "moe_topk": "K",
    "moe_k": "K",
    "n_shared_experts": "NS",
    "moe_num_shared_experts": "NS",
    "n_group": "NG",
    "topk_group": "KG",
    "sliding_window": "W",
}
PAIRS = "J"  # rotary pairs: as many as rope frequencies

# Sizes of the two witnesses.  Kept small, distinct, and coprime where no constraint ties them:
# H is a multiple of G, D of H, E of NG; P and A are even; K <= KG * E / NG.
WITNESSES: tuple[dict[str, int], ...] = (
    {
        "G": 3, "H": 15, "D": 255, "VOC": 509, "I": 271, "F": 113, "FS": 127, "A": 44, "N": 23,
        "P": 26, "V": 29, "R": 101, "RQ": 103, "E": 28, "K": 5, "NS": 2, "NG": 7, "KG": 3,
        "W": 41,
    },
    {
        "G": 2, "H": 14, "D": 322, "VOC": 521, "I": 277, "F": 131, "FS": 137, "A": 76, "N": 31,
        "P": 34, "V": 37, "R": 107, "RQ": 109, "E": 55, "K": 7, "NS": 3, "NG": 11, "KG": 5,
        "W": 59,
    },
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The dims of a config by letter, and the fields that hold them."""

    dims: dict[str, int]
    fields: dict[str, str]


def sizes_of(config: PreTrainedConfig, head_tied: bool = False) -> Sizes:
    """Dims that the config names.  A size of 1 is structure, not a dim: it stays what it is.

    `head_tied`: the hidden size is heads times head size and has no letter of its own.
    """
    latent = getattr(config, "kv_lora_rank", None) is not None
    skipped = {"head_dim", "num_key_value_heads"} if latent else set[str]()
    dims: dict[str, int] = {}
    fields: dict[str, str] = {}
    for name, letter in FIELDS.items():
        size = getattr(config, name, None)
        if name == "head_dim" and size is None and not latent:
            size = config.hidden_size // config.num_attention_heads
        own = name in config.to_dict() or name == "head_dim"
        if name in skipped or not own or not isinstance(size, int) or size <= 1:
            continue
        if letter in dims:
            continue
        dims[letter], fields[name] = size, letter
    if head_tied:
        dims.pop("D", None)
    return Sizes(dims, fields)


def witness_configs(
    config: PreTrainedConfig, layers: int, head_tied: bool = False
) -> Iterator[PreTrainedConfig]:
    """Two configs of the same architecture with `layers` layers and telling sizes.

    `head_tied`: the hidden size is heads times head size, which some models take for granted.
    """
    sizes = sizes_of(config)
    for chosen in WITNESSES:
        if head_tied:
            chosen = {**chosen, "D": chosen["H"] * chosen["A"]}
        changes: dict[str, Any] = {f: chosen[letter] for f, letter in sizes.fields.items()}
        changes["num_hidden_layers"] = layers
        if sizes.dims.get("NG") is None and "E" in sizes.dims:
            changes.update(_ungrouped(config))
        yield shrunken(config, changes)


def _ungrouped(config: PreTrainedConfig) -> dict[str, Any]:
    """Group fields as they are (1 or None)."""
    return {f: getattr(config, f) for f in ("n_group", "topk_group") if hasattr(config, f)}


def shrunken(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of the same class with fields changed and derived fields computed anew."""
    values = config.to_dict()
    latent = values.get("kv_lora_rank") is not None
    for derived in ("qk_head_dim", *(("head_dim", "num_key_value_heads") if latent else ())):
        values.pop(derived, None)
    layers = int(changes.get("num_hidden_layers", config.num_hidden_layers))
    for name, value in values.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values[name] = value[:layers]
    values.update(changes)
    if latent:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[token] = None if values.get(token) is None else 0
    return type(config).from_dict(values)
