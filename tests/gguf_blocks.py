"""Valid GGUF blocks for tests: any bits, except that scales are finite halves of a chosen size."""

from __future__ import annotations

import zlib

import gguf
import numpy as np
import torch

FORMATS = ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs")
# In a block: where its f16 scales lie, and its sub-scales with their minima.
_HALVES = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
           "iq4_xs": (0,)}  # fmt: skip
_SUBS = {"q4_0": (0, 0), "q8_0": (0, 0), "q4_k": (4, 16), "q5_k": (4, 16), "q6_k": (192, 208),
         "iq4_xs": (2, 8)}  # fmt: skip
# f16 scales that bring values near 1; minima are near the middle of the quants
_UNIT = {"q4_0": 0.2, "q8_0": 0.0135, "q4_k": 0.006, "q5_k": 0.003, "q6_k": 0.0007,
         "iq4_xs": 0.0007}  # fmt: skip
_MINIMUM = {"q4_k": 7.5, "q5_k": 15.5}


def qtype(format: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.upper()]


def sizes(format: str) -> tuple[int, int]:
    """Columns and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[qtype(format)]


def whole(format: str, columns: int) -> int:
    """Columns rounded up to whole blocks; other formats take any number."""
    block = sizes(format)[0] if format in FORMATS else 1
    return -(-columns // block) * block


def values(format: str, blocks: np.ndarray) -> np.ndarray:
    """f32 [rows, cols], by the gguf package."""
    return gguf.quants.dequantize(blocks, qtype(format))


def _set_scale(format: str, each: np.ndarray, number: int, scale: np.ndarray) -> None:
    at = _HALVES[format][number]
    halves = scale.astype(np.float16)[..., None].view(np.uint8)
    each[..., at : at + 2] = halves


def random_blocks(
    format: str, rows: int, cols: int, rng: np.random.Generator, size: float = 1.0
) -> np.ndarray:
    """Bytes [rows, bytes of a row]; values have about the standard deviation `size`."""
    columns, nbytes = sizes(format)
    assert cols % columns == 0
    each = rng.integers(0, 256, (rows, cols // columns, nbytes), np.uint8)
    scale = size * _UNIT[format] * rng.uniform(0.5, 1.5, each.shape[:2])
    if format not in _MINIMUM:
        scale *= rng.choice([-1, 1], scale.shape)
    _set_scale(format, each, 0, scale)
    if format in _MINIMUM:
        _set_scale(format, each, 1, scale * _MINIMUM[format])
    return each.reshape(rows, -1)


def blocks_for(format: str, like: torch.Tensor) -> np.ndarray:
    """Blocks that depend on nothing but a matrix [rows, cols], of about its size."""
    dense = like.float().contiguous().numpy()
    rng = np.random.default_rng(zlib.crc32(dense.tobytes()))
    rows, cols = dense.shape
    return random_blocks(format, rows, cols, rng, float(dense.std()) or 1.0)


def extreme_blocks(format: str, rows: int, cols: int) -> np.ndarray:
    """Rows of equal bytes: every pair of extreme quants and extreme sub-scales."""
    columns, nbytes = sizes(format)
    each = np.zeros((rows, cols // columns, nbytes), np.uint8)
    first, last = _SUBS[format]
    bytes4 = (0x00, 0x7F, 0x80, 0xFF)
    for r in range(rows):
        each[r] = bytes4[r % 4]
        each[r, :, first:last] = bytes4[r // 4 % 4]
    for number in range(len(_HALVES[format])):
        _set_scale(format, each, number, np.ones(each.shape[:2]))
    return each.reshape(rows, -1)
