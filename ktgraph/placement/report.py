"""What `place` decided, as text: predicted times, memory by term, and a row for every op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ktgraph.ir.graph import Op
from ktgraph.placement.decision import Decision, Run, Term
from ktgraph.placement.graph import CPU, ON_HOST, STREAM, Region, Site
from ktgraph.target.description import round_size

_HEADS = (
    "value", "op", "layers", "FLOP/B", "ridge", "bound", "device", "µs", "runner-up", "µs",
    "margin", "why",
)  # fmt: skip
_RIGHT = (3, 4, 7, 9, 10)


@dataclass(frozen=True)
class Row:
    """One op at one range of layers.  Times in seconds of one execution.

    `margin` is what the phase's critical path would lose, for each layer, on the runner-up.
    """

    number: int  # the op's place in its block
    value: str
    op: str
    layers: str
    intensity: float
    ridge: float
    bound: str
    device: str
    seconds: float
    runner_up: str
    runner_seconds: float | None
    margin: float | None
    why: str

    def cells(self) -> tuple[str, ...]:
        return (
            self.value, self.op, self.layers, f"{self.intensity:.3g}", f"{self.ridge:.3g}",
            self.bound, self.device, _micro(self.seconds), self.runner_up or "-",
            _micro(self.runner_seconds), _signed(self.margin), self.why,
        )  # fmt: skip


def _micro(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.4g}"


def _signed(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:+.3g}"


def rows_of(decision: Decision, region: Region, run: Run) -> Iterator[Row]:
    """A row for every op of a region that computes."""
    for site in region.sites:
        if not site.is_view and not site.is_barrier:
            yield _row(decision, region, run, site)


def _row(decision: Decision, region: Region, run: Run, site: Site) -> Row:
    device = decision.device(region, run, site)
    runs_on = decision.machine.home if device == STREAM else device
    target = decision.machine.target
    at = target.device(runs_on)
    dtype = site.cost.dtype if site.cost.dtype in at.peak else "f32"
    other, seconds, margin = _runner_up(decision, region, run, site, device)
    names = ", ".join(f"%{r.name}" for r in site.op.results)
    return Row(
        site.number,
        f"@{region.func.name} {names}",
        site.op.name,
        layers_text(layers_of(site.op, run.layers)),
        site.cost.intensity,
        at.ridge(dtype),
        site.cost.bound(target, runs_on, fallback=True),
        (f"{runs_on} (streamed)" if device == STREAM else device) + _hot_text(decision, run, site),
        _seconds(decision, site, device),
        f"{decision.machine.home} (streamed)" if other == STREAM else other,
        seconds,
        margin,
        _why(decision, region, run, site, device, other, margin),
    )


def _hot_text(decision: Decision, run: Run, site: Site) -> str:
    """``, 16 hot on cuda:0 (38%)``: the slots, and the share of choices (or bytes) there."""
    slots = run.slots.get(site.number)
    if not slots:
        return ""
    return f", {slots} hot on {decision.machine.home} ({run.shares[site.number]:.0%})"


def _seconds(decision: Decision, site: Site, device: str) -> float:
    """Roofline time; of streamed experts with their way over the link."""
    if device != STREAM:
        return site.seconds[device]
    home = decision.machine.home
    return site.seconds[home] + decision.machine.transfer(CPU, home, site.streamed_bytes)


def _runner_up(
    decision: Decision, region: Region, run: Run, site: Site, device: str
) -> tuple[str, float | None, float | None]:
    """The best other place, its roofline time, and what the critical path would lose there."""
    others = [d for d in decision.machine.devices if d != device]
    if device == STREAM:
        others = [CPU]
    elif site.is_experts and decision.machine.is_hybrid:
        others.append(STREAM)
    if not others:
        return "", None, None
    if site.has_state or len(region.sites) > 150:
        best = min(others, key=lambda d: _seconds(decision, site, d))
        time = _seconds(decision, site, best)
        return best, time, time - _seconds(decision, site, device)
    pricer = decision.pricer
    spans = {d: pricer.makespan(region, {**run.assign, site.number: d}, run.shares) for d in others}
    best = min(spans, key=lambda d: spans[d])
    return best, _seconds(decision, site, best), spans[best] - run.seconds


def _why(
    decision: Decision,
    region: Region,
    run: Run,
    site: Site,
    device: str,
    other: str,
    margin: float | None,
) -> str:
    rule = decision.rules.get((region.number, site.number, run.layers[0]))
    if rule is not None and rule.device is not None:
        return f"rule {rule.where}"
    if not other:
        return "the only device"
    if site.op.name in ON_HOST:
        return "only the cpu runs it"
    if site.has_state:
        return "follows the cache"
    home = decision.machine.home
    if device != home and device != STREAM and other == home and margin is not None and margin < 0:
        return f"{home} is full"
    if device == home and margin is not None and margin < 0:
        return "least over all phases"
    if device == STREAM:
        return "weights cross the link sooner than the host computes"
    if device == CPU and other == STREAM:
        return f"{home} is full; streaming takes longer"
    return "least critical path"


def layers_of(op: Op, turns: Sequence[int | None]) -> Sequence[int | None]:
    """The layers that an op belongs to at these turns of its repeat: those of its weights.

    Where layers alternate, a turn is a group of them: ``@layers[2*i+1].experts``.
    """
    index = next((r.index for r in op.weights if r.index is not None and r.index.names), None)
    if index is None:
        return turns
    return [None if t is None else index.at(dict.fromkeys(index.names, t)) for t in turns]


def layers_text(layers: Sequence[int | None]) -> str:
    """``1..9``, ``4``, ``0, 2 .. 22``, or ``-`` outside repeats."""
    first, last = layers[0], layers[-1]
    if first is None or last is None:
        return "-"
    if len(layers) == 1:
        return str(first)
    step = (last - first) // (len(layers) - 1)
    if step == 1:
        return f"{first}..{last}"
    return f"{first}, {last}" if len(layers) == 2 else f"{first}, {first + step} .. {last}"


def placement_text(decision: Decision, rows: Sequence[Row]) -> str:
    """The file placement.txt of a dump."""
    machine = decision.machine
    lines = [
        f"target {machine.target.name} (hash {machine.target.hash}): home {machine.home}, "
        f"devices {', '.join(machine.devices)}",
        *[_call_line(decision, name) for name in decision.calls],
        f"cache: {decision.cache_rows} rows on {decision.state}",
        "",
        *_memory_lines(decision),
        "",
        "margin: what one layer's critical path would lose on the runner-up; times of one layer",
        *aligned([_HEADS, *[r.cells() for r in rows]], _RIGHT),
    ]
    return "\n".join(lines) + "\n"


def _call_line(decision: Decision, name: str) -> str:
    call = decision.calls[name]
    sizes = f"{call.tokens} new tokens, {call.rows} rows in the cache"
    return f"@{name}: {sizes}: {decision.seconds(name) * 1e3:.4g} ms predicted"


def _memory_lines(decision: Decision) -> list[str]:
    from ktgraph.placement.decide import home_memory

    lines: list[str] = []
    for device in decision.machine.devices:
        has = decision.machine.target.device(device).memory
        if device == decision.machine.home:
            has = home_memory(decision.machine, decision.settings)
        used = round_size(decision.used(device))
        lines.append(f"memory of {device}: {used} of {round_size(has)} used")
        terms = [t for t in decision.terms if t.device == device]
        lines += aligned([_term_cells(t) for t in terms[:10]], (0,), "  ")
        if len(terms) > 10:
            rest = sum(t.nbytes for t in terms[10:])
            lines.append(f"  and {len(terms) - 10} more: {round_size(rest)}")
    return lines


def _term_cells(term: Term) -> tuple[str, ...]:
    return round_size(term.nbytes), term.kind, term.name


def aligned(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = ""
) -> list[str]:
    """Rows as columns of equal width, two spaces apart; columns in `right` are set to the right."""
    if not rows:
        return []
    widths = [max(len(r[n]) for r in rows) for n in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            c.rjust(w) if n in right else c.ljust(w)
            for n, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


__all__ = ["Row", "aligned", "layers_of", "layers_text", "placement_text", "rows_of"]
