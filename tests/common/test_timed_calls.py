"""Calls in turns: each in another order, waited for, until the time is up."""

import pytest

from fxq.common import timed_calls
from fxq.common.timed_calls import interleaved


def test_calls_take_turns_in_any_order_and_are_waited_for(monkeypatch):
    monkeypatch.setattr(timed_calls, "MOST", 20)
    monkeypatch.setattr(timed_calls, "SECONDS", 60.0)
    order = []
    found = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, lambda: order.append("wait"))
    assert order[1::2] == ["wait"] * 40
    rounds = list(zip(order[0::4], order[2::4], strict=True))
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert list(found) == ["a", "b"]


def test_rounds_end_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(timed_calls, "SECONDS", 0.0)
    calls = []
    interleaved({"a": lambda: calls.append(0)}, lambda: None)
    assert len(calls) == 1


def test_the_shortest_time_of_a_call_that_is_held_up_once(monkeypatch):
    monkeypatch.setattr(timed_calls, "MOST", 5)
    clock, lasts = [0.0], iter([9.0, 5.0, 3.0, 5.0, 7.0])
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += 1e-6 * next(lasts)

    assert interleaved({"a": call}, lambda: None, least=True) == {"a": pytest.approx(3.0)}
    lasts = iter([9.0, 5.0, 3.0, 5.0, 7.0])
    assert interleaved({"a": call}, lambda: None) == {"a": pytest.approx(5.0)}
