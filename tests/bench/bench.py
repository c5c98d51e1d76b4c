"""What digestd costs, beside what the machine allows, measured in turns in one run. Prints a table and a line of JSON.

.venv/bin/python tests/bench/bench.py [--quick] [--only ingest,close,…]

Needs nothing but Python and digestd's packages; uses wrk for the load when it is installed. Listens and calls on
loopback only, keeps its files in a temporary folder (BENCH_DIR names another place for it), stops what it started.
README.md beside this file says what each line means.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import pathlib
import platform
import py_compile
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import digestd  # noqa: E402
import load  # noqa: E402

REPETITIONS = 5
INSTALLED = "import sys, digestd; sys.exit(digestd.main())"  # as the command does: a script is compiled at each start
PAYLOAD = json.dumps({"text": "p" * 260})

# Figures of peers that cannot be assumed to be installed here, so not measured in this run: BullMQ 6.7.0 on Redis 7.0.15,
# on the machine of the README's table, that same day. On another machine, measure them there: it may be twice as fast.
RECORDED_BULLMQ_ADD = {
    "awaited, always": (1_283, 6.0),
    "awaited, everysec": (2_608, 2.5),
    "64 in flight": (12_401, 0.6),
}
RECORDED_BULLMQ_BURST_MS = 1_615
RECORDED_BULLMQ_START_MS = 343
RECORDED_BULLMQ_EVERY = {"p99_ms": 717, "cpu": 44.4}
# Redis with a million of BullMQ's jobs, on that machine too: to come back with its log, and its memory.
RECORDED_REDIS_RELOAD_MS = 6_820
RECORDED_REDIS_MIB = 1_035

COMMENTS = """
[senders.hook]
type = "webhook"
url = "http://127.0.0.1:{hook}/hook"

[workflows.comments]
[[workflows.comments.steps]]
id = "digest"
type = "digest"
key = "payload.postId"
window = "{window}"
[[workflows.comments.steps]]
id = "chat"
type = "chat"
sender = "hook"
"""

LATER = """
[senders.console]
type = "log"

[workflows.later]
[[workflows.later.steps]]
id = "wait"
type = "delay"
delay = "1m"
[[workflows.later.steps]]
id = "chat"
type = "chat"
sender = "console"
text = "hello"
"""


class Line(NamedTuple):
    """One line of the table. `met` is None where there is no gate."""

    what: str
    ours: str
    limit: str
    ratio: float | None
    gate: str
    met: bool | None
    figures: dict[str, Any]


class Failed(Exception):
    """The benchmark itself could not be made: a process that did not start, an event that did not come."""


# -- processes and files -----------------------------------------------------------------------------------------------

children: list[subprocess.Popen[bytes]] = []


def say(text: str) -> None:
    print(f"… {text}", file=sys.stderr, flush=True)


def spawn(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, *map(str, arguments)], **options)
    children.append(process)
    return process


def end(process: subprocess.Popen[bytes], hard: bool = True) -> None:
    """Stop a child, by its own id."""
    if process.poll() is None:
        process.kill() if hard else process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    if process in children:
        children.remove(process)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond where the kernel counts them."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except OSError:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], seconds: float, what: str, pause_s: float = 0.05) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(pause_s)
    raise Failed(f"{what} did not come within {seconds:.0f} s")


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


@contextlib.contextmanager
def helper(*arguments: Any, port: int) -> Iterator[None]:
    """One of load.py's servers, listening."""
    process = spawn(HERE / "load.py", *arguments)
    try:
        wait_until(lambda: can_connect(port), 20, "a server of load.py", 0.02)
        yield
    finally:
        end(process)


