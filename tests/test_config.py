"""Reading the config: what is accepted, and every problem at once, with its file, line and key path."""

from __future__ import annotations

import base64
import datetime as dt
import json
import os
import pathlib
import re
import traceback
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

import digestd
from conftest import ROOT, START

HERE = pathlib.Path(__file__).parent
PAIRS = sorted((HERE / "configs").glob("*.toml"))
CASES = [json.loads(line) for line in (HERE / "data" / "config_cases.jsonl").read_text("utf-8").splitlines()]
EXAMPLE = (ROOT / "config.example.toml").read_text("utf-8")
CONTRACT = (HERE / "data" / "contract.toml").read_text("utf-8")
EXTRACT = (HERE / "data" / "extract.toml").read_text("utf-8")
LOG = '[senders.console]\ntype = "log"\n'
SECRET = "correcthorsebatterystaple"
WHSEC = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


def read(text: str, **options: Any) -> digestd.Config:
    return digestd.read_config(text, pathlib.Path("c.toml"), **options)


def refused(text: str) -> digestd.ConfigError:
    with pytest.raises(digestd.ConfigError) as caught:
        read(text)
    return caught.value


def places(text: str) -> list[tuple[int, str]]:
    """Line and key path of each problem, where the words do not matter."""
    return [(problem.line, problem.path) for problem in refused(text).problems]


def step(body: str) -> str:
    """A config of one in-between step, whose own lines begin in line 3."""
    return f'[[workflows.w.steps]]\nid = "one"\n{body}\n'


def case(kind: str) -> list[dict[str, Any]]:
    found = [row["input"] for row in CASES if row["kind"] == kind]
    assert found, kind
    return found


