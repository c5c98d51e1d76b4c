"""Specs from the config, and their exactly one pending run."""

from __future__ import annotations

import json
import re
import time

import pytest

import digestd
from conftest import BASIC, START, statements

TICK = BASIC + '[repeatables.tick]\nevery = "1m"\nsender = "hook"\ndata = { color = "bird" }\n'


def seconds(w) -> list[float]:
    return [(at - START) / 1000 for at, _, _ in w.sent]


def slots(w) -> list[str]:
    return [body["data"]["slot"] for body in w.bodies()]


def pending(w) -> int:
    return w.one("SELECT count(*) FROM runs WHERE repeatable_id IS NOT NULL AND taken_at IS NULL AND state = 'active'")


def test_an_interval_runs_on_the_clock_and_keeps_its_grid(world):
    w = world(TICK.replace('every = "1m"', 'every = "15m"'))
    w.crash()
    w.clock.at = digestd.parse_instant("2026-03-09T09:07:00Z")
    w.path.unlink()
    w.open()
    w.advance("1h")
    assert slots(w) == [f"2026-03-09T{time}:00Z" for time in ("09:15", "09:30", "09:45", "10:00")]


def test_a_run_says_what_it_is(world):
    w = world(TICK)
    w.advance("1m")
    body = w.bodies()[0]
    assert body == {
        "type": "digestd.repeatable",
        "timestamp": "2026-03-09T09:01:00Z",
        "data": {"repeatable": "tick", "name": "tick", "jobId": None, "key": "tick:::UTC:60000",
                 "slot": "2026-03-09T09:01:00Z", "count": 1, "data": {"color": "bird"}},
    }  # fmt: skip


def test_a_cron_runs_in_its_zone(world):
    w = world(BASIC + '[repeatables.report]\ncron = "30 10 * * mon"\ntimezone = "Europe/Berlin"\nsender = "hook"\n')
    w.advance("1d")
    assert slots(w) == ["2026-03-09T09:30:00Z"]


def test_six_fields_and_the_alias_pattern(world):
    w = world(BASIC + '[repeatables.s]\npattern = "*/20 * * * * *"\nsender = "hook"\n')
    w.advance("1m")
    assert seconds(w) == [20, 40, 60]


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_is_exact_and_survives_restarts_and_reloads(world, limit):
    w = world(TICK.replace('every = "1m"', f'every = "1m"\nlimit = {limit}'))
    w.advance("90s")
    for _ in range(3):
        w.crash()
        w.open()
    w.use(TICK.replace('every = "1m"', f'every = "1m"\nlimit = {limit}'))
    w.advance("10m")
    assert len(w.sent) == limit
    assert w.one("SELECT state, next_utc, reason FROM v_repeatables") == (
        "finished",
        None,
        f"the limit of {limit} runs is reached",
    )
    assert w.one("SELECT count(*) FROM v_trouble") == 0


def test_restarts_leave_one_pending_run_and_its_slot(world):
    w = world(TICK.replace('every = "1m"', 'every = "5m"'))
    for _ in range(5):
        w.advance("10s")
        w.crash()
        w.open()
    assert pending(w) == 1
    w.advance("5m")
    assert seconds(w) == [300]


def test_after_a_downtime_there_is_one_late_run_and_then_the_grid(world):
    w = world(TICK)
    w.advance("2m")
    w.crash()
    w.clock.at += 330_000
    w.open()
    w.advance("90s")
    assert seconds(w) == [60, 120, 450, 480, 540]
    assert slots(w)[2] == "2026-03-09T09:03:00Z"


def test_a_late_cron_run_survives_the_restart_and_comes_once(world):
    w = world(BASIC + '[repeatables.noon]\ncron = "30 12 * * *"\nsender = "hook"\n')
    w.advance("2h")
    w.crash()
    w.clock.at = digestd.parse_instant("2026-03-09T13:30:00Z")
    w.open()
    w.advance("1d")
    assert slots(w) == ["2026-03-09T12:30:00Z", "2026-03-10T12:30:00Z"]
    assert w.sent[0][0] == digestd.parse_instant("2026-03-09T13:30:00Z")


def test_an_added_spec_does_not_run_the_others_again(world):
    w = world(TICK)
    w.advance("70s")
    w.use(TICK + '[repeatables.other]\nevery = "1h"\nsender = "hook"\n')
    w.tick()
    assert seconds(w) == [60]


def test_a_changed_interval_replaces_the_old_and_keeps_the_counter(world):
    w = world(TICK)
    w.advance("1m")
    w.use(TICK.replace('every = "1m"', 'every = "5m"'))
    w.advance("10m")
    assert seconds(w) == [60, 300, 600]
    assert w.one("SELECT count FROM repeatables") == 3 and pending(w) == 1


def test_changed_data_reaches_the_next_run_and_its_slot_stays(world):
    w = world(TICK)
    w.advance("30s")
    w.use(TICK.replace("bird", "fish"))
    w.advance("30s")
    assert seconds(w) == [60] and w.bodies()[0]["data"]["data"] == {"color": "fish"}


