"""What a try comes to: done, another try, given up; and what the run does meanwhile."""

from __future__ import annotations

import pytest

import digestd
from conftest import BASIC, START

TWO_STEPS = (
    BASIC
    + """
[senders.console]
type = "log"
[workflows.alert]
[[workflows.alert.steps]]
id = "hook"
type = "chat"
sender = "hook"
[[workflows.alert.steps]]
id = "log"
type = "push"
sender = "console"
"""
)


def test_a_temporary_failure_is_tried_again_by_the_plan_and_then_given_up(world):
    w = world(TWO_STEPS)
    w.reply("hook", "temporary", "temporary", "temporary")
    w.trigger("alert")
    w.advance("1h")
    assert [at - START for at, claim, _ in w.sent if claim.sender_name == "hook"] == [0, 5_000, 65_000]
    assert w.rows("SELECT number, outcome FROM attempts WHERE job_id = 1") == [
        (1, "temporary"),
        (2, "temporary"),
        (3, "temporary"),
    ]
    assert w.one("SELECT reason FROM v_trouble") == "given up after 3 tries: temporary"


def test_the_next_step_is_due_after_the_first_try_whatever_its_result(world):
    w = world(TWO_STEPS)
    w.reply("hook", "temporary")
    w.trigger("alert")
    w.tick()
    assert [claim.sender_name for _, claim, _ in w.sent] == ["hook", "console"]
    assert w.one("SELECT state FROM runs") == "active"
    w.advance("5s")
    assert w.one("SELECT state FROM runs") == "completed"
    assert [claim.sender_name for _, claim, _ in w.sent] == ["hook", "console", "hook"]


@pytest.mark.parametrize(("last", "follows"), [("sent", True), ("permanent", False)])
def test_stop_on_failure_waits_for_the_final_result(world, last, follows):
    w = world(TWO_STEPS.replace('id = "hook"', 'id = "hook"\nstop_on_failure = true'))
    w.reply("hook", "temporary", last)
    w.trigger("alert")
    w.tick()
    assert [claim.sender_name for _, claim, _ in w.sent] == ["hook"]
    w.advance("1m")
    assert ("console" in [claim.sender_name for _, claim, _ in w.sent]) is follows
    assert w.one("SELECT state FROM runs") == ("completed" if follows else "failed")


def test_a_permanent_failure_is_not_tried_again_and_others_go_on(world):
    w = world()
    w.reply("hook", "permanent")
    for subscriber in ("a", "b"):
        w.trigger("comments", subscriber)
    w.advance("1h")
    assert len(w.sent) == 2 and len(w.bodies()) == 1
    assert w.one("SELECT state, reason FROM jobs WHERE state = 'failed'") == ("failed", "permanent")


def test_a_failed_job_is_retried_by_hand_with_the_same_id_and_bytes(world):
    w = world(TWO_STEPS)
    w.reply("hook", "permanent")
    w.trigger("alert", payload={"n": 1})
    w.advance("1m")
    with digestd.transaction():
        assert digestd.retry_job(1, w.now) is True
        assert digestd.retry_job(1, w.now) is False
        assert digestd.retry_job(99, w.now) is False
    w.tick()
    tries = [claim for _, claim, _ in w.sent if claim.sender_name == "hook"]
    assert len(tries) == 2 and tries[0].message == tries[1].message and tries[0].public_id == tries[1].public_id
    assert [claim.sender_name for _, claim, _ in w.sent].count("console") == 1  # the run is not pushed on again


def test_a_job_retried_in_the_middle_of_a_run_does_not_hurry_its_later_steps(world):
    w = world(TWO_STEPS.replace('[[workflows.alert.steps]]\nid = "log"',
              '[[workflows.alert.steps]]\nid = "wait"\ntype = "delay"\ndelay = "1h"\n[[workflows.alert.steps]]\nid = "log"'))  # fmt: skip
    w.reply("hook", "permanent")
    w.trigger("alert")
    w.advance("1m")
    with digestd.transaction():
        assert digestd.retry_job(1, w.now)
    w.advance("30m")
    assert [claim.sender_name for _, claim, _ in w.sent] == ["hook", "hook"]
    w.advance("30m")
    assert w.sent[-1][0] == START + digestd.HOUR


