"""Placing events in windows, closing them, cancelling."""

from __future__ import annotations

import pytest

import digestd
from conftest import BASIC, START, World


def minute(count: float) -> int:
    return START + int(count * digestd.MINUTE)


def test_events_of_one_key_become_one_digest_oldest_first(world):
    w = world()
    for number in range(3):
        w.trigger("comments", payload={"postId": "p1", "n": number})
    w.trigger("comments", payload={"postId": "p2", "n": 9})
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[0, 1, 2], [9]]
    assert [at for at, _, _ in w.sent] == [minute(10), minute(10)]


def test_later_events_never_move_the_end_of_a_window(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.advance("9m")
    w.trigger("comments", payload={"postId": 1})
    w.advance("1m")
    assert len(w.digested()) == 1 and len(w.digested()[0]) == 2


def test_an_event_at_the_end_of_a_window_opens_the_next(world):
    w = world()
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.clock.at = minute(10)  # the tick has not come yet
    w.trigger("comments", payload={"postId": 1, "n": 2})
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1], [2]]
    assert [at for at, _, _ in w.sent] == [minute(10), minute(20)]


def test_a_late_tick_changes_no_membership(world):
    w = world()
    for at, number in ((0, 1), (9.99, 2), (10, 3)):
        w.clock.at = minute(at)
        w.trigger("comments", payload={"postId": 1, "n": number})
    w.clock.at = minute(10) + 40_000
    w.advance("20m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("payloads", "groups"),
    [
        ([{"level": 0}, {"level": False}, {"level": ""}, {"level": None}, {}, {"level": "0"}], 5),
        ([{"level": 1}, {"level": 1.0}, {"level": True}, {"level": "1"}], 3),
        ([{"level": {"a": 1, "b": [1.0, 2]}}, {"level": {"b": [1, 2.0], "a": 1.0}}], 1),
        ([{"level": [1, 2]}, {"level": [2, 1]}], 2),
    ],
    ids=["falsy values are values", "numbers and texts", "members in any order", "lists keep their order"],
)
def test_equal_json_values_are_one_group_and_no_others(world, payloads, groups):
    w = world(BASIC.replace("payload.postId", "payload.level"))
    for payload in payloads:
        w.trigger("comments", payload=payload)
    assert w.one("SELECT count(*) FROM digests") == groups


def test_a_nested_key_groups_and_odd_payloads_count_as_without_one(world):
    w = world(BASIC.replace("payload.postId", "payload.a.b"))
    for payload in (
        {"a.b": "x"},
        {"a": None},
        {"a": [{"b": "x"}]},
        {"a": "text"},
        {"a": {"b": "x"}},
        {"a": {"b": "x"}},
    ):
        w.trigger("comments", payload=payload)
    assert w.rows("SELECT key, events FROM v_digests ORDER BY key") == [("", 4), ('"x"', 2)]


def test_several_key_paths_are_one_key(world):
    w = world(BASIC.replace('"payload.postId"', '["payload.a", "payload.b"]'))
    for a, b in (("x", "y"), ("x", "y"), ("xy", ""), ("x", None)):
        w.trigger("comments", payload={"a": a, "b": b})
    w.advance("10m")
    assert sorted(body["data"]["digest"]["key"] for body in w.bodies()[:2]) == [["x", "y"], ["xy", ""]]
    assert w.one("SELECT count(*) FROM digests") == 3


def test_group_identity_does_not_depend_on_separators(world):
    w = world()
    w.trigger("comments", "a:b", {"postId": "c"})
    w.trigger("comments", "a", {"postId": "b:c"})
    assert w.one("SELECT count(*) FROM digests") == 2


def test_fifty_triggers_in_one_millisecond_are_one_digest(world):
    w = world()
    for number in range(50):
        w.trigger("comments", payload={"postId": 1, "n": number})
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [list(range(50))]


TWO = """
[workflows.twice]
[[workflows.twice.steps]]
id = "hourly"
type = "digest"
key = "payload.k"
window = "1h"
[[workflows.twice.steps]]
id = "daily"
type = "digest"
window = "1d"
[[workflows.twice.steps]]
id = "send"
type = "chat"
sender = "hook"
"""