def test_a_removed_spec_ends_with_its_pending_run_and_comes_back_when_it_is_added_again(world):
    w = world(TICK)
    w.advance("1m")
    w.use(BASIC)
    w.advance("5m")
    assert seconds(w) == [60] and pending(w) == 0
    assert w.one("SELECT state FROM repeatables") == "retired"
    w.use(TICK)
    w.advance("1m")
    assert seconds(w) == [60, 420] and w.one("SELECT count FROM repeatables") == 2


def test_a_run_that_fails_for_good_does_not_stop_the_next(world):
    w = world(TICK)
    w.reply("hook", "permanent")
    w.advance("2m")
    assert seconds(w) == [60, 120] and w.one("SELECT count(*) FROM v_trouble WHERE what = 'job failed'") == 1


def test_retries_of_a_run_never_add_or_count_runs(world):
    w = world(TICK.replace('every = "1m"', 'every = "1m"\nlimit = 2'))
    w.reply("hook", "temporary", "temporary")
    w.advance("10m")
    assert w.one("SELECT count FROM repeatables") == 2
    assert w.one("SELECT count(*) FROM runs WHERE taken_at IS NOT NULL") == 2


def test_a_run_that_triggers_a_workflow_does_so_once_per_slot(world):
    w = world(
        BASIC
        + '[repeatables.t]\nevery = "1m"\nlimit = 3\ntrigger = { workflow = "comments", to = "s1", payload = { postId = 1 } }\n'
    )
    w.advance("20m")
    assert [len(events) for events in w.digested()] == [3]
    assert w.one("SELECT count(*) FROM runs WHERE repeatable_id IS NOT NULL AND state = 'completed'") == 3


def test_a_trigger_whose_recipients_are_refused_fails_visibly(world):
    w = world(BASIC + '[repeatables.t]\nevery = "1m"\nlimit = 1\ntrigger = { workflow = "comments", to = "a\\tb" }\n')
    w.advance("1m")
    assert "the trigger was refused" in w.one("SELECT reason FROM v_trouble")


def test_specs_of_the_same_second_all_run(world):
    w = world(BASIC + '[repeatables.a]\ncron = "* * * * * *"\nsender = "hook"\ndata = "A"\n'
              '[repeatables.b]\ncron = "*/5 * * * * *"\nsender = "hook"\ndata = "B"\n')  # fmt: skip
    w.advance("5s")
    assert [body["data"]["data"] for body in w.bodies()][-2:] in (["A", "B"], ["B", "A"])


def test_a_slow_run_makes_the_next_wait_and_nothing_piles_up(world):
    w = world("[daemon]\nconcurrency = 1\n" + TICK.replace('every = "1m"', 'every = "1s"'))
    for _ in range(20):
        w.clock.at += 1000
        with digestd.transaction():
            claims = digestd.tick(w.config, w.now, w.room).claims
        if claims:
            running = claims[0]
        if (w.now - START) % 5000 == 0:
            w._try(running)
    assert w.one("SELECT count(*) FROM attempts") <= 6 and pending(w) == 1


def test_the_database_itself_refuses_a_second_pending_run(world):
    w = world(TICK)
    with pytest.raises(Exception, match="UNIQUE constraint failed: runs.repeatable_id"):
        w.rows("INSERT INTO runs (repeatable_id, seq, slot_at, created_at) VALUES (1, 99, 1, 1)")


def test_hashed_fields_depend_on_the_name_and_stay_the_same(world):
    w = world(BASIC + "".join(f'[repeatables.r{n}]\ncron = "H H * * *"\nsender = "hook"\n' for n in range(20)))
    first = w.rows("SELECT s.name, r.slot_at FROM runs r JOIN repeatables s ON s.id = r.repeatable_id ORDER BY 1")
    assert len({slot for _, slot in first}) > 15
    w.crash()
    w.path.unlink()
    w.open()
    assert (
        w.rows("SELECT s.name, r.slot_at FROM runs r JOIN repeatables s ON s.id = r.repeatable_id ORDER BY 1") == first
    )


def test_a_spec_whose_next_run_the_database_refuses_is_broken_and_stops_no_other(world):
    """Somebody wrote a run by hand whose number digestd is about to give."""
    kinds = {"odd": 'sender = "hook"', "odd-trigger": 'trigger = { workflow = "comments", to = "s1" }'}
    other = '[repeatables.other]\nevery = "1m"\nsender = "hook"\n'
    w = world(BASIC + "".join(f'[repeatables.{name}]\nevery = "1m"\n{do}\n' for name, do in kinds.items()) + other)
    w.rows(
        "INSERT INTO runs (repeatable_id, seq, slot_at, taken_at, state, created_at, finished_at)"
        f" SELECT id, seq + 1, {START}, {START}, 'completed', {START}, {START} FROM repeatables WHERE name <> 'other'"
    )
    w.advance("3m")
    assert w.rows("SELECT name, state, count FROM repeatables ORDER BY name") == [
        ("odd", "broken", 1), ("odd-trigger", "broken", 1), ("other", "active", 3),
    ]  # fmt: skip
    assert {
        reason.partition(":")[0] for (reason,) in w.rows("SELECT reason FROM repeatables WHERE state = 'broken'")
    } == {"its next run cannot be stored"}
    assert w.one("SELECT count(*) FROM events") == 1