def result(job_id: int = 1, **more) -> digestd.SendResult:
    return digestd.SendResult(job_id, 1, "temporary", **more)


def test_a_try_never_comes_before_its_retry_after_and_a_far_one_is_cut_to_a_day():
    sender = digestd.LogSettings(type="log", retry=["30s"], jitter=0.0)
    assert digestd.next_try_at(sender, 1, 0, result(retry_after_ms=120_000)) == 120_000
    assert digestd.next_try_at(sender, 1, 0, result(retry_after_ms=1_000)) == 30_000
    assert digestd.next_try_at(sender, 1, 0, result(retry_at=90_000)) == 90_000
    assert digestd.next_try_at(sender, 1, 10**6, result(retry_at=90_000)) == 10**6 + 30_000
    assert digestd.next_try_at(sender, 1, 0, result(retry_at=10**15)) == digestd.DAY
    assert digestd.next_try_at(sender, 2, 0, result()) is None


def test_jitter_adds_up_to_a_fifth_is_the_same_each_time_and_differs_between_jobs():
    sender = digestd.LogSettings(type="log", retry=["100s"])
    waits = [digestd.next_try_at(sender, 1, 0, result(job)) for job in range(200)]
    assert all(100_000 <= wait <= 120_000 for wait in waits) and len(set(waits)) > 150
    assert waits == [digestd.next_try_at(sender, 1, 0, result(job)) for job in range(200)]


def test_an_interrupted_try_is_repeated_at_once_and_does_not_use_up_the_plan(world):
    w = world(TWO_STEPS)
    w.trigger("alert")
    with digestd.transaction():
        claims = digestd.tick(w.config, w.now, w.room).claims
    assert len(claims) == 1
    w.crash()
    w.open()
    w.tick()
    assert w.rows("SELECT number, outcome FROM attempts WHERE job_id = 1") == [(1, "interrupted"), (2, "sent")]
    assert w.one("SELECT tries FROM jobs WHERE id = 1") == 1
    assert w.sent[0][1].public_id == claims[0].public_id and w.sent[0][1].message == claims[0].message


def test_a_message_that_ends_the_process_three_times_is_given_up(world):
    w = world(TWO_STEPS)
    w.trigger("alert")
    for _ in range(3):
        with digestd.transaction():
            assert len(digestd.tick(w.config, w.now, w.room).claims) == 1
        w.crash()
        w.open()
    w.advance("1m")
    assert w.one("SELECT state, reason FROM jobs WHERE id = 1") == (
        "failed",
        "the process ended 3 times during the try",
    )
    assert [claim.sender_name for _, claim, _ in w.sent] == ["console"]  # the run goes on


def test_a_result_that_comes_twice_changes_nothing(world):
    w = world(TWO_STEPS)
    w.trigger("alert")
    w.tick()
    late = digestd.SendResult(1, 1, "permanent", "late")
    with digestd.transaction():
        digestd.record_outcomes(w.config, [digestd.Sent(w.sent[0][1], late)], w.now)
    assert w.one("SELECT state FROM jobs WHERE id = 1") == "completed"
    assert w.one("SELECT outcome FROM attempts WHERE id = 1") == "sent"


# -- many at once ------------------------------------------------------------------------------------------------------


def claims_of(w, count):
    """Tries that were begun, and of which nothing is recorded yet."""
    for number in range(count):
        w.trigger("alert", f"s{number}")
    with digestd.transaction():
        return digestd.tick(w.config, w.now, w.room).claims


def test_of_many_results_one_that_comes_too_late_stops_only_itself(world):
    w = world(TWO_STEPS)
    claims = claims_of(w, 3)
    w.rows("UPDATE jobs SET state = 'failed', finished_at = 1 WHERE id = ?", claims[1].job_id)
    sent = [digestd.Sent(claim, digestd.result_of(claim, "sent")) for claim in claims]
    with digestd.transaction():
        digestd.record_outcomes(w.config, sent, w.now)
    states = dict(w.rows("SELECT id, state FROM jobs"))
    assert [states[claim.job_id] for claim in claims] == ["completed", "failed", "completed"]
    at_hand = dict(w.rows("SELECT id, next_at IS NOT NULL FROM runs"))
    assert [at_hand[claim.run_id] for claim in claims] == [1, 0, 1]  # the others go on