def trigger_load(port: int, connections: int, seconds: float) -> dict[str, Any]:
    """Run the load generator against a port; its figures. Fails when a request failed."""
    url = f"http://127.0.0.1:{port}/v1/events/trigger"
    command = [sys.executable, HERE / "load.py", "trigger", url, f"--connections={connections}", f"--seconds={seconds}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    figures = json.loads(found.stdout)
    if figures["errors"] or not figures["requests"]:
        raise Failed(f"requests failed: {figures}")
    return figures


class Daemon:
    """A real daemon in a folder of its own."""

    def __init__(self, folder: pathlib.Path, config: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.port = folder, free_port()
        self.config = folder / "config.toml"
        self.config.write_text(f'[api]\nlisten = ["127.0.0.1:{self.port}"]\n{config}')
        self.database = folder / "digestd.sqlite3"

    def start(self, keep_log: bool = True) -> float:
        """Start it and wait until it listens; how long that took, in ms. Without a log its output goes nowhere."""
        log = self.folder / "log.txt"
        began = time.perf_counter()
        with log.open("ab") if keep_log else open(os.devnull, "ab") as out:  # noqa: PTH123
            self.process = spawn(
                "-c", INSTALLED, "run", "--config", self.config, cwd=self.folder, stdout=out, stderr=out,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        wait_until(self._listens, 60, f"the daemon; see its log:\n{log.read_text() if log.exists() else ''}", 0.002)
        return (time.perf_counter() - began) * 1000

    def _listens(self) -> bool:
        if self.process.poll() is not None:
            log = self.folder / "log.txt"
            raise Failed(f"the daemon ended with {self.process.returncode}:\n{log.read_text() if log.exists() else ''}")
        return can_connect(self.port)

    def trigger(self, number: int) -> None:
        """One trigger over a connection of its own; fails unless the answer is 201."""
        body = json.dumps({"name": "comments", "to": f"s{number}", "payload": {"postId": number}}).encode()
        request = b"POST /v1/events/trigger HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(request)
            answer = connection.recv(4096)
        if not answer.startswith(b"HTTP/1.1 201"):
            raise Failed(f"the answer to a trigger is {answer[:200]!r}")

    def query(self, sql: str, *values: Any) -> list[Any]:
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=5)) as connection:
            return connection.execute(sql, values).fetchall()

    def sent(self) -> int:
        return int(self.query("SELECT count(*) FROM attempts WHERE outcome = 'sent'")[0][0])

    def stop(self, hard: bool = False) -> None:
        end(self.process, hard)

    # what the kernel says about it

    def rss_mib(self) -> float:
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, to the nanosecond where the kernel counts them."""
        return process_cpu_s(self.process.pid)

    def wake_ups(self) -> int:
        """How often its main thread, which runs the loop, has gone to sleep."""
        status = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/status").read_text()
        return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


class Scene:
    """The run: its folder, and how much to do."""

    def __init__(self, folder: pathlib.Path, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.repetitions = 2 if quick else REPETITIONS
        self.made = 0

    def new_folder(self) -> pathlib.Path:
        self.made += 1
        folder = self.folder / str(self.made)
        folder.mkdir()
        return folder

    @functools.cached_property
    def windows(self) -> int:
        return 10_000 if self.quick else 100_000

    def config_of(self, text: str) -> digestd.Config:
        return digestd.read_config(text, self.folder / "config.toml")


# -- limits ------------------------------------------------------------------------------------------------------------


def connect_raw(folder: pathlib.Path, script: str) -> sqlite3.Connection:
    """A fresh database with the settings that digestd uses, and nothing of digestd."""
    connection = sqlite3.connect(folder / "raw.sqlite3", isolation_level=None)
    connection.executescript(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -65536;" + script
    )
    return connection


RAW_EVENTS = """
CREATE TABLE events (id INTEGER PRIMARY KEY, public_id TEXT NOT NULL, subscriber TEXT NOT NULL, key TEXT NOT NULL,
    window_id INTEGER, created_at INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, payload TEXT NOT NULL);
CREATE UNIQUE INDEX events_public_id ON events (public_id);
CREATE INDEX events_window ON events (window_id, created_at);
CREATE INDEX events_state ON events (state, created_at);
"""


def raw_inserts(scene: Scene, count: int, per_commit: int) -> float:
    """Rows a second that plain SQLite takes: 300 bytes of JSON, a text id, 3 indexes, FULL."""
    folder, now = scene.new_folder(), 1_764_500_000_000
    data = [
        (f"{now + i // 10:012x}{i:020x}", f"subscriber-{who:05d}", f"post-{i % 100:03d}", who, now, PAYLOAD)
        for i, who in ((i, i * 7919 % load.SUBSCRIBERS) for i in range(count))
    ]
    sql = "INSERT INTO events (public_id, subscriber, key, window_id, created_at, payload) VALUES (?, ?, ?, ?, ?, ?)"
    with contextlib.closing(connect_raw(folder, RAW_EVENTS)) as connection:
        began = time.perf_counter()
        for start in range(0, count, per_commit):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(sql, data[start : start + per_commit])
            connection.execute("COMMIT")
        took_s = time.perf_counter() - began
    shutil.rmtree(folder)
    return count / took_s


RAW_JOBS = """
CREATE TABLE jobs (id INTEGER PRIMARY KEY, state TEXT NOT NULL, due_at INTEGER NOT NULL, taken_at INTEGER,
    public_id TEXT);
CREATE INDEX jobs_waiting ON jobs (due_at) WHERE state = 'waiting';
CREATE TABLE attempts (id INTEGER PRIMARY KEY, job_id INTEGER NOT NULL, number INTEGER NOT NULL,
    started_at INTEGER NOT NULL, UNIQUE (job_id, number));
"""


def raw_claims(scene: Scene, count: int, per_commit: int) -> float:
    """Ms until plain SQLite has begun to claim the last 1 % of the jobs that are due at once, with FULL commits."""
    folder, moments = scene.new_folder(), []
    claim = (
        "UPDATE jobs SET state = 'active', taken_at = 1 WHERE id IN"
        " (SELECT id FROM jobs WHERE state = 'waiting' AND due_at <= 1 ORDER BY due_at, id LIMIT ?) RETURNING id"
    )
    with contextlib.closing(connect_raw(folder, RAW_JOBS)) as connection:
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO jobs (state, due_at, public_id) VALUES ('waiting', 1, ?)",
            ((f"msg_{i:028x}",) for i in range(count)),
        )
        connection.execute("COMMIT")
        began = time.perf_counter()
        for _ in range(0, count, per_commit):
            connection.execute("BEGIN IMMEDIATE")
            claimed = connection.execute(claim, (per_commit,)).fetchall()
            connection.executemany("INSERT INTO attempts (job_id, number, started_at) VALUES (?, 1, 1)", claimed)
            connection.execute("COMMIT")
            moments += [(time.perf_counter() - began) * 1000] * len(claimed)
    shutil.rmtree(folder)
    return load.percentile(moments, 0.99)


def command_ms(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, timeout=60)
    return (time.perf_counter() - began) * 1000


# -- databases to start from -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: pathlib.Path, now: int) -> Iterator[sqlite3.Connection]:
    """digestd's database, made in this process; the connection beneath it, for many rows at once."""
    digestd.open_store(str(path), now)
    try:
        yield digestd.database.connection()
    finally:
        digestd.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        digestd.close_store()


def owners(windows: int) -> Iterator[tuple[int, str]]:
    """The number of each window, and whose it is."""
    return ((number, f"subscriber-{number % load.SUBSCRIBERS:05d}") for number in range(windows))


def fill(path: pathlib.Path, windows: int, each: int, now: int, closed: bool) -> None:
    """A database with `windows` windows of `each` events that came over ten minutes and end at `now`: all open, or all
    closed and delivered. Events lie as they would have come, so that those of a window are not beside one another."""
    opened_at, state = now - 600_000, "closed" if closed else "open"
    with opened(path, now) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO subscribers (subscriber_id, created_at, updated_at) VALUES (?, ?, ?)",
            ((f"subscriber-{i:05d}", opened_at, opened_at) for i in range(load.SUBSCRIBERS)),
        )
        connection.executemany(
            "INSERT INTO digests (workflow, step, subscriber_id, key, state, opened_at, closes_at, due_at, closed_at)"
            " VALUES ('comments', 'digest', ?, ?, ?, ?, ?, ?, ?)",
            (
                (who, f'"old-{i // load.SUBSCRIBERS}"', state, opened_at, now, now, now if closed else None)
                for i, who in owners(windows)
            ),
        )
        for round_number in range(each):
            connection.executemany(
                "INSERT INTO events (workflow, subscriber_id, payload, transaction_id, received_at, state, digest_id,"
                " placed_at) VALUES ('comments', ?, ?, ?, ?, 'placed', ?, ?)",
                (
                    (who, PAYLOAD, f"{opened_at:012x}{round_number:06x}{i:014x}", opened_at, i + 1, opened_at)
                    for i, who in owners(windows)
                ),
            )
            connection.execute("COMMIT")
            connection.execute("BEGIN")
        if closed:
            connection.executescript(
                f"""
                INSERT INTO runs (workflow, subscriber_id, digest_id, step, state, created_at, finished_at)
                    SELECT workflow, subscriber_id, id, 'chat', 'completed', {now}, {now} FROM digests;
                INSERT INTO jobs (run_id, step, type, sender, state, due_at, tries, public_id, created_at, taken_at,
                    finished_at) SELECT id, 'chat', 'chat', 'hook', 'completed', {now}, 1, printf('msg_%028x', id),
                    {now}, {now}, {now} FROM runs;
                INSERT INTO attempts (job_id, number, started_at, finished_at, outcome, status_code)
                    SELECT id, 1, {now}, {now}, 'sent', 200 FROM jobs;
                """
            )
        if connection.in_transaction:
            connection.execute("COMMIT")


