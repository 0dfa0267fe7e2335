"""How far an encoding moves a weight and its outputs, as NMSE on a sample of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktgraph.ir.graph import WeightRef
from ktgraph.ir.types import Encoding
from ktgraph.weights.encodings import round_trip
from ktgraph.weights.evaluate import WeightEvaluator

MATRICES, ROWS, INPUTS = 4, 512, 32  # matrices of a stack, rows of each, normal inputs


@dataclass(frozen=True)
class EncodingErrors:
    """NMSE of a weight and of its outputs, the largest over the matrices measured."""

    weight: float
    output: float

    @property
    def largest(self) -> float:
        return max(self.weight, self.output)


def measure_errors(
    values: WeightEvaluator, ref: WeightRef, index: int | None, encoding: Encoding
) -> EncodingErrors:
    """Errors of storing a weight [..., rows, cols] in `encoding`."""
    found = [compare_matrix(m, encoding) for m in values.sample(ref, index, MATRICES)]
    return EncodingErrors(max(e.weight for e in found), max(e.output for e in found))


def compare_matrix(matrix: torch.Tensor, encoding: Encoding) -> EncodingErrors:
    """Errors of evenly spaced rows of one matrix [rows, cols] on seeded normal inputs."""
    rows = matrix[:: -(-matrix.shape[0] // ROWS)].float()
    rounded = round_trip(rows, encoding)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows.shape[1], INPUTS, generator=rng)
    return EncodingErrors(_nmse(rounded, rows), _nmse(rounded @ x, rows @ x))


def _nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    size = float(want.double().square().sum())
    return float((got - want).double().square().sum()) / size if size else 0.0


__all__ = ["INPUTS", "MATRICES", "ROWS", "EncodingErrors", "compare_matrix", "measure_errors"]
