"""What the end-to-end tests share: a real daemon, and real peers, each in a process of its own.

A peer that is not installed is a failure: `make e2e` installs them all. With DIGESTD_E2E_SKIP_MISSING=1 its tests are
skipped instead.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pathlib
import queue
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests" / "e2e" / "clients"
INSTALLED = ROOT / ".e2e"  # where `make e2e` puts the SDKs
API_KEY = "key-of-the-e2e-tests"


def _load_scenes() -> Any:
    """tests/conftest.py, under a name of its own: pytest gives the name conftest to this file."""
    spec = importlib.util.spec_from_file_location("scenes", ROOT / "tests" / "conftest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scenes = _load_scenes()
Process, free_port, wait_for = scenes.Process, scenes.free_port, scenes.wait_for


def missing(what: str) -> NoReturn:
    """A peer is not there: fail, or skip where that is asked for."""
    if os.environ.get("DIGESTD_E2E_SKIP_MISSING") == "1":
        pytest.skip(f"{what} is missing")
    pytest.fail(f"{what} is missing; make e2e installs it (DIGESTD_E2E_SKIP_MISSING=1 skips its tests)", pytrace=False)


def program(name: str) -> str:
    """The path of a program that has to be installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
    return found or missing(name)


# -- Novu's SDKs -------------------------------------------------------------------------------------------------------

# Every kind of step that the SDKs show something of. A window or a delay of an hour ends in no test.
NOVU_CONFIG = f"""
keys = ["{API_KEY}"]

[senders.out]
type = "log"

[senders.nobody]
type = "webhook"
url = "http://127.0.0.1:9/hook"
retry = []

[workflows.notice]
name = "A notice"
steps = [
  {{ id = "feed", type = "in_app", subject = "On {{{{ payload.about }}}}", text = "Read {{{{ payload.about }}}}" }},
]

[workflows.comments]
steps = [
  {{ id = "digest", type = "digest", key = "payload.postId", window = "1h" }},
  {{ id = "feed", type = "in_app", text = "{{{{ steps.digest.eventCount }}}} comments" }},
]

[workflows.reminder]
steps = [{{ id = "wait", type = "delay", delay = "1h" }}, {{ id = "feed", type = "in_app", text = "now" }}]

[workflows.news]
steps = [
  {{ id = "mail", type = "email", sender = "out", subject = "News", text = "There is news" }},
  {{ id = "chat", type = "chat", sender = "out", text = "There is news" }},
]

[workflows.lost]
steps = [{{ id = "chat", type = "chat", sender = "nobody", text = "nobody hears it" }}]

[workflows.alarm]
critical = true
steps = [{{ id = "mail", type = "email", sender = "out", subject = "Fire", text = "It burns" }}]

[workflows.strict]
steps = [{{ id = "feed", type = "in_app", text = "{{{{ payload.name }}}}" }}]
[workflows.strict.payload_schema]
type = "object"
required = ["name"]
properties = {{ name = {{ type = "string" }}, age = {{ type = "integer" }} }}
"""


class SdkError(Exception):
    """What an SDK raised: the name of its class, the HTTP status, the message, and what it read out of the answer."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['name']} {error['status']}: {error['message']} {error['data']}")
        self.name: str = error["name"]
        self.status: int | None = error["status"]
        self.message: str = error["message"]
        self.data: Any = error["data"]


class Client:
    """An SDK in a process of its own, asked a line at a time (tests/e2e/clients has the other end)."""

    def __init__(self, command: list[str], folder: pathlib.Path, log: pathlib.Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("wb"), text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, call: str, args: Any, key: str = API_KEY) -> Any:
        """What a call gives. Raises SdkError with what it raised."""
        assert self.process.stdin
        print(json.dumps({"call": call, "args": args, "key": key}), file=self.process.stdin, flush=True)
        line = self.lines.get(timeout=30)
        assert line, f"the client ended:\n{self.log.read_text('utf-8', 'replace')}"
        said = json.loads(line)
        if "error" in said:
            raise SdkError(said["error"])
        return said["result"]

    def stop(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def start_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Client]]:
    """Starts a driver of tests/e2e/clients by its name."""
    started: list[Client] = []

    def start(driver: str, *arguments: str) -> Client:
        if driver.endswith(".mjs"):
            command, folder = program("node"), INSTALLED / "node"
            needed = folder / "node_modules"
        else:
            command, folder = str(INSTALLED / "python" / "bin" / "python"), INSTALLED / "python"
            needed = pathlib.Path(command)
        if not needed.exists():
            missing(f"what {driver} needs")
        log = tmp_path_factory.mktemp("client") / "log.txt"
        started.append(Client([command, str(CLIENTS / driver), *arguments], folder, log))
        return started[-1]

    yield start
    for client in started:
        client.stop()


@pytest.fixture(scope="module")
def novu_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A daemon with the workflows of NOVU_CONFIG, which lives as long as the tests of a file."""
    process = Process(tmp_path_factory.mktemp("daemon"), NOVU_CONFIG)
    yield process
    if process.process.poll() is None:
        process.kill()


@pytest.fixture(scope="module")
def novu_url(novu_daemon: Any) -> str:
    """What a client is given in place of Novu's own address."""
    return f"http://127.0.0.1:{novu_daemon.port}"


_numbers = itertools.count(1)


@pytest.fixture
def new_id() -> Callable[[str], str]:
    """Makes ids that no other test has."""
    return lambda name: f"{name}-{next(_numbers)}"


class HttpAnswer(NamedTuple):
    """An answer as it came: names of headers in small letters."""

    status: int
    headers: dict[str, str]
    body: Any


@pytest.fixture(scope="module")
def novu_http(novu_daemon: Any) -> Callable[..., HttpAnswer]:
    """Asks the daemon without an SDK: for what they do not send, or do not show."""

    def ask(method: str, path: str, body: Any = None, **headers: str) -> HttpAnswer:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Authorization": f"ApiKey {API_KEY}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"http://127.0.0.1:{novu_daemon.port}{path}", data, sent, method=method)
        try:
            answer = urllib.request.urlopen(request, timeout=10)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read()
            told = {name.lower(): value for name, value in answer.headers.items()}
            return HttpAnswer(answer.status, told, json.loads(text) if text else None)

    return ask