def fill_by_engine(path: pathlib.Path, config: digestd.Config, bodies: list[dict[str, Any]], now: int) -> None:
    """Triggers through digestd's own stages, as if it were `now`."""
    with opened(path, now):
        room = digestd.Room(1, config.senders)
        for start in range(0, len(bodies), 500):
            with digestd.transaction():
                for body in bodies[start : start + 500]:
                    _, events = digestd.record_trigger(digestd.check_trigger(config, body, now), now)
                    for event in events:
                        digestd.place_or_fail(config, event, now)
                digestd.tick(config, now, room)


# -- the lines ---------------------------------------------------------------------------------------------------------


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratios(ours: list[float], limit: list[float]) -> float:
    """The median of the ratios of each repetition: noise that falls on both cancels out."""
    return median([mine / theirs for mine, theirs in zip(ours, limit, strict=True)])


def measure_ingest(scene: Scene) -> list[Line]:
    """Triggers over HTTP, answered after the commit."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    seconds = 1 if scene.quick else 3
    for _ in range(scene.repetitions):
        note("raw100", raw_inserts(scene, 40_000, 100))
        note("raw1", raw_inserts(scene, 1_500, 1))
        port = free_port()
        with helper("answer", port, port=port):
            note("plain64_p99", trigger_load(port, 64, seconds)["p99_ms"])
            note("plain1", trigger_load(port, 1, 1)["rate"])
        daemon = Daemon(scene.new_folder(), COMMENTS.format(hook=9, window="1h"))
        # The load's windows are open already: else most of a short run would be spent on opening them.
        windows = [
            {"name": "comments", "to": f"subscriber-{who:05d}", "payload": {"postId": f"post-{who % load.POSTS:03d}"}}
            for who in range(load.SUBSCRIBERS)
        ]
        fill_by_engine(daemon.database, digestd.load_config(daemon.config), windows, int(time.time() * 1000))
        daemon.start()
        try:
            many = trigger_load(daemon.port, 64, seconds)
            note("many", many["rate"])
            note("many_p50", many["p50_ms"])
            note("many_p99", many["p99_ms"])
            note("one", trigger_load(daemon.port, 1, min(2, seconds))["rate"])
            note("rss_mib", daemon.rss_mib())
        finally:
            daemon.stop()
    middle = {name: median(values) for name, values in found.items()}
    by = many["by"]
    ratio, tail = ratios(found["many"], found["raw100"]), ratios(found["many_p99"], found["plain64_p99"])
    one = ratios(found["one"], found["raw1"])
    return [
        Line(
            f"ingest, 64 connections, FULL ({by})", f"{middle['many']:,.0f}/s",
            f"raw SQLite, 100 a commit: {middle['raw100']:,.0f}/s", ratio, ">= 0.15", ratio >= 0.15, middle,
        ),
        Line(
            "the same: p99", f"{middle['many_p99']:.1f} ms", f"plain server: {middle['plain64_p99']:.1f} ms",
            tail, "<= 15, <= 25 ms", tail <= 15 and middle["many_p99"] <= 25, {},
        ),
        Line(
            "ingest, 1 connection, FULL", f"{middle['one']:,.0f}/s", f"raw SQLite, 1 a commit: {middle['raw1']:,.0f}/s",
            one, ">= 0.25", one >= 0.25, {},
        ),
        *[
            Line(
                f"64 connections, beside BullMQ add, {how}", f"{middle['many']:,.0f}/s", f"recorded: {rate:,}/s",
                middle["many"] / rate, f">= {least}", middle["many"] >= least * rate, {},
            )
            for how, (rate, least) in RECORDED_BULLMQ_ADD.items()
        ],
        Line("RSS after that load", f"{middle['rss_mib']:.0f} MiB", "-", None, "-", None, {}),
    ]  # fmt: skip


def close_all(
    path: pathlib.Path, config: digestd.Config, now: int, stage: Callable[..., Any] = digestd.tick
) -> tuple[float, list[float]]:
    """Seconds until no window is open any more, and the ms of each transaction: with the whole tick, or one stage. As
    in the daemon, a thread tends the log."""
    digestd.open_store(str(path), now)
    done = threading.Event()
    tender = threading.Thread(
        target=lambda: [digestd.checkpoint(str(path)) for _ in iter(lambda: done.wait(digestd.TEND_S), True)]
    )
    tender.start()
    room = digestd.Room(config.daemon.concurrency, config.senders)
    spans: list[float] = []
    began = time.perf_counter()
    for _ in range(10_000):
        start = time.perf_counter()
        with digestd.transaction():
            stage(*((config, now, room) if stage is digestd.tick else (config, now)))
        spans.append((time.perf_counter() - start) * 1000)
        if not digestd.row("SELECT 1 FROM digests WHERE state IN ('open', 'held') LIMIT 1"):
            break
    else:
        raise Failed("the windows did not close")
    took_s = time.perf_counter() - began
    done.set()
    tender.join()
    digestd.close_store()
    return took_s, spans


def close_one_by_one(path: pathlib.Path, sample: int, now: int) -> float:
    """Seconds for one window, when each is closed by a commit of its own."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("PRAGMA synchronous = FULL; PRAGMA foreign_keys = 1;")
        due = connection.execute("SELECT id FROM digests WHERE state = 'open' LIMIT ?", (sample,)).fetchall()
        began = time.perf_counter()
        for (digest_id,) in due:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE digests SET state = 'closed', closed_at = ? WHERE id = ?", (now, digest_id))
            connection.execute(
                "INSERT INTO runs (workflow, subscriber_id, digest_id, step, next_at, created_at)"
                " SELECT workflow, subscriber_id, id, step, ?, ? FROM digests WHERE id = ?", (now, now, digest_id)
            )  # fmt: skip
            connection.execute("COMMIT")
        return (time.perf_counter() - began) / len(due)


