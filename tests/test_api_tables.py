"""Novu's contract as tables, against one real daemon with keys: the rows of the facts on Novu (6.15, 6.16, 6.17, 6.20,
6.21) under their ids, the shape of every answer (5.1 to 5.5), and what no caller may get: a 5xx.

A row that `differs` says why digestd does something else on purpose; one of SKIPPED has nothing here that it could be
about. Every answer of every test goes through `Client`, which holds each error to the shape that the SDKs can read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import itertools
import json
import pathlib
import re
import sqlite3
import tomllib
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

import digestd
from conftest import Process, wait_for

FOLDER = pathlib.Path(__file__).parent / "data"
TRIGGER, SUBSCRIBERS = "/v1/events/trigger", "/v2/subscribers"
KEY = "the-right-key"

CONFIG = f'keys = ["{KEY}"]\n' + (FOLDER / "api.toml").read_text("utf-8")
LATER = """
[workflows.later]
[[workflows.later.steps]]
id = "mail"
type = "email"
sender = "out"
"""


def load(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"api_{name}.jsonl").read_text("utf-8").splitlines()]


SHAPES = {row["name"]: row["shape"] for row in load("shapes")}
CALLS, REFUSALS, PREFERENCES = load("calls"), load("refusals"), load("preferences")
ROWS: dict[str, str] = {}  # the rows that have a test, and why they differ

SKIPPED = {
    "G03": "digestd has no tenants",
    "G14": "digestd has no switch for it: a schema that the config has is always held to",
    "G17": "digestd has no attachments",
    **{f"G{number}": "digestd has no topics" for number in range(19, 26)},
    **{f"G{number}": "digestd has no contexts" for number in range(26, 31)},
    "G37": "digestd has no bridge URLs",
    "B28": "digestd has no contexts",
    "O04": "digestd has no route that is closed to keys",
}


def row(name: str, differs: str = "") -> Any:
    """Marks the test of a row, which gets the row's id as its own."""
    assert name not in ROWS
    ROWS[name] = differs
    return pytest.mark.parametrize("row_id", [name], indirect=True)


@pytest.fixture(autouse=True)
def row_id(request: pytest.FixtureRequest) -> str | None:
    """The row that a test is of."""
    return getattr(request, "param", None)


# -- a client, and what every answer has to be like --------------------------------------------------------------------


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]  # their names in lower case
    body: Any

    @property
    def data(self) -> Any:
        assert self.status < 300, self
        return self.body["data"]

    @property
    def messages(self) -> dict[str, list[str]]:
        """What a 422 says, by the field that it is about."""
        assert self.status == 422, self
        return {name: told["messages"] for name, told in self.body["errors"].items()}


class Client:
    """Calls the daemon as an SDK does, with its key, and looks at what every answer must be like."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __call__(self, method: str, path: str, body: Any = None, key: str | None = KEY, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        head = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            head.setdefault("Authorization", f"ApiKey {key}")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=20)) as line:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have heard enough
                line.request(method, path, data, {"Content-Type": "application/json", **head})
            answer = line.getresponse()
            text = answer.read()
            reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, None)
        if reply.headers.get("content-type", "").startswith("application/json"):
            reply = reply._replace(body=json.loads(text))
        else:
            assert not text or path.startswith("/u/"), f"{method} {path}: the SDKs refuse {reply.headers}"
        assert_is_no_failure(reply, method, path)
        return reply

    def get(self, path: str, **query: Any) -> Reply:
        return self("GET", path + ("?" + urllib.parse.urlencode(query, doseq=True) if query else ""))

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self("POST", path, body, **headers)

    def patch(self, path: str, body: Any, **headers: str) -> Reply:
        return self("PATCH", path, body, **headers)

    def delete(self, path: str) -> Reply:
        return self("DELETE", path)

    def trigger(self, name: str, to: Any, payload: Any = None, **more: Any) -> str:
        """Its transaction id."""
        reply = self.post(TRIGGER, {"name": name, "to": to, "payload": payload or {}, **more})
        assert (reply.status, reply.data["status"]) == (201, "processed"), reply
        return str(reply.data["transactionId"])

    def rows(self, sql: str) -> list[Any]:
        return self.process.query(sql)


def assert_is_no_failure(reply: Reply, method: str, path: str) -> None:
    """No call makes the server fail, and each refusal can be read by the SDKs and by people."""
    assert reply.status < 500, f"{method} {path}: {reply}"
    if reply.status == 204:
        assert "content-type" not in reply.headers and reply.body is None
    if reply.status < 400 or path.startswith("/u/"):
        return
    is_of_trigger = path.startswith(TRIGGER) and reply.status == 400
    found = faults(reply.body, "@trigger error" if is_of_trigger else "@error")
    if reply.status == 422:
        found += [fault for told in reply.body["errors"].values() for fault in faults(told, "@constraint")]
        assert reply.body["errors"]
    assert not found, f"{method} {path}: {found} in {reply.body}"
    assert reply.body["statusCode"] == reply.status and reply.body["path"] == path.partition("?")[0]
    assert len(reply.body["message"]) > 3 and "Traceback" not in reply.body["message"]


def is_time(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", value) is not None


KINDS: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "null": lambda value: value is None,
    "text": lambda value: isinstance(value, str),
    "time": is_time,
    "bool": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
}


def faults(value: Any, shape: Any, where: str = "it") -> list[str]:
    """Where a value is not of a shape: "@name" of another one, "kind|kind", "=one|of|these", a list (with "*" it may be
    empty), or an object, whose names that end in "?" may be absent. More than the shape names is never a fault."""
    if isinstance(shape, list):
        if not isinstance(value, list) or not (value or "*" in shape):
            return [f"{where} is not a list with something in it"]
        return [fault for place, one in enumerate(value) for fault in faults(one, shape[0], f"{where}[{place}]")]
    if isinstance(shape, dict):
        return _faults_of_object(value, shape, where)
    if shape.startswith("@"):
        return faults(value, SHAPES[shape[1:]], where)
    if shape.startswith("="):
        return [] if value in shape[1:].split("|") else [f"{where} is {value!r}, which is not in {shape[1:]}"]
    return [] if any(KINDS[kind](value) for kind in shape.split("|")) else [f"{where} is {value!r}, not {shape}"]


def _faults_of_object(value: Any, shape: Mapping[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} is not an object"]
    found = []
    for name, inner in shape.items():
        bare = name.removesuffix("?")
        if bare in value:
            found += faults(value[bare], inner, f"{where}.{bare}")
        elif name == bare:
            found.append(f"{where} has no {name}")
    return found


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    process = Process(tmp_path_factory.mktemp("tables"), CONFIG)
    yield Client(process)
    if process.process.poll() is None:
        process.kill()


# -- what tests begin with ---------------------------------------------------------------------------------------------


def new_id() -> str:
    return f"s-{uuid.uuid4().hex[:12]}"


def path_of(subscriber_id: str, rest: str = "") -> str:
    return f"{SUBSCRIBERS}/{urllib.parse.quote(subscriber_id, safe='')}{rest}"


def make(api: Client, **fields: Any) -> str:
    """A new subscriber."""
    who = new_id()
    assert api.post(SUBSCRIBERS, {"subscriberId": who, **fields}).status == 201
    return who


def end_of(api: Client, transaction_id: str) -> None:
    """Wait until the run of a transaction is over."""
    text = f"e.transaction_id = '{transaction_id}' AND r.state <> 'active'"
    sql = f"SELECT 1 FROM events e JOIN runs r ON r.event_id = e.id WHERE {text}"
    wait_for(lambda: api.rows(sql), what=f"the end of {transaction_id}")


def deliver(api: Client, workflow: str, who: str, **payload: Any) -> list[str]:
    """Trigger a workflow: the channels by which something came."""
    transaction_id = api.trigger(workflow, who, payload)
    end_of(api, transaction_id)
    return sorted(message["channel"] for message in api.get("/v1/messages", transactionId=transaction_id).body["data"])


def channels(api: Client, who: str, workflow: str = "") -> dict[str, bool]:
    """What a subscriber is shown to get of a workflow, or of all."""
    found = api.get(path_of(who, "/preferences"), criticality="all").data
    if not workflow:
        return dict(found["global"]["channels"])
    [one] = [one for one in found["workflows"] if one["workflow"]["identifier"] == workflow]
    return dict(one["channels"])


def choose(api: Client, who: str, workflow: str = "", **wanted: bool) -> Reply:
    body = {"channels": wanted, **({"workflowId": workflow} if workflow else {})}
    return api.patch(path_of(who, "/preferences"), body)


@contextlib.contextmanager
def opened(api: Client) -> Iterator[sqlite3.Connection]:
    """The database, as another program has it."""
    with contextlib.closing(sqlite3.connect(api.process.database, timeout=10, isolation_level=None)) as connection:
        yield connection


class Scene:
    """What the braces in a row stand for, each made when a row first asks for it."""

    def __init__(self, api: Client) -> None:
        self.api = api
        self.made: dict[str, str] = {}

    def fill(self, value: Any) -> Any:
        """A path or a body, with its braces filled."""
        text = json.dumps(value)
        return json.loads(re.sub(r"\{([a-z]+)\}", lambda found: self.get(found[1]), text))

    def get(self, name: str) -> str:
        if name not in self.made:
            self.made[name] = getattr(self, f"make_{name}")()
        return self.made[name]

    def make_new(self) -> str:
        """An id of nobody."""
        return new_id()

    def make_who(self) -> str:
        """A subscriber."""
        return make(self.api, firstName="Ada", lastName="L", email="ada@example.org", phone="+31612345678")

    def make_reader(self) -> str:
        """A subscriber who got something in each channel."""
        transaction_id = self.api.trigger("news", self.get("who"), {"text": "hi"})
        end_of(self.api, transaction_id)
        self.made["transaction"] = transaction_id
        return self.get("who")

    def make_transaction(self) -> str:
        self.get("reader")
        return self.made["transaction"]

    def make_message(self) -> str:
        """The id of the reader's message in the feed."""
        return str(self.api.get(f"/v1/subscribers/{self.get('reader')}/notifications/feed").body["data"][0]["_id"])

    def make_notification(self) -> str:
        return notifications(self.api, transactionId=self.get("transaction"))[0]["_id"]

    def make_waiting(self) -> str:
        """The transaction id of an event in a window."""
        return self.api.trigger("comments", self.get("who"), {"post": 1})

    def make_digested(self) -> str:
        """The notification of an event that came into another's window."""
        self.get("waiting")
        transaction_id = self.api.trigger("comments", self.get("who"), {"post": 1})
        return notifications(self.api, transactionId=transaction_id)[0]["_id"]


