"""Calls in turns: each in another order, waited for, until the time is up."""

import os
import time

import pytest
import torch

from fxq.common import timed_calls
from fxq.common.timed_calls import clock, interleaved, rounds, times_in_turns


def test_calls_take_turns_in_any_order_and_are_waited_for(monkeypatch):
    monkeypatch.setattr(timed_calls, "MAX_ROUNDS", 20)
    monkeypatch.setattr(timed_calls, "SECONDS", 60.0)
    order = []
    timings = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, lambda: order.append("wait"))
    assert order[1::2] == ["wait"] * 40
    rounds = list(zip(order[0::4], order[2::4], strict=True))
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert list(timings) == ["a", "b"]


def test_rounds_end_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(timed_calls, "SECONDS", 0.0)
    calls = []
    interleaved({"a": lambda: calls.append(0)}, lambda: None)
    assert len(calls) == 1


def test_the_shortest_time_of_a_call_that_is_held_up_once(monkeypatch):
    monkeypatch.setattr(timed_calls, "MAX_ROUNDS", 5)
    now, lasts = [0.0], iter([9.0, 5.0, 3.0, 5.0, 7.0])
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timed_calls, "clock", lambda every_thread: lambda: now[0])

    def call():
        now[0] += 1e-6 * next(lasts)

    monkeypatch.setattr(timed_calls, "TURN_SECONDS", 0.0)
    assert interleaved({"a": call}, lambda: None, shortest=True) == {"a": pytest.approx(3.0)}
    lasts = iter([9.0, 5.0, 3.0, 5.0, 7.0])
    assert interleaved({"a": call}, lambda: None) == {"a": pytest.approx(5.0)}


@pytest.mark.parametrize(
    ("seconds", "shortest", "count"), [(1.0, True, 3), (3.0, True, 2), (5.0, True, 1), (1.0, False, 1)]
)
def test_the_shortest_time_of_slow_calls_is_that_of_a_few(monkeypatch, seconds, shortest, count):
    now, calls = [0.0], []
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timed_calls, "clock", lambda every_thread: lambda: now[0])

    def call():
        now[0] += seconds
        calls.append(0)

    interleaved({"a": call}, lambda: None, shortest=shortest)
    assert len(calls) == count


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 4), (100.0, 100)])
def test_given_seconds_no_other_limit_ends_the_rounds(monkeypatch, seconds, count):
    monkeypatch.setattr(timed_calls, "MAX_ROUNDS", 2)
    now = [0.0]
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 1.0

    times = times_in_turns({"a": call}, rounds(4, seconds), lambda: now[0])
    assert times == {"a": [1.0] * count}


@pytest.mark.parametrize(("turn", "least"), [(0.04, 3000.0), (0.0, 9000.0)])
def test_who_is_held_up_by_the_calls_before_it_is_repeated_in_its_turn(monkeypatch, turn, least):
    """Only the third call in a row takes its own time."""
    monkeypatch.setattr(timed_calls, "TURN_SECONDS", turn)
    now, before = [0.0], []
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timed_calls, "clock", lambda every_thread: lambda: now[0])

    def call(name):
        now[0] += 0.003 if before[-2:] == [name, name] else 0.009
        before.append(name)

    calls = {name: lambda name=name: call(name) for name in "abc"}
    assert interleaved(calls, lambda: None, shortest=True) == dict.fromkeys("abc", pytest.approx(least))


def test_of_many_calls_turns_are_shorter(monkeypatch):
    """Each has four turns all the same."""
    now, order = [0.0], []
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timed_calls, "clock", lambda every_thread: lambda: now[0])

    def call(name):
        now[0] += 0.0001
        order.append(name)

    interleaved({name: lambda name=name: call(name) for name in range(20)}, lambda: None, shortest=True)
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert min(turns.count(name) for name in range(20)) >= 3  # two turns in a row look like one


def test_the_clock_counts_what_the_cpu_gave(monkeypatch):
    """One thread: what other programs take does not count; several: they wait for each other."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = clock()
    began = alone()
    time.sleep(0.05)
    assert (alone() - began < 0.04) is (os.name == "posix")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clock() is time.perf_counter