def close_bare(path: pathlib.Path, now: int) -> float:
    """Seconds to close all windows with the same two statements and nothing else, as many a commit as a stage moves:
    what the tables with their indexes and checks cost, whoever writes them."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("PRAGMA synchronous = FULL; PRAGMA foreign_keys = 1; PRAGMA cache_size = -32000;")
        due = [digest_id for (digest_id,) in connection.execute("SELECT id FROM digests WHERE state = 'open'")]
        began = time.perf_counter()
        for first in range(0, len(due), digestd.WINDOWS_AT_ONCE):
            ids = json.dumps(due[first : first + digestd.WINDOWS_AT_ONCE])
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "UPDATE digests SET state = 'closed', closed_at = ? WHERE id IN (SELECT value FROM json_each(?))"
                " AND state = 'open'", (now, ids)
            )  # fmt: skip
            connection.execute(
                "INSERT INTO runs (workflow, subscriber_id, digest_id, step, next_at, created_at) SELECT workflow,"
                " subscriber_id, id, step, ?, ? FROM digests WHERE id IN (SELECT value FROM json_each(?))",
                (now, now, ids),
            )
            connection.execute("COMMIT")
        return time.perf_counter() - began


def measure_close(scene: Scene) -> list[Line]:
    """Many windows that end in the same second, closed by the tick in its transactions."""
    now, windows = 1_764_500_000_000, scene.windows
    config = scene.config_of(COMMENTS.format(hook=9, window="10m"))
    folder = scene.new_folder()
    say(f"making {windows:,} windows with {windows * 10:,} events")
    fill(folder / "filled.sqlite3", windows, 10, now, closed=False)
    ours, alone, bare, limit, longest, middles = [], [], [], [], [], []

    def fresh() -> pathlib.Path:
        for file in folder.glob("copy.*"):
            file.unlink()
        copy = pathlib.Path(shutil.copyfile(folder / "filled.sqlite3", folder / "copy.sqlite3"))
        with copy.open("rb+") as file:
            os.fsync(file)  # or the first checkpoint pays for the copy
        return copy

    for _ in range(scene.repetitions):
        limit.append(close_one_by_one(fresh(), 2_000, now) * windows)
        took_s, spans = close_all(fresh(), config, now)
        ours.append(took_s)
        longest.append(max(spans))
        middles.append(median(spans))
        alone.append(close_all(fresh(), config, now, digestd.close_windows)[0])
        bare.append(close_bare(fresh(), now))
    shutil.rmtree(folder)
    faster, faster_alone = ratios(limit, ours), ratios(limit, alone)
    figures = {"transaction_p50_ms": median(middles), "windows": windows}
    return [
        Line(
            f"close of {windows:,} windows due at once", f"{median(ours):.2f} s",
            f"one commit each: {median(limit):.1f} s", faster, "-", None, figures,
        ),
        Line(
            "the same: the stage close_windows alone", f"{median(alone):.2f} s",
            f"one commit each: {median(limit):.1f} s", faster_alone, ">= 30 times faster", faster_alone >= 30,
            {"alone_s": median(alone)},
        ),
        Line(
            "the same, beside its two statements alone", f"{median(alone):.2f} s",
            f"{digestd.WINDOWS_AT_ONCE:,} a commit: {median(bare):.2f} s, {ratios(limit, bare):.0f} times faster",
            ratios(alone, bare), "-", None, {"bare_s": median(bare)},
        ),
        Line(
            "the same: longest write transaction", f"{median(longest):.0f} ms", f"(p50 {median(middles):.1f} ms)",
            None, "<= 50 ms", median(longest) <= 50, {"worst_ms": max(longest)},
        ),
    ]  # fmt: skip


def sleep_until(at_ms: float) -> None:
    time.sleep(max(0.0, at_ms / 1000 - time.time()))


def fill_due_soon(scene: Scene, daemon: Daemon, workflow: str, count: int, wait_ms: int, ahead_s: float) -> int:
    """Fill a database so that everything is due at one instant soon; start the daemon on it; that instant in ms."""
    due_at = int((time.time() + ahead_s) * 1000)
    bodies = [{"name": workflow, "to": f"s{number:05d}", "payload": {"postId": number}} for number in range(count)]
    fill_by_engine(daemon.database, digestd.load_config(daemon.config), bodies, due_at - wait_ms)
    daemon.start(keep_log=False)
    if time.time() * 1000 > due_at - 300:
        raise Failed("the database was not ready before its work was due; is the machine very busy?")
    return due_at


def measure_jobs(scene: Scene) -> list[Line]:
    """One-shot jobs, behind a delay step, all due in the same ms."""
    count = 2_000 if scene.quick else 10_000
    late: dict[str, list[float]] = {"p50": [], "p99": [], "max": []}
    limit = []
    for _ in range(scene.repetitions):
        limit.append(raw_claims(scene, count, 50))
        daemon = Daemon(scene.new_folder(), "[daemon]\nconcurrency = 50\n" + LATER)
        try:
            due_at = fill_due_soon(scene, daemon, "later", count, digestd.MINUTE, 4 + count / 2_000)
            sleep_until(due_at)
            wait_until(lambda daemon=daemon: daemon.sent() == count, 60, "all jobs", 0.25)
            started = [at - due_at for (at,) in daemon.query("SELECT started_at FROM attempts")]
        finally:
            daemon.stop()
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            late[name].append(load.percentile(started, share))
    last, ratio = median(late["p99"]), ratios(late["p99"], limit)
    bound = 0.6 * RECORDED_BULLMQ_BURST_MS
    figures = {f"{name}_ms": median(values) for name, values in late.items()}
    return [
        Line(
            f"{count:,} one-shot jobs due at once: last 1 %", f"{last:.0f} ms (p50 {median(late['p50']):.0f})",
            f"raw claim, 50 a commit: {median(limit):.0f} ms", ratio, "-", None, figures,
        ),
        Line(
            "the same, beside BullMQ", f"{last:.0f} ms", f"recorded: {RECORDED_BULLMQ_BURST_MS} ms",
            last / RECORDED_BULLMQ_BURST_MS, f"<= 0.6 ({bound:.0f} ms)", last <= bound if count == 10_000 else None, {},
        ),
    ]  # fmt: skip


def read_calls(log: pathlib.Path) -> list[tuple[float, str]]:
    """What the receiver noted: when, in ms, and the id of the digest."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(at), digest_id) for at, digest_id in (line.split() for line in lines)]


