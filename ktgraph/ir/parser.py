"""The parser of `.ktir` text (grammar: docs/ir.md); errors show line, column and the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import (
    Attr,
    Block,
    Function,
    Module,
    Op,
    Operand,
    Recipe,
    Value,
    Weight,
    WeightRef,
    Witness,
)
from ktgraph.ir.lexer import ParseError, Token, parse_error, tokenize
from ktgraph.ir.types import BATCH, DTYPES, BatchType, Encoding, StateType, TensorType, Type

_Scope = dict[str, Value]
X = TypeVar("X")


def parse_module(text: str, file: str = "<text>") -> Module:
    """Parse a whole module."""
    return Parser(text, file).module()


def parse_file(path: str | Path) -> Module:
    """Parse a `.ktir` file; errors name it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise ParseError(f"{path}: not a text file ({where})") from None
    return parse_module(text, str(path))


def parse_type(text: str) -> Type:
    """Parse one type, e.g. ``f32[T, D]<bf16>@cpu``."""
    parser = Parser(text, "<type>")
    found = parser.type()
    parser.expect_end()
    return found


def parse_dim(text: str) -> Dim:
    """Parse one dim, e.g. ``H*(N+P)``."""
    parser = Parser(text, "<dim>")
    found = parser.dim()
    parser.expect_end()
    return found


