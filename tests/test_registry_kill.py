"""The registry's process killed at any moment: what it leaves is consistent."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from lorad.registry.records import Action
from lorad.registry.registry import Registry
from registry_on_disk import BASE, CHECK, TINKER, files
from registry_on_disk import adapters as adapters
from registry_on_disk import state as state

CHURN = """
    import itertools, sys
    from functools import partial
    from pathlib import Path
    from lorad.adapter_ref import AdapterName
    from lorad.adapters.peft_format import read_adapter
    from lorad.errors import LoradError
    from lorad.registry.records import Who
    from lorad.registry.registry import Registry
    from lorad.sizing.model_shape import ModelShape

    state, adapters = Path(sys.argv[1]), [Path(a) for a in sys.argv[2:]]
    shape = ModelShape("llama", 8, 1, 2, 1, 4, 16, 32)
    registry = Registry.open(state, "org/Tiny-Base", partial(read_adapter, shape=shape))
    name, who = AdapterName("default", "tinker"), Who.daemon()
    print("ready", flush=True)
    for directory in itertools.cycle(adapters):
        label = registry.push(directory, name, who=who).version.label
        registry.promote(name, label, who=who)
        for other in list(registry.adapter(name).versions):
            if other != label:
                registry.delete(name, other, who=who)
"""


def test_kill_at_any_moment_leaves_it_consistent(
    state: Path, adapters: list[Path], tmp_path: Path
) -> None:
    script = tmp_path / "churn.py"
    script.write_text(textwrap.dedent(CHURN))
    rng = random.Random(20261129)
    for _ in range(12):
        command = [sys.executable, str(script), str(state), *map(str, adapters)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.06))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        check_consistent(state)


def check_consistent(state: Path) -> None:
    registry = Registry.open(state, BASE, CHECK)
    adapter = next(iter(registry.adapters()), None)
    expected = set()
    for version in adapter.versions.values() if adapter else ():
        assert version.servable
        directory = registry.verify(version.ref)
        expected |= {str(f.relative_to(state / "store")) for f in directory.iterdir()}
    assert files(state) == expected
    if adapter:
        moves = [e for e in registry.history(TINKER) if e.action is Action.PROMOTE]
        assert adapter.live == (moves[0].to_version if moves else None)
        assert adapter.generation == (moves[0].generation if moves else 0)
    registry.close()
