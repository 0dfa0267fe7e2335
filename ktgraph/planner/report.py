"""A plan as tables: speed, memory, where weights live, and what-ifs beside the base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ktgraph.placement.graph import CPU
from ktgraph.planner.forecast import Forecast, Phase
from ktgraph.planner.holdings import ROUTED
from ktgraph.planner.model import ModelSize
from ktgraph.target import ASSUMED_DISK, Target, provenance_text, round_size

_TERMS = 6  # of a device's memory
_LIMITS = 3  # of a phase
_RIGHT = ("tok/s", "time", "bytes", "share", "layers", "decode tok/s", "prompt tok/s")


def report(model: ModelSize, forecasts: Sequence[Forecast]) -> Group:
    """Everything about the base, then a table of all forecasts when there are several."""
    base, parts = forecasts[0], list[RenderableType]()
    parts.append(_heading(model, base))
    parts += _verdict(base)
    if base.prefill is not None:
        parts.append(_speed(base))
    if base.need is not None:
        parts += [_memory(base), _places(base)]
    if len(forecasts) > 1:
        parts.append(what_if_table(forecasts))
        parts += [Text(f"{f.name}: {f.refusal}") for f in forecasts[1:] if f.refusal and not f.need]
    return Group(*parts)


# -- the base --------------------------------------------------------------------------------------
def _heading(model: ModelSize, base: Forecast) -> RenderableType:
    options, target = base.options, base.target
    stored = f"quantize {options.quantize}" if options.quantize else "weights as stored"
    batch = f"batch {base.setting.batch}"
    asked = f"{stored}, computed in {_dtype(base)}, context {options.context}, {batch}"
    lines = [str(model), asked, f"target {target.name}: {provenance_text(target)}"]
    lines += [f"  {_device_line(target, d.name)}" for d in target.devices]
    return Text("\n".join(lines))


def _dtype(base: Forecast) -> str:
    return {"auto": "f32"}.get(base.options.dtype, base.options.dtype)


def _device_line(target: Target, name: str) -> str:
    device = target.device(name)
    threads = f" on {device.threads} threads" if device.kind == "cpu" else ""
    return (
        f"{name}: {device.model or device.kind}, {round_size(device.memory)} for ktgraph, "
        f"{device.bandwidth_at() / 1e9:.3g} GB/s{threads}"
    )


def _verdict(base: Forecast) -> Iterator[RenderableType]:
    if base.fits:
        used = [f"{d.name} {_of(base, d.name)}" for d in base.target.devices]
        yield Text(f"fits: {', '.join(used)}", style="green")
        return
    yield Text("does not fit: kt.compile refuses it", style="bold red")
    # the table of memory below shows the terms
    yield Text(base.refusal if base.need is None else _headlines(base.refusal))
    if base.disk is not None:
        disk = base.target.disk or ASSUMED_DISK
        origin = "" if base.target.disk is not None else ", assumed"
        yield Text(
            f"with {round_size(base.disk.nbytes)} of the routed experts ({base.disk.share:.0%}) on "
            f"a disk of {disk.bandwidth / 1e9:.3g} GB/s{origin}, which nothing here runs, a token "
            f"would read {round_size(base.disk.a_token)} from it:"
        )
    elif base.need is not None and CPU in {d.name for d in base.target.devices}:
        yield Text("it is short of more than routed experts on disk could free")


def _headlines(refusal: str) -> str:
    lines = [x for x in refusal.split("\n") if not x.startswith(" ")]
    return "\n".join(x.removesuffix(" The largest terms:") for x in lines)


def _of(found: Forecast, device: str) -> str:
    used, unit = round_size(found.memory(device)).split(" ")
    memory, memory_unit = round_size(found.target.device(device).memory).split(" ")
    return f"{used} {unit if unit != memory_unit else ''}".strip() + f" of {memory} {memory_unit}"


def _speed(base: Forecast) -> Table:
    table = _table("speed, predicted", "phase", "call", "tok/s", "time", "what the time goes to")
    for phase in (base.prefill, base.prompt, base.decode):
        if phase is not None:
            table.add_row(
                phase.name, _call(phase, base), _speedText(phase.speed),
                _time(phase.seconds), _limits(phase),
            )  # fmt: skip
    return table


def _call(phase: Phase, base: Forecast) -> str:
    if phase.name == "prompt":
        return f"{phase.tokens} tokens in calls of {base.prefill.tokens if base.prefill else 0}"
    return f"{phase.tokens} new, {phase.rows} rows in the cache"


def _limits(phase: Phase) -> str:
    shown = [x for x in phase.limits if x.seconds >= 0.02 * phase.seconds][:_LIMITS]
    return ", ".join(f"{x} {x.seconds / phase.seconds:.0%}" for x in shown)


def _speedText(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _memory(base: Forecast) -> Table:
    table = _table("memory", "device", "bytes", "kind", "what")
    assert base.need is not None
    for device in base.target.devices:
        here = base.need.on(device.name)
        table.add_row(device.name, _of(base, device.name), "", "")
        for term in here.terms[:_TERMS]:
            table.add_row("", round_size(term.nbytes), term.kind, escape(term.name))
        rest = here.terms[_TERMS:]
        if rest:
            size = round_size(sum(t.nbytes for t in rest))
            table.add_row("", size, "", f"{len(rest)} more")
    return table


def _places(base: Forecast) -> Table:
    table = _table(
        "where weights live", "weights", "layers", "bytes", "stored as", "lie on", "computed"
    )
    for row in base.holdings:
        runs = dict(row.runs)
        ways = list(dict.fromkeys(runs.values()))
        how = ways[0] if len(ways) == 1 else ", ".join(f"{p}: {w}" for p, w in runs.items())
        table.add_row(
            row.what, row.span, round_size(row.nbytes), escape(", ".join(row.encodings[:2])),
            row.device, how if row.what == ROUTED else "there",
        )  # fmt: skip
    return table


# -- what-ifs --------------------------------------------------------------------------------------
def what_if_table(forecasts: Sequence[Forecast]) -> Table:
    """A row for each forecast, the base first; speeds with their change against it."""
    base = forecasts[0]
    table = _table(
        "what if", "", "fits", "decode tok/s", "prompt tok/s", "decode bound by", "GPU", "RAM",
        "experts on GPU",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for found in forecasts:
        gpus = [g.name for g in found.target.gpus]
        cpus = [d.name for d in found.target.devices if d.kind == "cpu"]
        fits = "yes" if found.fits else "from disk" if found.disk is not None else "no"
        table.add_row(
            escape(found.name), fits, _change(found.decode, base.decode),
            _change(found.prompt, base.prompt), str(found.decode.bound) if found.decode else "-",
            _of(found, gpus[0]) if gpus and found.need else "-",
            _of(found, cpus[0]) if cpus and found.need else "-", _resident(found),
        )  # fmt: skip
    return table


def _change(phase: Phase | None, base: Phase | None) -> str:
    if phase is None:
        return "-"
    text = _speedText(phase.speed)
    if base is None or phase is base or abs(phase.speed / base.speed - 1) < 0.005:
        return text
    return f"{text} ({phase.speed / base.speed - 1:+.0%})"


def _resident(found: Forecast) -> str:
    """Layers whose routed experts lie on the GPU."""
    rows = [h for h in found.holdings if h.what == ROUTED]
    home = sorted({n for h in rows if h.device != CPU for n in h.layers})
    every = {n for h in rows for n in h.layers}
    if not rows:
        return "-"
    return f"{len(home)} of {len(every)} layers"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, title_style="bold")
    for column in columns:
        right = column in _RIGHT
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


__all__ = ["report", "what_if_table"]