async def raw_calls(folder: pathlib.Path, port: int, count: int) -> list[float]:
    """The limit for one digest: sleep until due, one FULL commit, one POST on a kept connection. When each was due."""
    connection = connect_raw(folder, RAW_JOBS)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = PAYLOAD.encode()
    due = []
    for number in range(count):
        at = time.time() + 0.1
        await asyncio.sleep(at - time.time())
        connection.execute("INSERT INTO jobs (state, due_at, public_id) VALUES ('active', 1, ?)", (str(number),))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readuntil(b"ok")
        due.append(at * 1000)
    writer.close()
    connection.close()
    return due


def measure_digest(scene: Scene) -> list[Line]:
    """Single digests, spread out: from the end of the window to the webhook's arrival."""
    count = 5 if scene.quick else 20
    late, limit = [], []
    folder, port = scene.new_folder(), free_port()
    log = folder / "calls.txt"
    daemon = Daemon(scene.new_folder(), COMMENTS.format(hook=port, window="1s"))
    with helper("receive", port, log, port=port):
        daemon.start()
        try:
            for number in range(count):
                daemon.trigger(number)
                time.sleep(0.31)
            wait_until(lambda: len(read_calls(log)) >= count, 20, "all webhooks")
            due = {str(digest_id): at for digest_id, at in daemon.query("SELECT id, closes_at FROM digests")}
            late = [at - due[digest_id] for at, digest_id in read_calls(log)]
        finally:
            daemon.stop()
        due_raw = asyncio.run(raw_calls(folder, port, count))
        wait_until(lambda: len(read_calls(log)) >= 2 * count, 20, "the raw calls")
        limit = [call[0] - at for call, at in zip(read_calls(log)[count:], due_raw, strict=True)]
    middle = median(late)
    return [
        Line(
            f"one digest due to the webhook's arrival ({count} of them)", f"p50 {middle:.1f}, max {max(late):.1f} ms",
            f"sleep, commit, POST: p50 {median(limit):.1f}, max {max(limit):.1f} ms", middle / median(limit),
            "max <= 25 ms", max(late) <= 25, {"p50_ms": middle, "max_ms": max(late)},
        )
    ]  # fmt: skip


