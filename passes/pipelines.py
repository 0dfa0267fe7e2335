"""Named pipelines: pipeline strings by name (`ktgraph/pipeline.py` says how they are written)."""

from __future__ import annotations

PIPELINES: dict[str, str] = {
    "default": (
        "name-dims,canonicalize,flatten-tokens,fix-sizes,window-cache,specialize-phases,mla-absorb,"
        "merge-linears,moe-group,fuse-norms,fuse-rope-kv,place,quantize,expert-deferral,"
        "insert-copies,overlap,dequantize,pack-weights,plan-memory,lower"
    ),
}

__all__ = ["PIPELINES"]
