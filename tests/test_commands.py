"""The command line, as a person uses it: exit codes, output, and what it says when something is wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import io
import json
import os
import pathlib
import re
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import jsonschema_rs
import pytest
import tomli

import digestd
import peers
from conftest import BASIC, ROOT

HERE = pathlib.Path(__file__).parent
SECRET = "correcthorsebatterystaple"
FIVE = f"""[daemon]
timezone = "Mars/Phobos"
concurrncy = 4
[senders.mail]
type = "smtp"
port = "25x"
from = "Digest <digest@example.org>"
username = "u"
password = "{SECRET}"
[[workflows.w.steps]]
id = "digest"
type = "digest"
window = "soon"
[[workflows.w.steps]]
id = "mail"
type = "email"
sender = "mial"
"""
FIVE_PLACES = [
    (2, "daemon.timezone"),
    (3, "daemon.concurrncy"),
    (6, "senders.mail.port"),
    (13, "workflows.w.steps.0.window"),
    (17, "workflows.w.steps.1.sender"),
]
BIRD = """
[repeatables.bird]
cron = "0 9 * * *"
timezone = "Europe/Berlin"
sender = "hook"
"""
LOOKING = (("status",), ("digests",), ("jobs",), ("repeat", "list"))
CHANGING = (("cancel", "t1"), ("retry", "--all"), ("trigger", "comments", "--to", "s1"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("DIGESTD_CONFIG", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY", "JOURNAL_STREAM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path):
    """A folder with a good config."""
    (tmp_path / "config.toml").write_text(BASIC)
    return tmp_path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The same as `cli` without a process of its own, which is what makes hundreds of small cases fast."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        log = digestd.log
        before = (log.handlers[:], log.propagate, log.level)
        log.handlers[:] = []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = digestd.main(arguments)
            except SystemExit as error:
                code = error.code
            except Exception:  # as the interpreter does
                traceback.print_exc()
                code = 1
            finally:
                log.handlers[:], log.propagate = before[:2]
                log.setLevel(before[2])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    return run


def fine(result: subprocess.CompletedProcess[str]) -> str:
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def failed(result: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """What it says when it fails: words, and no trace."""
    assert "Traceback" not in result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.startswith("digestd: ")
    return result.stderr


def all_of(cli: Any, commands: Iterable[tuple[str, ...]], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Several commands at the same time, to save time where their order does not matter."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda command: cli(*command, **options), commands))


def query(folder: pathlib.Path, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(folder / "digestd.sqlite3", timeout=20)) as connection:
        return connection.execute(sql).fetchall()


def events(folder: pathlib.Path) -> list[Any]:
    return query(folder, "SELECT workflow, subscriber_id, payload FROM events ORDER BY id")


def nothing_written(folder: pathlib.Path) -> bool:
    return not (folder / "digestd.sqlite3").exists() or not events(folder)


# -- usage, and which config -------------------------------------------------------------------------------------------


WRONG = [
    (), ("dance",), ("status", "--loud"), ("trigger",), ("trigger", "comments"), ("trigger", "--to", "s1"), ("cancel",),
    ("trigger", "comments", "--to", "s1", "--jsonl", "-"), ("retry",), ("retry", "one"), ("retry", "1", "--all"),
    ("release",), ("release", "x"), ("preview", "comments"), ("test",), ("next",), ("digests", "-n", "x"), ("repeat",), ("repeat", "lst"), ("simulate",),
]  # fmt: skip


def test_a_wrong_command_line_ends_with_2(cli, here, folder):
    for result in [cli("dance"), cli("retry"), *(here(*command) for command in WRONG)]:
        assert (result.returncode, result.stdout) == (2, ""), result.args
        assert result.stderr and "Traceback" not in result.stderr and len(result.stderr) < 2000
    assert nothing_written(folder)


def test_version_and_help_need_nothing(cli, here):
    assert fine(cli("--version")) == f"digestd {digestd.__version__}\n"
    assert all(name in fine(here("--help")) for name in ("run", "check", "trigger", "status", "simulate"))


def test_the_config_is_the_named_one_else_the_environments_else_the_one_here(cli, here, tmp_path):
    for name in ("named", "other", "config"):
        (tmp_path / f"{name}.toml").write_text(BASIC)
    env = cli("check", DIGESTD_CONFIG="other.toml")
    both = cli("--config", "named.toml", "check", DIGESTD_CONFIG="other.toml")
    before, after = here("--config", "named.toml", "check"), here("check", "--config", "named.toml")
    for result, name in (
        (before, "named"),
        (after, "named"),
        (env, "other"),
        (both, "named"),
        (here("check"), "config"),
    ):
        assert fine(result).startswith(f"{name}.toml: fine")
    assert fine(here("check", "other.toml")).startswith("other.toml: fine")


def test_a_config_that_is_not_there_ends_with_78(here):
    for command, words in (
        (("--config", "none.toml", "status"), "none.toml"),
        (("status", "--config", "."), "directory"),
    ):
        result = here(*command)
        assert result.returncode == 78 and words in result.stderr and "Traceback" not in result.stderr
    result = here("check", "--config", "none.toml")
    assert result.returncode == 78 and result.stdout == "none.toml: cannot be read: No such file or directory\n"


# -- check and run on a bad config -------------------------------------------------------------------------------------


def places_in(text: str) -> list[tuple[int, str]]:
    found = [re.fullmatch(r"config\.toml:(\d+): ([\w.]+): .+", line) for line in text.splitlines()]
    assert all(found), text
    return [(int(match[1]), match[2]) for match in found if match]


def test_five_mistakes_are_five_lines_on_stdout_for_check_and_on_stderr_for_run(cli, here, tmp_path):
    (tmp_path / "config.toml").write_text(FIVE)
    check, run, as_json = cli("check"), cli("run"), here("check", "--json")
    assert (check.returncode, check.stderr) == (78, "") and places_in(check.stdout) == FIVE_PLACES
    assert (run.returncode, run.stdout) == (78, "") and places_in(run.stderr) == FIVE_PLACES
    assert as_json.returncode == 78 and json.loads(as_json.stdout)["ok"] is False
    problems = json.loads(as_json.stdout)["problems"]
    assert [(problem["line"], problem["path"]) for problem in problems] == FIVE_PLACES
    assert {problem["file"] for problem in problems} == {"config.toml"}
    assert SECRET not in check.stdout + run.stderr + as_json.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]  # no database for a config that is refused


def test_every_command_that_reads_the_config_refuses_a_bad_one(here, tmp_path):
    (tmp_path / "config.toml").write_text(FIVE)
    (tmp_path / "t.jsonl").write_text("")
    commands = [*LOOKING, *CHANGING, ("migrate",), ("sql", "SELECT 1"), ("simulate", "t.jsonl")]
    for result in (here(*command) for command in commands):
        assert (result.returncode, result.stdout) == (78, "")
        assert places_in(result.stderr) == FIVE_PLACES
    assert not (tmp_path / "digestd.sqlite3").exists()


def test_a_syntax_error_is_told_alone(cli, here, tmp_path):
    (tmp_path / "config.toml").write_text(FIVE + "broken = = 1\n")
    check, run = here("check"), cli("run")
    assert check.stdout == run.stderr and check.returncode == run.returncode == 78
    assert len(check.stdout.splitlines()) == 1 and check.stdout.startswith("config.toml:18: ")


def test_check_needs_the_secrets_and_looking_does_not(cli, here, folder):
    text = '[api]\nkeys = [{ env = "DIGESTD_TEST_KEY" }]\n' + BASIC
    (folder / "config.toml").write_text(text)
    check, run, trigger = here("check"), cli("run"), here("trigger", "comments", "--to", "s1")
    assert check.returncode == 78 and "DIGESTD_TEST_KEY is not set" in check.stdout
    assert run.returncode == 78 and "DIGESTD_TEST_KEY is not set" in run.stderr
    fine(trigger)
    fine(cli("check", DIGESTD_TEST_KEY=SECRET))


def test_check_counts_what_is_under_way_and_what_would_have_no_place(here, world, folder):
    w = world(BASIC + BASIC[BASIC.index("[workflows.comments]") :].replace("workflows.comments", "workflows.gone"))
    for who in ("s1", "s2"):
        w.trigger("comments", who, {"postId": 1})
    w.trigger("gone", "s1", {"postId": 1})
    w.reply("hook", "temporary")
    w.advance("10m")
    w.trigger("comments", "s1", {"postId": 2})
    digestd.close_store()
    assert fine(here("check")).splitlines()[-1].endswith("config.toml: fine: 1 workflows, 0 repeatables, 2 senders")
    assert fine(here("check", "--db")).splitlines()[:-1] == [
        "open: 1 windows of comments/digest", "open: 1 jobs of comments/chat"
    ]  # fmt: skip
    (folder / "config.toml").write_text(BASIC.replace("workflows.comments", "workflows.other"))
    found = json.loads(fine(here("check", "--db", "--json")))
    assert found["open"] == [
        {"what": "windows", "name": "comments/digest", "count": 1, "missing": "workflow"},
        {"what": "jobs", "name": "comments/chat", "count": 1, "missing": "workflow"},
    ]
    assert "they will fail" in fine(here("check", "--db"))


def test_a_broken_repeatable_is_told_by_check_and_status_and_their_exit_codes(here, world, folder):
    text = BASIC + '[repeatables.odd]\nevery = "1m"\nsender = "hook"\n'
    (folder / "config.toml").write_text(text)
    world(text).rows("UPDATE repeatables SET state = 'broken', reason = 'the rule has no further time'")
    digestd.close_store()
    told, as_json, status = here("check", "--db"), here("check", "--db", "--json"), here("status")
    assert told.returncode == 1 and "broken: repeatable odd: the rule has no further time" in told.stdout
    assert as_json.returncode == 1 and [one["name"] for one in json.loads(as_json.stdout)["broken"]] == ["odd"]
    assert status.returncode == 1 and "repeatable broken" in status.stdout
    assert here("check").returncode == 0


def test_a_warning_changes_nothing_and_secrets_are_not_printed(here, folder):
    text = BASIC.replace('url = "http://', f'url = "http://user:{SECRET}@') + f'[api]\nkeys = ["{SECRET}"]\n'
    (folder / "config.toml").write_text(text)
    (folder / "config.toml").chmod(0o644)
    told, as_json = here("check"), here("check", "--json")
    assert fine(told).startswith("warning: config.toml: ") and ": fine: " in told.stdout
    assert json.loads(fine(as_json))["ok"] is True and len(json.loads(as_json.stdout)["warnings"]) == 1
    assert SECRET not in told.stdout + as_json.stdout
    (folder / "config.toml").chmod(0o600)
    assert "warning" not in fine(here("check"))


def test_old_zone_names_are_known_without_the_systems_zones(cli, tmp_path):
    zones = ("Europe/Kiev", "Europe/Kyiv", "US/Pacific", "Asia/Calcutta")
    feed = '[[workflows.{0}.steps]]\nid = "feed"\ntype = "in_app"\n'
    text = "".join(f'[workflows.w{n}]\ntimezone = "{zone}"\n' + feed.format(f"w{n}") for n, zone in enumerate(zones))
    (tmp_path / "config.toml").write_text(text)
    result = cli("check", PYTHONTZPATH="")
    assert result.returncode == 0 or (result.returncode == 78 and "tzdata" in result.stdout)


# -- --json ------------------------------------------------------------------------------------------------------------


def test_everything_that_prints_can_print_json(here, folder):
    (folder / "t.jsonl").write_text('{"at": "2026-03-09T09:00:00Z", "trigger": {"name": "comments", "to": "s1"}}\n')
    (folder / "lines.jsonl").write_text('{"name": "comments", "to": "s1"}\n')
    objects = [("migrate",), ("trigger", "comments", "--to", "s1", "--transaction-id", "t1"), ("check",), ("status",),
               ("cancel", "t1"), ("retry", "--all"), ("next", "@daily"), ("schema",),
               ("trigger", "--jsonl", "lines.jsonl")]  # fmt: skip
    for command in objects:
        assert isinstance(json.loads(fine(here(*command, "--json"))), dict), command
    for command in (("digests",), ("jobs",), ("repeat", "list")):
        assert isinstance(json.loads(fine(here("--json", *command))), list), command
    told = [json.loads(line) for line in fine(here("simulate", "--json", "t.jsonl")).splitlines()]
    assert [item["what"] for item in told] == ["opened", "closed", "sent"]


def test_failures_with_json_are_words_on_stderr_and_nothing_on_stdout(here, folder):
    for result in (here("status", "--json"), here("trigger", "nosuch", "--to", "s1", "--json")):
        failed(result)
        assert result.stdout == ""


# -- trigger -----------------------------------------------------------------------------------------------------------


def test_a_trigger_is_on_the_disk_when_the_command_ends(cli, folder):
    told = fine(cli("trigger", "comments", "--to", "s1"))
    [(transaction_id,)] = query(folder, "SELECT transaction_id FROM events")
    assert told == f"recorded 1 events, transaction id {transaction_id}\n"
    assert events(folder) == [("comments", "s1", "{}")]


def test_the_payload_comes_as_text_from_a_file_or_from_standard_input(cli, here, folder):
    (folder / "p.json").write_text('{"n": "füür"}', "utf-8")
    fine(here("trigger", "comments", "--to", "s1", "--payload", '{"n": 1.5, "b": [true, null]}'))
    fine(here("trigger", "comments", "--to", "s1", "--payload", "@p.json"))
    fine(cli("trigger", "comments", "--to", "s1", "--payload", "-", input='{"n": 3}\n'))
    payloads = [json.loads(payload) for _, _, payload in events(folder)]
    assert payloads == [{"n": 1.5, "b": [True, None]}, {"n": "füür"}, {"n": 3}]


def test_several_recipients_are_one_event_each_and_bring_their_fields(here, folder):
    ada = {"subscriberId": "ada", "email": "ada@example.org", "timezone": "Europe/Berlin", "data": {"team": "a"}}
    to = ["s1", "s2", "s1", json.dumps(ada)]
    told = json.loads(fine(here("trigger", "comments", *(part for one in to for part in ("--to", one)), "--json")))
    assert told["recorded"] == 3
    assert sorted(subscriber for _, subscriber, _ in events(folder)) == ["ada", "s1", "s2"]
    found = query(folder, "SELECT email, timezone, data FROM subscribers WHERE subscriber_id = 'ada'")
    assert found == [("ada@example.org", "Europe/Berlin", '{"team":"a"}')]


def test_the_same_transaction_again_is_fine_and_with_another_payload_an_error(here, folder):
    first = ("trigger", "comments", "--to", "s1", "--transaction-id", "t1", "--payload")
    fine(here(*first, '{"a": 1, "b": 2}'))
    assert "t1" in fine(here(*first, '{"b": 2, "a": 1.0}'))
    assert "t1" in failed(here(*first, '{"a": 2}'))
    assert events(folder) == [("comments", "s1", '{"a":1,"b":2}')]


def test_a_workflow_nobody_knows_is_named_and_nothing_is_written(here, folder):
    assert "coments" in failed(here("trigger", "coments", "--to", "s1"))
    assert nothing_written(folder)


BAD_PAYLOADS = {
    "a list": "[1]",
    "a text": '"text"',
    "a number": "5",
    "no JSON": "{a: 1}",
    "empty": "",
    "a thousand levels": '{"a":' * 1000 + "1" + "}" * 1000,
    "NaN": '{"a": NaN}',
    "infinity": '{"a": -Infinity}',
    "too large a float": '{"a": 1e400}',
    "half a surrogate pair": '{"a": "\\ud800"}',
    "half a pair in a name": '{"\\udfff": 1}',
    "five thousand digits": '{"a": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_a_bad_payload_is_refused_in_words_and_nothing_is_written(here, folder, payload):
    assert len(failed(here("trigger", "comments", "--to", "s1", "--payload", payload))) < 400
    assert nothing_written(folder)


BAD_RECIPIENTS = {
    "empty": "",
    "blank at the end": "s1 ",
    "a line end": "s\n1",
    "too long": "s" * 256,
    "not UTF-8": os.fsdecode(b"s\xff"),
    "an object without an id": '{"email": "a@example.org"}',
    "an address that is none": '{"subscriberId": "a", "email": "nobody"}',
    "a zone that is none": '{"subscriberId": "a", "timezone": "Mars/Phobos"}',
    "a number for a name": '{"subscriberId": "a", "firstName": 5}',
    "half a surrogate pair in a name": '{"subscriberId": "a", "firstName": "\\ud800"}',
    "half a surrogate pair in an address": '{"subscriberId": "a", "email": "\\ud800@example.org"}',
    "half a surrogate pair in data": '{"subscriberId": "a", "data": {"x": "\\ud800"}}',
    "broken JSON": '{"subscriberId": "a"',
}


@pytest.mark.parametrize("to", BAD_RECIPIENTS.values(), ids=BAD_RECIPIENTS)
def test_a_bad_recipient_is_refused_in_words_and_nothing_is_written(here, folder, to):
    failed(here("trigger", "comments", "--to", "good", "--to", to))
    assert nothing_written(folder)


def test_a_bad_transaction_id_is_refused_and_nothing_is_written(here, folder):
    for transaction_id in ("", "a\tb", "t" * 256, os.fsdecode(b"t\xff")):
        failed(here("trigger", "comments", "--to", "s1", "--transaction-id", transaction_id))
    assert nothing_written(folder)


def test_a_payload_file_that_cannot_be_read_is_told_in_words(here, folder):
    (folder / "latin").write_bytes(b'{"a": "caf\xe9"}')
    for name in ("none", "latin", "."):
        result = here("trigger", "comments", "--to", "s1", "--payload", f"@{name}")
        assert name in failed(result, result.returncode) and result.returncode in (1, 2)
    assert nothing_written(folder)


def test_good_lines_are_recorded_and_bad_ones_told_with_their_numbers(cli, folder):
    lines = [
        '{"name": "comments", "to": "s1", "payload": {"n": 1}}',
        "",
        '{"name": "comments"',
        '{"name": "nosuch", "to": "s1"}',
        '{"name": "comments", "to": ["s2", {"subscriberId": "s3"}], "payload": {"n": 2}}',
        "[1]",
        '{"name": "comments", "to": "s1", "payload": {"n": NaN}}',
        '{"name": "comments", "to": "s1", "payload": ' + '{"a":' * 1000 + "1" + "}" * 1001,
        '{"name": "comments", "to": {"subscriberId": "s4", "firstName": "\\ud800"}}',
        '{"name": "comments", "to": "s1", "payload": {"n": 3}}',
    ]
    result = cli("trigger", "--jsonl", "-", input="\n".join(lines))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    told = result.stderr.splitlines()
    assert [re.match(r"digestd: line (\d+): .", line)[1] for line in told] == ["3", "4", "6", "7", "8", "9"]
    assert result.stdout == "recorded 4 events, refused 6 lines\n"
    assert [json.loads(payload) for _, _, payload in events(folder)] == [{"n": 1}, {"n": 2}, {"n": 2}, {"n": 3}]


def test_a_file_of_good_lines_is_recorded_whole(here, folder):
    lines = [json.dumps({"name": "comments", "to": f"s{n}", "payload": {"n": n}}) for n in range(1100)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    assert fine(here("trigger", "--jsonl", "lines.jsonl")) == "recorded 1100 events\n"
    assert [json.loads(payload)["n"] for _, _, payload in events(folder)] == list(range(1100))


def test_a_line_that_reuses_a_transaction_with_other_content_is_told(here, folder):
    lines = [
        json.dumps({"name": "comments", "to": "s1", "payload": {"n": n}, "transactionId": "t1"}) for n in (1, 1, 2)
    ]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    result = here("trigger", "--jsonl", "lines.jsonl")
    assert result.returncode == 1 and "line 3" in result.stderr and "line 2" not in result.stderr
    assert events(folder) == [("comments", "s1", '{"n":1}')]


def test_a_file_of_lines_that_cannot_be_read_is_told_in_words(here, folder):
    (folder / "latin.jsonl").write_bytes(b'{"name": "comments", "to": "s1", "payload": {"a": "caf\xe9"}}\n')
    for name in ("none.jsonl", "latin.jsonl", "."):
        result = here("trigger", "--jsonl", name)
        assert "Traceback" not in result.stderr, name
        assert result.returncode in (1, 2) and result.stderr.startswith("digestd: ")


# -- cancel, retry, and what a person looks at -------------------------------------------------------------------------


def test_cancel_is_true_only_when_something_was_cancelled(cli, here, world, folder):
    w = world()
    w.trigger("comments", payload={"postId": 1}, id="t1")
    digestd.close_store()
    results = [here("cancel", "nosuch"), cli("cancel", "t1"), here("cancel", "t1")]
    assert [result.returncode for result in results] == [1, 0, 1]
    assert fine(results[1]) == "cancelled\n" and all(result.stderr == "" for result in results)
    assert query(folder, "SELECT state, (SELECT state FROM digests) FROM events") == [("cancelled", "discarded")]


@pytest.mark.parametrize("transaction_id", [os.fsdecode(b"t\xff"), "", "t" * 5000, "'; DROP TABLE events; --"])
def test_cancelling_nonsense_is_nothing_to_cancel(here, world, folder, transaction_id):
    world().trigger("comments", payload={"postId": 1}, id="t1")
    digestd.close_store()
    result = here("cancel", transaction_id)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert query(folder, "SELECT state FROM events") == [("placed",)]


def test_status_of_a_calm_database_needs_no_hand(here, folder):
    fine(here("migrate"))
    assert "nothing needs a hand" in fine(here("status")) and "not running" in fine(here("status"))
    status = json.loads(fine(here("status", "--json")))
    assert (status["running"], status["trouble"], status["troubleCount"]) == (False, [], 0)


def failed_work(w: Any) -> None:
    """One job that failed for good, and one event that could not be placed."""
    w.reply("hook", "permanent")
    w.trigger("comments", payload={"postId": "p1"})
    w.trigger("comments", "s2", {"postId": "p1"})
    w.advance("10m")
    w.rows("INSERT INTO events (workflow, subscriber_id, payload) VALUES ('comments', 's9', '[]')")
    w.tick()
    digestd.close_store()


def test_status_lists_what_needs_a_hand_and_ends_with_1(cli, here, world, folder):
    failed_work(world())
    told, as_json = cli("status"), here("--json", "status")
    assert told.returncode == as_json.returncode == 1
    assert "2 need a hand" in told.stdout and told.stderr == ""
    assert "job failed" in told.stdout and "comments/chat" in told.stdout and "digestd retry 1" in told.stdout
    assert "event failed" in told.stdout
    trouble = json.loads(as_json.stdout)["trouble"]
    assert {item["what"] for item in trouble} == {"job failed", "event failed"}
    assert {item["subscriberId"] for item in trouble} == {"s1", "s9"} and all(item["reason"] for item in trouble)


def test_status_tells_when_the_daemon_runs(here, folder):
    fine(here("migrate"))
    lock = digestd.InstanceLock(folder / "digestd.sqlite3")
    try:
        assert f"running, process {os.getpid()}" in fine(here("status"))
    finally:
        lock.release()


def test_windows_jobs_and_repeatables_are_listed(here, world, folder):
    (folder / "config.toml").write_text(BASIC + BIRD)
    failed_work(world(BASIC + BIRD))
    digests, jobs, repeat, one, as_json, plain = (
        here(*command)
        for command in (
            ("digests", "--json"),
            ("jobs", "--json"),
            ("repeat", "list", "--json"),
            ("digests", "-n", "1", "--json"),
            ("jobs", "-n", "1", "--json"),
            ("jobs",),
        )
    )
    found = json.loads(fine(digests))
    assert [(row["subscriber_id"], row["key"], row["state"], row["events"]) for row in found] == [
        ("s2", '"p1"', "closed", 1), ("s1", '"p1"', "closed", 1),
    ]  # fmt: skip
    assert json.loads(fine(one)) == found[:1] and len(json.loads(fine(as_json))) == 1
    states = {row["subscriber_id"]: row["state"] for row in json.loads(fine(jobs)) if row["type"] == "chat"}
    assert states == {"s1": "failed", "s2": "completed"}
    [bird] = json.loads(fine(repeat))
    assert (bird["name"], bird["rule"], bird["timezone"]) == ("bird", "cron 0 9 * * *", "Europe/Berlin")
    assert bird["next"][0] == "2026-03-10T08:00:00Z" and len(bird["next"]) == 5
    lines = fine(plain).splitlines()
    assert lines[0].split()[:3] == ["id", "owner", "step"] and len(lines) == 1 + len(json.loads(jobs.stdout))


def test_empty_lists_say_none(here, folder):
    fine(here("migrate"))
    for result in (here(*command) for command in LOOKING[1:]):
        assert fine(result) == "none\n"


def test_a_row_cannot_forge_lines_or_paint_the_terminal(here, world, folder):
    w = world()
    w.rows("INSERT INTO events (workflow, subscriber_id, payload) VALUES ('comments', ?, '{}')", "s1\n\x1b[31mforged")
    w.rows("INSERT INTO events (workflow, subscriber_id, payload) VALUES (?, 's1', '{}')", "a\n\x1b[31mforged")
    w.advance("10m")
    digestd.close_store()
    for result in (here(*command) for command in LOOKING):
        assert "\x1b" not in result.stdout and not any(line.startswith("\x1b") for line in result.stdout.splitlines())
        assert not any(line.lstrip().startswith("forged") for line in result.stdout.splitlines())


@pytest.mark.parametrize("number", ["99999999999999999999999", "-1"])
def test_absurd_numbers_are_refused_or_found_nowhere(here, world, folder, number):
    failed_work(world())
    for command in (("retry", number), ("retry", "--", number), ("digests", "-n", number), ("jobs", f"-n{number}")):
        result = here(*command)
        assert "Traceback" not in result.stderr
        assert result.returncode in ((1, 2) if command[0] == "retry" else (0, 1, 2))
    assert query(folder, "SELECT count(*) FROM jobs WHERE state = 'failed'") == [(1,)]


def test_retry_takes_a_failed_job_up_again_once(here, world, folder):
    failed_work(world())
    [(job,)] = query(folder, "SELECT id FROM jobs WHERE state = 'failed'")
    first, again, none = (here("retry", str(number)) for number in (job, job, 4711))
    assert fine(first) == "1 jobs are tried again\n"
    assert (again.returncode, none.returncode) == (1, 1) and "no such job has failed" in none.stdout + none.stderr
    assert query(folder, f"SELECT state FROM jobs WHERE id = {job}")[0][0] in ("waiting", "delayed")


def test_retry_all_takes_every_failed_job_and_is_fine_with_none(here, world, folder):
    failed_work(world())
    assert json.loads(fine(here("retry", "--all", "--json"))) == {"retried": 1}
    assert json.loads(fine(here("retry", "--all", "--json"))) == {"retried": 0}


def test_a_window_is_released_once(here, world, folder):
    world().trigger("comments", payload={"postId": 1})
    digestd.close_store()
    assert fine(here("release", "1")) == "released\n"
    again, none = here("release", "1", "--json"), here("release", "4711")
    assert (again.returncode, none.returncode) == (1, 1) and json.loads(again.stdout) == {"released": False}
    assert none.stdout == "no such window is open\n"
    assert query(folder, "SELECT state, reason FROM digests") == [("closed", "released")]


# -- repeatables by hand -----------------------------------------------------------------------------------------------


def added(here, *arguments: str) -> dict:
    return json.loads(fine(here("repeat", "add", *arguments, "--json")))


def test_a_repeatable_is_added_shown_changed_and_removed(here, folder):
    facts = added(here, "tick", "--every", "15m", "--sender", "hook", "--data", '{"a": 1}', "--limit", "9")
    assert (facts["key"], facts["source"], facts["changed"], len(facts["next"])) == (
        "tick:::UTC:900000",
        "command",
        "added",
        5,
    )
    again = added(here, "tick", "--every", "900000", "--sender", "hook", "--data", '{"a": 1}', "--limit", "10")
    assert again["changed"] == "limit 9 -> 10" and again["next"] == facts["next"]
    shown = fine(here("repeat", "show", "tick"))
    assert "every 15m" in shown and facts["next"][4] in shown and "0 of 10" in shown
    assert [one["key"] for one in json.loads(fine(here("repeat", "list", "--json")))] == ["tick:::UTC:900000"]
    assert fine(here("repeat", "remove", "tick")) == "removed: tick:::UTC:900000\n"
    gone = here("repeat", "remove", "tick")
    assert gone.returncode == 1 and "no repeatable" in gone.stderr
    assert fine(here("repeat", "list")) == "none\n"


def test_two_of_one_name_are_told_apart_by_key_or_by_their_options(here, folder):
    for job_id in ("a", "b"):
        added(here, "x", "--cron", "0 9 * * *", "--sender", "hook", "--job-id", job_id)
    several = here("repeat", "pause", "x")
    assert several.returncode == 1 and "x:a::UTC:0 9 * * *" in several.stderr
    fine(here("repeat", "remove", "x", "--cron", "0 9 * * *", "--job-id", "a"))
    assert json.loads(fine(here("repeat", "remove", "x:b::UTC:0 9 * * *", "--json"))) == {"key": "x:b::UTC:0 9 * * *"}


def test_a_repeatable_is_paused_skipped_and_run_now(here, folder):
    first, second = added(here, "x", "--every", "1h", "--sender", "hook")["next"][:2]
    assert json.loads(fine(here("repeat", "skip-next", "x", "--json")))["skipped"] == first
    assert json.loads(fine(here("repeat", "show", "x", "--json")))["next"][0] == second
    assert json.loads(fine(here("repeat", "run-now", "x", "--json")))["count"] == 1
    assert query(folder, "SELECT state FROM jobs WHERE state = 'waiting'") == [("waiting",)]
    fine(here("repeat", "pause", "x"))
    assert "repeatables 0 active, 1 paused" in here("status").stdout
    again = here("repeat", "pause", "x")
    assert again.returncode == 1 and "is paused" in again.stderr
    assert json.loads(fine(here("repeat", "show", "x", "--json")))["state"] == "paused"
    fine(here("repeat", "resume", "x"))
    assert json.loads(fine(here("repeat", "list", "--json")))[0]["next"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--every", "1m"], "sender and trigger"),
        (["x", "--every", "1m", "--cron", "* * * * *", "--sender", "hook"], "cron and every"),
        (["x", "--every", "1m", "--sender", "hok"], "did you mean 'hook'?"),
        (["x", "--every", "1m", "--sender", "hook", "--end-at", "2020-01-01T00:00:00Z"], "would never run"),
        (["x", "--every", "1m", "--sender", "hook", "--data", "{"], "not JSON"),
        (["x", "--every", "1m", "--sender", "hook", "--backoff", '{"delay": "1x"}'], "not a duration"),
        (["x", "--cron", "0 0 30 2 *", "--sender", "hook"], "never"),
    ],
)
def test_a_repeatable_that_is_none_is_refused_and_nothing_is_stored(here, folder, arguments, words):
    refused = here("repeat", "add", *arguments)
    assert refused.returncode == 1 and words in refused.stderr and "Traceback" not in refused.stderr
    if (folder / "digestd.sqlite3").exists():
        assert query(folder, "SELECT count(*) FROM repeatables") == [(0,)]


# -- people ------------------------------------------------------------------------------------------------------------


def test_a_subscriber_is_set_shown_listed_and_deleted(here, folder):
    made = fine(here("subscriber", "set", "ada", "--email", "ada@example.org", "--hours", "daily 00:00-24:00"))
    assert "ada@example.org" in made and "mon-sun 00:00-24:00" in made and "inside" in made
    changed = fine(here("subscriber", "set", "ada", "--first-name", "Ada", "--data", '{"plan": "pro"}', "--json"))
    facts = json.loads(changed)
    assert facts == json.loads(fine(here("subscriber", "show", "ada", "--json")))
    assert (facts["firstName"], facts["email"], facts["data"]) == ("Ada", "ada@example.org", {"plan": "pro"})
    cleared = json.loads(fine(here("subscriber", "set", "ada", "--email", "", "--hours", "always", "--json")))
    assert "email" not in cleared and cleared["schedule"] is None
    assert [one["subscriber_id"] for one in json.loads(fine(here("subscriber", "list", "--json")))] == ["ada"]
    assert fine(here("subscriber", "delete", "ada")) == "deleted\n"
    again, gone = here("subscriber", "delete", "ada"), here("subscriber", "show", "ada")
    assert (again.returncode, gone.returncode) == (1, 1) and "no subscriber 'ada'" in gone.stderr
    assert fine(here("subscriber", "list")) == "none\n"


def test_a_schedule_is_taken_as_novu_writes_it_also_from_a_file(here, folder):
    schedule = {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [
        {"start": "09:00 AM", "end": "05:00 PM"}]}}}  # fmt: skip
    (folder / "hours.json").write_text(json.dumps(schedule), "utf-8")
    for given in (json.dumps(schedule), "@" + str(folder / "hours.json")):
        facts = json.loads(fine(here("subscriber", "set", "ada", "--schedule", given, "--json")))
        assert facts["schedule"] == schedule and facts["inside"] == (facts["nextStart"] is None)
    assert "mon 09:00-17:00" in fine(here("subscriber", "show", "ada"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--email", "nobody"], "is not an e-mail address"),
        (["--timezone", "Mars/Phobos"], "is not a time zone"),
        (["--hours", "mon 9-5"], "is not a time of day"),
        (["--schedule", '{"isEnabled": 1}'], "isEnabled true or false"),
        (["--schedule", "{"], "not JSON"),
        (["--data", "[]"], "data must be an object"),
        (["--hours", "always", "--schedule", ""], "give one"),
    ],
)
def test_a_bad_field_of_a_subscriber_is_refused_and_nothing_is_stored(here, folder, option, words):
    refused = here("subscriber", "set", "ada", "--first-name", "Ada", *option)
    assert refused.returncode in (1, 2) and words in refused.stderr and "Traceback" not in refused.stderr
    assert (
        json.loads(fine(here("subscriber", "list", "--json")) if (folder / "digestd.sqlite3").exists() else "[]") == []
    )


def test_what_a_subscriber_gets_is_turned_on_and_off_and_told(here, folder):
    facts = json.loads(fine(here("subscriber", "set", "ada", "--turn-off", "email", "--turn-off", "sms", "--json")))
    assert facts["channels"] == [{"workflow": None, "channel": name, "enabled": False} for name in ("email", "sms")]
    told = fine(here("subscriber", "set", "ada", "--turn-on", "email", "--workflow", "comments"))
    assert "email off, sms off, email on for comments" in told
    refused = here("subscriber", "set", "ada", "--turn-off", "email", "--workflow", "nope")
    assert refused.returncode == 1 and "no workflow" in refused.stderr
    assert here("subscriber", "set", "ada", "--workflow", "comments").returncode == 2


# -- senders -----------------------------------------------------------------------------------------------------------


def test_a_sender_is_disabled_listed_with_what_waits_and_enabled(here, folder):
    assert {one["state"] for one in json.loads(fine(here("sender", "list", "--json")))} == {"ok"}
    assert not (folder / "digestd.sqlite3").exists(), "looking makes nothing"
    fine(here("migrate"))
    assert "disabled; 0 jobs wait" in fine(here("sender", "disable", "hook", "--reason", "moving"))
    assert "was disabled before" in fine(here("sender", "disable", "hook"))
    [hook, mail] = json.loads(fine(here("sender", "list", "--json")))
    assert (hook["name"], hook["type"], hook["state"], hook["cause"], hook["reason"]) == (
        "hook", "webhook", "disabled", "person", "moving",
    )  # fmt: skip
    assert (mail["state"], mail["failures"], mail["waiting"]) == ("ok", 0, 0)
    assert "moving" in fine(here("sender", "list")) and "sender enable hook" in fine(
        here("sql", "SELECT * FROM v_trouble")
    )
    facts = json.loads(fine(here("sender", "enable", "hook", "--json")))
    assert facts == {"name": "hook", "done": True, "waiting": 0}
    assert "no sender is called 'hok'" in failed(here("sender", "enable", "hok"), 2)


# -- trying out --------------------------------------------------------------------------------------------------------

PREVIEW = BASIC.replace(
    '[[workflows.comments.steps]]\nid = "chat"',
    """[[workflows.comments.steps]]
