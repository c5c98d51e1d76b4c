"""What real clients count on beside the single call: answers that are kept, links in mails, Alertmanager, broadcasts."""

from __future__ import annotations

import base64
import concurrent.futures
import hmac
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

import digestd
from conftest import Process
from test_api import TRIGGER, WORKFLOWS, call, connect, head, new_id, read_answer, send


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("api"), WORKFLOWS)
    yield process
    process.kill()


@pytest.fixture
def locked_api(tmp_path: Any) -> Iterator[Process]:
    """A daemon that asks for a key."""
    process = Process(tmp_path, WORKFLOWS)
    process.stop()
    process.config.write_text(process.config.read_text().replace("[api]\n", '[api]\nkeys = ["secret"]\n'))
    process.start()
    yield process
    process.kill()


# -- a call that comes again with the same Idempotency-Key -------------------------------------------------------------


def once_more(api: Process, key: str, body: Any, path: str = TRIGGER, *more: str) -> tuple[int, dict[str, str], Any]:
    data = json.dumps(body).encode()
    return send(api, head("POST", path, f"Content-Length: {len(data)}", f"Idempotency-Key: {key}", *more) + data)


def test_the_same_key_and_body_is_answered_as_before_and_done_once(api):
    key, body = new_id(), {"name": "comments", "to": new_id(), "payload": {"postId": 1}}
    first, again = once_more(api, key, body), once_more(api, key, body)
    assert first[0] == again[0] == 201 and first[2] == again[2]
    assert first[1]["idempotency-key"] == again[1]["idempotency-key"] == key
    assert "idempotency-replay" not in first[1] and again[1]["idempotency-replay"] == "true"
    assert api.query(f"SELECT count(*) FROM events WHERE subscriber_id = '{body['to']}'") == [(1,)]


def test_a_key_survives_the_end_of_the_process(tmp_path):
    process = Process(tmp_path, WORKFLOWS)
    body = {"name": "comments", "to": "s1", "payload": {"postId": 1}}
    first = once_more(process, "k", body)
    process.kill()
    process.start()
    again = once_more(process, "k", body)
    assert again[2] == first[2] and again[1]["idempotency-replay"] == "true"
    assert process.query("SELECT count(*) FROM events") == [(1,)]
    assert process.stop() == 0


def test_a_key_with_another_body_is_422_and_nothing_is_done(api):
    key, to = new_id(), new_id()
    once_more(api, key, {"name": "comments", "to": to})
    status, headers, answer = once_more(api, key, {"name": "comments", "to": to, "payload": {"n": 1}})
    assert status == 422 and "Idempotency-Key" in answer["message"] and headers["idempotency-key"] == key
    assert api.query(f"SELECT count(*) FROM events WHERE subscriber_id = '{to}'") == [(1,)]
    assert once_more(api, key, {}, "/v2/subscribers")[0] == 422, "nor does it serve another path"


def test_an_error_is_kept_too_and_answered_again(api):
    key = new_id()
    first = once_more(api, key, {"name": "nope", "to": "s1"})
    again = once_more(api, key, {"name": "nope", "to": "s1"})
    assert first[0] == again[0] == 422 and first[2] == again[2] and again[1]["idempotency-replay"] == "true"


def test_ten_at_once_with_one_key_are_done_once_and_the_others_are_told_to_wait(api):
    key, body = new_id(), {"name": "comments", "to": new_id(), "payload": {"postId": 1}}
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: once_more(api, key, body), range(10)))
    assert {status for status, _, _ in answers} <= {201, 409}
    assert all(headers["retry-after"] == "1" for status, headers, _ in answers if status == 409)
    assert api.query(f"SELECT count(*) FROM events WHERE subscriber_id = '{body['to']}'") == [(1,)]


def test_a_key_of_256_characters_is_400_and_one_of_255_is_fine(api):
    assert once_more(api, "k" * 256, call(new_id()))[0] == 400
    assert once_more(api, new_id() + "k" * 223, call(new_id()))[0] == 201


def test_reading_is_never_kept(api):
    key = new_id()
    line = head("GET", "/v1/repeatables", f"Idempotency-Key: {key}")
    assert "idempotency-key" not in send(api, line)[1]
    assert api.query(f"SELECT count(*) FROM answers WHERE key = '{key}'") == [(0,)]


def test_a_key_is_not_echoed_to_a_caller_that_is_not_let_in(locked_api):
    status, headers, _ = once_more(locked_api, "k", call(new_id()))
    assert status == 401 and "idempotency-key" not in headers


