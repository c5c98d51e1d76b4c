"""The HTTP contract, against one real daemon: what a client gets, and what is on the disk afterwards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import pathlib
import re
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any, BinaryIO

import pytest

import digestd
from conftest import ROOT, Process, free_port, wait_for

WORKFLOWS = """
[senders.out]
type = "log"

[workflows.comments]
[[workflows.comments.steps]]
id = "digest"
type = "digest"
key = "payload.postId"
window = "1h"
[[workflows.comments.steps]]
id = "chat"
type = "chat"
sender = "out"

[workflows.strict]
payload_schema = { properties = { n = { type = "integer" }, m = { items = { type = "string" } } } }
[[workflows.strict.steps]]
id = "chat"
type = "chat"
sender = "out"
"""
TRIGGER = "/v1/events/trigger"
LIMIT = 512 * 1024


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("api"), WORKFLOWS)
    yield process
    if process.process.poll() is None:
        process.kill()


@pytest.fixture(scope="module", autouse=True)
def half_sent(api: Process) -> Iterator[socket.socket]:
    """A client that sends half a body and hangs, for as long as the other tests of this file run."""
    with connect(api) as client:
        client.sendall(head("POST", TRIGGER, "Content-Length: 100") + b'{"name": "comm')
        yield client


@pytest.fixture(scope="module", autouse=True)
def slow_head(api: Process) -> Iterator[list[float]]:
    """A client that sends the head of a request byte by byte and never ends it, for as long as it is let; how long it
    was, in s, once it is over."""
    lasted: list[float] = []

    def drip() -> None:
        began = time.monotonic()
        with connect(api) as client, contextlib.suppress(OSError):
            client.settimeout(0.2)
            client.sendall(b"POST /v1/events/trigger HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            while time.monotonic() - began < 60:
                client.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not client.recv(1000).startswith(b"HTTP/1.1 408"):
                        break
        lasted.append(time.monotonic() - began)

    threading.Thread(target=drip, daemon=True).start()
    yield lasted


# -- a client that can do what the usual ones do not -------------------------------------------------------------------


def connect(api: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), timeout=20)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def post(body: bytes, *lines: str) -> bytes:
    return head("POST", TRIGGER, f"Content-Length: {len(body)}", *lines) + body


def read_answer(stream: BinaryIO, with_body: bool = True) -> tuple[int, dict[str, str], bytes]:
    """One answer from a connection: status, headers in lower case, body."""
    status = int(stream.readline().split()[1])
    headers = {}
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, stream.read(int(headers.get("content-length", 0))) if with_body else b""


def send(api: Process, data: bytes, with_body: bool = True) -> tuple[int, dict[str, str], Any]:
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(data)
        status, headers, body = read_answer(stream, with_body)
        return status, headers, json.loads(body) if body else None


def send_text(api: Process, body: bytes) -> tuple[int, Any]:
    status, _, answer = send(api, post(body))
    return status, answer


def new_id() -> str:
    return uuid.uuid4().hex


def call(transaction_id: str, **more: Any) -> dict[str, Any]:
    return {"name": "comments", "to": "s1", "payload": {"postId": 1}, "transactionId": transaction_id, **more}


def events_of(api: Process, transaction_id: str) -> list[Any]:
    return api.query(f"SELECT subscriber_id, payload, state FROM events WHERE transaction_id = '{transaction_id}'")


def count_events(api: Process) -> int:
    return int(api.query("SELECT count(*) FROM events")[0][0])


def accepts(api: Process) -> bool:
    """Whether the server goes on: a plain trigger is taken."""
    transaction_id = new_id()
    status, _ = api.request("POST", TRIGGER, call(transaction_id))
    return status == 201 and len(events_of(api, transaction_id)) == 1


# -- trigger -----------------------------------------------------------------------------------------------------------


def test_a_trigger_is_acknowledged_as_novu_does_and_is_in_the_database(api):
    transaction_id = new_id()
    answer = api.request("POST", TRIGGER, call(transaction_id))
    assert answer == (201, {"data": {"acknowledged": True, "status": "processed", "transactionId": transaction_id}})
    assert events_of(api, transaction_id) == [("s1", '{"postId":1}', "placed")]


def test_a_trigger_without_a_transaction_id_gets_one_of_its_own(api):
    given = [api.trigger("comments", "s1")[1]["data"]["transactionId"] for _ in range(2)]
    given.append(api.trigger("comments", "s1", transactionId=None)[1]["data"]["transactionId"])
    assert len(set(given)) == 3
    assert [len(events_of(api, one)) for one in given] == [1, 1, 1]


def test_an_answer_is_json_for_clients_that_look_at_the_content_type(api):
    _, headers, _ = send(api, post(json.dumps(call(new_id())).encode()))
    assert headers["content-type"].partition(";")[0] == "application/json"


def test_a_trigger_without_payload_has_an_empty_one(api):
    transaction_id = new_id()
    body = {"name": "comments", "to": "s1", "transactionId": transaction_id}
    assert api.request("POST", TRIGGER, body)[0] == 201
    assert events_of(api, transaction_id) == [("s1", "{}", "placed")]


def test_a_recipient_with_fields_makes_and_updates_the_subscriber(api):
    def stored() -> tuple[Any, ...]:
        sql = "SELECT first_name, last_name, email, timezone, data FROM subscribers WHERE subscriber_id = 'ada'"
        return api.query(sql)[0]

    first = {
        "firstName": "Ada",
        "lastName": "L",
        "email": "a@example.org",
        "timezone": "Europe/Paris",
        "data": {"a": 1},
    }
    assert api.trigger("comments", {"subscriberId": "ada", **first})[0] == 201
    assert stored() == ("Ada", "L", "a@example.org", "Europe/Paris", '{"a":1}')
    assert api.trigger("comments", {"subscriberId": "ada", "lastName": "Lovelace", "email": None})[0] == 201
    assert stored() == ("Ada", "Lovelace", None, "Europe/Paris", '{"a":1}')
    assert api.trigger("comments", "ada")[0] == 201
    assert stored() == ("Ada", "Lovelace", None, "Europe/Paris", '{"a":1}')


def test_a_recipient_named_twice_gets_one_event(api):
    transaction_id = new_id()
    to = ["b1", {"subscriberId": "b2", "firstName": "Bo"}, "b1", {"subscriberId": "b1"}, "b2"]
    assert api.trigger("comments", to, transactionId=transaction_id)[0] == 201
    assert sorted(event[0] for event in events_of(api, transaction_id)) == ["b1", "b2"]


def test_an_unknown_workflow_is_told_in_the_words_that_the_clients_look_for(api):
    before = count_events(api)
    status, answer = api.trigger("nothing", "s1")
    assert (status, answer["message"]) == (422, "workflow_not_found")
    assert answer["errors"]["general"]["messages"] == ["workflow_not_found"]
    assert count_events(api) == before


@pytest.mark.parametrize("missing", ["name", "to"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_trigger_without_name_or_recipient_is_400_and_says_which_is_missing(api, missing, how):
    body = call(new_id())
    if how == "absent":
        del body[missing]
    else:
        body[missing] = None
    status, answer = api.request("POST", TRIGGER, body)
    assert status == 400
    assert answer["type"] and answer["errors"][0]["field"] == missing
    assert answer["message"].startswith(missing)


BAD_RECIPIENTS = [
    "", [], [""], {}, {"email": "x@example.org"}, {"subscriberId": ""}, {"subscriberId": None}, 7, True, [["s1"]],
    ["s1", None], "x" * 300, "two\nlines", "nul\0", {"subscriberId": "s1", "email": "nobody"},
    {"subscriberId": "s1", "timezone": "Mars/Phobos"}, {"subscriberId": "s1", "firstName": 5},
    {"subscriberId": "s1", "data": "text"},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_RECIPIENTS, ids=lambda bad: json.dumps(bad)[:40])
def test_one_bad_recipient_refuses_the_whole_call_and_nothing_is_stored(api, bad):
    good = f"good-{new_id()}"
    before = count_events(api)
    assert api.trigger("comments", bad)[0] == 422
    status, answer = api.trigger("comments", [good, *(bad if isinstance(bad, list) and bad else [bad])])
    assert status == 422
    assert answer["errors"]["general"]["messages"] == [answer["message"]]
    assert count_events(api) == before
    assert api.query(f"SELECT * FROM subscribers WHERE subscriber_id = '{good}'") == []


@pytest.mark.parametrize("payload", [[1], "text", 7, True, [], "", 0, False])
def test_a_payload_that_is_no_object_is_400(api, payload):
    status, answer = api.request("POST", TRIGGER, call(new_id(), payload=payload))
    assert status == 400
    assert answer["errors"][0]["field"] == "payload"


@pytest.mark.parametrize("given", ["", " x", "a\nb", "x" * 300, 7, ["x"], {}])
def test_a_transaction_id_that_is_none_is_refused_and_nothing_is_stored(api, given):
    before = count_events(api)
    status, _ = api.request("POST", TRIGGER, call("x") | {"transactionId": given})
    assert status in (400, 422)
    assert count_events(api) == before


# -- bodies ------------------------------------------------------------------------------------------------------------


def with_value(text: str) -> bytes:
    return f'{{"name":"comments","to":"s1","payload":{{"x":{text}}}}}'.encode()


BROKEN = {
    "a list": b"[]",
    "a text": b'"x"',
    "a number": b"7",
    "null": b"null",
    "empty": b"",
    "blanks": b"  \n",
    "half": b'{"name":"comments"',
    "more behind": b'{"name":"comments","to":"s1"} {}',
    "latin-1": '{"name":"comments","to":"s1","payload":{"x":"é"}}'.encode("latin-1"),
    "UTF-16": '{"name":"comments","to":"s1"}'.encode("utf-16"),
    "NaN": with_value("NaN"),
    "Infinity": with_value("-Infinity"),
    "1e400": with_value("1e400"),
    "5000 digits": with_value("1" * 5000),
    "20,000 brackets": with_value("[" * 20_000 + "]" * 20_000),
    "20,000 brackets in a form field": b"[" * 20_000,
    "20,000 objects": with_value('{"a":' * 20_000 + "1" + "}" * 20_000),
    "a lone surrogate": with_value(r'"a\ud83d"'),
    "a lone surrogate in a name": b'{"name":"comments","to":"s1","payload":{"\\udc00":1}}',
    "a NUL between": with_value("\0"),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_a_body_that_is_no_proper_json_is_400_with_the_reason_and_the_server_goes_on(api, body):
    before = count_events(api)
    status, answer = send_text(api, body)
    assert status == 400
    assert answer["message"] and answer["errors"]
    assert count_events(api) == before
    assert accepts(api)


@pytest.mark.parametrize("name", [r"com\ud83dments", r"x\u0000"])
def test_a_workflow_name_with_odd_characters_is_refused_and_not_a_server_error(api, name):
    status, _ = send_text(api, f'{{"name":"{name}","to":"s1"}}'.encode())
    assert status in (400, 422)


@pytest.mark.parametrize("where", ["to", "transactionId"])
def test_a_lone_surrogate_in_an_id_is_refused_and_not_a_server_error(api, where):
    status, _ = send_text(api, json.dumps(call("t") | {where: "a\ud83d"}).encode())
    assert status in (400, 422)


def test_a_lone_surrogate_in_a_subscriber_field_is_refused_and_not_a_server_error(api):
    to = {"subscriberId": "surrogate", "firstName": "a\ud83d"}
    status, _ = send_text(api, json.dumps(call("t") | {"to": to}).encode())
    assert status in (400, 422)
    assert api.query("SELECT * FROM subscribers WHERE subscriber_id = 'surrogate'") == []


def test_a_byte_order_mark_is_taken(api):
    transaction_id = new_id()
    assert send_text(api, b"\xef\xbb\xbf" + json.dumps(call(transaction_id)).encode())[0] == 201
    assert len(events_of(api, transaction_id)) == 1


def test_of_doubled_keys_the_last_one_counts(api):
    transaction_id = new_id()
    body = (
        f'{{"name":"nothing","name":"comments","to":"s1","payload":{{"a":1,"a":2}},"transactionId":"{transaction_id}"}}'
    )
    assert send_text(api, body.encode())[0] == 201
    assert events_of(api, transaction_id) == [("s1", '{"a":2}', "placed")]


@pytest.mark.parametrize(
    "value",
    ["x\0y", "\u2028\u2029", "日本 \U0001f600", "a\nb\t\"c\\", 2**63, -(2**70), 1.5e300, {"": {"": []}}, None, False],
    ids=["NUL", "line separators", "far characters", "controls", "2^63", "-2^70", "big float", "empty", "null", "no"],
)  # fmt: skip
def test_a_value_arrives_in_the_database_whole(api, value):
    transaction_id = new_id()
    assert api.request("POST", TRIGGER, call(transaction_id, payload={"x": value}))[0] == 201
    [(_, text, state)] = events_of(api, transaction_id)
    assert (json.loads(text), state) == ({"x": value}, "placed")


def test_ninety_levels_of_nesting_are_fine(api):
    assert send_text(api, with_value("[" * 90 + "]" * 90))[0] == 201


def sized(size: int, transaction_id: str) -> bytes:
    bare = len(json.dumps(call(transaction_id, payload={"x": ""})))
    return json.dumps(call(transaction_id, payload={"x": "x" * (size - bare)})).encode()


def test_a_body_of_exactly_512_kb_is_taken(api):
    transaction_id = new_id()
    body = sized(LIMIT, transaction_id)
    assert len(body) == LIMIT
    assert api.request("POST", TRIGGER, body)[0] == 201
    assert len(events_of(api, transaction_id)) == 1


@pytest.mark.parametrize("size", [LIMIT + 1, 4 << 20], ids=["one byte more", "4 MiB"])
def test_a_larger_body_is_413_and_the_server_goes_on(api, size):
    transaction_id = new_id()
    client = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
    with contextlib.closing(client):
        client.request("POST", TRIGGER, sized(size, transaction_id))
        answer = client.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["statusCode"] == 413
    assert events_of(api, transaction_id) == []
    assert accepts(api)


def test_a_body_said_to_be_large_is_413_before_it_is_sent(api):
    assert send(api, head("POST", TRIGGER, "Content-Length: 52428800"))[0] == 413


def test_a_chunked_body_that_never_ends_is_413_and_the_server_goes_on(api):
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(head("POST", TRIGGER, "Transfer-Encoding: chunked"))
        with contextlib.suppress(OSError):  # it may hang up while we still send
            for _ in range(LIMIT // 1024 + 64):
                client.sendall(chunk)
        assert read_answer(stream)[0] == 413
    assert accepts(api)


def test_a_chunked_body_within_the_limit_is_taken(api):
    transaction_id = new_id()
    body = json.dumps(call(transaction_id)).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:20], body[20:])) + b"0\r\n\r\n"
    assert send(api, head("POST", TRIGGER, "Transfer-Encoding: chunked") + chunks)[0] == 201
    assert len(events_of(api, transaction_id)) == 1


# -- bulk --------------------------------------------------------------------------------------------------------------


def bulk(api: Process, events: Any) -> tuple[int, Any]:
    return api.request("POST", TRIGGER + "/bulk", {"events": events})


def test_a_bulk_of_a_hundred_is_answered_in_order(api):
    ids = [new_id() for _ in range(100)]
    status, answer = bulk(api, [call(one) for one in ids])
    assert status == 201
    assert list(answer) == ["data"]
    assert [item["transactionId"] for item in answer["data"]] == ids
    assert {(item["acknowledged"], item["status"]) for item in answer["data"]} == {(True, "processed")}
    stored = api.query("SELECT transaction_id FROM events ORDER BY id DESC LIMIT 100")
    assert [one for (one,) in reversed(stored)] == ids


def test_a_bulk_of_101_is_422_and_nothing_is_stored(api):
    before = count_events(api)
    status, answer = bulk(api, [call(new_id()) for _ in range(101)])
    assert status == 422
    assert answer["errors"]["events"]["messages"]
    assert count_events(api) == before


@pytest.mark.parametrize("bad", [{"name": "nothing"}, {"payload": [1]}, {"name": None}], ids=json.dumps)
def test_a_bad_event_in_a_bulk_is_an_item_with_an_error_and_the_others_count(api, bad):
    ids = [new_id() for _ in range(3)]
    status, answer = bulk(api, [call(ids[0]), call(ids[1]) | bad, call(ids[2])])
    assert status == 201
    assert [item["status"] for item in answer["data"]] == ["processed", "error", "processed"]
    assert answer["data"][1]["error"] and "error" not in answer["data"][0]
    assert [len(events_of(api, one)) for one in ids] == [1, 0, 1]


@pytest.mark.parametrize("item", [7, "text", None, [], {}])
def test_an_item_that_is_no_trigger_is_an_error_of_its_own(api, item):
    good = new_id()
    status, answer = bulk(api, [item, call(good)])
    assert status == 201
    assert [one["status"] for one in answer["data"]] == ["error", "processed"]
    assert len(events_of(api, good)) == 1


@pytest.mark.parametrize("to", ["", [], ["s1", ""], {"subscriberId": ""}], ids=json.dumps)
def test_an_empty_recipient_refuses_the_whole_bulk(api, to):
    good = new_id()
    status, _ = bulk(api, [call(good), call(new_id(), to=to)])
    assert status == 422
    assert events_of(api, good) == []


@pytest.mark.parametrize("body", [{}, {"events": []}, {"events": {}}, {"events": None}, [], "x"], ids=json.dumps)
def test_a_bulk_without_events_is_400(api, body):
    status, answer = api.request("POST", TRIGGER + "/bulk", body)
    assert status == 400
    assert isinstance(answer["errors"], list)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_bulk_of_which_the_database_refuses_one_is_500_and_nothing_of_it_is_stored(tmp_path, bad):
    process = Process(tmp_path, WORKFLOWS)
    try:
        with contextlib.closing(sqlite3.connect(process.folder / "digestd.sqlite3")) as connection, connection:
            connection.execute(
                "CREATE TRIGGER odd BEFORE INSERT ON events WHEN new.payload LIKE '%odd%'"
                " BEGIN SELECT raise(ABORT, 'odd'); END"
            )
        ids = [new_id() for _ in range(3)]
        calls = [call(one, payload={"postId": 1, "n": "odd" if n == bad else "even"}) for n, one in enumerate(ids)]
        assert bulk(process, calls)[0] == 500
        assert [events_of(process, one) for one in ids] == [[], [], []]
        assert bulk(process, [call(one) for one in ids])[0] == 201  # and the next one is served
    finally:
        process.stop()


def test_the_same_transaction_twice_in_a_bulk_is_one_event(api):
    transaction_id = new_id()
    _, answer = bulk(api, [call(transaction_id), call(transaction_id)])
    assert [item["status"] for item in answer["data"]] == ["processed", "processed"]
    assert len(events_of(api, transaction_id)) == 1


# -- cancel, and the same transaction again ----------------------------------------------------------------------------


def test_a_cancel_is_true_once_and_false_where_nothing_was_cancelled(api):
    transaction_id = new_id()
    api.request("POST", TRIGGER, call(transaction_id))
    assert api.request("DELETE", f"{TRIGGER}/{transaction_id}") == (200, {"data": True})
    assert api.request("DELETE", f"{TRIGGER}/{transaction_id}") == (200, {"data": False})
    assert api.request("DELETE", f"{TRIGGER}/never-seen") == (200, {"data": False})
    assert events_of(api, transaction_id) == [("s1", '{"postId":1}', "cancelled")]


@pytest.mark.parametrize("name", ["a/b c", "50%", "%2F", "ü?x=1#y", "a+b", "bulk"])
def test_a_transaction_id_with_any_characters_can_be_cancelled(api, name):
    transaction_id = f"{new_id()} {name}" if name != "bulk" else name
    assert api.request("POST", TRIGGER, call(transaction_id))[0] == 201
    assert api.request("DELETE", f"{TRIGGER}/{urllib.parse.quote(transaction_id, safe='')}") == (200, {"data": True})


def test_the_same_call_again_has_the_same_answer_and_is_one_event(api):
    transaction_id = new_id()
    body = call(transaction_id, to=["s1", "s2"], payload={"a": 1, "b": {"c": [1, 2]}})
    again = call(transaction_id, to=["s1", "s2"], payload={"b": {"c": [1, 2.0]}, "a": 1})
    assert api.request("POST", TRIGGER, body) == api.request("POST", TRIGGER, again)
    assert len(events_of(api, transaction_id)) == 2


def test_a_transaction_id_used_for_other_content_is_an_error_and_the_first_event_stays(api):
    transaction_id = new_id()
    api.request("POST", TRIGGER, call(transaction_id))
    status, answer = api.request("POST", TRIGGER, call(transaction_id, payload={"postId": 2}))
    assert status == 201
    assert (answer["data"]["status"], answer["data"]["transactionId"]) == ("error", transaction_id)
    assert transaction_id in answer["data"]["error"][0]
    assert events_of(api, transaction_id) == [("s1", '{"postId":1}', "placed")]


def test_a_cancelled_transaction_id_stays_used(api):
    transaction_id = new_id()
    api.request("POST", TRIGGER, call(transaction_id))
    api.request("DELETE", f"{TRIGGER}/{transaction_id}")
    assert api.request("POST", TRIGGER, call(transaction_id))[0] == 201
    assert [event[2] for event in events_of(api, transaction_id)] == ["cancelled"]


def test_twenty_clients_with_one_transaction_id_make_one_event(api):
    transaction_id = new_id()
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: api.request("POST", TRIGGER, call(transaction_id)), range(20)))
    assert [status for status, _ in answers] == [201] * 20
    assert {answer["data"]["status"] for _, answer in answers} == {"processed"}
    assert len(events_of(api, transaction_id)) == 1


# -- HTTP itself -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nothing", "/v1/events", "/v1/events/triggers", TRIGGER + "/a/b", "/%00", "//"])
def test_an_unknown_path_is_404(api, path):
    assert send(api, head("GET", path))[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", TRIGGER), ("PUT", TRIGGER), ("DELETE", TRIGGER), ("GET", TRIGGER + "/bulk"), ("GET", TRIGGER + "/x"),
     ("POST", TRIGGER + "/x"), ("POST", "/healthz"), ("OPTIONS", TRIGGER)],
)  # fmt: skip
def test_a_method_that_the_path_does_not_have_is_405(api, method, path):
    assert send(api, head(method, path, "Content-Length: 0"))[0] == 405


ERRORS = {
    400: post(b"x"),
    404: head("GET", "/nothing?query=1"),
    405: head("PUT", TRIGGER, "Content-Length: 0"),
    413: head("POST", TRIGGER, "Content-Length: 99999999"),
    422: post(b'{"name":"nothing","to":"s1"}'),
}


@pytest.mark.parametrize("status", ERRORS)
def test_an_error_has_the_fields_that_the_sdks_need(api, status):
    got, headers, answer = send(api, ERRORS[status])
    assert (got, answer["statusCode"]) == (status, status)
    assert headers["content-type"].partition(";")[0] == "application/json"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", answer["timestamp"])
    assert answer["path"] == ("/nothing" if status == 404 else TRIGGER)
    assert isinstance(answer["message"], str) and answer["message"]


def test_head_has_no_body_and_the_connection_can_be_used_on(api):
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(head("HEAD", "/healthz"))
        status, headers, _ = read_answer(stream, with_body=False)
        assert status == 200 and int(headers["content-length"]) > 0
        client.sendall(head("HEAD", TRIGGER))
        assert read_answer(stream, with_body=False)[0] == 405
        client.sendall(head("GET", "/healthz"))
        assert json.loads(read_answer(stream)[2])["status"] == "ok"


def test_many_requests_go_over_one_connection_errors_included(api):
    ids = [new_id() for _ in range(200)]
    with connect(api) as client, client.makefile("rb") as stream:
        for number, one in enumerate(ids):
            client.sendall(post(b"[]") if number % 10 == 5 else post(json.dumps(call(one)).encode()))
            status, _, body = read_answer(stream)
            assert status == (400 if number % 10 == 5 else 201)
            assert status == 400 or json.loads(body)["data"]["transactionId"] == one


def test_pipelined_requests_are_answered_in_their_order(api):
    ids = [new_id() for _ in range(20)]
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(b"".join(post(json.dumps(call(one)).encode()) for one in ids) + head("GET", "/healthz"))
        answers = [read_answer(stream) for _ in range(21)]
    assert [json.loads(body)["data"]["transactionId"] for _, _, body in answers[:20]] == ids
    assert [status for status, _, _ in answers] == [201] * 20 + [200]


def test_a_client_that_says_close_is_let_go(api):
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(head("GET", "/healthz", "Connection: close"))
        assert read_answer(stream)[0] == 200
        assert stream.read() == b""


def test_an_http_1_0_client_is_answered_and_let_go(api):
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert read_answer(stream)[0] == 200
        assert stream.read() == b""


def test_a_client_that_asks_first_is_told_to_go_on(api):
    transaction_id = new_id()
    body = json.dumps(call(transaction_id)).encode()
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(head("POST", TRIGGER, f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert read_answer(stream)[0] == 100
        client.sendall(body)
        assert read_answer(stream)[0] == 201
    assert len(events_of(api, transaction_id)) == 1


def test_a_client_that_asks_first_with_2_mb_gets_its_413(api):
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(head("POST", TRIGGER, f"Content-Length: {2 << 20}", "Expect: 100-continue"))
        status = read_answer(stream)[0]
        assert (read_answer(stream)[0] if status == 100 else status) == 413
    assert accepts(api)


def test_two_hundred_idle_connections_do_not_block_new_calls(api):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(api)) for _ in range(200)]
        for client in idle[:100]:
            client.sendall(b"POST ")  # half of a request line
        assert accepts(api)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
     head("POST", TRIGGER, "Content-Length: -1"), head("POST", TRIGGER, "Content-Length: x"),
     head("POST", TRIGGER, "Content-Length: 2", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
     head("GET", "/healthz", "X: " + "x" * 100_000)],
    ids=["TLS", "no path", "another version", "negative length", "no number", "two lengths", "100 kB header"],
)  # fmt: skip
def test_nonsense_on_the_line_is_400_and_the_server_goes_on(api, data):
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(data)
        assert read_answer(stream)[0] == 400
    assert accepts(api)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("keys"), 'keys = ["older-key", "right-key"]\n' + WORKFLOWS)
    yield process
    if process.process.poll() is None:
        process.kill()


AUTHORIZATIONS = {
    "none": (None, 401),
    "empty": ("", 401),
    "wrong": ("ApiKey wrong", 401),
    "right": ("ApiKey right-key", 201),
    "the other right one": ("ApiKey older-key", 201),
    "other case of the scheme": ("apikey right-key", 201),
    "capitals": ("APIKEY right-key", 201),
    "other case of the key": ("ApiKey RIGHT-KEY", 401),
    "Bearer": ("Bearer right-key", 401),
    "the bare key": ("right-key", 401),
    "the beginning of it": ("ApiKey right-ke", 401),
    "no key behind the scheme": ("ApiKey ", 401),
    "not ASCII": ("ApiKey schlüssel-日本", 401),
}


@pytest.mark.parametrize(("given", "status"), AUTHORIZATIONS.values(), ids=AUTHORIZATIONS.keys())
def test_only_a_known_key_opens_the_door(locked_api, given, status):
    transaction_id = new_id()
    lines = [] if given is None else [f"Authorization: {given}"]
    got, _, answer = send(locked_api, post(json.dumps(call(transaction_id)).encode(), *lines))
    assert got == status
    assert len(events_of(locked_api, transaction_id)) == (status == 201)
    if status == 401:
        assert {"statusCode", "timestamp", "path", "message"} <= set(answer)
        assert "right-key" not in json.dumps(answer)


def test_bytes_that_are_no_text_are_no_key(locked_api):
    assert (
        send(
            locked_api,
            head("DELETE", TRIGGER + "/x").replace(b"\r\n\r\n", b"\r\nAuthorization: ApiKey \xff\xfe\r\n\r\n"),
        )[0]
        == 401
    )


def test_the_health_check_needs_no_key_and_everything_else_does(locked_api):
    assert locked_api.request("GET", "/healthz")[0] == 200
    for method, path in (
        ("POST", TRIGGER + "/bulk"),
        ("DELETE", TRIGGER + "/x"),
        ("GET", "/nothing"),
        ("GET", "//healthz"),
    ):
        assert send(locked_api, head(method, path, "Content-Length: 0"))[0] == 401


def test_a_key_is_in_no_log(locked_api):
    send(locked_api, head("DELETE", TRIGGER + "/x", "Authorization: ApiKey guessed-key"))
    assert "right-key" not in locked_api.logged() and "guessed-key" not in locked_api.logged()


# -- another process holds the database --------------------------------------------------------------------------------


@contextlib.contextmanager
def held(api: Process) -> Iterator[sqlite3.Connection]:
    """The write lock, in this process, which is another one than the daemon's."""
    with contextlib.closing(sqlite3.connect(api.database, timeout=10, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other
        if other.in_transaction:
            other.execute("ROLLBACK")


def send_many(api: Process, pool: concurrent.futures.Executor, ids: list[str]) -> list[concurrent.futures.Future[Any]]:
    return [pool.submit(send, api, post(json.dumps(call(one)).encode())) for one in ids]


def test_a_lock_of_three_seconds_loses_no_trigger(api):
    ids = [new_id() for _ in range(20)]
    with concurrent.futures.ThreadPoolExecutor(20) as pool, held(api) as other:
        until = time.monotonic() + 3
        answers = send_many(api, pool, ids)
        wait_for(lambda: time.monotonic() > until, what="the end of the lock")
        assert not any(answer.done() for answer in answers)
        assert api.request("GET", "/healthz")[0] == 200  # the loop is not blocked
        other.execute("ROLLBACK")
        assert [answer.result()[0] for answer in answers] == [201] * 20
    assert [len(events_of(api, one)) for one in ids] == [1] * 20


def test_a_longer_lock_is_503_and_what_was_refused_is_never_stored(api):
    refused, later = [new_id() for _ in range(20)], [new_id() for _ in range(5)]
    with concurrent.futures.ThreadPoolExecutor(30) as pool, held(api) as other:
        for answer in send_many(api, pool, refused):
            status, headers, body = answer.result()
            assert status == 503
            assert int(headers["retry-after"]) >= 1
            assert {"statusCode", "timestamp", "path", "message"} <= set(body)
        answers = send_many(api, pool, later)
        cancelled = pool.submit(send, api, head("DELETE", f"{TRIGGER}/{refused[0]}"))
        wait_for(lambda: not any(answer.done() for answer in answers) and all(answer.running() for answer in answers))
        other.execute("ROLLBACK")
        assert [answer.result()[0] for answer in answers] == [201] * 5
        assert cancelled.result()[2] == {"data": False}
    assert [len(events_of(api, one)) for one in later] == [1] * 5
    assert [len(events_of(api, one)) for one in refused] == [0] * 20
    assert accepts(api)


def test_a_client_that_hung_up_while_the_database_was_locked_breaks_nothing(api):
    gone = new_id()
    with held(api), connect(api) as client:
        client.sendall(post(json.dumps(call(gone)).encode()))
        client.shutdown(socket.SHUT_RDWR)
    assert accepts(api)
    assert len(events_of(api, gone)) <= 1


# -- repeatables -------------------------------------------------------------------------------------------------------

SPECS = "/v1/repeatables"


def hourly(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "every": 3_600_000, "sender": "out", **more}


def listed(api: Process) -> list[str]:
    status, answer = api.request("GET", SPECS)
    assert status == 200
    return [one["key"] for one in answer["data"]]


def test_a_repeatable_is_added_listed_and_removed_by_its_key(api):
    status, answer = api.request("POST", SPECS, hourly("api one", limit=5, data={"a": 1}, tz="Europe/Berlin"))
    facts = answer["data"]
    assert (status, facts["key"], facts["count"], facts["limit"]) == (201, "api one:::Europe/Berlin:3600000", 0, 5)
    assert len(facts["next"]) == 5 and (facts["state"], facts["source"], facts["data"]) == ("active", "api", {"a": 1})
    assert api.request("POST", SPECS, hourly("api one", limit=7, tz="Europe/Berlin"))[1]["data"]["limit"] == 7
    path = f"{SPECS}/{urllib.parse.quote(facts['key'])}"
    assert api.request("GET", path)[1]["data"]["limit"] == 7 and facts["key"] in listed(api)
    assert api.request("DELETE", path) == (200, {"data": True})
    assert api.request("DELETE", path) == (200, {"data": False})
    assert facts["key"] not in listed(api) and api.request("GET", path)[0] == 404


def test_a_repeatable_is_removed_by_its_name_options_and_job_id(api):
    for job_id in ("a", "b"):
        assert api.request("POST", SPECS, hourly("api two", jobId=job_id))[0] == 201
    assert api.request("DELETE", f"{SPECS}/{urllib.parse.quote('api two')}")[0] == 409
    assert api.request("DELETE", SPECS, hourly("api two", jobId="a")) == (200, {"data": True})
    assert [key for key in listed(api) if key.startswith("api two")] == ["api two:b::UTC:3600000"]
    assert api.request("DELETE", SPECS, hourly("api two", jobId="c")) == (200, {"data": False})
    bare = {"name": "api two", "repeat": {"every": "1h", "jobId": "b"}}
    assert api.request("DELETE", SPECS, bare) == (200, {"data": True})
    status, answer = api.request("DELETE", SPECS, {"name": "api two"})
    assert status == 422 and "cron, pattern and every" in answer["message"]


def test_the_options_of_bullmq_are_taken_as_its_clients_nest_them(api):
    body = {"name": "api nested", "sender": "out", "repeat": {"pattern": "0 15 3 * * *", "limit": 2, "jobId": "j"}}
    status, answer = api.request("POST", SPECS, body)
    assert status == 201 and answer["data"]["rule"] == "cron 0 15 3 * * *" and answer["data"]["jobId"] == "j"
    assert len(answer["data"]["next"]) == 2  # and no more than its limit lets it have


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"every": 1000, "sender": "out"}, "name"),
        (hourly("x", cron="* * * * *"), "one of cron and every"),
        ({"name": "x", "sender": "out"}, "one of cron and every"),
        (hourly("x", sender="nobody"), "no sender is called"),
        ({"name": "x", "every": 1000}, "sender and trigger"),
        (hourly("x", limit=0), "limit: 0 is out of range"),
        (hourly("x", limit=3, count=3), "the limit of 3 runs is reached"),
        (hourly("x", end_at="2020-01-01T00:00:00Z"), "would never run"),
        (hourly("x", end_at="2020-02-30T00:00:00Z"), "not a real date"),
        (hourly("x", immediately=True, start_at="2030-01-01T00:00:00Z"), "exclude each other"),
        (hourly("x", tz="Mars/Phobos"), "not a time zone"),
        (hourly("x", evry=1), "did you mean 'every'?"),
        ({"name": "x", "cron": "0 0 30 2 *", "sender": "out"}, "never happens"),
        ({"name": "x", "cron": 5, "sender": "out"}, "cron"),
        (hourly("x\ny"), "control characters"),
        ([], "an object"),
    ],
)
def test_a_repeatable_that_is_none_is_refused_with_the_reason_and_not_stored(api, body, words):
    before = listed(api)
    status, answer = api.request("POST", SPECS, body)
    assert status == 422 and words in answer["message"] and answer["errors"]["general"]["messages"]
    assert listed(api) == before


