"""The stages a model goes through, each an object that prints itself: Traced, Lowered, Compiled."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from ktgraph.analysis import CostAnalysis, MemoryAnalysis, cost_analysis, memory_analysis
from ktgraph.chat import Chat
from ktgraph.chat_template import chat_template
from ktgraph.cpu_kernels import NativeMissingError, load_native
from ktgraph.errors import UnsupportedInputError, is_whole, path_of
from ktgraph.explain import explain as explain_op
from ktgraph.generate import Decoder, Endings, Event, Generation, Limits, prompt_logits
from ktgraph.ir.graph import Module
from ktgraph.ir.types import StateType
from ktgraph.measured import cost_model, timeline_events
from ktgraph.model_input import ModelCard, ModelInput, is_gguf
from ktgraph.pass_api import CompileOptions, PassContext, option_fault
from ktgraph.pass_manager import PassManager, PassReport
from ktgraph.perplexity import Perplexity, perplexity
from ktgraph.placement.popularity import Popularity
from ktgraph.runtime.memory import MemoryNeed, choose_cache, memory_need
from ktgraph.runtime.packed import packed_weights, packing_nbytes, use_nbytes
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.planfile import PlanFileError, load_plan
from ktgraph.runtime.planfile_write import save_plan, write_plan
from ktgraph.runtime.runner import Runner, available_memory
from ktgraph.sampling import Sampling
from ktgraph.target import Target, check_threads, most_threads, resolve_target, with_threads
from ktgraph.timeline import lanes_html, write_chrome_trace
from ktgraph.tokenizer import Tokenizer
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.policy import Policy
from ktgraph.weights.sources import ModelSource, WeightSource

Ids = Sequence[int]
Prompt = str | Ids | Tensor
_CARD = "model.json"  # the member of a .ktplan that holds the `ModelCard`
_PLACEMENT = "placement.txt"
_PATHS = ("rules", "popularity")  # options that may be given as a Path
_CONTEXT = 4096  # rows of a sequence where the model allows more and the user says nothing


def compile_options(card: ModelCard, dtype: str, given: dict[str, Any]) -> CompileOptions:
    """What the user gave over the defaults; None means the default.  Unknown names are errors."""
    check_options(given)
    chosen = {k: str(v) if k in _PATHS else v for k, v in given.items() if v is not None}
    context = min(card.max_context or _CONTEXT, _CONTEXT)
    options = replace(CompileOptions(), **{"context": context, "dtype": dtype, **chosen})
    if card.max_context is not None and options.context > card.max_context:
        raise UnsupportedInputError(
            f"context={options.context}: {card.name} was made for {card.max_context} positions"
        )
    return options


def check_isa() -> None:
    """A KTGRAPH_ISA that is unknown, or that this CPU lacks, shows before anything runs."""
    try:
        load_native().Engine(1)
    except NativeMissingError:
        return  # lowering works without the native part, and says so where it is needed
    except (RuntimeError, ValueError) as error:
        raise UnsupportedInputError(str(error)) from None


def check_options(given: dict[str, Any]) -> None:
    """Raises UnsupportedInputError for a name that is no option, or a value that makes no sense."""
    known = sorted({f.name for f in fields(CompileOptions)} - {"dtype"})
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            raise UnsupportedInputError(f"unknown option {name!r}; {hint}")
        fault = option_fault(name, str(given[name]) if name in _PATHS else given[name])
        if fault is not None and given[name] is not None:
            raise UnsupportedInputError(fault)


class Traced:
    """The model's graph as its own code computes it: unplaced, with leading axes [b, s]."""

    def __init__(self, ir: Module, given: ModelInput, dtype: str) -> None:
        self.ir = ir
        self.given = given
        self.dtype = dtype

    def as_text(self) -> str:
        """Canonical .ktir text; `ktgraph opt` resumes from it."""
        return str(self.ir)

    __str__ = as_text

    def __repr__(self) -> str:
        return f"Traced(@{self.ir.name}, {sum(1 for _ in self.ir.walk())} ops)"

    def lower(
        self,
        target: str | Path | Target = "auto",
        pipeline: str = "default",
        *,
        validate: int | None = None,
        dump: str | Path | None = None,
        **options: Any,
    ) -> Lowered:
        """Run the passes; the traced graph itself stays as it is.

        target: "auto", "cpu", "hybrid", "cuda", a target file, its name, or a `Target`.
        pipeline: e.g. "default,-fuse-norms,+my-pass@before:place".
        validate: 0, 1 (every pass on a miniature in float64) or 2 (kernels too); None: what the
            environment's KTGRAPH_VALIDATE says.
        dump: folder for every pass's IR and reports; None: what KTGRAPH_DUMP says.
        options: fields of `CompileOptions`: quantize, max_tokens, context, max_batch, cache_rows,
            exact, defer, rules, popularity, threads, page_size.  None means the default.
        """
        chosen = compile_options(self.given.card, self.dtype, options)
        if validate not in (None, 0, 1, 2):
            raise UnsupportedInputError(f"validate={validate!r}: expected 0, 1, 2 or None")
        dump = None if dump is None else path_of("dump", dump)
        check_isa()
        if chosen.quantize is not None:
            Policy.parse(chosen.quantize)  # an unknown encoding shows before anything runs
        machine = with_threads(resolve_target(target), chosen.threads)
        context = PassContext(machine, self.source(), chosen)
        module = self.ir.clone()
        report = PassManager().run(module, pipeline, context, validate=validate, dump=dump)
        return Lowered(module, report, context, self.given.card, pipeline)

    def source(self) -> WeightSource | None:
        """Where the weights are read from."""
        return weight_source(self.given)


