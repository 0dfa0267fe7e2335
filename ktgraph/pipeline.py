"""Pipeline strings: which passes run, in which order, with which options.

    pipeline = item {"," item}
    item     = ref [options]                      a pass, or a named pipeline (passes/pipelines.py)
             | "+" ref [options] [place]          add a pass to what stands before
             | "-" name                           leave a pass out
    place    = "@before:" name | "@after:" name
    options  = "{" name "=" value {"," name "=" value} "}"
    ref      = name | module ":" Class | file.py ":" name

Once a named pipeline was written, a plain ``place{gpu_memory=22GiB}`` sets options of the pass that
is there.  ``+my-pass`` without a place goes to the end, but before the last run of *required*
passes (in `default`: before ``plan-memory,lower``).  ``@before`` means the first pass of that name,
``@after`` the last.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ktgraph.pass_api import Pass, UnknownPassError, all_passes, pass_class
from ktgraph.pass_options import PipelineError, options_text, parse_options, split_top

_ITEM = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<ref>[^{}@\s]+)\s*(?:\{(?P<options>.*)\})?"
    r"\s*(?:@(?P<place>before|after):(?P<anchor>[^{}@\s]+))?",
    re.DOTALL,
)
_PLUGIN = "__ktgraph_plugin__"  # on a module loaded from a file: that file


@dataclass(frozen=True)
class Step:
    """One pass with its options; `ref` is how a pipeline string names it."""

    instance: Pass
    ref: str

    @staticmethod
    def of(instance: Pass) -> Step:
        return Step(instance, _ref_of(type(instance)))

    @property
    def name(self) -> str:
        return self.instance.name

    def __str__(self) -> str:
        return self.ref + options_text(self.instance)


@dataclass(frozen=True)
class Pipeline:
    """Steps in order; `str(pipeline)` is a flat pipeline string that parses back to it."""

    steps: tuple[Step, ...]

    @staticmethod
    def of(given: str | Pipeline | Sequence[Pass]) -> Pipeline:
        """A pipeline string, a list of passes, or a pipeline as it is.

        Raises PipelineError or UnknownPassError, both naming what is known.
        """
        if isinstance(given, Pipeline):
            return given
        if isinstance(given, str):
            return parse_pipeline(given)
        if isinstance(given, Sequence) and all(isinstance(p, Pass) for p in given):  # pyright: ignore[reportUnnecessaryIsInstance]
            return Pipeline(tuple(map(Step.of, given)))
        raise PipelineError(f"pipeline {given!r}: expected a pipeline string or a list of passes")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.steps)

    def rest_after(self, applied: Sequence[str]) -> Pipeline:
        """The steps that remain when the first ones, by name `applied`, have run."""
        if self.names[: len(applied)] != tuple(applied):
            raise PipelineError(
                f"the file was written after {','.join(applied) or 'no pass'}, the pipeline begins "
                f"with {','.join(self.names[: max(len(applied), 1)])}: give --from PASS to say "
                "where to go on"
            )
        return Pipeline(self.steps[len(applied) :])

    def starting_at(self, name: str) -> Pipeline:
        """The steps from the pass `name` on."""
        return Pipeline(self.steps[_find(self.steps, name, "--from ") :])

    def __str__(self) -> str:
        return ",".join(map(str, self.steps))


def parse_pipeline(text: str) -> Pipeline:
    """Read a pipeline string."""
    steps: list[Step] = []
    editing = False
    for item in split_top(" ".join(text.split())):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise PipelineError(
                f"pipeline item {item!r}: expected name{{option=value}}@before:name"
            )
        sign, ref, options = found["sign"], found["ref"], found["options"]
        if not sign and _named(ref) is not None:
            _no_extras(item, options, found["place"])
            steps += parse_pipeline(_named(ref) or "").steps
            editing = True
        elif sign == "-":
            _no_extras(item, options, found["place"])
            _find(steps, ref, "-")
            steps = [s for s in steps if s.name != ref]
        elif sign == "+":
            _add(steps, _step(ref, options), found["place"], found["anchor"])
        elif editing:
            _set_options(steps, item, ref, options)
        else:
            steps.append(_step(ref, options))
    return Pipeline(tuple(steps))


def _named(ref: str) -> str | None:
    pipelines = import_module("ktgraph.passes.pipelines")
    found: str | None = pipelines.PIPELINES.get(ref)
    return found


def _no_extras(item: str, options: str | None, place: str | None) -> None:
    if options is not None or place is not None:
        raise PipelineError(f"pipeline item {item!r}: options and @ go with a pass that is added")


def _set_options(steps: list[Step], item: str, ref: str, options: str | None) -> None:
    if options is None:
        raise PipelineError(
            f"pipeline item {item!r} after a named pipeline: write +{ref} to add the pass, "
            f"or {ref}{{option=value}} to set options"
        )
    places = [i for i, s in enumerate(steps) if ref in (s.name, s.ref)]
    if not places:
        _find(steps, ref, "")
    for at in places:
        instance = steps[at].instance
        values = parse_options(type(instance), options, f"pass {steps[at].name}")
        steps[at] = replace(steps[at], instance=replace(instance, **values))


def _add(steps: list[Step], step: Step, place: str | None, anchor: str | None) -> None:
    if place is None or anchor is None:
        steps.insert(_closing(steps), step)
    elif place == "before":
        steps.insert(_find(steps, anchor, "@before:"), step)
    else:
        backwards = list(reversed(steps))
        steps.insert(len(steps) - _find(backwards, anchor, "@after:"), step)


def _closing(steps: Sequence[Step]) -> int:
    """Where the last run of required passes begins."""
    at = len(steps)
    while at and steps[at - 1].instance.required:
        at -= 1
    return at


def _find(steps: Sequence[Step], name: str, what: str) -> int:
    for at, step in enumerate(steps):
        if name in (step.name, step.ref):
            return at
    names = [s.name for s in steps]
    close = difflib.get_close_matches(name, names, n=2)
    hint = f" (did you mean {', '.join(close)}?)" if close else ""
    raise PipelineError(
        f"{what}{name}: no such pass in the pipeline{hint}; it holds {', '.join(names) or 'none'}"
    )


def _step(ref: str, options: str | None) -> Step:
    cls = _resolve(ref)
    values = parse_options(cls, options or "", f"pass {cls.name}")
    return Step(cls(**values), ref if ":" in ref else _ref_of(cls))


# -- passes that live outside the package ---------------------------------------------------------
def _resolve(ref: str) -> type[Pass]:
    where, colon, name = ref.rpartition(":")
    if not colon:
        return pass_class(ref)
    if where.endswith(".py"):
        return _from_file(where, name)
    try:
        found = getattr(import_module(where), name, None)
    except Exception as error:  # of the user's module, whatever it is
        reason = (
            str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        )
        raise UnknownPassError(f"{ref}: cannot import {where}: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise UnknownPassError(f"{ref}: {where} has no Pass class {name!r}")
    return found


def _from_file(file: str, name: str) -> type[Pass]:
    module = load_plugin(file)
    own = list(_classes(module))
    for cls in own:
        if name in (cls.name, cls.__name__):
            return cls
    known = ", ".join(c.name for c in own) or "none"
    raise UnknownPassError(f"{file}: no pass {name!r} in this file; it defines {known}")


def _classes(module: ModuleType) -> Iterator[type[Pass]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Pass) and value.name:
            yield value


def load_plugin(file: str | Path) -> ModuleType:
    """Run a Python file that registers passes, ops or kernels; once, unless it has changed.

    Raises PipelineError when there is no such file, or for an error in it, with its line.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise PipelineError(f"plugin {file}: no such file")
    name = "ktgraph_plugin_" + re.sub(r"\W", "_", str(path.with_suffix("")).lstrip("/"))
    stamp = path.stat().st_mtime_ns
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, _PLUGIN)[1] == stamp:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _PLUGIN, (str(path), stamp))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _plugin_error(str(path), error) from error
    return module


def _plugin_error(file: str, error: Exception) -> PipelineError:
    """An error in a user's file, with the line of that file that it comes from."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename == file:
        lines, text = [error.lineno], error.msg
    at = f":{lines[-1]}" if lines else ""
    return PipelineError(f"{file}{at}: {type(error).__name__}: {text}")


def loaded_plugins() -> list[str]:
    """Files that `load_plugin` has run, in order."""
    found = [vars(m).get(_PLUGIN) for m in list(sys.modules.values())]
    return [f[0] for f in found if f is not None]


def _ref_of(cls: type[Pass]) -> str:
    """A name that finds the class again in another process."""
    plugin = getattr(sys.modules.get(cls.__module__), _PLUGIN, None)
    if plugin is not None:
        return f"{plugin[0]}:{cls.name}"
    if all_passes().get(cls.name) is cls:
        return cls.name
    return f"{cls.__module__}:{cls.__qualname__}"


__all__ = [
    "Pipeline",
    "PipelineError",
    "Step",
    "load_plugin",
    "loaded_plugins",
    "parse_pipeline",
]
