"""A target as TOML text: written by hand in a fixed order, read with errors that give the line."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from ktgraph.target.description import (
    Device,
    DeviceKind,
    Disk,
    EngineSpeed,
    Link,
    Origin,
    Provenance,
    Target,
    TargetError,
    close_matches,
    format_size,
    parse_size,
)

FORMAT = 1
_KINDS = ("cpu", "cuda", "simulated")
_DTYPES = ("f32", "f16", "bf16", "fp8", "int8")

Table = Mapping[str, Any]


# ---- writing


def write(target: Target) -> str:
    """Canonical text of `target`."""
    head = {"format": FORMAT, "name": target.name, "home": target.home}
    source = target.provenance
    about = {"origin": source.origin, "date": source.date, "host": source.host, "note": source.note}
    parts = [_table("", head), _table("[provenance]", about)]
    parts += [_device_text(device) for device in target.devices]
    parts += [
        _table(
            "[[link]]",
            {"src": k.src, "dst": k.dst, "bandwidth": k.bandwidth, "latency": k.latency},
        )
        for k in target.links
    ]
    if target.disk is not None:
        figures = {"bandwidth": target.disk.bandwidth, "latency": target.disk.latency}
        parts.append(_table("[disk]", figures))
    return "\n".join(parts)


def _device_text(device: Device) -> str:
    entries = {
        "name": device.name,
        "kind": device.kind,
        "model": device.model,
        "memory": format_size(device.memory),
        "isa": list(device.isa),
        "cores": device.cores,
        "threads": device.threads,
        "numa_nodes": device.numa_nodes,
        "launch": device.launch,
        "bandwidth": [list(point) for point in device.bandwidth],
    }
    if device.engine:
        entries["engine"] = [[s.threads, s.read, s.compute] for s in device.engine]
    order = [dtype for dtype in _DTYPES if dtype in device.peak]
    order += sorted(set(device.peak) - set(order))
    peak = {dtype: device.peak[dtype] for dtype in order}
    text = _table("[[device]]", entries) + _table("[device.peak]", peak)
    text += _table("[device.reads]", device.reads) if device.reads else ""
    for level, rows in device.many_rows.items():
        text += _table(f"[device.many_rows.{level}]", rows)
    return text


def _table(header: str, entries: Mapping[str, object]) -> str:
    lines = [header] if header else []
    lines += [f"{key} = {_value(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in cast("list[object]", value)) + "]"
    return repr(value)  # int, float: repr reads back exactly


# ---- reading


def read(text: str, *, path: str) -> Target:
    """The target that `text` describes. Raises TargetError naming file, line and key."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TargetError(_syntax_message(path, str(error))) from None
    return _Reader(text, path).target(data)


def _syntax_message(path: str, message: str) -> str:
    match = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", message)
    where = f"{path}:{match[2]}" if match else path
    return f"{where}: not valid TOML: {match[1] if match else message}"