@pytest.fixture
def scene(api: Client) -> Scene:
    return Scene(api)


def notifications(api: Client, **query: Any) -> list[dict[str, Any]]:
    return list(api.get("/v1/notifications", **query).body["data"])


def params(rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [pytest.param(one, id=one["id"]) for one in rows]


# -- the tables as a whole ---------------------------------------------------------------------------------------------


def numbers(letter: str, last: int) -> set[str]:
    return {f"{letter}{number:02d}" for number in range(1, last + 1)}


def test_every_row_has_a_test_or_a_reason_why_not():
    wanted = numbers("G", 37) | numbers("M", 11) | numbers("B", 29) | numbers("I", 8) | numbers("O", 5)
    with_test = [*ROWS, *(one["id"] for one in PREFERENCES)]
    assert len(with_test) == len(set(with_test)) and not set(with_test) & set(SKIPPED)
    assert set(with_test) | set(SKIPPED) == wanted


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in SKIPPED])
def test_a_row_that_digestd_has_nothing_for(name):
    pytest.skip(SKIPPED[name])


def test_no_two_rows_of_a_table_have_one_name():
    for table in (CALLS, REFUSALS, PREFERENCES):
        names = [one["id"] for one in table]
        assert len(names) == len(set(names))


def template(path: str) -> str:
    """A path without what it names, to compare routes by."""
    return re.sub(r"\{[a-z]+\}", "*", path.partition("?")[0])


ROUTES = list({(one["method"], template(one["path"])): one for one in CALLS}.values())
OTHERS = {"_alertmanager", "_show_unsubscribe", "_unsubscribe"}  # digestd's own, which have their tests elsewhere


def test_every_route_of_the_contract_has_a_row():
    """But for those that only Novu's first clients know."""
    with_row = {digestd.find_route(one["method"], one["path"].partition("?")[0])[0] for one in ROUTES}
    without = {name for ways in digestd._ROUTES.values() for name in ways.values()} - with_row
    assert {name for name in without if "old" not in name} == OTHERS | {"_page_subscribers"}


# -- G: triggers -------------------------------------------------------------------------------------------------------


@row("G01")
def test_a_good_trigger_is_acknowledged_as_processed(api):
    who = new_id()
    data = api.post(TRIGGER, {"name": "news", "to": who, "payload": {"text": "hi"}}).data
    assert (data["acknowledged"], data["status"]) == (True, "processed") and data["transactionId"]


@row("G02")
def test_an_unknown_workflow_is_422_in_words_that_the_sdk_can_read(api):
    reply = api.post(TRIGGER, {"name": "nothing", "to": new_id(), "payload": {}})
    assert reply.messages["general"] == ["workflow_not_found"] and reply.body["message"] == "workflow_not_found"


EMPTY = [{"subscriberId": ""}, [{"subscriberId": "ok"}, {"subscriberId": ""}], "", ["ok", ""], []]


@row("G04")
def test_an_empty_recipient_is_422_and_nobody_is_made(api):
    found = [api.post(TRIGGER, {"name": "news", "to": to, "payload": {}}) for to in EMPTY]
    assert [reply.status for reply in found] == [422] * len(EMPTY)
    assert api.get(path_of("ok")).status == 404


@row("G05")
def test_one_empty_recipient_refuses_a_whole_bulk(api):
    good = new_id()
    events = [{"name": "news", "to": {"subscriberId": name}, "payload": {}} for name in (good, "")]
    assert api.post(f"{TRIGGER}/bulk", {"events": events}).status == 422
    assert api.get(path_of(good)).status == 404


@row("G06")
def test_a_bulk_is_answered_in_its_order_with_its_ids(api):
    ids = [f"t-{new_id()}" for _ in range(3)]
    events = [{"name": "news", "to": new_id(), "payload": {}, "transactionId": one} for one in ids]
    reply = api.post(f"{TRIGGER}/bulk", {"events": events})
    assert reply.status == 201 and [one["transactionId"] for one in reply.data] == ids


@row("G07")
def test_a_bulk_of_101_is_422_under_the_name_events(api):
    who = new_id()
    reply = api.post(f"{TRIGGER}/bulk", {"events": [{"name": "news", "to": who, "payload": {}}] * 101})
    assert reply.messages["events"] and api.get(path_of(who)).status == 404


@row("G08")
def test_a_bad_event_of_a_bulk_is_an_error_in_its_place(api):
    events = [{"name": name, "to": new_id(), "payload": {}} for name in ("nothing", "news", "")]
    data = api.post(f"{TRIGGER}/bulk", {"events": events}).data
    assert [one["status"] for one in data] == ["error", "processed", "error"]
    assert data[0]["error"] == ["workflow_not_found"] and data[2]["error"]


FIELDS = {
    "firstName": "Ada", "lastName": "Lovelace", "email": "ada@example.org", "phone": "+31612345678",
    "avatar": "https://example.org/a.png", "locale": "en_GB", "timezone": "Europe/London", "data": {"plan": "pro"},
}  # fmt: skip


def shown(api: Client, who: str) -> dict[str, Any]:
    """The fields of a subscriber that a caller can set."""
    found = api.get(path_of(who)).data
    return {name: found.get(name) for name in FIELDS}


@row("G09")
def test_an_unknown_recipient_is_made_with_its_fields(api):
    who = new_id()
    api.trigger("news", {"subscriberId": who, **FIELDS})
    assert shown(api, who) == FIELDS


@row("G10")
def test_a_known_recipient_is_updated_and_what_is_not_sent_stays(api):
    who = make(api, **FIELDS)
    api.trigger("news", {"subscriberId": who, "lastName": "King", "phone": None})
    assert shown(api, who) == {**FIELDS, "lastName": "King", "phone": None}


@row("G11")
def test_five_triggers_at_once_make_one_subscriber(api):
    who = new_id()
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda n: api.trigger("news", {"subscriberId": who, "firstName": f"n{n}"}), range(5)))
    found = api.get(SUBSCRIBERS, subscriberId=who).body
    assert (len(found["data"]), found["totalCount"]) == (1, 1)


def strict(api: Client, **payload: Any) -> Reply:
    return api.post(TRIGGER, {"name": "strict", "to": new_id(), "payload": payload})


@row("G12")
def test_a_payload_without_a_required_field_is_400_and_names_it(api):
    reply = strict(api, size="L")
    assert (reply.status, reply.body["type"]) == (400, "PAYLOAD_VALIDATION_ERROR")
    assert len(reply.body["errors"]) == 1
    assert "name" in reply.body["errors"][0]["field"] + reply.body["errors"][0]["message"]


@row("G13")
def test_a_payload_that_is_as_the_schema_has_it_is_taken(api):
    assert strict(api, name="a", size="L").data["acknowledged"] is True


@row("G15")
def test_defaults_of_a_schema_are_filled_in_and_given_values_stay(api):
    transaction_id = strict(api, name="a", home={"city": "Rome"}).data["transactionId"]
    [found] = notifications(api, transactionId=transaction_id)
    assert found["payload"] == {"name": "a", "size": "M", "home": {"city": "Rome", "land": "NL"}}


@row("G16")
def test_a_schema_may_have_a_keyword_that_nobody_knows(api):
    assert "x-colour" in CONFIG and strict(api, name="a").status == 201


@row("G18", differs="there are no batches: all events of a call are written in one transaction")
def test_several_recipients_get_an_event_each(api):
    people = [new_id() for _ in range(3)]
    transaction_id = api.trigger("news", [people[0], {"subscriberId": people[1]}, people[2]])
    found = notifications(api, transactionId=transaction_id)
    assert sorted(one["to"]["subscriberId"] for one in found) == sorted(people)


@row("G31")
def test_a_broadcast_reaches_every_subscriber(api):
    people = [make(api) for _ in range(3)]
    data = api.post(f"{TRIGGER}/broadcast", {"name": "everybody", "payload": {"text": "hi"}}).data
    sql = f"SELECT subscriber_id FROM events WHERE transaction_id = '{data['transactionId']}'"
    reached = [name for (name,) in api.rows(sql)]
    assert set(people) <= set(reached) and len(reached) == len(set(reached))
    assert api.rows("SELECT count(*) FROM subscribers") == [(len(reached),)]


