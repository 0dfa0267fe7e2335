"""Rewrites written as `.ktir` text: `Rule`, `Match`, `rewrite`, and the pass base `RulePass`."""

from ktgraph.ops.registry import Refusal, no
from ktgraph.rewrite.applying import (
    RewriteError,
    RulePass,
    apply_match,
    apply_together,
    find_match,
    layer_prefix,
    rewrite,
)
from ktgraph.rewrite.derive import derived_weight, reference
from ktgraph.rewrite.matching import Match, Matcher
from ktgraph.rewrite.pattern import parse_pattern
from ktgraph.rewrite.rule import Rule

__all__ = [
    "Match",
    "Matcher",
    "Refusal",
    "RewriteError",
    "Rule",
    "RulePass",
    "apply_match",
    "apply_together",
    "derived_weight",
    "find_match",
    "layer_prefix",
    "no",
    "parse_pattern",
    "reference",
    "rewrite",
]