def test_a_repeatable_is_paused_resumed_skipped_and_run_once_more_by_calls(api):
    assert api.request("POST", SPECS, hourly("api three"))[0] == 201
    path = f"{SPECS}/{urllib.parse.quote('api three')}"
    assert api.request("POST", path + "/pause")[1]["data"]["key"] == "api three:::UTC:3600000"
    assert api.request("POST", path + "/pause")[0] == 409
    assert api.request("GET", path)[1]["data"]["next"] == []
    assert api.request("POST", path + "/resume")[0] == 200
    first = api.request("GET", path)[1]["data"]["next"][0]
    assert api.request("POST", path + "/skip-next")[1]["data"]["skipped"] == first
    assert api.request("POST", path + "/run-now")[1]["data"]["count"] == 1
    wait_for(
        lambda: (api.request("GET", path)[1]["data"]["lastRun"] or {}).get("result") == "completed", what="the run"
    )
    facts = api.request("GET", path)[1]["data"]
    assert (facts["count"], facts["runs24h"], facts["failures24h"]) == (1, 1, 0) and facts["next"][0] > first
    assert api.request("POST", path + "/explode")[0] == 405
    assert api.request("POST", f"{SPECS}/nobody/pause")[0] == 404


def test_the_list_is_ordered_by_the_next_time_and_then_the_key(api):
    for name, every in (("zz late", 7_200_000), ("zz b", 60_000), ("zz a", 60_000)):
        assert api.request("POST", SPECS, hourly(name, every=every))[0] == 201
    assert api.request("POST", f"{SPECS}/{urllib.parse.quote('zz late')}/pause")[0] == 200
    mine = [key.partition(":")[0] for key in listed(api) if key.startswith("zz")]
    assert mine == ["zz a", "zz b", "zz late"] and listed(api)[-1].startswith("zz late")


