"""Novu's current SDKs as clients: @novu/api for JavaScript and novu-py for Python, each test with both.

They validate what they are answered, so a call that gives something has had the right status and shape. The docstrings
name the rows of Novu's contract, by method and path, and the cases of Novu's own tests, such as G02.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from conftest import SdkError, wait_for

Ids = Callable[[str], str]


class Novu:
    """One of the SDKs: novu("subscribers.create", body=…) calls it."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __call__(self, call: str, **args: Any) -> Any:
        return self.client.ask(call, args)

    def refused(self, call: str, **args: Any) -> SdkError:
        """The error that a call raises."""
        with pytest.raises(SdkError) as raised:
            self(call, **args)
        return raised.value

    def trigger(self, workflow: str, to: Any, payload: dict[str, Any] | None = None, **more: Any) -> Any:
        return self("trigger", body={"workflowId": workflow, "to": to, "payload": payload or {}, **more})

    def feed(self, subscriber: str, **query: Any) -> list[dict[str, Any]]:
        return self("feed.list", subscriberId=subscriber, **query)["data"]

    def inbox(self, subscriber: str, **query: Any) -> list[dict[str, Any]]:
        return self("inbox.list", subscriberId=subscriber, **query)["data"]

    def person(self, subscriber: str, *about: str) -> list[str]:
        """A new subscriber whose feed has a notice about each of these; the ids of these messages."""
        self("subscribers.create", body={"subscriberId": subscriber})
        for number, word in enumerate(about, 1):
            self.trigger("notice", subscriber, {"about": word})
            wait_for(lambda number=number: len(self.feed(subscriber)) == number, what=f"the notice about {word}")
        return [message["id"] for message in reversed(self.feed(subscriber))]

    def run(self, transaction: str, job: str, *states: str) -> dict[str, Any]:
        """The notification of a transaction, once a job of this type has come to one of these states."""

        def look() -> dict[str, Any] | None:
            [found] = self("activity.list", transactionId=transaction)["data"]
            reached = [one for one in found["jobs"] if one["type"] == job and one["status"] in states]
            return found if reached else None

        return wait_for(look, what=f"a {job} job that is {' or '.join(states)}")


@pytest.fixture(scope="module", params=["novu-api", "novu-py"])
def novu(request: pytest.FixtureRequest, start_client: Any, novu_url: str) -> Novu:
    driver = {"novu-api": "api_driver.mjs", "novu-py": "py_driver.py"}[request.param]
    return Novu(start_client(driver, novu_url))


def job_of(notification: dict[str, Any], kind: str) -> dict[str, Any]:
    [found] = [job for job in notification["jobs"] if job["type"] == kind]
    return found


# -- the key -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["wrong", "Bearer wrong", "key-of-the-e2e-tests-and-more"])
def test_a_wrong_key_is_told_as_401(novu, key):
    """O03"""
    with pytest.raises(SdkError) as refused:
        novu.client.ask("subscribers.search", {}, key)
    assert (refused.value.name, refused.value.status) == ("ErrorDto", 401)
    assert "Authorization" in refused.value.message


@pytest.mark.parametrize("driver", ["api_driver.mjs", "py_driver.py"])
def test_a_slash_at_the_end_of_the_configured_address_does_no_harm(start_client, novu_url, driver):
    """§5.1 Base URL"""
    assert Novu(start_client(driver, f"{novu_url}/"))("subscribers.search", email="nobody@example.org")["data"] == []


# -- events ------------------------------------------------------------------------------------------------------------


def test_a_trigger_is_acknowledged_and_its_message_arrives(novu, new_id):
    """POST /v1/events/trigger, G01"""
    ann, transaction = new_id("ann"), new_id("t")
    answer = novu.trigger("notice", ann, {"about": "tea"}, transactionId=transaction)
    assert (answer["acknowledged"], answer["status"], answer["transactionId"]) == (True, "processed", transaction)
    [message] = wait_for(lambda: novu.feed(ann), what="the message")
    assert (message["subject"], message["content"]) == ("On tea", "Read tea")
    assert message["transactionId"] == transaction and message["payload"] == {"about": "tea"}


def test_a_trigger_without_a_transaction_id_is_given_one(novu, new_id):
    """POST /v1/events/trigger"""
    first, second = (novu.trigger("notice", new_id("ann"))["transactionId"] for _ in range(2))
    assert first and second and first != second


def test_a_trigger_makes_its_subscribers_with_the_fields_that_come_along(novu, new_id):
    """POST /v1/events/trigger, G09, G10, G18"""
    ann, bob = new_id("ann"), new_id("bob")
    novu.trigger("notice", [{"subscriberId": ann, "firstName": "Ann", "email": "ann@example.org"}, bob])
    novu.trigger("notice", {"subscriberId": ann, "lastName": "Lee"})
    found = novu("subscribers.retrieve", subscriberId=ann)
    assert (found["firstName"], found["lastName"], found["email"]) == ("Ann", "Lee", "ann@example.org")
    assert novu("subscribers.retrieve", subscriberId=bob)["subscriberId"] == bob


def test_a_trigger_may_carry_all_that_the_sdk_can_send(novu, new_id):
    """POST /v1/events/trigger: overrides, actor"""
    more = {"overrides": {"email": {"subject": "x"}}, "actor": {"subscriberId": new_id("boss"), "firstName": "Bo"}}
    assert novu.trigger("notice", new_id("ann"), {"deep": {"list": [1, None, "é"]}}, **more)["status"] == "processed"


def test_a_transaction_id_that_comes_again_with_the_same_content_does_nothing(novu, new_id):
    """POST /v1/events/trigger: idempotent by transactionId"""
    ann, transaction = new_id("ann"), new_id("t")
    first, second = (novu.trigger("comments", ann, {"postId": 1}, transactionId=transaction) for _ in range(2))
    assert first == second
    assert len(novu("activity.list", subscriberIds=[ann])["data"]) == 1


def test_an_idempotency_key_that_comes_again_makes_no_second_event(novu, new_id):
    """§5.1 Idempotency-Key, as an SDK sends it, I01 and I03"""
    ann, key = new_id("ann"), new_id("key")
    body = {"workflowId": "comments", "to": ann, "payload": {"postId": 1}}
    first, second = (novu("trigger", body=body, idempotencyKey=key) for _ in range(2))
    assert first["transactionId"] == second["transactionId"]
    assert len(novu("activity.list", subscriberIds=[ann])["data"]) == 1
    other = novu.refused("trigger", body={**body, "payload": {"postId": 2}}, idempotencyKey=key)
    assert (other.name, other.status) == ("ValidationErrorDto", 422)


def test_an_unknown_workflow_is_told_as_workflow_not_found(novu):
    """POST /v1/events/trigger, G02: Novu's own answer to this cannot be read by its SDKs"""
    error = novu.refused("trigger", body={"workflowId": "nothing", "to": "ann", "payload": {}})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)
    assert "workflow_not_found" in error.message
    assert any("workflow_not_found" in text for text in error.data["errors"]["general"]["messages"])


@pytest.mark.parametrize(
    "to", [{"subscriberId": ""}, [{"subscriberId": "ok"}, {"subscriberId": ""}], "", ["ok", ""], []]
)
def test_an_empty_recipient_is_refused(novu, to):
    """POST /v1/events/trigger, G04"""
    error = novu.refused("trigger", body={"workflowId": "notice", "to": to, "payload": {}})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)