id = "mail"
type = "email"
sender = "mail"
when = "payload.postId == 1"
subject = "{{ steps.digest.countSummary }} on {{ payload.postId }}"
text = "{% for e in steps.digest.events %}- {{ e.payload.by }}\\n{% endfor %}"
[[workflows.comments.steps]]
id = "feed"
type = "in_app"
[[workflows.comments.steps]]
id = "chat\"""",
)


def test_preview_shows_a_message_of_payloads_and_sends_nothing(here, tmp_path):
    (tmp_path / "config.toml").write_text(PREVIEW)
    two = '[{"postId": 1, "by": "Ada"}, {"postId": 1, "by": "Grace"}]'
    shown = fine(
        here(
            "preview", "comments", "mail", "--payload", two, "--to", '{"subscriberId": "s1", "email": "a@example.org"}'
        )
    )
    assert "Subject: 2 notifications on 1" in shown and "- Ada" in shown and "- Grace" in shown
    found = json.loads(fine(here("preview", "comments", "chat", "--payload", two, "--json")))
    body = json.loads(found["body"])
    assert (found["sender"], found["wanted"], body["data"]["digest"]["eventCount"]) == ("hook", True, 2)
    assert "postId" in fine(here("preview", "comments", "feed", "--payload", '{"postId": 1}'))
    assert not (tmp_path / "digestd.sqlite3").exists()


