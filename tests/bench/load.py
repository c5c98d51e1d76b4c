"""The other ends of the benchmark's connections, each run as a process of its own, with nothing but Python.

load.py trigger URL --connections N --seconds S    sends triggers; prints rate and latencies as one line of JSON
load.py answer PORT                                a plain server that reads JSON and answers 201: the limit
load.py receive PORT LOG                           a webhook receiver that notes when each call came
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.parse
from typing import Any

SUBSCRIBERS = 5_000
POSTS = 100
PAD = "p" * 120
PATIENCE_S = 10.0  # how much longer than asked a run may take before it is given up

# wrk is used when it is installed: it takes a tenth of the CPU, which the server on the same cores then has.
WRK_SCRIPT = """
local subscribers, posts = tonumber(os.getenv("BENCH_SUBSCRIBERS")), tonumber(os.getenv("BENCH_POSTS"))
local stamp, pad, sent = os.getenv("BENCH_STAMP"), os.getenv("BENCH_PAD"), 0
local body = '{"name":"comments","to":{"subscriberId":"subscriber-%05d"},"payload":{"postId":"post-%03d",'
    .. '"text":"%s","n":%d},"transactionId":"%s-%d"}'
wrk.headers["Content-Type"] = "application/json"
function request()
  sent = sent + 1
  local who = (sent * 7919) % subscribers
  return wrk.format("POST", nil, nil, string.format(body, who, who % posts, pad, sent, stamp, sent))
end
function done(summary, latency, requests)
  local bad = summary.errors
  local function ms(percent) return latency:percentile(percent) / 1e3 end
  local rate = summary.requests / summary.duration * 1e6
  io.write(string.format('RESULT {"requests":%d,"rate":%.1f,', summary.requests, rate))
  io.write(string.format('"p50_ms":%.3f,"p95_ms":%.3f,"p99_ms":%.3f,', ms(50), ms(95), ms(99)))
  io.write(string.format('"max_ms":%.3f,', latency.max / 1e3))
  io.write(string.format('"errors":%d,"by":"wrk"}\\n', bad.status + bad.connect + bad.read + bad.write + bad.timeout))
