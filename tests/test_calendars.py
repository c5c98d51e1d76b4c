"""From a rule and an instant to the next instant: cron, intervals, scheduled windows, weekly hours, clock changes.

The rows under data/ come from cron-parser's, BullMQ's and Novu's own tests and from reports of their users. Where
digestd differs from such a source on purpose, the row holds our answer and says why in `differs`.
"""

from __future__ import annotations

import calendar
import datetime as dt
import functools
import json
import pathlib
import random
import zoneinfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import digestd
from conftest import World

DATA = pathlib.Path(__file__).parent / "data"
at_ms = digestd.parse_instant


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def params(rows: list[dict]) -> list:
    return [pytest.param(row, id=row["id"]) for row in rows]


def texts(instants: list[int]) -> list[str]:
    return [digestd.iso_text(at) for at in instants]


def local_text(at: int, zone: str) -> str:
    return str(digestd.local_time(at, digestd.load_zone(zone)))


# -- cron: the tables --------------------------------------------------------------------------------------------------

BULLMQ = load("cron_bullmq")
TABLES = BULLMQ + load("cron_novu")


def asked(row: dict) -> tuple[digestd.Rule, int]:
    # Start and end are applied here: they are options of a repeatable, not of a calendar.
    return digestd.parse_cron(row["cron"], digestd.load_zone(row["timezone"])), max(
        at_ms(row["from"]), at_ms(row.get("start", row["from"]))
    )


@pytest.mark.parametrize("row", params([row for row in TABLES if "next" in row]))
def test_cron_gives_the_times_of_the_table(row):
    rule, at = asked(row)
    more = "then" in row  # the end comes next: one more instant must lie past it
    found = digestd.next_times(rule, at, len(row["next"]) + more)
    if "end" in row:
        found = [instant for instant in found if instant <= at_ms(row["end"])]
    assert texts(found) == row["next"]


@pytest.mark.parametrize("row", params([row for row in TABLES if "error" in row]))
def test_cron_that_cannot_be_read_or_never_happens_is_refused(row):
    with pytest.raises(digestd.RuleError):
        digestd.parse_cron(row["cron"], digestd.load_zone(row["timezone"]))
    with pytest.raises(digestd.RuleError):
        digestd.parse_rule(row["cron"], digestd.load_zone(row["timezone"]))


@pytest.mark.parametrize("row", params([row for row in BULLMQ if "accepted" in row]))
def test_a_hashed_field_is_accepted_without_a_seed_and_never_moves(row):
    first, again = (digestd.next_times(asked(row)[0], asked(row)[1], 50) for _ in range(2))
    assert len(first) == 50 and first == again


@pytest.mark.parametrize("row", params([row for row in BULLMQ if "equals" in row]))
def test_a_hashed_field_means_what_cron_parser_draws(row):
    hashed, plain = digestd.parse_cron(row["cron"], seed=row["seed"]), digestd.parse_cron(row["equals"])
    hour = at_ms("2024-01-01T00:00:00Z")
    for _ in range(400):  # about 37 hours apart, over 20 months
        assert digestd.next_times(hashed, hour, 2) == digestd.next_times(plain, hour, 2)
        hour += 37 * digestd.HOUR + 61_007


@given(seed=st.text(max_size=20))
@settings(deadline=None, max_examples=60)
def test_hashed_values_stay_inside_their_range_and_field(seed):
    at = at_ms("2024-01-01T00:00:00Z")

    def local(cron: str, count: int = 3) -> list[dt.datetime]:
        rule = digestd.parse_cron(cron, seed=seed)
        return [digestd.local_time(instant, digestd.UTC) for instant in digestd.next_times(rule, at, count)]

    assert all(1 <= time.second <= 5 for time in local("H(1-5)/10 * * * * *"))
    assert all(50 <= time.second <= 59 for time in local("H(50-100)/60 * * * * *"))
    assert all(1 <= time.day <= 5 for time in local("0 0 H(0-5) * *"))
    assert len({time.day for time in local("0 0 H/40 * *", 12)}) <= 2  # one value; a short month may pass it over
    assert len({time.month for time in local("0 0 1 H/60 *")}) == 1


def test_rows_marked_as_different_do_differ():
    assert [
        row["id"] for row in TABLES if row.get("next") is not None and row.get("next") == row.get("source_next")
    ] == []


# -- cron: reports from the field --------------------------------------------------------------------------------------

FIELD = load("cron")


@pytest.mark.parametrize("row", params([row for row in FIELD if row["verdict"] == "fires"]))
def test_cron_of_a_field_report_fires_when_it_should(row):
    zone = digestd.load_zone(row["tz"])
    for rule in (digestd.parse_cron(row["expr"], zone), digestd.parse_rule(row["expr"], zone)):
        assert texts(digestd.next_times(rule, at_ms(row["from"]), len(row["next"]))) == row["next"]


@pytest.mark.parametrize("row", params([row for row in FIELD if row["verdict"] != "fires"]))
def test_cron_of_a_field_report_is_refused(row):
    for parse in (digestd.parse_cron, digestd.parse_rule):
        with pytest.raises(digestd.RuleError):
            parse(row["expr"], digestd.load_zone(row["tz"]))


def test_a_tick_every_15_s_goes_on_while_the_clocks_go_back():
    rule = digestd.parse_cron("*/15 * * * * *", digestd.load_zone("Europe/London"))
    begin = at_ms("2025-10-26T00:29:45Z")
    assert digestd.next_times(rule, begin, 481) == [begin + 15_000 * (n + 1) for n in range(481)]


def test_a_restart_inside_the_repeated_hour_goes_on_from_there():
    rule = digestd.parse_cron("*/30 * * * *", digestd.load_zone("America/New_York"))
    assert texts(digestd.next_times(rule, at_ms("2019-11-03T06:10:00Z"), 1)) == ["2019-11-03T06:30:00Z"]


def test_a_pattern_is_accepted_in_the_week_before_the_clocks_change():
    rule = digestd.parse_cron("0 2 * * *", digestd.load_zone("Europe/Copenhagen"))
    days = ["23", "24", "25", "26", "27", "28"]
    expected = [f"2018-10-{day}T00:00:00Z" for day in days] + ["2018-10-29T01:00:00Z"]
    assert texts(digestd.next_times(rule, at_ms("2018-10-22T20:00:00Z"), 7)) == expected


