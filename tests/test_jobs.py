"""Beginning steps, delays, claiming, and what stops only itself."""

from __future__ import annotations

import json

import pytest

import digestd
from conftest import BASIC, START, statements

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
        room.begin("a", 0)
    assert (room.free("a", 0), room.free("b", 0)) == (0, 1)
    room.begin("b", 0)
    assert (room.free("a", 0), room.free("b", 0)) == (0, 0)
    room.end("a")
    assert room.free("a", 0) == 1
    assert digestd.Room(1, dict.fromkeys("abc")).free("c", 0) == 1


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


# -- delays ------------------------------------------------------------------------------------------------------------


def delayed(setting: str, more: str = "") -> str:
    """A config of a workflow that begins with a delay, and then sends."""
    return (
        BASIC
        + f"""
[workflows.later]
[[workflows.later.steps]]
id = "wait"
type = "delay"
{setting}
{more}
[[workflows.later.steps]]
id = "send"
type = "chat"
sender = "hook"
"""
    )


SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


@pytest.mark.parametrize(
    ("row", "value", "wait_ms"),
    [
        # facts on Novu, 6.1 and 6.2
        ("W01", {"amount": 5, "unit": "seconds"}, 5 * SECOND),
        ("W02", {"amount": 5, "unit": "minutes"}, 5 * MINUTE),
        ("W03", {"amount": 5, "unit": "hours"}, 5 * HOUR),
        ("W04", {"amount": 1, "unit": "days"}, DAY),
        ("W05", "2026-03-09T08:10:10Z", None),
        ("U02", "2026-03-09T08:10:10.5Z", None),
        ("U03", "2026-03-09T08:10:10", None),
        ("B17", "2026-03-09T10:10:10+02:00", None),
        ("U11", {"amount": 2, "unit": "weeks"}, 14 * DAY),
        ("U12", {"amount": 3, "unit": "months"}, 90 * DAY),
        ("U14", {"amount": 0.5, "unit": "seconds"}, 500),
        ("U14b", {"amount": 1.5, "unit": "minutes"}, 90 * SECOND),
        ("U15", {"amount": 0, "unit": "hours"}, 0),
        ("one", {"amount": 1, "unit": "hour"}, HOUR),
    ],
)
def test_a_payload_tells_a_delay(world, row, value, wait_ms):
    w = world(delayed('delay = "payload.when"'))
    if wait_ms is None:
        w.clock.at = digestd.parse_instant("2026-03-09T08:10:00Z")
        wait_ms = 10_500 if row == "U02" else 10_000
    start = w.now
    w.trigger("later", payload={"when": value})
    w.advance("100d")
    assert [at - start for at, _, _ in w.sent] == [wait_ms]


@pytest.mark.parametrize(
    ("row", "value", "words"),
    [
        ("W07", None, "the payload does not tell it"),
        ("W09", "invalid-timestamp", "is not a date and time"),
        ("W10", {"amount": 5, "unit": "invalid-unit"}, "is not a unit"),
        ("W11", {"amount": -5, "unit": "minutes"}, "is not an amount"),
        ("U04a", "2026-12-01", "is not a date and time"),
        ("U04b", "12:00:00", "is not a date and time"),
        ("U04c", "2026/12/01 12:00:00", "is not a date and time"),
        ("U05a", "2026-13-01T00:00:00Z", "is not a real date and time"),
        ("U05b", "2026-12-32T00:00:00Z", "is not a real date and time"),
        ("U06", "2027-02-30T12:00:00Z", "is not a real date and time"),
        ("U13", {"amount": 1, "unit": "years"}, "is not a unit"),
        ("U13b", {"amount": 1, "unit": ""}, "is not a unit"),
        ("U13c", {"amount": 1}, "is not a unit"),
        ("no unit", {"unit": "hours"}, "is not an amount"),
        ("true", {"amount": True, "unit": "hours"}, "is not an amount"),
        ("a number", 5, "is neither"),
        ("endless", {"amount": 1e300, "unit": "months"}, "is not an amount"),
        ("too long", "2028-01-01T00:00:00Z", "is over daemon.max_window"),
        ("too many", {"amount": 13, "unit": "months"}, "is over daemon.max_window"),
    ],
)
def test_a_delay_that_cannot_be_stops_its_run_visibly_and_no_other(world, row, value, words):
    w = world(delayed('delay = "payload.when"'))
    w.trigger("later", "s1", {"when": value})
    w.trigger("later", "s2", {"when": {"amount": 1, "unit": "hours"}})
    w.advance("2h")
    assert [claim.draft.subscriber["subscriberId"] for _, claim, _ in w.sent] == ["s2"]
    state, reason = w.one("SELECT state, reason FROM runs WHERE subscriber_id = 's1'")
    assert state == "failed" and words in reason
    assert w.one("SELECT what, reason FROM v_trouble") == ("job failed", reason)