def test_preview_says_what_would_keep_a_message_from_being_sent(here, tmp_path):
    (tmp_path / "config.toml").write_text(PREVIEW)
    result = here("preview", "comments", "mail", "--payload", '{"postId": 2}')
    assert result.returncode == 0 and "1 notification on 2" in result.stdout
    assert result.stderr.splitlines() == [
        "digestd: it would be skipped: its condition says no", "digestd: the subscriber has no e-mail address"
    ]  # fmt: skip


def test_preview_of_a_window_shows_what_it_would_send_now(here, world, folder):
    w = world()
    w.subscriber("s1", firstName="Ada")
    for number in range(3):
        w.trigger("comments", payload={"postId": 1, "n": number})
    digestd.close_store()
    body = json.loads(json.loads(fine(here("preview", "comments", "chat", "--digest", "1", "--json")))["body"])
    assert [event["payload"]["n"] for event in body["data"]["digest"]["events"]] == [0, 1, 2]
    assert (body["data"]["subscriber"]["firstName"], body["data"]["digest"]["key"]) == ("Ada", 1)
    assert query(folder, "SELECT state FROM digests") == [("open",)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch", "chat"), "no workflow is called 'nosuch'"),
        (("comments", "caht"), "did you mean 'chat'?"),
        (("comments", "digest"), "no step of comments that sends something is called 'digest'"),
        (("comments", "chat", "--payload", "5"), "a payload is an object"),
        (("comments", "chat", "--payload", "[1]"), "a payload is an object"),
    ],
)
def test_preview_of_what_is_not_there_is_a_wrong_command(here, folder, arguments, words):
    assert words in failed(here("preview", *arguments), 2)


