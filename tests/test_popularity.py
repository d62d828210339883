"""Popularity, cache models and traces: against simulation and brute force."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.errors import LoradError
from lorad.sizing.cache_model import (
    LruModel,
    distinct_in_batch,
    distinct_in_time,
    pinned_hit_rate,
    simulate,
    slots_model,
    smallest_capacity,
)
from lorad.sizing.popularity import (
    from_weights,
    parse_popularity,
    read_counts,
    slora,
    uniform,
    zipf,
)
from lorad.sizing.traces import Trace, TraceModel, read_trace, stack_distances

SHAPES = [zipf(100, 1.0), zipf(300, 0.9), zipf(100, 1.5), uniform(60), slora(100, 0.3)]


def replay_lru(adapters, sizes, capacity):
    """Hits of a byte-bounded LRU, one request after the other."""
    cache, used, hits = OrderedDict(), 0, 0
    for adapter in adapters:
        if adapter in cache:
            cache.move_to_end(adapter)
            hits += 1
            continue
        cache[adapter] = None
        used += sizes[adapter]
        while used > capacity:
            used -= sizes[cache.popitem(last=False)[0]]
    return hits


def trace_of(adapters, times=None):
    times = times or [float(i) for i in range(len(adapters))]
    names = tuple(f"a{i}" for i in range(max(adapters) + 1))
    return Trace("trace", times, adapters, names)


# Popularity


@pytest.mark.parametrize("popularity", SHAPES, ids=lambda p: p.label)
def test_shares_fall_and_sum_to_one(popularity):
    assert sum(popularity.shares) == pytest.approx(1.0)
    assert list(popularity.shares) == sorted(popularity.shares, reverse=True)


def test_slora_alpha_is_not_zipf():
    """The benchmark's floor(n U^(1/alpha)): 1 is uniform, and 0.1 gives the first of 100 63 %."""
    assert slora(50, 1.0).shares == pytest.approx(uniform(50).shares)
    assert slora(100, 0.1).shares[0] == pytest.approx(0.631, abs=0.001)
    assert zipf(50, 0.0).shares == pytest.approx(uniform(50).shares)


def test_counts_are_sorted_and_zeros_dropped():
    found = from_weights("counts", [1, 0, 3], ["a", "b", "c"])
    assert (found.names, found.shares) == (("c", "a"), (0.75, 0.25))


@pytest.mark.parametrize(
    "text",
    ["zipf", "zipf:x", "zipf:nan", "zipf:-1", "slora:0", "slora:2", "pareto:1", "", "uniform:1"],
)
def test_unknown_popularity_is_refused(text):
    with pytest.raises(LoradError) as caught:
        parse_popularity(text, 10)
    assert caught.value.code == "usage.invalid"


@pytest.mark.parametrize("fleet", [None, 0, 10**9])
def test_fleet_must_be_a_real_number_of_adapters(fleet):
    with pytest.raises(LoradError):
        parse_popularity("uniform", fleet)


def test_counts_file(tmp_path):
    file = tmp_path / "counts.csv"
    file.write_text("adapter,count\nacme/a,10\nacme/b,30\n\n")
    found = read_counts(file)
    assert (found.names, found.shares) == (("acme/b", "acme/a"), (0.75, 0.25))
    assert parse_popularity(f"file:{file}", None).shares == found.shares
    with pytest.raises(LoradError):
        parse_popularity(f"file:{file}", 1)


@pytest.mark.parametrize(
    "text", ["", "a,b\nc,d\n", "a,1\nb,-1\n", "a,0\n", "a\nb\n", "a,1\nb,inf\n", "a,1\nb,nan\n"]
)
def test_bad_counts_file_is_refused(tmp_path, text):
    file = tmp_path / "counts.csv"
    file.write_text(text)
    with pytest.raises(LoradError) as caught:
        read_counts(file)
    assert caught.value.code == "usage.invalid"


# Hit rates


@pytest.mark.parametrize("popularity", SHAPES, ids=lambda p: p.label)
@pytest.mark.parametrize("capacity", [4, 8, 25])
def test_che_is_within_a_point_and_a_half(popularity, capacity):
    model = slots_model(popularity.shares)
    simulated = simulate(popularity.shares, model.sizes, capacity)
    assert model.che(capacity).rate == pytest.approx(simulated.rate, abs=0.015)
    assert model.hit_rate(capacity).method == "che"


@pytest.mark.parametrize(
    ("fleet", "exponent", "slots", "rate"),
    [(100, 1.0, 4, 0.208), (100, 1.0, 8, 0.347), (1000, 0.9, 8, 0.114)],
)
def test_hit_rates_measured_elsewhere(fleet, exponent, slots, rate):
    found = slots_model(zipf(fleet, exponent).shares).hit_rate(slots).rate
    assert found == pytest.approx(rate, abs=0.005)


def lru_of_three(shares):
    """Exact: P(the two latest adapters are j, k) and that a third one follows them."""
    squares = sum(p * p for p in shares)
    once = squares
    twice = sum(p / (1 - p) * (squares - p * p) for p in shares)
    thrice = sum(
        p * q / (1 - p) / (1 - p - q) * (squares - p * p - q * q)
        for i, p in enumerate(shares)
        for j, q in enumerate(shares)
        if i != j
    )
    return once, once + twice, once + twice + thrice