@row("G32", differs="a step has no switch: its condition `when` says no")
def test_a_step_that_is_off_does_not_run_and_the_next_one_does(api):
    assert deliver(api, "halved", new_id()) == ["chat"]


@row("G33")
def test_a_channel_that_was_turned_off_is_missing_from_the_second_trigger(api):
    who = make(api, email="ada@example.org")
    assert deliver(api, "news", who) == ["chat", "email", "in_app"]
    assert choose(api, who, "news", chat=False).status == 200
    assert deliver(api, "news", who) == ["email", "in_app"]
    newest = notifications(api, subscriberIds=who)[0]
    [chat] = [job for job in newest["jobs"] if job["type"] == "chat"]
    assert "the subscriber turned chat off" in json.dumps(chat["executionDetails"])


@row("G34")
def test_a_critical_workflow_is_sent_whatever_its_reader_turned_off(api):
    who = make(api, email="ada@example.org")
    choose(api, who, email=False)
    assert deliver(api, "alarm", who) == ["email"]


@row("G35")
def test_a_channel_that_is_off_in_the_config_can_be_turned_on(api):
    who = make(api, email="ada@example.org")
    assert deliver(api, "quiet", who) == ["chat"]
    choose(api, who, "quiet", email=True)
    assert deliver(api, "quiet", who) == ["chat", "email"]


@row("G36")
def test_a_workflow_with_all_channels_off_sends_nothing(api):
    assert deliver(api, "silent", new_id()) == []


# -- M: which choice wins ----------------------------------------------------------------------------------------------


def choose_in_database(api: Client, who: str, workflow: str, email: bool) -> None:
    """A choice that no call would take, as one from a time when the workflow was not critical."""
    values = (who, workflow, "email", int(email), 0)
    sql = "INSERT INTO preferences (subscriber_id, workflow, channel, enabled, updated_at) VALUES (?, ?, ?, ?, ?)"
    with opened(api) as connection:
        connection.execute(sql, values)


@pytest.mark.parametrize("case", params(PREFERENCES))
def test_the_choice_that_wins_decides_what_is_shown_and_what_is_sent(api, case):
    for one in (case, *case.get("also", ())):
        who = make(api, email="ada@example.org")
        for level, workflow in (("global", ""), ("own", case["workflow"])):
            if level in one and choose(api, who, workflow, email=one[level]).status != 200:
                choose_in_database(api, who, workflow, one[level])
        assert channels(api, who, case["workflow"])["email"] is case["email"]
        assert ("email" in deliver(api, case["workflow"], who)) is case["email"]


# -- B: subscribers ----------------------------------------------------------------------------------------------------


@row("B01")
def test_what_a_subscriber_was_made_with_is_read_back(api):
    who = new_id()
    made = api.post(SUBSCRIBERS, {"subscriberId": who, **FIELDS})
    assert made.status == 201 and made.data["subscriberId"] == who
    assert shown(api, who) == FIELDS == {name: made.data[name] for name in FIELDS}


@row("B02")
def test_a_subscriber_made_again_is_updated_and_stays_one(api):
    who = make(api, **FIELDS)
    first = api.get(path_of(who)).data
    again = api.post(SUBSCRIBERS, {"subscriberId": who, "firstName": "Augusta", "data": {"plan": "free"}})
    assert again.status == 201 and again.data["_id"] == first["_id"] and again.data["createdAt"] == first["createdAt"]
    assert shown(api, who) == {**FIELDS, "firstName": "Augusta", "data": {"plan": "free"}}
    assert len(api.get(SUBSCRIBERS, subscriberId=who).body["data"]) == 1


@row("B03")
def test_a_subscriber_can_be_made_with_names_of_null(api):
    who = make(api, firstName=None, lastName=None)
    assert not shown(api, who)["firstName"] and not shown(api, who)["lastName"]


@row("B04")
def test_an_empty_name_phone_or_avatar_is_kept_as_it_is(api):
    empty = {"firstName": "", "lastName": "", "phone": "", "avatar": ""}
    assert {name: shown(api, make(api, **empty))[name] for name in empty} == empty


CHECKED = {
    "email": ["", "nobody", "a@b@c", "@example.org"],
    "locale": ["", "not a locale!", "123"],
    "timezone": ["", "Mars/Phobos", "GMT+25"],
}


def refused(api: Client, given: Callable[[str], bool], ask: Callable[[dict[str, Any]], Reply]) -> int:
    """How many bad values of the three checked fields were refused by the field's name."""
    found = [(name, ask({name: value})) for name, values in CHECKED.items() for value in values if given(value)]
    assert all(reply.messages[name] for name, reply in found)
    return len(found)


@row("B05")
def test_an_empty_mail_address_locale_or_zone_is_422_by_its_name(api):
    who = new_id()
    ask = lambda body: api.post(SUBSCRIBERS, {"subscriberId": who, **body})  # noqa: E731
    assert refused(api, lambda value: not value, ask) == 3 and api.get(path_of(who)).status == 404


@row("B06")
def test_a_mail_address_locale_and_zone_of_null_are_stored_as_null(api):
    who = make(api, email=None, locale=None, timezone=None)
    found = api.get(path_of(who)).data
    assert (found["email"], found["locale"], found["timezone"]) == (None, None, None)


@row("B07")
def test_a_bad_mail_address_locale_or_zone_is_422_by_its_name(api):
    who = new_id()
    ask = lambda body: api.post(SUBSCRIBERS, {"subscriberId": who, **body})  # noqa: E731
    assert refused(api, bool, ask) == 7 and api.get(path_of(who)).status == 404


@row("B08")
def test_one_that_exists_and_may_not_is_409_with_the_subscriber(api):
    """The SDK reads this 409 as the subscriber itself, people and other clients as an error: it is both."""
    who = make(api, **FIELDS)
    reply = api.post(f"{SUBSCRIBERS}?failIfExists=true", {"subscriberId": who, "firstName": "Eve"})
    assert reply.status == 409 and faults(reply.body, "@error") == [] and who in reply.body["message"]
    assert shown(api, who) == FIELDS
    assert faults(reply.body, "@subscriber") == [] and reply.body["subscriberId"] == who


@row("B09")
def test_one_that_exists_and_may_is_updated(api):
    who = make(api, **FIELDS)
    reply = api.post(f"{SUBSCRIBERS}?failIfExists=false", {"subscriberId": who, "firstName": "Eve"})
    assert reply.status == 201 and shown(api, who) == {**FIELDS, "firstName": "Eve"}


@row("B10")
def test_data_of_null_is_taken(api):
    assert shown(api, make(api, data=None))["data"] is None


@row("B11")
def test_a_patch_of_two_fields_changes_these_alone(api):
    who = make(api, **FIELDS)
    reply = api.patch(path_of(who), {"firstName": "Augusta", "lastName": "King"})
    wanted = {**FIELDS, "firstName": "Augusta", "lastName": "King"}
    assert {name: reply.data[name] for name in FIELDS} == wanted == shown(api, who)


@row("B12")
def test_a_patch_of_nobody_is_404_and_makes_nobody(api):
    who = new_id()
    assert api.patch(path_of(who), {"firstName": "Ada"}).status == 404 == api.get(path_of(who)).status


@row("B13")
def test_a_patch_of_nothing_changes_nothing(api):
    who = make(api, **FIELDS)
    assert api.patch(path_of(who), {}).status == 200 and shown(api, who) == FIELDS


@row("B14")
def test_a_patch_clears_names_with_null_and_empties_them(api):
    who = make(api, **FIELDS)
    simple = ("firstName", "lastName", "phone", "avatar")
    for value in (None, ""):
        assert api.patch(path_of(who), dict.fromkeys(simple, value)).status == 200
        assert [shown(api, who)[name] for name in simple] == [value] * 4


@row("B15")
def test_a_patch_clears_the_checked_fields_and_data_with_null(api):
    who = make(api, **FIELDS)
    cleared = dict.fromkeys(("email", "locale", "timezone", "data"))
    assert api.patch(path_of(who), cleared).status == 200 and shown(api, who) == {**FIELDS, **cleared}


@row("B16")
def test_a_patch_with_an_empty_or_bad_checked_field_is_422_by_its_name(api):
    who = make(api, **FIELDS)
    assert refused(api, lambda value: True, lambda body: api.patch(path_of(who), {"firstName": "Eve", **body})) == 10
    assert shown(api, who) == FIELDS


@row("B17")
def test_a_patch_cannot_change_the_id(api):
    who, other = make(api), new_id()
    reply = api.patch(path_of(who), {"subscriberId": other, "firstName": "Ada"})
    assert (reply.data["subscriberId"], reply.data["firstName"]) == (who, "Ada")
    assert api.get(path_of(other)).status == 404


@row("B18")
def test_nobody_is_404(api):
    who = new_id()
    reply = api.get(path_of(who))
    assert reply.status == 404 and who in reply.body["message"]


@row("B19", differs="digestd has no topics, whose subscriptions would go too")
def test_with_a_subscriber_go_messages_and_preferences(api):
    who = make(api, email="ada@example.org")
    deliver(api, "news", who)
    choose(api, who, email=False)
    waiting = api.trigger("comments", who, {"post": 1})
    assert api.delete(path_of(who)).data == {"acknowledged": True, "status": "deleted"}
    for rest in ("", "/preferences", "/notifications"):
        assert api.get(path_of(who, rest)).status == 404
    assert api.get("/v1/messages", subscriberId=who).body["data"] == []
    assert api.delete(f"{TRIGGER}/{waiting}").data is False  # what waited is discarded
    api.post(SUBSCRIBERS, {"subscriberId": who})  # and one who comes back begins with nothing of it
    assert channels(api, who)["email"] is True
    assert api.get(path_of(who, "/notifications")).body["data"] == []


