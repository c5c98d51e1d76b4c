"""Novu's HTTP contract without an SDK: what they do not send, or do not show of an answer.

The docstrings name the rows of the contract, and the cases of Novu's own tests, such as I01.
"""

from __future__ import annotations

import concurrent.futures

import pytest

from conftest import API_KEY, wait_for


@pytest.fixture
def person(novu_http, new_id):
    """A new subscriber whose feed has a message; its id, and the message's."""
    ann = new_id("ann")
    novu_http("POST", "/v1/events/trigger", {"name": "notice", "to": ann, "payload": {"about": "tea"}})

    def look():
        answer = novu_http("GET", f"/v1/subscribers/{ann}/notifications/feed")
        return answer.status == 200 and answer.body["data"]

    [message] = wait_for(look, what="the message")
    return ann, message["_id"]


def trigger_body(ann: str, post: int = 1) -> dict:
    return {"name": "comments", "to": ann, "payload": {"postId": post}}


def events_of(novu_http, ann: str) -> int:
    return len(novu_http("GET", f"/v1/notifications?subscriberIds={ann}").body["data"])


# -- who may ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["", "ApiKey", "ApiKey ", "ApiKey wrong", API_KEY, f"Bearer {API_KEY}", f"ApiKey {API_KEY} x"]
)
def test_a_request_without_the_right_key_is_refused_in_full(novu_http, value):
    """O01, O02, O03, O04"""
    answer = novu_http("GET", "/v2/subscribers", Authorization=value)
    assert answer.status == 401
    assert answer.body["statusCode"] == 401 and answer.body["path"] == "/v2/subscribers"
    assert answer.body["message"] and answer.body["timestamp"].endswith("Z")


def test_a_request_with_the_right_key_is_let_in(novu_http):
    """O05"""
    assert novu_http("GET", "/v2/subscribers").status == 200
    assert novu_http("GET", "/v2/subscribers", Authorization=f"apikey {API_KEY}").status == 200


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v2/subscribers/nobody", 404),
        ("PUT", "/v2/subscribers", 405),
        ("POST", "/v1/events/trigger", 400),
        ("POST", "/v2/subscribers", 422),
    ],
)
def test_every_error_is_json_with_the_fields_that_the_sdks_read(novu_http, method, path, status):
    """§5.2"""
    answer = novu_http(method, path, {} if method != "GET" else None)
    assert answer.status in ({400, 422} if path.endswith("trigger") else {status})
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.body["statusCode"] == answer.status
    assert {"timestamp", "path", "message"} <= set(answer.body)
    if answer.status == 422:
        assert all(one["messages"] for one in answer.body["errors"].values())


def test_a_result_stands_alone_in_its_envelope(novu_http, person):
    """§5.1: with another key beside data, the current SDKs do not unwrap"""
    ann, message = person
    for method, path, body in (
        ("POST", "/v1/events/trigger", trigger_body(ann)),
        ("GET", f"/v2/subscribers/{ann}", None),
        ("GET", f"/v2/subscribers/{ann}/preferences", None),
        ("PATCH", f"/v2/subscribers/{ann}/notifications/{message}/read", None),
        ("DELETE", "/v1/events/trigger/never", None),
        ("DELETE", f"/v1/messages/{message}", None),
    ):
        assert list(novu_http(method, path, body).body) == ["data"], path


def test_a_slash_at_the_end_of_a_path_does_no_harm(novu_http, new_id):
    """§5.1 Base URL"""
    assert novu_http("POST", "/v1/events/trigger/", trigger_body(new_id("ann"))).status == 201


# -- calls that no SDK has ---------------------------------------------------------------------------------------------


def test_a_run_that_waits_for_nobody_is_not_resumed(novu_http, new_id):
    """POST /v1/events/trigger/{transactionId}/resume: 200, and 400 without to"""
    path = f"/v1/events/trigger/{new_id('t')}/resume"
    answer = novu_http("POST", path, {"stepId": "wait", "to": "ann", "data": {}})
    assert (answer.status, answer.body) == (200, {"data": {"resumed": False}})
    assert novu_http("POST", path, {"stepId": "wait", "data": {}}).status == 400


@pytest.mark.parametrize("way", ["read", "seen", "archive", "read-archive", "delete"])
@pytest.mark.parametrize("tags", [["promotion"], [["promotion"], ["sale"]]], ids=["any", "all"])
def test_what_is_done_with_the_messages_of_a_tag_is_not_done_with_all(novu_http, person, way, tags):
    """POST /v2/subscribers/{id}/notifications/… with tags, of which no message here has one"""
    ann, _ = person
    path = f"/v2/subscribers/{ann}/notifications"
    before = novu_http("GET", path).body
    assert novu_http("POST", f"{path}/{way}", {"tags": tags}).status == 204
    assert novu_http("GET", path).body == before


def test_the_payload_of_a_pressed_button_is_kept(novu_http, person):
    """POST /v1/subscribers/{id}/messages/{messageId}/actions/{type} with payload"""
    ann, message = person
    path = f"/v1/subscribers/{ann}/messages/{message}/actions/primary"
    assert novu_http("POST", path, {"status": "done", "payload": {"why": "yes"}}).status == 201
    [shown] = novu_http("GET", f"/v1/subscribers/{ann}/notifications/feed").body["data"]
    assert shown["cta"]["action"]["result"] == {"type": "primary", "payload": {"why": "yes"}}


# -- the same call again -----------------------------------------------------------------------------------------------