def test_a_delay_whose_time_is_past_is_now_or_fails_as_its_step_says(world):
    past = {"when": "2020-01-01T00:00:00Z"}
    w = world(delayed('delay = "payload.when"'))
    w.trigger("later", payload=past)
    w.tick()
    assert len(w.sent) == 1
    w.use(delayed('delay = "payload.when"', 'past = "fail"'))
    w.trigger("later", payload=past)
    w.tick()
    assert len(w.sent) == 1 and "is in the past" in w.one("SELECT reason FROM v_trouble")


def test_a_run_whose_delay_cannot_be_can_be_tried_again_as_often_as_needed(world):
    """The refusals are rows of one run; the second one met the first one's."""
    w = world(delayed('delay = "payload.when"', 'past = "fail"'))
    w.trigger("later", payload={"when": "2020-01-01T00:00:00Z"})
    w.tick()
    for _ in range(3):
        assert w.rows("SELECT state FROM runs") == [("failed",)]
        [(job_id,)] = w.rows("SELECT id FROM v_trouble")
        with digestd.transaction():
            assert digestd.retry_job(job_id, w.now)
        w.tick()
    assert "is in the past" in w.one("SELECT reason FROM v_trouble")
    w.use(delayed('delay = "payload.when"'))
    with digestd.transaction():
        digestd.retry_job(w.one("SELECT id FROM v_trouble"), w.now)
    w.tick()
    assert len(w.sent) == 1 and w.rows("SELECT * FROM v_trouble") == []


def test_a_delay_lasts_until_the_clock_says_in_the_subscribers_zone(world):
    w = world(delayed('every = "day"\nat = "09:00"'))
    w.clock.at = digestd.parse_instant("2026-03-09T10:00:00Z")
    w.subscriber("tokyo", timezone="Asia/Tokyo")
    w.trigger("later", ["tokyo", "utc"])
    w.advance("2d")
    assert [(digestd.iso_text(at), claim.draft.subscriber["subscriberId"]) for at, claim, _ in w.sent] == [
        ("2026-03-10T00:00:00Z", "tokyo"), ("2026-03-10T09:00:00Z", "utc")
    ]  # fmt: skip


def test_a_delay_whose_condition_says_no_lets_the_run_go_on_at_once(world):
    w = world(delayed('delay = "1h"', 'when = "payload.slow"'))
    w.trigger("later", "s1", {"slow": True})
    w.trigger("later", "s2", {})
    w.tick()
    assert [claim.draft.subscriber["subscriberId"] for _, claim, _ in w.sent] == ["s2"]
    assert w.one("SELECT type, reason FROM jobs WHERE state = 'skipped'") == ("delay", "its condition says no")
    w.advance("1h")
    assert len(w.sent) == 2


# -- conditions of messages --------------------------------------------------------------------------------------------


def test_a_message_whose_condition_says_no_is_skipped_and_the_rest_goes_on(world):
    text = CHAIN.replace('id = "sms"', 'id = "sms"\nwhen = "payload.amount > 10 and subscriber.data.plan == \'pro\'"')
    w = world(text.replace('id = "feed"', 'id = "feed"\nwhen = "payload.feed"'))
    w.subscriber("pro", data={"plan": "pro"})
    for who, amount, feed in (("pro", 11, True), ("pro", 10, False), ("free", 11, True)):
        w.trigger("chain", who, {"amount": amount, "feed": feed})
    w.advance("2h")
    steps = [claim.draft.step for _, claim, _ in w.sent]
    assert (steps.count("sms"), steps.count("push"), w.one("SELECT count(*) FROM inbox_messages")) == (1, 3, 2)
    assert w.rows("SELECT step, reason FROM jobs WHERE state = 'skipped' AND step <> 'mail' ORDER BY id") == [
        ("feed", "its condition says no"), ("sms", "its condition says no"), ("sms", "its condition says no")
    ]  # fmt: skip


