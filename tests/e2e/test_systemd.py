"""digestd.service under a real systemd, as it is shipped: its life, its reload, and what happens when things go wrong."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import standardwebhooks
from machine import PORT, Hook, Machine, Refused, commands_of, needed

from conftest import ROOT, wait_for

UNIT = (ROOT / "digestd.service").read_text()
STATE = "/var/lib/digestd"
DATABASE = f"{STATE}/digestd.sqlite3"
COMMAND = "/opt/digestd/bin/digestd"
TRIGGER = (COMMAND, "trigger", "alone", "--to", "ada", "--config", "/etc/digestd/config.toml")

# Each trigger is a message at once; three of `digested` are one digest.
CONFIG = """
[senders.hook]
type = "webhook"
url = "http://127.0.0.1:{port}/hook"
jitter = 0

[[workflows.alone.steps]]
id = "chat"
type = "chat"
sender = "hook"
text = "{{{{ payload.n }}}}"

[[workflows.digested.steps]]
id = "digest"
type = "digest"
window = "1h"
max_events = 3
[[workflows.digested.steps]]
id = "chat"
type = "chat"
sender = "hook"
"""
SECOND = '[[workflows.second.steps]]\nid = "chat"\ntype = "chat"\nsender = "hook"\n'


@pytest.fixture(scope="module")
def booted() -> Iterator[Machine]:
    needed()
    try:
        made = Machine()
    except Refused as error:
        pytest.skip(f"the kernel refuses the mounts that a machine with systemd needs: {error}")
    # the user, by the very line that the unit's head tells
    made.run(*commands_of(UNIT, "useradd"))
    yield made
    made.stop()


class Service:
    """digestd.service on the machine, and what systemd tells of it."""

    def __init__(self, machine: Machine, hook: Hook) -> None:
        self.machine, self.hook = machine, hook
        self.run = machine.run
        self.config = machine.path("/etc/digestd/config.toml")
        shown = self.run("journalctl", "--show-cursor", "-n", "0", "--quiet").stdout
        self.cursor = shown.partition("-- cursor: ")[2].strip()

    def write(self, text: str = "", config: str = CONFIG) -> None:
        self.config.write_text(text + config.format(port=self.hook.port))

    def drop_in(self, text: str) -> None:
        """An override of the unit, as `systemctl edit` makes one."""
        folder = self.machine.path("/etc/systemd/system/digestd.service.d")
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text(text)
        self.run("systemctl", "daemon-reload")

    def start(self) -> None:
        self.run("systemctl", "start", "digestd")

    def show(self, name: str) -> str:
        return self.run("systemctl", "show", "digestd", "--property", name, "--value").stdout.strip()

    def journal(self) -> list[dict[str, Any]]:
        """What the journal has of the service since the test began."""
        shown = self.run("journalctl", "-u", "digestd", "-o", "json", "--after-cursor", self.cursor).stdout
        return [json.loads(line) for line in shown.splitlines()]

    def told(self, priority: int = 7) -> str:
        """The same as text: what is at least so urgent."""
        return "\n".join(str(one["MESSAGE"]) for one in self.journal() if int(one.get("PRIORITY", 6)) <= priority)

    def trigger(self, name: str, to: str = "ada", **payload: Any) -> int:
        body = {"name": name, "to": to, "payload": payload}
        return self.machine.request("POST", "/v1/events/trigger", body)[0]

    def query(self, sql: str) -> list[list[Any]]:
        """Read-only and beside the daemon, as an operator looks."""
        code = (
            "import sqlite3, json, sys;"
            f"print(json.dumps(sqlite3.connect('file:{DATABASE}?mode=ro', uri=True).execute(sys.argv[1]).fetchall()))"
        )
        return json.loads(self.run("/usr/bin/python3", "-c", code, sql).stdout)

    def reset(self) -> None:
        """As if it had never run."""
        self.hook.stop()
        self.run("systemctl", "stop", "digestd.service", "digestd.socket", check=False)
        self.run("sh", "-c", f"rm -rf {STATE} /etc/digestd/* /etc/systemd/system/digestd.service.d"
                             " /etc/systemd/system/digestd.socket")  # fmt: skip
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "reset-failed")


@pytest.fixture
def service(booted: Machine) -> Iterator[Service]:
    made = Service(booted, Hook(booted))
    made.write()
    yield made
    made.reset()


# -- start and stop ----------------------------------------------------------------------------------------------------


def test_the_service_starts_says_so_and_serves(service):
    service.start()
    assert (service.show("ActiveState"), service.show("SubState")) == ("active", "running")
    assert re.search(r"\d+ failed", service.show("StatusText")) and "due" in service.show("StatusText")
    assert service.machine.request("GET", "/healthz")[0] == 200
    assert service.trigger("alone", n=1) == 201
    wait_for(lambda: service.hook.bodies, what="the webhook")
    assert service.told(priority=4) == ""  # nothing to warn of
    pid = service.show("MainPID")
    assert service.run("stat", "-c", "%U", f"/proc/{pid}").stdout.strip() == "digestd"


def test_the_unit_has_nothing_that_systemd_would_warn_of(service):
    done = service.run("systemd-analyze", "verify", "/etc/systemd/system/digestd.service")
    assert done.stdout + done.stderr == ""


def test_what_the_service_may_do_is_little(service):
    shown = service.run("systemd-analyze", "security", "--no-pager", "digestd.service").stdout
    [exposure] = re.findall(r"Overall exposure level for digestd.service: ([\d.]+)", shown)
    assert float(exposure) <= 1.3, shown


def test_nobody_else_can_read_what_it_keeps(service):
    service.start()
    service.trigger("alone", n=1)
    modes = service.run("stat", "-c", "%n %U:%G %a", STATE, "/run/digestd", *service.run(
        "sh", "-c", f"ls {STATE}/*").stdout.split()).stdout.splitlines()  # fmt: skip
    assert len(modes) >= 5, modes  # the folders, the database, its log, its index
    for line in modes:
        name, owner, mode = line.rsplit(" ", 2)
        assert owner == "digestd:digestd", line
        wanted = 0o755 if name == "/run/digestd" else 0o750 if name == STATE else 0o640
        assert int(mode, 8) & ~wanted == 0, line


def owners(service: Service) -> set[str]:
    return set(service.run("sh", "-c", f"stat -c %U {STATE}/*").stdout.split())


def test_what_root_does_on_the_command_line_reaches_the_daemon_and_does_not_lock_it_out(service):
    service.start()
    service.run(*TRIGGER)
    wait_for(lambda: len(service.hook.posts) == 1, what="the event beside the daemon")
    service.run("systemctl", "stop", "digestd")
    service.run(*TRIGGER)
    service.start()
    wait_for(lambda: len(service.hook.posts) == 2, what="the event of the time without it")
    assert owners(service) == {"digestd"}
    assert sorted(path.name for path in service.config.parent.iterdir()) == ["config.toml"]


def test_what_root_does_before_the_first_start_does_not_lock_the_daemon_out(service):
    service.run("install", "-d", "-o", "digestd", "-g", "digestd", "-m", "750", STATE)
    service.run(*TRIGGER)
    service.start()
    wait_for(lambda: service.hook.posts, what="the event of the time before")
    assert owners(service) == {"digestd"}


def test_a_stop_lets_a_message_on_its_way_end(service):
    service.write('[daemon]\ndrain_timeout = "20s"\n')
    service.start()
    service.hook.is_open.clear()
    service.trigger("alone", n=1)
    wait_for(lambda: service.hook.posts, what="the webhook")
    stop = threading.Thread(target=service.run, args=("systemctl", "stop", "digestd"))
    stop.start()
    wait_for(lambda: service.show("ActiveState") == "deactivating", what="the stop")
    service.hook.is_open.set()
    stop.join(15)
    assert not stop.is_alive()
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    assert service.query("SELECT state FROM jobs") == [["completed"]]
    assert service.query("SELECT outcome FROM attempts") == [["sent"]]


def test_a_stop_ends_in_time_when_a_message_does_not_and_repeats_it_after_the_start(service):
    service.write('[daemon]\ndrain_timeout = "1s"\n')
    service.start()
    service.hook.is_open.clear()
    service.trigger("alone", n=1)
    wait_for(lambda: service.hook.posts, what="the webhook")
    began = time.monotonic()
    service.run("systemctl", "stop", "digestd")
    assert time.monotonic() - began < 5
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    # who looks while it is down must not be told of a message under way
    assert service.query("SELECT count(*) FROM jobs WHERE state = 'active'") == [[0]]
    service.hook.is_open.set()
    service.start()
    wait_for(lambda: service.query("SELECT state FROM jobs") == [["completed"]], what="the repeated webhook")
    assert len({headers["webhook-id"] for headers, _ in service.hook.posts}) == 1


# -- reload ------------------------------------------------------------------------------------------------------------


def test_a_reload_of_a_bad_file_fails_with_the_reason_and_changes_nothing(service):
    service.start()
    pid = service.show("MainPID")
    service.write(SECOND.replace('"chat"\nsender', '"chat"\nsendr'))
    done = service.run("systemctl", "reload", "digestd", check=False)
    assert done.returncode != 0
    assert service.show("MainPID") == pid and service.show("ActiveState") == "active"
    assert service.trigger("alone", n=1) == 201
    wait_for(lambda: service.hook.bodies, what="the webhook by the old config")
    told = wait_for(lambda: "sendr" in service.told() and service.told(), what="the reason in the journal")
    assert re.search(r"config\.toml:\d+: .*sendr", told)
    # and it is told where people look first, though the check before the signal has refused it already
    wait_for(lambda: "refused" in service.show("StatusText"), what="the word in systemctl status")


def test_a_good_file_is_in_force_when_reload_returns(service):
    service.start()
    pid = service.show("MainPID")
    for number in range(3):
        name = f"second{number}"
        assert service.trigger(name) != 201
        service.write(SECOND.replace("second", name))
        service.run("systemctl", "reload", "digestd")
        assert service.trigger(name) == 201
    assert service.show("MainPID") == pid


def test_a_reload_mends_what_a_bad_file_left_behind(service):
    service.start()
    service.config.write_text("nonsense = ")
    assert service.run("systemctl", "reload", "digestd", check=False).returncode != 0
    service.write(SECOND)
    service.run("systemctl", "reload", "digestd")
    assert service.trigger("second") == 201
    assert "refused" not in service.show("StatusText")


def test_a_file_that_only_the_daemon_can_judge_makes_reload_fail(service):
    """Whether a credential is there is known to the service alone."""
    service.start()
    service.write(config=CONFIG.replace("jitter = 0", 'jitter = 0\nsecret = {{ credential = "not-there" }}') + SECOND)
    done = service.run("systemctl", "reload", "digestd", check=False)
    assert done.returncode != 0
    assert "not-there" in service.told(priority=3)
    assert "refused" in service.show("StatusText")
    assert service.trigger("second") != 201


def test_what_needs_a_restart_is_said_at_a_reload(service):
    service.start()
    service.write(f'[api]\nlisten = ["127.0.0.1:{PORT + 1}"]\n')
    service.run("systemctl", "reload", "digestd")
    assert "takes effect at the next start" in service.told(priority=4)


# -- when things go wrong ----------------------------------------------------------------------------------------------


def test_a_config_that_is_wrong_at_the_start_fails_once_and_says_why(service):
    service.write("[daemn]\n")
    assert service.run("systemctl", "start", "digestd", check=False).returncode != 0
    # not activating: that would be the wait for another start
    assert (service.show("ActiveState"), service.show("SubState")) == ("failed", "failed")
    assert (service.show("ExecMainStatus"), service.show("NRestarts")) == ("78", "0")
    assert re.search(r"config\.toml:\d+: .*daemn", service.told())
    service.write()
    service.start()
    assert service.show("ActiveState") == "active"


def test_a_killed_daemon_comes_back_and_nothing_is_lost(service):
    service.start()
    pid = service.show("MainPID")
    service.hook.is_open.clear()  # one message is on its way at the kill
    assert service.trigger("alone", n=1) == 201
    assert [service.trigger("digested", n=number) for number in range(2)] == [201, 201]
    wait_for(lambda: service.hook.posts, what="the webhook")
    service.run("sh", "-c", f"kill -KILL {pid}")
    service.hook.is_open.set()
    wait_for(
        lambda: service.show("MainPID") not in (pid, "0") and service.show("ActiveState") == "active",
        what="the restart",
    )
    assert service.show("NRestarts") == "1"
    assert service.trigger("digested", n=2) == 201
    bodies = wait_for(lambda: len(service.hook.posts) == 3 and service.hook.bodies, what="both messages")
    [digest] = [body["data"] for body in bodies if body["data"]["digest"]]
    assert [event["payload"]["n"] for event in digest["digest"]["events"]] == [0, 1, 2]
    assert len({headers["webhook-id"] for headers, _ in service.hook.posts}) == 2


# In place of Debian's sitecustomize: at a signal the main thread, and with it the loop, sleeps. Other threads live on,
# so that a watchdog that one of them fed would see nothing.
FREEZE = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))\n"


def test_a_loop_that_hangs_is_restarted_and_where_it_hung_is_in_the_journal(service):
    folder = service.machine.path("/opt/freeze")
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(FREEZE)
    service.drop_in("[Service]\nWatchdogSec=3\nRestartSec=100ms\nEnvironment=PYTHONPATH=/opt/freeze\n")
    service.start()
    pid = service.show("MainPID")
    assert service.trigger("alone", n=1) == 201
    service.run("sh", "-c", f"kill -USR1 {pid}")
    wait_for(lambda: service.show("NRestarts") == "1" and service.show("ActiveState") == "active", what="the restart")
    assert service.show("MainPID") != pid
    assert "Watchdog timeout" in service.told() and "sitecustomize.py" in service.told()
    assert service.machine.request("GET", "/healthz")[0] == 200


def test_the_watchdog_leaves_an_idle_daemon_alone(service):
    service.drop_in("[Service]\nWatchdogSec=2\n")
    service.start()
    stamps = set()
    wait_for(lambda: stamps.add(service.show("WatchdogTimestampMonotonic")) or len(stamps) == 4, what="three pings")
    assert service.show("NRestarts") == "0"


def test_errors_have_the_priority_of_errors_in_the_journal(service):
    service.hook.stop()
    service.write(config=CONFIG.replace("jitter = 0", "retry = []"))
    service.start()
    service.trigger("alone", n=1)
    wait_for(lambda: "failed" in service.told(priority=3), what="the failure")
    [line] = [one for one in service.journal() if "failed" in str(one["MESSAGE"])]
    assert line["PRIORITY"] == "3" and not line["MESSAGE"].startswith("<")
    assert "failed" not in "".join(str(one["MESSAGE"]) for one in service.journal() if one["PRIORITY"] != "3")


# -- credentials and sockets -------------------------------------------------------------------------------------------


def test_a_secret_that_only_root_can_read_is_had_by_load_credential(service):
    secrets = ["whsec_" + base64.b64encode(bytes([number]) * 32).decode() for number in range(2)]
    path = service.machine.path("/etc/digestd/team-hook")
    path.touch(0o600)
    path.write_text(secrets[0])
    [line] = re.findall(r"(?m)^# (LoadCredential=.*)$", UNIT)
    service.drop_in(f"[Service]\n{line}\n")
    signed = CONFIG.replace("jitter = 0", 'jitter = 0\nsecret = {{ credential = "team-hook" }}')
    service.write(config=signed)
    service.start()
    service.trigger("alone", n=1)
    headers, body = wait_for(lambda: service.hook.posts, what="the webhook")[0]
    standardwebhooks.Webhook(secrets[0]).verify(body, headers)
    # a reload finds it too, and commands have no need of it
    service.write(SECOND, config=signed)
    service.run("systemctl", "reload", "digestd")
    assert service.trigger("second") == 201
    service.run(*TRIGGER)
    wait_for(lambda: len(service.hook.posts) == 3, what="what root triggered")
    # a new secret comes with a restart
    path.write_text(secrets[1])
    service.run("systemctl", "restart", "digestd")
    count = len(service.hook.posts)
    service.trigger("alone", n=2)
    headers, body = wait_for(lambda: service.hook.posts[count:], what="the webhook")[0]
    standardwebhooks.Webhook(secrets[1]).verify(body, headers)
    assert not any(secret[6:] in service.told() for secret in secrets)


def socket_unit() -> str:
    """The socket unit that the repository tells of, out of the comments of digestd.service."""
    found = re.search(r"(?m)^# +\[Socket\]\n(?:#.*\n)+", UNIT)
    assert found, "digestd.service shows no socket unit"
    lines = [line.removeprefix("#").strip() for line in found[0].splitlines()]
    return "\n".join(line for line in lines if line.startswith("[") or "=" in line) + "\n"


@pytest.fixture
def activated(service: Service) -> Service:
    service.machine.path("/etc/systemd/system/digestd.socket").write_text(socket_unit())
    service.write('[api]\nlisten = ["systemd"]\n')
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "start", "digestd.socket")
    return service


def test_a_request_to_the_socket_starts_the_service_and_is_answered(activated):
    assert activated.show("ActiveState") == "inactive"
    assert activated.trigger("alone", n=1) == 201
    assert activated.show("ActiveState") == "active"
    wait_for(lambda: activated.hook.bodies, what="the webhook")
    activated.write('[api]\nlisten = ["systemd"]\n' + SECOND)
    activated.run("systemctl", "reload", "digestd")
    assert activated.trigger("second") == 201


def test_no_request_is_refused_while_the_service_is_restarted(activated):
    activated.start()
    stopped, statuses, broken = threading.Event(), [], []

    def ask() -> None:
        while not stopped.is_set():
            try:
                statuses.append(activated.trigger("digested", "bob"))
            except (ConnectionResetError, BrokenPipeError) as error:  # was open at the stop: its event is kept or not
                broken.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(2):
        count = len(statuses)
        wait_for(lambda count=count: len(statuses) > count + 5, what="a few answers")
        activated.run("systemctl", "restart", "digestd")
    count = len(statuses)
    wait_for(lambda: len(statuses) > count + 5, what="answers after the restart")
    stopped.set()
    asking.join()
    assert set(statuses) == {201}
    assert len(broken) <= 2
    [[kept]] = activated.query("SELECT count(*) FROM events")
    assert len(statuses) <= kept <= len(statuses) + len(broken)
