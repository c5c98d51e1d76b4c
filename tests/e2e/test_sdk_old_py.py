"""novu 1, Novu's first SDK for Python, as a client. It builds its own objects out of each answer, so a field that it
needs and does not get is an error. The docstrings name the rows of Novu's contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conftest import SdkError, wait_for

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def novu(start_client: Any, novu_url: str) -> Call:
    """novu("EventApi.trigger", …) calls it with these names; what it gives is the SDK's object, field by field."""
    client = start_client("old_py_driver.py", novu_url)
    return lambda call, **args: client.ask(call, args)


@pytest.fixture
def ann(novu, new_id) -> str:
    """A subscriber that there is."""
    name = new_id("ann")
    novu("SubscriberApi.create", subscriber={"dto": "SubscriberDto", "subscriber_id": name, "first_name": "Ann"})
    return name


def notice(novu: Call, subscriber: str, about: str = "tea") -> dict[str, Any]:
    """A message in somebody's feed."""
    answer = novu("EventApi.trigger", name="notice", recipients=subscriber, payload={"about": about})

    def look() -> list[dict[str, Any]]:
        return novu("MessageApi.list", subscriber_id=subscriber, transaction_id=answer["transaction_id"])["data"]

    return wait_for(look, what="the message")[0]


def refused(novu: Call, call: str, **args: Any) -> SdkError:
    with pytest.raises(SdkError) as raised:
        novu(call, **args)
    return raised.value


# -- events ------------------------------------------------------------------------------------------------------------


def test_a_trigger_is_acknowledged(novu, ann, new_id):
    """POST /v1/events/trigger"""
    more = {"overrides": {"email": {"subject": "x"}}, "transaction_id": new_id("t"), "actor": ann}
    answer = novu("EventApi.trigger", name="notice", recipients=[ann], payload={"about": "tea"}, **more)
    assert answer == {"acknowledged": True, "status": "processed", "transaction_id": more["transaction_id"]}


def test_an_unknown_workflow_is_told_as_workflow_not_found(novu, ann):
    """POST /v1/events/trigger"""
    error = refused(novu, "EventApi.trigger", name="nothing", recipients=ann, payload={})
    assert (error.name, error.status) == ("HTTPError", 422) and "workflow_not_found" in error.data["message"]


def test_a_wrong_key_is_told_as_401(start_client, novu_url):
    with pytest.raises(SdkError) as raised:
        start_client("old_py_driver.py", novu_url).ask("SubscriberApi.list", {}, "wrong")
    assert (raised.value.name, raised.value.status) == ("HTTPError", 401)


def test_a_bulk_is_answered_in_its_order(novu, ann, new_id):
    """POST /v1/events/trigger/bulk"""
    ids = [new_id("t") for _ in range(3)]
    event = {"dto": "InputEventDto", "name": "comments", "recipients": ann, "payload": {"postId": 1}}
    answers = novu("EventApi.trigger_bulk", events=[{**event, "transaction_id": one} for one in ids])
    assert [(one["transaction_id"], one["status"]) for one in answers] == [(one, "processed") for one in ids]


def test_a_bad_event_of_a_bulk_is_told_in_its_place(novu, ann):
    """POST /v1/events/trigger/bulk: this SDK needs a transactionId with an error, too"""
    events = [
        {"dto": "InputEventDto", "name": name, "recipients": ann, "payload": {}} for name in ("nothing", "notice")
    ]
    assert [one["status"] for one in novu("EventApi.trigger_bulk", events=events)] == ["error", "processed"]


def test_a_broadcast_reaches_every_subscriber(novu, ann):
    """POST /v1/events/trigger/broadcast"""
    answer = novu("EventApi.broadcast", name="notice", payload={"about": "all"})
    assert (answer["acknowledged"], answer["status"]) == (True, "processed")
    [message] = wait_for(lambda: novu("MessageApi.list", subscriber_id=ann)["data"], what="the message")
    assert message["transaction_id"] == answer["transaction_id"]


def test_a_cancel_stops_what_waits(novu, ann, new_id):
    """DELETE /v1/events/trigger/{transactionId}: this SDK does not tell the result"""
    transaction = new_id("t")
    novu("EventApi.trigger", name="comments", recipients=ann, payload={"postId": 1}, transaction_id=transaction)
    assert novu("EventApi.delete", transaction_id=transaction) is None
    [found] = novu("NotificationApi.list", transaction_id=transaction)["data"]
    assert "canceled" in [job["status"] for job in found["jobs"]]


