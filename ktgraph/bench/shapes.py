"""The MoE layers that are measured, and weight formats by name."""

from __future__ import annotations

from dataclasses import dataclass

from ktgraph.errors import UnsupportedInputError

TOKENS = (1, 4, 16, 64, 512, 2048)


@dataclass(frozen=True)
class Shape:
    """A routed layer: y = sum over top_k of w * down(silu(gate x) * up x)."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int

    @property
    def weights_of_expert(self) -> int:
        """Elements of gate, up and down together."""
        return 3 * self.hidden * self.width

    def flops(self, tokens: int) -> int:
        """A multiply and an add are two; activations and the merge are left out."""
        return 2 * self.weights_of_expert * tokens * self.top_k


SHAPES = {
    s.name: s
    for s in (
        Shape("dsv2lite", 2048, 1408, 64, 6),
        Shape("qwen3a3b", 2048, 768, 128, 8),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("dsv3", 7168, 2048, 64, 8),  # 64 of its 256 experts
        Shape("mixtral", 4096, 14336, 8, 2),
        Shape("tiny", 128, 64, 16, 4),  # for tests of the bench itself; not measured by default
    )
}
MEASURED = tuple(name for name in SHAPES if name != "tiny")

_GROUPED = {"int4": 64, "int4p": 64, "int4z": 64, "mxfp4": 32, "fp8": 128}  # default groups


@dataclass(frozen=True)
class WeightFormat:
    """A packed format of cpu_kernels; `group` is 0 where the format has none."""

    name: str
    group: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.group}" if self.group else self.name


def parse_format(text: str) -> WeightFormat:
    """`int8`, `int4` (group 64) or `int4:32`."""
    name, _, group = text.partition(":")
    if group and not group.isdigit():
        raise UnsupportedInputError(
            f"format {text!r}: expected NAME or NAME:GROUP, as int8 or int4:32"
        )
    return WeightFormat(name, int(group) if group else _GROUPED.get(name, 0))


def find_shape(name: str) -> Shape:
    """A shape by name."""
    if name not in SHAPES:
        raise UnsupportedInputError(f"no shape {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]


# How a format's name begins -> bits of a weight: what is compared with what.
_BITS = (
    ("f32", 32), ("bf16", 16), ("f16", 16), ("fp8", 8), ("int8", 8), ("q8", 8), ("int4", 4),
    ("q4", 4), ("mxfp4", 4),
)  # fmt: skip


def bits_of(format_name: str) -> int:
    """Bits of a weight without scales; 0 where the name tells nothing."""
    return next((bits for start, bits in _BITS if format_name.startswith(start)), 0)
