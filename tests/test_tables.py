"""Rows of the tables of BullMQ's and Novu's behaviour that no other file holds, and that every row stands somewhere."""

from __future__ import annotations

import collections
import json
import pathlib
import re

import pytest

import digestd
from conftest import START, World

DATA = pathlib.Path(__file__).parent / "data"


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def texts(instants: list[int]) -> list[str]:
    return [digestd.iso_text(at) for at in instants]


STRICT = load("cron_strict")
CALENDAR = load("calendar_novu")
DELAYS = load("delays_novu")
JOURNEYS = load("journeys_novu")


def params(rows: list[dict]) -> list:
    """One for each row; a row with `skip` does not apply to digestd."""
    return [
        pytest.param(row, id=row["id"], marks=[pytest.mark.skip(reason=row["skip"])] if "skip" in row else [])
        for row in rows
    ]


def with_any(rows: list[dict], *names: str) -> list[dict]:
    return [row for row in rows if any(name in row for name in names)]


# -- the tables as a whole ---------------------------------------------------------------------------------------------


ANSWERS = {
    "next",
    "error",
    "accepted",
    "equals",
    "inside",
    "sent",
    "says",
    "refused",
    "skip",
}  # one of which a test looks at


def numbers(letter: str, first: int, last: int, digits: int = 2) -> set[str]:
    return {f"{letter}{number:0{digits}d}" for number in range(first, last + 1)}


# What Novu gets wrong and we do not: facts on Novu, 9. B2 asks for contexts, which digestd does not have: a path of the
# payload in `key` keeps tenants apart.
BEAT = {
    "B1": ["test_two_digests_in_one_workflow_never_mix_and_the_later_one_has_every_event"],
    "B2": ["test_several_key_paths_are_one_key"],
    "B3": ["test_a_scheduled_rule_ends_where_novu_would_or_should", "test_day_31_and_the_last_day_are_one_boundary"],
    "B4": ["test_the_next_times_do_not_depend_on_the_zone_of_the_machine"],
    "B5": ["test_a_scheduled_window_ends_at_the_next_boundary_in_the_zone"],
    "B6": ["test_each_planned_local_time_gives_exactly_one_instant", "test_inside_and_next_start_never_disagree"],
    "B7": ["test_inside_the_hours_as_novu_says_or_should"],
    "B8": ["test_hours_are_read_in_each_spelling", "test_a_name_that_is_no_zone_is_refused_by_name"],
    "B9": ["test_inside_and_next_start_never_disagree"],
    "B10": ["test_cancel_reaches_every_subscriber_of_a_transaction_and_no_closed_window"],
    "B11": ["test_an_emptied_window_sends_nothing_and_does_not_shorten_the_next"],
    "B12": ["test_an_event_at_the_end_of_a_window_opens_the_next", "test_a_late_tick_changes_no_membership"],
    "B13": ["test_a_crash_after_any_statement_loses_and_doubles_nothing", "test_ten_kills_among_ten_thousand_triggers"],
    "B14": ["test_the_same_transaction_again_records_nothing", "test_a_crash_after_any_statement"],
    "B15": ["test_a_transaction_id_reused_with_other_content_is_an_error_and_never_swallowed"],
    "B16": ["test_an_unknown_workflow_is_told_in_the_words_that_the_clients_look_for"],
    "B17": ["test_a_payload_tells_a_delay", "test_what_is_no_delay_is_refused"],
    "B18": ["test_long_waits_fire_when_they_are_due_and_not_before", "test_a_wait_of_years_ends_when_it_should"],
    "B19": ["test_outside_the_hours_a_message_is_skipped_sent_or_held"],
    "B20": ["test_a_window_that_is_held_counts_as_open_however_long_ago_its_events_came"],
}