@pytest.mark.parametrize("popularity", SHAPES, ids=lambda p: p.label)
def test_small_caches_are_right_where_che_is_not(popularity):
    model = slots_model(popularity.shares)
    for capacity, exact in enumerate(lru_of_three(popularity.shares), 1):
        found = model.hit_rate(capacity)
        assert found.method == ("simulated" if capacity == 3 else "exact")
        tolerance = 0.004 if capacity == 3 else 1e-9
        assert found.rate == pytest.approx(exact, abs=tolerance)


def test_sizes_that_differ_are_counted_in_bytes():
    shares = zipf(120, 1.0).shares
    sizes = [(8, 16, 64)[i % 3] for i in range(120)]
    model = LruModel(shares, sizes)
    for capacity in (200, 700, 2000):
        simulated = simulate(shares, sizes, capacity).rate
        assert model.hit_rate(capacity).rate == pytest.approx(simulated, abs=0.015)
    assert model.hit_rate(sum(sizes)).rate == 1.0
    assert model.hit_rate(7).rate == 0.0


def test_a_partial_slot_holds_nothing():
    model = LruModel(uniform(20).shares, [10] * 20)
    assert model.hit_rate(99).rate == model.hit_rate(90).rate < model.hit_rate(100).rate


def test_hit_rate_of_a_million_adapters_counts_like_ones_together():
    """Shares within a percent count as one; the rate must not notice."""
    popularity = zipf(3000, 1.0)
    grouped = slots_model(popularity.shares).hit_rate(300)
    assert grouped.resident == pytest.approx(300)
    simulated = simulate(popularity.shares, [1] * 3000, 300)
    assert grouped.rate == pytest.approx(simulated.rate, abs=0.005)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(1e-300, 1e15), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    capacity=st.integers(0, 160),
)
def test_any_popularity_has_a_rate(weights, sizes, capacity):
    """However lopsided: no division by zero, and never more hits than there are requests."""
    shares = from_weights("any", weights).shares
    model = LruModel(shares, sizes[: len(shares)])
    if capacity >= 4 * max(sizes) or capacity < min(sizes):  # no simulation: it takes a while
        assert -1e-9 <= model.hit_rate(capacity).rate <= 1 + 1e-9
    assert 0 <= slots_model(shares).hit_rate(2).rate <= 1 + 1e-9


def test_pinning_beats_lru_by_the_known_gap():
    shares = zipf(100, 1.0).shares
    assert pinned_hit_rate(shares, 8) == pytest.approx(0.524, abs=0.001)
    assert pinned_hit_rate(shares, 8) > slots_model(shares).hit_rate(8).rate + 0.15


@pytest.mark.parametrize("miss", [0.5, 0.2, 0.05, 0.0])
def test_smallest_capacity_is_the_first_that_is_enough(miss):
    model = slots_model(zipf(200, 1.2).shares)
    least = smallest_capacity(model, 200, miss)
    assert model.hit_rate(least).miss <= miss
    assert least == 1 or model.hit_rate(least - 1).miss > miss


def test_distinct_adapters():
    two = distinct_in_batch(uniform(2).shares, 2)
    assert two.mean == pytest.approx(1.5)
    assert distinct_in_batch(uniform(50).shares, 1).mean == pytest.approx(1.0)
    assert distinct_in_batch(uniform(10).shares, 10_000).mean == pytest.approx(10.0)
    assert distinct_in_time(uniform(10).shares, 1e6) == pytest.approx(10.0)
    assert distinct_in_time(uniform(10).shares, 1e-6) == pytest.approx(1e-6, rel=1e-3)


# Traces


@settings(max_examples=60, deadline=None)
@given(
    adapters=st.lists(st.integers(0, 9), min_size=2, max_size=120),
    sizes=st.lists(st.integers(1, 9), min_size=10, max_size=10),
    capacity=st.integers(9, 60),
)
def test_replay_equals_lru_request_by_request(adapters, sizes, capacity):
    model = TraceModel(trace_of(adapters), sizes)
    hits = replay_lru(adapters, sizes, capacity)
    assert model.hit_rate(capacity).rate == pytest.approx(hits / len(adapters))


def test_stack_distance_is_what_was_touched_since():
    assert stack_distances([0, 1, 1, 2, 0], [10, 3, 5]) == [3, 18]


def test_trace_file(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("time,adapter\n3600,b\n0,a\n7200,b\n1.5,a\n2,a\n")
    trace = read_trace(file)
    assert trace.names == ("a", "b")
    assert list(trace.adapters) == [0, 0, 0, 1, 1]
    assert trace.rate == pytest.approx(4 / 7200)
    assert trace.unique_in_last(3600) == 1
    assert trace.unique_in_last(7201) == 2
    assert trace.popularity().shares == (0.6, 0.4)


def test_trace_times_may_be_dates(tmp_path):
    file = tmp_path / "trace.tsv"
    file.write_text("2024-05-01T10:00:00Z\ta\n2024-05-01T11:00:00Z\tb\n")
    assert read_trace(file).seconds == 3600


@pytest.mark.parametrize(
    "text", ["", "1,a\n", "time,adapter\n1,a\nlater,b\n", "1\n2\n", "1,a\nnan,b\n2,c\n"]
)
def test_bad_trace_is_refused(tmp_path, text):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(LoradError) as caught:
        read_trace(file)
    assert caught.value.code == "usage.invalid"


def test_missing_trace_is_not_found(tmp_path):
    with pytest.raises(LoradError) as caught:
        read_trace(tmp_path / "none.csv")
    assert caught.value.code == "path.not_found"
