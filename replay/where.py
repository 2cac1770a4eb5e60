"""`--where EXPR`: a condition over the fields of an event, or of a row of an export.

    reward > 0.5 and not (finish_reason in ["length", "environment"])
    type == "batch_cut" and "0-17" in groups.group_id
    len(response_ids) >= 512 or prompt =~ "^reverse "

    condition   one of: `not` condition · condition `and` condition · condition `or` condition · (condition) ·
                value OP value · value
    OP          ==  !=  <  <=  >  >=  =~ (regular expression, anywhere in the text)  in  not in
    value       number · 'text' or "text" · true · false · null · [value, …] · len(value) · field
    field       name, name.inner, name.0, name["any key"]; through a list: the list of what its items hold

A missing field is null, and null compares false with everything, so `x != 1` wants an x; `x == null` asks whether
it is missing. Values of different kinds are unequal and have no order. Nothing is evaluated by Python: an expression
cannot do more than compare.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from replay import fields
from replay.fields import PLACE_NAMES, WITHOUT_EVENT
from replay.records import Entry
from streams.errors import ConfigError

Path = tuple[str, ...]
Lookup = Callable[[Path], Any]
Run = Callable[[Lookup], Any]


class Field(NamedTuple):
    """A field as the expression names it."""

    path: Path
    place: int  # of its first character


class Where(NamedTuple):
    """A condition. Make it with `parse_where`."""

    text: str
    fields: tuple[Field, ...]  # in the order of the expression
    run: Run

    def matches(self, entry: Entry) -> bool:
        return bool(self.run(lambda path: fields.value_at(entry, path)))

    def matches_row(self, row: Mapping[str, Any]) -> bool:
        """As `matches`, over a row. A key that holds dots is found by its whole name."""
        return bool(self.run(lambda path: _in_row(row, path)))

    @property
    def needs_event(self) -> bool:
        """Whether a record must be decoded, or its place and its headers say enough."""
        return any(field.path[0] not in WITHOUT_EVENT for field in self.fields)

    def check(self, known: Collection[str], of: str) -> None:
        """Raise ConfigError for a name that is not among `known`, the fields of `of`: it would match nothing."""
        for field in self.fields:
            name = field.path[0]
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
                _refuse(self.text, field.place, f"no field {name!r} in {of}; {hint}")


def parse_where(text: str) -> Where:
    """Raises ConfigError, which names the place.

    >>> where = parse_where("reward > 0.5 and metadata.level in ['easy', 'hard']")
    >>> where.matches_row({"reward": 1.0, "metadata": {"level": "hard"}})
    True
    >>> where.matches_row({"reward": 1.0})
    False
    """
    return _Parser(text).whole()


def names_of(kinds: Iterable[type]) -> set[str]:
    """First names that `Where.matches` knows for entries with these events."""
    return {name for kind in kinds for name in kind.__struct_fields__} | set(PLACE_NAMES)


def _in_row(row: Mapping[str, Any], path: Path) -> Any:
    for end in range(len(path), 0, -1):
        name = ".".join(path[:end])
        if name in row:
            return fields.inside(row[name], path[end:])
    return None


def _refuse(text: str, place: int, what: str) -> NoReturn:
    raise ConfigError(f"--where {text!r}, character {place + 1}: {what}")


# ---------------------------------------------------------------- what it is made of
class _Token(NamedTuple):
    kind: str
    text: str
    place: int


class _Node(NamedTuple):
    run: Run
    place: int
    is_literal: bool = False
    value: Any = None  # of a literal


_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[^\W\d]\w*(?:\.\w+)*)"
    r"|(?P<sign>==|!=|<=|>=|=~|[<>()\[\],])"
)
_LITERALS = {"true": True, "false": False, "null": None}
_WORDS = {"and", "or", "not", "in", "len"} | set(_LITERALS)
_HINTS = {
    "=": "write == to compare",
    "&": "write and",
    "|": "write or",
    "!": "write not, or != to compare",
}
_MOST_NESTING = 50


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if text[at] in "'\"":
                _refuse(text, at, "this text has no end")
            hint = _HINTS.get(text[at])
            _refuse(text, at, f"{text[at]!r} has no meaning here" + (f"; {hint}" if hint else ""))
        kind = match.lastgroup or ""
        if kind == "name" and match.group() in _WORDS:
            kind = "word"
        if kind != "space":
            found.append(_Token(kind, match.group(), at))
        at = match.end()
    return [*found, _Token("end", "", len(text))]


def _unquoted(token: _Token) -> str:
    r"""The text of a string: \' \" \\ stand for the sign; any other backslash stays, so that '\d' is one for =~."""
    return re.sub(r"\\(['\"\\])", r"\1", token.text[1:-1])


