"""Beginning steps, delays, claiming, and what stops only itself."""

from __future__ import annotations

import pytest

import digestd
from conftest import BASIC, START

CHAIN = (
    BASIC
    + """
[senders.console]
type = "log"

[workflows.chain]
[[workflows.chain.steps]]
id = "first"
type = "chat"
sender = "hook"
[[workflows.chain.steps]]
id = "wait"
type = "delay"
delay = "1h"
[[workflows.chain.steps]]
id = "feed"
type = "in_app"
subject = "{{ payload.title }}"
text = "hello {{ subscriber.subscriberId }}"
[[workflows.chain.steps]]
id = "mail"
type = "email"
sender = "mail"
[[workflows.chain.steps]]
id = "sms"
type = "sms"
sender = "console"
[[workflows.chain.steps]]
id = "push"
type = "push"
sender = "console"
"""
)


def test_steps_run_in_order_and_a_delay_waits(world):
    w = world(CHAIN)
    w.trigger("chain", {"subscriberId": "s1", "email": "a@example.org"}, {"title": "T"})
    w.advance("2h")
    assert [claim.draft.step for _, claim, _ in w.sent] == ["first", "mail", "sms", "push"]
    assert [at - START for at, _, _ in w.sent] == [0, *[digestd.HOUR] * 3]
    assert w.rows("SELECT subscriber_id, subject, body, payload FROM inbox_messages") == [
        ("s1", "T", "hello s1", '{"title":"T"}')
    ]
    assert w.one("SELECT state FROM runs") == "completed"
    assert w.rows("SELECT DISTINCT state FROM jobs") == [("completed",)]


def test_a_subscriber_without_an_address_skips_that_step_alone(world):
    w = world(CHAIN)
    w.trigger("chain")
    w.advance("2h")
    assert w.one("SELECT state, reason FROM jobs WHERE step = 'mail'") == (
        "skipped",
        "the subscriber has no e-mail address",
    )
    assert [claim.draft.step for _, claim, _ in w.sent] == ["first", "sms", "push"]
    assert w.one("SELECT count(*) FROM v_trouble") == 0


def test_the_address_is_read_when_the_step_runs(world):
    w = world(CHAIN)
    w.trigger("chain", {"subscriberId": "s1", "email": "old@example.org"})
    w.advance("30m")
    w.subscriber("s1", email="new@example.org")
    w.advance("1h")
    assert [claim.message.to for _, claim, _ in w.sent if claim.sender_name == "mail"] == ["new@example.org"]


def test_a_template_that_fails_on_one_event_fails_that_digest_alone(world):
    w = world(BASIC + 'text = "{% for x in payload.items %}{{ x | divided_by: payload.zero }}{% endfor %}"')
    for subscriber, payload in (("a", {"items": []}), ("b", {"items": [1], "zero": 0}), ("c", {"items": []})):
        w.trigger("comments", subscriber, payload)
    w.advance("10m")
    assert [claim.draft.subscriber["subscriberId"] for _, claim, result in w.sent if result.outcome == "sent"] == [
        "a",
        "c",
    ]
    assert w.one("SELECT what, subscriber_id FROM v_trouble") == ("job failed", "b")
    assert "the template failed" in w.one("SELECT reason FROM attempts WHERE outcome = 'permanent'")


def test_a_step_or_workflow_that_is_gone_fails_visibly_and_retry_revives_it(world):
    w = world(CHAIN)
    w.trigger("chain", id="t1")
    w.advance("1m")
    gone = CHAIN.replace('id = "wait"', 'id = "other"')
    w.use(gone)
    w.advance("2h")
    assert w.one("SELECT what, reason FROM v_trouble") == ("job failed", "step removed")
    w.use(BASIC)
    with digestd.transaction():
        assert digestd.retry_job(w.one("SELECT id FROM jobs WHERE state = 'failed'"), w.now)
    w.tick()
    assert w.one("SELECT reason FROM v_trouble") == "workflow removed"
    w.use(CHAIN)
    with digestd.transaction():
        assert digestd.retry_job(w.one("SELECT id FROM jobs WHERE state = 'failed'"), w.now)
    w.advance("1h")
    assert w.one("SELECT count(*) FROM v_trouble") == 0
    assert w.one("SELECT count(*) FROM inbox_messages") == 1