def test_of_many_results_each_meets_its_own_fate(world):
    w = world(TWO_STEPS)
    claims = claims_of(w, 4)
    outcomes = ["sent", "temporary", "permanent", "sent"]
    sent = [digestd.Sent(*pair) for pair in zip(claims, map(digestd.result_of, claims, outcomes), strict=True)]
    with digestd.transaction():
        digestd.record_outcomes(w.config, sent, w.now)
    states = dict(w.rows("SELECT id, state FROM jobs"))
    assert [states[claim.job_id] for claim in claims] == ["completed", "delayed", "failed", "completed"]
    found = dict(w.rows("SELECT job_id, outcome FROM attempts"))
    assert [found[claim.job_id] for claim in claims] == outcomes


def test_a_result_that_the_database_refuses_does_not_take_the_others_with_it(world):
    w = world(TWO_STEPS)
    claims = claims_of(w, 3)
    sent = [digestd.Sent(claim, digestd.result_of(claim, "sent")) for claim in claims]
    bad = sent[1]._replace(result=sent[1].result._replace(status_code="x" * 10))
    w.rows(
        "CREATE TRIGGER odd BEFORE UPDATE ON attempts WHEN new.status_code = 'xxxxxxxxxx'"
        " BEGIN SELECT raise(ABORT, 'odd'); END"
    )
    with digestd.transaction():
        digestd.record_outcomes(w.config, [sent[0], bad, sent[2]], w.now)
    states = dict(w.rows("SELECT id, state FROM jobs"))
    assert [states[claim.job_id] for claim in claims] == ["completed", "active", "completed"]


# -- senders that are disabled -----------------------------------------------------------------------------------------


def make_tries(world, **facts) -> None:
    """Begin what is due, and let every try by the hook come to this."""
    with digestd.transaction():
        report = digestd.tick(world.config, world.now, world.room)
    for claim in report.claims:
        result = digestd.result_of(claim, **facts) if claim.sender_name == "hook" else digestd.result_of(claim, "sent")
        world.sent.append((world.now, claim, result))
        with digestd.transaction():
            digestd.record_outcomes(world.config, [digestd.Sent(claim, result)], world.now)
        world.room.end(claim.sender_name, claim.lane)


GONE = {"outcome": "permanent", "reason": "HTTP 410", "status_code": 410, "cause": "gone"}


def test_a_sender_that_is_gone_is_disabled_and_its_message_waits_with_what_follows(world):
    w = world(TWO_STEPS)
    w.trigger("alert", "s1")
    make_tries(w, **GONE)
    w.tick()
    assert w.rows("SELECT name, state, cause, reason FROM senders") == [("hook", "disabled", "gone", "HTTP 410")]
    w.trigger("alert", "s2")
    w.advance("30d")
    assert w.rows("SELECT run_id, step, state FROM jobs WHERE sender = 'hook'") == [
        (1, "hook", "waiting"),
        (2, "hook", "waiting"),
    ]
    assert w.rows("SELECT outcome, status_code FROM attempts WHERE job_id = 1") == [("permanent", 410)]
    # The other sender is not held up, neither for the message that met the 410 nor for the one that came later.
    assert [claim.run_id for _, claim, _ in w.sent if claim.sender_name == "console"] == [1, 2]
    assert w.rows("SELECT what, name, reason FROM v_trouble") == [("sender disabled", "hook", "HTTP 410; 2 jobs wait")]