def test_a_payload_that_its_schema_forbids_is_refused_with_each_error(novu, new_id):
    """POST /v1/events/trigger, G12: 400 with type and errors"""
    error = novu.refused("trigger", body={"workflowId": "strict", "to": new_id("ann"), "payload": {"age": "old"}})
    assert (error.name, error.status) == ("PayloadValidationExceptionDto", 400)
    assert error.data["type"] == "PAYLOAD_VALIDATION_ERROR"
    told = {one["field"]: one["message"] for one in error.data["errors"]}
    assert any("name" in field or "name" in message for field, message in told.items())
    assert any("age" in field for field in told)


def test_a_payload_as_its_schema_wants_it_is_taken(novu, new_id):
    """POST /v1/events/trigger, G13"""
    assert novu.trigger("strict", new_id("ann"), {"name": "Ann", "age": 7})["status"] == "processed"


def test_a_payload_that_is_too_large_is_told_as_413(novu, new_id):
    """§5.2: were the connection cut instead, the SDKs would try again for an hour"""
    body = {"workflowId": "notice", "to": new_id("ann"), "payload": {"text": "x" * 9_000_000}}
    error = novu.refused("trigger", body=body)
    assert (error.name, error.status) == ("ErrorDto", 413)


def test_a_bulk_is_answered_one_by_one_in_its_order(novu, new_id):
    """POST /v1/events/trigger/bulk, G06"""
    ids = [new_id("t") for _ in range(3)]
    events = [{"workflowId": "notice", "to": new_id("ann"), "payload": {}, "transactionId": one} for one in ids]
    answers = novu("triggerBulk", body={"events": events})
    assert [one["transactionId"] for one in answers] == ids
    assert {(one["acknowledged"], one["status"]) for one in answers} == {(True, "processed")}


def test_a_bad_event_of_a_bulk_is_told_in_its_place_and_the_others_are_taken(novu, new_id):
    """POST /v1/events/trigger/bulk, G08"""
    ann = new_id("ann")
    events = [{"workflowId": name, "to": ann, "payload": {"about": "x"}} for name in ("nothing", "notice", "")]
    first, second, third = novu("triggerBulk", body={"events": events})
    assert first["status"] == "error" and "workflow_not_found" in " ".join(first["error"])
    assert second["status"] == "processed"
    assert third["status"] == "error" and third["error"]
    wait_for(lambda: len(novu.feed(ann)) == 1, what="the message of the good one")


def test_a_bulk_with_an_empty_recipient_is_refused_as_a_whole(novu, new_id):
    """POST /v1/events/trigger/bulk, G05"""
    ann = new_id("ann")
    events = [{"workflowId": "notice", "to": to, "payload": {}} for to in (ann, {"subscriberId": ""})]
    error = novu.refused("triggerBulk", body={"events": events})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)
    assert novu("activity.list", subscriberIds=[ann])["data"] == []


def test_a_bulk_of_101_is_refused_under_events(novu):
    """POST /v1/events/trigger/bulk, G07"""
    events = [{"workflowId": "notice", "to": "ann", "payload": {}}] * 101
    error = novu.refused("triggerBulk", body={"events": events})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)
    assert error.data["errors"]["events"]["messages"]


def test_a_bulk_of_100_is_taken(novu, new_id):
    """POST /v1/events/trigger/bulk, the limit itself"""
    ann = new_id("ann")
    events = [{"workflowId": "comments", "to": ann, "payload": {"postId": number}} for number in range(100)]
    assert [one["status"] for one in novu("triggerBulk", body={"events": events})] == ["processed"] * 100


def test_a_broadcast_reaches_every_subscriber(novu, new_id):
    """POST /v1/events/trigger/broadcast, G31"""
    people, transaction = [new_id("ann") for _ in range(3)], new_id("t")
    for one in people:
        novu.person(one)
    answer = novu(
        "triggerBroadcast", body={"name": "notice", "payload": {"about": "all"}, "transactionId": transaction}
    )
    assert (answer["acknowledged"], answer["status"], answer["transactionId"]) == (True, "processed", transaction)
    for one in people:
        [message] = wait_for(lambda one=one: novu.feed(one), what=f"the message of {one}")
        assert message["subject"] == "On all"


def test_a_broadcast_of_an_unknown_workflow_is_refused(novu):
    """POST /v1/events/trigger/broadcast"""
    error = novu.refused("triggerBroadcast", body={"name": "nothing", "payload": {}})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)
    assert "workflow_not_found" in error.message


@pytest.mark.parametrize("workflow", ["comments", "reminder"])
def test_a_cancel_is_true_once_and_stops_what_waits(novu, new_id, workflow):
    """DELETE /v1/events/trigger/{transactionId}: true, then false"""
    transaction = new_id("t")
    novu.trigger(workflow, new_id("ann"), {"postId": 1}, transactionId=transaction)
    kind = {"comments": "digest", "reminder": "delay"}[workflow]
    novu.run(transaction, kind, "delayed")
    assert novu("cancel", transactionId=transaction) is True
    assert novu("cancel", transactionId=transaction) is False
    assert job_of(novu.run(transaction, kind, "canceled"), kind)["status"] == "canceled"


def test_a_cancel_of_what_never_was_or_is_over_is_false(novu, new_id):
    """DELETE /v1/events/trigger/{transactionId}: false"""
    assert novu("cancel", transactionId=new_id("never")) is False
    ann, transaction = new_id("ann"), new_id("t")
    novu.trigger("notice", ann, transactionId=transaction)
    wait_for(lambda: novu.feed(ann), what="the message")
    assert novu("cancel", transactionId=transaction) is False


# -- subscribers -------------------------------------------------------------------------------------------------------

PERSON = {
    "firstName": "Ann", "lastName": "Lee", "email": "ann@example.org", "phone": "+431234567", "locale": "de_AT",
    "avatar": "https://example.org/ann.png", "timezone": "Europe/Vienna", "data": {"team": "red", "size": 3},
}  # fmt: skip


def test_a_subscriber_is_made_and_read_back(novu, new_id):
    """POST /v2/subscribers, GET /v2/subscribers/{id}, B01"""
    ann = new_id("ann")
    made = novu("subscribers.create", body={"subscriberId": ann, **PERSON})
    found = novu("subscribers.retrieve", subscriberId=ann)
    for subscriber in (made, found):
        assert subscriber["subscriberId"] == ann and subscriber["deleted"] is False
        assert {name: subscriber[name] for name in PERSON} == PERSON
        assert subscriber["createdAt"] and subscriber["updatedAt"]
    assert made["id"] == found["id"]


def test_a_subscriber_that_is_made_again_is_changed(novu, new_id):
    """POST /v2/subscribers, B02, B09: one row, absent fields stay"""
    ann = new_id("ann")
    made = novu("subscribers.create", body={"subscriberId": ann, **PERSON})
    again = novu("subscribers.create", body={"subscriberId": ann, "firstName": "Anna"}, failIfExists=False)
    assert again["id"] == made["id"]
    assert (again["firstName"], again["lastName"], again["email"]) == ("Anna", "Lee", "ann@example.org")
    assert novu("subscribers.search", subscriberId=ann)["totalCount"] == 1


def test_a_subscriber_that_must_be_new_and_is_not_is_a_conflict_that_shows_it(novu, new_id):
    """POST /v2/subscribers?failIfExists=true, B08: the SDKs read the subscriber out of the 409"""
    ann = new_id("ann")
    body = {"subscriberId": ann, "firstName": "Ann"}
    assert novu("subscribers.create", body=body, failIfExists=True)["firstName"] == "Ann"
    error = novu.refused("subscribers.create", body={**body, "firstName": "Other"}, failIfExists=True)
    assert error.status == 409 and "SubscriberResponseDto" in error.name
    assert (error.data["subscriberId"], error.data["firstName"]) == (ann, "Ann")
    assert novu("subscribers.retrieve", subscriberId=ann)["firstName"] == "Ann"