@pytest.mark.parametrize("case", BEAT)
def test_what_novu_gets_wrong_has_a_test_of_ours(case):
    tests = "".join(path.read_text("utf-8") for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    assert [name for name in BEAT[case] if f"def {name}" not in tests] == []


@pytest.mark.parametrize(
    ("files", "rows", "expected"),
    [
        (
            ["cron_bullmq"],
            336,
            numbers("K", 1, 167, 3) | numbers("X", 1, 116, 3) | numbers("H", 1, 19)
            | numbers("D", 1, 9) | numbers("D", 51, 75),
        ),
        (["cron_strict"], 17, numbers("X", 201, 217)),
        (["cron_novu"], 26, numbers("C", 27, 52)),
        (
            ["windows_novu", "calendar_novu"],
            64,
            numbers("C", 1, 26) | numbers("V", 1, 8) | {f"V1-{letter}" for letter in "abcdefghijklm"},
        ),
        (["schedule_novu"], 71, numbers("S", 1, 39) | numbers("N", 1, 31)),
        (["journeys_novu"], 34, numbers("D", 1, 22) | numbers("K", 1, 12)),
    ],
    ids=["cron", "strict cron", "cron of windows", "windows and their settings", "hours", "journeys"],
)  # fmt: skip
def test_every_row_of_a_table_stands_in_its_file(files, rows, expected):
    table = [row for name in files for row in load(name)]
    found = [row["id"] for row in table]
    assert [row["id"] for row in table if not ANSWERS & row.keys()] == []
    assert len(found) == rows and collections.Counter(found).most_common(1)[0][1] == 1
    assert {re.match(r"V1-[a-m]|[A-Z]\d+", name)[0] for name in found} == expected


def test_every_row_on_delays_stands_here_or_with_the_jobs():
    here = [row["id"] for row in DELAYS]
    jobs = re.findall(r'^ +\("([WU]\d\d[a-d]?)", ', (pathlib.Path(__file__).parent / "test_jobs.py").read_text(), re.M)
    assert len(here) == 23 and not set(here) & set(jobs)
    assert {name[:3] for name in here + jobs} == numbers("W", 1, 12) | numbers("U", 1, 15)


# -- cron: what a strict parser refuses --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", params(STRICT))
def test_cron_that_a_strict_parser_is_asked(row):
    at = digestd.parse_instant(row["from"])
    expected = row.get("ours") or row.get("next")
    if "equals" in row:
        expected = texts(digestd.next_times(digestd.parse_cron(row["equals"]), at, 50))
    if expected is None:
        assert row["error"]
        with pytest.raises(digestd.RuleError):
            digestd.parse_cron(row["cron"], seed=row["seed"])
        return
    rule = digestd.parse_cron(row["cron"], digestd.load_zone(row["timezone"]), row["seed"])
    assert texts(digestd.next_times(rule, at, len(expected))) == expected


# -- calendars in the config -------------------------------------------------------------------------------------------


def config_text(*steps: dict, daemon: dict | None = None) -> str:
    """A config of one workflow; its steps are named after their type and place."""
    lines = ["[daemon]", *(f"{name} = {json.dumps(value)}" for name, value in (daemon or {}).items())]
    lines += ["[senders.hook]", 'type = "webhook"', 'url = "http://127.0.0.1:9/hook"', "[workflows.w]"]
    for place, step in enumerate(steps, 1):
        fields = {"id": f"{step['type']}{place}", **step}
        lines += ["[[workflows.w.steps]]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def read(folder: pathlib.Path, *steps: dict) -> digestd.Config:
    return digestd.read_config(config_text(*steps), folder / "config.toml")


@pytest.mark.parametrize("row", params([row for row in CALENDAR if "accepted" not in row]))
def test_a_window_ends_where_the_table_says(row, tmp_path):
    step = read(tmp_path, {"type": "digest", **row["step"]}).workflows["w"].steps[0]
    found = step.closes_at(digestd.parse_instant(row["from"]), "UTC")
    assert texts([found]) in ([row["ours"]] if "ours" in row else [row["next"], row.get("or")])


@pytest.mark.parametrize("row", params(with_any(CALENDAR, "accepted")))
def test_a_calendar_in_the_config_is_accepted_or_refused(row, tmp_path):
    step = {"type": "digest", **row["step"]}
    if row.get("ours", row["accepted"]):
        [taken] = read(tmp_path, step).workflows["w"].steps
        assert {name: getattr(taken, name) for name in step} == step
        return
    with pytest.raises(digestd.ConfigError) as refused:
        read(tmp_path, step)
    assert all(problem.path.startswith("workflows.w.steps.0") for problem in refused.value.problems)


# -- delays that the payload tells -------------------------------------------------------------------------------------

LETTERS = {"seconds": "s", "minutes": "m", "hours": "h", "days": "d", "weeks": "w", "months": "mo"}


@pytest.mark.parametrize("row", params(with_any(DELAYS, "ms")))
def test_an_amount_and_a_unit_are_a_length(row):
    assert digestd.told_delay(row["value"], "UTC", START, "fail") - START == row["ms"]
    assert digestd.parse_duration(f"{row['value']['amount']}{LETTERS[row['value']['unit']]}") == row["ms"]


@pytest.mark.parametrize("row", params(with_any(DELAYS, "path")))
def test_a_delay_is_told_by_the_value_at_its_path(row, world):
    payload = row["value"]
    for name in reversed(row["path"].split(".")[1:]):
        payload = {name: payload}
    w = world(config_text({"type": "delay", "delay": row["path"]}, {"type": "chat", "sender": "hook"}))
    w.trigger("w", payload=payload)
    w.advance("1d")
    assert [at - START for at, _, _ in w.sent] == [row["ms"]]


@pytest.mark.parametrize("row", params(with_any(DELAYS, "instant")))
def test_a_date_and_time_is_an_instant(row):
    at = digestd.parse_instant(row["instant"])
    assert digestd.told_delay(row["value"], "Asia/Tokyo", at - 1, "fail") == at


@pytest.mark.parametrize("row", params(with_any(DELAYS, "error")))
def test_what_is_no_delay_is_refused(row):
    with pytest.raises(digestd.RuleError):
        digestd.told_delay(row["value"], "UTC", START, "fail")


# -- hours: how long to wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", params(with_any(load("schedule_novu"), "next")))
def test_now_is_no_wait_and_a_later_start_is_one(row):
    hours = digestd.parse_schedule(row["schedule"], digestd.load_zone(row["timezone"] or "UTC"))
    at = digestd.parse_instant(row["at"])
    later = row["next"] is not None and digestd.parse_instant(row["next"]) > at
    assert digestd.hold_until(hours, 0, at) == (digestd.parse_instant(row["next"]) if later else None)
    assert digestd.hold_until(hours, 3, at) is None


# -- digests and delays from the trigger to the messages ---------------------------------------------------------------


def journey_steps(row: dict) -> list[dict]:
    """The steps of a row; a message tells how many events the digest step before it reports."""
    steps, text = [], ""
    for place, step in enumerate(row["steps"], 1):
        more = {} if step["type"] in ("digest", "delay") else {"text": text or "none"}
        more |= {"sender": "hook"} if step["type"] in ("email", "sms", "push", "chat") else {}
        steps.append({**more, **step})
        if step["type"] == "digest":
            text = f"{{{{ steps.digest{place}.eventCount }}}}"
    return steps


def messages(w: World) -> list[tuple[str, int, str]]:
    """What was sent or put in a feed: the step, how many ms after the start, the text."""
    found = []
    for (at, claim, _), body in zip(w.sent, w.bodies(), strict=True):
        text, digest = body["data"]["text"], body["data"]["digest"]
        assert text == (str(digest["eventCount"]) if digest else "none")
        found.append((claim.draft.step, at - START, text))
    feed = "SELECT j.step, m.created_at, m.body FROM inbox_messages m JOIN jobs j ON j.id = m.job_id"
    return found + [(step, at - START, text) for step, at, text in w.rows(feed)]


def play(world, row: dict) -> World:
    w = world(config_text(*journey_steps(row), daemon=row.get("daemon")))
    for number, payload in enumerate(row["triggers"]):
        answer = w.trigger("w", row.get("to", "s1"), payload, id=f"t{number}")
        if row.get("again"):
            w.advance("300ms")
            assert w.trigger("w", row.get("to", "s1"), payload, id=f"t{number}") == answer
        if "gap_ms" in row:
            w.advance(f"{row['gap_ms']}ms")
    w.advance("20d")
    return w


@pytest.mark.parametrize("row", params([row for row in JOURNEYS if not {"refused", "says"} & row.keys()]))
def test_triggers_become_the_messages_of_the_row(row, world):
    w = play(world, row)
    found, expected = messages(w), row.get("ours", row["sent"])
    if "texts" in row:
        assert sorted(text for _, _, text in found) == sorted(row["texts"])
        found = [(step, at, str(len(text.split()) - 1)) for step, at, text in found]
    assert sorted(found) == sorted((step, at, str(count or "none")) for step, at, count in expected)
    assert w.one("SELECT count(*) FROM runs WHERE state = 'active'") == 0
    assert w.rows("SELECT state FROM digests") == [("closed",)] * row["windows"]
    assert w.one("SELECT count(*) FROM jobs WHERE state = 'skipped'") == row["skipped"]
    trouble = w.rows("SELECT reason FROM v_trouble")
    assert [row["failed"] in reason for (reason,) in trouble] == [True] if "failed" in row else trouble == []


@pytest.mark.parametrize("row", params(with_any(JOURNEYS, "says")))
def test_triggers_become_the_texts_of_the_row(row, world):
    assert [body["data"]["text"] for body in play(world, row).bodies()] == row["says"]


@pytest.mark.parametrize("row", params(with_any(JOURNEYS, "refused")))
def test_a_journey_that_the_config_refuses(row, tmp_path):
    with pytest.raises(digestd.ConfigError) as refused:
        read(tmp_path, *journey_steps(row))
    assert [row["refused"] in str(problem) for problem in refused.value.problems] == [True]