def test_the_same_key_and_body_are_answered_with_the_first_answer(novu_http, new_id):
    """§5.1 Idempotency, I01"""
    ann, key = new_id("ann"), new_id("key")
    first = novu_http("POST", "/v1/events/trigger", trigger_body(ann), Idempotency_Key=key)
    second = novu_http("POST", "/v1/events/trigger", trigger_body(ann), Idempotency_Key=key)
    assert (first.status, first.headers["idempotency-key"], first.headers.get("idempotency-replay")) == (201, key, None)
    assert (second.status, second.headers["idempotency-key"]) == (201, key)
    assert second.headers["idempotency-replay"] == "true"
    assert second.body == first.body
    assert events_of(novu_http, ann) == 1


def test_the_same_key_with_another_body_is_refused(novu_http, new_id):
    """§5.1 Idempotency, I03"""
    ann, key = new_id("ann"), new_id("key")
    novu_http("POST", "/v1/events/trigger", trigger_body(ann), Idempotency_Key=key)
    other = novu_http("POST", "/v1/events/trigger", trigger_body(ann, post=2), Idempotency_Key=key)
    assert other.status == 422 and other.body["errors"]
    assert events_of(novu_http, ann) == 1


def test_another_key_is_another_call(novu_http, new_id):
    """§5.1 Idempotency, I04"""
    ann = new_id("ann")
    answers = [
        novu_http("POST", "/v1/events/trigger", trigger_body(ann), Idempotency_Key=new_id("key")) for _ in range(2)
    ]
    assert answers[0].body["data"]["transactionId"] != answers[1].body["data"]["transactionId"]
    assert events_of(novu_http, ann) == 2


def test_an_error_is_answered_again_too(novu_http, new_id):
    """§5.1 Idempotency, I06"""
    key, body = new_id("key"), {"name": "nothing", "to": "ann", "payload": {}}
    first, second = (novu_http("POST", "/v1/events/trigger", body, Idempotency_Key=key) for _ in range(2))
    assert (first.status, second.status) == (422, 422)
    assert second.body == first.body and second.headers["idempotency-replay"] == "true"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v2/subscribers/{ann}"), ("DELETE", "/v1/events/trigger/{ann}")],
    ids=["get", "delete"],
)
def test_a_key_on_a_call_that_is_safe_to_repeat_changes_nothing(novu_http, person, new_id, method, path):
    """§5.1 Idempotency, I05: the SDKs send a key with every call"""
    ann, _ = person
    key = new_id("key")
    for _ in range(2):
        answer = novu_http(method, path.format(ann=ann), Idempotency_Key=key)
        assert answer.status == 200 and "idempotency-replay" not in answer.headers


def test_a_patch_is_answered_again_too(novu_http, person, new_id):
    """§5.1 Idempotency: POST and PATCH"""
    ann, _ = person
    key = new_id("key")
    novu_http("PATCH", f"/v2/subscribers/{ann}", {"firstName": "Ann"}, Idempotency_Key=key)
    novu_http("PATCH", f"/v2/subscribers/{ann}", {"firstName": "Bea"})
    again = novu_http("PATCH", f"/v2/subscribers/{ann}", {"firstName": "Ann"}, Idempotency_Key=key)
    assert again.headers["idempotency-replay"] == "true" and again.body["data"]["firstName"] == "Ann"
    assert novu_http("GET", f"/v2/subscribers/{ann}").body["data"]["firstName"] == "Bea"


def test_a_key_of_more_than_255_characters_is_refused(novu_http, new_id):
    """§5.1 Idempotency, I07"""
    body, longest = trigger_body(new_id("ann")), new_id("key").ljust(255, "x")
    assert novu_http("POST", "/v1/events/trigger", body, Idempotency_Key=longest + "x").status == 400
    assert novu_http("POST", "/v1/events/trigger", body, Idempotency_Key=longest).status == 201


def test_a_key_is_not_echoed_to_a_stranger(novu_http, new_id):
    """§5.1 Idempotency, I08: nor is what others did replayed"""
    key, body = new_id("key"), trigger_body(new_id("ann"))
    novu_http("POST", "/v1/events/trigger", body, Idempotency_Key=key)
    answer = novu_http("POST", "/v1/events/trigger", body, Idempotency_Key=key, Authorization="ApiKey wrong")
    assert answer.status == 401
    assert "idempotency-key" not in answer.headers and "idempotency-replay" not in answer.headers


def test_calls_at_the_same_moment_with_one_key_make_one_event(novu_http, new_id):
    """§5.1 Idempotency, I02: the others are told to come again, or get the same answer"""
    ann, key = new_id("ann"), new_id("key")

    def ask(_: int):
        return novu_http("POST", "/v1/events/trigger", trigger_body(ann), Idempotency_Key=key)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    assert {answer.status for answer in answers} <= {201, 409}
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status == 409)
    assert len({answer.body["data"]["transactionId"] for answer in answers if answer.status == 201}) == 1
    assert events_of(novu_http, ann) == 1


def test_a_new_subscriber_in_many_triggers_at_once_is_made_once(novu_http, new_id):
    """G11"""
    ann = new_id("ann")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda n: novu_http("POST", "/v1/events/trigger", trigger_body(ann, n)), range(5)))
    assert [answer.status for answer in answers] == [201] * 5
    assert novu_http("GET", f"/v2/subscribers?subscriberId={ann}").body["totalCount"] == 1