# -- B: preferences ----------------------------------------------------------------------------------------------------


def workflows(api: Client, critical: bool | None = None) -> list[str]:
    """The workflows of the config as it is now."""
    found = tomllib.loads(api.process.config.read_text())["workflows"]
    return sorted(name for name, one in found.items() if critical in (None, one.get("critical", False)))


def listed(api: Client, who: str, **query: str) -> list[str]:
    found = api.get(path_of(who, "/preferences"), **query).data["workflows"]
    return sorted(one["workflow"]["identifier"] for one in found)


@row("B20")
def test_without_a_choice_all_is_on_and_each_workflow_is_listed(api):
    who = make(api)
    found = api.get(path_of(who, "/preferences")).data
    assert found["global"]["enabled"] is True and set(found["global"]["channels"].values()) == {True}
    assert listed(api, who, criticality="all") == workflows(api)
    [news] = [one for one in found["workflows"] if one["workflow"]["identifier"] == "news"]
    assert news["enabled"] is True and news["channels"] == {"in_app": True, "email": True, "chat": True}
    assert (news["workflow"]["name"], news["overrides"]) == ("News of the day", [])


@row("B21")
def test_preferences_of_nobody_are_404(api):
    assert api.get(path_of(new_id(), "/preferences")).status == 404


@row("B22")
def test_a_workflow_that_comes_later_follows_the_global_choice(api):
    who = make(api, email="ada@example.org")
    choose(api, who, email=False)
    api.process.config.write_text(api.process.config.read_text() + LATER)
    wait_for(lambda: "later" in listed(api, who), what="the new workflow")
    assert channels(api, who, "later") == {"email": False} and deliver(api, "later", who) == []


@row("B23")
def test_a_choice_for_a_workflow_is_of_that_one_alone(api):
    who = make(api)
    data = choose(api, who, "news", email=False).data
    after = {one["workflow"]["identifier"]: one["channels"].get("email") for one in data["workflows"]}
    assert (after["news"], after["loud"], data["global"]["channels"]["email"]) == (False, True, True)
    assert channels(api, who, "news") == {"in_app": True, "email": False, "chat": True}


@row("B24")
def test_a_global_choice_is_followed_by_each_workflow_without_one_of_its_own(api):
    who = make(api)
    choose(api, who, "news", email=True)
    data = choose(api, who, email=False).data
    after = {one["workflow"]["identifier"]: one["channels"].get("email") for one in data["workflows"]}
    assert (after["news"], after["loud"], data["global"]["channels"]["email"]) == (True, False, False)


def choose_many(api: Client, who: str, names: Sequence[str]) -> Reply:
    wanted = [{"workflowId": name, "channels": {"email": False}} for name in names]
    return api.patch(path_of(who, "/preferences/bulk"), {"preferences": wanted})


@row("B25")
def test_three_choices_at_once_have_three_answers(api):
    who, names = make(api), ["news", "quiet", "loud"]
    data = choose_many(api, who, names).data
    assert [one["workflow"]["identifier"] for one in data] == names
    assert [one["channels"]["email"] for one in data] == [channels(api, who, name)["email"] for name in names]
    assert [one["channels"]["email"] for one in data] == [False] * 3


@row("B26")
def test_101_choices_at_once_are_422(api):
    who = make(api)
    assert choose_many(api, who, ["news"] * 101).messages["preferences"]
    assert channels(api, who, "news")["email"] is True
    assert choose_many(api, who, ["news"] * 100).status == 200


@row("B27")
def test_choices_for_an_unknown_workflow_or_subscriber_are_404_and_none_is_kept(api):
    who = make(api)
    assert choose_many(api, who, ["news", "nothing"]).status == 404
    assert channels(api, who, "news")["email"] is True
    assert choose_many(api, new_id(), ["news"]).status == 404


@row("B29", differs="digestd has no topics: nobody is subscribed to one")
def test_subscriptions_are_none_and_those_of_nobody_are_404(api):
    who, rest = make(api), "/subscriptions"
    empty = {"data": [], "next": None, "previous": None, "totalCount": 0, "totalCountCapped": False}
    for query in ({}, {"key": "news"}, {"limit": "2", "orderBy": "_id", "orderDirection": "ASC"}):
        assert api.get(path_of(who, rest), **query).body == empty
    assert api.get(path_of(new_id(), rest)).status == 404


# -- I: calls that are sent again --------------------------------------------------------------------------------------


def count_events(api: Client, who: str) -> int:
    return int(api.rows(f"SELECT count(*) FROM events WHERE subscriber_id = '{who}'")[0][0])


def news_for(who: str, text: str = "hi") -> dict[str, Any]:
    return {"name": "news", "to": who, "payload": {"text": text}}


@row("I01")
def test_the_same_key_and_body_is_one_event_and_has_the_first_answer(api):
    who, key = new_id(), new_id()
    first, again = (api.post(TRIGGER, news_for(who), Idempotency_Key=key) for _ in range(2))
    assert first.status == again.status == 201 and first.body == again.body and count_events(api, who) == 1
    assert first.headers["idempotency-key"] == again.headers["idempotency-key"] == key
    assert "idempotency-replay" not in first.headers and again.headers["idempotency-replay"] == "true"


@row("I02")
def test_the_same_key_while_the_first_is_under_way_is_409_and_when_to_come_back(api):
    who, key = new_id(), new_id()
    with concurrent.futures.ThreadPoolExecutor(2) as pool, opened(api) as other:
        other.execute("BEGIN IMMEDIATE")  # so that the first one has to wait
        both = [pool.submit(api.post, TRIGGER, news_for(who), Idempotency_Key=key) for _ in range(2)]
        early = next(concurrent.futures.as_completed(both, 4)).result()
        other.execute("ROLLBACK")
        late = [one.result() for one in both if one.result() is not early]
    assert (early.status, early.headers["retry-after"], early.headers["idempotency-key"]) == (409, "1", key)
    assert [reply.status for reply in late] == [201] and count_events(api, who) == 1


@row("I03")
def test_the_same_key_with_another_body_is_422(api):
    who, key = new_id(), new_id()
    api.post(TRIGGER, news_for(who), Idempotency_Key=key)
    reply = api.post(TRIGGER, news_for(who, "ho"), Idempotency_Key=key)
    assert reply.status == 422 and reply.messages and count_events(api, who) == 1


@row("I04")
def test_another_key_is_another_event(api):
    who = new_id()
    first, other = (api.post(TRIGGER, news_for(who), Idempotency_Key=new_id()) for _ in range(2))
    assert first.data["transactionId"] != other.data["transactionId"] and count_events(api, who) == 2


@row("I05")
def test_a_get_is_answered_anew_whatever_its_key(api):
    who, key = make(api, firstName="Ada"), new_id()
    assert api("GET", path_of(who), Idempotency_Key=key).data["firstName"] == "Ada"
    api.patch(path_of(who), {"firstName": "Eve"})
    again = api("GET", path_of(who), Idempotency_Key=key)
    assert again.data["firstName"] == "Eve" and "idempotency-replay" not in again.headers


@row("I06")
def test_an_error_is_remembered_as_well(api):
    for _ in range(20):  # the answer has a time in it, which may be another ms only now and then
        who, key = new_id(), new_id()
        first = api.patch(path_of(who), {"firstName": "Ada"}, Idempotency_Key=key)
        api.post(SUBSCRIBERS, {"subscriberId": who})
        again = api.patch(path_of(who), {"firstName": "Ada"}, Idempotency_Key=key)
        assert first.status == again.status == 404 and first.body == again.body
        assert again.headers["idempotency-replay"] == "true" and shown(api, who)["firstName"] is None


@row("I07")
def test_a_key_of_more_than_255_characters_is_400(api):
    who = new_id()
    assert api.post(TRIGGER, news_for(who), Idempotency_Key="k" * 256).status == 400
    assert api.post(TRIGGER, news_for(who), Idempotency_Key=who.ljust(255, "k")).status == 201
    assert count_events(api, who) == 1


@row("I08")
def test_a_caller_without_a_key_to_the_api_gets_no_idempotency_key_back(api):
    reply = api("POST", TRIGGER, news_for(new_id()), key=None, Idempotency_Key=new_id())
    assert reply.status == 401 and "idempotency-key" not in reply.headers


# -- O: who may call ---------------------------------------------------------------------------------------------------


@row("O01")
def test_no_authorization_is_401(api):
    assert api("GET", SUBSCRIBERS, key=None).status == 401


@row("O02")
def test_a_scheme_without_a_key_is_401(api):
    assert [api("GET", SUBSCRIBERS, Authorization=given).status for given in ("ApiKey", "ApiKey ")] == [401, 401]


@row("O03")
def test_a_wrong_key_is_401(api):
    assert [api("GET", SUBSCRIBERS, key=key).status for key in ("wrong", KEY[:-1], KEY.upper())] == [401] * 3


@row("O05")
def test_the_right_key_opens(api):
    assert api("GET", SUBSCRIBERS).status == 200