# -- subscribers -------------------------------------------------------------------------------------------------------


def test_a_subscriber_is_made_changed_read_and_deleted(novu, new_id):
    """POST /v1/subscribers, GET, PUT, DELETE /v1/subscribers/{id}: this SDK sends null for all that is not given"""
    ann = new_id("ann")
    known = {"dto": "SubscriberDto", "subscriber_id": ann, "first_name": "Ann", "email": "ann@example.org"}
    made = novu("SubscriberApi.create", subscriber=known)
    assert (made["subscriber_id"], made["first_name"], made["deleted"]) == (ann, "Ann", False)
    changed = novu("SubscriberApi.put", subscriber={**known, "last_name": "Lee", "data": {"team": "red"}})
    assert (changed["first_name"], changed["last_name"], changed["data"]) == ("Ann", "Lee", {"team": "red"})
    found = novu("SubscriberApi.get", subscriber_id=ann)
    assert (found["email"], found["last_name"]) == ("ann@example.org", "Lee") and found["_id"]
    assert novu("SubscriberApi.delete", subscriber_id=ann) is None
    assert refused(novu, "SubscriberApi.get", subscriber_id=ann).status == 404


def test_subscribers_are_listed_in_pages_and_streamed_to_the_end(novu, new_id):
    """GET /v1/subscribers?page=&limit="""
    people = [new_id("ann") for _ in range(12)]
    for one in people:
        novu("SubscriberApi.create", subscriber={"dto": "SubscriberDto", "subscriber_id": one})
    page = novu("SubscriberApi.list", page=0)
    assert (page["page"], page["page_size"]) == (0, 10) and page["total_count"] >= 12
    assert [one["subscriber_id"] for one in page["data"]] == people[:1:-1]
    streamed = [one["subscriber_id"] for one in novu("SubscriberApi.stream")]
    assert streamed[:12] == people[::-1] and len(streamed) == page["total_count"]


def test_many_subscribers_are_made_in_one_call(novu, ann, new_id):
    """POST /v1/subscribers/bulk"""
    bob = new_id("bob")
    entries = [{"dto": "SubscriberDto", "subscriber_id": one} for one in (ann, bob)]
    done = novu("SubscriberApi.bulk_create", subscribers=entries)
    assert [one["subscriber_id"] for one in done["created"]] == [bob]
    assert [one["subscriber_id"] for one in done["updated"]] == [ann]
    assert done["failed"] == []


def test_credentials_are_set_and_forgotten(novu, ann):
    """PUT, DELETE /v1/subscribers/{id}/credentials"""
    hook = "https://example.org/hook"
    found = novu("SubscriberApi.credentials", subscriber_id=ann, provider_id="slack", webhook_url=hook)
    [channel] = found["channels"]
    assert (channel["provider_id"], channel["credentials"]["webhook_url"]) == ("slack", hook)
    novu("SubscriberApi.delete_credentials", subscriber_id=ann, provider_id="slack")
    assert novu("SubscriberApi.get", subscriber_id=ann)["channels"] == []


def test_the_online_flag_is_kept(novu, ann):
    """PATCH /v1/subscribers/{id}/online-status"""
    assert novu("SubscriberApi.online_status", subscriber_id=ann, status=True)["is_online"] is True


# -- preferences -------------------------------------------------------------------------------------------------------


def test_the_choice_for_a_channel_of_a_workflow_is_kept(novu, ann):
    """GET /v1/subscribers/{id}/preferences, PATCH …/preferences/{workflow}"""
    choice = {"subscriber_id": ann, "template_id": "news", "channel": "email", "channel_enabled": False}
    changed = novu("SubscriberApi.change_channel_preference", **choice)
    assert changed["template"]["name"] == "news" and changed["preference"]["channels"]["email"] is False
    listed = {one["template"]["_id"]: one for one in novu("SubscriberApi.preferences", subscriber_id=ann)}
    assert listed["news"]["preference"]["channels"]["email"] is False
    assert listed["news"]["preference"]["channels"]["chat"] is True
    assert listed["alarm"]["template"]["critical"] is True