@pytest.mark.parametrize(
    ("cron", "zone", "at", "expected"),
    [
        ("0 0 0 10 * *", "America/Sao_Paulo", "2014-10-13T12:00:00Z", "2014-11-10T02:00:00Z"),
        ("0 5 1 * *", "Europe/Berlin", "2016-05-17T14:00:00Z", "2016-06-01T03:00:00Z"),
        ("0 55 * * * *", "Europe/Belgrade", "2026-03-31T21:55:01Z", "2026-03-31T22:55:00Z"),
        ("0 * * * 1-5", "America/Chicago", "2016-02-29T17:00:00Z", "2016-02-29T18:00:00Z"),
        ("0 0 * 2 1#5", "UTC", "2072-03-01T00:00:00Z", "2112-02-29T00:00:00Z"),
        ("0 0 29 2 *", "UTC", "2096-03-01T00:00:00Z", "2104-02-29T00:00:00Z"),
    ],
    ids=["midnight gap on the way", "month end", "hour at a month end", "leap day", "forty years", "no leap in 2100"],
)
def test_a_far_or_awkward_next_time_is_found(cron, zone, at, expected):
    rule = digestd.parse_cron(cron, digestd.load_zone(zone))
    assert texts(digestd.next_times(rule, at_ms(at), 1)) == [expected]


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 12 30 12 *", ["2012-12-29T22:00:00Z"]),
        ("0 12 * 12 5", ["2012-12-06T22:00:00Z", "2012-12-13T22:00:00Z"]),
        ("0 12 30 * *", ["2012-01-29T22:00:00Z", "2012-03-29T22:00:00Z"]),
        ("30 23 30 12 *", ["2012-12-30T09:30:00Z"]),
        ("0 0 30 12 *", ["2012-12-29T10:00:00Z"]),
    ],
)
def test_a_day_that_the_zone_left_out_has_no_run(cron, expected):
    # Samoa went from Thursday 29 to Saturday 31 December 2011.
    rule = digestd.parse_cron(cron, digestd.load_zone("Pacific/Apia"))
    assert texts(digestd.next_times(rule, at_ms("2011-12-28T00:00:00Z"), len(expected))) == expected


@pytest.mark.parametrize("cron", ["*/5 * * * *", "0 9 * * *", "0 0 30 12 *", "30 2 * * 0"])
def test_a_rule_ends_with_the_calendar_and_not_with_a_crash(cron):
    rule = digestd.parse_cron(cron, digestd.load_zone("Pacific/Kiritimati"))
    assert digestd.next_times(rule, at_ms("9999-12-31T23:57:00Z"), 5) == []


@pytest.mark.parametrize(
    ("cron", "word"),
    [
        ("* * * *", "4 fields"),
        ("61 * * * *", "minute"),
        ("0 0 * * 8", "day of week"),
        ("0 0 30 2 *", "never"),
        ("@midnight", "alias"),
        ("*/0 * * * *", "step"),
        ("1,,2 * * * *", "empty"),
    ],
)
def test_a_refusal_names_the_text_and_what_is_wrong(cron, word):
    with pytest.raises(digestd.RuleError) as refused:
        digestd.parse_cron(cron)
    assert word in refused.value.message and cron in refused.value.message


# -- cron against brute force ------------------------------------------------------------------------------------------

FIELDS = {field.name: field for field in digestd.CRON_FIELDS}


class Matcher:
    """What a drawn cron text means, kept apart from its spelling."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.values: dict[str, set[int]] = {}
        self.restricted: dict[str, bool] = {}
        self.last_day = False
        self.last_weekdays: set[int] = set()
        self.nth: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        return " ".join(self.parts)

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def day_of_month(self, day: dt.date) -> bool:
        last = calendar.monthrange(day.year, day.month)[1]
        return day.day in self.values["day of month"] or (self.last_day and day.day == last)

    def day_of_week(self, day: dt.date) -> bool:
        weekday, last = day.isoweekday() % 7, calendar.monthrange(day.year, day.month)[1]
        if self.nth is not None:
            return (weekday, (day.day - 1) // 7 + 1) == self.nth
        in_last_week = weekday in self.last_weekdays and day.day > last - 7
        return weekday in {value % 7 for value in self.values["day of week"]} or in_last_week

    def matches_day(self, day: dt.date) -> bool:
        if day.month not in self.values["month"]:
            return False
        either = self.restricted["day of month"], self.restricted["day of week"]
        if either == (True, True):
            return self.day_of_month(day) or self.day_of_week(day)
        return self.day_of_month(day) if either[0] else self.day_of_week(day)

    def can_happen(self) -> bool:
        if self.restricted["day of week"] or self.last_day:
            return True
        longest = {month: calendar.monthrange(2024, month)[1] for month in range(1, 13)}
        return any(day <= longest[month] for day in self.values["day of month"] for month in self.values["month"])

    def local_times(self, first: dt.date, days: int):
        """Every planned wall-clock time from a day on, in order."""
        for day in (first + dt.timedelta(days=ahead) for ahead in range(days)):
            if self.matches_day(day):
                for hour in sorted(self.values["hour"]):
                    for minute in sorted(self.values["minute"]):
                        for second in sorted(self.values["second"]):
                            yield dt.datetime(day.year, day.month, day.day, hour, minute, second)


@st.composite
def cron_items(draw, field) -> tuple[str, set[int]]:
    def spelled(value: int) -> str:
        style = draw(st.sampled_from(["plain", "plain", "zero", "name"]))
        if style == "name" and value - field.low < len(
            field.names
        ):  # SUN is 0, never the 7 that begins or ends a range
            named = field.names[value - field.low]
            return draw(st.sampled_from([named, named.upper(), named.title()]))
        return f"0{value}" if style == "zero" else str(value)

    value = draw(st.integers(field.low, field.high))
    kind = draw(st.sampled_from(["value", "value", "range", "star step", "start step", "range step"]))
    if kind == "value":
        return spelled(value), {value}
    step = draw(st.integers(1, field.high + 3))
    if kind == "star step":
        return f"{draw(st.sampled_from('*?'))}/{step}", set(range(field.low, field.high + 1, step))
    if kind == "start step":
        return f"{spelled(value)}/{step}", set(range(value, field.high + 1, step))
    high = draw(st.integers(value, field.high))
    text = f"{spelled(value)}-{spelled(high)}"
    if kind == "range":
        return text, set(range(value, high + 1))
    return f"{text}/{step}", set(range(value, high + 1, step))


@st.composite
def cron_texts(draw, seconds: bool = True) -> Matcher:
    matcher = Matcher()
    six = seconds and draw(st.booleans())
    for name, field in FIELDS.items():
        matcher.restricted[name] = False
        if name == "second" and not six:
            matcher.values[name] = {0}
            continue
        if draw(st.integers(0, 9)) < (4 if name in ("second", "minute", "hour") else 6):
            matcher.parts.append(draw(st.sampled_from("**?")))
            matcher.values[name] = set(range(field.low, field.high + 1))
            continue
        matcher.restricted[name] = True
        if name == "day of week" and draw(st.integers(0, 4)) == 0:
            day, nth = draw(st.integers(0, 7)), draw(st.integers(1, 5))
            matcher.nth, matcher.values[name] = (day % 7, nth), set()
            matcher.parts.append(f"{day}#{nth}")
            continue
        items = draw(st.lists(cron_items(field), min_size=1, max_size=3))
        spelling, matcher.values[name] = [item[0] for item in items], set().union(*(item[1] for item in items))
        if name == "day of month" and draw(st.integers(0, 4)) == 0:
            spelling.append("L")
            matcher.last_day = True
        if name == "day of week" and draw(st.integers(0, 4)) == 0:
            day = draw(st.integers(0, 7))
            spelling.insert(0, f"{day}L")
            matcher.last_weekdays.add(day % 7)
        matcher.parts.append(",".join(spelling))
    return matcher


MOMENTS = st.integers(at_ms("1999-12-01T00:00:00Z"), at_ms("2060-01-01T00:00:00Z"))


@given(matcher=cron_texts(), at=MOMENTS)
@settings(deadline=None, max_examples=250)
def test_cron_in_utc_agrees_with_looking_at_every_minute(matcher, at):
    if not matcher.can_happen():
        with pytest.raises(digestd.RuleError):
            digestd.parse_cron(matcher.text)
        return
    rule = digestd.parse_cron(matcher.text)
    first = digestd.local_time(at, digestd.UTC).date()
    days = 1500
    expected: list[int] = []
    for local in matcher.local_times(first, days):
        instant = int(local.replace(tzinfo=dt.UTC).timestamp()) * 1000
        if instant > at:
            expected.append(instant)
        if len(expected) == 12:
            break
    found = digestd.next_times(rule, at, 12)
    horizon = int(dt.datetime.combine(first + dt.timedelta(days=days), dt.time(), dt.UTC).timestamp()) * 1000
    assert texts([instant for instant in found if instant < horizon]) == texts(expected)


# -- clock changes against brute force ---------------------------------------------------------------------------------

SIXTEEN_ZONES = [
    "America/New_York", "Europe/Berlin", "Europe/London", "Europe/Athens", "Australia/Lord_Howe", "Australia/Sydney",
    "America/Nuuk", "America/Scoresbysund", "Antarctica/Troll", "America/Santiago", "America/Havana", "Asia/Beirut",
    "Africa/Cairo", "Atlantic/Azores", "Africa/Casablanca", "America/Asuncion",
]  # fmt: skip
MORE_ZONES = [
    "Pacific/Apia",
    "Pacific/Chatham",
    "Asia/Kathmandu",
    "Asia/Gaza",
    "Asia/Pyongyang",
    "America/Caracas",
    "UTC",
]


YEARS = range(2010, 2029)  # with the day that Samoa left out


def offset_at(second: int, zone: zoneinfo.ZoneInfo) -> dt.timedelta:
    return dt.datetime.fromtimestamp(second, dt.UTC).astimezone(zone).utcoffset()


@functools.cache
def clock_changes(name: str) -> list[tuple[int, dt.timedelta, dt.timedelta]]:
    """(second, offset before, offset after) of every change of a zone's clock, found by walking and halving."""
    zone = zoneinfo.ZoneInfo(name)
    found = []
    low = int(dt.datetime(YEARS[0], 1, 1, tzinfo=dt.UTC).timestamp())
    end = int(dt.datetime(YEARS[-1] + 1, 1, 1, tzinfo=dt.UTC).timestamp())
    while low < end:
        high = low + 12 * 3600
        if offset_at(low, zone) != offset_at(high, zone):
            left, right = low, high
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if offset_at(middle, zone) == offset_at(low, zone) else (left, middle)
            found.append((right, offset_at(low, zone), offset_at(high, zone)))
        low = high
    return found