def test_preview_of_a_window_that_is_not_there_is_a_wrong_command(here, world, folder):
    world()
    digestd.close_store()
    assert "there is no window 7" in failed(here("preview", "comments", "chat", "--digest", "7"), 2)


def test_a_sender_is_tested_by_one_real_message(here, folder):
    receiver, mails = peers.Receiver(200, 503), peers.MailServer()
    try:
        text = BASIC.replace("http://127.0.0.1:9/hook", receiver.url())
        text = text.replace('tls = "none"', f'tls = "none"\nport = {mails.port}')
        (folder / "config.toml").write_text(text)
        assert fine(here("test", "hook")).startswith("sent, after ")
        result = here("test", "hook", "--json")
        assert (result.returncode, json.loads(result.stdout)["status"]) == (1, 503)
        assert fine(here("test", "mail", "--to", "you@example.org")).startswith("sent, after ")
        [mail] = mails.mails
        assert mail.to == ["you@example.org"] and "test of the sender mail" in mail.message["Subject"]
        assert json.loads(receiver.requests[0].body)["type"] == "digestd.test"
        assert "a mail needs an address" in failed(here("test", "mail"), 2)
        assert "did you mean 'hook'?" in failed(here("test", "hok"), 2)
        assert not (folder / "digestd.sqlite3").exists()
    finally:
        receiver.stop()
        mails.stop()


