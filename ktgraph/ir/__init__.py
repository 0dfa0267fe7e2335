"""The IR: dims, types, graph, text, verification, interpretation (docs/ir.md)."""

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import (
    Attr,
    Block,
    Function,
    Module,
    Op,
    Operand,
    Recipe,
    Value,
    Weight,
    WeightRef,
    Witness,
)
from ktgraph.ir.lexer import ParseError
from ktgraph.ir.parser import parse_dim, parse_file, parse_module, parse_type
from ktgraph.ir.types import BATCH, BatchType, Encoding, StateType, TensorType, Type

__all__ = [
    "BATCH",
    "Attr",
    "BatchType",
    "Block",
    "Dim",
    "Encoding",
    "Function",
    "Module",
    "Op",
    "Operand",
    "ParseError",
    "Recipe",
    "StateType",
    "TensorType",
    "Type",
    "Value",
    "Weight",
    "WeightRef",
    "Witness",
    "parse_dim",
    "parse_file",
    "parse_module",
    "parse_type",
]
