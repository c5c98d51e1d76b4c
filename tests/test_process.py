"""The daemon as a process: real signals, crashes, files, sockets and receivers on this machine."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import email
import email.policy
import hashlib
import http.server
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiosmtpd.controller
import pytest
import standardwebhooks

import digestd
from conftest import ROOT, Process, free_port, wait_for

DATA = ROOT / "tests" / "data"


# -- the other sides ---------------------------------------------------------------------------------------------------


class Receiver:
    """A webhook endpoint in this process. `posts` holds (headers, body, path) of each request, when it came."""

    def __init__(self) -> None:
        self.posts: list[tuple[dict[str, str], bytes, str]] = []
        self.delay: Callable[[], Any] = lambda: None  # called before each answer
        self.open = threading.Event()
        self.open.set()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.posts.append(({name.lower(): value for name, value in self.headers.items()}, body, self.path))
                if self.path.startswith("/slow"):
                    receiver.open.wait(60)
                receiver.delay()
                with contextlib.suppress(OSError):  # the daemon may be gone by now
                    self.send_response(204)
                    self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a killed daemon resets its connections
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def bodies(self, path: str = "/") -> list[Any]:
        return [json.loads(body) for _, body, where in list(self.posts) if where.startswith(path)]

    def ids(self, path: str = "/") -> list[str]:
        return [headers["webhook-id"] for headers, _, where in list(self.posts) if where.startswith(path)]

    def close(self) -> None:
        self.open.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def pause(seconds: float) -> None:
    """The world's own slowness, as of an endpoint or an editor; never a way to wait for the daemon."""
    threading.Event().wait(seconds)


class Sink:
    """A mail server that keeps what comes."""

    def __init__(self) -> None:
        self.mails: list[email.message.EmailMessage] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 kept"


@pytest.fixture
def sink() -> Iterator[tuple[Sink, int]]:
    kept = Sink()
    controller = aiosmtpd.controller.Controller(kept, hostname="127.0.0.1", port=free_port())
    controller.start()
    yield kept, controller.port
    controller.stop()


class OwnProcess(Process):
    """A daemon whose config is written by the test, listen line included."""

    def __init__(self, folder: pathlib.Path, text: str, port: int, **env: str) -> None:
        self.folder, self.port, self.env = folder, port, env
        self.config = folder / "config.toml"
        self.config.write_text(text)
        self.database = folder / "digestd.sqlite3"
        self.start()


@pytest.fixture
def own_daemon(tmp_path: pathlib.Path) -> Iterator[Callable[..., OwnProcess]]:
    started: list[OwnProcess] = []

    def start(text: str, port: int, **env: str) -> OwnProcess:
        process = OwnProcess.__new__(OwnProcess)
        started.append(process)
        process.__init__(tmp_path, text, port, **env)  # type: ignore[misc]
        return process

    yield start
    for process in started:
        if hasattr(process, "process") and process.process.poll() is None:
            process.kill()