# -- sql, schema, migrate ----------------------------------------------------------------------------------------------


SQL = (
    ("sql", "SELECT workflow FROM events"),
    ("sql", "--json", "SELECT id, workflow FROM events"),
    ("sql", "--json", "SELECT 1 WHERE 0"),
    ("sql", "DELETE FROM events"),
    ("sql", "SELECT nonsense"),
)


@pytest.mark.parametrize("shell", [True, False], ids=["as installed", "without the sqlite3 shell"])
def test_sql_looks_and_never_touches(cli, here, world, folder, monkeypatch, shell):
    world().trigger("comments", payload={"postId": 1})
    digestd.close_store()
    if not shell:
        monkeypatch.setenv("PATH", str(folder))
    shown, as_json, empty, delete, broken = all_of(cli, SQL) if shell else [here(*command) for command in SQL]
    assert "comments" in fine(shown)
    assert json.loads(fine(as_json)) == [{"id": 1, "workflow": "comments"}]
    assert json.loads(fine(empty)) == []
    for result, words in ((delete, "readonly"), (broken, "nonsense")):
        assert "Traceback" not in result.stderr
        assert result.returncode == 1 and words in result.stderr
    assert len(events(folder)) == 1


def test_the_schema_accepts_every_config_that_is_accepted_and_finds_typos(cli):
    schema = json.loads(fine(cli("schema")))  # in an empty folder: it needs no config
    jsonschema_rs.meta.validate(schema)
    validator = jsonschema_rs.validator_for(schema)
    texts = [
        (ROOT / "config.example.toml").read_text(),
        *((HERE / "data" / f"{name}.toml").read_text() for name in ("contract", "extract")),
    ]
    texts += [
        BASIC + BIRD,
        BASIC + BIRD.replace("cron", "pattern"),
        '[repeatables.a]\nevery = 5000\nsender = "b"\n[senders.b]\ntype = "log"\n',
    ]
    for text in texts:
        assert [
            f"{list(error.instance_path)}: {error.message}" for error in validator.iter_errors(tomli.loads(text))
        ] == []
    wrong_texts = ['[daemon]\ntimezon = "UTC"\n', '[daemon]\nconcurrency = "x"\n', "[daemn]\n",
                   '[senders.a]\ntype = "smpt"\n', '[senders.a]\ntype = "webhook"\n']  # fmt: skip
    for wrong in wrong_texts:
        assert not validator.is_valid(tomli.loads(wrong)), wrong