def planned_instants(
    local: dt.datetime, change: tuple[int, dt.timedelta, dt.timedelta] | None, zone, both: bool
) -> list[int]:
    """What a planned local time near one clock change stands for, by arithmetic on the two offsets alone."""
    if change is None:
        offset = zone.utcoffset(local)
        return [int((local - offset).replace(tzinfo=dt.UTC).timestamp())]
    second, before, after = change
    as_before, as_after = (int((local - offset).replace(tzinfo=dt.UTC).timestamp()) for offset in (before, after))
    real = [instant for instant, holds in ((as_before, as_before < second), (as_after, as_after >= second)) if holds]
    if not real:  # in the gap: read with the offset from before, unless a whole day is missing
        return [as_before] if after - before < dt.timedelta(hours=23) else []
    return sorted(real) if both else [min(real)]


def test_each_planned_local_time_gives_exactly_one_instant_around_every_clock_change():
    checks = 0
    for name in SIXTEEN_ZONES:
        zone = digestd.load_zone(name)
        for change in clock_changes(name):
            middle = digestd.local_time(change[0] * 1000, zone).date()
            if middle.year not in (2024, 2025, 2026):
                continue
            days = [middle + dt.timedelta(days=ahead) for ahead in (-2, -1, 0, 1, 2)]
            for half_hour in range(48):
                hour, minute = divmod(half_hour * 30, 60)
                planned = [dt.datetime.combine(day, dt.time(hour, minute)) for day in days]
                expected = [
                    second * 1000 for local in planned for second in planned_instants(local, change, zone, False)
                ]
                assert len(set(expected)) == len(planned)  # none lost, none doubled
                rule = digestd.parse_cron(f"{minute} {hour} * * *", zone)
                found = digestd.next_times(rule, expected[0] - 1, len(expected))
                assert found == expected, (name, rule, [local_text(at, name) for at in found])
                checks += 1
    assert checks > 3000


@st.composite
def near_clock_changes(draw):
    """A zone and an instant, mostly within three days of a change of its clock."""
    name = draw(st.sampled_from(SIXTEEN_ZONES + MORE_ZONES))
    changes = clock_changes(name)
    if not changes or draw(st.integers(0, 9)) == 0:
        return name, draw(MOMENTS), None
    change = draw(st.sampled_from(changes))
    return name, change[0] * 1000 + draw(st.integers(-3 * digestd.DAY, 3 * digestd.DAY)), change


@given(matcher=cron_texts(seconds=False), place=near_clock_changes())
@settings(deadline=None, max_examples=150)
def test_any_cron_near_a_clock_change_agrees_with_the_planned_local_times(matcher, place):
    name, at, change = place
    assume(matcher.can_happen() and change is not None)
    others = [other for other in clock_changes(name) if 0 < abs(other[0] - change[0]) < 9 * 86400]
    assume(not others)  # the oracle knows one change at a time
    zone = digestd.load_zone(name)
    first = digestd.local_time(at, zone).date() - dt.timedelta(days=2)
    both = len(matcher.values["hour"]) == 24
    planned = [
        second * 1000
        for local in matcher.local_times(first, 8)
        for second in planned_instants(local, change, zone, both)
    ]
    horizon = at + 4 * digestd.DAY
    expected = [instant for instant in sorted(set(planned)) if at < instant < horizon][:40]
    found = [
        instant for instant in digestd.next_times(digestd.parse_cron(matcher.text, zone), at, 40) if instant < horizon
    ]
    assert texts(found) == texts(expected)