def test_taking_a_hundred_runs_costs_a_few_statements_for_all(world):
    specs = "".join(f'[repeatables.r{n}]\nevery = "1m"\nsender = "out"\n' for n in range(100))
    w = world(f'[senders.out]\ntype = "log"\n{specs}')
    w.clock.at += digestd.MINUTE
    claims = []

    def tick():
        with digestd.transaction():
            claims.extend(digestd.tick(w.config, w.now, w.room).claims)

    each = r"SELECT name, key, job_id|INSERT INTO jobs"  # of which there is one for each
    seen = [sql for sql in statements(tick) if not re.match(each, sql)]
    assert len(claims) == 100
    assert len(seen) <= 25, seen


# -- what a spec may ask for -------------------------------------------------------------------------------------------


def toml(value) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)


def spec_text(**settings) -> str:
    fields = {"every": "1m", "sender": "hook", **settings}
    lines = (f"{name} = {toml(value)}\n" for name, value in fields.items() if value is not None)
    return BASIC + f"[repeatables.x]\n{''.join(lines)}"


def tick(w) -> list[digestd.Claim]:
    with digestd.transaction():
        return digestd.tick(w.config, w.now, w.room).claims


def finish(w, claim, outcome="sent") -> None:
    """What was under way ends."""
    result = digestd.result_of(claim, outcome, outcome)
    w.sent.append((w.now, claim, result))
    with digestd.transaction():
        digestd.record_outcomes(w.config, [digestd.Sent(claim, result)], w.now)
    w.room.end(claim.sender_name, claim.lane)


def slow(w, for_s: int, takes_s: int) -> list[int]:
    """A second at a time for so long, each try taking so many seconds: at which seconds tries began."""
    begun, ends = [], []
    for second in range(1, for_s + 1):
        w.clock.at += 1000
        for end, claim in [one for one in ends if one[0] <= second]:
            finish(w, claim)
            ends.remove((end, claim))
        for claim in tick(w):
            begun.append(second)
            ends.append((second + takes_s, claim))
    return begun


@pytest.mark.parametrize(
    ("overlap", "begun"),
    [("allow", list(range(1, 16))), ("skip", [1, 6, 11]), ("queue", [1, 6, 11])],
)
def test_a_run_is_due_while_the_one_before_is_still_going(world, overlap, begun):
    """E13: with skip the slots in between are passed over, with queue the pending one waits; either way one at a time."""
    w = world(spec_text(every="1s", overlap=overlap))
    assert slow(w, 15, 5) == begun
    assert pending(w) == 1 and w.one("SELECT count FROM repeatables") == len(begun)
    skipped = w.one("SELECT count(*) FROM jobs WHERE state = 'skipped'")
    assert skipped == (12 if overlap == "skip" else 0)
    late = [slot for slot, taken in w.rows("SELECT slot_at, taken_at FROM runs WHERE taken_at > slot_at")]
    assert len(late) == (2 if overlap == "queue" else 0)


def test_with_one_place_a_slow_job_runs_one_at_a_time(world):
    w = world("[daemon]\nconcurrency = 1\n" + spec_text(every="1s"))
    assert slow(w, 17, 5) == [1, 6, 11, 16]
    assert pending(w) == 1 and w.one("SELECT count(*) FROM jobs WHERE state IN ('delayed', 'waiting')") == 1


def test_with_five_places_a_job_of_five_seconds_runs_each_second(world):
    alone = re.sub(
        r"\[senders.mail\].*?\n\n", "", spec_text(every="1s"), flags=re.DOTALL
    )  # each other one keeps a place
    w = world("[daemon]\nconcurrency = 5\n" + alone)
    assert slow(w, 30, 5) == list(range(1, 31))


def test_a_run_that_is_being_retried_is_still_going(world):
    w = world(spec_text(every="1m", overlap="skip", attempts=2, backoff="150s"))
    w.reply("hook", "temporary")
    w.advance("6m")
    assert seconds(w) == [60, 210, 240, 300, 360]


def test_a_queued_run_does_not_keep_others_of_the_sender_waiting(world):
    more = "".join(f'[repeatables.q{n}]\nevery = "1s"\noverlap = "queue"\nsender = "hook"\n' for n in range(10))
    w = world("[daemon]\nconcurrency = 20\n" + spec_text(every="1h") + more)
    w.clock.at += 1000
    assert len(tick(w)) == 10
    w.clock.at += 5000
    assert tick(w) == [] and w.one("SELECT count(*) FROM jobs WHERE state = 'waiting'") == 10
    w.trigger("comments", payload={"postId": 1})
    w.clock.at += digestd.HOUR
    assert {claim.workflow for claim in tick(w)} == {None, "comments"}


@pytest.mark.parametrize(
    ("missed", "ran"),
    [
        ("once", [60, 120, 450, 480, 540]),
        ("skip", [60, 120, 480, 540]),
        ("all", [60, 120, 450, 450, 450, 450, 450, 480, 540]),
    ],
)
def test_after_a_downtime_runs_come_as_the_spec_says(world, missed, ran):
    w = world(spec_text(missed=missed))
    w.advance("2m")
    w.crash()
    w.clock.at += 330_000
    w.open()
    w.advance("90s")
    assert seconds(w) == ran
    if missed == "all":
        assert slots(w) == [f"2026-03-09T09:0{minute}:00Z" for minute in range(1, 10)]
    assert pending(w) == 1