class Parser:
    """A recursive-descent parser over the tokens of one text."""

    def __init__(self, text: str, file: str = "<text>") -> None:
        self.text, self.file = text, file
        self.tokens = tokenize(text, file)
        self.at = 0

    # -- tokens ---------------------------------------------------------------------------------
    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def fail(self, message: str, token: Token | None = None) -> NoReturn:
        where = token or self.token
        raise parse_error(self.text, self.file, where.line, where.column, message)

    def next(self) -> Token:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def sees(self, text: str) -> bool:
        return self.token.text == text and self.token.kind != "string"

    def take(self, text: str) -> bool:
        if not self.sees(text):
            return False
        self.next()
        return True

    def expect(self, text: str) -> Token:
        if not self.sees(text):
            self.fail(f"expected {text!r}, got {self.token.text or 'end of file'!r}")
        return self.next()

    def expect_kind(self, kind: str, what: str) -> str:
        if self.token.kind != kind:
            self.fail(f"expected {what}, got {self.token.text or 'end of file'!r}")
        return self.next().text

    def expect_end(self) -> None:
        if self.token.kind != "end":
            self.fail(f"unexpected {self.token.text!r} after the end")

    def many(self, item: Callable[[], X], end: str) -> list[X]:
        """Comma-separated items up to (and without) `end`."""
        if self.sees(end):
            return []
        items = [item()]
        while self.take(","):
            items.append(item())
        return items

    # -- small pieces ---------------------------------------------------------------------------
    def name(self) -> str:
        return self.expect_kind("name", "a name")

    def string(self) -> str:
        raw = self.expect_kind("string", "a string")[1:-1]
        return raw.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")

    def integer(self) -> int:
        negative = self.take("-")
        text = self.expect_kind("number", "an integer")
        if not text.lstrip("-").isdigit():
            self.fail(f"expected an integer, got {text!r}", self.tokens[self.at - 1])
        return -int(text) if negative else int(text)

    def span(self) -> tuple[int, int]:
        lo = self.integer()
        self.expect("..")
        return lo, self.integer()

    def device(self) -> str:
        name = self.name()
        return f"{name}:{self.integer()}" if self.take(":") else name

    def dim(self) -> Dim:
        negative = self.take("-")
        total = self._term()
        total = -total if negative else total
        while self.sees("+") or self.sees("-"):
            total = total + self._term() if self.next().text == "+" else total - self._term()
        return total

    def _term(self) -> Dim:
        product = self._factor()
        while self.take("*"):
            product = product * self._factor()
        return product

    def _factor(self) -> Dim:
        if self.take("("):
            inner = self.dim()
            self.expect(")")
            return inner
        if self.token.kind == "number":
            return Dim.of(self.integer())
        if self.token.kind == "name" and "." not in self.token.text:
            return Dim.of(self.name())
        self.fail(f"expected a dim, got {self.token.text or 'end of file'!r}")

    def attr(self) -> Attr:
        if self.token.kind == "string":
            return self.string()
        if self.take("["):
            items = self.many(self.attr, "]")
            self.expect("]")
            return tuple(items)
        if self.sees("true") or self.sees("false"):
            return self.next().text == "true"
        if self.token.kind == "number" and not self.token.text.isdigit():
            return float(self.next().text)
        if self.token.kind == "name" and self.token.text in ("inf", "nan"):
            return float(self.next().text)
        return self.dim()

    def attrs(self) -> dict[str, Attr]:
        if not self.take("{"):
            return {}
        items = self.many(self._attr_item, "}")
        self.expect("}")
        return dict(items)

    def _attr_item(self) -> tuple[str, Attr]:
        key = self.name()
        self.expect("=")
        return key, self.attr()

    # -- types ----------------------------------------------------------------------------------
    def type(self) -> Type:
        if self.take("batch"):
            return self._batch()
        if self.take("kv"):
            return self._state()
        return self.tensor()

    def _batch(self) -> BatchType:
        if not self.take("("):
            return BATCH
        window = self._window()
        self.expect(")")
        return BatchType(window=window)

    def _window(self) -> Dim:
        self.expect("window")
        self.expect("=")
        return self.dim()

    def _state(self) -> StateType:
        self.expect("(")
        items = self.many(self._state_part, ")")
        self.expect(")")
        parts = [item for item in items if isinstance(item, tuple)]
        windows = [item for item in items if isinstance(item, Dim)]
        layers = {count for count, _ in parts}
        if len(layers) != 1:
            self.fail("every part of a kv type has the same number of layers")
        if len(windows) > 1 or (windows and items[-1] is not windows[0]):
            self.fail("a kv type has one window at most, behind its parts")
        window = windows[0] if windows else None
        return StateType(layers.pop(), tuple(p for _, p in parts), self._at_device(), window)

    def _state_part(self) -> tuple[Dim, TensorType] | Dim:
        if self.sees("window"):
            return self._window()
        count = self.dim()
        self.expect("x")
        return count, self.tensor()

    def tensor(self) -> TensorType:
        dtype = self.token
        if dtype.text not in DTYPES:
            self.fail(f"expected a type ({', '.join(DTYPES)}, kv, batch), got {dtype.text!r}")
        self.next()
        self.expect("[")
        dims = tuple(self.many(self.dim, "]"))
        self.expect("]")
        encoding = self.encoding() if self.take("<") else None
        return TensorType(dtype.text, dims, encoding, self._at_device())

    def _at_device(self) -> str | None:
        if self.token.kind == "symbol":  # "@cpu" or "@cuda" ":" INT
            name = self.next().text[1:]
            return f"{name}:{self.integer()}" if self.take(":") else name
        return None

    def encoding(self) -> Encoding:
        name = self.name()
        params: list[tuple[str, int | str]] = []
        if self.take("("):
            params = self.many(self._encoding_param, ")")
            self.expect(")")
        self.expect(">")
        return Encoding(name, tuple(params))

    def _encoding_param(self) -> tuple[str, int | str]:
        key = self.name()
        self.expect("=")
        return key, self.integer() if self.token.kind == "number" else self.name()

    # -- module ---------------------------------------------------------------------------------
    def module(self) -> Module:
        if not (self.take("ktgraph.ir") and self.take("1")):
            self.fail("expected the header 'ktgraph.ir 1'")
        self.expect("module")
        module = Module(self.expect_kind("symbol", "a module name")[1:])
        if self.take("home"):
            module.home = self.device()
        while self.token.kind != "end":
            self._declaration(module)
        _resolve_recipes(module)
        return module

    def _declaration(self, module: Module) -> None:
        start = self.token
        readers = {
            "target": self._target,
            "dim": self._dims,
            "sym": self._sym,
            "device": self._device,
            "weight": self._weight,
            "witness": self._witness,
            "func": self._function,
        }
        reader = readers.get(start.text)
        if reader is None:
            self.fail(f"expected one of {', '.join(readers)}, got {start.text!r}")
        self.next()
        reader(module)

    def _target(self, module: Module) -> None:
        module.target_hash = self.string()

    def _dims(self, module: Module) -> None:
        while True:
            name = self.name()
            self.expect("=")
            module.dims[name] = self.integer()
            if not self.take(","):
                return

    def _sym(self, module: Module) -> None:
        name = self.name()
        self.expect("in")
        module.syms[name] = self.span()

    def _device(self, module: Module) -> None:
        name = self.device()
        module.devices[name] = self.attrs()

    def _witness(self, module: Module) -> None:
        bindings = {k: v.const() for k, v in self.attrs().items() if isinstance(v, Dim)}
        self.expect("=")
        self.expect("[")
        literals = self.many(self.integer, "]")
        self.expect("]")
        module.witnesses.append(Witness(bindings, literals))

    def _weight(self, module: Module) -> None:
        start = self.token
        weight = self._weight_name(self.expect_kind("symbol", "a weight name"), start)
        self.expect(":")
        weight.type = self.tensor()
        if self.take("from"):
            weight.source = self.string()
        if self.take("="):
            weight.recipe = self._recipe(module)
        if weight.name in module.weights:
            self.fail(f"weight @{weight.name} is declared twice", start)
        module.weights[weight.name] = weight

    def _weight_name(self, symbol: str, token: Token) -> Weight:
        name, unset = symbol[1:], TensorType("f32", ())
        if " in " not in name:
            return Weight(name, unset)
        head, _, rest = name.partition("[")
        index, _, tail = rest.partition("]")
        words = index.replace("..", " ").split()
        if len(words) != 4 or not (words[2].isdigit() and words[3].isdigit()):
            self.fail("a weight family is written @name[i in LO..HI].rest", token)
        return Weight(f"{head}[]{tail}", unset, var=words[0], lo=int(words[2]), hi=int(words[3]))

    def _recipe(self, module: Module) -> Recipe:
        kind = self.name()
        self.expect("(")
        args = self.many(lambda: self.weight_ref(module, declared=False), ")")
        self.expect(")")
        return Recipe(kind, tuple(args), tuple(self.attrs().items()))

    def weight_ref(self, module: Module | None, declared: bool = True) -> WeightRef:
        token = self.token
        name = self.expect_kind("symbol", "a weight (@name)")[1:]
        if "[" not in name or (module is not None and name in module.weights):
            found = WeightRef(name)
        else:
            found = self._indexed_ref(name, module, declared, token)
        if declared and module is not None and found.name not in module.weights:
            self.fail(f"{token.text} is not declared", token)
        return found

    def _indexed_ref(
        self, name: str, module: Module | None, declared: bool, token: Token
    ) -> WeightRef:
        head, _, rest = name.partition("[")
        index, _, tail = rest.partition("]")
        family = f"{head}[]{tail}"
        literal = index.isdigit()
        if literal and not declared and (module is None or family not in module.weights):
            return WeightRef(name)
        try:
            return WeightRef(family, parse_dim(index))
        except ParseError:
            self.fail(f"{token.text}: the index is not a dim", token)

    # -- functions ------------------------------------------------------------------------------
    def _function(self, module: Module) -> None:
        token = self.token
        name = self.expect_kind("symbol", "a function name")[1:]
        if name in module.functions:
            self.fail(f"function @{name} is declared twice", token)
        func = module.add_function(name)
        scope: _Scope = {}
        self.expect("(")
        for arg_name, arg_token, arg_type in self.many(self._param, ")"):
            self._define(scope, func.body.add_arg(arg_name, arg_type), arg_token)
        self.expect(")")
        func.attrs = self.attrs()
        self.expect("->")
        self.expect("(")
        types = self.many(self.type, ")")
        self.expect(")")
        self._body(module, func.body, scope, "return")
        returned = [v.type for v in func.body.returns]
        if returned != types:
            shown = ", ".join(map(str, returned))
            self.fail(f"@{name} declares other result types than it returns ({shown})", token)

    def _param(self) -> tuple[str, Token, Type]:
        token = self.token
        name = self.expect_kind("value", "a value (%name)")[1:]
        self.expect(":")
        return name, token, self.type()

    def _define(self, scope: _Scope, value: Value, token: Token) -> None:
        if value.name in scope:
            self.fail(f"%{value.name} is defined twice", token)
        scope[value.name] = value

    def _body(self, module: Module, block: Block, scope: _Scope, end: str) -> None:
        self.expect("{")
        while not self.sees(end):
            if self.token.kind != "value":
                self.fail(f"expected an op or {end!r}, got {self.token.text or 'end of file'!r}")
            block.append(self.op(module, scope))
        self.expect(end)
        block.set_returns(self.many(lambda: self._use(scope), "}"))
        self.expect("}")

    def _use(self, scope: _Scope) -> Value:
        token = self.token
        name = self.expect_kind("value", "a value (%name)")[1:]
        if name not in scope:
            self.fail(f"%{name} is not defined here", token)
        return scope[name]

    def op(self, module: Module, scope: _Scope) -> Op:
        """One op line (or a `repeat` with its body)."""
        start = self.token
        tokens: list[Token] = []
        while True:
            tokens.append(self.token)
            self.expect_kind("value", "a value (%name)")
            if not self.take(","):
                break
        self.expect("=")
        names = [t.text[1:] for t in tokens]
        op = (
            self._repeat(module, scope, names, start)
            if self.sees("repeat")
            else self._plain_op(module, scope, names, start)
        )
        op.line = start.line
        for value, token in zip(op.results, tokens, strict=True):
            self._define(scope, value, token)
        return op

    def _plain_op(self, module: Module, scope: _Scope, names: list[str], start: Token) -> Op:
        name = self.name()
        operands: list[Operand] = []
        if self.token.kind in ("value", "symbol") or self.sees("_"):
            operands = self.many(lambda: self._operand(module, scope), "{")
        attrs = self.attrs()
        types = self._result_types(names, start)
        via = self.name() if self.take("via") else None
        loc = self.string() if self.take("loc") else None
        results = list(zip(names, types, strict=True))
        return Op(name, operands, results, attrs, via=via, loc=loc)

    def _operand(self, module: Module, scope: _Scope) -> Operand:
        if self.take("_"):
            return None
        if self.token.kind == "symbol":
            return self.weight_ref(module)
        return self._use(scope)

    def _result_types(self, names: list[str], start: Token) -> list[Type]:
        self.expect(":")
        types = [self.type()]
        while self.take(","):
            types.append(self.type())
        if len(types) != len(names):
            self.fail(f"{len(names)} results, but {len(types)} types", start)
        return types

    def _repeat(self, module: Module, scope: _Scope, names: list[str], start: Token) -> Op:
        self.expect("repeat")
        index = self.name()
        self.expect("in")
        lo, hi = self.span()
        self.expect("(")
        carried = self.many(lambda: self._carried(scope), ")")
        self.expect(")")
        attrs = self.attrs() if self._sees_attrs() else {}
        body = Block()
        inner = dict(scope)
        for name, token, initial in carried:
            self._define(inner, body.add_arg(name, initial.type), token)
        self._body(module, body, inner, "yield")
        for name in inner.keys() - scope.keys():
            if name in names:
                self.fail(f"%{name} is defined twice", start)
        types = self._result_types(names, start)
        return Op(
            "repeat",
            [initial for _, _, initial in carried],
            list(zip(names, types, strict=True)),
            {"index": index, "lo": lo, "hi": hi, **attrs},
            body=body,
        )

    def _sees_attrs(self) -> bool:
        """Whether "{" opens attributes (a name follows) and not a body (a value or `yield`)."""
        following = self.tokens[self.at + 1 : self.at + 3]
        return len(following) == 2 and following[0].kind == "name" and following[1].text == "="

    def _carried(self, scope: _Scope) -> tuple[str, Token, Value]:
        token = self.token
        name = self.expect_kind("value", "a value (%name)")[1:]
        self.expect("=")
        return name, token, self._use(scope)


def _resolve_recipes(module: Module) -> None:
    """Recipes may name weights declared later: point literal indices at their families."""
    for weight in module.weights.values():
        if weight.recipe is not None:
            args = tuple(_resolve(module, ref) for ref in weight.recipe.args)
            weight.recipe = replace(weight.recipe, args=args)


def _resolve(module: Module, ref: WeightRef) -> WeightRef:
    if ref.index is not None or ref.name in module.weights or "[" not in ref.name:
        return ref
    head, _, rest = ref.name.partition("[")
    index, _, tail = rest.partition("]")
    return WeightRef(f"{head}[]{tail}", Dim.of(int(index)))


__all__ = [
    "Function",
    "ParseError",
    "Parser",
    "parse_dim",
    "parse_file",
    "parse_module",
    "parse_type",
]
