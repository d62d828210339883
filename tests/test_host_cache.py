"""The host tier: bounded by count and by bytes; without requests, least recently used first."""

from __future__ import annotations

from collections import OrderedDict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.adapters.host_cache import HostCache
from lorad.adapters.weights import AdapterWeights
from lorad.sizing.adapter_size import AdapterLayout


def weights(name: str, elements: int = 1) -> AdapterWeights:
    """4 bytes an element."""
    nbytes = 4 * elements
    return AdapterWeights(name, AdapterLayout((), nbytes, nbytes, 1), torch.zeros(elements))


def names(cache: HostCache) -> str:
    """Oldest use first."""
    return "".join(each.digest for each in cache.items())


def filled(text: str, max_adapters: int = 3, max_bytes: int = 10**6) -> HostCache:
    cache = HostCache(max_adapters, max_bytes)
    for name in text:
        cache.put(weights(name))
    return cache


def test_the_count_is_bounded() -> None:
    cache = filled("abcd")
    assert (names(cache), len(cache), cache.nbytes) == ("bcd", 3, 12)
    assert "a" not in cache
    assert cache.get("a") is None


def test_the_bytes_are_bounded() -> None:
    cache = HostCache(10, 40)
    for name, elements in (("a", 4), ("b", 3), ("c", 3)):
        cache.put(weights(name, elements))
    assert (names(cache), cache.nbytes) == ("abc", 40)
    cache.put(weights("d", 1))
    assert (names(cache), cache.nbytes) == ("bcd", 28)
    cache.put(weights("e", 9))
    assert (names(cache), cache.nbytes) == ("de", 40), "as many go as are needed"


def test_a_get_is_a_use_and_a_look_is_none() -> None:
    cache = filled("abc")
    assert cache.get("a").digest == "a"
    assert "b" in cache
    cache.put(weights("d"))
    assert names(cache) == "cad"


def test_one_that_alone_is_too_large_is_not_kept_and_takes_no_place() -> None:
    """Whoever needs it holds it until it is on the device."""
    cache = filled("abc", max_bytes=16)
    assert cache.put(weights("big", 100)) == ["big"]
    assert (names(cache), cache.nbytes) == ("abc", 12)


def test_putting_again_replaces_and_counts_once() -> None:
    cache = filled("ab")
    newer = weights("a", 5)
    cache.put(newer)
    assert cache.get("a") is newer
    assert (names(cache), cache.nbytes) == ("ba", 24)


def test_drop_gives_back_the_bytes_once() -> None:
    cache = filled("ab")
    assert cache.drop("a") == 4
    assert cache.drop("a") == 0
    assert cache.drop("never") == 0
    assert (names(cache), cache.nbytes) == ("b", 4)


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcdef"), st.integers(1, 9)),
    st.tuples(st.just("get"), st.sampled_from("abcdef"), st.just(0)),
    st.tuples(st.just("drop"), st.sampled_from("abcdef"), st.just(0)),
)


@given(
    max_adapters=st.integers(1, 5),
    max_bytes=st.integers(1, 100),
    operations=st.lists(OPERATIONS, max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_like_a_plain_list_in_any_order(max_adapters, max_bytes, operations) -> None:
    cache = HostCache(max_adapters, max_bytes)
    model: OrderedDict[str, int] = OrderedDict()
    for what, name, elements in operations:
        if what == "get":
            assert (cache.get(name) is not None) == (name in model)
            if name in model:
                model.move_to_end(name)
        elif what == "drop":
            assert cache.drop(name) == model.pop(name, 0)
        else:
            cache.put(weights(name, elements))
            model.pop(name, None)
            if 4 * elements <= max_bytes:
                model[name] = 4 * elements
            while len(model) > max_adapters or sum(model.values()) > max_bytes:
                model.popitem(last=False)
        assert names(cache) == "".join(model)
        assert cache.nbytes == sum(model.values())
        assert len(cache) == len(model)
