#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "aiohttp>=3.14,<4",
#     "aiosmtplib>=5.1,<6",
#     "cronsim>=2.8,<3",
#     "jsonschema-rs>=0.60,<1",
#     "peewee>=4.5.3,<5",
#     "prometheus-client>=0.26,<1",
#     "pydantic>=2.14,<3",
#     "python-liquid>=2.3.6,<3",
#     "schedule>=1.2.2,<2",
#     "tomli>=2.4,<3",
#     "tzdata",
#     "watchfiles>=1.3,<2",
# ]
# ///
"""digestd: one mail instead of thirty, and jobs that repeat, from one file and one SQLite database.

Events come in by HTTP, from the command line, or as rows that another program inserts. A workflow collects them in
windows per subscriber and key; when a window ends, its steps run once for all of them. Repeatables run by cron or at
an interval. Everything that is known is a row in the database; everything that is wished for is in one TOML file.

The map. A section uses only names that stand above it.

    I.   the floor
         1  Vocabulary    states and moves, units, the records that travel between sections
         2  Errors        one base with a hint, few children
         3  Clock         the only place that reads time; text to instants and durations, and back
         4  Calendars     pure: from a rule and an instant to the next instant
         5  Config        TOML to validated settings, every problem at once
         6  Store         open, lock, migrate, models, the guarded move
    II.  the journey of an event, each stage finding rows in one state and leaving them in the next
         7  Ingest        check a trigger and record its events, once
         8  Digests       place events in windows or start their run; close, hold, discard, cancel
         9  Repeatables   specs, each with exactly one pending run
         10 Jobs          begin steps, promote and claim jobs, compose messages
         11 Senders       a message in, a result out; no database, no clock
         12 Outcomes      what happened; the next try, or giving up
    III. the engine
         13 Tick          the stages in order, once, with one now
         14 Daemon        the loop, the inbox, signals, reload, systemd, housekeeping
         15 API           HTTP in and out
         16 Simulator     the same engine under a virtual clock
         17 Commands      the command line

What it promises. A 201, or exit 0 of `digestd trigger`, means that the event is on the disk. Every event is put in
exactly one digest, or kept with the reason why not. A message is sent at least once: at most one repeat for each crash
or unanswered try, always with the same id. One process owns a database at a time; a crash between any two statements
is a pause. Start reading at section 1, jump once to `tick` in section 13, then read sections 7 to 12 in order.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import bisect
import calendar
import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import datetime as dt
import difflib
import errno
import fcntl
import functools
import gc
import hashlib
import hmac
import io
import itertools
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import types
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import cronsim
import peewee
import pydantic
import tomli

if TYPE_CHECKING:
    import ssl

    import liquid

__version__ = "0.1.0"

log = logging.getLogger("digestd")


# ======================================================================================================================
# I. THE FLOOR
# ======================================================================================================================

# ----------------------------------------------------------------------------------------------------------------------
# 1 Vocabulary
# ----------------------------------------------------------------------------------------------------------------------
# Every state and every allowed move. A state is a word in a column; nothing below invents another one.

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
WEEK = 7 * DAY
MONTH = 30 * DAY  # Novu's rule for lengths; calendar months exist only in calendars

CHANNELS = ("email", "sms", "push", "chat", "in_app")
BATCH = 500  # rows that one stage moves in one transaction, so that no caller waits long for its turn
MAX_EVENTS_SHOWN = 10_000  # events listed with their payload in a webhook body
MAX_EVENTS_BYTES = 1 << 20
MAX_BODY = 512 * 1024
MAX_DEPTH = 100  # levels of nesting in a JSON document from outside
MAX_SUBJECT = 150
MAX_WAITS = 3  # holds for the subscriber's hours, in all
FIRST_SAMPLE = 1_704_067_200_000  # 2024, a leap year: calendars are judged from there, never from today
MAX_MISSED = 100  # runs that are made up for after a downtime, where a repeatable asks for all of them
MISSED_MS = 10 * SECOND  # later than that, a run was missed: a restart takes less
FAILURES = 3  # that a sender has in a row, before days of failure disable it
MAX_INTERRUPTIONS = 3  # tries in a row that ended with the process: then the message is held to be the cause

EVENT_MOVES = {("received", "placed"), ("received", "failed"), ("received", "cancelled"), ("placed", "cancelled")}
DIGEST_MOVES = {
    ("open", "held"), ("held", "held"), ("open", "closed"), ("held", "closed"),
    ("open", "discarded"), ("held", "discarded"),
}  # fmt: skip
RUN_MOVES = {
    ("active", "completed"), ("active", "failed"), ("active", "cancelled"), ("active", "merged"),
    ("failed", "active"), ("merged", "cancelled"),
}  # fmt: skip
JOB_MOVES = {
    ("delayed", "waiting"), ("waiting", "active"), ("active", "completed"), ("active", "failed"),
    ("active", "delayed"), ("active", "waiting"), ("failed", "waiting"),
    ("delayed", "cancelled"), ("waiting", "cancelled"), ("delayed", "skipped"), ("waiting", "skipped"),
    ("active", "skipped"), ("active", "cancelled"),
}  # fmt: skip
REPEATABLE_MOVES = {
    ("active", "paused"), ("paused", "active"), ("active", "finished"), ("active", "broken"), ("active", "retired"),
    ("paused", "retired"), ("broken", "active"), ("broken", "retired"), ("finished", "retired"),
    ("finished", "active"), ("retired", "active"),
}  # fmt: skip
SENDER_MOVES = {("ok", "disabled"), ("disabled", "ok")}
MOVES: dict[str, set[tuple[str, str]]] = {
    "events": EVENT_MOVES,
    "digests": DIGEST_MOVES,
    "runs": RUN_MOVES,
    "jobs": JOB_MOVES,
    "repeatables": REPEATABLE_MOVES,
    "senders": SENDER_MOVES,
}
UNFINISHED = "('delayed', 'waiting', 'active')"  # the states of a job that has not ended, as SQL writes them


class Recipient(NamedTuple):
    """One subscriber that a trigger names: the public id and the fields that came with it."""

    subscriber_id: str
    fields: dict[str, Any]


class Trigger(NamedTuple):
    """A checked trigger: one workflow, its recipients, one payload."""

    workflow: str
    recipients: list[Recipient]
    payload: dict[str, Any]
    payload_text: str
    transaction_id: str


class TriggerAnswer(NamedTuple):
    """What the caller of a trigger is told; `errors` is empty when it was taken."""

    status: str
    transaction_id: str | None
    errors: tuple[str, ...] = ()


class Event(NamedTuple):
    """An event that was recorded and has no place yet. Times in ms."""

    id: int
    workflow: str
    subscriber_id: str
    payload: dict[str, Any]
    received_at: int
    transaction_id: str | None = None  # None: another program gave none, and it gets one with its place


class DigestedEvent(NamedTuple):
    """One event as templates and webhook bodies see it, oldest first. Time in ms."""

    id: int
    time_at: int
    payload_text: str
    transaction_id: str | None


@dataclasses.dataclass(slots=True)
class Draft:
    """All that a message is composed from, read at its first try; composing needs neither database nor clock."""

    job_id: int
    public_id: str
    channel: str  # email, sms, push, chat, in_app, or message for a repeatable
    sender: Any  # the sender's settings
    content: Any  # the step or repeatable whose templates are rendered
    now: int
    created_at: int  # when the window closed, the event came, or the slot was
    workflow: str | None = None
    step: str | None = None
    subscriber: dict[str, Any] = dataclasses.field(default_factory=dict)
    digest_id: int | None = None
    digest_key: str = ""
    has_digest: bool = False
    events: list[DigestedEvent] = dataclasses.field(default_factory=list)
    steps: dict[str, list[DigestedEvent]] = dataclasses.field(default_factory=dict)
    digests: dict[str, Any] = dataclasses.field(default_factory=dict)  # the settings of those steps
    waited: dict[str, int] = dataclasses.field(default_factory=dict)  # by delay steps, in ms
    credentials: dict[str, Any] = dataclasses.field(default_factory=dict)  # the subscriber's, by provider
    unsubscribe: str | None = None  # the URL that ends mails like this one
    repeatable: dict[str, Any] = dataclasses.field(default_factory=dict)


class Message(NamedTuple):
    """What a sender sends: finished bytes and where to, the same on every try."""

    body: str
    content_type: str = "text/plain; charset=utf-8"
    subject: str | None = None
    to: str | None = None
    url: str | None = None  # where to, when the data tells
    summary: Mapping[str, Any] = types.MappingProxyType({})  # what was rendered, for people


@dataclasses.dataclass(slots=True)
class Claim:
    """One try that has been written down and is now to be made. `message` is None until the draft is composed."""

    job_id: int
    attempt_id: int
    number: int
    started_at: int
    public_id: str
    sender_name: str
    sender: Any
    run_id: int = 0
    workflow: str | None = None
    step: str = ""
    tries: int = 0  # that reached a result before this one
    lane: str = ""  # no two tries of one lane at once; '' for none
    message: Message | None = None
    draft: Draft | None = None
    result: SendResult | None = None  # known before any sending: the template failed


class SendResult(NamedTuple):
    """What came of a try. `outcome` is sent, temporary or permanent; spans in ms. `cause` is why no other message will
    fare better by this sender: gone, or login."""

    job_id: int
    attempt_id: int
    outcome: str
    reason: str | None = None
    status_code: int | None = None
    retry_after_ms: int | None = None
    retry_at: int | None = None
    took_ms: int | None = None
    cause: str | None = None
    at_once: bool = False  # the first time, it may be tried again without a wait
    enhanced_code: str | None = None  # a mail server's finer one, such as 4.7.1


class TickReport(NamedTuple):
    """What one tick did: rows moved, tries to make, whether more is due at once, and when something is due next."""

    moved: int
    claims: list[Claim]
    more: bool
    wake_at: int | None


# What arrives on the daemon's inbox. `reply` gets the answer after the commit.


class Reply(Protocol):
    """What waits for an answer: a future, or what acts like one."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: Any, /) -> None: ...


class Keep(NamedTuple):
    """That the answer to a call is to be kept under its Idempotency-Key, in the same commit as what the call does.
    `shape` makes of what the call came to a status and a body."""

    key: str
    body_hash: str
    shape: Callable[[Any], tuple[int, str]]


class TriggerCall(NamedTuple):
    triggers: Sequence[Trigger | TriggerAnswer]
    reply: Reply
    since: float  # on the monotonic clock: who waits too long for a commit is told so
    keep: Keep | None = None


class CancelCall(NamedTuple):
    transaction_id: str
    reply: Reply
    since: float
    keep: Keep | None = None


class ActCall(NamedTuple):
    """Anything else to be done inside the transaction: `act` is given now, and what it returns is the answer."""

    act: Callable[[int], Any]
    reply: Reply
    since: float
    keep: Keep | None = None


class Composed(NamedTuple):
    claim: Claim
    reply: Reply


class Sent(NamedTuple):
    claim: Claim
    result: SendResult


# ----------------------------------------------------------------------------------------------------------------------
# 2 Errors
# ----------------------------------------------------------------------------------------------------------------------
# A message says where, what was found and what would be right; the hint says what to do about it.


class DigestdError(Exception):
    """Base of everything digestd raises on purpose. `exit_code` is what a command ends with."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(DigestdError):
    """The command line, or a rule given on it, is wrong."""

    exit_code = 2


class RuleError(DigestdError):
    """A cron text, interval, duration, zone or schedule that cannot be used."""

    exit_code = 2


class Problem(NamedTuple):
    """One thing that is wrong in the config file."""

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        return where + (f"{self.path}: {self.text}" if self.path else self.text)


class ConfigError(DigestdError):
    """The config file has problems; all of them are in `problems`."""

    exit_code = 78

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class StoreError(DigestdError):
    """The database cannot be used: not there, not ours, too new, damaged, locked, read-only."""


class IllegalMove(DigestdError):
    """A change of state that MOVES does not allow: a bug, never bad input."""


class Rejected(DigestdError):
    """A request that is refused: the HTTP status, the message, and the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str = "general",
        hint: str = "",
        problems: Sequence[tuple[str, str]] = (),
        more: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.field = field
        self.problems = problems  # with a payload, one by one: where, and what
        self.more = more  # what the answer holds beside the error


def shown(value: Any) -> str:
    """A value of the config as the file spells it, short and on one line; of lists and tables only the kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of many digits"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "…"


def one_line(text: str) -> str:
    """A text as one line of a log: whoever wrote it, it cannot forge a second one."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class PermanentFailure(DigestdError):
    """Trying again cannot help: a broken template, an address that is none."""


# ----------------------------------------------------------------------------------------------------------------------
# 3 Clock
# ----------------------------------------------------------------------------------------------------------------------
# The only place that reads time. Everything else is handed `now`, an int of milliseconds since 1970 UTC.

UTC = dt.UTC
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
FIRST_INSTANT = -62_135_596_800_000  # the start of year 1
FAR_FUTURE = 253_402_300_799_000  # the end of year 9999, past which no instant is kept

_UNITS = {"mo": MONTH, "w": WEEK, "d": DAY, "h": HOUR, "m": MINUTE, "s": SECOND, "ms": 1}
_DURATION = re.compile(r"(?:(\d{1,400})(mo|ms|w|d|h|m|s))", re.ASCII)
_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?\s?([Zz]|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)


class Clock(Protocol):
    """What tells the time: the system's clock, or one that the simulator and the tests move by hand."""

    def now(self) -> int:
        """Milliseconds since 1970 UTC."""

    def monotonic(self) -> float:
        """Seconds on a clock that is never set back; only differences mean anything."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is moved. Starts at `at`, in ms."""

    def __init__(self, at: int) -> None:
        self.at = at

    def now(self) -> int:
        return self.at

    def monotonic(self) -> float:
        return self.at / 1000


def iso_text(at: int) -> str:
    """An instant as ISO 8601 in UTC; the fraction is written only where there is one."""
    moment = EPOCH + dt.timedelta(milliseconds=at)
    return moment.isoformat(timespec="seconds")[:19] + (f".{at % 1000:03d}Z" if at % 1000 else "Z")


def utc_text(at: int | None) -> str:
    """An instant for people, in UTC to the second; '-' for none."""
    return "-" if at is None else (EPOCH + dt.timedelta(milliseconds=at)).strftime("%Y-%m-%d %H:%M:%S")


def parse_instant(text: str, zone: dt.tzinfo | None = None) -> int:
    """Milliseconds since 1970 for an ISO 8601 date and time.

    An offset or Z is needed unless `zone` is given. Second 60 is read as the first of the next minute. Raises RuleError
    for anything that is not a real date and time.
    """
    match = _INSTANT.fullmatch(text.strip()) if isinstance(text, str) else None
    if not match:
        raise RuleError(f"{text!r} is not a date and time; write it as 2026-03-09T09:00:00Z")
    year, month, day, hour, minute = (int(part) for part in match.group(1, 2, 3, 4, 5))
    second = int(match[6] or 0)
    offset = match[8]
    if offset is None and zone is None:
        raise RuleError(f"{text!r} has no offset; end it with Z or with one like +02:00")
    try:
        leap = second == 60
        moment = dt.datetime(year, month, day, hour, minute, 59 if leap else second, tzinfo=_offset(offset) or zone)
        at = (moment - EPOCH) // dt.timedelta(milliseconds=1) + (SECOND if leap else 0)
    except (ValueError, OverflowError) as error:
        raise RuleError(f"{text!r} is not a real date and time: {error}") from None
    at += int((match[7] or "0").ljust(3, "0")[:3])
    if not FIRST_INSTANT <= at <= FAR_FUTURE:
        raise RuleError(f"{text!r} lies outside the years 1 to 9999 in UTC")
    return at


def _offset(text: str | None) -> dt.timezone | None:
    if text is None:
        return None
    if text in "Zz":
        return UTC
    hours, minutes = int(text[1:3]), int(text[3:].lstrip(":") or 0)
    if hours > 23 or minutes > 59:
        raise ValueError(f"the offset {text} is out of range")
    return dt.timezone((1 if text[0] == "+" else -1) * dt.timedelta(hours=hours, minutes=minutes))


def parse_duration(text: object) -> int:
    """Milliseconds for a text such as 500ms, 90s, 10m, 1h30m, 7d, 2w, 3mo (a month is 30 days). Raises RuleError."""
    if not isinstance(text, str):
        raise RuleError(f'{shown(text)} is not a duration; write a text with a unit, such as "10m"')
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise RuleError(
            f'{shown(text)} is not a duration; write numbers with the units mo w d h m s ms, such as "90s" or "1h30m"'
        )
    units = [unit for _, unit in parts]
    if sorted(set(units), key=list(_UNITS).index) != units:
        raise RuleError(f"{text!r} is not a duration: each unit once, from the longest to the shortest")
    total = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if total == 0:
        raise RuleError(f"{text!r} is no time at all; the shortest duration is 1ms")
    if total > 10_000 * 365 * DAY:
        raise RuleError(f"{shown(text)} is longer than 10,000 years")
    return total


def duration_text(span_ms: int) -> str:
    """A span as the config writes it: 5400000 is 1h30m."""
    if span_ms == 0:
        return "0s"
    text, rest = "", abs(span_ms)
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest = divmod(rest, _UNITS[unit])
        text += f"{count}{unit}" if count else ""
    return ("-" if span_ms < 0 else "") + text


def new_public_id(prefix: str, now: int) -> str:
    """An id for the outside: ordered by time, unguessable, without a dot (the webhook signature forbids one)."""
    return f"{prefix}_{now:012x}{secrets.token_hex(8)}"


# ----------------------------------------------------------------------------------------------------------------------
# 4 Calendars
# ----------------------------------------------------------------------------------------------------------------------
# Pure functions from a rule and an instant to the next instant, strictly after it. No clock, no database.
# One rule for clock changes, for cron and scheduled windows alike: planned local times are enumerated; one inside a gap
# moves forward by the length of the gap; an ambiguous one means its first occurrence, except when all 24 hours are
# selected, then both; equal instants are one; a local day that the zone left out has no run.

_ZONE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9][A-Za-z0-9_+-]*)*", re.ASCII)
_NO_ZONES = re.compile(r"posix/|right/|posixrules$|localtime$|Factory$|leapseconds$|tzdata", re.ASCII)
_MARGIN_MS = 4 * HOUR  # no zone sets its clock back by more
_AFTER_CHANGE_MS = 26 * HOUR  # nor forward by more: some left out a whole day

CRON_ALIASES = {
    "@yearly": "0 0 0 1 1 *", "@annually": "0 0 0 1 1 *", "@monthly": "0 0 0 1 * *", "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *", "@hourly": "0 0 * * * *", "@minutely": "0 * * * * *", "@secondly": "* * * * * *",
    "@weekdays": "0 0 0 * * 1-5", "@weekends": "0 0 0 * * 0,6",
}  # fmt: skip
MONTH_NAMES = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
LONG_DAYS = ["sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"]
DAY_NAMES = [name[:3] for name in LONG_DAYS]


class Rule(Protocol):
    """A rule that says when: cron, an interval, a scheduled window."""

    def next_after(self, at: int) -> int | None:
        """The first instant strictly after `at`, in ms; None when there is none."""


def load_zone(name: Any) -> zoneinfo.ZoneInfo:
    """The zone of an IANA name. Raises RuleError for anything else, also for names that only look like files."""
    hint = "use an IANA name such as Europe/Berlin or UTC"
    if not isinstance(name, str) or not _ZONE_NAME.fullmatch(name) or _NO_ZONES.match(name) or len(name) > 64:
        raise RuleError(f"{shown(name)} is not a time zone; {hint}")
    try:
        return zoneinfo.ZoneInfo(name)  # which keeps a cache of its own
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise RuleError(f"{name!r} is not a time zone that this system or the tzdata package knows; {hint}") from None


def local_time(at: int, zone: dt.tzinfo) -> dt.datetime:
    """The wall-clock time at an instant, without zone."""
    return (EPOCH + dt.timedelta(milliseconds=at)).astimezone(zone).replace(tzinfo=None, fold=0)


def _instant(local: dt.datetime, zone: dt.tzinfo, fold: int = 0) -> int:
    return (local.replace(tzinfo=zone, fold=fold) - EPOCH) // dt.timedelta(milliseconds=1)


class CronField(NamedTuple):
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


CRON_FIELDS = (
    CronField("second", 0, 59),
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField("day of month", 1, 31),
    CronField("month", 1, 12, tuple(MONTH_NAMES)),
    CronField("day of week", 0, 7, tuple(DAY_NAMES)),
)


class _Draws:
    """The numbers behind H, one for each field in order: FNV-1a of the seed, then mulberry32, as cron-parser draws."""

    def __init__(self, seed: str) -> None:
        state = 2166136261
        for byte in seed.encode():
            state = ((state ^ byte) * 16777619) & 0xFFFFFFFF
        self.state = state

    def __call__(self) -> float:
        self.state = (self.state + 0x6D2B79F5) & 0xFFFFFFFF
        mixed = ((self.state ^ (self.state >> 15)) * (1 | self.state)) & 0xFFFFFFFF
        mixed = ((mixed + (((mixed ^ (mixed >> 7)) * (61 | mixed)) & 0xFFFFFFFF)) & 0xFFFFFFFF) ^ mixed
        return ((mixed ^ (mixed >> 14)) & 0xFFFFFFFF) / 4294967296


def _number(digits: str, field: CronField) -> int:
    if len(digits) > 9:
        raise RuleError(f"{digits[:20]}… is out of range for the {field.name}")
    return int(digits)


def _cron_value(field: CronField, text: str) -> int:
    if text.lower() in field.names:
        return field.names.index(text.lower()) + field.low
    if not (text.isascii() and text.isdigit()):
        raise RuleError(f"{text!r} is not a {field.name}")
    value = _number(text, field)
    if not field.low <= value <= field.high:
        limits = f"which goes from {field.low} to {field.high}"
        raise RuleError(f"{text[:20]} is out of range for the {field.name}, {limits}")
    return value


def _hashed_values(field: CronField, item: str, draw: float) -> list[str]:
    """H, H/step, H(a-b), H(a-b)/step: a value, or a phase, that depends on the seed alone."""
    match = re.fullmatch(r"H(?:\((\d+)-(\d+)\))?(?:/(\d+))?", item, re.ASCII)
    if not match:
        raise RuleError(f"{item!r} is not a hashed {field.name}; write H, H/5, H(0-29) or H(0-29)/10")
    low, high = (_number(match[1], field), _number(match[2], field)) if match[1] else (field.low, field.high)
    if low > high:
        raise RuleError(f"the range in {item!r} runs backwards")
    low, high = max(low, field.low), min(high, field.high)
    if low > high:
        raise RuleError(f"{item!r} holds no {field.name}")
    if match[3] is None:
        return [str(int(draw * (high - low + 1)) + low)]
    step = _number(match[3], field)
    if step == 0:
        raise RuleError(f"the step of {item!r} is 0")
    start = low - low % step + int(draw * step)
    values = [value for value in range(start, high + 1, step) if value >= low]
    return [str(value) for value in values] or [str(int(draw * (high - low + 1)) + low)]


def _cron_item(field: CronField, item: str, draw: float) -> list[str]:
    """One item of a list, as the values it stands for, in the spelling that cronsim reads."""
    if item[:1] == "H":
        return _hashed_values(field, item, draw)
    if field.name == "day of month" and item.upper() == "L":
        return ["L"]
    if field.name == "day of week" and item[-1:].upper() == "L" and len(item) > 1:
        return [f"{_cron_value(field, item[:-1])}L"]
    base, slash, step_text = item.partition("/")
    step = 1
    if slash:
        if not (step_text.isascii() and step_text.isdigit() and _number(step_text, field)):
            raise RuleError(f"the step in {shown(item)} must be a number from 1")
        step = _number(step_text, field)
    if base in ("*", "?"):
        low, high = field.low, field.high if field.name != "day of week" else 6
    elif "-" in base:
        low, high = (_cron_value(field, part) for part in base.split("-", 1))
        if low > high:
            raise RuleError(f"the range {base!r} runs backwards; write the two parts as a list")
    else:
        low = _cron_value(field, base)
        high = field.high if slash else low
    return [str(value) for value in range(low, high + 1, step)]


def _cron_field(field: CronField, text: str, draw: float) -> str:
    """A field in cronsim's spelling: `*`, or an explicit list."""
    if text in ("*", "?"):
        return "*"
    if "#" in text:
        if field.name != "day of week" or any(char in text for char in ",-/"):
            raise RuleError(f"{text!r}: a # stands alone in the day of week, as in 1#2 for the second Monday")
        day, _, nth = text.partition("#")
        if day == "H":
            day = _hashed_values(field, day, draw)[0]
        if nth not in ("1", "2", "3", "4", "5"):
            raise RuleError(f"{text!r}: the number after # goes from 1 to 5")
        return f"{_cron_value(field, day)}#{nth}"
    values: list[str] = []
    for item in text.split(","):
        if not item:
            raise RuleError(f"{text!r} has an empty item in its list")
        values += _cron_item(field, item, draw)
    return ",".join(dict.fromkeys(values))


class _Sim(cronsim.CronSim):
    """cronsim, on naive local times, with the day rule of cron-parser."""

    @classmethod
    def of(cls, fields: Sequence[str]) -> _Sim:
        # Explicit lists never begin with a star, which switches off Debian's AND between the two day fields.
        return cls(" ".join(fields), dt.datetime(2000, 1, 1))

    def after(self, local: dt.datetime) -> Iterator[dt.datetime]:
        twin = copy.copy(self)
        twin.dt = local.replace(microsecond=0)
        return _until_the_end(twin)


def _until_the_end(sim: Iterator[dt.datetime]) -> Iterator[dt.datetime]:
    try:
        yield from sim
    except (OverflowError, ValueError):  # past year 9999
        return


class LocalRule:
    """A rule of wall-clock times in one zone. `sims` plan naive local times; the zone makes instants of them."""

    def __init__(self, sims: Sequence[_Sim], zone: dt.tzinfo, both: bool) -> None:
        self.sims = sims
        self.zone = zone
        self.both = both  # all 24 hours are selected: an ambiguous time is two

    def next_after(self, at: int) -> int | None:
        """The first instant after `at`; None when there is none before the calendar ends, in the year 9999."""
        try:
            found = [self._next_of(sim, at) for sim in self.sims]
        except OverflowError:
            return None
        return min((instant for instant in found if instant is not None), default=None)

    def _next_of(self, sim: _Sim, at: int) -> int | None:
        while True:
            planned = next(sim.after(local_time(at, self.zone)), None)
            if planned is None:
                return None
            guess = _instant(planned, self.zone)
            change = self._change_near(at) or self._change_near(guess)
            if change is None:
                return guess
            found = self._around(sim, at, change)
            if found is not None and found <= change + _AFTER_CHANGE_MS:
                return found
            at = max(at, change + _AFTER_CHANGE_MS)  # nothing happens in between

    def _change_near(self, at: int) -> int | None:
        """A clock change close enough that local and real time do not run alike between it and `at`."""
        return _clock_change(at - _AFTER_CHANGE_MS, at + _MARGIN_MS, self.zone)

    def _around(self, sim: _Sim, at: int, change: int) -> int | None:
        """The first instant after `at` near one clock change: the earlier of what the offsets before and after give."""
        before, after = (local_time(change + shift, self.zone) - local_time(change + shift, UTC) for shift in (-1, 0))
        moment, turn = local_time(at, UTC), local_time(change, UTC)
        gap_counts = dt.timedelta(0) < after - before < dt.timedelta(hours=23)
        found = []
        # Read with the offset from before: all up to the change, and those in the gap, moved by its length.
        planned = next(sim.after(moment + before), None)
        if planned is not None and planned < turn + (after if gap_counts else before):
            found.append(planned - before)
        # Read with the offset from after; what was repeated counts again only where all hours are selected.
        begin = turn + (after if self.both else max(before, after)) - dt.timedelta(seconds=1)
        planned = next(sim.after(max(moment + after, begin)), None)
        if planned is not None:
            found.append(planned - after)
        return min((_instant(utc, UTC) for utc in found), default=None)


def _clock_change(first: int, last: int, zone: dt.tzinfo) -> int | None:
    """The first instant in (first, last] at which the zone's offset is another one; None when there is none."""

    def offset(at: int) -> dt.timedelta | None:
        return (EPOCH + dt.timedelta(milliseconds=at)).astimezone(zone).utcoffset()

    before = offset(first)
    if offset(last) == before:
        return None
    low, high = first // SECOND, -(-last // SECOND)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if offset(middle * SECOND) == before else (low, middle)
    return high * SECOND


def parse_cron(text: str, zone: dt.tzinfo = UTC, seed: str = "") -> LocalRule:
    """A cron text of 5 fields, or 6 with seconds first, as a rule in `zone`.

    The dialect is cron-parser's, which BullMQ and Novu use: names, lists, ranges, steps, L, nL, n#k, ?, H, aliases;
    both day fields set means either. Lists may overlap. Raises RuleError for anything else, and for what can never be.
    """
    fields = _cron_fields(text, seed)
    try:
        sim = _Sim.of(fields)
    except cronsim.CronSimError:
        raise RuleError(f"cron {text!r} never happens: no month has such a day") from None
    if next(sim.after(dt.datetime(2000, 1, 1)), None) is None:
        raise RuleError(f"cron {text!r} never happens")
    return LocalRule([sim], zone, both=len(sim.hours) == 24)


@functools.lru_cache(maxsize=4096)
def _cron_fields(text: str, seed: str) -> tuple[str, ...]:
    parts = CRON_ALIASES.get(text, text).split()
    if text[:1] == "@" and text not in CRON_ALIASES:
        raise RuleError(f"{text!r} is not a cron alias; there are {', '.join(CRON_ALIASES)}")
    if len(parts) not in (5, 6):
        raise RuleError(f"cron {text!r} has {len(parts)} fields; there must be 5, or 6 with seconds first")
    draws = _Draws(seed)
    second, minute, hour, month, day, weekday = (draws() for _ in CRON_FIELDS)  # the month is drawn before the day
    numbers = [second, minute, hour, day, month, weekday]
    if len(parts) == 5:
        parts.insert(0, "0")
    try:
        return tuple(map(_cron_field, CRON_FIELDS, parts, numbers))
    except RuleError as error:
        raise RuleError(f"cron {text!r}: {error.message}") from None


class Every:
    """An interval: the multiples of `every_ms` since the epoch, shifted by `offset_ms` (case: every 15 min at 04:07
    runs 04:15, 04:30)."""

    def __init__(self, every_ms: int, offset_ms: int = 0) -> None:
        self.every_ms = every_ms
        self.offset_ms = offset_ms % every_ms

    def next_after(self, at: int) -> int | None:
        return at - (at - self.offset_ms) % self.every_ms + self.every_ms


_ORDINALS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "last": -1}
_DAY_KINDS = {"day": range(7), "weekday": range(5), "weekend": (5, 6), "weekend day": (5, 6)}


class _MonthDays(_Sim):
    """Days of a month that cron cannot say: the first weekday, the last weekend day."""

    wanted: tuple[int, Sequence[int]] = (1, range(7))  # which of the days, and of which ISO weekdays from 0

    def match_day(self, d: dt.date) -> bool:
        which, weekdays = self.wanted
        days_of_month = range(1, calendar.monthrange(d.year, d.month)[1] + 1)
        days = [day for day in days_of_month if (d.weekday() + day - d.day) % 7 in weekdays]
        return len(days) >= abs(which) and days[which - 1 if which > 0 else which] == d.day


def day_number(name: object) -> int:
    """0 for Sunday to 6 for Saturday, from a full name or three letters in any case. Raises RuleError."""
    word = name.lower() if isinstance(name, str) else ""
    if word in LONG_DAYS:
        return LONG_DAYS.index(word)
    if word in DAY_NAMES:
        return DAY_NAMES.index(word)
    raise RuleError(f"{shown(name)} is not a day; write monday to sunday, or mon to sun")


def parse_time_of_day(text: object) -> tuple[int, int, int]:
    """Hour, minute and second of a 24-hour time such as 09:00 or 9:00:30. Raises RuleError."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d))?", text, re.ASCII) if isinstance(text, str) else None
    if not match or int(match[1]) > 23 or int(match[2]) > 59 or int(match[3] or 0) > 59:
        raise RuleError(f'{shown(text)} is not a time of day; write it as "09:00", on the 24-hour clock')
    return int(match[1]), int(match[2]), int(match[3] or 0)


def _month_sim(item: object, clock: str) -> _Sim:
    """The days of a month that one item of `on` names: 15, "last", "first monday", "last weekday"."""
    if isinstance(item, int) and not isinstance(item, bool):
        if not 1 <= item <= 31:
            raise RuleError(f'{item} is not a day of a month; there are 1 to 31, and "last"')
        return _Sim.of([*clock.split(), str(item), "*", "*"])
    words = item.lower().split() if isinstance(item, str) else []
    if words == ["last"]:
        return _Sim.of([*clock.split(), "L", "*", "*"])
    kind = " ".join(words[1:])
    if len(words) < 2 or words[0] not in _ORDINALS:
        raise RuleError(f'{item!r} is not a day of a month; write 1 to 31, "last", "first monday", "last weekday"')
    weekdays = _DAY_KINDS.get(kind) or ((day_number(kind) + 6) % 7,)
    sim = _MonthDays.of([*clock.split(), "*", "*", "*"])
    assert isinstance(sim, _MonthDays)
    sim.wanted = (_ORDINALS[words[0]], tuple(weekdays))
    return sim


def scheduled_rule(
    every: str, at: str | None = None, on: Sequence[object] | None = None, zone: dt.tzinfo = UTC
) -> LocalRule:
    """The friendly text of a scheduled window: every minute, hour, day, week or month; at a time; on days.

    Day names for weeks; for months 1 to 31, "last", "first monday", "last weekday". A month without the named day is
    passed over, as cron does. Raises RuleError.
    """
    if every in ("minute", "hour"):
        if at is not None or on:
            raise RuleError(f"every {every!r} takes neither at nor on")
        clock = "0 * *" if every == "minute" else "0 0 *"
        return LocalRule([_Sim.of([*clock.split(), "*", "*", "*"])], zone, both=True)
    hour, minute, second = parse_time_of_day("00:00" if at is None else at)
    clock = f"{second} {minute} {hour}"
    if every == "day":
        if on:
            raise RuleError('every "day" takes no on; every "week" does')
        return LocalRule([_Sim.of([*clock.split(), "*", "*", "*"])], zone, both=False)
    if every == "week":
        days = sorted({day_number(name) for name in on or ("monday",)})
        return LocalRule([_Sim.of([*clock.split(), "*", "*", ",".join(map(str, days))])], zone, both=False)
    if every == "month":
        return LocalRule([_month_sim(item, clock) for item in on or (1,)], zone, both=False)
    raise RuleError(f"{every!r} is not a period; there are minute, hour, day, week, month")


_FRIENDLY = {"minutely": "minute", "hourly": "hour", "daily": "day", "weekly": "week", "monthly": "month"}


def parse_rule(text: str, zone: dt.tzinfo = UTC, offset_ms: int = 0) -> Rule:
    """A rule as a person writes it: a cron text, `every 15m`, or `daily at 09:00`, `every monday at 9:00`,
    `monthly on 1, last at 08:00`. Raises RuleError."""
    words = text.lower().split()
    if not words:
        raise RuleError("the rule is empty; write a cron text, every 15m, or daily at 09:00")
    if words[0] not in _FRIENDLY and words[0] != "every":
        return parse_cron(text, zone)
    if words[0] == "every" and len(words) == 2 and re.match(r"\d", words[1]):
        return Every(parse_duration(words[1]), offset_ms)
    body, _, at = " ".join(words).partition(" at ")
    body, _, days = body.partition(" on ")
    on: list[object] = (
        [int(item) if item.strip().isdigit() else item.strip() for item in days.split(",")] if days else []
    )
    period = _FRIENDLY.get(body) or body.removeprefix("every ")
    if period not in _FRIENDLY.values() and not on:
        named = period.replace(" and ", ",").split(",")
        period, on = "week", [name.strip() for name in named]
    return scheduled_rule(period, at.strip() or None, on, zone)


def next_times(rule: Rule, at: int, count: int) -> list[int]:
    """The next `count` instants of a rule, strictly after `at`; fewer where it ends."""
    times: list[int] = []
    try:
        while len(times) < count and (moment := rule.next_after(times[-1] if times else at)) is not None:
            if moment >= FAR_FUTURE - 2 * DAY:  # some zone could not write it any more
                break
            times.append(moment)
    except OverflowError:
        if not times:
            raise RuleError(f"{iso_text(at)} is at the edge of the calendar") from None
    return times


_CLOCK_TIME = re.compile(r"(\d{1,2}):(\d\d)\s?(am|pm)?", re.ASCII | re.IGNORECASE)


def _schedule_minute(text: object) -> int:
    """Minute of the day of `09:00 AM`, `5:00pm` or `17:00`; 24:00 is midnight at the end. Raises RuleError."""
    match = _CLOCK_TIME.fullmatch(text.strip()) if isinstance(text, str) else None
    if match and int(match[2]) < 60:
        hour, minute, half = int(match[1]), int(match[2]), (match[3] or "").lower()
        if half and 1 <= hour <= 12:
            return (hour % 12 + (12 if half == "pm" else 0)) * 60 + minute
        if not half and (hour < 24 or (hour == 24 and minute == 0)):
            return hour * 60 + minute
    raise RuleError(f'{text!r} is not a time of day; write it as "09:00 AM" or "17:00"')


class Schedule:
    """A subscriber's weekly hours in one zone. Slots hold both their ends, to the minute.

    A slot whose end comes before its start runs into the next day and belongs to the day it starts on. `is_inside` and
    `next_start` read the same slots, so they cannot disagree.
    """

    def __init__(self, slots: dict[int, list[tuple[int, int]]], zone: dt.tzinfo) -> None:
        self.slots = slots  # by weekday, Sunday is 0: (first minute, first minute after), past 1440 into the next day
        self.zone = zone

    def is_inside(self, at: int) -> bool:
        """Whether the local wall time at this instant lies in a slot."""
        local = local_time(at, self.zone)
        minute, weekday = local.hour * 60 + local.minute, local.isoweekday() % 7
        today = any(start <= minute < end for start, end in self.slots.get(weekday, ()))
        return today or any(minute < end - 1440 for _, end in self.slots.get((weekday - 1) % 7, ()))

    def next_start(self, at: int) -> int | None:
        """The first instant from `at` on that is inside; None when no slot is ever open."""
        if self.is_inside(at):
            return at
        today = local_time(at, self.zone).date()
        for ahead in range(-1, 15):
            day = today + dt.timedelta(days=ahead)
            inside = [moment for moment in self._openings(day) if moment > at and self.is_inside(moment)]
            if inside:
                return min(inside)
        return None

    def _openings(self, day: dt.date) -> Iterator[int]:
        """Instants of a local day at which it may open: the starts, in both passes, and the zone's clock change."""
        midnight = dt.datetime.combine(day, dt.time())
        for start, _ in self.slots.get(day.isoweekday() % 7, ()):
            local = midnight + dt.timedelta(minutes=start)
            # A start that the zone leaves out never comes; what is open after the gap opens with the clock change.
            yield from (at for fold in (0, 1) if local_time(at := _instant(local, self.zone, fold), self.zone) == local)
        first, last = _instant(midnight, self.zone), _instant(midnight + dt.timedelta(days=1), self.zone)
        change = _clock_change(first - 1, last, self.zone)
        if change is not None:
            yield change


def parse_schedule(value: Any, zone: dt.tzinfo = UTC) -> Schedule | None:
    """A weekly schedule as the API takes it, {isEnabled, weeklySchedule: {monday: {isEnabled, hours: [{start, end}]}}}.

    None stands for "no restriction": no schedule, one that is off, one without a weekly part. Raises RuleError.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("isEnabled"), bool):
        raise RuleError("a schedule is an object with isEnabled true or false")
    week = value.get("weeklySchedule")
    if week is not None and (not isinstance(week, dict) or (not week and value["isEnabled"])):
        raise RuleError("weeklySchedule is an object with at least one day")
    slots: dict[int, list[tuple[int, int]]] = {}
    for name, day in (week or {}).items():
        if name not in LONG_DAYS:
            raise RuleError(f"{name!r} is not a day of weeklySchedule; there are {', '.join(LONG_DAYS)}")
        parsed = [_slot(name, hours) for hours in _hours_of(name, day)]
        if day.get("isEnabled"):
            slots[LONG_DAYS.index(name)] = sorted(parsed)
    return Schedule(slots, zone) if value["isEnabled"] and week is not None else None


def _hours_of(name: str, day: Any) -> list[Any]:
    if not isinstance(day, dict) or not isinstance(day.get("isEnabled"), bool):
        raise RuleError(f"{name} is an object with isEnabled true or false, and hours")
    hours = day.get("hours") or []
    if not isinstance(hours, list):
        raise RuleError(f"the hours of {name} are a list of {{start, end}}")
    return hours


def _slot(name: str, hours: Any) -> tuple[int, int]:
    if not isinstance(hours, dict) or not {"start", "end"} <= hours.keys():
        raise RuleError(f"the hours of {name} are a list of {{start, end}}")
    start, end = _schedule_minute(hours["start"]), _schedule_minute(hours["end"])
    if start == 1440:
        raise RuleError(f"24:00 cannot begin the hours of {name}; write 00:00")
    if end == 1440:  # the end of this day, not its inclusive next minute
        return start, 1440
    return (start, end + 1) if end >= start else (start, end + 1441)


def _novu_time(text: str) -> str:
    """A time of the day as Novu's clients write it, 09:00 AM. Raises RuleError. What they cannot write stays: 24:00."""
    hour, minute = divmod(_schedule_minute(text), 60)
    return f"{hour % 12 or 12:02d}:{minute:02d} {'AM' if hour < 12 else 'PM'}" if hour < 24 else "24:00"


def _span_text(slot: Mapping[str, str]) -> str:
    return "-".join("{:02d}:{:02d}".format(*divmod(_schedule_minute(slot[end]), 60)) for end in ("start", "end"))


def _day_span(text: str) -> list[str]:
    """The days that a word names: mon, mon-fri, fri-mon, daily."""
    if text == "daily":
        return LONG_DAYS
    first, dash, last = text.partition("-")
    start, end = day_number(first), day_number(last) if dash else day_number(first)
    return [LONG_DAYS[(start + ahead) % 7] for ahead in range((end - start) % 7 + 1)]


def parse_hours(text: str) -> dict[str, Any] | None:
    """A weekly schedule as a person writes it: `mon-fri 09:00-17:00, sat 10:00-12:00 14:00-16:00`; `always` is None.

    The object is the one that `parse_schedule` reads. Raises RuleError.
    """
    if text.strip().lower() == "always":
        return None
    week: dict[str, Any] = {}
    for part in text.lower().split(","):
        days, *spans = part.split() or [""]
        if not spans:
            raise RuleError(f"{part.strip()!r} names no hours; write days and hours, such as mon-fri 09:00-17:00")
        for day in _day_span(days):
            slots = week.setdefault(day, {"isEnabled": True, "hours": []})["hours"]
            for span in spans:
                start, dash, end = span.partition("-")
                if not dash:
                    raise RuleError(f"{span!r} is no span of hours; write it as 09:00-17:00")
                slots.append({"start": _novu_time(start), "end": _novu_time(end)})
    schedule = {"isEnabled": True, "weeklySchedule": week}
    parse_schedule(schedule)
    return schedule


def hours_text(schedule: Mapping[str, Any] | None) -> str:
    """A weekly schedule in the words of `parse_hours`; days in a row that are alike stand together."""
    if not schedule or not schedule.get("isEnabled") or schedule.get("weeklySchedule") is None:
        return "always"
    days = []
    for name in (*LONG_DAYS[1:], LONG_DAYS[0]):
        day = schedule["weeklySchedule"].get(name) or {}
        slots = (day.get("hours") or []) if day.get("isEnabled") else []
        days.append((name[:3], " ".join(map(_span_text, slots))))
    parts = []
    for hours, group in itertools.groupby(days, key=lambda day: day[1]):
        names = [name for name, _ in group]
        if hours:
            parts.append(f"{names[0]}{'-' + names[-1] if len(names) > 1 else ''} {hours}")
    return ", ".join(parts) or "never"


# ----------------------------------------------------------------------------------------------------------------------
# 5 Config
# ----------------------------------------------------------------------------------------------------------------------
# TOML to validated settings: frozen models whose fields carry the defaults. Every problem is reported at once, each
# with file, line and key path. Templates are compiled here, so that a broken one is found when the file is read.

# -- templates ---------------------------------------------------------------------------------------------------------

_IRREGULAR = {
    "child": "children", "person": "people", "man": "men", "woman": "women", "foot": "feet", "tooth": "teeth",
    "goose": "geese", "mouse": "mice", "ox": "oxen", "leaf": "leaves", "life": "lives", "wife": "wives",
    "knife": "knives", "half": "halves", "shelf": "shelves", "wolf": "wolves", "loaf": "loaves", "thief": "thieves",
    "datum": "data", "index": "indices", "analysis": "analyses", "crisis": "crises",
}  # fmt: skip
_UNCOUNTABLE = {"sheep", "fish", "deer", "series", "species", "news", "equipment", "information", "money", "rice"}


def english_plural(word: str) -> str:
    """The plural of an English noun by the usual rules and the common irregular ones."""
    lower = word.lower()
    if lower in _UNCOUNTABLE:
        return word
    if lower in _IRREGULAR:
        plural = _IRREGULAR[lower]
        return plural.capitalize() if word[:1].isupper() else plural
    if re.search(r"(?:s|x|z|ch|sh)$", lower):
        return word + "es"
    if re.search(r"[^aeiou]y$", lower):
        return word[:-1] + "ies"
    return word + "s" if word else word


def _at_path(item: Any, path: str) -> str:
    """The text at a dotted path inside an item, as Novu's filters print it: nothing where there is nothing."""
    for name in path.split(".") if path else ():
        item = item.get(name) if isinstance(item, dict) else None
    if item is None:
        return ""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, (dict, list)):
        return json.dumps(item, ensure_ascii=False, separators=(",", ":")) if item else ""
    return str(item)


def _plain(text: Any) -> str:
    return "".join((str(text),))


def _words(items: Sequence[Any], key_path: Any, limit: int) -> list[str]:
    """The words of a sentence: of one or two items all, of more no more than it will hold."""
    return [_at_path(item, str(key_path or "")) for item in (items if len(items) <= 2 else items[:limit])]


def filter_to_sentence(
    items: Any, key_path: str = "", limit: Any = 2, overflow: str = "other", words_connector: str = ", ",
    two_words_connector: str = " and ", last_word_connector: str = ", and ",
) -> str:  # fmt: skip
    """Novu's toSentence: "Ada, Grace, and 3 others"."""
    if not isinstance(items, list) or not items:
        return ""
    # Literals in a template come as Markup, which would escape again what is joined to it.
    words_connector, two_words_connector, last_word_connector, overflow = map(
        _plain, (words_connector, two_words_connector, last_word_connector, overflow)
    )
    limit = max(0, int(limit))
    words = _words(items, key_path, limit)
    if len(items) == 1:
        return words[0]
    if len(items) == 2:
        return two_words_connector.join(words)
    if limit >= len(items):
        return words_connector.join(words[:-1]) + last_word_connector + words[-1]
    rest = len(items) - limit
    singular = overflow[:-1] if re.search(r"[^s]s$", overflow) else overflow
    noun = singular if rest == 1 else english_plural(singular)
    connector = two_words_connector if limit == 1 else last_word_connector
    return f"{words_connector.join(words)}{connector}{rest} {noun}"


def filter_pluralize(value: Any, singular: str = "", plural: str = "", show_count: Any = "true") -> str:
    """Novu's pluralize: "1 notification", "2 notifications"; nothing for zero, negative, or what is no number."""
    count: float
    if isinstance(value, (list, dict)):
        count = len(value)
    else:
        try:
            count = float(value if not isinstance(value, str) or "_" not in value else "")
        except (TypeError, ValueError):
            return ""
    if not 0 < count < float("inf"):
        return ""
    noun = singular if count == 1 else plural or english_plural(singular)
    number = int(count) if count == int(count) else count
    return f"{number} {noun}" if str(show_count) == "true" and not isinstance(show_count, bool) else noun


def filter_digest(items: Any, max_names: Any = 2, key_path: str = "", separator: str = ", ") -> str:
    """Novu's older digest filter: "Ada, Grace and 3 others"."""
    if not isinstance(items, list) or not items:
        return ""
    limit, separator = max(0, int(max_names)), _plain(separator)
    words = _words(items, key_path, limit)
    if len(items) <= 2:
        return " and ".join(words)
    if limit >= len(items):
        return f"{separator.join(words[:-1])} and {words[-1]}"
    rest = len(items) - limit
    return f"{separator.join(words)} and {rest} other{'s' if rest > 1 else ''}"


def _as_in_js(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_in_js(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_in_js(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def filter_json(value: Any) -> str:
    """JSON as Novu's Liquid prints it, also where an object or a list stands alone: with single quotes."""
    text = json.dumps(_as_in_js(value), ensure_ascii=False, separators=(",", ":"), default=str)
    return text.replace('"', "'")


def filter_uniq(items: Any, key: Any = None) -> Any:
    """Liquid's uniq, in one pass: the library's own compares each item with all before it."""
    if not isinstance(items, (list, tuple, range)):
        return items
    seen: set[Any] = set()
    kept = []
    for item in items:
        value = item.get(str(key)) if key is not None and isinstance(item, dict) else item
        is_plain = not isinstance(value, (dict, list))  # a list is not the text that spells it
        mark = (is_plain, value if is_plain else json.dumps(value, sort_keys=True, default=str))
        if mark not in seen:
            seen.add(mark)
            kept.append(item)
    return kept


BUDGET = 20_000_000  # what one rendering may go through, in characters: a second or two, however fast the machine is
TIMES_THROUGH = 20  # and so many times through all that it is given
NODE = 16  # what one number, list or object counts, in characters
TAG = 50  # and one tag or text of the template, each time it is rendered
FILTER = 150  # and one filter, beside what goes through it
MAX_DATE_FORMAT = 1000


@dataclasses.dataclass
class Rendering:
    """One rendering under way: what time it is for it, in ms, and how much it may still go through, in characters. Who
    has much to show may go through more: `spare` is what it shows, until that is needed."""

    now: int
    spare: Any
    left: int = BUDGET


_rendering: contextvars.ContextVar[Rendering] = contextvars.ContextVar("rendering")


def _extent(value: Any) -> int:
    """How much there is of a value, in characters: of a list or an object with all that is in it, for two of them may
    be compared."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return NODE + value.bit_length() // 8
    if isinstance(value, range):
        return NODE * max(0, value.stop - value.start)
    extent, pending = NODE, [value] if isinstance(value, (list, tuple, dict)) else []
    while pending:
        inner = pending.pop()
        for item in inner.values() if isinstance(inner, dict) else inner:
            extent += len(item) if isinstance(item, str) else NODE
            if isinstance(item, (list, tuple, dict)):
                pending.append(item)
        if isinstance(inner, dict):
            extent += sum(map(len, inner))
    return extent


def _growth(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """How much a filter that multiplies will make of its input, told before it does."""
    if name in ("join", "toSentence", "digest"):
        return (len(value) if isinstance(value, (str, list, tuple)) else 1) * max(map(_extent, arguments), default=1)
    if name == "replace" and len(arguments) == 2:
        return str(value).count(str(arguments[0])) * _extent(arguments[1])
    return 0


def _spend(amount: int) -> None:
    import liquid.exceptions

    rendering = _rendering.get()
    rendering.left -= amount
    if rendering.left < 0 and rendering.spare is not None:
        rendering.left += TIMES_THROUGH * _extent(rendering.spare)
        rendering.spare = None
    if rendering.left < 0:
        words = f"it goes through more than {BUDGET // 1_000_000} million characters"
        raise liquid.exceptions.ResourceLimitError(words, token=None)


def _metered(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts what it goes through. One template must not keep all others waiting, whatever is in it or in
    a payload; and a number of a million digits is no number of a mail."""

    import liquid.exceptions

    @functools.wraps(act)
    def run(value: Any, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        _spend(FILTER + _extent(value) + sum(map(_extent, given)) + _growth(name, value, given))
        if name == "date" and value in ("now", "today"):
            value = EPOCH + dt.timedelta(milliseconds=_rendering.get().now)
        elif name == "date" and _extent(value) > 100:
            return value
        if name == "date" and arguments and _extent(arguments[0]) > MAX_DATE_FORMAT:
            words = f"a date's format has at most {MAX_DATE_FORMAT} characters"
            raise liquid.exceptions.ResourceLimitError(words, token=None)
        found = act(value, *arguments, **named)
        if isinstance(found, int) and found.bit_length() > 4096:
            raise liquid.exceptions.ResourceLimitError("it makes a number of more than 1,200 digits", token=None)
        _spend(_extent(found))
        return found

    return run


def _metered_template() -> type[Any]:
    """A template whose variables count too, each time they are read: a loop may look for something in a long text. So
    do its tags: each of them, before it is rendered, asks which ones are disabled."""
    import liquid
    from liquid.context import RenderContext

    class Reading(RenderContext):
        @property
        def disabled_tags(self) -> Any:
            _spend(TAG)
            return self._disabled_tags

        @disabled_tags.setter
        def disabled_tags(self, names: Any) -> None:
            self._disabled_tags = names

        def get(self, path: list[object], **options: Any) -> object:
            found = super().get(path, **options)
            _spend(_extent(found))
            return found

    return type("Metered", (liquid.BoundTemplate,), {"context_class": Reading})


@functools.cache
def _meter_ranges() -> None:
    """Ranges such as (1..payload.n) count too, whole and where they are made: the library walks through one without
    counting when it is reversed, begins further on, or is looked into, and has no hook for it."""
    from liquid.builtin.expressions.primitive import RangeLiteral

    make = RangeLiteral._make_range

    def counted(self: Any, start: Any, stop: Any) -> range:
        found = make(self, start, stop)
        _spend(_extent(found))
        return found

    RangeLiteral._make_range = counted  # type: ignore[method-assign]


class Finished(str):
    """A text that is what it has to be, and is printed as it is: a whole JSON value."""


def _real_json(value: Any) -> Finished:
    """The json filter of a json template: a whole value, with its quotes; null where there is none."""
    import liquid

    found = None if isinstance(value, liquid.Undefined) else _as_in_js(value)
    return Finished(json.dumps(found, ensure_ascii=False, separators=(",", ":"), default=str))


_MARKDOWN = re.compile(r"([\\`*_\[\]~|<>])")
# How a value is put into a template of each kind, so that what an event says is no markup there, and no mention.
ESCAPES: dict[str, Callable[[str], str]] = {
    "text": str,
    "html": str,  # by the library
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "entities": lambda text: text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
    "markdown": lambda text: _MARKDOWN.sub(r"\\\1", text),
    "mattermost": lambda text: _MARKDOWN.sub(r"\\\1", text).replace("@", "@\u200b"),
    "no-mentions": lambda text: text.replace("<", "\u2039").replace(">", "\u203a"),
}


def _novu_output(kind: str) -> type[Any]:
    """What prints {{ … }}: as the library does, but objects and lists as Novu, whole numbers without a fraction, and
    escaped for what the template makes."""
    from liquid.builtin.output import Output, OutputNode
    from liquid.stringify import to_liquid_string

    escape = ESCAPES[kind]

    class Printed(OutputNode):
        def render_to_output(self, context: Any, buffer: Any) -> int:
            value = self.expression.evaluate(context)
            if isinstance(value, Finished):
                return int(buffer.write(str(value)))
            if isinstance(value, (dict, list, tuple)):
                _spend(_extent(value))
                value = filter_json(value) if kind != "json" else str(_real_json(value))
            return int(buffer.write(escape(to_liquid_string(_as_in_js(value), context.autoescape))))

    return type("Printing", (Output,), {"node_class": Printed})


@functools.cache
def _liquid(kind: str = "text") -> liquid.Environment:
    """A Liquid environment that cannot reach Python, files, or endless time and memory. `kind` is one of ESCAPES."""
    import liquid

    class Bounded(liquid.Environment):
        loop_iteration_limit = 100_000
        output_stream_limit = 4 << 20
        local_namespace_limit = 1 << 20
        template_class = _metered_template()

    _meter_ranges()
    environment = Bounded(autoescape=kind == "html")
    environment.add_filter("toSentence", filter_to_sentence)
    environment.add_filter("pluralize", filter_pluralize)
    environment.add_filter("digest", filter_digest)
    environment.add_filter("json", filter_json if kind != "json" else _real_json)
    environment.add_tag(_novu_output(kind))
    environment.add_filter("uniq", filter_uniq)
    for name, act in list(environment.filters.items()):
        environment.filters[name] = _metered(name, act)
    return environment


@functools.lru_cache(maxsize=1024)
def compile_template(text: str, kind: str = "text") -> liquid.BoundTemplate:
    """A compiled Liquid template that makes a text of this kind. Raises RuleError with the line inside the template and
    what is wrong there."""
    import liquid.exceptions

    try:
        return _liquid(kind).from_string(text)
    except liquid.exceptions.LiquidError as error:
        line = getattr(error.token, "start_index", None) if getattr(error, "token", None) is not None else None
        where = f" in line {text.count(chr(10), 0, line) + 1} of it" if isinstance(line, int) else ""
        raise RuleError(f"the template cannot be read{where}: {str(error).splitlines()[0]}") from None


def render_template(text: str, context: dict[str, Any], kind: str = "text", now: int = 0) -> str:
    """A template rendered, as if it were `now`. Raises PermanentFailure: the same data would fail again."""
    if "{" not in text:
        return text
    import liquid.exceptions

    _rendering.set(Rendering(now, context))
    try:
        return compile_template(text, kind).render(**context)
    except (liquid.exceptions.LiquidError, RecursionError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        words = str(error.args[0]) if error.args else type(error).__name__
        raise PermanentFailure(f"the template failed: {one_line(words)}") from error


VALUES = ("payload", "subscriber", "workflow", "steps")  # what templates and conditions of a workflow see


@functools.cache
def _condition_liquid() -> liquid.Environment:
    import liquid

    class Logical(liquid.Environment):
        logical_not_operator = True
        logical_parentheses = True
        template_class = _metered_template()

    _meter_ranges()
    return Logical()


@functools.lru_cache(maxsize=1024)
def compile_condition(text: str) -> liquid.BoundTemplate:
    """A condition in Liquid, such as payload.amount > 10 and subscriber.data.plan == 'pro'. Raises RuleError."""
    import liquid.exceptions

    if re.search(r"[{%]%|%[%}]|\{\{|}}", text):
        raise RuleError("a condition is what stands in a Liquid if, without braces: payload.amount > 10")
    try:
        condition = _condition_liquid().from_string(f"{{% if {text} %}}yes{{% endif %}}")
    except liquid.exceptions.LiquidError as error:
        raise RuleError(f"the condition cannot be read: {str(error).splitlines()[0]}") from None
    unknown = sorted(condition.analyze().globals.keys() - set(VALUES))
    if unknown:
        raise RuleError(f"there is nothing called {unknown[0]!r} here; {nearest(unknown[0], VALUES)}")
    return condition


def condition_holds(text: str, context: dict[str, Any]) -> bool:
    """Whether a condition is true. Raises PermanentFailure where it cannot be told, as for a text that is more than 10:
    a wrong guess would send, or not, in silence."""
    import liquid.exceptions

    _rendering.set(Rendering(0, context))
    try:
        return compile_condition(text).render(**context) == "yes"
    except (liquid.exceptions.LiquidError, RecursionError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        words = str(error.args[0]) if error.args else type(error).__name__
        raise PermanentFailure(f"the condition cannot be told: {one_line(words)}") from error


# -- field types -------------------------------------------------------------------------------------------------------


def _rule_field(check: Callable[[Any], Any]) -> pydantic.BeforeValidator:
    """Turn a function that raises RuleError into a validator of a field."""

    def validate(value: Any) -> Any:
        try:
            return check(value)
        except RuleError as error:
            raise ValueError(error.message) from None

    return pydantic.BeforeValidator(validate)


def _checked(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def same(value: Any) -> Any:
        check(value)
        return value

    return same


def _interval(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise RuleError(f"{shown(value)} ms is no interval; it must be at least 1")
        if value > FAR_FUTURE:
            raise RuleError(f"{shown(value)} ms is longer than 10,000 years")
        return value
    return parse_duration(value)


def _instant_value(value: Any) -> int:
    """An instant in the config: a date and time of TOML, an ISO text, or milliseconds, as BullMQ has them."""
    if isinstance(value, dt.datetime):
        value = value.isoformat()
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= FAR_FUTURE:
            raise RuleError(f"{shown(value)} is not an instant in ms")
        return value
    return parse_instant(value)


def _template_field(kind: str) -> pydantic.AfterValidator:
    def validate(text: str, info: pydantic.ValidationInfo) -> str:
        if (info.context or {}).get("templates", True):
            try:
                compile_template(text, kind)
            except RuleError as error:
                raise ValueError(error.message) from None
        return text

    return pydantic.AfterValidator(validate)


def _read_secret(value: Any, info: pydantic.ValidationInfo) -> str:
    """A secret as plain text, or {env = …}, {file = …}, {credential = …}; an unset or empty one is an error."""
    context = info.context or {}
    text = _look_up_secret(value, context)
    if not text and (context.get("secrets", True) or isinstance(value, str)):
        raise ValueError("the secret is empty")
    return text


def _look_up_secret(value: Any, context: dict[str, Any]) -> str:
    if isinstance(value, str):
        context.get("plain_secrets", []).append(value)
        return value
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in ("env", "file", "credential"):
        raise ValueError('a secret is a text, or one of {env = "NAME"}, {file = "PATH"}, {credential = "NAME"}')
    kind, name = next(iter(value.items()))
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind} takes a name")
    if not context.get("secrets", True):
        return ""
    if kind == "env":
        if name not in os.environ:
            raise ValueError(f"the environment variable {one_line(name)} is not set")
        return os.environ[name]
    return _secret_file(kind, name, context)


def _secret_file(kind: str, name: str, context: dict[str, Any]) -> str:
    if kind == "credential":
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        if not folder:
            raise ValueError(f"the credential {name} needs LoadCredential={name}:… in the unit: none are loaded")
        path = pathlib.Path(folder) / name
    else:
        path = pathlib.Path(context.get("base", ".")) / name
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    context.setdefault("files", []).append(path)
    return text.strip("\r\n")


def _existing_file(name: str, info: pydantic.ValidationInfo) -> str:
    """A file named in the config, relative to it; its full path."""
    context = info.context or {}
    path = pathlib.Path(context.get("base", ".")) / name
    if context.get("secrets", True) and not path.is_file():
        raise ValueError(f"there is no file {path}")
    return str(path)


def _read_schema(value: Any, info: pydantic.ValidationInfo) -> Any:
    """A JSON Schema, as a table or as the name of a JSON file beside the config; it must be one that can be used."""
    context = info.context or {}
    if isinstance(value, str):
        path = pathlib.Path(context.get("base", ".")) / value
        try:
            value = json.loads(path.read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        context.setdefault("files", []).append(path)
    if not isinstance(value, dict):
        raise ValueError("a payload schema is a table, or the name of a JSON file that holds an object")
    try:
        payload_rule(_json_value(value))
    except RuleError as error:
        raise ValueError(error.message) from None
    return value


def _refuse_to_fetch(uri: str) -> Any:
    raise RuleError(f"a schema reads no other document, and {uri} is one")


class PayloadRule:
    """A JSON Schema for payloads, compiled. Raises RuleError for what is none. It reads nothing but itself."""

    def __init__(self, schema: dict[str, Any]) -> None:
        import jsonschema_rs

        self.schema = schema
        try:
            self.validator = jsonschema_rs.validator_for(schema, retriever=_refuse_to_fetch)
        except (ValueError, RecursionError) as error:
            where = "".join(f".{part}" for part in getattr(error, "instance_path", ()))
            words = str(getattr(error, "message", error)).splitlines()[0]
            raise RuleError(f"this is no JSON Schema{where and ', at ' + where[1:]}: {one_line(words)}") from None

    def problems(self, payload: dict[str, Any]) -> list[tuple[str, str]]:
        """What is wrong with a payload: the dotted path and the words, one for each violated keyword."""
        found = self.validator.iter_errors(payload)
        return sorted((".".join(["payload", *map(str, one.instance_path)]), one_line(one.message)) for one in found)

    def with_defaults(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The payload with the defaults of the properties that it lacks; the same object when it lacks none."""
        filled: dict[str, Any] = self._filled(self.schema, payload, frozenset())
        return filled

    def _filled(self, schema: Any, value: Any, within: frozenset[int]) -> Any:
        """A value with the defaults that its schema names, also in the items of a list, in references and in allOf; not
        those of anyOf and oneOf, of which nobody knows which one is meant (so does the validator of Novu). `within` are
        the schemas whose default it is part of: one that holds itself ends there."""
        for part in self._parts(schema, ("allOf",), set()) if isinstance(schema, dict) else ():
            if isinstance(value, dict):
                value = self._filled_object(part.get("properties"), value, within)
            elif isinstance(value, list) and isinstance(part.get("items"), dict):
                new = [self._filled(part["items"], item, within) for item in value]
                value = new if any(one is not other for one, other in zip(new, value, strict=True)) else value
        return value

    def _filled_object(self, properties: Any, value: dict[str, Any], within: frozenset[int]) -> dict[str, Any]:
        filled = {}
        for name, inner in properties.items() if isinstance(properties, dict) else ():
            if name in value:
                new = self._filled(inner, value[name], within)
                if new is not value[name]:
                    filled[name] = new
            elif isinstance(inner, dict) and "default" in inner:
                own = inner["default"]
                filled[name] = own if id(inner) in within else self._filled(inner, own, within | {id(inner)})
        return {**value, **filled} if filled else value

    def knows(self, path: Sequence[str]) -> bool:
        """Whether the schema names a property at this path."""
        level = [self.schema]
        for name in path:
            level = [
                inner[name]
                for schema in level
                for part in self._parts(schema, ("allOf", "anyOf", "oneOf"), set())
                if isinstance(inner := part.get("properties"), dict) and isinstance(inner.get(name), dict)
            ]
        return bool(level)

    def _parts(self, schema: dict[str, Any], words: Sequence[str], seen: set[str]) -> Iterator[dict[str, Any]]:
        """A schema, and those that it is made of by these words and by references."""
        yield schema
        for word in words:
            for part in schema.get(word) or ():
                if isinstance(part, dict):
                    yield from self._parts(part, words, seen)
        target = schema.get("$ref")
        if isinstance(target, str) and target.startswith("#") and target not in seen:
            found: Any = self.schema
            for name in target[1:].split("/")[1:]:
                found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
            if isinstance(found, dict):
                yield from self._parts(found, words, seen | {target})


@functools.lru_cache(maxsize=64)
def _payload_rule(text: str) -> PayloadRule:
    return PayloadRule(json.loads(text))


def payload_rule(schema: dict[str, Any]) -> PayloadRule:
    """The rule of a schema, compiled once however often it is asked for. Raises RuleError."""
    return _payload_rule(json.dumps(schema))


def _webhook_key(secret: pydantic.SecretStr, info: pydantic.ValidationInfo) -> pydantic.SecretStr:
    text = secret.get_secret_value()
    if not (info.context or {}).get("secrets", True) and not text:
        return secret
    try:
        key = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not text.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError("a webhook secret is whsec_ and the base64 of 24 to 64 random bytes")
    return secret


def _webhook_url(text: str) -> str:
    import yarl

    try:
        url = yarl.URL(text)
        port = url.port
    except ValueError as error:
        raise RuleError(f"this is not a URL: {error}") from None
    if not text.isprintable() or " " in text:
        raise RuleError("a URL holds no blanks or control characters; write a blank as %20")
    if url.scheme not in ("http", "https") or not url.host or port is None:
        raise RuleError("a webhook needs a URL that begins with http:// or https:// and names a host")
    return text


def _read_url(value: Any, info: pydantic.ValidationInfo) -> Any:
    """A webhook's URL as a text, or as a secret is named: where the path is the secret, it need not stand here."""
    context = info.context or {}
    if isinstance(value, dict):
        value = _look_up_secret(value, context)
        if not value and not context.get("secrets", True):
            return ""
    if not isinstance(value, str):
        return value
    try:
        return _webhook_url(value)
    except RuleError as error:
        raise ValueError(error.message) from None


def _header_value(secret: pydantic.SecretStr) -> pydantic.SecretStr:
    if not secret.get_secret_value().isprintable():
        raise ValueError("a header is one line, without control characters")
    return secret


_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OWN_HEADERS = ("content-length", "transfer-encoding", "connection", "host", "webhook-id", "webhook-timestamp",
                "webhook-signature", "idempotency-key")  # fmt: skip


def _header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise RuleError(f"{shown(name)} is no name of a header")
    if name.lower() in _OWN_HEADERS:
        raise RuleError(f"{name} is set by digestd itself")
    return name


def _proxy(text: Any) -> Any:
    """A proxy's URL, or the word that takes it from the environment."""
    if text != "environment" and isinstance(text, str):
        _webhook_url(text)
        if not text.startswith("http://"):
            raise RuleError('a proxy is "http://host:port", or "environment" for HTTPS_PROXY, HTTP_PROXY and NO_PROXY')
    return text


def _network(text: Any) -> Any:
    import ipaddress

    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise RuleError(f"this is no network such as 10.0.0.0/8: {error}") from None
    return text


def _data_path(text: Any) -> Any:
    if isinstance(text, str) and not _DATA_PATH.fullmatch(text):
        raise RuleError(f'{shown(text)} is no path such as "subscriber.data.hookUrl" or "payload.url"')
    return text


_DATA_PATH = re.compile(r"(?:payload|subscriber)(?:\.[^.\s]+)+")


def _public_url(text: Any) -> Any:
    if isinstance(text, str):
        _webhook_url(text)
        if "?" in text or "#" in text or "@" in text or len(text) > 400:
            raise RuleError("it is what a mail's links begin with: a scheme, a host, perhaps a path")
        text = text.rstrip("/")
    return text


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone: localhost, 127.0.0.0/8, ::1. A name that only begins like one is not."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Listen(NamedTuple):
    """Where the API listens: `kind` is tcp, unix or systemd."""

    kind: str
    host: str = ""
    port: int = 0

    @property
    def is_private(self) -> bool:
        return self.kind == "unix" or is_loopback(self.host)


def _is_ip(text: str) -> bool:
    import ipaddress

    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def parse_listen(text: Any) -> Listen:
    """127.0.0.1:3210, [::1]:3210, localhost:3210, unix:/run/x.sock or systemd. Raises RuleError."""
    if text == "systemd":
        return Listen("systemd")
    if isinstance(text, str) and text.startswith("unix:") and len(text) > 5:
        return Listen("unix", text[5:])
    match = (
        re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", text, re.ASCII)
        if isinstance(text, str)
        else None
    )
    if not match or int(match[3]) > 65535 or (match[1] and not _is_ip(match[1])):
        raise RuleError(f'{shown(text)} is no address; write "127.0.0.1:3210", "[::1]:3210", "unix:/path" or "systemd"')
    return Listen("tcp", match[1] or match[2], int(match[3]))


_MAILBOX = re.compile(r'[^\s@,;:<>()\[\]"\\\x00-\x1f\x7f]+@[^\s@,;:<>()\[\]"\\\x00-\x1f\x7f]+')


def is_mail_address(text: str) -> bool:
    """Whether a text is one plain address, local@domain, and nothing else."""
    return bool(_MAILBOX.fullmatch(text)) and len(text) <= 254 and ".." not in text and not text.endswith(".")


def _from_header(text: str) -> str:
    import email.utils

    name, address = email.utils.parseaddr(text)
    if not is_mail_address(address) or not text.isprintable():
        raise RuleError(f'{text!r} is not a sender; write "Name <local@domain>"')
    return text


_PATH = re.compile(r"payload(?:\.[^.\s]+)+")


def _key_path(text: Any) -> Any:
    if not isinstance(text, str) or not _PATH.fullmatch(text):
        raise RuleError(f"{shown(text)} is not a path in the payload; write it as payload.name or payload.outer.name")
    return text


def _condition(text: str) -> str:
    compile_condition(text)
    return text


def _day_item(item: Any) -> Any:
    if not isinstance(item, (int, str)) or isinstance(item, bool):
        raise RuleError(f'{shown(item)} is not a day; write "monday", 15, "last" or "first monday"')
    return item


def _json_value(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise RuleError("this cannot be JSON: it holds a date, a time, nan or inf") from None
    return value


def _recipients(to: Any) -> Any:
    for entry in to if isinstance(to, list) and to else [to]:
        name = entry.get("subscriberId") if isinstance(entry, dict) else entry
        if not isinstance(name, str) or not name.strip():
            raise RuleError("it names nobody; write a subscriber id, a table with subscriberId, or a list of them")
    return _json_value(to)


def _plain_name(text: str) -> str:
    if not text.strip() or len(text) > 100 or not text.isprintable():
        raise ValueError("it must have 1 to 100 printable characters")
    return text


_DURATION_SCHEMA = {"type": "string", "pattern": "^([0-9]+(mo|ms|w|d|h|m|s))+$", "examples": ["90s", "1h30m", "7d"]}
Duration = Annotated[int, _rule_field(parse_duration), pydantic.WithJsonSchema(_DURATION_SCHEMA)]
DelayLength = Annotated[
    int | str,
    _rule_field(lambda value: _key_path(value) if str(value).startswith("payload") else parse_duration(value)),
    pydantic.WithJsonSchema({**_DURATION_SCHEMA, "pattern": "", "examples": ["1h", "payload.sendAt"]}),
]
Interval = Annotated[
    int, _rule_field(_interval), pydantic.WithJsonSchema({**_DURATION_SCHEMA, "type": ["string", "integer"]})
]
Instant = Annotated[
    int, _rule_field(_instant_value), pydantic.WithJsonSchema({"type": ["string", "integer"], "format": "date-time"})
]
Offset = Annotated[
    int,
    _rule_field(lambda value: 0 if value == 0 and not isinstance(value, bool) else _interval(value)),
    pydantic.WithJsonSchema({**_DURATION_SCHEMA, "type": ["string", "integer"]}),
]
Zone = Annotated[str, _rule_field(_checked(load_zone))]
CronText = Annotated[
    str, pydantic.Strict(), _rule_field(lambda text: text if not isinstance(text, str) else _checked(parse_cron)(text))
]
TimeOfDay = Annotated[str, _rule_field(_checked(parse_time_of_day))]
KeyPath = Annotated[str, _rule_field(_key_path)]
KeyPaths = Annotated[
    list[KeyPath],
    pydantic.Field(min_length=1),
    pydantic.BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    pydantic.WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]
DayItem = Annotated[Any, _rule_field(_day_item), pydantic.WithJsonSchema({"type": ["string", "integer"]})]
JsonValue = Annotated[Any, _rule_field(_json_value)]
Condition = Annotated[
    str, pydantic.Strict(), _rule_field(lambda text: _condition(text) if isinstance(text, str) else text)
]
Template = Annotated[str, _template_field("text")]
HtmlTemplate = Annotated[str, _template_field("html")]
JsonTemplate = Annotated[str, _template_field("json")]
_SECRET_SCHEMA = {
    "type": ["string", "object"],
    "properties": {kind: {"type": "string"} for kind in ("env", "file", "credential")},
    "additionalProperties": False,
}
Secret = Annotated[
    pydantic.SecretStr,
    pydantic.Strict(False),
    pydantic.BeforeValidator(_read_secret),
    pydantic.WithJsonSchema(_SECRET_SCHEMA),
]
WebhookKey = Annotated[Secret, pydantic.AfterValidator(_webhook_key)]
WebhookKeys = Annotated[
    list[WebhookKey],
    pydantic.Field(max_length=5),
    pydantic.BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    pydantic.WithJsonSchema({"anyOf": [_SECRET_SCHEMA, {"type": "array", "items": _SECRET_SCHEMA}]}),
]
WebhookUrl = Annotated[str, pydantic.BeforeValidator(_read_url), pydantic.WithJsonSchema(_SECRET_SCHEMA)]
ChatId = Annotated[
    str,
    pydantic.BeforeValidator(lambda value: str(value) if type(value) is int else value),
    pydantic.WithJsonSchema({"type": ["string", "integer"]}),
]
HeaderValue = Annotated[Secret, pydantic.AfterValidator(_header_value)]
PayloadSchema = Annotated[
    dict[str, Any], pydantic.BeforeValidator(_read_schema), pydantic.WithJsonSchema({"type": ["string", "object"]})
]
Name = Annotated[str, pydantic.AfterValidator(_plain_name)]
StepId = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$")]

# -- models ------------------------------------------------------------------------------------------------------------


class Settings(pydantic.BaseModel):
    """Base of every table of the config: closed, frozen, strict about types."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=False, defer_build=True
    )


class DaemonSettings(Settings):
    database: Annotated[str, pydantic.AfterValidator(_plain_name)] = "digestd.sqlite3"
    timezone: Zone = "UTC"
    concurrency: Annotated[int, pydantic.Field(ge=1, le=1000)] = 16
    durability: Literal["full", "normal"] = "full"
    retention: Duration = 30 * DAY
    max_window: Duration = 365 * DAY
    drain_timeout: Duration = 20 * SECOND
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ApiSettings(Settings):
    listen: list[Annotated[str, _rule_field(_checked(parse_listen))]] = ["127.0.0.1:3210"]
    keys: list[Secret] = []
    public_url: Annotated[str, _rule_field(_public_url)] | None = None


class SenderSettings(Settings):
    timeout: Duration = 15 * SECOND
    concurrency: Annotated[int, pydantic.Field(ge=1, le=1000)] | None = None
    max_per_minute: Annotated[int, pydantic.Field(ge=1, le=100_000)] | None = None
    retry: list[Duration] = [5 * SECOND, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 10 * HOUR]
    jitter: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.2


class Preset(NamedTuple):
    """What a chat service asks of a webhook: how values are escaped in its texts, the settings that it must have and
    may have, its URL where it has one of its own, and the statuses that say an endpoint is gone for good."""

    escape: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    url: str | None = None
    gone: tuple[int, ...] = (410,)


PRESETS = {
    "slack": Preset("entities", gone=(404, 410)),
    "discord": Preset("markdown", gone=(404, 410)),
    "teams": Preset("markdown"),
    "telegram": Preset("entities", ("token", "chat_id"), url="https://api.telegram.org", gone=(401, 404, 410)),
    "ntfy": Preset("text", ("topic",), ("token", "priority", "tags"), "https://ntfy.sh"),
    "mattermost": Preset("mattermost", takes=("username", "icon_url")),
    "googlechat": Preset("no-mentions"),
    "apprise": Preset("text", takes=("tag",)),
}


def _webhook_schema(schema: dict[str, Any]) -> None:
    """For editors: a preset needs no type, and where a webhook goes to must stand somewhere."""
    schema["required"] = []
    given = [["type", "url"], ["type", "url_from"], ["preset", "url"], ["preset", "url_from"], ["preset", "token"]]
    schema["anyOf"] = [{"required": names} for names in (*given, ["preset", "topic"])]


class WebhookSettings(SenderSettings):
    model_config = pydantic.ConfigDict(json_schema_extra=_webhook_schema)
    type: Literal["webhook"]
    preset: Literal["slack", "discord", "teams", "telegram", "ntfy", "mattermost", "googlechat", "apprise"] | None = (
        None
    )
    url: Annotated[WebhookUrl | None, pydantic.Field(repr=False)] = None
    url_from: Annotated[str, _rule_field(_data_path)] | None = None
    allow_addresses: list[Annotated[str, _rule_field(_network)]] = []
    secret: WebhookKeys = []
    headers: dict[Annotated[str, _rule_field(_header_name)], HeaderValue] = {}
    ca_file: Annotated[str, pydantic.AfterValidator(_existing_file)] | None = None
    proxy: Annotated[str | None, pydantic.Field(repr=False), _rule_field(_proxy)] = None
    disable_after: Duration = 5 * DAY
    token: Secret | None = None
    chat_id: ChatId | None = None
    topic: str | None = None
    priority: Annotated[int, pydantic.Field(ge=1, le=5)] | None = None
    tags: list[str] = []
    username: str | None = None
    icon_url: str | None = None
    tag: str | None = None

    @property
    def service(self) -> Preset:
        """What its preset asks; without one, nothing."""
        return PRESETS[self.preset] if self.preset else _NO_PRESET


_NO_PRESET = Preset("text")


Mailbox = Annotated[str, _rule_field(lambda text: _from_header(text) if isinstance(text, str) else text)]


class MailSettings(SenderSettings):
    """What every sender of mail has."""

    sender: Annotated[Mailbox, pydantic.Field(alias="from")]
    reply_to: Mailbox | None = None
    thread: Literal["workflow", "key", "day", "month", "none"] = "workflow"
    timeout: Duration = 30 * SECOND
    retry: list[Duration] = [MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR]


class SmtpSettings(MailSettings):
    type: Literal["smtp"]
    host: str = "127.0.0.1"
    port: Annotated[int, pydantic.Field(ge=1, le=65535)] = 25
    tls: Literal["none", "starttls", "implicit"] = "starttls"
    username: str | None = None
    password: Secret | None = None
    ca_file: Annotated[str, pydantic.AfterValidator(_existing_file)] | None = None
    server_name: str | None = None
    hello: str | None = None
    concurrency: Annotated[int, pydantic.Field(ge=1, le=1000)] | None = 2


class SendmailSettings(MailSettings):
    type: Literal["sendmail"]
    command: Annotated[list[Annotated[str, pydantic.Field(min_length=1)]], pydantic.Field(min_length=1)] = [
        "/usr/sbin/sendmail", "-t", "-i"
    ]  # fmt: skip


class LogSettings(SenderSettings):
    type: Literal["log"]


SENDER_MODELS: dict[str, type[SenderSettings]] = {
    "webhook": WebhookSettings, "smtp": SmtpSettings, "sendmail": SendmailSettings, "log": LogSettings
}  # fmt: skip
AnySender = Annotated[
    WebhookSettings | SmtpSettings | SendmailSettings | LogSettings,
    pydantic.Field(discriminator="type"),
    pydantic.BeforeValidator(
        lambda value: {"type": "webhook", **value} if isinstance(value, dict) and "preset" in value else value
    ),
]


class StepSettings(Settings):
    id: StepId
    when: Condition | None = None


class Calendar(StepSettings):
    """A step that may name instants of the calendar: every with at and on, or cron."""

    every: Literal["minute", "hour", "day", "week", "month"] | None = None
    at: TimeOfDay | None = None
    on: Annotated[list[DayItem], pydantic.Field(min_length=1)] | None = None
    cron: CronText | None = None

    @pydantic.model_validator(mode="after")
    def _calendar_is_one(self) -> Calendar:
        if self.every is not None:
            try:
                scheduled_rule(self.every, self.at, self.on)
            except RuleError as error:
                raise ValueError(error.message) from None
        return self

    def next_after(self, at: int, zone: str, seed: str) -> int:
        """The next instant, in ms. Raises RuleError when the calendar has none."""
        found = calendar_rule(self.every, self.at, tuple(self.on or ()), self.cron, zone, seed).next_after(at)
        if found is None:
            raise RuleError(f"the step {seed} has no instant after {iso_text(at)}")
        return found


@functools.lru_cache(maxsize=1024)
def calendar_rule(
    every: str | None, at: str | None, on: tuple[Any, ...], cron: str | None, zone: str, seed: str
) -> Rule:
    """The rule behind a step's calendar, in the zone of an IANA name."""
    place = load_zone(zone)
    return parse_cron(cron, place, seed) if cron is not None else scheduled_rule(every or "", at, on, place)


class Content(Settings):
    """What a message says, where the config gives it words: three templates, or for a webhook its whole body."""

    subject: Template | None = None
    text: Template | None = None
    html: HtmlTemplate | None = None
    whole: Annotated[JsonTemplate | None, pydantic.Field(alias="json")] = None

    @functools.cached_property
    def templates(self) -> dict[str, str]:
        """Those that there are."""
        found = {"subject": self.subject, "text": self.text, "html": self.html}
        return {name: text for name, text in found.items() if text is not None}

    @functools.cached_property
    def takes_values(self) -> bool:
        """Whether any of them holds more than fixed words."""
        return any("{" in text for text in (*self.templates.values(), self.whole or ""))


class DigestStep(Calendar):
    type: Literal["digest"]
    key: KeyPaths | None = None
    window: Duration | None = None
    start: Literal["immediately", "when_repeated"] = "immediately"
    look_back: Duration = 5 * MINUTE
    max_events: Annotated[int, pydantic.Field(ge=2, le=10_000)] | None = None
    show: Annotated[int, pydantic.Field(ge=1)] | None = None
    order: Literal["oldest", "newest"] = "oldest"
    extend_to_schedule: bool = False

    @functools.cached_property
    def paths(self) -> list[list[str]]:
        """The digest key's paths inside the payload, split."""
        return [path.split(".")[1:] for path in self.key or []]

    @functools.cached_property
    def takes_all(self) -> bool:
        """Whether an event that comes while a window is open joins it, and nothing else is to be asked or done."""
        return self.when is None and self.start == "immediately" and self.max_events is None

    def closes_at(self, at: int, zone: str) -> int:
        """When a window that opens at `at` ends, in ms. Raises RuleError when the calendar has no further boundary."""
        return at + self.window if self.window is not None else self.next_after(at, zone, self.id)


class DelayStep(Calendar):
    type: Literal["delay"]
    delay: DelayLength | None = None
    past: Literal["now", "fail"] = "now"
    extend_to_schedule: bool = False


class ChannelStep(Content, StepSettings):
    type: Literal["email", "sms", "push", "chat"]
    sender: str
    outside: Literal["skip", "hold", "send"] = "skip"
    stop_on_failure: bool = False


class InAppStep(Content, StepSettings):
    type: Literal["in_app"]
    sender: str | None = None
    stop_on_failure: bool = False


STEP_MODELS: dict[str, type[StepSettings]] = {
    "digest": DigestStep, "delay": DelayStep, "in_app": InAppStep,
    "email": ChannelStep, "sms": ChannelStep, "push": ChannelStep, "chat": ChannelStep,
}  # fmt: skip
AnyStep = Annotated[DigestStep | DelayStep | ChannelStep | InAppStep, pydantic.Field(discriminator="type")]


class WorkflowSettings(Settings):
    name: Name | None = None
    critical: bool = False
    channels: dict[Literal["email", "sms", "push", "chat", "in_app"], bool] = {}
    timezone: Zone | None = None
    payload_schema: PayloadSchema | None = None
    steps: Annotated[list[AnyStep], pydantic.Field(min_length=1, max_length=100)]

    @functools.cached_property
    def places(self) -> dict[str, int]:
        return {step.id: place for place, step in enumerate(self.steps)}

    @functools.cached_property
    def digests(self) -> dict[str, DigestStep]:
        """Its digest steps by their ids."""
        return {step.id: step for step in self.steps if isinstance(step, DigestStep)}

    @functools.cached_property
    def delays(self) -> dict[str, DelayStep]:
        """Its delay steps by their ids."""
        return {step.id: step for step in self.steps if isinstance(step, DelayStep)}

    @functools.cached_property
    def holds_windows(self) -> bool:
        """Whether any of its windows may have to wait for the subscriber's hours."""
        return not self.critical and any(step.extend_to_schedule for step in self.digests.values())

    @functools.cached_property
    def payload_rule(self) -> PayloadRule | None:
        """What payloads have to be like, compiled."""
        return None if self.payload_schema is None else payload_rule(self.payload_schema)

    def step(self, step_id: str) -> Any:
        """The step of an id, or None when the running config has none of that name."""
        place = self.places.get(step_id)
        return None if place is None else self.steps[place]

    def step_after(self, step_id: str | None) -> Any:
        """The step after the one of this id (the first, for None); None at the end. KeyError when the id is gone."""
        place = 0 if step_id is None else self.places[step_id] + 1
        return self.steps[place] if place < len(self.steps) else None


class RepeatableTrigger(Settings):
    workflow: str
    to: Annotated[Any, _rule_field(_recipients)]
    payload: Annotated[dict[str, Any], _rule_field(_json_value)] = {}


class Backoff(Settings):
    """The waits between the tries of one run: all alike, or each twice the one before."""

    type: Literal["fixed", "exponential"] = "fixed"
    delay: Duration
    jitter: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.0

    def waits(self, count: int) -> list[int]:
        """So many of them, in ms; none longer than a day."""
        growth = 2 if self.type == "exponential" else 1
        return [min(self.delay * growth ** min(number, 40), max(DAY, self.delay)) for number in range(count)]


class RunRetention(Settings):
    """How many ended runs of a repeatable are kept, and how long; one that failed stays."""

    count: Annotated[int, pydantic.Field(ge=0)] | None = None
    age: Duration | None = None


class RepeatableSettings(Content):
    cron: CronText | None = None
    pattern: CronText | None = None  # BullMQ's word for the same
    every: Interval | None = None
    align: Literal["clock", "start"] = "clock"
    offset: Offset | None = None
    limit: Annotated[int, pydantic.Field(ge=1, le=2**53)] | None = None
    count: Annotated[int, pydantic.Field(ge=0, le=2**53)] = 0
    start_at: Instant | None = None
    end_at: Instant | None = None
    timezone: Zone | None = None
    immediately: bool = False
    job_id: Name | None = None
    overlap: Literal["allow", "skip", "queue"] = "allow"
    missed: Literal["once", "skip", "all"] = "once"
    jitter: Duration | None = None
    attempts: Annotated[int, pydantic.Field(ge=1, le=100)] | None = None
    backoff: (
        Annotated[
            Backoff,
            pydantic.BeforeValidator(lambda value: {"delay": value} if isinstance(value, (str, int)) else value),
        ]
        | None
    ) = None
    retention: (
        Annotated[
            RunRetention, pydantic.BeforeValidator(lambda value: {"age": value} if isinstance(value, str) else value)
        ]
        | None
    ) = None
    trigger: RepeatableTrigger | None = None
    sender: str | None = None
    data: JsonValue = None


SYSTEM_CONFIG, SYSTEM_STATE = pathlib.Path("/etc/digestd"), pathlib.Path("/var/lib/digestd")  # as the unit has them


class Config(Settings):
    """The whole config, validated. `source` is the file, `files` every file it was read from."""

    daemon: DaemonSettings = DaemonSettings()
    api: ApiSettings = ApiSettings()
    senders: dict[Name, AnySender] = {}
    workflows: dict[Name, WorkflowSettings] = {}
    repeatables: dict[Name, RepeatableSettings] = {}

    _source: pathlib.Path = pydantic.PrivateAttr(default=pathlib.Path("config.toml"))
    _files: tuple[pathlib.Path, ...] = pydantic.PrivateAttr(default=())
    _warnings: tuple[Problem, ...] = pydantic.PrivateAttr(default=())

    @property
    def source(self) -> pathlib.Path:
        return self._source

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return self._files

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return self._warnings

    @property
    def longest_look_back(self) -> int:
        """How far any of the steps that start when repeated looks back, in ms."""
        steps = (step for workflow in self.workflows.values() for step in workflow.digests.values())
        return max((step.look_back for step in steps if step.start == "when_repeated"), default=0)

    @property
    def database(self) -> pathlib.Path:
        """The database file: relative to the config file, or to $STATE_DIRECTORY under systemd. One in /etc/digestd
        has it in the unit's state directory for the commands as well, or they would work on a database of their own."""
        state = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
        folder = self._source.absolute().parent
        if not state and folder == SYSTEM_CONFIG:
            state = str(SYSTEM_STATE)
        return (pathlib.Path(state) if state else self._source.parent) / self.daemon.database


# -- reading, and telling what is wrong --------------------------------------------------------------------------------


class _Lines:
    """Finds the line of a key path with tomli alone: the shortest run of lines that parses and holds the path."""

    def __init__(self, text: str) -> None:
        self.lines = [line + "\n" for line in text.split("\n")]  # TOML knows no other line ends

    def of(self, path: Sequence[str | int]) -> int:
        """The line, from 1, of the statement that introduced the path, or the longest part of it that is there."""
        path = list(path)
        while path and not self._holds(len(self.lines), path):
            path.pop()
        if not path:
            return 1
        return bisect.bisect_left(range(len(self.lines)), True, key=lambda count: self._holds(count, path)) or 1

    def _holds(self, count: int, path: Sequence[str | int]) -> bool:
        while True:  # a prefix that ends inside a multi-line value does not parse: grow it
            try:
                found: Any = tomli.loads("".join(self.lines[:count]))
                break
            except ValueError:
                if count >= len(self.lines):
                    return False
                count += 1
        for part in path:
            try:
                found = found[part]
            except (KeyError, IndexError, TypeError):
                return False
        return True


def nearest(name: str, known: Sequence[str], otherwise: str = "there are") -> str:
    """A hint for a name that is none: the one it was perhaps meant to be, else all there are."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known) or 'none'}"


def _known_keys(path: Sequence[str | int], data: Any) -> Iterable[str]:
    """The keys that may stand where the last part of `path` stands."""

    def names(model: Any) -> list[str]:
        return [field.alias or name for name, field in model.model_fields.items()]

    parent = data
    for part in path[:-1]:
        parent = parent[part]
    kind = parent.get("type") if isinstance(parent, dict) else None
    table, depth = path[0], len(path)
    if depth == 1:
        return names(Config)
    if table == "senders":
        return names(SENDER_MODELS.get(str(kind or ("webhook" if "preset" in parent else "")), SenderSettings))
    if table == "workflows":
        return names(WorkflowSettings) if depth == 3 else names(STEP_MODELS.get(str(kind), StepSettings))
    if table == "repeatables":
        return names(RepeatableTrigger if path[2] == "trigger" else RepeatableSettings)
    return names({"daemon": DaemonSettings, "api": ApiSettings}[str(table)])


_SECRET_KEYS = {"keys", "secret", "password", "url", "headers", "token", "proxy"}  # what stands there is never shown
_TYPE_WORDS = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "string_type": "a text in quotes", "bool_type": "true or false", "list_type": "a list", "dict_type": "a table",
    "model_type": "a table", "model_attributes_type": "a table", "is_instance_of": "another value",
}  # fmt: skip


def _plain_words(error: Any, path: Sequence[str | int], data: Any) -> str:
    """One of pydantic's errors in the words of a person: what was found, what would be right."""
    kind, context, found = error["type"], error.get("ctx", {}), shown(error.get("input"))
    if kind == "extra_forbidden":
        known = list(_known_keys(path, data))
        return f"unknown key; {nearest(str(path[-1]), known, 'known here are')}"
    if kind == "missing":
        return "is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        wanted = ", ".join(SENDER_MODELS if path[0] == "senders" else STEP_MODELS)
        return (
            f"{shown(context['tag'])} is unknown; there are {wanted}"
            if "tag" in context
            else f"is missing; there are {wanted}"
        )
    if kind == "literal_error":
        return f"{found} is not one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{found} must be letters, digits, - and _, at most 64"
    if kind in ("greater_than_equal", "less_than_equal"):
        limit, word = next(iter(context.values())), "least" if kind.startswith("greater") else "most"
        return f"{found} is out of range; it must be at {word} {limit}"
    if kind in ("too_short", "too_long"):
        limit, word = context.get("min_length") or context.get("max_length"), "least" if kind == "too_short" else "most"
        return f"there must be at {word} {limit}"
    if kind in _TYPE_WORDS:
        found = "this" if _SECRET_KEYS & set(path) else found
        return f"{found} is not right here; it must be {_TYPE_WORDS[kind]}"
    return str(error["msg"]).removeprefix("Value error, ")


def _real_path(loc: Sequence[str | int], data: Any, kind: str) -> list[str | int]:
    """pydantic's location without what is not in the file: the tags of unions, which stand after their table's name."""
    parts = list(loc)
    if parts[0] == "senders":
        del parts[2:3]
    elif parts[0] == "workflows" and parts[2:3] == ["steps"]:
        del parts[4:5]
    path: list[str | int] = []
    found = data
    for place, part in enumerate(parts):
        inside = (isinstance(found, dict) and part in found) or (isinstance(found, list) and isinstance(part, int))
        if inside:
            found = found[part]
            path.append(part)
        elif kind == "missing" and place == len(parts) - 1:
            path.append(part)
    return [*path, "type"] if kind.startswith("union_tag") else path


def _path_text(path: Sequence[str | int]) -> str:
    return ".".join(str(part) if re.fullmatch(r"[\w-]+", str(part)) else json.dumps(part) for part in path)


Found = tuple[list[str | int], str]


def _pydantic_problems(error: pydantic.ValidationError, data: Any) -> Iterator[Found]:
    for item in error.errors(include_url=False):
        path = _real_path(item["loc"], data, item["type"])
        if path:
            yield path, one_line(_plain_words(item, path, data))


def _tables(data: Any, name: str) -> list[tuple[str, dict[str, Any]]]:
    tables = data.get(name)
    return (
        [(key, value) for key, value in tables.items() if isinstance(value, dict)] if isinstance(tables, dict) else []
    )


def _one_of(table: dict[str, Any], path: list[str | int], names: Sequence[str], what: str) -> Iterator[Found]:
    """Exactly one of these settings must be there."""
    given = [name for name in names if name in table]
    if len(given) != 1:
        yield path, f"{what} of {', '.join(names[:-1])} and {names[-1]}; found {' and '.join(given) or 'none of them'}"


def _rule_for_check(value: Any, base: pathlib.Path) -> PayloadRule | None:
    """The payload schema of a workflow, where there is one that can be used."""
    try:
        return payload_rule(json.loads((base / value).read_bytes()) if isinstance(value, str) else value)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, RuleError):
        return None  # what is wrong with it is told elsewhere


def _key_problems(step: dict[str, Any], path: list[str | int], rule: PayloadRule) -> Iterator[Found]:
    """Digest keys, and delays that the payload tells, must be in the payload's schema."""
    for setting in ("key", "delay"):
        value = step.get(setting)
        several = isinstance(value, list)
        for place, text in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(text, str) and _PATH.fullmatch(text) and not rule.knows(text.split(".")[1:]):
                yield (
                    [*path, setting, *([place] if several else [])],
                    f"{text!r} is not in the workflow's payload_schema",
                )


def _workflow_problems(data: Any, senders: Any, max_window: int, base: pathlib.Path) -> Iterator[Found]:
    for name, workflow in _tables(data, "workflows"):
        steps = workflow.get("steps")
        seen: set[str] = set()
        rule = _rule_for_check(workflow.get("payload_schema"), base)
        for place, step in enumerate(steps if isinstance(steps, list) else ()):
            path: list[str | int] = ["workflows", name, "steps", place]
            if isinstance(step, dict):
                if isinstance(step.get("id"), str):
                    if step["id"] in seen:
                        yield [*path, "id"], f"{step['id']!r} is the id of an earlier step; each step has its own"
                    seen.add(step["id"])
                yield from _step_problems(step, path, senders, max_window)
                if rule is not None:
                    yield from _key_problems(step, path, rule)


def _step_problems(step: dict[str, Any], path: list[str | int], senders: Any, max_window: int) -> Iterator[Found]:
    yield from _sender_problems(step, path, senders)
    kind = step.get("type")
    if kind == "digest":
        yield from _one_of(step, path, ("window", "every", "cron"), "a digest ends by one")
        if "look_back" in step and step.get("start") != "when_repeated":
            yield [*path, "look_back"], 'goes with start = "when_repeated"'
    elif kind == "delay":
        yield from _one_of(step, path, ("delay", "every", "cron"), "a delay ends by one")
        if "past" in step and not str(step.get("delay")).startswith("payload"):
            yield [*path, "past"], 'goes with a delay that the payload tells, such as delay = "payload.sendAt"'
    if kind in ("digest", "delay"):
        yield from _calendar_problems(step, path)
    for setting in ("window", "delay"):
        with contextlib.suppress(RuleError):
            if setting in step and parse_duration(step[setting]) > max_window:
                limit = duration_text(max_window)
                yield [*path, setting], f"{step[setting]!r} is over daemon.max_window, which is {limit}"


def _calendar_problems(step: dict[str, Any], path: list[str | int]) -> Iterator[Found]:
    """What a calendar needs beside `every`. As in Novu, nothing is guessed, not midnight either."""
    every = step.get("every")
    if every is None:
        yield from (([*path, name], "goes with every") for name in ("at", "on") if name in step)
    elif not {"window", "delay", "cron"} & step.keys():
        if every in ("day", "week", "month") and "at" not in step:
            yield [*path, "at"], f'is missing: when on the day, such as at = "09:00", goes with every = "{every}"'
        if every == "week" and "on" not in step:
            yield [*path, "on"], 'is missing: which days, such as on = ["monday"], goes with every = "week"'


def _sender_problems(table: dict[str, Any], path: list[str | int], senders: Any) -> Iterator[Found]:
    name = table.get("sender")
    if isinstance(name, str) and isinstance(senders, dict) and name not in senders:
        yield [*path, "sender"], f"no sender is called {shown(name)}; {nearest(name, [str(key) for key in senders])}"


def _webhook_problems(sender: dict[str, Any], path: list[str | int]) -> Iterator[Found]:
    """Where a webhook goes to, and what its preset asks for."""
    name = sender.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    options = {option for other in PRESETS.values() for option in (*other.needs, *other.takes)}
    for option in sorted(options & sender.keys()):
        if preset is None or option not in (*preset.needs, *preset.takes):
            owners = [other for other, known in PRESETS.items() if option in (*known.needs, *known.takes)]
            yield [*path, option], f"goes with preset = {' or '.join(map(json.dumps, owners))}"
    if preset is not None:
        yield from (([*path, option], "is missing") for option in preset.needs if option not in sender)
    if "url" in sender and "url_from" in sender:
        yield [*path, "url_from"], "url and url_from exclude each other; set one of them"
    elif "url" not in sender and "url_from" not in sender and (preset is None or preset.url is None):
        yield [*path, "url"], "is missing"
    if "allow_addresses" in sender and "url_from" not in sender:
        yield [*path, "allow_addresses"], "goes with url_from: an address that this file names is reached anyway"
    if "proxy" in sender and "url_from" in sender:
        yield [*path, "proxy"], "a URL that comes from data is reached straight, so that its address can be checked"


def _json_template_problems(data: Any) -> Iterator[Found]:
    """Templates of whole bodies, with senders that have no such thing."""
    senders = data.get("senders")
    places: list[tuple[list[str | int], Any]] = [
        (["repeatables", name], spec) for name, spec in _tables(data, "repeatables")
    ]
    for name, workflow in _tables(data, "workflows"):
        steps = workflow.get("steps")
        for place, step in enumerate(steps if isinstance(steps, list) else ()):
            places.append((["workflows", name, "steps", place], step))
    for path, table in places:
        if isinstance(table, dict) and "json" in table and isinstance(senders, dict):
            sender = senders.get(table["sender"]) if isinstance(table.get("sender"), str) else None
            if isinstance(sender, dict) and "preset" not in sender and sender.get("type") != "webhook":
                yield [*path, "json"], f"goes with a webhook; {table['sender']!r} is {shown(sender.get('type'))}"


def _sender_table_problems(data: Any) -> Iterator[Found]:
    for name, sender in _tables(data, "senders"):
        if sender.get("type") == "webhook" or "preset" in sender:
            yield from _webhook_problems(sender, ["senders", name])
        if sender.get("type") == "smtp":
            path: list[str | int] = ["senders", name]
            if ("username" in sender) != ("password" in sender):
                yield path, "username and password go together"
            host = sender.get("host", SmtpSettings.model_fields["host"].default)
            if "password" in sender and sender.get("tls") == "none" and not is_loopback(str(host)):
                yield [*path, "tls"], 'a password is not sent without TLS; set "starttls" or "implicit"'


def _plan_problems(spec: dict[str, Any], path: list[str | int]) -> Iterator[Found]:
    """Settings of a repeatable that exclude each other, or need another one."""
    if spec.get("immediately") is True and "start_at" in spec:
        yield [*path, "immediately"], "now and start_at exclude each other; set one of them"
    if "every" not in spec:
        yield from (([*path, name], "goes with every") for name in ("align", "offset") if name in spec)
    if "sender" not in spec:
        yield from (
            ([*path, name], "goes with sender: a trigger is done in one go, and is not tried again")
            for name in ("attempts", "backoff")
            if name in spec
        )
    if spec.get("retention") in ({}, []):
        yield [*path, "retention"], 'is empty; write "7d", or { count = 100, age = "7d" }'
    with contextlib.suppress(RuleError):
        if (
            "start_at" in spec
            and "end_at" in spec
            and _instant_value(spec["end_at"]) < _instant_value(spec["start_at"])
        ):
            yield [*path, "end_at"], "lies before start_at, so it would never run"
    with contextlib.suppress(RuleError):
        if "jitter" in spec and "every" in spec and parse_duration(spec["jitter"]) >= _interval(spec["every"]):
            yield [*path, "jitter"], "must be shorter than every, or runs would be lost"


def _repeatable_problems(data: Any, senders: Any) -> Iterator[Found]:
    workflows = dict(_tables(data, "workflows"))
    for name, spec in _tables(data, "repeatables"):
        path: list[str | int] = ["repeatables", name]
        yield from _one_of(
            spec,
            path,
            ("cron", "every") if "pattern" not in spec else ("cron", "pattern", "every"),
            "a repeatable has one",
        )
        yield from _one_of(spec, path, ("sender", "trigger"), "a repeatable has one")
        yield from _sender_problems(spec, path, senders)
        yield from _plan_problems(spec, path)
        target = spec["trigger"].get("workflow") if isinstance(spec.get("trigger"), dict) else None
        if isinstance(target, str) and target not in workflows:
            words = f"no workflow is called {shown(target)}; {nearest(target, list(workflows))}"
            yield [*path, "trigger", "workflow"], words


def _cross_problems(data: Any, base: pathlib.Path) -> Iterator[Found]:
    """What no single setting can know: names of other tables, settings that exclude each other. Tolerates broken
    tables, so that it is told beside what is wrong with them."""
    daemon, api, senders = data.get("daemon"), data.get("api"), data.get("senders", {})
    max_window = DaemonSettings().max_window
    with contextlib.suppress(RuleError, AttributeError):
        max_window = parse_duration(daemon.get("max_window"))
    yield from _workflow_problems(data, senders, max_window, base)
    yield from _sender_table_problems(data)
    yield from _json_template_problems(data)
    yield from _repeatable_problems(data, senders)
    if isinstance(api, dict) and not api.get("keys"):
        for place, text in enumerate(api["listen"] if isinstance(api.get("listen"), list) else ()):
            with contextlib.suppress(RuleError):
                listen = parse_listen(text)
                if listen.kind == "tcp" and not listen.is_private:
                    words = "can be reached by others, and no api.keys are set; set one, or listen on 127.0.0.1"
                    yield ["api", "listen", place], f"{text!r} {words}"


MAX_LINES = 50  # warnings that come with their line
_FIELD_NAMES = ("second", "minute", "hour", "day of the month", "month", "day of the week")
_FIELD_SIZES = (60, 60, 24, 31, 12, 7)


def _step_trap(field: str, name: str, size: int) -> Iterator[str]:
    for step in re.findall(r"(?:^|,)[*?]/(\d{1,4})", field):
        if int(step) > 1 and size % int(step):
            longer = {"second": "minute", "minute": "hour", "hour": "day", "day of the month": "month"}.get(name)
            again = f"begins anew with each {longer or {'month': 'year'}.get(name, 'week')}"
            yield f"*/{step} in the {name} is not every {step} of them: it {again}"


@functools.lru_cache(maxsize=256)
def _gaps(zone: dt.tzinfo) -> list[tuple[dt.datetime, dt.datetime]]:
    """What the clocks of a zone leave out within three years, as local times: the last second before, and the first
    after. Days that a zone skipped whole are none of these."""
    found, at = [], FIRST_SAMPLE
    while at < FIRST_SAMPLE + 3 * 366 * DAY:
        change = _clock_change(at, at + 20 * DAY, zone)
        at += 20 * DAY
        if change is not None:
            turn, later = local_time(change - SECOND, zone), local_time(change, zone)
            if dt.timedelta(seconds=1) < later - turn < dt.timedelta(hours=23):
                found.append((turn, later))
    return found


def _gap_trap(rule: LocalRule) -> Iterator[str]:
    """A planned local time that the clocks leave out."""
    for turn, later in () if rule.both else _gaps(rule.zone):
        planned = next(rule.sims[0].after(turn), None)
        if planned is not None and planned < later:
            moved = planned + (later - turn) - dt.timedelta(seconds=1)
            when = f"{planned:%H:%M} does not exist on {planned:%Y-%m-%d}, when the clocks change"
            yield f"{when}: it runs at {moved:%H:%M}"
            return


def cron_traps(text: str, zone: dt.tzinfo = UTC, seed: str = "") -> list[str]:
    """What people fall into with a cron text that can be read: in words, each what it does and what was perhaps meant.
    (Facts on BullMQ, 5: issues 305, 1736, and those of cron-parser on the two day fields.)"""
    fields = CRON_ALIASES.get(text, text).split()
    if len(fields) == 5:
        fields.insert(0, "0")
    second, minute, hour, day, _, weekday = fields
    found = []
    if second in ("*", "?") and (minute, hour) != ("*", "*") and text not in CRON_ALIASES:
        once = " ".join(["0", *fields[1:]])
        found.append(f"the first of six fields is the second: * runs 60 times in each minute; for once, write {once}")
    for field, name, size in zip(fields, _FIELD_NAMES, _FIELD_SIZES, strict=True):
        found += _step_trap(field, name, size)
    if day not in ("*", "?") and weekday not in ("*", "?"):
        found.append("both day fields are set: it runs when either of them matches, not only when both do")
    late = sorted({int(number) for number in re.findall(r"(?<![\d/#])(\d\d)(?![\d/])", day) if 28 < int(number) < 32})
    if late and weekday in ("*", "?"):
        found.append(f"months without a day {late[0]} are passed over; L is the last day of each")
    return [*found, *_gap_trap(parse_cron(text, zone, seed))]


def _repeatable_warnings(config: Config, name: str, spec: RepeatableSettings) -> Iterator[tuple[str, str]]:
    """What is allowed in a repeatable and perhaps not meant: (setting, words)."""
    cron = spec.cron or spec.pattern
    if cron is not None:
        zone = load_zone(spec.timezone or config.daemon.timezone)
        yield from (("cron" if spec.cron else "pattern", words) for words in cron_traps(cron, zone, name))
    sender = config.senders.get(spec.sender or "")
    rate = sender.max_per_minute if sender is not None else None
    if spec.every is not None and rate is not None and spec.every * rate < MINUTE:
        yield "every", f"makes more than the {rate} a minute that the sender {spec.sender!r} takes"


def _sample_of(schema: Any, depth: int = 0) -> Any:
    """A value as a JSON Schema has it, good enough to try a template with."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    for word in ("default", "const"):
        if word in schema:
            return schema[word]
    for word in ("examples", "enum"):
        if isinstance(schema.get(word), list) and schema[word]:
            return schema[word][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or "properties" in schema:
        inner = schema.get("properties")
        return {name: _sample_of(one, depth + 1) for name, one in (inner if isinstance(inner, dict) else {}).items()}
    if kind == "array":
        return [_sample_of(schema.get("items"), depth + 1)]
    return {"string": 'a "text"', "integer": 1, "number": 1.5, "boolean": True}.get(str(kind))


def _sample_values(workflow: WorkflowSettings, step: Any) -> dict[str, Any]:
    """What a step's templates would see, with two events as the payload schema has them."""
    payload = _sample_of(workflow.payload_schema) if workflow.payload_schema else {}
    payload = payload if isinstance(payload, dict) else {}
    events = [{"id": str(number), "time": iso_text(FIRST_SAMPLE), "payload": payload} for number in (1, 2)]
    summary = {"events": events, "eventCount": 2, "countSummary": "2 notifications", "sentenceSummary": "a and b"}
    before = workflow.steps[: workflow.places[step.id]]
    return {
        "payload": payload,
        "subscriber": {"subscriberId": "somebody", "data": {}},
        "workflow": {"name": "sample"},
        "steps": {one.id: {"duration": MINUTE} if isinstance(one, DelayStep) else summary for one in before},
    }


def json_body(template: str, values: dict[str, Any], now: int = 0) -> str:
    """The body that a json template makes. Raises PermanentFailure where that is no JSON."""
    text = render_template(template, values, "json", now)
    try:
        json.loads(text)
    except ValueError as error:
        words = f"{error}; a value that is not inside quotes needs the filter json: {{{{ payload.count | json }}}}"
        raise PermanentFailure(f"the json template does not make JSON: {words}") from None
    return text


def _json_problems(config: Config) -> Iterator[Found]:
    """Whether templates of whole bodies make JSON, tried with samples."""
    for name, workflow in config.workflows.items():
        for place, step in enumerate(workflow.steps):
            whole = getattr(step, "whole", None)
            if whole is not None:
                try:
                    json_body(whole, _sample_values(workflow, step), FIRST_SAMPLE)
                except PermanentFailure as error:
                    yield ["workflows", name, "steps", place, "json"], error.message
    for name, spec in config.repeatables.items():
        if spec.whole is not None:
            facts = {"name": name, "key": name, "jobId": None, "slot": iso_text(FIRST_SAMPLE), "count": 1}
            values = {"repeatable": facts, "slot": facts["slot"], "count": 1, "data": spec.data}
            try:
                json_body(spec.whole, values, FIRST_SAMPLE)
            except PermanentFailure as error:
                yield ["repeatables", name, "json"], error.message


def _open_to_others(path: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(path.stat().st_mode & stat.S_IROTH)
    return False


def _calendar_warnings(step: Any, max_window: int) -> Iterator[tuple[list[str | int], str]]:
    """What is allowed in a calendar and perhaps not meant: days that months lack, gaps past max_window."""
    if not isinstance(step, Calendar) or (step.every is None and step.cron is None):
        return
    for place, day in enumerate(step.on or ()):
        if isinstance(day, int) and day > 28:
            yield ["on", place], f'months without a day {day} are passed over; "last" is the last day of each'
    if step.cron is not None:
        for words in cron_traps(step.cron, UTC, step.id):
            yield ["cron"], words
    sample = next_times(
        calendar_rule(step.every, step.at, tuple(step.on or ()), step.cron, "UTC", step.id), FIRST_SAMPLE, 50
    )
    longest = max((later - sooner for sooner, later in zip(sample, sample[1:], strict=False)), default=0)
    if longest > max_window:
        setting: list[str | int] = ["cron" if step.cron is not None else "every"]
        yield setting, f"it may last {duration_text(longest)}, over daemon.max_window, {duration_text(max_window)}"


def _doubts(config: Config) -> Iterator[Found]:
    """What the settings allow and perhaps do not mean."""
    for workflow, settings in config.workflows.items():
        for place, step in enumerate(settings.steps):
            for setting, words in _calendar_warnings(step, config.daemon.max_window):
                yield ["workflows", workflow, "steps", place, *setting], words
    for name, spec in config.repeatables.items():
        for key, words in _repeatable_warnings(config, name, spec):
            yield ["repeatables", name, key], words
    if (config.api.public_url or "").startswith("http://"):
        yield ["api", "public_url"], "mail programs unsubscribe at one click by https alone (RFC 8058)"
    for name, sender in config.senders.items():
        if isinstance(sender, SmtpSettings) and sender.tls == "none" and not is_loopback(sender.host):
            yield ["senders", name, "tls"], f"mail to {sender.host} goes without TLS"
        if isinstance(sender, SendmailSettings) and shutil.which(sender.command[0]) is None:
            yield ["senders", name, "command"], f"there is no program {sender.command[0]}"


def _warnings(config: Config, plain_secrets: Sequence[str], lines: _Lines) -> Iterator[Problem]:
    file = str(config.source)
    if plain_secrets and _open_to_others(config.source):
        yield Problem(
            file, 0, "", "holds secrets in plain text and can be read by everyone; chmod o-r, or use {file = …}"
        )
    for path in config.files[1:]:
        if _open_to_others(path):
            yield Problem(str(path), 0, "", "is a secret that everyone can read; chmod o-r")
    for number, (where, words) in enumerate(_doubts(config)):
        # To find a line means to parse most of the file again: a daemon must not start late for a thousand of them.
        yield Problem(file, lines.of(where) if number < MAX_LINES else 0, _path_text(where), words)


def read_config(text: str, source: pathlib.Path, secrets: bool = True, templates: bool = True) -> Config:
    """A config from its text. Raises ConfigError with every problem; a TOML syntax error is reported alone."""
    file = str(source)
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        hint = "; a text needs quotes around it" if error.msg == "Invalid value" else ""
        raise ConfigError([Problem(file, error.lineno, "", f"{error.msg} at column {error.colno}{hint}")]) from None
    except RecursionError:
        raise ConfigError([Problem(file, 0, "", "is nested too deeply")]) from None
    except ValueError:
        raise ConfigError([Problem(file, 0, "", "holds a number of too many digits")]) from None
    if not data:
        raise ConfigError([Problem(file, 0, "", "is empty; it needs at least one table, such as [daemon]")])
    context: dict[str, Any] = {
        "base": source.parent,
        "secrets": secrets,
        "templates": templates,
        "files": [],
        "plain_secrets": [],
    }
    found = list(_cross_problems(data, source.parent))
    config = None
    try:
        config = Config.model_validate(data, context=context)
    except pydantic.ValidationError as error:
        found += _pydantic_problems(error, data)
    if config is not None and templates:
        found += _json_problems(config)
    lines = _Lines(text)
    problems = [Problem(file, lines.of(path), _path_text(path), words) for path, words in found]
    if problems or config is None:
        raise ConfigError(sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.path)))
    config._source = source
    config._files = (source, *context["files"])
    config._warnings = tuple(_warnings(config, context["plain_secrets"], lines))
    return config


def load_config(path: pathlib.Path, secrets: bool = True, templates: bool = True) -> Config:
    """A config from its file. Raises ConfigError; a byte-order mark is taken, other encodings than UTF-8 are not."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem(str(path), 0, "", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError([Problem(str(path), line, "", "is not UTF-8 from here on")]) from None
    return read_config(text, path, secrets, templates)


def files_digest(paths: Iterable[pathlib.Path]) -> str:
    """A hash over the contents of files, to see whether any of them changed; one that is away counts as a change."""
    total = hashlib.sha256()
    for path in paths:
        try:
            total.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            total.update(b"away")
    return total.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# 6 Store
# ----------------------------------------------------------------------------------------------------------------------
# The only section that opens the database. Models describe columns and serve everything rare; the hot statements are
# plain SQL, run through the same connection (peewee builds a statement in 60 to 160 us, SQLite runs it in 3).
# `database` is the one thing in this module that changes.

APPLICATION_ID = 0x64677374  # "dgst": tells our files from others
BUSY_MS = 50  # how long a statement of the daemon may wait for somebody else's lock
CACHED_ROWS = 50_000

WindowName = tuple[str, str, str, str]  # subscriber, workflow, step, key: at most one window of a name is open


class Store(peewee.SqliteDatabase):
    """The database handle, with what is remembered of it between transactions."""

    def __init__(self) -> None:
        super().__init__(None, autoconnect=False, lock_type="IMMEDIATE")
        self.open_windows: dict[WindowName, tuple[int, int]] = {}  # -> id, due_at
        self.window_names: dict[int, WindowName] = {}  # the same by id, as windows that end are known by it
        self.known_subscribers: set[str] = set()
        self.sender_states: dict[str, str] | None = None  # of those that failed; None: not read yet
        self.any_choices: bool | None = None  # whether any subscriber turned a channel on or off
        self.seen_version = 0

    def keep_window(self, name: WindowName, window_id: int, due_at: int) -> None:
        """Remember a window that is open."""
        if len(self.open_windows) >= CACHED_ROWS:
            self.open_windows.clear()
            self.window_names.clear()
        self.open_windows[name] = (window_id, due_at)
        self.window_names[window_id] = name

    def drop_window(self, window_id: int) -> None:
        """Remember a window no longer: it ends, or its end moves."""
        name = self.window_names.pop(window_id, None)
        if name is not None:
            self.open_windows.pop(name, None)

    def forget(self) -> None:
        """Drop what is cached: another process wrote, or a transaction was rolled back."""
        self.open_windows.clear()
        self.window_names.clear()
        self.known_subscribers.clear()
        self.sender_states = None
        self.any_choices = None


database = Store()


class Table(peewee.Model):
    class Meta:
        database = database
        legacy_table_names = False


class Fact(Table):
    name = peewee.TextField(primary_key=True)
    value = peewee.TextField()
    updated_at = peewee.IntegerField()

    class Meta:
        table_name = "meta"


class Subscriber(Table):
    id = peewee.AutoField()
    subscriber_id = peewee.TextField(unique=True)
    first_name = peewee.TextField(null=True)
    last_name = peewee.TextField(null=True)
    email = peewee.TextField(null=True)
    phone = peewee.TextField(null=True)
    avatar = peewee.TextField(null=True)
    locale = peewee.TextField(null=True)
    timezone = peewee.TextField(null=True)
    data = peewee.TextField(null=True)
    schedule = peewee.TextField(null=True)
    credentials = peewee.TextField(null=True)
    is_online = peewee.IntegerField(null=True)
    last_online_at = peewee.IntegerField(null=True)
    created_at = peewee.IntegerField()
    updated_at = peewee.IntegerField()

    class Meta:
        table_name = "subscribers"


class Preference(Table):
    id = peewee.AutoField()
    subscriber_id = peewee.TextField()
    workflow = peewee.TextField()
    channel = peewee.TextField()
    enabled = peewee.IntegerField()
    updated_at = peewee.IntegerField()

    class Meta:
        table_name = "preferences"


class SenderRow(Table):
    id = peewee.AutoField()
    name = peewee.TextField(unique=True)
    state = peewee.TextField(default="ok")
    failures = peewee.IntegerField(default=0)
    failing_at = peewee.IntegerField(null=True)
    failed_at = peewee.IntegerField(null=True)
    disabled_at = peewee.IntegerField(null=True)
    cause = peewee.TextField(null=True)
    reason = peewee.TextField(null=True)

    class Meta:
        table_name = "senders"


class Arrival(Table):
    id = peewee.AutoField()
    workflow = peewee.TextField()
    step = peewee.TextField()
    subscriber_id = peewee.TextField()
    key = peewee.TextField()
    event_id = peewee.IntegerField(null=True)
    arrived_at = peewee.IntegerField()

    class Meta:
        table_name = "arrivals"


class Digest(Table):
    id = peewee.AutoField()
    workflow = peewee.TextField()
    step = peewee.TextField()
    subscriber_id = peewee.TextField()
    key = peewee.TextField()
    state = peewee.TextField(default="open")
    opened_at = peewee.IntegerField()
    closes_at = peewee.IntegerField()
    due_at = peewee.IntegerField()
    waits = peewee.IntegerField(default=0)
    held_at = peewee.IntegerField(null=True)
    closed_at = peewee.IntegerField(null=True)
    reason = peewee.TextField(null=True)

    class Meta:
        table_name = "digests"


class EventRow(Table):
    id = peewee.AutoField()
    workflow = peewee.TextField()
    subscriber_id = peewee.TextField()
    payload = peewee.TextField(default="{}")
    transaction_id = peewee.TextField(null=True)
    received_at = peewee.IntegerField()
    state = peewee.TextField(default="received")
    digest_id = peewee.IntegerField(null=True)
    placed_at = peewee.IntegerField(null=True)
    finished_at = peewee.IntegerField(null=True)
    reason = peewee.TextField(null=True)

    class Meta:
        table_name = "events"


class Repeatable(Table):
    id = peewee.AutoField()
    key = peewee.TextField()
    name = peewee.TextField()
    job_id = peewee.TextField(null=True)
    source = peewee.TextField()
    cron = peewee.TextField(null=True)
    every_ms = peewee.IntegerField(null=True)
    align = peewee.TextField(default="clock")
    offset_ms = peewee.IntegerField(default=0)
    anchor_at = peewee.IntegerField(default=0)
    timezone = peewee.TextField()
    start_at = peewee.IntegerField(null=True)
    end_at = peewee.IntegerField(null=True)
    run_limit = peewee.IntegerField(null=True)
    overlap = peewee.TextField(default="allow")
    missed = peewee.TextField(default="once")
    jitter_ms = peewee.IntegerField(default=0)
    attempts = peewee.IntegerField(null=True)
    backoff = peewee.TextField(null=True)
    retention = peewee.TextField(null=True)
    action = peewee.TextField()
    count = peewee.IntegerField(default=0)
    seq = peewee.IntegerField(default=0)
    behind = peewee.IntegerField(default=0)
    state = peewee.TextField(default="active")
    reason = peewee.TextField(null=True)
    created_at = peewee.IntegerField()
    updated_at = peewee.IntegerField()
    finished_at = peewee.IntegerField(null=True)

    class Meta:
        table_name = "repeatables"


class Run(Table):
    id = peewee.AutoField()
    workflow = peewee.TextField(null=True)
    subscriber_id = peewee.TextField(null=True)
    event_id = peewee.IntegerField(null=True)
    digest_id = peewee.IntegerField(null=True)
    repeatable_id = peewee.IntegerField(null=True)
    seq = peewee.IntegerField(null=True)
    slot_at = peewee.IntegerField(null=True)
    taken_at = peewee.IntegerField(null=True)
    count = peewee.IntegerField(null=True)
    step = peewee.TextField(null=True)
    next_at = peewee.IntegerField(null=True)
    state = peewee.TextField(default="active")
    created_at = peewee.IntegerField()
    finished_at = peewee.IntegerField(null=True)
    reason = peewee.TextField(null=True)

    class Meta:
        table_name = "runs"


class DigestRun(Table):
    run_id = peewee.IntegerField(primary_key=True)
    digest_id = peewee.IntegerField()
    joined_at = peewee.IntegerField()

    class Meta:
        table_name = "digest_runs"


class Job(Table):
    id = peewee.AutoField()
    run_id = peewee.IntegerField()
    step = peewee.TextField()
    type = peewee.TextField()
    sender = peewee.TextField(null=True)
    state = peewee.TextField()
    due_at = peewee.IntegerField()
    tries = peewee.IntegerField(default=0)
    waits = peewee.IntegerField(default=0)
    public_id = peewee.TextField()
    message = peewee.TextField(null=True)
    created_at = peewee.IntegerField()
    taken_at = peewee.IntegerField(null=True)
    lane = peewee.TextField(default="")
    finished_at = peewee.IntegerField(null=True)
    reason = peewee.TextField(null=True)

    class Meta:
        table_name = "jobs"


class Attempt(Table):
    id = peewee.AutoField()
    job_id = peewee.IntegerField()
    number = peewee.IntegerField()
    started_at = peewee.IntegerField()
    finished_at = peewee.IntegerField(null=True)
    outcome = peewee.TextField(null=True)
    status_code = peewee.IntegerField(null=True)
    enhanced_code = peewee.TextField(null=True)
    reason = peewee.TextField(null=True)
    took_ms = peewee.IntegerField(null=True)

    class Meta:
        table_name = "attempts"


class InboxMessage(Table):
    id = peewee.AutoField()
    job_id = peewee.IntegerField(unique=True)
    public_id = peewee.TextField(unique=True)
    subscriber_id = peewee.TextField()
    workflow = peewee.TextField()
    subject = peewee.TextField(null=True)
    body = peewee.TextField(null=True)
    payload = peewee.TextField()
    created_at = peewee.IntegerField()
    seen_at = peewee.IntegerField(null=True)
    read_at = peewee.IntegerField(null=True)
    archived_at = peewee.IntegerField(null=True)
    actions = peewee.TextField(null=True)

    class Meta:
        table_name = "inbox_messages"


class KeptAnswer(Table):
    key = peewee.TextField(primary_key=True)
    body_hash = peewee.TextField()
    status = peewee.IntegerField()
    body = peewee.TextField()
    created_at = peewee.IntegerField()

    class Meta:
        table_name = "answers"


TABLES: tuple[type[Table], ...] = (
    Fact, Subscriber, Preference, SenderRow, Digest, Arrival, EventRow, Repeatable, Run, DigestRun, Job, Attempt,
    InboxMessage, KeptAnswer,
)  # fmt: skip

# -- statements, transactions, moves -----------------------------------------------------------------------------------


def _read(fetch: Callable[[Any], Any], sql: str, values: Sequence[Any], strict: bool = False) -> Any:
    """Run a statement and fetch. Text that is not UTF-8, which only another program can have written, comes with marks
    for what cannot be read, so that one row does not stop all; where that is `strict`, it raises."""
    try:
        return fetch(database.execute_sql(sql, values))
    except sqlite3.Error as error:  # met while fetching, which peewee does not translate
        if strict or "decode" not in str(error).lower() or not sql.lstrip().startswith("SELECT"):
            raise peewee.OperationalError(str(error)) from error
    connection = database.connection()
    connection.text_factory = _decode
    try:
        return fetch(database.execute_sql(sql, values))
    finally:
        connection.text_factory = str


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def rows(sql: str, *values: Any, strict: bool = False) -> list[Any]:
    """All rows of a query, as tuples. Read whole, so that no cursor is left open to block a checkpoint."""
    found: list[Any] = _read(sqlite3.Cursor.fetchall, sql, values, strict)
    return found


def row(sql: str, *values: Any, strict: bool = False) -> Any:
    """The first row of a query, or None."""
    return _read(sqlite3.Cursor.fetchone, sql, values, strict)


def execute(sql: str, *values: Any) -> int:
    """Run a statement that writes; how many rows it touched."""
    return int(database.execute_sql(sql, values).rowcount)


def insert(sql: str, *values: Any) -> int:
    """Run an INSERT of one row; its id."""
    return int(database.execute_sql(sql, values).lastrowid)


def execute_many(sql: str, values: Iterable[Sequence[Any]]) -> int:
    """Run one statement that writes with many sets of values; how many rows it touched in all."""
    try:
        return int(database.cursor().executemany(sql, values).rowcount)
    except sqlite3.IntegrityError as error:  # past peewee, which would translate
        raise peewee.IntegrityError(str(error)) from error
    except sqlite3.Error as error:
        raise peewee.OperationalError(str(error)) from error


def insert_text(model: type[Table], *names: str) -> str:
    """An INSERT statement for these columns of a model, rendered once, so that it cannot drift from the model."""
    assert all(name in model._meta.fields for name in names)
    return f"INSERT INTO {model._meta.table_name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


@contextlib.contextmanager
def transaction() -> Iterator[None]:
    """BEGIN IMMEDIATE … COMMIT. Drops what is cached when another process committed since, or this one rolls back."""
    try:
        with database.atomic():
            version = row("PRAGMA data_version")[0]
            if version != database.seen_version:
                database.forget()
                database.seen_version = version
            yield
    except BaseException:
        database.forget()
        raise


class savepoint:
    """What happens inside is kept or undone as a whole; the transaction around it goes on. They nest, for SQLite takes
    the innermost of one name; the one name keeps the statement in its cache (1.2 us against 21)."""

    def __enter__(self) -> None:
        database.execute_sql("SAVEPOINT part")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # what ends the process ends the transaction around it too
        if kind is not None:
            database.forget()
            database.execute_sql("ROLLBACK TO part")
        database.execute_sql("RELEASE part")


@functools.cache
def _move_text(table: str, names: tuple[str, ...], many: bool, guard: str = "") -> str:
    facts = "".join(f", {name} = ?" for name in names)
    if many:
        wanted = "id IN (SELECT value FROM json_each(?))"
        return f"UPDATE {table} SET state = ?{facts} WHERE {wanted} AND state = ?{guard and ' AND '}{guard}"
    return f"UPDATE {table} SET state = ?{facts} WHERE id = ? AND state = ?{guard and ' AND '}{guard}"


def _check_move(table: str, old: str, new: str) -> None:
    if (old, new) not in MOVES[table]:
        raise IllegalMove(f"{table} may not go from {old} to {new}")


def move(model: type[Table], row_id: int, old: str, new: str, guard: str = "", **facts: Any) -> bool:
    """Change the state of one row, if it is still `old` (and `guard`, a condition in SQL, holds), with other columns.

    Returns whether it moved. Raises IllegalMove for a pair that MOVES does not hold.
    """
    table = model._meta.table_name
    _check_move(table, old, new)
    done = execute(_move_text(table, tuple(facts), False, guard), new, *facts.values(), row_id, old) == 1
    if done and log.isEnabledFor(logging.DEBUG):
        known = {name: value for name, value in facts.items() if name != "message"}
        log.debug(
            "%s %s %s->%s%s", table, row_id, old, new, "".join(f" {name}={value}" for name, value in known.items())
        )
    return done


def move_all(
    model: type[Table],
    ids: Iterable[int],
    old: str,
    new: str,
    guard: str = "",
    through: Sequence[str] = (),
    **facts: Any,
) -> list[int]:
    """The same for a batch of rows, all with the same columns; returns the ids of those that moved. States that they
    would pass `through` within this transaction, where nobody sees them, are not written."""
    table = model._meta.table_name
    for pair in itertools.pairwise((old, *through, new)):
        _check_move(table, *pair)
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        return []
    listed = json.dumps(wanted)
    moved = execute(_move_text(table, tuple(facts), True, guard), new, *facts.values(), listed, old)
    log.debug("%s %s->%s: %d rows", table, old, new, moved)
    if moved == len(wanted):  # nearly always; RETURNING would cost each row a quarter more
        return wanted
    as_moved = "".join(f" AND {name} IS ?" for name in facts)
    text = f"SELECT id FROM {table} WHERE id IN (SELECT value FROM json_each(?)) AND state = ?{as_moved}"
    return [found[0] for found in rows(text, listed, new, *facts.values())]


def move_each(
    model: type[Table], facts: Mapping[int, Sequence[Any]], old: str, new: str, names: tuple[str, ...]
) -> int:
    """The same for a batch of rows, each with its own values of the columns `names`; how many moved."""
    table = model._meta.table_name
    _check_move(table, old, new)
    text = _move_text(table, names, False)
    moved = execute_many(text, [(new, *values, row_id, old) for row_id, values in facts.items()])
    log.debug("%s %s->%s: %d rows", table, old, new, moved)
    return moved


def is_poison(error: BaseException) -> bool:
    """Whether an error belongs to the row at hand, and not to the database as a whole: then the others go on."""
    return not isinstance(error, peewee.DatabaseError) or isinstance(error, peewee.IntegrityError)


def bug_text(error: BaseException) -> str:
    """A reason to keep for an error: our own words, or those of a bug."""
    return error.message if isinstance(error, DigestdError) else f"a bug in digestd: {type(error).__name__}: {error}"


def remember(name: str, value: str, now: int) -> None:
    """Keep a fact about the daemon itself, in `meta`."""
    execute(
        "INSERT INTO meta (name, value, updated_at) VALUES (?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
        name, value, now,
    )  # fmt: skip


def remembered(name: str) -> str | None:
    found = row("SELECT value FROM meta WHERE name = ?", name)
    return found[0] if found else None


# -- migrations --------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^-- == (?:(\d+): (.*)|views) ==$", re.MULTILINE)


class Migrations(NamedTuple):
    """migrations.sql, split: the statements of each numbered section, and the views."""

    sections: dict[int, list[str]]
    views: list[str]

    @property
    def version(self) -> int:
        return max(self.sections)


def project_file(name: str) -> str:
    """A file that comes with digestd: beside this one, or inside the installed package's metadata."""
    beside = pathlib.Path(__file__).with_name(name)
    if beside.exists():
        return beside.read_text("utf-8")
    import importlib.metadata

    text = importlib.metadata.distribution("digestd").read_text(f"extra_metadata/{name}")
    if text is None:
        raise StoreError(f"{name} is missing from the installation", "install digestd again")
    return text


def _statements(text: str) -> list[str]:
    statements, pending = [], ""
    for line in text.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending.strip())
            pending = ""
    return [statement for statement in statements if re.sub(r"--.*", "", statement).strip()]


@functools.cache
def read_migrations() -> Migrations:
    """The schema's history. Cached: the file does not change under a running program."""
    text = project_file("migrations.sql")
    marks = list(_SECTION.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    parts = {mark[1]: _statements(text[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)}
    views = parts.pop(None)
    return Migrations({int(number): statements for number, statements in parts.items()}, views)


def _apply_section(number: int, statements: Sequence[str]) -> None:
    database.execute_sql("PRAGMA foreign_keys = 0")  # inside a transaction it would do nothing
    with database.atomic():
        for statement in statements:
            database.execute_sql(statement)
        broken = rows("PRAGMA foreign_key_check")
        if broken:
            raise StoreError(f"section {number} of migrations.sql leaves {len(broken)} rows that point nowhere")
        database.execute_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute_sql(f"PRAGMA user_version = {number}")
    database.execute_sql("PRAGMA foreign_keys = 1")


def migrate(now: int) -> list[int]:
    """Bring the open database to the newest schema and make its views again; the sections that were applied.

    A file that holds rows is copied first, beside itself, so that a failed upgrade can be undone.
    """
    migrations = read_migrations()
    have = int(database.pragma("user_version"))
    pending = [number for number in sorted(migrations.sections) if number > have]
    if pending and have and database.database != ":memory:":
        copy_name = f"{database.database}.schema-{have}.{now}"
        database.execute_sql("VACUUM INTO ?", (copy_name,))
        log.info("schema %d is upgraded to %d; the former database is kept as %s", have, pending[-1], copy_name)
    if pending or not _views_are_current(migrations):
        for (name,) in rows("SELECT name FROM sqlite_schema WHERE type = 'view'"):
            database.execute_sql(f'DROP VIEW "{name}"')
        for number in pending:
            _apply_section(number, migrations.sections[number])
        with database.atomic():
            for statement in migrations.views:
                database.execute_sql(statement)
    return pending


def _views_are_current(migrations: Migrations) -> bool:
    def bare(statement: str) -> str:
        return re.sub(r"^(?:\s*--.*\n)*", "", statement).rstrip(";").strip()

    have = [found[0] for found in rows("SELECT sql FROM sqlite_schema WHERE type = 'view' ORDER BY rowid")]
    return [bare(sql) for sql in have] == [bare(sql) for sql in migrations.views]


# -- opening -----------------------------------------------------------------------------------------------------------


def give_to_the_folders_owner(file: int, path: pathlib.Path) -> None:
    """What root makes in the daemon's folder is the daemon's: else a command that root ran first would lock it out."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.fchown(file, owner.st_uid, owner.st_gid)


class InstanceLock:
    """One daemon for one database: a lock file beside it, held as long as this object lives."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        try:
            self.file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
            give_to_the_folders_owner(self.file.fileno(), self.path)
        except OSError as error:
            raise StoreError(
                f"cannot make {self.path}: {error.strerror}", "the folder must be writable for digestd"
            ) from None
        for wait_s in (0.02, 0.2, None):  # a command that only asks who holds it does so for a moment
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if wait_s is not None:
                    time.sleep(wait_s)
        else:
            holder = self.file.read().strip() or "unknown"
            self.file.close()
            raise StoreError(f"{path} is in use by another digestd, process {holder}", "stop that one first")
        self.file.truncate(0)
        self.file.write(f"{os.getpid()}\n")
        self.file.flush()

    def release(self) -> None:
        """Give the lock up. The file stays: removing it would let two processes hold two files of one name."""
        with contextlib.suppress(OSError, ValueError):
            self.file.truncate(0)
            self.file.close()


def lock_holder(path: pathlib.Path) -> str | None:
    """The process id of the daemon that holds a database, or None."""
    try:
        with open(path.with_name(path.name + ".lock")) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read().strip() or "unknown"
    except OSError:
        pass
    return None


def _create_file(path: pathlib.Path) -> None:
    """Make the file with a mode that keeps others out, whatever the umask; -wal and -shm take the same."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise StoreError(f"cannot make {path}: {error.strerror}", "the folder must exist and be writable") from None
    with contextlib.suppress(OSError):
        shared = bool(os.environ.get("STATE_DIRECTORY")) or path.parent == SYSTEM_STATE
        os.fchmod(descriptor, 0o640 if shared else 0o600)
        give_to_the_folders_owner(descriptor, path)
    os.close(descriptor)


def _refuse_strangers(path: str) -> None:
    """Only our own databases, or empty files, and none from a newer digestd."""
    application, version = int(database.pragma("application_id")), int(database.pragma("user_version"))
    newest = read_migrations().version
    if application == APPLICATION_ID and version > newest:
        raise StoreError(
            f"{path} has schema {version}, and this digestd {__version__} knows schemas up to {newest}",
            "install the newer digestd again, or put back the copy that the upgrade left beside the file",
        )
    if application != APPLICATION_ID and row("SELECT 1 FROM sqlite_schema LIMIT 1"):
        raise StoreError(f"{path} is a database of another program", "name another file in daemon.database")


def _refuse_other_columns(path: str) -> None:
    """A file whose schema has our number and other columns: before the first release, schema 1 still changed."""
    if int(database.pragma("user_version")) != read_migrations().version:
        return
    for model in TABLES:
        names = ", ".join(model._meta.fields)
        try:
            database.execute_sql(f"SELECT {names} FROM {model._meta.table_name} LIMIT 0")
        except peewee.OperationalError as error:
            if "no such" not in str(error):
                raise
            words = f"{path} was made by a digestd of before the first release: {error}"
            raise StoreError(words, "move the file away, and a new one is made") from None


@contextlib.contextmanager
def _store_errors(path: str) -> Iterator[None]:
    """What SQLite says, in words that tell what to do."""
    try:
        yield
    except (peewee.DatabaseError, sqlite3.DatabaseError) as error:
        text = str(error)
        hints = {
            "not a database": "it is not an SQLite file, or it is damaged; name another file, or put back a backup",
            "malformed": "it is damaged; put back a backup, or try: sqlite3 FILE .recover",
            "locked": "another program holds it; end that, or wait",
            "readonly": "the file and its folder must be writable for digestd",
            "unable to open": "the file and its folder must be there and readable for digestd",
            "disk I/O": "the disk failed; see the kernel's log",
            "full": "the disk is full",
            "no such table": "a daemon is making it at this moment; try again",
        }
        hint = next((words for part, words in hints.items() if part in text), "")
        raise StoreError(f"{path}: {text}", hint) from error


def open_store(path: str, now: int, durability: str = "full", busy_ms: int = BUSY_MS, may_migrate: bool = True) -> None:
    """Open the database at a path (":memory:" for none on disk), check that it is ours, bring its schema up to date.

    Raises StoreError. `busy_ms` is how long a statement waits for another program's lock.
    """
    if path != ":memory:":
        _create_file(pathlib.Path(path))
    pragmas = {
        "busy_timeout": max(busy_ms, 2000),  # while opening; the daemon's short one is set below
        "foreign_keys": 1,
        "synchronous": 2 if durability == "full" else 1,
        "wal_autocheckpoint": 10_000,
        "journal_size_limit": 64 << 20,
        "cache_size": -32_000,
        "temp_store": 2,
    }
    close_store()
    database.init(path, pragmas=pragmas)
    database.forget()
    with _store_errors(path):
        database.connect()
        _refuse_strangers(path)
        if path != ":memory:" and database.pragma("journal_mode") != "wal":
            database.pragma("journal_mode", "wal")
        if may_migrate:
            migrate(now)
        _refuse_other_columns(path)
        if may_migrate:
            execute("UPDATE meta SET value = value WHERE name = ''")  # a write: read-only files are found out here
        database.execute_sql(f"PRAGMA busy_timeout = {busy_ms}")
        database.seen_version = row("PRAGMA data_version")[0]
    if may_migrate and remembered("unsubscribe_key") is None:
        with transaction():
            remember("instance", secrets.token_hex(8), now)
            remember("unsubscribe_key", secrets.token_hex(32), now)


def close_store() -> None:
    """Close the database; opening it again is fine."""
    if not database.is_closed():
        database.close()


# ======================================================================================================================
# II. THE JOURNEY
# ======================================================================================================================

# ----------------------------------------------------------------------------------------------------------------------
# 7 Ingest
# ----------------------------------------------------------------------------------------------------------------------
# Checks a trigger and records its events, once. Owns the birth of events (received), and of subscribers that a trigger
# brings. Knows nothing of windows.

SUBSCRIBER_FIELDS = {
    "firstName": "first_name", "lastName": "last_name", "email": "email", "phone": "phone", "avatar": "avatar",
    "locale": "locale", "timezone": "timezone", "data": "data",
}  # fmt: skip

_INSERT_EVENT = (
    insert_text(
        EventRow,
        "workflow",
        "subscriber_id",
        "payload",
        "transaction_id",
        "received_at",
        "state",
        "digest_id",
        "placed_at",
    )
    + " ON CONFLICT (transaction_id, subscriber_id, workflow) WHERE transaction_id IS NOT NULL DO NOTHING"
)
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_loads = json.JSONDecoder(parse_constant=_no_constant).decode


def canonical_json(value: Any) -> str:
    """One text for all spellings of a JSON value: members sorted, 1 and 1.0 the same, 1 and true not."""
    if isinstance(value, str):
        return _dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumps(name)}:{canonical_json(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical_json, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _dumps(value)


def parse_json(data: bytes | str) -> Any:
    """A JSON document from outside. Raises Rejected(400) with the reason, also for what Python would let pass: NaN,
    thousands of levels, lone surrogates, numbers past what a float holds."""
    try:
        text = data.decode().removeprefix("\ufeff") if isinstance(data, bytes) else data
        value = _loads(text)
    except UnicodeDecodeError:
        raise Rejected(400, "the body is not UTF-8") from None
    except RecursionError:
        raise Rejected(400, f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise Rejected(400, f"the body is not JSON: {error}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Rejected(400, f"the JSON is nested deeper than {MAX_DEPTH} levels")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        level = [item for item in inner if isinstance(item, (dict, list))]
    return depth


def json_text(value: Any, field: str = "payload") -> str:
    """A value as compact JSON that every receiver can read. Raises Rejected(400)."""
    try:
        text = _dumps(value)
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise Rejected(400, f"{field} holds half of a surrogate pair, which is no character", field) from None
    except (ValueError, RecursionError):
        raise Rejected(400, f"{field} holds a number that JSON does not know, such as NaN or 1e400", field) from None
    return text


def check_id(value: Any, field: str) -> str:
    """An id given by a caller: 1 to 255 characters, none of them a control character. Raises Rejected(422)."""
    if not isinstance(value, str):
        raise Rejected(422, f"{field} must be a text", field)
    if not value or len(value) > 255 or not value.isprintable() or value != value.strip():
        raise Rejected(
            422, f"{field} must have 1 to 255 characters, no control characters, no blanks at its ends", field
        )
    return value


def check_subscriber_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The columns for a subscriber's fields; null clears, what is absent stays. Raises Rejected(422)."""
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        column = SUBSCRIBER_FIELDS.get(name)
        if column is None:
            continue
        if name == "data" and value is not None:
            if not isinstance(value, dict):
                raise Rejected(422, "data must be an object", "data")
            value = json_text(value, "data")
        elif value is not None and (not isinstance(value, str) or len(value) > 1000 or "\x00" in value):
            raise Rejected(422, f"{name} must be a text or null", name)
        columns[column] = value
    for name, value in columns.items():
        json_text(value, name)  # refuses half a surrogate pair
    if columns.get("email") is not None and not is_mail_address(columns["email"]):
        raise Rejected(422, f"{columns['email']!r} is not an e-mail address", "email")
    if columns.get("timezone") is not None:
        try:
            load_zone(columns["timezone"])
        except RuleError as error:
            raise Rejected(422, error.message, "timezone") from None
    return columns


def check_schedule(value: Any) -> str | None:
    """The column for a subscriber's weekly hours; null removes them. Raises Rejected(422)."""
    if value is None:
        return None
    try:
        parse_schedule(value)
    except RuleError as error:
        raise Rejected(422, error.message, "schedule") from None
    return json_text(value, "schedule")


def _check_recipients(to: Any) -> list[Recipient]:
    """The recipients that `to` names, each once. One bad one refuses the whole call."""
    alone = to["subscriberId"] if type(to) is dict and len(to) == 1 and "subscriberId" in to else to
    if type(alone) is str:  # the usual case, and the fast one
        return [Recipient(check_id(alone, "to"), {})]
    found: dict[str, dict[str, Any]] = {}
    entries = to if isinstance(to, list) else [to]
    if not entries:
        raise Rejected(422, "to names nobody", "to")
    for entry in entries:
        if isinstance(entry, dict):
            if "subscriberId" not in entry:
                raise Rejected(422, "a recipient needs a subscriberId", "to")
            subscriber_id, fields = check_id(entry["subscriberId"], "subscriberId"), check_subscriber_fields(entry)
        else:
            subscriber_id, fields = check_id(entry, "to"), {}
        found.setdefault(subscriber_id, {}).update(fields)
    return [Recipient(subscriber_id, fields) for subscriber_id, fields in found.items()]


_FOREIGN = {  # what Novu knows and would keep apart by; ignored in silence, it would mix
    "tenant": "tenants: put it into the payload, and into the digest's key",
    "context": "contexts: put them into the payload, and into the digest's key",
    "bridgeUrl": "workflows outside its config",
}


def check_trigger(config: Config, body: Any, now: int) -> Trigger:
    """A trigger as Novu's clients send it, {name, to, payload, transactionId}, checked against the config.

    Raises Rejected: 400 for a wrong shape, 422 for recipients that are none and for a workflow nobody knows.
    """
    if not isinstance(body, dict):
        raise Rejected(400, "a trigger is a JSON object", "body")
    name, to, payload = body.get("name"), body.get("to"), body.get("payload")
    if not isinstance(name, str) or not name:
        raise Rejected(400, "name is missing: the workflow to trigger", "name")
    if to is None:
        raise Rejected(400, "to is missing: a subscriber id, an object with subscriberId, or a list of them", "to")
    if payload is None:
        payload = {}
    elif not isinstance(payload, dict):
        raise Rejected(400, f"payload must be an object, not {_dumps(payload)[:60]}", "payload")
    recipients = _check_recipients(to)
    if name not in config.workflows:
        hint = f"no workflow is called {shown(name)}; {nearest(name, list(config.workflows))}"
        raise Rejected(422, "workflow_not_found", "name", hint)
    for foreign, words in _FOREIGN.items():
        if body.get(foreign):
            raise Rejected(422, f"digestd has no {words}", foreign)
    payload = conform(config.workflows[name], payload)
    transaction_id = body.get("transactionId")
    if transaction_id is None:
        transaction_id = new_public_id("txn", now)
    else:
        check_id(transaction_id, "transactionId")
    return Trigger(name, recipients, payload, json_text(payload), transaction_id)


def conform(workflow: WorkflowSettings, payload: dict[str, Any]) -> dict[str, Any]:
    """A payload as its workflow's schema has it, with defaults. Raises Rejected(400) with everything that is wrong."""
    rule = workflow.payload_rule
    if rule is None:
        return payload
    payload = rule.with_defaults(payload)
    problems = rule.problems(payload)
    if problems:
        words = "; ".join(f"{where}: {what}" for where, what in problems)
        raise Rejected(400, f"the payload is not as the workflow's schema has it: {words}", "payload", "", problems)
    return payload


def upsert_subscriber(subscriber_id: str, columns: dict[str, Any], now: int) -> None:
    """Make a subscriber, or overwrite the columns that are given."""
    names = list(columns)
    sets = "".join(f"{name} = excluded.{name}, " for name in names)
    execute(
        f"INSERT INTO subscribers (subscriber_id, created_at, updated_at{''.join(', ' + name for name in names)})"
        f" VALUES (?, ?, ?{', ?' * len(names)})"
        f" ON CONFLICT (subscriber_id) DO UPDATE SET {sets}updated_at = excluded.updated_at",
        subscriber_id, now, now, *columns.values(),
    )  # fmt: skip


def set_channels(subscriber_id: str, workflow: str, channels: Mapping[str, bool], now: int) -> None:
    """Keep what a subscriber chose to get: for a workflow, or with '' for all that have no choice of their own."""
    execute_many(
        "INSERT INTO preferences (subscriber_id, workflow, channel, enabled, updated_at) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (subscriber_id, workflow, channel)"
        " DO UPDATE SET enabled = excluded.enabled, updated_at = excluded.updated_at",
        [(subscriber_id, workflow, channel, int(is_on), now) for channel, is_on in channels.items()],
    )
    database.any_choices = None


def record_trigger(trigger: Trigger, now: int) -> tuple[TriggerAnswer, list[Event]]:
    """Write one event for each recipient of a checked trigger, received; the answer, and the events that are new.

    The same transaction id again for the same workflow and recipient writes nothing: the answer is as the first was
    when the content is the same, an error when it is not.
    """
    events, clashes = [], []
    name, text, transaction_id = trigger.workflow, trigger.payload_text, trigger.transaction_id
    for subscriber_id, columns in trigger.recipients:
        if columns:
            upsert_subscriber(subscriber_id, columns, now)
        values = (name, subscriber_id, text, transaction_id, now, "received", None, None)
        cursor = database.execute_sql(_INSERT_EVENT, values)
        if cursor.rowcount == 1:
            events.append(Event(cursor.lastrowid, name, subscriber_id, trigger.payload, now, transaction_id))
        elif not _is_repeat(trigger, subscriber_id):
            clashes.append(subscriber_id)
    return _answer(trigger, clashes), events


def record_placed(triggers: Sequence[tuple[Trigger, Sequence[int]]], now: int) -> list[TriggerAnswer]:
    """The same for triggers whose recipients have their windows open: the events are written placed, all of them with
    one statement. The answers."""
    if not triggers:
        return []
    values = [
        (one.workflow, to.subscriber_id, one.payload_text, one.transaction_id, now, "placed", window_id, now)
        for one, window_ids in triggers
        for to, window_id in zip(one.recipients, window_ids, strict=True)
    ]
    if execute_many(_INSERT_EVENT, values) == len(values):
        return [_answer(trigger, ()) for trigger, _ in triggers]
    # Some were there before, and nothing tells which; one that was written just now is its own repeat.
    return [
        _answer(trigger, [to.subscriber_id for to in trigger.recipients if not _is_repeat(trigger, to.subscriber_id)])
        for trigger, _ in triggers
    ]


def _answer(trigger: Trigger, clashes: Sequence[str]) -> TriggerAnswer:
    if not clashes:
        return TriggerAnswer("processed", trigger.transaction_id)
    used = f"transactionId {trigger.transaction_id} was used before for "
    errors = tuple(f"{used}{subscriber_id}, with another payload" for subscriber_id in clashes)
    return TriggerAnswer("error", trigger.transaction_id, errors)


def _is_repeat(trigger: Trigger, subscriber_id: str) -> bool:
    found = row(
        "SELECT payload FROM events WHERE transaction_id = ? AND subscriber_id = ? AND workflow = ?",
        trigger.transaction_id, subscriber_id, trigger.workflow,
    )  # fmt: skip
    return canonical_json(_loads(found[0])) == canonical_json(trigger.payload)


_RECEIVED = (
    "SELECT id, workflow, subscriber_id, payload, received_at, transaction_id FROM events"
    " WHERE state = 'received' AND id > ? ORDER BY id LIMIT ?"
)


def _received_rows(limit: int) -> Iterator[Any]:
    """Rows that wait for a place. One whose text is no UTF-8 cannot even be read, and comes as its id alone."""
    try:
        yield from rows(_RECEIVED, 0, limit, strict=True)
    except peewee.OperationalError as error:
        if "decode" not in str(error).lower():
            raise
        for (event_id,) in rows("SELECT id FROM events WHERE state = 'received' ORDER BY id LIMIT ?", limit):
            try:
                yield row(_RECEIVED, event_id - 1, 1, strict=True)
            except peewee.OperationalError:
                yield (event_id,)


def _conform_stored(workflow: WorkflowSettings, event_id: int, payload: dict[str, Any]) -> dict[str, Any]:
    conforming = conform(workflow, payload)
    if conforming is not payload:
        execute("UPDATE events SET payload = ? WHERE id = ?", json_text(conforming), event_id)
    return conforming


def received_events(config: Config, limit: int) -> list[tuple[Event | None, int, str]]:
    """Events that wait for a place, oldest first: (event, id, reason). One that another program wrote badly comes as
    None with the reason why."""
    found: list[tuple[Event | None, int, str]] = []
    for event_id, *columns in _received_rows(limit):
        try:
            if not columns:
                raise Rejected(400, "it holds text that is not UTF-8")
            workflow, subscriber_id, text, received_at, transaction_id = columns
            check_id(subscriber_id, "subscriber_id")
            payload = parse_json(text)
            if not isinstance(payload, dict):
                raise Rejected(400, "the payload is not a JSON object")
            if workflow in config.workflows:
                payload = _conform_stored(config.workflows[workflow], event_id, payload)
            json_text(payload)
            found.append((Event(event_id, workflow, subscriber_id, payload, received_at, transaction_id), event_id, ""))
        except Rejected as error:
            found.append((None, event_id, error.message))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# 8 Digests
# ----------------------------------------------------------------------------------------------------------------------
# Gives each event its place: in the one open window of its step, subscriber and key, or in a run of its own. Closes,
# holds and discards windows. Owns the moves of events after received, and all of digests; owns the birth of runs that
# begin from an event or a window. A window is [opened_at, due_at): an event at its end is never in it.

CONDITION_SAYS_NO = "its condition says no"
RELEASED = "released"
CANCELLED = "cancelled"
SUBSCRIBER_DELETED = "subscriber deleted"
WINDOWS_AT_ONCE = 2 * BATCH  # two short statements close them: 10 to 15 ms

_INSERT_WINDOW = insert_text(Digest, "workflow", "step", "subscriber_id", "key", "opened_at", "closes_at", "due_at")
_INSERT_EVENT_RUN = insert_text(Run, "workflow", "subscriber_id", "event_id", "step", "next_at", "created_at")
_FIND_WINDOW = (
    "SELECT id, due_at FROM digests WHERE subscriber_id = ? AND workflow = ? AND step = ? AND key = ?"
    " AND state IN ('open', 'held')"
)
# A window is opened by what comes into it, and one that cancels emptied is discarded at once: when it ends, something
# is in it, and the stage does not look. What somebody emptied by hand is found out when its message is composed.
_WINDOW = """
    SELECT d.id, d.workflow, d.step, d.subscriber_id, d.state, d.waits,
           EXISTS (SELECT 1 FROM events e WHERE e.digest_id = d.id)
           OR EXISTS (SELECT 1 FROM digest_runs m WHERE m.digest_id = d.id)
    FROM digests d WHERE d.id = ?
"""
_INSERT_ARRIVAL = insert_text(Arrival, "subscriber_id", "workflow", "step", "key", "event_id", "arrived_at")
_ARRIVED = """
    SELECT 1 FROM arrivals a WHERE a.subscriber_id = ? AND a.workflow = ? AND a.step = ? AND a.key = ?
    AND a.arrived_at >= ? AND NOT EXISTS (SELECT 1 FROM events e WHERE e.id = a.event_id AND e.state = 'cancelled')
    LIMIT 1
"""
_COUNT_EVENTS = """
    SELECT (SELECT count(*) FROM (SELECT 1 FROM events WHERE digest_id = ? AND state = 'placed' LIMIT ?))
         + (SELECT count(*) FROM digest_runs m JOIN runs r ON r.id = m.run_id
            LEFT JOIN events e ON e.digest_id = r.digest_id AND e.state = 'placed' WHERE m.digest_id = ?)
"""
_DUE_WINDOWS = """
    SELECT id, state, workflow NOT IN (SELECT value FROM json_each(?))
    FROM digests WHERE state IN ('open', 'held') AND due_at <= ? ORDER BY due_at, id LIMIT ?
"""


class Window(NamedTuple):
    """A window whose time has come."""

    id: int
    workflow: str
    step: str
    subscriber_id: str
    state: str
    waits: int
    has_events: int


# -- what templates and conditions see ---------------------------------------------------------------------------------


def person_of(subscriber_id: str, columns: Sequence[Any]) -> dict[str, Any]:
    """A subscriber by its columns, as templates and webhooks see it; only the fields that are set."""
    person: dict[str, Any] = {"subscriberId": subscriber_id}
    for name, value in zip(SUBSCRIBER_FIELDS, columns, strict=True):
        if value is not None:
            person[name] = json.loads(value) if name == "data" else value
    return person


def load_person(subscriber_id: str) -> dict[str, Any]:
    """The same by its id alone, as the row is now."""
    columns = ", ".join(SUBSCRIBER_FIELDS.values())
    found = row(f"SELECT {columns} FROM subscribers WHERE subscriber_id = ?", subscriber_id)
    return person_of(subscriber_id, found) if found else {"subscriberId": subscriber_id}


def in_order(step: DigestStep | None, events: Sequence[DigestedEvent]) -> Sequence[DigestedEvent]:
    """Events, which come oldest first, as their digest step wants them shown."""
    return events[::-1] if step is not None and step.order == "newest" else events


def _step_values(step: DigestStep | None, events: Sequence[DigestedEvent]) -> dict[str, Any]:
    """What a digest step leaves for templates: steps.<id>.events, in the step's order and no more than it shows, and
    eventCount and Novu's two summaries, which are of all."""
    listed = [
        {"id": str(event.id), "time": iso_text(event.time_at), "payload": json.loads(event.payload_text)}
        for event in in_order(step, events)
    ]
    return {
        "events": listed[: step.show] if step is not None else listed,
        "eventCount": len(listed),
        "countSummary": filter_pluralize(len(listed), "notification", "notifications"),
        "sentenceSummary": filter_to_sentence(listed, "payload.name", 2, "other"),
    }


def template_values(draft: Draft) -> dict[str, Any]:
    """The variables of a draft's templates and conditions."""
    if draft.repeatable:
        facts = draft.repeatable
        return {"repeatable": facts, "slot": facts["slot"], "count": facts["count"], "data": facts["data"]}
    return {
        "payload": json.loads(draft.events[0].payload_text) if draft.events else {},
        "subscriber": draft.subscriber,
        "workflow": {"name": draft.workflow},
        "unsubscribe_url": draft.unsubscribe,
        "steps": {name: _step_values(draft.digests.get(name), events) for name, events in draft.steps.items()}
        | {name: {"duration": waited_ms} for name, waited_ms in draft.waited.items()},
    }


# -- windows -----------------------------------------------------------------------------------------------------------


def value_at(payload: Any, path: Sequence[str]) -> Any:
    """The value at a path of member names; None when it is missing, or a list or text stands on the way."""
    for name in path:
        payload = payload.get(name) if isinstance(payload, dict) else None
    return payload


def digest_key(step: DigestStep, payload: dict[str, Any]) -> str:
    """The canonical text of the digest key's value: equal for equal JSON values, '' for the group without one."""
    paths = step.paths
    if not paths:
        return ""
    if len(paths) == 1:
        value = value_at(payload, paths[0])
        return "" if value is None else canonical_json(value)
    return canonical_json([value_at(payload, path) for path in paths])


def zone_of(config: Config, workflow: WorkflowSettings | None, timezone: str | None) -> str:
    """The zone that counts for a subscriber: its own, else the workflow's, else the daemon's."""
    return timezone or (workflow.timezone if workflow else None) or config.daemon.timezone


@functools.lru_cache(maxsize=4096)
def _schedule_of(text: str, zone: str) -> Schedule | None:
    try:
        return parse_schedule(json.loads(text), load_zone(zone))
    except (RuleError, ValueError) as error:
        log.warning("a subscriber's schedule cannot be read and is ignored: %s", error)
        return None


def subscriber_schedule(config: Config, schedule: str | None, timezone: str | None) -> Schedule | None:
    """The weekly hours that restrict a subscriber, in its zone, else the daemon's; None: no restriction."""
    return _schedule_of(schedule, timezone or config.daemon.timezone) if schedule else None


def hours_of(config: Config, subscriber_id: str) -> Schedule | None:
    """The weekly hours that restrict a subscriber now; None: no restriction."""
    found = row("SELECT schedule, timezone FROM subscribers WHERE subscriber_id = ?", subscriber_id)
    return subscriber_schedule(config, *found) if found else None


def hold_until(hours: Schedule | None, waits: int, now: int) -> int | None:
    """When a step that waits for the subscriber's hours goes on; None: now. At most three waits; none when the
    schedule never opens."""
    if hours is None or waits >= MAX_WAITS:
        return None
    start = hours.next_start(now)
    return start if start is not None and start > now else None


def ensure_subscriber(subscriber_id: str, now: int) -> None:
    """A subscriber row for this id, made on the fly when there is none."""
    if subscriber_id in database.known_subscribers:
        return
    execute(
        "INSERT INTO subscribers (subscriber_id, created_at, updated_at) VALUES (?, ?, ?)"
        " ON CONFLICT (subscriber_id) DO NOTHING",
        subscriber_id, now, now,
    )  # fmt: skip
    if len(database.known_subscribers) >= CACHED_ROWS:
        database.known_subscribers.clear()
    database.known_subscribers.add(subscriber_id)


def _open_window(
    config: Config, workflow: str, step: DigestStep, subscriber_id: str, key: str, now: int
) -> tuple[int, int]:
    zone = "UTC"
    if step.window is None:
        found = row("SELECT timezone FROM subscribers WHERE subscriber_id = ?", subscriber_id)
        zone = zone_of(config, config.workflows[workflow], found[0] if found else None)
    closes_at = step.closes_at(now, zone)
    window_id = insert(_INSERT_WINDOW, workflow, step.id, subscriber_id, key, now, closes_at, closes_at)
    log.debug("digests %s opened workflow=%s step=%s closes_at=%s", window_id, workflow, step.id, closes_at)
    return window_id, closes_at


def join_or_open(
    config: Config, workflow: str, step: DigestStep, subscriber_id: str, key: str, at: int, now: int
) -> int:
    """The id of the window that something which reached a digest step at `at` belongs to.

    A window that has already ended by then is settled first, with the function the tick uses; if that holds it, it
    collects on. An instant in the past counts for joining only: a new window opens now.
    """
    name = (subscriber_id, workflow, step.id, key)
    found = _current_window(config, name, at, now)
    if not found:
        found = _open_window(config, workflow, step, subscriber_id, key, now)
        database.keep_window(name, *found)
    return int(found[0])


def _current_window(config: Config, name: WindowName, at: int, now: int) -> tuple[int, int] | None:
    """The window of this name that what comes at `at` may join; one that has ended by then is settled."""
    found = _find_window(name)
    if found and at >= found[1]:
        _settle_window(config, found[0], now)
        found = _find_window(name)
    return found


def is_repeated(
    config: Config,
    workflow: str,
    step: DigestStep,
    subscriber_id: str,
    key: str,
    event_id: int | None,
    at: int,
    now: int,
) -> bool:
    """Whether what reaches a digest step that starts when repeated goes to a window: there is one, or something of the
    same key reached the step within the look-back, both ends included. That it came is noted for those that follow."""
    name = (subscriber_id, workflow, step.id, key)
    repeated = (
        _current_window(config, name, at, now) is not None or row(_ARRIVED, *name, at - step.look_back) is not None
    )
    insert(_INSERT_ARRIVAL, *name, event_id, at)
    return repeated


def close_if_full(config: Config, step: DigestStep, window_id: int, now: int) -> None:
    """A window that has as many events as its step lets it have ends now, not at its time."""
    if step.max_events is None:
        return
    [count] = row(_COUNT_EVENTS, window_id, step.max_events, window_id)
    if count >= step.max_events and row("SELECT 1 FROM digests WHERE id = ? AND state = 'open'", window_id):
        _settle_window(config, window_id, now, f"it has max_events, {step.max_events}")


def release_window(window_id: int, now: int) -> bool:
    """End a window now, by hand, whatever it waits for: open or held -> closed. Whether it did. Its messages go out
    whatever the subscriber's hours say."""
    found = row(_WINDOW + " AND d.state IN ('open', 'held')", window_id)
    if not found:
        return False
    window = Window(*found)
    if window.has_events:
        _close([window.id], window.state, now, RELEASED)
    else:
        _discard(window.id, window.state, "nothing is in it", now)
    return True


def _discard(window_id: int, state: str, reason: str, now: int) -> None:
    database.drop_window(window_id)
    move(Digest, window_id, state, "discarded", closed_at=now, reason=reason)


def _find_window(name: WindowName) -> tuple[int, int] | None:
    """The window that is open by this name: its id and end. Remembered."""
    found = database.open_windows.get(name)
    if found is None:
        found = row(_FIND_WINDOW, *name)
        if found is not None:
            database.keep_window(name, *found)
    return found


def joinable_windows(config: Config, trigger: Trigger, now: int) -> list[int] | None:
    """The windows that the events of a trigger join, one for each recipient, when all are open already; the hot path.
    Nothing is opened or settled here."""
    step = config.workflows[trigger.workflow].steps[0]
    if not isinstance(step, DigestStep) or not step.takes_all:
        return None
    key, found = digest_key(step, trigger.payload), []
    for subscriber_id, columns in trigger.recipients:
        window = None if columns else _find_window((subscriber_id, trigger.workflow, step.id, key))
        if window is None or now >= window[1]:
            return None
        found.append(window[0])
    return found


def place_event(config: Config, event: Event, now: int) -> None:
    """received -> placed: in a window when its workflow begins with a digest, else in a run of its own."""
    workflow = config.workflows.get(event.workflow)
    if workflow is None:
        fail_event(event.id, f"no workflow is called {event.workflow!r}", now)
        return
    ensure_subscriber(event.subscriber_id, now)
    step = workflow.steps[0]
    facts: dict[str, Any] = {} if event.transaction_id else {"transaction_id": new_public_id("txn", now)}
    if isinstance(step, DigestStep):
        at, key = min(event.received_at, now), digest_key(step, event.payload)
        alone = _why_alone(config, event, step, key, at, now)
        if not alone:
            window_id = join_or_open(config, event.workflow, step, event.subscriber_id, key, at, now)
            move(EventRow, event.id, "received", "placed", digest_id=window_id, placed_at=now, **facts)
            close_if_full(config, step, window_id, now)
            return
        facts["reason"] = alone
    if move(EventRow, event.id, "received", "placed", placed_at=now, **facts):
        insert(_INSERT_EVENT_RUN, event.workflow, event.subscriber_id, event.id, None, now, now)


def _why_alone(config: Config, event: Event, step: DigestStep, key: str, at: int, now: int) -> str:
    """Why an event goes on alone, past the digest step that its workflow begins with; '' when it goes to a window."""
    if step.when is not None:
        found = DigestedEvent(event.id, event.received_at, _dumps(event.payload), event.transaction_id)
        person = load_person(event.subscriber_id)
        draft = Draft(0, "", "digest", None, step, now, at, event.workflow, step.id, person, events=[found])
        if not condition_holds(step.when, template_values(draft)):
            return CONDITION_SAYS_NO
    if step.start == "when_repeated" and not is_repeated(
        config, event.workflow, step, event.subscriber_id, key, event.id, at, now
    ):
        return f"the first within {duration_text(step.look_back)}"
    return ""


def fail_event(event_id: int, reason: str, now: int) -> None:
    """received -> failed: kept, with the reason, and listed as trouble."""
    if move(EventRow, event_id, "received", "failed", finished_at=now, reason=reason):
        log.error("event %s cannot be placed: %s", event_id, one_line(reason))


def place_or_fail(config: Config, event: Event, now: int) -> None:
    """Place an event; one that cannot be placed fails alone."""
    try:
        with savepoint():
            place_event(config, event, now)
    except Exception as error:
        if not is_poison(error):
            raise
        if not isinstance(error, DigestdError):
            log.exception("a bug met event %s", event.id)
        fail_event(event.id, bug_text(error), now)


def place_events(config: Config, now: int) -> int:
    """Stage: events (received) that other programs or the command line wrote -> placed, or failed."""
    found = received_events(config, BATCH)
    for event, event_id, reason in found:
        if event is None:
            fail_event(event_id, reason, now)
        else:
            place_or_fail(config, event, now)
    return len(found)


def _verdict(config: Config, window: Window, now: int) -> int | None:
    """Until when a window that has ended is held for the subscriber's hours; None when it goes on now."""
    workflow = config.workflows.get(window.workflow)
    step = workflow.step(window.step) if workflow else None
    if workflow is None or workflow.critical or not getattr(step, "extend_to_schedule", False):
        return None
    return hold_until(hours_of(config, window.subscriber_id), window.waits, now)


def close_windows(config: Config, now: int) -> int:
    """Stage: windows whose time has come -> closed, held or discarded. Those about which there is nothing to ask, and
    that are nearly all, go by their ids alone."""
    asking = [name for name, workflow in config.workflows.items() if workflow.holds_windows]
    due = rows(_DUE_WINDOWS, json.dumps(asking), now, WINDOWS_AT_ONCE)
    for state in ("open", "held"):
        _close([window_id for window_id, its_state, plain in due if plain and its_state == state], state, now)
    for window_id, _, plain in due:
        if not plain:
            _settle_window(config, window_id, now)
    return len(due)


def _settle_window(config: Config, window_id: int, now: int, reason: str | None = None) -> None:
    """A window that has ended: -> closed with a run of its own, -> held, or -> discarded with nothing in it. The reason
    is why it ends other than by time."""
    window = Window(*row(_WINDOW, window_id))
    until = _verdict(config, window, now) if window.has_events else None
    if window.has_events and until is None:
        _close([window.id], window.state, now, reason)
        return
    if until is None:
        _discard(window.id, window.state, "nothing is in it", now)
    else:
        database.drop_window(window.id)
        move(Digest, window.id, window.state, "held", due_at=until, held_at=now, waits=window.waits + 1)


def _close(window_ids: Sequence[int], state: str, now: int, reason: str | None = None) -> None:
    """open or held -> closed, with a run for each: the same two statements for one and for all."""
    if not window_ids:
        return
    for window_id in window_ids:
        database.drop_window(window_id)
    facts = {"reason": reason} if reason else {}
    closed = move_all(Digest, window_ids, state, "closed", closed_at=now, **facts)
    execute(
        "INSERT INTO runs (workflow, subscriber_id, digest_id, step, next_at, created_at)"
        " SELECT workflow, subscriber_id, id, step, ?, ? FROM digests WHERE id IN (SELECT value FROM json_each(?))"
        " ON CONFLICT (digest_id) WHERE digest_id IS NOT NULL DO NOTHING",  # written by hand: that one it is then
        now, now, json.dumps(closed),
    )  # fmt: skip


def join_later_window(
    config: Config, run_id: int, workflow: str, step: DigestStep, subscriber_id: str, key: str, now: int
) -> None:
    """A run that reaches a digest step further on joins its window as a whole: active -> merged."""
    window_id = join_or_open(config, workflow, step, subscriber_id, key, now, now)
    if move(Run, run_id, "active", "merged", next_at=None, finished_at=now, reason=f"joined digest {window_id}"):
        insert(insert_text(DigestRun, "run_id", "digest_id", "joined_at"), run_id, window_id, now)
        close_if_full(config, step, window_id, now)


def _discard_if_empty(digest_id: int, now: int) -> None:
    found = row("SELECT state FROM digests WHERE id = ? AND state IN ('open', 'held')", digest_id)
    left = row(
        "SELECT 1 FROM events WHERE digest_id = ? AND state = 'placed' UNION ALL"
        " SELECT 1 FROM digest_runs WHERE digest_id = ? LIMIT 1", digest_id, digest_id
    )  # fmt: skip
    if found and not left:
        _discard(digest_id, found[0], "all its events were cancelled", now)


def _cancel_run(run_id: int, now: int, reason: str = CANCELLED) -> bool:
    """What is unfinished of a run that comes from one event: its jobs, its place in a later window, itself. A try under
    way ends, and its result is recorded; nothing follows it."""
    found = row(
        "SELECT r.state, m.digest_id FROM runs r LEFT JOIN digest_runs m ON m.run_id = r.id WHERE r.id = ?", run_id
    )
    state, later = found or ("", 0)
    if state == "merged" and row("SELECT 1 FROM digests WHERE id = ? AND state IN ('open', 'held')", later):
        execute("DELETE FROM digest_runs WHERE run_id = ?", run_id)
        move(Run, run_id, "merged", "cancelled", finished_at=now, reason=reason)
        _discard_if_empty(later, now)
        return True
    if state != "active":
        return False
    for job_id, job_state in rows(
        "SELECT id, state FROM jobs WHERE run_id = ? AND state IN ('delayed', 'waiting')", run_id
    ):
        move(Job, job_id, job_state, "cancelled", finished_at=now, reason=reason, message=None)
    return move(Run, run_id, "active", "cancelled", next_at=None, finished_at=now, reason=reason)


def cancel_transaction(transaction_id: str, now: int) -> bool:
    """Take the events of a transaction out of open and held windows, and cancel what is unfinished of runs that come
    from them alone. True only when something was cancelled; a closed window's events cannot be."""
    cancelled = False
    for event_id, state, digest_id in rows(
        "SELECT id, state, digest_id FROM events WHERE transaction_id = ?", transaction_id
    ):
        if state == "placed" and digest_id is None:
            run = row("SELECT id FROM runs WHERE event_id = ?", event_id)
            if not run or not _cancel_run(run[0], now):
                continue
        elif state == "placed":
            if not row("SELECT 1 FROM digests WHERE id = ? AND state IN ('open', 'held')", digest_id):
                continue
        elif state != "received":
            continue
        cancelled |= move(EventRow, event_id, state, "cancelled", finished_at=now, reason=CANCELLED)
        if digest_id is not None:
            _discard_if_empty(digest_id, now)
    return cancelled


def delete_subscriber(subscriber_id: str, now: int) -> bool:
    """A subscriber goes, with its feed; its windows are discarded, and what is unfinished of its runs is cancelled.
    What was sent stays on record. False where there is none of this id."""
    facts: dict[str, Any] = {"finished_at": now, "reason": SUBSCRIBER_DELETED}
    for window_id, state in rows(
        "SELECT id, state FROM digests WHERE subscriber_id = ? AND state IN ('open', 'held')", subscriber_id
    ):
        inside = rows("SELECT id FROM events WHERE digest_id = ? AND state = 'placed'", window_id)
        joined = rows(
            "SELECT r.id, r.event_id FROM digest_runs m JOIN runs r ON r.id = m.run_id WHERE m.digest_id = ?", window_id
        )
        move_all(Run, [run_id for run_id, _ in joined], "merged", "cancelled", **facts)
        inside += [(event_id,) for _, event_id in joined if event_id is not None]
        move_all(EventRow, [event_id for (event_id,) in inside], "placed", "cancelled", **facts)
        execute("DELETE FROM digest_runs WHERE digest_id = ?", window_id)
        _discard(window_id, state, SUBSCRIBER_DELETED, now)
    received = rows("SELECT id FROM events WHERE state = 'received' AND subscriber_id = ?", subscriber_id)
    move_all(EventRow, [found[0] for found in received], "received", "cancelled", **facts)
    for run_id, event_id in rows(
        "SELECT id, event_id FROM runs WHERE subscriber_id = ? AND state = 'active'", subscriber_id
    ):
        if _cancel_run(run_id, now, SUBSCRIBER_DELETED) and event_id is not None:
            move(EventRow, event_id, "placed", "cancelled", **facts)
    for table in ("inbox_messages", "arrivals", "preferences"):
        execute(f"DELETE FROM {table} WHERE subscriber_id = ?", subscriber_id)
    database.known_subscribers.discard(subscriber_id)
    return execute("DELETE FROM subscribers WHERE subscriber_id = ?", subscriber_id) > 0


# ----------------------------------------------------------------------------------------------------------------------
# 9 Repeatables
# ----------------------------------------------------------------------------------------------------------------------
# Specs, each with exactly one pending run (a unique index proves it). Owns all moves of repeatables, and the birth of
# their runs and of those runs' jobs. Taking a run and adding the next one is one transaction, before its work starts.

STILL_GOING = "the run before it is still going"


class Spec(NamedTuple):
    """What a repeatable is, apart from what has become of it; the columns of its row, and two that count when it is
    added. Instants and spans in ms, the last four texts JSON."""

    name: str
    job_id: str | None
    cron: str | None
    every_ms: int | None
    align: str
    offset_ms: int
    timezone: str
    start_at: int | None
    end_at: int | None
    run_limit: int | None
    overlap: str
    missed: str
    jitter_ms: int
    attempts: int | None
    backoff: str | None
    retention: str | None
    action: str  # sender and templates, or trigger; and data
    first_count: int = 0  # where the counter starts
    immediately: bool = False

    @property
    def key(self) -> str:
        """The identity that BullMQ gives it: name, job id, end, zone, rule."""
        end = "" if self.end_at is None else self.end_at
        return f"{self.name}:{self.job_id or ''}:{end}:{self.timezone}:{self.cron or self.every_ms}"

    def anchor(self, now: int) -> int:
        """What its interval counts from: the epoch, its start, or the instant it is added."""
        if self.align == "clock" or (self.start_at is None and self.offset_ms):
            return self.offset_ms
        return now if self.start_at is None else self.start_at + self.offset_ms

    def begin(self, now: int) -> int:
        """The instant after which its first slot lies: an interval that counts from its start begins with that."""
        return now - 1 if self.align == "start" else now


_SPEC_COLUMNS = Spec._fields[:-2]
_TIMING = {"cron", "every_ms", "align", "offset_ms", "timezone", "start_at", "end_at"}
_LABELS = {"every_ms": "every", "offset_ms": "offset", "run_limit": "limit", "jitter_ms": "jitter"}


class Plan(NamedTuple):
    """What the next run of a spec is planned from: columns of its row."""

    id: int
    name: str
    cron: str | None
    every_ms: int | None
    anchor_at: int
    timezone: str
    start_at: int | None
    end_at: int | None
    run_limit: int | None
    missed: str
    jitter_ms: int
    behind: int
    taken: int  # its count
    seq: int
    action: str

    @property
    def rule(self) -> Rule:
        """Raises RuleError."""
        return _slot_rule(self.cron, self.every_ms, self.anchor_at, self.timezone, self.name)


_PLAN_NAMES = [name if name != "taken" else "count" for name in Plan._fields]
_PLAN_COLUMNS = ", ".join(_PLAN_NAMES)
_INSERT_SPEC = insert_text(
    Repeatable, "key", "source", "anchor_at", "created_at", "updated_at", "count", *_SPEC_COLUMNS
)  # fmt: skip
_UPDATE_SPEC = (
    "UPDATE repeatables SET key = ?, source = ?, anchor_at = coalesce(?, anchor_at), updated_at = ?, "
    + ", ".join(f"{name} = ?" for name in _SPEC_COLUMNS)
    + " WHERE id = ?"
)
_INSERT_SLOT_RUNS = (
    "INSERT INTO runs (repeatable_id, seq, slot_at, created_at)"
    " SELECT value ->> 0, value ->> 1, value ->> 2, ? FROM json_each(?) RETURNING id, repeatable_id"
)
_INSERT_TAKEN_RUN = insert_text(Run, "repeatable_id", "seq", "slot_at", "taken_at", "count", "created_at")
_INSERT_JOB = insert_text(
    Job, "run_id", "step", "type", "sender", "state", "due_at", "public_id", "created_at", "finished_at", "reason"
)
_PENDING = (
    "SELECT id, repeatable_id, slot_at FROM runs"
    " WHERE id IN (SELECT value FROM json_each(?)) AND taken_at IS NULL AND state = 'active'"
)
_COUNT_RUNS = (
    "UPDATE repeatables SET count = count + 1, seq = seq + CASE state WHEN 'active' THEN 1 ELSE 0 END"
    f" WHERE id IN (SELECT value FROM json_each(?)) RETURNING state, {_PLAN_COLUMNS}"
)
_TAKE_RUNS = (
    "UPDATE runs SET taken_at = ?, count = (SELECT s.count FROM repeatables s WHERE s.id = runs.repeatable_id)"
    " WHERE id IN (SELECT value FROM json_each(?))"
)
_IN_PROGRESS = "SELECT 1 FROM runs o WHERE o.repeatable_id = s.id AND o.taken_at IS NOT NULL AND o.state = 'active'"
_DOUBTFUL_SLOTS = f"""
    SELECT j.id, r.id, s.id, s.name, r.slot_at, s.missed = 'skip' AND ? - j.due_at > ?,
           s.overlap = 'skip' AND EXISTS ({_IN_PROGRESS})
    FROM jobs j JOIN runs r ON r.id = j.run_id JOIN repeatables s ON s.id = r.repeatable_id
    WHERE j.id IN (SELECT value FROM json_each(?)) AND r.taken_at IS NULL AND (s.overlap = 'skip' OR s.missed = 'skip')
"""


def spec_of(config: Config, name: str, settings: RepeatableSettings) -> Spec:
    """The spec that an entry of the config, a command or a call stands for."""
    action = settings.model_dump(
        include={"sender", "subject", "text", "html", "whole", "data", "trigger"}, exclude_none=True, by_alias=True
    )
    backoff, retention = settings.backoff, settings.retention
    return Spec(
        name, settings.job_id, settings.cron or settings.pattern, settings.every, settings.align, settings.offset or 0,
        settings.timezone or config.daemon.timezone, settings.start_at, settings.end_at, settings.limit,
        settings.overlap, settings.missed, settings.jitter or 0, settings.attempts,
        None if backoff is None else backoff.model_dump_json(),
        None if retention is None else retention.model_dump_json(exclude_none=True),
        json.dumps(action, ensure_ascii=False), settings.count, settings.immediately,
    )  # fmt: skip


_OTHER_WORDS = {  # as BullMQ and JavaScript have them
    "tz": "timezone", "startDate": "start_at", "endDate": "end_at", "jobId": "job_id", "startAt": "start_at",
    "endAt": "end_at",
}  # fmt: skip


def _settings_of(body: Any) -> tuple[str, dict[str, Any]]:
    """The name in a call's body, and the settings in the config's words. Raises Rejected(422)."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise Rejected(422, "a repeatable is an object with name, cron or every, and sender or trigger", "name")
    flat = {**body, **(body["repeat"] if isinstance(body.get("repeat"), dict) else {})}
    name = check_id(flat.pop("name"), "name")
    return name, {
        _OTHER_WORDS.get(key, key): value for key, value in flat.items() if key != "repeat" and value is not None
    }


def _checked_settings(name: str, settings: dict[str, Any], found: list[Found]) -> RepeatableSettings:
    """The settings, validated. Raises Rejected(422) with what is wrong with each, and what was found before."""
    data, told = {"repeatables": {name: settings}}, list(found)
    checked = RepeatableSettings()
    try:
        checked = RepeatableSettings.model_validate(settings, context={"secrets": False})
    except pydantic.ValidationError as error:
        for item in error.errors(include_url=False):
            path = _real_path(["repeatables", name, *item["loc"]], data, item["type"])
            told.append((path, one_line(_plain_words(item, path, data))))
    if told:
        listed = [(_path_text(path[2:]), words) for path, words in told]
        text = "; ".join(f"{where}: {words}" if where else words for where, words in listed)
        raise Rejected(422, text, problems=listed)
    return checked


def spec_from(config: Config, body: Any) -> Spec:
    """The spec of a call or a command: an object with name and the settings of the config, also in BullMQ's words, its
    options apart in `repeat` or not. Raises Rejected(422) with everything that is wrong."""
    name, settings = _settings_of(body)
    data = {"repeatables": {name: settings}, "workflows": dict.fromkeys(config.workflows, {})}
    found = list(_repeatable_problems(data, config.senders))
    return spec_of(config, name, _checked_settings(name, settings, found))


def key_from(config: Config, body: Any) -> str:
    """The key of the spec that a call or a command means by name, rule, zone, end and job id. Raises Rejected(422)."""
    name, settings = _settings_of(body)
    telling = ("cron", "pattern", "every", "end_at", "timezone", "job_id")
    known: dict[str, Any] = {key: settings[key] for key in telling if key in settings}
    path: list[str | int] = ["repeatables", name]
    found = list(_one_of(known, path, ("cron", "pattern", "every"), "to tell it apart there must be one"))
    return spec_of(config, name, _checked_settings(name, known, found)).key


@functools.lru_cache(maxsize=4096)
def _slot_rule(cron: str | None, every_ms: int | None, anchor_at: int, timezone: str, seed: str) -> Rule:
    return parse_cron(cron, load_zone(timezone), seed) if cron is not None else Every(every_ms or 1, anchor_at)


@functools.lru_cache(maxsize=4096)
def action_of(text: str) -> dict[str, Any]:
    """What a spec's runs do, from its row; shared, so it is only read."""
    return dict(json.loads(text))


# -- the pending run ---------------------------------------------------------------------------------------------------


def _finish_spec(spec_id: int, reason: str, now: int) -> None:
    move(Repeatable, spec_id, "active", "finished", finished_at=now, reason=reason)


def _break_spec(spec_id: int, name: str, reason: str, now: int) -> None:
    if move(Repeatable, spec_id, "active", "broken", updated_at=now, reason=reason):
        log.error("repeatable %s is broken: %s", one_line(name), one_line(reason))


def _next_slot(plan: Plan, after: int, now: int, at_once: bool) -> int | None:
    """The slot of a spec's next run, now or the first of its rule; None when there is none, and the spec has ended with
    the reason."""
    if plan.run_limit is not None and plan.taken >= plan.run_limit:
        _finish_spec(plan.id, f"the limit of {plan.run_limit} runs is reached", now)
        return None
    slot_at, reason = now if at_once else None, "the rule has no further time"
    try:
        if not at_once:
            slot_at = plan.rule.next_after(after if plan.start_at is None else max(after, plan.start_at - 1))
    except RuleError as error:
        reason = error.message
    if slot_at is None:
        _break_spec(plan.id, plan.name, reason, now)
    elif plan.end_at is not None and slot_at > plan.end_at:
        _finish_spec(plan.id, f"its end, {iso_text(plan.end_at)}, is reached", now)
        return None
    return slot_at


def _spread(plan: Plan) -> int:
    """How long after its slot a run is due: the same for the same run, so that many specs of one rule spread."""
    if not plan.jitter_ms:
        return 0
    drawn = int.from_bytes(hashlib.sha256(f"{plan.name} {plan.seq}".encode()).digest()[:6])
    return plan.jitter_ms * drawn >> 48


def _add_runs(plans: Iterable[tuple[Plan, int]], now: int, at_once: bool = False) -> int:
    """Add the pending runs of specs, each with its job, by their plans and the instants after which they lie, or with
    the slot now; how many there were to add. Two statements for all."""
    slots, jobs = [], {}
    for plan, after in plans:
        slot_at = _next_slot(plan, after, now, at_once)
        if slot_at is None:
            continue
        sender = action_of(plan.action).get("sender")
        kind = "trigger" if sender is None else "message"
        due_at = slot_at + (0 if at_once else _spread(plan))
        slots.append((plan.id, plan.seq, slot_at))
        jobs[plan.id] = (plan.name, kind, sender, "delayed", due_at, new_public_id("msg", slot_at), now, None, None)
    if slots:
        added = rows(_INSERT_SLOT_RUNS, now, json.dumps(slots))
        execute_many(_INSERT_JOB, [(run_id, *jobs[spec_id]) for run_id, spec_id in added])
    return len(slots)


def plan_run(spec_id: int, after: int, now: int, at_once: bool = False) -> bool:
    """Add the pending run of an active spec: its first slot strictly after `after`, or now. False when there is none to
    add: the limit or the end is reached (finished), or the rule has no further slot (broken)."""
    found = row(f"UPDATE repeatables SET seq = seq + 1 WHERE id = ? RETURNING {_PLAN_COLUMNS}", spec_id)
    return bool(_add_runs([(Plan._make(found), after)], now, at_once))


def take_runs(run_ids: Sequence[int], now: int) -> dict[int, int]:
    """Pending runs are taken: each is counted, and the next one of its spec added, planned from its slot or from now,
    whichever is later. A few statements for all; a spec whose next run the database refuses is broken, and alone.

    Returns which of its spec's runs each is. A retry finds its run taken and changes nothing.
    """
    if not run_ids:
        return {}
    try:
        with savepoint():
            _take_together(run_ids, now)
    except peewee.IntegrityError as error:
        if len(run_ids) > 1:
            return {known: count for run_id in run_ids for known, count in take_runs([run_id], now).items()}
        spec_id, name = row(
            "SELECT s.id, s.name FROM runs r JOIN repeatables s ON s.id = r.repeatable_id WHERE r.id = ?", *run_ids
        )
        _break_spec(spec_id, name, f"its next run cannot be stored: {error}", now)
        _take_together(run_ids, now)
    found = rows("SELECT id, count FROM runs WHERE id IN (SELECT value FROM json_each(?))", json.dumps(run_ids))
    return {run_id: count or 0 for run_id, count in found}


def _take_together(run_ids: Sequence[int], now: int) -> None:
    taken = {spec_id: (run_id, slot_at) for run_id, spec_id, slot_at in rows(_PENDING, json.dumps(run_ids))}
    if not taken:
        return
    counted = rows(_COUNT_RUNS, json.dumps(list(taken)))
    execute(_TAKE_RUNS, now, json.dumps([run_id for run_id, _ in taken.values()]))
    plans = [(state, Plan._make(columns)) for state, *columns in counted]
    for _, plan in plans:
        slot_at = taken[plan.id][1]
        if now - slot_at > MISSED_MS + plan.jitter_ms:
            late = duration_text(now - slot_at)
            log.warning("repeatable %s: the run of %s comes %s late", one_line(plan.name), iso_text(slot_at), late)
    active = [plan for state, plan in plans if state == "active"]
    _add_runs([(plan, _go_on_from(plan, taken[plan.id][1], now)) for plan in active], now)


def _go_on_from(plan: Plan, slot_at: int, now: int) -> int:
    """The instant after which a spec's next run lies, when the one of this slot is taken: the later of slot and now,
    so that nothing piles up. Where all missed runs are wanted, the slot, for MAX_MISSED runs in a row."""
    if plan.missed != "all":
        return max(now, slot_at)
    following = plan.rule.next_after(slot_at)
    is_behind = following is not None and following <= now
    makes_up = is_behind and plan.behind + 1 < MAX_MISSED
    if is_behind and not makes_up:
        log.warning("repeatable %s missed more than %d runs; the others are passed over", plan.name, MAX_MISSED)
    if makes_up or plan.behind:
        execute("UPDATE repeatables SET behind = ? WHERE id = ?", plan.behind + 1 if makes_up else 0, plan.id)
    return slot_at if makes_up else max(now, slot_at)


def pass_slots(job_ids: Sequence[int], now: int) -> set[int]:
    """Of jobs that are due, those of runs that are not to be: missed, or while the one before is still going, where
    their spec says skip. They are skipped, uncounted, and the next run is added. Returns them."""
    passed = set()
    doubtful = rows(_DOUBTFUL_SLOTS, now, MISSED_MS, json.dumps(list(job_ids))) if job_ids else []
    for job_id, run_id, spec_id, name, slot_at, is_missed, overlaps in doubtful:
        if is_missed or overlaps:
            reason = f"missed by {duration_text(now - slot_at)}" if is_missed else STILL_GOING
            move(Job, job_id, "delayed", "skipped", finished_at=now, reason=reason)
            move(Run, run_id, "active", "cancelled", finished_at=now, reason=reason)
            log.warning("repeatable %s: the run of %s is skipped: %s", one_line(name), iso_text(slot_at), reason)
            plan_run(spec_id, max(now, slot_at), now)
            passed.add(job_id)
    return passed


def _pending_slot(spec_id: int) -> int | None:
    found = row("SELECT slot_at FROM runs WHERE repeatable_id = ? AND taken_at IS NULL AND state = 'active'", spec_id)
    return found[0] if found else None


def _drop_pending_run(spec_id: int, reason: str, now: int) -> None:
    """Cancel the run that no one has taken yet, also when it waits for a free sender."""
    for run_id, job_id, job_state in rows(
        "SELECT r.id, j.id, j.state FROM runs r JOIN jobs j ON j.run_id = r.id"
        " WHERE r.repeatable_id = ? AND r.taken_at IS NULL AND r.state = 'active'", spec_id
    ):  # fmt: skip
        move(Job, job_id, job_state, "cancelled", finished_at=now, reason=reason)
        move(Run, run_id, "active", "cancelled", finished_at=now, reason=reason)


def last_known_at() -> int:
    """The latest instant that the database has seen, as far as the newest rows tell; 0 for none."""
    newest = ("SELECT created_at FROM runs", "SELECT started_at FROM attempts", "SELECT placed_at FROM events")
    parts = ", ".join(f"coalesce(({text} ORDER BY id DESC LIMIT 1), 0)" for text in newest)
    return int(row(f"SELECT max({parts})")[0])


def replan_intervals(now: int) -> int:
    """After the wall clock was set back: the pending run of each interval is planned anew, where one lies before it, or
    nothing would run for the length of the jump. Runs of cron keep their slots: a wall time that came does not come
    again. Returns how many were planned anew."""
    columns = ", ".join(f"s.{name}" for name in _PLAN_NAMES)
    replanned = 0
    for slot_at, *found in rows(
        f"SELECT r.slot_at, {columns} FROM repeatables s JOIN runs r ON r.repeatable_id = s.id"
        " WHERE s.state = 'active' AND s.every_ms IS NOT NULL AND r.taken_at IS NULL AND r.state = 'active'"
        " AND r.slot_at > ?", now
    ):  # fmt: skip
        plan = Plan._make(found)
        sooner = plan.rule.next_after(now if plan.start_at is None else max(now, plan.start_at - 1))
        if sooner is not None and sooner < slot_at:
            _drop_pending_run(plan.id, "the clock was set back", now)
            replanned += plan_run(plan.id, now, now)
    return replanned


# -- adding, changing, removing ----------------------------------------------------------------------------------------


def _have(spec: Spec, source: str) -> Any:
    """The row that a spec is already there as: in the config the name is its identity, else the key. One that was taken
    out of the config comes back as it was. (id, source, state, columns …), or None."""
    named, known = ("source = 'config' AND name = ?", spec.name), ("key = ?", spec.key)
    ways = [(*known, "<>")] if source != "config" else [(*named, "<>"), (*known, "<>"), (*named, "=")]
    columns = f"SELECT id, source, state, {', '.join(_SPEC_COLUMNS)} FROM repeatables"
    for condition, value, is_retired in ways:
        found = row(f"{columns} WHERE {condition} AND state {is_retired} 'retired' ORDER BY id DESC LIMIT 1", value)
        if found:
            return found
    return None


def _value_text(column: str, value: Any) -> str:
    if value is None:
        return "none"
    return duration_text(value) if column.endswith("_ms") else iso_text(value) if column.endswith("_at") else str(value)


def _change_text(column: str, old: Any, new: Any) -> str:
    label = _LABELS.get(column, column)
    if column in ("action", "backoff", "retention"):
        return f"{label} changed"
    return f"{label} {_value_text(column, old)} -> {_value_text(column, new)}"


def upsert_repeatable(spec: Spec, source: str, now: int) -> str:
    """Add a spec, or bring the one that is there up to date; what changed, in words, '' for nothing.

    The counter is kept. The pending run is planned anew only when the timing changed. Raises Rejected(409) for one that
    the config holds.
    """
    have = _have(spec, source)
    if have is None:
        values = (spec.key, source, spec.anchor(now), now, now, spec.first_count, *spec[: len(_SPEC_COLUMNS)])
        plan_run(insert(_INSERT_SPEC, *values), spec.begin(now), now, spec.immediately)
        return "added"
    spec_id, old_source, state, *old = have
    if source != "config" and old_source == "config":
        raise Rejected(409, f"{spec.key} is in the config file; change it there")
    changed = {name: (was, new) for name, was, new in zip(_SPEC_COLUMNS, old, spec, strict=False) if was != new}
    timing = bool(_TIMING & changed.keys())
    words = [_change_text(name, *pair) for name, pair in changed.items()]
    if old_source != source:
        words.append(f"taken over from the {old_source}")
    if words:
        anchor_at = spec.anchor(now) if timing else None
        execute(_UPDATE_SPEC, spec.key, source, anchor_at, now, *spec[: len(_SPEC_COLUMNS)], spec_id)
    comes_back = state in ("retired", "broken") or (state == "finished" and (timing or "run_limit" in changed))
    if comes_back:
        move(Repeatable, spec_id, state, "active", finished_at=None, reason=None, updated_at=now)
        words.append("active again")
    if comes_back or words:
        begin = spec.begin(now) if timing or comes_back else None
        _plan_anew(spec_id, begin, now, spec.immediately and state == "retired")
    return ", ".join(words)


def _plan_anew(spec_id: int, begin: int | None, now: int, at_once: bool) -> None:
    """After a change: the pending run stays where its timing holds, whatever made it what it is, and does what the spec
    now says. `begin`: the timing does not hold, and the next slot lies after that instant."""
    state, is_over, text = row("SELECT state, run_limit <= count, action FROM repeatables WHERE id = ?", spec_id)
    sender, pending_at = action_of(text).get("sender"), _pending_slot(spec_id)
    if pending_at is not None and begin is None and not is_over:
        execute(
            "UPDATE jobs SET sender = ?, type = ? WHERE run_id ="
            " (SELECT id FROM runs WHERE repeatable_id = ? AND taken_at IS NULL AND state = 'active')",
            sender, "trigger" if sender is None else "message", spec_id,
        )  # fmt: skip
        return
    _drop_pending_run(spec_id, "planned anew", now)
    if state == "active":
        plan_run(spec_id, now if begin is None else begin, now, at_once)


def add_repeatable(spec: Spec, source: str, now: int) -> str:
    """The same for one that a person or a program adds: what changed. Inside the caller's transaction, which is undone
    where this raises Rejected: 409 for one in the config, 422 for one that would never run."""
    words = upsert_repeatable(spec, source, now)
    state, reason = row("SELECT state, reason FROM repeatables WHERE key = ? AND state <> 'retired'", spec.key)
    if words == "added" and state != "active":
        raise Rejected(422, f"it would never run: {reason}")
    return words


class NamedSpec(NamedTuple):
    """A spec that a command or a call is about."""

    id: int
    key: str
    name: str
    state: str
    source: str


def find_repeatable(text: str) -> NamedSpec:
    """A spec by its key, or by its name where only one has it. Raises Rejected: 404, or 409 for several."""
    found = rows(
        "SELECT id, key, name, state, source FROM repeatables WHERE (key = ? OR name = ?) AND state <> 'retired'"
        " ORDER BY key <> ?, key", text, text, text
    )  # fmt: skip
    if not found:
        raise Rejected(404, f"no repeatable has the key or name {text!r}", hint="digestd repeat list shows all")
    if len(found) > 1 and found[0][1] != text:
        keys = ", ".join(key for _, key, *_ in found)
        raise Rejected(409, f"several repeatables are called {text!r}; give one of the keys {keys}")
    return NamedSpec._make(found[0])


def retire_repeatable(spec: NamedSpec, reason: str, now: int) -> None:
    """A spec ends, with its pending run; a run under way finishes."""
    _drop_pending_run(spec.id, reason, now)
    if move(Repeatable, spec.id, spec.state, "retired", finished_at=now, reason=reason):
        log.info("repeatable %s: %s", one_line(spec.name), reason)


def pause_repeatable(spec: NamedSpec, now: int) -> bool:
    """active -> paused, without a pending run; a run under way finishes. False when it is not active."""
    if not move(Repeatable, spec.id, "active", "paused", updated_at=now, reason="paused by hand"):
        return False
    _drop_pending_run(spec.id, "paused", now)
    return True


def resume_repeatable(spec: NamedSpec, now: int) -> bool:
    """paused -> active, with its next run from now on; what fell into the pause is not made up for."""
    if not move(Repeatable, spec.id, "paused", "active", updated_at=now, reason=None):
        return False
    plan_run(spec.id, now, now)
    return True


def skip_next_run(spec: NamedSpec, now: int) -> int:
    """Pass over the pending run, uncounted, and add the one after it; the slot that was passed over. Raises
    Rejected(409) where there is none."""
    slot_at = _pending_slot(spec.id)
    if slot_at is None:
        raise Rejected(409, f"{spec.key} has no pending run: it is {spec.state}")
    _drop_pending_run(spec.id, "skipped by hand", now)
    plan_run(spec.id, max(now, slot_at), now)
    return slot_at


def run_now(spec: NamedSpec, now: int) -> int:
    """One more run, now, beside the pending one, whose slot stays; which of the spec's runs it is. Raises Rejected(409)
    where its limit or its end forbids that."""
    if spec.state == "finished":
        raise Rejected(409, f"{spec.key} is finished: it runs no more")
    count, seq, limit, end_at, action = row(
        "UPDATE repeatables SET count = count + 1, seq = seq + 1 WHERE id = ?"
        " RETURNING count, seq, run_limit, end_at, action", spec.id,
    )  # fmt: skip
    if limit is not None and count > limit:
        raise Rejected(409, f"{spec.key} has had its {limit} runs")
    if end_at is not None and now > end_at:
        raise Rejected(409, f"{spec.key} has had its end, {iso_text(end_at)}")
    sender = action_of(action).get("sender")
    run_id = insert(_INSERT_TAKEN_RUN, spec.id, seq, now, now, count, now)
    kind = "trigger" if sender is None else "message"
    insert(_INSERT_JOB, run_id, spec.name, kind, sender, "waiting", now, new_public_id("msg", now), now, None, None)
    if limit is not None and count >= limit and spec.state == "active":
        _drop_pending_run(spec.id, "the limit is reached", now)
        _finish_spec(spec.id, f"the limit of {limit} runs is reached", now)
    return int(count)


def _why_unusable(config: Config, action: dict[str, Any]) -> str:
    """Why this config has no way to do what a spec asks for; '' when it has."""
    sender, trigger = action.get("sender"), action.get("trigger") or {}
    if sender is not None and sender not in config.senders:
        return f"there is no sender {sender!r} any more"
    if trigger and trigger["workflow"] not in config.workflows:
        return f"there is no workflow {trigger['workflow']!r} any more"
    return ""


def do_to_repeatable(config: Config, deed: str, text: str, now: int) -> dict[str, Any]:
    """What a person does with a spec, by its key or name: remove, pause, resume, run-now, skip-next. What came of it.
    Raises Rejected: 404 for none, 409 where its state, its source or the config forbids it."""
    spec = find_repeatable(text)
    if deed in ("resume", "run-now"):
        unusable = _why_unusable(config, action_of(row("SELECT action FROM repeatables WHERE id = ?", spec.id)[0]))
        if unusable:
            raise Rejected(409, f"{spec.key} cannot run: {unusable}")
    if deed == "remove":
        if spec.source == "config":
            raise Rejected(409, f"{spec.key} is in the config file; take it out there, or pause it")
        retire_repeatable(spec, "removed", now)
    elif deed == "run-now":
        return {"key": spec.key, "count": run_now(spec, now)}
    elif deed == "skip-next":
        return {"key": spec.key, "skipped": iso_text(skip_next_run(spec, now))}
    elif not (pause_repeatable if deed == "pause" else resume_repeatable)(spec, now):
        raise Rejected(409, f"{spec.key} is {spec.state}, so it cannot be {deed}d")
    return {"key": spec.key}


REPEATABLE_DEEDS = ("remove", "pause", "resume", "run-now", "skip-next")


def _arm(spec_id: int, name: str, now: int) -> bool:
    """Add the pending run of an active spec that has none, from now on; one that the database refuses breaks only that
    spec. Whether there is one."""
    try:
        with savepoint():
            return plan_run(spec_id, now, now)
    except peewee.IntegrityError as error:
        _break_spec(spec_id, name, f"its next run cannot be stored: {error}", now)
        return False


def _revive(spec_id: int, name: str, now: int) -> bool:
    """broken -> active, if it has a next run; else it is broken again, with the reason."""
    move(Repeatable, spec_id, "broken", "active", updated_at=now, reason=None)
    _drop_pending_run(spec_id, "planned anew", now)
    if not _arm(spec_id, name, now):
        return False
    log.warning("repeatable %s runs again", one_line(name))
    return True


def revive_broken(now: int) -> int:
    """Look again for the next time of specs that had none: a zone may be known by now. How many have one."""
    broken = rows("SELECT id, name FROM repeatables WHERE state = 'broken'")
    return sum([_revive(spec_id, name, now) for spec_id, name in broken])


def rearm_repeatables(now: int) -> int:
    """A pending run is what its spec makes it: where somebody deleted or ended one by hand, it is made again, from now
    on. How many were missing."""
    pending = "SELECT 1 FROM runs r JOIN jobs j ON j.run_id = r.id WHERE r.repeatable_id = s.id AND r.taken_at IS NULL"
    missing = rows(
        f"SELECT id, name FROM repeatables s WHERE state = 'active' AND NOT EXISTS ({pending} AND r.state = 'active'"
        f" AND j.state IN {UNFINISHED})"
    )
    for spec_id, name in missing:
        for (run_id,) in rows("SELECT id FROM runs WHERE repeatable_id = ? AND taken_at IS NULL", spec_id):
            move(Run, run_id, "active", "cancelled", finished_at=now, reason="its job is gone")
        _arm(spec_id, name, now)
        log.error("repeatable %s had lost its pending run", one_line(name))
    return len(missing)


def _judge_others(config: Config, now: int) -> None:
    """Specs that were added by command or call, after the config changed: one whose sender or workflow is gone is
    broken, and runs again when it is back."""
    for spec_id, name, state, text in rows(
        "SELECT id, name, state, action FROM repeatables WHERE source <> 'config' AND state IN ('active', 'broken')"
    ):
        reason = _why_unusable(config, action_of(text))
        if reason and state == "active":
            _drop_pending_run(spec_id, reason, now)
            _break_spec(spec_id, name, reason, now)
        elif not reason and state == "broken":
            _revive(spec_id, name, now)


def sync_repeatables(config: Config, now: int) -> None:
    """Make the specs that came from the config equal to the config; those added otherwise are left alone."""
    for name, settings in config.repeatables.items():
        try:
            with savepoint():
                changed = upsert_repeatable(spec_of(config, name, settings), "config", now)
        except peewee.IntegrityError as error:
            log.error("repeatable %s cannot be stored: %s", one_line(name), error)
            continue
        if changed:
            log.info("repeatable %s: %s", one_line(name), one_line(changed))
    for found in rows(
        "SELECT id, key, name, state, source FROM repeatables WHERE source = 'config' AND state <> 'retired'"
    ):
        spec = NamedSpec._make(found)
        if spec.name not in config.repeatables:
            retire_repeatable(spec, "removed from the config", now)
    _judge_others(config, now)
    rearm_repeatables(now)


# -- looking in --------------------------------------------------------------------------------------------------------


def rule_text(cron: str | None, every_ms: int | None, align: str, offset_ms: int, anchor_at: int) -> str:
    """A spec's rule in words."""
    if cron is not None:
        return f"cron {cron}"
    text = f"every {duration_text(every_ms or 1)}"
    if align == "start" and anchor_at != offset_ms:
        return f"{text}, counted from {iso_text(anchor_at)}"
    return text + (f", {duration_text(offset_ms)} past the clock" if offset_ms else "")


def _coming(plan: Plan, pending_at: int | None, count: int) -> list[int]:
    """The slots that a spec will have, the pending one first; fewer where its limit or end comes before."""
    most = count if plan.run_limit is None else min(count, plan.run_limit - plan.taken)
    if pending_at is None or most <= 0:
        return []
    with contextlib.suppress(RuleError):
        later = next_times(plan.rule, pending_at, most - 1) if most > 1 else []
        return [pending_at, *(at for at in later if plan.end_at is None or at <= plan.end_at)]
    return [pending_at]


def _last_run(spec_id: int) -> dict[str, Any] | None:
    found = row(
        "SELECT r.slot_at, r.taken_at, j.state, j.finished_at, coalesce(j.reason, (SELECT a.reason FROM attempts a"
        " WHERE a.job_id = j.id ORDER BY a.number DESC LIMIT 1)) FROM runs r JOIN jobs j ON j.run_id = r.id"
        " WHERE r.repeatable_id = ? AND r.taken_at IS NOT NULL ORDER BY r.seq DESC LIMIT 1", spec_id
    )  # fmt: skip
    if not found:
        return None
    slot_at, taken_at, state, finished_at, reason = found
    return {
        "slot": iso_text(slot_at), "takenAt": iso_text(taken_at), "latenessMs": taken_at - slot_at, "result": state,
        "finishedAt": None if finished_at is None else iso_text(finished_at), "reason": reason,
    }  # fmt: skip


_FIRST_TAKEN = (
    "SELECT seq, taken_at, count FROM runs WHERE repeatable_id = ? AND seq > ? AND taken_at IS NOT NULL"
    " ORDER BY seq LIMIT 1"
)


def _runs_since(spec_id: int, at: int) -> int:
    """How many runs of a spec were taken after an instant, told by their numbers: a search by halves, for there may be
    a million of them."""
    newest = "SELECT seq, count FROM runs WHERE repeatable_id = ? AND taken_at IS NOT NULL ORDER BY seq DESC LIMIT 1"
    first, last = row(_FIRST_TAKEN, spec_id, 0), row(newest, spec_id)
    if not first or not last:
        return 0
    low, high, before = 0, last[0], first[2] - 1  # the last one up to `at` lies in [low, high], and is number `before`
    while low < high:
        middle = (low + high) // 2
        found = row(_FIRST_TAKEN, spec_id, middle)
        if found is None or found[1] > at:
            high = middle
        else:
            low, before = found[0], found[2]
    return int(max(0, last[1] - before))


def _failures_since(at: int) -> dict[int, int]:
    """By spec, how many runs that were taken after an instant have failed."""
    return dict(
        rows(
            "SELECT r.repeatable_id, count(*) FROM jobs j JOIN runs r ON r.id = j.run_id"
            " WHERE j.state = 'failed' AND r.repeatable_id IS NOT NULL AND r.taken_at > ? GROUP BY 1", at
        )
    )  # fmt: skip


def repeatable_facts(now: int, key: str | None = None, count: int = 5) -> list[dict[str, Any]]:
    """The specs (or the one of a key) as listings tell them, with so many of the times to come; ordered by the next
    time, then the key. Retired ones are history and not listed."""
    others = ("key", "state", "reason", "source", "job_id", "align", "offset_ms", "overlap")
    wanted, values = (" AND key = ?", (key,)) if key is not None else ("", ())
    listed, failures = [], _failures_since(now - DAY)
    for found in rows(
        f"SELECT {', '.join(others)}, {_PLAN_COLUMNS} FROM repeatables WHERE state <> 'retired'{wanted}", *values
    ):
        facts, plan = dict(zip(others, found, strict=False)), Plan._make(found[len(others) :])
        coming = _coming(plan, _pending_slot(plan.id), count)
        listed.append({
            "key": facts["key"], "name": plan.name, "jobId": facts["job_id"], "source": facts["source"],
            "rule": rule_text(plan.cron, plan.every_ms, facts["align"], facts["offset_ms"], plan.anchor_at),
            "cron": plan.cron, "every": plan.every_ms, "timezone": plan.timezone, "state": facts["state"],
            "reason": facts["reason"], "next": [iso_text(at) for at in coming], "count": plan.taken,
            "limit": plan.run_limit, "overlap": facts["overlap"], "missed": plan.missed, "lastRun": _last_run(plan.id),
            "runs24h": _runs_since(plan.id, now - DAY), "failures24h": failures.get(plan.id, 0),
            **action_of(plan.action),
        })  # fmt: skip
    return sorted(listed, key=lambda one: (not one["next"], one["next"][:1], one["key"]))


# ----------------------------------------------------------------------------------------------------------------------
# 10 Jobs
# ----------------------------------------------------------------------------------------------------------------------
# Begins the next step of runs, promotes due jobs, claims waiting ones, and composes their messages. Owns the birth of
# jobs and attempts, the moves of jobs up to active, and those of the jobs that need no sender.

OUTSIDE_HOURS = "outside the subscriber's schedule"
LARGE = 64 * 1024  # characters of payload that take a while to compose
LINES_AT_ONCE = 300  # of the log, in one turn; with many more its transaction would take over 50 ms

_READY_RUNS = (
    "SELECT r.id, r.workflow, r.subscriber_id, r.event_id, r.digest_id, r.step, s.schedule IS NOT NULL"
    " OR EXISTS (SELECT 1 FROM preferences p WHERE p.subscriber_id = r.subscriber_id) FROM runs r"
    " LEFT JOIN subscribers s ON s.subscriber_id = r.subscriber_id"
    " WHERE r.next_at <= ? ORDER BY r.next_at, r.id LIMIT ?"
)
_RUN_COLUMNS = (
    "r.workflow, r.subscriber_id,"
    " r.event_id, r.digest_id, r.repeatable_id, r.slot_at, r.created_at, r.step, d.step, d.key,"
    " EXISTS (SELECT 1 FROM digest_runs m WHERE m.digest_id = r.digest_id), "
    + ", ".join(f"s.{column}" for column in SUBSCRIBER_FIELDS.values())
    + ", s.id, e.received_at, e.payload, e.transaction_id"
)
_RUN_TABLES = (
    " LEFT JOIN digests d ON d.id = r.digest_id LEFT JOIN subscribers s ON s.subscriber_id = r.subscriber_id"
    " LEFT JOIN events e ON e.id = r.event_id"
)
_JOBS = (
    f"SELECT j.id, j.run_id, j.step, j.type, j.public_id, j.message, j.tries, j.waits, {_RUN_COLUMNS}"
    f" FROM jobs j JOIN runs r ON r.id = j.run_id{_RUN_TABLES}"
)
_RUN_AT_STEP = (  # as if it had a job there: what its condition sees is what its message would
    f"SELECT 0, r.id, ?, ?, '', NULL, 0, 0, {_RUN_COLUMNS} FROM runs r{_RUN_TABLES} WHERE r.id = ?"
)
_DUE_JOBS = (
    "SELECT j.id, j.waits > 0 AND j.tries = 0 AND j.type <> 'delay', j.run_id, j.type, r.workflow, j.step, r.step"
    " FROM jobs j JOIN runs r ON r.id = j.run_id"
    " WHERE j.state = 'delayed' AND j.due_at <= ? ORDER BY j.due_at LIMIT ?"
)
_PLAIN_JOBS = _JOBS + " WHERE j.state = 'waiting' AND j.sender IS NULL AND j.lane = '' ORDER BY j.due_at, j.id LIMIT ?"
_AT_ONCE = ("waiting", "active")
_NEXT_STEPS = "UPDATE runs SET next_at = ? WHERE id IN (SELECT value FROM json_each(?)) AND state = 'active'"
# Digests go before repeatables where a sender has not room for all. A run that waits for the one before waits here.
_WAITING_JOBS = (
    _JOBS + " WHERE j.state = 'waiting' AND j.sender = ? AND j.lane = '' AND j.due_at <= ?"
    " AND (j.type <> 'message' OR r.taken_at IS NOT NULL"
    f" OR NOT EXISTS (SELECT 1 FROM repeatables s WHERE s.id = r.repeatable_id AND s.overlap = 'queue'"
    f" AND EXISTS ({_IN_PROGRESS}))) ORDER BY j.type = 'message', j.due_at, j.id LIMIT ?"
)
_BEGIN_ATTEMPTS = (
    "INSERT INTO attempts (job_id, number, started_at)"
    " SELECT value, coalesce((SELECT max(number) FROM attempts WHERE job_id = value), 0) + 1, ? FROM json_each(?)"
    " RETURNING job_id, id, number"
)
_INSERT_INBOX = (
    insert_text(
        InboxMessage, "job_id", "public_id", "subscriber_id", "workflow", "subject", "body", "payload", "created_at"
    )
    + " ON CONFLICT (job_id) DO NOTHING"
)
_RUN_STEP = "UPDATE runs SET step = ?, next_at = ? WHERE id = ? AND state = 'active'"
# Only from the step the run is at: a step retried by hand, long passed, must not push the run on.
_GO_ON = (
    "UPDATE runs SET next_at = ? WHERE id IN (SELECT value FROM json_each(?)) AND state = 'active' AND step = ?"
    " RETURNING id"
)
_IS_OVER = f"next_at IS NULL AND NOT EXISTS (SELECT 1 FROM jobs WHERE run_id = runs.id AND state IN {UNFINISHED})"


class ReadyRun(NamedTuple):
    """A run whose next step is to begin."""

    id: int
    workflow: str
    subscriber_id: str
    event_id: int | None
    digest_id: int | None
    step: str | None
    has_wishes: int  # the subscriber has weekly hours, or turned channels on or off


class WaitingJob(NamedTuple):
    """A job that may be taken, with what its message will need."""

    id: int
    run_id: int
    step: str
    type: str
    public_id: str
    message: str | None
    tries: int
    waits: int
    workflow: str | None
    subscriber_id: str
    event_id: int | None
    digest_id: int | None
    repeatable_id: int | None
    slot_at: int | None
    created_at: int
    run_step: str | None
    digest_step: str | None
    digest_key: str | None
    has_earlier: int  # the window was joined by runs of earlier ones
    first_name: str | None  # the subscriber's columns
    last_name: str | None
    email: str | None
    phone: str | None
    avatar: str | None
    locale: str | None
    timezone: str | None
    data: str | None
    person_id: int | None  # the subscriber's row
    received_at: int | None  # the event's, where it is one alone
    payload: str | None
    transaction_id: str | None

    @property
    def person(self) -> Sequence[Any]:
        """The subscriber's columns."""
        return self[19:27]


def sender_states() -> dict[str, str]:
    """The state of each sender that has failed since its last success, or is disabled."""
    if database.sender_states is None:
        found = rows("SELECT name, state FROM senders WHERE failures > 0 OR state = 'disabled'")
        database.sender_states = dict(found)
    return database.sender_states


def sender_is_disabled(name: str | None) -> bool:
    """Whether the jobs of a sender wait until somebody enables it."""
    return name is not None and sender_states().get(name) == "disabled"


def channel_choices(subscriber_id: str) -> dict[tuple[str, str], bool]:
    """What a subscriber chose: (workflow, channel) to on or off; '' for every workflow without a choice of its own."""
    found = rows("SELECT workflow, channel, enabled FROM preferences WHERE subscriber_id = ?", subscriber_id)
    return {(workflow, channel): bool(enabled) for workflow, channel, enabled in found}


def is_wanted(workflow: WorkflowSettings, choices: Mapping[tuple[str, str], bool], name: str, channel: str) -> bool:
    """Whether a channel is on: as the subscriber chose for the workflow, else for all, else as the config has it."""
    default = workflow.channels.get(channel, True)  # type: ignore[call-overload]
    return workflow.critical or choices.get((name, channel), choices.get(("", channel), default))


def why_turned_off(workflow: WorkflowSettings, name: str, subscriber_id: str, channel: str) -> str:
    """Why a channel is off for a subscriber; '' when it is on."""
    if workflow.critical:
        return ""
    choices = channel_choices(subscriber_id)
    if is_wanted(workflow, choices, name, channel):
        return ""
    chose = (name, channel) in choices or ("", channel) in choices
    return f"the subscriber turned {channel} off" if chose else f"{channel} is off unless the subscriber turns it on"


def why_turned_off_since(config: Config, job: WaitingJob) -> str:
    """Why the message of a job is not wanted any more: one that waited, for hours or for its sender, may have been
    turned off meanwhile. '' when it is; no query where nobody ever chose."""
    if database.any_choices is None:
        [found] = row("SELECT EXISTS (SELECT 1 FROM preferences)")
        database.any_choices = bool(found)
    workflow = config.workflows.get(job.workflow or "") if database.any_choices else None
    return "" if workflow is None else why_turned_off(workflow, job.workflow or "", job.subscriber_id, job.type)


def settle_runs(run_ids: Iterable[int], now: int) -> None:
    """active -> completed, once no step is to come and no job is unfinished."""
    move_all(Run, run_ids, "active", "completed", guard=_IS_OVER, finished_at=now)


def go_on(config: Config, run_ids: Sequence[int], workflow: str | None, step: str | None, now: int) -> None:
    """The step that these runs are at is passed: their next one begins now, or they are over."""
    settings = config.workflows.get(workflow) if workflow else None
    goes_on = workflow is not None and (settings is None or step not in settings.places or settings.step_after(step))
    moved = {found[0] for found in rows(_GO_ON, now, json.dumps(list(run_ids)), step)} if goes_on else set()
    settle_runs([run_id for run_id in run_ids if run_id not in moved], now)


def insert_job(
    run_id: int, step: str, kind: str, sender: str | None, state: str, due_at: int, now: int, reason: str | None = None
) -> int:
    """A job is born; it is final from the start when its state is skipped or failed."""
    finished_at = now if state in ("skipped", "failed") else None
    return insert(
        _INSERT_JOB, run_id, step, kind, sender, state, due_at, new_public_id("msg", now), now, finished_at, reason
    )


def first_payload(event_id: int | None, digest_id: int | None) -> dict[str, Any]:
    """The payload that a run works with: its event's, or the first event's of its window."""
    events = load_events(event_id, digest_id)
    return json.loads(events[0].payload_text) if events else {}


def load_events(event_id: int | None, digest_id: int | None, may_be_joined: int = 1) -> list[DigestedEvent]:
    """The original events behind a run, oldest first, through any number of windows."""
    if digest_id is None:
        found = rows("SELECT id, received_at, payload, transaction_id FROM events WHERE id = ?", event_id)
    else:
        found = rows(
            "SELECT id, received_at, payload, transaction_id FROM events WHERE digest_id = ? AND state = 'placed'"
            " ORDER BY received_at, id", digest_id
        )  # fmt: skip
        joined = may_be_joined and rows(
            "SELECT r.event_id, r.digest_id FROM digest_runs m JOIN runs r ON r.id = m.run_id WHERE m.digest_id = ?",
            digest_id,
        )
        if joined:
            found += [event for one_event, one_digest in joined for event in load_events(one_event, one_digest)]
            found.sort(key=lambda event: (event[1], event[0]))
    return [DigestedEvent(*event) for event in found]


def _earlier_digests(digest_id: int) -> list[tuple[str, int]]:
    """The windows whose runs joined this one, with their steps."""
    return rows(
        "SELECT d.step, d.id FROM digest_runs m JOIN runs r ON r.id = m.run_id JOIN digests d ON d.id = r.digest_id"
        " WHERE m.digest_id = ?", digest_id
    )  # fmt: skip


def _begin_channel(config: Config, run: ReadyRun, workflow: WorkflowSettings, step: Any, now: int) -> None:
    """A channel step: a job that waits for its sender; outside the subscriber's hours one that is skipped, or held;
    skipped too where it is not wanted."""
    unwanted = why_turned_off(workflow, run.workflow, run.subscriber_id, step.type)
    if unwanted:
        _pass_step(run, step, unwanted, now)
        return
    hours = None if workflow.critical or step.type == "in_app" else hours_of(config, run.subscriber_id)
    if hours is not None and step.outside != "send" and not hours.is_inside(now) and not _is_released(run.digest_id):
        until = hold_until(hours, 0, now) if step.outside == "hold" else None
        if until is None:
            _pass_step(run, step, OUTSIDE_HOURS, now)
        else:
            job_id = insert_job(run.id, step.id, step.type, step.sender, "delayed", until, now)
            execute("UPDATE jobs SET waits = 1 WHERE id = ?", job_id)
            execute(_RUN_STEP, step.id, None, run.id)
        return
    job_id = insert_job(run.id, step.id, step.type, step.sender, "waiting", now, now)
    is_disabled = sender_is_disabled(step.sender)
    if is_disabled and step.type == "in_app":
        feed_at_once(config, job_id, now)
    execute(_RUN_STEP, step.id, now if is_disabled and not step.stop_on_failure else None, run.id)


def _is_released(digest_id: int | None) -> bool:
    """Whether a person ended this window by hand: then its messages are wanted now, and not lost to the hours."""
    return digest_id is not None and row("SELECT reason FROM digests WHERE id = ?", digest_id) == (RELEASED,)


def _pass_step(run: ReadyRun, step: Any, reason: str, now: int) -> None:
    """A step that is skipped: a job tells why, and the run goes on at once."""
    insert_job(run.id, step.id, step.type, getattr(step, "sender", None), "skipped", now, now, reason)
    execute(_RUN_STEP, step.id, now, run.id)


def _why_passed(config: Config, run: ReadyRun, step: Any, now: int) -> str:
    """Why a run goes past a step without it; '' when it does not. Raises PermanentFailure where it cannot be told."""
    if run.step is None and run.event_id is not None and isinstance(step, DigestStep):
        reason = row("SELECT reason FROM events WHERE id = ?", run.event_id)[0]
        if reason:  # found out when the event was placed
            return str(reason)
    if step.when is not None and isinstance(step, (DigestStep, DelayStep)):  # a message asks when it is composed
        job = WaitingJob(*row(_RUN_AT_STEP, step.id, step.type, run.id))
        if not condition_holds(step.when, template_values(load_draft(config, job, now))):
            return CONDITION_SAYS_NO
    return ""


def _begin_digest(config: Config, run: ReadyRun, step: DigestStep, now: int) -> None:
    """A digest step further on: the run joins its window, or goes past as the first of a while."""
    key = digest_key(step, first_payload(run.event_id, run.digest_id))
    if step.start == "when_repeated" and not is_repeated(
        config, run.workflow, step, run.subscriber_id, key, run.event_id, now, now
    ):
        _pass_step(run, step, f"the first within {duration_text(step.look_back)}", now)
    else:
        join_later_window(config, run.id, run.workflow, step, run.subscriber_id, key, now)


_DELAY_UNITS = {
    "second": SECOND, "minute": MINUTE, "hour": HOUR, "day": DAY, "week": 7 * DAY, "month": 30 * DAY
}  # fmt: skip


def told_delay(value: Any, zone: str, now: int, past: str) -> int:
    """When a delay ends that a payload tells: an ISO date and time, in the zone where it has no offset, or {amount,
    unit}. Raises RuleError for anything else, and for the past where `past` is fail; else the past is now."""
    if isinstance(value, dict):
        amount, unit = value.get("amount"), value.get("unit")
        length = _DELAY_UNITS.get(unit.removesuffix("s")) if isinstance(unit, str) else None
        if length is None:
            raise RuleError(f"{shown(unit)} is not a unit; there are {', '.join(f'{name}s' for name in _DELAY_UNITS)}")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount <= FAR_FUTURE / length:
            raise RuleError(f"{shown(amount)} is not an amount; it must be a number of at least 0")
        return now + int(amount * length)
    if not isinstance(value, str):
        raise RuleError(f"{shown(value)} is neither a date and time nor an object with amount and unit")
    due_at = parse_instant(value, load_zone(zone))
    if due_at <= now and past == "fail":
        raise RuleError(f"{value!r} is in the past")
    return max(due_at, now)


def delay_ends_at(config: Config, run: ReadyRun, step: DelayStep, now: int) -> int:
    """When a delay that begins now ends, in ms. Raises PermanentFailure with the reason when it cannot be told."""
    if isinstance(step.delay, int):
        return now + step.delay
    found = row("SELECT timezone FROM subscribers WHERE subscriber_id = ?", run.subscriber_id)
    zone = zone_of(config, config.workflows[run.workflow], found[0] if found else None)
    try:
        if step.delay is None:
            return step.next_after(now, zone, step.id)
        value = value_at({"payload": first_payload(run.event_id, run.digest_id)}, step.delay.split("."))
        if value is None:
            raise RuleError("the payload does not tell it")
        due_at = told_delay(value, zone, now, step.past)
        if due_at - now > config.daemon.max_window:
            raise RuleError(f"{shown(value)} is over daemon.max_window, {duration_text(config.daemon.max_window)}")
    except RuleError as error:
        raise PermanentFailure(f"the delay {step.delay or step.id} cannot be: {error.message}") from None
    return due_at


def _lose_place(run: ReadyRun, reason: str, now: int) -> None:
    """The run cannot go on from where it is, as its step was removed from the config or the next one cannot be begun: a
    failed job stands for that, and `retry` makes it look again."""
    [times] = row("SELECT count(*) FROM jobs WHERE run_id = ? AND type = 'next'", run.id)
    place = f"after {run.step or 'the start'}{f', {times + 1}' if times else ''}"
    insert_job(run.id, place, "next", None, "failed", now, now, reason)
    move(Run, run.id, "active", "failed", next_at=None, finished_at=now, reason=reason)
    log.error("run %s cannot go on: %s", run.id, reason)


def begin_step(config: Config, run: ReadyRun, now: int) -> None:
    """Begin the step after the one a run is at, whatever its type."""
    workflow = config.workflows.get(run.workflow)
    if workflow is None:
        _lose_place(run, "workflow removed", now)
        return
    if run.step is not None and run.step not in workflow.places:
        _lose_place(run, "step removed", now)
        return
    step = workflow.step_after(run.step)
    if step is None:
        execute("UPDATE runs SET next_at = NULL WHERE id = ?", run.id)
        settle_runs([run.id], now)
        return
    try:
        passed = _why_passed(config, run, step, now)
        if passed:
            _pass_step(run, step, passed, now)
        elif isinstance(step, DigestStep):
            _begin_digest(config, run, step, now)
        elif isinstance(step, DelayStep):
            insert_job(run.id, step.id, "delay", None, "delayed", delay_ends_at(config, run, step, now), now)
            execute(_RUN_STEP, step.id, None, run.id)
        else:
            _begin_channel(config, run, workflow, step, now)
    except PermanentFailure as error:
        _lose_place(run, f"step {step.id}: {error.message}", now)


def _begin_or_fail(config: Config, run: ReadyRun, now: int) -> None:
    try:
        with savepoint():
            begin_step(config, run, now)
    except Exception as error:
        if not is_poison(error):
            raise
        log.error("run %s cannot go on: %s", run.id, one_line(bug_text(error)), exc_info=True)
        move(Run, run.id, "active", "failed", next_at=None, finished_at=now, reason=bug_text(error))


def _begin_together(step: Any, runs: Sequence[ReadyRun], now: int) -> None:
    """The same channel step of many runs, none of which has hours to mind: two statements for all."""
    ids = json.dumps([run.id for run in runs])
    execute(
        "INSERT INTO jobs (run_id, step, type, sender, state, due_at, public_id, created_at)"
        " SELECT id, ?, ?, ?, 'waiting', ?, 'msg_' || printf('%012x', ?) || lower(hex(randomblob(8))), ?"
        " FROM runs WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id",
        step.id, step.type, step.sender, now, now, now, ids,
    )  # fmt: skip
    execute("UPDATE runs SET step = ?, next_at = NULL WHERE id IN (SELECT value FROM json_each(?))", step.id, ids)


def _common_step(config: Config, workflow_name: str, step_id: str | None, has_wishes: int) -> Any:
    """The channel step that runs at this place begin next, where nothing about the run itself matters; else None."""
    workflow = config.workflows.get(workflow_name)
    if workflow is None or has_wishes or (step_id is not None and step_id not in workflow.places):
        return None
    step = workflow.step_after(step_id)
    if not isinstance(step, (ChannelStep, InAppStep)) or sender_is_disabled(step.sender):
        return None
    return step if workflow.critical or workflow.channels.get(step.type, True) else None


def begin_steps(config: Config, now: int) -> int:
    """Stage: runs whose next step is to begin -> a job, a window joined, or the end of the run."""
    found = list(map(ReadyRun._make, rows(_READY_RUNS, now, BATCH)))
    places: dict[tuple[Any, ...], list[ReadyRun]] = {}
    for run in found:
        places.setdefault((run.workflow, run.step, run.has_wishes), []).append(run)
    for place, runs in places.items():
        step = _common_step(config, *place)
        try:
            if step is not None:
                with savepoint():
                    _begin_together(step, runs, now)
                continue
        except peewee.IntegrityError:
            pass  # one of them is odd: each for itself, and only that one fails
        for run in runs:
            _begin_or_fail(config, run, now)
    return len(found)


def promote_jobs(config: Config, now: int) -> int:
    """Stage: jobs (delayed) that are due -> waiting. Delays that end and have nothing more to wait for go on to
    completed at once, and their runs to the next step. The same few statements for all."""
    due = rows(_DUE_JOBS, now, BATCH)
    is_plain = {place: _is_plain_delay(config, *place) for place in {found[3:] for found in due}}
    delays = {found[0]: found[2] for found in due if is_plain[found[3:]]}
    if delays:
        ended = move_all(Job, delays, "delayed", "completed", "", _AT_ONCE, taken_at=now, finished_at=now)
        execute(_NEXT_STEPS, now, json.dumps([delays[job_id] for job_id in ended]))
    passed = pass_slots([found[0] for found in due if found[3] in ("message", "trigger")], now)
    others = [found[:2] for found in due if found[0] not in delays and found[0] not in passed]
    ready = [job_id for job_id, is_held in others if not is_held or _goes_now(config, job_id, now)]
    move_all(Job, ready, "delayed", "waiting")
    return len(due)


def _goes_now(config: Config, job_id: int, now: int) -> bool:
    """Whether a channel step's job that waited for the subscriber's hours may go to its sender. If not, it waits again,
    or has waited three times and is skipped."""
    job = WaitingJob(*row(_JOBS + " WHERE j.id = ?", job_id))
    workflow = config.workflows.get(job.workflow or "")
    outside = getattr(workflow.step(job.step) if workflow else None, "outside", "send")
    hours = hours_of(config, job.subscriber_id)
    if workflow is None or workflow.critical or outside == "send" or hours is None or hours.is_inside(now):
        return True
    until = hold_until(hours, job.waits, now) if outside == "hold" else None
    if until is not None:
        move_all(Job, [job_id], "delayed", "delayed", "", _AT_ONCE, due_at=until, waits=job.waits + 1)
    else:
        move_all(Job, [job_id], "delayed", "skipped", "", _AT_ONCE, finished_at=now, reason=OUTSIDE_HOURS)
        go_on(config, [job.run_id], job.workflow, job.step, now)
    return False


def _is_plain_delay(config: Config, kind: str, workflow_name: str | None, step_id: str, run_step: str | None) -> bool:
    """Whether jobs of this kind and place are delays, which when they end can only lead to the next step."""
    workflow = config.workflows.get(workflow_name or "")
    step = workflow.step(step_id) if workflow else None
    return (
        kind == "delay"
        and workflow is not None
        and isinstance(step, DelayStep)
        and not (step.extend_to_schedule and not workflow.critical)
        and run_step == step_id
        and workflow.step_after(step_id) is not None
    )


# -- jobs that need no sender ------------------------------------------------------------------------------------------


def _finish_delay(config: Config, job: WaitingJob, now: int) -> None:
    """The delay is over: the run goes on, or waits for the subscriber's hours."""
    workflow = config.workflows.get(job.workflow or "")
    step = workflow.step(job.step) if workflow else None
    if workflow is not None and not workflow.critical and isinstance(step, DelayStep) and step.extend_to_schedule:
        until = hold_until(hours_of(config, job.subscriber_id), job.waits, now)
        if until is not None:
            move(Job, job.id, "active", "delayed", due_at=until, waits=job.waits + 1)
            return
    move(Job, job.id, "active", "completed", finished_at=now)
    go_on(config, [job.run_id], job.workflow, job.step, now)


def _finish_trigger(config: Config, job: WaitingJob, now: int) -> None:
    """A repeatable that triggers a workflow: the event is recorded once per run, whatever is tried again. Runs are
    known by their number: after the clock was set back, a slot may come twice."""
    key, action, seq = row(
        "SELECT s.key, s.action, r.seq FROM repeatables s JOIN runs r ON r.repeatable_id = s.id WHERE r.id = ?",
        job.run_id,
    )
    wanted = action_of(action)["trigger"]
    transaction_id = f"repeat {key[:200]} {seq}"
    body = {"name": wanted["workflow"], "to": wanted["to"], "payload": wanted.get("payload") or {}}
    try:
        record_trigger(check_trigger(config, {**body, "transactionId": transaction_id}, now), now)
    except Rejected as error:
        move(Job, job.id, "active", "failed", finished_at=now, reason=f"the trigger was refused: {error.message}")
    else:
        move(Job, job.id, "active", "completed", finished_at=now)
    settle_runs([job.run_id], now)


def _find_place(config: Config, job: WaitingJob, now: int) -> None:
    """Look again for the place of a run whose step or workflow had gone."""
    workflow = config.workflows.get(job.workflow or "")
    if workflow is not None and (job.run_step is None or job.run_step in workflow.places):
        move(Job, job.id, "active", "completed", finished_at=now)
        execute("UPDATE runs SET next_at = ? WHERE id = ? AND state = 'active'", now, job.run_id)
    else:
        reason = "step removed" if workflow else "workflow removed"
        move(Job, job.id, "active", "failed", finished_at=now, reason=reason)
        move(Run, job.run_id, "active", "failed", finished_at=now, reason=reason)


def _finish_in_app(config: Config, job: WaitingJob, now: int) -> None:
    try:
        draft = load_draft(config, job, now)
        unwanted = why_unwanted(draft)
        if unwanted:
            move(Job, job.id, "active", "skipped", finished_at=now, reason=unwanted)
        else:
            write_inbox(draft, compose(draft), now)
            move(Job, job.id, "active", "completed", finished_at=now)
    except PermanentFailure as error:
        move(Job, job.id, "active", "failed", finished_at=now, reason=error.message)
    go_on(config, [job.run_id], job.workflow, job.step, now)


def _finish_plain_job(config: Config, job: WaitingJob, now: int) -> None:
    if job.type == "trigger":
        take_runs([job.run_id], now)
    move(Job, job.id, "waiting", "active", taken_at=now)
    ways = {"delay": _finish_delay, "trigger": _finish_trigger, "next": _find_place}
    ways.get(job.type, _finish_in_app)(config, job, now)


def finish_plain_jobs(config: Config, now: int) -> int:
    """Stage: jobs (waiting) that need no sender -> active -> completed, in one go: delays, in-app rows, triggers."""
    found = list(map(WaitingJob._make, rows(_PLAIN_JOBS, BATCH)))
    for job in found:
        try:
            with savepoint():
                _finish_plain_job(config, job, now)
        except Exception as error:
            if not is_poison(error):
                raise
            log.exception("a bug met job %s", job.id)
            move(Job, job.id, "waiting", "active", taken_at=now)
            move(Job, job.id, "active", "failed", finished_at=now, reason=bug_text(error))
            go_on(config, [job.run_id], job.workflow, job.step, now)
    return len(found)


def write_inbox(draft: Draft, message: Message, now: int) -> None:
    """The row in the subscriber's feed; once per job."""
    execute(
        _INSERT_INBOX, draft.job_id, draft.public_id, draft.subscriber["subscriberId"], draft.workflow,
        message.summary.get("subject"), message.summary.get("html") or message.summary.get("text"),
        draft.events[0].payload_text if draft.events else "{}", now,
    )  # fmt: skip


def feed_at_once(config: Config, job_id: int, now: int) -> None:
    """The feed's row of an in-app step whose sender is disabled: what waits is the message beside it alone. What is
    wrong with it is told when it is tried."""
    with contextlib.suppress(PermanentFailure):
        draft = load_draft(config, WaitingJob(*row(_JOBS + " WHERE j.id = ?", job_id)), now)
        if not why_unwanted(draft):
            write_inbox(draft, compose(dataclasses.replace(draft, sender=None)), now)


# -- drafts: what a message is composed from ---------------------------------------------------------------------------


def load_draft(config: Config, job: WaitingJob, now: int, count: int = 0) -> Draft:
    """All that the message of a job is made from, as the config and the rows say now. `count` is the number of a
    repeatable's run. Raises PermanentFailure with the reason when there is none to make."""
    if job.repeatable_id is not None:
        return _repeatable_draft(config, job, now, count)
    workflow = config.workflows.get(job.workflow or "")
    step = workflow.step(job.step) if workflow else None
    if workflow is None or step is None:
        raise PermanentFailure("step removed" if workflow else "workflow removed")
    name = getattr(step, "sender", None)
    sender = config.senders[name] if name is not None else None
    if job.event_id is not None and job.payload is not None:  # one event alone, read with the job
        events = [DigestedEvent(job.event_id, job.received_at or 0, job.payload, job.transaction_id)]
    else:
        events = load_events(job.event_id, job.digest_id, job.has_earlier)
    draft = Draft(
        job.id, job.public_id, job.type, sender, step, now, job.created_at, workflow=job.workflow, step=job.step,
        subscriber=person_of(job.subscriber_id, job.person), digest_id=job.digest_id, events=events,
        digests=workflow.digests,
    )  # fmt: skip
    if isinstance(sender, MailSettings):
        draft.unsubscribe = unsubscribe_url(config, job)
    elif isinstance(sender, WebhookSettings) and (sender.url_from or "").startswith(_CREDENTIALS):
        draft.credentials = load_credentials(job.subscriber_id)
    if job.digest_id is not None:
        draft.has_digest, draft.digest_key = True, job.digest_key or ""
        draft.steps[job.digest_step or ""] = draft.events
        _load_earlier(draft, job.digest_id if job.has_earlier else None)
    _pass_digests(draft, workflow)
    if workflow.delays:
        draft.waited = _waited(job.run_id, job.digest_id)
    return draft


_CREDENTIALS = "subscriber.credentials."


def load_credentials(subscriber_id: str) -> dict[str, Any]:
    """What the chat and push providers of a subscriber need, by provider."""
    found = row("SELECT credentials FROM subscribers WHERE subscriber_id = ?", subscriber_id)
    return json.loads(found[0]) if found and found[0] else {}


def unsubscribe_token(person_id: int, subscriber_id: str, workflow: str, channel: str) -> str:
    """What stands in an unsubscribe URL. Short, since a header holds it; it names the row, and proves the rest."""
    key = remembered("unsubscribe_key") or ""
    said = "\0".join((subscriber_id, workflow, channel)).encode()
    mac = hmac.digest(bytes.fromhex(key), said, "sha256")[:16]
    return f"{person_id}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


def unsubscribe_url(config: Config, job: WaitingJob) -> str | None:
    """The URL that ends mails like this one; None where the config has no public one, or they cannot be ended."""
    workflow = config.workflows.get(job.workflow or "")
    if config.api.public_url is None or workflow is None or workflow.critical or job.person_id is None:
        return None
    token = unsubscribe_token(job.person_id, job.subscriber_id, job.workflow or "", job.type)
    return f"{config.api.public_url}/u/{token}"


def why_unwanted(draft: Draft) -> str:
    """Why a message is not to be sent: its condition says no, or its window holds nothing. '' when it is. Raises
    PermanentFailure where the condition cannot be told."""
    if draft.digest_id is not None and not draft.events:
        return "nothing is in it"
    condition = getattr(draft.content, "when", None)
    return "" if condition is None or condition_holds(condition, template_values(draft)) else CONDITION_SAYS_NO


def _load_earlier(draft: Draft, digest_id: int | None) -> None:
    """The events of the windows that were joined on the way to this one, by their steps."""
    behind = _earlier_digests(digest_id) if digest_id is not None else []
    while behind:
        step, earlier_id = behind.pop()
        draft.steps.setdefault(step, []).extend(load_events(None, earlier_id))
        behind += _earlier_digests(earlier_id)


def _waited(run_id: int, digest_id: int | None) -> dict[str, int]:
    """How long the delays on the way of a run were, in ms; where it comes from a window, those of what came first."""
    waited: dict[str, int] = {}
    while True:
        ended = "type = 'delay' AND state = 'completed'"
        waited |= dict(rows(f"SELECT step, finished_at - created_at FROM jobs WHERE run_id = ? AND {ended}", run_id))
        joined = "SELECT min(m.run_id), r.digest_id FROM digest_runs m JOIN runs r ON r.id = m.run_id"
        run_id, digest_id = row(f"{joined} WHERE m.digest_id = ?", digest_id)
        if run_id is None:
            return waited


def _pass_digests(draft: Draft, workflow: WorkflowSettings) -> None:
    """Digest steps that the run went past without a window: each of them reports the events that the run is about."""
    for step in workflow.steps[: workflow.places[draft.step or ""]]:
        if isinstance(step, DigestStep) and step.id not in draft.steps:
            if draft.digest_id is None:
                draft.has_digest = True
                draft.digest_key = digest_key(step, json.loads(draft.events[0].payload_text) if draft.events else {})
            draft.steps[step.id] = draft.events


@functools.lru_cache(maxsize=4096)
def _content_of(action: str) -> Content:
    wanted = action_of(action)
    return Content.model_construct(
        whole=wanted.get("json"), **{name: wanted.get(name) for name in ("subject", "text", "html")}
    )


def _repeatable_draft(config: Config, job: WaitingJob, now: int, count: int) -> Draft:
    name, key, job_id, action = row("SELECT name, key, job_id, action FROM repeatables WHERE id = ?", job.repeatable_id)
    wanted, slot_at = action_of(action), job.slot_at or 0
    sender = config.senders.get(wanted.get("sender") or "")
    if sender is None:
        raise PermanentFailure("sender removed")
    facts = {
        "name": name,
        "key": key,
        "jobId": job_id,
        "slot": iso_text(slot_at),
        "count": count,
        "data": wanted.get("data"),
    }
    return Draft(job.id, job.public_id, "message", sender, _content_of(action), now, slot_at, repeatable=facts)


# -- composing ---------------------------------------------------------------------------------------------------------


def _clean_line(text: str) -> str:
    """A text fit for one header line: breaks and control characters become blanks, and it ends somewhere. The joiners
    that scripts and emoji need stay."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char in "\u200c\u200d" else " " for char in text)
    line = " ".join(text.split())
    return line if len(line) <= MAX_SUBJECT else line[: MAX_SUBJECT - 1] + "…"


_name_line = functools.lru_cache(maxsize=256)(_clean_line)  # for names, which come again and again


def render_content(draft: Draft, escape: str = "text") -> dict[str, Any]:
    """The subject, text and html that the step has templates for; values in the text are escaped for what it is put
    into. Raises PermanentFailure."""
    context = template_values(draft) if draft.content.takes_values else {}
    kinds = {"html": "html", "text": escape}
    rendered: dict[str, Any] = {}
    for name, text in draft.content.templates.items():
        words = render_template(text, context, kinds.get(name, "text"), draft.now)
        rendered[name] = _clean_line(words) if name == "subject" else words
    return rendered


def _events_text(events: Sequence[DigestedEvent]) -> tuple[str, int]:
    """The events as JSON text, and how many of the newest lost their payload. Stored JSON is joined as it is."""
    parts, size, cut = [], 0, 0
    for number, event in enumerate(events):
        head = f'{{"id":"{event.id}","time":"{iso_text(event.time_at)}"'
        tail = f',"transactionId":{_dumps(event.transaction_id)}}}'
        size += len(event.payload_text.encode())
        if cut or number >= MAX_EVENTS_SHOWN or size > MAX_EVENTS_BYTES:
            cut += 1
            parts.append(head + tail)
        else:
            parts.append(f'{head},"payload":{event.payload_text}{tail}')
    return f"[{','.join(parts)}]", cut


def _digest_text(draft: Draft) -> str:
    if not draft.has_digest:
        return "null"
    listed, cut = _events_text(draft.events)
    digest_id = "null" if draft.digest_id is None else f'"{draft.digest_id}"'
    return (
        f'{{"id":{digest_id},"key":{draft.digest_key or "null"},"eventCount":{len(draft.events)},'
        f'"events":{listed},"truncated":{cut or "false"}}}'
    )


def _event_body(draft: Draft, rendered: dict[str, Any]) -> str:
    """The Standard Webhooks event: type, timestamp, data."""
    if draft.repeatable:
        facts = draft.repeatable
        data = _dumps(
            {
                "repeatable": facts["name"],
                "name": facts["name"],
                **{name: facts[name] for name in ("jobId", "key", "slot", "count", "data")},
                **rendered,
            }
        )
        kind = "repeatable"
    else:
        kind = draft.channel
        payload = draft.events[0].payload_text if draft.events else "{}"
        data = (
            f'{{"workflow":{_dumps(draft.workflow)},"step":{_dumps(draft.step)},"channel":"{draft.channel}",'
            f'"subscriber":{_dumps(draft.subscriber)},"payload":{payload},"digest":{_digest_text(draft)}'
            + "".join(f',"{name}":{_dumps(text)}' for name, text in rendered.items())
            + "}"
        )
    return f'{{"type":"digestd.{kind}","timestamp":"{iso_text(draft.created_at)}","data":{data}}}'


def data_url(draft: Draft) -> str | None:
    """Where a message goes when the data tells; None when it tells nothing. Raises PermanentFailure for what is no
    URL."""
    path = draft.sender.url_from.split(".")
    payload = json.loads(draft.events[0].payload_text) if draft.events else {}
    known = {"payload": payload, "subscriber": {**draft.subscriber, "credentials": draft.credentials}}
    found = value_at(known, path)
    if found is None:
        return None
    try:
        if not isinstance(found, str):
            raise RuleError("it is no text")
        if "@" in _webhook_url(found).partition("://")[2].partition("/")[0]:
            raise RuleError("a URL that comes from data holds no name and password")
    except RuleError as error:
        raise PermanentFailure(f"{draft.sender.url_from} cannot be used: {error.message}") from None
    return found


def compose_webhook(draft: Draft) -> Message:
    """The body that a webhook gets: the step's own JSON, what its preset asks for, or a Standard Webhooks event."""
    settings = draft.sender
    escape = settings.service.escape
    rendered = render_content(draft, escape)
    if draft.content.whole is not None:
        values = template_values(draft) if "{" in draft.content.whole else {}
        body = json_body(draft.content.whole, values, draft.now)
    elif settings.preset is not None:
        body = _dumps(compose_chat(draft, rendered))
    else:
        body = _event_body(draft, rendered)
    if draft.channel == "in_app" and escape != "text":
        rendered = render_content(draft)  # the feed has its own way to escape
    url = data_url(draft) if settings.url_from is not None else None
    return Message(body, "application/json", url=url, summary=rendered)


# -- chat services: what each of them wants as a body, and how much of it ----------------------------------------------


def fit(text: str, most: int, size: Callable[[str], int] = len) -> str:
    """A text no larger than `most`: whole lines go first, from the end, with how many there were; then characters."""
    if size(text) <= most:
        return text
    lines = text.rstrip("\n").split("\n")
    low, high = 0, len(lines) - 1
    while low < high:  # the most lines that fit
        middle = (low + high + 1) // 2
        if size("\n".join(lines[:middle]) + _more(len(lines) - middle)) <= most:
            low = middle
        else:
            high = middle - 1
    if low:
        return "\n".join(lines[:low]) + _more(len(lines) - low)
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(text[:middle] + "…") <= most else (low, middle - 1)
    return re.sub(r"(?:&[a-z]{0,4}|\\)$", "", text[:low]) + "…"  # not in the middle of what was escaped


def _more(count: int) -> str:
    return f"\n… and {count} more"


def utf16_size(text: str) -> int:
    """The length of a text as JavaScript and Telegram count it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def utf8_size(text: str) -> int:
    """The length of a text in bytes as it is sent."""
    return len(text.encode("utf-8", "surrogatepass"))


def _slack(title: str, text: str, draft: Draft) -> dict[str, Any]:
    sections, rest = [f"*{title}*"], fit(text.strip("\n"), 11_000)
    while rest:
        end = rest.rfind("\n", 1, 3000) if len(rest) > 3000 else len(rest)
        # Where no line ends, a part ends anywhere, but not within what was escaped.
        part = rest[:end] if end > 0 else re.sub(r"&[a-z]{0,4}$", "", rest[:2900])
        sections.append(part)
        rest = rest[len(part) :].lstrip("\n")
    blocks = [{"type": "section", "text": {"type": "mrkdwn", "text": part}} for part in sections if part.strip()]
    return {"text": title, "blocks": blocks}


def _discord(title: str, text: str, draft: Draft) -> dict[str, Any]:
    body: dict[str, Any] = {"content": f"**{title}**", "allowed_mentions": {"parse": []}}
    return {**body, "embeds": [{"description": fit(text, 4096, utf16_size)}]} if text.strip() else body


def _teams(title: str, text: str, draft: Draft) -> dict[str, Any]:
    block = {"type": "TextBlock", "wrap": True}
    spaced = functools.partial(re.sub, "\n", "\n\n")  # one line break alone is a blank there
    lines = spaced(fit(text.strip("\n"), 24_000, lambda part: utf8_size(_dumps(spaced(part)))))
    head, tail = {**block, "text": title, "weight": "Bolder", "size": "Medium"}, {**block, "text": lines}
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [head, tail] if lines.strip() else [head],
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _telegram(title: str, text: str, draft: Draft) -> dict[str, Any]:
    head = f"<b>{title}</b>"
    room = 4096 - utf16_size(head) - 2
    whole = fit(text.strip("\n"), room, utf16_size)
    if whole != text.strip("\n"):  # a tag that was opened may have lost its end, and such a text is refused
        whole = fit(re.sub(r"<[^>]*>", "", text.strip("\n")), room, utf16_size)
    return {
        "chat_id": draft.sender.chat_id,
        "text": f"{head}\n\n{whole}" if whole.strip() else head,
        "parse_mode": "HTML",
        "link_preview_options": {"is_disabled": True},
    }


def _ntfy(title: str, text: str, draft: Draft) -> dict[str, Any]:
    settings = draft.sender
    body = {"topic": settings.topic, "title": title, "message": fit(text.strip("\n"), 4000, utf8_size) or title}
    options = {"priority": settings.priority, "tags": settings.tags or None}
    return {**body, **{name: value for name, value in options.items() if value is not None}}


def _mattermost(title: str, text: str, draft: Draft) -> dict[str, Any]:
    body = {"text": fit(f"**{title}**\n\n{text}".rstrip("\n"), 16_000)}
    options = {"username": draft.sender.username, "icon_url": draft.sender.icon_url}
    return {**body, **{name: value for name, value in options.items() if value is not None}}


def _googlechat(title: str, text: str, draft: Draft) -> dict[str, Any]:
    place = "/".join(filter(None, (draft.workflow, draft.subscriber.get("subscriberId"), draft.digest_key)))
    thread = hashlib.sha256((place or str(draft.repeatable.get("name"))).encode()).hexdigest()[:24]
    return {"text": fit(f"*{title}*\n{text}".rstrip("\n"), 4000, utf8_size), "thread": {"threadKey": thread}}


def _apprise(title: str, text: str, draft: Draft) -> dict[str, Any]:
    body = {"title": title, "body": fit(text, 1_000_000) or title, "type": "info", "format": "text"}
    return {**body, "tag": draft.sender.tag} if draft.sender.tag else body


_CHATS: dict[str, Callable[[str, str, Draft], dict[str, Any]]] = {
    "slack": _slack, "discord": _discord, "teams": _teams, "telegram": _telegram, "ntfy": _ntfy,
    "mattermost": _mattermost, "googlechat": _googlechat, "apprise": _apprise,
}  # fmt: skip


def compose_chat(draft: Draft, rendered: dict[str, Any]) -> dict[str, Any]:
    """The body that a chat service wants (facts on webhooks, 4d): no longer than it takes, and without a way for an
    event to write markup or to call people."""
    escape = ESCAPES[draft.sender.service.escape]
    text = rendered["text"] if "text" in rendered else escape(_readable(draft, rendered))
    return _CHATS[draft.sender.preset](escape(_default_subject(draft, rendered)), text, draft)


def _readable(draft: Draft, rendered: dict[str, Any]) -> str:
    """A body for people where the step has no template: one line per event."""
    if "text" in rendered:
        return str(rendered["text"])
    if draft.repeatable:
        return f"{draft.repeatable['name']}, run {draft.repeatable['count']}, {draft.repeatable['slot']}\n"
    step = next((step for name, step in reversed(draft.digests.items()) if name in draft.steps), None)
    most = step.show if step is not None and step.show else len(draft.events)
    listed = [f"- {iso_text(event.time_at)} {event.payload_text}\n" for event in in_order(step, draft.events)[:most]]
    rest = len(draft.events) - len(listed)
    return "".join([*listed, f"… and {rest} more\n" if rest else ""])


def _default_subject(draft: Draft, rendered: dict[str, Any]) -> str:
    return rendered.get("subject") or _name_line(draft.workflow or str(draft.repeatable.get("name", "digestd")))


def compose_log(draft: Draft, rendered: dict[str, Any]) -> Message:
    """What the log sender prints: a line for the subject, lines for the body."""
    to = draft.subscriber.get("subscriberId", "")
    summary = {"subject": _default_subject(draft, rendered), **rendered, "text": _readable(draft, rendered)}
    return Message(summary["text"], subject=summary["subject"], to=to, summary=summary)


def _ascii_domain(address: str) -> str:
    local, _, domain = address.rpartition("@")
    try:
        return f"{local}@{domain.encode('idna').decode('ascii')}"
    except UnicodeError:
        raise PermanentFailure(f"{address} has a domain that cannot be written in ASCII") from None


def _header_text(text: str) -> str:
    """A header value in ASCII. Texts that hold =? are encoded too, or a reader would decode what an event says."""
    from email.header import Header

    return text if text.isascii() and "=?" not in text else Header(text, "utf-8", maxlinelen=75).encode()


def _mailbox_header(name: str, address: str) -> str:
    from email.utils import quote

    # A local part beyond ASCII goes out raw, for a server with SMTPUTF8; an encoded word would be another address.
    address = address.encode().decode("ascii", "surrogateescape")
    if not name:
        return address
    return (
        f'"{quote(name)}" <{address}>' if name.isascii() and "=?" not in name else f"{_header_text(name)} <{address}>"
    )


def _thread_root(draft: Draft, domain: str) -> str | None:
    """The invented message that all mails of a thread answer to; it need not exist (facts on mail, 3b)."""
    kind = draft.sender.thread
    if kind == "none":
        return None
    place = [draft.workflow or "", draft.subscriber.get("subscriberId", "")]
    if kind == "key":
        place.append(draft.digest_key)
    elif kind in ("day", "month"):
        day = local_time(draft.created_at, load_zone(draft.subscriber.get("timezone") or "UTC"))
        place.append(day.strftime("%Y-%m-%d" if kind == "day" else "%Y-%m"))
    return f"<thread.{hashlib.sha256(canonical_json(place).encode()).hexdigest()[:32]}@{domain}>"


def _mail_headers(draft: Draft, subject: str, to: str) -> Iterator[tuple[str, str]]:
    """The headers of a digest's mail (facts on mail, 3b), each in ASCII but for a local part that is none."""
    import email.utils

    from_name, from_address = email.utils.parseaddr(draft.sender.sender)
    from_address = _ascii_domain(from_address)
    domain = from_address.rpartition("@")[2]
    names = " ".join(draft.subscriber.get(part, "") for part in ("firstName", "lastName")).strip()
    list_name = re.sub(r"[^A-Za-z0-9-]+", "-", draft.workflow or "digestd").strip("-")[:60] or "digestd"
    yield "From", _mailbox_header(from_name, from_address)
    if draft.sender.reply_to is not None:
        reply_name, reply_address = email.utils.parseaddr(draft.sender.reply_to)
        yield "Reply-To", _mailbox_header(reply_name, _ascii_domain(reply_address))
    yield "To", _mailbox_header(_clean_line(names), to)
    yield "Subject", _header_text(subject)
    yield "Message-ID", f"<{draft.public_id}@{domain}>"
    yield "Date", email.utils.format_datetime(EPOCH + dt.timedelta(milliseconds=draft.now))
    root = _thread_root(draft, domain)
    if root is not None:
        yield "In-Reply-To", root
        yield "References", root
    yield "List-Id", f"<{list_name}.digestd.{domain}>"
    if draft.unsubscribe is not None:
        yield "List-Unsubscribe", f"<{draft.unsubscribe}>"
        yield "List-Unsubscribe-Post", "List-Unsubscribe=One-Click"
    yield "Auto-Submitted", "auto-generated"


def compose_mail(draft: Draft, rendered: dict[str, Any]) -> Message:
    """A finished mail: multipart/alternative where there is HTML, stable Message-ID, no header line over 900 bytes."""
    from email.charset import QP, Charset
    from email.generator import BytesGenerator
    from email.mime.multipart import MIMEMultipart
    from email.mime.text import MIMEText
    from email.policy import compat32

    charset = Charset("utf-8")
    charset.body_encoding = QP
    text = MIMEText(_readable(draft, rendered).replace("\x00", ""), "plain", charset)  # type: ignore[arg-type]
    mail: MIMEText | MIMEMultipart = text
    if "html" in rendered:
        mail = MIMEMultipart("alternative", boundary=f"=_{draft.public_id}")
        mail.attach(text)
        mail.attach(MIMEText(rendered["html"].replace("\x00", ""), "html", charset))  # type: ignore[arg-type]
    subject, to = _default_subject(draft, rendered), _ascii_domain(draft.subscriber["email"])
    for name, value in _mail_headers(draft, subject, to):
        mail[name] = value
    out = io.BytesIO()
    policy = compat32.clone(linesep="\r\n", max_line_length=998)
    BytesGenerator(out, mangle_from_=False, maxheaderlen=998, policy=policy).flatten(mail)
    return Message(
        out.getvalue().decode("utf-8", "surrogateescape"),
        "message/rfc822",
        subject,
        to,
        summary={"subject": subject, **rendered, "to": to},
    )


def missing_address(draft: Draft) -> str | None:
    """Why a message has nobody to go to; None when its sender needs no address or there is one."""
    if isinstance(draft.sender, WebhookSettings) and draft.sender.url_from is not None:
        return None if data_url(draft) is not None else f"nothing stands at {draft.sender.url_from}"
    if not isinstance(draft.sender, MailSettings):
        return None
    if draft.repeatable:
        return "a repeatable's message by mail has no recipient; let it trigger a workflow with an email step"
    address = draft.subscriber.get("email")
    if not address:
        return "the subscriber has no e-mail address"
    return None if is_mail_address(address) else f"{address!r} is not an e-mail address"


def compose(draft: Draft) -> Message:
    """The finished message of a draft. Pure, so that it may run in a thread. Raises PermanentFailure."""
    try:
        if isinstance(draft.sender, WebhookSettings):
            return compose_webhook(draft)
        rendered = render_content(draft)
        return compose_mail(draft, rendered) if isinstance(draft.sender, MailSettings) else compose_log(draft, rendered)
    except PermanentFailure:
        raise
    except Exception as error:
        log.exception("a bug met the message of job %s", draft.job_id)
        raise PermanentFailure(f"the message cannot be composed: {type(error).__name__}: {error}") from error


def is_heavy(draft: Draft) -> bool:
    """Whether composing takes so long that it belongs in a thread."""
    events = draft.events
    return (
        len(events) > 200 or isinstance(draft.sender, MailSettings) or sum(len(e.payload_text) for e in events) > LARGE
    )


# -- claiming ----------------------------------------------------------------------------------------------------------


class Room:
    """How many tries may begin: `total` under way in all, and of each sender no more than its concurrency and, in any
    minute, its max_per_minute. A sender never takes the last place of each other one, so that an endpoint that hangs
    leaves the others theirs. A line of the log is written at once and takes no place."""

    def __init__(self, total: int, senders: Mapping[str, Any]) -> None:
        self.under_way: dict[str, int] = {}
        self.lanes: set[str] = set()  # those in which a try is under way
        self.parked: dict[str, str] = {}  # lanes in which jobs wait behind it, with their sender
        self.freed: set[str] = set()  # of those, the ones whose try has ended
        self.begun: dict[str, tuple[int, ...]] = {}  # when the tries of the last minute began, of senders with a rate
        self.wake_at: int | None = None  # when the rate of one lets what waits for it begin
        self.fit(total, senders)

    def free(self, sender: str, now: int) -> int:
        """How many more tries this sender may begin now, in ms."""
        settings = self.senders[sender]
        if sender in self.logs:
            most = LINES_AT_ONCE
        else:
            left = self.total - sum(self.under_way.values())
            own = getattr(settings, "concurrency", None) or self.total
            reserved = max(0, len(self.under_way) - 1)
            most = min(left, min(own, max(1, self.total - reserved)) - self.under_way.get(sender, 0))
        if getattr(settings, "max_per_minute", None):
            most = min(most, settings.max_per_minute - len(self._recent(sender, now)))
        return max(0, most)

    def _recent(self, sender: str, now: int) -> tuple[int, ...]:
        """When its tries of the last minute began; none lies ahead, also when the clock was set back."""
        recent = tuple(min(at, now) for at in self.begun.get(sender, ()) if at > now - MINUTE)
        self.begun[sender] = recent
        return recent

    def opens_at(self, sender: str, now: int) -> int | None:
        """When its rate lets another try begin; None when it does now, or has no limit."""
        rate = getattr(self.senders[sender], "max_per_minute", None)
        recent = self._recent(sender, now) if rate else ()
        return recent[-rate] + MINUTE if rate and len(recent) >= rate else None

    def begin(self, sender: str, now: int, lane: str = "") -> None:
        if sender not in self.logs:
            self.under_way[sender] = self.under_way.get(sender, 0) + 1
        if lane:
            self.lanes.add(lane)
        if getattr(self.senders[sender], "max_per_minute", None):
            self.begun[sender] = (*self.begun.get(sender, ()), now)

    def end(self, sender: str, lane: str = "") -> None:
        if sender in self.under_way:
            self.under_way[sender] = max(0, self.under_way[sender] - 1)
        self.lanes.discard(lane)
        if lane in self.parked:
            self.freed.add(lane)

    def recall(self, tries: Iterable[tuple[str, int]]) -> None:
        """Tries of the last minute that a former process began: (sender, when)."""
        for sender, at in tries:
            self.begun[sender] = (*self.begun.get(sender, ()), at)

    def kept(self) -> tuple[Any, ...]:
        """What `restore` needs to undo what a transaction began that was rolled back."""
        return dict(self.under_way), dict(self.begun), set(self.lanes), dict(self.parked), set(self.freed)

    def restore(self, kept: tuple[Any, ...]) -> None:
        self.under_way, self.begun, self.lanes, self.parked, self.freed = kept

    def fit(self, total: int, senders: Mapping[str, Any]) -> None:
        """Take over a config, by its senders' names; what is under way stays counted."""
        self.total, self.senders = total, senders
        self.logs = {name for name, settings in senders.items() if isinstance(settings, LogSettings)}
        busy = {name: count for name, count in self.under_way.items() if count}
        self.under_way = {**dict.fromkeys(senders.keys() - self.logs, 0), **busy}


def recent_tries(config: Config, now: int) -> list[tuple[str, int]]:
    """When the tries of the last minute began, oldest first, as far as the rates of the senders go by them."""
    most = sum(sender.max_per_minute or 0 for sender in config.senders.values())
    found = rows(
        "SELECT j.sender, a.started_at FROM (SELECT * FROM attempts ORDER BY id DESC LIMIT ?) a"
        " JOIN jobs j ON j.id = a.job_id WHERE a.started_at > ? ORDER BY a.id", most and 2 * most + 1000, now - MINUTE
    )  # fmt: skip
    return [(sender, at) for sender, at in found if sender is not None]


def _message_text(message: Message) -> str:
    """A composed message as its job keeps it until it is final: every try sends the same bytes."""
    return json.dumps({**message._asdict(), "summary": dict(message.summary)})


def _end_without_sending(config: Config, job: WaitingJob, state: str, reason: str, now: int) -> None:
    move(Job, job.id, "waiting", "active", taken_at=now)
    move(Job, job.id, "active", state, finished_at=now, reason=reason, message=None)
    log.warning("job %s %s: %s", job.id, state, one_line(reason))
    go_on(config, [job.run_id], job.workflow, job.step, now)


def _first_draft(config: Config, job: WaitingJob, now: int, count: int) -> Draft | None:
    """The draft of a job's first try; None where there is nothing to send, and the job has ended with the reason."""
    try:
        draft = load_draft(config, job, now, count)
        unwanted = why_unwanted(draft) or why_turned_off_since(config, job)
        if unwanted:
            _end_without_sending(config, job, "skipped", unwanted, now)
            return None
        missing = missing_address(draft)
        if missing is None:
            return draft
        if job.type == "in_app":  # the feed needs no address
            write_inbox(draft, compose(dataclasses.replace(draft, sender=None)), now)
        _end_without_sending(config, job, "skipped", missing, now)
    except PermanentFailure as error:
        _end_without_sending(config, job, "failed", error.message, now)
    return None


def lane_of(job: WaitingJob, sender: str) -> str:
    """The lane of a job: no two messages for one subscriber and key are on their way to one place at once, so that the
    newer one does not arrive first. '' for a repeatable's, which have none."""
    return "" if job.repeatable_id is not None else _dumps([sender, job.subscriber_id, job.digest_key or ""])


def _claim_of(config: Config, job: WaitingJob, name: str, count: int, now: int) -> Claim | None:
    """The claim of a job, with its message where that is quick; None when there is nothing to send after all."""
    draft = _first_draft(config, job, now, count) if job.message is None else None
    if job.message is None and draft is None:
        return None
    claim = Claim(
        job.id, 0, 0, now, job.public_id, name, config.senders[name], job.run_id, job.workflow, job.step, job.tries,
        "" if isinstance(config.senders[name], LogSettings) else lane_of(job, name), draft=draft,
    )  # fmt: skip
    if draft is None:
        claim.message = Message(**json.loads(job.message or "{}"))
    elif not is_heavy(draft):
        finish_claim(claim)
        if claim.message is not None and job.type == "in_app":
            write_inbox(draft, claim.message, now)
    return claim


def _activate(claims: Sequence[Claim], now: int) -> None:
    """waiting -> active with an attempt on record, before anything is sent: a few statements for all. The text of a
    line of the log is not kept: it goes nowhere else, and after a crash it is composed again."""
    lines = [claim.job_id for claim in claims if isinstance(claim.sender, LogSettings)]
    move_all(Job, lines, "waiting", "active", taken_at=now)
    kept = {
        claim.job_id: (now, claim.message and _message_text(claim.message))
        for claim in claims
        if not isinstance(claim.sender, LogSettings)
    }
    move_each(Job, kept, "waiting", "active", ("taken_at", "message"))
    by_job = {claim.job_id: claim for claim in claims}
    for job_id, attempt_id, number in rows(_BEGIN_ATTEMPTS, now, json.dumps(list(by_job))):
        claim = by_job[job_id]
        claim.attempt_id, claim.number = attempt_id, number
        if claim.result is not None:
            claim.result = claim.result._replace(attempt_id=attempt_id)


def finish_claim(claim: Claim) -> None:
    """Compose the message of a claim; a failure becomes the result of the try."""
    assert claim.draft is not None
    try:
        claim.message = compose(claim.draft)
    except PermanentFailure as error:
        claim.result = SendResult(claim.job_id, claim.attempt_id, "permanent", error.message)


def keep_composed(claim: Claim, now: int) -> None:
    """Store what was composed in a thread, and the feed's row of an in-app step that also has a sender."""
    assert claim.draft is not None and claim.message is not None
    execute("UPDATE jobs SET message = ? WHERE id = ?", _message_text(claim.message), claim.job_id)
    if claim.draft.channel == "in_app":
        write_inbox(claim.draft, claim.message, now)


def _open_lanes(room: Room) -> None:
    """Where a try has ended, the next one of its lane may be taken."""
    for lane in sorted(room.freed):
        wanted = (
            "SELECT id FROM jobs WHERE state = 'waiting' AND sender = ? AND lane = ?"
            " ORDER BY type = 'message', due_at, id LIMIT 1"
        )
        if not execute(f"UPDATE jobs SET lane = '' WHERE id = ({wanted})", room.parked[lane], lane):
            del room.parked[lane]
    room.freed.clear()


def unpark_jobs(lanes: Iterable[str] = ()) -> int:
    """Let jobs out of every lane but these, in which a try is under way; how many. What ended a lane's try may have
    left others behind it: a cancel, a change of the config, the end of the process."""
    text = "UPDATE jobs SET lane = '' WHERE state = 'waiting' AND lane <> '' AND lane NOT IN"
    return execute(f"{text} (SELECT value FROM json_each(?))", json.dumps(sorted(lanes)))


def _claim_by(config: Config, name: str, free: int, now: int, room: Room) -> tuple[list[Claim], int]:
    """The claims of one sender, no more than `free`; and how many jobs were found to wait for another one's end."""
    jobs = list(map(WaitingJob._make, rows(_WAITING_JOBS, name, now, free)))
    counts = take_runs([job.run_id for job in jobs if job.type == "message"], now)
    claims, behind = [], []
    for job in jobs:
        lane = lane_of(job, name)
        if lane in room.lanes:
            behind.append((lane, job.id))
            continue
        claim = _claim_of(config, job, name, counts.get(job.run_id, 0), now)
        if claim is not None:
            room.begin(name, now, claim.lane)
            claims.append(claim)
    if behind:
        execute_many("UPDATE jobs SET lane = ? WHERE id = ?", behind)
        room.parked |= dict.fromkeys((lane for lane, _ in behind), name)
    if claims:
        _activate(claims, now)
    return claims, len(behind)


def claim_jobs(config: Config, now: int, room: Room) -> list[Claim]:
    """Stage: jobs (waiting) -> active, as many as each sender has room for; the tries that are now to be made. Those
    of a disabled sender stay waiting."""
    claims: list[Claim] = []
    _open_lanes(room)
    for name in config.senders:
        if sender_is_disabled(name):
            continue
        parked = 0
        while free := room.free(name, now):
            found, behind = _claim_by(config, name, free, now, room)
            claims += found
            parked += behind
            if not behind or parked >= BATCH:
                break
        opens_at = room.opens_at(name, now)
        if parked >= BATCH:
            opens_at = now  # there may be more behind them
        if opens_at is not None and row("SELECT 1 FROM jobs WHERE state = 'waiting' AND sender = ? LIMIT 1", name):
            room.wake_at = min(opens_at, room.wake_at or opens_at)
    return claims


def rebind_jobs(config: Config, now: int) -> None:
    """After the config changed: jobs that have no message yet go by the sender their step now names, and those whose
    sender is gone fail, where a person sees them. What is remembered of such a sender is forgotten."""
    unpark_jobs()
    forgotten = "DELETE FROM senders WHERE name NOT IN (SELECT value FROM json_each(?))"
    execute(forgotten, json.dumps(list(config.senders)))
    database.sender_states = None
    for job_id, state, name, has_message, run_id, workflow_name, step_id in rows(
        "SELECT j.id, j.state, j.sender, j.message IS NOT NULL, r.id, r.workflow, j.step"
        " FROM jobs j JOIN runs r ON r.id = j.run_id"
        " WHERE j.state IN ('delayed', 'waiting') AND j.sender IS NOT NULL"
    ):
        workflow = config.workflows.get(workflow_name or "")
        step = workflow.step(step_id) if workflow else None
        wanted = getattr(step, "sender", None)
        if wanted is not None and wanted != name and not has_message:
            execute("UPDATE jobs SET sender = ? WHERE id = ?", wanted, job_id)
        elif name not in config.senders:
            if state == "delayed":
                move(Job, job_id, "delayed", "waiting")
            move(Job, job_id, "waiting", "active", taken_at=now)
            move(Job, job_id, "active", "failed", finished_at=now, reason=f"sender {name!r} removed")
            go_on(config, [run_id], workflow_name, step_id, now)


# ----------------------------------------------------------------------------------------------------------------------
# 11 Senders
# ----------------------------------------------------------------------------------------------------------------------
# A claim in, a result out. No database, no clock: the claim carries the finished message, the settings, and when the
# try began. Whatever a sender raises is a result too.

MAX_REPLY = 1024  # bytes of an answer that are kept


def short_reply(data: bytes) -> str:
    """The beginning of what the other side said, as one line of text."""
    text = data[:MAX_REPLY].decode("utf-8", "replace")
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def sign_webhook(secret: str, public_id: str, timestamp_s: int, body: bytes) -> str:
    """The Standard Webhooks signature: HMAC-SHA256 over id.timestamp.body, as v1,<base64>."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{public_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def judge_status(status: int, location: str = "") -> tuple[str, str]:
    """What an HTTP status means for a webhook: (outcome, reason). The one place that knows."""
    if 200 <= status < 300:
        return "sent", ""
    if 300 <= status < 400:
        return (
            "permanent",
            f"HTTP {status}: a redirect to {location or 'nowhere'}, which is not followed; set that URL instead",
        )
    if status in (408, 425, 429) or status >= 500:
        return "temporary", f"HTTP {status}"
    return "permanent", f"HTTP {status}"


def judge_chat(preset: str, status: int, said: bytes) -> tuple[str, str, int | None]:
    """The same for the services of presets, some of which say it otherwise: (outcome, reason, wait in ms)."""
    outcome, reason = judge_status(status)
    told: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(said)
    told = told if isinstance(told, dict) else {}
    if preset == "apprise" and status == 204:
        return "permanent", "HTTP 204: Apprise has nobody under this key and tag", None
    if preset == "apprise" and status == 424:
        return "temporary", "HTTP 424: some of Apprise's services failed", None
    if preset == "telegram" and outcome == "sent" and told.get("ok") is False:
        return "permanent", "HTTP 200, but not ok", None
    inner = told.get("parameters") if isinstance(told.get("parameters"), dict) else told
    wait = inner.get("retry_after") if outcome == "temporary" and isinstance(inner, dict) else None
    is_span = isinstance(wait, (int, float)) and not isinstance(wait, bool) and 0 <= wait < 1e9
    return outcome, reason, min(DAY, int(wait * SECOND)) if is_span else None  # type: ignore[operator]


def parse_retry_after(text: str | None) -> tuple[int | None, int | None]:
    """A Retry-After header as (span in ms, instant in ms); both None where there is none that can be read."""
    if text is None:
        return None, None
    if text.isascii() and text.isdigit():
        return min(int(text[:12]) * SECOND, DAY), None
    import email.utils

    try:
        moment = email.utils.parsedate_to_datetime(text)
        return None, (moment.replace(tzinfo=moment.tzinfo or UTC) - EPOCH) // dt.timedelta(milliseconds=1)
    except (ValueError, TypeError, OverflowError):
        log.warning("a Retry-After that cannot be read is ignored: %s", one_line(text[:100]))
        return None, None


class Senders:
    """The transports, with the connections they keep. Use from one loop; `close` when done."""

    def __init__(self) -> None:
        self.sessions: dict[tuple[Any, ...], Any] = {}  # by what their connections depend on
        self.lines: list[MailLine] = []  # to mail servers, idle
        self.goodbyes: set[asyncio.Future[None]] = set()  # to those that were idle for long

    async def send(self, claim: Claim) -> SendResult:
        """Make one try. Never raises: what goes wrong is the result, and a bug is a temporary failure."""
        try:
            async with asyncio.timeout(claim.sender.timeout / SECOND):
                if isinstance(claim.sender, WebhookSettings):
                    return await self._send_webhook(claim)
                if isinstance(claim.sender, SmtpSettings):
                    return await self._send_by_smtp(claim)
                if isinstance(claim.sender, SendmailSettings):
                    return await send_by_command(claim)
                return send_to_log(claim)
        except TimeoutError:
            return result_of(claim, "temporary", f"no answer within {duration_text(claim.sender.timeout)}")
        except Exception as error:
            log.exception("a bug met the try %s of job %s", claim.number, claim.job_id)
            return result_of(claim, "temporary", bug_text(error))

    def _session(self, settings: WebhookSettings) -> Any:
        """The connections that a sender shares with those that trust and reach the same."""
        import aiohttp

        by_environment = settings.proxy == "environment"
        allowed = tuple(settings.allow_addresses) if settings.url_from is not None else None
        key = (settings.ca_file, by_environment, allowed)
        if key not in self.sessions:
            connector = aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=30, use_dns_cache=allowed is None, resolver=guarded_resolver(allowed),
                ssl=_tls_context(settings.ca_file) if settings.ca_file else True,
            )  # fmt: skip
            self.sessions[key] = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(), cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False, trust_env=by_environment,
            )  # fmt: skip
        return self.sessions[key]

    async def _send_webhook(self, claim: Claim) -> SendResult:
        import aiohttp

        settings, url = claim.sender, webhook_target(claim)
        proxy = settings.proxy if settings.proxy != "environment" else None
        try:
            refuse_address(url.raw_host or "", settings.allow_addresses if settings.url_from is not None else None)
            async with self._session(settings).post(
                url, data=_body_of(claim), headers=_webhook_headers(claim), allow_redirects=False, proxy=proxy
            ) as reply:
                return await _judge_reply(claim, reply, str(url))
        except PermanentFailure as error:
            return result_of(claim, "permanent", error.message)
        except aiohttp.ClientError as error:
            return result_of(claim, "temporary", _connection_words(error))

    async def _send_by_smtp(self, claim: Claim) -> SendResult:
        """One mail, over a connection that is kept where there is one. One that had been idle and breaks before the
        text of the mail was no try: the server had long closed it, and another one is made."""
        while True:
            line = self._idle_line(claim.sender) or MailLine(claim.sender)
            try:
                result = await send_mail(line, claim)
            finally:
                self._keep_line(line)
            if not (result.at_once and line.uses > 1):
                return result

    def _idle_line(self, settings: SmtpSettings) -> MailLine | None:
        """A connection that is idle, to the server of these settings."""
        for line in self.lines:
            if line.settings is settings:
                self.lines.remove(line)
                line.wake()
                return line
        return None

    def _keep_line(self, line: MailLine) -> None:
        """Keep a connection for the next mail for a while, unless it is of no more use."""
        if line.is_broken or line.uses >= MAIL_REUSES:
            line.drop()
            return
        self.lines.append(line)
        line.rest(lambda: self._let_go(line))

    def _let_go(self, line: MailLine) -> None:
        if line in self.lines:
            self.lines.remove(line)
            goodbye = asyncio.ensure_future(line.hang_up())
            self.goodbyes.add(goodbye)
            goodbye.add_done_callback(self.goodbyes.discard)

    async def close(self) -> None:
        """Close the connections that are kept."""
        for session in self.sessions.values():
            await session.close()
        self.sessions.clear()
        lines, self.lines = self.lines, []
        for line in lines:
            line.wake()
        await asyncio.gather(*(line.hang_up() for line in lines), *self.goodbyes)


def result_of(
    claim: Claim, outcome: str, reason: str | None = None, status_code: int | None = None,
    retry_after_ms: int | None = None, retry_at: int | None = None, cause: str | None = None,
) -> SendResult:  # fmt: skip
    said = (outcome, reason, status_code, retry_after_ms, retry_at)
    return SendResult(claim.job_id, claim.attempt_id, *said, cause=cause)


def _body_of(claim: Claim) -> bytes:
    assert claim.message is not None
    return claim.message.body.encode("utf-8", "surrogateescape")


def webhook_target(claim: Claim) -> Any:
    """Where a webhook goes."""
    import yarl

    assert claim.message is not None
    settings = claim.sender
    url = yarl.URL(claim.message.url or settings.url or settings.service.url or "")
    if settings.preset == "telegram":
        return url / f"bot{settings.token.get_secret_value()}/sendMessage"
    if settings.preset == "googlechat":
        return url.update_query(messageReplyOption="REPLY_MESSAGE_FALLBACK_TO_NEW_THREAD")
    return url


def _webhook_headers(claim: Claim) -> dict[str, str]:
    """Standard Webhooks: the same id on every try, the time and the signatures of this one, one for each secret."""
    assert claim.message is not None
    settings, timestamp_s = claim.sender, claim.started_at // SECOND
    headers = {
        "Content-Type": claim.message.content_type,
        "User-Agent": f"digestd/{__version__}",
        "webhook-id": claim.public_id,
        "webhook-timestamp": str(timestamp_s),
        "Idempotency-Key": claim.public_id,
    }
    if settings.secret:
        body, keys = _body_of(claim), [key.get_secret_value() for key in settings.secret]
        headers["webhook-signature"] = " ".join(sign_webhook(key, claim.public_id, timestamp_s, body) for key in keys)
    if settings.preset == "ntfy" and settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
    own = {name.lower(): name for name in headers}
    for name, value in settings.headers.items():
        headers[own.get(name.lower(), name)] = value.get_secret_value()
    return headers


_NAT64 = "64:ff9b::/96"
_METADATA = "fd00:ec2::254"


def refuse_address(text: str, allowed: Sequence[str] | None) -> None:
    """Refuse an address that no message may go to. Raises PermanentFailure; a name passes, for it is looked up later.

    `allowed` is None where the config names the URL: then all are reached but those of the link, where clouds tell
    their secrets. Where data names it, only public addresses are, and the networks in `allowed`.
    """
    import ipaddress

    try:
        address: Any = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        if ":" in text or text.replace(".", "").isdigit():  # 127.1 and the like: they would be reached unseen
            raise PermanentFailure(f"{one_line(text)} is no address that can be told from others") from None
        return
    if address.version == 6:
        inside = address.ipv4_mapped or address.sixtofour
        if inside is None and address in ipaddress.ip_network(_NAT64):
            inside = ipaddress.ip_address(int(address) & 0xFFFFFFFF)
        address = inside or address
    if address.is_link_local or str(address) == _METADATA:
        raise PermanentFailure(f"{text} is an address of the link alone, and no message goes there")
    if allowed is None or any(address in ipaddress.ip_network(network) for network in allowed):
        return
    if not address.is_global or address.is_multicast:
        words = "is not a public address, and the URL comes from data; allow_addresses of the sender names networks"
        raise PermanentFailure(f"{text} {words}")


def guarded_resolver(allowed: Sequence[str] | None) -> Any:
    """A resolver that refuses a name when any of its addresses is to be refused. What it gives is what is connected to,
    so there is no second look-up that could say something else."""
    import aiohttp

    class Guarded(aiohttp.ThreadedResolver):
        async def resolve(self, *name: Any, **options: Any) -> Any:
            found = await super().resolve(*name, **options)
            for one in found:
                refuse_address(one["host"], allowed)
            return found

    return Guarded()


async def _judge_reply(claim: Claim, reply: Any, url: str) -> SendResult:
    """What an answer means, with the beginning of what it said."""
    settings = claim.sender
    data = await _read_reply(reply, settings.timeout)
    outcome, reason = judge_status(reply.status, _shown_url(reply.headers.get("Location", "")))
    wait_ms, wait_at = parse_retry_after(reply.headers.get("Retry-After") if outcome == "temporary" else None)
    if settings.preset is not None:
        outcome, reason, told_ms = judge_chat(settings.preset, reply.status, data)
        wait_ms = max(wait_ms or 0, told_ms or 0) or None
    said = hide_headers(hide_url(short_reply(data), url), settings)
    words = ": ".join(part for part in (reason, said) if part)
    if outcome == "temporary" and reply.headers.get("webhook-delivery", "").strip().lower() == "abort-message":
        return result_of(claim, "permanent", f"the receiver wants no more tries: {words}", reply.status)
    gone = reply.status in settings.service.gone and settings.url_from is None
    return result_of(claim, outcome, words or None, reply.status, wait_ms, wait_at, "gone" if gone else None)


async def _read_reply(reply: Any, timeout_ms: int) -> bytes:
    """The beginning of an answer's body. The status has decided: a body that is broken or late changes nothing."""
    import aiohttp

    data = b""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(min(2, timeout_ms / SECOND / 4)):
            data = await reply.content.read(MAX_REPLY)
    return data


def hide_headers(text: str, settings: WebhookSettings) -> str:
    """What the other side said, without the secrets that our headers carry: some answer with all that they got."""
    hidden = [value.get_secret_value() for value in (*settings.headers.values(), *filter(None, [settings.token]))]
    for value in hidden:
        for part in (value, *value.split()):
            if len(part) >= 6:
                text = text.replace(part, "…")
    return text


def hide_url(text: str, url: str) -> str:
    """What the other side said, without the parts of our URL: one that echoes its path would give a secret away."""
    import yarl

    parsed = yarl.URL(url)
    parts = [parsed.raw_path_qs, parsed.raw_path, parsed.raw_query_string, *parsed.raw_parts, *parsed.query.values()]
    parts += [parsed.path_qs, parsed.path, parsed.query_string, *parsed.parts]
    for part in sorted({part for part in parts if len(part) >= 4}, key=len, reverse=True):
        text = text.replace(part, "…")
    return text


def _shown_url(url: str) -> str:
    """A URL without what may be secret in it: scheme, host and port."""
    match = re.match(r"((?:https?:)?//)(?:[^/@]*@)?([^/?#]*)", url)
    return f"{match[1]}{match[2]}/…" if match else url[:1] and "a path on the same host"


def _connection_words(error: BaseException) -> str:
    """What went wrong on the way, without the URL: its path may be the secret."""
    import ssl

    import aiohttp

    if isinstance(error, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError)):
        return f"TLS failed: {one_line(str(error.__cause__ or error.args[-1]))}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the host name cannot be resolved: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {cause.reason or cause}"
        known = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror
        return f"cannot connect: {known or type(cause).__name__}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer; the message may have arrived"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return type(error).__name__


def _tls_context(ca_file: str | None, server_name: str | None = None) -> ssl.SSLContext:
    """TLS that checks who answers: by the system's authorities or by a file, by the host's name or by another one."""
    import ssl

    class Named(ssl.SSLContext):
        def wrap_bio(self, *streams: Any, **options: Any) -> Any:
            return super().wrap_bio(*streams, **options | {"server_hostname": server_name})

    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if server_name is not None:
        context.__class__ = Named
    return context


def _sender_address(settings: MailSettings) -> str:
    import email.utils

    return _ascii_domain(email.utils.parseaddr(settings.sender)[1])


MAIL_REUSES = 50  # mails over one connection
MAIL_IDLE_S = 30.0  # that it waits for the next one


class MailLine:
    """A connection to a mail server, made when it is first used. `stage` is how far the mail at hand has come."""

    def __init__(self, settings: SmtpSettings) -> None:
        import aiosmtplib

        hello = _ascii_domain(f"@{settings.hello}")[1:] if settings.hello else None
        self.settings = settings
        self.smtp = aiosmtplib.SMTP(
            hostname=settings.host, port=settings.port, timeout=settings.timeout / SECOND,
            local_hostname=hello or _sender_address(settings).rpartition("@")[2],
            start_tls=settings.tls == "starttls", use_tls=settings.tls == "implicit",
            tls_context=None if settings.tls == "none" else _tls_context(settings.ca_file, settings.server_name),
        )  # fmt: skip
        self.uses = 0
        self.stage = "connecting"
        self.was_connected = False
        self.is_broken = False
        self.timer: Any = None

    async def open(self) -> None:
        """Ready for a mail: connected, under TLS as set, logged in."""
        self.stage, self.uses = "connecting", self.uses + 1
        if self.uses > 1:
            return
        await self.smtp.connect()
        self.was_connected = True
        if self.smtp.is_ehlo_or_helo_needed:
            await self.smtp.ehlo()
        if self.settings.username is None or self.settings.password is None:
            return
        self.stage = "login"
        password = self.settings.password.get_secret_value()
        if "plain" in self.smtp.supported_auth_methods:  # trying all methods would count a wrong password several times
            await self.smtp.auth_plain(self.settings.username, password)
        else:
            await self.smtp.login(self.settings.username, password)

    def rest(self, end: Callable[[], None]) -> None:
        """Idle from now on; `end` is called when that lasts too long."""
        self.timer = asyncio.get_running_loop().call_later(MAIL_IDLE_S, end)

    def wake(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def drop(self) -> None:
        """Close without a word: nothing that the server could say matters."""
        self.smtp.close()

    async def hang_up(self) -> None:
        """Say goodbye; a server that is silent then has taken the mails all the same."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.smtp.quit(), 1)
        self.smtp.close()


async def send_mail(line: MailLine, claim: Claim) -> SendResult:
    """One mail over one connection: MAIL, RCPT, DATA. The line is broken where it cannot take another one."""
    assert claim.message is not None
    settings, to, smtp = claim.sender, claim.message.to or "", line.smtp
    line.is_broken = True  # until it is known not to be, also when this is given up in the middle
    try:
        await line.open()
        line.stage = "envelope"
        sender, options, wishes, encoding = _sender_address(settings), [], [], "ascii"
        if not (to + sender).isascii():
            if not smtp.supports_extension("smtputf8"):
                line.is_broken = False
                return result_of(claim, "permanent", f"{to} needs SMTPUTF8, which the mail server does not offer")
            options, encoding = ["SMTPUTF8", "BODY=8BITMIME"], "utf-8"
        if smtp.supports_extension("dsn"):  # a bounce names the message, and does not carry it back
            options += ["RET=HDRS", f"ENVID={claim.public_id}"]
            wishes.append("NOTIFY=FAILURE")
        await smtp.mail(sender, options=options, encoding=encoding)
        await smtp.rcpt(to, options=wishes, encoding=encoding)
        line.stage = "data"
        code, said = await smtp.data(_body_of(claim))
        line.is_broken = False
        return _with_enhanced_code(result_of(claim, "sent", short_reply(said.encode()), code))
    except Exception as error:
        result = _with_enhanced_code(_judge_mail_error(claim, error, line.stage))
        is_gone = isinstance(error, _disconnected()) or result.status_code == 421
        if is_gone and line.was_connected and line.stage != "data":
            return result._replace(at_once=result.cause is None)
        if result.status_code is not None and result.status_code != 421 and line.stage in ("envelope", "data"):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(smtp.rset(), 2)
                line.is_broken = False
        return result


_ENHANCED = re.compile(r"(?:^|\b\d{3} )([245]\.\d{1,3}\.\d{1,3})\b", re.ASCII)


def _with_enhanced_code(result: SendResult) -> SendResult:
    """A mail server's result with the finer code (RFC 3463) that stands first in what it said."""
    found = _ENHANCED.search(result.reason or "")
    return result._replace(enhanced_code=found[1]) if found else result


def _disconnected() -> tuple[type[Exception], ...]:
    import aiosmtplib

    return (aiosmtplib.SMTPServerDisconnected, ConnectionError)


def _judge_mail_error(claim: Claim, error: Exception, stage: str) -> SendResult:
    """What an SMTP error means: 5xx is final, but for a full mailbox, which is given its time, and a refused login,
    which a person mends; the rest comes again."""
    import ssl

    import aiosmtplib

    if isinstance(error, aiosmtplib.SMTPResponseException):
        said = f"{error.code} {short_reply(str(error.message).encode())}"
        if stage == "login":
            cause = "login" if error.code >= 500 else None
            return result_of(claim, "temporary", f"the login was refused: {said}", error.code, cause=cause)
        is_final = error.code >= 500 and not str(error.message).startswith("5.2.2") and stage != "connecting"
        return result_of(claim, "permanent" if is_final else "temporary", said, error.code)
    if isinstance(error, aiosmtplib.SMTPNotSupported):
        return result_of(claim, "temporary", f"the server does not offer it: {one_line(str(error))}")
    if isinstance(error, (aiosmtplib.SMTPServerDisconnected, aiosmtplib.SMTPReadTimeoutError)):
        twice = "; the mail may arrive twice" if stage == "data" else ""
        return result_of(claim, "temporary", f"the connection broke: {one_line(str(error))}{twice}")
    if isinstance(error, (aiosmtplib.SMTPException, ssl.SSLError, OSError)):
        return result_of(claim, "temporary", one_line(str(error)) or type(error).__name__)
    raise error


_FINAL_EXITS = {64, 65, 67, 68, 77, 78}  # of a sendmail; all others may mend themselves (facts on mail, 3c)


async def send_by_command(claim: Claim) -> SendResult:
    """A mail given to a program such as sendmail, which has its own queue. Recipients stand in its headers."""
    settings, body = claim.sender, _body_of(claim).replace(b"\r\n", b"\n")
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command, stdin=pipe, stdout=nothing, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        return result_of(claim, "temporary", f"cannot run {settings.command[0]}: {os.strerror(error.errno or 0)}")
    try:
        _, said = await process.communicate(body)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    code = process.returncode or 0
    if code == 0:
        return result_of(claim, "sent")
    ended = f"exit {code}" if code > 0 else f"ended by signal {-code}"
    words = ": ".join(part for part in (ended, short_reply(said)) if part)
    return result_of(claim, "permanent" if code in _FINAL_EXITS else "temporary", words, code)


def send_to_log(claim: Claim) -> SendResult:
    """Print a message: a line for what it is, and the body behind bars, so that no text can forge a line of the log."""
    assert claim.message is not None
    message = claim.message
    head = f"message {claim.public_id} by {claim.sender_name} to {message.to or '-'}: {message.subject}"
    lines = [one_line(head), *(f"  | {one_line(line)}" for line in message.body.splitlines())]
    log.info("%s", "\n".join(lines))
    return result_of(claim, "sent")


# ----------------------------------------------------------------------------------------------------------------------
# 12 Outcomes
# ----------------------------------------------------------------------------------------------------------------------
# Writes down what came of a try and decides what follows: done, another try, or giving up. Owns the moves of jobs out
# of active and the end of attempts.

_FINISH_ATTEMPTS = (
    "UPDATE attempts SET finished_at = ?, outcome = ?, status_code = ?, enhanced_code = ?, reason = ?, took_ms = ?"
    " WHERE id IN (SELECT value FROM json_each(?)) AND outcome IS NULL"
)


def next_try_at(sender: SenderSettings, tries: int, now: int, result: SendResult) -> int | None:
    """When a message is tried again after `tries` of them; None when the plan is at its end.

    The plan's wait with up to a fifth more, so that what failed together does not come back together, computed from
    the job so that it is the same each time; never before the Retry-After, which is honoured up to a day.
    """
    if tries > len(sender.retry):
        return None
    wait_ms = sender.retry[tries - 1]
    spread = int.from_bytes(hashlib.sha256(f"{result.job_id} {tries}".encode()).digest()[:4]) / (1 << 32)
    due_at = now + wait_ms + int(wait_ms * sender.jitter * spread)
    if result.retry_after_ms is not None:
        due_at = max(due_at, now + result.retry_after_ms)
    if result.retry_at is not None:
        due_at = max(due_at, min(result.retry_at, now + DAY))
    return due_at


def record_outcomes(config: Config, sent: Sequence[Sent], now: int) -> None:
    """Write down what came of many tries. Those that succeeded, which is most, share their statements; each other one
    is kept or undone as a whole. Inside the caller's transaction."""
    alone = [one for one in sent if one.result.outcome != "sent"]
    try:
        with savepoint():
            _record_successes(config, [one for one in sent if one.result.outcome == "sent"], now)
    except Exception as error:
        if not is_poison(error):
            raise
        alone = list(sent)  # one of them is odd: each for itself
    for one in alone:
        _record_alone(config, one, now)


def _record_alone(config: Config, one: Sent, now: int) -> None:
    try:
        with savepoint():
            if one.result.outcome == "sent":
                _record_successes(config, [one], now)
            else:
                _record_failure(config, one.claim, one.result, now)
    except Exception as error:
        if not is_poison(error):
            raise
        log.exception("what came of job %s cannot be recorded", one.claim.job_id)


def _finish_attempts(sent: Iterable[Sent], now: int) -> None:
    """The end of attempts: one statement for all that ended alike, which of lines of the log is all."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for claim, result in sent:
        facts = (result.outcome, result.status_code, result.enhanced_code, result.reason, result.took_ms)
        alike.setdefault(facts, []).append(claim.attempt_id)
    for facts, attempt_ids in alike.items():
        execute(_FINISH_ATTEMPTS, now, *facts, json.dumps(attempt_ids))


def _stops_on_failure(config: Config, workflow: str | None, step: str) -> bool:
    settings = config.workflows.get(workflow) if workflow else None
    return bool(getattr(settings.step(step) if settings else None, "stop_on_failure", False))


def _record_successes(config: Config, sent: Sequence[Sent], now: int) -> None:
    """active -> completed. The run goes on after the first try, whatever came of it; where the step says
    stop_on_failure, after the last."""
    _finish_attempts(sent, now)
    _note_successes({claim.sender_name for claim, _ in sent})
    groups: dict[tuple[str | None, str, int], dict[int, int]] = {}
    for claim, _ in sent:
        step = claim.step if claim.workflow else ""  # a repeatable's run has no step to go on from
        groups.setdefault((claim.workflow, step, claim.tries), {})[claim.job_id] = claim.run_id
    for (workflow, step, tries), jobs in groups.items():
        moved = move_all(Job, jobs, "active", "completed", tries=tries + 1, finished_at=now, message=None)
        for job_id in jobs.keys() - set(moved):
            _warn_of_late_result(job_id)
        run_ids = [jobs[job_id] for job_id in moved]
        if tries == 0 or _stops_on_failure(config, workflow, step):
            go_on(config, run_ids, workflow, step, now)
        else:
            settle_runs(run_ids, now)


def _note_successes(names: set[str]) -> None:
    """A sender that works again: its failures no longer count. A disabled one stays so, though a try got through."""
    failing = [name for name in names if sender_states().get(name) == "ok"]
    if failing:
        wanted = "name IN (SELECT value FROM json_each(?)) AND state = 'ok'"
        execute(f"UPDATE senders SET failures = 0, failing_at = NULL WHERE {wanted}", json.dumps(failing))
        database.sender_states = None


_NOTE_FAILURE = """
    INSERT INTO senders (name, failures, failing_at, failed_at, reason) VALUES (?, 1, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET
        failing_at = CASE WHEN failures = 0 OR failed_at < ? THEN excluded.failing_at ELSE failing_at END,
        failures = CASE WHEN failures = 0 OR failed_at < ? THEN 1 ELSE failures + 1 END,
        failed_at = excluded.failed_at, reason = CASE state WHEN 'ok' THEN excluded.reason ELSE reason END
    RETURNING state, failures, failing_at
"""


def _note_failure(config: Config, claim: Claim, result: SendResult, now: int) -> None:
    """Count a failure of a sender. One that is gone, or whose login is refused, is disabled at once, and a webhook that
    fails for days is too; a day without a try begins the count anew. Where each message has an address of its own, and
    where the message alone is to blame, nothing is counted."""
    settings = config.senders.get(claim.sender_name)
    if settings is None or (result.outcome == "permanent" and result.status_code is None):
        return
    if result.cause is None and (not isinstance(settings, WebhookSettings) or settings.url_from is not None):
        return
    values = (claim.sender_name, now, now, result.reason, now - DAY, now - DAY)
    state, failures, failing_at = row(_NOTE_FAILURE, *values)
    database.sender_states = None
    if state == "disabled":
        return
    if result.cause is not None:
        disable_sender(config, claim.sender_name, result.cause, result.reason or "", now)
    elif isinstance(settings, WebhookSettings) and failures >= FAILURES and now - failing_at >= settings.disable_after:
        words = f"it has failed since {utc_text(failing_at)} UTC, {failures} times; the last answer: {result.reason}"
        disable_sender(config, claim.sender_name, "failing", words, now)


def disable_sender(config: Config, name: str, cause: str, reason: str, now: int) -> bool:
    """ok -> disabled: its jobs stay waiting until it is enabled. Their runs go on, as after a first try. False when it
    was disabled before."""
    execute("INSERT INTO senders (name) VALUES (?) ON CONFLICT (name) DO NOTHING", name)
    [row_id] = row("SELECT id FROM senders WHERE name = ?", name)
    done = move(SenderRow, row_id, "ok", "disabled", disabled_at=now, cause=cause, reason=reason)
    database.sender_states = None
    if done:
        level = logging.INFO if cause == "person" else logging.ERROR
        log.log(level, "sender %s is disabled, and its messages wait: %s", name, one_line(reason))
        held: dict[tuple[str, str], list[int]] = {}
        for job_id, kind, run_id, workflow, step in rows(
            "SELECT j.id, j.type, r.id, r.workflow, j.step FROM jobs j JOIN runs r ON r.id = j.run_id"
            " WHERE j.sender = ? AND j.state = 'waiting' AND j.tries = 0 AND r.workflow IS NOT NULL AND r.step = j.step"
            " AND r.next_at IS NULL AND r.state = 'active'", name
        ):  # fmt: skip
            held.setdefault((workflow, step), []).append(run_id)
            if kind == "in_app":
                feed_at_once(config, job_id, now)
        for (workflow, step), run_ids in held.items():
            if not _stops_on_failure(config, workflow, step):
                go_on(config, run_ids, workflow, step, now)
    return done


def enable_sender(name: str) -> bool:
    """disabled -> ok: what waits for it is sent. False when it was not disabled."""
    found = row("SELECT id FROM senders WHERE name = ?", name)
    facts: dict[str, Any] = dict.fromkeys(("disabled_at", "cause", "reason", "failing_at"))
    done = bool(found) and move(SenderRow, found[0], "disabled", "ok", failures=0, **facts)
    database.sender_states = None
    if done:
        log.info("sender %s is enabled", name)
    return done


def enable_mended(changed: Iterable[str] | None = None) -> None:
    """Enable senders whose settings changed; at start, which nobody can compare, those whose login was refused. What a
    person disabled stays so."""
    for name, cause in rows("SELECT name, cause FROM senders WHERE state = 'disabled' AND cause <> 'person'"):
        if cause == "login" if changed is None else name in changed:
            enable_sender(name)


def _warn_of_late_result(job_id: int) -> None:
    log.warning("the result of job %s comes too late: it is no longer active", job_id)


def _record_failure(config: Config, claim: Claim, result: SendResult, now: int) -> None:
    """active -> failed, or delayed for another try; the run goes on or not, as after a success."""
    _finish_attempts([Sent(claim, result)], now)
    state = _move_by_failure(config, claim, result, now)
    _note_failure(config, claim, result, now)
    if state is None:
        _warn_of_late_result(claim.job_id)
    elif _stops_on_failure(config, claim.workflow, claim.step):
        if state == "failed":
            reason = f"step {claim.step} failed"
            move(Run, claim.run_id, "active", "failed", next_at=None, finished_at=now, reason=reason)
    elif claim.tries == 0:
        go_on(config, [claim.run_id], claim.workflow, claim.step, now)
    elif state == "failed":
        settle_runs([claim.run_id], now)


def _retry_settings(claim: Claim, sender: SenderSettings) -> SenderSettings:
    """What the plan of tries goes by: the sender's settings, with the attempts and waits of a repeatable's own."""
    if claim.workflow is not None:
        return sender
    attempts, backoff = row(
        "SELECT s.attempts, s.backoff FROM runs r JOIN repeatables s ON s.id = r.repeatable_id WHERE r.id = ?",
        claim.run_id,
    )
    count = attempts - 1 if attempts is not None else len(sender.retry)
    if backoff is not None:
        own = Backoff.model_construct(**json.loads(backoff))
        return sender.model_copy(update={"retry": own.waits(count), "jitter": own.jitter})
    waits = [*sender.retry, *sender.retry[-1:] * count][:count] if sender.retry else [SECOND] * count
    return sender.model_copy(update={"retry": waits})


def _move_by_failure(config: Config, claim: Claim, result: SendResult, now: int) -> str | None:
    """The move of the job alone; its new state, or None when it was not active any more."""
    job_id, tries = claim.job_id, claim.tries + 1
    if row("SELECT 1 FROM runs WHERE id = ? AND state = 'cancelled'", claim.run_id):  # while the try was under way
        return "cancelled" if _cancel_tried(job_id, now) else None
    if result.cause is not None:  # no fault of the message: it waits for the sender
        return "waiting" if move(Job, job_id, "active", "waiting", due_at=now) else None
    if result.outcome == "temporary":
        sender = config.senders.get(claim.sender_name)
        if result.at_once and claim.number == 1 and sender is not None:  # beside the plan of tries, which is for later
            log.info("job %s is tried again at once: %s", job_id, one_line(result.reason or ""))
            return "delayed" if move(Job, job_id, "active", "delayed", due_at=now) else None
        due_at = next_try_at(_retry_settings(claim, sender), tries, now, result) if sender else None
        if due_at is not None:
            if not move(Job, job_id, "active", "delayed", tries=tries, due_at=due_at):
                return None
            log.warning("job %s is tried again at %s: %s", job_id, iso_text(due_at), one_line(result.reason or ""))
            return "delayed"
    reason = result.reason or "refused"
    if result.outcome == "temporary":
        reason = f"given up after {tries} tries: {reason}"
    if not move(Job, job_id, "active", "failed", tries=tries, finished_at=now, reason=reason):
        return None
    log.error("job %s failed: %s", job_id, one_line(reason))
    return "failed"


def _cancel_tried(job_id: int, now: int) -> bool:
    """active -> cancelled, for a job whose run was cancelled during a try that did not succeed."""
    return move(Job, job_id, "active", "cancelled", finished_at=now, reason="cancelled", message=None)


def recover_interrupted(config: Config, now: int) -> int:
    """At start: jobs still active belong to a process that is gone (the lock says there is no other).

    active -> waiting, at once and without using up the plan; or cancelled, where its run is. What was interrupted twice
    in a row is tried again one after the other, so that of many under way only the one that ends the process is
    interrupted a third time; that one goes active -> failed, for then the message is held to be the cause.
    """
    found = rows(
        "SELECT j.id, j.run_id, j.step, j.tries, r.workflow, r.state FROM jobs j JOIN runs r ON r.id = j.run_id"
        " WHERE j.state = 'active'"
    )
    unpark_jobs()
    suspects = 0
    for job_id, run_id, step, tries, workflow, run_state in found:
        times = _interrupted_in_a_row(job_id, now)
        if run_state == "cancelled":
            _cancel_tried(job_id, now)
        elif times >= MAX_INTERRUPTIONS:
            reason = f"the process ended {times} times during the try"
            move(Job, job_id, "active", "failed", finished_at=now, reason=reason)
            if tries == 0:
                go_on(config, [run_id], workflow, step, now)
            settle_runs([run_id], now)
        elif times == MAX_INTERRUPTIONS - 1 and suspects:
            move(Job, job_id, "active", "delayed", due_at=now + suspects * 2 * SECOND)
            suspects += 1
        else:
            move(Job, job_id, "active", "waiting", due_at=now)
            suspects += times == MAX_INTERRUPTIONS - 1
    if found:
        log.warning("%d tries were interrupted by the end of the former process", len(found))
    return len(found)


def _interrupted_in_a_row(job_id: int, now: int) -> int:
    """End the attempt of a process that is gone; how many in a row have now ended so."""
    execute(
        "UPDATE attempts SET finished_at = ?, outcome = 'interrupted', reason = 'the process ended during the try'"
        " WHERE job_id = ? AND outcome IS NULL",
        now, job_id,
    )  # fmt: skip
    outcomes = rows(
        "SELECT outcome FROM attempts WHERE job_id = ? ORDER BY number DESC LIMIT ?", job_id, MAX_INTERRUPTIONS
    )
    return next((count for count, (outcome,) in enumerate(outcomes) if outcome != "interrupted"), len(outcomes))


def retry_job(job_id: int, now: int) -> bool:
    """failed -> waiting, by hand: the plan begins anew, the message and its id stay. False when it had not failed."""
    found = row("SELECT run_id FROM jobs WHERE id = ?", job_id)
    if not found or not move(Job, job_id, "failed", "waiting", due_at=now, tries=0, finished_at=None, reason=None):
        return False
    state = row("SELECT state FROM runs WHERE id = ?", found[0])[0]
    if state == "failed":
        move(Run, found[0], "failed", "active", finished_at=None, reason=None)
    return True


# ======================================================================================================================
# III. THE ENGINE
# ======================================================================================================================

# ----------------------------------------------------------------------------------------------------------------------
# 13 Tick
# ----------------------------------------------------------------------------------------------------------------------
# The stages in the order of an event's life, once, with one `now`. Runs inside the caller's transaction, so that what
# arrived and what follows from it is one commit.

MAX_ROUNDS = 4  # an event goes through place, close, begin and claim in one; a chain of instant steps takes more


class Heads(NamedTuple):
    """What is first in each line: when something is due, in ms, and whether anything waits."""

    windows_at: int | None
    jobs_at: int | None
    runs_at: int | None
    received: int
    waiting: int

    @property
    def wake_at(self) -> int | None:
        """The next instant at which something is due; None when nothing is planned."""
        return min((at for at in self[:3] if at is not None), default=None)


def read_heads() -> Heads:
    """One look at the heads of five indexes, whatever the tables hold."""
    found = row(
        "SELECT (SELECT min(due_at) FROM digests WHERE state IN ('open', 'held')),"
        " (SELECT min(due_at) FROM jobs WHERE state = 'delayed'),"
        " (SELECT min(next_at) FROM runs WHERE next_at IS NOT NULL),"
        " EXISTS (SELECT 1 FROM events WHERE state = 'received'), EXISTS (SELECT 1 FROM jobs WHERE state = 'waiting')"
    )
    return Heads(*found)


def next_wake_at() -> int | None:
    """The next instant at which something is due, in ms; None when nothing is planned."""
    return read_heads().wake_at


def _run_stages(config: Config, now: int, heads: Heads) -> tuple[int, ...]:
    """The stages that have something to do, in order; how many rows each moved."""

    def is_due(at: int | None) -> bool:
        return at is not None and at <= now

    placed = place_events(config, now) if heads.received else 0
    closed = close_windows(config, now) if is_due(heads.windows_at) else 0
    begun = begin_steps(config, now) if is_due(heads.runs_at) or placed or closed else 0
    promoted = promote_jobs(config, now) if is_due(heads.jobs_at) else 0
    finished = finish_plain_jobs(config, now) if heads.waiting or begun or promoted else 0
    return placed, closed, begun, promoted, finished


def tick(config: Config, now: int, room: Room) -> TickReport:
    """Move everything that is due by one bounded batch per stage, and claim what may be sent."""
    total, more = 0, True
    for _ in range(MAX_ROUNDS):
        heads = read_heads()
        counts = _run_stages(config, now, heads)
        total += sum(counts)
        more = max(counts) >= BATCH
        if more or not any(counts):
            break
    else:
        more = True
    room.wake_at = None
    claims = claim_jobs(config, now, room) if heads.waiting or total else []
    wake_at = next_wake_at() if total or claims else heads.wake_at
    if room.wake_at is not None:
        wake_at = min(room.wake_at, wake_at or room.wake_at)
    return TickReport(total + len(claims), claims, more, wake_at)


def take_triggers(config: Config, triggers: Iterable[Trigger], now: int) -> list[TriggerAnswer]:
    """Record the events of triggers and place them, in their order: Ingest and Digests in one go. The answers.

    Inside the caller's transaction. Where the windows are open already, that is one statement for all triggers in a
    row. An event that cannot be placed is recorded all the same, and fails alone.
    """
    answers: list[TriggerAnswer] = []
    placed: list[tuple[Trigger, list[int]]] = []
    for trigger in triggers:
        window_ids = joinable_windows(config, trigger, now)
        if window_ids is not None:
            placed.append((trigger, window_ids))
            continue
        answers += record_placed(placed, now)
        placed = []
        answers.append(_take_trigger(config, trigger, now))
    return answers + record_placed(placed, now)


def _take_trigger(config: Config, trigger: Trigger, now: int) -> TriggerAnswer:
    [first, *others] = trigger.recipients
    with savepoint() if others or first.fields else contextlib.nullcontext():  # one statement is a whole in itself
        answer, events = record_trigger(trigger, now)
    for event in events:
        place_or_fail(config, event, now)
    return answer


def adopt_config(config: Config, now: int) -> None:
    """What follows in the database from a config that was just read. Inside the caller's transaction."""
    sync_repeatables(config, now)
    rebind_jobs(config, now)


def _digest_tree(run_id: int) -> tuple[list[int], list[int], list[int]]:
    """The runs, windows and events that belong to a run, through every window that was joined on the way to it."""
    runs, digests, events, pending = [], [], [], [run_id]
    while pending:
        one = pending.pop()
        runs.append(one)
        event_id, digest_id = row("SELECT event_id, digest_id FROM runs WHERE id = ?", one)
        if event_id is not None:
            events.append(event_id)
        if digest_id is not None:
            digests.append(digest_id)
            events += [found[0] for found in rows("SELECT id FROM events WHERE digest_id = ?", digest_id)]
            pending += [found[0] for found in rows("SELECT run_id FROM digest_runs WHERE digest_id = ?", digest_id)]
    return runs, digests, events


def _delete(table: str, column: str, ids: Sequence[int]) -> None:
    execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", json.dumps(list(ids)))


def purge(before: int, limit: int = 50) -> int:
    """Delete runs that ended before an instant, each whole, with its events, windows, jobs and attempts; how many.

    What failed and needs a person stays, and so does whatever else is unfinished. Inside the caller's transaction.
    """
    own = "SELECT 1 FROM repeatables s WHERE s.id = r.repeatable_id AND s.retention IS NOT NULL"
    old = rows(
        "SELECT id FROM runs r WHERE state IN ('completed', 'cancelled') AND finished_at < ? AND NOT EXISTS"
        f" (SELECT 1 FROM jobs j WHERE j.run_id = r.id"
        f" AND (j.state = 'failed' OR j.state IN {UNFINISHED} OR j.finished_at >= ?))"
        f" AND (repeatable_id IS NULL OR NOT EXISTS ({own})) ORDER BY finished_at LIMIT ?", before, before, limit
    )  # fmt: skip
    for (run_id,) in old:
        _delete_tree(*_digest_tree(run_id))
    return len(old) + _purge_discarded(before, limit)


def _delete_tree(runs: Sequence[int], digests: Sequence[int], events: Sequence[int]) -> None:
    wanted = "SELECT id FROM jobs WHERE run_id IN (SELECT value FROM json_each(?))"
    jobs = [found[0] for found in rows(wanted, json.dumps(list(runs)))]
    _delete("attempts", "job_id", jobs)
    _delete("inbox_messages", "job_id", jobs)
    _delete("jobs", "id", jobs)
    _delete("digest_runs", "run_id", runs)
    _delete("runs", "id", runs)
    _delete("events", "id", events)
    _delete("digests", "id", digests)


_ENDED_RUNS = (
    "SELECT r.id FROM runs r WHERE r.repeatable_id = ? AND r.state IN ('completed', 'cancelled')"
    " AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.run_id = r.id AND j.state = 'failed')"
)


def purge_by_spec(now: int, limit: int = 500) -> int:
    """Delete ended runs of repeatables that say how many are kept, or how long; how many. What failed stays."""
    gone = 0
    for spec_id, text in rows("SELECT id, retention FROM repeatables WHERE retention IS NOT NULL"):
        retention = json.loads(text)
        found: set[int] = set()
        if (age_ms := retention.get("age")) is not None:
            sql = f"{_ENDED_RUNS} AND r.finished_at < ? ORDER BY r.seq LIMIT ?"
            found.update(run_id for (run_id,) in rows(sql, spec_id, now - age_ms, limit))
        if (count := retention.get("count")) is not None:
            sql = f"{_ENDED_RUNS} ORDER BY r.seq DESC LIMIT ? OFFSET ?"
            found.update(run_id for (run_id,) in rows(sql, spec_id, limit, count))
        if found:
            _delete_tree(sorted(found), [], [])
        gone += len(found)
    return gone


def purge_arrivals(before: int, limit: int = 1000) -> int:
    """Delete what came to steps that start when repeated before an instant that no look-back reaches; how many."""
    return execute(
        "DELETE FROM arrivals WHERE id IN (SELECT id FROM arrivals WHERE arrived_at < ? LIMIT ?)", before, limit
    )


def purge_answers(before: int, limit: int = 1000) -> int:
    """Delete kept answers of before an instant; how many."""
    wanted = "SELECT key FROM answers WHERE created_at < ? LIMIT ?"
    return execute(f"DELETE FROM answers WHERE key IN ({wanted})", before, limit)


def _purge_discarded(before: int, limit: int) -> int:
    """Windows that were emptied, and events that were cancelled, go the same way."""
    digests = [
        found[0]
        for found in rows("SELECT id FROM digests WHERE state = 'discarded' AND closed_at < ? LIMIT ?", before, limit)
    ]
    if digests:
        execute(
            "DELETE FROM events WHERE state = 'cancelled' AND digest_id IN (SELECT value FROM json_each(?))",
            json.dumps(digests),
        )
        _delete("digests", "id", digests)
    return len(digests)


# ----------------------------------------------------------------------------------------------------------------------
# 14 Daemon
# ----------------------------------------------------------------------------------------------------------------------
# One asyncio loop in one thread. All that happens arrives on one inbox; a turn drains it in one transaction, ticks,
# answers after the commit, launches tries, and sleeps until the next due time or the next message. Never an await
# inside a transaction: peewee's transaction belongs to the thread, and another task's write would join it.

LOOK_S = 1.0  # how often rows that other programs inserted are looked for
MIN_SLEEP_S = 0.005  # ticks that due times alone cause are this far apart
MAX_MESSAGES = 500  # taken from the inbox in one turn
TEND_CHANGES = 1_000  # rows changed, and
TEND_S = 0.3  # past, before the write-ahead log is moved into the database
ANSWER_S = 5.0  # a caller waits so long for a commit; then 503, and the request does not count


class Service(Protocol):
    """Something that runs beside the loop and speaks to it through the inbox, such as the API."""

    async def start(self, daemon: Daemon) -> None: ...

    async def stop(self) -> None: ...


def notify_systemd(text: str) -> None:
    """Tell systemd a state, such as READY=1; nothing where there is no systemd. A socket that is gone is no trouble."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] in ("/", "@"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line,
        ):
            line.sendto(text.encode(), "\0" + path[1:] if path[0] == "@" else path)


class ConfigWatch:
    """A thread that says "look again" when the config, a secret file, or a folder on the way to one changes.

    It watches folders, not files: an editor that renames would end the watch of a file. A yield is only a hint; who
    gets it compares hashes.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.files: tuple[pathlib.Path, ...] = ()
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self._run, name="config-watch", daemon=True)

    def follow(self, files: Iterable[pathlib.Path]) -> None:
        """Watch these files from now on."""
        self.files = tuple(files)
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self) -> None:
        self.stop_event.set()

    def _places(self) -> tuple[set[pathlib.Path], set[str]]:
        """The folders to watch, and the names in them that matter: the files, and every link on the way to them, for a
        link that is swapped says nothing about the folders behind it."""
        folders: set[pathlib.Path] = set()
        names: set[str] = set()
        for path in self.files:
            step = path.absolute()
            for _ in range(8):
                for part in (step, *step.parents):
                    if part == step or part.is_symlink():
                        folders.add(part.parent)
                        names.add(part.name)
                if not step.is_symlink():
                    break
                step = step.parent / os.readlink(step)
        return {folder for folder in folders if folder.is_dir()}, names

    def _run(self) -> None:
        from watchfiles import watch

        while not self.stop_event.is_set():
            try:
                folders, names = self._places()
                for _ in watch(
                    *folders, watch_filter=lambda _, path, names=names: pathlib.Path(path).name in names,  # type: ignore[misc]
                    recursive=False, step=500, debounce=1000, rust_timeout=5000, yield_on_timeout=True,
                    raise_interrupt=False, stop_event=self.stop_event,
                ):  # fmt: skip
                    self.look()
                    if self._places() != (folders, names):
                        break
            except Exception as error:  # a folder went away: look for it again
                log.debug("the config's folder cannot be watched: %s", error)
                self.look()
                self.stop_event.wait(1)


class Daemon:
    """The loop, and what it holds in memory: the config, the inbox, the tries under way."""

    def __init__(self, config: Config, clock: Clock, services: Sequence[Service] = ()) -> None:
        self.config = config
        self.clock = clock
        self.services = services
        self.inbox: collections.deque[Any] = collections.deque()
        self.senders = Senders()
        self.room = Room(config.daemon.concurrency, config.senders)
        self.flights: set[asyncio.Task[None]] = set()
        self.loaded = files_digest(config.files)
        self.refused = ""
        self.read_at = clock.now()
        self.read_next = ""  # why to read the config again once it has been read
        self.stopping = False
        self.more = True  # a first tick at start: much may be due
        self.last_now = last_known_at()
        self.room.recall(recent_tries(config, clock.now()))
        self.wake_at: int | None = None
        self.trouble_since: float | None = None
        self.trouble_logged = float("-inf")
        self.pinged = float("-inf")
        self.chores = self._chores()
        self.reading: asyncio.Task[None] | None = None
        self.tending: asyncio.Task[None] | None = None
        self.tended = float("-inf")
        self.tended_changes = 0
        self.watch: ConfigWatch | None = None

    # -- messages in ---------------------------------------------------------------------------------------------------

    def put(self, message: Any) -> None:
        """Put a message on the inbox and wake the loop. From the loop's thread."""
        self.inbox.append(message)
        self.wakeup.set()

    async def ask(self, make: Callable[[asyncio.Future[Any]], Any]) -> Any:
        """Put a message that wants an answer, and wait for it; it comes after the commit."""
        reply = asyncio.get_running_loop().create_future()
        self.put(make(reply))
        return await reply

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until a signal asks to stop; then drain and return."""
        self.loop = asyncio.get_running_loop()
        # Names are looked up in threads: some that hang must not keep others, nor the composing of mails, waiting.
        self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(64, "digestd"))
        self.wakeup = asyncio.Event()
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            self.loop.add_signal_handler(getattr(signal, name), self._on_signal, name)
        for service in self.services:
            await service.start(self)
        self.watch = ConfigWatch(functools.partial(self.loop.call_soon_threadsafe, self._look_at_config))
        self.watch.follow(self.config.files)
        notify_systemd(f"READY=1\nSTATUS={self._status()}")
        log.info("digestd %s serves %s", __version__, self.config.source)
        gc.collect()
        gc.freeze()  # what is loaded by now stays: the collector need not walk it again
        gc.set_threshold(20_000, 20, 20)
        give_memory_back()
        try:
            while not self.stopping:
                await self._pass()
            await self._drain()
        finally:
            self.watch.stop()
            await self.senders.close()

    async def _pass(self) -> None:
        """One turn of the loop, and the sleep before it."""
        await self._sleep()
        if self._has_work():
            await self._turn()
        self.chores.run_pending()
        self._tend_wal()
        self._ping_watchdog()

    async def _sleep(self) -> None:
        """Until the next message or due time. With a message there, only until those that come with it are there too:
        what is on its way through the loop shares the commit."""
        if not self.inbox and not self.more:
            handle = self.loop.call_later(self._sleep_s(), self.wakeup.set)
            await self.wakeup.wait()
            handle.cancel()
        seen = -1
        while len(self.inbox) > seen and len(self.inbox) < MAX_MESSAGES:
            seen = len(self.inbox)
            await asyncio.sleep(0)
        self.wakeup.clear()

    def _sleep_s(self) -> float:
        if self.wake_at is None:
            return LOOK_S
        return min(LOOK_S, max(MIN_SLEEP_S, (self.wake_at - self.clock.now()) / SECOND))

    def _has_work(self) -> bool:
        """Whether a turn has anything to do: a message, something due, or another process's commit."""
        now = self.clock.now()
        if (
            self.inbox
            or self.more
            or (self.wake_at is not None and self.wake_at <= now)
            or now < self.last_now - SECOND
        ):
            return True
        self.last_now = now
        try:
            return bool(row("PRAGMA data_version")[0] != database.seen_version)
        except peewee.DatabaseError:
            return True

    async def _turn(self) -> None:
        """Drain the inbox and tick in one transaction, then answer and launch."""
        messages = self._take()
        kept, now = self.room.kept(), self.clock.now()
        try:
            answers, report = self._commit(messages, now)
        except peewee.DatabaseError as error:
            self.inbox.extendleft(reversed(messages))
            self.room.restore(kept)
            await self._endure(error)
            return
        self._relieved()
        self.last_now = now
        self.more, self.wake_at = report.more, report.wake_at
        for reply, answer in answers:
            if not reply.done():
                reply.set_result(answer)
        for message in messages:
            if isinstance(message, Sent):
                self.room.end(message.claim.sender_name, message.claim.lane)
                self.more = True  # its place is free for the next one
        for claim in report.claims:
            self._launch(claim)

    def _take(self) -> list[Any]:
        """Messages for one turn, without those whose caller has gone: a 503 was answered, so they must not count."""
        taken: list[Any] = []
        while self.inbox and len(taken) < MAX_MESSAGES:
            message = self.inbox.popleft()
            reply = getattr(message, "reply", None)
            if reply is None or not reply.done():
                taken.append(message)
        return taken

    def _commit(self, messages: Sequence[Any], now: int) -> tuple[list[tuple[Reply, Any]], TickReport]:
        answers: list[tuple[Reply, Any]] = []
        with transaction():
            if now < self.last_now - SECOND:
                self._go_back(now)
            if sent := [message for message in messages if isinstance(message, Sent)]:
                record_outcomes(self.config, sent, now)
            calls = [message for message in messages if not isinstance(message, Sent)]
            for kind, group in itertools.groupby(calls, type):
                alike = list(group)
                outcomes = self._take_calls(alike, now) if kind is TriggerCall else self._handle_each(alike, now)
                _keep_answers(zip(alike, outcomes, strict=True), now)
                answers += [(message.reply, outcome) for message, outcome in zip(alike, outcomes, strict=True)]
            report = TickReport(0, [], False, None) if self.stopping else tick(self.config, now, self.room)
        return answers, report

    def _go_back(self, now: int) -> None:
        """The wall clock was set back: intervals are planned anew; windows, retries and cron keep their instants."""
        span, count = duration_text(self.last_now - now), replan_intervals(now)
        log.warning("the clock was set back by %s; %d intervals are planned anew", span, count)

    def _take_calls(self, calls: Sequence[TriggerCall], now: int) -> list[Any]:
        """Triggers that came one after the other, together; where the database refuses one, each for itself. A call is
        kept or undone as a whole: its answers, or the error."""
        wanted = [trigger for call in calls for trigger in call.triggers if isinstance(trigger, Trigger)]
        try:
            with savepoint():
                answers = iter(take_triggers(self.config, wanted, now))
        except Exception as error:
            if not is_poison(error):
                raise
            if len(calls) > 1:
                return [outcome for call in calls for outcome in self._take_calls([call], now)]
            log.exception("a call cannot be handled: TriggerCall")
            return [error]
        return [[next(answers) if isinstance(one, Trigger) else one for one in call.triggers] for call in calls]

    def _handle_each(self, messages: Sequence[Any], now: int) -> list[Any]:
        """Other messages, each kept or undone as a whole; one that fails answers only itself."""
        outcomes: list[Any] = []
        for message in messages:
            try:
                with savepoint():
                    if isinstance(message, CancelCall):
                        outcomes.append(cancel_transaction(message.transaction_id, now))
                    elif isinstance(message, ActCall):
                        outcomes.append(message.act(now))
                    else:
                        keep_composed(message.claim, now)
                        outcomes.append(None)
            except Exception as error:
                if not is_poison(error):
                    raise
                if not isinstance(error, DigestdError):
                    log.exception("a call cannot be handled: %s", type(message).__name__)
                outcomes.append(error)
        return outcomes

    async def _endure(self, error: Exception) -> None:
        """The database cannot be written: keep everything, say so once a minute, try again soon."""
        moment = self.clock.monotonic()
        if self.trouble_since is None:
            self.trouble_since = moment
        if moment - self.trouble_logged >= 60:
            self.trouble_logged = moment
            log.error("the database cannot be written, and everything waits: %s", one_line(str(error)))
            notify_systemd(f"STATUS=the database cannot be written: {one_line(str(error))}")
        for message in self.inbox:
            if moment - getattr(message, "since", moment) > ANSWER_S and not message.reply.done():
                message.reply.set_exception(TimeoutError())
        self.more = True
        await asyncio.sleep(min(1.0, max(0.05, (moment - self.trouble_since) / 4)))

    def _relieved(self) -> None:
        if self.trouble_since is not None:
            log.warning("the database can be written again, after %.1f s", self.clock.monotonic() - self.trouble_since)
            self.trouble_since, self.trouble_logged = None, float("-inf")
            notify_systemd(f"STATUS={self._status()}")

    # -- tries under way -----------------------------------------------------------------------------------------------

    def _launch(self, claim: Claim) -> None:
        if claim.result is None and claim.message is not None and isinstance(claim.sender, LogSettings):
            self.put(Sent(claim, send_to_log(claim)))  # nothing to wait for
            return
        task = self.loop.create_task(self._make_try(claim))
        self.flights.add(task)
        task.add_done_callback(self.flights.discard)

    async def _make_try(self, claim: Claim) -> None:
        """Compose what was too long for the loop, keep it, send it, and put the result on the inbox."""
        began = self.clock.monotonic()
        if claim.message is None and claim.result is None:
            await asyncio.to_thread(finish_claim, claim)
            if claim.message is not None:
                await self.ask(lambda reply: Composed(claim, reply))
        result = claim.result or await self.senders.send(claim)
        took_ms = int((self.clock.monotonic() - began) * SECOND)
        self.put(Sent(claim, result._replace(took_ms=took_ms)))

    # -- stop ----------------------------------------------------------------------------------------------------------

    def _on_signal(self, name: str) -> None:
        if name == "SIGHUP":
            self._reload("SIGHUP")
        elif self.stopping:
            log.warning("%s again: ending at once; what is under way is tried again at the next start", name)
            os._exit(1)
        else:
            log.info("%s: ending; %d tries are under way", name, len(self.flights))
            notify_systemd("STOPPING=1\nSTATUS=ending")
            self.stopping = True
            self.wakeup.set()

    async def _drain(self) -> None:
        """Take nothing new, let what is under way end, record it. What is not done in time is repeated later."""
        closing = asyncio.gather(*(service.stop() for service in self.services))
        deadline = self.clock.monotonic() + self.config.daemon.drain_timeout / SECOND
        while (self.flights or self.inbox or not closing.done()) and self.clock.monotonic() < deadline:
            if self.inbox:
                await self._turn()
            under_way: set[asyncio.Future[Any]] = {closing, *self.flights}
            await asyncio.wait(under_way, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        if self.flights:
            log.warning("%d tries did not end in time; they are repeated after the next start", len(self.flights))
            for task in self.flights:
                task.cancel()
            await asyncio.gather(*self.flights, return_exceptions=True)
            with contextlib.suppress(peewee.DatabaseError), transaction():  # else the next start writes it down
                recover_interrupted(self.config, self.clock.now())
        closing.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await closing

    # -- reload --------------------------------------------------------------------------------------------------------

    def _look_at_config(self) -> None:
        """The watcher or a chore says look again: read only if the contents differ from what is loaded or refused."""
        if not self.stopping and files_digest(self.config.files) not in (self.loaded, self.refused):
            self._reload("a change of the file")

    def _reload(self, why: str) -> None:
        if self.reading is None or self.reading.done():
            self.reading = self.loop.create_task(self._read_config(why))
            self.reading.add_done_callback(self._read_again)
        else:
            self.read_next = why  # what is read now may be of before

    def _read_again(self, _: Any) -> None:
        if self.read_next and not self.stopping:
            why, self.read_next = self.read_next, ""
            self._reload(why)

    async def _read_config(self, why: str) -> None:
        """Read the file in a thread, then take all of it or nothing. Twice the same content, a moment apart, so that a
        file half-written is not taken for a whole one."""
        monotonic_us = int(self.clock.monotonic() * 1_000_000)
        notify_systemd(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")
        seen = files_digest(self.config.files)
        for _ in range(50):
            await asyncio.sleep(0.2)
            again = files_digest(self.config.files)
            if again == seen:
                break
            seen = again
        try:
            config = await asyncio.to_thread(load_config, self.config.source)
            await self._adopt(config, why)
        except ConfigError as error:
            self._refuse(error, seen)
        except DigestdError as error:
            log.error("the config could not be taken: %s", one_line(str(error)))
        notify_systemd(f"READY=1\nSTATUS={self._status()}")

    async def _adopt(self, config: Config, why: str) -> None:
        self._warn_of_restart(config)
        open_work = touched_work(self.config, config)
        changed = [name for name, sender in self.config.senders.items() if config.senders.get(name) != sender]
        now = self.clock.now()
        for wait_s in (0.1, 0.5, 1.0, 2.0, 5.0):
            try:
                with transaction():
                    adopt_config(config, now)
                    enable_mended(changed)
                    forget_refusal()
                    remember("config_loaded", files_digest([config.source]), now)
                break
            except peewee.OperationalError:
                await asyncio.sleep(wait_s)
        else:
            raise StoreError("the database is locked; the config will be read again")
        self.config, self.refused, self.read_at = config, "", now
        self.loaded = files_digest(config.files)
        self.room.fit(config.daemon.concurrency, config.senders)
        set_log_level(config.daemon.log_level)
        if self.watch is not None:
            self.watch.follow(config.files)
        log.info("the config was read again after %s%s", why, f"; it touches {open_work}" if open_work else "")
        self.more = True
        self.wakeup.set()

    def _refuse(self, error: ConfigError, seen: str) -> None:
        """Loud, and nothing changes: the log, systemd's status line, and a row that `digestd status` shows."""
        self.refused = seen
        log.error("the config is refused, and the one before stays in force")
        for problem in error.problems:
            log.error("%s", one_line(str(problem)))
        with contextlib.suppress(peewee.DatabaseError), transaction():
            remember("config_refused", "\n".join(map(str, error.problems)), self.clock.now())

    def _warn_of_restart(self, config: Config) -> None:
        for table, name in (("daemon", "database"), ("daemon", "durability"), ("api", "listen")):
            if getattr(getattr(config, table), name) != getattr(getattr(self.config, table), name):
                log.warning("%s.%s changed; that takes effect at the next start", table, name)

    # -- housekeeping --------------------------------------------------------------------------------------------------

    def _chores(self) -> Any:
        import schedule

        chores = schedule.Scheduler()
        for every_s, chore in (
            (60, self._look_at_config),
            (60, self._watch_wal),
            (300, self._purge),
            (60, self._tell_status),
            (60, self._rearm),
            (21_600, self._optimize),
            (86_400, self._revive_broken),
        ):
            chores.every(every_s).seconds.do(self._guarded, chore)
        return chores

    def _guarded(self, chore: Callable[[], None]) -> None:
        """A chore that fails is logged and comes again; `schedule` would let it starve every later one."""
        try:
            chore()
        except Exception:
            log.exception("the chore %s failed", chore.__name__)

    def _tell_status(self) -> None:
        notify_systemd(f"STATUS={self._status()}")

    def _status(self) -> str:
        if self.refused:
            return "the config on disk is refused; the one before stays in force"
        [opened] = row("SELECT count(*) FROM digests WHERE state IN ('open', 'held')")
        [failed] = row("SELECT count(*) FROM jobs WHERE state = 'failed'")
        disabled = [name for name, state in sender_states().items() if state == "disabled"]
        parts = [
            f"{opened} open digests",
            f"{len(self.flights)} tries under way",
            f"next due {utc_text(next_wake_at())}",
        ]
        parts += [f"{failed} failed", *(f"sender {name} disabled" for name in disabled)]
        return ", ".join([*parts, f"config of {utc_text(self.read_at)}"])

    def _ping_watchdog(self) -> None:
        """After a finished pass, so that a loop that hangs is noticed."""
        interval_us = os.environ.get("WATCHDOG_USEC", "")
        if not interval_us.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return
        if self.clock.monotonic() - self.pinged >= int(interval_us) / 2_000_000 - 0.5 * LOOK_S:
            self.pinged = self.clock.monotonic()
            notify_systemd("WATCHDOG=1")

    def _purge(self) -> None:
        before = self.clock.now() - self.config.daemon.retention
        with transaction():
            now = self.clock.now()
            gone = purge(before) + purge_by_spec(now) + purge_arrivals(now - self.config.longest_look_back)
            gone += purge_answers(now - DAY)
        if gone:
            self.loop.call_later(0.1, self._guarded, self._purge)

    def _rearm(self) -> None:
        with transaction():
            if rearm_repeatables(self.clock.now()) + unpark_jobs(self.room.lanes):
                self.more = True

    def _revive_broken(self) -> None:
        with transaction():
            if revive_broken(self.clock.now()):
                self.more = True

    def _optimize(self) -> None:
        database.execute_sql("PRAGMA optimize")

    def _watch_wal(self) -> None:
        """Warn of a log that only grows; and what little was written since, move it too."""
        wal = self.config.database.with_name(self.config.database.name + "-wal")
        size = wal.stat().st_size if wal.exists() else 0
        if size > 256 << 20:
            log.warning("the write-ahead log has %d MiB: another program keeps an old snapshot open", size >> 20)
        self._tend_wal(least=1)

    def _tend_wal(self, least: int = TEND_CHANGES) -> None:
        """Move the log into the database, a little at a time where much is written. Left to SQLite, that falls into one
        unlucky commit, and all who wait for it wait for two syncs of 40 MiB (250 ms here)."""
        changes, moment = database.connection().total_changes, self.clock.monotonic()
        if (
            changes - self.tended_changes < least
            or moment - self.tended < TEND_S
            or (self.tending is not None and not self.tending.done())
        ):
            return
        self.tended_changes, self.tended = changes, moment
        self.tending = self.loop.create_task(asyncio.to_thread(checkpoint, str(self.config.database)))


def _keep_answers(calls: Iterable[tuple[Any, Any]], now: int) -> None:
    """Write down what calls with an Idempotency-Key are answered, together with what they did."""
    kept = []
    for call, outcome in calls:
        keep: Keep | None = getattr(call, "keep", None)
        if keep is None:
            continue
        try:
            status, body = keep.shape(outcome)
        except Exception:
            log.exception("a bug met an answer that was to be kept")
            continue
        if status < 500:
            kept.append((keep.key, keep.body_hash, status, body, now))
    if kept:
        names = ("key", "body_hash", "status", "body", "created_at")
        execute_many(insert_text(KeptAnswer, *names) + " ON CONFLICT (key) DO NOTHING", kept)


def give_memory_back() -> None:
    """Reading the program and the config took some twenty MiB that nothing needs again; glibc keeps them for itself
    unless it is asked. Where there is no such call, nothing is lost."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


def checkpoint(path: str) -> None:
    """Move what is in the write-ahead log into the database, with a connection of its own, so that a thread may. It
    waits for nobody, and nobody for it."""
    address = pathlib.Path(path).absolute().as_uri() + "?mode=rw"  # a file that was moved away is not made anew
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(address, 0.05, uri=True)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def forget_refusal() -> None:
    execute("DELETE FROM meta WHERE name = 'config_refused'")


def touched_work(old: Config, new: Config) -> str:
    """How much open work a change of config touches, in words; '' for none."""
    counted = []
    for name, workflow in old.workflows.items():
        if new.workflows.get(name) != workflow:
            windows = row("SELECT count(*) FROM digests WHERE workflow = ? AND state IN ('open', 'held')", name)[0]
            if windows:
                counted.append(
                    f"{windows} open windows of {name}" + ("" if name in new.workflows else ", which is gone")
                )
    return ", ".join(counted)


def set_log_level(name: str) -> None:
    log.setLevel(getattr(logging, name.upper()))


class JournalFormatter(logging.Formatter):
    """Lines with journald's priority in front, each of them: a prefix covers only its own line."""

    _PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

    def format(self, record: logging.LogRecord) -> str:
        priority = self._PRIORITY.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


class TerminalFormatter(logging.Formatter):
    """Lines with the time in front, for people. The second is put into words once, not for each line."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _second_text(int(record.created))


@functools.lru_cache(maxsize=1)
def _second_text(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def set_up_log(level: str) -> None:
    """Log to stderr: for journald with priorities, for people with the time."""
    # What logging's manual says to switch off where no format asks for it; half of the time a line takes.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    if os.environ.get("JOURNAL_STREAM"):
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(TerminalFormatter("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(message)s"))
    log.handlers[:] = [handler]
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # a trace for every malformed request would fill the disk
    log.propagate = False
    set_log_level(level)


# ----------------------------------------------------------------------------------------------------------------------
# 15 API
# ----------------------------------------------------------------------------------------------------------------------
# HTTP in: Novu's contract, so that its clients work unchanged. A service of the daemon; it turns requests into messages
# on the inbox and answers when they are committed. Holds no state but its sockets.

READ_S = 10.0  # for a body to arrive
KEEP_ALIVE_S = 75  # a quiet connection stays open
BULK = 100
BULK_SUBSCRIBERS = 500
KNOWN_HEADS, MAX_HEAD = 512, 2048  # how many heads of requests are known again, of at most so many bytes
_TRIGGER = "/v1/events/trigger"
_UNSUBSCRIBE = "/u/"
_REPEATABLES = "/v1/repeatables"
_REASONS = {200: "OK", 201: "Created", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
            405: "Method Not Allowed", 409: "Conflict", 413: "Content Too Large", 422: "Unprocessable Content",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


class Answer(NamedTuple):
    """A status, a JSON body (a text is one already), and header lines beside the usual ones."""

    status: int
    body: Any = ""
    headers: str = ""
    kind: str = "application/json"

    @property
    def text(self) -> str:
        text = self.body if isinstance(self.body, str) else _dumps(self.body)
        return text if text.isascii() else text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text

    def encode(self) -> bytes:
        if self.status == 204:
            return f"HTTP/1.1 204 {_REASONS[204]}\r\n{self.headers}\r\n".encode()
        body = self.text.encode()
        return (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.kind}\r\n"
            f"Content-Length: {len(body)}\r\n{self.headers}\r\n"
        ).encode() + body


class Call:
    """One request on its way: what it asks, and whether its answer is to be kept under its Idempotency-Key."""

    def __init__(self, request: Any, path: str) -> None:
        self.request = request
        self.method: str = request.method
        self.path = path
        self.key = ""
        self.body: bytes | None = None
        self.kept = False
        self.told: Answer | None = None  # what was kept, once it is: the very same is answered

    @property
    def body_hash(self) -> str:
        """What tells this request from another one that carries the same key."""
        asked = f"{self.method} {self.request.raw_path}\n".encode()
        return hashlib.sha256(asked + (self.body or b"")).hexdigest()

    def keep(self, shape: Callable[[Any], Answer], refuse: Callable[[BaseException, str], Answer]) -> Keep | None:
        """What goes with the message to the inbox, so that the answer is kept in the commit that makes it true."""
        if not self.key:
            return None
        self.kept = True

        def answer(outcome: Any) -> tuple[int, str]:
            self.told = refuse(outcome, self.path) if isinstance(outcome, BaseException) else shape(outcome)
            return self.told.status, self.told.text

        return Keep(self.key, self.body_hash, answer)

    def value(self, name: str) -> str | None:
        """One value of the query."""
        found = self.request.query.get(name)
        return None if found in (None, "") else str(found)

    def values(self, name: str) -> list[str]:
        """All values of the query under a name, also as name[]=…"""
        query = self.request.query
        return [value for key in (name, f"{name}[]") for value in query.getall(key, []) if value]

    def number(self, name: str, default: int, most: int, least: int = 1) -> int:
        """A number of the query. Raises Rejected(422)."""
        text = self.value(name)
        if text is None:
            return default
        text = text.removesuffix(".0")  # novu-py writes every number so
        if not (text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most):
            raise Rejected(422, f"{name} must be a number from {least} to {most}", name)
        return int(text)

    def flag(self, name: str) -> bool | None:
        """true or false of the query; None where it is not there. Raises Rejected(422)."""
        text = self.value(name)
        if text not in (None, "true", "false"):
            raise Rejected(422, f"{name} must be true or false", name)
        return None if text is None else text == "true"


class Ready:
    """A response that is already bytes, in the shape that aiohttp asks of one: on the hot route, headers built one by
    one costs more than the commit."""

    def __init__(self, data: bytes, keep_alive: bool | None, with_body: bool) -> None:
        self.data = data if with_body else data[: data.index(b"\r\n\r\n") + 4]
        self.keep_alive = keep_alive

    async def prepare(self, request: Any) -> None:
        if self.keep_alive is None:
            self.keep_alive = request.keep_alive
        if not self.keep_alive:
            self.data = self.data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        if request.transport is not None:
            request.transport.write(self.data)
            if request.protocol.writing_paused:
                await request.writer.drain()  # the caller does not read: its next request has to wait

    async def write_eof(self) -> None:
        """All has been written."""


def error_body(
    status: int, message: str, path: str, now: int, field: str = "general", problems: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """An error in the shape that the SDKs can read: for 400 a list of errors, for 422 an object of messages."""
    body: dict[str, Any] = {"statusCode": status, "timestamp": iso_text(now), "path": path, "message": message}
    if status == 400:
        body |= {"type": "VALIDATION_ERROR", "errors": [{"field": field, "message": message}]}
        if problems:
            listed = [{"field": where, "message": what} for where, what in problems]
            body |= {"type": "PAYLOAD_VALIDATION_ERROR", "errors": listed}
    elif status == 422:
        messages = {"messages": [message], "value": None}
        body["errors"] = {"general": messages, field: messages}
    return body


# -- the routes, but for the two that are asked for most ---------------------------------------------------------------

_S1, _S2 = "/v1/subscribers", "/v2/subscribers"
_ROUTES = {
    "/healthz": {"GET": "_health"},
    "/v1/events/trigger": {"POST": "_trigger"},
    "/v1/events/trigger/bulk": {"POST": "_bulk"},
    "/v1/events/trigger/broadcast": {"POST": "_broadcast"},
    "/v1/events/trigger/*": {"DELETE": "_cancel"},
    "/v1/events/trigger/*/resume": {"POST": "_resume"},
    "/v1/ingest/alertmanager/*": {"POST": "_alertmanager"},
    _S2: {"GET": "_list_subscribers", "POST": "_create_subscriber"},
    f"{_S2}/*": {"GET": "_get_subscriber", "PATCH": "_patch_subscriber", "DELETE": "_delete_subscriber"},
    f"{_S2}/*/preferences": {"GET": "_get_preferences", "PATCH": "_patch_preferences"},
    f"{_S2}/*/preferences/bulk": {"PATCH": "_patch_many_preferences"},
    f"{_S2}/*/subscriptions": {"GET": "_subscriptions"},
    f"{_S2}/*/notifications": {"GET": "_inbox"},
    f"{_S2}/*/notifications/count": {"GET": "_count_inbox"},
    f"{_S2}/*/notifications/(read|seen|archive|read-archive|delete)": {"POST": "_mark_many"},
    f"{_S2}/*/notifications/*": {"DELETE": "_delete_inbox_item"},
    f"{_S2}/*/notifications/*/(read|unread|archive|unarchive)": {"PATCH": "_mark_one"},
    f"{_S2}/*/notifications/*/actions/(primary|secondary)/(complete|revert)": {"PATCH": "_turn_action"},
    _S1: {"GET": "_page_subscribers", "POST": "_create_subscriber"},
    f"{_S1}/bulk": {"POST": "_create_subscribers"},
    f"{_S1}/*": {"GET": "_get_subscriber", "PUT": "_patch_subscriber", "DELETE": "_delete_subscriber"},
    f"{_S1}/*/credentials": {"PUT": "_set_credentials", "PATCH": "_set_credentials"},
    f"{_S1}/*/credentials/*": {"DELETE": "_drop_credentials"},
    f"{_S1}/*/online-status": {"PATCH": "_set_online"},
    f"{_S1}/*/preferences": {"GET": "_old_preferences", "PATCH": "_patch_old_global"},
    f"{_S1}/*/preferences/(global|template)": {"GET": "_old_preferences_of"},
    f"{_S1}/*/preferences/*": {"PATCH": "_patch_old_preference"},
    f"{_S1}/*/notifications/feed": {"GET": "_feed"},
    f"{_S1}/*/notifications/unseen": {"GET": "_unseen"},
    f"{_S1}/*/messages/mark-as": {"POST": "_mark_as"},
    f"{_S1}/*/messages/markAs": {"POST": "_mark_as"},
    f"{_S1}/*/messages/mark-all": {"POST": "_mark_all"},
    f"{_S1}/*/messages/*/actions/*": {"POST": "_act_on_message"},
    "/v1/notifications": {"GET": "_list_notifications"},
    "/v1/notifications/*": {"GET": "_get_notification"},
    "/v1/messages": {"GET": "_list_messages"},
    "/v1/messages/*": {"DELETE": "_delete_message"},
    "/v1/messages/transaction/*": {"DELETE": "_delete_messages_of"},
    "/u/*": {"GET": "_show_unsubscribe", "POST": "_unsubscribe"},
}
_ROUTES_BY_LENGTH: dict[int, list[tuple[re.Pattern[str], dict[str, str]]]] = {}
for _path, _ways in _ROUTES.items():
    _pattern = re.compile(re.sub(r"\*", "([^/]+)", _path))
    _ROUTES_BY_LENGTH.setdefault(_path.count("/"), []).append((_pattern, _ways))


def find_route(method: str, path: str) -> tuple[str, list[str]]:
    """The method of Api that answers a request, and what its path names. Raises Rejected: 404, 405."""
    import urllib.parse

    allowed: list[str] = []
    for pattern, ways in _ROUTES_BY_LENGTH.get(path.rstrip("/").count("/"), ()):
        found = pattern.fullmatch(path.rstrip("/"))
        if found is None:
            continue
        name = ways.get("GET" if method == "HEAD" else method)
        if name is None:
            allowed += ways
            continue
        try:
            return name, [urllib.parse.unquote(part, errors="strict") for part in found.groups()]
        except UnicodeDecodeError:
            raise Rejected(400, "the path is not UTF-8") from None
    if allowed:
        raise Rejected(405, f"{method} is not allowed here; use {' or '.join(sorted(set(allowed)))}")
    raise Rejected(404, f"there is nothing at {one_line(path)}")


# -- subscribers and their preferences, as Novu's clients see them -----------------------------------------------------

_OURS = {"_organizationId": "digestd", "_environmentId": "digestd"}
_SUBSCRIBER_COLUMNS = (
    "id, subscriber_id, " + ", ".join(SUBSCRIBER_FIELDS.values())
    + ", credentials, is_online, last_online_at, created_at, updated_at"
)  # fmt: skip


def unknown_subscriber(subscriber_id: str) -> Rejected:
    """The refusal for a subscriber that is none."""
    return Rejected(404, f"there is no subscriber {one_line(subscriber_id[:255])}", "subscriberId")


def _wire_subscriber(columns: Sequence[Any]) -> dict[str, Any]:
    row_id, subscriber_id, *fields = columns
    credentials, is_online, last_online_at, created_at, updated_at = fields[len(SUBSCRIBER_FIELDS) :]
    facts = dict(zip(SUBSCRIBER_FIELDS, fields, strict=False))
    facts["data"] = json.loads(facts["data"]) if facts["data"] else None
    channels = [
        {"providerId": provider, "_integrationId": provider, "integrationIdentifier": provider, "credentials": known}
        for provider, known in json.loads(credentials or "{}").items()
    ]
    return {
        "_id": str(row_id), "subscriberId": subscriber_id, **facts, "channels": channels, "topics": [],
        "isOnline": None if is_online is None else bool(is_online),
        "lastOnlineAt": None if last_online_at is None else iso_text(last_online_at),
        **_OURS, "deleted": False, "createdAt": iso_text(created_at), "updatedAt": iso_text(updated_at), "__v": 0,
    }  # fmt: skip


def subscriber_rows(rest: str, *values: Any) -> list[dict[str, Any]]:
    """Subscribers as the API shows them, by the rest of a query."""
    return list(map(_wire_subscriber, rows(f"SELECT {_SUBSCRIBER_COLUMNS} FROM subscribers {rest}", *values)))


def find_subscriber(subscriber_id: str) -> dict[str, Any]:
    """One of them. Raises Rejected(404)."""
    found = subscriber_rows("WHERE subscriber_id = ?", subscriber_id)
    if not found:
        raise unknown_subscriber(subscriber_id)
    return found[0]


_LOCALE = re.compile(r"[A-Za-z]{2,3}([_-][A-Za-z0-9]{2,8})*")


def check_wire_subscriber(body: dict[str, Any]) -> dict[str, Any]:
    """The columns for a subscriber's fields as the API takes them. Raises Rejected(422)."""
    for name in ("email", "locale", "timezone"):
        if body.get(name) == "":
            raise Rejected(422, f"{name} must not be empty; null removes it", name)
    columns = check_subscriber_fields(body)
    locale = columns.get("locale")
    if locale is not None and not _LOCALE.fullmatch(locale):
        raise Rejected(422, f"{shown(locale)} is not a locale such as en or de_AT", "locale")
    return columns


def upsert_subscribers(entries: Sequence[Any], now: int) -> dict[str, Any]:
    """Make or change many; what is refused is told, and the others are made. Inside the caller's transaction."""
    done: dict[str, list[dict[str, Any]]] = {"updated": [], "created": [], "failed": []}
    for entry in entries:
        given = entry.get("subscriberId") if isinstance(entry, dict) else None
        try:
            if not isinstance(entry, dict):
                raise Rejected(422, "a subscriber is an object with subscriberId")
            subscriber_id = check_id(given, "subscriberId")
            columns = check_wire_subscriber(entry)
            known = row("SELECT 1 FROM subscribers WHERE subscriber_id = ?", subscriber_id)
            upsert_subscriber(subscriber_id, columns, now)
            done["updated" if known else "created"].append({"subscriberId": subscriber_id})
        except Rejected as error:
            named = given if isinstance(given, str) else ""
            done["failed"].append({"message": error.message, "subscriberId": named})
    return done


class Page(NamedTuple):
    """Which part of a sorted list is wanted: what stands after or before a row, which the cursor names by its values
    of the columns that it is sorted by."""

    column: str
    is_descending: bool
    after: tuple[int, int] | None
    before: tuple[int, int] | None
    with_cursor: bool
    limit: int

    @classmethod
    def of(cls, call: Call) -> Page:
        """As a query has it. Raises Rejected(422)."""
        order, direction = call.value("orderBy") or "_id", (call.value("orderDirection") or "DESC").upper()
        column = {"_id": "id", "updatedAt": "updated_at"}.get(order)
        if column is None or direction not in ("ASC", "DESC"):
            raise Rejected(422, "orderBy is _id or updatedAt, orderDirection ASC or DESC", "orderBy")
        after, before = (cls._cursor(call, name) for name in ("after", "before"))
        if after and before:
            raise Rejected(422, "after and before exclude each other", "after")
        return cls(
            column, direction == "DESC", after, before, bool(call.flag("includeCursor")), call.number("limit", 10, 100)
        )

    @staticmethod
    def _cursor(call: Call, name: str) -> tuple[int, int] | None:
        text = call.value(name)
        if text is None:
            return None
        found = re.fullmatch(r"(\d{1,18})\.(\d{1,18})", text, re.ASCII)
        if found is None:
            raise Rejected(422, f"{name} is not a cursor that a list gave", name)
        return int(found[1]), int(found[2])

    def query(self) -> tuple[str, list[int]]:
        """The condition and the order in SQL, with the values; one more row than is wanted tells whether there are
        more. What stands before a row comes backwards."""
        cursor = self.after or self.before
        downwards = self.is_descending == (self.before is None)
        text, values = "", []
        if cursor is not None:
            sign = ("<" if downwards else ">") + ("=" if self.with_cursor else "")
            text, values = f" AND ({self.column}, id) {sign} (?, ?)", list(cursor)
        way = "DESC" if downwards else "ASC"
        return f"{text} ORDER BY {self.column} {way}, id {way} LIMIT {self.limit + 1}", values


def search_subscribers(call: Call) -> dict[str, Any]:
    """A part of the list of subscribers, with the cursors to those beside it."""
    page = Page.of(call)
    text, values = "WHERE 1", list[Any]()
    for name, condition in (
        ("subscriberId", "subscriber_id = ?"),
        ("email", "instr(lower(email), lower(?))"),
        ("phone", "phone = ?"),
        ("name", "instr(lower(coalesce(first_name, '') || ' ' || coalesce(last_name, '')), lower(?))"),
    ):
        if (wanted := call.value(name)) is not None:
            text, values = f"{text} AND {condition}", [*values, wanted]
    rest, place = page.query()
    found = rows(f"SELECT {_SUBSCRIBER_COLUMNS} FROM subscribers {text}{rest}", *values, *place)
    more, found = len(found) > page.limit, found[: page.limit]
    if page.before is not None:
        found.reverse()
    cursors = [f"{one[-1] if page.column == 'updated_at' else one[0]}.{one[0]}" for one in found]
    has_next = more if page.before is None else True
    has_previous = more if page.before is not None else page.after is not None
    [total] = row(f"SELECT count(*) FROM (SELECT 1 FROM subscribers {text} LIMIT {MOST_COUNTED + 1})", *values)
    return {
        "data": list(map(_wire_subscriber, found)),
        "next": cursors[-1] if cursors and has_next else None,
        "previous": cursors[0] if cursors and has_previous else None,
        "totalCount": min(total, MOST_COUNTED), "totalCountCapped": total > MOST_COUNTED,
    }  # fmt: skip


MOST_COUNTED = 50_000


PROVIDERS = (  # of chat and push: the SDKs can read no subscriber that has another one
    "slack", "discord", "msteams", "webex-messaging", "mattermost", "ryver", "zulip", "grafana-on-call", "getstream",
    "rocket-chat", "whatsapp-business", "line", "chat-webhook", "novu-slack", "telegram", "sendblue", "novu-web-chat",
    "fcm", "apns", "expo", "one-signal", "pushpad", "push-webhook", "pusher-beams", "appio",
)  # fmt: skip
CREDENTIALS = ("webhookUrl", "channel", "alertUid", "title", "imageUrl", "state", "externalUrl")


def check_credentials(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The provider in a call's body, and what it needs. Raises Rejected(422)."""
    provider, given = body.get("providerId"), body.get("credentials")
    if provider not in PROVIDERS:
        hint = nearest(provider, PROVIDERS) if isinstance(provider, str) else f"there are {', '.join(PROVIDERS)}"
        raise Rejected(422, f"{shown(provider)} is no provider of chat or push; {hint}", "providerId")
    if not isinstance(given, dict):
        raise Rejected(422, "credentials must be an object", "credentials")
    known = {name: given[name] for name in (*CREDENTIALS, "deviceTokens") if given.get(name) is not None}
    for name, value in known.items():
        if name == "deviceTokens":
            if not isinstance(value, list) or not all(isinstance(token, str) for token in value):
                raise Rejected(422, "deviceTokens must be a list of texts", "credentials")
        elif not isinstance(value, str):
            raise Rejected(422, f"{name} must be a text", "credentials")
    json_text(known, "credentials")
    return str(provider), known


def set_credentials(subscriber_id: str, body: dict[str, Any], replace: bool, now: int) -> dict[str, Any]:
    """Keep what a chat or push provider needs to reach a subscriber; device tokens are added, unless all is replaced.
    Raises Rejected."""
    provider, given = check_credentials(body)
    find_subscriber(subscriber_id)
    known = load_credentials(subscriber_id)
    before = {} if replace else known.get(provider, {})
    after = {**before, **given}
    tokens = [*(before.get("deviceTokens") or ()), *(given.get("deviceTokens") or ())]
    if tokens:
        after["deviceTokens"] = list(dict.fromkeys(map(str, tokens)))
    columns = {"credentials": json_text({**known, provider: after}, "credentials")}
    upsert_subscriber(subscriber_id, columns, now)
    return find_subscriber(subscriber_id)


def drop_credentials(subscriber_id: str, provider: str, now: int) -> None:
    """Forget what a provider needs. Raises Rejected(404) for a subscriber that is none."""
    find_subscriber(subscriber_id)
    known = load_credentials(subscriber_id)
    if known.pop(provider, None) is not None:
        upsert_subscriber(subscriber_id, {"credentials": json_text(known, "credentials")}, now)


class PreferenceChange(NamedTuple):
    """What a call wants to change: channels of one workflow, or of all with '', and the weekly hours."""

    workflow: str
    channels: dict[str, bool]
    has_schedule: bool = False
    schedule: str | None = None


def check_preference(config: Config, body: Any, needs_workflow: bool = False) -> PreferenceChange:
    """A change of preferences, checked. Raises Rejected: 422 for a wrong shape, 404 for an unknown workflow, 400 for a
    critical one, whose channels nobody turns off."""
    if not isinstance(body, dict):
        raise Rejected(422, "a preference is an object with channels and workflowId", "preferences")
    workflow, channels = body.get("workflowId"), body.get("channels")
    if channels is None:
        channels = {}
    if not isinstance(channels, dict):
        raise Rejected(422, "channels must be an object of channels and true or false", "channels")
    for channel, is_on in channels.items():
        if channel not in (*CHANNELS, "tool"):
            raise Rejected(422, f"{shown(channel)} is no channel; {nearest(channel, CHANNELS)}", "channels")
        if not isinstance(is_on, bool):
            raise Rejected(422, f"channels.{channel} must be true or false", "channels")
    ours = {channel: is_on for channel, is_on in channels.items() if channel in CHANNELS}
    if workflow is None and needs_workflow:
        raise Rejected(422, "workflowId is missing", "workflowId")
    if workflow is not None:
        if not isinstance(workflow, str) or workflow not in config.workflows:
            raise Rejected(404, f"there is no workflow {shown(workflow)}", "workflowId")
        if config.workflows[workflow].critical:
            raise Rejected(400, f"{workflow} is critical: nobody turns its channels off", "workflowId")
        if body.get("schedule") is not None:
            raise Rejected(422, "schedule is one for all workflows; leave workflowId away", "schedule")
        return PreferenceChange(workflow, ours)
    has_schedule = "schedule" in body
    return PreferenceChange("", ours, has_schedule, check_schedule(body["schedule"]) if has_schedule else None)


def set_preference(subscriber_id: str, change: PreferenceChange, now: int) -> None:
    """Keep a change of preferences; the weekly hours are replaced as a whole. Raises Rejected(404)."""
    find_subscriber(subscriber_id)
    set_channels(subscriber_id, change.workflow, change.channels, now)
    if change.has_schedule:
        upsert_subscriber(subscriber_id, {"schedule": change.schedule}, now)


def _workflow_facts(config: Config, name: str) -> dict[str, Any]:
    workflow = config.workflows[name]
    told = {"name": workflow.name or name, "critical": workflow.critical, "tags": [], "severity": "none"}
    return {"id": name, "identifier": name, "slug": name, **told}


def _workflow_channels(config: Config, name: str, choices: Mapping[tuple[str, str], bool]) -> dict[str, bool]:
    """The channels that a workflow has steps for, each on or off."""
    workflow = config.workflows[name]
    used = [channel for channel in CHANNELS if any(step.type == channel for step in workflow.steps)]
    return {channel: is_wanted(workflow, choices, name, channel) for channel in used}


def preferences_of(config: Config, subscriber_id: str, which: str) -> dict[str, Any]:
    """What a subscriber gets: for all workflows, and for each that is critical, or not, or both. Raises Rejected."""
    if which not in ("critical", "nonCritical", "all"):
        raise Rejected(422, "criticality is critical, nonCritical or all", "criticality")
    find_subscriber(subscriber_id)
    choices = channel_choices(subscriber_id)
    [schedule] = row("SELECT schedule FROM subscribers WHERE subscriber_id = ?", subscriber_id)
    everywhere = {"enabled": True, "channels": {channel: choices.get(("", channel), True) for channel in CHANNELS}}
    if schedule is not None:
        everywhere["schedule"] = json.loads(schedule)
    listed = [
        {"enabled": True, "channels": _workflow_channels(config, name, choices), "overrides": [],
         "workflow": _workflow_facts(config, name)}
        for name, workflow in config.workflows.items()
        if which == "all" or workflow.critical == (which == "critical")
    ]  # fmt: skip
    return {"global": everywhere, "workflows": listed}


def workflow_preference(config: Config, subscriber_id: str, name: str) -> dict[str, Any]:
    """What a subscriber gets of one workflow."""
    channels = _workflow_channels(config, name, channel_choices(subscriber_id))
    return {"level": "template", "enabled": True, "channels": channels, "workflow": _workflow_facts(config, name)}


def old_preferences_of(config: Config, subscriber_id: str) -> list[dict[str, Any]]:
    """The same as Novu's first clients know it. Raises Rejected(404)."""
    find_subscriber(subscriber_id)
    choices = channel_choices(subscriber_id)
    return [
        {
            "template": {"_id": name, "name": workflow.name or name, "critical": workflow.critical},
            "preference": {"enabled": True, "channels": _workflow_channels(config, name, choices)},
        }
        for name, workflow in config.workflows.items()
    ]


def old_global_of(subscriber_id: str) -> dict[str, Any]:
    """What a subscriber gets of all workflows, as Novu's first clients know it."""
    choices = channel_choices(subscriber_id)
    return {"enabled": True, "channels": {channel: choices.get(("", channel), True) for channel in CHANNELS}}


def old_channels(body: dict[str, Any]) -> dict[str, Any]:
    """Which channels a call of Novu's first clients turns on or off: {channel: {type, enabled}}, {preferences: [the
    same]}, or {enabled} for all of them. Raises Rejected(422)."""
    listed = body.get("preferences", [body["channel"]] if "channel" in body else None)
    if listed is None and isinstance(body.get("enabled"), bool):
        return dict.fromkeys(CHANNELS, body["enabled"])
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise Rejected(422, "channel must be an object with type and enabled", "channel")
    return {str(one.get("type")): one.get("enabled") for one in listed}


# -- what became of events: Novu's activity feed -----------------------------------------------------------------------
# Read by a connection and in a thread of their own: filters may walk through many rows.

Ask = Callable[..., list[Any]]


@contextlib.contextmanager
def look_in(path: pathlib.Path) -> Iterator[Ask]:
    """A connection that only reads, for the time of one answer: ask(sql, *values) gives rows."""
    address = path.absolute().as_uri() + "?mode=ro"
    with contextlib.closing(sqlite3.connect(address, 5.0, uri=True)) as connection:
        connection.text_factory = _decode
        yield lambda sql, *values: connection.execute(sql, values).fetchall()


_EVENT_COLUMNS = (
    "e.id, e.workflow, e.subscriber_id, e.payload, e.transaction_id, e.received_at, e.state, e.digest_id, e.placed_at,"
    " e.finished_at, e.reason, s.id, s.first_name, s.last_name, s.email, s.phone, r.id, r.state,"
    " (SELECT min(f.id) FROM events f WHERE f.digest_id = e.digest_id AND f.state = 'placed')"
)
_EVENT_TABLES = (
    " FROM events e LEFT JOIN subscribers s ON s.subscriber_id = e.subscriber_id"
    " LEFT JOIN runs r ON r.event_id = e.id OR (e.digest_id IS NOT NULL AND r.digest_id = e.digest_id)"
)
_PROVIDERS = {"email": "email-webhook", "sms": "generic-sms", "push": "push-webhook", "chat": "chat-webhook"}
_PRESET_PROVIDERS = {
    "slack": "slack", "discord": "discord", "teams": "msteams", "telegram": "telegram", "mattermost": "mattermost"
}  # fmt: skip


def provider_of(config: Config, sender: str | None, channel: str) -> str:
    """The nearest of Novu's names for what sent something: its clients refuse all others."""
    settings = config.senders.get(sender or "")
    if isinstance(settings, MailSettings):
        return "nodemailer"
    preset = getattr(settings, "preset", None)
    return _PRESET_PROVIDERS.get(preset or "") or (_PROVIDERS.get(channel, "novu") if settings is not None else "novu")


def _wire_job(
    config: Config, job_id: str, kind: str, step: str, status: str, at: int, told: Sequence[dict[str, Any]] = (),
    sender: str | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "_id": job_id, "type": kind, "status": status, "updatedAt": iso_text(at), "executionDetails": list(told),
        "step": {"_id": step, "_templateId": step, "name": step, "active": True, "filters": []},
        "providerId": provider_of(config, sender, kind), **more,
    }  # fmt: skip


def _detail(
    name: str, at: int, status: str, text: str, is_retry: bool = False, raw: str | None = None
) -> dict[str, Any]:
    return {
        "_id": name, "createdAt": iso_text(at), "status": status, "detail": text, "isRetry": is_retry, "isTest": False,
        "raw": raw, "source": "Internal",
    }  # fmt: skip


_DIGEST_STATUS = {"open": "delayed", "held": "delayed", "closed": "completed", "discarded": "canceled"}
_JOB_STATUS = {"waiting": "queued", "active": "running", "cancelled": "canceled"}


def _digest_job(config: Config, ask: Ask, event: Sequence[Any]) -> dict[str, Any]:
    """The digest step of an event that is, or was, in a window: of the first of them, or one that joined it."""
    digest_id, first_id = event[7], event[18]
    [[step, state, closes_at, waits]] = ask("SELECT step, state, closes_at, waits FROM digests WHERE id = ?", digest_id)
    status = "canceled" if event[6] == "cancelled" else _DIGEST_STATUS[state] if event[0] == first_id else "merged"
    told = _detail(
        f"d{digest_id}", event[5], "Pending" if status == "delayed" else "Success", f"until {iso_text(closes_at)}"
    )
    settings = config.workflows[event[1]].step(step) if event[1] in config.workflows else None
    kind: dict[str, Any] = {"type": "timed"}
    if isinstance(settings, DigestStep) and settings.window is not None:
        kind = {"type": "regular", "amount": settings.window / SECOND, "unit": "seconds"}
    digest = {**kind, "digestKey": ", ".join(getattr(settings, "key", None) or ())}
    return _wire_job(
        config, f"d{digest_id}", "digest", step, status, event[8] or event[5], [told], digest=digest,
        scheduleExtensionsCount=waits,
    )  # fmt: skip


def _step_jobs(config: Config, ask: Ask, run_id: int) -> Iterator[dict[str, Any]]:
    """The steps of a run, each with its tries."""
    for job_id, step, kind, sender, state, at, reason in ask(
        "SELECT id, step, type, sender, state, coalesce(finished_at, taken_at, created_at), reason FROM jobs"
        " WHERE run_id = ? ORDER BY id", run_id
    ):  # fmt: skip
        told = [
            _detail(f"a{try_id}", started_at, {"sent": "Success", None: "Pending"}.get(outcome, "Failed"),
                    f"try {number}: {outcome or 'under way'}", number > 1, said)
            for try_id, number, started_at, outcome, said in ask(
                "SELECT id, number, started_at, outcome, reason FROM attempts WHERE job_id = ? ORDER BY number", job_id
            )
        ]  # fmt: skip
        if reason:
            told.append(_detail(f"j{job_id}", at, "Failed" if state == "failed" else "Warning", reason))
        shown_kind = kind if kind in (*CHANNELS, "delay", "digest") else "custom"
        yield _wire_job(config, str(job_id), shown_kind, step, _JOB_STATUS.get(state, state), at, told, sender)


def _notification(config: Config, ask: Ask, event: Sequence[Any]) -> dict[str, Any]:
    """An event, as Novu shows a notification: with the steps of its run; of one that joined another's window, the run
    is that one's."""
    (event_id, workflow, subscriber_id, payload, transaction_id, received_at, state, digest_id, placed_at, finished_at,
     reason, person_id, first_name, last_name, email, phone, run_id, _, first_id) = event  # fmt: skip
    settings = config.workflows.get(workflow)
    told = [_detail(f"e{event_id}", received_at, "Failed" if state == "failed" else "Success", reason or state)]
    status = {"failed": "failed", "cancelled": "canceled"}.get(state, "completed")
    jobs = [_wire_job(config, f"e{event_id}", "trigger", "trigger", status, received_at, told)]
    is_merged = digest_id is not None and first_id not in (None, event_id)
    if digest_id is not None:
        jobs.append(_digest_job(config, ask, event))
    if run_id is not None and not is_merged:
        jobs += _step_jobs(config, ask, run_id)
    person = {"firstName": first_name, "lastName": last_name, "email": email, "phone": phone}
    found = {
        "_id": str(event_id), **_OURS, "_subscriberId": str(person_id or subscriber_id), "_templateId": workflow,
        "transactionId": transaction_id or f"event-{event_id}", "createdAt": iso_text(received_at),
        "updatedAt": iso_text(finished_at or placed_at or received_at),
        "channels": sorted({job["type"] for job in jobs if job["type"] in CHANNELS}), "jobs": jobs,
        "subscriber": {"_id": str(person_id or ""), "subscriberId": subscriber_id,
                       **{name: value for name, value in person.items() if value is not None}},
        "template": {"_id": workflow, "name": settings.name or workflow if settings else workflow,
                     "triggers": [{"type": "event", "identifier": workflow, "variables": []}]},
        "payload": _loads_or_nothing(payload), "to": {"subscriberId": subscriber_id}, "tags": [], "topics": [],
        "critical": bool(settings and settings.critical), "severity": "none",
    }  # fmt: skip
    return {**found, "_digestedNotificationId": str(first_id)} if is_merged else found


def _loads_or_nothing(text: str) -> dict[str, Any]:
    """A payload; {} for what another program wrote badly."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _any_of(column: str, wanted: Sequence[str]) -> tuple[str, list[Any]]:
    return (f" AND {column} IN (SELECT value FROM json_each(?))", [json.dumps(wanted)]) if wanted else ("", [])


def list_notifications(config: Config, call: Call) -> dict[str, Any]:
    """A page of Novu's activity feed, the newest event first."""
    page, limit = call.number("page", 0, 10**6, 0), call.number("limit", 10, 50)
    text, values = "WHERE 1", list[Any]()
    for name, column in (
        ("templates", "e.workflow"), ("subscriberIds", "e.subscriber_id"), ("emails", "s.email"),
        ("transactionId", "e.transaction_id"),
    ):  # fmt: skip
        more, given = _any_of(column, call.values(name))
        text, values = text + more, values + given
    if channels := call.values("channels"):
        text += (
            " AND EXISTS (SELECT 1 FROM jobs j WHERE j.run_id = r.id AND j.type IN (SELECT value FROM json_each(?)))"
        )
        values.append(json.dumps(channels))
    if (wanted := call.value("search")) is not None:
        text += " AND (e.transaction_id = ? OR e.subscriber_id = ? OR s.email = ?)"
        values += [wanted] * 3
    for name, sign in (("after", ">="), ("before", "<=")):
        if (moment := call.value(name)) is not None:
            try:
                values.append(parse_instant(moment))
            except RuleError as error:
                raise Rejected(422, f"{name}: {error.message}", name) from None
            text += f" AND e.received_at {sign} ?"
    rest = f"{text} ORDER BY e.id DESC LIMIT ? OFFSET ?"
    with look_in(config.database) as ask:
        found = ask(f"SELECT {_EVENT_COLUMNS}{_EVENT_TABLES} {rest}", *values, limit + 1, page * limit)
        data = [_notification(config, ask, event) for event in found[:limit]]
    return {"data": data, "hasMore": len(found) > limit, "pageSize": limit, "page": page}


def find_notification(config: Config, notification_id: str) -> dict[str, Any]:
    """One event with its steps. Raises Rejected(404)."""
    is_number = notification_id.isascii() and notification_id.isdigit() and len(notification_id) < 19
    with look_in(config.database) as ask:
        text = f"SELECT {_EVENT_COLUMNS}{_EVENT_TABLES} WHERE e.id = ?"
        found = ask(text, int(notification_id)) if is_number else []
        if not found:
            raise Rejected(404, f"there is no notification {one_line(notification_id[:255])}", "notificationId")
        return _notification(config, ask, found[0])


# -- messages, and the subscriber's feed -------------------------------------------------------------------------------

_FIRST_EVENT = (
    " LEFT JOIN events e ON e.id = coalesce(r.event_id,"
    " (SELECT min(f.id) FROM events f WHERE f.digest_id = r.digest_id AND f.state = 'placed'))"
)
_MESSAGE_COLUMNS = (
    "j.public_id, j.id, j.type, j.sender, j.state, j.created_at, j.reason, r.id, r.workflow, r.subscriber_id,"
    " e.id, e.transaction_id, e.payload, s.id, s.email, m.subject, m.body, m.seen_at, m.read_at"
)
_MESSAGE_TABLES = (
    f" FROM jobs j JOIN runs r ON r.id = j.run_id{_FIRST_EVENT} LEFT JOIN subscribers s"
    " ON s.subscriber_id = r.subscriber_id LEFT JOIN inbox_messages m ON m.job_id = j.id"
    f" WHERE j.type IN ({', '.join(map(repr, CHANNELS))}) AND j.state IN ('completed', 'failed')"
    " AND r.workflow IS NOT NULL AND s.id IS NOT NULL"  # what somebody got who is gone is told no more
    " AND (j.type <> 'in_app' OR m.id IS NOT NULL OR j.state = 'failed')"
)


def _message(config: Config, found: Sequence[Any]) -> dict[str, Any]:
    (public_id, _, channel, sender, state, created_at, reason, run_id, workflow, subscriber_id, event_id,
     transaction_id, payload, person_id, email, subject, body, seen_at, read_at) = found  # fmt: skip
    facts = {
        "_id": public_id, **_OURS, "_templateId": workflow, "templateIdentifier": workflow,
        "_notificationId": str(event_id or f"run-{run_id}"), "_subscriberId": str(person_id or subscriber_id),
        "createdAt": iso_text(created_at), "content": body, "transactionId": transaction_id or f"run-{run_id}",
        "channel": channel, "seen": seen_at is not None, "read": read_at is not None, "cta": {},
        "status": "sent" if state == "completed" else "error", "providerId": provider_of(config, sender, channel),
        "payload": _loads_or_nothing(payload or ""),
    }  # fmt: skip
    more = {"subject": subject, "email": email if channel == "email" else None, "errorText": reason}
    return {**facts, **{name: value for name, value in more.items() if value is not None}}


def list_messages(config: Config, call: Call) -> dict[str, Any]:
    """A page of what was sent, or could not be, the newest first."""
    page, limit, channel = call.number("page", 0, 10**6, 0), call.number("limit", 10, 100), call.value("channel")
    if channel not in (None, *CHANNELS, "tool"):
        raise Rejected(422, f"channel must be one of {', '.join(CHANNELS)}", "channel")
    text, values = _MESSAGE_TABLES, list[Any]()
    for column, wanted in (
        ("j.type", call.values("channel")), ("r.subscriber_id", call.values("subscriberId")),
        ("e.transaction_id", call.values("transactionId")),
    ):  # fmt: skip
        more, given = _any_of(column, wanted)
        text, values = text + more, values + given
    with look_in(config.database) as ask:
        rest = f"SELECT {_MESSAGE_COLUMNS}{text} ORDER BY j.id DESC LIMIT ? OFFSET ?"
        found = ask(rest, *values, limit + 1, page * limit)
    data = [_message(config, one) for one in found[:limit]]
    return {"data": data, "hasMore": len(found) > limit, "pageSize": limit, "page": page}


def delete_message(message_id: str, now: int) -> None:
    """Take a message out of its subscriber's feed. Raises Rejected: 404 for one that is none, 400 for one that was sent
    elsewhere, whose record goes with its run."""
    if execute("DELETE FROM inbox_messages WHERE public_id = ?", message_id):
        return
    if row("SELECT 1 FROM jobs WHERE public_id = ? AND type <> 'in_app'", message_id):
        raise Rejected(400, "only messages of the in-app feed can be deleted; others go with their run", "messageId")
    raise Rejected(404, f"there is no message {one_line(message_id[:255])}", "messageId")


def delete_messages_of(transaction_id: str, channel: str | None, now: int) -> int:
    """Take the messages of a transaction out of the feeds; how many. Nothing else is kept of what was sent."""
    if channel not in (None, "in_app"):
        return 0
    return execute(
        "DELETE FROM inbox_messages WHERE job_id IN (SELECT j.id FROM events e"
        " JOIN runs r ON r.event_id = e.id OR (e.digest_id IS NOT NULL AND r.digest_id = e.digest_id)"
        " JOIN jobs j ON j.run_id = r.id WHERE e.transaction_id = ?)", transaction_id
    )  # fmt: skip


class FeedItem(NamedTuple):
    """A row of a subscriber's feed, with what is shown of its event and its subscriber."""

    public_id: str
    job_id: int
    workflow: str
    subject: str | None
    body: str | None
    payload: str
    created_at: int
    seen_at: int | None
    read_at: int | None
    archived_at: int | None
    actions: str | None
    subscriber_id: str
    person_id: int | None
    first_name: str | None
    last_name: str | None
    avatar: str | None
    run_id: int
    event_id: int | None
    transaction_id: str | None

    @property
    def person(self) -> dict[str, Any]:
        """Who it is for, as far as is known."""
        known = {"firstName": self.first_name, "lastName": self.last_name, "avatar": self.avatar}
        return {
            "subscriberId": self.subscriber_id,
            **{name: value for name, value in known.items() if value is not None},
        }


_FEED = (
    "SELECT m.public_id, m.job_id, m.workflow, m.subject, m.body, m.payload, m.created_at, m.seen_at, m.read_at,"
    " m.archived_at, m.actions, m.subscriber_id, s.id, s.first_name, s.last_name, s.avatar, r.id, e.id,"
    " e.transaction_id"
    " FROM inbox_messages m JOIN jobs j ON j.id = m.job_id JOIN runs r ON r.id = j.run_id"
    f"{_FIRST_EVENT} LEFT JOIN subscribers s ON s.subscriber_id = m.subscriber_id WHERE m.subscriber_id = ?"
)
_FEED_STATES = {"seen": "m.seen_at", "read": "m.read_at", "archived": "m.archived_at"}


def _leaves(value: Any, path: str = "$") -> Iterator[tuple[str, str]]:
    """The members of an object at any depth: where each stands, as SQLite says it, and its JSON."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if '"' in name:
                raise Rejected(422, "names with a quote in them cannot be looked for", "data")
            yield from _leaves(inner, f'{path}."{name}"')
    else:
        yield path, json_text(value, "data")


def feed_condition(wanted: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Which rows of a feed are wanted, as SQL with its values. None of ours is ever put off, has a tag, or a severity;
    data is part of the payload."""
    text, values = "", list[Any]()
    for name, column in _FEED_STATES.items():
        if wanted.get(name) is not None:
            text += f" AND {column} IS {'NOT ' if wanted[name] else ''}NULL"
    severity = wanted.get("severity")
    severity = [severity] if isinstance(severity, str) else severity
    if wanted.get("snoozed") or wanted.get("tags") or (severity and "none" not in severity):
        text += " AND 0"
    for path, leaf in _leaves(wanted.get("data") or {}):
        text += " AND json_extract(m.payload, ?) IS json_extract(?, '$')"
        values += [path, leaf]
    return text, values


def check_data(text: Any) -> dict[str, Any] | None:
    """A part of a payload that is looked for: a JSON object, or its text. Raises Rejected(422)."""
    if text is None or text == "":
        return None
    try:
        found = parse_json(text) if isinstance(text, str) else text
    except Rejected as error:
        raise Rejected(422, f"data must be the JSON of an object: {error.message}", "data") from None
    if not isinstance(found, dict):
        raise Rejected(422, "data must be the JSON of an object", "data")
    return found


def check_payload_filter(text: str | None) -> dict[str, Any] | None:
    """The same as the first API has it: base64 of the JSON. Raises Rejected(422)."""
    if text is None:
        return None
    try:
        return check_data(base64.b64decode(text, validate=True).decode())
    except (ValueError, UnicodeDecodeError):
        raise Rejected(422, "payload must be the base64 of a JSON object", "payload") from None


def _cta(item: FeedItem) -> dict[str, Any]:
    pressed = json.loads(item.actions or "{}")
    if not pressed:
        return {}
    button, how = next(reversed(pressed.items()))
    result = {"type": button, "payload": how.get("payload") or {}}
    return {"action": {"status": how["status"], "buttons": [], "result": result}}


def feed_entry(item: FeedItem) -> dict[str, Any]:
    """A row of the feed as the first version of Novu's API has it."""
    moment = max(filter(None, (item.created_at, item.seen_at, item.read_at, item.archived_at)))
    return {
        "_id": item.public_id, **_OURS, "_templateId": item.workflow, "templateIdentifier": item.workflow,
        "_notificationId": str(item.event_id or f"run-{item.run_id}"), "_subscriberId": str(item.person_id or ""),
        "_jobId": str(item.job_id), "subscriber": {"_id": str(item.person_id or ""), **item.person},
        "createdAt": iso_text(item.created_at), "updatedAt": iso_text(moment), "content": item.body or "",
        "transactionId": item.transaction_id or f"run-{item.run_id}", "subject": item.subject, "channel": "in_app",
        "providerId": "novu", "seen": item.seen_at is not None, "read": item.read_at is not None,
        "archived": item.archived_at is not None, "cta": _cta(item), "status": "sent",
        "payload": _loads_or_nothing(item.payload), "data": None, "tags": [],
    }  # fmt: skip


def inbox_entry(config: Config, item: FeedItem) -> dict[str, Any]:
    """The same as its second version has it."""
    facts = {
        "id": item.public_id, "transactionId": item.transaction_id or f"run-{item.run_id}", "body": item.body or "",
        "to": {"id": str(item.person_id or ""), **item.person}, "isRead": item.read_at is not None,
        "isSeen": item.seen_at is not None, "isArchived": item.archived_at is not None, "isSnoozed": False,
        "createdAt": iso_text(item.created_at), "channelType": "in_app", "tags": [], "severity": "none",
        "data": _loads_or_nothing(item.payload),
    }  # fmt: skip
    moments = {"readAt": item.read_at, "firstSeenAt": item.seen_at, "archivedAt": item.archived_at}
    facts |= {name: None if at is None else iso_text(at) for name, at in moments.items()}
    if item.subject is not None:
        facts["subject"] = item.subject
    if item.workflow in config.workflows:
        facts["workflow"] = _workflow_facts(config, item.workflow)
    for button, how in json.loads(item.actions or "{}").items():
        facts[f"{button}Action"] = {"label": button, "isCompleted": how["status"] == "done"}
    return facts


def count_feed(subscriber_id: str, wanted: Mapping[str, Any]) -> int:
    """How many rows of a feed are as wanted."""
    condition, values = feed_condition(wanted)
    text = f"SELECT count(*) FROM inbox_messages m WHERE m.subscriber_id = ?{condition}"
    return int(row(text, subscriber_id, *values)[0])


def _feed_rows(subscriber_id: str, condition: str, values: Sequence[Any], limit: int, offset: int) -> list[FeedItem]:
    text = f"{_FEED}{condition} ORDER BY m.id DESC LIMIT ? OFFSET ?"
    return list(map(FeedItem._make, rows(text, subscriber_id, *values, limit, offset)))


def page_feed(config: Config, subscriber_id: str, call: Call) -> dict[str, Any]:
    """A page of a feed, the newest first, for the first version of Novu's API."""
    find_subscriber(subscriber_id)
    page, limit = call.number("page", 0, 10**6, 0), call.number("limit", 10, 100)
    wanted = {"read": call.flag("read"), "seen": call.flag("seen"), "archived": False}
    wanted["data"] = check_payload_filter(call.value("payload"))  # type: ignore[assignment]
    found = _feed_rows(subscriber_id, *feed_condition(wanted), limit + 1, page * limit)
    told = {"totalCount": count_feed(subscriber_id, wanted), "hasMore": len(found) > limit}
    return {"data": list(map(feed_entry, found[:limit])), **told, "pageSize": limit, "page": page}


def page_inbox(config: Config, subscriber_id: str, call: Call) -> dict[str, Any]:
    """The same for its second version: from an offset, or after a message."""
    find_subscriber(subscriber_id)
    limit, offset, after = call.number("limit", 10, 100), call.number("offset", 0, 10**6, 0), call.value("after")
    wanted: dict[str, Any] = {name: call.flag(name) for name in ("read", "seen", "archived", "snoozed")}
    wanted |= {"tags": call.values("tags") or None, "severity": call.values("severity") or None}
    wanted["data"] = check_data(call.value("data"))
    condition, values = feed_condition(wanted)
    if after is not None:
        place = row("SELECT id FROM inbox_messages WHERE public_id = ? AND subscriber_id = ?", after, subscriber_id)
        if not place:
            raise Rejected(422, "after is not the id of a message of this feed", "after")
        condition += f" AND m.id < {int(place[0])}"
    for name, sign in (("createdGte", ">="), ("createdLte", "<=")):
        if call.value(name) is not None:
            condition += f" AND m.created_at {sign} {call.number(name, 0, 10**15, 0)}"
    found = _feed_rows(subscriber_id, condition, values, limit + 1, offset)
    told = {name: is_on for name, is_on in wanted.items() if is_on is not None}
    return {"data": [inbox_entry(config, one) for one in found[:limit]], "hasMore": len(found) > limit, "filter": told}


def check_filters(call: Call) -> list[dict[str, Any]]:
    """The filters of a count: a JSON list of objects. Raises Rejected."""
    found = parse_json(call.value("filters") or "[{}]")
    if not isinstance(found, list) or not 1 <= len(found) <= 30 or not all(isinstance(one, dict) for one in found):
        raise Rejected(422, "filters must be a JSON list of 1 to 30 objects", "filters")
    for one in found:
        for name in ("read", "seen", "archived", "snoozed"):
            if not isinstance(one.get(name), bool | None):
                raise Rejected(422, f"{name} must be true or false", "filters")
    return [{**one, **({"data": check_data(one["data"])} if "data" in one else {})} for one in found]


# What a mark does: the columns that are set when they are empty, and those that are emptied.
_MARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "seen": (("seen_at",), ()),
    "unseen": ((), ("seen_at", "read_at")),
    "read": (("seen_at", "read_at"), ()),
    "unread": ((), ("read_at",)),
    "archive": (("seen_at", "read_at", "archived_at"), ()),
    "unarchive": ((), ("archived_at",)),
}


def check_mark(value: Any) -> str:
    """One of the four marks that Novu's first API has. Raises Rejected(422)."""
    if value not in ("read", "seen", "unread", "unseen"):
        raise Rejected(422, "markAs must be read, seen, unread or unseen", "markAs")
    return str(value)


def check_marking(body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Which messages are to be marked, and how; also as the first clients say it, {mark: {seen, read}}. Raises
    Rejected(422)."""
    ids, mark = body.get("messageId"), body.get("markAs")
    ids = [ids] if isinstance(ids, str) else ids
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        raise Rejected(422, "messageId must be an id, or a list of them", "messageId")
    if mark is None and isinstance(body.get("mark"), dict):
        given = [(name, body["mark"][name]) for name in ("seen", "read") if body["mark"].get(name) is not None]
        marks = [name if is_on else f"un{name}" for name, is_on in given]
        return ids, marks or [check_mark(None)]
    return ids, [check_mark(mark)]


def _mark(subscriber_id: str, mark: str, now: int, condition: str, *values: Any) -> int:
    """Mark the rows of a feed that fulfil a condition; how many there were."""
    filled, emptied = _MARKS[mark]
    sets = [f"{name} = coalesce({name}, {now})" for name in filled] + [f"{name} = NULL" for name in emptied]
    text = f"UPDATE inbox_messages AS m SET {', '.join(sets)} WHERE m.subscriber_id = ?{condition}"
    return execute(text, subscriber_id, *values)


_THESE = " AND m.public_id IN (SELECT value FROM json_each(?))"


def mark_as(subscriber_id: str, ids: Sequence[str], marks: Sequence[str], now: int) -> list[dict[str, Any]]:
    """Mark some messages of a feed; they are the answer. Raises Rejected(404) when there is none of these."""
    find_subscriber(subscriber_id)
    if not all(_mark(subscriber_id, mark, now, _THESE, json.dumps(list(ids))) for mark in marks):
        raise Rejected(404, "there are no such messages in this feed", "messageId")
    found = rows(f"{_FEED}{_THESE} ORDER BY m.id DESC", subscriber_id, json.dumps(list(ids)))
    return [_marked_entry(FeedItem._make(one)) for one in found]


def _marked_entry(item: FeedItem) -> dict[str, Any]:
    """A row of the feed as an answer to a mark, where its subscriber would have to be told whole."""
    left_out = {"subscriber"} | ({"subject"} if item.subject is None else set())
    return {name: value for name, value in feed_entry(item).items() if name not in left_out}


def mark_all(subscriber_id: str, mark: str, now: int) -> int:
    """Mark all messages of a feed that are not marked so; how many that were."""
    find_subscriber(subscriber_id)
    filled, emptied = _MARKS[mark]
    changes = " OR ".join([f"{name} IS NULL" for name in filled] + [f"{name} IS NOT NULL" for name in emptied])
    return _mark(subscriber_id, mark, now, f" AND ({changes})")


def mark_many(subscriber_id: str, way: str, body: dict[str, Any], now: int) -> int:
    """What Novu's second API does with many at once: read, seen, archive, read-archive, delete; how many."""
    find_subscriber(subscriber_id)
    ids = body.get("ids", body.get("notificationIds"))
    if ids is not None and not (isinstance(ids, list) and all(isinstance(one, str) for one in ids)):
        raise Rejected(422, "notificationIds must be a list of ids", "notificationIds")
    condition, values = feed_condition({"tags": body.get("tags"), "data": check_data(body.get("data"))})
    if ids is not None:
        condition, values = condition + _THESE, [*values, json.dumps(ids)]
    if way == "delete":
        return execute(f"DELETE FROM inbox_messages AS m WHERE m.subscriber_id = ?{condition}", subscriber_id, *values)
    if way == "read-archive":
        return _mark(subscriber_id, "archive", now, f"{condition} AND m.read_at IS NOT NULL", *values)
    return _mark(subscriber_id, way, now, condition, *values)


def _one_entry(subscriber_id: str, message_id: str) -> FeedItem:
    found = rows(f"{_FEED}{_THESE}", subscriber_id, json.dumps([message_id]))
    if not found:
        raise Rejected(404, f"there is no message {one_line(message_id[:255])} in this feed", "messageId")
    return FeedItem._make(found[0])


def mark_one(config: Config, subscriber_id: str, message_id: str, mark: str, now: int) -> dict[str, Any]:
    """Mark one message; it is the answer. Raises Rejected(404)."""
    _mark(subscriber_id, mark, now, _THESE, json.dumps([message_id]))
    return inbox_entry(config, _one_entry(subscriber_id, message_id))


def press(subscriber_id: str, message_id: str, button: str, how: dict[str, Any]) -> None:
    """Note that a button of a message was pressed, or is as if it had not been."""
    item = _one_entry(subscriber_id, message_id)
    pressed = json_text({**json.loads(item.actions or "{}"), button: how}, "payload")
    execute("UPDATE inbox_messages SET actions = ? WHERE public_id = ?", pressed, message_id)


def note_action(
    config: Config, subscriber_id: str, message_id: str, button: str, body: dict[str, Any], now: int
) -> dict[str, Any]:
    """The same as the first API asks for it: {status: pending or done, payload}. Raises Rejected."""
    status, payload = body.get("status"), body.get("payload")
    if button not in ("primary", "secondary") or status not in ("pending", "done"):
        raise Rejected(422, "an action is primary or secondary, and its status pending or done", "status")
    if payload is not None and not isinstance(payload, dict):
        raise Rejected(422, "payload must be an object", "payload")
    press(subscriber_id, message_id, button, {"status": status, "payload": payload or {}})
    return _marked_entry(_one_entry(subscriber_id, message_id))


# -- the end of a mail -------------------------------------------------------------------------------------------------


class Subscription(NamedTuple):
    """What an unsubscribe URL stands for."""

    subscriber_id: str
    workflow: str
    channel: str


def find_subscription(config: Config, token: str) -> Subscription | None:
    """What a token stands for: it names the subscriber's row, and proves the workflow and the channel. None for one
    that was not made here, or whose subscriber or workflow is gone."""
    row_id, _, proof = token.partition(".")
    if not (row_id.isascii() and row_id.isdigit() and len(row_id) < 19):
        return None
    found = row("SELECT subscriber_id FROM subscribers WHERE id = ?", int(row_id))
    for name, workflow in config.workflows.items() if found else ():
        for channel in {step.type for step in workflow.steps if step.type in CHANNELS}:
            wanted = unsubscribe_token(int(row_id), found[0], name, channel).partition(".")[2]
            if hmac.compare_digest(wanted.encode(), proof.encode("utf-8", "surrogatepass")):
                return None if workflow.critical else Subscription(found[0], name, channel)
    return None


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="robots" content="noindex"><title>{title}</title>
<style>:root{{color-scheme:light dark}}body{{font:1.1rem/1.5 system-ui,sans-serif;max-width:34rem;margin:15vh auto;
padding:0 1rem}}button{{font:inherit;padding:.5rem 1rem}}</style></head>
<body><h1>{title}</h1><p>{text}</p>{form}</body></html>
"""
_PAGE_HEADERS = (
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; form-action 'self';"
    " frame-ancestors 'none'\r\n"
    "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n"
)


def unsubscribe_page(config: Config, found: Subscription | None, what: str) -> Answer:
    """The page that asks, or tells what was done."""
    import html

    def page(status: int, title: str, text: str, form: str = "") -> Answer:
        return Answer(
            status, _PAGE.format(title=title, text=text, form=form), _PAGE_HEADERS, "text/html; charset=utf-8"
        )

    if found is None:
        return page(404, "This link is not valid", "Nothing was changed. It may be of a list that no longer exists.")
    name = f"<b>{html.escape(config.workflows[found.workflow].name or found.workflow)}</b>"
    kind = {"email": "mails", "in_app": "messages"}.get(found.channel, f"{found.channel} messages")
    back = '<form method="post"><button name="undo" value="1">Get them again</button></form>'
    stop = '<form method="post"><button name="List-Unsubscribe" value="One-Click">Unsubscribe</button></form>'
    if what == "done":
        return page(200, "Unsubscribed", f"You will get no more {kind} of {name}.", back)
    if what == "back":
        return page(200, "Subscribed again", f"You will get {kind} of {name}.", stop)
    return page(200, "Unsubscribe?", f"You get {kind} of {name}. Press the button to get no more of them.", stop)


# -- Alertmanager ------------------------------------------------------------------------------------------------------

_GROUP_FACTS = ("receiver", "groupKey", "groupLabels", "commonLabels", "commonAnnotations", "externalURL")


def alert_triggers(config: Config, workflow: str, to: Sequence[str], body: Any, now: int) -> list[Trigger]:
    """What Alertmanager's webhook (version 4) sends, as triggers: one for each alert, known by its fingerprint, start
    and status, so that what it sends again is the same event. Raises Rejected."""
    alerts = body.get("alerts") if isinstance(body, dict) else None
    if not isinstance(alerts, list) or not all(isinstance(alert, dict) for alert in alerts):
        raise Rejected(400, "alerts must be a list of objects, as Alertmanager's webhook sends them", "alerts")
    if not to:
        raise Rejected(400, "to is missing in the URL: …?to=SUBSCRIBER", "to")
    group = {name: body[name] for name in _GROUP_FACTS if name in body}
    triggers = []
    for alert in alerts:
        labels = canonical_json(alert.get("labels"))
        mark = alert.get("fingerprint") or hashlib.sha256(labels.encode()).hexdigest()[:16]
        known = " ".join(str(part) for part in (mark, alert.get("startsAt"), alert.get("status")))
        wanted = {"name": workflow, "to": list(to), "payload": {**group, **alert}}
        triggers.append(check_trigger(config, {**wanted, "transactionId": f"alertmanager {known}"[:255]}, now))
    return triggers or (
        [] if workflow in config.workflows else [check_trigger(config, {"name": workflow, "to": to}, now)]
    )


class Api:
    """The HTTP service."""

    def __init__(self) -> None:
        self.runner: Any = None
        self.sockets: list[str] = []
        self.heads: dict[bytes, Head] = {}  # of requests on the short way, by their bytes
        self.in_flight: set[str] = set()  # Idempotency-Keys of requests that are under way
        self.waiting = 0  # triggers on the short way whose answer is not written yet
        self.all_answered = asyncio.Event()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, daemon: Daemon) -> None:
        """Listen on every address of the config. Raises DigestdError with the address that cannot be had."""
        from aiohttp import web

        self.daemon = daemon
        self.make_request = functools.partial(web.BaseRequest, loop=daemon.loop, client_max_size=MAX_BODY)
        server = short_way_server(self)(
            self._serve,
            request_factory=self.make_request,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=2,
        )
        self.runner = web.ServerRunner(server, shutdown_timeout=5)
        await self.runner.setup()
        for text in daemon.config.api.listen:
            await self._listen(parse_listen(text))

    async def _listen(self, listen: Listen) -> None:
        from aiohttp import web

        try:
            if listen.kind == "systemd":
                for handed in systemd_sockets():
                    await web.SockSite(self.runner, handed).start()
            elif listen.kind == "unix":
                _remove_stale_socket(listen.host)
                await web.UnixSite(self.runner, listen.host).start()
                os.chmod(listen.host, 0o660)
                self.sockets.append(listen.host)
            else:
                await web.TCPSite(self.runner, listen.host, listen.port, reuse_address=True, backlog=1024).start()
        except OSError as error:
            where = listen.host if listen.kind == "unix" else f"{listen.host}:{listen.port}"
            hint = "another program uses it; ss -ltnp shows which" if error.errno == errno.EADDRINUSE else ""
            raise DigestdError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}", hint) from None
        log.info(
            "the API listens on %s",
            "systemd's sockets"
            if listen.kind == "systemd"
            else listen.host + (f":{listen.port}" if listen.port else ""),
        )

    async def stop(self) -> None:
        """Take no new connections; let requests under way end."""
        if self.waiting:  # those on the short way, of which the server does not know
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.all_answered.wait(), 5)
        if self.runner is not None:
            await self.runner.cleanup()
        for path in self.sockets:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _serve(self, request: Any) -> Any:
        """Route, answer, and turn whatever goes wrong into an error that a client can read."""
        call = Call(request, request.raw_path.partition("?")[0])
        try:
            self._admit(call.path, request.headers)
            answer = await self._once(call)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self.daemon.stopping:
                raise
            answer = self._refusal(error, call.path)
        return Ready(answer.encode(), False if answer.status == 413 else None, call.method != "HEAD")

    async def _once(self, call: Call) -> Answer:
        """The answer to a request; to one with an Idempotency-Key that was answered before, that answer (facts on
        Novu, 5.1: for a day, errors too, POST and PATCH alone)."""
        given = call.request.headers.get("Idempotency-Key")
        if given is None or call.method not in ("POST", "PATCH") or call.path.startswith(_UNSUBSCRIBE):
            return await self._route(call)
        if not 0 < len(given) <= 255 or not given.isprintable() or not given.isascii():
            raise Rejected(400, "an Idempotency-Key has 1 to 255 characters of ASCII", "Idempotency-Key")
        call.body = await self._body(call)
        echo = f"Idempotency-Key: {given}\r\n"
        if given in self.in_flight:
            error = Rejected(409, "a request with this Idempotency-Key is under way")
            return self._refusal(error, call.path)._replace(headers=f"Retry-After: 1\r\n{echo}")
        since = self.daemon.clock.now() - DAY
        found = row("SELECT body_hash, status, body FROM answers WHERE key = ? AND created_at > ?", given, since)
        if found and found[0] != call.body_hash:
            error = Rejected(422, "this Idempotency-Key came before with another request", "Idempotency-Key")
            return self._refusal(error, call.path)._replace(headers=echo)
        if found:
            return Answer(found[1], found[2], f"Idempotency-Replay: true\r\n{echo}")
        self.in_flight.add(given)
        call.key = given
        try:
            answer = await self._answer_to_keep(call)
        finally:
            self.in_flight.discard(given)
        return answer._replace(headers=answer.headers + echo)

    async def _answer_to_keep(self, call: Call) -> Answer:
        """The answer, kept: in the commit that made it true, or where there was none in one of its own."""
        try:
            answer = await self._route(call)
        except Rejected as error:
            answer = self._refusal(error, call.path)
        if not call.kept and answer.status < 500:
            await self._commit(call, functools.partial(ActCall, lambda now: None), lambda _: answer)
        return call.told or answer

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Let a request in that needs no key, or has one that is configured. Compared in constant time."""
        keys = self.daemon.config.api.keys
        if not keys or path in ("/healthz", "/readyz") or path.startswith(_UNSUBSCRIBE):
            return
        scheme, _, value = headers.get("Authorization", "").partition(" ")
        given = value.strip().encode("utf-8", "surrogateescape")
        found = [hmac.compare_digest(key.get_secret_value().encode(), given) for key in keys]
        if scheme.lower() != "apikey" or not any(found):
            raise Rejected(401, "the Authorization header is missing or its ApiKey is not known")

    def _refusal(self, error: BaseException, path: str) -> Answer:
        """What a request that went wrong is answered."""
        now = self.daemon.clock.now()
        if isinstance(error, Rejected):
            body = error_body(error.status, error.message, path, now, error.field, error.problems)
            return Answer(error.status, {**error.more, **body})
        if isinstance(error, (TimeoutError, asyncio.CancelledError)):
            body = error_body(503, "the database is busy; nothing was stored", path, now)
            return Answer(503, body, "Retry-After: 1\r\n")
        log.error("a bug met a request to %s", one_line(path), exc_info=error)
        return Answer(500, error_body(500, "a bug in digestd; its log has more", path, now))

    async def _route(self, call: Call) -> Answer:
        if call.path == _TRIGGER and call.method == "POST":
            return await self._trigger(call)
        if call.path == _REPEATABLES or call.path.startswith(_REPEATABLES + "/"):
            return await self._repeatables(call, call.request.url.path[len(_REPEATABLES) + 1 :])
        name, captured = find_route(call.method, call.path)
        answer: Answer = await getattr(self, name)(call, *captured)
        return answer

    @staticmethod
    def _only(method: str, *allowed: str) -> None:
        if method not in allowed:
            raise Rejected(405, f"{method} is not allowed here; use {' or '.join(allowed)}")

    async def _body(self, call: Call) -> bytes:
        """The body: refused when too large, given up when it does not arrive."""
        request = call.request
        if call.body is not None:
            return call.body
        if request.content.is_eof() and request.content.total_bytes <= MAX_BODY:
            return bytes(request.content.read_nowait())  # it came with the headers: the usual case
        if (request.content_length or 0) > MAX_BODY:
            raise Rejected(413, f"the body is larger than {MAX_BODY} bytes")
        return await self._late_body(request)

    async def _json(self, call: Call) -> Any:
        return parse_json(await self._body(call))

    async def _object(self, call: Call) -> dict[str, Any]:
        """The body, which is a JSON object; an empty one counts as {}. Raises Rejected(400)."""
        data = await self._body(call)
        found = parse_json(data) if data.strip() else {}
        if not isinstance(found, dict):
            raise Rejected(400, "the body must be a JSON object", "body")
        return found

    async def _late_body(self, request: Any) -> bytes:
        """A body that is still on its way."""
        from aiohttp import web

        if request.headers.get("Expect", "").lower() == "100-continue":
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(READ_S):
                return bytes(await request.read())
        except web.HTTPRequestEntityTooLarge:
            raise Rejected(413, f"the body is larger than {MAX_BODY} bytes") from None
        except TimeoutError:
            raise Rejected(400, f"the body did not arrive within {READ_S:.0f} s") from None

    async def _commit(self, call: Call, make: Callable[..., Any], shape: Callable[[Any], Answer] | None = None) -> Any:
        """Put a message on the inbox and wait for its commit; with a `shape`, what it came to as the answer, which is
        kept where the request asks for that. Raises TimeoutError when the commit cannot be had in time."""
        reply = self.daemon.loop.create_future()
        keep = call.keep(shape, self._refusal) if shape is not None else None
        self.daemon.put(make(reply, self.daemon.clock.monotonic(), keep))
        outcome = await reply
        if isinstance(outcome, Exception):
            raise outcome
        return outcome if shape is None else shape(outcome)

    async def _act(self, call: Call, act: Callable[[int], Any], shape: Callable[[Any], Answer]) -> Answer:
        """Do something in the next transaction; the answer comes after its commit."""
        answer: Answer = await self._commit(call, functools.partial(ActCall, act), shape)
        return answer

    # -- routes: events ------------------------------------------------------------------------------------------------

    async def _health(self, call: Call) -> Answer:
        return Answer(200, {"status": "ok", "version": __version__})

    async def _trigger(self, call: Call) -> Answer:
        trigger = check_trigger(self.daemon.config, await self._json(call), self.daemon.clock.now())
        answer: Answer = await self._commit(call, functools.partial(TriggerCall, [trigger]), _answer_trigger)
        return answer

    def begin_trigger(self, headers: Mapping[str, str], body: bytes, write: Callable[[bytes], None]) -> None:
        """The same without a task of its own, for the short way: `write` gets the answer after the commit."""
        self.waiting += 1
        reply = ShortReply(self, write)
        try:
            self._admit(_TRIGGER, headers)
            trigger = check_trigger(self.daemon.config, parse_json(body), self.daemon.clock.now())
            self.daemon.put(TriggerCall([trigger], reply, self.daemon.clock.monotonic()))
        except Exception as error:
            reply.set_exception(error)

    def end_trigger(self, outcome: list[TriggerAnswer] | BaseException) -> bytes:
        """The bytes that answer a trigger on the short way."""
        self.waiting -= 1
        if self.daemon.stopping and not self.waiting:
            self.all_answered.set()
        if isinstance(outcome, BaseException):
            return self._refusal(outcome, _TRIGGER).encode()
        return _answer_trigger(outcome).encode()

    async def _bulk(self, call: Call) -> Answer:
        body = await self._json(call)
        events = body.get("events") if isinstance(body, dict) else None
        if not isinstance(events, list) or not events:
            raise Rejected(400, f"events must be a list of 1 to {BULK} triggers", "events")
        if len(events) > BULK:
            raise Rejected(422, f"events must be a list of 1 to {BULK} triggers; found {len(events)}", "events")
        triggers = [self._check_one(event) for event in events]
        answer: Answer = await self._commit(
            call,
            functools.partial(TriggerCall, triggers),
            lambda answers: Answer(201, '{"data":[' + ",".join(map(_trigger_answer, answers)) + "]}"),
        )
        return answer

    async def _broadcast(self, call: Call) -> Answer:
        """One event for every subscriber there is, some hundred in a transaction: a call that is cut off in the middle
        is completed by the same one again, for they share a transaction id."""
        body = await self._object(call)
        trigger = check_trigger(self.daemon.config, {**body, "to": "everybody"}, self.daemon.clock.now())
        last_id, text = 0, "SELECT id, subscriber_id FROM subscribers WHERE id > ? ORDER BY id LIMIT ?"
        while len(found := rows(text, last_id, BATCH)) == BATCH:
            part = trigger._replace(recipients=[Recipient(subscriber_id, {}) for _, subscriber_id in found])
            await self._commit(call, functools.partial(TriggerCall, [part]))
            last_id = found[-1][0]
        if not found:
            return _answer_trigger([TriggerAnswer("processed", trigger.transaction_id)])
        part = trigger._replace(recipients=[Recipient(subscriber_id, {}) for _, subscriber_id in found])
        answer: Answer = await self._commit(call, functools.partial(TriggerCall, [part]), _answer_trigger)
        return answer

    def _check_one(self, event: Any) -> Trigger | TriggerAnswer:
        """A bad event becomes an item with an error; a malformed recipient refuses the whole call, as Novu does."""
        try:
            return check_trigger(self.daemon.config, event, self.daemon.clock.now())
        except Rejected as error:
            if error.field in ("to", "subscriberId"):
                raise
            given = event.get("transactionId") if isinstance(event, dict) else None
            known = given if isinstance(given, str) else new_public_id("txn", self.daemon.clock.now())
            return TriggerAnswer("error", known, (error.message,))  # its first clients cannot do without an id

    async def _cancel(self, call: Call, transaction_id: str) -> Answer:
        cancelled = await self._commit(call, functools.partial(CancelCall, transaction_id))
        return Answer(200, {"data": cancelled})

    async def _resume(self, call: Call, transaction_id: str) -> Answer:
        """Novu's way to go on with a run that waits for a person; none of ours does."""
        if (await self._object(call)).get("to") is None:
            raise Rejected(400, "to is missing: whose run goes on", "to")
        return Answer(200, {"data": {"resumed": False}})

    async def _alertmanager(self, call: Call, workflow: str) -> Answer:
        """What Alertmanager's webhook sends: an event for each alert and status, however often it is sent again."""
        to = [name for text in call.values("to") for name in text.split(",")]
        triggers = alert_triggers(self.daemon.config, workflow, to, await self._json(call), self.daemon.clock.now())
        told = {"acknowledged": True, "status": "processed", "accepted": len(triggers)}
        if not triggers:
            return Answer(201, {"data": told})
        answer: Answer = await self._commit(
            call, functools.partial(TriggerCall, triggers), lambda _: Answer(201, {"data": told})
        )
        return answer

    async def _repeatables(self, call: Call, rest: str) -> Answer:
        """List, add, remove repeatables; and what a person does with one of them."""
        config, now, (key, _, deed) = self.daemon.config, self.daemon.clock.now(), rest.rpartition("/")
        if call.method == "POST" and deed in REPEATABLE_DEEDS and key:
            act = functools.partial(do_to_repeatable, config, deed, key)
            return await self._act(call, act, lambda done: Answer(200, {"data": {"done": True, **done}}))
        if rest and call.method in ("GET", "HEAD"):
            return Answer(200, {"data": repeatable_facts(now, find_repeatable(rest).key)[0]})
        if rest:
            self._only(call.method, "GET", "HEAD", "DELETE")
            return await self._remove_repeatable(call, rest)
        self._only(call.method, "GET", "HEAD", "POST", "DELETE")
        if call.method in ("GET", "HEAD"):
            return Answer(200, {"data": repeatable_facts(now)})
        body = await self._json(call)
        if call.method == "DELETE":
            return await self._remove_repeatable(call, key_from(config, body))
        spec = spec_from(config, body)

        def add(moment: int) -> Any:
            add_repeatable(spec, "api", moment)
            return repeatable_facts(moment, spec.key)[0]

        return await self._act(call, add, lambda facts: Answer(201, {"data": facts}))

    async def _remove_repeatable(self, call: Call, key: str) -> Answer:
        """Novu's and BullMQ's answer to a removal: whether there was one."""
        removal = functools.partial(ActCall, functools.partial(do_to_repeatable, self.daemon.config, "remove", key))
        try:
            await self._commit(call, removal)
        except Rejected as error:
            if error.status != 404:
                raise
            return Answer(200, {"data": False})
        return Answer(200, {"data": True})

    # -- routes: subscribers -------------------------------------------------------------------------------------------

    async def _list_subscribers(self, call: Call) -> Answer:
        return Answer(200, search_subscribers(call))

    async def _page_subscribers(self, call: Call) -> Answer:
        page, limit = call.number("page", 0, 10**6, 0), call.number("limit", 10, 100)
        found = subscriber_rows("ORDER BY id DESC LIMIT ? OFFSET ?", limit + 1, page * limit)
        [total] = row("SELECT count(*) FROM subscribers")
        told = {"page": page, "pageSize": limit, "totalCount": total, "hasMore": len(found) > limit}
        return Answer(200, {"data": found[:limit], **told})

    async def _create_subscriber(self, call: Call) -> Answer:
        body = await self._object(call)
        subscriber_id = check_id(body.get("subscriberId"), "subscriberId")
        columns, must_be_new = check_wire_subscriber(body), call.flag("failIfExists")

        def create(now: int) -> Any:
            if must_be_new and (known := subscriber_rows("WHERE subscriber_id = ?", subscriber_id)):
                words = f"there is a subscriber {subscriber_id} already"
                raise Rejected(409, words, "subscriberId", more=known[0])  # the SDKs read it as the subscriber
            upsert_subscriber(subscriber_id, columns, now)
            return find_subscriber(subscriber_id)

        return await self._act(call, create, lambda found: Answer(201, {"data": found}))

    async def _create_subscribers(self, call: Call) -> Answer:
        """Many at once; a bad one is told, and the others are made."""
        entries = (await self._object(call)).get("subscribers")
        if not isinstance(entries, list) or not 1 <= len(entries) <= BULK_SUBSCRIBERS:
            raise Rejected(422, f"subscribers must be a list of 1 to {BULK_SUBSCRIBERS}", "subscribers")
        return await self._act(
            call, functools.partial(upsert_subscribers, entries), lambda done: Answer(201, {"data": done})
        )

    async def _get_subscriber(self, call: Call, subscriber_id: str) -> Answer:
        return Answer(200, {"data": find_subscriber(subscriber_id)})

    async def _patch_subscriber(self, call: Call, subscriber_id: str) -> Answer:
        columns = check_wire_subscriber(await self._object(call))

        def change(now: int) -> Any:
            find_subscriber(subscriber_id)
            upsert_subscriber(subscriber_id, columns, now)
            return find_subscriber(subscriber_id)

        return await self._act(call, change, lambda found: Answer(200, {"data": found}))

    async def _delete_subscriber(self, call: Call, subscriber_id: str) -> Answer:
        def delete(now: int) -> None:
            if not delete_subscriber(subscriber_id, now):
                raise unknown_subscriber(subscriber_id)

        done = Answer(200, {"data": {"acknowledged": True, "status": "deleted"}})
        return await self._act(call, delete, lambda _: done)

    async def _set_credentials(self, call: Call, subscriber_id: str) -> Answer:
        body = await self._object(call)
        act = functools.partial(set_credentials, subscriber_id, body, call.method == "PUT")
        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _drop_credentials(self, call: Call, subscriber_id: str, provider: str) -> Answer:
        act = functools.partial(drop_credentials, subscriber_id, provider)
        return await self._act(call, act, lambda _: Answer(204))

    async def _set_online(self, call: Call, subscriber_id: str) -> Answer:
        body = await self._object(call)
        is_online = body.get("isOnline", body.get("online"))  # the second is what an old client says
        if not isinstance(is_online, bool):
            raise Rejected(422, "isOnline must be true or false", "isOnline")

        def act(now: int) -> Any:
            find_subscriber(subscriber_id)
            columns = {"is_online": int(is_online), **({} if is_online else {"last_online_at": now})}
            upsert_subscriber(subscriber_id, columns, now)
            return find_subscriber(subscriber_id)

        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _subscriptions(self, call: Call, subscriber_id: str) -> Answer:
        """Of topics, which digestd does not have: none."""
        find_subscriber(subscriber_id)
        empty: dict[str, Any] = {"data": [], "next": None, "previous": None, "totalCount": 0, "totalCountCapped": False}
        return Answer(200, empty)

    async def _get_preferences(self, call: Call, subscriber_id: str) -> Answer:
        which = call.value("criticality") or "nonCritical"
        return Answer(200, {"data": preferences_of(self.daemon.config, subscriber_id, which)})

    async def _patch_preferences(self, call: Call, subscriber_id: str) -> Answer:
        config, change = self.daemon.config, check_preference(self.daemon.config, await self._object(call))

        def act(now: int) -> Any:
            set_preference(subscriber_id, change, now)
            return preferences_of(config, subscriber_id, "all" if change.workflow else "nonCritical")

        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _patch_many_preferences(self, call: Call, subscriber_id: str) -> Answer:
        config, entries = self.daemon.config, (await self._object(call)).get("preferences")
        if not isinstance(entries, list) or not 1 <= len(entries) <= BULK:
            raise Rejected(422, f"preferences must be a list of 1 to {BULK}", "preferences")
        changes = [check_preference(config, entry, needs_workflow=True) for entry in entries]

        def act(now: int) -> Any:
            for change in changes:
                set_preference(subscriber_id, change, now)
            return [workflow_preference(config, subscriber_id, change.workflow) for change in changes]

        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _old_preferences(self, call: Call, subscriber_id: str) -> Answer:
        return Answer(200, {"data": old_preferences_of(self.daemon.config, subscriber_id)})

    async def _old_preferences_of(self, call: Call, subscriber_id: str, level: str) -> Answer:
        found = old_preferences_of(self.daemon.config, subscriber_id)
        return Answer(200, {"data": found if level == "template" else [{"preference": old_global_of(subscriber_id)}]})

    async def _patch_old_global(self, call: Call, subscriber_id: str) -> Answer:
        body = await self._object(call)
        change = check_preference(self.daemon.config, {"channels": old_channels(body)})

        def act(now: int) -> Any:
            set_preference(subscriber_id, change, now)
            return {"preference": old_global_of(subscriber_id)}

        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _patch_old_preference(self, call: Call, subscriber_id: str, workflow: str) -> Answer:
        config, body = self.daemon.config, await self._object(call)
        change = check_preference(config, {"workflowId": workflow, "channels": old_channels(body)})

        def act(now: int) -> Any:
            set_preference(subscriber_id, change, now)
            found = old_preferences_of(config, subscriber_id)
            return next(one for one in found if one["template"]["_id"] == change.workflow)

        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    # -- routes: what became of events, and the feed -------------------------------------------------------------------

    async def _list_notifications(self, call: Call) -> Answer:
        return Answer(200, await asyncio.to_thread(list_notifications, self.daemon.config, call))

    async def _get_notification(self, call: Call, notification_id: str) -> Answer:
        return Answer(200, {"data": await asyncio.to_thread(find_notification, self.daemon.config, notification_id)})

    async def _list_messages(self, call: Call) -> Answer:
        return Answer(200, await asyncio.to_thread(list_messages, self.daemon.config, call))

    async def _delete_message(self, call: Call, message_id: str) -> Answer:
        done = Answer(200, {"data": {"acknowledged": True, "status": "deleted"}})
        return await self._act(call, functools.partial(delete_message, message_id), lambda _: done)

    async def _delete_messages_of(self, call: Call, transaction_id: str) -> Answer:
        channel = call.value("channel")
        if channel not in (None, *CHANNELS):
            raise Rejected(422, f"channel must be one of {', '.join(CHANNELS)}", "channel")
        act = functools.partial(delete_messages_of, transaction_id, channel)
        return await self._act(call, act, lambda _: Answer(204))

    async def _feed(self, call: Call, subscriber_id: str) -> Answer:
        return Answer(200, page_feed(self.daemon.config, subscriber_id, call))

    async def _unseen(self, call: Call, subscriber_id: str) -> Answer:
        find_subscriber(subscriber_id)
        seen = call.flag("seen") or False
        return Answer(200, {"data": {"count": count_feed(subscriber_id, {"seen": seen})}})

    async def _mark_as(self, call: Call, subscriber_id: str) -> Answer:
        ids, marks = check_marking(await self._object(call))
        act = functools.partial(mark_as, subscriber_id, ids, marks)
        return await self._act(call, act, lambda found: Answer(201, {"data": found}))

    async def _mark_all(self, call: Call, subscriber_id: str) -> Answer:
        mark = check_mark((await self._object(call)).get("markAs"))
        act = functools.partial(mark_all, subscriber_id, mark)
        return await self._act(call, act, lambda count: Answer(201, {"data": count}))

    async def _act_on_message(self, call: Call, subscriber_id: str, message_id: str, button: str) -> Answer:
        body = await self._object(call)
        act = functools.partial(note_action, self.daemon.config, subscriber_id, message_id, button, body)
        return await self._act(call, act, lambda found: Answer(201, {"data": found}))

    async def _inbox(self, call: Call, subscriber_id: str) -> Answer:
        return Answer(200, page_inbox(self.daemon.config, subscriber_id, call))

    async def _count_inbox(self, call: Call, subscriber_id: str) -> Answer:
        find_subscriber(subscriber_id)
        found = [{"count": count_feed(subscriber_id, wanted), "filter": wanted} for wanted in check_filters(call)]
        return Answer(200, {"data": found})

    async def _mark_one(self, call: Call, subscriber_id: str, message_id: str, mark: str) -> Answer:
        act = functools.partial(mark_one, self.daemon.config, subscriber_id, message_id, mark)
        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _mark_many(self, call: Call, subscriber_id: str, mark: str) -> Answer:
        body = await self._object(call)
        act = functools.partial(mark_many, subscriber_id, mark, body)
        return await self._act(call, act, lambda _: Answer(204))

    async def _turn_action(self, call: Call, subscriber_id: str, message_id: str, button: str, way: str) -> Answer:
        config, how = self.daemon.config, {"status": "done" if way == "complete" else "pending"}

        def act(now: int) -> Any:
            press(subscriber_id, message_id, button, how)
            return inbox_entry(config, _one_entry(subscriber_id, message_id))

        return await self._act(call, act, lambda found: Answer(200, {"data": found}))

    async def _delete_inbox_item(self, call: Call, subscriber_id: str, message_id: str) -> Answer:
        def delete(now: int) -> None:
            if not mark_many(subscriber_id, "delete", {"ids": [message_id]}, now):
                raise Rejected(404, f"there is no message {one_line(message_id[:255])} in this feed", "messageId")

        return await self._act(call, delete, lambda _: Answer(204))

    # -- routes: the end of a mail -------------------------------------------------------------------------------------

    async def _show_unsubscribe(self, call: Call, token: str) -> Answer:
        """A page with a button: programs that follow every link of a mail must change nothing."""
        return unsubscribe_page(self.daemon.config, find_subscription(self.daemon.config, token), "ask")

    async def _unsubscribe(self, call: Call, token: str) -> Answer:
        """What a mail program sends at one click (RFC 8058), and the page's buttons."""
        config, found = self.daemon.config, find_subscription(self.daemon.config, token)
        back = b"undo=1" in (await self._body(call)).split(b"&")

        def act(now: int) -> None:
            if found is not None:
                set_channels(found.subscriber_id, found.workflow, {found.channel: back}, now)

        page = unsubscribe_page(config, found, "back" if back else "done")
        return await self._act(call, act, lambda _: page)


class ShortReply:
    """What a future is to the daemon, for a trigger on the short way: it takes the answer, and writes it at once."""

    __slots__ = ("api", "write")

    def __init__(self, api: Api, write: Callable[[bytes], None]) -> None:
        self.api = api
        self.write: Callable[[bytes], None] | None = write

    def done(self) -> bool:
        """Whether the answer was given."""
        return self.write is None

    def set_result(self, outcome: Any) -> None:
        """Give it: the answers to the triggers, or the error that kept them from being handled."""
        write, self.write = self.write, None
        assert write is not None
        write(self.api.end_trigger(outcome))

    set_exception = set_result


class Head(NamedTuple):
    """What the head of a request said: its headers, and how many bytes of body follow."""

    headers: Mapping[str, str]
    length: int


class ShortWay:
    """The parser of one connection, with a shorter way for the usual request.

    For each request the server runs a task and waits on two futures, which costs more than all that a trigger is about.
    A POST of a trigger that has come in whole, while nothing else on its connection is under way, needs none of that:
    it goes to the inbox from here, and its answer to the socket after the commit. All others take the server's way.
    The parser is the server's own; this stands where the server holds it, and adds nothing to what it lets pass. A
    caller says the same above each body, so a head that was parsed once is known by its bytes, and not parsed again.
    """

    PARTS = ("_parser", "_waiter", "_next_keepalive_close_time")  # what is used of the server's connection

    def __init__(self, api: Api, connection: Any) -> None:
        self.api = api
        self.connection = connection
        self.parser = connection._parser
        self.later: bytes | None = None  # what came while an answer is due; None: none is
        self.between = True  # the parser holds no part of a message: what comes next is the head of one
        self.timer: Any = None  # ends a connection whose next head does not come to its end
        self.timed = False  # whether it does so because a head has begun
        self.timer = api.daemon.loop.call_later(KEEP_ALIVE_S, self._cut)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parser, name)

    def _time_head(self, is_there: bool) -> None:
        """A caller has so long to send the head of a request: one byte now and then would hold the connection for ever,
        for which the server itself has no limit."""
        if self.timer is not None and (is_there or not self.timed):
            self.timer.cancel()
            self.timer = None
        if not is_there and not self.timed and self._is_idle():
            self.timer = self.api.daemon.loop.call_later(READ_S, self._cut)
        self.timed = self.timer is not None

    def _cut(self) -> None:
        transport = self.connection.transport
        if transport is not None:
            transport.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            transport.close()

    def feed_data(self, data: bytes) -> Any:
        """Parse what has come: (messages, whether the protocol changes, what is left), as the server asks for it."""
        if self.later is not None:
            if data:
                self.later += data
                self.connection.transport.pause_reading()
            return (), False, b""
        if self.between and self._is_idle():
            at = data.find(b"\r\n\r\n") + 4
            known = self.api.heads.get(data[:at])
            if known is not None and len(data) == at + known.length:
                if self.timer is not None:
                    self._time_head(True)
                self._begin(known.headers, data[at:])
                return (), False, b""
        found = self.parser.feed_data(data)
        if data:
            self._time_head(bool(found[0]))
        if len(found[0]) == 1 and self._is_usual(*found[0][0]) and not found[1] and self._is_idle():
            message, body = found[0][0]
            self.parser.message_consumed()
            whole = body.read_nowait()
            self._learn(data, message, whole)
            self._begin(message.headers, whole)
            return (), False, b""
        self.between = self.between and not data
        return found

    @staticmethod
    def _is_usual(message: Any, body: Any) -> bool:
        return bool(
            message.path == _TRIGGER
            and message.method == "POST"
            and not message.should_close
            and not message.compression
            and "Idempotency-Key" not in message.headers
            and body.is_eof()
            and body.total_bytes <= MAX_BODY
        )

    def _is_idle(self) -> bool:
        """Whether nothing else is under way on the connection, and it may go on."""
        waiter = self.connection._waiter
        return (
            waiter is not None
            and not waiter.done()
            and not self.connection.writing_paused
            and not self.api.daemon.stopping
        )

    def _learn(self, data: bytes, message: Any, body: bytes) -> None:
        """Know a head again that came from its first byte on, with a body as long as it says."""
        at = data.find(b"\r\n\r\n") + 4
        began, self.between = self.between, not message.chunked and len(data) == at + len(body)
        if began and self.between and at <= MAX_HEAD:
            if len(self.api.heads) >= KNOWN_HEADS:
                self.api.heads.clear()
            self.api.heads[data[:at]] = Head(message.headers, len(body))

    def _begin(self, headers: Mapping[str, str], body: bytes) -> None:
        self.connection._next_keepalive_close_time = self.api.daemon.loop.time() + KEEP_ALIVE_S
        self.later = b""
        self.api.begin_trigger(headers, body, self._end)

    def _end(self, answer: bytes) -> None:
        transport = self.connection.transport
        later, self.later = self.later, None
        if transport is None:
            return  # the caller has gone
        transport.write(answer)
        if later:
            transport.resume_reading()
            self.connection.data_received(later)


def short_way_server(api: Api) -> Any:
    """aiohttp's low-level server, whose connections have the short way where they have the parts that it needs."""
    from aiohttp import web

    class Server(web.Server):
        def __call__(self) -> web.RequestHandler:
            connection = super().__call__()
            if all(hasattr(connection, part) for part in ShortWay.PARTS):
                connection._parser = ShortWay(api, connection)  # type: ignore[assignment]
            return connection

    return Server


def _answer_trigger(answers: Sequence[TriggerAnswer]) -> Answer:
    return Answer(201, '{"data":' + _trigger_answer(answers[0]) + "}")


def _trigger_answer(answer: TriggerAnswer) -> str:
    """Novu's answer to a trigger, as JSON text."""
    errors = f',"error":{_dumps(answer.errors)}' if answer.errors else ""
    known = "" if answer.transaction_id is None else f',"transactionId":{_dumps(answer.transaction_id)}'
    return f'{{"acknowledged":true,"status":"{answer.status}"{known}{errors}}}'


def systemd_sockets() -> list[socket.socket]:
    """The listening sockets that systemd hands over. Raises DigestdError when there are none."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        raise DigestdError(
            'api.listen says "systemd", but systemd hands over no sockets', "start it from its socket unit"
        )
    found = [socket.socket(fileno=3 + number) for number in range(int(os.environ.get("LISTEN_FDS", "0")))]
    for handed in found:
        handed.setblocking(False)
    return found


def _remove_stale_socket(path: str) -> None:
    """A socket file that nobody listens on is left over from a crash. Raises OSError when somebody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except FileNotFoundError:
            pass
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


# ----------------------------------------------------------------------------------------------------------------------
# 16 Simulator
# ----------------------------------------------------------------------------------------------------------------------
# The real engine under a virtual clock, on a database in memory, with senders that record. It drives the tick exactly
# as the daemon does, and tells what happened by reading the rows.


class SimulatedReply(NamedTuple):
    """What a sender will answer: a status, timeout, or an SMTP code."""

    status: Any
    retry_after_ms: int | None


class Simulation:
    """One run over a timeline. `steps` yields what happened, in time order, as objects of the output."""

    def __init__(self, config: Config) -> None:
        senders = {name: sender.model_copy(update={"jitter": 0.0}) for name, sender in config.senders.items()}
        specs = {name: spec.model_copy(update={"jitter": None}) for name, spec in config.repeatables.items()}
        self.config = config.model_copy(update={"senders": senders, "repeatables": specs})
        self.clock = VirtualClock(0)
        self.room = Room(1_000_000, config.senders)  # sends take no time, so only rates count
        self.replies: dict[str, list[SimulatedReply]] = {}
        self.seen: dict[str, int] = dict.fromkeys(
            ("events", "failed events", "digests", "attempts", "inbox_messages"), 0
        )
        self.live_windows: dict[int, tuple[str, int]] = {}
        self.down_until = 0
        self.kept: dict[int, Claim] = {}  # by job: what was sent
        self.merged: set[int] = set()  # runs, jobs and specs of which has been told
        self.taken: set[int] = set()
        self.waits: dict[int, int] = {}  # by job: of how many waits has been told
        self.ended: set[int] = set()
        self.over: set[tuple[int, str]] = set()

    def run(self, lines: Iterable[tuple[int, dict[str, Any] | str]], until: int | None) -> Iterator[dict[str, Any]]:
        """Play the lines, each (at, what), sorted by time; then go on to `until`, or until nothing is left to come."""
        first = True
        for at, line in lines:
            if first:
                self.clock.at = at
                yield from self._do(lambda now: adopt_config(self.config, now))
                first = False
            if until is not None and at > until:
                break
            yield from self._advance(at)
            yield from self._play(line)
        yield from self._finish(until)

    def _finish(self, until: int | None) -> Iterator[dict[str, Any]]:
        if until is not None:
            yield from self._advance(until)
            return
        while self._is_alive() and (wake_at := self._wake_at()) is not None and wake_at < FAR_FUTURE:
            self.clock.at = wake_at
            yield from self._settle()

    def _wake_at(self) -> int | None:
        """The next instant at which the daemon would do something; never while it is down."""
        wake_at = next_wake_at()
        if self.room.wake_at is not None:
            wake_at = min(self.room.wake_at, wake_at or self.room.wake_at)
        if row("SELECT 1 FROM events WHERE state = 'received' LIMIT 1"):
            wake_at = self.down_until if wake_at is None else min(wake_at, self.down_until)
        return None if wake_at is None else max(wake_at, self.down_until, self.clock.at)

    def _is_alive(self) -> bool:
        """Whether a window, hold, delay or retry is left; what repeatables do and trigger does not keep it going."""
        own = "transaction_id NOT LIKE 'repeat %'"
        return bool(
            row("SELECT 1 FROM events WHERE state = 'received' LIMIT 1")
            or row(
                f"SELECT 1 FROM digests d WHERE state IN ('open', 'held') AND (EXISTS (SELECT 1 FROM events e"
                f" WHERE e.digest_id = d.id AND {own})"
                " OR EXISTS (SELECT 1 FROM digest_runs m WHERE m.digest_id = d.id))"
            )
            or row(
                f"SELECT 1 FROM jobs j JOIN runs r ON r.id = j.run_id WHERE j.state IN {UNFINISHED}"
                " AND (r.repeatable_id IS NULL OR j.tries > 0) LIMIT 1"
            )
        )

    def _advance(self, at: int) -> Iterator[dict[str, Any]]:
        """Let everything due up to an instant happen, each at its own time; then it is that instant."""
        while (wake_at := self._wake_at()) is not None and wake_at <= at:
            self.clock.at = wake_at
            yield from self._settle()
        self.clock.at = max(self.clock.at, at)

    def _settle(self) -> Iterator[dict[str, Any]]:
        """Tick at this instant until nothing moves; sends take no time."""
        while True:
            now = self.clock.now()
            with transaction():
                report = tick(self.config, now, self.room)
            for claim in report.claims:
                if claim.message is None and claim.result is None:
                    finish_claim(claim)
                result = claim.result or self._answer(claim)
                with transaction():
                    if claim.draft is not None and claim.message is not None:
                        keep_composed(claim, now)
                    self.kept[claim.job_id] = claim
                    record_outcomes(self.config, [Sent(claim, result)], now)
                self.room.end(claim.sender_name, claim.lane)
            yield from self._news()
            if not report.moved:
                return

    def _answer(self, claim: Claim) -> SendResult:
        """What the simulated endpoint says; sent, unless a reply was ordered."""
        waiting = self.replies.get(claim.sender_name)
        if not waiting:
            return result_of(claim, "sent")
        reply = waiting.pop(0)
        if reply.status == "timeout":
            return result_of(claim, "temporary", "no answer within the timeout")
        code = int(reply.status)
        if isinstance(claim.sender, MailSettings) and code == 535:
            return result_of(claim, "temporary", "the login was refused: 535", code, cause="login")
        if isinstance(claim.sender, MailSettings):
            outcome = "sent" if code < 400 else "temporary" if code < 500 else "permanent"
            return result_of(claim, outcome, str(code), code, reply.retry_after_ms)
        outcome, reason = judge_status(code)
        wait_ms = reply.retry_after_ms if outcome == "temporary" else None
        service = claim.sender.service if isinstance(claim.sender, WebhookSettings) else None
        gone = service is not None and code in service.gone and claim.sender.url_from is None
        return result_of(claim, outcome, reason or None, code, wait_ms, cause="gone" if gone else None)

    # -- lines of the timeline -----------------------------------------------------------------------------------------

    def _do(self, act: Callable[[int], Any]) -> Iterator[dict[str, Any]]:
        with transaction():
            act(self.clock.now())
        yield from self._news()

    def _play(self, line: dict[str, Any] | str) -> Iterator[dict[str, Any]]:
        """One line; what is refused is told and nothing else happens."""
        kinds = {
            "trigger": self._trigger, "cancel": self._cancel, "subscriber": self._subscriber,
            "repeatable": self._repeatable, "remove_repeatable": self._remove, "down": self._down, "reply": self._reply,
        }  # fmt: skip
        try:
            if isinstance(line, str):
                raise Rejected(400, line)
            named = [name for name in kinds if name in line]
            if len(named) != 1:
                raise Rejected(400, f"a line has one of {', '.join(kinds)}; found {' and '.join(named) or 'none'}")
            with transaction():
                kinds[named[0]](line[named[0]])
        except (DigestdError, pydantic.ValidationError) as error:
            reason = error.message if isinstance(error, DigestdError) else one_line(str(error))
            yield self._told("error", reason=reason)
        if self.clock.now() >= self.down_until:
            yield from self._settle()

    def _trigger(self, body: Any) -> None:
        now = self.clock.now()
        trigger = check_trigger(self.config, body, now)
        down = now < self.down_until
        answer = record_trigger(trigger, now)[0] if down else take_triggers(self.config, [trigger], now)[0]
        if answer.errors:
            raise Rejected(409, "; ".join(answer.errors))

    def _cancel(self, transaction_id: Any) -> None:
        if not cancel_transaction(check_id(transaction_id, "transactionId"), self.clock.now()):
            raise Rejected(404, f"nothing to cancel under {transaction_id!r}")

    def _subscriber(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise Rejected(400, "a subscriber is an object with subscriberId")
        subscriber_id = check_id(fields.get("subscriberId"), "subscriberId")
        columns = check_subscriber_fields(fields)
        if "schedule" in fields:
            columns["schedule"] = check_schedule(fields["schedule"])
        upsert_subscriber(subscriber_id, columns, self.clock.now())

    def _repeatable(self, fields: Any) -> None:
        body = {**fields, "jitter": None} if isinstance(fields, dict) else fields
        if isinstance(body, dict) and "sender" not in body and "trigger" not in body:
            body["sender"] = next(iter(self.config.senders), None)
        add_repeatable(spec_from(self.config, body), "command", self.clock.now())

    def _remove(self, key: Any) -> None:
        retire_repeatable(find_repeatable(str(key)), "removed", self.clock.now())

    def _down(self, span: Any) -> None:
        self.down_until = self.clock.now() + parse_duration(span)

    def _reply(self, order: Any) -> None:
        if not isinstance(order, dict) or order.get("sender") not in self.config.senders:
            raise Rejected(400, "a reply is an object with the name of a sender, a status, and times")
        status = order.get("status")
        if status != "timeout" and not str(status).isdigit():
            raise Rejected(400, f'{status!r} is no status; write 503, "451" or "timeout"')
        retry_after = order.get("retry_after")
        reply = SimulatedReply(status, parse_duration(retry_after) if retry_after is not None else None)
        self.replies.setdefault(order["sender"], []).extend([reply] * int(order.get("times", 1)))

    # -- telling what happened, from the rows --------------------------------------------------------------------------

    def _told(self, what: str, **fields: Any) -> dict[str, Any]:
        return {
            "at": iso_text(self.clock.now()),
            "what": what,
            **{name: value for name, value in fields.items() if value is not None},
        }

    def _new_rows(self, table: str, columns: str) -> list[Any]:
        found = rows(f"SELECT id, {columns} FROM {table} WHERE id > ? ORDER BY id", self.seen[table])
        if found:
            self.seen[table] = found[-1][0]
        return found

    def _news(self) -> Iterator[dict[str, Any]]:
        """What the rows say has happened since the last look: what joined, what ended, what began after it."""
        opened = {found[0] for found in self._new_rows("digests", "state")}
        arrivals = self._arrivals()
        yield from self._arrival_news(
            {window: came for window, came in arrivals.items() if window not in opened}, False
        )
        yield from self._window_news()
        self.live_windows |= dict.fromkeys(sorted(opened), ("open", 0))
        yield from self._arrival_news({window: came for window, came in arrivals.items() if window in opened}, True)
        yield from self._window_news()
        yield from self._failed_event_news()
        yield from self._job_news()
        yield from self._spec_news()

    def _arrival_news(self, arrivals: dict[int, list[list[str]]], new: bool) -> Iterator[dict[str, Any]]:
        for digest_id, came in arrivals.items():
            workflow, step, subscriber_id, key, closes_at = row(
                "SELECT workflow, step, subscriber_id, key, closes_at FROM digests WHERE id = ?", digest_id
            )
            for number, transaction_ids in enumerate(came):
                yield self._told(
                    "opened" if new and number == 0 else "joined", workflow=workflow, step=step,
                    subscriberId=subscriber_id, key=_key_value(key), transactionIds=transaction_ids,
                    closesAt=iso_text(closes_at),
                )  # fmt: skip

    def _failed_event_news(self) -> Iterator[dict[str, Any]]:
        for event_id, workflow, subscriber_id, transaction_id, reason in rows(
            "SELECT id, workflow, subscriber_id, transaction_id, reason FROM events WHERE state = 'failed' AND id > ?",
            self.seen["failed events"],
        ):
            self.seen["failed events"] = event_id
            yield self._told(
                "failed", workflow=workflow, subscriberId=subscriber_id, transactionIds=[transaction_id], reason=reason
            )

    def _arrivals(self) -> dict[int, list[list[str]]]:
        """By window, the arrivals since the last look: each the transaction ids that came in together."""
        found: dict[int, list[list[str]]] = {}
        placed = rows(
            "SELECT id, digest_id, transaction_id FROM events"
            " WHERE id > ? AND state <> 'received' AND digest_id IS NOT NULL ORDER BY id",
            self.seen["events"],
        )
        for event_id, digest_id, transaction_id in placed:
            found.setdefault(digest_id, []).append([transaction_id])
            self.seen["events"] = event_id
        merged = rows("SELECT run_id, digest_id FROM digest_runs WHERE joined_at = ? ORDER BY run_id", self.clock.now())
        for run_id, digest_id in merged:
            if run_id not in self.merged:
                self.merged.add(run_id)
                events = load_events(*row("SELECT event_id, digest_id FROM runs WHERE id = ?", run_id))
                found.setdefault(digest_id, []).append([event.transaction_id or "" for event in events])
        return found

    def _window_news(self) -> Iterator[dict[str, Any]]:
        for window_id, (old_state, old_waits) in list(self.live_windows.items()):
            state, waits, due_at, workflow, step, subscriber_id, key, reason = row(
                "SELECT state, waits, due_at, workflow, step, subscriber_id, key, reason FROM digests WHERE id = ?",
                window_id,
            )
            if (state, waits) == (old_state, old_waits):
                continue
            events = load_events(None, window_id)
            fields = {
                "workflow": workflow, "step": step, "subscriberId": subscriber_id, "key": _key_value(key),
                "transactionIds": [event.transaction_id for event in events], "eventCount": len(events),
                "reason": reason,
            }  # fmt: skip
            if state == "held":
                fields |= {"until": iso_text(due_at), "waits": waits}
                self.live_windows[window_id] = (state, waits)
            else:
                del self.live_windows[window_id]
            yield self._told(state, **fields)

    def _job_news(self) -> Iterator[dict[str, Any]]:
        for run_id, spec, slot_at, count, key in rows(
            "SELECT r.id, s.name, r.slot_at, r.count, s.key FROM runs r JOIN repeatables s ON s.id = r.repeatable_id"
            " WHERE r.taken_at = ? ORDER BY r.id", self.clock.now()
        ):  # fmt: skip
            if run_id not in self.taken:
                self.taken.add(run_id)
                yield self._told("run", repeatable=spec, key=key, slot=iso_text(slot_at), count=count)
        told = [*self._try_news(), *self._wait_news(), *self._end_news(), *self._feed_news()]
        yield from (one for _, one in sorted(told, key=lambda item: item[0]))  # a run's steps in their order

    def _try_news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for _, job_id, number, outcome, reason in self._new_rows("attempts", "job_id, number, outcome, reason"):
            what = {"sent": "sent", "permanent": "failed"}.get(outcome or "", "retrying")
            due_at, state, job_reason = row("SELECT due_at, state, reason FROM jobs WHERE id = ?", job_id)
            if what == "retrying" and state == "failed":
                what, reason = "failed", job_reason
            until = iso_text(due_at) if what == "retrying" else None
            if what != "sent" and state == "waiting":  # it waits for its sender, which is disabled
                what, until, reason = "failed", None, f"{reason}; the sender is disabled, and its messages wait"
            reason = reason if what != "sent" else None
            yield job_id, self._told(what, **self._job_fields(job_id), attempt=number, reason=reason, until=until)

    def _wait_news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for job_id, waits, due_at in rows(
            "SELECT id, waits, due_at FROM jobs WHERE state = 'delayed' AND waits > 0 AND tries = 0 ORDER BY id"
        ):
            if self.waits.get(job_id) != waits:
                self.waits[job_id] = waits
                yield job_id, self._told("held", **self._job_fields(job_id), until=iso_text(due_at), waits=waits)

    def _end_news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for job_id, state, reason in rows(
            "SELECT j.id, j.state, j.reason FROM jobs j WHERE j.finished_at = ? AND j.state IN ('skipped', 'failed')"
            " AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.job_id = j.id) ORDER BY j.id", self.clock.now()
        ):  # fmt: skip
            if job_id not in self.ended:
                self.ended.add(job_id)
                yield job_id, self._told(state, **self._job_fields(job_id), reason=reason)

    def _feed_news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for _, job_id in self._new_rows("inbox_messages", "job_id"):
            fields = self._job_fields(job_id) | {"channel": "in_app", "sender": None}
            subject, body = row("SELECT subject, body FROM inbox_messages WHERE job_id = ?", job_id)
            yield job_id, self._told("sent", **fields | {"message": {"subject": subject, "text": body}})

    def _job_fields(self, job_id: int) -> dict[str, Any]:
        step, kind, sender, workflow, subscriber_id, event_id, digest_id, spec_id, slot_at = row(
            "SELECT j.step, j.type, j.sender, r.workflow, r.subscriber_id, r.event_id, r.digest_id, r.repeatable_id,"
            " r.slot_at FROM jobs j JOIN runs r ON r.id = j.run_id WHERE j.id = ?", job_id
        )  # fmt: skip
        claim = self.kept.get(job_id)
        message = claim.message.summary if claim is not None and claim.message is not None else None
        if spec_id is not None:
            return {"repeatable": step, "sender": sender, "slot": iso_text(slot_at), "message": message}
        events = load_events(event_id, digest_id)
        key = (
            row("SELECT key FROM digests WHERE id = ?", digest_id)[0]
            if digest_id is not None
            else self._key_alone(workflow, step, events)
        )
        return {
            "workflow": workflow, "step": step, "channel": kind if kind in CHANNELS else None, "sender": sender,
            "subscriberId": subscriber_id, "key": _key_value(key), "eventCount": len(events), "message": message,
            "transactionIds": [event.transaction_id for event in events],
        }  # fmt: skip

    def _key_alone(self, workflow_name: str, step_id: str, events: Sequence[DigestedEvent]) -> str:
        """The key of an event that goes on alone, past the digest steps up to this one."""
        workflow = self.config.workflows.get(workflow_name)
        place = workflow.places.get(step_id) if workflow else None
        if workflow is None or place is None or not events:
            return ""
        passed = [step for name, step in workflow.digests.items() if workflow.places[name] <= place]
        return digest_key(passed[-1], json.loads(events[0].payload_text)) if passed else ""

    def _spec_news(self) -> Iterator[dict[str, Any]]:
        for spec_id, name, state, reason in rows(
            "SELECT id, name, state, reason FROM repeatables"
            " WHERE state IN ('finished', 'broken') AND coalesce(finished_at, updated_at) = ?",
            self.clock.now(),
        ):
            if (spec_id, state) not in self.over:
                self.over.add((spec_id, state))
                yield self._told("finished" if state == "finished" else "failed", repeatable=name, reason=reason)


def _key_value(key: str) -> Any:
    return json.loads(key) if key else None


def read_timeline(text: str) -> list[tuple[int, dict[str, Any] | str]]:
    """The lines of a timeline in time order, equal times in file order. A line that cannot be read keeps its place as
    the text of what is wrong; one without a time goes with the line before it."""
    lines: list[tuple[int, dict[str, Any] | str]] = []
    at = -1
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found = parse_json(line)
            if not isinstance(found, dict) or "at" not in found:
                raise Rejected(400, "a line is an object with at and what happens then")
            at = parse_instant(found["at"])
            lines.append((at, found))
        except DigestdError as error:
            lines.append((at, f"line {number}: {error.message}"))
    start = next((moment for moment, _ in lines if moment >= 0), 0)
    return sorted(((moment if moment >= 0 else start, line) for moment, line in lines), key=lambda item: item[0])


# ----------------------------------------------------------------------------------------------------------------------
# 17 Commands
# ----------------------------------------------------------------------------------------------------------------------
# The command line. Every command works on the database file by the functions above, whether the daemon runs or not.
# Exit codes: 0 fine, 1 failed, 2 usage, 78 bad config.

CONFIG_PLACES = ("config.toml", "/etc/digestd/config.toml")
CLI_BUSY_MS = 5000


def find_config(given: str | None) -> pathlib.Path:
    """The config file: --config, else $DIGESTD_CONFIG, else ./config.toml, else /etc/digestd/config.toml."""
    if given or os.environ.get("DIGESTD_CONFIG"):
        return pathlib.Path(given or os.environ["DIGESTD_CONFIG"])
    for place in CONFIG_PLACES:
        if pathlib.Path(place).exists():
            return pathlib.Path(place)
    raise ConfigError(
        [Problem(CONFIG_PLACES[0], 0, "", "is not there; name a config with --config, or copy config.example.toml")]
    )


def config_of(arguments: argparse.Namespace, secrets: bool = False, templates: bool = False) -> Config:
    return load_config(find_config(arguments.config), secrets, templates)


@contextlib.contextmanager
def store_of(config: Config, must_exist: bool = True) -> Iterator[int]:
    """The config's database, open; yields the time. A file that is missing or of an older schema is brought up to date
    under the instance lock, so never below a running daemon."""
    now = SystemClock().now()
    path = config.database
    if must_exist and not path.exists():
        raise StoreError(f"{path} is not there", "start the daemon once, or name the right config")
    lock = None
    if lock_holder(path) is None:
        with contextlib.suppress(StoreError):  # a daemon that starts at this moment does it instead
            lock = InstanceLock(path)
    try:
        open_store(str(path), now, config.daemon.durability, CLI_BUSY_MS, may_migrate=lock is not None)
    finally:
        if lock is not None:
            lock.release()
    # What others wrote badly must not hide the rest from a person who looks.
    database.connection().text_factory = lambda data: data.decode("utf-8", "replace")
    try:
        yield now
    finally:
        close_store()


def show_table(arguments: argparse.Namespace, sql: str, *values: Any) -> int:
    """The rows of a query, as columns for people or as JSON."""
    cursor = database.execute_sql(sql, values)
    names, found = [column[0] for column in cursor.description], cursor.fetchall()
    if arguments.json:
        print(json.dumps([dict(zip(names, one, strict=True)) for one in found], ensure_ascii=False))
        return len(found)
    if found:
        print_columns(names, found, 60)
    return len(found)


def print_columns(names: Sequence[str], found: Iterable[Sequence[Any]], most: int | None = None) -> None:
    """Rows under their names as columns for people, each no wider than `most` characters."""
    texts = [["" if value is None else one_line(str(value)) for value in one] for one in found]
    widths = [max(map(len, column)) for column in zip(names, *texts, strict=True)]
    widths = [width if most is None else min(most, width) for width in widths]
    for one in [names, *texts]:
        print("  ".join(text[:width].ljust(width) for text, width in zip(one, widths, strict=True)).rstrip())


def show(arguments: argparse.Namespace, value: dict[str, Any], text: str) -> None:
    print(json.dumps(value, ensure_ascii=False) if arguments.json else text)


# -- run, check, migrate -----------------------------------------------------------------------------------------------


def command_run(arguments: argparse.Namespace) -> int:
    """Start the daemon and serve until a signal says to stop."""
    os.environ["TZ"] = "UTC"  # `schedule` counts in naive local time, and would stop for an hour in autumn
    time.tzset()
    if sys.stderr is not None:
        import faulthandler

        faulthandler.enable()  # the watchdog's SIGABRT leaves a trace of where the loop hangs
    config = config_of(arguments, secrets=True, templates=True)
    set_up_log("debug" if arguments.debug else config.daemon.log_level)
    for warning in config.warnings:
        log.warning("%s", one_line(str(warning)))
    clock = SystemClock()
    lock = InstanceLock(config.database)
    try:
        notify_systemd("EXTEND_TIMEOUT_USEC=600000000\nSTATUS=opening the database")
        open_store(str(config.database), clock.now(), config.daemon.durability)
        with _store_errors(str(config.database)), transaction():
            adopt_config(config, clock.now())
            recover_interrupted(config, clock.now())
            enable_mended()
            forget_refusal()
        asyncio.run(Daemon(config, clock, [Api()]).run())
    finally:
        close_store()
        lock.release()
    log.info("ended")
    return 0


RELOAD_S = 60.0  # that a reload waits for the daemon's word


def command_reload(arguments: argparse.Namespace) -> int:
    """Let the running daemon read its config again, and wait until it has, or has refused it: exit 0 means that the
    file is in force. A file with problems is told here, and the daemon is not asked. Secrets are the daemon's alone:
    systemd gives its credentials to no other process."""
    config, clock = config_of(arguments, secrets=False, templates=True), SystemClock()
    pid = lock_holder(config.database) if config.database.exists() else None
    if pid is None or not str(pid).isdigit():
        raise DigestdError(
            "no daemon runs on this config's database", "start it: digestd run, or systemctl start digestd"
        )
    since, wanted = clock.now(), files_digest([config.source])
    try:
        os.kill(int(pid), signal.SIGHUP)
    except OSError as error:
        raise DigestdError(f"cannot signal the daemon, process {pid}: {os.strerror(error.errno or 0)}") from None
    until = clock.monotonic() + RELOAD_S
    while clock.monotonic() < until:
        time.sleep(0.05)
        with store_of(config), _store_errors(str(config.database)):
            found = dict(rows("SELECT name, value FROM meta WHERE name LIKE 'config_%' AND updated_at >= ?", since))
        if found.get("config_loaded") == wanted:
            show(arguments, {"ok": True}, f"{config.source}: in force")
            return 0
        if "config_refused" in found:
            raise DigestdError(f"the daemon refuses the config:\n{found['config_refused']}")
    raise DigestdError(f"the daemon said nothing within {RELOAD_S:.0f} s", "its log may say why")


def command_check(arguments: argparse.Namespace) -> int:
    """Validate the config: all problems on stdout, exit 78; warnings change nothing."""
    if arguments.file:
        arguments.config = arguments.file
    try:
        config = config_of(arguments, secrets=True, templates=True)
    except ConfigError as error:
        if arguments.json:
            print(
                json.dumps(
                    {"ok": False, "problems": [problem._asdict() for problem in error.problems]}, ensure_ascii=False
                )
            )
        else:
            print("\n".join(map(str, error.problems)))
        return error.exit_code
    open_work, broken = _open_work(config) if arguments.db else ([], [])
    for warning in config.warnings if not arguments.json else ():
        print(f"warning: {warning}")
    for one in open_work if not arguments.json else ():
        lost = f", and this config has no such {one['missing']}: they will fail" if one["missing"] else ""
        print(f"{'warning' if lost else 'open'}: {one['count']} {one['what']} of {one['name']}{lost}")
    for name, reason in broken if not arguments.json else ():
        print(f"broken: repeatable {name}: {one_line(reason)}")
    counted = [f"{len(getattr(config, table))} {table}" for table in ("workflows", "repeatables", "senders")]
    text = f"{config.source}: fine: {', '.join(counted)}"
    facts = {"ok": True, "problems": [], "warnings": [warning._asdict() for warning in config.warnings]}
    found = {"open": open_work, "broken": [{"name": name, "reason": reason} for name, reason in broken]}
    show(arguments, {**facts, **found} if arguments.db else facts, text)
    return 1 if broken else 0


def _open_work(config: Config) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """What is under way in the database, by step, and what of it this config has no place for; and the repeatables
    that are broken, with the reason."""
    if not config.database.exists():
        return [], []
    with store_of(config), _store_errors(str(config.database)):
        found = rows(
            "SELECT 'windows', workflow, step, count(*) FROM digests WHERE state IN ('open', 'held') GROUP BY 2, 3"
            " UNION ALL SELECT 'jobs', r.workflow, j.step, count(*) FROM jobs j JOIN runs r ON r.id = j.run_id"
            f" WHERE j.state IN {UNFINISHED} AND r.workflow IS NOT NULL GROUP BY 2, 3"
        )
        broken = rows("SELECT name, coalesce(reason, '') FROM repeatables WHERE state = 'broken' ORDER BY name")
    work = []
    for what, workflow, step, count in found:
        settings = config.workflows.get(workflow)
        missing = "workflow" if settings is None else "step" if step not in settings.places else None
        work.append({"what": what, "name": f"{workflow}/{step}", "count": count, "missing": missing})
    return work, broken


def command_migrate(arguments: argparse.Namespace) -> int:
    """Bring the database to the newest schema; a copy of the former one is kept beside it."""
    config = config_of(arguments)
    lock = InstanceLock(config.database)
    try:
        existed = config.database.exists()
        open_store(str(config.database), SystemClock().now(), busy_ms=CLI_BUSY_MS, may_migrate=False)
        with _store_errors(str(config.database)):
            applied = migrate(SystemClock().now())
            version = int(database.pragma("user_version"))
    finally:
        close_store()
        lock.release()
    text = f"schema {version}, " + (f"applied {len(applied)} sections" if applied else "nothing to do")
    show(arguments, {"schema": version, "applied": applied, "new": not existed}, text)
    return 0


# -- events ------------------------------------------------------------------------------------------------------------


def _read_text(path: str) -> str:
    """A file named on the command line, or standard input for -. Raises UsageError."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8") from None


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a JSON Lines file that hold something, with their numbers, read as they come."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as source:
            for number, line in enumerate(source, 1):
                if line.strip():
                    yield number, line.decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _payload_argument(text: str | None) -> Any:
    if text is None:
        return {}
    return parse_json(_read_text(text.removeprefix("@")) if text == "-" or text.startswith("@") else text)


def _recipient_argument(text: str) -> list[Any]:
    found = parse_json(text) if text.lstrip()[:1] in ("{", "[") else text
    return found if isinstance(found, list) else [found]


def command_trigger(arguments: argparse.Namespace) -> int:
    """Record an event, or one per line of a JSON Lines file; exit 0 only when all are on the disk."""
    config = config_of(arguments)
    if arguments.jsonl is not None:
        if arguments.workflow or arguments.to or arguments.payload:
            raise UsageError("--jsonl takes everything from its lines: no WORKFLOW, --to or --payload")
        return _trigger_lines(arguments, config)
    if not arguments.workflow or not arguments.to:
        raise UsageError("trigger needs a WORKFLOW and --to ID, or --jsonl FILE")
    to = [recipient for text in arguments.to for recipient in _recipient_argument(text)]
    body = {"name": arguments.workflow, "to": to, "payload": _payload_argument(arguments.payload)}
    body["transactionId"] = arguments.transaction_id
    trigger = check_trigger(config, body, SystemClock().now())
    with store_of(config, must_exist=False) as now, _store_errors(str(config.database)), transaction():
        answer, events = record_trigger(trigger, now)
    for reason in answer.errors:
        print(f"digestd: {reason}", file=sys.stderr)
    text = (
        f"recorded {len(events)} events, transaction id {answer.transaction_id}"
        if events
        else f"nothing new: transaction id {answer.transaction_id} is known"
    )
    if not answer.errors:
        show(arguments, {"transactionId": answer.transaction_id, "recorded": len(events)}, text)
    return 1 if answer.errors else 0


def _trigger_lines(arguments: argparse.Namespace, config: Config) -> int:
    """Each line a trigger as the API takes it; a bad line is told and the others go on."""
    recorded, refused = 0, 0
    batch: list[tuple[int, Trigger]] = []
    clock = SystemClock()

    def refuse(number: int, reason: str) -> None:
        nonlocal refused
        refused += 1
        print(f"digestd: line {number}: {one_line(reason)}", file=sys.stderr)

    def flush() -> None:
        nonlocal recorded
        with transaction():
            answers = [(number, *record_trigger(trigger, clock.now())) for number, trigger in batch]
        for number, answer, events in answers:
            recorded += len(events)
            for reason in answer.errors:
                refuse(number, reason)
        batch.clear()

    with store_of(config, must_exist=False), _store_errors(str(config.database)):
        for number, line in _read_lines(arguments.jsonl):
            try:
                batch.append((number, check_trigger(config, parse_json(line), clock.now())))
            except Rejected as error:
                refuse(number, error.hint or error.message)
            if len(batch) >= BATCH:
                flush()
        flush()
    text = f"recorded {recorded} events" + (f", refused {refused} lines" if refused else "")
    show(arguments, {"recorded": recorded, "refused": refused}, text)
    return 1 if refused else 0


def command_cancel(arguments: argparse.Namespace) -> int:
    """Cancel what is unfinished of a transaction; exit 1 when there was nothing to cancel."""
    config, transaction_id = config_of(arguments), check_id(arguments.transaction_id, "TRANSACTION_ID")
    with store_of(config) as now, _store_errors(str(config.database)), transaction():
        cancelled = cancel_transaction(transaction_id, now)
    show(
        arguments, {"cancelled": cancelled}, "cancelled" if cancelled else "nothing to cancel: unknown, or already sent"
    )
    return 0 if cancelled else 1


# -- looking in --------------------------------------------------------------------------------------------------------


def _config_or_refusal(arguments: argparse.Namespace) -> tuple[Config, str | None]:
    """The config; where the file is refused, enough of one to find the database, and the problems."""
    try:
        return config_of(arguments), None
    except ConfigError as error:
        config = Config()
        config._source = find_config(arguments.config)
        with contextlib.suppress(OSError, ValueError, AttributeError, pydantic.ValidationError):
            named = tomli.loads(config._source.read_text("utf-8-sig")).get("daemon", {}).get("database")
            config = Config(daemon=DaemonSettings(**({"database": named} if named else {})))
            config._source = find_config(arguments.config)
        if not config.database.exists():
            raise
        return config, str(error)


def _status_facts(config: Config, refused: str | None) -> dict[str, Any]:
    """What `status` tells, from the rows."""
    holder, wake_at = lock_holder(config.database), next_wake_at()
    counts = dict(
        rows(
            "SELECT 'open', count(*) FROM digests WHERE state IN ('open', 'held') UNION ALL"
            " SELECT 'waiting', count(*) FROM jobs WHERE state = 'waiting' UNION ALL"
            " SELECT 'retrying', count(*) FROM jobs WHERE state = 'delayed' AND tries > 0 UNION ALL"
            " SELECT 'repeatables', count(*) FROM repeatables WHERE state = 'active' UNION ALL"
            " SELECT 'paused', count(*) FROM repeatables WHERE state = 'paused'"
        )
    )
    return {
        "running": holder is not None, "pid": holder, **counts, "next": None if wake_at is None else iso_text(wake_at),
        "configRefused": refused or remembered("config_refused"),
        "troubleCount": row("SELECT count(*) FROM v_trouble")[0],
    }  # fmt: skip


def command_status(arguments: argparse.Namespace) -> int:
    """Is it running, what is open, what needs a person? Exit 1 when something does."""
    config, refusal = _config_or_refusal(arguments)
    with store_of(config), _store_errors(str(config.database)):
        facts = _status_facts(config, refusal)
        trouble, refused = facts["troubleCount"], facts["configRefused"]
        if arguments.json:
            names = ("what", "id", "name", "subscriberId", "since", "reason", "hint")
            facts["trouble"] = [dict(zip(names, one, strict=True)) for one in rows("SELECT * FROM v_trouble LIMIT 100")]
            print(json.dumps(facts, ensure_ascii=False))
        else:
            print(f"daemon      {'running, process ' + facts['pid'] if facts['running'] else 'not running'}")
            print(f"windows     {facts['open']} open")
            print(f"messages    {facts['waiting']} waiting, {facts['retrying']} retrying")
            print(
                f"repeatables {facts['repeatables']} active"
                + (f", {facts['paused']} paused" if facts["paused"] else "")
            )
            print(f"next due    {facts['next'] or 'nothing'}")
            if refused:
                print(f"\nThe config on disk is refused; a daemon goes on with the one before:\n{refused}")
            print(f"\n{trouble} need a hand:" if trouble else "\nnothing needs a hand")
            show_table(
                arguments, "SELECT what, id, name, subscriber_id, since_utc, reason, hint FROM v_trouble LIMIT 20"
            )
    return 1 if trouble or refused else 0


def command_list(arguments: argparse.Namespace) -> int:
    """digests, jobs: the rows of a view, newest first."""
    view = {"digests": "v_digests", "jobs": "v_jobs"}[arguments.command]
    config = config_of(arguments)
    with store_of(config), _store_errors(str(config.database)):
        if not show_table(arguments, f"SELECT * FROM {view} LIMIT ?", arguments.limit) and not arguments.json:
            print("none")
    return 0


def _repeatable_line(facts: dict[str, Any]) -> dict[str, Any]:
    """A spec as one line of the list."""
    last = facts["lastRun"] or {}
    due = facts["next"][0] if facts["next"] else "-"
    ran = f"{last['slot']} {last['result']}, {duration_text(last['latenessMs'])} late" if last else "-"
    limit = "" if facts["limit"] is None else f" of {facts['limit']}"
    return {
        "key": facts["key"], "rule": facts["rule"], "timezone": facts["timezone"], "state": facts["state"],
        "next": due, "last run": ran, "24 h": f"{facts['runs24h']} runs, {facts['failures24h']} failed",
        "count": f"{facts['count']}{limit}", "reason": facts["reason"] or "",
    }  # fmt: skip


def command_repeat_list(arguments: argparse.Namespace) -> int:
    """The repeatables, ordered by their next time, with the last run, the last 24 hours, count and state."""
    config = config_of(arguments)
    with store_of(config) as now, _store_errors(str(config.database)):
        listed = repeatable_facts(now)
    if arguments.json:
        print(json.dumps(listed, ensure_ascii=False))
    elif listed:
        lines = [_repeatable_line(facts) for facts in listed]
        print_columns(list(lines[0]), [list(line.values()) for line in lines])
    else:
        print("none")
    return 0


def _repeatable_text(facts: dict[str, Any]) -> str:
    """All about one spec, a fact a line."""
    lines = dict(_repeatable_line(facts))
    lines["next"] = ", ".join(facts["next"]) or "-"
    if facts["lastRun"] and facts["lastRun"]["reason"]:
        lines["last run"] += f": {facts['lastRun']['reason']}"
    lines |= {name: facts[name] for name in ("source", "overlap", "missed")}
    lines["does"] = json.dumps({name: facts[name] for name in ("sender", "trigger", "data") if name in facts})
    return "\n".join(f"{name:<10}{one_line(str(value))}" for name, value in lines.items() if value != "")


def command_repeat_show(arguments: argparse.Namespace) -> int:
    """All about one repeatable, by its key or name."""
    config = config_of(arguments)
    with store_of(config) as now, _store_errors(str(config.database)):
        [facts] = repeatable_facts(now, find_repeatable(arguments.key).key)
    show(arguments, facts, _repeatable_text(facts))
    return 0


def _repeatable_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options of `repeat add` and `repeat remove` say, as the config would."""
    body = {"name": arguments.name}
    body |= {name: getattr(arguments, name) for name in REPEAT_OPTIONS if getattr(arguments, name, None) is not None}
    body |= {name: int(body[name]) for name in ("every", "offset") if str(body.get(name, "")).isdigit()}
    for name in ("data", "trigger", "backoff", "retention"):
        text = body.get(name)
        if text is not None and (name in ("data", "trigger") or text.lstrip()[:1] == "{"):
            body[name] = _payload_argument(text)
    return body


def command_repeat_add(arguments: argparse.Namespace) -> int:
    """Add a repeatable, or bring the one of the same name, rule, zone, end and job id up to date; its count stays."""
    config = config_of(arguments)
    spec = spec_from(config, _repeatable_body(arguments))
    with store_of(config, must_exist=False) as now, _store_errors(str(config.database)):
        with transaction():
            words = add_repeatable(spec, "command", now)
        [facts] = repeatable_facts(now, spec.key)
    text = f"{words or 'nothing changed'}: {spec.key}\nnext      {', '.join(facts['next'])}"
    show(arguments, {**facts, "changed": words}, text)
    return 0


def command_repeat(arguments: argparse.Namespace) -> int:
    """Remove, pause or resume a repeatable, run it once more now, or skip its next run; by its key or name."""
    config, key = config_of(arguments), arguments.key
    if any(getattr(arguments, name, None) is not None for name in REPEAT_OPTIONS):
        arguments.name = arguments.key
        key = key_from(config, _repeatable_body(arguments))
    with store_of(config) as now, _store_errors(str(config.database)), transaction():
        done = do_to_repeatable(config, arguments.action, key, now)
    words = {"remove": "removed", "pause": "paused", "resume": "resumed", "run-now": "one more run now",
             "skip-next": f"the run of {done.get('skipped')} is skipped"}[arguments.action]  # fmt: skip
    show(arguments, done, f"{words}: {done['key']}")
    return 0


def command_retry(arguments: argparse.Namespace) -> int:
    """Failed jobs are tried again, with the same message and id; exit 1 when there was none."""
    config = config_of(arguments)
    if (arguments.job is None) == (not arguments.all):
        raise UsageError("retry takes the number of a JOB, or --all")
    with store_of(config) as now, _store_errors(str(config.database)), transaction():
        wanted = (
            [found[0] for found in rows("SELECT id FROM jobs WHERE state = 'failed'")]
            if arguments.all
            else [arguments.job]
        )
        retried = sum(retry_job(job_id, now) for job_id in wanted)
    show(arguments, {"retried": retried}, f"{retried} jobs are tried again" if retried else "no such job has failed")
    return 0 if retried or arguments.all else 1


def command_release(arguments: argparse.Namespace) -> int:
    """A window ends now, whatever it waits for, and its digest goes out, whatever the subscriber's hours say; exit 1
    when it is not open."""
    config = config_of(arguments)
    with store_of(config) as now, _store_errors(str(config.database)), transaction():
        released = release_window(arguments.digest, now)
    show(arguments, {"released": released}, "released" if released else "no such window is open")
    return 0 if released else 1


def _subscriber_facts(config: Config, subscriber_id: str, now: int) -> dict[str, Any] | None:
    """A subscriber as `show` tells it; None where there is none of this id."""
    found = row("SELECT schedule FROM subscribers WHERE subscriber_id = ?", subscriber_id)
    if not found:
        return None
    facts, hours = load_person(subscriber_id), hours_of(config, subscriber_id)
    facts["schedule"] = None if found[0] is None else json.loads(found[0])
    if hours is not None:
        opens_at = hours.next_start(now)
        facts["inside"] = opens_at == now
        facts["nextStart"] = None if opens_at is None or opens_at == now else iso_text(opens_at)
    choices = channel_choices(subscriber_id)
    facts["channels"] = [
        {"workflow": workflow or None, "channel": channel, "enabled": is_on}
        for (workflow, channel), is_on in sorted(choices.items())
    ]
    return facts


def _subscriber_text(facts: dict[str, Any]) -> str:
    parts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    parts["hours"] = hours_text(facts["schedule"])
    if "inside" in facts:
        opens = f"outside until {facts['nextStart']}" if facts["nextStart"] else "outside, and never inside"
        parts["now"] = "inside" if facts["inside"] else opens
    chosen = [
        f"{one['channel']} {'on' if one['enabled'] else 'off'}" + (f" for {one['workflow']}" if one["workflow"] else "")
        for one in facts["channels"]
    ]
    parts["channels"] = ", ".join(chosen) or "all as the config has them"
    width = max(map(len, SUBSCRIBER_FIELDS)) + 4
    shown_parts = {name: text for name, text in parts.items() if name not in ("schedule", "inside", "nextStart")}
    return "\n".join(f"{name:<{width}}{one_line(text)}" for name, text in shown_parts.items())


def _given_columns(arguments: argparse.Namespace) -> dict[str, Any]:
    """The columns that the options of `subscriber set` name; an empty text clears."""
    fields = {name: getattr(arguments, column) for name, column in SUBSCRIBER_FIELDS.items()}
    fields = {name: text or None for name, text in fields.items() if text is not None}
    if fields.get("data") is not None:
        fields["data"] = _payload_argument(fields["data"])
    columns = check_subscriber_fields(fields)
    if arguments.schedule is not None and arguments.hours is not None:
        raise UsageError("--schedule and --hours say the same; give one")
    if arguments.hours is not None:
        columns["schedule"] = check_schedule(parse_hours(arguments.hours))
    elif arguments.schedule is not None:
        columns["schedule"] = check_schedule(_payload_argument(arguments.schedule or "null"))
    return columns


def _given_channels(arguments: argparse.Namespace, config: Config) -> PreferenceChange:
    """The channels that the options of `subscriber set` turn on or off."""
    wanted = dict.fromkeys(arguments.turn_on or (), True) | dict.fromkeys(arguments.turn_off or (), False)
    if arguments.workflow is not None and not wanted:
        raise UsageError("--workflow goes with --turn-on or --turn-off")
    return check_preference(config, {"channels": wanted, "workflowId": arguments.workflow})


def command_subscribers(arguments: argparse.Namespace) -> int:
    """The subscribers, by their ids."""
    config = config_of(arguments)
    columns = "subscriber_id, first_name, last_name, email, phone, timezone, schedule IS NOT NULL AS has_hours"
    with store_of(config), _store_errors(str(config.database)):
        sql = f"SELECT {columns} FROM subscribers ORDER BY subscriber_id LIMIT ?"
        if not show_table(arguments, sql, arguments.limit) and not arguments.json:
            print("none")
    return 0


def command_subscriber(arguments: argparse.Namespace) -> int:
    """Show a subscriber; with `set` after changing what the options name, making it where there is none."""
    config, is_set = config_of(arguments), arguments.action == "set"
    subscriber_id = check_id(arguments.id, "ID")
    changes = _given_columns(arguments) if is_set else {}
    chosen = _given_channels(arguments, config) if is_set else None
    with store_of(config, must_exist=not is_set) as now, _store_errors(str(config.database)):
        if chosen is not None:
            with transaction():
                upsert_subscriber(subscriber_id, changes, now)
                set_preference(subscriber_id, chosen, now)
        facts = _subscriber_facts(config, subscriber_id, now)
    if facts is None:
        raise DigestdError(f"there is no subscriber {subscriber_id!r}", "digestd subscriber list shows all")
    show(arguments, facts, _subscriber_text(facts))
    return 0


def command_forget(arguments: argparse.Namespace) -> int:
    """Delete a subscriber: its open windows are discarded, its unfinished jobs cancelled; exit 1 when there is none."""
    config = config_of(arguments)
    with store_of(config) as now, _store_errors(str(config.database)), transaction():
        deleted = delete_subscriber(arguments.id, now)
    show(arguments, {"deleted": deleted}, "deleted" if deleted else f"there is no subscriber {arguments.id!r}")
    return 0 if deleted else 1


def command_sql(arguments: argparse.Namespace) -> int:
    """A query, or the sqlite3 shell, on the database, read-only, so that nothing is locked or changed by looking."""
    config = config_of(arguments)
    if arguments.query is not None:
        with store_of(config), _store_errors(str(config.database)):
            database.execute_sql("PRAGMA query_only = 1")
            show_table(arguments, arguments.query)
        return 0
    shell = shutil.which("sqlite3")
    if shell is None:
        raise StoreError("the sqlite3 shell is not installed", "install it, or give a query: digestd sql 'SELECT …'")
    if not config.database.exists():
        raise StoreError(f"{config.database} is not there", "start the daemon once")
    return subprocess.call([shell, "-readonly", "-box", "-cmd", ".timeout 5000", str(config.database)])


def command_schema(arguments: argparse.Namespace) -> int:
    """The JSON Schema of the config, for editors."""
    schema = Config.model_json_schema(mode="validation")
    print(
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "digestd", **schema}, indent=2)
    )
    return 0


# -- trying out --------------------------------------------------------------------------------------------------------


def _step_named(config: Config, workflow_name: str, step_id: str) -> Any:
    """A step that sends something, by the names on the command line. Raises UsageError."""
    workflow = config.workflows.get(workflow_name)
    if workflow is None:
        words = nearest(workflow_name, list(config.workflows))
        raise UsageError(f"no workflow is called {workflow_name!r}; {words}")
    steps = {step.id: step for step in workflow.steps if isinstance(step, (ChannelStep, InAppStep))}
    if step_id not in steps:
        raise UsageError(
            f"no step of {workflow_name} that sends something is called {step_id!r}; {nearest(step_id, list(steps))}"
        )
    return steps[step_id]


def _sample_draft(arguments: argparse.Namespace, config: Config, step: Any, now: int) -> Draft:
    """What the message of a step would be made from, of payloads given on the command line: an object, or a list of
    them, one for each event."""
    given = _payload_argument(arguments.payload)
    payloads = given if isinstance(given, list) else [given]
    if not all(isinstance(payload, dict) for payload in payloads):
        raise UsageError("a payload is an object; for several events give a list of them")
    workflow = config.workflows[arguments.workflow]
    events = [
        DigestedEvent(number, now, json_text(conform(workflow, payload)), f"preview-{number}")
        for number, payload in enumerate(payloads, 1)
    ]
    [to] = _recipient_argument(arguments.to)
    person = to if isinstance(to, dict) else {"subscriberId": to}
    check_subscriber_fields(person)
    draft = Draft(0, "msg_preview", step.type, None, step, now, now, arguments.workflow, step.id, person, events=events)
    passed = [name for name in workflow.digests if workflow.places[name] < workflow.places[step.id]]
    if passed:
        draft.digest_id, draft.has_digest = 0, True
        draft.digest_key = digest_key(
            workflow.digests[passed[-1]], json.loads(events[0].payload_text) if events else {}
        )
    draft.steps = dict.fromkeys(passed, events)
    draft.digests = workflow.digests
    draft.waited = {name: delay.delay for name, delay in workflow.delays.items() if isinstance(delay.delay, int)}
    return draft


def _window_draft(arguments: argparse.Namespace, config: Config, step: Any, now: int) -> Draft:
    """The same of a window that there is: what it would send if it ended now."""
    found = row("SELECT workflow, step, subscriber_id, key FROM digests WHERE id = ?", arguments.digest)
    if not found or found[0] != arguments.workflow:
        raise UsageError(f"there is no window {arguments.digest} of the workflow {arguments.workflow}")
    _, digest_step, subscriber_id, key = found
    events = load_events(None, arguments.digest)
    return Draft(
        0, "msg_preview", step.type, None, step, now, now, arguments.workflow, step.id, load_person(subscriber_id),
        arguments.digest, key, True, events, {digest_step: events},
        digests=config.workflows[arguments.workflow].digests,
    )  # fmt: skip


def command_preview(arguments: argparse.Namespace) -> int:
    """The message of a step, as it would be sent; nothing is. Of a payload given, or of a window that there is."""
    config, now = config_of(arguments, templates=True), SystemClock().now()
    step = _step_named(config, arguments.workflow, arguments.step)
    if arguments.digest is not None:
        with store_of(config), _store_errors(str(config.database)):
            draft = _window_draft(arguments, config, step, now)
    else:
        draft = _sample_draft(arguments, config, step, now)
    draft.sender = config.senders[step.sender] if step.sender is not None else None
    unwanted, missing = why_unwanted(draft), missing_address(draft)
    if missing is not None:
        draft.subscriber = {**draft.subscriber, "email": "somebody@example.org"}
    message = compose(draft)
    for words in (unwanted and f"it would be skipped: {unwanted}", missing):
        if words:
            print(f"digestd: {words}", file=sys.stderr)
    facts = {"sender": step.sender, "to": message.to, "subject": message.subject, "contentType": message.content_type}
    head = "".join(f"{name}: {value}\n" for name, value in facts.items() if value is not None)
    show(arguments, {**facts, "wanted": not unwanted, "body": message.body}, f"{head}\n{message.body}".rstrip("\n"))
    return 0


def _test_claim(config: Config, name: str, to: str | None, now: int) -> Claim:
    """A message that says what it is, for one sender. Raises UsageError where an address is missing."""
    text = f"This is a test of the sender {name}. If you can read it, it works.\n"
    content = Content.model_construct(subject=f"A test of the sender {name}", text=text)
    person = {"subscriberId": "test", **({"email": to} if to else {})}
    draft = Draft(0, new_public_id("msg", now), "test", config.senders[name], content, now, now, "test", "test", person)
    if isinstance(draft.sender, WebhookSettings) and draft.sender.url_from is not None:
        if to is None:
            raise UsageError(f"its URL comes from data: digestd test {name} --to https://hooks.example.org/x")
        draft.sender = draft.sender.model_copy(update={"url_from": "payload.to"})
        draft.events = [DigestedEvent(0, now, json_text({"to": to}), None)]
    elif (missing := missing_address(draft)) is not None:
        raise UsageError(f"{missing if to else 'a mail needs an address'}: digestd test {name} --to you@example.org")
    return Claim(0, 0, 1, now, draft.public_id, name, draft.sender, message=compose(draft))


async def _try_once(claim: Claim) -> SendResult:
    senders = Senders()
    try:
        return await senders.send(claim)
    finally:
        await senders.close()


def command_test(arguments: argparse.Namespace) -> int:
    """Send one message by a sender, now, and say what came of it; nothing is stored."""
    config, clock = config_of(arguments, secrets=True), SystemClock()
    if arguments.sender not in config.senders:
        words = nearest(arguments.sender, list(config.senders))
        raise UsageError(f"no sender is called {arguments.sender!r}; {words}")
    claim = _test_claim(config, arguments.sender, arguments.to, clock.now())
    began = clock.monotonic()
    log.setLevel(logging.INFO)  # a sender of type log prints there
    result = asyncio.run(_try_once(claim))
    took_ms = int((clock.monotonic() - began) * SECOND)
    facts = {"outcome": result.outcome, "status": result.status_code, "reason": result.reason, "tookMs": took_ms}
    words = "sent" if result.outcome == "sent" else f"not sent, a {result.outcome} failure"
    said = f": {one_line(result.reason)}" if result.reason else ""
    show(arguments, facts, f"{words}, after {took_ms} ms{said}")
    return 0 if result.outcome == "sent" else 1


# -- senders -----------------------------------------------------------------------------------------------------------


def command_senders(arguments: argparse.Namespace) -> int:
    """The senders of the config, with what is remembered of them, and how many jobs wait for each."""
    config = config_of(arguments)
    known: dict[str, Any] = {}
    waiting: dict[str, int] = {}
    if config.database.exists():
        with store_of(config), _store_errors(str(config.database)):
            known = {found[0]: found[1:] for found in rows("SELECT * FROM v_senders")}
            waiting = dict(rows("SELECT sender, count(*) FROM jobs WHERE state = 'waiting' GROUP BY sender"))
    names = ("state", "failures", "failingSince", "lastFailure", "disabledAt", "cause", "waiting", "reason")
    listed = []
    for name, settings in config.senders.items():
        facts = dict(zip(names, known.get(name, ("ok", 0, *[None] * 6)), strict=True))
        preset = getattr(settings, "preset", None)
        kind = preset or getattr(settings, "type", "")
        listed.append({"name": name, "type": kind, **facts, "waiting": waiting.get(name, 0)})
    if arguments.json:
        print(json.dumps(listed, ensure_ascii=False))
    elif listed:
        shown_names = ("name", "type", "state", "waiting", "failures", "failingSince", "reason")
        print_columns(shown_names, [[one[name] for name in shown_names] for one in listed], 80)
    return 0


def command_sender(arguments: argparse.Namespace) -> int:
    """Enable a sender that was disabled, so that what waits for it is sent; or disable one, so that it waits."""
    config = config_of(arguments)
    if arguments.name not in config.senders:
        words = nearest(arguments.name, list(config.senders))
        raise UsageError(f"no sender is called {arguments.name!r}; {words}")
    with store_of(config) as now, _store_errors(str(config.database)), transaction():
        if arguments.action == "enable":
            done = enable_sender(arguments.name)
        else:
            done = disable_sender(config, arguments.name, "person", arguments.reason, now)
        [waiting] = row("SELECT count(*) FROM jobs WHERE state = 'waiting' AND sender = ?", arguments.name)
    word = f"{arguments.action}d" if done else f"was {arguments.action}d before"
    facts = {"name": arguments.name, "done": done, "waiting": waiting}
    show(arguments, facts, f"sender {arguments.name} {word}; {waiting} jobs wait for it")
    return 0


# -- calendars and simulation ------------------------------------------------------------------------------------------


def _rule_of(text: Any, timezone: str, anchor_at: int = 0) -> Rule:
    if not isinstance(text, str):
        raise RuleError(f"a rule is a text, not {text!r}")
    return parse_rule(text, load_zone(timezone), anchor_at)


def _anchor_of(align: Any, offset: Any, at: int) -> int:
    """What an interval counts from, as for a repeatable that is added at an instant."""
    if align not in ("clock", "start"):
        raise RuleError(f'{shown(align)} is not what an interval counts from; there are "clock" and "start"')
    offset_ms = _interval(offset) if offset else 0
    return at if align == "start" and not offset_ms else offset_ms


def _answer_rule(line: str, now: int) -> dict[str, Any]:
    """One line of `next --jsonl`: {rule, timezone, from, n} to {next} or {error}."""
    try:
        asked = parse_json(line)
        if not isinstance(asked, dict) or "rule" not in asked:
            raise RuleError("a line is an object with rule, and may have timezone, from and n")
        at = parse_instant(asked["from"]) if asked.get("from") is not None else now
        count = asked.get("n", 5)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= 10_000:
            raise RuleError(f"n is a number from 1 to 10000, not {count!r}")
        anchor_at = _anchor_of(asked.get("align") or "clock", asked.get("offset"), at)
        times = next_times(_rule_of(asked["rule"], asked.get("timezone") or "UTC", anchor_at), at, count)
        return {"next": [iso_text(moment) for moment in times]}
    except DigestdError as error:
        return {"error": error.message}


def command_next(arguments: argparse.Namespace) -> int:
    """The next instants of a rule; needs no config."""
    now = SystemClock().now()
    if arguments.jsonl is not None:
        for _, line in _read_lines(arguments.jsonl):
            print(json.dumps(_answer_rule(line, now), ensure_ascii=False))
        return 0
    if arguments.rule is None:
        raise UsageError('next needs a RULE: a cron text, "every 15m", or "daily at 09:00"')
    zone = load_zone(arguments.timezone)
    at = parse_instant(arguments.start) if arguments.start else now
    anchor_at = _anchor_of(arguments.align, arguments.offset, at)
    rule = _rule_of(arguments.rule, arguments.timezone, anchor_at)
    if isinstance(rule, LocalRule) and not arguments.json and len(arguments.rule.split()) in (5, 6):
        with contextlib.suppress(RuleError):  # words of as many parts are no cron
            for words in cron_traps(arguments.rule, zone):
                print(f"digestd: warning: {words}", file=sys.stderr)
    times = next_times(rule, at, arguments.n)
    if not times:
        raise RuleError(f"{arguments.rule!r} has no time after {iso_text(at)}")
    if arguments.json:
        print(json.dumps({"next": [iso_text(moment) for moment in times]}))
    else:
        for moment in times:
            with contextlib.suppress(OverflowError):  # a zone may lie outside the calendar where UTC is inside
                print(f"{iso_text(moment)}  {local_time(moment, zone):%a %Y-%m-%d %H:%M:%S} {arguments.timezone}")
    return 0


def command_simulate(arguments: argparse.Namespace) -> int:
    """Play a timeline through the real engine under a virtual clock; nothing is sent."""
    config = config_of(arguments, secrets=False, templates=True)
    lines = read_timeline(_read_text(arguments.timeline))
    until = parse_instant(arguments.until) if arguments.until else None
    log.setLevel(logging.CRITICAL)
    open_store(":memory:", 0)
    try:
        for told in Simulation(config).run(lines, until):
            print(json.dumps(told, ensure_ascii=False) if arguments.json else _in_words(told))
    finally:
        close_store()
    return 0


def _in_words(told: dict[str, Any]) -> str:
    """One thing that happened, as a line a person can follow."""
    subject = told.get("repeatable") or "/".join(told[name] for name in ("workflow", "step") if name in told)
    parts = [told["at"], f"{told['what']:<9}", subject]
    if "subscriberId" in told:
        parts.append(f"for {told['subscriberId']}" + (f" key {json.dumps(told['key'])}" if "key" in told else ""))
    if "sender" in told or "channel" in told:
        parts.append(f"[{told.get('channel') or 'message'} by {told.get('sender') or 'the feed'}]")
    if told.get("eventCount"):
        parts.append(f"{told['eventCount']} event{'s' if told['eventCount'] != 1 else ''}")
    for name, word in (
        ("closesAt", "closes"),
        ("until", "until"),
        ("slot", "slot"),
        ("count", "run"),
        ("reason", "because:"),
    ):
        if told.get(name) is not None:
            parts.append(f"{word} {told[name]}")
    subject_line = (told.get("message") or {}).get("subject") if isinstance(told.get("message"), dict) else None
    return one_line("  ".join(part for part in [*parts, f"“{subject_line}”" if subject_line else ""] if part))


# -- the parser --------------------------------------------------------------------------------------------------------


def _common(parser: argparse.ArgumentParser, top: bool) -> None:
    missing: Any = (
        None if top else argparse.SUPPRESS
    )  # so that an option before the command is not overwritten after it
    parser.add_argument("--config", metavar="FILE", default=missing, help="the config file")
    parser.add_argument("--json", action="store_true", default=False if top else argparse.SUPPRESS, help="print JSON")
    parser.add_argument(
        "--debug", action="store_true", default=False if top else argparse.SUPPRESS, help="log more; show traces"
    )


AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def _adder(commands: Any) -> AddCommand:
    """What adds a command to a group of them: its name, its function, and a line of help."""

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=(function.__doc__ or text).strip()
        )
        _common(command, top=False)
        command.set_defaults(function=function)
        return command

    return add


def _count(text: str, most: int = 10_000) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {most}")
    return int(text)


def _add_event_commands(add: AddCommand) -> None:
    trigger = add("trigger", command_trigger, "record an event")
    trigger.add_argument("workflow", nargs="?", metavar="WORKFLOW")
    trigger.add_argument(
        "--to", metavar="ID", action="append", help="a subscriber id, or JSON with subscriberId; may be repeated"
    )
    trigger.add_argument("--payload", metavar="JSON", help="the payload: JSON, @file, or - for standard input")
    trigger.add_argument("--transaction-id", metavar="ID")
    trigger.add_argument(
        "--jsonl", metavar="FILE", help="one trigger a line, as the API takes them; - for standard input"
    )
    add("cancel", command_cancel, "cancel what is unfinished of a transaction").add_argument(
        "transaction_id", metavar="TRANSACTION_ID"
    )


def _add_looking_commands(add: AddCommand) -> None:
    add("status", command_status, "what is open, what needs a hand")
    for name, text in (("digests", "the windows, newest first"), ("jobs", "the jobs, newest first")):
        add(name, command_list, text).add_argument(
            "-n", "--limit", type=_count, default=20, metavar="N", help="how many"
        )
    _add_repeat_commands(add)
    retry = add("retry", command_retry, "try failed jobs again")
    retry.add_argument("job", nargs="?", type=functools.partial(_count, most=2**62), metavar="JOB")
    retry.add_argument("--all", action="store_true")
    release = add("release", command_release, "end a window now")
    release.add_argument("digest", type=functools.partial(_count, most=2**62), metavar="DIGEST")
    _add_subscriber_command(add)
    _add_sender_command(add)
    add("sql", command_sql, "the sqlite3 shell on the database, read-only").add_argument(
        "query", nargs="?", metavar="SQL"
    )
    add("schema", command_schema, "the JSON Schema of the config, for editors")


REPEAT_OPTIONS: dict[str, dict[str, Any]] = {
    "cron": {"metavar": "TEXT", "help": "5 fields, or 6 with seconds first"},
    "every": {"metavar": "DURATION", "help": "an interval"},
    "align": {"choices": ["clock", "start"], "help": "what an interval counts from"},
    "offset": {"metavar": "DURATION", "help": "shift of an interval"},
    "limit": {"metavar": "N", "type": int, "help": "at most so many runs ever"},
    "count": {"metavar": "N", "type": int, "help": "where the counter starts"},
    "start_at": {"metavar": "ISO", "help": "no run before it"},
    "end_at": {"metavar": "ISO", "help": "no run after it"},
    "timezone": {"metavar": "TZ"},
    "immediately": {"action": "store_true", "default": None, "help": "the first run now, then the plan"},
    "job_id": {"metavar": "ID", "help": "tells two of one name and rule apart"},
    "overlap": {"choices": ["allow", "skip", "queue"], "help": "while the run before is still going"},
    "missed": {"choices": ["once", "skip", "all"], "help": "after a downtime"},
    "jitter": {"metavar": "DURATION", "help": "spread runs over so long after their slot"},
    "attempts": {"metavar": "N", "type": int, "help": "tries of one run"},
    "backoff": {"metavar": "DURATION", "help": "between tries; or JSON with type, delay and jitter"},
    "retention": {"metavar": "DURATION", "help": "how long ended runs are kept; or JSON with count and age"},
    "sender": {"metavar": "NAME"},
    "subject": {"metavar": "TEMPLATE"},
    "text": {"metavar": "TEMPLATE"},
    "html": {"metavar": "TEMPLATE"},
    "data": {"metavar": "JSON", "help": "what the message carries: JSON, @file, or -"},
    "trigger": {"metavar": "JSON", "help": "instead of a sender: workflow, to and payload"},
}


def _add_repeat_commands(add: AddCommand) -> None:
    repeat = add("repeat", command_repeat_list, "the repeatables: list, show, add, remove, pause, run now")
    action = _adder(repeat.add_subparsers(dest="action", metavar="ACTION", required=True))

    def options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
        for name in names:
            parser.add_argument(f"--{name.replace('_', '-')}", **REPEAT_OPTIONS[name])

    action("list", command_repeat_list, "all, by their next time")
    adding = action("add", command_repeat_add, "add one, or change it")
    adding.add_argument("name", metavar="NAME")
    options(adding, REPEAT_OPTIONS)
    action("show", command_repeat_show, "one, with its next five times").add_argument("key", metavar="KEY")
    for name, text in zip(
        REPEATABLE_DEEDS,
        ("end one, with its pending run", "no runs until it is resumed", "go on from now",
         "one more run, beside the plan", "pass over the pending run"),
        strict=True,
    ):  # fmt: skip
        parser = action(name, command_repeat, text)
        parser.add_argument("key", metavar="KEY", help="its key, or its name where only one has it")
        if name == "remove":
            options(parser, ("cron", "every", "end_at", "timezone", "job_id"))


def _add_subscriber_command(add: AddCommand) -> None:
    subscriber = add("subscriber", command_subscriber, "people: their address, zone and weekly hours")
    action = _adder(subscriber.add_subparsers(dest="action", metavar="ACTION", required=True))

    change = action("set", command_subscriber, "make one, or change fields; an empty text clears")
    for parser in (
        change,
        action("show", command_subscriber, "one, and when its hours begin"),
        action("delete", command_forget, "one, with its open work"),
    ):
        parser.add_argument("id", metavar="ID", help="the subscriber id that triggers name")
    for field, column in SUBSCRIBER_FIELDS.items():
        change.add_argument(f"--{column.replace('_', '-')}", metavar="JSON" if field == "data" else "TEXT")
    change.add_argument("--hours", metavar="TEXT", help="mon-fri 09:00-17:00, sat 10:00-12:00; or always")
    change.add_argument("--schedule", metavar="JSON", help="the same as Novu writes it: JSON, @file, or -")
    for name in ("on", "off"):
        change.add_argument(
            f"--turn-{name}", metavar="CHANNEL", action="append", choices=CHANNELS, help="may be repeated"
        )
    change.add_argument("--workflow", metavar="WORKFLOW", help="of this workflow alone")
    listing = action("list", command_subscribers, "all")
    listing.add_argument("-n", "--limit", type=_count, default=100, metavar="N", help="how many")


def _add_sender_command(add: AddCommand) -> None:
    sender = add("sender", command_senders, "the senders: how they do; enable one that was disabled")
    action = _adder(sender.add_subparsers(dest="action", metavar="ACTION", required=True))
    action("list", command_senders, "all, with what waits for them")
    action("enable", command_sender, "send again, beginning with what waits").add_argument("name", metavar="NAME")
    disabling = action("disable", command_sender, "send nothing until it is enabled; what is to be sent waits")
    disabling.add_argument("name", metavar="NAME")
    disabling.add_argument("--reason", default="disabled by hand", metavar="TEXT")


def _add_trying_commands(add: AddCommand) -> None:
    preview = add("preview", command_preview, "the message of a step, as it would be sent")
    preview.add_argument("workflow", metavar="WORKFLOW")
    preview.add_argument("step", metavar="STEP")
    preview.add_argument(
        "--payload", metavar="JSON", help="of one event, or a list of several: JSON, @file, or - for standard input"
    )
    preview.add_argument("--to", metavar="ID", default="somebody", help="a subscriber id, or JSON with subscriberId")
    preview.add_argument("--digest", type=functools.partial(_count, most=2**62), metavar="N", help="of this window")
    test = add("test", command_test, "send one message by a sender, now")
    test.add_argument("sender", metavar="SENDER")
    test.add_argument("--to", metavar="ADDRESS", help="for mail: where to; for a sender with url_from: the URL")


def _add_calendar_commands(add: AddCommand) -> None:
    upcoming = add("next", command_next, "the next times of a rule")
    upcoming.add_argument("rule", nargs="?", metavar="RULE", help='a cron text, "every 15m", "daily at 09:00"')
    upcoming.add_argument("--timezone", default="UTC", metavar="TZ")
    upcoming.add_argument("--from", dest="start", metavar="ISO", help="strictly after this instant; default now")
    upcoming.add_argument("-n", type=_count, default=5, metavar="N", help="how many, up to 10000")
    upcoming.add_argument("--align", default="clock", choices=["clock", "start"], help="what an interval counts from")
    upcoming.add_argument("--offset", metavar="DURATION", help="shift of an interval")
    upcoming.add_argument("--jsonl", metavar="FILE", help="one {rule, timezone, from, n} a line; - for standard input")
    simulate = add("simulate", command_simulate, "play a timeline under a virtual clock; nothing is sent")
    simulate.add_argument("timeline", metavar="TIMELINE", help="JSON Lines; - for standard input")
    simulate.add_argument("--until", metavar="ISO", help="go on to this instant")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="digestd", description="One mail instead of thirty, and jobs that repeat.")
    parser.add_argument("--version", action="version", version=f"digestd {__version__}")
    _common(parser, top=True)
    add = _adder(parser.add_subparsers(dest="command", metavar="COMMAND", required=True))
    add("run", command_run, "start the daemon")
    add("reload", command_reload, "let the daemon read its config again, and wait until it has")
    check = add("check", command_check, "validate the config")
    check.add_argument("file", nargs="?", metavar="FILE")
    check.add_argument("--db", action="store_true", help="count what is under way, and what of it would have no place")
    _add_event_commands(add)
    _add_looking_commands(add)
    _add_trying_commands(add)
    _add_calendar_commands(add)
    add("migrate", command_migrate, "bring the database to the newest schema")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parsed = make_parser().parse_args(arguments)
    if not log.handlers:
        set_up_log("warning")
    try:
        return int(parsed.function(parsed))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except DigestdError as error:
        if parsed.debug:
            raise
        print(str(error) if isinstance(error, ConfigError) else f"digestd: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
