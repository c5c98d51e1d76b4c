"""The promises, whatever comes in, in whatever order, and wherever the process ends: each event in exactly one digest of
each digest step that it reached, or alone, or kept with the reason why not; nothing doubled, nothing stuck.

What is checked is read from the tables by SQL and from what was sent, as somebody outside would.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import pathlib
import sqlite3
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import digestd
from conftest import World

CONFIG = """
[senders.hook]
type = "webhook"
url = "http://127.0.0.1:9/hook"
retry = ["5s", "1m"]
jitter = 0

[workflows.plain]
steps = [
    { id = "first", type = "digest", key = "payload.k", window = "10m" },
    { id = "chat", type = "chat", sender = "hook" },
]
[workflows.office]
steps = [
    { id = "first", type = "digest", window = "10m", extend_to_schedule = true },
    { id = "feed", type = "in_app" },
    { id = "chat", type = "chat", sender = "hook", outside = "hold" },
]
[workflows.again]
steps = [
    { id = "first", type = "digest", key = "payload.k", window = "10m", start = "when_repeated", look_back = "5m" },
    { id = "wait", type = "delay", delay = "1m" },
    { id = "chat", type = "chat", sender = "hook" },
]
[workflows.full]
steps = [
    { id = "first", type = "digest", window = "10m", max_events = 3 },
    { id = "chat", type = "chat", sender = "hook" },
]
[workflows.twice]
steps = [
    { id = "first", type = "digest", key = "payload.k", window = "10m" },
    { id = "between", type = "push", sender = "hook" },
    { id = "second", type = "digest", window = "1h" },
    { id = "chat", type = "chat", sender = "hook" },
]
[workflows.picky]
steps = [
    { id = "first", type = "digest", window = "10m", when = "payload.n > 3" },
    { id = "chat", type = "chat", sender = "hook" },
]
[workflows.mixed]
steps = [
    { id = "first", type = "digest", key = "payload.k", window = "10m", when = "payload.n > 3", max_events = 2 },
    { id = "second", type = "digest", window = "30m", start = "when_repeated", extend_to_schedule = true },
    { id = "feed", type = "in_app" },
    { id = "chat", type = "chat", sender = "hook", stop_on_failure = true },
    { id = "last", type = "push", sender = "hook" },
]
[workflows.late]
steps = [
    { id = "wait", type = "delay", delay = "1m" },
    { id = "second", type = "digest", key = "payload.k", window = "5m" },
    { id = "chat", type = "chat", sender = "hook" },
]
[workflows.hourly]
steps = [
    { id = "first", type = "digest", every = "hour" },
    { id = "chat", type = "chat", sender = "hook" },
]
"""
STEPS = {name: workflow["steps"] for name, workflow in tomllib.loads(CONFIG)["workflows"].items()}
STEP_OF = {(name, step["id"]): step for name, steps in STEPS.items() for step in steps}
LOOK_BACK = 5 * digestd.MINUTE
MESSAGES = ("chat", "push")
UNFINISHED = ("delayed", "waiting", "active")
OPEN = ("open", "held")

Events = dict[tuple[str, str, int], str | None]  # workflow, subscriber, the payload's u -> transaction id
Rows = dict[int, dict[str, Any]]
Members = dict[int, set[int]]  # window -> events


def weekly(**days: tuple[str, str]) -> dict[str, Any]:
    week = {day: {"isEnabled": True, "hours": [{"start": start, "end": end}]} for day, (start, end) in days.items()}
    return {"isEnabled": True, "weeklySchedule": week}


HOURS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "short": weekly(monday=("09:00 AM", "09:05 AM"), wednesday=("09:00 AM", "09:00 AM")),
    "nights": weekly(monday=("10:00 PM", "06:00 AM"), tuesday=("10:00 PM", "06:00 AM")),
    "never": {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": False, "hours": []}}},
}

# -- what may happen ---------------------------------------------------------------------------------------------------

PEOPLE = st.sampled_from(["s1", "s1", "s2"])
RECIPIENTS = st.sampled_from([["s1"], ["s2"], ["s1", "s2"], ["s2", "s3", "s1"]])
IDS = st.none() | st.sampled_from(["t1", "t2", "t3", "t4", "t5", "t6"])
PAYLOADS = st.fixed_dictionaries({"k": st.sampled_from([1, 1, 2]), "n": st.sampled_from([9, 1, 4, 9, 3, 5, 4, "many"])})
SPANS = st.sampled_from(
    [digestd.MINUTE, 0, 1, LOOK_BACK, LOOK_BACK + 1, 10 * digestd.MINUTE, digestd.HOUR, digestd.DAY]
)
SHIFTS = st.sampled_from([0, -1, -LOOK_BACK, -10 * digestd.MINUTE, -digestd.HOUR, digestd.MINUTE, digestd.HOUR])
PLACES = st.integers(0, 5)  # among those there are, the newest first
REPLIES = st.lists(st.sampled_from(["temporary", "sent", "permanent", "gone"]), max_size=4)


def may_hold(workflows: list[str]) -> bool:
    return any(step.get("extend_to_schedule") for name in workflows for step in STEPS[name])


def waves(workflows: list[str]) -> st.SearchStrategy[list[list[tuple[Any, ...]]]]:
    """Operations that concern some workflows: lists of lists, as one list would be short nearly always."""
    workflow = st.sampled_from(workflows)
    body = st.tuples(workflow, RECIPIENTS, PAYLOADS, IDS)
    call = st.tuples(st.just("trigger"), st.lists(body, min_size=1, max_size=3))
    cancel = st.tuples(st.just("cancel"), PLACES)
    go_on = st.tuples(st.just("next"))
    advance = st.tuples(st.just("advance"), SPANS)
    plain = [
        call,
        cancel,
        advance,
        go_on,
        st.tuples(st.just("insert"), workflow, PEOPLE, PAYLOADS, SHIFTS, IDS, st.booleans()),
        st.tuples(st.just("repeat"), PLACES),
        st.tuples(st.just("undo"), body),
        st.tuples(st.just("release"), PLACES),
        st.tuples(st.just("sleep"), SPANS),
        st.tuples(st.just("edge"), st.sampled_from([-1, 0, 1])),
        st.tuples(st.just("tick")),
        st.tuples(st.just("hours"), PEOPLE, st.sampled_from(list(HOURS))),
        st.tuples(st.just("switch"), st.booleans()),
        st.tuples(st.just("switch"), st.just(True)),
    ]
    wake = st.tuples(st.just("wake"))
    operation = st.one_of(
        *plain,
        *([wake, wake, wake] if may_hold(workflows) else []),
        call,
        call,
        call,
        cancel,
        advance,
        go_on,
        st.tuples(st.just("begin")),
        st.tuples(st.just("finish")),
        st.tuples(st.just("reply"), REPLIES),
        st.tuples(st.just("crash"), st.integers(0, 50), st.one_of(plain)),
    )
    return st.lists(st.lists(operation, min_size=4, max_size=12), min_size=1, max_size=8)


def end_of(step: dict[str, Any], opened_at: int) -> int:
    if step.get("every") == "hour":
        return opened_at - opened_at % digestd.HOUR + digestd.HOUR
    return opened_at + digestd.parse_duration(step["window"])


def members(events: Rows, windows: Rows, runs: Rows, joined: Rows) -> Members:
    """The events in each window, through the runs that joined it, without those that were cancelled."""
    inside: Members = {window_id: set() for window_id in windows}
    for event_id, event in events.items():
        if event["digest_id"] is not None and event["state"] == "placed":
            inside[event["digest_id"]].add(event_id)
    for one in sorted(joined.values(), key=lambda one: one["joined_at"]):
        run = runs[one["run_id"]]
        found = inside[run["digest_id"]] if run["digest_id"] is not None else {run["event_id"]}
        inside[one["digest_id"]] |= found
    return inside


class Crash(BaseException):
    """Not an Exception, so that nothing in the program can mistake it for one."""


@contextlib.contextmanager
def crash_after(count: int) -> Iterator[None]:
    """The process ends after this many statements."""
    left = count

    def hook(event: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash

    digestd.database.query_hooks.append(hook)
    try:
        yield
    finally:
        digestd.database.query_hooks.remove(hook)


class Play:
    """A world to which things happen, and what somebody outside knows of it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.w = World(folder, CONFIG)
        self.count = 0  # events so far; their payload's u
        self.events: Events = {}  # those that were accepted
        self.asked: Events = {}  # those of a call that has no answer yet
        self.bodies: list[dict[str, Any]] = []  # calls with an id, so that they can be made again
        self.in_hand: list[digestd.Claim] = []  # tries under way
        self.closed: dict[int, Any] = {}  # windows that have ended, as they were then
        self.turn = 0
        self.other_hours = itertools.cycle(["short", "nights"])
        self.placed: dict[int, int] = {}  # events -> the turn in which they were placed
        self.cancelled: dict[int, int] = {}
        self.opened: dict[int, int] = {}  # windows -> the turn in which they were opened
        self.over_in: dict[int, int] = {}
        self.ended: dict[int, str] = {}  # events that were cancelled or have failed
        self.begun: dict[str, int] = {}  # messages, by the number of their tries
        self.feed: set[int] = set()
        self.were_cancelled: set[int] = set()  # events, when it was looked last
        self.were_over: set[int] = set()  # runs that were cancelled

    def open(self) -> None:
        self.w.open()
        digestd.database.execute_sql("PRAGMA synchronous = 0")  # processes end here, not machines

    def do(self, kind: str, *values: Any) -> None:
        self.turn += 1
        getattr(self, f"do_{kind}")(*values)
        self.look()
        if kind in ("tick", "next", "advance"):
            self.look_for_what_is_late()

    # -- what happens

    def do_trigger(self, bodies: Sequence[Any]) -> None:
        calls = []
        for workflow, to, payload, name in bodies:
            self.count += 1
            calls.append({"name": workflow, "to": to, "payload": {**payload, "u": self.count}, "transactionId": name})
        self.bodies += [body for body in calls if body["transactionId"]]
        self.call(calls)

    def do_repeat(self, place: int) -> None:
        if self.bodies:
            self.call([self.bodies[-1 - place % len(self.bodies)]])

    def call(self, bodies: list[dict[str, Any]]) -> None:
        used = {(workflow, to, name): number for (workflow, to, number), name in self.events.items() if name}
        expected = []
        for body in bodies:
            workflow, number, name, clashes = body["name"], body["payload"]["u"], body["transactionId"], False
            for to in body["to"]:
                if name is None or used.setdefault((workflow, to, name), number) == number:
                    self.asked[workflow, to, number] = name
                else:
                    clashes = True  # the id was used for something else
            expected.append("error" if clashes else "processed")
        w = self.w
        with digestd.transaction():
            triggers = [digestd.check_trigger(w.config, body, w.now) for body in bodies]
            answers = digestd.take_triggers(w.config, triggers, w.now)
        self.take()
        assert [answer.status for answer in answers] == expected

    def do_undo(self, body: Any) -> None:
        """A call that is rolled back, as when the disk is full; nothing of it is there."""
        workflow, to, payload, _ = body
        w = self.w
        trigger = digestd.check_trigger(w.config, {"name": workflow, "to": to, "payload": {**payload, "u": 0}}, w.now)
        with contextlib.suppress(ZeroDivisionError), digestd.transaction():
            digestd.take_triggers(w.config, [trigger], w.now)
            raise ZeroDivisionError

    def take(self) -> None:
        self.events.update(self.asked)
        self.asked = {}

    def do_insert(self, workflow: str, to: str, payload: Any, shift: int, name: str | None, is_other: bool) -> None:
        if name and name in [self.events[event] for event in self.events if event[:2] == (workflow, to)]:
            return  # the unique index would refuse it
        self.count += 1
        self.asked = {(workflow, to, self.count): name}
        sql = (
            "INSERT INTO events (workflow, subscriber_id, payload, received_at, transaction_id) VALUES (?, ?, ?, ?, ?)"
        )
        values = (workflow, to, json.dumps({**payload, "u": self.count}), self.w.now + shift, name)
        if is_other:  # another program
            with contextlib.closing(sqlite3.connect(self.w.path)) as connection, connection:
                connection.execute(sql, values)
        else:
            self.w.rows(sql, *values)
        self.take()

    def do_cancel(self, place: int) -> None:
        known = self.w.rows(
            "SELECT transaction_id FROM events WHERE transaction_id IS NOT NULL GROUP BY 1 ORDER BY max(id) DESC"
        )
        if known:
            count = "SELECT count(*) FROM events WHERE state = 'cancelled'"
            before = self.w.one(count)
            told = self.w.cancel(known[place % len(known)][0])
            assert told == (self.w.one(count) > before), "cancel says what it did"

    def do_release(self, place: int) -> None:
        known = self.w.rows("SELECT id, state IN ('open', 'held') FROM digests ORDER BY 2 DESC, id DESC")
        if known:
            window_id, is_open = known[place % len(known)]
            with digestd.transaction():
                assert digestd.release_window(window_id, self.w.now) == bool(is_open), "release says what it did"

    def do_advance(self, span: int) -> None:
        self.w.run_until(self.w.now + span)

    def do_sleep(self, span: int) -> None:
        self.w.clock.at += span  # and no tick

    def do_edge(self, shift: int) -> None:
        found = self.w.one("SELECT min(due_at) FROM digests WHERE state IN ('open', 'held')")
        if found is not None:
            self.w.clock.at = max(self.w.now, found + shift)

    def do_tick(self) -> None:
        self.w.tick()

    def do_next(self) -> None:
        self.w.run_until(digestd.next_wake_at() or self.w.now)

    def do_hours(self, who: str, name: str) -> None:
        with digestd.transaction():
            digestd.upsert_subscriber(who, {"schedule": HOURS[name] and json.dumps(HOURS[name])}, self.w.now)

    def rename(self) -> None:
        """A message that is composed again now would have other bytes."""
        for who in ("s1", "s2", "s3"):
            self.w.subscriber(who, firstName=f"in turn {self.turn}")

    def do_wake(self) -> None:
        """Hours that the end of a hold does not lie in, and then the next window ends."""
        self.do_hours("s1", next(self.other_hours))
        found = self.w.one("SELECT min(due_at) FROM digests WHERE state IN ('open', 'held')")
        if found is not None:
            self.w.run_until(found)

    def do_reply(self, replies: list[str]) -> None:
        self.w.reply("hook", *replies)

    def do_switch(self, on: bool) -> None:
        """Somebody enables the sender, or disables it."""
        with digestd.transaction():
            if on:
                digestd.enable_sender("hook")
            else:
                digestd.disable_sender(self.w.config, "hook", "person", "by hand", self.w.now)

    def do_begin(self) -> None:
        with digestd.transaction():
            self.in_hand += digestd.tick(self.w.config, self.w.now, self.w.room).claims

    def do_finish(self) -> None:
        while self.in_hand:
            self.w._try(self.in_hand.pop(0))
        self.rename()

    def do_crash(self, count: int, operation: tuple[Any, ...]) -> None:
        """The process ends within an operation, or after it, and a new one goes on. What was under way has arrived."""
        try:
            with crash_after(count):
                getattr(self, f"do_{operation[0]}")(*operation[1:])
        except Crash:
            pass
        self.w.crash()
        self.w.sent += [(self.w.now, claim, digestd.result_of(claim, "sent")) for claim in self.in_hand]
        self.in_hand = []
        self.open()
        self.rename()
        there = self.read_events()
        taken = [event in there for event in self.asked]
        assert all(taken) or not any(taken), "a call that got no answer was taken as a whole, or not at all"
        if any(taken):
            self.take()
        self.asked = {}

    # -- what can be seen

    def read_events(self) -> dict[tuple[str, str, int], Any]:
        found = self.w.rows("SELECT workflow, subscriber_id, payload, id FROM events")
        named = {(workflow, to, json.loads(text)["u"]): event_id for workflow, to, text, event_id in found}
        assert len(named) == len(found), "an event is there twice"
        return named

    def read(self, table: str) -> dict[int, dict[str, Any]]:
        cursor = digestd.database.execute_sql(f"SELECT rowid AS number, * FROM {table}")
        names = [column[0] for column in cursor.description]
        return {values[0]: dict(zip(names, values, strict=True)) for values in cursor.fetchall()}

    def look(self) -> None:
        """What holds at every moment."""
        tables = ("events", "digests", "runs", "digest_runs", "jobs", "attempts", "inbox_messages")
        events, windows, runs, joined, jobs, attempts, feed = map(self.read, tables)
        named = self.read_events()
        assert named.keys() == self.events.keys(), "what was accepted is there, and nothing else"
        inside = members(events, windows, runs, joined)
        self.look_at_windows(events, windows, runs, joined, inside)
        self.look_at_events(events, windows, runs, inside)
        self.look_at_messages(events, runs, jobs, attempts, feed, inside)

    def look_at_windows(self, events: Rows, windows: Rows, runs: Rows, joined: Rows, inside: Members) -> None:
        names = [
            (window["workflow"], window["step"], window["subscriber_id"], window["key"])
            for window in windows.values()
            if window["state"] in OPEN
        ]
        assert len(set(names)) == len(names), "two windows are open for one key"
        begun = collections.Counter(run["digest_id"] for run in runs.values())
        for window_id, window in windows.items():
            assert begun[window_id] == (window["state"] == "closed"), "one run for each window that was closed"
            self.opened.setdefault(window_id, self.turn)
            if window["state"] not in OPEN:
                self.over_in.setdefault(window_id, self.turn)
            found, place = inside[window_id], (window["workflow"], window["step"])
            step = STEP_OF[place]
            assert window["closes_at"] == end_of(step, window["opened_at"]), "the end of a window never moves"
            if window["state"] in OPEN:
                assert found, "an emptied window is discarded"
                assert window["state"] == "held" or len(found) < step.get("max_events", 99), "a full window ends"
            assert window["waits"] <= 3, "a window is held a fourth time"
            if window["state"] == "closed":
                assert found, "nothing is in it"
                assert "max_events" not in (window["reason"] or "") or len(found) >= step["max_events"], "not yet full"
                assert window["reason"] or window["closed_at"] >= window["due_at"], "a window ended before its time"
            if window["state"] not in OPEN:
                as_closed = (window, sorted(found))
                assert self.closed.setdefault(window_id, as_closed) == as_closed, "a window changed after it was closed"
            assert window["state"] != "discarded" or not found, "a window with something in it was discarded"
            for event_id in found:
                event = events[event_id]
                assert (event["workflow"], event["subscriber_id"]) == (window["workflow"], window["subscriber_id"])
                if "key" in step:
                    assert window["key"] == str(json.loads(event["payload"])["k"]), "a window of another key"
        for event in events.values():
            if event["state"] == "placed" and event["digest_id"] is not None:
                at = min(event["received_at"], event["placed_at"])
                assert at < windows[event["digest_id"]]["due_at"], "an event at the end of a window is in it"
        for one in joined.values():
            assert one["joined_at"] < windows[one["digest_id"]]["due_at"], "a run joined a window that had ended"

    def look_at_events(self, events: Rows, windows: Rows, runs: Rows, inside: Members) -> None:
        places = collections.Counter(
            (event_id, windows[window_id]["step"]) for window_id, found in inside.items() for event_id in found
        )
        assert all(count == 1 for count in places.values()), "an event is in two windows of one step"
        alone = {run["event_id"] for run in runs.values()}
        for event_id, event in events.items():
            if event["placed_at"] is not None:
                self.placed.setdefault(event_id, self.turn)
            if event["state"] == "cancelled":
                self.cancelled.setdefault(event_id, self.turn)
            if event["state"] == "placed":
                assert (event["digest_id"] is None) == (event_id in alone), "in a window, or with a run of its own"
            if event["state"] in ("cancelled", "failed"):
                assert event["reason"], "the reason why not is kept"
                if self.ended.setdefault(event_id, event["state"]) == "cancelled" and event["digest_id"]:
                    window = self.closed.get(event["digest_id"])
                    assert window is None or event["finished_at"] <= window[0]["closed_at"], (
                        "cancelled in a closed window"
                    )
            else:
                assert event_id not in self.ended, "an event that had ended came back"

    def look_at_messages(
        self, events: Rows, runs: Rows, jobs: Rows, attempts: Rows, feed: Rows, inside: Members
    ) -> None:
        tries: dict[int, list[Any]] = collections.defaultdict(list)
        for attempt in attempts.values():
            tries[attempt["job_id"]].append(attempt["outcome"])
        sent: dict[str, list[str]] = collections.defaultdict(list)
        for _, claim, result in self.w.sent:
            if claim.message is not None and result.outcome == "sent":
                sent[claim.public_id].append(claim.message.body)
        for job_id, job in jobs.items():
            bodies, outcomes, name = sent[job["public_id"]], tries[job_id], job["public_id"]
            assert len(set(bodies)) <= 1, "a repeat has other bytes"
            assert len(bodies) <= 1 + outcomes.count("interrupted"), "a message was sent twice, and nothing had crashed"
            assert outcomes.count("sent") == (job["type"] in MESSAGES and job["state"] == "completed")
            assert job["state"] != "completed" or job["type"] not in MESSAGES or bodies
            assert job["state"] not in ("failed", "skipped", "cancelled") or job["reason"]
            assert job["state"] != "skipped" or not outcomes
            run = runs[job["run_id"]]
            about = inside[run["digest_id"]] if run["digest_id"] is not None else {run["event_id"]}
            if bodies:
                told = json.loads(bodies[0])["data"]["digest"]
                assert {int(event["id"]) for event in told["events"]} == about, "a message tells of other events"
                assert len(told["events"]) == told["eventCount"] == len(about)
            if name not in self.begun and outcomes:
                assert not about & self.were_cancelled, "a cancelled event is in a message composed after the cancel"
            if run["id"] in self.were_over:
                assert len(outcomes) == self.begun.get(name, 0), "a cancelled run goes on"
            self.begun[name] = len(outcomes)
        for message in feed.values():
            run = runs[jobs[message["job_id"]]["run_id"]]
            about = inside[run["digest_id"]] if run["digest_id"] is not None else {run["event_id"]}
            assert message["job_id"] in self.feed or not about & self.were_cancelled
            self.feed.add(message["job_id"])
        self.were_cancelled = {event_id for event_id, event in events.items() if event["state"] == "cancelled"}
        self.were_over = {run_id for run_id, run in runs.items() if run["state"] == "cancelled"}

    def look_for_what_is_late(self) -> None:
        """What holds after a tick."""
        for sql in (
            "events WHERE state = 'received'",
            f"digests WHERE state IN ('open', 'held') AND due_at <= {self.w.now}",
            f"runs WHERE next_at <= {self.w.now}",
            f"jobs WHERE state = 'delayed' AND due_at <= {self.w.now}",
        ):
            assert self.w.one(f"SELECT count(*) FROM {sql}") == 0, f"overdue: {sql}"

    # -- what has to come of it

    def end(self) -> None:
        """Let time go on until nothing more is planned; then each event has its place, and all is over."""
        self.do("finish")
        self.w.replies.clear()
        self.do("switch", True)
        self.do("advance", 120 * digestd.DAY)
        events, windows, runs, joined, jobs, feed = map(
            self.read, ("events", "digests", "runs", "digest_runs", "jobs", "inbox_messages")
        )
        assert digestd.next_wake_at() is None
        assert not [window for window in windows.values() if window["state"] in OPEN], "a window is stuck"
        assert not [run for run in runs.values() if run["state"] == "active"], "a run is stuck"
        assert not [job for job in jobs.values() if job["state"] in UNFINISHED], "a job is stuck"
        for kept in (*events.values(), *windows.values(), *runs.values(), *jobs.values()):
            assert "bug" not in (kept["reason"] or "")
        for event_id, event in events.items():
            assert event["state"] != "received", "an event is stuck"
            self.look_at_placing(event_id, event, events, windows)
        steps: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        for job in jobs.values():
            steps[job["run_id"]][job["step"]] = job
        told = {message["job_id"] for message in feed.values()}
        for run_id, run in runs.items():
            self.look_at_run(run, windows, joined.get(run_id), steps[run_id], told)
            if run["state"] == "cancelled":
                assert events[run["event_id"]]["state"] == "cancelled"

    def look_at_placing(self, event_id: int, event: dict[str, Any], events: Rows, windows: Rows) -> None:
        """Whether an event went to a window or alone, as the first step of its workflow says."""
        step, payload = STEPS[event["workflow"]][0], json.loads(event["payload"])
        if "when" in step:
            wanted = "failed" if payload["n"] == "many" else "window" if payload["n"] > 3 else "alone"
        elif step.get("start") == "when_repeated":
            wanted = self.start_of(event_id, event, payload, events, windows)
        else:
            wanted = "window" if step["type"] == "digest" else "alone"
        if event["state"] == "placed":
            found = "alone" if event["digest_id"] is None else "window"
        else:
            found = event["state"]
        assert found in ("cancelled", wanted) or wanted == "either", f"{event} should be {wanted}"

    def start_of(self, event_id: int, event: dict[str, Any], payload: Any, events: Rows, windows: Rows) -> str:
        """Whether an event was the first within the look-back; where two came in one turn, that is open."""
        if event["placed_at"] is None:
            return "either"
        turn, at, is_clear = self.placed[event_id], min(event["received_at"], event["placed_at"]), True
        for other_id, other in events.items():
            is_alike = all(other[name] == event[name] for name in ("workflow", "subscriber_id"))
            if other_id == event_id or not is_alike or json.loads(other["payload"])["k"] != payload["k"]:
                continue
            if other_id not in self.placed or self.placed[other_id] > turn:
                continue
            if self.placed[other_id] == turn:
                is_clear = False
            elif (
                min(other["received_at"], other["placed_at"]) >= at - LOOK_BACK
                and self.cancelled.get(other_id, turn + 1) > turn
            ):
                return "window"
        for window_id, window in windows.items():
            name = (window["workflow"], window["subscriber_id"], window["key"])
            if name != (event["workflow"], event["subscriber_id"], str(payload["k"])):
                continue
            was_open = self.opened[window_id] < turn < self.over_in[window_id] and at < window["due_at"]
            if was_open or (self.opened[window_id] < turn and window_id == event["digest_id"]):
                return "window"
        return "alone" if is_clear else "either"

    def look_at_run(
        self, run: dict[str, Any], windows: Rows, joined: Any, jobs: dict[str, Any], told: set[int]
    ) -> None:
        """A run has a job for each step that it reached, and nothing is left out."""
        steps = STEPS[run["workflow"]]
        ids = [step["id"] for step in steps]
        first = ids.index(windows[run["digest_id"]]["step"]) + 1 if run["digest_id"] is not None else 0
        assert (run["state"] == "merged") == (joined is not None), "a merged run is in a later window"
        last = len(ids) if joined is None else ids.index(windows[joined["digest_id"]]["step"])
        if run["state"] in ("completed", "merged"):
            assert sorted(jobs) == sorted(ids[first:last]), f"steps of {run}"
        else:
            assert run["reason"] == ("cancelled" if run["state"] == "cancelled" else "step chat failed")
        for step in steps[first:last]:
            job = jobs.get(step["id"])
            if job is None:
                continue
            if step["type"] == "digest":
                assert job["state"] == "skipped", "a run goes past a digest step, or joins its window"
            elif step["type"] == "in_app":
                assert (job["id"] in told) == (job["state"] == "completed")
                assert job["state"] in ("completed", "cancelled"), "the feed is never skipped"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="digestd")  # failures are part of the play: thousands of lines