def test_answers_are_kept_for_a_day(world):
    w = world(WORKFLOWS)
    w.rows("INSERT INTO answers VALUES ('old', '', 201, '{}', ?), ('new', '', 201, '{}', ?)", w.now - 1, w.now + 1)
    with digestd.transaction():
        assert digestd.purge_answers(w.now) == 1
    assert w.rows("SELECT key FROM answers") == [("new",)]


# -- the end of a mail -------------------------------------------------------------------------------------------------


def unsubscribe_path(api: Process, workflow: str = "comments", channel: str = "chat") -> tuple[str, str]:
    """A subscriber, and the path of the link in a mail to it."""
    subscriber_id = f"Zoë {new_id()}"
    api.request("POST", "/v2/subscribers", {"subscriberId": subscriber_id})
    [[row_id]] = api.query(f"SELECT id FROM subscribers WHERE subscriber_id = '{subscriber_id}'")
    [[key]] = api.query("SELECT value FROM meta WHERE name = 'unsubscribe_key'")
    said = "\0".join((subscriber_id, workflow, channel)).encode()
    mac = base64.urlsafe_b64encode(hmac.digest(bytes.fromhex(key), said, "sha256")[:16]).decode().rstrip("=")
    return subscriber_id, f"/u/{row_id}.{mac}"


def choices_of(api: Process, subscriber_id: str) -> list[Any]:
    return api.query(f"SELECT workflow, channel, enabled FROM preferences WHERE subscriber_id = '{subscriber_id}'")


def page(api: Process, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], str]:
    with connect(api) as client, client.makefile("rb") as stream:
        form = "Content-Type: application/x-www-form-urlencoded"
        client.sendall(head(method, path, f"Content-Length: {len(body)}", form) + body)
        status, headers, text = read_answer(stream, method != "HEAD")
        return status, headers, text.decode()


def test_a_program_that_follows_the_link_changes_nothing_and_a_person_sees_a_button(api):
    subscriber_id, path = unsubscribe_path(api)
    status, headers, text = page(api, "GET", path)
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert '<form method="post">' in text and "comments" in text and subscriber_id not in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert page(api, "HEAD", path)[0] == 200 and choices_of(api, subscriber_id) == []


@pytest.mark.parametrize("body", [b"List-Unsubscribe=One-Click", b""])
def test_one_click_of_a_mail_program_writes_the_preference(api, body):
    subscriber_id, path = unsubscribe_path(api)
    assert page(api, "POST", path, body)[0] == 200
    assert choices_of(api, subscriber_id) == [("comments", "chat", 0)]
    _, found = api.request("GET", f"/v2/subscribers/{urllib.parse.quote(subscriber_id)}/preferences")
    one = next(one for one in found["data"]["workflows"] if one["workflow"]["identifier"] == "comments")
    assert one["channels"] == {"chat": False}
    assert page(api, "POST", path, b"undo=1")[0] == 200
    assert choices_of(api, subscriber_id) == [("comments", "chat", 1)]


def test_a_link_that_was_made_up_changes_nothing(api):
    subscriber_id, path = unsubscribe_path(api)
    for wrong in (path + "x", path[:-2], "/u/1.", "/u/x", "/u/%00", "/u/9999999.AAAA", path.replace("/u/", "/u/0")):
        status, headers, _ = page(api, "POST", wrong, b"List-Unsubscribe=One-Click")
        assert status in (404, 200) and choices_of(api, subscriber_id) in ([], [("comments", "chat", 0)]), wrong
    assert page(api, "POST", path + "x")[0] == 404


def test_a_link_needs_no_key_where_everything_else_does(locked_api):
    assert page(locked_api, "GET", "/u/1.x")[0] == 404
    assert locked_api.request("GET", "/v2/subscribers")[0] == 401


# -- Alertmanager ------------------------------------------------------------------------------------------------------

ALERT = {"status": "firing", "labels": {"alertname": "Down"}, "annotations": {}, "startsAt": "2026-03-09T09:00:00Z",
         "endsAt": "0001-01-01T00:00:00Z", "generatorURL": "", "fingerprint": "c0ffee"}  # fmt: skip
GROUP = {"version": "4", "groupKey": "{}:{}", "receiver": "digestd", "status": "firing", "groupLabels": {},
         "commonLabels": {}, "commonAnnotations": {}, "externalURL": "http://am", "truncatedAlerts": 0}  # fmt: skip


def alert(api: Process, to: str, *alerts: dict[str, Any]) -> tuple[int, Any]:
    return api.request("POST", f"/v1/ingest/alertmanager/comments?to={to}", {**GROUP, "alerts": list(alerts)})


