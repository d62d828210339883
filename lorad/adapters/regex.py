"""A regular expression that cannot run away: parsed here, matched by a set of states.

Python's `re` backtracks, so `(a+)+$` takes exponential time. This automaton (Thompson's
construction) keeps every state it could be in and reads each character once, so its work is at
most states x length of the text, whatever the expression is. It answers only "does it
match", so greedy and lazy quantifiers are the same to it.

Syntax: literals, `.`, `[..]`, `( )`, `(?: )`, `|`, `* + ? {m} {m,} {m,n}` with an optional lazy
`?`, `^`, `$`, `\\A`, `\\Z`, `\\d \\D \\w \\W \\s \\S`, and an escaped punctuation mark. All else
(look-around, back-references, flags, possessive quantifiers, ...) raises RegexUnsupported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_STATES = 500
MAX_WORK = 100_000
MAX_REPEAT = 200
MAX_DEPTH = 20


class RegexUnsupported(ValueError):
    """The expression uses what this matcher does not know, or is too large for it."""


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character out of a set, or out of its complement."""

    chars: frozenset[str]
    negated: bool = False

    def accepts(self, char: str) -> bool:
        return (char in self.chars) != self.negated


@dataclass(frozen=True, slots=True)
class _Start:
    """`^`: the text begins here."""


