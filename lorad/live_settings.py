"""The settings of a running daemon, and how SIGHUP changes those that can change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from lorad.config import SETTINGS, Config, reloaded
from lorad.errors import LoradError
from lorad.log import set_up_logging
from lorad.server.auth import ApiKeys, read_api_keys

log = logging.getLogger(__name__)


class LiveSettings:
    """`config` is what holds now; a reload puts another in its place."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        """`read` merges the sources again. Raises LoradError when the keys cannot be read."""
        self.config = config
        self.api_keys = ApiKeys(_keys(config))
        self._read = read
        self._followers: list[Callable[[Config], None]] = []

    def follow(self, follower: Callable[[Config], None]) -> None:
        """Call this with the settings after each change."""
        self._followers.append(follower)

    def reload(self) -> None:
        """Take over what can change while the daemon runs, and log what cannot.

        A source that is wrong anywhere changes nothing at all.
        """
        try:
            wanted = self._read()
            keys = _keys(wanted)
        except LoradError as error:
            hint = f" ({error.hint})" if error.hint else ""
            log.error(
                "reload: all settings stay as they are: %s%s [%s]", error.message, hint, error.code
            )
            return
        before, self.config = self.config, reloaded(self.config, wanted)
        set_up_logging(self.config.log.level)
        added, removed = self.api_keys.replace(keys)
        for follower in self._followers:
            follower(self.config)
        _tell(before, self.config, wanted, added, removed)


def _keys(config: Config) -> dict[str, str]:
    file = config.server.api_keys
    return read_api_keys(Path(file)) if file else {}


def _tell(before: Config, now: Config, wanted: Config, added: int, removed: int) -> None:
    old, new = dict(before.items()), dict(now.items())
    changes = [f"{key} {old[key]!r} -> {new[key]!r}" for key in SETTINGS if old[key] != new[key]]
    if added or removed:
        changes.append(f"API keys: {added} added or changed, {removed} removed")
    log.info("reloaded: %s", "; ".join(changes) or "nothing has changed")
    if before.server.api_keys and not now.server.api_keys:
        log.warning("reloaded: server.api_keys is empty now: no key is asked for any more")
    for key, value in wanted.items():
        if value != new[key]:
            log.warning(
                "%s stays %r until a restart; the settings say %r now", key, new[key], value
            )


def terminal_watch() -> Callable[[], bool]:
    """Whether the terminal that this process began on is gone: what SIGHUP means by birth."""
    began_on_terminal = sys.stderr.isatty()
    return lambda: began_on_terminal and not sys.stderr.isatty()
