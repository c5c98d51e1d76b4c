"""What is shipped beside the program: the package, its pins, the unit, the licence."""

from __future__ import annotations

import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import pytest
import tomli

import digestd
from conftest import ROOT

PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SOURCES = ("digestd.py", "migrations.sql", "config.example.toml", "pyproject.toml", "constraints.txt", "LICENSE")


def name_of(requirement: str) -> str:
    """The normalised name of a package in a requirement or a pin."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement.strip())[0]).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {name_of(line): line.strip() for line in lines if line.strip() and not line.startswith("#")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The bin folder of an empty environment into which a copy of the project was installed by pip, with the pins."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    for name in ("README.md", "CHANGELOG.md", "digestd.service"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    venv.create(folder / "venv")  # this Python's pip fills it: not every system has ensurepip
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install", "--quiet",
         "--disable-pip-version-check", "-c", "constraints.txt", "."],
        cwd=source, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert pip.returncode == 0, pip.stdout + pip.stderr
    shutil.rmtree(source)  # what is installed must stand on its own
    return folder / "venv" / "bin"


def test_a_plain_pip_install_gives_a_command_that_works_from_any_folder(installed, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [installed / "digestd", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env
        )

    (tmp_path / "config.toml").write_text(
        '[senders.out]\ntype = "log"\n[workflows.w]\n[[workflows.w.steps]]\nid = "d"\ntype = "digest"\nwindow = "1h"\n'
        '[[workflows.w.steps]]\nid = "c"\ntype = "chat"\nsender = "out"\n'
    )
    assert run("--version").stdout.split()[-1] == digestd.__version__
    checked = run("check")
    assert (checked.returncode, checked.stderr) == (0, "")
    # this makes a database, which needs migrations.sql
    triggered = run("trigger", "w", "--to", "s1")
    assert (triggered.returncode, triggered.stderr) == (0, "")
    status = run("status", "--json")
    assert status.returncode == 0
    assert json.loads(status.stdout)["troubleCount"] == 0
    check = [sys.executable, "-m", "pip", "--python", str(installed / "python"), "--disable-pip-version-check", "check"]
    agreed = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert agreed.returncode == 0, agreed.stdout


def test_the_checkout_runs_without_an_installation_from_another_folder(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(ROOT / "digestd.py"), "next", "every 15m", "--from", "2025-01-01T03:07:00Z", "-n", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0
    assert "2025-01-01T03:15:00Z" in ended.stdout


def test_the_script_header_names_the_same_dependencies_as_the_package():
    text = (ROOT / "digestd.py").read_text("utf-8")
    [block] = re.findall(r"(?m)^# /// script\n((?:#.*\n)*?)# ///$", text)
    header = tomli.loads("".join(line.removeprefix("#").removeprefix(" ") + "\n" for line in block.splitlines()))
    assert header["dependencies"] == PROJECT["project"]["dependencies"]
    assert header["requires-python"] == PROJECT["project"]["requires-python"]


def test_every_dependency_has_a_pin_within_its_range():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = PROJECT["project"]["dependencies"] + extras["test"] + extras["lint"]
    assert {name_of(one) for one in wanted} - set(pins()) == set()
    for one in wanted:
        version = [int(part) for part in re.findall(r"\d+", pins()[name_of(one)].partition("==")[2])]
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", one):
            limit = [int(part) for part in bound.split(".")]
            assert version >= limit if sign == ">=" else version < limit, f"{one}: {pins()[name_of(one)]}"


def test_every_pin_is_one_exact_version():
    assert [pin for pin in pins().values() if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin)] == []


def test_what_runs_here_besides_the_dependencies_is_pinned_too():
    """A dependency of a dependency without a pin could change under the feet of a fresh install."""
    import importlib.metadata

    missing, seen, waiting = set(), set(), [name_of(one) for one in PROJECT["project"]["dependencies"]]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in pins():
            missing.add(name)
        for requirement in importlib.metadata.requires(name) or []:
            marker = requirement.partition(";")[2]
            if not marker:
                waiting.append(name_of(requirement))
    assert missing == set()


def test_the_version_is_said_in_one_place_and_the_changelog_knows_it():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "digestd.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", digestd.__version__)
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"(?m)^## (Unreleased|{re.escape(digestd.__version__)})", changes)


def test_the_licence_is_mit():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert text.startswith("MIT License")
    assert "without restriction" in text and 'THE SOFTWARE IS PROVIDED "AS IS"' in text
    assert PROJECT["project"]["license"] == "MIT"


def unit() -> tuple[configparser.RawConfigParser, dict[str, list[str]]]:
    """The unit file, and its ExecStart and ExecReload lines, of which there may be several."""
    text = (ROOT / "digestd.service").read_text("utf-8")
    parser = configparser.RawConfigParser(strict=False, comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    lines: dict[str, list[str]] = {}
    for name, value in re.findall(r"(?m)^(Exec\w+)=(.*)$", text):
        lines.setdefault(name, []).append(value)
    return parser, lines


def test_the_unit_calls_digestd_with_commands_and_options_that_exist():
    _, lines = unit()
    calls = [line.split()[1:] for value in lines.values() for line in value if "/digestd " in line]
    assert len(calls) == 2
    for arguments in calls:
        digestd.make_parser().parse_args(arguments)  # SystemExit for what is not there


def test_the_unit_fits_what_the_daemon_does():
    parser, lines = unit()
    service = parser["Service"]
    assert service["Type"] == "notify"
    assert "run" in lines["ExecStart"][0].split()
    assert [line.split()[1] for line in lines["ExecReload"]] == ["reload"]  # waits, and fails for a bad file
    assert {"2", "78"} <= set(service["RestartPreventExitStatus"].split())
    assert int(service["WatchdogSec"]) >= 5
    drain_s = digestd.read_config("[daemon]", pathlib.Path("config.toml")).daemon.drain_timeout / digestd.SECOND
    assert int(service["TimeoutStopSec"]) > drain_s  # or systemd kills a daemon that still drains
    assert service["StateDirectory"] and service["UMask"] in ("0027", "0077")
    assert parser["Install"]["WantedBy"] == "multi-user.target"


def test_the_unit_has_no_option_that_systemd_does_not_know():
    analyze = shutil.which("systemd-analyze")
    known = {
        "Unit": {"Description", "Documentation", "Wants", "After", "StartLimitIntervalSec"},
        "Install": {"WantedBy"},
        "Service": {
            "Type", "User", "Group", "ExecStart", "ExecReload", "Restart", "RestartSec", "RestartPreventExitStatus",
            "WatchdogSec", "TimeoutStopSec", "StateDirectory", "StateDirectoryMode", "RuntimeDirectory",
            "ConfigurationDirectory", "UMask", "LoadCredential", "CapabilityBoundingSet", "NoNewPrivileges",
            "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectClock",
            "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables",
            "ProtectControlGroups", "ProtectProc", "ProcSubset", "RestrictAddressFamilies", "RestrictNamespaces",
            "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute",
            "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber", "RemoveIPC", "DevicePolicy",
        },
    }  # fmt: skip
    parser, _ = unit()
    assert {section: set(parser[section]) - known.get(section, set()) for section in parser.sections()} == {
        section: set() for section in parser.sections()
    }
    if analyze:  # systemd's own word, where it is installed
        said = subprocess.run([analyze, "verify", ROOT / "digestd.service"], capture_output=True, text=True, timeout=30)
        assert "Unknown" not in said.stderr and "Failed to parse" not in said.stderr


def test_the_files_of_the_contract_are_there():
    for name in ("README.md", "Makefile", ".ci/run", ".gitignore", *SOURCES, "CHANGELOG.md", "digestd.service"):
        assert (ROOT / name).is_file(), f"{name} is missing"