def test_a_restart_of_a_few_seconds_misses_nothing(world):
    w = world(spec_text(missed="skip"))
    w.advance("58s")
    w.crash()
    w.clock.at += 7000
    w.open()
    w.advance("1m")
    assert seconds(w) == [65, 120]


def test_at_most_a_hundred_missed_runs_are_made_up_for_and_no_slot_is_walked_through(world, caplog):
    w = world(spec_text(every=None, cron="* * * * * *", missed="all"))
    w.crash()
    w.clock.at += digestd.parse_duration("365d")
    w.open()
    with caplog.at_level("WARNING", "digestd"):
        w.tick()
    assert len(w.sent) == 100 and slots(w)[-1] == "2026-03-09T09:01:40Z"
    w.advance("2s")
    assert len(w.sent) == 102 and pending(w) == 1
    assert w.one("SELECT behind FROM repeatables") == 0


def test_a_skipped_run_is_told_once_and_not_counted(world, caplog):
    w = world(spec_text(every=None, cron="30 12 * * *", missed="skip", limit=1))
    w.crash()
    w.clock.at = digestd.parse_instant("2026-03-09T13:30:00Z")
    w.open()
    with caplog.at_level("WARNING", "digestd"):
        w.advance("1h")
    assert w.sent == [] and w.rows("SELECT state, reason FROM jobs WHERE state = 'skipped'") == [
        ("skipped", "missed by 1h")
    ]
    w.advance("1d")
    assert slots(w) == ["2026-03-10T12:30:00Z"]
    assert w.one("SELECT count(*) FROM v_trouble") == 0


def test_a_run_that_comes_late_is_told_with_how_late_it_is_and_one_on_time_is_not(world, caplog):
    w = world(spec_text(every=None, cron="0 3 * * 0", jitter="30s"))
    w.clock.at = digestd.parse_instant("2026-03-15T02:00:00Z")
    with caplog.at_level("WARNING", "digestd"):
        w.advance("2h")
        assert caplog.text == ""
        w.clock.at = digestd.parse_instant("2026-03-22T07:00:00Z")
        w.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "repeatable x: the run of 2026-03-22T03:00:00Z comes 4h late"
    ]


def test_jitter_spreads_runs_and_is_the_same_each_time_and_never_moves_the_slot(world):
    text = BASIC + "".join(
        f'[repeatables.x{n}]\nevery = "1h"\njitter = "10m"\nsender = "hook"\n' for n in range(50)
    )  # fmt: skip
    w = world(text)
    due = w.rows("SELECT j.step, j.due_at - r.slot_at, r.slot_at FROM jobs j JOIN runs r ON r.id = j.run_id ORDER BY 1")
    assert {slot for _, _, slot in due} == {START + digestd.HOUR}
    assert len({late for _, late, _ in due}) > 40 and all(0 <= late < 600_000 for _, late, _ in due)
    w.crash()
    w.path.unlink()
    w.open()
    assert (
        w.rows("SELECT j.step, j.due_at - r.slot_at, r.slot_at FROM jobs j JOIN runs r ON r.id = j.run_id ORDER BY 1")
        == due
    )
    w.advance("3h")
    assert len(w.sent) >= 100 and {slot[14:] for slot in slots(w)} == {"00:00Z"}


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        ({"attempts": 3, "backoff": "10s"}, [60, 70, 80]),
        ({"attempts": 4, "backoff": {"type": "exponential", "delay": "10s"}}, [60, 70, 90, 130]),
        ({"attempts": 1}, [60]),
        ({"attempts": 3}, [60, 65, 125]),
        ({"backoff": "1s"}, [60, 61, 62]),
    ],
    ids=["fixed", "exponential", "one", "attempts alone", "backoff alone"],
)
def test_a_run_is_tried_as_often_and_as_far_apart_as_its_spec_says(world, settings, tried):
    w = world(spec_text(limit=1, **settings))
    w.reply("hook", *["temporary"] * 20)
    w.advance("2h")
    assert seconds(w) == tried
    assert "given up after" in w.one("SELECT reason FROM v_trouble")
    assert w.one("SELECT count FROM repeatables") == 1


def test_ended_runs_are_kept_as_long_and_as_many_as_the_spec_says(world):
    count = spec_text(retention={"count": 3})
    w = world(
        count
        + '[repeatables.y]\nevery = "1m"\nsender = "hook"\nretention = "5m"\n[repeatables.z]\nevery = "1m"\nsender = "hook"\n'
    )
    w.reply("hook", "permanent", "permanent", "permanent")
    w.advance("20m")
    with digestd.transaction():
        digestd.purge(w.now - digestd.MINUTE)
        assert digestd.purge_by_spec(w.now) > 0
        assert digestd.purge_by_spec(w.now) == 0
    kept = dict(w.rows("SELECT s.name, count(*) FROM runs r JOIN repeatables s ON s.id = r.repeatable_id"
                       " WHERE r.taken_at IS NOT NULL GROUP BY 1"))  # fmt: skip
    assert kept == {"x": 3 + 1, "y": 6 + 1, "z": 2 + 1}  # and the one that failed
    assert pending(w) == 3 and w.one("SELECT count FROM repeatables WHERE name = 'x'") == 20