def test_migrate_makes_a_database_once(here, folder):
    version = digestd.read_migrations().version
    assert f"schema {version}" in fine(here("migrate"))
    assert "nothing to do" in fine(here("migrate"))
    told = json.loads(fine(here("migrate", "--json")))
    assert told == {"schema": version, "applied": [], "new": False}
    assert (folder / "digestd.sqlite3").stat().st_mode & 0o077 == 0


def test_migrate_and_run_do_not_work_below_a_running_daemon(cli, here, folder):
    fine(here("migrate"))
    lock = digestd.InstanceLock(folder / "digestd.sqlite3")
    try:
        for result in (here("migrate"), cli("run")):
            assert f"process {os.getpid()}" in failed(result)
    finally:
        lock.release()


# -- next --------------------------------------------------------------------------------------------------------------


def following(here: Any, *arguments: str) -> list[str]:
    return json.loads(fine(here("next", *arguments, "--json")))["next"]


def test_next_knows_cron_intervals_and_plain_words(here):
    at = ("--from", "2025-01-01T04:07:00Z", "-n", "2")
    assert following(here, "* 15 3 * * *", *at) == ["2025-01-02T03:15:00Z", "2025-01-02T03:15:01Z"]
    assert following(here, "every 15m", *at) == ["2025-01-01T04:15:00Z", "2025-01-01T04:30:00Z"]
    assert following(here, "every 15m", "--offset", "5m", *at) == ["2025-01-01T04:20:00Z", "2025-01-01T04:35:00Z"]
    assert following(here, "every 15m", "--align", "start", *at) == ["2025-01-01T04:22:00Z", "2025-01-01T04:37:00Z"]
    berlin = ("--timezone", "Europe/Berlin", *at)
    assert following(here, "daily at 09:00", *berlin) == ["2025-01-01T08:00:00Z", "2025-01-02T08:00:00Z"]
    assert following(here, "0 5 * * *", *berlin) == ["2025-01-02T04:00:00Z", "2025-01-03T04:00:00Z"]
    lines = fine(here("next", "0 5 * * *", *berlin)).splitlines()
    assert [line.split()[0] for line in lines] == ["2025-01-02T04:00:00Z", "2025-01-03T04:00:00Z"]