def test_a_hundred_triggers_at_once_for_one_key_open_one_window(api):
    who = new_id()
    gate = threading.Barrier(100)

    def send_one(number: int) -> int:
        with connect(api) as client, client.makefile("rb") as stream:
            gate.wait()
            client.sendall(post(json.dumps(call(f"{who}-{number}", to=who, payload={"postId": "one"})).encode()))
            return read_answer(stream)[0]

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        assert list(pool.map(send_one, range(100))) == [201] * 100
    windows = f"SELECT count(*), count(DISTINCT digest_id), min(state) FROM events WHERE subscriber_id = '{who}'"
    assert api.query(windows) == [(100, 1, "placed")]
    assert api.query(f"SELECT state FROM digests WHERE subscriber_id = '{who}'") == [("open",)]


# -- payload schemas ---------------------------------------------------------------------------------------------------


def test_a_payload_is_held_to_the_schema_of_its_workflow(api):
    status, answer = api.request("POST", TRIGGER, call(new_id(), name="strict", payload={"n": "x", "m": [1]}))
    assert (status, answer["type"]) == (400, "PAYLOAD_VALIDATION_ERROR")
    assert [error["field"] for error in answer["errors"]] == ["payload.m.0", "payload.n"]
    one, two = new_id(), new_id()
    bulk = [call(one, name="strict", payload={"n": 1}), call(two, name="strict", payload={"n": "x"})]
    status, answer = api.request("POST", TRIGGER + "/bulk", {"events": bulk})
    assert status == 201 and [item["status"] for item in answer["data"]] == ["processed", "error"]
    assert 'payload.n: "x" is not of type "integer"' in answer["data"][1]["error"][0]
    assert (len(events_of(api, one)), len(events_of(api, two))) == (1, 0)