def run_once(folder: pathlib.Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`digestd run` in a folder where it cannot, and what it says."""
    return subprocess.run(
        [sys.executable, str(ROOT / "digestd.py"), "run", "--config", str(folder / "config.toml")],
        cwd=folder, capture_output=True, text=True, timeout=20, env={**os.environ, **env},
    )  # fmt: skip


def hook(receiver: Receiver, window: str = "1s", path: str = "/hook") -> str:
    """One sender, one workflow `w`: a digest, then a post."""
    return f"""
[senders.hook]
type = "webhook"
url = "{receiver.url(path)}"
retry = ["1s", "1s", "1s"]
jitter = 0
""" + workflow("w", window)


def workflow(name: str, window: str = "1h", sender: str = "hook") -> str:
    return f"""
[workflows.{name}]
[[workflows.{name}.steps]]
id = "digest"
type = "digest"
window = "{window}"
[[workflows.{name}.steps]]
id = "chat"
type = "chat"
sender = "{sender}"
"""


# at once, without a window
ALONE = """
[workflows.alone]
[[workflows.alone.steps]]
id = "chat"
type = "chat"
sender = "hook"
"""


# -- the contract's own config, from trigger to mail -------------------------------------------------------------------


def test_the_config_of_the_contract_gives_two_digests_by_post_and_mail_and_three_runs_of_the_bird(
    own_daemon, receiver, sink
):
    mails, smtp_port = sink
    port = free_port()
    text = (DATA / "contract.toml").read_text()
    for old, new in (("127.0.0.1:3210", f"127.0.0.1:{port}"), ("http://127.0.0.1:9000/hook", receiver.url()),
                     ("port = 2525", f"port = {smtp_port}")):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    process = own_daemon(text, port)
    to = {"subscriberId": "s1", "email": "ada@example.org"}
    for number, post in enumerate(("p1", "p2", "p1", "p1", "p2")):
        status, answer = process.trigger("comments", to, {"postId": post, "text": f"text {number}"})
        assert (status, answer["data"]["status"]) == (201, "processed")

    wait_for(lambda: len(mails.mails) >= 2, what="both mails")
    wait_for(lambda: process.query("SELECT state FROM v_repeatables") == [("finished",)], what="the end of the bird")
    wait_for(lambda: process.query("SELECT count(*) FROM jobs WHERE state <> 'completed'") == [(0,)])

    verifier = standardwebhooks.Webhook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqr")
    for headers, body, _ in receiver.posts:
        verifier.verify(body, headers)
    chats = [body for body in receiver.bodies() if body["type"] == "digestd.chat"]
    digested = [[event["payload"]["text"] for event in body["data"]["digest"]["events"]] for body in chats]
    assert sorted(digested) == [["text 0", "text 2", "text 3"], ["text 1", "text 4"]]
    assert sorted(body["data"]["digest"]["key"] for body in chats) == ["p1", "p2"]
    assert sorted(mail["subject"] for mail in mails.mails) == [
        "2 notifications on post p2",
        "3 notifications on post p1",
    ]
    texts = sorted(mail.get_content().replace("\r\n", "\n") for mail in mails.mails)
    assert texts == ["- text 0\n- text 2\n- text 3\n", "- text 1\n- text 4\n"]
    assert {mail["to"] for mail in mails.mails} == {"ada@example.org"}

    birds = [body for body in receiver.bodies() if body["type"] == "digestd.repeatable"]
    assert [body["data"]["count"] for body in birds] == [1, 2, 3]
    assert len(set(receiver.ids())) == len(receiver.posts) == 5
    assert process.query("SELECT count, next_utc FROM v_repeatables") == [(3, None)]
    windows = process.query("SELECT key, state, events FROM v_digests ORDER BY key")
    assert windows == [('"p1"', "closed", 3), ('"p2"', "closed", 2)]
    assert process.query("SELECT * FROM v_trouble") == []
    assert process.stop(wait=5) == 0


# -- kill -9 -----------------------------------------------------------------------------------------------------------


TWICE_INTERRUPTED = """
SELECT count(*) FROM jobs, v_now
WHERE (state IN ('waiting', 'active') OR (state = 'delayed' AND due_at < now_at + 1000))
AND (SELECT count(*) FROM attempts WHERE job_id = jobs.id AND outcome = 'interrupted') > 1
"""
TOTAL, PART, PEOPLE, KILLS = 10_000, 20, 100, 10


class Feed:
    """Four clients that send bulks, each until it is acknowledged, as a caller with transaction ids does."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.acknowledged = 0
        self.parts = collections.deque(range(0, TOTAL, PART))
        self.may_send = threading.Event()
        self.until = time.monotonic() + 90

    def send(self, first: int) -> bool:
        events = [
            {"name": "w", "to": f"s{n % PEOPLE}", "payload": {"n": n}, "transactionId": f"t{n}"}
            for n in range(first, first + PART)
        ]
        try:
            status, answer = self.process.request("POST", "/v1/events/trigger/bulk", {"events": events})
        except (OSError, ValueError, http.client.HTTPException):  # killed meanwhile: stored or not, nobody knows
            return False
        return status == 201 and all(item["status"] == "processed" for item in answer["data"])

    def work(self) -> None:
        while time.monotonic() < self.until:
            try:
                first = self.parts.popleft()
            except IndexError:
                return
            while not self.send(first):
                assert time.monotonic() < self.until
                self.may_send.wait(1)
            self.acknowledged += PART


def test_ten_kills_among_ten_thousand_triggers_lose_and_double_nothing(daemon, receiver):
    seed = int(os.environ.get("DIGESTD_SEED", random.randrange(1 << 32)))
    print(f"DIGESTD_SEED={seed}")
    dice = random.Random(seed)
    receiver.delay = lambda: pause(0.02)  # so that posts are in the air when the kill comes
    process = daemon(hook(receiver, window="2s"))
    feed = Feed(process)
    feed.may_send.set()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(feed.work) for _ in range(4)]
        for mark in sorted(dice.sample(range(200, TOTAL - 400, 100), KILLS)):
            wait_for(lambda mark=mark: feed.acknowledged >= mark, what=f"trigger {mark}")
            # a message that the process dies of three times is given up, by design: let no innocent one come to that
            wait_for(lambda: process.query(TWICE_INTERRUPTED) == [(0,)], what="the messages of the crashes before")
            pause(dice.random() * 0.5)
            feed.may_send.clear()
            process.kill()
            process.start()
            feed.may_send.set()
        for worker in workers:
            worker.result()
    assert feed.acknowledged == TOTAL

    unfinished = (
        "SELECT (SELECT count(*) FROM digests WHERE state <> 'closed')"
        " + (SELECT count(*) FROM jobs WHERE state <> 'completed') + (SELECT count(*) FROM runs WHERE state = 'active')"
    )
    wait_for(lambda: process.query(unfinished) == [(0,)], 30, what=f"the last digest\n{process.logged()[-3000:]}")

    # in the database: each event once, in one window, which has one run with one message
    stored = process.query("SELECT transaction_id, count(*), count(digest_id), min(state) FROM events GROUP BY 1")
    assert sorted(stored) == sorted((f"t{n}", 1, 1, "placed") for n in range(TOTAL))
    of_digest = "SELECT count(*) FROM runs r JOIN jobs j ON j.run_id = r.id WHERE r.digest_id = d.id"
    assert process.query(f"SELECT count(*) FROM digests d WHERE ({of_digest}) <> 1") == [(0,)]
    # at the receiver: each event in one message, which may have come more than once, with the same bytes
    messages: dict[str, bytes] = {}
    seen: collections.Counter[str] = collections.Counter()
    for headers, body, _ in receiver.posts:
        if messages.setdefault(headers["webhook-id"], body) is body:
            seen.update(event["transactionId"] for event in json.loads(body)["data"]["digest"]["events"])
        assert messages[headers["webhook-id"]] == body
    assert seen == {f"t{n}": 1 for n in range(TOTAL)}
    # never more repeats than crashes and tries in flight can explain
    interrupted = process.query("SELECT count(*) FROM attempts WHERE outcome <> 'sent'")[0][0]
    assert len(receiver.posts) - len(messages) <= interrupted
    assert process.query("SELECT * FROM v_trouble") == []
    assert process.query("PRAGMA integrity_check") == [("ok",)]
    assert process.stop() == 0