def test_a_condition_may_ask_how_many_events_there_are(world):
    w = world(BASIC.replace('sender = "hook"', 'sender = "hook"\nwhen = "steps.digest.eventCount > 1"'))
    for who, number in (("s1", 1), ("s2", 1), ("s2", 2)):
        w.trigger("comments", who, {"postId": 1, "n": number})
    w.advance("10m")
    assert [len(events) for events in w.digested()] == [2]


def test_a_condition_that_cannot_be_told_fails_its_message_and_retry_asks_again(world):
    text = BASIC.replace('sender = "hook"', 'sender = "hook"\nwhen = "payload.n > 10"')
    w = world(text)
    w.trigger("comments", payload={"postId": 1, "n": "many"})
    w.advance("10m")
    assert w.sent == [] and "the condition cannot be told" in w.one("SELECT reason FROM v_trouble")
    w.use(text.replace("payload.n > 10", "payload.n"))
    with digestd.transaction():
        assert digestd.retry_job(1, w.now)
    w.tick()
    assert len(w.sent) == 1


# -- messages outside the subscriber's hours ---------------------------------------------------------------------------

WAITED = """
[workflows.w]
[[workflows.w.steps]]
id = "wait"
type = "delay"
delay = "90s"
%s
[[workflows.w.steps]]
id = "digest"
type = "digest"
window = "10m"
when = "%s"
[[workflows.w.steps]]
id = "again"
type = "delay"
delay = "1s"
[[workflows.w.steps]]
id = "send"
type = "chat"
sender = "hook"
text = "{{ steps.wait.duration }} {{ steps.again.duration }} {{ steps.digest.eventCount }}"
"""


@pytest.mark.parametrize(
    ("more", "digests", "text"),
    [
        ("", "true", "90000 1000 2"),
        ("", "steps.wait.duration == 90000", "90000 1000 2"),
        ("", "steps.wait.duration > 90000", "90000 1000 1"),
        ('when = "false"', "true", " 1000 2"),
        ("extend_to_schedule = true", "true", "3600000 1000 2"),  # from eight, until the office opens at nine
    ],
    ids=["through a digest", "in a condition", "digest skipped", "delay skipped", "held"],
)
def test_a_delay_leaves_how_long_it_was_for_the_steps_after_it(world, more, digests, text):
    w = world(BASIC + WAITED % (more, digests))
    w.subscriber("s1", schedule=OFFICE)
    w.subscriber("s2", schedule=OFFICE)
    w.clock.at -= digestd.HOUR if "extend" in more else 0
    for number in range(2):
        w.trigger("w", payload={"n": number})
    w.advance("3h")
    assert {body["data"]["text"] for body in w.bodies()} == {text}


OFFICE = {
    "isEnabled": True,
    "weeklySchedule": {"monday": {"isEnabled": True, "hours": [{"start": "09:00 AM", "end": "05:00 PM"}]}},
}
SUNDAY = digestd.parse_instant("2026-03-08T12:00:00Z")


def outside(how: str) -> str:
    return BASIC.replace('sender = "hook"', f'sender = "hook"\noutside = "{how}"')


@pytest.mark.parametrize(
    ("how", "at"), [("skip", None), ("send", "2026-03-08T12:10:00Z"), ("hold", "2026-03-09T09:00:00Z")]
)
def test_outside_the_hours_a_message_is_skipped_sent_or_held(world, how, at):
    w = world(outside(how))
    w.clock.at = SUNDAY
    w.subscriber("s1", schedule=OFFICE)
    w.trigger("comments", payload={"postId": 1})
    w.advance("3d")
    assert [digestd.iso_text(sent_at) for sent_at, _, _ in w.sent] == ([at] if at else [])
    assert w.one("SELECT waits FROM jobs") == (1 if how == "hold" else 0)