def weight_source(given: ModelInput) -> WeightSource | None:
    """Where the model's weights are read from; a config has none."""
    if isinstance(given.model, Path) and is_gguf(given.model):
        from ktgraph.frontends.gguf_model import open_gguf

        return open_gguf(given.model).source
    if isinstance(given.model, Path):
        from ktgraph.weights.safetensors_source import SafetensorsSource

        return SafetensorsSource(given.model)
    return ModelSource(given.model) if isinstance(given.model, nn.Module) else None


class Lowered:
    """The graph after every pass: placed, scheduled, each op with its kernel."""

    def __init__(
        self,
        module: Module,
        passes: PassReport,
        context: PassContext,
        card: ModelCard,
        pipeline: str,
    ) -> None:
        self.module = module
        self.passes = passes
        self.context = context
        self.card = card
        self.pipeline = pipeline

    def as_text(self) -> str:
        """Canonical .ktir text."""
        return str(self.module)

    __str__ = as_text

    def __repr__(self) -> str:
        return f"Lowered(@{self.module.name}, {len(self.passes.records)} passes)"

    def ir_after(self, name: str) -> Module:
        """The graph as the pass called `name` left it."""
        return self.passes.ir_after(name)

    def diff(self, name: str) -> str:
        """What the pass changed, as a unified diff of the text."""
        return self.passes.diff(name)

    def why_not(self, rule: str, layer: int | None = None) -> str:
        """Where a rule matched, and why it did not elsewhere."""
        if layer is not None and not 0 <= layer < self.layers:
            raise UnsupportedInputError(f"layer={layer}: the model has layers 0..{self.layers - 1}")
        return self.passes.why_not(rule, layer=layer)

    @property
    def layers(self) -> int:
        """Layers of the model: those its cache has rows for."""
        values = [[a.type for a in f.args] for f in self.module.functions.values()]
        states = [[t for t in types if isinstance(t, StateType)] for types in values]
        return max((sum(t.layers.const() for t in found) for found in states), default=0)

    @property
    def target(self) -> Target:
        """The machine it was lowered for."""
        assert self.context.target is not None
        return self.context.target

    @property
    def threads(self) -> int:
        """Worker threads that will run it: as asked for, else as measured for the target."""
        return self.context.options.threads or self.target.cpu_threads

    def cost_analysis(self) -> CostAnalysis:
        """FLOPs, bytes and predicted seconds: ``.at(T=1, S=4096).table()``."""
        return cost_analysis(self.module, self.target)

    def explain(self, what: str) -> str:
        """Why ``%value``, ``@weight`` or an op runs where it does, and what else was possible."""
        return explain_op(self.module, what, self.target, self.context.options, self.placement)

    @property
    def placement(self) -> str:
        """What the pass `place` reported, op by op."""
        return self.context.artifacts.get(_PLACEMENT, "")

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes by device and kind, from types alone, with a cache of the default size."""
        return memory_analysis(self.module, self.context.options)

    def memory_need(self) -> MemoryNeed:
        """Bytes that `compile` will take of this machine's memory; nothing is loaded for it."""
        plan = Plan.build(self.module)
        available = available_memory(plan)
        shape = choose_cache(plan, self.context.options, available, self.threads)
        return memory_need(plan, shape, self.threads)

    def packing(self) -> tuple[int, int]:
        """Bytes that `save` writes, and about the most memory that it takes meanwhile."""
        uses = Plan.build(self.module).loaded()
        return sum(map(use_nbytes, uses)), packing_nbytes(uses, self.threads)

    def save(self, path: str | Path) -> None:
        """Pack the weights straight into a .ktplan, which `kt.load` starts from.

        One weight after another is read, packed and written: the model need not fit into memory.
        """
        source, options = self.context.source, self.context.options
        assert source is not None
        plan = Plan.build(self.module)
        evaluator = WeightEvaluator(self.module, source, cache_nbytes=0)
        write_plan(
            path_of("path", path),
            plan,
            options,
            packed_weights(plan.loaded(), evaluator, self.threads),
            fingerprint=source.fingerprint(),
            pipeline=self.pipeline,
            target=self.target.to_toml(),
            extras=_plan_extras(self.card, self.placement),
        )

    def compile(self) -> Compiled:
        """Load and pack the weights, and make the graph ready to run.

        Raises MemoryBudgetError before anything is loaded, TargetError for more threads than CPUs,
        and errors of the checkpoint.
        Warns (FallbackWarning) when ops run on their torch reference: the step is slow then.
        """
        source, options = self.context.source, self.context.options
        if source is None:
            raise UnsupportedInputError(
                f"{self.card.name} was traced from a config, which has no weights: it can be "
                "planned, dumped and read, but not run; give a checkpoint folder or a loaded model"
            )
        check_threads(self.threads)
        if self.context.fallbacks:
            warnings.warn(fallback_text(self.context.fallbacks), FallbackWarning, stacklevel=2)
        runner = Runner.load(self.module, source, options, threads=self.threads)
        made = Provenance(self.pipeline, options, self.target, source.fingerprint(), self.placement)
        return Compiled(runner, self.card, made, self.passes)


