"""@novu/node 2, Novu's first SDK for JavaScript, as a client. It validates nothing and gives the answer as it came:
these tests are what its users read out of it. The docstrings name the rows of Novu's contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conftest import SdkError, wait_for

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def novu(start_client: Any, novu_url: str) -> Call:
    """novu("events.trigger", …) calls it; what it gives is the answer's body, with its status."""
    client = start_client("node_driver.mjs", novu_url)
    return lambda call, *args: client.ask(call, args)


@pytest.fixture
def ann(new_id) -> str:
    return new_id("ann")


def notice(novu: Call, subscriber: str, about: str = "tea") -> dict[str, Any]:
    """A message in somebody's feed."""
    novu("subscribers.identify", subscriber, {})
    before = len(novu("subscribers.getNotificationsFeed", subscriber)["data"])
    novu("events.trigger", "notice", {"to": subscriber, "payload": {"about": about}})

    def look() -> list[dict[str, Any]]:
        return novu("subscribers.getNotificationsFeed", subscriber)["data"]

    return wait_for(lambda: len(look()) > before and look()[0], what="the message")


def refused(novu: Call, call: str, *args: Any) -> SdkError:
    with pytest.raises(SdkError) as raised:
        novu(call, *args)
    return raised.value


# -- events ------------------------------------------------------------------------------------------------------------


def test_a_trigger_is_acknowledged(novu, ann, new_id):
    """POST /v1/events/trigger: this SDK always sends overrides"""
    transaction = new_id("t")
    answer = novu("events.trigger", "notice", {"to": ann, "payload": {"about": "tea"}, "transactionId": transaction})
    assert answer["status"] == 201
    assert answer["data"] == {"acknowledged": True, "status": "processed", "transactionId": transaction}
    wait_for(lambda: novu("subscribers.getNotificationsFeed", ann)["data"], what="the message")


def test_an_unknown_workflow_is_told_as_workflow_not_found(novu, ann):
    """POST /v1/events/trigger"""
    error = refused(novu, "events.trigger", "nothing", {"to": ann, "payload": {}})
    assert error.status == 422 and "workflow_not_found" in error.data["message"]


def test_a_wrong_key_is_told_as_401(start_client, novu_url):
    with pytest.raises(SdkError) as raised:
        start_client("node_driver.mjs", novu_url).ask("subscribers.list", [], "wrong")
    assert raised.value.status == 401 and raised.value.data["message"]


def test_a_bulk_is_answered_in_its_order(novu, ann, new_id):
    """POST /v1/events/trigger/bulk"""
    ids = [new_id("t") for _ in range(3)]
    events = [{"name": "comments", "to": ann, "payload": {"postId": 1}, "transactionId": one} for one in ids]
    answer = novu("events.bulkTrigger", events)
    assert [one["transactionId"] for one in answer["data"]] == ids
    assert {one["status"] for one in answer["data"]} == {"processed"}


def test_a_broadcast_reaches_every_subscriber(novu, ann):
    """POST /v1/events/trigger/broadcast"""
    novu("subscribers.identify", ann, {})
    answer = novu("events.broadcast", "notice", {"payload": {"about": "all"}})
    assert answer["data"]["acknowledged"] is True and answer["data"]["transactionId"]
    [message] = wait_for(lambda: novu("subscribers.getNotificationsFeed", ann)["data"], what="the message")
    assert message["subject"] == "On all"


def test_a_cancel_is_true_once(novu, ann, new_id):
    """DELETE /v1/events/trigger/{transactionId}"""
    transaction = new_id("t")
    novu("events.trigger", "comments", {"to": ann, "payload": {"postId": 1}, "transactionId": transaction})
    assert [novu("events.cancel", transaction) for _ in range(2)] == [
        {"status": 200, "data": True}, {"status": 200, "data": False}
    ]  # fmt: skip


# -- subscribers -------------------------------------------------------------------------------------------------------