def test_a_workflow_is_turned_off_as_a_whole(novu, ann):
    """PATCH /v1/subscribers/{id}/preferences/{workflow} with enabled alone"""
    changed = novu("SubscriberApi.change_preference_state", subscriber_id=ann, template_id="notice", state=False)
    assert changed["preference"]["enabled"] is False or changed["preference"]["channels"]["in_app"] is False
    answer = novu("EventApi.trigger", name="notice", recipients=ann, payload={"about": "tea"})

    def look() -> list[str]:
        [found] = novu("NotificationApi.list", transaction_id=answer["transaction_id"])["data"]
        return [job["status"] for job in found["jobs"] if job["type"] == "in_app" and job["status"] != "queued"]

    assert wait_for(look, what="the end of the step") == ["skipped"]


# -- the feed ----------------------------------------------------------------------------------------------------------


def test_the_unseen_are_counted(novu, ann):
    """GET /v1/subscribers/{id}/notifications/unseen"""
    notice(novu, ann)
    assert novu("SubscriberApi.unseen_notifications", subscriber_id=ann) == 1


@pytest.mark.parametrize(
    ("mark", "seen", "read"),
    [
        ({"seen": True}, True, False),
        ({"read": True}, True, True),
        ({"seen": True, "read": False}, True, False),
        ({"seen": True, "read": True}, True, True),
    ],
    ids=["seen", "read", "seen not read", "both"],
)
def test_a_message_is_marked(novu, ann, mark, seen, read):
    """POST /v1/subscribers/{id}/messages/markAs with mark: {seen, read}"""
    message = notice(novu, ann)
    answer = novu("SubscriberApi.mark_as", subscriber_id=ann, message_id=message["_id"], **mark)
    assert (answer["_id"], answer["seen"], answer["read"]) == (message["_id"], seen, read)


def test_all_messages_are_marked(novu, ann):
    """POST /v1/subscribers/{id}/messages/mark-all"""
    notice(novu, ann, "tea")
    notice(novu, ann, "milk")
    assert novu("SubscriberApi.mark_all_as", subscriber_id=ann, mark_as="seen") == 2
    assert novu("SubscriberApi.unseen_notifications", subscriber_id=ann) == 0


def test_a_button_of_a_message_is_noted_as_pressed(novu, ann):
    """POST /v1/subscribers/{id}/messages/{messageId}/actions/{type}"""
    message = notice(novu, ann)
    pressed = {"action_type": "secondary", "status": "done", "payload": {"why": "yes"}}
    answer = novu("SubscriberApi.mark_message_action", subscriber_id=ann, message_id=message["_id"], **pressed)
    assert answer["_id"] == message["_id"]
    assert answer["cta"]["action"]["result"] == {"type": "secondary", "payload": {"why": "yes"}}


# -- messages and what became of events --------------------------------------------------------------------------------


def test_messages_are_listed_streamed_and_deleted(novu, ann):
    """GET /v1/messages, DELETE /v1/messages/{id}"""
    ids = [notice(novu, ann, str(number))["_id"] for number in range(12)][::-1]
    page = novu("MessageApi.list", subscriber_id=ann, channel="in_app", limit=5, page=1)
    assert [one["_id"] for one in page["data"]] == ids[5:10] and (page["page"], page["page_size"]) == (1, 5)
    assert [one["_id"] for one in novu("MessageApi.stream", subscriber_id=ann)] == ids
    assert novu("MessageApi.delete", message_id=ids[0]) is True
    assert [one["_id"] for one in novu("MessageApi.list", subscriber_id=ann, limit=1)["data"]] == ids[1:2]


def test_events_are_listed_and_one_is_shown(novu, ann):
    """GET /v1/notifications, GET /v1/notifications/{id}"""
    message = notice(novu, ann)
    page = novu("NotificationApi.list", subscriber_ids=[ann], channels=["in_app"], templates=["notice"])
    [found] = page["data"]
    assert (page["page"], page["has_more"], page["page_size"]) == (0, False, 10)
    assert found["transaction_id"] == message["transaction_id"]
    assert found["subscriber"]["first_name"] == "Ann" and found["template"]["name"] == "A notice"
    assert novu("NotificationApi.get", notification_id=found["_id"]) == found
    assert [one["_id"] for one in novu("NotificationApi.stream", subscriber_ids=[ann])] == [found["_id"]]
