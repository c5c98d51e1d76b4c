"""Every clock change of sixteen zones in three years, against a walk along the real clock: no daily run lost or doubled.

The zones have changes of every odd kind: of half an hour and of two hours, at midnight and up to it, and a last one.
The oracle looks at what the wall shows every half hour, with datetime and zoneinfo alone: the first time that it shows
a planned local time counts, and what it never shows lies in the gap.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import zoneinfo
from collections.abc import Sequence
from typing import NamedTuple

import pytest

import digestd

ZONES = [
    "Australia/Lord_Howe", "America/Nuuk", "America/Scoresbysund", "Antarctica/Troll", "America/Santiago",
    "America/Havana", "Asia/Beirut", "Africa/Cairo", "Atlantic/Azores", "America/Asuncion", "America/New_York",
    "Europe/London", "Europe/Berlin", "Europe/Athens", "Asia/Jerusalem", "Australia/Adelaide",
]  # fmt: skip
DAY, HALF_HOUR = dt.timedelta(days=1), dt.timedelta(minutes=30)
AROUND = range(-1, 2)  # the local days around a change that are looked at
DAILY = [((hour,), (minute,)) for hour in range(24) for minute in (0, 30)]
EIGHT_A_DAY = [(sorted((hour + more) % 24 for more in range(4)), (0, 30)) for hour in range(0, 24, 2)]


class Change(NamedTuple):
    """A change of a zone's clock: its instant in ms, what the wall would have shown at it, and what it shows; and when
    it shows each local time around it first."""

    at: int
    old: dt.datetime
    new: dt.datetime
    first_shown: dict[dt.datetime, int]

    @property
    def length(self) -> dt.timedelta:
        return self.new - self.old


def shown(at: dt.datetime, zone: zoneinfo.ZoneInfo) -> dt.datetime:
    return at.astimezone(zone).replace(tzinfo=None, fold=0)


def walk(begin: dt.datetime, end: dt.datetime, zone: zoneinfo.ZoneInfo) -> list[tuple[int, dt.datetime]]:
    """What the wall shows, by the instant in ms."""
    instants = [begin + HALF_HOUR * number for number in range((end - begin) // HALF_HOUR)]
    return [(int(at.timestamp()) * 1000, shown(at, zone)) for at in instants]


@functools.cache
def clock_changes(name: str) -> list[Change]:
    """The changes of a zone's clock in 2024 to 2026."""
    zone, found = zoneinfo.ZoneInfo(name), []
    first, end = (dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (2024, 2027))
    for day in [first + DAY * number for number in range((end - first).days)]:
        if shown(day + DAY, zone) - shown(day, zone) == DAY:
            continue
        seen = walk(day - 5 * DAY, day + 6 * DAY, zone)
        [(at, old, new)] = [
            (after[0], before[1] + HALF_HOUR, after[1])
            for before, after in itertools.pairwise(seen)
            if after[1] - before[1] != HALF_HOUR
        ]
        found.append(Change(at, old, new, {local: at for at, local in reversed(seen)}))
    return found


def planned_runs(change: Change, days: Sequence[int], hours: Sequence[int], minutes: Sequence[int]) -> list[int]:
    """The instant that each planned local time around a change means."""
    instants = []
    for ahead, hour, minute in itertools.product(days, hours, minutes):
        local = dt.datetime.combine(change.new.date() + DAY * ahead, dt.time(hour, minute))
        if local not in change.first_shown:
            assert change.old <= local < change.new  # in the gap, and nowhere else
            local += change.length
        instants.append(change.first_shown[local])
    return instants


def cron_text(hours: Sequence[int], minutes: Sequence[int]) -> str:
    return f"{','.join(map(str, minutes))} {','.join(map(str, hours))} * * *"


@pytest.mark.parametrize("name", ZONES)
def test_a_daily_run_is_neither_lost_nor_doubled_when_the_clocks_change(name):
    zone, checks = digestd.load_zone(name), 0
    for change in clock_changes(name):
        for hours, minutes in DAILY:
            expected = planned_runs(change, AROUND, hours, minutes)
            assert len(set(expected)) == len(AROUND)
            rule = digestd.parse_cron(cron_text(hours, minutes), zone)
            assert digestd.next_times(rule, expected[0] - 1, len(expected)) == expected, (hours, minutes)
            checks += len(expected)
    assert checks == len(clock_changes(name)) * len(DAILY) * len(AROUND) >= 288


@pytest.mark.parametrize("name", ZONES)
def test_a_rule_that_is_read_again_after_each_run_loses_and_doubles_none(name):
    checks = 0
    for change in clock_changes(name):
        for hours, minutes in DAILY:
            expected = planned_runs(change, AROUND, hours, minutes)
            found = [expected[0]]
            while len(found) < len(expected):
                rule = digestd.parse_cron(cron_text(hours, minutes), digestd.load_zone(name))
                found += digestd.next_times(rule, found[-1], 1)
            assert found == expected, (hours, minutes)
            checks += len(expected) - 1
    assert checks == len(clock_changes(name)) * len(DAILY) * (len(AROUND) - 1) >= 192


@pytest.mark.parametrize("name", ZONES)
def test_a_daemon_that_starts_while_the_clocks_change_finds_the_right_next_run(name):
    zone, checks = digestd.load_zone(name), 0
    for change in clock_changes(name):
        length = abs(change.length) // dt.timedelta(milliseconds=1)
        starts = [change.at + shift for shift in (0, length)]
        for hours, minutes in DAILY:
            expected = planned_runs(change, range(-1, 3), hours, minutes)
            rule = digestd.parse_cron(cron_text(hours, minutes), zone)
            for start in starts:
                following = next(at for at in expected if at > start)
                assert digestd.next_times(rule, start, 1) == [following], (hours, minutes, start - change.at)
                checks += 1
    assert checks == len(clock_changes(name)) * len(DAILY) * 2 >= 192


@pytest.mark.parametrize("name", ZONES)
def test_planned_times_that_fall_on_one_instant_are_one_run(name):
    zone, shared = digestd.load_zone(name), 0
    gaps = [change for change in clock_changes(name) if change.new > change.old]
    for change in gaps:
        for hours, minutes in EIGHT_A_DAY:
            planned = planned_runs(change, range(-1, 1), hours, minutes)
            expected = sorted(set(planned))
            shared += len(planned) - len(expected)
            rule = digestd.parse_cron(cron_text(hours, minutes), zone)
            assert digestd.next_times(rule, expected[0] - 1, len(expected)) == expected, (hours, minutes)
    assert shared > 0


def test_there_are_thousands_of_planned_times_and_changes_of_every_kind():
    changes = [change for name in ZONES for change in clock_changes(name)]
    assert all(map(clock_changes, ZONES)) and len(changes) * len(DAILY) > 4000
    assert {abs(change.length) // HALF_HOUR for change in changes} == {1, 2, 4}
    gaps = [(change.old, change.new) for change in changes if change.new > change.old]
    assert any(old.time() == dt.time() for old, _ in gaps)  # midnight itself is left out
    assert any(old.date() < new.date() for old, new in gaps)  # the gap ends the day