def test_an_open_window_keeps_its_end_and_uses_the_templates_of_when_it_closes(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.advance("1m")
    w.use(BASIC.replace('window = "10m"', 'window = "1h"') + 'text = "new"')
    w.advance("9m")
    assert [body["data"]["text"] for body in w.bodies()] == ["new"]


def test_a_sender_that_is_gone_fails_its_jobs_and_a_renamed_one_takes_them_over(world):
    w = world(BASIC)
    w.reply("hook", "temporary", "temporary")
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    w.trigger("comments", payload={"postId": 2})
    w.use(BASIC.replace("[senders.hook]", "[senders.other]").replace('sender = "hook"', 'sender = "other"'))
    assert w.one("SELECT reason FROM v_trouble") == "sender 'hook' removed"
    w.advance("10m")
    assert w.one("SELECT sender FROM jobs WHERE state = 'completed'") == "other"


def test_retries_send_the_same_bytes_whatever_was_edited_in_between(world):
    w = world(BASIC + 'text = "{{ subscriber.firstName }}"')
    w.subscriber("s1", firstName="Ada")
    w.reply("hook", "temporary")
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    w.subscriber("s1", firstName="Grace")
    w.use(BASIC + 'text = "other"')
    w.advance("1m")
    bodies = [claim.message.body for _, claim, _ in w.sent]
    ids = {claim.public_id for _, claim, _ in w.sent}
    assert len(bodies) == 2 and bodies[0] == bodies[1] and len(ids) == 1
    assert w.one("SELECT message FROM jobs") is None  # kept until the job is final, not longer


def test_a_sender_never_takes_the_last_place_of_another():
    room = digestd.Room(4, dict.fromkeys("ab"))
    for _ in range(3):
        room.begin("a")
    assert (room.free("a"), room.free("b")) == (0, 1)
    room.begin("b")
    assert (room.free("a"), room.free("b")) == (0, 0)
    room.end("a")
    assert room.free("a") == 1
    assert digestd.Room(1, dict.fromkeys("abc")).free("c") == 1


def test_a_saturated_sender_takes_its_jobs_in_order_of_their_due_time(world):
    w = world("[daemon]\nconcurrency = 1\n" + BASIC)
    for number in range(5):
        w.trigger("comments", payload={"postId": number})
        w.advance("1ms")
    w.advance("11m")
    assert [body["data"]["payload"]["postId"] for body in w.bodies()] == [0, 1, 2, 3, 4]


def test_events_of_a_large_digest_are_all_counted_and_the_newest_lose_their_payload(world):
    w = world()
    with digestd.transaction():
        w.rows("INSERT INTO digests (workflow, step, subscriber_id, key, opened_at, closes_at, due_at)"
               " VALUES ('comments', 'digest', 's1', '', ?, ?, ?)", START, START + 1, START + 1)  # fmt: skip
        for number in range(10_050):
            w.rows("INSERT INTO events (workflow, subscriber_id, payload, transaction_id, received_at, state, digest_id, placed_at)"
                   " VALUES ('comments', 's1', '{}', ?, ?, 'placed', 1, ?)", f"t{number}", START, START)  # fmt: skip
    w.advance("1s")
    digest = w.bodies()[0]["data"]["digest"]
    assert (digest["eventCount"], len(digest["events"]), digest["truncated"]) == (10_050, 10_050, 50)
    assert "payload" in digest["events"][9_999] and "payload" not in digest["events"][10_000]
    assert digest["events"][-1]["transactionId"] == "t10049"


@pytest.mark.parametrize("waits", [1, 2, 3])
def test_a_delay_that_ends_outside_the_hours_waits_for_them(world, waits):
    w = world(CHAIN.replace('delay = "1h"', 'delay = "1h"\nextend_to_schedule = true'))
    monday = {
        "isEnabled": True,
        "weeklySchedule": {"monday": {"isEnabled": True, "hours": [{"start": "9:00 AM", "end": "9:00 AM"}]}},
    }
    w.subscriber("s1", schedule=monday)
    w.trigger("chain")
    w.advance("3d")
    assert w.one("SELECT state, waits FROM jobs WHERE type = 'delay'") == ("delayed", 1)
    w.advance("7d")
    assert w.one("SELECT state FROM jobs WHERE type = 'delay'") == "completed"
    assert w.one("SELECT created_at FROM inbox_messages") == START + digestd.WEEK


@pytest.mark.parametrize(
    "spoil",
    [
        "UPDATE subscribers SET first_name = CAST(x'41ff' AS TEXT) WHERE subscriber_id = 's1'",
        "UPDATE subscribers SET timezone = CAST(x'41ff' AS TEXT), schedule = CAST(x'ff' AS TEXT) WHERE subscriber_id = 's1'",
        "UPDATE events SET payload = CAST(x'7b226e223a2241ff227d' AS TEXT) WHERE subscriber_id = 's1'",
    ],
)
def test_text_that_is_no_utf8_in_a_row_written_by_hand_stops_nobody(world, spoil):
    """It is sent with marks for what cannot be read."""
    w = world()
    w.trigger("comments", "s1", {"postId": 1})
    w.trigger("comments", "s2", {"postId": 1})
    w.rows(spoil)
    w.advance("10m")
    assert sorted(claim.draft.subscriber["subscriberId"] for _, claim, _ in w.sent) == ["s1", "s2"]
    assert w.rows("SELECT DISTINCT state FROM jobs WHERE sender = 'hook'") == [("completed",)]