def test_a_post_in_the_air_at_a_kill_is_sent_again_with_the_same_id(daemon, receiver):
    receiver.open.clear()
    process = daemon(hook(receiver, path="/slow") + ALONE)
    process.trigger("alone", "s1", {"n": 1})
    wait_for(lambda: receiver.posts, what="the first try")
    process.kill()
    receiver.open.set()
    process.start()
    wait_for(lambda: process.query("SELECT state FROM jobs") == [("completed",)], what="the second try")
    assert len(receiver.posts) == 2 and len(set(receiver.ids())) == 1
    assert len({body for _, body, _ in receiver.posts}) == 1
    assert process.query("SELECT number, outcome FROM attempts ORDER BY number") == [(1, "interrupted"), (2, "sent")]
    assert process.query("SELECT tries FROM jobs") == [(1,)]  # the interruption used up nothing of the plan


def test_a_message_that_the_process_dies_of_three_times_is_given_up_and_listed(daemon, receiver):
    receiver.open.clear()
    process = daemon(hook(receiver, path="/slow") + ALONE)
    process.trigger("alone", "s1", {"n": 1})
    for tries in (1, 2, 3):
        wait_for(lambda tries=tries: len(receiver.posts) == tries, what=f"try {tries}")
        process.kill()
        process.start()
    assert process.query("SELECT outcome FROM attempts") == [("interrupted",)] * 3
    assert process.query("SELECT what FROM v_trouble") == [("job failed",)]
    assert len(set(receiver.ids())) == 1 and len(receiver.posts) == 3


# -- the end by a signal -----------------------------------------------------------------------------------------------


def test_sigterm_lets_the_post_end_records_it_and_begins_no_other(daemon, receiver):
    receiver.open.clear()
    config = hook(receiver, path="/slow") + ALONE + "[daemon]\nconcurrency = 1\n"
    process = daemon(config)
    for number in range(3):
        process.trigger("alone", f"s{number}", {"n": number})
    wait_for(lambda: len(receiver.posts) == 1, what="the first post")
    process.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in process.logged(), what="the daemon's word that it ends")
    receiver.open.set()
    assert process.process.wait(20) == 0
    assert len(receiver.posts) == 1
    assert process.query("SELECT state FROM jobs ORDER BY id") == [("completed",), ("waiting",), ("waiting",)]
    assert process.query("SELECT outcome FROM attempts") == [("sent",)]
    process.start()
    wait_for(lambda: process.query("SELECT count(*) FROM jobs WHERE state = 'completed'") == [(3,)], what="the others")
    assert len(receiver.posts) == len(set(receiver.ids())) == 3


def test_a_second_sigterm_ends_at_once_and_the_post_is_repeated_after_the_start(daemon, receiver):
    receiver.open.clear()
    process = daemon(hook(receiver, path="/slow") + ALONE + '[daemon]\ndrain_timeout = "10m"\n')
    process.trigger("alone", "s1")
    wait_for(lambda: receiver.posts, what="the post")
    process.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in process.logged(), what="the daemon's word that it ends")
    assert process.process.poll() is None
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait(20) != 0
    receiver.open.set()
    process.start()
    wait_for(lambda: process.query("SELECT state FROM jobs") == [("completed",)], what="the repeated post")
    assert len(set(receiver.ids())) == 1


def test_a_post_that_outlasts_the_drain_time_is_repeated_after_the_start(daemon, receiver):
    receiver.open.clear()
    process = daemon(hook(receiver, path="/slow") + ALONE + '[daemon]\ndrain_timeout = "500ms"\n')
    process.trigger("alone", "s1")
    wait_for(lambda: receiver.posts, what="the post")
    assert process.stop() == 0
    receiver.open.set()
    process.start()
    wait_for(lambda: process.query("SELECT state FROM jobs") == [("completed",)], what="the repeated post")
    assert process.query("SELECT outcome FROM attempts ORDER BY number")[-1] == ("sent",)
    assert len(receiver.posts) == 2 and len(set(receiver.ids())) == 1