# -- one pair of files for each problem --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_a_broken_config_is_told_line_by_line(path, monkeypatch):
    # An expected line that ends with … gives only the beginning: the rest is a library's words, or a list that grows.
    for name in ("DIGESTD_TEST_UNSET", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(digestd.ConfigError) as caught:
        digestd.read_config(path.read_text("utf-8"), pathlib.Path(path.name))
    found = str(caught.value).splitlines()
    wanted = path.with_suffix(".txt").read_text("utf-8").splitlines()
    for number, line in enumerate(wanted):
        if line.endswith("…") and number < len(found) and found[number].startswith(line[:-1]):
            wanted[number] = found[number]
    assert found == wanted


def test_every_pair_of_files_is_whole():
    texts = sorted((HERE / "configs").glob("*.txt"))
    assert len(PAIRS) > 100 and [path.stem for path in PAIRS] == [path.stem for path in texts]


def test_every_problem_carries_its_file_line_path_and_words():
    [problem] = refused("[daemon]\nconcurrency = 0\n").problems
    assert problem == ("c.toml", 2, "daemon.concurrency", "0 is out of range; it must be at least 1")


def test_each_problem_comes_once():
    text = step('type = "digest"\nevery = "month"\nat = "09:00"\non = [true, 1.5]') + step(
        'type = "digest"\nkey = 5\nwindow = "1m"'
    )
    assert places(text.replace('"one"', '"two"', 1)) == [
        (6, "workflows.w.steps.0.on.0"), (6, "workflows.w.steps.0.on.1"), (10, "workflows.w.steps.1.key"),
    ]  # fmt: skip


def test_a_key_that_is_given_in_both_spellings_is_not_sent_to_itself():
    error = refused(f'{LOG}[repeatables.bird]\npattern = "@daily"\ncron = "@hourly"\nsender = "console"\n')
    assert "did you mean 'pattern'" not in str(error)
    assert "repeatables.bird" in str(error)


def test_values_are_shown_as_the_file_spells_them():
    text = step('type = "digest"\nevery = "day"\nat = 07:00:00') + "[daemon]\nconcurrency = true\n"
    shown = str(refused(text))
    assert "true" in shown and "True" not in shown
    assert "07:00:00" in shown and "datetime" not in shown


def test_a_name_with_a_line_end_in_it_forges_no_second_problem(monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    for kind in ("env", "file", "credential"):
        error = refused(f'[api]\nkeys = [{{ {kind} = "A\\nc.toml:9: daemon: all is well" }}]\n')
        assert len(str(error).splitlines()) == len(error.problems) == 1


def test_a_huge_value_does_not_flood_the_terminal():
    numbers = ", ".join(["123456789"] * 5000)
    assert len(str(refused(f"[daemon]\ntimezone = [{numbers}]\n"))) < 1000


# -- files that are none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", " \t\r\n"])
def test_an_empty_file_is_refused(text):
    [problem] = refused(text).problems
    assert problem.line == 0 and "is empty" in problem.text


def test_a_byte_order_mark_is_taken_and_counts_as_nothing(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf[daemon]\nconcurrency = 4\n")
    assert digestd.load_config(path).daemon.concurrency == 4
    path.write_bytes(b"\xef\xbb\xbfdaemon.concurrency = 0\n")
    with pytest.raises(digestd.ConfigError, match=r"c\.toml:1: daemon\.concurrency: 0 is out of range"):
        digestd.load_config(path)


def test_windows_line_ends_change_neither_meaning_nor_line_numbers(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(EXAMPLE.replace("\n", "\r\n").encode())
    assert digestd.load_config(path).workflows.keys() == {"demo"}
    for name in ("several-at-once", "lines-multi-line-texts", "lines-arrays-of-tables", "syntax-duplicate-table"):
        text = (HERE / "configs" / f"{name}.toml").read_text("utf-8")
        path.write_bytes(text.replace("\n", "\r\n").encode())
        with pytest.raises(digestd.ConfigError) as caught:
            digestd.load_config(path)
        assert [(problem.line, problem.path) for problem in caught.value.problems] == places(text)


@pytest.mark.parametrize(
    "mark", ["\u2028", "\u2029", "\x85"], ids=["line separator", "paragraph separator", "next line"]
)
def test_what_only_looks_like_a_line_end_does_not_count_as_one(mark):
    assert places(f"[daemon]\n# one{mark}two{mark}three\nconcurrncy = 1\n") == [(3, "daemon.concurrncy")]


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes('[daemon]\n# ok\ndatabase = "café"\n'.encode("latin-1"))
    with pytest.raises(digestd.ConfigError) as caught:
        digestd.load_config(path)
    assert str(caught.value) == f"{path}:3: is not UTF-8 from here on"
    path.write_bytes(EXAMPLE.encode("utf-16"))
    with pytest.raises(digestd.ConfigError, match=r"c\.toml:1: is not UTF-8"):
        digestd.load_config(path)


def test_a_path_that_cannot_be_read_is_told_in_words(tmp_path):
    for path, words in ((tmp_path / "none.toml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(digestd.ConfigError) as caught:
            digestd.load_config(path)
        assert str(caught.value) == f"{path}: cannot be read: {words}"


def test_binary_rubbish_and_endless_nesting_are_single_problems():
    for text in ("\0\0\0", "a = " + "[" * 5000, "a = " + "{a = " * 5000, "[" + ".".join("a" * 5000) + "]\nb = 1\n"):
        assert len(refused(text).problems) >= 1


# -- what is accepted --------------------------------------------------------------------------------------------------


def test_the_example_is_accepted_without_a_warning():
    config = digestd.load_config(ROOT / "config.example.toml")
    assert config.warnings == () and config.workflows and config.repeatables


def test_the_contract_file_is_accepted():
    config = read(CONTRACT)
    assert config.senders["hook"].retry == [1000, 1000, 2000]
    assert config.repeatables["bird"].limit == 3
    assert [step.id for step in config.workflows["comments"].steps] == ["digest", "hook", "mail"]


def test_the_extract_of_the_contract_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "team-hook").write_text(WHSEC + "\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("DIGESTD_API_KEY", SECRET)
    config = read(EXTRACT)
    assert [key.get_secret_value() for key in config.senders["team"].secret] == [WHSEC]
    assert [key.get_secret_value() for key in config.api.keys] == [SECRET]
    assert config.workflows["comments"].steps[0].extend_to_schedule is True
    assert config.repeatables["bird"].data == {"color": "bird"}


def test_the_defaults_are_those_of_the_contract():
    daemon, api = read("[daemon]\n").daemon, read("[daemon]\n").api
    assert (daemon.database, daemon.timezone, daemon.concurrency, daemon.durability) == (
        "digestd.sqlite3",
        "UTC",
        16,
        "full",
    )
    assert (daemon.retention, daemon.max_window) == (30 * digestd.DAY, 365 * digestd.DAY)
    assert daemon.drain_timeout == 20 * digestd.SECOND and api.listen == ["127.0.0.1:3210"]
    hook = read('[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\n').senders["hook"]
    assert (hook.timeout, hook.jitter) == (15 * digestd.SECOND, 0.2)
    assert hook.retry == [digestd.parse_duration(text) for text in ("5s", "5m", "30m", "2h", "5h", "10h", "10h")]


def test_the_database_lies_beside_the_config_or_in_the_state_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    config = digestd.read_config('[daemon]\ndatabase = "d.db"\n', tmp_path / "c.toml")
    assert config.database == tmp_path / "d.db"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/digestd:/var/lib/other")
    assert config.database == pathlib.Path("/var/lib/digestd/d.db")
    assert read('[daemon]\ndatabase = "/srv/d.db"\n').database == pathlib.Path("/srv/d.db")


def test_a_database_path_that_no_system_can_open_is_refused():
    assert places('[daemon]\ndatabase = "a\\u0000b"\n') == [(2, "daemon.database")]


def test_pattern_is_another_name_for_cron():
    config = read(f'{LOG}[repeatables.bird]\npattern = "*/5 * * * *"\nsender = "console"\n')
    assert digestd.spec_of(config, "bird", config.repeatables["bird"]).cron == "*/5 * * * *"


def test_a_local_mail_server_needs_no_tls_for_a_password():
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        text = f'[senders.m]\ntype = "smtp"\nhost = "{host}"\ntls = "none"\nfrom = "a@example.org"\n'
        assert read(text + 'username = "u"\npassword = "p"\n').warnings == ()


def test_a_host_that_only_begins_like_loopback_gets_no_password_in_the_clear():
    text = '[senders.m]\ntype = "smtp"\nhost = "127.example.org"\ntls = "none"\nfrom = "a@example.org"\n'
    assert places(text + 'username = "u"\npassword = "p"\n') == [(4, "senders.m.tls")]


# -- numbers, dates and other TOML that does not fit -------------------------------------------------------------------


def test_toml_oddities_are_read_or_refused_with_the_key():
    assert [row["files"] for row in case("config-toml")] == [
        ["BOM + a=1", "a=1\\r\\n", "[x] twice", "n=9223372036854775808", "at=07:00:00", "at=2025-01-01T07:00:00"]
    ]
    assert places("a=1\r\n") == [(1, "a")]
    assert "twice" in str(refused("[daemon]\n[daemon]\n"))
    assert places("[daemon]\nconcurrency=9223372036854775808\n") == [(2, "daemon.concurrency")]
    for value in ("07:00:00", "2025-01-01T07:00:00", "2025-01-01", "2025-01-01T07:00:00Z"):
        assert places(step(f'type = "digest"\nevery = "day"\nat = {value}')) == [(5, "workflows.w.steps.0.at")]
        assert places(f"[daemon]\nretention = {value}\n") == [(2, "daemon.retention")]
        assert places(f"[daemon]\ntimezone = {value}\n") == [(2, "daemon.timezone")]


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000], ids=["decimal", "hexadecimal"])
def test_a_number_of_thousands_of_digits_is_refused(digits):
    assert [problem.line for problem in refused(f"[daemon]\nconcurrency = {digits}\n").problems] in ([2], [0])


@pytest.mark.parametrize("setting", ["limit = 9223372036854775808", "limit = 1\nevery = 9223372036854775808"])
def test_a_number_that_no_database_holds_is_refused(setting):
    every = "" if "every" in setting else 'every = "1s"\n'
    name = setting.split()[0] if every else "every"
    text = f'{LOG}[repeatables.bird]\nsender = "console"\n{every}{setting}\n'
    assert [path for _, path in places(text)] == [f"repeatables.bird.{name}"]


@pytest.mark.parametrize("value", ["2025-01-01T07:00:00", "2025-01-01", "07:00:00", "nan", "inf"])
@pytest.mark.parametrize("where", ["data", "payload"])
def test_data_that_json_cannot_hold_is_refused_with_its_key_or_made_to_fit(value, where):
    feed = '[[workflows.w.steps]]\nid = "feed"\ntype = "in_app"\n'
    action = (
        'sender = "console"\ndata' if where == "data" else 'trigger.workflow = "w"\ntrigger.to = "you"\ntrigger.payload'
    )
    try:
        bird = read(f'{LOG}{feed}[repeatables.bird]\nevery = "1s"\n{action} = {{ a = [{value}] }}\n').repeatables[
            "bird"
        ]
    except digestd.ConfigError as error:
        assert all(problem.path.startswith("repeatables.bird.") for problem in error.problems)
    else:
        json.dumps(bird.data if where == "data" else bird.trigger.payload, allow_nan=False)


@pytest.mark.parametrize("to", ["5", "[]", '""', "{}", '[""]', '{ subscriberId = "" }', "true"])
def test_a_trigger_for_nobody_is_refused_when_the_file_is_read(to):
    feed = '[[workflows.w.steps]]\nid = "feed"\ntype = "in_app"\n'
    text = f'{feed}[repeatables.bird]\nevery = "1s"\ntrigger = {{ workflow = "w", to = {to} }}\n'
    assert all(path.startswith("repeatables.bird.trigger") for _, path in places(text))


@pytest.mark.parametrize("value", ['["UTC"]', "{ a = 1 }", "[[]]", "1.5", "true", "[1979-05-27]"])
def test_a_value_of_the_wrong_type_is_one_problem_wherever_it_stands(value):
    for text, place in (
        (f"[daemon]\ntimezone = {value}\n", (2, "daemon.timezone")),
        (f"[daemon]\nretention = {value}\n", (2, "daemon.retention")),
        (f"[daemon]\ndurability = {value}\n", (2, "daemon.durability")),
        (f"[daemon]\ndatabase = {value}\n", (2, "daemon.database")),
        (f'[senders.a]\ntype = "webhook"\nurl = {value}\n', (3, "senders.a.url")),
        (f'[senders.a]\ntype = "smtp"\nfrom = {value}\n', (3, "senders.a.from")),
        (step(f'type = "digest"\ncron = {value}'), (4, "workflows.w.steps.0.cron")),
        (step(f'type = "digest"\nevery = "day"\nat = {value}'), (5, "workflows.w.steps.0.at")),
        (step(f'type = "delay"\ndelay = {value}'), (4, "workflows.w.steps.0.delay")),
        (step(f'type = "in_app"\ntext = {value}'), (4, "workflows.w.steps.0.text")),
    ):
        assert places(text) == [place]


@pytest.mark.parametrize("value", ["5", "[]", "true", '["log"]', "{}", "2025-01-01"])
def test_a_type_that_is_no_text_is_refused(value):
    assert [line for line, _ in places(f"[senders.a]\ntype = {value}\n")] == [2]
    assert [line for line, _ in places(step(f"type = {value}"))] == [3]


# -- rows from the field -----------------------------------------------------------------------------------------------


def test_each_semantic_error_of_the_field_is_refused_with_its_key():
    edits = next(row["edits"] for row in case("config-bad") if "edits" in row)
    frames = [
        (LOG + '[repeatables.a]\nsender = "console"\n', "repeatables.a.cron"),
        ("[daemon]\n", "daemon.timezone"),
        (LOG + '[repeatables.a]\nevery = "1s"\nsender = "console"\n', "repeatables.a.evrey"),
        ('[senders.a]\ntype = "smtp"\nfrom = "a@example.org"\n', "senders.a.port"),
    ]
    for (frame, path), edit in zip(frames, edits, strict=True):
        edit = edit.replace("tz =", "timezone =")  # our word for it
        assert places(f"{frame}{edit}\n") == [(frame.count("\n") + 1, path)]


def test_a_syntax_error_hides_the_other_problems():
    text = '[senders.mail]\ntype = "smtp"\nhost = "mx.example.org"\n\n\n\n\n\nport = = 25\nprot = 1\n'
    assert str(refused(text)) == "c.toml:9: Invalid value at column 8; a text needs quotes around it"


@pytest.mark.parametrize(
    "amount", [0, -5, 1.5, "5", True, float("nan"), "0m", "-5m", "1.5m", "5 m", "m", "", "5M", "١m", "5m5m"]
)
def test_an_amount_that_is_no_duration_is_refused(amount):
    wild = [row["amount"] for inputs in case("bad-duration") for row in inputs["digest"]]
    assert wild[:5] == [0, -5, 1.5, "5", True]
    text = step(f'type = "digest"\nwindow = {toml_of(amount)}')
    assert places(text) == [(4, "workflows.w.steps.0.window")]


def test_weeks_and_months_are_multiplied_and_fortnights_are_unknown():
    assert [row["unit"] for row in case("bad-duration")[1]["digest"]] == ["weeks", "months", "fortnights"]
    for text, seconds in (("1w", 604_800), ("1mo", 2_592_000)):
        [digest] = read(step(f'type = "digest"\nwindow = "{text}"')).workflows["w"].steps
        assert digest.window == seconds * digestd.SECOND
    assert places(step('type = "digest"\nwindow = "1fortnight"')) == [(4, "workflows.w.steps.0.window")]


def test_sixty_days_are_a_window_and_a_million_years_are_refused_with_the_maximum():
    near, far = case("far-future")
    assert near == {"digest": "regular 60 days", "event": "2025-01-01T00:00:00Z"}
    [digest] = read(step('type = "digest"\nwindow = "60d"')).workflows["w"].steps
    closes_at = digest.closes_at(digestd.parse_instant(near["event"]), "UTC")
    assert digestd.iso_text(closes_at) == "2025-03-02T00:00:00Z"
    units = {"months": "mo", "seconds": "s", "days": "d"}
    for row in far["digest"]:
        text = f"{int(row['amount'])}{units[row['unit']]}"
        for setting in ('type = "digest"\nwindow', 'type = "delay"\ndelay'):
            error = refused(step(f'{setting} = "{text}"'))
            assert [problem.line for problem in error.problems] == [4]
            assert "10,000 years" in str(error) or "max_window" in str(error)


ZONES = [zone for row in case("zone-invalid") for zone in row["zones"] if " " not in zone.strip()] + [
    "../../etc/localtime", "/usr/share/zoneinfo/UTC", "Europe/Berlin\0", "Europe/../UTC", "posixrules", "localtime",
    "right/UTC", "Europe/Berlin/", "tzdata.zi", " UTC",
]  # fmt: skip


@pytest.mark.parametrize("zone", ZONES, ids=lambda zone: zone[:20] or "empty")
def test_a_name_that_is_no_zone_is_refused_with_the_name(zone):
    error = refused(f"[daemon]\ntimezone = {toml_of(zone)}\n")
    assert [(problem.line, problem.path) for problem in error.problems] == [(2, "daemon.timezone")]
    assert repr(zone)[1:20] in str(error)


@pytest.mark.parametrize("zone", case("zone-alias")[0]["zones"])
def test_an_old_name_of_a_zone_is_accepted(zone):
    assert read(f'[daemon]\ntimezone = "{zone}"\n').daemon.timezone == zone


def test_cron_texts_of_the_field_mean_what_they_say():
    second, quartz, star = case("cron-fields")
    [digest] = read(step(f'type = "digest"\ncron = "{second["cron"]}"')).workflows["w"].steps
    first = digestd.parse_instant("2025-01-01T03:15:00Z")
    at, found = digestd.parse_instant(second["now"]), []
    for _ in range(61):
        at = digest.closes_at(at, second["tz"])
        found.append(at)
    assert found == [first + n * digestd.SECOND for n in range(60)] + [first + digestd.DAY]
    assert "7 fields" in str(refused(step(f'type = "digest"\ncron = "{quartz["cron"]}"')))
    [digest] = read(step(f'type = "digest"\ncron = "{star["cron"]}"')).workflows["w"].steps
    assert digestd.iso_text(digest.closes_at(digestd.parse_instant(star["now"]), star["tz"])) == "2019-02-11T15:34:00Z"


def test_a_cron_that_never_fires_is_refused_and_its_valid_neighbour_is_not():
    [row] = case("cron-never")
    assert "never happens" in str(refused(step(f'type = "digest"\ncron = "{row["never"]}"')))
    [digest] = read(step(f'type = "digest"\ncron = "{row["valid"]}"')).workflows["w"].steps
    closes_at = digest.closes_at(digestd.parse_instant("2026-01-31T00:00:00Z"), "UTC")
    assert digestd.iso_text(closes_at) == "2026-02-01T00:00:00Z"


def url_config(url: str) -> str:
    return f'[senders.a]\ntype = "webhook"\nurl = {toml_of(url)}\n'


def test_urls_of_the_field_are_taken_or_refused_with_the_key():
    file, login, blank, header = case("hook-url")[0]["urls"]
    bracketed, bare, scoped = case("hook-ipv6")[0]["urls"]
    for url in (login, bracketed):
        assert read(url_config(url)).senders["a"].url == url
    for url in (file, blank, header.replace("\\r\\n", "\r\n"), bare):
        assert places(url_config(url)) == [(3, "senders.a.url")]
    try:
        read(url_config(scoped))
    except digestd.ConfigError as error:
        assert [problem.path for problem in error.problems] == ["senders.a.url"]


@pytest.mark.parametrize(
    "url", ["", "http://", "http://:80/", "http://[::1/h", "http://h:99999/", "http://h:x/", "http:/h", "//h/", "h/",
            "javascript:1", "http://h/\x7f", "http://h\t/", "ftp://h/", "http://h/\n"],
)  # fmt: skip
def test_a_text_that_is_no_url_is_refused(url):
    assert places(url_config(url)) == [(3, "senders.a.url")]


# -- who may come in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listen",
    ["127.0.0.1:3210", "127.8.9.10:1", "[::1]:3210", "localhost:3210", "unix:/run/digestd/digestd.sock", "systemd"],
)
def test_a_private_address_needs_no_key(listen):
    assert read(f'[api]\nlisten = ["{listen}"]\n').api.listen == [listen]


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:3210",
        "[::]:3210",
        "192.168.1.5:80",
        "example.org:80",
        "127.example.org:3210",
        "localhost.example.org:1",
    ],
)
def test_a_public_address_needs_a_key(listen):
    assert places(f'[api]\nlisten = ["{listen}"]\nkeys = []\n') == [(2, "api.listen.0")]
    assert read(f'[api]\nlisten = ["{listen}"]\nkeys = ["{SECRET}"]\n').api.listen == [listen]


@pytest.mark.parametrize(
    "listen", ["", ":80", "3210", "unix:", "127.0.0.1", "127.0.0.1:65536", "::1:80", "http://x:80", "a b:80"]
)
def test_a_text_that_is_no_address_is_refused(listen):
    assert places(f'[api]\nlisten = ["127.0.0.1:1", "{listen}"]\n') == [(2, "api.listen.1")]


@pytest.mark.parametrize(
    "key", ['""', '{ env = "DIGESTD_TEST_EMPTY" }', '{ file = "empty" }', '{ credential = "empty" }']
)
def test_an_empty_key_opens_nothing(key, tmp_path, monkeypatch):
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("DIGESTD_TEST_EMPTY", "")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(digestd.ConfigError) as caught:
        digestd.read_config(f"[api]\nkeys = [{key}]\n", tmp_path / "c.toml")
    assert [problem.path for problem in caught.value.problems] == ["api.keys.0"]


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_secrets_come_from_the_environment_a_file_or_a_credential(tmp_path, monkeypatch):
    (tmp_path / "key.txt").write_text("from-a-file\n")
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "hook").write_text(WHSEC + "\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    monkeypatch.setenv("DIGESTD_TEST_KEY", "from-the-environment")
    text = '[api]\nkeys = [{ env = "DIGESTD_TEST_KEY" }, { file = "key.txt" }, "plain"]\n'
    text += '[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\nsecret = { credential = "hook" }\n'
    config = digestd.read_config(text, tmp_path / "c.toml")
    assert [key.get_secret_value() for key in config.api.keys] == ["from-the-environment", "from-a-file", "plain"]
    assert [key.get_secret_value() for key in config.senders["hook"].secret] == [WHSEC]
    assert set(config.files) == {tmp_path / "c.toml", tmp_path / "key.txt", tmp_path / "credentials" / "hook"}
    for shown in (repr(config), str(config), f"{config.api!r} {config.senders['hook']!r}"):
        assert not any(secret in shown for secret in ("from-the-environment", "from-a-file", "plain", WHSEC))


def test_without_secrets_a_config_is_read_where_none_are_set(monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert read(EXTRACT, secrets=False).senders["team"].url == "https://hooks.example.org/x"


def test_a_login_inside_a_url_is_never_shown():
    config = read(url_config(f"http://user:{SECRET}@example.test/h"))
    assert SECRET not in repr(config) and SECRET not in str(config)


@pytest.mark.parametrize(
    "text",
    [
        f'[api]\nkeys = "{SECRET}"\n',
        f'[api]\nkeys = [["{SECRET}"], {{ value = "{SECRET}" }}]\n',
        f'api = ["{SECRET}"]\n',
        f'[[api]]\nkeys = ["{SECRET}"]\n',
        f'[[senders]]\ntype = "smtp"\npassword = "{SECRET}"\n',
        f'[[senders.mail]]\ntype = "smtp"\npassword = "{SECRET}"\n',
        f'[senders.mail]\ntype = "smtp"\nfrom = "a@example.org"\npassword = "{SECRET}"\n',
        f'[senders.mail]\ntype = "smtp"\nfrom = "a@example.org"\nusername = "u"\npassword = ["{SECRET}"]\n',
        f'[senders.mail]\ntype = "smpt"\npassword = "{SECRET}"\n',
        f'[senders.mail]\ntype = "smtp"\nhost = "mx.example.org"\ntls = "none"\nfrom = "a@example.org"\n'
        f'username = "u"\npassword = "{SECRET}"\n',
        f'[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\nsecret = "{SECRET}"\n',
        f'[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\nsecret = {{ plain = "{SECRET}" }}\n',
        f'[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\nsecret = "whsec_{SECRET}"\n',
        f'[senders.hook]\ntype = "webhook"\nurl = "http://user:{SECRET}@exa mple.test/"\n',
        f'[senders.hook]\ntype = "webhook"\nurl = "ftp://user:{SECRET}@example.test/"\n',
        f'[senders.hook]\ntype = "webhook"\nurl = "http://user:{SECRET}@[::1/"\n',
        f'[senders.hook]\ntype = "webhook"\nurl = ["http://user:{SECRET}@example.test/"]\n',
        f'[api]\nkeys = ["{SECRET}\n',
        f"[api]\nkeys = [{SECRET}]\n",
        f'[api]\nkeys = ["a", {{ env = "{SECRET}" ]\n',
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated_in_the_error(text):
    error = refused(text)
    assert SECRET not in str(error) and SECRET not in repr(error.problems)
    assert SECRET not in "".join(traceback.format_exception(error))


def test_warnings_tell_of_secrets_that_others_can_read(tmp_path):
    path, key = tmp_path / "c.toml", tmp_path / "key.txt"
    key.write_text(SECRET)
    for text, mode, key_mode, told in (
        ('[api]\nkeys = ["plain"]\n', 0o600, 0o600, []),
        ('[api]\nkeys = ["plain"]\n', 0o644, 0o600, [path]),
        ('[api]\nkeys = [{ file = "key.txt" }]\n', 0o644, 0o600, []),
        ('[api]\nkeys = [{ file = "key.txt" }]\n', 0o644, 0o644, [key]),
    ):
        path.write_text(text)
        path.chmod(mode)
        key.chmod(key_mode)
        warnings = digestd.load_config(path).warnings
        assert [warning.file for warning in warnings] == [str(file) for file in told]
        assert SECRET not in str(warnings) and 'plain"' not in str(warnings)


def test_a_public_url_without_tls_is_a_warning():
    for scheme, count in (("http", 1), ("https", 0)):
        found = read(f'[api]\npublic_url = "{scheme}://d.example.org/"\n').warnings
        assert [warning.path for warning in found] == ["api.public_url"] * count
    for wrong in ("d.example.org", "ftp://x", "https://x/?a=b", "https://u:p@x/", "https://x/#a", 5):
        assert places(f"[api]\npublic_url = {json.dumps(wrong)}\n") == [(2, "api.public_url")]


def test_mail_in_the_clear_to_another_host_is_a_warning_with_its_line():
    text = '[senders.m]\ntype = "smtp"\nhost = "mx.example.org"\ntls = "none"\nfrom = "a@example.org"\n'
    [warning] = read(text).warnings
    assert (warning.line, warning.path) == (4, "senders.m.tls")


def test_a_month_without_the_named_day_is_a_warning_that_names_last():
    [warning] = read(step('type = "digest"\nevery = "month"\nat = "09:00"\non = [31]')).warnings
    assert '"last"' in warning.text and (warning.line, warning.path) == (6, "workflows.w.steps.0.on.0")
    assert read(step('type = "digest"\nevery = "month"\nat = "09:00"\non = [28, "last"]')).warnings == ()


def test_a_scheduled_gap_over_the_limit_is_a_warning_and_no_error():
    [warning] = read('[daemon]\nmax_window = "7d"\n' + step('type = "digest"\nevery = "month"\nat = "09:00"')).warnings
    assert "max_window" in warning.text and warning.path.startswith("workflows.w.steps.0")


# -- whatever comes ----------------------------------------------------------------------------------------------------


def toml_of(value: Any) -> str:
    """A value as one line of TOML; tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_of(str(key))} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    return str(value)


def file_of(tables: dict[str, Any]) -> str:
    return "".join(f"{toml_of(str(name))} = {toml_of(value)}\n" for name, value in tables.items())


def check_answer(text: str) -> None:
    """A Config, or a ConfigError whose problems are sorted, each once and each on one line; nothing else."""
    try:
        assert isinstance(read(text), digestd.Config)
    except digestd.ConfigError as error:
        problems = error.problems
        assert problems and len(set(problems)) == len(problems)
        assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)
        assert len(str(error).split("\n")) == len(problems)
        last = text.count("\n") + 1
        assert all(0 <= problem.line <= last and problem.text and problem.file == "c.toml" for problem in problems)


KNOWN = sorted(set(re.findall(r"[\w.]+", EXAMPLE + CONTRACT + EXTRACT))) + [
    "delay", "in_app", "digest", "email", "html", "cron", "pattern", "every", "at", "on", "month", "last monday",
    "0 0 31 2 *", "{{", "{% if %}", "{% for a in b %}", "payload.a", "whsec_", "systemd", "A\nB", "", "a\0b", "9999w",
    "10000000mo", "__class__",
]  # fmt: skip
TEXTS = st.sampled_from(KNOWN) | st.text(max_size=8)
SCALARS = (
    st.booleans() | st.integers() | st.sampled_from([2**63, -(2**63), 2**1000, 0]) | st.floats() | TEXTS | st.dates()
    | st.times() | st.datetimes()
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
FULL = {**tomli.loads(EXTRACT), **tomli.loads(CONTRACT)}
FULL["workflows"]["demo"] = tomli.loads(EXAMPLE)["workflows"]["demo"]
FULL["repeatables"]["demo"] = tomli.loads(EXAMPLE)["repeatables"]["demo"]
FULL["senders"]["console"] = {"type": "log"}


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_of(item, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    if isinstance(value, dict):
        return {key: changed(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    return [changed(item, path[1:], new) if place == path[0] else item for place, item in enumerate(value)]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.text() | st.text(st.sampled_from("[]{}=\"'\n\r.,#\\ab1 \u2028\0")))
def test_any_text_is_a_config_or_a_config_error(text):
    check_answer(text)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.data())
def test_the_example_with_any_characters_changed_is_a_config_or_a_config_error(data):
    text = data.draw(st.sampled_from([EXAMPLE, CONTRACT]))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        text = (
            text[:start]
            + data.draw(TEXTS | st.text(st.sampled_from('[]{}="\n.,#\\'), max_size=4))
            + text[start + length :]
        )
    check_answer(text)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(st.data())
def test_a_full_config_with_any_value_in_any_place_is_a_config_or_a_config_error(data):
    tables: Any = FULL
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places_of(tables)[1:]))
        if data.draw(st.booleans()):
            tables = changed(tables, path, data.draw(VALUES))
        else:  # one more key beside it
            parent: Any = tables
            for part in path[:-1]:
                parent = parent[part]
            if isinstance(parent, dict):
                tables = changed(tables, path[:-1], {**parent, data.draw(TEXTS): data.draw(VALUES)})
    check_answer(file_of(tables))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(
        st.sampled_from(
            [
                "{{",
                "}}",
                "{%",
                "%}",
                " if ",
                " for ",
                " in ",
                "endif",
                "a",
                ".",
                "[",
                "|",
                "'",
                "1",
                " assign ",
                "=",
                ":",
                "{% raw %}",
                "{#",
                "case",
                " when ",
                "..",
                "(",
                ")",
                "-",
                "include",
                "render",
                "9" * 30,
            ]
        ),
        max_size=14,
    ).map("".join)
)
def test_any_template_is_compiled_or_refused(text):
    for kind in digestd.ESCAPES:
        try:
            digestd.compile_template(text, kind)
        except digestd.RuleError as error:
            assert "template cannot be read" in error.message


ANYTHING = st.text(max_size=20) | VALUES | st.none() | st.binary(max_size=5)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    ANYTHING
    | st.text(st.sampled_from("0123456789mowdhs -+.eE"), max_size=12)
    | st.from_regex(r"\A(\d{1,40}(mo|w|d|h|m|s|ms)){1,4}\Z")
)
def test_parse_duration_gives_a_span_or_refuses(text):
    try:
        span = digestd.parse_duration(text)
    except digestd.RuleError:
        return
    assert isinstance(span, int) and 0 < span <= 10_000 * 365 * digestd.DAY


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(1, 10_000 * 365 * digestd.DAY))
def test_a_span_written_out_reads_as_itself(span):
    assert digestd.parse_duration(digestd.duration_text(span)) == span


CRON_ITEMS = st.sampled_from([
    "*", "?", "H", "L", "5L", "1#2", "H#3", "*/5", "1-5", "5-1", "0", "7", "61", "*/0", "JAN", "mon", "H(9-1)",
    "1,2,", "-", "/", "#", "1/", "9" * 5000, "*/" + "9" * 5000, "١", "1.5", "LW", "15W",
])  # fmt: skip


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.text(max_size=20)
    | st.text(st.sampled_from("0123456789*/,-#?LHW@ adijmnwy()"), max_size=25)
    | st.lists(CRON_ITEMS | st.integers(0, 59).map(str), min_size=4, max_size=7).map(" ".join)
)
def test_parse_cron_gives_a_rule_or_refuses(text):
    try:
        rule = digestd.parse_cron(text)
    except digestd.RuleError as error:
        assert error.message
        return
    at = rule.next_after(START)
    assert at is None or at > START


@pytest.mark.parametrize(
    "minute", ["9" * 5000, "*/" + "9" * 5000, f"H(1-{'9' * 5000})"], ids=["value", "step", "range"]
)
def test_a_cron_number_of_thousands_of_digits_is_refused(minute):
    with pytest.raises(digestd.RuleError):
        digestd.parse_cron(f"{minute} * * * *")


@settings(deadline=None, max_examples=200, derandomize=True)
@given(ANYTHING | st.text(st.sampled_from("0123456789.:[]unixsytemdlocahf/ "), max_size=20))
def test_parse_listen_gives_an_address_or_refuses(text):
    try:
        listen = digestd.parse_listen(text)
    except digestd.RuleError:
        return
    assert listen.kind in ("tcp", "unix", "systemd") and 0 <= listen.port < 65536
    assert bool(listen.host) == (listen.kind != "systemd")


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.text() | st.binary() | JSONS.map(json.dumps) | st.text(st.sampled_from('[]{}",:1eE+-.\\ud8tfnNaI')))
def test_parse_json_gives_a_value_or_refuses_with_400(data):
    try:
        value = digestd.parse_json(data)
    except digestd.Rejected as error:
        assert error.status == 400 and error.message
        return
    assert value is None or isinstance(value, (bool, int, float, str, list, dict))


@pytest.mark.parametrize(
    "data",
    [
        "[" * 100_000,
        '{"a":' * 5000 + "1" + "}" * 5000,
        "9" * 5000,
        "[NaN]",
        "-Infinity",
        b"\xff",
        b"\xfe\xff[",
        "",
        "{'a': 1}",
    ],
)
def test_json_that_breaks_parsers_is_refused_in_words(data):
    with pytest.raises(digestd.Rejected) as caught:
        digestd.parse_json(data)
    assert caught.value.status == 400 and len(caught.value.message) < 300


def test_the_hash_over_the_files_sees_changes_and_what_is_away(tmp_path):
    path = tmp_path / "c.toml"
    hashes = [digestd.files_digest([path])]
    for text in ("a", "b", "a"):
        path.write_text(text)
        hashes.append(digestd.files_digest([path]))
    os.remove(path)
    hashes.append(digestd.files_digest([path]))
    assert hashes[0] == hashes[4] and hashes[1] == hashes[3] and len(set(hashes)) == 3


# -- what people fall into with repeatables ----------------------------------------------------------------------------


def warnings_of(tmp_path, settings: str, more: str = "") -> list[str]:
    text = f'{more}[senders.out]\ntype = "log"\nmax_per_minute = 10\n[repeatables.x]\nsender = "out"\n{settings}\n'
    return [str(warning) for warning in digestd.read_config(text, tmp_path / "config.toml").warnings]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('cron = "* 15 3 * * *"', "write 0 15 3 * * *"),
        ('pattern = "* 15 3 * * *"', "60 times"),
        ('cron = "*/47 * * * * *"', "*/47 in the second is not every 47"),
        ('cron = "*/7 * * * *"', "begins anew with each hour"),
        ('cron = "0 */5 * * *"', "begins anew with each day"),
        ('cron = "0 9 */2 * *"', "begins anew with each month"),
        ('cron = "0 9 13 * 5"', "either of them"),
        ('cron = "0 9 31 * *"', "without a day 31"),
        ('cron = "0 9 1,30 * *"', "without a day 30"),
        ('cron = "30 2 * * *"\ntimezone = "America/New_York"', "02:30 does not exist on 2024-03-10"),
        ('cron = "0 2 * * *"\ntimezone = "Europe/Berlin"', "it runs at 03:00"),
        ('cron = "15 2 * * *"\ntimezone = "Australia/Lord_Howe"', "it runs at 02:45"),
        ('every = "5s"', "more than the 10 a minute"),
    ],
)
def test_what_is_perhaps_not_meant_is_told_with_its_place(tmp_path, settings, words):
    [warning] = warnings_of(tmp_path, settings)
    assert words in warning and re.search(r"config.toml:6: repeatables.x.(cron|pattern|every): ", warning)


@pytest.mark.parametrize(
    "settings",
    [
        'cron = "0 15 3 * * *"', 'cron = "* * * * * *"', 'cron = "*/15 * * * *"', 'cron = "0 9 * * mon-fri"',
        'cron = "0 9 L * *"', 'cron = "@daily"', 'cron = "@secondly"', 'cron = "0 9 1-28 * *"', 'every = "6s"',
        'cron = "*/10 * * * *"\ntimezone = "America/New_York"', 'cron = "30 3 * * *"\ntimezone = "America/New_York"',
        'cron = "30 2 * * *"\ntimezone = "Asia/Tokyo"', 'cron = "0 9 ? * 1#2"', 'cron = "H H * * *"',
    ],
)  # fmt: skip
def test_what_is_meant_is_not_warned_of(tmp_path, settings):
    assert warnings_of(tmp_path, settings) == []


def test_a_cron_of_a_digest_is_looked_at_as_well(tmp_path):
    text = (
        '[senders.out]\ntype = "log"\n[workflows.w]\n[[workflows.w.steps]]\nid = "d"\ntype = "digest"\n'
        'cron = "* 0 9 * * *"\n[[workflows.w.steps]]\nid = "s"\ntype = "chat"\nsender = "out"\n'
    )
    [warning] = digestd.read_config(text, tmp_path / "config.toml").warnings
    assert (warning.line, warning.path) == (7, "workflows.w.steps.0.cron")


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ('cron = "0 9 * * *"\nalign = "start"', "align", "goes with every"),
        ('cron = "0 9 * * *"\noffset = "1m"', "offset", "goes with every"),
        ('every = "1m"\nimmediately = true\nstart_at = 2030-01-01T00:00:00Z', "immediately", "exclude each other"),
        (
            'every = "1m"\nstart_at = "2030-01-02T00:00:00Z"\nend_at = "2030-01-01T00:00:00Z"',
            "end_at",
            "before start_at",
        ),
        ('every = "1m"\nstart_at = 2030-01-01T00:00:00', "start_at", "no offset"),
        ('every = "1m"\nend_at = "2030-02-30T00:00:00Z"', "end_at", "not a real date"),
        ('every = "1m"\njitter = "1m"', "jitter", "shorter than every"),
        ('every = "1m"\noverlap = "no"', "overlap", "is not one of"),
        ('every = "1m"\nmissed = true', "missed", "is not one of"),
        ('every = "1m"\nattempts = 0', "attempts", "at least 1"),
        ('every = "1m"\nbackoff = { type = "linear", delay = "1s" }', "backoff.type", "is not one of"),
        ('every = "1m"\nbackoff = "soon"', "backoff", "not a duration"),
        ('every = "1m"\nretention = {}', "retention", "is empty"),
        ('every = "1m"\nretention = { count = -1 }', "retention.count", "at least 0"),
        ('every = "1m"\ncount = -1', "count", "at least 0"),
        ('every = "1m"\njob_id = ""', "job_id", "1 to 100"),
    ],
)
def test_settings_of_a_repeatable_that_cannot_be_are_told_with_their_place(tmp_path, settings, path, words):
    text = f'[senders.out]\ntype = "log"\n[repeatables.x]\nsender = "out"\n{settings}\n'
    with pytest.raises(digestd.ConfigError) as error:
        digestd.read_config(text, tmp_path / "config.toml")
    assert [(problem.path, words in problem.text) for problem in error.value.problems] == [
        (f"repeatables.x.{path}", True)
    ]


def test_a_trigger_is_not_tried_again_so_it_takes_no_attempts(tmp_path):
    text = step('type = "digest"\nwindow = "1m"')
    [name] = read(text).workflows
    text += f'[repeatables.x]\nevery = "1m"\nattempts = 3\ntrigger = {{ workflow = "{name}", to = "s1" }}\n'
    with pytest.raises(digestd.ConfigError, match="goes with sender"):
        digestd.read_config(text, tmp_path / "config.toml")


@pytest.mark.timeout(20)
def test_a_thousand_warnings_do_not_keep_the_daemon_from_starting(tmp_path):
    """Each line was looked for in a file that was parsed again and again: 50 s."""
    specs = "".join(f'[repeatables.r{n}]\ncron = "* 15 3 * * *"\nsender = "out"\n' for n in range(1000))
    found = digestd.read_config('[senders.out]\ntype = "log"\n' + specs, tmp_path / "config.toml").warnings
    assert len(found) == 1000 and len({warning.path for warning in found}) == 1000
    assert [warning.line for warning in found[:2]] == [4, 7] and found[-1].line == 0