def test_two_digests_in_one_workflow_never_mix_and_the_later_one_has_every_event(world):
    w = world(BASIC + TWO)
    w.trigger("twice", payload={"k": "a", "n": 1})
    w.trigger("twice", payload={"k": "b", "n": 2})
    w.advance("90m")
    w.trigger("twice", payload={"k": "a", "n": 3})
    w.advance("3d")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2, 3]]
    assert [at for at, _, _ in w.sent] == [START + digestd.HOUR + digestd.DAY]
    assert w.rows("SELECT step, state FROM digests ORDER BY id")[-1] == ("hourly", "closed")
    assert w.one("SELECT count(*) FROM v_trouble") == 0


def test_cancel_takes_one_event_out_and_leaves_the_end(world):
    w = world()
    for number in (1, 2, 3):
        w.trigger("comments", payload={"postId": 1, "n": number}, id=f"t{number}")
        w.advance("1m")
    assert w.cancel("t1") is True
    assert w.cancel("t1") is False
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[2, 3]]
    assert w.sent[0][0] == minute(10)


def test_an_emptied_window_sends_nothing_and_does_not_shorten_the_next(world):
    w = world()
    w.trigger("comments", payload={"postId": 1}, id="t1")
    w.advance("5m")
    assert w.cancel("t1")
    assert w.one("SELECT state FROM digests") == "discarded"
    w.trigger("comments", payload={"postId": 1}, id="t2")
    w.advance("9m")
    assert w.sent == []
    w.advance("1m")
    assert [at for at, _, _ in w.sent] == [minute(15)]


def test_cancel_reaches_every_subscriber_of_a_transaction_and_no_closed_window(world):
    w = world()
    w.trigger("comments", ["a", "b"], {"postId": 1}, id="t1")
    w.trigger("comments", "a", {"postId": 1, "n": 2}, id="t2")
    assert w.cancel("t1")
    assert w.rows("SELECT subscriber_id, state FROM digests ORDER BY id") == [("a", "open"), ("b", "discarded")]
    w.advance("10m")
    assert w.cancel("t2") is False
    assert len(w.digested()) == 1


def test_cancel_ends_a_run_that_comes_from_one_event(world):
    w = world(BASIC + '[workflows.slow]\n[[workflows.slow.steps]]\nid = "wait"\ntype = "delay"\ndelay = "1h"\n'
              '[[workflows.slow.steps]]\nid = "send"\ntype = "chat"\nsender = "hook"\n')  # fmt: skip
    w.trigger("slow", id="t1")
    w.advance("1m")
    assert w.cancel("t1")
    w.advance("2h")
    assert w.sent == []
    assert w.one("SELECT state FROM runs") == "cancelled"


def test_a_run_merged_into_a_later_window_can_be_cancelled_out_of_it(world):
    w = world(BASIC + TWO.replace('[[workflows.twice.steps]]\nid = "hourly"\ntype = "digest"\nkey = "payload.k"\nwindow = "1h"\n',
              '[[workflows.twice.steps]]\nid = "hourly"\ntype = "delay"\ndelay = "1h"\n'))  # fmt: skip
    w.trigger("twice", payload={"n": 1}, id="t1")
    w.trigger("twice", payload={"n": 2}, id="t2")
    w.advance("2h")
    assert w.cancel("t1")
    w.advance("3d")
    assert [[event["n"] for event in events] for events in w.digested()] == [[2]]


def test_a_row_of_another_program_is_placed_and_a_bad_one_fails_alone(world):
    w = world()
    for payload in ('{"postId":1,"n":1}', "[1]", '{"x":NaN}', "nonsense", '{"postId":1,"n":2}'):
        w.rows(
            "INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', ?, ?)",
            payload,
            START,
        )
    w.rows("INSERT INTO events (workflow, subscriber_id, received_at) VALUES ('nothing', 's1', ?)", START)
    w.rows("INSERT INTO events (workflow, subscriber_id, received_at) VALUES ('comments', '', ?)", START)
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2]]
    assert w.one("SELECT count(*) FROM events WHERE state = 'failed'") == 5
    assert w.one("SELECT count(*) FROM v_trouble WHERE what = 'event failed'") == 5