def test_a_held_message_waits_at_most_three_times_and_is_then_skipped(world):
    w = world(outside("hold"))
    w.clock.at = SUNDAY
    days = ("monday", "tuesday", "wednesday", "thursday")
    w.subscriber("s1", schedule=OFFICE)
    w.trigger("comments", payload={"postId": 1})
    for day in days[1:]:
        w.advance("20h")  # the hours move away before they come
        w.subscriber("s1", schedule={**OFFICE, "weeklySchedule": {day: OFFICE["weeklySchedule"]["monday"]}})
        w.advance("4h")
    w.advance("7d")
    assert w.sent == [] and w.one("SELECT state, reason, waits FROM jobs") == (
        "skipped", "outside the subscriber's schedule", 3
    )  # fmt: skip
    assert w.one("SELECT state FROM runs") == "completed"


def test_a_held_message_is_not_moved_by_a_schedule_that_is_turned_off_meanwhile_and_goes_at_its_time(world):
    w = world(outside("hold"))
    w.clock.at = SUNDAY
    w.subscriber("s1", schedule=OFFICE)
    w.trigger("comments", payload={"postId": 1})
    w.advance("1h")
    w.subscriber("s1", schedule={"isEnabled": False})
    w.advance("3d")
    assert [digestd.iso_text(at) for at, _, _ in w.sent] == ["2026-03-09T09:00:00Z"]


@pytest.mark.parametrize(("then", "sent", "state"), [("send", 1, "completed"), ("skip", 0, "skipped")])
def test_a_held_message_goes_by_what_its_step_says_when_its_time_comes(world, then, sent, state):
    w = world(outside("hold"))
    w.clock.at = SUNDAY
    w.subscriber("s1", schedule=OFFICE)
    w.trigger("comments", payload={"postId": 1})
    w.advance("1h")
    w.subscriber("s1", schedule={**OFFICE, "weeklySchedule": {"friday": OFFICE["weeklySchedule"]["monday"]}})
    w.use(outside(then))
    w.advance("1d")
    assert (len(w.sent), w.one("SELECT state FROM jobs")) == (sent, state)


def test_retries_of_a_message_do_not_ask_for_the_hours_again(world):
    w = world(outside("hold").replace('retry = ["5s", "1m"]', 'retry = ["9h", "1m"]'))
    w.clock.at = SUNDAY
    w.subscriber("s1", schedule=OFFICE)
    w.reply("hook", "temporary")
    w.trigger("comments", payload={"postId": 1})
    w.advance("3d")
    assert [digestd.iso_text(at) for at, _, _ in w.sent] == ["2026-03-09T09:00:00Z", "2026-03-09T18:00:00Z"]


def test_a_critical_workflow_holds_no_message(world):
    w = world(outside("hold").replace("[workflows.comments]", "[workflows.comments]\ncritical = true"))
    w.clock.at = SUNDAY
    w.subscriber("s1", schedule=OFFICE)
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    assert len(w.sent) == 1


# -- lanes: one try at a time for each sender, subscriber and key ------------------------------------------------------

NOW = BASIC.replace('window = "10m"', 'window = "1s"')


def claimed(w) -> list[tuple[str, str]]:
    """Tick once; for whom and with which key tries begin, none of which has ended."""
    with digestd.transaction():
        report = digestd.tick(w.config, w.now, w.room)
    w.flying = [*getattr(w, "flying", []), *report.claims]
    return [(json.loads(claim.message.body)["data"]["subscriber"]["subscriberId"],
             json.loads(claim.message.body)["data"]["digest"]["key"]) for claim in report.claims]  # fmt: skip


def land(w, number: int = 0, outcome: str = "sent") -> None:
    """The try that began first ends."""
    claim = w.flying.pop(number)
    with digestd.transaction():
        sent = digestd.Sent(claim, digestd.result_of(claim, outcome))
        digestd.record_outcomes(w.config, [sent], w.now)
    w.room.end(claim.sender_name, claim.lane)


