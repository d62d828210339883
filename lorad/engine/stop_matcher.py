"""Finds stop strings in a text that comes in pieces."""

from __future__ import annotations


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`: its longest proper prefix that is also its suffix."""
    table, length = [0] * len(pattern), 0
    for place in range(1, len(pattern)):
        while length and pattern[place] != pattern[length]:
            length = table[length - 1]
        if pattern[place] == pattern[length]:
            length += 1
        table[place] = length
    return table


class StopMatcher:
    """Knuth-Morris-Pratt over several patterns: each character is looked at once.

    Text that may be the beginning of a stop string is held back. The first stop string to be
    complete wins; of two that end together, the one that began earlier.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        if "" in stop:
            raise ValueError("an empty stop string would end every text at once")
        self._patterns = [(pattern, _failure_table(pattern)) for pattern in stop]
        self._matched = [0] * len(stop)  # characters of each pattern that the text ends with
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is now safe to show; "" after a match."""
        if not self._patterns:
            return text
        if self.stopped is not None:
            return ""
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self.stopped = self._advance(char)
            if self.stopped is not None:
                self._held = ""
                return pending[: end - len(self.stopped)]
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        complete = ""
        for index, (pattern, table) in enumerate(self._patterns):
            length = self._matched[index]
            while length and pattern[length] != char:
                length = table[length - 1]
            if pattern[length] == char:
                length += 1
            self._matched[index] = length
            if length == len(pattern) and length > len(complete):
                complete = pattern
        return complete or None