def test_nothing_runs_before_the_start_or_after_the_end_and_both_are_inside(world):
    w = world(spec_text(start_at="2026-03-09T09:02:00Z", end_at="2026-03-09T09:04:00Z"))
    w.advance("1h")
    assert seconds(w) == [120, 180, 240]
    assert w.one("SELECT state, reason FROM repeatables") == ("finished", "its end, 2026-03-09T09:04:00Z, is reached")
    for _ in range(2):
        w.crash()
        w.open()
    w.advance("1h")
    assert len(w.sent) == 3 and w.one("SELECT count(*) FROM v_trouble") == 0


def test_a_later_end_makes_a_finished_spec_run_again_and_an_earlier_one_ends_it(world):
    end = "2026-03-09T09:02:00Z"
    w = world(spec_text(end_at=end))
    w.advance("10m")
    w.use(spec_text(end_at="2026-03-09T09:12:00Z"))
    w.advance("90s")
    assert seconds(w) == [60, 120, 660]
    w.use(spec_text(end_at=end))
    w.advance("10m")
    assert seconds(w) == [60, 120, 660] and pending(w) == 0
    assert w.one("SELECT state FROM repeatables") == "finished"


def test_the_first_run_at_once_is_only_the_first(world):
    text = spec_text(every=None, cron="0 7 * * *", immediately=True)
    w = world(text)
    w.tick()
    for _ in range(3):
        w.crash()
        w.open()
        w.use(text)
        w.tick()
    assert seconds(w) == [0]
    w.advance("1d")
    assert slots(w) == ["2026-03-09T09:00:00Z", "2026-03-10T07:00:00Z"]


def test_two_of_one_name_and_rule_are_told_apart_by_their_job_ids(world):
    w = world(BASIC)
    with digestd.transaction():
        for job_id in ("a", "b", "a"):
            body = {"name": "x", "every": "1m", "jobId": job_id, "sender": "hook"}
            digestd.add_repeatable(digestd.spec_from(w.config, body), "api", w.now)
    w.advance("1m")
    assert sorted(body["data"]["jobId"] for body in w.bodies()) == ["a", "b"]
    assert sorted(body["data"]["key"] for body in w.bodies()) == ["x:a::UTC:60000", "x:b::UTC:60000"]


def test_the_runs_of_the_last_day_are_counted_without_walking_through_them(world):
    w = world(spec_text(every="10m"))
    w.reply("hook", *["sent", "permanent", "sent"] * 200)
    w.advance("30h")
    with digestd.transaction():
        digestd.do_to_repeatable(w.config, "run-now", "x", w.now)
    w.tick()
    for hours in (0, 1, 23, 24, 29, 30, 31):
        at = w.now - hours * digestd.HOUR
        taken = w.one("SELECT count(*) FROM runs WHERE taken_at > ?", at)
        assert digestd._runs_since(1, at) == taken
    [facts] = digestd.repeatable_facts(w.now)
    assert (facts["runs24h"], facts["failures24h"]) == (145, 48)
    assert len(statements(lambda: digestd.repeatable_facts(w.now))) < 30


# -- by hand -----------------------------------------------------------------------------------------------------------


def deed(w, name, key="x"):
    with digestd.transaction():
        return digestd.do_to_repeatable(w.config, name, key, w.now)


def test_a_paused_spec_runs_no_more_until_it_is_resumed_and_makes_up_for_nothing(world):
    w = world(spec_text())
    w.advance("1m")
    deed(w, "pause")
    w.advance("5m")
    w.crash()
    w.open()
    w.use(spec_text(data={"a": 1}))
    w.advance("4m")
    assert seconds(w) == [60] and pending(w) == 0
    with pytest.raises(digestd.Rejected, match="is paused"):
        deed(w, "pause")
    deed(w, "resume")
    w.advance("1m")
    assert seconds(w) == [60, 660] and w.bodies()[-1]["data"]["data"] == {"a": 1}


def test_a_paused_spec_whose_sender_went_meanwhile_is_not_resumed_into_silence(world):
    """Its run would have waited for a sender that does not exist, and nobody would have been told."""
    w = world(BASIC)
    with digestd.transaction():
        digestd.add_repeatable(
            digestd.spec_from(w.config, {"name": "x", "every": "1m", "sender": "hook"}), "api", w.now
        )
    deed(w, "pause")
    w.use(BASIC.replace("senders.hook", "senders.other").replace('sender = "hook"', 'sender = "other"'))
    for name in ("resume", "run-now"):
        with pytest.raises(digestd.Rejected, match="no sender 'hook'"):
            deed(w, name)
    assert w.rows("SELECT state, count FROM repeatables") == [("paused", 0)] and pending(w) == 0
    w.use(BASIC)
    deed(w, "resume")
    w.advance("1m")
    assert seconds(w) == [60]


def test_no_run_comes_by_hand_after_the_end(world):
    w = world(spec_text(end_at="2026-03-09T09:10:00Z"))
    deed(w, "pause")
    w.advance("11m")
    with pytest.raises(digestd.Rejected, match="has had its end"):
        deed(w, "run-now")
    assert w.sent == [] and w.one("SELECT count FROM repeatables") == 0


