"""A long list leaves time to others while it is made."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

from lorad.server.long_list import json_array


def test_it_is_the_json_of_the_items() -> None:
    items = [{"a": "é", "b": [1, None]}, "x", 2.5]
    assert json.loads(asyncio.run(json_array(items))) == items
    assert asyncio.run(json_array([])) == b"[]"


def test_others_get_on_between_its_items() -> None:
    def slow() -> Iterator[int]:
        for i in range(20):
            time.sleep(0.002)
            yield i

    async def run() -> tuple[bytes, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        found = await json_array(slow())
        task.cancel()
        return found, turns

    found, turns = asyncio.run(run())
    assert json.loads(found) == list(range(20))
    assert turns >= 20