@functools.cache
def empty_store() -> bytes:
    """A database with the schema and nothing in it; making one takes longer than all else here."""
    with tempfile.TemporaryDirectory() as name:
        world = World(pathlib.Path(name), CONFIG)
        digestd.close_store()
        return world.path.read_bytes()


@pytest.mark.timeout(900)  # hypothesis looks long for the smallest example of a failure
@pytest.mark.parametrize("workflows", [[name] for name in STEPS] + [list(STEPS)], ids=[*STEPS, "all"])
@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_event_is_lost_doubled_or_stuck_whatever_happens_in_whatever_order(workflows, data):
    operations = [operation for wave in data.draw(waves(workflows)) for operation in wave]
    if may_hold(workflows):
        operations.insert(0, ("hours", "s1", data.draw(st.sampled_from(list(HOURS)))))
        operations += [("wake",)] * data.draw(st.integers(0, 5))
    play(operations)


def play(operations: list[tuple[Any, ...]]) -> None:
    empty = empty_store()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "digestd.sqlite3").write_bytes(empty)
        try:
            scene = Play(folder)
            scene.open()
            for operation in operations:
                scene.do(*operation)
            scene.end()
        finally:
            digestd.close_store()


# -- what it found -----------------------------------------------------------------------------------------------------


def test_nothing_follows_a_try_that_was_under_way_when_its_event_was_cancelled(world):
    w = world(CONFIG)
    w.trigger("picky", payload={"n": 1}, id="t1")
    with digestd.transaction():
        [claim] = digestd.tick(w.config, w.now, w.room).claims
    assert w.cancel("t1")
    w.reply("hook", "temporary")
    w._try(claim)
    w.advance("1h")
    assert [result.outcome for _, _, result in w.sent] == ["temporary"]


def test_a_message_cancelled_during_a_try_that_the_end_of_the_process_cut_off_is_not_sent_again(world):
    w = world(CONFIG)
    w.trigger("picky", payload={"n": 1}, id="t1")
    with digestd.transaction():
        digestd.tick(w.config, w.now, w.room)
    assert w.cancel("t1")
    w.crash()
    w.open()
    w.advance("1h")
    assert w.sent == []