@pytest.mark.parametrize("field", ["email", "locale", "timezone"])
@pytest.mark.parametrize("value", ["", "no such thing"])
@pytest.mark.parametrize("call", ["subscribers.create", "subscribers.patch"])
def test_a_bad_address_locale_or_zone_is_refused_by_its_name(novu, new_id, call, field, value):
    """POST and PATCH /v2/subscribers, B05, B07, B16"""
    ann = new_id("ann")
    if call == "subscribers.patch":
        novu.person(ann)
        error = novu.refused(call, subscriberId=ann, body={field: value})
    else:
        error = novu.refused(call, body={"subscriberId": ann, field: value})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)
    assert error.data["errors"][field]["messages"]


def test_null_is_nothing_and_an_empty_name_is_kept(novu, new_id):
    """POST /v2/subscribers, B03, B04, B06, B10"""
    ann = new_id("ann")
    empty = dict.fromkeys(PERSON)
    made = novu("subscribers.create", body={"subscriberId": ann, **empty})
    assert {made.get(name) for name in PERSON} == {None}
    texts = {"firstName": "", "lastName": "", "phone": "", "avatar": ""}
    found = novu("subscribers.create", body={"subscriberId": ann, **texts})
    assert {name: found[name] for name in texts} == texts


def test_a_subscriber_without_an_id_is_refused(novu):
    """POST /v2/subscribers"""
    error = novu.refused("subscribers.create", body={"subscriberId": ""})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)


def test_many_subscribers_are_made_changed_and_refused_in_one_call(novu, new_id):
    """POST /v1/subscribers/bulk"""
    ann, bob, bad = new_id("ann"), new_id("bob"), new_id("bad")
    novu.person(ann)
    entries = [{"subscriberId": ann, "firstName": "Ann"}, {"subscriberId": bob}, {"subscriberId": bad, "email": "no"}]
    answer = novu("subscribers.createBulk", body={"subscribers": entries})
    assert [one["subscriberId"] for one in answer["updated"]] == [ann]
    assert [one["subscriberId"] for one in answer["created"]] == [bob]
    [failed] = answer["failed"]
    assert failed["subscriberId"] == bad and failed["message"]
    assert novu("subscribers.retrieve", subscriberId=ann)["firstName"] == "Ann"
    assert novu.refused("subscribers.retrieve", subscriberId=bad).status == 404


def test_more_than_500_subscribers_in_one_call_are_refused(novu):
    """POST /v1/subscribers/bulk: 1 to 500"""
    entries = [{"subscriberId": f"much-{number}"} for number in range(501)]
    error = novu.refused("subscribers.createBulk", body={"subscribers": entries})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)


@pytest.mark.parametrize("call", ["subscribers.retrieve", "subscribers.patch", "subscribers.delete"])
def test_an_unknown_subscriber_is_not_found(novu, new_id, call):
    """GET, PATCH, DELETE /v2/subscribers/{id}, B12, B18"""
    body = {"body": {"firstName": "x"}} if call == "subscribers.patch" else {}
    error = novu.refused(call, subscriberId=new_id("nobody"), **body)
    assert (error.name, error.status) == ("ErrorDto", 404)


def test_a_patch_changes_what_it_names_and_nothing_else(novu, new_id):
    """PATCH /v2/subscribers/{id}, B11, B13"""
    ann = new_id("ann")
    novu("subscribers.create", body={"subscriberId": ann, **PERSON})
    changed = novu("subscribers.patch", subscriberId=ann, body={"firstName": "Anna", "data": {"team": "blue"}})
    wanted = {**PERSON, "firstName": "Anna", "data": {"team": "blue"}}
    assert {name: changed[name] for name in PERSON} == wanted
    unchanged = novu("subscribers.patch", subscriberId=ann, body={})
    assert {name: unchanged[name] for name in PERSON} == wanted


def test_a_patch_with_null_removes(novu, new_id):
    """PATCH /v2/subscribers/{id}, B14, B15"""
    ann = new_id("ann")
    novu("subscribers.create", body={"subscriberId": ann, **PERSON})
    cleared = novu("subscribers.patch", subscriberId=ann, body=dict.fromkeys(PERSON))
    assert {cleared.get(name) for name in PERSON} == {None}


def test_a_subscriber_with_a_name_that_needs_quoting_is_found(novu, new_id):
    """GET /v2/subscribers/{id}: the id in the path"""
    odd = new_id("ann+é @x&y=z")
    novu("subscribers.create", body={"subscriberId": odd})
    assert novu("subscribers.retrieve", subscriberId=odd)["subscriberId"] == odd


def test_a_deleted_subscriber_is_gone_with_its_messages_and_choices(novu, new_id):
    """DELETE /v2/subscribers/{id}, B19"""
    ann = new_id("ann")
    novu.person(ann, "tea")
    novu("preferences.update", subscriberId=ann, body={"channels": {"email": False}})
    answer = novu("subscribers.delete", subscriberId=ann)
    assert answer == {"acknowledged": True, "status": "deleted"}
    assert novu.refused("subscribers.retrieve", subscriberId=ann).status == 404
    assert novu.refused("feed.list", subscriberId=ann).status == 404
    novu.person(ann)
    assert novu.feed(ann) == []
    assert novu("preferences.list", subscriberId=ann)["global"]["channels"]["email"] is True


def test_subscribers_are_found_by_what_is_known_of_them(novu, new_id):
    """GET /v2/subscribers?subscriberId=&email=&name=&phone="""
    ann = new_id("ann")
    word = ann.replace("-", "")
    known = {"firstName": word.title(), "lastName": "Findme", "email": f"{word}@example.org", "phone": f"+9{word[3:]}"}
    novu("subscribers.create", body={"subscriberId": ann, **known})
    novu.person(new_id("other"))
    for query in (
        {"subscriberId": ann}, {"email": known["email"]}, {"name": f"{known['firstName']} Findme"}, {"name": word},
        {"subscriberId": ann, "email": known["email"]},
    ):  # fmt: skip
        found = novu("subscribers.search", **query)
        assert [one["subscriberId"] for one in found["data"]] == [ann], query
        assert (found["totalCount"], found["totalCountCapped"]) == (1, False)
        assert found["next"] is None and found["previous"] is None
    assert ann in [one["subscriberId"] for one in novu("subscribers.search", phone=known["phone"], limit=100)["data"]]
    assert novu("subscribers.search", email=f"no-{word}@example.org")["data"] == []


@pytest.mark.parametrize("order", ["_id", "updatedAt"])
@pytest.mark.parametrize("direction", ["ASC", "DESC"])
def test_a_list_of_subscribers_is_walked_forth_and_back_by_its_cursors(novu, new_id, order, direction):
    """GET /v2/subscribers?after=&before=&limit=&orderBy=&orderDirection="""
    group = f"group{new_id('g').replace('-', '')}x"
    people = [new_id("ann") for _ in range(5)]
    for one in people:
        novu("subscribers.create", body={"subscriberId": one, "lastName": group})
    wanted = people if direction == "ASC" else people[::-1]
    query = {"name": group, "limit": 2, "orderBy": order, "orderDirection": direction}

    def page(**place: str) -> Any:
        return novu("subscribers.search", **query, **place)

    def names(found: Any) -> list[str]:
        return [one["subscriberId"] for one in found["data"]]

    first = page()
    second = page(after=first["next"])
    third = page(after=second["next"])
    assert [names(one) for one in (first, second, third)] == [wanted[:2], wanted[2:4], wanted[4:]]
    assert {one["totalCount"] for one in (first, second, third)} == {5}
    assert first["previous"] is None and third["next"] is None
    assert names(page(before=third["previous"])) == wanted[2:4]
    assert names(page(before=second["previous"])) == wanted[:2]
    assert names(page(after=first["next"], includeCursor=True))[0] == wanted[1]