def test_each_alert_and_status_is_one_event_however_often_it_is_sent(api):
    to = new_id()
    resolved = {**ALERT, "status": "resolved", "endsAt": "2026-03-09T10:00:00Z"}
    other = {**ALERT, "fingerprint": "other"}
    for _ in range(2):
        assert alert(api, to, ALERT, other)[0] == 201
    assert alert(api, to, {**ALERT, "annotations": {"changed": "since"}}, resolved)[0] == 201
    found = api.query(f"SELECT payload FROM events WHERE subscriber_id = '{to}' ORDER BY id")
    payloads = [json.loads(text) for (text,) in found]
    assert [(one["fingerprint"], one["status"]) for one in payloads] == [
        ("c0ffee", "firing"), ("other", "firing"), ("c0ffee", "resolved"),
    ]  # fmt: skip
    assert payloads[0]["receiver"] == "digestd" and payloads[0]["labels"] == {"alertname": "Down"}


def test_alerts_go_to_everybody_that_the_url_names(api):
    one, two, three = new_id(), new_id(), new_id()
    assert alert(api, f"{one}&to={two},{three}", ALERT)[0] == 201
    for to in (one, two, three):
        assert api.query(f"SELECT count(*) FROM events WHERE subscriber_id = '{to}'") == [(1,)]


@pytest.mark.parametrize("body", [[], {}, {"alerts": "x"}, {"alerts": [1]}, {"alerts": None}])
def test_what_alertmanager_would_not_send_is_400(api, body):
    status, answer = api.request("POST", "/v1/ingest/alertmanager/comments?to=x", body)
    assert status == 400 and "alerts" in answer["message"]


def test_alerts_for_nobody_or_an_unknown_workflow_are_refused(api):
    assert api.request("POST", "/v1/ingest/alertmanager/comments", {"alerts": [ALERT]})[0] == 400
    assert api.request("POST", "/v1/ingest/alertmanager/nope?to=x", {"alerts": [ALERT]})[0] == 422
    assert api.request("POST", "/v1/ingest/alertmanager/nope?to=x", {"alerts": []})[0] == 422
    assert alert(api, "x")[1]["data"]["accepted"] == 0


def test_a_broadcast_reaches_every_subscriber_and_the_same_one_again_adds_none(tmp_path):
    process = Process(tmp_path, WORKFLOWS)
    everybody = [{"subscriberId": f"s{number}"} for number in range(1203)]
    for start in range(0, 1203, 500):
        answer = process.request("POST", "/v1/subscribers/bulk", {"subscribers": everybody[start : start + 500]})
        assert answer[0] == 201 and answer[1]["data"]["failed"] == []
    body = {"name": "comments", "payload": {"postId": 1}, "transactionId": "t"}
    for _ in range(2):
        status, answer = process.request("POST", f"{TRIGGER}/broadcast", body)
        assert status == 201 and answer["data"]["transactionId"] == "t"
    assert process.query("SELECT count(*), count(DISTINCT subscriber_id) FROM events") == [(1203, 1203)]
    assert process.stop() == 0


def test_half_a_surrogate_pair_in_what_is_told_back_breaks_no_answer(api):
    body = b'{"subscribers": [{"subscriberId": "\\ud800"}]}'
    for more in ((), (f"Idempotency-Key: {new_id()}",)):
        status, _, answer = send(
            api, head("POST", "/v1/subscribers/bulk", f"Content-Length: {len(body)}", *more) + body
        )
        assert status == 201 and len(answer["data"]["failed"]) == 1
    bulk = b'{"events": [{"name": "nope", "to": "s1", "transactionId": "\\udc00"}]}'
    assert send(api, head("POST", f"{TRIGGER}/bulk", f"Content-Length: {len(bulk)}") + bulk)[0] == 201


def test_calls_that_are_sent_again_with_their_key_after_a_kill_are_done_once(tmp_path):
    """As the SDKs do: no transaction id, one key a call, again and again until there is an answer."""
    process = Process(tmp_path, WORKFLOWS)
    calls = [
        (f"key-{number}", {"name": "comments", "to": f"s{number}", "payload": {"n": number}}) for number in range(400)
    ]
    todo, replayed, over = iter(calls), [], threading.Event()

    def work() -> None:
        for key, body in todo:
            while True:
                try:
                    status, headers, _ = once_more(process, key, body)
                except (OSError, IndexError, ValueError):
                    continue  # the daemon is gone, or was in the middle of its answer
                if status == 201:
                    replayed.append("idempotency-replay" in headers)
                    break
                assert status in (409, 503)

    def kill_now_and_then() -> None:
        while not over.wait(0.25):
            process.kill()
            process.start()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: work(), range(8)))
    over.set()
    killer.join()
    assert len(replayed) == 400
    assert process.query("SELECT count(*), count(DISTINCT subscriber_id) FROM events") == [(400, 400)]
    process.kill()
