"""Drives novu, Novu's first SDK for Python: the class and its method, and the arguments by name.

An argument {"dto": NAME, …} stands for one of the SDK's own classes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import sys
from typing import Any

import requests
from lines import answer_lines

PLACES = {
    "EventApi": "novu.api.event", "SubscriberApi": "novu.api.subscriber", "MessageApi": "novu.api.message",
    "NotificationApi": "novu.api.notification",
    "InputEventDto": "novu.dto.event", "SubscriberDto": "novu.dto.subscriber",
}  # fmt: skip


def named(name: str) -> Any:
    return getattr(importlib.import_module(PLACES[name]), name)


def built(given: Any) -> Any:
    if isinstance(given, list):
        return [built(one) for one in given]
    if isinstance(given, dict) and "dto" in given:
        return named(given["dto"])(**{name: value for name, value in given.items() if name != "dto"})
    return given


def plain(found: Any) -> Any:
    """A result as JSON."""
    if dataclasses.is_dataclass(found):
        return {field.name: plain(getattr(found, field.name)) for field in dataclasses.fields(found)}
    if isinstance(found, (list, tuple)) or (
        isinstance(found, collections.abc.Iterator) and not isinstance(found, (str, dict))
    ):
        return [plain(one) for one in found]
    return found


def answer(call: str, args: dict[str, Any], key: str) -> Any:
    place, name = call.split(".")
    api = named(place)(sys.argv[1], key)
    return plain(getattr(api, name)(**{name: built(value) for name, value in args.items()}))


def explain(error: Exception) -> dict[str, Any]:
    response = error.response if isinstance(error, requests.RequestException) else None
    if response is None:
        return {"name": type(error).__name__, "status": None, "message": str(error), "data": None}
    return {"name": type(error).__name__, "status": response.status_code, "message": str(error),
            "data": response.json()}  # fmt: skip


answer_lines(answer, explain)