def test_a_remembered_answer_outlives_a_restart(api):
    who, key = new_id(), new_id()
    first = api.post(TRIGGER, news_for(who), Idempotency_Key=key)
    assert api.process.stop() == 0
    api.process.start()
    again = api.post(TRIGGER, news_for(who), Idempotency_Key=key)
    assert again.body == first.body and again.headers["idempotency-replay"] == "true" and count_events(api, who) == 1


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_put_or_delete_is_done_anew_whatever_its_key(api, method):
    who, key = make(api), new_id()
    path, body = (path_of(who), None) if method == "DELETE" else (f"/v1/subscribers/{who}/credentials", CREDENTIALS)
    api(method, path, body, Idempotency_Key=key)
    api.post(SUBSCRIBERS, {"subscriberId": who})
    again = api(method, path, body, Idempotency_Key=key)
    assert again.status == 200 and "idempotency-replay" not in again.headers


CREDENTIALS = {"providerId": "slack", "credentials": {"webhookUrl": "https://example.org/hook"}}


# -- shapes ------------------------------------------------------------------------------------------------------------


def send(scene: Scene, case: Mapping[str, Any], **more: Any) -> Reply:
    """The call of a row, its braces filled."""
    path, body = scene.fill([case["path"], case.get("body")])
    return scene.api(case["method"], path, {**body, **more} if isinstance(body, dict) else body)


def statuses(case: Mapping[str, Any]) -> list[int]:
    return [case["status"]] if isinstance(case["status"], int) else list(case["status"])


@pytest.mark.parametrize("case", params(CALLS))
def test_a_call_is_answered_with_the_status_and_the_fields_that_the_sdks_need(scene, case):
    reply = send(scene, case)
    assert reply.status in statuses(case), reply
    if "answer" in case:
        assert faults(reply.body, case["answer"]) == []
        if isinstance(case["answer"], dict) and set(case["answer"]) == {"data"}:
            assert set(reply.body) == {"data"}  # or the SDKs do not unwrap it


@pytest.mark.parametrize("case", params([one for one in CALLS if "body" in one]))
def test_a_field_that_nobody_knows_yet_changes_nothing(scene, case):
    assert send(scene, case, fieldOfTomorrow={"a": [1]}, _id="x", contextKeys=[]).status in statuses(case)


@pytest.mark.parametrize("case", params(REFUSALS))
def test_a_call_that_is_wrong_is_refused_and_names_what_is(scene, case):
    reply = send(scene, case)
    assert reply.status in statuses(case), reply
    if "field" in case:
        assert case["field"] in json.dumps([reply.body["message"], reply.body.get("errors", "")])


OF_ONE = [one for one in ROUTES if re.search(r"/subscribers/\{(who|reader)\}", one["path"])]


@pytest.mark.parametrize("case", params(OF_ONE))
def test_what_is_asked_of_nobody_is_404(api, scene, case):
    scene.made |= {"who": new_id(), "reader": "nobody", "message": "none"}
    assert send(scene, case).status == 404
    assert api.get(path_of(scene.get("who"))).status == 404


@pytest.mark.parametrize("case", params([one for one in ROUTES if one["path"] != "/healthz"]))
def test_without_a_key_nothing_is_told_or_done(api, scene, case):
    scene.made |= dict.fromkeys(("who", "reader", "message", "transaction", "notification", "digested", "waiting"), "x")
    path, body = scene.fill([case["path"], case.get("body")])
    reply = api(case["method"], path, body, key=None)
    assert reply.status == 401 and KEY not in json.dumps(reply.body)
    assert not api.rows(f"SELECT 1 FROM subscribers WHERE subscriber_id = '{scene.get('new')}'")


AROUND = [
    "//healthz", "/healthz/", "/HEALTHZ", "/%68ealthz", "/healthz;/v2/subscribers", "/healthz/../v2/subscribers",
    "/healthz/%2e%2e/v2/subscribers", "/healthz%2f..%2fv2/subscribers", "/u/../v2/subscribers",
    "/u/%2e%2e/v2/subscribers", "/u//v2/subscribers", "/./v2/subscribers", "/v2//subscribers", "/V2/subscribers",
    "/v2/subscribers?x=/healthz", "/v2/subscribers#/healthz",
]  # fmt: skip


@pytest.mark.parametrize("path", AROUND)
def test_no_spelling_of_a_path_gets_around_the_key(api, path):
    reply = api("GET", path, key=None)
    assert reply.status in (400, 401, 404) and not (isinstance(reply.body, dict) and "data" in reply.body)


NOT_THERE = """
PUT /v2/subscribers
DELETE /v2/subscribers
POST /v2/subscribers/{who}
PUT /v2/subscribers/{who}
POST /v2/subscribers/{who}/preferences
DELETE /v2/subscribers/{who}/preferences
GET /v2/subscribers/{who}/preferences/bulk
POST /v2/subscribers/{who}/subscriptions
GET /v2/subscribers/{who}/notifications/seen
GET /v1/subscribers/{who}/credentials
GET /v1/subscribers/{who}/messages/mark-as
POST /v1/notifications
DELETE /v1/notifications/{new}
PATCH /v1/messages
GET /v1/messages/{new}
GET /v1/messages/transaction/{new}
PATCH /v1/events/trigger/{new}
PUT /v1/events/trigger/broadcast
""".strip().splitlines()


@pytest.mark.parametrize(("method", "path"), [line.split() for line in NOT_THERE], ids=NOT_THERE)
def test_a_method_that_a_path_does_not_have_is_405(scene, method, path):
    reply = send(scene, {"method": method, "path": path})
    assert reply.status == 405 and method in reply.body["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", TRIGGER), ("POST", SUBSCRIBERS), ("PATCH", SUBSCRIBERS + "/{who}")]
)
def test_a_body_that_is_too_large_is_413(scene, method, path):
    body = {"subscriberId": "{new}", "name": "news", "to": "{new}", "payload": {"x": "x" * 600_000}}
    assert send(scene, {"method": method, "path": path, "body": body}).status == 413


@pytest.mark.parametrize("path", ["/v3/subscribers", "/v2/topics", "/v2/workflows", "/v1/inbox/session", "/v2"])
def test_what_digestd_does_not_have_is_404(api, path):
    assert api.get(path).status == 404


# -- bodies that mean harm ---------------------------------------------------------------------------------------------

# The fields that some route reads.
READ = [
    "subscriberId", "name", "to", "events", "payload", "transactionId", "subscribers", "preferences", "channels",
    "workflowId", "schedule", "providerId", "credentials", "messageId", "markAs", "status", "notificationIds",
    "alerts", "isOnline",
]  # fmt: skip
# Right for many routes, but for what is put in place of {}.
GOOD = (
    b'{"subscriberId": "harm", "firstName": "Ada", "data": {}, "name": "everybody", "to": "harm", "payload": {},'
    b' "providerId": "slack", "credentials": {}, "status": "done", "schedule": {}, "channels": {}, "alerts": [{}]}'
)
HOSTILE = {
    "a list": b"[]",
    "a text": b'"x"',
    "null": b"null",
    "a number past all": b"1e400",
    "past all in fields": b'{"subscriberId": 1e400, "name": 1e400, "to": 1e400, "messageId": 1e400, "markAs": 1e400}',
    "past all inside": GOOD.replace(b"{}", b'{"x": 1e400}'),
    "deep": b"[" * 50_000 + b"]" * 50_000,
    "deep in a field": b'{"data": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    "large": b'{"data": "' + b"x" * 600_000 + b'"}',
    "half": b'{"subscriberId": "x"',
    "no UTF-8": b'{"subscriberId": "\xff"}',
    "half a character": b'{"subscriberId": "\\ud83d", "name": "\\ud83d", "to": "\\ud83d", "messageId": "\\ud83d"}',
    "half a character inside": GOOD.replace(b"{}", b'{"x": "\\ud83d"}').replace(b"Ada", b"\\udc00"),
    "NUL": b'{"subscriberId": "a\\u0000b", "name": "a\\u0000b", "to": "a\\u0000b", "messageId": "\\u0000"}',
    "all wrong": json.dumps(dict.fromkeys(READ, [[{"a": []}]])).encode(),
}
NOT_NOVUS = [
    {"id": "alertmanager", "method": "POST", "path": "/v1/ingest/alertmanager/news?to={who}"},
    {"id": "repeatables", "method": "POST", "path": "/v1/repeatables"},
    {"id": "unsubscribe", "method": "POST", "path": "/u/1.x"},
    {"id": "unsubscribe page", "method": "GET", "path": "/u/1.x"},
    {"id": "first preferences", "method": "PATCH", "path": "/v1/subscribers/{who}/preferences/news"},
    {"id": "first subscribers", "method": "POST", "path": "/v1/subscribers"},
    {"id": "first update", "method": "PUT", "path": "/v1/subscribers/{who}"},
]


@pytest.mark.parametrize("case", params([*ROUTES, *NOT_NOVUS]))
def test_no_body_makes_a_route_fail(api, scene, case):
    """The client takes no 5xx; where a body counts, each of these is refused."""
    path = scene.fill(case["path"])
    found = {name: api(case["method"], path, body).status for name, body in HOSTILE.items()}
    if case["method"] in ("POST", "PUT") and case.get("body"):  # the body of a PATCH may be {}
        assert [name for name in ("a list", "a text", "null", "deep", "half", "no UTF-8") if found[name] < 400] == []


NASTY = [
    "", "%00", "-1", "1e9", "99999999999999999999", "%27%20OR%201=1", "%F0%9F%98%80", "%ff", "[]", "null", "x" * 3000,
]  # fmt: skip
NAMES = [
    "page", "limit", "offset", "orderBy", "orderDirection", "after", "before", "read", "seen", "channel", "channels",
    "filters", "subscriberIds", "subscriberIds[]", "transactionId", "email", "name", "phone", "subscriberId",
    "criticality", "createdGte",
]  # fmt: skip