# -- any rule ----------------------------------------------------------------------------------------------------------

DAYS = ["monday", "Tue", "WEDNESDAY", "thu", "friday", "sat", "sunday"]
TIMES = st.builds("{:02d}:{:02d}".format, st.integers(0, 23), st.sampled_from([0, 0, 15, 30, 59]))
MONTH_DAYS = st.one_of(
    st.integers(1, 31),
    st.just("last"),
    st.builds(
        "{} {}".format,
        st.sampled_from(["first", "second", "third", "fourth", "last"]),
        st.sampled_from([*DAYS, "day", "weekday", "weekend day"]),
    ),
)


@st.composite
def rules(draw, zone) -> digestd.Rule:
    kind = draw(st.sampled_from(["cron", "every", "day", "week", "month", "hour", "minute"]))
    if kind == "cron":
        matcher = draw(cron_texts())
        assume(matcher.can_happen())
        return digestd.parse_cron(matcher.text, zone)
    if kind == "every":
        return digestd.Every(draw(st.integers(1, 90 * digestd.DAY)), draw(st.integers(0, 90 * digestd.DAY)))
    if kind in ("hour", "minute"):
        return digestd.scheduled_rule(kind, zone=zone)
    on = draw(st.lists(st.sampled_from(DAYS) if kind == "week" else MONTH_DAYS, min_size=1, max_size=4))
    return digestd.scheduled_rule(kind, draw(TIMES), None if kind == "day" else on, zone)


@given(data=st.data(), place=near_clock_changes())
@settings(deadline=None, max_examples=250)
def test_the_next_time_is_strictly_later_and_nothing_lies_between(data, place):
    name, at, _ = place
    rule = data.draw(rules(digestd.load_zone(name)))
    following = rule.next_after(at)
    assert following is not None and following > at
    between = data.draw(st.integers(at, following - 1))
    assert rule.next_after(between) == following
    assert rule.next_after(following) > following


def test_intervals_are_multiples_since_the_epoch():
    rule = digestd.parse_rule("every 15m")
    at = at_ms("2026-03-09T04:07:00Z")
    assert texts(digestd.next_times(rule, at, 2)) == ["2026-03-09T04:15:00Z", "2026-03-09T04:30:00Z"]
    assert texts(digestd.next_times(rule, at_ms("2026-03-09T04:15:00Z"), 1)) == ["2026-03-09T04:30:00Z"]


def test_an_offset_shifts_an_interval_and_counts_modulo_its_length():
    at = at_ms("2026-03-09T04:07:00Z")
    for offset in (5 * digestd.MINUTE, 65 * digestd.MINUTE):
        rule = digestd.parse_rule("every 15m", digestd.UTC, offset)
        assert texts(digestd.next_times(rule, at, 2)) == ["2026-03-09T04:20:00Z", "2026-03-09T04:35:00Z"]


def test_intervals_run_on_real_time_while_the_clocks_go_back():
    rule = digestd.parse_rule("every 30m", digestd.load_zone("Europe/Berlin"))
    begin = at_ms("2025-10-25T22:00:00Z")
    assert digestd.next_times(rule, begin, 12) == [begin + n * 30 * digestd.MINUTE for n in range(1, 13)]


# -- rules as a person writes them -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("daily at 09:00", ["2026-03-10T09:00:00Z", "2026-03-11T09:00:00Z"]),
        ("every day at 9:00", ["2026-03-10T09:00:00Z", "2026-03-11T09:00:00Z"]),
        ("Daily  AT 21:30:15", ["2026-03-09T21:30:15Z", "2026-03-10T21:30:15Z"]),
        ("daily", ["2026-03-10T00:00:00Z", "2026-03-11T00:00:00Z"]),
        ("hourly", ["2026-03-09T10:00:00Z", "2026-03-09T11:00:00Z"]),
        ("every hour", ["2026-03-09T10:00:00Z", "2026-03-09T11:00:00Z"]),
        ("every minute", ["2026-03-09T09:01:00Z", "2026-03-09T09:02:00Z"]),
        ("every monday at 9:00", ["2026-03-16T09:00:00Z", "2026-03-23T09:00:00Z"]),
        ("weekly on mon, thu at 08:30", ["2026-03-12T08:30:00Z", "2026-03-16T08:30:00Z"]),
        ("every tue and sat at 7:05", ["2026-03-10T07:05:00Z", "2026-03-14T07:05:00Z"]),
        ("monthly on 1, last at 08:00", ["2026-03-31T08:00:00Z", "2026-04-01T08:00:00Z"]),
        ("every month on first monday at 12:00", ["2026-04-06T12:00:00Z", "2026-05-04T12:00:00Z"]),
        ("every 1h30m", ["2026-03-09T10:30:00Z", "2026-03-09T12:00:00Z"]),
        ("0 9 * * *", ["2026-03-10T09:00:00Z", "2026-03-11T09:00:00Z"]),
        ("@weekly", ["2026-03-15T00:00:00Z", "2026-03-22T00:00:00Z"]),
    ],
)
def test_a_rule_in_words_means_what_it_says(text, expected):
    assert texts(digestd.next_times(digestd.parse_rule(text), at_ms("2026-03-09T09:00:00Z"), 2)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "every", "every 15", "every 0s", "every -5m", "every blue moon", "daily at 25:00", "daily at 9",
        "daily at 09:60", "daily at 9:00 pm", "hourly at 09:00", "every minute on monday", "daily on monday",
        "weekly on someday", "weekly on 1", "monthly on 0", "monthly on 32", "monthly on sixth monday",
        "monthly on monday", "yearly", "tomorrow",
    ],
)  # fmt: skip
def test_a_rule_in_words_that_means_nothing_is_refused(text):
    with pytest.raises(digestd.RuleError):
        digestd.parse_rule(text)


# -- scheduled windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", params(load("windows_novu")))
def test_a_scheduled_rule_ends_where_novu_would_or_should(row):
    # Left out: rows that repeat every n minutes, hours, days, weeks or months, which digestd writes as cron or window.
    rule = digestd.scheduled_rule(row["every"], row.get("at"), row.get("on"), digestd.load_zone(row["timezone"]))
    assert texts(digestd.next_times(rule, at_ms(row["from"]), len(row["next"]))) == row["next"]