class _Reader:
    """Turns parsed TOML into a Target, knowing the text so that errors can give a line."""

    def __init__(self, text: str, path: str) -> None:
        self.lines = text.splitlines()
        self.path = path

    def target(self, data: Table) -> Target:
        top = _Fields(self, "", 0, data)
        top.only("format", "name", "home", "provenance", "device", "link", "disk")
        if top.integer("format") != FORMAT:
            raise top.wrong("format", f"{FORMAT}, the format this version of ktgraph reads")
        about = self.fields("provenance", top.tables("provenance", single=True))
        devices = self.fields("device", top.tables("device"))
        if not devices:
            raise top.wrong("device", "at least one [[device]] table")
        links = self.fields("link", top.tables("link"))
        disks = self.fields("disk", top.tables("disk", single=True))
        names = tuple(f.text("name") for f in devices)
        for index, f in enumerate(devices):
            if names[index] in names[:index]:
                raise f.wrong("name", "a name that no other device has")
        return Target(
            name=top.text("name"),
            home=top.choice("home", names),
            devices=tuple(map(self.device, devices)),
            links=tuple(self.link(f, names) for f in links),
            provenance=self.provenance(about[0]) if about else Provenance("described"),
            disk=self.disk(disks[0]) if disks else None,
        )

    def fields(self, header: str, tables: list[Table]) -> list[_Fields]:
        return [_Fields(self, header, index, table) for index, table in enumerate(tables)]

    def provenance(self, f: _Fields) -> Provenance:
        f.only("origin", "date", "host", "note")
        return Provenance(
            origin=cast("Origin", f.choice("origin", ("measured", "described"))),
            date=f.text("date", ""),
            host=f.text("host", ""),
            note=f.text("note", ""),
        )

    def device(self, f: _Fields) -> Device:
        f.only(*Device.__dataclass_fields__)
        name = f.text("name")
        if not re.fullmatch(r"[a-z_]\w*(:\d+)?", name):
            raise f.wrong("name", 'a device name such as "cpu" or "cuda:0"')
        return Device(
            name=name,
            kind=cast("DeviceKind", f.choice("kind", _KINDS)),
            memory=f.size("memory"),
            bandwidth=f.curve("bandwidth"),
            peak=f.peaks("peak"),
            launch=f.number("launch", zero=True),
            model=f.text("model", ""),
            isa=f.texts("isa"),
            cores=f.integer("cores", 1),
            threads=f.integer("threads", 1),
            numa_nodes=f.integer("numa_nodes", 1),
            reads=f.rates("reads"),
            engine=f.speeds("engine"),
            many_rows=f.counts("many_rows"),
        )

    def link(self, f: _Fields, names: tuple[str, ...]) -> Link:
        f.only("src", "dst", "bandwidth", "latency")
        return Link(
            src=f.choice("src", names),
            dst=f.choice("dst", names),
            bandwidth=f.number("bandwidth"),
            latency=f.number("latency", zero=True),
        )

    def disk(self, f: _Fields) -> Disk:
        f.only("bandwidth", "latency")
        return Disk(f.number("bandwidth"), f.number("latency", zero=True))

    def line_of(self, header: str, index: int, key: str) -> int:
        """1-based line of `key` in the index-th table under `header`, else that table's line."""
        start, seen, current = 1, -1, ""
        for number, line in enumerate(self.lines, start=1):
            opened = re.match(r"\s*\[+\s*([\w.]+)\s*\]+", line)
            if opened:
                current = opened[1]
                seen += current == header
                if (current, seen) == (header, index):
                    start = number
                if (current, seen) == (f"{header}.{key}", index):
                    return number
                continue
            here = current == header and (not header or seen == index)
            if here and re.match(rf"\s*\"?{re.escape(key)}\"?\s*[=.]", line):
                return number
        return start