# -- the short way -----------------------------------------------------------------------------------------------------


def in_two_parts(api: Process, data: bytes) -> tuple[int, dict[str, str], Any]:
    """The headers, and the body when the server has read them and asks for it: then its own way is taken."""
    first, _, rest = data.partition(b"\r\n\r\n")
    with connect(api) as client, client.makefile("rb") as stream:
        client.sendall(first + b"\r\nExpect: 100-continue\r\n\r\n")
        answer = read_answer(stream)
        if answer[0] == 100:
            client.sendall(rest)
            answer = read_answer(stream)
        status, headers, body = answer
        return status, headers, json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(call("short-1")).encode(),
        json.dumps(call("short-2", to=["s1", {"subscriberId": "s2", "firstName": "Bo"}])).encode(),
        json.dumps(call("short-3", name="nothing")).encode(),
        json.dumps(call("short-4", to="")).encode(),
        json.dumps(call("short-5", payload=[1])).encode(),
        b'{"name": "comments", "to": "s1", "payload": {"n": NaN}}',
        b"[]",
        b"{",
        b"\xff",
        b"",
        b" " * (LIMIT + 1),
    ],
)
def test_a_call_that_comes_in_one_piece_is_answered_as_one_that_comes_in_two(api, body):
    (status, headers, answer), (status2, headers2, answer2) = send(api, post(body)), in_two_parts(api, post(body))
    answer.pop("timestamp", None), answer2.pop("timestamp", None)
    assert (status, headers.keys(), answer) == (status2, headers2.keys(), answer2)


