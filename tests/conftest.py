"""Scenes for the tests: a world with a clock that is moved by hand, a real database file, and senders that record."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import digestd  # noqa: E402

START = digestd.parse_instant("2026-03-09T09:00:00Z")  # a Monday

BASIC = """
[senders.hook]
type = "webhook"
url = "http://127.0.0.1:9/hook"
retry = ["5s", "1m"]
jitter = 0

[senders.mail]
type = "smtp"
tls = "none"
from = "Digest <digest@example.org>"
retry = ["1m"]
jitter = 0

[workflows.comments]
[[workflows.comments.steps]]
id = "digest"
type = "digest"
key = "payload.postId"
window = "10m"
[[workflows.comments.steps]]
id = "chat"
type = "chat"
sender = "hook"
"""


class World:
    """The engine on a file database. `sent` holds every try: (at, claim, result)."""

    def __init__(self, folder: pathlib.Path, text: str) -> None:
        self.folder = folder
        self.clock = digestd.VirtualClock(START)
        self.sent: list[tuple[int, digestd.Claim, digestd.SendResult]] = []
        self.replies: dict[str, list[tuple[str, str]]] = {}
        self.path = folder / "digestd.sqlite3"
        self.use(text)
        self.open()

    # -- life

    def use(self, text: str) -> None:
        """Take a config; once open, as a reload does."""
        self.config = digestd.read_config(text, self.folder / "config.toml")
        self.room = digestd.Room(self.config.daemon.concurrency, self.config.senders)
        if not digestd.database.is_closed():
            with digestd.transaction():
                digestd.adopt_config(self.config, self.now)

    def open(self) -> None:
        """Open the database, as a start of the daemon does."""
        digestd.open_store(str(self.path), self.now)
        with digestd.transaction():
            digestd.adopt_config(self.config, self.now)
            digestd.recover_interrupted(self.config, self.now)
        self.room = digestd.Room(self.config.daemon.concurrency, self.config.senders)

    def crash(self) -> None:
        """The process is gone; what was not committed is lost."""
        digestd.database.close()

    @property
    def now(self) -> int:
        return self.clock.now()

    # -- what comes in

    def trigger(self, name: str, to: Any = "s1", payload: Any = None, id: str | None = None) -> digestd.TriggerAnswer:
        body = {"name": name, "to": to, "payload": payload or {}, "transactionId": id}
        trigger = digestd.check_trigger(self.config, body, self.now)
        with digestd.transaction():
            return digestd.take_triggers(self.config, [trigger], self.now)[0]

    def cancel(self, transaction_id: str) -> bool:
        with digestd.transaction():
            return digestd.cancel_transaction(transaction_id, self.now)

    def subscriber(self, subscriber_id: str, **fields: Any) -> None:
        schedule = fields.pop("schedule", None)
        columns = digestd.check_subscriber_fields(fields)
        if schedule is not None:
            columns["schedule"] = json.dumps(schedule)
        with digestd.transaction():
            digestd.upsert_subscriber(subscriber_id, columns, self.now)

    def reply(self, sender: str, *replies: str) -> None:
        """What the sender's next tries come to: sent, temporary, permanent, gone; otherwise sent."""
        self.replies.setdefault(sender, []).extend((outcome, outcome) for outcome in replies)

    # -- time goes on

    def tick(self) -> None:
        """Ticks at this instant until nothing moves; tries take no time."""
        while True:
            with digestd.transaction():
                report = digestd.tick(self.config, self.now, self.room)
            for claim in report.claims:
                self._try(claim)
            if not report.moved:
                return

    def _try(self, claim: digestd.Claim) -> None:
        if claim.message is None and claim.result is None:
            digestd.finish_claim(claim)
            if claim.message is not None:
                with digestd.transaction():
                    digestd.keep_composed(claim, self.now)
        outcome, reason = (self.replies.get(claim.sender_name) or [("sent", "")]).pop(0)
        if outcome == "gone":
            result = claim.result or digestd.result_of(claim, "permanent", "HTTP 410", 410, cause="gone")
        else:
            result = claim.result or digestd.result_of(claim, outcome, reason or None)
        self.sent.append((self.now, claim, result))
        with digestd.transaction():
            digestd.record_outcomes(self.config, [digestd.Sent(claim, result)], self.now)
        self.room.end(claim.sender_name, claim.lane)

    def run_until(self, at: int) -> None:
        """Let everything due up to an instant happen, each at its own time."""
        self.tick()
        while (wake_at := self._wake_at()) is not None and wake_at <= at:
            self.clock.at = max(self.clock.at, wake_at)
            self.tick()
        self.clock.at = max(self.clock.at, at)

    def _wake_at(self) -> int | None:
        instants = (digestd.next_wake_at(), self.room.wake_at)
        return min((at for at in instants if at is not None), default=None)

    def advance(self, duration: str) -> None:
        self.run_until(self.now + digestd.parse_duration(duration))

    # -- looking in

    def rows(self, sql: str, *values: Any) -> list[Any]:
        return digestd.rows(sql, *values)

    def one(self, sql: str, *values: Any) -> Any:
        found = digestd.row(sql, *values)
        return found[0] if found and len(found) == 1 else found

    def bodies(self, sender: str | None = None) -> list[Any]:
        """The JSON bodies of what was sent by webhook, in order."""
        return [
            json.loads(claim.message.body)
            for _, claim, result in self.sent
            if claim.message is not None and result.outcome == "sent" and sender in (None, claim.sender_name)
        ]

    def digested(self) -> list[list[Any]]:
        """For each webhook sent, the payloads of its digest."""
        return [[event["payload"] for event in body["data"]["digest"]["events"]] for body in self.bodies()]


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[Callable[..., World]]:
    """Makes a world from a config text."""

    def make(text: str = BASIC) -> World:
        return World(tmp_path, text)

    yield make
    digestd.close_store()