DIGEST = '[workflows.w]\n[[workflows.w.steps]]\nid = "d"\ntype = "digest"\n'
WINDOWS = load("windows")
UNITS = {"seconds": "s", "minutes": "m", "hours": "h", "days": "d", "weeks": "w", "months": "mo"}


def digest_step(folder: pathlib.Path, **fields: object) -> digestd.DigestStep:
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items() if value is not None)
    return digestd.read_config(DIGEST + lines, folder / "config.toml").workflows["w"].steps[0]


@pytest.mark.parametrize("row", params([row for row in WINDOWS if row["kind"] == "regular"]))
def test_a_regular_window_is_a_fixed_length_from_its_first_event(row, tmp_path):
    step = digest_step(tmp_path, window=f"{row['amount']}{UNITS[row['unit']]}")
    assert texts([step.closes_at(at_ms(row["first_event"]), row["tz"])]) == [row["closes"]]


@pytest.mark.parametrize("row", params([row for row in WINDOWS if row["kind"] == "scheduled"]))
def test_a_scheduled_window_ends_at_the_next_boundary_in_the_zone(row, tmp_path):
    every = row["every"]
    on = every.get("days") or ([f"{every['ordinal']} {every['day']}"] if "ordinal" in every else None)
    for step in (
        digest_step(tmp_path, every=every["unit"], at=every.get("at"), on=on),
        digest_step(tmp_path, cron=row["as_cron"]),
    ):
        closes = step.closes_at(at_ms(row["first_event"]), row["tz"])
        assert texts([closes, step.closes_at(closes, row["tz"])]) == [row["closes"], row["next_close"]]


def length(span):
    return f"{span['amount']}{UNITS[span['unit']]}"


def play_events(world, row, settings):
    """The events of a row, at their times, through a digest step; what was sent, when."""
    w = world(
        '[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\n'
        + f'{DIGEST}key = "payload.k"\nwindow = "{length(row["window"])}"\n{settings}'
        + '[[workflows.w.steps]]\nid = "send"\ntype = "chat"\nsender = "hook"\n'
    )
    w.clock.at = at_ms(row["events"][0]["at"]) - 1
    for event in row["events"]:
        # What is due before the event happens first; what is due with it meets the event before any tick.
        w.run_until(at_ms(event["at"]) - 1)
        w.clock.at = at_ms(event["at"])
        w.trigger("w", event.get("subscriber", "s1"), {"k": event["key"], "id": event["id"]})
    w.advance("1h")
    return w


@pytest.mark.parametrize("row", params([row for row in WINDOWS if row["kind"] == "lookback"]))
def test_a_digest_that_starts_when_repeated_sends_the_first_at_once(row, world):
    w = play_events(world, row, f'start = "when_repeated"\nlook_back = "{length(row["lookback"])}"\n')
    sent = [
        {
            "at": digestd.iso_text(at),
            "type": "immediate" if body["data"]["digest"]["id"] is None else "digest",
            "key": body["data"]["digest"]["key"],
            "events": [event["payload"]["id"] for event in body["data"]["digest"]["events"]],
        }
        for (at, _, _), body in zip(w.sent, w.bodies(), strict=True)
    ]
    assert sent == row["expected"]


@pytest.mark.parametrize("row", params([row for row in WINDOWS if row["kind"] == "sequence"]))
def test_events_in_sequence_fall_into_the_windows_of_the_row(row, world):
    w = play_events(world, row, "")
    sent = [
        {
            "at": digestd.iso_text(at),
            "subscriber": body["data"]["subscriber"]["subscriberId"],
            "key": body["data"]["digest"]["key"],
            "events": [event["payload"]["id"] for event in body["data"]["digest"]["events"]],
        }
        for (at, _, _), body in zip(w.sent, w.bodies(), strict=True)
    ]
    assert sent == row["expected"]


@pytest.mark.parametrize(
    ("every", "at", "on"),
    [
        ("minute", "09:00", None), ("hour", None, ["monday"]), ("day", "9", None), ("day", "24:00", None),
        ("day", "09:60", None), ("day", "09:00", ["monday"]), ("week", "09:00", ["someday"]), ("week", "09:00", [1]),
        ("week", "09:00", ["m"]), ("month", "09:00", [0]), ("month", "09:00", [32]), ("month", "09:00", [True]),
        ("month", "09:00", [1.5]), ("month", "09:00", ["sixth monday"]), ("month", "09:00", ["first"]),
        ("month", "09:00", ["last 3"]), ("month", "09:00", ["monday"]), ("year", "09:00", None), ("day", 9, None),
    ],
)  # fmt: skip
def test_a_scheduled_rule_that_means_nothing_is_refused(every, at, on):
    with pytest.raises(digestd.RuleError):
        digestd.scheduled_rule(every, at, on)


def test_day_31_and_the_last_day_are_one_boundary_where_they_meet():
    rule = digestd.scheduled_rule("month", "08:00", [31, "last", "last day"])
    days = ["2026-01-31", "2026-02-28", "2026-03-31", "2026-04-30"]
    assert texts(digestd.next_times(rule, at_ms("2026-01-01T00:00:00Z"), 4)) == [f"{day}T08:00:00Z" for day in days]


@given(item=MONTH_DAYS, year=st.integers(2020, 2032), month=st.integers(1, 12))
@settings(deadline=None, max_examples=150)
def test_days_of_a_month_in_words_agree_with_counting_them(item, year, month):
    length = calendar.monthrange(year, month)[1]
    days = [dt.date(year, month, day) for day in range(1, length + 1)]
    if item == "last":
        expected = days[-1:]
    elif isinstance(item, int):
        expected = [day for day in days if day.day == item]
    else:
        which, kind = item.split(" ", 1)
        names = [name.lower()[:3] for name in DAYS]  # Monday first, as date.weekday counts
        wanted = {"day": range(7), "weekday": range(5), "weekend day": (5, 6)}.get(kind) or [
            names.index(kind.lower()[:3])
        ]
        fitting = [day for day in days if day.weekday() in wanted]
        place = -1 if which == "last" else ["first", "second", "third", "fourth"].index(which)
        expected = [fitting[place]]
    start = int(dt.datetime(year, month, 1, tzinfo=dt.UTC).timestamp()) * 1000 - 1
    rule = digestd.scheduled_rule("month", "00:00", [item])
    found = [digestd.local_time(at, digestd.UTC).date() for at in digestd.next_times(rule, start, 2)]
    assert [day for day in found if (day.year, day.month) == (year, month)] == expected


# -- the subscriber's weekly hours -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", params([row for row in load("schedule_novu") if "inside" in row]))
def test_inside_the_hours_as_novu_says_or_should(row):
    schedule = digestd.parse_schedule(row["schedule"], digestd.load_zone(row["timezone"] or "UTC"))
    at = at_ms(row["at"])
    assert (schedule is None or schedule.is_inside(at)) == row["inside"]
    assert (schedule is None or schedule.next_start(at) == at) == row["inside"]