def test_a_caller_that_reads_no_answers_is_read_no_further(api):
    """Or the answers would pile up in memory."""
    with connect(api) as client:
        client.settimeout(2)
        data = memoryview(head("GET", "/healthz") * 20_000)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 30_000_000:
                sent += client.send(data[sent % len(data) :][: 1 << 16])
    assert accepts(api)


def test_sigterm_while_a_trigger_waits_for_its_commit_still_answers_it(tmp_path):
    process = Process(tmp_path, WORKFLOWS)
    one = new_id()
    with connect(process) as client, client.makefile("rb") as stream:
        with held(process) as other:
            client.sendall(post(json.dumps(call(one)).encode()))
            wait_for(lambda: "cannot be written" in process.logged(), what="that the trigger waits")
            process.process.terminate()
            wait_for(lambda: "SIGTERM: ending" in process.logged(), what="the end's beginning")
            other.execute("ROLLBACK")
        assert read_answer(stream)[0] == 201
    assert process.process.wait(20) == 0
    process.log.close()
    assert len(events_of(process, one)) == 1


class Connections:
    """The API in this process, without a daemon behind it: calls are kept and answered by the test."""

    def __init__(self) -> None:
        self.config = digestd.read_config('[api]\nlisten = ["127.0.0.1:0"]\n' + WORKFLOWS, pathlib.Path("c.toml"))
        self.loop = asyncio.get_running_loop()
        self.clock = digestd.SystemClock()
        self.stopping = False
        self.calls: asyncio.Queue[digestd.TriggerCall] = asyncio.Queue()
        self.put = self.calls.put_nowait
        self.api = digestd.Api()

    async def __aenter__(self) -> Connections:
        await self.api.start(self)  # type: ignore[arg-type]
        _, port = self.api.runner.addresses[0]
        self.stream, self.writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await self.api.stop()

    async def trigger(self, *lines: str) -> bytes:
        self.writer.write(post(json.dumps(call("t")).encode(), *lines))
        waiting = await self.calls.get()
        waiting.reply.set_result([digestd.TriggerAnswer("processed", "t")])
        status = await self.stream.readline()
        await self.stream.readuntil(b"}}")
        return status


