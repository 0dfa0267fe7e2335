"""Expert deferral in prices: of experts on the host, the share that is not waited for.

The pass expert-deferral comes behind `place` and takes what is on the host then, so that `place`
prices what will come of its choice.  The last layer hands nothing on; it is priced as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ktgraph.ir.graph import Value
from ktgraph.placement.graph import Region, Site


def mark_late(regions: Sequence[Region], defer: int) -> None:
    """Set `late` of the experts whose last `defer` choices the host may compute a layer later."""
    decode = [r for r in regions if r.func.attrs.get("phase") == "decode"]
    if defer < 1 or sum(len(_layers(r)) * len(r.layers) for r in decode) < 2:
        return
    for region in decode:
        for sites in _layers(region).values():
            if len(sites) == 1:  # a layer with several groups of experts is left as it is
                top_k = sites[0].op.value(1).tensor.dims[-1].at(region.sizes)
                late = min(1.0, defer / top_k)
                region.sites[sites[0].number] = replace(sites[0], late=late)


def _layers(region: Region) -> dict[Value, list[Site]]:
    """Sites of experts by the rows that they read: those of one layer."""
    found: dict[Value, list[Site]] = {}
    for site in (s for s in region.sites if s.op.name == "moe.grouped_mlp"):
        found.setdefault(site.op.value(0), []).append(site)
    return found


__all__ = ["mark_late"]