def test_rows_in_the_past_join_what_was_open_then_and_those_in_the_future_count_as_now(world):
    w = world()
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.clock.at = minute(10) + 1000  # no tick has come yet
    for received_at, number in ((minute(9), 2), (minute(99), 3)):
        w.rows("INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', ?, ?)",
               f'{{"postId":1,"n":{number}}}', received_at)  # fmt: skip
    w.advance("20m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2], [3]]
    assert w.sent[1][0] == minute(20) + 1000


OFFICE = {
    "isEnabled": True,
    "weeklySchedule": {
        day: {"isEnabled": True, "hours": [{"start": "09:00 AM", "end": "05:00 PM"}]}
        for day in ("monday", "tuesday", "wednesday", "thursday", "friday")
    },
}
FRIDAY = digestd.parse_instant("2026-03-06T17:20:00Z")
HOURS = BASIC.replace('window = "10m"', 'window = "10m"\nextend_to_schedule = true')


def at_friday(w: World) -> None:
    w.clock.at = FRIDAY
    w.subscriber("s1", schedule=OFFICE)


def test_a_window_that_ends_outside_the_hours_is_held_and_collects_on(world):
    w = world(HOURS)
    at_friday(w)
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.advance("1d")
    assert w.one("SELECT state, waits FROM digests") == ("held", 1)
    w.trigger("comments", payload={"postId": 1, "n": 2})
    w.run_until(digestd.parse_instant("2026-03-09T09:00:00Z"))
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2]]
    assert w.sent[0][0] == digestd.parse_instant("2026-03-09T09:00:00Z")


def test_what_was_muted_goes_out_when_the_hours_next_begin(world):
    """case-022: held from 11:00 to the start at 12:00, and to no later repeat."""
    sunday = {"sunday": {"isEnabled": True, "hours": [{"start": "12:00 PM", "end": "10:00 PM"}]}}
    w = world(HOURS.replace('window = "10m"', 'window = "1h"'))
    w.clock.at = digestd.parse_instant("2026-03-08T10:00:00Z")
    w.subscriber("s1", schedule={"isEnabled": True, "weeklySchedule": sunday})
    w.trigger("comments", payload={"postId": 1})
    w.advance("2d")
    assert [digestd.iso_text(at) for at, _, _ in w.sent] == ["2026-03-08T12:00:00Z"]


def test_a_window_that_ended_while_the_daemon_was_down_goes_out_once_and_alone(world):
    """case-036: both events right after the start, and what comes then is in a window of its own."""
    w = world(BASIC.replace('window = "10m"', 'window = "1h"'))
    w.clock.at = digestd.parse_instant("2026-03-09T10:00:00Z")
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.advance("20m")
    w.trigger("comments", payload={"postId": 1, "n": 2})
    w.advance("10m")
    w.crash()
    w.clock.at = digestd.parse_instant("2026-03-09T15:00:00Z")
    w.open()
    w.trigger("comments", payload={"postId": 1, "n": 3})
    w.advance("2h")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2], [3]]
    assert [digestd.iso_text(at) for at, _, _ in w.sent] == ["2026-03-09T15:00:00Z", "2026-03-09T16:00:00Z"]


def test_an_event_after_the_end_of_a_window_that_has_to_wait_joins_it_before_any_tick(world):
    w = world(HOURS)
    at_friday(w)
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.clock.at += 11 * digestd.MINUTE
    w.trigger("comments", payload={"postId": 1, "n": 2})
    assert w.rows("SELECT state, waits FROM digests") == [("held", 1)]
    assert w.rows("SELECT digest_id FROM events") == [(1,), (1,)]


def test_without_the_extension_channels_outside_the_hours_are_skipped(world):
    w = world(BASIC)
    at_friday(w)
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    assert w.sent == []
    assert w.one("SELECT state, reason FROM jobs") == ("skipped", "outside the subscriber's schedule")


def test_a_critical_workflow_waits_for_no_hours(world):
    w = world(HOURS.replace("[workflows.comments]", "[workflows.comments]\ncritical = true"))
    at_friday(w)
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    assert len(w.sent) == 1


