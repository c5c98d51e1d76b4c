"""The process ends after any statement; a new one opens the file and goes on. Nothing lost, nothing doubled."""

from __future__ import annotations

import contextlib
import json

import pytest

import digestd
from conftest import BASIC, World

SCENE = (
    '[daemon]\ndurability = "normal"\n'
    + BASIC
    + """
[workflows.alert]
[[workflows.alert.steps]]
id = "hook"
type = "chat"
sender = "hook"
[[workflows.alert.steps]]
id = "wait"
type = "delay"
delay = "1m"
[[workflows.alert.steps]]
id = "later"
type = "digest"
window = "5m"
[[workflows.alert.steps]]
id = "feed"
type = "in_app"
[[workflows.alert.steps]]
id = "last"
type = "push"
sender = "hook"

[repeatables.tick]
every = "4m"
limit = 3
sender = "hook"
"""
)


class Crash(BaseException):
    """Not an Exception, so that nothing in the program can mistake it for one."""


def script(w: World) -> list:
    """What happens, as steps that can be taken again: a client that got no answer sends the same again."""
    return [
        lambda: w.trigger("comments", ["a", "b"], {"postId": 1}, "t1"),
        lambda: w.trigger("comments", "a", {"postId": 1}, "t2"),
        lambda: w.trigger("alert", "a", {"n": 1}, "t3"),
        lambda: w.trigger("comments", "b", {"postId": 2}, "t4"),
        lambda: w.advance("2m"),
        lambda: w.cancel("t4"),
        lambda: w.reply("hook", "temporary", "sent", "temporary"),
        lambda: w.advance("8m"),
        lambda: w.trigger("comments", "a", {"postId": 1}, "t5"),
        lambda: w.advance("30m"),
    ]


def play(w: World, crash_at: int | None) -> int:
    """Play the scene, ending the process after statement `crash_at`; how many statements there were."""
    count = 0

    def hook(event: object) -> None:
        nonlocal count
        count += 1
        if count == crash_at:
            raise Crash

    def execute_many(sql: str, values: object) -> int:
        done = plain(sql, values)
        hook(sql)
        return done

    plain = digestd.execute_many
    digestd.execute_many = execute_many
    digestd.database.query_hooks.append(hook)
    try:
        for step in script(w):
            try:
                step()
            except Crash:
                digestd.database.query_hooks.clear()
                digestd.execute_many = plain
                w.crash()
                w.open()
                w.tick()
                step()
    finally:
        digestd.database.query_hooks.clear()
        digestd.execute_many = plain
    w.advance("1d")
    return count


def check(w: World) -> None:
    """The promises, from outside."""
    assert w.rows("SELECT transaction_id, subscriber_id, state FROM events ORDER BY 1, 2") == [
        ("t1", "a", "placed"), ("t1", "b", "placed"), ("t2", "a", "placed"), ("t3", "a", "placed"), ("t4", "b", "cancelled"), ("t5", "a", "placed"),
    ]  # fmt: skip
    assert w.one("SELECT count(*) FROM digests WHERE state IN ('open', 'held')") == 0
    assert w.one(f"SELECT count(*) FROM jobs WHERE state IN {digestd.UNFINISHED}") == 0
    assert w.rows("SELECT state, count FROM repeatables") == [("finished", 3)]
    assert w.one("SELECT count(*) FROM runs WHERE state = 'active'") == 0
    assert w.one("SELECT count(*) FROM inbox_messages") == 1
    delivered: dict[str, set[str]] = {}
    for _, claim, result in w.sent:
        if result.outcome == "sent":
            delivered.setdefault(claim.public_id, set()).add(claim.message.body)
    assert all(len(bodies) == 1 for bodies in delivered.values())  # a repeat has the same id and the same bytes
    told = [json.loads(next(iter(bodies)))["data"] for bodies in delivered.values()]
    digests = [
        event["transactionId"] for data in told if data.get("step") == "chat" for event in data["digest"]["events"]
    ]
    assert sorted(digests) == ["t1", "t1", "t2", "t5"]  # each event in exactly one digest
    assert [
        event["transactionId"] for data in told if data.get("step") == "last" for event in data["digest"]["events"]
    ] == ["t3"]
    assert sorted(data["count"] for data in told if "slot" in data) == [1, 2, 3]
    repeats = len([1 for _, _, result in w.sent if result.outcome == "sent"]) - len(delivered)
    assert repeats <= 1, "at most one repeat for one crash"


def test_the_scene_without_a_crash(world):
    w = world(SCENE)
    play(w, None)
    check(w)


STATEMENTS = 700