def measure_burst(scene: Scene) -> list[Line]:
    """Digests of one event each, all due in the same ms, to a receiver on loopback."""
    count = 2_000 if scene.quick else 10_000
    middles, lasts, limit = [], [], []
    for _ in range(scene.repetitions):
        folder, port = scene.new_folder(), free_port()
        log = folder / "calls.txt"
        daemon = Daemon(scene.new_folder(), "[daemon]\nconcurrency = 64\n" + COMMENTS.format(hook=port, window="1m"))
        with helper("receive", port, log, port=port):
            limit.append(0.99 * count / trigger_load(port, 64, 1)["rate"] * 1000)
            time.sleep(0.3)
            already = len(read_calls(log))
            try:
                due_at = fill_due_soon(scene, daemon, "comments", count, digestd.MINUTE, 4 + count / 2_000)
                sleep_until(due_at)
                wait_until(lambda: len(read_calls(log)) >= already + count, 120, "all webhooks", 0.25)  # noqa: B023
            finally:
                daemon.stop()
        calls = [at - due_at for at, _ in read_calls(log)[already:]]
        middles.append(load.percentile(calls, 0.5))
        lasts.append(load.percentile(calls, 0.99))
    last = median(lasts)
    return [
        Line(
            f"{count:,} digests due at once: p99 at the receiver", f"{last:,.0f} ms (p50 {median(middles):,.0f})",
            f"{count:,} bare POSTs, 64 connections: {median(limit):,.0f} ms", ratios(lasts, limit),
            "<= 1.5 s", last <= 1_500 if count == 10_000 else None, {"p99_ms": last},
        )
    ]  # fmt: skip


def many_repeatables(count: int, every: str) -> str:
    head = '[daemon]\nconcurrency = 50\n[senders.console]\ntype = "log"\n'
    return head + "".join(
        f'[repeatables.job{number:04d}]\nevery = "{every}"\nsender = "console"\ntext = "{{{{ slot }}}}"\n'
        for number in range(count)
    )


def measure_idle(scene: Scene) -> list[Line]:
    """What it costs to wait."""
    seconds = 10 if scene.quick else 60
    daemon = Daemon(scene.new_folder(), many_repeatables(1_000, "1h"))
    if time.time() % 3600 > 3600 - seconds - 30:
        say("waiting for the hour to pass, at which the repeatables are due")
        time.sleep(seconds + 35)
    daemon.start()
    try:
        time.sleep(3)
        cpu_s, wake_ups, began = daemon.cpu_s(), daemon.wake_ups(), time.perf_counter()
        time.sleep(seconds)
        span = time.perf_counter() - began
        share, wakes = 100 * (daemon.cpu_s() - cpu_s) / span, (daemon.wake_ups() - wake_ups) / span
    finally:
        daemon.stop()
    return [
        Line(
            f"idle for {seconds} s with 1,000 repeatables of 1 h", f"{share:.3f} % of a core", "-", None,
            "<= 0.15 %", share <= 0.15, {"cpu_percent": share, "wake_ups_per_s": wakes},
        ),
        Line("the same: wake-ups of the loop", f"{wakes:.2f}/s", "-", None, "<= 2/s", wakes <= 2, {}),
    ]  # fmt: skip