def test_a_bulk_that_waits_for_its_commit_at_sigterm_is_answered_truly(daemon, receiver):
    process = daemon(hook(receiver, window="1h"))
    with contextlib.closing(sqlite3.connect(process.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(process.trigger, "w", "s1", {}, transactionId="late")
            wait_for(lambda: "cannot be written" in process.logged(), what="the trigger in the daemon's hands")
            process.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "SIGTERM" in process.logged(), what="the daemon's word that it ends")
            other.execute("ROLLBACK")
            try:
                status = answer.result()[0]
            except (OSError, http.client.HTTPException):
                status = None  # no answer is no promise
    assert process.process.wait(20) == 0
    assert process.query("SELECT count(*) FROM events") == [(1 if status == 201 else 0,)]


def test_an_idle_daemon_ends_with_0_at_ctrl_c(daemon, receiver):
    process = daemon(hook(receiver))
    process.process.send_signal(signal.SIGINT)
    assert process.process.wait(5) == 0
    assert "Traceback" not in process.logged()


# -- one owner ---------------------------------------------------------------------------------------------------------


def test_a_second_daemon_on_the_same_database_is_refused_with_the_pid_of_the_first(daemon, receiver, tmp_path):
    process = daemon(hook(receiver))
    second = run_once(tmp_path)
    assert second.returncode == 1
    assert str(process.process.pid) in second.stderr and "Traceback" not in second.stderr
    assert process.trigger("w", "s1")[0] == 201
    process.kill()
    process.start()  # a lock left by a crash keeps nobody out


def test_rows_that_another_program_inserts_are_digested(daemon, receiver):
    process = daemon(hook(receiver))
    sql = "".join(
        f"INSERT INTO events (workflow, subscriber_id, payload) VALUES ('w', 'sql', '{{\"n\":{number}}}');"
        for number in range(3)
    )
    subprocess.run(
        [sys.executable, "-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])",
         str(process.database), sql + "INSERT INTO events (workflow, subscriber_id) VALUES ('nothing', 'sql');"],
        check=True, timeout=20,
    )  # fmt: skip
    wait_for(lambda: process.query("SELECT count(*) FROM events WHERE state = 'received'") == [(0,)], 2, "their notice")
    [body] = wait_for(receiver.bodies, what="their digest")
    assert [event["payload"]["n"] for event in body["data"]["digest"]["events"]] == [0, 1, 2]
    assert process.query("SELECT what FROM v_trouble") == [("event failed",)]


def test_an_endpoint_that_hangs_does_not_delay_the_messages_of_another(daemon, receiver):
    receiver.open.clear()
    other = f'[senders.other]\ntype = "webhook"\nurl = "{receiver.url("/quick")}"\n'
    quick = ALONE.replace("workflows.alone", "workflows.quick").replace('"hook"', '"other"')
    process = daemon(hook(receiver, path="/slow") + other + ALONE + quick)
    for number in range(20):
        assert process.trigger("alone", f"s{number}", {"n": number})[0] == 201
    wait_for(lambda: receiver.bodies("/slow"), what="a post that hangs")
    for number in range(20):
        assert process.trigger("quick", f"s{number}", {"n": number})[0] == 201
    wait_for(lambda: len(receiver.bodies("/quick")) == 20, what="the other's messages")
    done = "SELECT sender, count(*) FROM jobs WHERE state = 'completed' GROUP BY sender"
    wait_for(lambda: process.query(done) == [("other", 20)], what="their record, and none of the endpoint that hangs")
    receiver.open.set()
    wait_for(lambda: process.query(done) == [("hook", 20), ("other", 20)], what="the rest")


def test_a_job_of_five_seconds_each_second_keeps_its_rate_with_five_places_and_waits_its_turn_with_one(
    tmp_path, receiver
):
    """Thirty seconds by the real clock, both daemons side by side."""
    spec = '[repeatables.x]\nevery = "1s"\nsender = "hook"\n'
    receiver.delay = lambda: pause(5)
    processes = {}
    for places in (1, 5):
        (tmp_path / str(places)).mkdir()
        config = f"[daemon]\nconcurrency = {places}\n" + hook(receiver, path=f"/{places}") + spec
        processes[places] = Process(tmp_path / str(places), config)
    try:
        pause(31)
        taken = "SELECT slot_at, taken_at FROM runs WHERE taken_at IS NOT NULL ORDER BY taken_at"
        each = processes[5].query(taken)
        slots = [slot_at for slot_at, _ in each]
        assert slots == list(range(slots[0], slots[0] + 1000 * len(slots), 1000)) and len(slots) >= 29
        turns = [taken_at for _, taken_at in processes[1].query(taken)]
        assert 5 <= len(turns) <= 7
        assert all(later - sooner >= 5000 for sooner, later in zip(turns, turns[1:], strict=False))
        for process in processes.values():
            assert process.query("SELECT count(*) FROM runs WHERE taken_at IS NULL AND state = 'active'") == [(1,)]
        late = sorted(taken_at - slot_at for slot_at, taken_at in each)
        print(f"late by p50 {late[len(late) // 2]} ms, most {late[-1]} ms")
    finally:
        for process in processes.values():
            process.kill()


# -- reload ------------------------------------------------------------------------------------------------------------


def knows(process: Process, name: str) -> bool:
    """Whether the running config has a workflow."""
    return process.trigger(name, "s1")[0] == 201


def test_sighup_takes_a_good_config_and_keeps_the_old_one_for_a_bad_one(daemon, receiver, cli):
    process = daemon(hook(receiver))
    good = process.config.read_text() + workflow("second")
    process.config.write_text(good)
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: knows(process, "second"), what="the new workflow")

    bad = good.replace("[workflows.w]", "[workflows.third]") + workflow("fourth", window="never")
    line = bad.splitlines().index('window = "never"') + 1
    process.config.write_text(bad)
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "refused" in process.logged(), what="the refusal")
    wait_for(lambda: f"config.toml:{line}: " in process.logged(), what="the file and line")
    assert knows(process, "w") and knows(process, "second")
    assert not knows(process, "third") and not knows(process, "fourth")
    told = wait_for(lambda: process.query("SELECT value FROM meta WHERE name = 'config_refused'"), what="the row")
    assert f"config.toml:{line}: " in told[0][0]
    # `status` must tell it while the config that is on disk is the bad one
    status = cli("status")
    assert status.returncode != 0
    assert "refused" in status.stdout + status.stderr
    assert f"config.toml:{line}: " in status.stdout + status.stderr