end
"""


def percentile(values: list[float], share: float) -> float:
    """The value that this share (0 to 1) of the values does not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def whole_messages(buffer: bytearray) -> list[tuple[bytes, bytes]]:
    """Take the HTTP messages that are complete off a buffer, each as (head, body). They have a Content-Length."""
    taken = []
    while (end := buffer.find(b"\r\n\r\n")) >= 0:
        head = bytes(buffer[:end])
        lower = head.lower()
        start = lower.find(b"content-length:")
        length = int(lower[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
        if len(buffer) < end + 4 + length:
            break
        taken.append((head, bytes(buffer[end + 4 : end + 4 + length])))
        del buffer[: end + 4 + length]
    return taken


# -- trigger: the load -------------------------------------------------------------------------------------------------


class Load:
    """What the callers share: the deadline, the next trigger, and the latencies so far in ms."""

    def __init__(self, url: str, seconds: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\nContent-Length: "
        )
        self.stamp = f"{time.time_ns():x}"
        self.began = time.perf_counter()
        self.deadline = self.began + seconds
        self.sent = 0
        self.errors = 0
        self.latencies: list[float] = []
        self.open = 0
        self.done = asyncio.get_running_loop().create_future()

    def next_request(self) -> bytes:
        self.sent += 1
        who = self.sent * 7919 % SUBSCRIBERS
        body = (
            f'{{"name":"comments","to":{{"subscriberId":"subscriber-{who:05d}"}},'
            f'"payload":{{"postId":"post-{who % POSTS:03d}","text":"{PAD}","n":{self.sent}}},'
            f'"transactionId":"{self.stamp}-{self.sent}"}}'
        )
        return f"{self.head}{len(body)}\r\n\r\n{body}".encode()


class Caller(asyncio.Protocol):
    """One connection that is kept: sends a trigger, waits for its answer, sends the next."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.buffer = bytearray()
        self.sent_at = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.load.open += 1
        self._send()

    def _send(self) -> None:
        self.sent_at = time.perf_counter()
        self.transport.write(self.load.next_request())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        for head, _ in whole_messages(self.buffer):
            moment = time.perf_counter()
            self.load.latencies.append((moment - self.sent_at) * 1000)
            self.load.errors += head[9:12] != b"201" and head[9:12] != b"200"
            if moment < self.load.deadline:
                self._send()
            else:
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.load.open -= 1
        self.load.errors += error is not None
        if self.load.open == 0 and not self.load.done.done():
            self.load.done.set_result(None)


async def call_all(url: str, connections: int, seconds: float) -> dict[str, Any]:
    load = Load(url, seconds)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Caller(load), load.host, load.port)
    async with asyncio.timeout(seconds + PATIENCE_S):
        await load.done
    took_s = time.perf_counter() - load.began
    found = load.latencies
    figures = {f"p{share}_ms": round(percentile(found, share / 100), 3) for share in (50, 95, 99)}
    return {
        "requests": len(found),
        "rate": round(len(found) / took_s, 1),
        **figures,
        "max_ms": round(max(found, default=0), 3),
        "errors": load.errors,
        "by": "asyncio",
    }


def call_with_wrk(url: str, connections: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "trigger.lua")
        script.write_text(WRK_SCRIPT)
        values = {"SUBSCRIBERS": SUBSCRIBERS, "POSTS": POSTS, "PAD": PAD, "STAMP": f"{time.time_ns():x}"}
        found = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script), url],
            env={**os.environ, **{f"BENCH_{name}": str(value) for name, value in values.items()}},
            capture_output=True, text=True, timeout=seconds + PATIENCE_S, check=True,
        )  # fmt: skip
    return json.loads(found.stdout.split("RESULT ", 1)[1])


# -- answer and receive: the servers -----------------------------------------------------------------------------------


class Answering(asyncio.Protocol):
    """Reads whole requests, parses their JSON, and answers 201."""

    _body = b'{"data":{"acknowledged":true,"status":"processed","transactionId":"x"}}'
    _answer = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(_body),
        _body,
    )

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        found = whole_messages(self.buffer)
        for _, body in found:
            json.loads(body)
        self.transport.write(self._answer * len(found))


class Receiving(asyncio.Protocol):
    """Notes the time of each call and the id of the digest in it, and answers 200."""

    calls: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        found = whole_messages(self.buffer)
        now_ms = time.time() * 1000
        for _, body in found:
            start = body.find(b'"digest":{"id":"') + 16
            digest_id = body[start : body.find(b'"', start)].decode() if start >= 16 else "-"
            self.calls.append(f"{now_ms:.3f} {digest_id}\n")
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * len(found))


async def serve(protocol: type[asyncio.Protocol], port: int, log: pathlib.Path | None = None) -> None:
    """Serve until killed; what was received is written down ten times a second."""
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", port, backlog=1024)
    async with server:
        while log is not None:
            await asyncio.sleep(0.1)
            lines, Receiving.calls = Receiving.calls, []
            if lines:
                with log.open("a") as out:  # noqa: ASYNC230  a few ms at most, and only after calls came
                    out.write("".join(lines))
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trigger = commands.add_parser("trigger")
    trigger.add_argument("url")
    trigger.add_argument("--connections", type=int, default=64)
    trigger.add_argument("--seconds", type=float, default=3)
    trigger.add_argument("--by", choices=("auto", "wrk", "asyncio"), default="auto")
    answer = commands.add_parser("answer")
    answer.add_argument("port", type=int)
    receive = commands.add_parser("receive")
    receive.add_argument("port", type=int)
    receive.add_argument("log", type=pathlib.Path)
    given = parser.parse_args()
    if given.command == "answer":
        asyncio.run(serve(Answering, given.port))
    elif given.command == "receive":
        asyncio.run(serve(Receiving, given.port, given.log))
    elif given.by == "wrk" or (given.by == "auto" and shutil.which("wrk")):
        print(json.dumps(call_with_wrk(given.url, given.connections, given.seconds)))
    else:
        print(json.dumps(asyncio.run(call_all(given.url, given.connections, given.seconds))))


if __name__ == "__main__":
    main()