def test_what_waited_for_a_disabled_sender_goes_out_once_it_is_enabled(world):
    w = world(TWO_STEPS)
    w.trigger("alert", "s1")
    make_tries(w, **GONE)
    w.trigger("alert", "s2")
    w.advance("1d")
    with digestd.transaction():
        assert digestd.enable_sender("hook") is True
        assert digestd.enable_sender("hook") is False
    w.tick()
    assert w.rows("SELECT state, tries FROM jobs WHERE sender = 'hook'") == [("completed", 1), ("completed", 1)]
    assert w.rows("SELECT state FROM runs") == [("completed",), ("completed",)]
    assert w.one("SELECT count(*) FROM jobs") == 4, "no step has run twice"
    assert w.rows("SELECT state, failures FROM senders") == [("ok", 0)]
    assert w.rows("SELECT * FROM v_trouble") == []


def test_steps_that_waited_for_a_first_try_go_on_when_its_sender_is_disabled(world):
    w = world(TWO_STEPS + "[daemon]\nconcurrency = 1\n")
    for number in range(5):
        w.trigger("alert", f"s{number}")
    make_tries(w, **GONE)  # one has room, four have never been tried
    w.tick()
    assert len([claim for _, claim, _ in w.sent if claim.sender_name == "console"]) == 5
    assert w.one("SELECT count(*) FROM jobs WHERE sender = 'hook' AND state = 'waiting'") == 5


def test_a_step_that_stops_on_failure_waits_for_the_disabled_sender(world):
    w = world(TWO_STEPS.replace('id = "hook"', 'id = "hook"\nstop_on_failure = true'))
    w.trigger("alert", "s1")
    make_tries(w, **GONE)
    w.trigger("alert", "s2")
    w.advance("1d")
    assert [claim.sender_name for _, claim, _ in w.sent] == ["hook"]
    with digestd.transaction():
        digestd.enable_sender("hook")
    w.advance("1s")
    assert [claim.sender_name for _, claim, _ in w.sent].count("console") == 2


def test_a_webhook_that_fails_for_five_days_is_disabled_and_nothing_is_lost(world):
    w = world(TWO_STEPS)
    for hour in range(0, 130, 6):
        w.clock.at = START + hour * digestd.HOUR
        w.trigger("alert", f"s{hour}")
        make_tries(w, outcome="temporary", reason="HTTP 503", status_code=503)
        if hour < 120:
            assert w.one("SELECT state FROM senders") == "ok"
    state, cause, reason = w.one("SELECT state, cause, reason FROM senders")
    assert (state, cause) == ("disabled", "failing") and "2026-03-09 09:00" in reason and "HTTP 503" in reason
    assert w.one("SELECT count(*) FROM jobs WHERE sender = 'hook' AND state = 'waiting'") > 0


def test_one_success_begins_the_count_of_failures_anew(world):
    w = world(TWO_STEPS)
    for hour in range(0, 240, 6):
        w.clock.at = START + hour * digestd.HOUR
        w.trigger("alert", f"s{hour}")
        make_tries(w, outcome="sent" if hour == 96 else "temporary", status_code=200 if hour == 96 else 503)
        if hour == 96:
            assert w.rows("SELECT state, failures, failing_at FROM senders") == [("ok", 0, None)]
    assert w.one("SELECT disabled_at FROM senders") == START + (102 + 120) * digestd.HOUR


def test_a_day_without_a_try_begins_the_count_of_failures_anew(world):
    w = world(TWO_STEPS.replace('retry = ["5s", "1m"]', "retry = []"))
    for day in range(0, 40, 2):
        w.clock.at = START + day * digestd.DAY
        w.trigger("alert", f"s{day}")
        make_tries(w, outcome="temporary", status_code=503)
    assert w.rows("SELECT state, failures FROM senders") == [("ok", 1)]


def test_a_template_that_fails_is_no_fault_of_its_sender(world):
    w = world(TWO_STEPS)
    for hour in range(0, 240, 6):
        w.clock.at = START + hour * digestd.HOUR
        w.trigger("alert", f"s{hour}")
        make_tries(w, outcome="permanent", reason="the template failed")
    assert w.rows("SELECT * FROM senders") == []


def test_successes_of_a_sender_that_never_failed_cost_no_statement(world):
    from conftest import statements

    w = world(TWO_STEPS)
    w.trigger("alert")
    assert [sql for sql in statements(w.tick) if "UPDATE senders" in sql or "INTO senders" in sql] == []