def test_credentials_are_set_added_to_and_forgotten(novu, new_id):
    """PUT, PATCH /v1/subscribers/{id}/credentials, DELETE …/{providerId}"""
    ann = new_id("ann")
    novu.person(ann)

    def channels(subscriber: Any) -> dict[str, Any]:
        return {one["providerId"]: one["credentials"] for one in subscriber["channels"]}

    hook = {"webhookUrl": "https://example.org/hook"}
    answer = novu("credentials.update", subscriberId=ann, body={"providerId": "slack", "credentials": hook})
    assert answer["subscriberId"] == ann
    assert channels(answer)["slack"]["webhookUrl"] == hook["webhookUrl"]
    for tokens in (["a"], ["b"]):
        answer = novu(
            "credentials.append", subscriberId=ann, body={"providerId": "fcm", "credentials": {"deviceTokens": tokens}}
        )
    assert channels(answer)["fcm"]["deviceTokens"] == ["a", "b"]
    answer = novu(
        "credentials.update", subscriberId=ann, body={"providerId": "fcm", "credentials": {"deviceTokens": ["c"]}}
    )
    assert channels(answer)["fcm"]["deviceTokens"] == ["c"]
    assert novu("credentials.delete", subscriberId=ann, providerId="slack") is None
    assert list(channels(novu("subscribers.retrieve", subscriberId=ann))) == ["fcm"]


def test_credentials_of_an_unknown_subscriber_are_not_found(novu, new_id):
    """PUT, DELETE /v1/subscribers/{id}/credentials"""
    nobody = new_id("nobody")
    body = {"providerId": "slack", "credentials": {"webhookUrl": "https://example.org/hook"}}
    assert novu.refused("credentials.update", subscriberId=nobody, body=body).status == 404
    assert novu.refused("credentials.delete", subscriberId=nobody, providerId="slack").status == 404


@pytest.mark.parametrize(
    "body",
    [
        {"providerId": "no-such-provider", "credentials": {}},
        {"providerId": "slack", "credentials": {"webhookUrl": 7}},
        {"providerId": "fcm", "credentials": {"deviceTokens": "abc"}},
        {"providerId": "fcm", "credentials": {"deviceTokens": [7]}},
    ],
    ids=["provider", "url", "tokens", "token"],
)
def test_credentials_that_an_sdk_cannot_read_do_not_get_in(novu, novu_http, new_id, body):
    """PUT /v1/subscribers/{id}/credentials: both sides are closed sets; once in, the subscriber could not be read"""
    ann = new_id("ann")
    novu.person(ann)
    novu_http("PUT", f"/v1/subscribers/{ann}/credentials", body)
    found = novu("subscribers.retrieve", subscriberId=ann)
    assert all(one["credentials"].get("deviceTokens") in (None, []) for one in found["channels"])


def test_the_online_flag_is_kept(novu, new_id):
    """PATCH /v1/subscribers/{id}/online-status"""
    ann = new_id("ann")
    novu.person(ann)
    assert novu("properties.updateOnlineFlag", subscriberId=ann, body={"isOnline": True})["isOnline"] is True
    gone = novu("properties.updateOnlineFlag", subscriberId=ann, body={"isOnline": False})
    assert gone["isOnline"] is False and gone["lastOnlineAt"]
    assert novu("subscribers.retrieve", subscriberId=ann)["isOnline"] is False


# -- preferences -------------------------------------------------------------------------------------------------------

HOURS = {
    "isEnabled": True,
    "weeklySchedule": {
        "monday": {"isEnabled": True, "hours": [{"start": "09:00 AM", "end": "05:00 PM"}]},
        "tuesday": {"isEnabled": False},
    },
}


def chosen(preferences: dict[str, Any], workflow: str) -> dict[str, bool]:
    [found] = [one for one in preferences["workflows"] if one["workflow"]["identifier"] == workflow]
    return {name: value for name, value in found["channels"].items() if value is not None}


def test_preferences_are_all_on_at_first_with_an_entry_for_each_workflow(novu, new_id):
    """GET /v2/subscribers/{id}/preferences, B20"""
    ann = new_id("ann")
    novu.person(ann)
    found = novu("preferences.list", subscriberId=ann)
    assert found["global"]["enabled"] is True and set(found["global"]["channels"].values()) <= {True, None}
    assert found["global"].get("schedule") is None
    listed = {one["workflow"]["identifier"]: one for one in found["workflows"]}
    assert set(listed) == {"notice", "comments", "reminder", "news", "lost", "strict"}
    assert listed["notice"]["workflow"]["name"] == "A notice" and listed["notice"]["overrides"] == []
    assert chosen(found, "news") == {"email": True, "chat": True}


def test_critical_workflows_are_listed_where_they_are_asked_for(novu, new_id):
    """GET /v2/subscribers/{id}/preferences?criticality="""
    ann = new_id("ann")
    novu.person(ann)

    def listed(which: str) -> set[str]:
        found = novu("preferences.list", subscriberId=ann, criticality=which)
        return {one["workflow"]["identifier"] for one in found["workflows"]}

    assert listed("critical") == {"alarm"}
    assert "alarm" not in listed("nonCritical")
    assert listed("all") == listed("nonCritical") | {"alarm"}