def windows(w, *names: tuple[str, str]) -> None:
    """Close a window for each (subscriber, key), one after the other."""
    for subscriber, key in names:
        w.trigger("comments", subscriber, {"postId": key})
        w.clock.at += 1000
        with digestd.transaction():
            digestd.close_windows(w.config, w.now)


def test_a_second_message_for_one_subscriber_and_key_waits_for_the_first(world):
    w = world(NOW)
    windows(w, ("s1", "a"), ("s1", "a"), ("s1", "b"), ("s2", "a"), ("s1", "a"))
    assert claimed(w) == [("s1", "a"), ("s1", "b"), ("s2", "a")]
    assert claimed(w) == []
    land(w)
    assert claimed(w) == [("s1", "a")]
    land(w, 2)
    assert claimed(w) == [("s1", "a")]
    assert [claim.run_id for claim in w.flying][-1] == 5, "in the order in which they came"


def test_a_message_that_is_to_be_tried_again_does_not_hold_up_the_next_one(world):
    w = world(NOW)
    windows(w, ("s1", "a"), ("s1", "a"))
    claimed(w)
    land(w, outcome="temporary")
    assert claimed(w) == [("s1", "a")]
    assert w.flying[0].run_id == 2


def test_a_long_lane_takes_no_place_from_others_behind_it(world):
    w = world(NOW + "[daemon]\nconcurrency = 3\n")
    windows(w, *[("s1", "a")] * 40, ("s2", "a"))
    assert claimed(w) == [("s1", "a"), ("s2", "a")]


def test_what_waits_in_a_lane_costs_the_tick_nothing(world):
    w = world(NOW)
    windows(w, *[("s1", "a")] * 60)
    claimed(w)
    found = statements(lambda: claimed(w))
    assert not [sql for sql in found if "UPDATE jobs" in sql]
    for sql in found:
        if "lane" in sql and sql.startswith(("SELECT", "UPDATE")):
            plan = [detail for *_, detail in w.rows(f"EXPLAIN QUERY PLAN {sql}")]
            assert any("jobs_waiting (sender=? AND lane=?" in detail for detail in plan), plan


def test_a_cancelled_message_leaves_its_lane_to_the_others_within_a_minute(world):
    w = world(NOW)
    windows(w, ("s1", "a"), ("s1", "a"), ("s1", "a"))
    claimed(w)
    land(w)
    with digestd.transaction():  # the next one is let out, and goes before it is taken
        digestd._open_lanes(w.room)
        digestd.move(digestd.Job, 2, "waiting", "cancelled", finished_at=w.now)
    assert claimed(w) == []
    with digestd.transaction():
        assert digestd.unpark_jobs(w.room.lanes) == 1
    assert claimed(w) == [("s1", "a")]


def test_a_start_and_a_change_of_the_config_let_all_out_of_their_lanes(world):
    w = world(NOW)
    windows(w, ("s1", "a"), ("s1", "a"))
    claimed(w)
    assert w.one("SELECT count(*) FROM jobs WHERE lane <> ''") == 1
    w.crash()
    w.open()
    assert w.one("SELECT count(*) FROM jobs WHERE lane <> ''") == 0


def test_a_transaction_that_is_rolled_back_leaves_no_lane_taken(world):
    w = world(NOW)
    windows(w, ("s1", "a"))
    kept = w.room.kept()
    with pytest.raises(RuntimeError), digestd.transaction():
        digestd.tick(w.config, w.now, w.room)
        assert w.room.lanes
        raise RuntimeError
    w.room.restore(kept)
    assert claimed(w) == [("s1", "a")]


def test_runs_of_a_repeatable_have_no_lane(world):
    w = world(BASIC + '[repeatables.r]\nevery = "1s"\nsender = "hook"\n')
    for _ in range(3):
        w.clock.at += 1000
        with digestd.transaction():
            w.flying = [*getattr(w, "flying", []), *digestd.tick(w.config, w.now, w.room).claims]
    assert len(w.flying) == 3 and {claim.lane for claim in w.flying} == {""}


# -- what subscribers chose to get -------------------------------------------------------------------------------------

