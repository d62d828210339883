"""Where things live: the admin socket, the state directory, the configuration file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOCKET_NAME = "lorad.sock"


def _is_root() -> bool:
    return os.geteuid() == 0


def runtime_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Directory of the admin socket: /run/lorad for root, else $XDG_RUNTIME_DIR/lorad."""
    if _is_root():
        return Path("/run/lorad")
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "lorad"
    return Path(tempfile.gettempdir()) / f"lorad-{os.geteuid()}"


def socket_path(given: str | None = None, env: Mapping[str, str] = os.environ) -> Path:
    """The admin socket: --socket, then LORAD_SOCKET, then the runtime directory."""
    chosen = given or env.get("LORAD_SOCKET")
    return Path(chosen).expanduser() if chosen else runtime_dir(env) / SOCKET_NAME


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Registry database and version store: /var/lib/lorad for root, else XDG state."""
    if _is_root():
        return Path("/var/lib/lorad")
    base = env.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "lorad"


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Things that can be made again, such as the converted demo model."""
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lorad"


def config_file(given: str | None = None, env: Mapping[str, str] = os.environ) -> Path | None:
    """--config, then LORAD_CONFIG, then the first default that exists, else None."""
    chosen = given or env.get("LORAD_CONFIG")
    if chosen:
        return Path(chosen).expanduser()
    user = Path(env.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "lorad/lorad.toml"
    defaults = [user, Path("/etc/lorad/lorad.toml")]
    return next((path for path in defaults if path.is_file()), None)