def test_the_command_reload_returns_when_the_file_is_in_force_and_fails_for_a_bad_one(daemon, receiver, cli):
    process = daemon(hook(receiver))
    good = process.config.read_text()
    for number in range(3):
        process.config.write_text(good + workflow(f"w{number}"))
        done = cli("reload")
        assert (done.returncode, done.stderr) == (0, "") and "in force" in done.stdout
        assert knows(process, f"w{number}")
    assert cli("reload", "--json").stdout == '{"ok": true}\n', "unchanged is fine"
    process.config.write_text(good + workflow("bad", window="never"))
    refused = cli("reload")
    assert refused.returncode == 78 and "config.toml:" in refused.stderr
    assert knows(process, "w2") and process.process.poll() is None
    process.config.write_text(good)
    assert cli("reload").returncode == 0
    process.stop()
    alone = cli("reload")
    assert alone.returncode == 1 and "no daemon runs" in alone.stderr


def test_a_reload_that_comes_while_one_is_under_way_is_not_forgotten(daemon, receiver, cli):
    process = daemon(hook(receiver))
    good = process.config.read_text()
    process.process.send_signal(signal.SIGHUP)
    process.config.write_text(good + workflow("late"))
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: knows(process, "late"), 3, "the file as it was at the second signal")


def test_a_config_with_a_secret_that_is_not_there_is_refused_until_it_is_mended(daemon, receiver, cli):
    process = daemon(hook(receiver))
    good = process.config.read_text()
    process.config.write_text(good.replace("jitter = 0", 'jitter = 0\nsecret = { env = "NOT_SET_ANYWHERE" }'))
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: process.query("SELECT value FROM meta WHERE name = 'config_refused'"), what="the refusal")
    status = cli("status")
    assert status.returncode == 1
    assert "refused" in status.stdout and "NOT_SET_ANYWHERE" in status.stdout
    process.config.write_text(good + workflow("mended"))
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: knows(process, "mended"), what="the mended config")
    assert "refused" not in cli("status").stdout


def test_a_save_by_rename_is_seen_each_time(daemon, receiver):
    process = daemon(hook(receiver))
    text = process.config.read_text()
    for number in range(3):
        fresh = process.folder / "config.toml.tmp"
        fresh.write_text(text + workflow(f"saved{number}"))
        fresh.rename(process.config)
        wait_for(lambda number=number: knows(process, f"saved{number}"), what=f"save {number}")


BIRD = '[repeatables.bird]\nevery = "1h"\nlimit = 9\nsender = "hook"\n'