def test_the_next_run_can_be_skipped_and_is_not_counted(world):
    w = world(spec_text(limit=2))
    assert deed(w, "skip-next") == {"key": "x:::UTC:60000", "skipped": "2026-03-09T09:01:00Z"}
    w.advance("10m")
    assert seconds(w) == [120, 180]
    with pytest.raises(digestd.Rejected, match="no pending run"):
        deed(w, "skip-next")


def test_one_more_run_now_leaves_the_plan_as_it_is_and_counts(world):
    w = world(spec_text(limit=3))
    w.advance("30s")
    assert deed(w, "run-now")["count"] == 1
    w.tick()
    assert seconds(w) == [30] and pending(w) == 1
    w.advance("30s")
    assert [body["data"]["count"] for body in w.bodies()] == [1, 2]
    deed(w, "run-now")
    w.advance("10m")
    assert seconds(w) == [30, 60, 60] and pending(w) == 0
    assert w.one("SELECT state, count FROM repeatables") == ("finished", 3)
    with pytest.raises(digestd.Rejected, match="finished"):
        deed(w, "run-now")


def test_runs_asked_for_together_are_each_told_which_they_are(world):
    w = world(spec_text())
    for _ in range(3):
        deed(w, "run-now")
    w.tick()
    assert sorted(body["data"]["count"] for body in w.bodies()) == [1, 2, 3]


def test_one_of_the_config_is_not_removed_by_hand_and_one_added_by_hand_is_left_alone_by_the_config(world):
    w = world(spec_text())
    with pytest.raises(digestd.Rejected, match="in the config file"):
        deed(w, "remove")
    with digestd.transaction():
        digestd.add_repeatable(
            digestd.spec_from(w.config, {"name": "y", "every": 60_000, "sender": "hook"}), "api", w.now
        )
    w.use(BASIC)
    w.advance("1m")
    assert [body["data"]["name"] for body in w.bodies()] == ["y"]
    deed(w, "remove", "y")
    w.advance("5m")
    assert len(w.sent) == 1


def test_a_config_that_names_what_was_added_by_hand_takes_it_over_and_keeps_its_count(world):
    w = world(BASIC)
    with digestd.transaction():
        digestd.add_repeatable(
            digestd.spec_from(w.config, {"name": "x", "every": "1m", "sender": "hook"}), "api", w.now
        )
    w.advance("1m")
    w.use(spec_text())
    w.advance("1m")
    assert w.rows("SELECT source, state, count FROM repeatables") == [("config", "active", 2)]
    with pytest.raises(digestd.Rejected, match="in the config file"), digestd.transaction():
        digestd.add_repeatable(
            digestd.spec_from(w.config, {"name": "x", "every": "1m", "sender": "hook"}), "api", w.now
        )


def test_what_comes_back_into_the_config_while_the_same_was_added_by_hand_is_one_spec(world):
    w = world(spec_text())
    w.use(BASIC)
    with digestd.transaction():
        digestd.add_repeatable(
            digestd.spec_from(w.config, {"name": "x", "every": "1m", "sender": "hook"}), "api", w.now
        )
    w.use(spec_text())
    w.advance("1m")
    assert seconds(w) == [60] and pending(w) == 1
    assert w.rows("SELECT source, state FROM repeatables ORDER BY id") == [("config", "retired"), ("config", "active")]


def test_a_first_run_at_once_comes_also_where_the_plan_has_none_before_the_end(world):
    w = world(spec_text(every="1h", immediately=True, end_at="2026-03-09T09:30:00Z"))
    w.advance("3h")
    assert seconds(w) == [0] and w.one("SELECT state FROM repeatables") == "finished"


def test_what_was_removed_and_is_added_again_begins_anew_and_runs(world):
    w = world(BASIC)
    for _ in range(2):
        with digestd.transaction():
            body = {"name": "x", "every": "1m", "limit": 2, "sender": "hook"}
            digestd.add_repeatable(digestd.spec_from(w.config, body), "api", w.now)
        w.advance("5m")
        deed(w, "remove")
        with pytest.raises(digestd.Rejected, match="no repeatable"):
            deed(w, "remove")
    assert seconds(w) == [60, 120, 360, 420]


@pytest.mark.parametrize(
    ("body", "gone", "reason"),
    [
        ({"sender": "hook"}, ("senders.hook", "senders.other"), "no sender 'hook'"),
        ({"trigger": {"workflow": "comments", "to": "s1"}}, ("workflows.comments", "workflows.others"), "no workflow"),
    ],
    ids=["sender", "workflow"],
)
def test_a_spec_whose_sender_or_workflow_goes_is_broken_and_runs_again_when_it_is_back(world, body, gone, reason):
    w = world(BASIC)
    with digestd.transaction():
        digestd.add_repeatable(digestd.spec_from(w.config, {"name": "x", "every": "1m", **body}), "api", w.now)
    w.advance("1m")
    w.use(
        BASIC.replace(*gone).replace(
            'sender = "hook"', f'sender = "{gone[1].partition(".")[2]}"' if body.get("sender") else 'sender = "hook"'
        )
    )
    w.advance("5m")
    state, why = w.one("SELECT state, reason FROM repeatables")
    assert state == "broken" and reason in why and pending(w) == 0
    assert "repeatable broken" in [what for (what,) in w.rows("SELECT what FROM v_trouble")]
    w.use(BASIC)
    w.advance("2m")
    assert w.rows("SELECT state, reason, count FROM repeatables") == [("active", None, 3)] and pending(w) == 1