def play(scene: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scene, 20))


async def rounds(until: Callable[[], Any] = lambda: False, count: int = 100_000) -> None:
    """Let the loop go round, until a condition holds or a number of times."""
    for _ in range(count):
        if until():
            return
        await asyncio.sleep(0)
    assert count < 100_000, "it did not come"


def test_what_follows_on_the_connection_waits_for_the_answer_before_it():
    """A trigger waits for a commit; the health check behind it must not overtake it, nor the trigger after that, which
    comes in pieces."""

    async def scene() -> tuple[bytes, list[bytes]]:
        async with Connections() as one:
            first, then = post(json.dumps(call("a")).encode()), post(json.dumps(call("b")).encode())
            one.writer.write(first)
            waiting = await one.calls.get()
            [connection] = one.api.runner.server.connections
            for piece in (head("GET", "/healthz"), then[:30]):
                one.writer.write(piece)
            await rounds(lambda: connection._parser.later)
            early = bytes(one.stream._buffer)
            waiting.reply.set_result([digestd.TriggerAnswer("processed", "a")])
            one.writer.write(then[30:] + post(b"["))
            (await one.calls.get()).reply.set_result([digestd.TriggerAnswer("processed", "b")])
            return early, [await one.stream.readuntil(mark) for mark in (b'"a"}}', b'"ok"', b'"b"}}', b" 400 ")]

    early, answers = play(scene())
    assert early == b"" and len(answers) == 4


