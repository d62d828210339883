"""`rank_pattern` and `alpha_pattern` keys: what PEFT means by them, in bounded time.

PEFT tries the keys in file order and takes the first for which `(.*\\.)?(KEY)$` matches the
module path, as a regular expression. The keys come with the adapter, and Python's matcher can
be made to run for years, so it is never given one:

- a key of letters, digits, `_`, `-` and `.` is compared as a suffix that starts the path or
  follows a dot (`.` stands for any character, as in PEFT);
- any other key is compiled by `lorad.adapters.regex` into an automaton whose work is bounded;
  what that cannot express is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from lorad.adapters.regex import RegexUnsupported, compile_regex
from lorad.errors import LoradError

MAX_KEYS = 4096
MAX_REGEXES = 64
MAX_KEY_LENGTH = 512

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
Matcher = Callable[[str], bool]


def _plain_matcher(key: str) -> Matcher:
    def matches(path: str) -> bool:
        start = len(path) - len(key)
        if start < 0 or (start > 0 and path[start - 1] != "."):
            return False
        return path.endswith(key) or all(
            wanted in (".", found) for wanted, found in zip(key, path[start:], strict=True)
        )

    return matches


def _refusal(where: str, key: str, reason: RegexUnsupported) -> LoradError:
    return LoradError(
        "adapter.pattern_unsupported",
        f"{where}: the key {key[:80]!r} cannot be matched safely: {reason}",
        hint="write the module names out, or use only . [..] (..) | * + ? {m,n} \\d \\w ^ $",
        details={"key": where, "pattern": key[:200]},
    )


class PatternTable:
    """The values of one pattern key, by module path; `where` is its name, for messages.

    Raises `adapter.pattern_unsupported`, also from `get` (a key that takes too much work).
    """

    def __init__(self, where: str, values: Mapping[str, float]) -> None:
        self.where = where
        longest = max(map(len, values), default=0)
        regexes = sum(not _PLAIN.fullmatch(key) for key in values)
        if len(values) > MAX_KEYS or longest > MAX_KEY_LENGTH or regexes > MAX_REGEXES:
            raise LoradError(
                "adapter.pattern_unsupported",
                f"{where} is too large: {len(values)} keys (at most {MAX_KEYS}), "
                f"{regexes} of them regular expressions (at most {MAX_REGEXES}), "
                f"the longest of {longest} characters (at most {MAX_KEY_LENGTH})",
                hint="write one key for several modules, such as the leaf name alone",
                details={"key": where},
            )
        self._rules = [(key, self._matcher(key), value) for key, value in values.items()]

    def get(self, path: str) -> float | None:
        """The value of the first key that matches `path`, or None."""
        return next((value for key, m, value in self._rules if self._matches(key, m, path)), None)

    def unused(self, paths: Sequence[str]) -> list[str]:
        """The keys that match none of `paths`."""
        return [
            key
            for key, matcher, _ in self._rules
            if not any(self._matches(key, matcher, path) for path in paths)
        ]

    def _matches(self, key: str, matcher: Matcher, path: str) -> bool:
        try:
            return matcher(path)
        except RegexUnsupported as reason:
            raise _refusal(self.where, key, reason) from None

    def _matcher(self, key: str) -> Matcher:
        if _PLAIN.fullmatch(key):
            return _plain_matcher(key)
        try:
            return compile_regex(key)
        except RegexUnsupported as reason:
            raise _refusal(self.where, key, reason) from None