def test_windows_that_end_together_are_each_held_or_closed_and_an_empty_one_sends_nothing(world):
    w = world(HOURS + BASIC[BASIC.index("[workflows.comments]") :].replace("workflows.comments", "workflows.plain"))
    at_friday(w)
    for workflow, who in (("comments", "s1"), ("comments", "s2"), ("plain", "s1"), ("plain", "s2")):
        w.trigger(workflow, who, {"postId": 1, "n": 1})
    w.rows(
        "INSERT INTO digests (workflow, step, subscriber_id, key, opened_at, closes_at, due_at)"
        f" VALUES ('plain', 'digest', 's3', '', {w.now}, {w.now + 600_000}, {w.now + 600_000})"
    )
    w.advance("10m")
    assert w.rows("SELECT workflow, subscriber_id, state FROM digests ORDER BY id") == [
        ("comments", "s1", "held"), ("comments", "s2", "closed"),
        ("plain", "s1", "closed"), ("plain", "s2", "closed"), ("plain", "s3", "closed"),
    ]  # fmt: skip
    assert [claim.draft.subscriber["subscriberId"] for _, claim, _ in w.sent] == ["s2", "s2"]  # s1 is out of its hours
    assert w.one("SELECT count(*) FROM jobs WHERE reason = 'nothing is in it'") == 1
    for workflow in ("comments", "plain"):  # what was remembered of them is right too
        w.trigger(workflow, "s1", {"postId": 1, "n": 2})
    assert w.rows("SELECT digest_id FROM events ORDER BY id DESC LIMIT 2") == [(6,), (1,)]


# -- start when repeated -----------------------------------------------------------------------------------------------

REPEATED = BASIC.replace('window = "10m"', 'window = "10m"\nstart = "when_repeated"\nlook_back = "5m"')


def test_a_cancelled_event_does_not_count_as_the_one_before(world):
    chat = '[[workflows.comments.steps]]\nid = "chat"'
    w = world(REPEATED.replace(chat, WAIT + chat))
    w.trigger("comments", payload={"postId": 1, "n": 1}, id="t1")
    assert w.cancel("t1")
    w.trigger("comments", payload={"postId": 1, "n": 2})
    assert w.one("SELECT count(*) FROM digests") == 0
    w.trigger("comments", payload={"postId": 1, "n": 3})
    assert w.one("SELECT count(*) FROM digests") == 1


WAIT = '[[workflows.comments.steps]]\nid = "wait"\ntype = "delay"\ndelay = "1h"\n'


def test_a_look_back_reaches_over_a_restart_and_past_the_retention(world):
    w = world(REPEATED)
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.tick()
    w.crash()
    w.open()
    w.advance("5m")
    with digestd.transaction():
        assert digestd.purge(w.now) == 1 and w.one("SELECT count(*) FROM events") == 0
        assert digestd.purge_arrivals(w.now - w.config.longest_look_back) == 0
    w.trigger("comments", payload={"postId": 1, "n": 2})
    assert w.one("SELECT state FROM digests") == "open"
    w.advance("10m")
    with digestd.transaction():
        assert digestd.purge_arrivals(w.now - w.config.longest_look_back) == 2
    assert w.digested() == [[{"postId": 1, "n": 1}], [{"postId": 1, "n": 2}]]


def test_a_window_that_is_held_counts_as_open_however_long_ago_its_events_came(world):
    w = world(REPEATED.replace("look_back", "extend_to_schedule = true\nlook_back"))
    at_friday(w)
    for number in (1, 2):
        w.trigger("comments", payload={"postId": 1, "n": number})
    w.advance("1d")
    assert w.one("SELECT state FROM digests") == "held"
    w.trigger("comments", payload={"postId": 1, "n": 3})
    assert w.one("SELECT count(*) FROM events WHERE digest_id = 1") == 2


def test_an_event_alone_says_why_and_its_digest_step_reports_it(world):
    text = "{{ steps.digest.eventCount }} {{ steps.digest.events[0].payload.n }}"
    w = world(REPEATED.replace('sender = "hook"', f'sender = "hook"\ntext = "{text}"'))
    w.trigger("comments", payload={"postId": 1, "n": 7})
    w.tick()
    [body] = w.bodies()
    assert body["data"]["text"] == "1 7" and body["data"]["digest"]["id"] is None
    assert w.one("SELECT type, state, reason FROM jobs WHERE step = 'digest'") == (
        "digest", "skipped", "the first within 5m"
    )  # fmt: skip