def test_next_warns_of_what_people_fall_into(here):
    told = here("next", "* 15 3 * * *", "-n", "1")
    assert told.returncode == 0 and "0 15 3 * * *" in told.stderr and len(told.stdout.splitlines()) == 1


def test_next_is_strictly_after_and_five_by_default(here):
    found = following(here, "0 9 * * *", "--from", "2025-01-01T09:00:00Z")
    assert len(found) == 5 and found[0] == "2025-01-02T09:00:00Z"


REFUSED_RULES = {
    ("0 0 30 2 *",): "never",
    ("* 0 0 1,2 * * *",): "7 fields",
    ("61 * * * *",): "61",
    ("every 0s",): "0s",
    ("sometimes",): "sometimes",
    ("",): "empty",
    ("9" * 5000 + " * * * *",): "minute",
    ("@daily", "--timezone", "Mars/Phobos"): "Mars/Phobos",
    ("@daily", "--timezone", ""): "time zone",
    ("@daily", "--from", "tomorrow"): "tomorrow",
    ("every 15m", "--offset", "soon"): "soon",
    ("0 0 1 1 *", "--from", "9999-12-31T23:00:00Z"): "9999",
    ("every 1h", "--from", "9999-12-31T23:30:00Z"): "9999",
}


@pytest.mark.parametrize(("rule", "words"), REFUSED_RULES.items(), ids=lambda part: str(part)[:30])
def test_a_rule_that_is_refused_ends_with_2_and_the_reason(here, rule, words):
    result = here("next", *rule)
    assert words in failed(result, 2) and result.stdout == ""


def test_next_does_not_fall_over_the_ends_of_time(here):
    zone = ("--timezone", "America/New_York")
    commands = [("next", rule, "--from", at, *zone) for rule in ("@daily", "every 1h") for at in
                ("0001-01-01T00:00:00Z", "9999-12-31T22:30:00Z")]  # fmt: skip
    for result in [here(*command) for command in commands]:
        assert "Traceback" not in result.stderr and result.returncode in (0, 2)


def test_a_count_that_is_none_is_refused_briefly(here):
    for result in (here("next", "@daily", "-n", count) for count in ("0", "-1", "10001", "x")):
        assert result.returncode == 2 and len(result.stderr) < 2000


LINES = [
    '{"rule": "every 1h", "from": "2025-01-01T00:30:00Z", "n": 1}',
    '{"rule": "0 0 30 2 *"}',
    "nonsense",
    "[]",
    '{"from": "2025-01-01T00:30:00Z"}',
    '{"rule": 5}',
    '{"rule": "@daily", "timezone": ["UTC"]}',
    '{"rule": "@daily", "timezone": "Mars/Phobos"}',
    '{"rule": "@daily", "timezone": 5}',
    '{"rule": "@daily", "n": 0}',
    '{"rule": "@daily", "n": 1e9}',
    '{"rule": "@daily", "n": "5"}',
    '{"rule": "@daily", "from": 5}',
    '{"rule": "@daily", "from": {}}',
    '{"rule": "0 5 * * *", "timezone": "Europe/Berlin", "from": "2025-07-01T00:00:00Z", "n": 1}',
]


@pytest.mark.parametrize("line", LINES[1:-1])
def test_next_answers_a_bad_line_with_an_error(here, tmp_path, line):
    (tmp_path / "lines.jsonl").write_text(f"{LINES[0]}\n{line}\n\n{LINES[-1]}")
    first, bad, last = (json.loads(answer) for answer in fine(here("next", "--jsonl", "lines.jsonl")).splitlines())
    assert list(bad) == ["error"] and bad["error"]
    assert first == {"next": ["2025-01-01T01:00:00Z"]} and last == {"next": ["2025-07-01T03:00:00Z"]}


def test_next_answers_lines_from_standard_input_without_a_config(cli):
    assert json.loads(fine(cli("next", "--jsonl", "-", input=LINES[0]))) == {"next": ["2025-01-01T01:00:00Z"]}
    assert fine(cli("next", "--jsonl", "-", input="")) == ""