class _Fields:
    """Typed access to one table of the file; every complaint names key, line and expectation."""

    def __init__(self, reader: _Reader, header: str, index: int, table: Table) -> None:
        self.reader, self.header, self.index, self.table = reader, header, index, table

    def wrong(self, key: str, expected: str) -> TargetError:
        found = f"found {self.table[key]!r}" if key in self.table else "it is missing"
        return TargetError(f"{self._where(key)}: expected {expected}; {found}")

    def _where(self, key: str) -> str:
        line = self.reader.line_of(self.header, self.index, key)
        table = f" of [{self.header}]" if self.header else ""
        return f"{self.reader.path}:{line}: key {key!r}{table}"

    def only(self, *known: str) -> None:
        for key in self.table:
            if key not in known:
                hint = close_matches(key, list(known))
                raise TargetError(f"{self._where(key)}: unknown key; {hint}")

    def tables(self, key: str, *, single: bool = False) -> list[Table]:
        value: object = self.table.get(key, [])
        tables = [cast("object", value)] if single and isinstance(value, dict) else _items(value)
        if tables is None or not all(isinstance(table, dict) for table in tables):
            raise self.wrong(key, f"a table [{key}]" if single else f"tables [[{key}]]")
        return cast("list[Table]", tables)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.table.get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self.wrong(key, "a text in quotes")
        return value

    def choice(self, key: str, options: tuple[str, ...]) -> str:
        value = self.table.get(key)
        if value not in options:
            raise self.wrong(key, "one of " + ", ".join(f'"{o}"' for o in options))
        return cast("str", value)

    def texts(self, key: str) -> tuple[str, ...]:
        items = _items(self.table.get(key, []))
        texts = tuple(item for item in items or () if isinstance(item, str))
        if items is None or len(texts) != len(items):
            raise self.wrong(key, "a list of texts")
        return texts

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.table.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number of 1 or more")
        return value

    def number(self, key: str, *, zero: bool = False) -> float:
        value = _number(self.table.get(key))
        if value is None or value < 0 or (value == 0 and not zero):
            raise self.wrong(key, f"a number {'of 0 or more' if zero else 'above 0'}")
        return value

    def size(self, key: str) -> int:
        value: object = self.table.get(key)
        try:
            if isinstance(value, str | int) and not isinstance(value, bool):
                return parse_size(value)
        except TargetError:
            pass
        raise self.wrong(key, 'bytes or a size such as "24GiB"')

    def peaks(self, key: str) -> dict[str, float]:
        value: object = self.table.get(key)
        table = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        peaks = {dtype: _number(peak) for dtype, peak in table.items()}
        good = {dtype: p for dtype, p in peaks.items() if p and p > 0 and dtype in _DTYPES}
        if not good or len(good) != len(peaks) or "f32" not in good:
            raise self.wrong(key, f"FLOP/s for f32 and others of {', '.join(_DTYPES)}")
        return good

    def rates(self, key: str) -> dict[str, float]:
        """Bytes/s by the name of a weight format; none when the key is not there."""
        value: object = self.table.get(key, {})
        table = cast("dict[str, object]", value) if isinstance(value, dict) else None
        rates = {name: _number(rate) for name, rate in (table or {}).items()}
        good = {name: r for name, r in rates.items() if r and r > 0}
        if table is None or len(good) != len(rates):
            raise self.wrong(key, "bytes/s by weight format, as in int8 = 50e9")
        return good

    def speeds(self, key: str) -> tuple[EngineSpeed, ...]:
        """[[threads, bytes/s, FLOP/s], ...] rising in threads; none when the key is not there."""
        items = _items(self.table.get(key, []))
        found = [_speed(item) for item in items or ()]
        good = tuple(s for s in found if s is not None)
        if items is None or len(good) != len(found) or not _rising([s.threads for s in good]):
            raise self.wrong(key, "[[threads, bytes/s, FLOP/s], ...] with rising threads")
        return good

    def counts(self, key: str) -> dict[str, dict[str, int]]:
        """Counts by level and weight format; none when the key is not there."""
        levels = _dict(self.table.get(key, {}))
        tables = {level: _dict(rows) for level, rows in (levels or {}).items()}
        good = {
            level: {name: n for name, n in rows.items() if type(n) is int and n >= 1}
            for level, rows in tables.items()
            if rows is not None
        }
        if levels is None or good != tables:
            raise self.wrong(key, "tables of counts by level and format, as in amx.int4p = 7")
        return good

    def curve(self, key: str) -> tuple[tuple[int, float], ...]:
        """Either one figure in bytes/s, or [[threads, bytes/s], ...] rising in threads."""
        value: object = self.table.get(key)
        single = _number(value)
        pairs = [[1, single]] if single else _items(value)
        points = [_point(pair) for pair in pairs or ()]
        good = tuple(point for point in points if point is not None)
        if not good or len(good) != len(points) or not _rising([n for n, _ in good]):
            raise self.wrong(key, "bytes/s, or [[threads, bytes/s], ...] with rising threads")
        return good


def _items(value: object) -> list[object] | None:
    return cast("list[object]", value) if isinstance(value, list) else None


def _dict(value: object) -> dict[str, object] | None:
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _point(pair: object) -> tuple[int, float] | None:
    items = _items(pair)
    if items is None or len(items) != 2:
        return None
    threads, speed = items[0], _number(items[1])
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1 or not speed:
        return None
    return (threads, speed) if speed > 0 else None


def _speed(triple: object) -> EngineSpeed | None:
    items = _items(triple)
    if items is None or len(items) != 3:
        return None
    point, compute = _point(items[:2]), _number(items[2])
    return EngineSpeed(*point, compute) if point and compute and compute > 0 else None


def _rising(counts: list[int]) -> bool:
    return all(a < b for a, b in pairwise(counts))