@pytest.mark.parametrize("case", params([one for one in ROUTES if one["method"] == "GET"]))
def test_no_query_makes_a_route_fail(api, scene, case):
    path = scene.fill(case["path"]).partition("?")[0]
    for value, name in itertools.product(NASTY, NAMES):
        api("GET", f"{path}?{name}={value}")
    api("GET", f"{path}?" + "&".join(f"{name}=1" for name in NAMES * 5))


# -- ids that are odd --------------------------------------------------------------------------------------------------

ODD = {
    "slash": "a/b", "slashes": "../../etc/passwd", "escaped slash": "a%2Fb", "backslash": "a\\b", "dots": "..",
    "dot": ".", "blank": "a b", "percent": "50%", "plus": "a+b", "query": "a?b=c#d", "star": "*",
    "brackets": "{who}[0]",
    "mail": "ada+x@example.org", "number": "12345", "a route's name": "bulk", "another one": "preferences",
    "markup": "<b>'\"&</b>", "quote": "o'brien; --", "umlaut": "ü", "far": "日本語", "emoji": "\U0001f600",
    "255 letters": "x" * 255, "255 emoji": "\U0001f600" * 255,
}  # fmt: skip


@pytest.mark.parametrize("who", ODD.values(), ids=ODD.keys())
def test_an_odd_id_goes_through_all_its_paths(api, who):
    made = api.post(SUBSCRIBERS, {"subscriberId": who, "firstName": "Ada"})
    assert made.data["subscriberId"] == who and api.get(path_of(who)).data["firstName"] == "Ada"
    assert api.patch(path_of(who), {"firstName": "Eve"}).data["subscriberId"] == who
    assert choose(api, who, email=False).status == 200 and channels(api, who)["email"] is False
    assert api.get(SUBSCRIBERS, subscriberId=who).body["data"][0]["firstName"] == "Eve"
    transaction_id = api.trigger("comments", who, {"post": 1})
    assert notifications(api, subscriberIds=who)[0]["transactionId"] == transaction_id
    assert api.delete(path_of(who)).status == 200 and api.get(path_of(who)).status == 404


@pytest.mark.parametrize("who", ["a\u200db", "a\u202eb", "a\ufeffb", "a\u2028b", " a", "a\t"])
def test_an_id_with_a_character_that_nobody_can_see_is_refused(api, who):
    assert api.post(SUBSCRIBERS, {"subscriberId": who}).messages["subscriberId"]


@pytest.mark.parametrize(
    "bad",
    ["%FF", "%zz", "%", "%00", "%0A", "%20", "%ED%A0%80", "x" * 256, "..%2f..%2fetc%2fpasswd", "../../../etc/passwd"],
)
@pytest.mark.parametrize("rest", ["", "/preferences", "/notifications"])
def test_a_path_that_names_nobody_who_could_be_is_refused(api, bad, rest):
    for method, body in (("GET", None), ("PATCH", {}), ("DELETE", None)):
        assert api(method, f"{SUBSCRIBERS}/{bad}{rest}", body).status in (400, 404, 405, 422)


def test_an_id_of_256_characters_is_refused_by_name(api):
    assert api.post(SUBSCRIBERS, {"subscriberId": "x" * 256}).messages["subscriberId"]


def test_ids_that_differ_in_case_or_in_how_a_letter_is_written_are_different_people(api):
    for pair in (("Case", "case"), ("\u00e9", "e\u0301")):
        people = [f"{part}{new_id()}" for part in pair]
        for who in people:
            api.post(SUBSCRIBERS, {"subscriberId": who, "firstName": who})
        assert [api.get(path_of(who)).data["firstName"] for who in people] == people


# -- lists of subscribers ----------------------------------------------------------------------------------------------

CROWD = 25


@pytest.fixture(scope="module")
def crowd(api: Client) -> str:
    """The domain of 25 subscribers who were made at one instant, seven of whom were changed since."""
    domain = f"{uuid.uuid4().hex[:8]}.example.org"
    people = [{"subscriberId": f"{n}@{domain}", "email": f"p{n}@{domain}"} for n in range(CROWD)]
    assert len(api.post("/v1/subscribers/bulk", {"subscribers": people}).data["created"]) == CROWD
    for number in (20, 3, 11, 0, 24, 7, 12):
        api.patch(path_of(f"{number}@{domain}"), {"firstName": f"Changed {number}"})
    return domain


def ids(page: Mapping[str, Any]) -> list[str]:
    return [one["subscriberId"] for one in page["data"]]


def page_of(api: Client, **query: Any) -> dict[str, Any]:
    found = api.get(SUBSCRIBERS, **query).body
    assert faults(found, "@empty cursor list") == []
    return dict(found)


def walk(api: Client, way: str, page: dict[str, Any], **query: Any) -> list[dict[str, Any]]:
    """The page and all after or before it."""
    pages = [page]
    while (cursor := pages[-1]["next" if way == "after" else "previous"]) is not None:
        assert len(pages) <= CROWD, "the walk does not end"
        pages.append(page_of(api, **query, **{way: cursor}))
    return pages


ORDERS = [{}] + [
    {"orderBy": column, "orderDirection": direction} for column in ("_id", "updatedAt") for direction in ("ASC", "DESC")
]


@pytest.mark.parametrize("limit", [1, 7, 12, 24, 25, 100])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " ".join(order.values()) or "as it comes")
def test_a_walk_forwards_and_back_meets_each_of_25_once_and_in_order(api, crowd, order, limit):
    query = {"email": crowd, "limit": limit, **order}
    forwards = walk(api, "after", page_of(api, **query), **query)
    met = [who for page in forwards for who in ids(page)]
    assert len(met) == CROWD == len(set(met))
    assert {len(page["data"]) for page in forwards[:-1]} <= {limit} and forwards[-1]["data"]
    assert {(page["totalCount"], page["totalCountCapped"]) for page in forwards} == {(CROWD, False)}
    assert forwards[0]["previous"] is None and all(page["previous"] for page in forwards[1:])
    back = walk(api, "before", forwards[-1], **query)
    assert [ids(page) for page in back] == [ids(page) for page in reversed(forwards)]
    assert all(page["next"] for page in back[1:])
    assert in_order([one for page in forwards for one in page["data"]], order)


def in_order(people: list[dict[str, Any]], order: Mapping[str, str]) -> bool:
    """Without an order it is the newest first."""
    if order.get("orderBy") == "updatedAt":
        found: list[Any] = [one["updatedAt"] for one in people]
    else:
        found = [int(one["subscriberId"].partition("@")[0]) for one in people]
    return found == sorted(found, reverse=order.get("orderDirection") != "ASC")


@pytest.mark.parametrize("order", ORDERS[1:], ids=lambda order: " ".join(order.values()))
def test_a_page_with_its_cursor_begins_or_ends_with_the_one_it_names(api, crowd, order):
    query = {"email": crowd, "limit": 10, **order}
    first = page_of(api, **query)
    second = page_of(api, **query, after=first["next"])
    after = page_of(api, **query, after=first["next"], includeCursor="true")
    before = page_of(api, **query, before=second["previous"], includeCursor="true")
    assert ids(after) == [ids(first)[-1], *ids(second)[:-1]]
    assert ids(before) == [*ids(first)[1:], ids(second)[0]]


def test_a_walk_goes_on_when_the_one_that_its_cursor_names_is_gone(api):
    domain = f"{uuid.uuid4().hex[:8]}.example.org"
    people = [{"subscriberId": f"{n}@{domain}", "email": f"p{n}@{domain}"} for n in range(6)]
    api.post("/v1/subscribers/bulk", {"subscribers": people})
    query = {"email": domain, "limit": 3, "orderBy": "_id", "orderDirection": "ASC"}
    first = page_of(api, **query)
    api.delete(path_of(ids(first)[-1]))
    assert ids(page_of(api, **query, after=first["next"])) == [one["subscriberId"] for one in people[3:]]


def test_subscribers_are_found_by_each_filter_and_by_all_together(api):
    mark = uuid.uuid4().hex[:8]
    ada = make(api, firstName=f"Ada {mark}", lastName="Lovelace", email=f"ada.{mark}@example.org", phone=f"+31{mark}")
    bob = make(api, firstName=f"Bob {mark}", email=f"bob.{mark}@example.org", phone=f"+32{mark}")
    ways = {
        "subscriberId": ada, "email": f"ada.{mark}@example.org", "phone": f"+31{mark}", "name": f"Ada {mark} Lovelace",
    }  # fmt: skip
    for name, value in ways.items():
        assert ids(page_of(api, **{name: value})) == [ada], name
    assert ids(page_of(api, **ways)) == [ada] and ids(page_of(api, name=f"Bob {mark}")) == [bob]
    nobody = {"data": [], "next": None, "previous": None, "totalCount": 0, "totalCountCapped": False}
    for query in (
        {**ways, "phone": f"+32{mark}"},
        {"email": "no%one@example.org"},
        {"name": "_"},
        {"subscriberId": ada[:-1]},
    ):
        assert page_of(api, **query) == nobody