def _plan_extras(card: ModelCard, placement: str) -> dict[str, str]:
    return {_CARD: json.dumps(card.to_json()), _PLACEMENT: placement}


class FallbackWarning(UserWarning):
    """Ops without a native kernel; the message names them, and why each kernel refused."""


def fallback_text(fallbacks: Mapping[str, Mapping[str, str]]) -> str:
    shown = [
        f"{op} ({'; '.join(f'{kernel}: {why}' for kernel, why in refused.items()) or 'no kernel'})"
        for op, refused in sorted(fallbacks.items())
    ]
    return f"these ops run on their torch reference, which is slow: {', '.join(shown)}"


@dataclass(frozen=True)
class Provenance:
    """What a compiled model was made with.

    fingerprint: of its weights.  placement: what the pass `place` reported, op by op.
    """

    pipeline: str
    options: CompileOptions
    target: Target
    fingerprint: str
    placement: str


@dataclass(frozen=True)
class _Prompts:
    """Prompts as token ids, and how they were given, which is how results are given back."""

    ids: list[list[int]]
    is_text: bool
    is_single: bool


class Compiled:
    """A model that runs.  Calls are not safe from several threads at once."""

    def __init__(
        self, runner: Runner, card: ModelCard, made: Provenance, passes: PassReport | None = None
    ) -> None:
        self.runner = runner
        self.card = card
        self.made = made
        self.passes = passes  # None: loaded from a plan
        self.limits = Limits(
            max_tokens=runner.max_tokens,
            max_batch=runner.max_batch,
            context=runner.context,
            cache_rows=runner.cache_rows,
            page_size=runner.page_size,
            vocabulary=runner.vocabulary,
            positions=card.max_context,
        )
        self._last: Generation | None = None
        runner.set_model(cost_model(runner.module, made.target))

    def __repr__(self) -> str:
        limits = self.limits
        return (
            f"Compiled({self.card.name} for {self.made.target.name}: context {limits.context}, "
            f"max_tokens {limits.max_tokens}, max_batch {limits.max_batch})"
        )

    @property
    def last(self) -> Generation:
        """Texts, ids, ends and timing of the last `generate`, also when it was interrupted."""
        if self._last is None:
            raise UnsupportedInputError("nothing was generated yet: call generate first")
        return self._last

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.card.tokenizer

    @overload
    def __call__(self, input_ids: Tensor) -> Tensor: ...
    @overload
    def __call__(self, input_ids: Sequence[Ids]) -> list[Tensor]: ...
    def __call__(self, input_ids: Tensor | Sequence[Ids]) -> Tensor | list[Tensor]:
        """Logits of every token, as the model itself gives them.

        Ids [b, s] give f32[b, s, VOC]; a list of b id lists of any lengths gives b of f32[s, VOC].
        """
        if not isinstance(input_ids, Tensor):
            is_list = isinstance(input_ids, Sequence) and not isinstance(input_ids, str)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not is_list or any(isinstance(p, (str, int)) for p in input_ids):
                raise UnsupportedInputError(
                    "a compiled model is called with token ids [b, s] or a list of id lists; "
                    "`logits` and `generate` take texts and a single list of ids as well"
                )
            lists: Any = [
                cast("Any", p).tolist() if isinstance(p, Tensor) else p for p in input_ids
            ]
            return prompt_logits(self.runner, self.limits, lists)
        if input_ids.is_floating_point() or input_ids.is_complex():
            raise UnsupportedInputError(f"input_ids are {input_ids.dtype}: expected integers")
        if input_ids.dim() != 2:
            raise UnsupportedInputError(
                f"input_ids has shape {list(input_ids.shape)}: expected [b, s]; for prompts of "
                "different lengths give a list of id lists"
            )
        prompts = cast("list[list[int]]", input_ids.tolist())  # pyright: ignore[reportUnknownMemberType]
        return torch.stack(prompt_logits(self.runner, self.limits, prompts))

    def logits(self, prompts: str | Sequence[str] | Sequence[Ids] | Ids | Tensor) -> Tensor:
        """Logits of the token after each prompt, f32[prompts, VOC]."""
        rows = prompt_logits(self.runner, self.limits, self._prompts(prompts).ids)
        return torch.stack([r[-1] for r in rows])

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        eos: int | Sequence[int] | None = None,
        stream: bool = False,
    ) -> Any:
        """Continue a prompt, or several in one ragged batch.

        prompt: a text, a list of texts, token ids, or a list of token id lists.  Texts come back
            as texts and ids as ids, one for each prompt; neither the end token nor a stop string is
            part of them.
        max_new_tokens: None goes on to the end token or until the context is full.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`; 0 is greedy.
        seed: makes draws repeatable; a prompt's draws do not depend on the others of its batch.
        stop: texts that end a sequence.
        eos: end token ids (default: those of the model's generation_config.json); () for none.
        stream: yield pieces as they come: text that never splits a character nor shows a part of a
            stop string (ids for prompts of ids), with several prompts (index, piece).

        `last` holds texts, ids, why each sequence ended and timing, also after Ctrl-C, which frees
        the cache and goes on as KeyboardInterrupt.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        endings = Endings.of(max_new_tokens, self.card.eos if eos is None else eos, stop)
        prompts = self._prompts(prompt)
        decoder = Decoder(self.runner, self.limits, self.tokenizer)
        self._last, events = decoder.start(prompts.ids, [sampling] * len(prompts.ids), endings)
        if stream:
            return _stream(events, prompts)
        for _ in events:
            pass
        found = self._last.texts if prompts.is_text else self._last.ids
        return found[0] if prompts.is_single else found

    def chat(
        self,
        system: str | None = None,
        *,
        template: str | Path | None = None,
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Chat:
        """A conversation that keeps its cache rows: ``chat.say("Hello")``, ``chat.stream(…)``.

        system: what the model is told first.  template: None for the tokenizer's own, "plain", or a
        Jinja file.  max_new_tokens: of one answer.  sampling: fields of `Sampling` over those of
        the model's generation_config.json.
        """
        found = chat_template(self.card, template)
        advised: dict[str, Any] = dict(self.card.sampling)
        how = Sampling(**{**advised, **sampling})
        return Chat(
            self.runner, self.limits, self.card, found,
            system=system, max_new_tokens=max_new_tokens, sampling=how,
        )  # fmt: skip

    def perplexity(
        self, text: str | Ids, window: int = 1023, bos: int | Literal["auto"] | None = "auto"
    ) -> Perplexity:
        """Perplexity of a text or of token ids: windows of `window` tokens, each behind `bos`.

        Every token is scored once.  bos: "auto" is the model's own begin token, None is none.
        """
        if isinstance(text, str):
            text = self.card.need_tokenizer("perplexity of a text").encode(text, special=False)
        first = self.card.bos if bos == "auto" else bos
        if not is_whole(window) or (first is not None and not is_whole(first)):
            raise UnsupportedInputError(
                f"window={window!r}, bos={bos!r}: expected a whole number, and a token id or None"
            )
        return perplexity(self.runner, self.limits, text, window=window, bos=first)

    # ---- hot experts

    @property
    def residency(self) -> dict[int, list[int]]:
        """Experts with slots on the GPU, by layer, as they are now; empty without hot experts."""
        return self.runner.residency

    def set_residency(self, layer: int, experts: Sequence[int]) -> None:
        """Let these experts of a layer live on the GPU, at most as many as it has slots.

        Between two calls, also in the middle of a streamed text: bytes of new experts are copied,
        results stay as they are but for round-off, and no CUDA graph is captured again.  `save`
        keeps the change.  Raises UnsupportedInputError.
        """
        self.runner.set_residency(layer, experts)

    def adapt_residency(self, every: int | None = 512) -> None:
        """After every so many tokens, let the experts chosen most lately take over slots.

        None ends it.  Texts may then differ in rare near-ties from those of fixed slots, where the
        CPU rounds rows (integer weights).  Raises UnsupportedInputError where no layer has slots.
        """
        self.runner.adapt_residency(every)

    def popularity(self, prompts: Any, max_new_tokens: int = 32) -> Popularity:
        """How often each expert is chosen while prompts are read and continued greedily.

        prompts: as `generate` takes them.  `Popularity.save` writes the file that the compile
        option `popularity` takes.
        """
        with self.runner.counting_experts() as counts:
            self.generate(prompts, max_new_tokens)
        return counts.popularity(self.card.name)

    # ---- what it is and costs

    @property
    def module(self) -> Module:
        """The graph that runs."""
        return self.runner.module

    def cost_analysis(self) -> CostAnalysis:
        """FLOPs, bytes and predicted seconds: ``.at(T=1, S=4096).table()``."""
        return cost_analysis(self.module, self.made.target)

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes by device and kind, with the cache as it is."""
        return memory_analysis(self.module, self.made.options, self.limits.cache_rows)

    def explain(self, what: str) -> str:
        """Why ``%value``, ``@weight`` or an op runs where it does, and what else was possible."""
        made = self.made
        return explain_op(self.module, what, made.target, made.options, made.placement)

    def timeline(self, path: str | Path, tokens: int = 32) -> None:
        """Write when each op ran, measured and as predicted, in a prefill and in a decode step.

        Of a simulated GPU, measured is the CPU's share; its own is as long as predicted.

        path: *.html is a page with lanes, anything else Chrome's trace format (also for Perfetto).
        tokens: length of the prefill.
        """
        path = path_of("path", path)
        if not path.parent.is_dir():
            raise UnsupportedInputError(f"{path}: there is no folder {path.parent}: make it first")
        if not is_whole(tokens) or tokens < 1:
            raise UnsupportedInputError(f"tokens={tokens!r}: expected a whole number above 0")
        events = timeline_events(self.runner, self.cost_analysis(), tokens)
        if path.suffix == ".html":
            path.write_text(lanes_html(self.card.name, events), encoding="utf-8")
        else:
            write_chrome_trace(path, events)

    def save(self, path: str | Path, *, weights: bool = True) -> None:
        """Write a .ktplan that `kt.load` starts from without tracing, passes or packing.

        weights: also the packed weights; without them `kt.load` needs the model and packs again.
        """
        save_plan(
            path_of("path", path),
            self.runner,
            self.made.options,
            fingerprint=self.made.fingerprint,
            pipeline=self.made.pipeline,
            target=self.made.target.to_toml(),
            extras=_plan_extras(self.card, self.made.placement),
            packed=weights,
        )

    @staticmethod
    def from_plan(path: str | Path, given: ModelInput | None, **changed: Any) -> Compiled:
        """What `kt.load` does; `changed`: compile options that differ from when it was saved.

        Raises PlanFileError.
        """
        source = weight_source(given) if given is not None else None
        file = load_plan(path, source)
        target = Target.from_toml(file.target, path=f"{path}: target.toml")
        try:
            placement = file.extras[_PLACEMENT]
            card = ModelCard.from_json(json.loads(file.extras[_CARD]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFileError(
                f"{path}: its model card or placement is damaged ({error!r}): compile the model "
                "again and save it"
            ) from error
        saved = {k: v for k, v in asdict(file.options).items() if k != "dtype"}
        options = compile_options(card, file.options.dtype, {**saved, **changed})
        file = replace(file, options=options)
        made = Provenance(file.pipeline, options, target, file.fingerprint, placement)
        threads = _threads_here(path, options.threads or target.cpu_threads)
        return Compiled(file.runner(source, threads), card, made)

    def _prompts(self, given: Any) -> _Prompts:
        plain = cast("Any", given.tolist()) if isinstance(given, Tensor) else given  # pyright: ignore[reportUnknownMemberType]
        if isinstance(plain, str):
            return _Prompts([self._encode(plain)], is_text=True, is_single=True)
        if not isinstance(plain, Sequence) or not plain:
            raise _wrong_prompt(given)
        items = cast("Sequence[Any]", plain)
        if all(isinstance(p, str) for p in items):
            return _Prompts([self._encode(p) for p in items], is_text=True, is_single=False)
        if all(isinstance(p, int) for p in items):
            return _Prompts([list(items)], is_text=False, is_single=True)
        if all(isinstance(p, Sequence) and not isinstance(p, str) for p in items):
            return _Prompts([list(p) for p in items], is_text=False, is_single=False)
        raise _wrong_prompt(given)

    def _encode(self, text: str) -> list[int]:
        return self.card.need_tokenizer("a text prompt").encode(text)


def _threads_here(path: str | Path, threads: int) -> int:
    """Of a plan made where there were more CPUs: as many as there are here, which is said."""
    most = most_threads()
    if threads > most:
        warnings.warn(
            f"{path}: made for {threads} threads, runs on the {most} there are", stacklevel=4
        )
    return min(threads, most)


def _wrong_prompt(given: object) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"prompt of type {type(given).__name__}: expected a text, a list of texts, token ids, or a "
        "list of token id lists"
    )


def _stream(events: Generator[Event], prompts: _Prompts) -> Iterator[Any]:
    with closing(events):
        for event in events:
            piece = event.piece if prompts.is_text else event.token
            if piece is not None and piece != "":
                yield piece if prompts.is_single else (event.index, piece)
