"""Drives novu-py: by the calls, arguments and answers of api_driver.mjs, so that the same tests serve both SDKs."""

from __future__ import annotations

import datetime
import enum
import functools
import re
import sys
from typing import Any

from lines import answer_lines
from novu_py import Novu
from novu_py.models import NovuError
from novu_py.types import BaseModel
from novu_py.types.basemodel import Unset
from novu_py.utils import RetryConfig

# The names that the two SDKs have in common differ from those on the wire; all others are taken as the wire has them.
RENAMED = {"workflowId": "workflow_id", "inApp": "in_app"}
NO_RETRIES = RetryConfig("none", None, False)  # its default would repeat a 409 for an hour


def snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)


def renamed(body: Any) -> Any:
    """The body of a request, but for what is inside of a payload."""
    if isinstance(body, list):
        return [renamed(one) for one in body]
    if isinstance(body, dict):
        return {
            RENAMED.get(name, name): value if name in ("payload", "data") else renamed(value)
            for name, value in body.items()
        }
    return body


def camel(found: Any) -> Any:
    """A model as JSON, with the names that the other SDK gives to the fields; one that was not sent is null."""
    if isinstance(found, Unset):
        return None
    if isinstance(found, BaseModel):
        return {
            re.sub(r"(?<=[a-z])_([a-z])", lambda part: part[1].upper(), name.rstrip("_")): camel(getattr(found, name))
            for name in type(found).model_fields
        }
    if isinstance(found, list):
        return [camel(one) for one in found]
    if isinstance(found, dict):
        return {name: camel(value) for name, value in found.items()}
    if isinstance(found, enum.Enum):
        return found.value
    return found.isoformat() if isinstance(found, datetime.datetime) else found


# Each call: the method, and the name that its body has among the arguments.
CALLS = {
    "trigger": ("trigger", "trigger_event_request_dto"),
    "triggerBulk": ("trigger_bulk", "bulk_trigger_event_dto"),
    "triggerBroadcast": ("trigger_broadcast", "trigger_event_to_all_request_dto"),
    "cancel": ("cancel", None),
    "subscribers.create": ("subscribers.create", "create_subscriber_request_dto"),
    "subscribers.createBulk": ("subscribers.create_bulk", "bulk_subscriber_create_dto"),
    "subscribers.retrieve": ("subscribers.retrieve", None),
    "subscribers.patch": ("subscribers.patch", "patch_subscriber_request_dto"),
    "subscribers.delete": ("subscribers.delete", None),
    "subscribers.search": ("subscribers.search", "request"),
    "credentials.update": ("subscribers.credentials.update", "update_subscriber_channel_request_dto"),
    "credentials.append": ("subscribers.credentials.append", "update_subscriber_channel_request_dto"),
    "credentials.delete": ("subscribers.credentials.delete", None),
    "properties.updateOnlineFlag": (
        "subscribers.properties.update_online_flag", "update_subscriber_online_flag_request_dto"
    ),
    "preferences.list": ("subscribers.preferences.list", None),
    "preferences.update": ("subscribers.preferences.update", "patch_subscriber_preferences_dto"),
    "preferences.bulkUpdate": ("subscribers.preferences.bulk_update", "bulk_update_subscriber_preferences_dto"),
    "topics.list": ("subscribers.topics.list", "request"),
    "activity.list": ("notifications.list", "request"),
    "activity.retrieve": ("notifications.retrieve", None),
    "messages.list": ("messages.retrieve", "request"),
    "messages.delete": ("messages.delete", None),
    "messages.deleteByTransactionId": ("messages.delete_by_transaction_id", None),
    "feed.list": ("subscribers.notifications.feed", "request"),
    "feed.unseenCount": ("subscribers.notifications.unseen_count", None),
    "feed.markAs": ("subscribers.messages.mark_all_as", "message_mark_as_request_dto"),
    "feed.markAll": ("subscribers.messages.mark_all", "mark_all_message_as_request_dto"),
    "feed.action": ("subscribers.messages.update_as_seen", "request"),
    "inbox.list": ("subscribers.notifications.list", "request"),
    "inbox.count": ("subscribers.notifications.count", None),
    "inbox.markAsRead": ("subscribers.notifications.mark_as_read", None),
    "inbox.markAsUnread": ("subscribers.notifications.mark_as_unread", None),
    "inbox.archive": ("subscribers.notifications.archive", None),
    "inbox.unarchive": ("subscribers.notifications.unarchive", None),
    "inbox.completeAction": ("subscribers.notifications.complete_action", "request"),
    "inbox.revertAction": ("subscribers.notifications.revert_action", "request"),
    "inbox.delete": ("subscribers.notifications.delete", None),
    "inbox.markAsSeen": ("subscribers.notifications.mark_as_seen", "mark_subscriber_notifications_as_seen_dto"),
    "inbox.markAllAsRead": ("subscribers.notifications.mark_all_as_read", "update_all_subscriber_notifications_dto"),
    "inbox.archiveAll": ("subscribers.notifications.archive_all", "update_all_subscriber_notifications_dto"),
    "inbox.archiveAllRead": ("subscribers.notifications.archive_all_read", "update_all_subscriber_notifications_dto"),
    "inbox.deleteAll": ("subscribers.notifications.delete_all", "update_all_subscriber_notifications_dto"),
}  # fmt: skip


@functools.cache
def client(key: str) -> Novu:
    return Novu(secret_key=key, server_url=sys.argv[1], retry_config=NO_RETRIES)


def answer(call: str, args: dict[str, Any], key: str) -> Any:
    path, body_name = CALLS[call]
    act: Any = client(key)
    for part in path.split("."):
        act = getattr(act, part)
    body = renamed(args.pop("body", {}))
    names = {snake(name): value for name, value in args.items()}
    if body_name == "request":  # all in one; the one that has a body as well has it under this name
        given: dict[str, Any] = {"request": {**names, **({"mark_message_action_as_seen_dto": body} if body else {})}}
    else:
        given = {**names, **({body_name: body} if body_name else {})}
    found = act(**given)
    return camel(getattr(found, "result", None))


def explain(error: Exception) -> dict[str, Any]:
    """Also what the SDK read out of the error."""
    status = error.status_code if isinstance(error, NovuError) else None
    return {"name": type(error).__name__, "status": status, "message": str(error),
            "data": camel(getattr(error, "data", None))}  # fmt: skip


answer_lines(answer, explain)