def test_a_bulk_of_subscribers_tells_who_is_new_who_is_not_and_who_is_refused(api):
    known, new, bad = make(api), new_id(), new_id()
    people = [
        {"subscriberId": known, "firstName": "Eve"}, {"subscriberId": new}, {"subscriberId": bad, "email": "nobody"},
        {"firstName": "none"}, "text", None,
    ]  # fmt: skip
    data = api.post("/v1/subscribers/bulk", {"subscribers": people}).data
    assert data["updated"] == [{"subscriberId": known}] and data["created"] == [{"subscriberId": new}]
    assert len(data["failed"]) == 4 and all(one["message"] for one in data["failed"])
    assert data["failed"][0]["subscriberId"] == bad and "nobody" in data["failed"][0]["message"]
    assert shown(api, known)["firstName"] == "Eve" and api.get(path_of(bad)).status == 404


def test_500_subscribers_are_taken_at_once_and_501_are_not(api):
    mark = uuid.uuid4().hex[:8]
    people = [{"subscriberId": f"{mark}-{number}", "lastName": mark} for number in range(501)]
    assert api.post("/v1/subscribers/bulk", {"subscribers": people}).messages["subscribers"]
    assert len(api.post("/v1/subscribers/bulk", {"subscribers": people[:500]}).data["created"]) == 500
    assert page_of(api, name=mark)["totalCount"] == 500


def test_the_same_subscriber_twice_in_a_bulk_is_one(api):
    who = new_id()
    people = [{"subscriberId": who, "firstName": "Ada"}, {"subscriberId": who, "firstName": "Eve"}]
    assert api.post("/v1/subscribers/bulk", {"subscribers": people}).status == 201
    assert shown(api, who)["firstName"] == "Eve" and page_of(api, subscriberId=who)["totalCount"] == 1


# -- preferences and the schedule in them ------------------------------------------------------------------------------


def day(*hours: tuple[str, str], is_on: bool = True) -> dict[str, Any]:
    return {"isEnabled": is_on, "hours": [{"start": start, "end": end} for start, end in hours]}


WEEK = {
    "isEnabled": True,
    "weeklySchedule": {
        "monday": day(("09:00 AM", "12:00 PM"), ("01:00 PM", "05:00 PM")), "friday": day(("10:00 PM", "02:00 AM")),
        "sunday": {"isEnabled": False},
    },
}  # fmt: skip


def schedule(api: Client, who: str) -> Any:
    return api.get(path_of(who, "/preferences")).data["global"].get("schedule")


def set_schedule(api: Client, who: str, value: Any) -> Reply:
    return api.patch(path_of(who, "/preferences"), {"schedule": value})


def test_a_schedule_is_given_back_as_it_was_set(api):
    who = make(api)
    assert schedule(api, who) is None
    assert set_schedule(api, who, WEEK).data["global"]["schedule"] == WEEK == schedule(api, who)


def test_a_schedule_is_replaced_as_a_whole(api):
    who = make(api)
    set_schedule(api, who, WEEK)
    other = {"isEnabled": True, "weeklySchedule": {"tuesday": day(("09:00 AM", "05:00 PM"))}}
    set_schedule(api, who, other)
    assert schedule(api, who) == other


@pytest.mark.parametrize(
    "value",
    [
        {"isEnabled": False},
        {"isEnabled": True},
        {"isEnabled": False, "weeklySchedule": {}},
        {**WEEK, "isEnabled": False},
        {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True}}},
        {"isEnabled": True, "weeklySchedule": {"monday": day()}},
        {"isEnabled": True, "weeklySchedule": {"monday": day(("9:00am", "05:00 pm"), ("18:00", "19:30"))}},
    ],
    ids=["off", "on, always", "off, no days", "off, with days", "no hours", "empty hours", "other spellings"],
)
def test_a_schedule_of_any_good_shape_is_kept(api, value):
    who = make(api)
    data = set_schedule(api, who, value).data
    assert data["global"]["schedule"]["isEnabled"] is value["isEnabled"] and faults(data, "@preferences") == []
    assert schedule(api, who) == data["global"]["schedule"]


def test_other_changes_leave_the_schedule_and_it_leaves_them(api):
    who = make(api)
    set_schedule(api, who, WEEK)
    choose(api, who, email=False)
    choose(api, who, "news", chat=False)
    api.patch(path_of(who), {"firstName": "Ada"})
    api.trigger("news", {"subscriberId": who, "lastName": "L"})
    assert schedule(api, who) == WEEK
    set_schedule(api, who, {"isEnabled": False})
    assert channels(api, who)["email"] is False and channels(api, who, "news")["chat"] is False


def test_a_bad_schedule_changes_nothing_and_takes_the_channels_with_it(api):
    who = make(api)
    set_schedule(api, who, WEEK)
    bad = {"channels": {"email": False}, "schedule": {"isEnabled": True, "weeklySchedule": {}}}
    assert api.patch(path_of(who, "/preferences"), bad).messages["schedule"]
    assert schedule(api, who) == WEEK and channels(api, who)["email"] is True


def test_outside_the_hours_of_a_schedule_only_the_feed_is_served(api):
    who = make(api, email="ada@example.org")
    never = {
        name: {"isEnabled": False}
        for name in ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    }
    set_schedule(api, who, {"isEnabled": True, "weeklySchedule": never})
    assert deliver(api, "news", who) == ["in_app"] and deliver(api, "alarm", who) == ["email"]


def test_the_channel_that_digestd_does_not_have_is_let_pass(api):
    who = make(api)
    data = choose(api, who, tool=False, email=False).data
    assert data["global"]["channels"]["email"] is False and data["global"]["channels"].get("tool", True) in (
        True,
        False,
    )
    assert choose(api, who, "news", tool=True).status == 200


def test_preferences_are_listed_by_how_critical_a_workflow_is(api):
    who = make(api)
    assert listed(api, who) == listed(api, who, criticality="nonCritical") == workflows(api, critical=False)
    assert listed(api, who, criticality="critical") == workflows(api, critical=True) == ["alarm"]
    assert listed(api, who, criticality="all") == workflows(api)


def test_a_critical_workflow_cannot_be_turned_off_and_says_so(api):
    who = make(api)
    for reply in (choose(api, who, "alarm", email=False), choose_many(api, who, ["news", "alarm"])):
        assert 400 <= reply.status < 500 and "critical" in reply.body["message"]
    assert channels(api, who, "alarm")["email"] is True and channels(api, who, "news")["email"] is True


def test_a_choice_can_be_taken_back(api):
    who = make(api, email="ada@example.org")
    for wanted in (False, True, False, True):
        choose(api, who, "news", email=wanted)
        assert channels(api, who, "news")["email"] is wanted
    assert deliver(api, "news", who) == ["chat", "email", "in_app"]


# -- credentials -------------------------------------------------------------------------------------------------------


def credentials(api: Client, who: str) -> dict[str, Any]:
    return {one["providerId"]: one["credentials"] for one in api.get(path_of(who)).data["channels"]}


def test_credentials_are_set_added_and_dropped(api):
    who, slack = make(api), {"webhookUrl": "https://example.org/a"}
    path = f"/v1/subscribers/{who}/credentials"
    for method, tokens in (("PUT", ["a"]), ("PATCH", ["b", "a"])):
        assert api(method, path, {"providerId": "fcm", "credentials": {"deviceTokens": tokens}}).status == 200
    api("PUT", path, {"providerId": "slack", "credentials": slack})
    assert credentials(api, who) == {"fcm": {"deviceTokens": ["a", "b"]}, "slack": slack}
    api("PUT", path, {"providerId": "fcm", "credentials": {"deviceTokens": ["c"]}})
    assert api.delete(f"{path}/slack").status == 204 and credentials(api, who) == {"fcm": {"deviceTokens": ["c"]}}
    assert api.delete(f"{path}/slack").status in (204, 404)


# -- what became of events ---------------------------------------------------------------------------------------------


def test_an_event_that_came_into_anothers_window_names_it_in_the_list_and_alone(api):
    who = make(api)
    first, second = (api.trigger("comments", who, {"post": 1, "n": n}) for n in range(2))
    [one], [two] = (notifications(api, transactionId=transaction_id) for transaction_id in (first, second))
    assert "_digestedNotificationId" not in one and two["_digestedNotificationId"] == one["_id"]
    assert [found["payload"]["n"] for found in (one, two)] == [0, 1]
    assert [job["status"] for found in (one, two) for job in found["jobs"] if job["type"] == "digest"] == [
        "delayed",
        "merged",
    ]
    for found in (one, two):
        assert api.get(f"/v1/notifications/{found['_id']}").data == found


def test_a_cancelled_event_is_shown_as_such(api):
    who = make(api)
    transaction_id = api.trigger("comments", who, {"post": 1})
    assert api.delete(f"{TRIGGER}/{transaction_id}").data is True
    [found] = notifications(api, transactionId=transaction_id)
    assert {job["status"] for job in found["jobs"] if job["type"] == "digest"} == {"canceled"}