class _Parser:
    """One function per rule of the grammar, loosest binding first."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, self._at = text, _tokens(text), 0
        self._fields: list[Field] = []
        self._check_nesting()

    def whole(self) -> Where:
        if self._next.kind == "end":
            _refuse(self._text, 0, "the condition is empty")
        node = self._either()
        if self._next.kind != "end":
            self._unexpected("and, or, or the end")
        return Where(self._text, tuple(self._fields), node.run)

    def _either(self) -> _Node:
        node = self._both()
        while self._takes("or"):
            node = _Node(_either(node.run, self._both().run), node.place)
        return node

    def _both(self) -> _Node:
        node = self._inverted()
        while self._takes("and"):
            node = _Node(_both(node.run, self._inverted().run), node.place)
        return node

    def _inverted(self) -> _Node:
        place, is_inverted = self._next.place, False
        while self._takes("not"):
            is_inverted = not is_inverted
        node = self._comparison()
        return _Node(_inverted(node.run), place) if is_inverted else node

    def _comparison(self) -> _Node:
        left = self._value()
        token = self._next
        name = self._operator()
        if name is None:
            return left
        right = self._value()
        if self._operator() is not None:
            _refuse(self._text, token.place, "two comparisons in a row; write a < x and x < b")
        return _Node(self._compared(name, token, left, right), left.place)

    def _operator(self) -> str | None:
        for name in (*_ORDERS, "==", "!=", "=~", "in"):
            if self._takes(name):
                return name
        after = self._tokens[min(self._at + 1, len(self._tokens) - 1)]
        if self._next.text == "not" and after.text == "in":
            self._at += 2
            return "not in"
        return None

    def _compared(self, name: str, token: _Token, left: _Node, right: _Node) -> Run:
        for side, other in ((left, right), (right, left)):
            if side.is_literal and side.value is None:
                if name not in ("==", "!="):
                    _refuse(self._text, token.place, f"null is only compared with == and !=, not with {name}")
                return _is_missing(other.run) if name == "==" else _inverted(_is_missing(other.run))
        if name == "=~":
            return _found(self._pattern(right), left.run)
        if name in ("in", "not in"):
            if right.is_literal and not isinstance(right.value, (list, str)):
                _refuse(self._text, right.place, f"{name} wants a list, a text or a field on its right")
            return _member(left.run, right.run, name == "in")
        return _compared(_OPERATORS[name], left.run, right.run)

    def _pattern(self, node: _Node) -> re.Pattern[str]:
        if not node.is_literal or not isinstance(node.value, str):
            _refuse(self._text, node.place, "=~ wants a text, the regular expression, on its right")
        try:
            return re.compile(node.value)
        except re.error as error:
            _refuse(self._text, node.place, f"not a regular expression: {error}")

    def _value(self) -> _Node:
        token = self._next
        if token.kind in ("number", "string") or token.text in _LITERALS or token.text == "[":
            value = self._literal()
            return _Node(lambda lookup: value, token.place, True, value)
        if self._takes("len"):
            self._expects("(")
            inner = self._value()
            self._expects(")")
            return _Node(_length(inner.run), token.place)
        if self._takes("("):
            node = self._either()
            self._expects(")")
            return node
        if token.kind == "name":
            return self._field()
        self._unexpected("a value")

    def _literal(self) -> Any:
        token = self._next
        self._at += 1
        if token.kind == "number":
            return float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        if token.kind == "string":
            return _unquoted(token)
        if token.text in _LITERALS:
            return _LITERALS[token.text]
        if token.text != "[":
            self._at -= 1
            self._unexpected("a number, a text, true, false or null")
        items: list[Any] = []
        while not self._takes("]"):
            if items:
                self._expects(",")
            items.append(self._literal())
        return items

    def _field(self) -> _Node:
        token = self._next
        self._at += 1
        path = tuple(token.text.split("."))
        while self._takes("["):
            key = self._next
            if key.kind != "string" and not key.text.isdecimal():
                self._unexpected("a text or a number, as in metadata['level']")
            self._at += 1
            self._expects("]")
            path += (_unquoted(key) if key.kind == "string" else key.text,)
        self._fields.append(Field(path, token.place))
        return _Node(lambda lookup: lookup(path), token.place)

    # -- tokens
    def _check_nesting(self) -> None:
        """Every rule that calls itself does so within brackets."""
        depth = 0
        for token in self._tokens:
            if token.kind == "sign":
                depth += (token.text in "([") - (token.text in ")]")
            if depth > _MOST_NESTING:
                _refuse(self._text, token.place, f"more than {_MOST_NESTING} brackets within one another")

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _takes(self, text: str) -> bool:
        if self._next.text != text or self._next.kind not in ("sign", "word"):
            return False
        self._at += 1
        return True

    def _expects(self, text: str) -> None:
        if not self._takes(text):
            self._unexpected(repr(text))

    def _unexpected(self, wanted: str) -> NoReturn:
        came = repr(self._next.text) if self._next.text else "the end"
        _refuse(self._text, self._next.place, f"needed {wanted}, got {came}")


# ---------------------------------------------------------------- what it does
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {**_ORDERS, "==": operator.eq, "!=": operator.ne}


def _either(left: Run, right: Run) -> Run:
    return lambda lookup: bool(left(lookup)) or bool(right(lookup))


def _both(left: Run, right: Run) -> Run:
    return lambda lookup: bool(left(lookup)) and bool(right(lookup))


def _inverted(inner: Run) -> Run:
    return lambda lookup: not inner(lookup)


def _is_missing(inner: Run) -> Run:
    return lambda lookup: inner(lookup) is None


def _compared(compare: Callable[[Any, Any], Any], left: Run, right: Run) -> Run:
    def run(lookup: Lookup) -> bool:
        one, other = _plain(left(lookup)), _plain(right(lookup))
        if one is None or other is None:
            return False
        try:
            return bool(compare(one, other))
        except TypeError:  # a text and a number have no order
            return False

    return run


def _member(inner: Run, container: Run, wanted: bool) -> Run:
    def run(lookup: Lookup) -> bool:
        item, among = _plain(inner(lookup)), _plain(container(lookup))
        if item is None or among is None:
            return False
        try:
            return (item in among) == wanted
        except TypeError:  # a number in a text, anything in a number
            return False

    return run


def _found(pattern: re.Pattern[str], inner: Run) -> Run:
    def run(lookup: Lookup) -> bool:
        text = _plain(inner(lookup))
        return isinstance(text, str) and pattern.search(text) is not None

    return run


def _length(inner: Run) -> Run:
    def run(lookup: Lookup) -> int | None:
        value = inner(lookup)
        return len(value) if hasattr(value, "__len__") else None

    return run


def _plain(value: Any) -> Any:
    """Bytes as text and tuples as lists, so that they equal what an expression can write."""
    if isinstance(value, bytes):
        return fields.text_of(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], tuple):
        return [_plain(item) for item in value]
    return value