def test_a_subscriber_is_made_changed_read_and_deleted(novu, ann):
    """POST /v1/subscribers, GET, PUT, DELETE /v1/subscribers/{id}"""
    made = novu("subscribers.identify", ann, {"firstName": "Ann", "email": "ann@example.org", "data": {"team": "red"}})
    assert made["status"] == 201 and made["data"]["firstName"] == "Ann"
    changed = novu("subscribers.update", ann, {"lastName": "Lee"})
    assert (changed["data"]["firstName"], changed["data"]["lastName"]) == ("Ann", "Lee")
    found = novu("subscribers.get", ann)["data"]
    assert (found["subscriberId"], found["lastName"], found["data"]) == (ann, "Lee", {"team": "red"})
    assert found["_id"] and found["createdAt"]
    deleted = novu("subscribers.delete", ann)
    assert deleted["data"] == {"acknowledged": True, "status": "deleted"}
    assert refused(novu, "subscribers.get", ann).status == 404


def test_subscribers_are_listed_in_pages(novu, new_id):
    """GET /v1/subscribers?page=&limit="""
    people = [new_id("ann") for _ in range(3)]
    for one in people:
        novu("subscribers.identify", one, {})
    first, second = novu("subscribers.list", 0, 2), novu("subscribers.list", 1, 2)
    listed = [one["subscriberId"] for one in [*first["data"], *second["data"]]]
    assert listed[:3] == people[::-1]
    assert (first["page"], first["pageSize"], first["hasMore"]) == (0, 2, True) and first["totalCount"] >= 3


def test_many_subscribers_are_made_in_one_call(novu, new_id):
    """POST /v1/subscribers/bulk"""
    ann, bob = new_id("ann"), new_id("bob")
    novu("subscribers.identify", ann, {})
    done = novu("subscribers.bulkCreate", [{"subscriberId": ann, "firstName": "Ann"}, {"subscriberId": bob}])["data"]
    assert done == {"updated": [{"subscriberId": ann}], "created": [{"subscriberId": bob}], "failed": []}


def test_credentials_are_set_and_forgotten(novu, ann):
    """PUT, DELETE /v1/subscribers/{id}/credentials"""
    novu("subscribers.identify", ann, {})
    hook = {"webhookUrl": "https://example.org/hook"}
    [channel] = novu("subscribers.setCredentials", ann, "slack", hook)["data"]["channels"]
    assert (channel["providerId"], channel["credentials"]) == ("slack", hook)
    novu("subscribers.setCredentials", ann, "fcm", {"deviceTokens": ["a"]})
    channels = {one["providerId"]: one for one in novu("subscribers.unsetCredentials", ann, "fcm")["data"]["channels"]}
    assert not channels["fcm"]["credentials"].get("deviceTokens")
    assert novu("subscribers.deleteCredentials", ann, "slack")["status"] == 204
    assert "slack" not in [one["providerId"] for one in novu("subscribers.get", ann)["data"]["channels"]]


def test_the_online_flag_is_kept(novu, ann):
    """PATCH /v1/subscribers/{id}/online-status: this SDK calls the field online"""
    novu("subscribers.identify", ann, {})
    assert novu("subscribers.updateOnlineStatus", ann, True)["data"]["isOnline"] is True


# -- preferences -------------------------------------------------------------------------------------------------------


def test_the_choice_for_a_channel_of_a_workflow_is_kept(novu, ann):
    """GET /v1/subscribers/{id}/preferences, PATCH …/preferences/{workflow}"""
    novu("subscribers.identify", ann, {})
    listed = {one["template"]["_id"]: one["preference"] for one in novu("subscribers.getPreference", ann)["data"]}
    assert listed["news"] == {"enabled": True, "channels": {"email": True, "chat": True}}
    changed = novu("subscribers.updatePreference", ann, "news", {"channel": {"type": "email", "enabled": False}})
    assert changed["data"]["preference"]["channels"] == {"email": False, "chat": True}
    listed = {one["template"]["_id"]: one["preference"] for one in novu("subscribers.getPreference", ann)["data"]}
    assert listed["news"]["channels"] == {"email": False, "chat": True}


# -- the feed ----------------------------------------------------------------------------------------------------------