def test_a_save_with_a_backup_in_two_halves_takes_only_the_whole_file(daemon, receiver):
    process = daemon(hook(receiver) + BIRD)
    text = process.config.read_text()
    backup = process.folder / "config.toml~"
    process.config.rename(backup)
    new = workflow("saved") + text
    with process.config.open("w") as file:
        file.write(new[: len(new) // 2])
        file.flush()
        pause(0.1)  # an editor on a slow disk
        file.write(new[len(new) // 2 :])
    backup.unlink()
    wait_for(lambda: knows(process, "saved"), what="the saved config")
    assert knows(process, "w")
    assert process.query("SELECT state, reason FROM repeatables") == [("active", None)]
    assert process.logged().count("was read again") == 1


def test_a_file_that_is_away_or_empty_for_a_while_ends_nothing(daemon, receiver):
    process = daemon(hook(receiver) + BIRD)
    text = process.config.read_text()
    away = process.folder / "away"
    process.config.rename(away)
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "refused" in process.logged(), what="the refusal of a file that is away")
    assert knows(process, "w")
    away.rename(process.config)
    os.truncate(process.config, 0)
    pause(0.05)  # shorter than the daemon waits for a file to settle
    process.config.write_text(text + workflow("restored"))
    wait_for(lambda: knows(process, "restored"), what="the restored file")
    assert process.query("SELECT state, count FROM repeatables") == [("active", 0)]
    assert process.query("SELECT count(*) FROM digests WHERE state = 'discarded'") == [(0,)]


def test_an_empty_file_is_refused_and_the_restored_one_taken(daemon, receiver):
    process = daemon(hook(receiver) + BIRD)
    text = process.config.read_text()
    os.truncate(process.config, 0)
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "refused" in process.logged() or "read again" in process.logged(), what="the daemon's word on it")
    assert knows(process, "w")
    process.config.write_text(text + workflow("restored"))
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: knows(process, "restored"), what="the restored file")
    assert process.query("SELECT state FROM repeatables") == [("active",)]


def test_a_swapped_link_is_seen_each_time(daemon, receiver, tmp_path):
    # config.toml -> data/config.toml, data -> v0, as orchestrators publish files
    for number in range(3):
        (tmp_path / f"v{number}").mkdir()
    (tmp_path / "data").symlink_to("v0")
    (tmp_path / "config.toml").symlink_to("data/config.toml")
    (tmp_path / "junk").symlink_to("nowhere")  # a broken link beside it is nobody's business
    process = daemon(hook(receiver))
    for number in (1, 2):
        (tmp_path / f"v{number}" / "config.toml").write_text(process.config.read_text() + workflow(f"linked{number}"))
        (tmp_path / "swap").symlink_to(f"v{number}")
        (tmp_path / "swap").rename(tmp_path / "data")
        wait_for(lambda number=number: knows(process, f"linked{number}"), what=f"swap {number}")
    assert process.config.is_symlink()
    assert "ERROR" not in process.logged()


def test_a_repeatable_changed_in_the_config_keeps_its_count_and_a_removed_one_is_retired(daemon, receiver):
    spec = '[repeatables.{}]\nevery = "{}"\nlimit = 100\nsender = "hook"\n'
    config = hook(receiver) + spec.format("changed", "500ms") + spec.format("removed", "1h")
    process = daemon(config)
    wait_for(lambda: receiver.bodies(), what="the first run")
    text = process.config.read_text()
    process.config.write_text(text.replace(spec.format("changed", "500ms"), spec.format("changed", "1h")))
    process.process.send_signal(signal.SIGHUP)
    schedule = "SELECT schedule, state FROM v_repeatables WHERE name = 'changed'"
    wait_for(lambda: process.query(schedule) == [("every 3600000 ms", "active")], what="the change")
    [(count, pending)] = process.query(
        "SELECT count, (SELECT slot_at FROM runs WHERE repeatable_id = s.id AND taken_at IS NULL AND state = 'active')"
        " FROM repeatables s WHERE name = 'changed'"
    )
    assert count >= 1 and pending % 3_600_000 == 0
    process.config.write_text(text.replace(spec.format("removed", "1h"), ""))
    process.process.send_signal(signal.SIGHUP)
    state = "SELECT state, next_utc FROM v_repeatables WHERE name = 'removed'"
    wait_for(lambda: process.query(state) == [("retired", None)], what="the removal")
    wait_for(lambda: process.query("SELECT max(count) FROM repeatables")[0][0] > count, what="the old rate again")
    assert "changed" in process.logged() and "removed" in process.logged()


def test_a_changed_secret_file_is_taken_without_a_restart(daemon, receiver, tmp_path):
    secrets = ["whsec_" + "QUFB" * 10, "whsec_" + "QkJC" * 10]
    (tmp_path / "secret").write_text(secrets[0])
    config = hook(receiver).replace("jitter = 0", f'jitter = 0\nsecret = {{ file = "{tmp_path}/secret" }}') + ALONE
    process = daemon(config)
    (tmp_path / "secret").write_text(secrets[1])
    wait_for(lambda: "read again" in process.logged(), what="the new secret")
    process.trigger("alone", "s1")
    [(headers, body, _)] = wait_for(lambda: list(receiver.posts), what="the post")
    standardwebhooks.Webhook(secrets[1]).verify(body, headers)


# -- systemd -----------------------------------------------------------------------------------------------------------


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: list[str] = []
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.line.bind("\0" + path[1:] if path[0] == "@" else path)
        self.line.setblocking(False)

    def messages(self) -> list[str]:
        """All that was said so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard.append(self.line.recv(65536).decode())
        return self.heard

    def count(self, word: str) -> int:
        return sum(word in message.splitlines() for message in self.messages())


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.line.close()


def test_systemd_hears_of_the_start_the_life_the_reload_and_the_end(daemon, receiver, manager):
    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", process.port)) == 0

    process = daemon(hook(receiver), NOTIFY_SOCKET=manager.path, WATCHDOG_USEC="2000000")
    wait_for(lambda: manager.count("READY=1") == 1, what="READY")
    assert listens()
    assert any("STATUS=" in message for message in manager.messages())
    # they come, and they are no flood
    pings = manager.count("WATCHDOG=1")
    began = time.monotonic()
    wait_for(lambda: manager.count("WATCHDOG=1") >= pings + 2, 10, "two pings")
    assert time.monotonic() - began > 0.3

    process.config.write_text(process.config.read_text() + workflow("second"))
    process.process.send_signal(signal.SIGHUP)
    wait_for(lambda: manager.count("READY=1") == 2, what="READY after the reload")
    said = [word for message in manager.messages() for word in message.splitlines()]
    assert said.index("RELOADING=1") < len(said) - 1 - said[::-1].index("READY=1")
    [moment] = [word for word in said if word.startswith("MONOTONIC_USEC=")]
    assert 0 < int(moment.partition("=")[2]) <= time.monotonic_ns() // 1000
    assert knows(process, "second")

    assert process.stop() == 0
    assert manager.count("STOPPING=1") == 1


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_ready_is_said_once_and_only_when_the_port_listens(daemon, tmp_path, receiver, kind):
    path = str(tmp_path / "notify") if kind == "path" else f"@digestd-test-{os.getpid()}"
    with contextlib.closing(Manager(path).line) as line:
        process = daemon(hook(receiver), NOTIFY_SOCKET=path)
        process.kill()
        with contextlib.suppress(BlockingIOError):  # what the first one said
            while line.recv(65536):
                pass
        line.settimeout(20)
        process.start(wait=False)
        while "READY=1" not in line.recv(65536).decode().splitlines():
            pass
        assert process.request("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("value", ["/nowhere/notify", "nonsense"], ids=["missing file", "no path"])
def test_a_notify_socket_that_is_gone_is_no_trouble(daemon, receiver, value):
    process = daemon(hook(receiver), NOTIFY_SOCKET=value, WATCHDOG_USEC="1000000")
    assert knows(process, "w")
    assert process.stop() == 0
    assert "Traceback" not in process.logged()


# what systemd does: the socket as descriptor 3, and the pid of the daemon itself in LISTEN_PID
LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.execvp("sh", ["sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh", *sys.argv[2:]])
"""


def test_a_socket_handed_over_by_systemd_is_served_and_lives_on(tmp_path, receiver):
    config = tmp_path / "config.toml"
    config.write_text(f'[api]\nlisten = ["systemd"]\n{hook(receiver)}')
    process = Process.__new__(Process)
    process.folder, process.config, process.database = tmp_path, config, tmp_path / "digestd.sqlite3"
    with socket.socket() as listener, (tmp_path / "log.txt").open("ab") as process.log:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        process.port = listener.getsockname()[1]
        for number in (1, 2):  # a second daemon on the same socket, as after a restart
            process.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(listener.fileno()),
                 sys.executable, str(ROOT / "digestd.py"), "run", "--config", str(config)],
                cwd=tmp_path, stdout=process.log, stderr=process.log, pass_fds=[listener.fileno()],
            )  # fmt: skip
            try:
                wait_for(process.is_healthy, what="the daemon")
                assert process.trigger("w", f"s{number}")[0] == 201
                process.process.terminate()
                assert process.process.wait(20) == 0
            finally:
                process.process.kill()
                process.process.wait()
    assert process.query("SELECT count(*) FROM events") == [(2,)]