def test_notifications_are_found_by_each_filter_in_each_way_of_writing_lists(api):
    ada, bob = (make(api, email=f"{name}.{new_id()}@example.org") for name in ("ada", "bob"))
    news, comments = api.trigger("news", ada), api.trigger("comments", bob, {"post": 1})
    end_of(api, news)
    both = {"subscriberIds": [ada, bob]}
    for query, wanted in (
        (both, [comments, news]),
        ({"subscriberIds[]": [ada, bob]}, [comments, news]),
        ({"subscriberIds": ada}, [news]),
        ({"subscriberIds": new_id()}, []),
        ({**both, "templates": "comments"}, [comments]),
        ({**both, "templates": ["comments", "news"]}, [comments, news]),
        ({**both, "channels": "email"}, [news]),
        ({**both, "channels[]": ["chat", "sms"]}, [news]),
        ({**both, "channels": "sms"}, []),
        ({"emails": api.get(path_of(ada)).data["email"]}, [news]),
        ({"transactionId": comments}, [comments]),
        ({**both, "after": "2999-01-01T00:00:00.000Z"}, []),
        ({**both, "before": "2999-01-01T00:00:00+02:00"}, [comments, news]),
        ({**both, "before": "2020-01-01T00:00:00Z"}, []),
    ):
        assert [one["transactionId"] for one in notifications(api, **query)] == wanted, query


@pytest.mark.parametrize("path", ["/v1/notifications?subscriberIds=", "/v1/messages?subscriberId="])
def test_pages_meet_each_event_once_and_tell_whether_there_is_more(api, path):
    who = make(api)
    sent = [api.trigger("everybody", who, {"n": n}) for n in range(5)]
    for transaction_id in sent:
        end_of(api, transaction_id)
    pages = [api.get(f"{path}{who}&page={page}&limit=2").body for page in range(4)]
    assert [one["transactionId"] for page in pages for one in page["data"]] == sent[::-1]
    assert [(page["page"], page["pageSize"], page["hasMore"]) for page in pages[:3]] == [
        (0, 2, True),
        (1, 2, True),
        (2, 2, False),
    ]
    assert pages[3]["data"] == [] and pages[3]["hasMore"] is False


def test_messages_are_found_by_channel_and_transaction(api, scene):
    who, transaction_id = scene.get("reader"), scene.get("transaction")
    for query, wanted in (
        ({}, ["chat", "email", "in_app"]), ({"channel": "email"}, ["email"]), ({"channel": "tool"}, []),
        ({"transactionId": [transaction_id, "x"]}, ["chat", "email", "in_app"]), ({"transactionId": "x"}, []),
    ):  # fmt: skip
        found = api.get("/v1/messages", subscriberId=who, **query).body["data"]
        assert sorted(one["channel"] for one in found) == wanted, query
        assert all(one["status"] == "sent" and one["transactionId"] == transaction_id for one in found)


# -- the feed ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(api: Client) -> str:
    """Somebody with three messages in the feed, the newest of which says 2."""
    who = make(api, firstName="Ada", lastName="L", avatar="https://example.org/a.png")
    for number in range(3):
        end_of(api, api.trigger("news", who, {"text": f"{number}"}))
    return who


def feed(api: Client, who: str, **query: Any) -> list[dict[str, Any]]:
    return list(api.get(f"/v1/subscribers/{who}/notifications/feed", **query).body["data"])


def inbox(api: Client, who: str, **query: Any) -> list[dict[str, Any]]:
    return list(api.get(path_of(who, "/notifications"), **query).body["data"])


def unseen(api: Client, who: str) -> int:
    return int(api.get(f"/v1/subscribers/{who}/notifications/unseen").data["count"])


def count(api: Client, who: str, **wanted: bool) -> int:
    [found] = api.get(path_of(who, "/notifications/count"), filters=json.dumps([wanted])).data
    return int(found["count"])


def test_a_feed_shows_the_newest_first_and_pages_through_all(api, reader):
    assert [one["content"] for one in feed(api, reader)] == ["2", "1", "0"]
    assert [one["content"] for page in range(3) for one in feed(api, reader, page=page, limit=2)] == ["2", "1", "0"]
    assert [one["body"] for one in inbox(api, reader)] == ["2", "1", "0"]
    newest, middle, oldest = (one["id"] for one in inbox(api, reader))
    assert [one["id"] for one in inbox(api, reader, limit=1, after=newest)] == [middle]
    assert [one["id"] for one in inbox(api, reader, limit=1, offset=2)] == [oldest]
    assert feed(api, reader)[0]["payload"] == {"text": "2"} and inbox(api, reader)[0]["subject"] == "news"
    assert inbox(api, reader)[0]["to"]["firstName"] == "Ada" and unseen(api, reader) == 3


def test_a_message_that_was_read_is_seen_and_can_be_unread(api, reader):
    path, first = path_of(reader, "/notifications"), feed(api, reader)[0]["_id"]
    read = api.patch(f"{path}/{first}/read", None).data
    assert (read["isRead"], read["isSeen"]) == (True, True) and is_time(read["readAt"]) and unseen(api, reader) == 2
    assert [one["_id"] for one in feed(api, reader, read="true")] == [first]
    assert (count(api, reader, read=True), count(api, reader, read=False), count(api, reader)) == (1, 2, 3)
    again = api.patch(f"{path}/{first}/unread", None).data
    assert (again["isRead"], again["readAt"]) == (False, None) and len(inbox(api, reader, read="false")) == 3


def test_marks_of_the_first_api_do_what_they_say(api, reader):
    path, two = f"/v1/subscribers/{reader}/messages", [one["_id"] for one in feed(api, reader)[:2]]
    marked = api.post(f"{path}/mark-as", {"messageId": two, "markAs": "seen"}).data
    assert sorted(one["_id"] for one in marked) == sorted(two) and {one["seen"] for one in marked} == {True}
    assert unseen(api, reader) == 1 and count(api, reader, read=True) == 0
    assert api.post(f"{path}/mark-all", {"markAs": "read"}).data == 3
    assert unseen(api, reader) == 0 and count(api, reader, read=True) == 3
    assert api.post(f"{path}/mark-as", {"messageId": two[0], "markAs": "unread"}).data[0]["read"] is False
    api.post(f"{path}/mark-all", {"markAs": "unseen"})
    assert unseen(api, reader) == 3


def test_an_archived_message_leaves_the_feed_and_can_come_back(api, reader):
    path, first = path_of(reader, "/notifications"), inbox(api, reader)[0]["id"]
    gone = api.patch(f"{path}/{first}/archive", None).data
    assert gone["isArchived"] is True and is_time(gone["archivedAt"])
    assert first not in [one["_id"] for one in feed(api, reader)]
    assert [one["id"] for one in inbox(api, reader, archived="true")] == [first]
    assert len(inbox(api, reader, archived="false")) == 2
    assert api.patch(f"{path}/{first}/unarchive", None).data["isArchived"] is False
    assert len(feed(api, reader)) == 3


def test_many_messages_are_marked_at_once(api, reader):
    path, first = path_of(reader, "/notifications"), inbox(api, reader)[0]["id"]
    api.post(f"{path}/seen", {"notificationIds": [first]})
    assert (count(api, reader, seen=True), count(api, reader, read=True)) == (1, 0)
    api.patch(f"{path}/{first}/read", None)
    api.post(f"{path}/read-archive", {})
    assert [one["id"] for one in inbox(api, reader, archived="true")] == [first]
    api.post(f"{path}/read", {})
    assert count(api, reader, read=True) == 3
    api.post(f"{path}/archive", {})
    assert count(api, reader, archived=True) == 3 and feed(api, reader) == []
    api.post(f"{path}/delete", {})
    assert inbox(api, reader) == []


def test_the_times_of_a_feed_can_be_asked_for_in_ms(api, reader):
    moments = [digestd.parse_instant(one["createdAt"]) for one in inbox(api, reader)]
    assert len(inbox(api, reader, createdGte=moments[-1], createdLte=moments[0])) == 3
    assert inbox(api, reader, createdGte=moments[0] + 60_000) == [] == inbox(api, reader, createdLte=moments[-1] - 1)


def test_a_deleted_message_is_in_no_list(api, reader):
    first, second, third = (one["_id"] for one in feed(api, reader))
    transaction_id = feed(api, reader)[2]["transactionId"]
    assert api.delete(f"/v1/messages/{first}").data == {"acknowledged": True, "status": "deleted"}
    assert api.delete(f"/v1/messages/{first}").status == 404
    assert api.delete(path_of(reader, f"/notifications/{second}")).status == 204
    assert [one["_id"] for one in feed(api, reader)] == [third]
    assert api.delete(f"/v1/messages/transaction/{transaction_id}?channel=in_app").status == 204
    assert feed(api, reader) == [] and inbox(api, reader) == []
    assert api.get("/v1/messages", subscriberId=reader, channel="in_app").body["data"] == []


def test_nobody_touches_the_feed_of_another(api, reader):
    other, first = make(api), inbox(api, reader)[0]["id"]
    for way in ("read", "unread", "archive", "unarchive", "actions/primary/complete"):
        assert api.patch(path_of(other, f"/notifications/{first}/{way}"), None).status == 404
    assert api.delete(path_of(other, f"/notifications/{first}")).status == 404
    marking = {"messageId": first, "markAs": "read"}
    assert api.post(f"/v1/subscribers/{other}/messages/mark-as", marking).status in (201, 404)
    for way in ("read", "seen", "archive", "delete"):
        api.post(path_of(other, f"/notifications/{way}"), {"notificationIds": [first]})
    assert inbox(api, reader)[0] == {
        **inbox(api, reader)[0],
        "id": first,
        "isRead": False,
        "isSeen": False,
        "isArchived": False,
    }
    assert inbox(api, other) == []


# -- at the end --------------------------------------------------------------------------------------------------------


def test_all_these_calls_left_no_bug_in_the_log_and_a_clean_end(api):
    assert api.process.stop() == 0
    logged = api.process.logged()
    assert "Traceback" not in logged and "a bug" not in logged and KEY not in logged