@pytest.mark.parametrize(
    "by_hand",
    [
        "DELETE FROM jobs",
        "UPDATE jobs SET state = 'cancelled', finished_at = 1",
        "DELETE FROM jobs; DELETE FROM runs",
    ],
)
def test_a_pending_run_that_somebody_deletes_skips_one_slot_and_ends_no_spec(world, caplog, by_hand):
    w = world(spec_text())
    w.advance("10s")
    for statement in by_hand.split("; "):
        w.rows(statement)
    w.advance("60s")
    assert w.sent == []
    with digestd.transaction():
        assert digestd.rearm_repeatables(w.now) == 1
        assert digestd.rearm_repeatables(w.now) == 0
    w.advance("1m")
    assert seconds(w) == [120] and pending(w) == 1
    assert "had lost its pending run" in caplog.text


@pytest.mark.parametrize("source", ["api", "config"])
@pytest.mark.parametrize("how", ["skipped", "at once", "brought forward", "overdue"])
def test_a_change_of_what_a_run_does_leaves_the_pending_run_where_it_is(world, source, how):
    """Planned anew, a slot skipped by hand came back, and a run that was due was lost."""
    settings = {"every": "1h", "immediately": how == "at once"}
    w = world(BASIC)

    def put(data: int) -> None:
        if source == "config":
            w.use(spec_text(**settings, data=data))
            return
        with digestd.transaction():
            body = {"name": "x", "sender": "hook", **settings, "data": data}
            digestd.add_repeatable(digestd.spec_from(w.config, body), "api", w.now)

    put(1)
    if how == "skipped":
        deed(w, "skip-next")
    elif how == "brought forward":
        w.rows("UPDATE jobs SET due_at = ?", w.now)
    elif how == "overdue":
        w.clock.at += 2 * digestd.HOUR
    [before] = w.rows("SELECT id, slot_at FROM runs WHERE taken_at IS NULL AND state = 'active'")
    put(2)
    assert w.rows("SELECT id, slot_at FROM runs WHERE taken_at IS NULL AND state = 'active'") == [before]
    w.tick()
    assert len(w.sent) == (how != "skipped")
    w.advance("2h")
    assert {body["data"]["data"] for body in w.bodies()} == {2}


def test_a_change_of_sender_or_to_a_trigger_reaches_the_pending_run(world):
    other = '[senders.other]\ntype = "webhook"\nurl = "http://127.0.0.1:9/other"\n'
    w = world(other + spec_text())
    w.use(other + spec_text(sender="other"))
    w.advance("1m")
    assert [claim.sender_name for _, claim, _ in w.sent] == ["other"]
    w.use(other + spec_text(sender=None, trigger={"workflow": "comments", "to": "s1"}))
    w.advance("1m")
    assert len(w.sent) == 1 and w.one("SELECT count(*) FROM events") == 1


