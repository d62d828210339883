"""How long a daemon with many registered adapters takes to be ready again.

python tests/soak/many_adapters.py --adapters 1000
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import time
from functools import partial
from pathlib import Path

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.registry.records import Who
from lorad.registry.registry import Registry

SHARED = runpy.run_path(str(Path(__file__).parent.parent / "admin_daemon.py"))


def fill(registry: Registry, root: Path, count: int) -> None:
    """Push and promote `count` adapters of one version each."""
    me = Who(0, 0)
    for number in range(count):
        folder = SHARED["write_adapter"](root / "adapter", number)
        name = AdapterName("default", f"a{number}")
        registry.push(folder, name, who=me)
        registry.promote(name, "v1", who=me)


def reopen(state: Path) -> tuple[Registry, float]:
    """The registry of a state directory, and the seconds that opening took."""
    check = partial(read_adapter, shape=SHARED["SHAPE"], max_lora_rank=16)
    began = time.monotonic()
    registry = Registry.open(state, SHARED["BASE"], check)
    return registry, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        registry, _ = reopen(Path(folder) / "state")
        began = time.monotonic()
        fill(registry, Path(folder), given.adapters)
        pushed = time.monotonic() - began
        registry.close()
        registry, seconds = reopen(Path(folder) / "state")
        print(f"{len(registry.adapters())} adapters pushed and promoted in {pushed:.1f} s,")
        print(f"opened again in {seconds * 1000:.0f} ms")
        registry.close()


if __name__ == "__main__":
    main()