@pytest.mark.parametrize("row", params([row for row in load("schedule_novu") if "next" in row]))
def test_the_next_start_as_novu_says_or_should(row):
    schedule = digestd.parse_schedule(row["schedule"], digestd.load_zone(row["timezone"] or "UTC"))
    at = at_ms(row["at"])
    found = at if schedule is None else schedule.next_start(at)
    assert found == (None if row["next"] is None else at_ms(row["next"]))


SCHEDULES = load("schedule")
SETTLED = [row for row in SCHEDULES if "kind" not in row]
CHANNELS = ("email", "sms", "push", "chat", "in_app")


def api_form(weekly: dict | None) -> dict | None:
    """The schedule of a row as the API takes it; every other one in Novu's spelling of hours."""
    if weekly is None:
        return None

    def spelled(time: str, novu: bool) -> str:
        return dt.datetime.strptime(time, "%H:%M").strftime("%I:%M %p") if novu else time

    week = {}
    for number, name in enumerate(digestd.LONG_DAYS):
        slots = weekly["days"].get(name[:3])
        week[name] = {"isEnabled": slots is not None}
        if slots is not None:
            novu = number % 2 == 0
            week[name]["hours"] = [{"start": spelled(start, novu), "end": spelled(end, novu)} for start, end in slots]
    return {"isEnabled": weekly["enabled"], "weeklySchedule": week}


def scheduled_world(world, row: dict) -> World:
    """A world whose one window ends at the row's instant."""
    steps = f'window = "10m"\nextend_to_schedule = {json.dumps(row["toggle"])}\n'
    for channel in CHANNELS:
        steps += f'[[workflows.w.steps]]\nid = "{channel}"\ntype = "{channel}"\n'
        steps += 'sender = "log"\n' if channel != "in_app" else ""
    critical = DIGEST.replace("[workflows.w]", f"[workflows.w]\ncritical = {json.dumps(row['critical'])}")
    w = world('[senders.log]\ntype = "log"\n' + critical + steps)
    w.clock.at = at_ms(row["window_end"]) - 10 * digestd.MINUTE
    return w


def channels(w: World) -> dict[str, dict]:
    """What became of each channel, in the words of the rows."""
    found = {}
    for step, state, finished_at, reason in w.rows("SELECT step, state, finished_at, reason FROM jobs"):
        assert (state, reason) in (("completed", None), ("skipped", "outside the subscriber's schedule")), (
            step,
            state,
            reason,
        )
        delivered = state == "completed"
        found[step] = {
            "result": "deliver" if delivered else "skip",
            "at": digestd.iso_text(finished_at) if delivered else None,
        }
    return found


@pytest.mark.parametrize("row", params(SETTLED))
def test_inside_and_the_next_start_as_the_row_says(row):
    schedule = digestd.parse_schedule(api_form(row["weekly"]), digestd.load_zone(row["tz"] or "UTC"))
    end, expected = at_ms(row["window_end"]), row["expected"]
    if row["weekly"] is None or not row["weekly"]["enabled"]:
        assert schedule is None
    elif expected["action"] == "hold":
        assert not schedule.is_inside(end)
        assert digestd.iso_text(schedule.next_start(end)) == expected["resume_at"]
    elif expected["action"] == "send_now" and not row["critical"]:
        assert schedule.is_inside(end) and schedule.next_start(end) == end
    else:
        assert not schedule.is_inside(end) and schedule.next_start(end) != end


@pytest.mark.parametrize("row", params(SETTLED))
def test_a_window_that_ends_is_held_skipped_or_sent_as_the_row_says(row, world):
    w = scheduled_world(world, row)
    w.subscriber("s1", timezone=row["tz"], schedule=api_form(row["weekly"]))
    w.trigger("w")
    end, resume_at = at_ms(row["window_end"]), row["expected"]["resume_at"]
    w.run_until(end)
    held = ("held", at_ms(resume_at), 1) if resume_at else ("closed", end, 0)
    assert w.one("SELECT state, due_at, waits FROM digests") == held
    w.run_until((at_ms(resume_at) if resume_at else end) + 1000)
    assert channels(w) == row["expected"]["channels"]
    feed = [digestd.iso_text(at) for (at,) in w.rows("SELECT created_at FROM inbox_messages")]
    assert feed == [row["expected"]["channels"]["in_app"]["at"]]


@pytest.mark.parametrize("row", params([row for row in SCHEDULES if "kind" in row]))
def test_a_schedule_that_changes_during_a_wait_is_read_again_on_each_wake(row, world):
    w = scheduled_world(world, row)
    w.subscriber("s1", timezone=row["tz"], schedule=api_form(row["schedules"][0]["weekly"]))
    w.trigger("w")
    waits = [at_ms(text) for text in row["expected"]["waits"]]
    changes = [(at_ms(change["from"]), change["weekly"]) for change in row["schedules"][1:]]
    wakes = [at_ms(row["window_end"]), *waits]
    for number, until in enumerate(waits):
        w.run_until(wakes[number])
        assert w.one("SELECT state, due_at, waits FROM digests") == ("held", until, number + 1)
        for at, weekly in changes:
            if wakes[number] < at < until:
                w.run_until(at)
                w.subscriber("s1", schedule=api_form(weekly))
                w.tick()
                assert w.one("SELECT due_at FROM digests") == until  # a change does not move the chosen time
        w.run_until(until - 1)
        assert w.one("SELECT count(*) FROM jobs") == 0  # in-app waits too
    w.run_until(at_ms(row["expected"]["at"]))
    assert w.one("SELECT state, waits FROM digests") == ("closed", len(waits))
    w.advance("1s")
    assert channels(w) == row["expected"]["channels"]