def test_a_later_digest_step_that_starts_when_repeated_lets_the_first_run_past(world):
    w = world(BASIC + TWO.replace('id = "daily"', 'id = "daily"\nstart = "when_repeated"\nlook_back = "3h"'))
    sent = []
    for number in range(3):
        w.trigger("twice", payload={"k": 1, "n": number})
        w.advance("90m")
        sent.append([len(events) for events in w.digested()])
    w.advance("2d")
    assert sent[0] == [1] and [len(events) for events in w.digested()] == [1, 2]


# -- windows that last long --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "at"),
    [
        ('window = "1000d"', START + 1000 * digestd.DAY),
        ('cron = "0 9 29 2 *"', digestd.parse_instant("2028-02-29T09:00:00Z")),
    ],
)
def test_a_wait_of_years_ends_when_it_should(world, ends, at):
    w = world('[daemon]\nmax_window = "3650d"\n' + BASIC.replace('window = "10m"', ends))
    w.trigger("comments", payload={"postId": 1})
    w.run_until(at - 1)
    with digestd.transaction():
        assert digestd.purge(w.now) == 0  # nothing of it is old
    assert w.sent == []
    w.run_until(at)
    assert len(w.sent) == 1


# -- windows that end otherwise ----------------------------------------------------------------------------------------


def test_a_window_that_is_full_ends_at_once_and_the_next_event_opens_another(world):
    w = world(BASIC.replace('window = "10m"', 'window = "10m"\nmax_events = 3'))
    for number in range(7):
        w.trigger("comments", payload={"postId": 1, "n": number})
        w.tick()
    assert [[event["n"] for event in events] for events in w.digested()] == [[0, 1, 2], [3, 4, 5]]
    assert w.rows("SELECT state, reason FROM digests") == [
        ("closed", "it has max_events, 3"), ("closed", "it has max_events, 3"), ("open", None)
    ]  # fmt: skip
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()][2:] == [[6]]


def test_a_bulk_of_triggers_fills_windows_one_after_the_other(world):
    w = world(BASIC.replace('window = "10m"', 'window = "10m"\nmax_events = 2'))
    bodies = [{"name": "comments", "to": "s1", "payload": {"postId": 1, "n": number}} for number in range(5)]
    with digestd.transaction():
        digestd.take_triggers(w.config, [digestd.check_trigger(w.config, body, w.now) for body in bodies], w.now)
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[0, 1], [2, 3], [4]]


def test_a_cancelled_event_leaves_room_in_a_window_with_a_limit(world):
    w = world(BASIC.replace('window = "10m"', 'window = "10m"\nmax_events = 3'))
    for number in range(2):
        w.trigger("comments", payload={"postId": 1, "n": number}, id=f"t{number}")
    assert w.cancel("t0")
    states = []
    for number in range(2, 4):
        w.trigger("comments", payload={"postId": 1, "n": number})
        states.append(w.one("SELECT state FROM digests"))
    assert states == ["open", "closed"]


def test_a_full_window_outside_the_hours_is_held_and_collects_on(world):
    w = world(HOURS.replace('window = "10m"', 'window = "10m"\nmax_events = 2'))
    at_friday(w)
    for number in range(4):
        w.trigger("comments", payload={"postId": 1, "n": number})
    assert w.rows("SELECT state, waits FROM digests") == [("held", 1)]
    w.run_until(digestd.parse_instant("2026-03-09T09:00:00Z"))
    assert [len(events) for events in w.digested()] == [4]


def release(w, window_id):
    with digestd.transaction():
        return digestd.release_window(window_id, w.now)


