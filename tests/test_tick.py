"""The stages together: counted statements, plans without scans, retention, bounded work."""

from __future__ import annotations

import re

import pytest

import digestd
from conftest import BASIC, START, statements


def test_an_idle_tick_is_a_handful_of_reads_and_no_write(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.tick()

    def tick() -> None:
        with digestd.transaction():
            digestd.tick(w.config, w.now, w.room)

    [begin, *seen, commit] = statements(tick)
    assert begin.startswith("BEGIN") and commit == "COMMIT"
    assert len(seen) <= 4 and all(sql.lstrip().startswith(("SELECT", "PRAGMA")) for sql in seen)


def test_closing_many_windows_costs_a_constant_number_of_statements(world):
    w = world()
    counts = []
    for many in (10, 400):
        for number in range(many):
            w.trigger("comments", f"s{many}-{number}", {"postId": 1})
        w.clock.at += 600_000
        with digestd.transaction():
            counts.append(len(statements(lambda: digestd.close_windows(w.config, w.now))))
        with digestd.transaction():
            w.rows("UPDATE runs SET next_at = NULL")
    assert counts[0] == counts[1] <= 4
    assert w.one("SELECT count(*) FROM digests WHERE state = 'closed'") == 410


def test_a_digest_costs_a_bounded_number_of_statements_from_due_to_done(world):
    w = world()
    for number in range(100):
        w.trigger("comments", f"s{number}", {"postId": 1})
        w.trigger("comments", f"s{number}", {"postId": 1})
    w.clock.at += 600_000
    seen = statements(w.tick)
    assert len(w.sent) == 100
    assert len(seen) / 100 <= 25, len(seen) / 100


def test_closing_never_touches_event_rows(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    w.clock.at += 600_000
    assert [sql for sql in statements(w.tick) if re.search(r"UPDATE events|DELETE FROM events", sql)] == []


def test_no_query_of_the_tick_scans_a_growing_table(world):
    """EXPLAIN QUERY PLAN of every statement that a busy tick runs."""
    w = world(BASIC + '[repeatables.t]\nevery = "1m"\nsender = "hook"\n')
    for number in range(20):
        w.trigger("comments", f"s{number}", {"postId": 1})
    w.rows("INSERT INTO events (workflow, subscriber_id, received_at) VALUES ('comments', 'x', ?)", START)
    w.reply("hook", "temporary")
    seen = statements(lambda: w.advance("11m")) + statements(digestd.next_wake_at)
    growing = {model._meta.table_name for model in digestd.TABLES} - {"repeatables", "senders", "meta"}
    wrong = set()
    for sql in set(seen):
        if sql.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT", "WITH"):
            for *_, detail in w.rows(f"EXPLAIN QUERY PLAN {sql}"):
                scan = re.match(r"SCAN (\w+)(?! USING (?:COVERING )?INDEX)", detail)
                names = dict(re.findall(r"(?:FROM|JOIN) (\w+) (\w)\b", sql))
                if scan and ({scan[1], names.get(scan[1])} & growing):
                    wrong.add((detail, sql))
    assert wrong == set()


def test_one_tick_moves_a_bounded_batch_and_says_that_more_is_due(world):
    w = world()
    for number in range(digestd.WINDOWS_AT_ONCE + 10):
        w.trigger("comments", f"s{number}", {"postId": 1})
    w.clock.at += 600_000
    with digestd.transaction():
        report = digestd.tick(w.config, w.now, w.room)
    assert report.more and w.one("SELECT count(*) FROM digests WHERE state = 'open'") == 10
    assert len(report.claims) == 15  # concurrency 16, and the other sender keeps one place


def test_events_of_another_program_are_placed_in_the_order_they_came(world):
    w = world()
    for number in range(5):
        w.rows("INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', ?, ?)",
               f'{{"n":{number}}}', START)  # fmt: skip
    w.advance("10m")
    assert [event["n"] for event in w.digested()[0]] == [0, 1, 2, 3, 4]


# -- retention


def purge_all(before: int) -> None:
    for _ in range(50):
        with digestd.transaction():
            if not digestd.purge(before):
                return
    raise AssertionError("purge does not end")


def counts(w) -> dict[str, int]:
    return {model._meta.table_name: w.one(f"SELECT count(*) FROM {model._meta.table_name}") for model in digestd.TABLES}


def test_a_run_is_deleted_as_a_whole_when_all_of_it_is_old_enough(world):
    w = world()
    for number in range(3):
        w.trigger("comments", payload={"postId": 1, "n": number})
    w.advance("10m")
    purge_all(w.now - 1)
    assert counts(w)["events"] == 3
    purge_all(w.now + 1)
    left = counts(w)
    assert {name: count for name, count in left.items() if count} == {"subscribers": 1, "meta": 2}
    assert w.rows("PRAGMA foreign_key_check") == []


def test_what_failed_or_is_unfinished_or_waits_in_a_later_window_stays(world):
    later = BASIC + (
        '[workflows.twice]\n[[workflows.twice.steps]]\nid = "a"\ntype = "digest"\nwindow = "1h"\n'
        '[[workflows.twice.steps]]\nid = "b"\ntype = "digest"\nwindow = "10d"\n'
        '[[workflows.twice.steps]]\nid = "c"\ntype = "chat"\nsender = "hook"\n'
    )
    w = world(later)
    w.reply("hook", "permanent")
    w.trigger("comments", payload={"postId": 1})
    w.trigger("twice", payload={"n": 1})
    w.advance("2d")
    purge_all(w.now + 1)
    assert counts(w)["events"] == 2 and w.one("SELECT count(*) FROM v_trouble WHERE what = 'job failed'") == 1
    w.advance("20d")
    assert [[event["n"] for event in events] for events in w.digested()] == [[1]]
    purge_all(w.now + 1)
    assert counts(w)["events"] == 1


def test_emptied_windows_and_cancelled_events_go_too(world):
    w = world()
    w.trigger("comments", payload={"postId": 1}, id="t1")
    w.cancel("t1")
    purge_all(w.now + 1)
    assert counts(w)["events"] == counts(w)["digests"] == 0


@pytest.mark.parametrize("duration", ["400d", "60d"])
def test_long_waits_fire_when_they_are_due_and_not_before(world, duration):
    w = world('[daemon]\nmax_window = "500d"\n' + BASIC.replace('"10m"', f'"{duration}"'))
    w.trigger("comments", payload={"postId": 1})
    w.run_until(START + digestd.parse_duration(duration) - 1)
    assert w.sent == []
    w.advance("1ms")
    assert len(w.sent) == 1