def clock_text(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


@st.composite
def weeks_near(draw, place) -> dict:
    """Weekly hours, many of which begin or end near the wall-clock time of the zone's change."""
    name, _, change = place
    change = change or (0, dt.timedelta(), dt.timedelta())
    walls = [dt.datetime.fromtimestamp(change[0], dt.UTC) + offset for offset in change[1:]]
    wall = draw(st.sampled_from(walls)) + dt.timedelta(minutes=draw(st.integers(-9, 9)) * 15)
    near = wall.hour * 60 + wall.minute
    minutes = st.one_of(
        st.just(near), st.integers(near - 60, near + 90).map(lambda minute: minute % 1440), st.integers(0, 1439)
    )
    week = {}
    for weekday in draw(st.sets(st.integers(0, 6), max_size=2)) | {wall.isoweekday() % 7}:
        slots = [
            {"start": clock_text(draw(minutes)), "end": clock_text(draw(st.one_of(minutes, st.just(1440))))}
            for _ in range(draw(st.integers(0, 3)))
        ]
        enabled = draw(st.integers(0, 9)) > 0
        week[digestd.LONG_DAYS[weekday]] = {"isEnabled": enabled, "hours": slots}
    return week


@given(data=st.data(), place=near_clock_changes())
@settings(deadline=None, max_examples=100)
def test_inside_and_next_start_never_disagree(data, place):
    name, at, _ = place
    week = data.draw(weeks_near(place))
    schedule = digestd.parse_schedule({"isEnabled": True, "weeklySchedule": week}, digestd.load_zone(name))
    start = schedule.next_start(at)
    assert (start == at) == schedule.is_inside(at)
    if start == at:
        return
    # Both ends of a slot, and every change of a clock in these years, lie on a whole minute.
    last = at + 9 * digestd.DAY if start is None else start - 1
    first_minute = at - at % digestd.MINUTE + digestd.MINUTE
    missed = next(
        (minute for minute in range(first_minute, last + 1, digestd.MINUTE) if schedule.is_inside(minute)), None
    )
    assert missed is None, (digestd.iso_text(missed), start and digestd.iso_text(start))
    assert start is None or schedule.is_inside(start)


def inside_by_hand(week: dict, local: dt.datetime) -> bool:
    """Whether a wall time is in a slot, by looking at the minute of the week."""
    minute = local.isoweekday() % 7 * 1440 + local.hour * 60 + local.minute
    for name, day in week.items():
        for hours in day["hours"] if day["isEnabled"] else ():
            start, end = (int(hours[key][:2]) * 60 + int(hours[key][3:]) for key in ("start", "end"))
            midnight = digestd.LONG_DAYS.index(name) * 1440
            if end == 1440:
                end = 1439  # 24:00 is the end of the day, not a minute of the next
            elif end < start:
                end += 1440
            if (minute - midnight - start) % (7 * 1440) <= end - start:
                return True
    return False


@given(data=st.data(), place=near_clock_changes())
@settings(deadline=None, max_examples=150)
def test_inside_is_a_matter_of_the_wall_clock_alone(data, place):
    name, at, _ = place
    week = data.draw(weeks_near(place))
    schedule = digestd.parse_schedule({"isEnabled": True, "weeklySchedule": week}, digestd.load_zone(name))
    for shift in range(-6, 7):
        moment = at + shift * 7 * digestd.HOUR
        wall = dt.datetime.fromtimestamp(moment // 1000, zoneinfo.ZoneInfo(name)).replace(tzinfo=None)
        assert schedule.is_inside(moment) == inside_by_hand(week, wall), (digestd.iso_text(moment), wall)


@pytest.mark.parametrize(
    ("start", "end", "inside", "outside"),
    [
        ("12:00 AM", "12:30 PM", "00:00", "12:31"),
        ("9:00 am", "5:00PM", "17:00", "17:01"),
        ("09:00", "17:00", "09:00", "08:59"),
        ("9:00am", "05:00 pm", "12:00", "18:00"),
        ("13:00", "24:00", "23:59", "12:59"),
        ("12:00 PM", "12:59 PM", "12:30", "00:30"),
    ],
)
def test_hours_are_read_in_each_spelling(start, end, inside, outside):
    week = {"monday": {"isEnabled": True, "hours": [{"start": start, "end": end}]}}
    schedule = digestd.parse_schedule({"isEnabled": True, "weeklySchedule": week})
    assert schedule.is_inside(at_ms(f"2024-01-01T{inside}:30Z"))
    assert not schedule.is_inside(at_ms(f"2024-01-01T{outside}:30Z"))


def test_hours_until_24_end_with_the_day():
    week = {"monday": {"isEnabled": True, "hours": [{"start": "09:00", "end": "24:00"}]}}
    schedule = digestd.parse_schedule({"isEnabled": True, "weeklySchedule": week})
    assert schedule.is_inside(at_ms("2024-01-01T23:59:59.999Z")) and not schedule.is_inside(
        at_ms("2024-01-02T00:00:00Z")
    )


@pytest.mark.parametrize(
    "time", ["25:00", "24:01", "09:60", "noon", "", "9", "13:00 PM", "0:30 AM", "9:0", "-1:00", 900, None]
)
@pytest.mark.parametrize("end", ["start", "end"])
def test_hours_that_are_no_time_of_day_are_refused(time, end):
    hours = {"start": "09:00", "end": "17:00", end: time}
    with pytest.raises(digestd.RuleError):
        digestd.parse_schedule({"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [hours]}}})


LATE = {"start": "24:00", "end": "02:00"}


@pytest.mark.parametrize(
    "value",
    [
        "always", [], {}, {"isEnabled": "yes"}, {"isEnabled": 1}, {"weeklySchedule": {}},
        {"isEnabled": True, "weeklySchedule": {}}, {"isEnabled": True, "weeklySchedule": []},
        {"isEnabled": True, "weeklySchedule": {"mon": {"isEnabled": True}}},
        {"isEnabled": True, "weeklySchedule": {"Monday": {"isEnabled": True}}},
        {"isEnabled": True, "weeklySchedule": {"monday": True}},
        {"isEnabled": True, "weeklySchedule": {"monday": {"hours": []}}},
        {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": "9-5"}}},
        {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [["09:00", "17:00"]]}}},
        {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [{"start": "09:00"}]}}},
        {"isEnabled": False, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [{"start": "x", "end": "y"}]}}},
        {"isEnabled": True, "weeklySchedule": {"friday": {"isEnabled": True, "hours": [LATE]}}},
    ],
)  # fmt: skip
def test_a_schedule_of_another_shape_is_refused(value):
    with pytest.raises(digestd.RuleError):
        digestd.parse_schedule(value)


# -- zones -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "Europe", "x" * 300, "leapseconds", "__init__.py", "", " ", "../../etc/localtime", "/usr/share/zoneinfo/UTC",
        "America/New\ud800York", "Europe/Berlin\0", "PST", "CST", "IST", "UTC+2", "GMT+5", "europe/paris", "utc",
        "America/New_York ", "right/UTC", "posix/UTC", "posixrules", "localtime", "Factory", "tzdata.zi", "zone.tab",
        "Mars/Phobos", "Europe//Berlin", "Europe/../Europe/Berlin", None, 5, "Ünited/Kingdom",
    ],
)  # fmt: skip
def test_a_name_that_is_no_zone_is_refused_by_name(name):
    with pytest.raises(digestd.RuleError) as refused:
        digestd.load_zone(name)
    assert repr(name)[:40].rstrip("'") in refused.value.message and len(refused.value.message) < 400


