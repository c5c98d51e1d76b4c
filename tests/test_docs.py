"""The README and the example tell the truth: every command runs, every setting and view is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

import digestd
from conftest import ROOT, free_port, wait_for

README = (ROOT / "README.md").read_text("utf-8")
EXAMPLE = (ROOT / "config.example.toml").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_config_of_the_readme_is_fine_and_short(tmp_path):
    text, slack = blocks("toml")
    digestd.read_config(text, tmp_path / "config.toml")
    assert len([line for line in text.splitlines() if line.strip()]) <= 22
    (tmp_path / "slack-url").write_text("https://hooks.example.org/services/T0/B0/x\n")
    config = digestd.read_config(text + slack, tmp_path / "config.toml")
    assert config.workflows["comments"].steps[-1].sender == "slack"


@pytest.fixture
def place(tmp_path):
    """A folder with the README's config, the command on the path, and the daemon running there."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "digestd"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "digestd.py"}" "$@"\n')
    command.chmod(0o755)
    port = free_port()
    (tmp_path / "config.toml").write_text(f'[api]\nlisten = ["127.0.0.1:{port}"]\n' + blocks("toml")[0])
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    env.pop("DIGESTD_CONFIG", None)
    with open(tmp_path / "log.txt", "wb") as log:
        running = subprocess.Popen([str(command), "run"], cwd=tmp_path, env=env, stdout=log, stderr=log)
        wait_for(
            lambda: "digestd" in (tmp_path / "log.txt").read_text() and "serves" in (tmp_path / "log.txt").read_text()
        )
        yield tmp_path, env, port
        running.terminate()
        assert running.wait(20) == 0


def test_every_command_of_the_readme_runs(place):
    folder, env, port = place
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip() and line != "make run"]
    assert len(lines) >= 12
    for line in lines:
        if line.split()[0] in ("sqlite3", "curl") and not shutil.which(line.split()[0]):
            line = _without_tool(line)
        done = subprocess.run(
            ["sh", "-c", line.replace("3210", str(port))],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert wait_for(lambda: digest_count(folder) == 3), "the three ways lead into one window"


def _without_tool(line: str) -> str:
    """The same by Python where a small machine has no sqlite3 shell or curl."""
    if line.startswith("sqlite3"):
        sql = line.split('"', 1)[1].rsplit('"', 1)[0]
        return f'"{sys.executable}" -c \'import sqlite3, sys; c = sqlite3.connect("digestd.sqlite3"); c.execute(sys.stdin.read()); c.commit()\' <<EOF\n{sql.replace(chr(92), "")}\nEOF'
    body = line.split("-d ", 1)[1]
    return f'"{sys.executable}" -c \'import sys, urllib.request; urllib.request.urlopen("http://127.0.0.1:3210/v1/events/trigger", sys.argv[1].encode())\' {body}'


def digest_count(folder) -> int:
    import contextlib
    import sqlite3

    with contextlib.closing(sqlite3.connect(f"file:{folder / 'digestd.sqlite3'}?mode=ro", uri=True)) as connection:
        found = connection.execute("SELECT max(events) FROM v_digests WHERE subscriber_id = 'ada'").fetchone()
        return found[0] or 0


def test_the_two_commands_of_a_first_look_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    assert {"run", "test", "venv", "lint", "bench"} <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert "make run" in README and "make test" in README
    if shutil.which("make"):
        assert subprocess.run(["make", "-n", "run", "test"], cwd=ROOT, capture_output=True).returncode == 0


def models() -> dict[str, list[type]]:
    tables = {
        "daemon": [digestd.DaemonSettings],
        "api": [digestd.ApiSettings],
        "repeatables": [digestd.RepeatableSettings],
    }
    tables["senders"] = list(dict.fromkeys(digestd.SENDER_MODELS.values()))
    tables["workflows"] = [digestd.WorkflowSettings, *dict.fromkeys(digestd.STEP_MODELS.values())]
    return tables


@pytest.mark.parametrize("table", ["daemon", "api", "senders", "workflows", "repeatables"])
def test_every_setting_stands_in_the_example(table):
    part = "\n".join(
        block
        for block in re.split(r"(?=^#? ?\[+)", EXAMPLE, flags=re.MULTILINE)
        if re.match(rf"#? ?\[+{table}\b", block)
    )
    for model in models()[table]:
        for name, field in model.model_fields.items():
            key = field.alias or name
            if key not in ("steps",):
                assert re.search(rf"^(?:# )?{key} = ", part, re.MULTILINE), f"{table}: {key} of {model.__name__}"


def test_the_defaults_in_the_example_are_the_defaults():
    config = digestd.read_config(EXAMPLE, ROOT / "config.example.toml")
    assert config.daemon == digestd.DaemonSettings() and config.api == digestd.ApiSettings()
    assert config.senders["console"] == digestd.LogSettings(type="log")
    step = config.workflows["demo"].steps[0]
    assert (step.start, step.extend_to_schedule) == ("immediately", False)


def test_what_is_commented_out_in_the_example_is_right_too(tmp_path):
    """With its senders uncommented the file still loads: a comment that lies helps nobody."""
    text = EXAMPLE
    for name in ("team", "personal", "chat", "phone", "push", "rooms", "everywhere", "mail", "local"):
        start = text.index(f"# [senders.{name}]")
        end = text.index("\n\n", start)
        text = text[:start] + re.sub(r"^# ", "", text[start:end], flags=re.MULTILINE) + text[end:]
    digestd.read_config(text, tmp_path / "config.toml", secrets=False)


def test_every_view_and_every_command_is_told_of():
    views = re.findall(r"^CREATE VIEW (v_\w+)", (ROOT / "migrations.sql").read_text(), re.MULTILINE)
    assert [view for view in views if f"`{view}`" not in README] == []
    actions = [action for action in digestd.make_parser()._actions if action.dest == "command"]
    untold = [
        name
        for name in actions[0].choices
        if f"digestd {name}" not in README + (ROOT / "digestd.service").read_text() + EXAMPLE
    ]
    assert set(untold) <= {"schema"}


def test_links_inside_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