@dataclass(frozen=True, slots=True)
class _End:
    """`$`: the text ends here."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    options: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node = _Chars | _Start | _End | _Sequence | _Either | _Repeat

_ASCII = [chr(code) for code in range(128)]
_CLASSES = {
    kind: frozenset(char for char in _ASCII if re.match(rf"\{kind}", char)) for kind in "dws"
}
_ANY = _Chars(frozenset("\n"), negated=True)
_REPEAT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")


class _Parser:
    """Recursive descent over the expression; `at` is the next character to read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def parse(self) -> _Node:
        node = self._either(0)
        if self.at != len(self.text):
            raise RegexUnsupported("an unmatched closing parenthesis")
        return node

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise RegexUnsupported("it ends in the middle of an expression")
        self.at += 1
        return char

    def _either(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise RegexUnsupported(f"groups nested more than {MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else _Either(tuple(options))

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return _Sequence(tuple(parts))

    def _atom(self, depth: int) -> _Node:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._set()
        if char == "\\":
            return self._escape()
        if char in "*+?{}":
            raise RegexUnsupported(f"a {char!r} that repeats nothing")
        special: dict[str, _Node] = {".": _ANY, "^": _Start(), "$": _End()}
        return special.get(char) or _Chars(frozenset(char))

    def _group(self, depth: int) -> _Node:
        if self._peek() == "?":
            self.at += 1
            if self._take() != ":":
                raise RegexUnsupported("a group that begins with (? and is not (?: )")
        node = self._either(depth + 1)
        if self._peek() != ")":
            raise RegexUnsupported("an unmatched opening parenthesis")
        self.at += 1
        return node

    def _escape(self) -> _Node:
        char = self._take()
        if char in ("A", "Z"):
            return _Start() if char == "A" else _End()
        return self._escaped_set(char)

    def _escaped_set(self, char: str) -> _Chars:
        if char.lower() in _CLASSES:
            return _Chars(_CLASSES[char.lower()], negated=char.isupper())
        if char.isalnum() or not char.isascii():
            raise RegexUnsupported(f"the escape \\{char}")
        return _Chars(frozenset(char))

    def _set(self) -> _Chars:
        negated = self._peek() == "^"
        self.at += negated
        chars: set[str] = set()
        first = True
        while first or self._peek() != "]":
            chars |= self._set_member()
            first = False
        self.at += 1
        return _Chars(frozenset(chars), negated)

    def _set_member(self) -> set[str]:
        low = self._set_char()
        if not isinstance(low, str):
            return set(low.chars)
        if self._peek() != "-" or self.text[self.at + 1 : self.at + 2] in ("]", ""):
            return {low}
        self.at += 1
        high = self._set_char()
        if not isinstance(high, str) or high < low:
            raise RegexUnsupported("a range in [..] that is not low-high")
        return {char for char in _ASCII if low <= char <= high}

    def _set_char(self) -> str | _Chars:
        char = self._take()
        if char == "\\":
            found = self._escaped_set(self._take())
            if found.negated:
                raise RegexUnsupported("a negated class inside [..]")
            return next(iter(found.chars)) if len(found.chars) == 1 else found
        if char == "[" or not char.isascii() or (char in "&|~-" and self._peek() == char):
            raise RegexUnsupported(f"{char!r} inside [..]")
        return char

    def _repeated(self, atom: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, _Start | _End):
            raise RegexUnsupported("a repeated anchor")
        if self._peek() == "?":  # lazy: the same question, asked in another order
            self.at += 1
        if self._peek() and self._peek() in "*+?{":
            raise RegexUnsupported("a quantifier on a quantifier")
        return _Repeat(atom, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char and char in "*+?":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        match = _REPEAT.match(self.text, self.at)
        if match is None or match.group(0) in ("{}", "{,}"):
            raise RegexUnsupported("a '{' that is not a repeat count")
        self.at = match.end()
        least = int(match.group(1) or 0)
        most = int(match.group(3)) if match.group(3) else (None if match.group(2) else least)
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise RegexUnsupported(f"a repeat count above {MAX_REPEAT}, or high before low")
        return least, most


_Step = _Chars | _Start | _End | None  # None: a free move


class _Automaton:
    """States and their moves. State 0 is where a match begins, `final` where it ends."""

    def __init__(self, node: _Node) -> None:
        self.moves: list[list[tuple[_Step, int]]] = [[]]
        self._nodes = 0
        self.final = self._add(node, 0)

    def _state(self) -> int:
        if len(self.moves) >= MAX_STATES:
            raise RegexUnsupported(f"it needs more than {MAX_STATES} states")
        self.moves.append([])
        return len(self.moves) - 1

    def _join(self, start: int, step: _Step, end: int | None = None) -> int:
        end = self._state() if end is None else end
        self.moves[start].append((step, end))
        return end

    def _add(self, node: _Node, start: int) -> int:
        """Add what leads from `start` through `node`; returns the state behind it."""
        self._nodes += 1  # a repeated empty group adds no state, so states alone do not bound it
        if self._nodes > 4 * MAX_STATES:
            raise RegexUnsupported("it is too large when its repeats are written out")
        match node:
            case _Sequence(parts):
                for part in parts:
                    start = self._add(part, start)
                return start
            case _Either(options):
                end = self._state()
                for option in options:
                    self._join(self._add(option, self._join(start, None)), None, end)
                return end
            case _Repeat():
                return self._add_repeat(node, start)
            case _:
                return self._join(start, node)

    def _add_repeat(self, node: _Repeat, start: int) -> int:
        for _ in range(node.least):
            start = self._add(node.part, start)
        if node.most is None:
            loop = self._join(start, None)
            self._join(self._add(node.part, loop), None, loop)
            return self._join(loop, None)
        end = self._state()
        self._join(start, None, end)
        for _ in range(node.most - node.least):
            start = self._add(node.part, start)
            self._join(start, None, end)
        return end

    def closure(self, states: Iterable[int], *, at_start: bool, at_end: bool) -> frozenset[int]:
        """`states` and all that is reached from them without reading a character."""
        reached, todo = set(states), list(states)
        while todo:
            for step, target in self.moves[todo.pop()]:
                free = (
                    step is None
                    or (at_start and isinstance(step, _Start))
                    or (at_end and isinstance(step, _End))
                )
                if free and target not in reached:
                    reached.add(target)
                    todo.append(target)
        return frozenset(reached)

    def read(self, states: Iterable[int], char: str) -> set[int]:
        """Where the states lead on one character, before free moves."""
        return {
            target
            for state in states
            for step, target in self.moves[state]
            if isinstance(step, _Chars) and step.accepts(char)
        }


class _PathMatcher:
    """Runs an automaton from the start of a path and from behind each of its dots, at once.

    The sets met on the way are kept: paths of one model differ in a few characters, so after the
    first of them a step is one look-up.
    """

    def __init__(self, automaton: _Automaton) -> None:
        self._automaton = automaton
        self._first = automaton.closure({0}, at_start=True, at_end=False)
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._work = 0

    def __call__(self, path: str) -> bool:
        states = self._first
        for char in path:
            known = self._known.get((states, char))
            states = self._next(states, char) if known is None else known
        at_end = self._automaton.closure(states, at_start=not path, at_end=True)
        return self._automaton.final in at_end

    def _next(self, states: frozenset[int], char: str) -> frozenset[int]:
        self._work += len(states) + 1
        if self._work > MAX_WORK:
            raise RegexUnsupported("matching it takes too long")
        moved = self._automaton.read(states, char)
        if char == ".":
            moved.add(0)
        reached = self._automaton.closure(moved, at_start=False, at_end=False)
        self._known[states, char] = reached
        return reached


def compile_regex(expression: str) -> Callable[[str], bool]:
    """A matcher equal to `re.match(r"(.*\\.)?(EXPRESSION)$", path)` for one line of ASCII.

    Raises RegexUnsupported here, and when matching has taken MAX_WORK steps over all paths.
    """
    return _PathMatcher(_Automaton(_Parser(expression).parse()))