def test_a_choice_for_one_workflow_changes_that_one_and_keeps_its_messages_away(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences, B23, G33"""
    ann = new_id("ann")
    novu.person(ann, "tea")
    changed = novu("preferences.update", subscriberId=ann, body={"workflowId": "notice", "channels": {"inApp": False}})
    assert chosen(changed, "notice") == {"inApp": False}
    assert chosen(changed, "strict") == {"inApp": True}
    assert changed["global"]["channels"]["inApp"] is True
    transaction = new_id("t")
    novu.trigger("notice", ann, {"about": "milk"}, transactionId=transaction)
    assert job_of(novu.run(transaction, "in_app", "skipped"), "in_app")["status"] == "skipped"
    assert [message["subject"] for message in novu.feed(ann)] == ["On tea"]


def test_a_choice_for_all_workflows_is_followed_by_those_without_their_own(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences without workflowId, B22, B24"""
    ann = new_id("ann")
    novu.person(ann)
    novu("preferences.update", subscriberId=ann, body={"workflowId": "news", "channels": {"chat": True}})
    changed = novu("preferences.update", subscriberId=ann, body={"channels": {"chat": False, "email": False}})
    assert changed["global"]["channels"]["chat"] is False
    assert chosen(changed, "news") == {"email": False, "chat": True}
    assert chosen(changed, "lost") == {"chat": False}
    assert novu("preferences.list", subscriberId=ann) == changed


def test_a_critical_workflow_is_sent_all_the_same(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences, G34"""
    ann, transaction = new_id("ann"), new_id("t")
    novu("subscribers.create", body={"subscriberId": ann, "email": "ann@example.org"})
    novu("preferences.update", subscriberId=ann, body={"channels": {"email": False}})
    novu.trigger("alarm", ann, transactionId=transaction)
    assert job_of(novu.run(transaction, "email", "completed", "skipped"), "email")["status"] == "completed"


def test_the_weekly_hours_ride_on_the_choice_for_all_workflows(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences with schedule: replaced as a whole"""
    ann = new_id("ann")
    novu.person(ann)

    def told(preferences: dict[str, Any]) -> dict[str, Any]:
        """Without what Python adds for absent days."""
        schedule = preferences["global"]["schedule"]
        days = {day: rest for day, rest in (schedule["weeklySchedule"] or {}).items() if rest is not None}
        return {"isEnabled": schedule["isEnabled"], "weeklySchedule": days}

    changed = told(novu("preferences.update", subscriberId=ann, body={"schedule": HOURS}))
    assert changed["isEnabled"] is True
    assert changed["weeklySchedule"]["monday"] == HOURS["weeklySchedule"]["monday"]
    assert changed["weeklySchedule"]["tuesday"]["isEnabled"] is False
    novu("preferences.update", subscriberId=ann, body={"channels": {"email": False}})
    assert told(novu("preferences.list", subscriberId=ann)) == changed
    sunday = {"isEnabled": True, "weeklySchedule": {"sunday": HOURS["weeklySchedule"]["monday"]}}
    replaced = told(novu("preferences.update", subscriberId=ann, body={"schedule": sunday}))
    assert [day for day, rest in replaced["weeklySchedule"].items() if rest["isEnabled"]] == ["sunday"]


def test_choices_for_many_workflows_are_made_in_one_call(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences/bulk, B25"""
    ann = new_id("ann")
    novu.person(ann)
    entries = [
        {"workflowId": "notice", "channels": {"inApp": False}},
        {"workflowId": "news", "channels": {"email": False}},
        {"workflowId": "strict", "channels": {"inApp": True}},
    ]
    answer = novu("preferences.bulkUpdate", subscriberId=ann, body={"preferences": entries})
    assert [one["workflow"]["identifier"] for one in answer] == ["notice", "news", "strict"]
    assert [one["level"] for one in answer] == ["template"] * 3
    assert answer[0]["channels"]["inApp"] is False
    assert (answer[1]["channels"]["email"], answer[1]["channels"]["chat"]) == (False, True)
    assert chosen(novu("preferences.list", subscriberId=ann), "news") == {"email": False, "chat": True}


def test_a_call_with_101_choices_is_refused(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences/bulk, B26"""
    ann = new_id("ann")
    novu.person(ann)
    entries = [{"workflowId": "notice", "channels": {"inApp": False}}] * 101
    error = novu.refused("preferences.bulkUpdate", subscriberId=ann, body={"preferences": entries})
    assert (error.name, error.status) == ("ValidationErrorDto", 422)
    assert chosen(novu("preferences.list", subscriberId=ann), "notice") == {"inApp": True}


def test_choices_for_an_unknown_workflow_or_subscriber_are_not_found_and_none_is_kept(novu, new_id):
    """PATCH /v2/subscribers/{id}/preferences and …/bulk, B27"""
    ann, nobody = new_id("ann"), new_id("nobody")
    novu.person(ann)
    good, bad = ({"workflowId": name, "channels": {"inApp": False}} for name in ("notice", "nothing"))
    for call, subscriber, body in (
        ("preferences.bulkUpdate", ann, {"preferences": [good, bad]}),
        ("preferences.bulkUpdate", nobody, {"preferences": [good]}),
        ("preferences.update", ann, bad),
        ("preferences.update", nobody, {"channels": {"inApp": False}}),
    ):
        error = novu.refused(call, subscriberId=subscriber, body=body)
        assert (error.name, error.status) == ("ErrorDto", 404), (call, body)
    assert chosen(novu("preferences.list", subscriberId=ann), "notice") == {"inApp": True}


def test_preferences_of_an_unknown_subscriber_are_not_found(novu, new_id):
    """GET /v2/subscribers/{id}/preferences, B21"""
    error = novu.refused("preferences.list", subscriberId=new_id("nobody"))
    assert (error.name, error.status) == ("ErrorDto", 404)


def test_a_subscriber_is_in_no_topic(novu, new_id):
    """GET /v2/subscribers/{id}/subscriptions, B29: none, and an unknown subscriber"""
    ann = new_id("ann")
    novu.person(ann)
    found = novu("topics.list", subscriberId=ann)
    assert (found["data"], found["next"], found["previous"], found["totalCount"]) == ([], None, None, 0)
    error = novu.refused("topics.list", subscriberId=new_id("nobody"))
    assert (error.name, error.status) == ("ErrorDto", 404)


# -- what became of events ---------------------------------------------------------------------------------------------


def test_a_delivered_event_is_shown_with_its_steps(novu, new_id):
    """GET /v1/notifications?transactionId= and /v1/notifications/{id}"""
    ann, transaction = new_id("ann"), new_id("t")
    novu("subscribers.create", body={"subscriberId": ann, "email": f"{ann}@example.org", "firstName": "Ann"})
    novu.trigger("news", ann, {"n": 1}, transactionId=transaction)
    novu.run(transaction, "chat", "completed")
    found = novu.run(transaction, "email", "completed")
    assert novu("activity.retrieve", notificationId=found["id"]) == found
    assert (found["transactionId"], found["payload"]) == (transaction, {"n": 1})
    assert (found["subscriber"]["subscriberId"], found["subscriber"]["firstName"]) == (ann, "Ann")
    assert found["template"]["name"] == "news"
    assert found["template"]["triggers"][0]["identifier"] == "news"
    assert sorted(found["channels"]) == ["chat", "email"]
    assert {job["type"] for job in found["jobs"]} >= {"email", "chat"}
    assert job_of(found, "email")["executionDetails"][0]["status"] == "Success"


def test_an_event_that_joined_the_window_of_another_names_that_one(novu, new_id):
    """GET /v1/notifications: digestedNotificationId, and the digest of a job"""
    ann, first, second = new_id("ann"), new_id("t"), new_id("t")
    novu.trigger("comments", ann, {"postId": 1}, transactionId=first)
    novu.trigger("comments", ann, {"postId": 1}, transactionId=second)
    opened, joined = novu.run(first, "digest", "delayed"), novu.run(second, "digest", "merged")
    assert opened.get("digestedNotificationId") is None
    assert joined["digestedNotificationId"] == opened["id"]
    digest = job_of(opened, "digest")["digest"]
    assert (digest["type"], digest["digestKey"]) == ("regular", "payload.postId")


def test_a_message_that_nobody_took_is_shown_as_failed_with_the_reason(novu, new_id):
    """GET /v1/notifications and GET /v1/messages: a failed step"""
    ann, transaction = new_id("ann"), new_id("t")
    novu.trigger("lost", ann, transactionId=transaction)
    job = job_of(novu.run(transaction, "chat", "failed"), "chat")
    assert "Failed" in [detail["status"] for detail in job["executionDetails"]]
    [message] = novu("messages.list", transactionId=[transaction])["data"]
    assert (message["status"], message["channel"]) == ("error", "chat") and message["errorText"]


def test_a_step_that_waits_is_shown_as_delayed(novu, new_id):
    """GET /v1/notifications: a delay"""
    transaction = new_id("t")
    novu.trigger("reminder", new_id("ann"), transactionId=transaction)
    assert job_of(novu.run(transaction, "delay", "delayed"), "delay")["status"] == "delayed"


def test_events_are_found_by_each_filter_alone(novu, new_id):
    """GET /v1/notifications?templates=&subscriberIds=&emails=&channels=&search=&transactionId="""
    ann, bob, first, second = new_id("ann"), new_id("bob"), new_id("t"), new_id("t")
    novu("subscribers.create", body={"subscriberId": ann, "email": f"{ann}@example.org"})
    novu.trigger("notice", ann, transactionId=first)
    novu.trigger("comments", bob, {"postId": 1}, transactionId=second)
    novu.run(first, "in_app", "completed")

    def found(**query: Any) -> list[str]:
        return [one["transactionId"] for one in novu("activity.list", **query)["data"]]

    assert found(subscriberIds=[ann]) == [first]
    assert found(subscriberIds=[ann, bob]) == [second, first]
    assert found(emails=[f"{ann}@example.org"]) == [first]
    assert found(subscriberIds=[ann, bob], templates=["comments"]) == [second]
    assert found(subscriberIds=[ann, bob], channels=["in_app"]) == [first]
    assert found(subscriberIds=[ann, bob], search=first) == [first]
    assert found(transactionId=second) == [second]
    assert found(subscriberIds=[new_id("nobody")]) == []


def test_events_are_found_by_their_time(novu, new_id):
    """GET /v1/notifications?after=&before="""
    ann = new_id("ann")
    novu.trigger("notice", ann)
    [one] = novu("activity.list", subscriberIds=[ann])["data"]
    at = one["createdAt"]
    assert len(novu("activity.list", subscriberIds=[ann], after=at, before=at)["data"]) == 1
    assert novu("activity.list", subscriberIds=[ann], before="2020-01-01T00:00:00.000Z")["data"] == []
    assert novu("activity.list", subscriberIds=[ann], after="2099-01-01T00:00:00.000Z")["data"] == []


def test_events_are_paged_the_newest_first(novu, new_id):
    """GET /v1/notifications?page=&limit="""
    ann = new_id("ann")
    ids = [novu.trigger("notice", ann)["transactionId"] for _ in range(3)]
    pages = [novu("activity.list", subscriberIds=[ann], page=page, limit=2) for page in (0, 1, 2)]
    assert [[one["transactionId"] for one in page["data"]] for page in pages] == [ids[:0:-1], ids[:1], []]
    assert [(page["hasMore"], page["page"], page["pageSize"]) for page in pages] == [
        (True, 0, 2), (False, 1, 2), (False, 2, 2)
    ]  # fmt: skip


def test_more_than_50_events_at_once_are_refused(novu):
    """GET /v1/notifications?limit=51"""
    error = novu.refused("activity.list", limit=51)
    assert (error.name, error.status) == ("ValidationErrorDto", 422)


@pytest.mark.parametrize("name", ["999999999", "none", "65f0c1f0c1f0c1f0c1f0c1f0"])
def test_an_unknown_notification_is_not_found(novu, name):
    """GET /v1/notifications/{id}"""
    error = novu.refused("activity.retrieve", notificationId=name)
    assert (error.name, error.status) == ("ErrorDto", 404)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_are_listed_by_each_filter(novu, new_id):
    """GET /v1/messages?subscriberId=&channel=&transactionId=&page=&limit="""
    ann, first, second = new_id("ann"), new_id("t"), new_id("t")
    novu("subscribers.create", body={"subscriberId": ann, "email": "ann@example.org"})
    novu.trigger("notice", ann, {"about": "tea"}, transactionId=first)
    novu.run(first, "in_app", "completed")
    novu.trigger("news", ann, transactionId=second)
    novu.run(second, "email", "completed")
    novu.run(second, "chat", "completed")

    def found(**query: Any) -> list[tuple[str, str]]:
        listed = novu("messages.list", subscriberId=ann, **query)["data"]
        return [(one["channel"], one["transactionId"]) for one in listed]

    assert sorted(found()) == sorted([("in_app", first), ("email", second), ("chat", second)])
    assert found(channel="email") == [("email", second)]
    assert found(transactionId=[first]) == [("in_app", first)]
    assert len(found(transactionId=[first, second])) == 3
    assert novu("messages.list", subscriberId=ann, limit=2)["hasMore"] is True
    assert (len(found(limit=2)), len(found(limit=2, page=1)), found(page=1)) == (2, 1, [])
    [message] = novu("messages.list", subscriberId=ann, channel="in_app")["data"]
    assert (message["subject"], message["content"], message["status"]) == ("On tea", "Read tea", "sent")
    assert (message["seen"], message["read"], message["payload"]) == (False, False, {"about": "tea"})
    [mail] = novu("messages.list", subscriberId=ann, channel="email")["data"]
    assert mail["email"] == "ann@example.org"


def test_the_message_of_a_digest_belongs_to_the_notification_that_opened_it(novu, new_id):
    """GET /v1/messages: notificationId leads back to GET /v1/notifications/{id}"""
    ann, transaction = new_id("ann"), new_id("t")
    novu.trigger("notice", ann, transactionId=transaction)
    run = novu.run(transaction, "in_app", "completed")
    [message] = novu("messages.list", subscriberId=ann)["data"]
    assert message["notificationId"] == run["id"] and message["subscriberId"] == run["subscriberId"]


def test_a_deleted_message_leaves_the_feed(novu, new_id):
    """DELETE /v1/messages/{messageId}"""
    ann = new_id("ann")
    tea, milk = novu.person(ann, "tea", "milk")
    answer = novu("messages.delete", messageId=tea)
    assert (answer["acknowledged"], answer["status"]) == (True, "deleted")
    assert [one["id"] for one in novu.feed(ann)] == [milk]
    assert [one["id"] for one in novu("messages.list", subscriberId=ann)["data"]] == [milk]
    assert novu.refused("messages.delete", messageId=tea).status == 404


def test_the_messages_of_a_transaction_are_deleted_together(novu, new_id):
    """DELETE /v1/messages/transaction/{transactionId}?channel="""
    ann, bob, transaction = new_id("ann"), new_id("bob"), new_id("t")
    novu.person(ann, "tea")
    novu.trigger("notice", [ann, bob], {"about": "milk"}, transactionId=transaction)
    wait_for(lambda: len(novu.feed(ann)) == 2 and len(novu.feed(bob)) == 1, what="the messages")
    assert novu("messages.deleteByTransactionId", transactionId=transaction, channel="email") is None
    assert len(novu.feed(bob)) == 1
    assert novu("messages.deleteByTransactionId", transactionId=transaction, channel="in_app") is None
    assert [one["subject"] for one in novu.feed(ann)] == ["On tea"]
    assert novu.feed(bob) == []


# -- the feed, as the first version of the API has it ------------------------------------------------------------------


def test_the_feed_has_the_newest_message_first_in_pages(novu, new_id):
    """GET /v1/subscribers/{id}/notifications/feed?page=&limit="""
    ann = new_id("ann")
    novu("subscribers.create", body={"subscriberId": ann, "firstName": "Ann"})
    ids = novu.person(ann, "one", "two", "three")
    first = novu("feed.list", subscriberId=ann, limit=2)
    second = novu("feed.list", subscriberId=ann, limit=2, page=1)
    assert [[one["id"] for one in page["data"]] for page in (first, second)] == [ids[:0:-1], ids[:1]]
    assert (first["hasMore"], first["page"], first["pageSize"], first["totalCount"]) == (True, 0, 2, 3)
    assert (second["hasMore"], second["page"]) == (False, 1)
    message = second["data"][0]
    assert message["channel"] == "in_app" and not any(message[name] for name in ("read", "seen", "archived"))
    assert (message["subscriber"]["subscriberId"], message["subscriber"]["firstName"]) == (ann, "Ann")
    assert message["templateIdentifier"] == "notice" and message["createdAt"]


def test_the_feed_is_filtered_by_seen_and_read(novu, new_id):
    """GET /v1/subscribers/{id}/notifications/feed?read=&seen="""
    ann = new_id("ann")
    one, two, three = novu.person(ann, "one", "two", "three")
    novu("feed.markAs", subscriberId=ann, body={"messageId": one, "markAs": "seen"})
    novu("feed.markAs", subscriberId=ann, body={"messageId": two, "markAs": "read"})

    def found(**query: Any) -> list[str]:
        return [message["id"] for message in novu.feed(ann, **query)]

    assert (found(seen=False), found(seen=True)) == ([three], [two, one])
    assert (found(read=False), found(read=True)) == ([three, one], [two])
    assert found(seen=True, read=False) == [one]


def test_the_feed_is_filtered_by_a_part_of_the_payload(novu, new_id):
    """GET /v1/subscribers/{id}/notifications/feed?payload= (JSON in base64)"""
    ann = new_id("ann")
    novu.person(ann, "tea", "milk")
    wanted = base64.b64encode(json.dumps({"about": "tea"}).encode()).decode()
    assert [one["subject"] for one in novu.feed(ann, payload=wanted)] == ["On tea"]


def test_the_unseen_are_counted(novu, new_id):
    """GET /v1/subscribers/{id}/notifications/unseen?seen="""
    ann = new_id("ann")
    one, *_ = novu.person(ann, "one", "two", "three")
    assert novu("feed.unseenCount", subscriberId=ann) == {"count": 3}
    novu("feed.markAs", subscriberId=ann, body={"messageId": one, "markAs": "seen"})
    assert novu("feed.unseenCount", subscriberId=ann) == {"count": 2}
    assert novu("feed.unseenCount", subscriberId=ann, seen=True) == {"count": 1}


@pytest.mark.parametrize("call", ["feed.list", "feed.unseenCount", "inbox.list"])
def test_the_feed_of_an_unknown_subscriber_is_not_found(novu, new_id, call):
    """GET of each feed"""
    error = novu.refused(call, subscriberId=new_id("nobody"))
    assert (error.name, error.status) == ("ErrorDto", 404)


@pytest.mark.parametrize(
    ("marks", "seen", "read"),
    [
        (["seen"], True, False),
        (["read"], True, True),
        (["read", "unread"], True, False),
        (["read", "unseen"], False, False),
    ],
    ids=["seen", "read", "unread", "unseen"],
)
def test_a_message_is_marked(novu, new_id, marks, seen, read):
    """POST /v1/subscribers/{id}/messages/mark-as: each mark"""
    ann = new_id("ann")
    one, two = novu.person(ann, "one", "two")
    for mark in marks:
        [answer] = novu("feed.markAs", subscriberId=ann, body={"messageId": one, "markAs": mark})
    assert (answer["id"], answer["seen"], answer["read"]) == (one, seen, read)
    other, marked = novu.feed(ann)
    assert (marked["id"], marked["seen"], marked["read"]) == (one, seen, read)
    assert (other["id"], other["seen"], other["read"]) == (two, False, False)


def test_several_messages_are_marked_at_once(novu, new_id):
    """POST /v1/subscribers/{id}/messages/mark-as with a list"""
    ann = new_id("ann")
    ids = novu.person(ann, "one", "two", "three")
    answer = novu("feed.markAs", subscriberId=ann, body={"messageId": ids[:2], "markAs": "read"})
    assert sorted(one["id"] for one in answer) == sorted(ids[:2]) and all(one["read"] for one in answer)
    assert [one["read"] for one in novu.feed(ann)] == [False, True, True]


def test_a_message_without_a_subject_can_be_marked_too(novu, new_id):
    """POST /v1/subscribers/{id}/messages/mark-as: the SDKs take no null for a subject here"""
    ann = new_id("ann")
    novu.trigger("strict", ann, {"name": "Ann"})
    [message] = wait_for(lambda: novu.feed(ann), what="the message")
    [answer] = novu("feed.markAs", subscriberId=ann, body={"messageId": message["id"], "markAs": "read"})
    assert answer["read"] is True and answer["content"] == "Ann"


def test_the_messages_of_somebody_else_are_not_marked(novu, new_id):
    """POST /v1/subscribers/{id}/messages/mark-as"""
    ann, bob = new_id("ann"), new_id("bob")
    [message] = novu.person(ann, "tea")
    novu.person(bob)
    error = novu.refused("feed.markAs", subscriberId=bob, body={"messageId": message, "markAs": "read"})
    assert (error.name, error.status) == ("ErrorDto", 404)
    assert novu.feed(ann)[0]["read"] is False


def test_all_messages_are_marked_and_those_that_changed_counted(novu, new_id):
    """POST /v1/subscribers/{id}/messages/mark-all"""
    ann = new_id("ann")
    one, *_ = novu.person(ann, "one", "two", "three")
    novu("feed.markAs", subscriberId=ann, body={"messageId": one, "markAs": "read"})
    assert novu("feed.markAll", subscriberId=ann, body={"markAs": "read"}) == 2
    assert [message["read"] for message in novu.feed(ann)] == [True] * 3
    assert novu("feed.markAll", subscriberId=ann, body={"markAs": "unread"}) == 3
    assert [message["read"] for message in novu.feed(ann)] == [False] * 3


@pytest.mark.parametrize("button", ["primary", "secondary"])
def test_a_button_of_a_message_is_noted_as_pressed(novu, new_id, button):
    """POST /v1/subscribers/{id}/messages/{messageId}/actions/{type}"""
    ann = new_id("ann")
    [message] = novu.person(ann, "tea")
    answer = novu("feed.action", subscriberId=ann, messageId=message, type=button, body={"status": "done"})
    assert answer["id"] == message
    action = novu.feed(ann)[0]["cta"]["action"]
    assert (action["status"], action["result"]["type"]) == ("done", button)


# -- the inbox, as its second version has it ---------------------------------------------------------------------------


def test_the_inbox_lists_what_the_feed_has(novu, new_id):
    """GET /v2/subscribers/{id}/notifications"""
    ann = new_id("ann")
    novu("subscribers.create", body={"subscriberId": ann, "firstName": "Ann"})
    [message] = novu.person(ann, "tea")
    found = novu("inbox.list", subscriberId=ann)
    [item] = found["data"]
    assert found["hasMore"] is False
    assert (item["id"], item["subject"], item["body"]) == (message, "On tea", "Read tea")
    assert (item["isRead"], item["isSeen"], item["isArchived"], item["isSnoozed"]) == (False, False, False, False)
    assert (item["to"]["subscriberId"], item["to"]["firstName"]) == (ann, "Ann")
    assert (item["channelType"], item["severity"], item["data"]) == ("in_app", "none", {"about": "tea"})
    assert (item["workflow"]["identifier"], item["workflow"]["name"]) == ("notice", "A notice")


def test_the_inbox_is_read_in_parts(novu, new_id):
    """GET /v2/subscribers/{id}/notifications?limit=&offset=&after="""
    ann = new_id("ann")
    ids = novu.person(ann, "one", "two", "three")[::-1]
    first = novu("inbox.list", subscriberId=ann, limit=2)
    assert [one["id"] for one in first["data"]] == ids[:2] and first["hasMore"] is True
    assert [one["id"] for one in novu.inbox(ann, limit=2, offset=2)] == ids[2:]
    rest = novu("inbox.list", subscriberId=ann, limit=2, after=ids[1])
    assert [one["id"] for one in rest["data"]] == ids[2:] and rest["hasMore"] is False


def test_the_inbox_is_filtered_by_what_was_done_with_a_message(novu, new_id):
    """GET /v2/subscribers/{id}/notifications?read=&seen=&archived=&snoozed="""
    ann = new_id("ann")
    one, two, three = novu.person(ann, "one", "two", "three")
    novu("inbox.markAsRead", subscriberId=ann, notificationId=one)
    novu("inbox.archive", subscriberId=ann, notificationId=two)

    def found(**query: Any) -> list[str]:
        return [item["id"] for item in novu.inbox(ann, **query)]

    assert (found(read=True, archived=False), found(read=False)) == ([one], [three])
    assert (found(archived=True), found(archived=False)) == ([two], [three, one])
    assert (found(seen=False), found(snoozed=True)) == ([three], [])
    assert found(snoozed=False) == [three, two, one]


def test_the_inbox_is_filtered_by_time(novu, new_id):
    """GET /v2/subscribers/{id}/notifications?createdGte=&createdLte= (in ms)"""
    ann = new_id("ann")
    novu.person(ann, "tea")
    assert len(novu.inbox(ann, createdGte=1_600_000_000_000)) == 1
    assert novu.inbox(ann, createdLte=1_600_000_000_000) == []
    assert novu.inbox(ann, createdGte=4_000_000_000_000) == []


def test_the_inbox_is_filtered_by_data(novu, new_id):
    """GET /v2/subscribers/{id}/notifications?data= (JSON)"""
    ann = new_id("ann")
    novu.person(ann, "tea", "milk")
    assert [one["subject"] for one in novu.inbox(ann, data=json.dumps({"about": "tea"}))] == ["On tea"]


def test_the_inbox_has_nothing_of_a_severity_that_no_message_has(novu, new_id):
    """GET /v2/subscribers/{id}/notifications?severity="""
    ann = new_id("ann")
    novu.person(ann, "tea")
    assert novu.inbox(ann, severity=["high"]) == []
    assert len(novu.inbox(ann, severity=["none"])) == 1


def test_the_inbox_is_counted_by_several_filters_at_once(novu, new_id):
    """GET /v2/subscribers/{id}/notifications/count?filters="""
    ann = new_id("ann")
    one, *_ = novu.person(ann, "one", "two", "three")
    novu("inbox.markAsRead", subscriberId=ann, notificationId=one)
    found = novu("inbox.count", subscriberId=ann, filters=json.dumps([{"read": False}, {"read": True}, {}]))
    assert [one["count"] for one in found] == [2, 1, 3]
    assert [one["filter"] for one in found] == [{"read": False}, {"read": True}, {}]


def test_a_message_is_read_and_unread(novu, new_id):
    """PATCH /v2/subscribers/{id}/notifications/{id}/read and …/unread"""
    ann = new_id("ann")
    [message] = novu.person(ann, "tea")
    item = novu("inbox.markAsRead", subscriberId=ann, notificationId=message)
    assert (item["id"], item["isRead"], item["isSeen"]) == (message, True, True) and item["readAt"]
    assert novu.inbox(ann)[0]["isRead"] is True
    item = novu("inbox.markAsUnread", subscriberId=ann, notificationId=message)
    assert item["isRead"] is False and item.get("readAt") is None
    assert novu.inbox(ann)[0]["isRead"] is False


def test_a_message_is_archived_and_brought_back(novu, new_id):
    """PATCH /v2/subscribers/{id}/notifications/{id}/archive and …/unarchive"""
    ann = new_id("ann")
    [message] = novu.person(ann, "tea")
    item = novu("inbox.archive", subscriberId=ann, notificationId=message)
    assert item["isArchived"] is True and item["archivedAt"]
    assert novu.inbox(ann, archived=False) == []
    item = novu("inbox.unarchive", subscriberId=ann, notificationId=message)
    assert item["isArchived"] is False
    assert [one["id"] for one in novu.inbox(ann, archived=False)] == [message]


@pytest.mark.parametrize("button", ["primary", "secondary"])
def test_an_action_is_completed_and_taken_back(novu, new_id, button):
    """PATCH /v2/subscribers/{id}/notifications/{id}/actions/{type}/complete and …/revert"""
    ann = new_id("ann")
    [message] = novu.person(ann, "tea")
    names = {"subscriberId": ann, "notificationId": message, "actionType": button}
    assert novu("inbox.completeAction", **names)[f"{button}Action"]["isCompleted"] is True
    assert novu.inbox(ann)[0][f"{button}Action"]["isCompleted"] is True
    assert novu("inbox.revertAction", **names)[f"{button}Action"]["isCompleted"] is False


def test_a_message_is_deleted_from_the_inbox(novu, new_id):
    """DELETE /v2/subscribers/{id}/notifications/{id}"""
    ann = new_id("ann")
    one, two = novu.person(ann, "one", "two")
    assert novu("inbox.delete", subscriberId=ann, notificationId=one) is None
    assert [item["id"] for item in novu.inbox(ann)] == [two]
    assert novu.refused("inbox.delete", subscriberId=ann, notificationId=one).status == 404


@pytest.mark.parametrize("call", ["inbox.markAsRead", "inbox.markAsUnread", "inbox.archive", "inbox.unarchive"])
def test_a_message_of_somebody_else_is_not_found(novu, new_id, call):
    """PATCH /v2/subscribers/{id}/notifications/{id}/…"""
    ann, bob = new_id("ann"), new_id("bob")
    [message] = novu.person(ann, "tea")
    novu.person(bob)
    error = novu.refused(call, subscriberId=bob, notificationId=message)
    assert (error.name, error.status) == ("ErrorDto", 404)
    assert novu.inbox(ann)[0]["isRead"] is False


def test_some_messages_are_seen_and_then_all(novu, new_id):
    """POST /v2/subscribers/{id}/notifications/seen: with notificationIds, and without"""
    ann = new_id("ann")
    one, two, three = novu.person(ann, "one", "two", "three")
    assert novu("inbox.markAsSeen", subscriberId=ann, body={"notificationIds": [one, three]}) is None
    assert [item["isSeen"] for item in novu.inbox(ann)] == [True, False, True]
    novu("inbox.markAsSeen", subscriberId=ann, body={})
    assert [item["isSeen"] for item in novu.inbox(ann)] == [True] * 3
    assert [item["isRead"] for item in novu.inbox(ann)] == [False] * 3


def test_all_messages_are_read(novu, new_id):
    """POST /v2/subscribers/{id}/notifications/read"""
    ann = new_id("ann")
    novu.person(ann, "one", "two")
    assert novu("inbox.markAllAsRead", subscriberId=ann, body={}) is None
    assert [item["isRead"] for item in novu.inbox(ann)] == [True] * 2


def test_all_messages_are_archived(novu, new_id):
    """POST /v2/subscribers/{id}/notifications/archive"""
    ann = new_id("ann")
    novu.person(ann, "one", "two")
    assert novu("inbox.archiveAll", subscriberId=ann, body={}) is None
    assert [item["isArchived"] for item in novu.inbox(ann)] == [True] * 2


def test_the_read_messages_alone_are_archived(novu, new_id):
    """POST /v2/subscribers/{id}/notifications/read-archive"""
    ann = new_id("ann")
    one, two = novu.person(ann, "one", "two")
    novu("inbox.markAsRead", subscriberId=ann, notificationId=one)
    assert novu("inbox.archiveAllRead", subscriberId=ann, body={}) is None
    assert {item["id"]: item["isArchived"] for item in novu.inbox(ann)} == {one: True, two: False}


def test_all_messages_are_deleted_and_those_of_others_stay(novu, new_id):
    """POST /v2/subscribers/{id}/notifications/delete"""
    ann, bob = new_id("ann"), new_id("bob")
    novu.person(ann, "one", "two")
    novu.person(bob, "one")
    assert novu("inbox.deleteAll", subscriberId=ann, body={}) is None
    assert novu.inbox(ann) == []
    assert len(novu.inbox(bob)) == 1


def test_the_messages_with_certain_data_alone_are_deleted(novu, new_id):
    """POST /v2/subscribers/{id}/notifications/delete with data (JSON)"""
    ann = new_id("ann")
    novu.person(ann, "tea", "milk")
    novu("inbox.deleteAll", subscriberId=ann, body={"data": json.dumps({"about": "tea"})})
    assert [item["subject"] for item in novu.inbox(ann)] == ["On milk"]