def test_a_spec_that_stays_broken_keeps_no_other_from_being_revived(world):
    w = world(spec_text() + '[repeatables.y]\nevery = "1m"\nsender = "hook"\n')
    w.rows("UPDATE repeatables SET state = 'broken', reason = 'odd'")
    w.rows("DELETE FROM jobs")
    w.rows("DELETE FROM runs")
    w.rows(
        "CREATE TRIGGER refuse BEFORE INSERT ON runs WHEN new.repeatable_id = 1"
        " BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )
    with digestd.transaction():
        assert digestd.revive_broken(w.now) == 1
    assert w.rows("SELECT name, state FROM repeatables ORDER BY id") == [("x", "broken"), ("y", "active")]


# -- clocks ------------------------------------------------------------------------------------------------------------


def set_back(w, span: str) -> int:
    w.clock.at -= digestd.parse_duration(span)
    with digestd.transaction():
        return digestd.replan_intervals(w.now)


def test_a_clock_set_back_leaves_no_interval_silent_and_runs_nothing_twice(world):
    w = world(spec_text(every="15m") + '[repeatables.noon]\ncron = "0 10 * * *"\nsender = "hook"\n')
    w.advance("61m")
    assert len(w.sent) == 5  # four of the interval, one of noon
    assert set_back(w, "1h") == 1
    w.advance("1h")
    times = [digestd.iso_text(at) for at, claim, _ in w.sent if claim.step == "x"]
    assert [time[11:16] for time in times] == ["09:15", "09:30", "09:45", "10:00"] * 2
    assert len([1 for _, claim, _ in w.sent if claim.step == "noon"]) == 1
    numbers = [body["data"]["count"] for body in w.bodies() if body["data"]["name"] == "x"]
    assert numbers == list(range(1, 9)) and pending(w) == 2


def test_a_workflow_is_triggered_again_for_a_slot_that_comes_twice(world):
    trigger = 'trigger = { workflow = "comments", to = "s1", payload = { postId = 1 } }\n'
    w = world(BASIC + f'[repeatables.x]\nevery = "15m"\n{trigger}')
    w.advance("61m")
    set_back(w, "1h")
    w.advance("61m")
    assert sum(map(len, w.digested())) + w.one("SELECT count(*) FROM events e JOIN digests d ON d.id = e.digest_id"
                                               " WHERE d.state = 'open'") == 8  # fmt: skip


def test_a_small_step_back_and_what_was_skipped_by_hand_stay_as_they_are(world):
    w = world(spec_text(every="15m"))
    deed(w, "skip-next")
    w.crash()
    w.clock.at += 1000
    w.open()
    w.advance("40m")
    assert seconds(w) == [1800]
    w.clock.at -= 500
    w.advance("10m")
    assert seconds(w) == [1800, 2700]


def test_the_database_tells_at_start_that_the_clock_was_set_back(world):
    w = world(spec_text())
    w.advance("10m")
    assert START + 500_000 < digestd.last_known_at() <= w.now
    w.clock.at -= digestd.HOUR
    assert digestd.Daemon(w.config, w.clock).last_now > w.now + digestd.SECOND


def test_the_daemon_notices_that_the_clock_was_set_back_also_while_it_sleeps(world, caplog):
    w = world(spec_text(every="15m"))
    w.advance("61m")
    daemon = digestd.Daemon(w.config, w.clock)
    daemon.more = False
    assert not daemon._has_work()
    w.clock.at -= 500
    assert not daemon._has_work()  # as the clock's own corrections do
    w.clock.at -= digestd.HOUR
    assert daemon._has_work()
    with caplog.at_level("WARNING", "digestd"):
        daemon._commit([], w.now)
    assert "set back by" in caplog.text and digestd.next_wake_at() <= w.now + 15 * digestd.MINUTE


def test_a_spec_that_was_broken_is_looked_at_again(world):
    w = world(spec_text())
    w.rows("UPDATE repeatables SET timezone = 'Mars/Phobos', cron = '0 9 * * *', every_ms = NULL")
    w.advance("1m")
    assert w.rows("SELECT state, reason LIKE '%Mars/Phobos%' FROM repeatables") == [("broken", 1)] and pending(w) == 0
    with digestd.transaction():
        assert digestd.revive_broken(w.now) == 0
    assert w.one("SELECT state FROM repeatables") == "broken"
    w.rows("UPDATE repeatables SET timezone = 'Europe/Berlin'")
    with digestd.transaction():
        assert digestd.revive_broken(w.now) == 1
    assert w.one("SELECT state FROM repeatables") == "active" and pending(w) == 1


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York", "Pacific/Apia"])
def test_the_zone_of_the_machine_moves_no_run(world, monkeypatch, zone):
    w = world(spec_text(every=None, cron="0 9 * * *") + '[repeatables.y]\nevery = "1d"\nsender = "hook"\n')
    w.advance("1d")
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        w.crash()
        w.open()
        w.advance("2d")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert sorted(slots(w)) == [f"2026-03-{day}Z" for day in ("10T00:00:00", "10T09:00:00", "11T00:00:00", "11T09:00:00",
                                                             "12T00:00:00", "12T09:00:00")]  # fmt: skip


# -- senders that have not room for all --------------------------------------------------------------------------------


def test_a_sender_with_a_rate_begins_no_more_tries_in_any_minute_and_loses_none(world):
    text = BASIC.replace('type = "webhook"', 'type = "webhook"\nmax_per_minute = 5', 1)
    w = world(text + "".join(f'[repeatables.x{n}]\nevery = "1h"\nsender = "hook"\n' for n in range(12)))
    w.advance("90m")
    assert seconds(w) == [3600] * 5 + [3660] * 5 + [3720] * 2
    assert digestd.recent_tries(w.config, START + 3_720_000 + 1000) == [("hook", START + 3_720_000)] * 2


def test_a_restart_does_not_begin_the_minute_anew(world):
    text = BASIC.replace('type = "webhook"', 'type = "webhook"\nmax_per_minute = 2', 1)
    w = world(text + "".join(f'[repeatables.x{n}]\nevery = "1h"\nsender = "hook"\n' for n in range(3)))
    w.advance("1h")
    w.crash()
    w.clock.at += 5000
    w.open()
    w.room.recall(digestd.recent_tries(w.config, w.now))
    w.advance("2m")
    assert seconds(w) == [3600, 3600, 3660]


def test_a_sender_takes_no_more_at_once_than_its_own_concurrency(world):
    text = BASIC.replace('type = "webhook"', 'type = "webhook"\nconcurrency = 2', 1)
    w = world(text + "".join(f'[repeatables.x{n}]\nevery = "1h"\nsender = "hook"\n' for n in range(5)))
    w.clock.at += digestd.HOUR
    first = tick(w)
    assert len(first) == 2 and tick(w) == []
    finish(w, first[0])
    assert len(tick(w)) == 1


def test_digests_go_before_repeatables_where_a_sender_has_not_room_for_all(world):
    w = world("[daemon]\nconcurrency = 2\n" + BASIC.replace("[daemon]\n", "") +
              "".join(f'[repeatables.x{n}]\nevery = "10m"\nsender = "hook"\n' for n in range(5)))  # fmt: skip
    w.clock.at += 60_000
    for post in range(3):
        w.trigger("comments", payload={"postId": post})
    w.clock.at += 600_000
    order = []
    while claims := tick(w):
        order += [claim.workflow for claim in claims]
        for claim in claims:
            finish(w, claim)
    assert order == ["comments"] * 3 + [None] * 5