def measure_stored(scene: Scene) -> list[Line]:
    """Memory and start-up, with nothing stored and with a million events; after kill -9 under load."""
    config = COMMENTS.format(hook=9, window="10m")
    py_compile.compile(str(ROOT / "digestd.py"))  # as an installed module is, whatever PYTHONDONTWRITEBYTECODE says
    events = scene.windows * 10
    say(f"making a database with {events:,} events")
    full = Daemon(scene.new_folder(), config)
    now = int(time.time() * 1000)
    fill(full.database, scene.windows, 10, now - digestd.HOUR, closed=True)
    found: dict[str, list[float]] = {name: [] for name in ("bare", "imports", "empty", "full", "rss_empty", "rss_full")}
    for number in range(scene.repetitions):
        found["bare"].append(command_ms("-c", "pass"))
        found["imports"].append(command_ms("-c", "import aiohttp.web, pydantic, peewee"))
        empty = Daemon(scene.new_folder(), config)
        for daemon, name in ((empty, "empty"), (full, "full")):
            began = time.perf_counter()
            daemon.start()
            daemon.trigger(number)
            found[name].append((time.perf_counter() - began) * 1000)
            if daemon is empty:
                time.sleep(2)
            else:
                trigger_load(daemon.port, 16, 1)
                time.sleep(1.5)
                log_kib = daemon.database.with_name("digestd.sqlite3-wal").stat().st_size // 1024
            found[f"rss_{name}"].append(daemon.rss_mib())
            daemon.stop(hard=True)
    middle = {name: median(values) for name, values in found.items()}
    memory, starts = middle["rss_full"], [ratios(found[name], found["imports"]) for name in ("empty", "full")]
    bare = f"imports: {middle['imports']:.0f} ms, bare python {middle['bare']:.0f} ms"
    most_empty, most_full = 1.5 * RECORDED_BULLMQ_START_MS, 0.15 * RECORDED_REDIS_RELOAD_MS
    return [
        Line(
            "RSS, idle and empty", f"{middle['rss_empty']:.1f} MiB", "-", None,
            "<= 68 MiB", middle["rss_empty"] <= 68, middle,
        ),
        Line(
            f"RSS with {events:,} events, after load", f"{memory:.0f} MiB",
            f"recorded, Redis: {RECORDED_REDIS_MIB:,} MiB", memory / RECORDED_REDIS_MIB, "<= 0.2",
            memory <= 0.2 * RECORDED_REDIS_MIB, {},
        ),
        Line("exec to the first 201, empty", f"{middle['empty']:.0f} ms", bare, starts[0],
             f"<= {most_empty:.0f} ms", middle["empty"] <= most_empty, {}),
        Line(f"the same with {events:,} events, after kill -9", f"{middle['full']:.0f} ms", bare, starts[1],
             f"<= {most_full:.0f} ms", middle["full"] <= most_full, {"log_kib": log_kib}),
    ]  # fmt: skip


def bullmq_folder(scene: Scene) -> pathlib.Path | None:
    """A folder with BullMQ in it: the one of BULLMQ_DIR, or a temporary one that npm fills. None where that, Node or Redis
    cannot be had."""
    if not shutil.which("node") or not shutil.which("redis-server"):
        return None
    if os.environ.get("BULLMQ_DIR"):
        return pathlib.Path(os.environ["BULLMQ_DIR"])
    folder = scene.new_folder()
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "bullmq@6"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=180, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    return folder if done else None


def measure_bullmq_every(scene: Scene, count: int, seconds: int) -> dict[str, float] | None:
    """The same by BullMQ on Redis (appendfsync everysec), in this run; None where it is not there."""
    modules = bullmq_folder(scene)
    if modules is None:
        return None
    port, folder = free_port(), scene.new_folder()
    command = [
        "redis-server",
        "--port",
        port,
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "yes",
        "--dir",
        folder,
    ]
    redis = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    children.append(redis)
    try:
        time.sleep(1)
        script = ["node", str(HERE / "bullmq.js"), str(port), str(count), str(seconds)]
        worker = subprocess.Popen(script, cwd=modules, stdout=subprocess.PIPE)
        children.append(worker)
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != b"measuring":
            return None
        redis_s = process_cpu_s(redis.pid)
        told = json.loads(worker.stdout.readline())
        share = 100 * (told["cpu"] + (process_cpu_s(redis.pid) - redis_s) / seconds)
        late = told["late"]
        return {
            "made": len(late) / (count * seconds), "p50_ms": load.percentile(late, 0.5),
            "p99_ms": load.percentile(late, 0.99), "cpu": share,
        }  # fmt: skip
    finally:
        for child in children[-2:]:
            end(child)