# -- what it cannot start on -------------------------------------------------------------------------------------------


def test_a_bad_config_ends_with_78_and_tells_every_problem_with_its_place(tmp_path, receiver):
    text = hook(receiver, window="never") + '[repeatables.bird]\nevery = "1s"\nsender = "nobody"\n'
    (tmp_path / "config.toml").write_text(text)
    ended = run_once(tmp_path)
    assert ended.returncode == 78
    line = text.splitlines().index('window = "never"') + 1
    assert f"config.toml:{line}: workflows.w.steps" in ended.stderr
    assert "repeatables.bird.sender" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "digestd.sqlite3").exists()


@pytest.mark.parametrize("text", ["a = = 1", None], ids=["syntax", "missing"])
def test_a_config_that_cannot_be_read_ends_with_78(tmp_path, text):
    if text is not None:
        (tmp_path / "config.toml").write_text(text)
    ended = run_once(tmp_path)
    assert ended.returncode == 78
    assert "config.toml" in ended.stderr and "Traceback" not in ended.stderr


FOR_FILLED = '[senders.hook]\ntype = "log"\n' + workflow("w")


def digest_of(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def once_filled(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A database with a hundred windows in it, closed cleanly: all of it in the one file."""
    process = Process(tmp_path_factory.mktemp("filled"), FOR_FILLED)
    try:
        for _ in range(3):
            events = [{"name": "w", "to": f"s{n}", "payload": {"text": "x" * 200, "n": n}} for n in range(100)]
            assert process.request("POST", "/v1/events/trigger/bulk", {"events": events})[0] == 201
        assert process.stop() == 0
    finally:
        if process.process.poll() is None:
            process.kill()
    assert not process.database.with_name("digestd.sqlite3-wal").exists()
    return process.database


@pytest.fixture
def filled(once_filled: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of it, with a config beside it."""
    (tmp_path / "config.toml").write_text(f'[api]\nlisten = ["127.0.0.1:{free_port()}"]\n{FOR_FILLED}')
    return pathlib.Path(shutil.copy(once_filled, tmp_path))


def refused(path: pathlib.Path, *words: str) -> None:
    """The daemon ends with 1, says the file and these words, and leaves every byte as it was."""
    before = digest_of(path)
    ended = run_once(path.parent)
    assert ended.returncode == 1, ended.stderr
    assert str(path) in ended.stderr or path.name in ended.stderr
    assert any(word in ended.stderr for word in words), ended.stderr
    assert "Traceback" not in ended.stderr
    assert digest_of(path) == before


def test_a_damaged_database_is_refused_and_left_as_it_is(filled):
    with filled.open("r+b") as file:
        file.seek(8192)
        file.write(random.Random(1).randbytes(4096))
    refused(filled, "damaged")


@pytest.mark.parametrize("content", [b"not a database, but a letter\n" * 300, b"short"], ids=["long", "short"])
def test_a_text_file_instead_of_a_database_is_refused_and_left_as_it_is(filled, content):
    filled.write_bytes(content)
    refused(filled, "not an SQLite file")


def test_the_database_of_another_program_is_refused_and_left_as_it_is(filled):
    filled.unlink()
    with contextlib.closing(sqlite3.connect(filled)) as other:
        other.executescript("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)")
    refused(filled, "another program")


def test_the_database_of_a_newer_digestd_is_refused_and_left_as_it_is(filled):
    with contextlib.closing(sqlite3.connect(filled)) as other:
        other.execute("PRAGMA user_version = 999")
    refused(filled, "999")


def test_a_read_only_database_is_refused_and_left_as_it_is(filled):
    filled.chmod(0o444)
    with filled.open("r+b") if os.access(filled, os.W_OK) else contextlib.nullcontext() as file:
        if file:  # root may write everything: a write version that SQLite does not know makes it read-only for all
            file.seek(18)
            file.write(b"\x03")
    refused(filled, "must be writable")


# in a process of its own: reading the file here to compare it would drop a lock of this one
HOLD = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("PRAGMA locking_mode = EXCLUSIVE")
other.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_locked_database_is_told_at_start_and_left_as_it_is(filled):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(filled)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        refused(filled, "another program holds it")
        other.kill()


def test_a_folder_that_is_not_there_is_told(tmp_path, receiver):
    (tmp_path / "config.toml").write_text(f'[daemon]\ndatabase = "nowhere/d.sqlite3"\n{hook(receiver)}')
    ended = run_once(tmp_path)
    assert ended.returncode == 1
    assert "nowhere" in ended.stderr and "Traceback" not in ended.stderr


def test_nobody_else_can_read_the_files_whatever_the_umask(daemon, receiver):
    before = os.umask(0o022)
    try:
        process = daemon(hook(receiver, window="1h"))
    finally:
        os.umask(before)
    assert process.trigger("w", "s1")[0] == 201
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in process.folder.glob("digestd.sqlite3*")}
    assert modes == dict.fromkeys(
        ("digestd.sqlite3", "digestd.sqlite3-wal", "digestd.sqlite3-shm", "digestd.sqlite3.lock"), 0o600
    )


def test_an_idle_daemon_writes_nothing(daemon, receiver):
    process = daemon(hook(receiver, window="1h"))
    assert process.trigger("w", "s1")[0] == 201
    wal = process.database.with_name("digestd.sqlite3-wal")
    before = digest_of(wal)
    until = time.monotonic() + 2.2  # two looks for rows of others, and more
    wait_for(lambda: time.monotonic() > until)
    assert digest_of(wal) == before


def test_the_log_is_moved_into_the_database_by_another_connection(tmp_path):
    path = tmp_path / "x.sqlite3"
    digestd.open_store(str(path), 1)
    try:
        with digestd.transaction():
            digestd.remember("fact", "kept", 1)
        digestd.checkpoint(str(path))
        alone = pathlib.Path(shutil.copyfile(path, tmp_path / "alone.sqlite3"))
    finally:
        digestd.close_store()
    with contextlib.closing(sqlite3.connect(alone)) as connection:
        assert connection.execute("SELECT value FROM meta WHERE name = 'fact'").fetchall() == [("kept",)]


def test_a_database_that_was_moved_away_is_not_made_anew_by_tending(tmp_path):
    digestd.checkpoint(str(tmp_path / "gone.sqlite3"))
    assert list(tmp_path.iterdir()) == []