@pytest.fixture
def cli(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in the test's folder, as a person would."""

    def run(*arguments: str, input: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "digestd.py"), *arguments],
            cwd=tmp_path, input=input, capture_output=True, text=True, timeout=60, env={**os.environ, **env},
        )  # fmt: skip

    return run


def statements(act: Callable[[], Any]) -> list[str]:
    """The SQL of each statement that something runs, as SQLite itself tells it: also of those run for many rows."""
    seen: list[str] = []
    connection = digestd.database.connection()
    connection.set_trace_callback(seen.append)
    try:
        act()
    finally:
        connection.set_trace_callback(None)
    return [sql for sql in seen if not sql.startswith("--")]  # those are the statements inside a trigger


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, what: str = "the condition") -> Any:
    """Wait for an event itself, looking often; what it gives."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come within {seconds} s")


class Process:
    """A real daemon in its own process, on a folder with a config.toml."""

    def __init__(self, folder: pathlib.Path, config: str, **env: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.config = folder / "config.toml"
        self.config.write_text(f'[api]\nlisten = ["127.0.0.1:{self.port}"]\n{config}')
        self.database = folder / "digestd.sqlite3"
        self.env = env
        self.start()

    def start(self, wait: bool = True) -> None:
        self.log = (self.folder / "log.txt").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "digestd.py"), "run", "--config", str(self.config)],
            cwd=self.folder, stdout=self.log, stderr=self.log, env={**os.environ, **self.env},
        )  # fmt: skip
        if wait:
            wait_for(self.is_healthy, what=f"the daemon\n{self.logged()}")

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.logged()}")
        try:
            return self.request("GET", "/healthz")[0] == 200
        except OSError:
            return False

    def logged(self) -> str:
        return (self.folder / "log.txt").read_text("utf-8", "replace")

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text else None

    def trigger(self, name: str, to: Any, payload: Any = None, **more: Any) -> tuple[int, Any]:
        return self.request("POST", "/v1/events/trigger", {"name": name, "to": to, "payload": payload or {}, **more})

    def query(self, sql: str) -> list[Any]:
        """Read with a connection of its own, as the sqlite3 shell would."""
        import contextlib
        import sqlite3

        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=5)) as connection:
            return connection.execute(sql).fetchall()

    def stop(self, wait: float = 20) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(wait)
        self.log.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Callable[..., Process]]:
    """Starts real daemons, and ends those that a test leaves running."""
    started: list[Process] = []

    def start(config: str, **env: str) -> Process:
        process = Process(tmp_path, config, **env)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.process.poll() is None:
            process.kill()
