"""Durations and instants: from text to milliseconds, and back."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import digestd

# -- durations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1ms", 1), ("500ms", 500), ("1s", 1_000), ("5s", 5_000), ("60s", 60_000), ("90s", 90_000), ("1m", 60_000),
        ("5m", 300_000), ("10m", 600_000), ("30m", 1_800_000), ("1h", 3_600_000), ("2h", 7_200_000),
        ("1h30m", 5_400_000), ("5h", 18_000_000), ("24h", 86_400_000), ("1d", 86_400_000), ("7d", 604_800_000),
        ("1w", 604_800_000), ("2w", 1_209_600_000), ("1mo", 2_592_000_000), ("3mo", 7_776_000_000),
        ("60d", 5_184_000_000),
        ("1mo2w3d4h5m6s7ms", 2_592_000_000 + 1_209_600_000 + 259_200_000 + 14_400_000 + 306_007), ("010m", 600_000),
        ("1d12h", 129_600_000), ("1s500ms", 1_500), ("1000000h", 3_600_000_000_000),
    ],
)  # fmt: skip
def test_a_duration_is_its_length_in_ms(text, ms):
    assert digestd.parse_duration(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "0s", "0ms", "0h0m", "10", "m", "-5m", "+5m", "1.5m", "0.5s", "1,5m", "5 m", " 5m", "5m ", "5M",
        "5min", "5minutes", "1y", "1 year", "1fortnight", "30m1h", "1h1h", "5m5m", "1h30", "٥m", "５m", "1e3s",
        "0x10s", "inf", "nans", "5m\n", "every 5m", "1mo1y", "9" * 400 + "s", "1000000mo", "100000000000d",
    ],
)  # fmt: skip
def test_a_text_that_is_no_duration_is_refused(text):
    with pytest.raises(digestd.RuleError) as refused:
        digestd.parse_duration(text)
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize(
    "value", [5, 0, -5, 1.5, True, float("nan"), None, ["5m"], {"amount": 5, "unit": "minutes"}, b"5m"]
)
def test_a_value_that_is_no_text_is_no_duration(value):
    with pytest.raises(digestd.RuleError):
        digestd.parse_duration(value)


def test_months_and_weeks_are_not_mistaken_for_minutes():
    assert digestd.parse_duration("1mo") == 30 * 24 * 60 * digestd.parse_duration("1m")
    assert digestd.parse_duration("1w") == 7 * digestd.parse_duration("1d")
    assert digestd.parse_duration("1m") == 60_000 * digestd.parse_duration("1ms")


@given(st.integers(1, 3_000 * 365 * digestd.DAY))
@settings(deadline=None)
def test_a_span_written_out_reads_back_the_same(span):
    assert digestd.parse_duration(digestd.duration_text(span)) == span


@pytest.mark.parametrize(
    ("span", "text"),
    [(0, "0s"), (5_400_000, "1h30m"), (86_400_000, "1d"), (1, "1ms"), (-90_000, "-1m30s"), (61_001, "1m1s1ms")],
)
def test_a_span_is_written_as_the_config_would(span, text):
    assert digestd.duration_text(span) == text


# -- instants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2025-01-01T12:00:00Z", "2025-01-01T12:00:00Z"),
        ("2025-12-31T23:59:59Z", "2025-12-31T23:59:59Z"),
        ("2025-06-15T08:30:00.123Z", "2025-06-15T08:30:00.123Z"),
        ("2025-06-15T08:30:00.12Z", "2025-06-15T08:30:00.120Z"),
        ("2025-06-15T08:30:00.1Z", "2025-06-15T08:30:00.100Z"),
        ("2025-06-15T08:30:00.123999Z", "2025-06-15T08:30:00.123Z"),
        ("2025-06-15T08:30:00.0Z", "2025-06-15T08:30:00Z"),
        ("2025-06-15T08:30:00+02:00", "2025-06-15T06:30:00Z"),
        ("2025-06-15T08:30:00+0200", "2025-06-15T06:30:00Z"),
        ("2025-06-15T08:30:00-05:30", "2025-06-15T14:00:00Z"),
        ("2025-06-15T08:30:00-00:00", "2025-06-15T08:30:00Z"),
        ("2025-06-15 08:30:00Z", "2025-06-15T08:30:00Z"),
        ("2025-06-15t08:30:00z", "2025-06-15T08:30:00Z"),
        ("2025-06-15T08:30Z", "2025-06-15T08:30:00Z"),
        ("2024-02-29T00:00:00Z", "2024-02-29T00:00:00Z"),
        ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00Z"),
        ("2016-12-31T23:59:60.500Z", "2017-01-01T00:00:00.500Z"),
        ("1969-12-31T23:59:59.250Z", "1969-12-31T23:59:59.250Z"),
        ("2038-01-19T03:14:08Z", "2038-01-19T03:14:08Z"),
        ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59Z"),
    ],
)
def test_an_instant_is_read_to_the_millisecond(text, utc):
    assert digestd.iso_text(digestd.parse_instant(text)) == utc


def test_an_instant_counts_from_1970_utc():
    assert digestd.parse_instant("1970-01-01T00:00:00Z") == 0
    assert digestd.parse_instant("2026-03-09T09:00:00Z") == 1_773_046_800_000


@pytest.mark.parametrize(
    "text",
    [
        "", "2025-01-01", "12:00:00", "invalid-date", "2025/01/01 12:00:00", "2025-13-01T12:00:00Z",
        "2025-01-32T12:00:00Z", "2025-02-30T12:00:00Z", "2025-02-29T12:00:00Z", "2025-00-10T12:00:00Z",
        "2025-01-00T12:00:00Z", "0000-01-01T00:00:00Z", "2025-01-01T24:00:00Z", "2025-01-01T12:60:00Z",
        "2025-01-01T12:00:61Z", "2025-01-01T12:00:00+24:00", "2025-01-01T12:00:00+02:60", "2025-01-01T12:00:00UTC",
        "2025-01-01T12:00:00 Europe/Berlin", "2025-01-01T12Z", "2025-01-01T12:00:00.Z", "2025-1-1T12:00:00Z",
        "25-01-01T12:00:00Z", "٢025-01-01T12:00:00Z", "+2025-01-01T12:00:00Z", "10000-01-01T00:00:00Z",
        "2025-W01-1T12:00:00Z", "1735732800", "now", "tomorrow", "2025-01-01T12:00:00Zx",
    ],
)  # fmt: skip
def test_a_text_that_is_no_real_instant_is_refused(text):
    with pytest.raises(digestd.RuleError):
        digestd.parse_instant(text)


@pytest.mark.parametrize(
    "value", [None, 5, 1.5, True, b"2025-01-01T12:00:00Z", ["2025-01-01T12:00:00Z"], dt.datetime(2025, 1, 1)]
)
def test_a_value_that_is_no_text_is_no_instant(value):
    with pytest.raises(digestd.RuleError):
        digestd.parse_instant(value)


def test_an_instant_without_an_offset_is_refused_unless_a_zone_is_given():
    with pytest.raises(digestd.RuleError) as refused:
        digestd.parse_instant("2025-06-15T08:30:00")
    assert "offset" in refused.value.message
    berlin = digestd.load_zone("Europe/Berlin")
    assert digestd.iso_text(digestd.parse_instant("2025-06-15T08:30:00", berlin)) == "2025-06-15T06:30:00Z"
    assert digestd.iso_text(digestd.parse_instant("2025-01-15T08:30:00", berlin)) == "2025-01-15T07:30:00Z"
    assert digestd.iso_text(digestd.parse_instant("2025-06-15T08:30:00Z", berlin)) == "2025-06-15T08:30:00Z"


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "9999-12-31T23:59:60Z"])
def test_an_instant_outside_the_calendar_is_refused_or_can_be_written(text):
    try:
        at = digestd.parse_instant(text)
    except digestd.RuleError:
        return
    assert digestd.iso_text(at)


@given(st.integers(-62_135_596_800_000, digestd.FAR_FUTURE))
@example(-30_610_224_000_001)  # the last instant of year 999: a year has four digits
@settings(deadline=None)
def test_an_instant_written_out_reads_back_the_same(at):
    assert digestd.parse_instant(digestd.iso_text(at)) == at


@given(st.integers(0, digestd.FAR_FUTURE - digestd.DAY), st.integers(-14 * 60, 14 * 60))
@settings(deadline=None)
def test_the_same_instant_in_another_offset_is_the_same(at, minutes):
    zone = dt.timezone(dt.timedelta(minutes=minutes))
    local = (digestd.EPOCH + dt.timedelta(milliseconds=at)).astimezone(zone)
    assert digestd.parse_instant(local.isoformat(timespec="milliseconds")) == at


def test_instants_for_people_are_in_utc_and_nothing_is_a_dash():
    assert digestd.utc_text(1_773_046_800_999) == "2026-03-09 09:00:00"
    assert digestd.utc_text(None) == "-"


def test_a_virtual_clock_stands_still_until_it_is_moved():
    clock = digestd.VirtualClock(5_000)
    assert (clock.now(), clock.now(), clock.monotonic()) == (5_000, 5_000, 5.0)
    clock.at += 1_500
    assert (clock.now(), clock.monotonic()) == (6_500, 6.5)


def test_public_ids_sort_by_time_and_never_repeat():
    early, late = digestd.new_public_id("msg", 1_000), digestd.new_public_id("msg", 2_000)
    assert early.startswith("msg_") and "." not in early
    assert early < late
    assert len({digestd.new_public_id("msg", 1_000) for _ in range(1000)}) == 1000
