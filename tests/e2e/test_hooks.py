"""Endpoints that slow digestd down or hang, by the real clock: what the others notice of it."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import pytest

from conftest import ROOT, Process, wait_for

sys.path.append(str(ROOT / "tests"))

from peers import SILENCE, Answer, Receiver  # noqa: E402

CONFIG = """
[senders.{name}]
type = "webhook"
url = "{url}"
retry = ["100ms", "100ms"]
jitter = 0
[workflows.{name}]
steps = [{{ id = "chat", type = "chat", sender = "{name}", text = "{{{{ payload.n }}}}" }}]
"""


@pytest.fixture
def receiver() -> Any:
    """Starts endpoints that note when each request came."""
    started: list[Receiver] = []

    def start(*answers: Any) -> tuple[Receiver, list[float]]:
        times: list[float] = []

        def noting(answer: Any) -> Any:
            return lambda request: (times.append(time.monotonic()), answer)[1]

        started.append(Receiver(*map(noting, answers)))
        return started[-1], times

    yield start
    for one in started:
        one.stop()


def config_of(name: str, there: Receiver) -> str:
    return CONFIG.format(name=name, url=there.url())


def test_a_throttled_receiver_gets_its_next_try_not_before_it_asked(tmp_path, receiver):
    there, times = receiver(Answer(429, {"Retry-After": "3"}), 200)
    process = Process(tmp_path, config_of("slow", there))
    try:
        assert process.trigger("slow", "s1", {"n": 1})[0] == 201
        wait_for(lambda: len(times) == 2, what="the second try")
        print(f"next try after {times[1] - times[0]:.3f} s")
        assert 3.0 <= times[1] - times[0] < 4.0
        assert there.requests[0].headers["webhook-id"] == there.requests[1].headers["webhook-id"]
    finally:
        process.kill()


def latencies(process: Process, times: list[float], count: int) -> list[float]:
    """How long each of some messages took, from its trigger to the endpoint, in ms."""
    found = []
    for number in range(count):
        seen, began = len(times), time.monotonic()
        assert process.trigger("quick", f"q{number}", {"n": number})[0] == 201
        wait_for(lambda: len(times) > seen, what="the quick endpoint's message")  # noqa: B023
        found.append((times[-1] - began) * 1000)
    return found


def test_a_receiver_that_hangs_delays_another_sender_by_less_than_100_ms(tmp_path, receiver):
    hanging, hung = receiver(*[SILENCE] * 200)
    quick, times = receiver(*[200] * 200)
    process = Process(tmp_path, config_of("slow", hanging) + config_of("quick", quick))
    try:
        alone = latencies(process, times, 50)
        for number in range(100):
            assert process.trigger("slow", f"s{number}", {"n": number})[0] == 201
        wait_for(lambda: len(hung) >= 10, what="tries that hang")
        beside = latencies(process, times, 50)
        print(f"alone p50 {statistics.median(alone):.1f}, most {max(alone):.1f} ms;"
              f" beside one that hangs p50 {statistics.median(beside):.1f}, most {max(beside):.1f} ms")  # fmt: skip
        for place in (25, 45):  # half and nine in ten; a single one may meet whatever else the machine does
            assert sorted(beside)[place] - sorted(alone)[place] < 100
    finally:
        process.kill()