@pytest.mark.parametrize("start", range(7))
def test_a_crash_after_any_statement_loses_and_doubles_nothing(tmp_path, start):
    played = 0
    for number in range(start + 1, STATEMENTS, 7):
        folder = tmp_path / str(number)
        folder.mkdir()
        w = World(folder, SCENE)
        try:
            total = play(w, number)
            check(w)
        except BaseException as error:
            error.add_note(f"the process ended after statement {number}")
            raise
        finally:
            digestd.close_store()
        played += 1
        if total < number:
            break
    assert played > 20


def test_the_crash_test_reaches_the_end_of_the_scene(world):
    w = world(SCENE)
    assert play(w, None) <= STATEMENTS


def test_a_message_sent_and_not_recorded_is_sent_once_more_with_the_same_id(world):
    w = world(SCENE)
    w.trigger("comments", payload={"postId": 1})
    w.clock.at += 600_000
    with digestd.transaction():
        claims = digestd.tick(w.config, w.now, w.room).claims
    claim = next(claim for claim in claims if claim.draft.step == "chat")
    w.sent.append(
        (w.now, claim, digestd.result_of(claim, "sent"))
    )  # it went out; the process ends before it is written
    w.crash()
    w.open()
    w.advance("1m")
    tries = [again for _, again, _ in w.sent if again.public_id == claim.public_id]
    assert len(tries) == 2 and tries[0].public_id == tries[1].public_id and tries[0].message == tries[1].message


SPECS = (
    '[daemon]\ndurability = "normal"\n'
    + BASIC
    + """
[repeatables.a]
every = "1m"
sender = "hook"
[repeatables.b]
cron = "* * * * *"
jitter = "5s"
overlap = "queue"
sender = "hook"
[repeatables.c]
every = "1m"
align = "start"
trigger = { workflow = "comments", to = "a", payload = { postId = 1 } }
[repeatables.d]
every = "30s"
missed = "all"
overlap = "skip"
sender = "hook"
[repeatables.e]
every = "1m"
missed = "skip"
limit = 3
sender = "hook"
"""
)
WITHOUT_ONE_PENDING_RUN = """
    SELECT s.name, s.state, count(r.id) FROM repeatables s
    LEFT JOIN runs r ON r.repeatable_id = s.id AND r.taken_at IS NULL AND r.state = 'active'
    GROUP BY s.id HAVING count(r.id) <> (s.state = 'active')
"""


def repeat(w: World, crash_at: int | None) -> int:
    """Specs are taken, paused, skipped and changed; the process ends after statement `crash_at`. How many there were."""
    count = 0

    def hook(event: digestd.peewee.QueryEvent) -> None:
        nonlocal count
        count += event.sql != WITHOUT_ONE_PENDING_RUN
        if count == crash_at:
            raise Crash

    def deed(name: str, key: str) -> None:
        with contextlib.suppress(digestd.Rejected), digestd.transaction():
            digestd.do_to_repeatable(w.config, name, key, w.now)

    def away() -> None:
        w.clock.at += 150_000
        w.tick()

    steps = [
        lambda: w.advance("61s"), lambda: deed("pause", "a"), lambda: deed("skip-next", "b"), lambda: deed("resume", "a"),
        lambda: deed("run-now", "d"), away, lambda: w.use(SPECS.replace('every = "1m"\nsender', 'every = "2m"\nsender')),
        lambda: w.advance("61s"),
    ]  # fmt: skip
    digestd.database.query_hooks.append(hook)
    try:
        for step in steps:
            try:
                step()
            except Crash:
                digestd.database.query_hooks.clear()
                w.crash()
                w.open()
                assert w.rows(WITHOUT_ONE_PENDING_RUN) == []
                w.tick()
                step()
            assert digestd.rows(WITHOUT_ONE_PENDING_RUN) == []
    finally:
        digestd.database.query_hooks.clear()
    return count


@pytest.mark.parametrize("start", range(4))
def test_a_crash_after_any_statement_leaves_each_spec_exactly_one_pending_run(tmp_path, start):
    (tmp_path / "whole").mkdir()
    whole = World(tmp_path / "whole", SPECS)
    total = repeat(whole, None)
    assert total > 150
    for crash_at in range(1 + start, total + 1, 4):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        w = World(folder, SPECS)
        repeat(w, crash_at)
        assert w.rows("SELECT count FROM repeatables WHERE name = 'e' AND count > 3") == []
        numbers = w.rows("SELECT repeatable_id, count FROM runs WHERE taken_at IS NOT NULL ORDER BY repeatable_id, seq")
        for spec_id in {spec for spec, _ in numbers}:
            mine = [number for spec, number in numbers if spec == spec_id]
            assert mine == list(range(1, len(mine) + 1))  # each run is counted once, in order
        digestd.close_store()