def test_the_feed_has_the_message(novu, ann):
    """GET /v1/subscribers/{id}/notifications/feed"""
    message = notice(novu, ann)
    assert (message["subject"], message["content"], message["payload"]) == ("On tea", "Read tea", {"about": "tea"})
    assert (message["seen"], message["read"], message["channel"]) == (False, False, "in_app")
    page = novu("subscribers.getNotificationsFeed", ann, {"page": 0, "limit": 5, "seen": False, "read": False})
    assert (page["totalCount"], page["hasMore"], page["page"], page["pageSize"]) == (1, False, 0, 5)


def test_the_feed_is_filtered_by_a_part_of_the_payload(novu, ann):
    """GET /v1/subscribers/{id}/notifications/feed?payload=: the SDK encodes it"""
    notice(novu, ann, "tea")
    notice(novu, ann, "milk")
    found = novu("subscribers.getNotificationsFeed", ann, {"payload": {"about": "tea"}})["data"]
    assert [one["subject"] for one in found] == ["On tea"]


def test_the_unseen_are_counted(novu, ann):
    """GET /v1/subscribers/{id}/notifications/unseen?seen="""
    message = notice(novu, ann)
    assert novu("subscribers.getUnseenCount", ann, False)["data"] == {"count": 1}
    novu("subscribers.markMessageSeen", ann, message["_id"])
    assert novu("subscribers.getUnseenCount", ann, False)["data"] == {"count": 0}
    assert novu("subscribers.getUnseenCount", ann, True)["data"] == {"count": 1}


@pytest.mark.parametrize(
    ("call", "more", "seen", "read"),
    [
        ("markMessageSeen", (), True, False),
        ("markMessageRead", (), True, True),
        ("markMessageAs", ({"seen": True, "read": False},), True, False),
        ("markMessageAs", ({"seen": True, "read": True},), True, True),
        ("markMessageAs", ({"seen": False, "read": False},), False, False),
    ],
    ids=["seen", "read", "seen not read", "both", "neither"],
)
def test_a_message_is_marked(novu, ann, call, more, seen, read):
    """POST /v1/subscribers/{id}/messages/markAs with mark: {seen, read}"""
    message = notice(novu, ann)
    [answer] = novu(f"subscribers.{call}", ann, message["_id"], *more)["data"]
    assert (answer["_id"], answer["seen"], answer["read"]) == (message["_id"], seen, read)


def test_all_messages_are_marked(novu, ann):
    """POST /v1/subscribers/{id}/messages/mark-all"""
    notice(novu, ann, "tea")
    notice(novu, ann, "milk")
    assert novu("subscribers.markAllMessagesAs", ann, "read")["data"] == 2
    assert [one["read"] for one in novu("subscribers.getNotificationsFeed", ann)["data"]] == [True, True]


def test_a_button_of_a_message_is_noted_as_pressed(novu, ann):
    """POST /v1/subscribers/{id}/messages/{messageId}/actions/{type}"""
    message = notice(novu, ann)
    body = {"status": "done", "payload": {"why": "yes"}}
    answer = novu("subscribers.markMessageActionSeen", ann, message["_id"], "primary", body)
    assert answer["data"]["_id"] == message["_id"]
    assert answer["data"]["cta"]["action"]["status"] == "done"
    assert answer["data"]["cta"]["action"]["result"] == {"type": "primary", "payload": {"why": "yes"}}


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_are_listed_and_deleted(novu, ann, new_id):
    """GET /v1/messages, DELETE /v1/messages/{id} and /v1/messages/transaction/{id}"""
    first, second = notice(novu, ann, "tea"), notice(novu, ann, "milk")
    listed = novu("messages.list", {"subscriberId": ann, "channel": "in_app", "limit": 5})["data"]
    assert [one["_id"] for one in listed] == [second["_id"], first["_id"]]
    found = novu("messages.list", {"transactionIds": [first["transactionId"], new_id("other")]})["data"]
    assert [one["_id"] for one in found] == [first["_id"]]
    deleted = novu("messages.deleteById", first["_id"])
    assert deleted["data"] == {"acknowledged": True, "status": "deleted"}
    assert novu("messages.deleteByTransactionId", second["transactionId"])["status"] == 204
    assert novu("subscribers.getNotificationsFeed", ann)["data"] == []
