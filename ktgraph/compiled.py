"""The last stage: `Compiled`, a model that runs, from `Lowered.compile` or a saved plan."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from ktgraph.analysis import CostAnalysis, MemoryAnalysis, cost_analysis, memory_analysis
from ktgraph.chat import Chat
from ktgraph.chat_template import chat_template
from ktgraph.compile_options import compile_options
from ktgraph.errors import UnsupportedInputError, is_whole, path_of
from ktgraph.explain import explain as explain_op
from ktgraph.generate import Decoder, Endings, Generation, Limits, prompt_logits
from ktgraph.ir.graph import Module
from ktgraph.measured import cost_model, timeline_events
from ktgraph.model_input import ModelCard, ModelInput, weight_source
from ktgraph.pass_api import CompileOptions
from ktgraph.pass_manager import PassReport
from ktgraph.perplexity import Perplexity, perplexity
from ktgraph.placement.popularity import Popularity
from ktgraph.prompts import pieces, read_prompts
from ktgraph.runtime.planfile import PlanFileError, load_plan
from ktgraph.runtime.planfile_write import save_plan
from ktgraph.runtime.runner import Runner
from ktgraph.sampling import Sampling
from ktgraph.target import Target, most_threads
from ktgraph.timeline import lanes_html, write_chrome_trace
from ktgraph.tokenizer import Tokenizer

Ids = Sequence[int]
_CARD = "model.json"  # the member of a .ktplan that holds the `ModelCard`
PLACEMENT = "placement.txt"  # likewise, of what the pass `place` reported


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
        rows = prompt_logits(self.runner, self.limits, read_prompts(prompts, self.card).ids)
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
        prompts = read_prompts(prompt, self.card)
        decoder = Decoder(self.runner, self.limits, self.tokenizer)
        self._last, events = decoder.start(prompts.ids, [sampling] * len(prompts.ids), endings)
        if stream:
            return pieces(events, prompts)
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
        """Experts with slots on the GPU, by layer, changes under way included; empty without."""
        return self.runner.residency

    def set_residency(self, layer: int, experts: Sequence[int]) -> None:
        """Let these experts of a layer live on the GPU, at most as many as it has slots.

        Between two calls, also in the middle of a streamed text: bytes of new experts are copied
        behind the next call and used from the one after it.  Results stay as they are but for
        round-off, and no CUDA graph is captured again.  `save` keeps the change.  Raises
        UnsupportedInputError.
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
            extras=plan_extras(self.card, self.made.placement),
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
            placement = file.extras[PLACEMENT]
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


def plan_extras(card: ModelCard, placement: str) -> dict[str, str]:
    """Members of a .ktplan that `Compiled.from_plan` reads back."""
    return {_CARD: json.dumps(card.to_json()), PLACEMENT: placement}


def _threads_here(path: str | Path, threads: int) -> int:
    """Of a plan made where there were more CPUs: as many as there are here, which is said."""
    most = most_threads()
    if threads > most:
        warnings.warn(
            f"{path}: made for {threads} threads, runs on the {most} there are", stacklevel=4
        )
    return min(threads, most)


__all__ = ["PLACEMENT", "Compiled", "Provenance", "plan_extras"]