def test_much_that_follows_is_not_read_before_it_is_its_turn():
    """A caller that does not wait for answers is slowed down, not kept in memory."""

    async def scene() -> int:
        async with Connections() as one:
            one.writer.write(post(json.dumps(call("a")).encode()))
            waiting = await one.calls.get()
            [connection] = one.api.runner.server.connections
            one.writer.write(head("GET", "/healthz") * 200_000)
            await rounds(lambda: not connection.transport.is_reading())
            await rounds(count=100)
            kept = len(connection._parser.later)
            one.writer.transport.abort()
            waiting.reply.set_result([digestd.TriggerAnswer("processed", "a")])
            return kept

    assert 0 < play(scene()) <= 256 << 10


def test_the_end_waits_for_the_answer_to_a_trigger_under_way():
    async def scene() -> bytes:
        async with Connections() as one:
            one.writer.write(post(json.dumps(call("a")).encode()))
            waiting = await one.calls.get()
            one.stopping = True
            ending = one.loop.create_task(one.api.stop())
            await rounds(count=50)
            waiting.reply.set_result([digestd.TriggerAnswer("processed", "a")])
            await ending
            return await one.stream.readline()

    assert play(scene()) == b"HTTP/1.1 201 Created\r\n"


def test_a_trigger_costs_no_task_of_its_own():
    """What the short way is for. It stands on three attributes of the server's connection; this tells when they go."""

    async def scene() -> tuple[bytes, int]:
        async with Connections() as one:
            await one.trigger()
            made = []
            one.loop.set_task_factory(
                lambda loop, coro, **more: made.append(1) or asyncio.Task(coro, loop=loop, **more)
            )
            status = await one.trigger()
            one.loop.set_task_factory(None)
            return status, len(made)

    assert play(scene()) == (b"HTTP/1.1 201 Created\r\n", 0)


class Counting:
    """A parser that counts what it is given."""

    def __init__(self, parser: Any) -> None:
        self.parser, self.fed = parser, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parser, name)

    def feed_data(self, data: bytes) -> Any:
        self.fed += len(data)
        return self.parser.feed_data(data)


def test_a_head_that_was_parsed_once_is_known():
    async def scene() -> list[int]:
        async with Connections() as one:
            await one.trigger()
            [connection] = one.api.runner.server.connections
            connection._parser.parser = parser = Counting(connection._parser.parser)
            seen = []
            for lines in ((), (), ("X-Other: 1",), ("X-Other: 1",), ("X-Long: " + "x" * digestd.MAX_HEAD,) * 2):
                await one.trigger(*lines)
                seen.append(parser.fed)
                parser.fed = 0
            return seen

    same, again, other, other_again, long = play(scene())
    assert (same, again, other_again) == (0, 0, 0) and other > 0 and long > 0


def test_known_heads_do_not_pile_up():
    async def scene() -> int:
        async with Connections() as one:
            for number in range(digestd.KNOWN_HEADS + 10):
                await one.trigger(f"X-Number: {number}")
            return len(one.api.heads)

    assert play(scene()) == 10


def test_a_key_that_is_taken_out_of_the_config_opens_nothing_by_a_known_head():
    async def scene() -> list[bytes]:
        async with Connections() as one:
            one.config = digestd.read_config('[api]\nkeys = ["one"]\n' + WORKFLOWS, pathlib.Path("c.toml"))
            seen = [await one.trigger("Authorization: ApiKey one") for _ in range(2)]
            one.config = digestd.read_config('[api]\nkeys = ["two"]\n' + WORKFLOWS, pathlib.Path("c.toml"))
            one.writer.write(post(json.dumps(call("t")).encode(), "Authorization: ApiKey one"))
            return [*seen, await one.stream.readline()]

    assert [line.split()[1] for line in play(scene())] == [b"201", b"201", b"401"]


USUAL = post(json.dumps(call("a")).encode())
NOTE = f"POST {TRIGGER} HTTP/1.1\r\nX-Note: ".encode()  # a header that is not at its end