def test_a_window_is_released_once_also_while_it_is_held(world):
    w = world(HOURS)
    at_friday(w)
    w.trigger("comments", payload={"postId": 1, "n": 1})
    assert release(w, 1) and not release(w, 1) and not release(w, 2)
    w.trigger("comments", payload={"postId": 1, "n": 2})
    w.advance("1d")
    assert w.one("SELECT state FROM digests WHERE id = 2") == "held"
    assert release(w, 2)
    w.trigger("comments", payload={"postId": 1, "n": 3})
    assert w.rows("SELECT id, state, reason FROM digests") == [
        (1, "closed", "released"), (2, "closed", "released"), (3, "open", None)
    ]  # fmt: skip
    assert w.rows("SELECT digest_id FROM events ORDER BY id") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("outside", ["skip", "hold"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_what_somebody_releases_at_night_goes_out_at_night(world, outside, by_hand):
    w = world(BASIC.replace('sender = "hook"', f'sender = "hook"\noutside = "{outside}"'))
    at_friday(w)
    w.trigger("comments", payload={"postId": 1})
    if by_hand:
        assert release(w, 1)
    w.advance("10m")
    assert len(w.sent) == by_hand


def test_a_released_window_cannot_be_cancelled_any_more(world):
    w = world()
    w.trigger("comments", payload={"postId": 1}, id="t1")
    assert release(w, 1) and not w.cancel("t1")
    w.tick()
    assert len(w.sent) == 1


@pytest.mark.parametrize(("order", "shown"), [("oldest", "01"), ("newest", "43")])
def test_templates_see_what_the_step_shows_and_count_all(world, order, shown):
    text = "{{ steps.digest.eventCount }}:{% for e in steps.digest.events %}{{ e.payload.n }}{% endfor %}"
    w = world(
        BASIC.replace('window = "10m"', f'window = "10m"\nshow = 2\norder = "{order}"')
        .replace('sender = "hook"', f'sender = "hook"\ntext = "{text}"')
    )  # fmt: skip
    for number in range(5):
        w.trigger("comments", payload={"postId": 1, "n": number})
    w.advance("10m")
    [body] = w.bodies()
    assert body["data"]["text"] == f"5:{shown}" and body["data"]["digest"]["eventCount"] == 5
    assert [event["payload"]["n"] for event in body["data"]["digest"]["events"]] == [0, 1, 2, 3, 4]


# -- conditions --------------------------------------------------------------------------------------------------------


def test_a_digest_whose_condition_says_no_lets_the_event_go_on_alone(world):
    w = world(BASIC.replace('window = "10m"', 'window = "10m"\nwhen = "payload.n > 10"'))
    for number in (1, 11, 12):
        w.trigger("comments", payload={"postId": 1, "n": number})
    w.tick()
    assert w.digested() == [[{"postId": 1, "n": 1}]]
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1], [11, 12]]
    assert w.one("SELECT state, reason FROM jobs WHERE type = 'digest'") == ("skipped", "its condition says no")


def test_a_condition_that_cannot_be_told_fails_that_event_alone(world):
    w = world(BASIC.replace('window = "10m"', 'window = "10m"\nwhen = "payload.n > 10"'))
    w.trigger("comments", payload={"postId": 1, "n": "many"})
    w.trigger("comments", payload={"postId": 1, "n": 11})
    w.advance("10m")
    assert w.digested() == [[{"postId": 1, "n": 11}]]
    state, reason = w.one("SELECT state, reason FROM events WHERE id = 1")
    assert state == "failed" and reason.startswith("the condition cannot be told: ")


def test_a_condition_sees_the_subscriber_as_it_is_now(world):
    w = world(BASIC.replace('window = "10m"', 'window = "10m"\nwhen = "subscriber.data.plan != \'pro\'"'))
    w.subscriber("s1", data={"plan": "pro"})
    w.trigger("comments", payload={"postId": 1})
    w.subscriber("s1", data={"plan": "free"})
    w.trigger("comments", payload={"postId": 1})
    assert w.rows("SELECT digest_id FROM events ORDER BY id") == [(None,), (1,)]


def test_a_later_digest_whose_condition_says_no_is_passed_with_all_events_in_it(world):
    w = world(BASIC + TWO.replace('id = "daily"', 'id = "daily"\nwhen = "payload.n > 10"'))
    for number in (1, 2):
        w.trigger("twice", payload={"k": 1, "n": number})
    w.advance("1h")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1, 2]]


# -- what somebody did by hand -----------------------------------------------------------------------------------------