def test_what_is_remembered_of_a_sender_goes_with_it(world):
    w = world(TWO_STEPS)
    w.trigger("alert")
    make_tries(w, **GONE)
    w.use(TWO_STEPS.replace('"hook"', '"other"').replace("senders.hook", "senders.other"))
    w.tick()
    assert w.rows("SELECT * FROM senders") == []
    assert w.one("SELECT state FROM jobs WHERE step = 'hook'") == "failed", "its step is gone, and a person sees it"


def test_a_login_that_was_refused_is_tried_again_after_a_start_but_a_gone_sender_is_not(world):
    w = world(BASIC)
    with digestd.transaction():
        digestd.disable_sender(w.config, "mail", "login", "535", w.now)
        digestd.disable_sender(w.config, "hook", "gone", "HTTP 410", w.now)
        digestd.enable_mended()
    assert w.rows("SELECT name, state FROM senders ORDER BY name") == [("hook", "disabled"), ("mail", "ok")]


def test_changed_settings_enable_a_sender_but_not_one_that_a_person_disabled(world):
    w = world(BASIC)
    with digestd.transaction():
        digestd.disable_sender(w.config, "mail", "person", "moving", w.now)
        digestd.disable_sender(w.config, "hook", "gone", "HTTP 410", w.now)
        digestd.enable_mended(["mail", "hook"])
    assert w.rows("SELECT name, state FROM senders ORDER BY name") == [("hook", "ok"), ("mail", "disabled")]


def test_a_repeatable_of_a_disabled_sender_does_not_pile_up(world):
    w = world(BASIC + '[repeatables.r]\nevery = "1m"\nsender = "hook"\n')
    with digestd.transaction():
        digestd.disable_sender(w.config, "hook", "person", "moving", w.now)
    w.advance("1d")
    assert w.one("SELECT count(*) FROM jobs") == 1 and w.sent == []
    with digestd.transaction():
        digestd.enable_sender("hook")
    w.advance("2m")
    assert [at - START - digestd.DAY for at, _, _ in w.sent] == [0, 60_000, 120_000]


def test_a_server_that_hangs_up_before_it_takes_anything_is_tried_once_more_at_once(world):
    w = world(TWO_STEPS)
    w.trigger("alert")
    for _ in range(2):
        with digestd.transaction():
            [claim, *_] = [c for c in digestd.tick(w.config, w.now, w.room).claims if c.sender_name == "hook"]
        result = digestd.result_of(claim, "temporary", "421 later", 421)._replace(at_once=True)
        with digestd.transaction():
            digestd.record_outcomes(w.config, [digestd.Sent(claim, result)], w.now)
        w.room.end("hook", claim.lane)
    assert w.one("SELECT state, due_at - ?, tries FROM jobs WHERE step = 'hook'", w.now) == ("delayed", 5000, 1)
    assert w.rows("SELECT number, started_at FROM attempts WHERE job_id = 1") == [(1, w.now), (2, w.now)]


FED = """
[workflows.fed]
[[workflows.fed.steps]]
id = "feed"
type = "in_app"
sender = "hook"
text = "hello {{ payload.n }}"
"""


def test_the_feed_has_its_row_also_while_the_sender_beside_it_is_disabled(world):
    w = world(TWO_STEPS + FED + "[daemon]\nconcurrency = 1\n")
    w.trigger("fed", "s1", {"n": 1})
    w.trigger("fed", "s2", {"n": 2})
    make_tries(w, **GONE)  # one has room, the other has never been tried
    w.trigger("fed", "s3", {"n": 3})
    w.tick()
    found = "SELECT subscriber_id, body FROM inbox_messages ORDER BY id"
    assert sorted(w.rows(found)) == [("s1", "hello 1"), ("s2", "hello 2"), ("s3", "hello 3")]
    with digestd.transaction():
        digestd.enable_sender("hook")
    w.tick()
    assert len(w.rows(found)) == 3 and w.rows("SELECT DISTINCT state FROM jobs") == [("completed",)]