def in_pieces(random: Random) -> list[bytes]:
    """A conversation of usual and unusual requests, cut anywhere; often where one begins or ends."""
    requests = [
        *[USUAL] * 4,
        post(json.dumps(call("b")).encode(), "X-Other: 1"),
        post(USUAL),  # a request as the body of another
        NOTE + USUAL,
        b"\r\n" + USUAL,
        USUAL[: USUAL.index(b"\r\n\r\n")] + b"\r\nTransfer-Encoding: chunked" + USUAL[USUAL.index(b"\r\n\r\n") :],
        head("POST", TRIGGER, "Transfer-Encoding: chunked") + b"2\r\n[]\r\n0\r\n\r\n",
        head("GET", "/healthz"),
        post(b"["),
        post(b""),
    ]
    whole, cuts = b"", set()
    for _ in range(random.randrange(2, 8)):
        cuts |= {len(whole), len(whole) + random.randrange(200)} if random.random() < 0.7 else set()
        start, request = len(whole), random.choice(requests)
        whole += request
        inner = request.find(USUAL)
        if inner > 0:
            cuts |= {start + inner, start + inner + len(USUAL)}
    marks = [0, *sorted(cut for cut in cuts if 0 < cut < len(whole)), len(whole)]
    return [whole[first:then] for first, then in itertools.pairwise(marks)]


async def answers_to(pieces: list[bytes]) -> list[bytes]:
    """The statuses and bodies that a conversation gets, each piece sent after all before it were dealt with."""
    async with Connections() as one:

        def put(message: digestd.TriggerCall) -> None:
            found = [digestd.TriggerAnswer("processed", trigger.transaction_id) for trigger in message.triggers]
            one.loop.call_soon(message.reply.set_result, found)

        one.put = put  # type: ignore[assignment]
        for piece in (*pieces, head("GET", "/healthz", "Connection: close")):
            if not one.stream.at_eof() and not one.writer.is_closing():  # the server may have heard enough
                one.writer.write(piece)
            await rounds(count=12)
        await rounds(lambda: one.stream._eof or one.stream.exception())
        answered = bytes(one.stream._buffer)
        return re.findall(rb"HTTP/1.\d (\d+)[^{]*(?:\{[^}]*\"transactionId\":(\S+)\}\})?", answered)


@pytest.mark.parametrize(
    "pieces",
    [
        [USUAL, NOTE, USUAL, USUAL],
        [USUAL, head("POST", TRIGGER, f"Content-Length: {len(USUAL)}"), USUAL, USUAL],
        [USUAL[:2], USUAL[2:], USUAL[2:]],
        [USUAL, USUAL + USUAL[:9], USUAL[9:], USUAL],
        [USUAL, b"\r\n", USUAL, USUAL],
        [USUAL, USUAL + b"\r\n", USUAL],
        [USUAL, head("GET", "/healthz") + USUAL, USUAL],
        *[in_pieces(Random(seed)) for seed in range(40)],
    ],
)
def test_however_a_conversation_is_cut_the_short_way_answers_as_the_server_does(monkeypatch, pieces):
    ours = play(answers_to(pieces))
    monkeypatch.setattr(digestd.ShortWay, "PARTS", ("_no_such_part",))
    assert ours == play(answers_to(pieces)) and ours


def test_a_server_without_the_parts_for_the_short_way_serves_all_the_same(monkeypatch):
    monkeypatch.setattr(digestd.ShortWay, "PARTS", ("_no_such_part",))

    async def scene() -> tuple[bytes, type]:
        async with Connections() as one:
            status = await one.trigger()
            return status, type(one.api.runner.server.connections[0]._parser)

    status, parser = play(scene())
    assert status == b"HTTP/1.1 201 Created\r\n" and parser is not digestd.ShortWay


def test_a_connection_is_closed_when_it_was_quiet_for_75_s_and_not_before():
    async def scene() -> list[bool]:
        async with Connections() as one:
            real, ahead = one.loop.time, 0.0
            one.loop.time = lambda: real() + ahead  # type: ignore[method-assign]
            seen = []
            for quiet_s in (74, 74, 76):
                await one.trigger()
                ahead += quiet_s
                await rounds(count=20)  # with what is due by the loop's clock
                seen.append(not one.api.runner.server.connections)
                if seen[-1]:
                    break
            return seen

    assert asyncio.run(scene()) == [False, False, True]


# -- other doors -------------------------------------------------------------------------------------------------------


class UnixProcess(Process):
    """A daemon that listens on a unix socket only."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.path = folder / "d.sock"
        self.config.write_text(f'[api]\nlisten = ["unix:{self.path}"]\n{WORKFLOWS}')
        self.database = folder / "digestd.sqlite3"
        self.env = {}
        self.start()

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(self.path))
            with client.makefile("rb") as stream:
                data = b"" if body is None else json.dumps(body).encode()
                client.sendall(head(method, path, f"Content-Length: {len(data)}") + data)
                status, _, text = read_answer(stream)
                return status, json.loads(text)


@pytest.fixture
def unix_api(tmp_path: pathlib.Path) -> Iterator[UnixProcess]:
    process = UnixProcess(tmp_path)
    yield process
    if process.process.poll() is None:
        process.kill()


def test_a_unix_socket_serves_owner_and_group_only_and_goes_away_with_the_daemon(unix_api):
    assert stat.S_IMODE(unix_api.path.stat().st_mode) == 0o660
    assert accepts(unix_api)
    assert unix_api.stop() == 0
    assert not unix_api.path.exists()


def test_a_unix_socket_left_by_a_crash_is_taken_over(unix_api):
    unix_api.kill()
    assert unix_api.path.is_socket()
    unix_api.start()
    assert accepts(unix_api)


def run_once(folder: pathlib.Path, listen: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.toml").write_text(f'[api]\nlisten = ["{listen}"]\n{WORKFLOWS}')
    return subprocess.run(
        [sys.executable, str(ROOT / "digestd.py"), "run"], cwd=folder, capture_output=True, text=True, timeout=20
    )


def test_a_port_in_use_is_told_and_ends_with_1(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = run_once(tmp_path, f"127.0.0.1:{port}")
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr and "in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_unix_socket_in_use_is_told_and_left_alone(tmp_path):
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        ended = run_once(tmp_path, f"unix:{path}")
        assert ended.returncode == 1
        assert str(path) in ended.stderr and "Traceback" not in ended.stderr
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_an_open_address_without_keys_is_refused_at_start(tmp_path):
    ended = run_once(tmp_path, f"0.0.0.0:{free_port()}")
    assert ended.returncode == 78
    assert "keys" in ended.stderr and "Traceback" not in ended.stderr


def test_systemd_sockets_without_systemd_are_told(tmp_path):
    ended = run_once(tmp_path, "systemd")
    assert ended.returncode == 1
    assert "systemd" in ended.stderr and "Traceback" not in ended.stderr


# -- at the end --------------------------------------------------------------------------------------------------------


def test_the_client_that_hung_in_its_body_was_answered_and_let_go(api, half_sent):
    with half_sent.makefile("rb") as stream:
        assert read_answer(stream)[0] in (400, 408)
    assert accepts(api)


def test_a_client_that_drips_its_head_was_let_go_after_ten_seconds(api, slow_head):
    wait_for(lambda: slow_head, 30, "the end of the slow client")
    assert 9 < slow_head[0] < 30
    assert accepts(api)


def test_all_this_left_no_bug_in_the_log_and_a_clean_end(api):
    assert api.stop() == 0
    assert "Traceback" not in api.logged()
    assert "a bug" not in api.logged()
    assert digestd.__version__ in api.logged()