CHANNELS = """
[senders.console]
type = "log"
[workflows.news]
[[workflows.news.steps]]
id = "mail"
type = "email"
sender = "console"
[[workflows.news.steps]]
id = "chat"
type = "chat"
sender = "console"
[[workflows.news.steps]]
id = "feed"
type = "in_app"
"""


def choose(w, workflow: str, **channels: bool) -> None:
    with digestd.transaction():
        digestd.set_channels("s1", workflow, channels, w.now)


def outcome_of(w) -> dict[str, str]:
    """Each step of a fresh event's run, by what became of it."""
    w.trigger("news")
    w.tick()
    run = w.one("SELECT max(id) FROM runs")
    assert w.one("SELECT state FROM runs WHERE id = ?", run) == "completed"
    return dict(w.rows("SELECT step, coalesce(reason, state) FROM jobs WHERE run_id = ? ORDER BY id", run))


ALL = {"mail": "completed", "chat": "completed", "feed": "completed"}


def test_a_channel_that_a_subscriber_turned_off_is_skipped_with_the_reason_and_the_run_goes_on(world):
    w = world(CHANNELS)
    assert outcome_of(w) == ALL
    choose(w, "news", email=False, in_app=False)
    off = "the subscriber turned {} off"
    assert outcome_of(w) == {**ALL, "mail": off.format("email"), "feed": off.format("in_app")}
    choose(w, "news", email=True)
    assert outcome_of(w) == {**ALL, "feed": off.format("in_app")}


def test_a_choice_for_a_workflow_comes_before_one_for_all_of_them(world):
    w = world(CHANNELS)
    choose(w, "", email=False, chat=False)
    choose(w, "news", chat=True)
    assert outcome_of(w) == {**ALL, "mail": "the subscriber turned email off"}


def test_a_channel_that_the_config_turns_off_can_be_turned_on(world):
    w = world(CHANNELS.replace("[workflows.news]\n", "[workflows.news]\nchannels = { email = false }\n"))
    assert outcome_of(w) == {**ALL, "mail": "email is off unless the subscriber turns it on"}
    choose(w, "", email=True)
    assert outcome_of(w) == ALL


def test_a_critical_workflow_asks_nobody(world):
    w = world(
        CHANNELS.replace("[workflows.news]\n", "[workflows.news]\ncritical = true\nchannels = { chat = false }\n")
    )
    choose(w, "news", email=False, chat=False, in_app=False)
    assert outcome_of(w) == ALL


def test_what_a_subscriber_chose_goes_with_it(world):
    w = world(CHANNELS)
    w.trigger("news")
    choose(w, "news", email=False)
    with digestd.transaction():
        digestd.delete_subscriber("s1", w.now)
    assert w.rows("SELECT * FROM preferences") == [] and outcome_of(w) == ALL


def test_what_is_turned_off_while_it_waits_for_the_hours_or_for_its_sender_is_not_sent(world):
    held = BASIC.replace('sender = "hook"', 'sender = "hook"\noutside = "hold"')
    w = world(held)
    office = {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [
        {"start": "12:00 PM", "end": "01:00 PM"}]}}}  # fmt: skip
    w.subscriber("s1", schedule=office)
    w.trigger("comments", "s1", {"postId": 1})
    w.trigger("comments", "s2", {"postId": 1})
    with digestd.transaction():
        digestd.disable_sender(w.config, "hook", "person", "moving", w.now)
    w.advance("1h")
    for name in ("s1", "s2"):
        with digestd.transaction():
            digestd.set_channels(name, "comments", {"chat": False}, w.now)
    with digestd.transaction():
        digestd.enable_sender("hook")
    w.advance("3h")
    assert w.sent == [] and w.rows("SELECT state, reason FROM jobs") == [
        ("skipped", "the subscriber turned chat off"), ("skipped", "the subscriber turned chat off"),
    ]  # fmt: skip


def test_where_nobody_ever_chose_a_message_costs_no_look_at_the_choices(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    w.trigger("comments", payload={"postId": 1})
    found = statements(lambda: w.advance("10m"))
    assert [
        sql for sql in found if sql.startswith("SELECT") and "FROM preferences" in sql and "FROM runs" not in sql
    ] == []