@pytest.mark.parametrize("name", ["Europe/Kiev", "Europe/Kyiv", "US/Pacific", "Asia/Calcutta", "Etc/GMT+5", "GMT"])
def test_an_old_name_of_a_zone_is_accepted(name):
    assert digestd.load_zone(name).key == name


# -- the command -------------------------------------------------------------------------------------------------------

MIXED = [
    {"rule": "0 9 * * *", "from": "2025-01-01T00:00:00Z", "n": 2},
    {"rule": "30 2 * * *", "timezone": "America/New_York", "from": "2025-03-08T12:00:00Z", "n": 1},
    {"rule": "every 15m", "from": "2025-01-01T04:07:00Z", "n": 2},
    {"rule": "daily at 09:00", "timezone": "Asia/Tokyo", "from": "2025-01-01T00:00:00+09:00", "n": 1},
    {"rule": "60 * * * *"},
    {"rule": "0 9 * * *", "timezone": "Mars/Phobos"},
    {"rule": "0 9 * * *", "from": "yesterday"},
    {"rule": "0 9 * * *", "n": 0},
    {"rule": "0 9 * * *", "n": True},
    {"rule": "0 9 * * *", "timezone": 5},
    {"rule": "0 9 * * *", "from": 5},
    {"rule": None},
    {"timezone": "UTC"},
    ["0 9 * * *"],
    "0 9 * * *",
]


def test_next_answers_each_line_with_times_or_the_reason(cli):
    lines = [json.dumps(line) for line in MIXED] + ["{broken", '{"rule": NaN}']
    done = cli("next", "--jsonl", "-", input="\n".join(lines[:3]) + "\n\n" + "\n".join(lines[3:]) + "\n")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert answers[:4] == [
        {"next": ["2025-01-01T09:00:00Z", "2025-01-02T09:00:00Z"]},
        {"next": ["2025-03-09T07:30:00Z"]},
        {"next": ["2025-01-01T04:15:00Z", "2025-01-01T04:30:00Z"]},
        {"next": ["2025-01-01T00:00:00Z"]},
    ]
    assert len(answers) == len(lines)
    for answer, line in zip(answers[4:], lines[4:], strict=True):
        assert list(answer) == ["error"] and isinstance(answer["error"], str) and answer["error"], line


@pytest.mark.parametrize("rule", ["0 9 * * *", "every 15m", "monthly on last at 09:00"])
def test_next_from_the_edge_of_the_calendar_breaks_no_other_line(cli, rule):
    edges = ["9999-12-31T23:59:59Z", "9999-12-31T23:59:60Z", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00"]
    zones = ["UTC", "Pacific/Kiritimati", "America/Adak"]
    lines = [{"rule": rule, "timezone": zone, "from": at} for zone in zones for at in edges]
    lines.append({"rule": "every 15m", "from": "2025-01-01T04:07:00Z", "n": 1})
    done = cli("next", "--jsonl", "-", input="\n".join(map(json.dumps, lines)))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert [list(answer) in (["next"], ["error"]) for answer in answers] == [True] * len(lines)
    assert answers[-1] == {"next": ["2025-01-01T04:15:00Z"]}


def test_next_answers_a_thousand_mixed_rules_of_which_none_breaks_another(cli):
    rows = [row for row in TABLES if "cron" in row and "from" in row and "start" not in row]
    rows = [random.Random(7).choice(rows) for _ in range(1000)]
    lines = [
        json.dumps({"rule": row["cron"], "timezone": row["timezone"], "from": row["from"], "n": 1}) for row in rows
    ]
    done = cli("next", "--jsonl", "-", input="\n".join(lines))
    assert done.returncode == 0
    for row, line in zip(rows, done.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        if "error" in row:
            assert list(answer) == ["error"], row["id"]
        elif row.get("next"):
            assert answer == {"next": row["next"][:1]} or ("end" in row and not row["next"]), row["id"]


@pytest.mark.parametrize("host", ["America/New_York", "Pacific/Kiritimati"])
def test_the_next_times_do_not_depend_on_the_zone_of_the_machine(cli, host):
    done = cli(
        "next",
        "0 9 * * MON",
        "--timezone",
        "Asia/Tokyo",
        "--from",
        "2024-01-03T13:00:00Z",
        "-n",
        "1",
        "--json",
        TZ=host,
    )
    assert json.loads(done.stdout) == {"next": ["2024-01-08T00:00:00Z"]}
    done = cli("next", "daily at 09:00", "--from", "2024-01-03T13:00:00Z", "-n", "1", "--json", TZ=host)
    assert json.loads(done.stdout) == {"next": ["2024-01-04T09:00:00Z"]}


# -- hours as a person writes them -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("mon-fri 09:00-17:00", None),
        ("Mon-Fri 9:00am-5:00pm", "mon-fri 09:00-17:00"),
        ("mon-fri 09:00-17:00, sat 10:00-12:00 14:00-16:00", None),
        ("sat 10:00-12:00, monday 09:00-17:00, sat 14:00-16:00", "mon 09:00-17:00, sat 10:00-12:00 14:00-16:00"),
        ("fri-mon 22:00-06:00", "mon 22:00-06:00, fri-sun 22:00-06:00"),
        ("daily 00:00-24:00", "mon-sun 00:00-24:00"),
        ("always", None),
        (" ALWAYS ", "always"),
    ],
)
def test_hours_in_words_are_a_schedule_and_words_again(text, again):
    schedule = digestd.parse_hours(text)
    assert digestd.hours_text(schedule) == (again or text)
    assert digestd.parse_hours(digestd.hours_text(schedule)) == schedule


def test_hours_in_words_are_written_as_the_clients_of_novu_do():
    assert digestd.parse_hours("tue 0:30-12:00") == {
        "isEnabled": True,
        "weeklySchedule": {"tuesday": {"isEnabled": True, "hours": [{"start": "12:30 AM", "end": "12:00 PM"}]}},
    }


@pytest.mark.parametrize(
    "text",
    ["", "mon", "mon-fri", "09:00-17:00", "mon 9-17", "mon 09:00", "mon 09:00-25:00", "funday 09:00-17:00", "mon-tues 1:00-2:00",
     "mon 09:00-17:00,", "mon 24:00-06:00", "mon 09:00 - 17:00"],
)  # fmt: skip
def test_hours_in_words_that_mean_nothing_are_refused(text):
    with pytest.raises(digestd.RuleError):
        digestd.parse_hours(text)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (None, "always"),
        ({"isEnabled": False, "weeklySchedule": {"monday": {"isEnabled": False}}}, "always"),
        ({"isEnabled": True}, "always"),
        ({"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": False, "hours": []}}}, "never"),
    ],
)
def test_a_schedule_reads_as_words(schedule, text):
    assert digestd.hours_text(schedule) == text
