"""`ktgraph chat`: talk with a model, with its own chat template.

Answers stream to stdout, everything else goes to stderr.  Ctrl-C stops an answer, Ctrl-D or /quit
ends the chat.  From a pipe every line is a message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktgraph.cli.model_arguments import add_model_arguments, open_model, say
from ktgraph.errors import KtgraphError
from ktgraph.packed_folder import plan_in

if TYPE_CHECKING:
    from ktgraph.chat import Chat

_COMMANDS = "/reset begins anew, /quit ends, Ctrl-C stops an answer; \\ at a line's end goes on"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def add_parser(commands: Any) -> None:
    """Add `chat` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat", help="talk with a model", description=__doc__
    )
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--template", metavar="plain|FILE", help="default: the tokenizer's own chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer")
    own = "default: as the model's generation_config.json says"
    parser.add_argument("--temperature", type=float, help=f"0 is greedy; {own}")
    parser.add_argument("--top-k", type=int, help=own)
    parser.add_argument("--top-p", type=float, help=own)
    parser.add_argument("--min-p", type=float, help=own)
    parser.add_argument("--repetition-penalty", type=float, help=own)
    parser.add_argument("--seed", type=int)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command; from a pipe the exit code is 1 when a message could not be answered."""
    given = {name: getattr(args, name) for name in _SAMPLING}
    sampling = {name: value for name, value in given.items() if value is not None}
    _check(args, sampling)
    exe, _ = open_model(args)
    chat = exe.chat(
        args.system, template=args.template, max_new_tokens=args.max_new_tokens, **sampling
    )
    is_live = sys.stdin.isatty()
    if is_live:
        say(_COMMANDS)
    failed = False
    for message in _messages(is_live):
        if message == "/quit":
            break
        failed = not _turn(chat, message) or failed
    return int(failed and not is_live)


def _check(args: argparse.Namespace, sampling: dict[str, Any]) -> None:
    """What makes no sense shows before the model is traced and loaded."""
    from ktgraph.chat_template import chat_template
    from ktgraph.generate import Endings
    from ktgraph.model_input import read_model
    from ktgraph.sampling import Sampling

    Sampling(**sampling)
    Endings(args.max_new_tokens)
    if plan_in(args.model) is None:
        chat_template(read_model(args.model, args.tokenizer).card, args.template)
        args.max_batch = args.max_batch or 1  # the cache holds this one conversation


def _messages(is_live: bool) -> Iterator[str]:
    """Lines of stdin to its end; one that ends in a backslash goes on in the next."""
    if is_live:
        import_module("readline")  # gives `input` its history and line editing
    while True:
        try:
            line = _line("> ", is_live)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + _line(". ", is_live)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_live:
                raise
            say("\n(/quit or Ctrl-D ends the chat)")
            continue
        if line.strip():
            yield line.strip()


def _line(prompt: str, is_live: bool) -> str:
    if is_live:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _turn(chat: Chat, message: str) -> bool:
    """One message, or a command; False when it could not be answered."""
    if message == "/reset":
        chat.reset()
        say("(begun anew)")
        return True
    if message == "/help":
        say(_COMMANDS)
        return True
    if message.startswith("/"):
        say(f"{message.split()[0]} is no command: {_COMMANDS}")
        return False
    try:
        _answer(chat, message)
    except KtgraphError as error:
        say(f"ktgraph chat: {error}")
        return False
    return True


def _answer(chat: Chat, message: str) -> None:
    pieces = chat.stream(message)
    try:
        with closing(pieces):
            for number, piece in enumerate(pieces):
                if number == 0 and chat.dropped:
                    say(f"(the context is full: {chat.dropped} oldest exchange(s) left out)")
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # the answer stays as far as it got
    print(flush=True)
    say(_summary(chat))


def _summary(chat: Chat) -> str:
    if chat.last is None:
        return "[stopped before it began]"
    answer, timing = chat.last.continuations[0], chat.last.timing
    ends = {
        "interrupted": "stopped; ",
        "length": "cut at --max-new-tokens; ",
        "context": f"cut at the context's {chat.limits.rows} tokens, which --context sets; ",
    }
    old = len(answer.prompt) - timing.prefill_tokens
    return f"[{ends.get(answer.finish or '', '')}{timing}; {old} tokens of before kept]"