def measure_repeat(scene: Scene) -> list[Line]:
    """A thousand repeatables, all due in the same ms of each second; and BullMQ's, where it can be had."""
    seconds, count = 5 if scene.quick else 20, 1_000
    limit = median([raw_claims(scene, count, 50) for _ in range(scene.repetitions)])
    daemon = Daemon(scene.new_folder(), many_repeatables(count, "1s"))
    daemon.start(keep_log=False)
    try:
        first = (int(time.time()) + 3) * 1000
        sleep_until(first - 100)
        cpu_s, began = daemon.cpu_s(), time.perf_counter()
        sleep_until(first - 100 + seconds * 1000)
        share = 100 * (daemon.cpu_s() - cpu_s) / (time.perf_counter() - began)
        time.sleep(3)
        late = [
            at - slot_at
            for at, slot_at in daemon.query(
                "SELECT a.started_at, r.slot_at FROM runs r JOIN jobs j ON j.run_id = r.id"
                " JOIN attempts a ON a.job_id = j.id WHERE r.slot_at >= ? AND r.slot_at < ? AND a.outcome = 'sent'",
                first, first + seconds * 1000
            )
        ]  # fmt: skip
    finally:
        daemon.stop(hard=True)
    made, last = len(late) / (count * seconds), load.percentile(late, 0.99)
    measured = measure_bullmq_every(scene, count, seconds)
    peer = measured or RECORDED_BULLMQ_EVERY
    most, most_cpu = 0.4 * peer["p99_ms"], 0.6 * peer["cpu"]
    beside = f"BullMQ{'' if measured else ', recorded'}"
    p50 = f"p50 {measured['p50_ms']:.0f}, " if measured else ""
    figures = {"made": made, "p50_ms": load.percentile(late, 0.5), "p99_ms": last, "cpu_percent": share}
    return [
        Line("1,000 repeatables every 1 s: runs made", f"{100 * made:.1f} %",
             f"BullMQ: {100 * measured['made']:.1f} %" if measured else "-", made, "100 %", made >= 1, figures),
        Line(
            "the same: lateness", f"p50 {figures['p50_ms']:.0f}, p99 {last:.0f} ms",
            f"raw claim of 1,000: {limit:.0f} ms", last / limit, "", None, {},
        ),
        Line("the same, beside BullMQ", f"p99 {last:.0f} ms", f"{beside}: {p50}p99 {peer['p99_ms']:.0f} ms",
             last / peer["p99_ms"], f"<= {most:.0f} ms", last <= most, measured or {}),
        Line("the same: CPU", f"{share:.1f} % of a core", f"{beside}: {peer['cpu']:.1f} %", share / peer["cpu"],
             f"<= {most_cpu:.1f} %", share <= most_cpu, {}),
    ]  # fmt: skip


MEASURES: dict[str, Callable[[Scene], list[Line]]] = {
    "ingest": measure_ingest,
    "close": measure_close,
    "jobs": measure_jobs,
    "digest": measure_digest,
    "burst": measure_burst,
    "idle": measure_idle,
    "stored": measure_stored,
    "repeat": measure_repeat,
}


# -- the table ---------------------------------------------------------------------------------------------------------


def machine_busy() -> list[int]:
    return list(map(int, pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))


def facts() -> dict[str, Any]:
    import aiohttp

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "digestd.py", "migrations.sql"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return {
        "commit": (commit or "unknown") + (" with changes" if changed else ""),
        "digestd": digestd.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "aiohttp": aiohttp.__version__,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def print_table(lines: list[Line]) -> None:
    shown = [("what", "digestd", "limit", "ratio", "gate", "met")]
    words = {True: "yes", False: "NO", None: "-"}
    for line in lines:
        ratio = "-" if line.ratio is None else f"{line.ratio:.3g}"
        shown.append((line.what, line.ours, line.limit, ratio, line.gate, words[line.met]))
    widths = [max(len(one[place]) for one in shown) for place in range(6)]
    for number, one in enumerate(shown):
        print("  ".join(text.ljust(width) for text, width in zip(one, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs; no gate counts")
    parser.add_argument("--only", default=",".join(MEASURES), help=f"some of: {', '.join(MEASURES)}")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in MEASURES]:
        parser.error(f"nothing is called {', '.join(unknown)}; choose from {', '.join(MEASURES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    about, before, lines, trouble = facts(), machine_busy(), [], []
    with tempfile.TemporaryDirectory(prefix="digestd-bench-", dir=os.environ.get("BENCH_DIR")) as folder:
        try:
            for name in names:
                say(f"{name}: {(MEASURES[name].__doc__ or '').strip()}")
                scene = Scene(pathlib.Path(folder, name), given.quick)
                scene.folder.mkdir()
                try:
                    lines += MEASURES[name](scene)
                except (Failed, subprocess.SubprocessError) as error:
                    trouble.append(f"{name}: {error}")
                    say(f"{name} failed: {error}")
                finally:
                    digestd.close_store()
                shutil.rmtree(scene.folder)
        finally:
            for process in list(children):
                end(process)
    spent = [late - early for early, late in zip(before, machine_busy(), strict=True)]
    about["busy_percent"] = round(100 * (1 - (spent[3] + spent[4]) / max(1, sum(spent))), 1)
    print(
        f"digestd {about['digestd']} at {about['commit']}; Python {about['python']}, SQLite {about['sqlite']}, "
        f"aiohttp {about['aiohttp']}\n{about['cores']} cores, {about['memory_gib']} GiB, load {about['load'][0]} at "
        f"the start, {about['busy_percent']} % busy meanwhile{'; --quick: no gate counts' if given.quick else ''}\n"
    )
    print_table(lines)
    print("".join(f"\nnot measured: {text}" for text in trouble))
    missed = [line.what for line in lines if line.met is False]
    print("JSON " + json.dumps({**about, "lines": [line._asdict() for line in lines], "trouble": trouble}))
    return 1 if trouble or (missed and not given.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