def test_a_reader_that_goes_away_leaves_no_trace(tmp_path):
    command = [sys.executable, str(ROOT / "digestd.py"), "next", "@secondly", "-n", "10000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
    assert "Traceback" not in told and "Exception" not in told


# -- simulate ----------------------------------------------------------------------------------------------------------

TIMELINE = """
# a comment, and a blank line before it
{"at": "2026-03-09T09:00:00Z", "trigger": {"name": "comments", "to": "s1", "payload": {"postId": 1, "n": 1}}}
{"at": "2026-03-09T10:05:00+01:00", "trigger": {"name": "comments", "to": "s1", "payload": {"postId": 1, "n": 2}}}
"""


def test_simulate_tells_what_would_be_sent_as_lines_or_as_json(cli, here, folder):
    (folder / "t.jsonl").write_text(TIMELINE)
    told, as_json, piped = (
        here("simulate", "t.jsonl"),
        here("simulate", "t.jsonl", "--json"),
        cli("simulate", "-", "--config", "config.toml", "--json", input=TIMELINE),
    )
    found = [json.loads(line) for line in fine(as_json).splitlines()]
    assert [(item["at"], item["what"]) for item in found] == [
        ("2026-03-09T09:00:00Z", "opened"), ("2026-03-09T09:05:00Z", "joined"),
        ("2026-03-09T09:10:00Z", "closed"), ("2026-03-09T09:10:00Z", "sent"),
    ]  # fmt: skip
    assert found[0]["closesAt"] == "2026-03-09T09:10:00Z" and found[3]["eventCount"] == 2
    lines = fine(told).splitlines()
    assert [line.split()[:2] for line in lines] == [[item["at"], item["what"]] for item in found]

    def without_ids(text: str) -> str:
        return re.sub(r"\b[a-z]+_[0-9a-f]{20,}", "ID", text)

    assert without_ids(fine(piped)) == without_ids(as_json.stdout)
    assert not list(folder.glob("*.sqlite3*"))


def test_simulate_stops_where_it_is_told_to(here, folder):
    (folder / "t.jsonl").write_text(TIMELINE)
    told = fine(here("simulate", "t.jsonl", "--until", "2026-03-09T09:07:00Z", "--json"))
    assert [json.loads(line)["what"] for line in told.splitlines()] == ["opened", "joined"]
    assert "soon" in failed(here("simulate", "t.jsonl", "--until", "soon"), 2)


def test_refused_lines_are_errors_in_the_output_and_the_others_go_on(here, folder):
    lines = [
        '{"at": "2026-03-09T09:00:00Z", "trigger": {"name": "nosuch", "to": "s1"}}',
        '{"at": "2026-03-09T09:00:01Z"}',
        '{"at": "2026-03-09T09:00:02Z", "dance": true}',
        '{"at": "noon", "cancel": "t1"}',
        '{"at": 5, "cancel": "t1"}',
        "nonsense",
        '{"at": "2026-03-09T09:00:03Z", "trigger": {"name": "comments", "to": "s1", "payload": {"a": NaN}}}',
        '{"at": "2026-03-09T09:00:03Z", "trigger": 5}',
        '{"at": "2026-03-09T09:00:04Z", "trigger": {"name": "comments", "to": "s", "payload": {"t": "a\u2028b\x85c"}}}',
    ]
    (folder / "t.jsonl").write_text("\n".join(lines), "utf-8")
    result = here("simulate", "t.jsonl", "--json")
    found = [json.loads(line) for line in fine(result).splitlines()]
    assert [item["what"] for item in found] == ["error"] * 8 + ["opened", "closed", "sent"]
    assert all(item["reason"] and item["at"].startswith("2026-03-09T09:00:0") for item in found[:8])


def test_a_timeline_that_cannot_be_read_is_told_in_words(here, folder):
    (folder / "latin.jsonl").write_bytes(b'{"at": "2026-03-09T09:00:00Z", "cancel": "caf\xe9"}\n')
    for name in ("none.jsonl", "latin.jsonl", "."):
        result = here("simulate", name)
        assert "Traceback" not in result.stderr, name
        assert result.returncode in (1, 2) and name in result.stderr and result.stdout == ""


def test_an_empty_timeline_is_nothing_at_all(here, folder):
    (folder / "t.jsonl").write_text("\n# nothing\n")
    assert fine(here("simulate", "t.jsonl")) == ""


# -- databases that cannot be used -------------------------------------------------------------------------------------


def test_a_database_that_is_not_there_is_told_and_not_made_by_looking(here, folder):
    for result in (here(*command) for command in (*LOOKING, *CHANGING[:2], ("sql", "SELECT 1"))):
        told = failed(result)
        assert "digestd.sqlite3 is not there" in told and "hint: " in told
    assert [path.name for path in folder.iterdir()] == ["config.toml"]


def test_a_folder_that_is_not_there_is_told_in_words(cli, here, folder):
    (folder / "config.toml").write_text(f'[daemon]\ndatabase = "no/such/folder/d.sqlite3"\n{BASIC}')
    commands = (*LOOKING, *CHANGING, ("migrate",), ("sql", "SELECT 1"))
    for result in [cli("run"), *(here(*command) for command in commands)]:
        assert "no/such/folder/d.sqlite3" in failed(result)


def test_a_file_that_is_no_database_is_told_and_left_alone(cli, here, folder):
    path = folder / "digestd.sqlite3"
    path.write_bytes(b"This is a letter to my aunt. " * 500)
    before = path.read_bytes()
    for result in [cli("run"), *(here(*command) for command in (*LOOKING, *CHANGING, ("migrate",)))]:
        told = failed(result)
        assert "not a database" in told and "hint: " in told
    result = cli("sql", "SELECT 1 FROM events")
    assert result.returncode == 1 and "not a database" in result.stderr and "Traceback" not in result.stderr
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_told_and_left_alone(here, folder):
    path = folder / "digestd.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE bookmarks (url TEXT); INSERT INTO bookmarks VALUES ('http://example.org');"
        )
    before = path.read_bytes()
    for result in (here(*command) for command in (*LOOKING, *CHANGING, ("migrate",))):
        assert "another program" in failed(result)
    assert path.read_bytes() == before


def test_a_database_of_a_newer_digestd_is_told_and_left_alone(here, folder):
    fine(here("migrate"))
    with contextlib.closing(sqlite3.connect(folder / "digestd.sqlite3")) as connection:
        connection.execute("PRAGMA user_version = 999")
    for result in (here(*command) for command in (*LOOKING, *CHANGING, ("migrate",))):
        assert "999" in failed(result)
    assert query(folder, "PRAGMA user_version") == [(999,)]


def test_a_folder_in_the_place_of_the_database_is_told_in_words(cli, here, folder):
    (folder / "digestd.sqlite3").mkdir()
    for result in (here(*command) for command in (*LOOKING, *CHANGING, ("migrate",))):
        failed(result)
    result = cli("sql", "SELECT 1 FROM events")
    assert result.returncode == 1 and "Traceback" not in result.stderr


def without_powers() -> None:
    """In the child: even root obeys the modes of files without CAP_DAC_OVERRIDE (1) and CAP_DAC_READ_SEARCH (2)."""
    library = ctypes.CDLL(None)
    for capability in (1, 2):
        library.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; without powers there is nothing to drop


@pytest.mark.parametrize("whole_folder", [False, True], ids=["the file", "the file and its folder"])
def test_a_read_only_database_is_told_and_nothing_is_written(here, world, folder, whole_folder):
    world().trigger("comments", payload={"postId": 1}, id="t1")
    digestd.close_store()
    fine(here("digests"))  # the files beside it are there, as after any use

    def powerless(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "digestd.py"), *command],
            cwd=folder, capture_output=True, text=True, timeout=60, preexec_fn=without_powers,
        )  # fmt: skip

    for path in folder.glob("digestd.sqlite3*"):
        path.chmod(0o444)
    if whole_folder:
        folder.chmod(0o555)
    try:
        results = [powerless(*command) for command in (CHANGING[0], CHANGING[2], LOOKING[0])]
    finally:
        folder.chmod(0o755)
    for result in results[:2]:
        assert "writable" in failed(result) or "readable" in result.stderr
    assert results[2].returncode in (0, 1) and "Traceback" not in results[2].stderr
    (folder / "digestd.sqlite3").chmod(0o644)
    assert query(folder, "SELECT state FROM events") == [("placed",)]


def test_a_database_that_another_program_locks_is_told_and_nothing_is_written(cli, world, folder):
    failed_work(world())
    before = query(folder, "SELECT count(*) FROM events")
    with contextlib.closing(sqlite3.connect(folder / "digestd.sqlite3", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        results = all_of(cli, [*CHANGING, ("jobs", "--json")])
        connection.execute("ROLLBACK")
    for result in results[: len(CHANGING)]:
        told = failed(result)
        assert "locked" in told and "hint: " in told
    assert "Traceback" not in results[-1].stderr and results[-1].returncode in (0, 1)
    assert query(folder, "SELECT count(*) FROM events") == before
    assert query(folder, "SELECT count(*) FROM jobs WHERE state = 'failed'") == [(1,)]
    assert json.loads(fine(cli("retry", "--all", "--json"))) == {"retried": 1}