def test_a_window_that_somebody_emptied_by_hand_sends_nothing(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.rows(f"UPDATE events SET state = 'cancelled', finished_at = {w.now}")
    w.advance("10m")
    assert w.sent == [] and w.one("SELECT state, reason FROM jobs") == ("skipped", "nothing is in it")


def test_a_deleted_window_is_nobodys_and_stops_nothing(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.rows("PRAGMA foreign_keys = 0")
    w.rows("DELETE FROM digests")
    w.trigger("comments", "s2", {"postId": 1})
    w.advance("10m")
    assert len(w.sent) == 1


def test_a_window_for_which_somebody_wrote_a_run_closes_and_stops_no_other(world):
    w = world()
    w.trigger("comments", "s1", {"postId": 1})
    w.trigger("comments", "s2", {"postId": 1})
    w.rows(
        "INSERT INTO runs (workflow, subscriber_id, digest_id, step, state, created_at, finished_at)"
        f" VALUES ('comments', 's1', 1, 'digest', 'completed', {START}, {START})"
    )
    w.advance("10m")
    assert w.rows("SELECT state FROM digests ORDER BY id") == [("closed",), ("closed",)]
    assert w.rows("SELECT subscriber_id, count(*) FROM runs GROUP BY 1 ORDER BY 1") == [("s1", 1), ("s2", 1)]
    assert [claim.draft.subscriber["subscriberId"] for _, claim, _ in w.sent] == ["s2"]


# -- deleting a subscriber ---------------------------------------------------------------------------------------------


def delete(w, subscriber_id):
    with digestd.transaction():
        return digestd.delete_subscriber(subscriber_id, w.now)


LATER = """
[workflows.later]
[[workflows.later.steps]]
id = "feed"
type = "in_app"
text = "x"
[[workflows.later.steps]]
id = "wait"
type = "delay"
delay = "1m"
[[workflows.later.steps]]
id = "digest"
type = "digest"
window = "10m"
[[workflows.later.steps]]
id = "send"
type = "chat"
sender = "hook"
"""


def test_a_deleted_subscriber_gets_nothing_any_more_and_others_do(world):
    w = world(BASIC + LATER)
    for subscriber_id in ("s1", "s2"):
        w.trigger("comments", subscriber_id, {"postId": 1})
        w.trigger("later", subscriber_id)
    w.advance("2m")
    w.trigger("later", ["s1", "s2"])
    w.rows("INSERT INTO events (workflow, subscriber_id, payload) VALUES ('comments', 's1', '{}')")
    assert delete(w, "s1") and not delete(w, "s1") and not delete(w, "nobody")
    w.advance("1d")
    assert {body["data"]["subscriber"]["subscriberId"] for body in w.bodies()} == {"s2"}
    assert len(w.sent) == 2
    assert w.rows("SELECT DISTINCT state, reason FROM events WHERE subscriber_id = 's1'") == [
        ("cancelled", "subscriber deleted")
    ]
    assert (
        w.rows("SELECT state, reason FROM digests WHERE subscriber_id = 's1'")
        == [("discarded", "subscriber deleted")] * 2
    )
    assert set(w.rows("SELECT state, reason FROM runs WHERE subscriber_id = 's1'")) == {
        ("cancelled", "subscriber deleted")
    }
    assert w.rows("SELECT subscriber_id, count(*) FROM inbox_messages GROUP BY 1") == [("s2", 2)]
    assert w.one("SELECT count(*) FROM v_trouble") == 0


def test_a_deleted_subscriber_comes_back_with_the_next_trigger_and_nothing_of_before(world):
    w = world()
    w.subscriber("s1", email="a@example.test")
    w.trigger("comments", payload={"postId": 1, "n": 1})
    assert delete(w, "s1")
    w.trigger("comments", payload={"postId": 1, "n": 2})
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[2]]
    assert w.bodies()[0]["data"]["subscriber"] == {"subscriberId": "s1"}


def test_a_message_on_its_way_while_its_subscriber_is_deleted_is_not_tried_again(world):
    w = world(BASIC + LATER)
    w.trigger("comments", payload={"postId": 1})
    w.reply("hook", "temporary")
    w.advance("10m")
    assert delete(w, "s1")
    w.advance("1d")
    assert len(w.sent) == 1
    assert w.rows("SELECT state, reason FROM jobs") == [("cancelled", "subscriber deleted")]


def test_what_was_of_a_deleted_subscriber_is_purged_in_the_end(world):
    w = world(BASIC + LATER)
    w.trigger("comments", payload={"postId": 1})
    w.trigger("later")
    w.advance("2m")
    assert delete(w, "s1")
    w.advance("2d")
    with digestd.transaction():
        digestd.purge(w.now - digestd.DAY)
    assert [w.one(f"SELECT count(*) FROM {table}") for table in ("events", "digests", "runs", "jobs")] == [0, 0, 0, 0]
