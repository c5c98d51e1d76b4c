"""Specs from the config, and their exactly one pending run."""

from __future__ import annotations

import re

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
