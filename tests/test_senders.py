"""Messages that are composed and really sent: to small servers on loopback, by digestd's own senders."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime as dt
import json
import logging
import os
import re
import socket
import subprocess
import sys
import urllib.parse
from typing import Any

import pytest
import standardwebhooks

import digestd
from conftest import BASIC, ROOT, START, World, free_port, wait_for
from peers import CA, DRIP, DROP, HANG, HANG_UP, SILENCE, Answer, MailServer, Raw, Receiver

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


# -- scenes ------------------------------------------------------------------------------------------------------------


class LiveWorld(World):
    """A world whose tries are really made, one after the other."""

    def __init__(self, folder: Any, text: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.senders = digestd.Senders()
        super().__init__(folder, text)

    def _try(self, claim: digestd.Claim) -> None:
        result = self.send(claim)
        self.sent.append((self.now, claim, result))
        with digestd.transaction():
            digestd.record_outcomes(self.config, [digestd.Sent(claim, result)], self.now)
        self.room.end(claim.sender_name, claim.lane)

    def send(self, claim: digestd.Claim) -> digestd.SendResult:
        """Compose as the daemon does, and make the try; nothing of its result is written down."""
        if claim.message is None and claim.result is None:
            digestd.finish_claim(claim)
            if claim.message is not None:
                with digestd.transaction():
                    digestd.keep_composed(claim, self.now)
        return claim.result or self.loop.run_until_complete(self.senders.send(claim))

    def finish(self) -> None:
        self.loop.run_until_complete(self.senders.close())
        self.loop.close()

    @property
    def reasons(self) -> list[str | None]:
        return [result.reason for _, _, result in self.sent]

    @property
    def minutes(self) -> list[float]:
        """When the tries were made, in minutes since the start."""
        return [(at - START) / digestd.MINUTE for at, _, _ in self.sent]


@pytest.fixture
def live(tmp_path):
    """Makes a world that really sends."""
    made = []

    def make(text: str) -> LiveWorld:
        made.append(LiveWorld(tmp_path, text))
        return made[-1]

    yield make
    for one in made:
        one.finish()
    digestd.close_store()


@pytest.fixture
def receiver():
    """Starts HTTP servers with their answers."""
    started = []

    def start(*answers: Any, **settings: Any) -> Receiver:
        started.append(Receiver(*answers, **settings))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def mail_server():
    """Starts mail servers with their replies."""
    started = []

    def start(**settings: Any) -> MailServer:
        started.append(MailServer(**settings))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def send(settings: Any, message: digestd.Message, at: int = START, public_id: str = "msg_1") -> digestd.SendResult:
    """One try with senders of its own."""
    claim = digestd.Claim(1, 1, 1, at, public_id, "out", settings, message=message)

    async def once() -> digestd.SendResult:
        senders = digestd.Senders()
        try:
            return await senders.send(claim)
        finally:
            await senders.close()

    return asyncio.run(once())


def hook(url: str, **settings: Any) -> digestd.WebhookSettings:
    return digestd.WebhookSettings.model_validate({"type": "webhook", "timeout": "5s", "url": url, **settings})


def post(url: str, body: str = '{"a":1}', at: int = START, **settings: Any) -> digestd.SendResult:
    return send(hook(url, **settings), digestd.Message(body, "application/json"), at)


def events_of(*payloads: Any) -> list[digestd.DigestedEvent]:
    texts = [payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False) for payload in payloads]
    return [digestd.DigestedEvent(number, START, text, f"t{number}") for number, text in enumerate(texts, 1)]


def draft_of(
    sender: Any = None, channel: str = "chat", events: list[digestd.DigestedEvent] | None = None,
    subscriber: dict[str, Any] | None = None, workflow: str = "news", **templates: str,
) -> digestd.Draft:  # fmt: skip
    """What a message of a closed window is composed from."""
    step = digestd.ChannelStep.model_validate({"id": "out", "type": "email", "sender": "out", **templates})
    events = events_of({"n": 1}) if events is None else events
    return digestd.Draft(
        1, "job_1", channel, sender or hook("http://127.0.0.1:9/"), step, START, START, workflow=workflow, step="out",
        subscriber={"subscriberId": "s1", **(subscriber or {})}, digest_id=7, digest_key='"k"', has_digest=True,
        events=events, steps={"digest": events},
    )  # fmt: skip


def composed(draft: digestd.Draft) -> Any:
    return json.loads(digestd.compose(draft).body)


def smtp(server: MailServer | int, **settings: Any) -> digestd.SmtpSettings:
    port = server if isinstance(server, int) else server.port
    table = {"type": "smtp", "port": port, "tls": "none", "from": "Digest <digest@example.org>", "timeout": "10s"}
    return digestd.SmtpSettings.model_validate({**table, **settings})


def mail(
    settings: digestd.SmtpSettings, to: str = "ann@example.test", subscriber: dict[str, Any] | None = None, **more: Any
) -> digestd.SendResult:
    """Compose a mail and try it once."""
    person = {"email": to, **(subscriber or {})}
    return send(settings, digestd.compose_mail(*with_content(draft_of(settings, "email", subscriber=person, **more))))


def with_content(draft: digestd.Draft) -> tuple[digestd.Draft, dict[str, Any]]:
    return draft, digestd.render_content(draft)


def hook_config(url: str, more: str = "") -> str:
    return BASIC.replace("http://127.0.0.1:9/hook", url) + more


def mail_config(port: int, template: str = 'text = "hello"', more: str = "") -> str:
    """A digest of ten minutes per postId, then a mail."""
    chat, step = 'id = "chat"\ntype = "chat"\nsender = "hook"', 'id = "mail"\ntype = "email"\nsender = "mail"\n'
    return BASIC.replace('tls = "none"', f'tls = "none"\nport = {port}').replace(chat, step + template) + more


ANN = {"subscriberId": "s1", "email": "ann@example.test"}


def sent_words(caplog: pytest.LogCaptureFixture) -> str:
    """All that was logged, apart from what the test's own servers say."""
    return "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("mail."))


# -- the webhook body --------------------------------------------------------------------------------------------------


def test_the_body_of_a_digest_has_exactly_the_promised_members(live, receiver):
    there = receiver()
    w = live(hook_config(there.url()))
    person = {"subscriberId": "s1", "firstName": "Zoë", "email": "zoe@example.org", "data": {"plan": ["a", 1]}}
    one, two = {"postId": "p1", "n": 1}, {"postId": "p1", "n": 2}
    w.trigger("comments", person, one, id="t1")
    w.advance("1m")
    w.trigger("comments", "s1", two, id="t2")
    w.advance("10m")
    (request,) = there.requests
    first, second = (str(event_id) for (event_id,) in w.rows("SELECT id FROM events ORDER BY id"))
    assert json.loads(request.body) == {
        "type": "digestd.chat",
        "timestamp": "2026-03-09T09:10:00Z",
        "data": {
            "workflow": "comments",
            "step": "chat",
            "channel": "chat",
            "subscriber": person,
            "payload": one,
            "digest": {
                "id": str(w.one("SELECT id FROM digests")),
                "key": "p1",
                "eventCount": 2,
                "events": [
                    {"id": first, "time": "2026-03-09T09:00:00Z", "payload": one, "transactionId": "t1"},
                    {"id": second, "time": "2026-03-09T09:01:00Z", "payload": two, "transactionId": "t2"},
                ],
                "truncated": False,
            },
        },
    }  # fmt: skip
    assert request.method == "POST"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == w.one("SELECT public_id FROM jobs WHERE sender = 'hook'")
    assert "webhook-signature" not in request.headers


def test_a_workflow_without_a_digest_step_sends_a_null_digest(live, receiver):
    there = receiver()
    more = '[workflows.plain]\n[[workflows.plain.steps]]\nid = "push"\ntype = "push"\nsender = "hook"\n'
    w = live(hook_config(there.url(), more))
    w.advance("90s")
    w.trigger("plain", payload={"n": 1})
    w.tick()
    body = json.loads(there.requests[0].body)
    assert (body["type"], body["timestamp"]) == ("digestd.push", "2026-03-09T09:01:30Z")
    assert body["data"]["digest"] is None
    assert body["data"]["payload"] == {"n": 1}


def test_an_immediate_delivery_has_no_digest_id_and_its_one_event():
    draft = draft_of()
    draft.digest_id = None
    digest = composed(draft)["data"]["digest"]
    assert (digest["id"], digest["key"], digest["eventCount"], digest["truncated"]) == (None, "k", 1, False)
    assert [event["payload"] for event in digest["events"]] == [{"n": 1}]


@pytest.mark.parametrize(
    ("key", "payload", "expected"),
    [
        ('"payload.k"', {}, None),
        ('"payload.k"', {"k": 1}, 1),
        ('"payload.k"', {"k": "ä"}, "ä"),
        ('"payload.k"', {"k": {"b": 1, "a": [False]}}, {"a": [False], "b": 1}),
        ('["payload.a", "payload.b"]', {"a": "x", "b": 2}, ["x", 2]),
        (None, {"k": 1}, None),
    ],
)
def test_the_digest_key_in_the_body_is_the_value_itself(live, receiver, key, payload, expected):
    there = receiver()
    line = f"key = {key}" if key else ""
    w = live(hook_config(there.url()).replace('key = "payload.postId"', line))
    w.trigger("comments", payload=payload)
    w.advance("10m")
    assert json.loads(there.requests[0].body)["data"]["digest"]["key"] == expected


@pytest.mark.parametrize(
    "templates",
    [{}, {"subject": "S"}, {"text": "T"}, {"html": "<p>H</p>"}, {"subject": "S", "text": "T", "html": "<p>H</p>"}],
    ids=lambda templates: "+".join(templates) or "none",
)
def test_subject_text_and_html_are_there_only_where_the_step_has_them(templates):
    data = composed(draft_of(**templates))["data"]
    assert {name: data[name] for name in ("subject", "text", "html") if name in data} == templates
    assert set(data) - set(templates) == {"workflow", "step", "channel", "subscriber", "payload", "digest"}


def test_events_past_ten_thousand_keep_their_ids_and_lose_their_payload():
    digest = composed(draft_of(events=events_of(*['{"n":1}'] * 10_050)))["data"]["digest"]
    assert (digest["eventCount"], len(digest["events"]), digest["truncated"]) == (10_050, 10_050, 50)
    assert all(event["payload"] == {"n": 1} for event in digest["events"][:10_000])
    assert all("payload" not in event for event in digest["events"][10_000:])
    assert digest["events"][-1] == {"id": "10050", "time": "2026-03-09T09:00:00Z", "transactionId": "t10050"}


@pytest.mark.parametrize("letter", ["x", "é", "☃"])
def test_payloads_past_a_mebibyte_are_cut_from_the_newest_on(letter):
    payload = json.dumps({"t": letter * 1000}, ensure_ascii=False)
    digest = composed(draft_of(events=events_of(*[payload] * 1500)))["data"]["digest"]
    kept = [event for event in digest["events"] if "payload" in event]
    assert kept == digest["events"][: len(kept)]
    assert digest["truncated"] == 1500 - len(kept)
    assert [event["transactionId"] for event in digest["events"]] == [f"t{n}" for n in range(1, 1501)]
    size = len(kept) * len(payload.encode())
    assert 0.8 * (1 << 20) < size <= 1 << 20, f"{size} bytes of payload were kept"


def test_ten_thousand_events_of_another_program_are_one_digest(live, receiver):
    there = receiver()
    w = live(hook_config(there.url()))
    w.rows(
        "INSERT INTO events (workflow, subscriber_id, payload, received_at) WITH RECURSIVE n(i) AS"
        " (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)"
        " SELECT 'comments', 's1', json_object('postId', 1, 'n', i, 't', printf('%.*c', 200, 'x')), ? FROM n", START
    )  # fmt: skip
    w.advance("10m")
    (request,) = there.requests
    digest = json.loads(request.body)["data"]["digest"]
    assert (digest["eventCount"], len(digest["events"])) == (10_000, 10_000)
    assert digest["truncated"] == sum("payload" not in event for event in digest["events"]) > 0
    assert w.one("SELECT state FROM jobs WHERE sender = 'hook'") == "completed"


def test_a_repeatables_body_has_exactly_the_promised_members(live, receiver):
    there = receiver()
    more = '[repeatables.bird]\nevery = "10s"\nlimit = 2\nsender = "hook"\ndata = { color = "bird", n = [1, 2.5] }\n'
    w = live(hook_config(there.url(), more))
    w.advance("1m")
    assert len(there.requests) == 2
    assert json.loads(there.requests[1].body) == {
        "type": "digestd.repeatable",
        "timestamp": "2026-03-09T09:00:20Z",
        "data": {
            "repeatable": "bird", "name": "bird", "jobId": w.one("SELECT job_id FROM repeatables"),
            "key": w.one("SELECT key FROM repeatables"), "slot": "2026-03-09T09:00:20Z", "count": 2,
            "data": {"color": "bird", "n": [1, 2.5]},
        },
    }  # fmt: skip


def test_a_repeatables_templates_see_slot_count_and_data(live, receiver):
    there = receiver()
    more = (
        '[repeatables.bird]\nevery = "10s"\nlimit = 1\nsender = "hook"\ndata = { color = "red" }\n'
        'subject = "{{ repeatable.name }} {{ count }}"\ntext = "{{ slot }} {{ data.color }}"\n'
    )
    w = live(hook_config(there.url(), more))
    w.advance("1m")
    data = json.loads(there.requests[0].body)["data"]
    assert (data["subject"], data["text"]) == ("bird 1", "2026-03-09T09:00:10Z red")


def test_nan_in_a_repeatables_data_never_reaches_the_receiver(live, receiver):
    there = receiver()
    more = '[repeatables.bird]\nevery = "10s"\nlimit = 1\nsender = "hook"\ndata = { x = nan, y = inf }\n'
    try:
        w = live(hook_config(there.url(), more))
    except digestd.DigestdError:
        return  # refused at the door is as good
    w.advance("1m")
    for request in there.requests:
        json.loads(request.body, parse_constant=lambda name: pytest.fail(f"{name} was sent"))


def test_integers_of_any_size_keep_their_digits(live, receiver):
    there = receiver()
    w = live(hook_config(there.url()))
    w.trigger("comments", payload={
        "postId": 1285704473650888702, "big": 123456789012345678901234567890, "neg": -9223372036854775809,
    })  # fmt: skip
    w.advance("10m")
    body = there.requests[0].body
    for digits in (
        b'"postId":1285704473650888702,',
        b'"big":123456789012345678901234567890,',
        b'"neg":-9223372036854775809}',
    ):
        assert body.count(digits) == 2  # in payload and in events
    assert b'"key":1285704473650888702,' in body


def test_large_integers_keep_their_digits_in_templates():
    events = events_of('{"id":1285704473650888702,"big":123456789012345678901234567890}')
    assert composed(draft_of(events=events, text="{{ payload.id }} {{ payload.big }}"))["data"]["text"] == (
        "1285704473650888702 123456789012345678901234567890"
    )


def test_nul_and_control_characters_of_a_payload_arrive_whole(live, receiver):
    there = receiver()
    w = live(hook_config(there.url()))
    text = "x\x00y" + "".join(map(chr, range(1, 32))) + "\x7f\x85\u2028\u202e\U0001f600"
    w.trigger("comments", payload={"postId": 1, "t": text})
    w.advance("10m")
    assert json.loads(there.requests[0].body)["data"]["payload"]["t"] == text


@pytest.mark.parametrize("payload", ['{"postId":1,"t":"a\\ud83d"}', '{"postId":1,"t":"\\ude00"}'])
@pytest.mark.parametrize("channel", ["hook", "mail"])
def test_half_a_surrogate_pair_written_by_another_program_stops_nothing(live, receiver, mail_server, channel, payload):
    there, server = receiver(), mail_server()
    text = 'text = "{{ payload.t }}"'
    config = hook_config(there.url()) + text if channel == "hook" else mail_config(server.port, text)
    w = live(config)
    w.trigger("comments", ANN, {"postId": 2, "t": "fine"})
    w.rows(
        "INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', ?, ?)",
        payload,
        START,
    )
    w.advance("1d")
    arrived = [request.body.decode() for request in there.requests] + [one.text() for one in server.mails]
    assert any("fine" in one for one in arrived)
    assert w.one("SELECT count(*) FROM digests WHERE state IN ('open', 'held')") == 0
    assert w.one("SELECT count(*) FROM jobs WHERE state IN ('delayed', 'waiting', 'active')") == 0


# -- the signature, and the same bytes on every try --------------------------------------------------------------------


@pytest.mark.parametrize("size", [24, 32, 64])
def test_the_signature_verifies_with_the_public_library(receiver, size):
    there = receiver()
    secret = "whsec_" + base64.b64encode(os.urandom(size)).decode()
    assert post(there.url(), '{"a":"é☃\U0001f600"}', digestd.SystemClock().now(), secret=secret).outcome == "sent"
    request = there.requests[0]
    assert standardwebhooks.Webhook(secret).verify(request.body, request.headers) == {"a": "é☃\U0001f600"}
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(secret).verify(request.body.replace(b"a", b"b"), request.headers)


def test_every_try_has_the_same_id_and_bytes_and_its_own_time_and_signature(live, receiver):
    there = receiver(500, 503, 200)
    more = f'secret = "{SECRET}"\n'
    config = hook_config(there.url()).replace('retry = ["5s", "1m"]', f'retry = ["5s", "1m"]\n{more}', 1)
    config += 'text = "first {{ payload.n }} ☃"\n'
    w = live(config)
    w.trigger("comments", payload={"postId": 1, "n": 1})
    w.advance("10m")
    w.use(config.replace("first", "edited"))
    w.trigger("comments", payload={"postId": 2, "n": 2})
    w.advance("20m")
    *tries, last = there.requests
    assert len(tries) == 3
    assert len({request.headers["webhook-id"] for request in tries}) == 1
    assert len({request.body for request in tries}) == 1
    assert json.loads(tries[2].body)["data"]["text"] == "first 1 ☃"
    assert json.loads(last.body)["data"]["text"] == "edited 2 ☃"
    started = [START + 10 * digestd.MINUTE + span for span in (0, 5_000, 65_000)]
    assert [int(request.headers["webhook-timestamp"]) * 1000 for request in tries] == started
    for request, at in zip(tries, started, strict=True):
        signature = standardwebhooks.Webhook(SECRET).sign(
            request.headers["webhook-id"], dt.datetime.fromtimestamp(at / 1000, dt.UTC), request.body.decode()
        )
        assert request.headers["webhook-signature"] == signature


def test_a_crash_after_the_answer_sends_the_same_id_and_bytes_again(live, receiver):
    there = receiver()
    w = live(hook_config(there.url(), 'text = "hello"\n'))
    w.trigger("comments", payload={"postId": 1})
    w.clock.at = START + 10 * digestd.MINUTE
    claims: list[digestd.Claim] = []
    while not claims:
        with digestd.transaction():
            claims = digestd.tick(w.config, w.now, w.room).claims
    assert [w.send(claim).outcome for claim in claims] == ["sent"]
    w.crash()
    w.open()
    w.tick()
    first, second = there.requests
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    assert w.one("SELECT state FROM jobs WHERE sender = 'hook'") == "completed"


# -- what a status means -----------------------------------------------------------------------------------------------

STATUSES = {
    200: "sent", 201: "sent", 202: "sent", 204: "sent", 299: "sent",
    301: "permanent", 302: "permanent", 303: "permanent", 304: "permanent", 307: "permanent", 308: "permanent",
    400: "permanent", 401: "permanent", 403: "permanent", 404: "permanent", 410: "permanent", 413: "permanent",
    422: "permanent",
    408: "temporary", 425: "temporary", 429: "temporary",
    500: "temporary", 501: "temporary", 502: "temporary", 503: "temporary", 504: "temporary", 599: "temporary",
}  # fmt: skip


@pytest.mark.parametrize(("status", "outcome"), STATUSES.items())
def test_a_status_means(receiver, status, outcome):
    there = receiver(status)
    result = post(there.url())
    assert (result.outcome, result.status_code) == (outcome, status)
    assert outcome == "sent" or str(status) in result.reason
    assert digestd.judge_status(status)[0] == outcome
    assert len(there.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_the_reason_names_where_it_leads(receiver, status):
    target = receiver()
    there = receiver(Answer(status, {"Location": target.url("/new/TOKEN")}))
    result = post(there.url())
    assert result.outcome == "permanent"
    assert str(status) in result.reason and f"127.0.0.1:{target.port}" in result.reason
    assert "TOKEN" not in result.reason
    assert target.requests == [] and len(there.requests) == 1


def test_a_redirect_to_the_same_host_does_not_tell_its_path(receiver):
    there = receiver(Answer(301, {"Location": "/hook/TOKEN/"}))
    result = post(there.url("/hook/TOKEN"))
    assert result.outcome == "permanent" and "301" in result.reason
    assert "TOKEN" not in result.reason
    assert len(there.requests) == 1


def test_a_redirect_that_names_another_host_without_a_scheme_is_told_as_such(receiver):
    there = receiver(Answer(301, {"Location": "//elsewhere.example.test/x"}))
    assert "elsewhere.example.test" in post(there.url()).reason


def test_two_timeouts_of_the_server_and_then_a_success_are_three_tries(live, receiver):
    there = receiver(408, 408, 200)
    w = live(hook_config(there.url()))
    w.trigger("comments", payload={"postId": 1})
    w.advance("1d")
    assert [result.outcome for _, _, result in w.sent] == ["temporary", "temporary", "sent"]
    assert w.one("SELECT state FROM jobs WHERE sender = 'hook'") == "completed"


def test_a_refusal_of_one_digest_leaves_the_others_alone(live, receiver):
    refused = []

    def answer(request: Any) -> int:
        one = json.loads(request.body)["data"]["digest"]["key"] == "p1"
        refused.append(one)
        return 429 if one and refused.count(True) == 1 else 200

    there = receiver(*[answer] * 4)
    w = live(hook_config(there.url()))
    for number in (1, 2, 3):
        w.trigger("comments", payload={"postId": f"p{number}"})
    w.advance("1h")
    keys = [json.loads(request.body)["data"]["digest"]["key"] for request in there.requests]
    assert sorted(keys) == ["p1", "p1", "p2", "p3"] and keys[3] == "p1"
    assert w.rows("SELECT DISTINCT state FROM jobs WHERE sender = 'hook'") == [("completed",)]


# -- Retry-After -------------------------------------------------------------------------------------------------------

AT_TEN = digestd.parse_instant("2026-03-09T10:00:00Z")


@pytest.mark.parametrize(
    ("value", "wait_s", "warnings"),
    [
        ("120", 120, 0),
        ("0", 5, 0),
        ("3", 5, 0),
        ("1000000000", 86_400, 0),
        ("9" * 400, 86_400, 0),
        ("Mon, 09 Mar 2026 10:02:00 GMT", 120, 0),
        ("Monday, 09-Mar-26 10:02:00 GMT", 120, 0),
        ("Mon Mar  9 10:02:00 2026", 120, 0),
        ("Mon, 09 Mar 2026 12:02:00 +0200", 120, 0),
        ("Mon, 09 Mar 2026 09:00:00 GMT", 5, 0),
        ("Fri, 09 Mar 2046 09:00:00 GMT", 86_400, 0),
        ("abc", 5, 1),
        ("-5", 5, 1),
        ("120.5", 5, 1),
        ("1e9", None, None),
        ("Mon, 99 Mar 2026 10:02:00 GMT", 5, 1),
        ("Mon, 09 Mar 99999 10:02:00 GMT", None, None),
        ("", 5, None),
    ],
)
def test_the_next_try_waits_for_the_longer_of_plan_and_retry_after(live, receiver, caplog, value, wait_s, warnings):
    there = receiver(Answer(429, {"Retry-After": value}), 200)
    w = live(hook_config(there.url()))
    w.clock.at = AT_TEN - 10 * digestd.MINUTE
    w.trigger("comments", payload={"postId": 1})
    w.run_until(AT_TEN)
    due_at = w.one("SELECT due_at FROM jobs WHERE state = 'delayed' AND sender = 'hook'")
    if wait_s is None:  # no whole number and no date: the own plan, or the cap
        assert due_at - AT_TEN in (5_000, 86_400_000)
    else:
        assert due_at - AT_TEN == wait_s * 1000
    if warnings is not None:
        assert sum("Retry-After" in record.getMessage() for record in caplog.records) == warnings
    w.advance("2d")
    assert [result.outcome for _, _, result in w.sent] == ["temporary", "sent"]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_retry_after_counts_with_every_temporary_answer(receiver, status):
    result = post(receiver(Answer(status, {"Retry-After": "120"})).url())
    assert (result.outcome, result.retry_after_ms, result.retry_at) == ("temporary", 120_000, None)


def test_retry_after_of_a_final_answer_starts_no_further_try(live, receiver):
    there = receiver(Answer(404, {"Retry-After": "5"}), Answer(200, {"Retry-After": "5"}))
    w = live(hook_config(there.url()))
    w.trigger("comments", payload={"postId": 1})
    w.trigger("comments", payload={"postId": 2})
    w.advance("1d")
    assert len(there.requests) == 2


def test_no_retry_after_is_none():
    assert digestd.parse_retry_after(None) == (None, None)


# -- when the other side misbehaves ------------------------------------------------------------------------------------


def test_a_refused_connection_is_tried_again_with_a_reason():
    result = post(f"http://127.0.0.1:{free_port()}/hook")
    assert result.outcome == "temporary" and "refused" in result.reason


def test_a_host_that_does_not_resolve_is_tried_again_with_a_reason():
    result = post("http://name.invalid/hook")
    assert result.outcome == "temporary" and "resolve" in result.reason


@pytest.mark.parametrize(
    "answer",
    [SILENCE, DRIP, Raw(b"HTTP/1.1 500 Oops\r\nContent-Le", "hang")],
    ids=["never answers", "drips", "stops in a header"],
)
def test_a_server_that_does_not_come_to_an_end_is_given_up_as_temporary(receiver, answer):
    there = receiver(answer)
    result = post(there.url(), timeout="300ms")
    assert (result.outcome, result.status_code) == ("temporary", None)
    assert "no answer within 300ms" in result.reason


def test_a_server_that_takes_no_connection_is_given_up_as_temporary():
    with socket.socket() as full:  # its queue is full, so that the handshake never ends
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(full.getsockname())
            waiting.append(one)
        result = post(f"http://127.0.0.1:{full.getsockname()[1]}/", timeout="300ms")
        for one in waiting:
            one.close()
    assert (result.outcome, result.reason) == ("temporary", "no answer within 300ms")


@pytest.mark.parametrize(
    "answer",
    [
        HANG_UP,
        Raw(b"garbage without an end of line"),
        Raw(b"\x00\xff" * 5000 + b"\r\n\r\n"),
        Raw(b"HTTP/1.1 abc Nonsense\r\n\r\n"),
        Raw(b"HTTP/1.1 200 OK\r\nNo colon here\r\n\r\n"),
        Raw(b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 100_000 + b"\r\n\r\n"),
        Raw(b"SSH-2.0-OpenSSH_9.2\r\n"),
        Raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    ],
    ids=[
        "nothing",
        "no line",
        "binary",
        "no status",
        "a bad header",
        "a huge header",
        "another protocol",
        "bad chunks",
    ],
)
def test_an_answer_that_is_none_is_tried_again_with_a_reason(receiver, caplog, answer):
    there = receiver(answer)
    result = post(there.url("/hooks/TOKEN"))
    assert result.outcome == "temporary"
    assert result.reason and "bug" not in result.reason and "TOKEN" not in result.reason
    assert result.reason.isprintable()


CUT = {
    "is cut": Raw(b"HTTP/1.1 %d S\r\nContent-Length: 100\r\n\r\n"),
    "never comes": Raw(b"HTTP/1.1 %d S\r\nContent-Length: 100\r\n\r\n", "hang"),
    "is no gzip": Raw(b"HTTP/1.1 %d S\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\ngarbage"),
}


@pytest.mark.parametrize("way", CUT)
@pytest.mark.parametrize(("status", "outcome"), [(200, "sent"), (410, "permanent"), (503, "temporary")])
def test_the_status_decides_also_when_the_body_of_the_answer(receiver, status, outcome, way):
    answer = CUT[way]
    there = receiver(Raw(answer.data % status, answer.then))
    result = post(there.url(), timeout="500ms")
    assert (result.outcome, result.status_code) == (outcome, status)


def test_only_the_first_kibibyte_of_an_answer_is_kept(receiver):
    there = receiver(Answer(500, {}, b"start " + b"z" * 3_000_000))
    result = post(there.url())
    assert result.outcome == "temporary" and "HTTP 500" in result.reason
    assert "start zzz" in result.reason
    assert len(result.reason) <= 1024 + len("HTTP 500: ")


def test_an_answer_cannot_forge_a_line(receiver):
    there = receiver(Answer(500, {}, "ä\n<3>ERROR forged\x1b[31m\u2028\x00".encode()))
    reason = post(there.url()).reason
    assert reason.isprintable() and reason.startswith("HTTP 500: ä <3>ERROR forged")


def test_an_answer_that_is_no_utf8_is_kept_readable(receiver):
    there = receiver(Answer(400, {}, b"caf\xe9"))
    assert post(there.url()).reason == "HTTP 400: caf\ufffd"


def test_a_dead_endpoint_sees_few_tries_at_growing_distances_and_then_the_message(live, receiver):
    port = free_port()
    config = hook_config(f"http://127.0.0.1:{port}/hook").replace('retry = ["5s", "1m"]\njitter = 0\n', "", 1)
    w = live(config)
    w.trigger("comments", payload={"postId": 1})
    w.advance("20m")  # the window's ten minutes, and ten in which nobody is there
    refused = [at for at, _, _ in w.sent]
    assert 3 <= len(refused) <= 12
    assert all(result.outcome == "temporary" for _, _, result in w.sent)
    there = receiver(port=port)
    w.advance("1d")
    assert len(there.requests) == 1
    times = [at for at, _, _ in w.sent]
    waits = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert waits == sorted(waits) and waits[0] >= 5_000


def test_an_endpoint_that_hangs_keeps_no_other_from_its_messages(daemon, receiver):
    hanging, quick = receiver(*[SILENCE] * 40), receiver()
    step = '[workflows.{0}]\n[[workflows.{0}.steps]]\nid = "send"\ntype = "chat"\nsender = "{0}"\n'
    sender = '[senders.{}]\ntype = "webhook"\nurl = "{}"\ntimeout = "60s"\n'
    d = daemon(
        '[daemon]\ndrain_timeout = "100ms"\n' + sender.format("a", hanging.url()) + sender.format("b", quick.url())
        + step.format("a") + step.format("b")
    )  # fmt: skip
    for name in ("a", "b"):
        for number in range(20):
            assert d.trigger(name, f"s{number}", {"n": number})[0] == 201
    wait_for(lambda: len(quick.requests) == 20, what="the messages of the endpoint that answers")
    wait_for(lambda: hanging.requests, what="a try at the endpoint that hangs")
    assert d.query("SELECT count(*) FROM jobs WHERE sender = 'a' AND state = 'completed'") == [(0,)]
    d.stop()


# -- addresses, TLS, proxies, secrets ----------------------------------------------------------------------------------


def test_an_ipv6_address_in_brackets_works(receiver):
    there = receiver(host="::1")
    assert post(there.url()).outcome == "sent"
    assert there.requests[0].headers["host"] == f"[::1]:{there.port}"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://example.test/x", "example.test/x", "http:///x", "http://::1:8081/h",
        "http://example.test/a b", "http://example.test/\r\nX: y", "http://example.test/\tx", "http://example.test:99999/",
        "",
    ],
)  # fmt: skip
def test_a_url_that_is_none_is_refused_when_the_config_is_read(tmp_path, url):
    with pytest.raises(digestd.ConfigError, match="url"):
        digestd.read_config(BASIC.replace('"http://127.0.0.1:9/hook"', json.dumps(url)), tmp_path / "config.toml")


@pytest.mark.parametrize(
    "secret", ["whsec_", "whsec_!!!", "plain", base64.b64encode(bytes(32)).decode(), "whsec_" + "A" * 8]
)
def test_a_signing_secret_that_is_none_is_refused_when_the_config_is_read(tmp_path, secret):
    config = BASIC.replace('type = "webhook"', f'type = "webhook"\nsecret = "{secret}"')
    with pytest.raises(digestd.ConfigError, match="secret"):
        digestd.read_config(config, tmp_path / "config.toml")


def test_credentials_in_the_url_are_sent_as_a_header(receiver):
    there = receiver()
    assert post(there.url("/hook", user="user:p%40ss@")).outcome == "sent"
    assert there.requests[0].headers["authorization"] == "Basic " + base64.b64encode(b"user:p@ss").decode()
    assert there.requests[0].target == "/hook"


def test_path_and_query_of_the_url_reach_the_endpoint(receiver):
    there = receiver()
    post(there.url("/workflows/a%2Fb/run?sp=%2Ftriggers%2Fmanual&sig=x%2By%3D&empty="))
    path, _, query = there.requests[0].target.partition("?")
    assert path == "/workflows/a%2Fb/run"
    assert urllib.parse.parse_qsl(query, keep_blank_values=True) == [
        ("sp", "/triggers/manual"), ("sig", "x+y="), ("empty", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("certificate", ["selfsigned", "expired", "elsewhere", "localhost"])
def test_an_endpoint_whose_certificate_is_not_trusted_gets_nothing_and_is_tried_again(receiver, certificate):
    there = receiver(certificate=certificate)
    result = post(there.url("/hooks/TOKEN"))
    assert result.outcome == "temporary"
    assert "TLS" in result.reason and "certificate" in result.reason and "TOKEN" not in result.reason
    assert there.requests == []


def test_plain_http_on_an_https_url_is_tried_again_with_a_reason(receiver):
    there = receiver()
    result = post(there.url("/hooks/TOKEN", scheme="https"))
    assert result.outcome == "temporary" and "TLS" in result.reason and "TOKEN" not in result.reason
    assert there.requests == []


TRUSTING = """
import asyncio, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import digestd

async def main():
    senders = digestd.Senders()
    for url in sys.argv[2:]:
        settings = digestd.WebhookSettings.model_validate({"type": "webhook", "url": url, "timeout": "5s"})
        claim = digestd.Claim(1, 1, 1, 0, "msg_1", "out", settings, message=digestd.Message("{}", "application/json"))
        result = await senders.send(claim)
        print(json.dumps([result.outcome, result.reason]))
    await senders.close()

asyncio.run(main())
"""


def test_with_a_trusted_authority_only_the_right_and_valid_certificate_is_sent_to(receiver):
    names = ("localhost", "elsewhere", "expired", "selfsigned")
    servers = [receiver(certificate=name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", TRUSTING, str(ROOT), *(one.url() for one in servers)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "SSL_CERT_FILE": str(CA)},
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [outcome for outcome, _ in results] == ["sent", "temporary", "temporary", "temporary"], done.stderr
    assert [len(one.requests) for one in servers] == [1, 0, 0, 0]
    for (_, reason), word in zip(results[1:], ("match|mismatch|not valid for", "expired", "self.signed"), strict=True):
        assert re.search(word, reason), reason


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_in_the_environment_redirects_nothing(monkeypatch, receiver, name):
    there, proxy = receiver(), receiver()
    monkeypatch.setenv(name, proxy.url(""))
    assert post(there.url()).outcome == "sent"
    assert len(there.requests) == 1 and proxy.requests == []


REDIRECT = Answer(302, {"Location": "/x/TOKEN"})


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/services/T000/B000/TOKEN", None), ("/hook?key=TOKEN", None), ("/hook#TOKEN", None),
        ("/hook/TOKEN", 500), ("/hook?key=TOKEN", 404), ("/hook/TOKEN", HANG_UP), ("/hook/TOKEN", SILENCE),
        ("/hook?key=TOKEN", Raw(b"nonsense\r\n\r\n")), ("/hook/TOKEN", REDIRECT),
    ],
    ids=["refused", "refused, query", "fragment", "500", "404", "hangs up", "silent", "nonsense", "redirect"],
)  # fmt: skip
def test_the_secret_in_a_url_is_in_no_reason_and_no_line_of_the_log(live, receiver, caplog, path, answer):
    caplog.set_level(logging.DEBUG)
    url = f"http://user:PASSWORD@127.0.0.1:{free_port()}{path}"  # nobody is there
    if answer is not None:
        url = receiver(answer, answer, answer).url(path, user="user:PASSWORD@")
    w = live(hook_config(url).replace('type = "webhook"', 'type = "webhook"\ntimeout = "200ms"'))
    w.trigger("comments", payload={"postId": 1})
    w.advance("1h")
    assert w.one("SELECT state FROM jobs WHERE sender = 'hook'") == "failed"
    stored = json.dumps(
        w.rows("SELECT * FROM v_jobs") + w.rows("SELECT * FROM attempts") + w.rows("SELECT * FROM v_trouble")
    )
    for words in (stored, str(w.reasons), sent_words(caplog), caplog.text):
        assert "TOKEN" not in words and "PASSWORD" not in words
    assert all(w.reasons)


@pytest.mark.parametrize("status", [404, 500])
def test_an_answer_that_repeats_the_url_does_not_bring_its_secret_into_the_reason(receiver, status):
    """As the frameworks do: "Cannot POST /services/…"."""

    def answer(request: Any) -> Answer:
        return Answer(status, {}, f"Cannot POST {request.target}".encode())

    there = receiver(answer)
    result = post(there.url("/services/T000/B000/SECRETTOKEN?key=SECRETKEY"))
    assert str(status) in result.reason
    assert "SECRETTOKEN" not in result.reason and "SECRETKEY" not in result.reason


def test_at_debug_level_no_secret_is_in_the_log_the_database_or_the_status(daemon, receiver, mail_server, cli):
    server = mail_server(login=("digestd", "right"))
    there = receiver(404)
    closed = free_port()
    config = f"""
[daemon]
log_level = "debug"
[senders.a]
type = "webhook"
url = "http://127.0.0.1:{closed}/services/PATHSECRET"
secret = "{SECRET}"
[senders.b]
type = "webhook"
url = "{there.url("/h?key=QUERYSECRET", user="u:USERSECRET@")}"
[senders.m]
type = "smtp"
port = {server.port}
tls = "none"
from = "digest@example.org"
username = "digestd"
password = "MAILSECRET"
"""
    for name, kind in (("a", "chat"), ("b", "chat"), ("m", "email")):
        config += f'[workflows.{name}]\n[[workflows.{name}.steps]]\nid = "send"\ntype = "{kind}"\nsender = "{name}"\n'
    d = daemon(config)
    for name in ("a", "b", "m"):
        assert d.trigger(name, ANN, {"n": 1})[0] == 201
    wait_for(lambda: d.query("SELECT count(*) FROM attempts WHERE outcome IS NOT NULL")[0][0] == 3, what="three tries")
    told = "".join(one.stdout + one.stderr for one in (cli("status", "--json"), cli("jobs", "--json"), cli("check")))
    told += json.dumps(d.request("GET", "/healthz")) + d.logged()
    told += "".join((d.folder / f"digestd.sqlite3{end}").read_bytes().decode("latin-1") for end in ("", "-wal"))
    d.stop()
    told += d.logged()
    found = ["PATHSECRET", "QUERYSECRET", "USERSECRET", "MAILSECRET", SECRET, SECRET.removeprefix("whsec_")]
    found += [base64.b64encode(text).decode().rstrip("=") for text in (b"MAILSECRET", b"\0digestd\0MAILSECRET")]
    assert [secret for secret in found if secret in told] == []
    assert set(server.logins) == {("digestd", "MAILSECRET")} and len(there.requests) == 1


# -- mail: what is in it -----------------------------------------------------------------------------------------------


def wire_is_fit(data: bytes) -> None:
    """The rules of the wire that hold for every mail: ASCII, CRLF alone, no line too long."""
    assert data.isascii()
    assert b"\r" not in data.replace(b"\r\n", b"") and b"\n" not in data.replace(b"\r\n", b"")
    head, _, body = data.partition(b"\r\n\r\n")
    assert max(map(len, head.split(b"\r\n"))) <= 900
    assert max(map(len, body.split(b"\r\n"))) <= 998


def test_a_mail_with_html_is_multipart_with_the_text_first(mail_server):
    server = mail_server()
    assert mail(smtp(server), text="Grüße\n", html="<p>Grüße</p>").outcome == "sent"
    (got,) = server.mails
    parts = list(got.message.iter_parts())
    assert got.message.get_content_type() == "multipart/alternative"
    assert [part.get_content_type() for part in parts] == ["text/plain", "text/html"]
    assert [part.get_content_charset() for part in parts] == ["utf-8", "utf-8"]
    assert (got.text(), got.text("html")) == ("Grüße\n", "<p>Grüße</p>")
    wire_is_fit(got.data)


def test_a_mail_without_html_is_plain_text(mail_server):
    server = mail_server()
    mail(smtp(server), text="hello\n")
    assert server.mails[0].message.get_content_type() == "text/plain"
    assert server.mails[0].text() == "hello\n"
    assert (server.mails[0].sender, server.mails[0].to) == ("digest@example.org", ["ann@example.test"])


def test_a_mail_with_html_alone_has_a_complete_text_all_the_same(mail_server):
    server = mail_server()
    mail(smtp(server), html="<p>x</p>", events=events_of({"n": "first"}, {"n": "second"}))
    text = server.mails[0].text()
    assert "first" in text and "second" in text


def test_a_mail_has_the_headers_of_a_digest(mail_server):
    server = mail_server()
    mail(smtp(server), text="x", subject="Hello", workflow="Meine Wünsche & mehr")
    head = server.mails[0].message
    assert head["Subject"] == "Hello"
    assert head["Message-ID"] == "<job_1@example.org>"
    assert head["Date"].datetime == dt.datetime(2026, 3, 9, 9, tzinfo=dt.UTC)
    assert head["Auto-Submitted"] == "auto-generated"
    assert re.fullmatch(r"<[A-Za-z0-9.-]+\.digestd\.example\.org>", head["List-Id"])
    assert head["MIME-Version"] == "1.0"
    for name in ("From", "To", "Subject", "Message-ID", "Date", "List-Id"):
        assert len(head.get_all(name)) == 1
    wire_is_fit(server.mails[0].data)


def test_a_mail_without_a_subject_template_has_the_workflows_name(mail_server):
    server = mail_server()
    mail(smtp(server), text="x", workflow="news of the day")
    assert server.mails[0].message["Subject"] == "news of the day"


@pytest.mark.parametrize(
    "subject",
    [
        "Ärger ☃",
        "Ї і Ж",
        "日本語の件名",
        "Family 👩‍👩‍👧 photo",
        "می‌خواهم",
        "A =?UTF-8?Q?=0A?=Bcc: x@example.test",
        "=?utf-8?b?QmNjOiB4?=",
        "100 % = ?x?",
        "ends in a blank-less backslash \\",
        '"quoted" <and> (commented), listed; with: signs',
    ],
)
def test_a_subject_arrives_as_it_was_written(mail_server, subject):
    server = mail_server()
    mail(smtp(server), text="x", subject="{{ payload.s }}", events=events_of({"s": subject}))
    (got,) = server.mails
    assert got.message["Subject"] == subject
    assert got.message["Bcc"] is None and got.message.get_all("Subject") == [subject]
    wire_is_fit(got.data)


@pytest.mark.parametrize(
    "break_", ["\r\n", "\n", "\r", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x00"]
)
def test_a_line_break_in_a_subject_becomes_a_blank(live, mail_server, break_):
    server = mail_server()
    w = live(mail_config(server.port, 'subject = "{{ payload.s }}"\ntext = "x"'))
    w.trigger("comments", ANN, {"postId": 1, "s": f"a{break_}Bcc: x@example.test"})
    w.advance("10m")
    (got,) = server.mails
    assert got.message["Subject"] == "a Bcc: x@example.test"
    assert got.message["Bcc"] is None and got.to == ["ann@example.test"]
    wire_is_fit(got.data)


@pytest.mark.parametrize("letter", ["x", "ä", "☃", "\U0001f600", "http://example.test/ "])
def test_a_subject_of_1100_characters_leaves_no_line_too_long(mail_server, letter):
    server = mail_server()
    subject = (letter * 1100)[:1100]
    mail(smtp(server), text="x", subject="{{ payload.s }}", events=events_of({"s": subject}))
    got = server.mails[0].message["Subject"]
    assert 100 <= len(got) <= 1100 and subject.startswith(got.rstrip("…"))
    wire_is_fit(server.mails[0].data)


@pytest.mark.parametrize(
    "name",
    [
        "Например Jörg",
        'Ann "the boss" O\'Neill',
        "Doe, Ann",
        "Ann <x@example.test>",
        "=?UTF-8?Q?=0A?=Bcc: x",
        "back\\slash",
        "ä" * 300,
    ],
)
def test_a_name_leaves_the_address_outside_the_encoded_word(mail_server, name):
    server = mail_server()
    mail(
        smtp(server, **{"from": "Nachrichten für alle <digest@example.org>"}), text="x", subscriber={"firstName": name}
    )
    (got,) = server.mails
    (to,), (sender,) = got.message["To"].addresses, got.message["From"].addresses
    assert (to.username, to.domain) == ("ann", "example.test")
    # a phrase of several encoded words is read with blanks between them by Python's parser, so compare without blanks
    shown, wanted = to.display_name.rstrip("…").replace(" ", ""), name.replace(" ", "")
    assert shown == wanted[: len(shown)] and len(shown) >= min(100, len(wanted))
    assert (sender.display_name, sender.addr_spec) == ("Nachrichten für alle", "digest@example.org")
    assert b"<ann@example.test>" in got.head and b"<digest@example.org>" in got.head
    assert got.message["Bcc"] is None
    wire_is_fit(got.data)


def test_a_line_break_in_a_name_starts_no_header(mail_server):
    server = mail_server()
    mail(smtp(server), text="x", subscriber={"firstName": "Ann\r\nBcc: x@example.test", "lastName": "\n\nY"})
    (got,) = server.mails
    assert got.message["Bcc"] is None and got.message["To"].addresses[0].addr_spec == "ann@example.test"
    wire_is_fit(got.data)


def test_a_non_ascii_domain_goes_in_its_ascii_form(mail_server):
    server = mail_server()
    assert mail(smtp(server), "ann@bücher.example", text="x").outcome == "sent"
    (got,) = server.mails
    assert got.to == ["ann@xn--bcher-kva.example"]
    assert b"ann@xn--bcher-kva.example" in got.head


def test_a_non_ascii_domain_of_the_sender_goes_in_its_ascii_form(mail_server):
    server = mail_server()
    result = mail(smtp(server, **{"from": "Digest <digest@bücher.example>"}), text="x")
    assert result.outcome == "sent", result.reason
    (got,) = server.mails
    assert got.sender == "digest@xn--bcher-kva.example"
    assert b"<digest@xn--bcher-kva.example>" in got.head
    assert all(name.isascii() for name in server.hello)


def test_a_domain_that_is_none_fails_for_good_before_any_connection(mail_server):
    server = mail_server()
    with pytest.raises(digestd.PermanentFailure, match="domain"):
        mail(smtp(server), "ann@" + "ä" * 70 + ".example", text="x")
    assert server.stages == []


def test_a_non_ascii_local_part_fails_for_good_where_the_server_cannot_take_it(mail_server):
    server = mail_server()
    result = mail(smtp(server), "jörg@example.test", text="x")
    assert result.outcome == "permanent"
    assert "SMTPUTF8" in result.reason and "jörg@example.test" in result.reason
    assert server.mails == [] and "MAIL" not in server.stages


def test_a_non_ascii_local_part_is_sent_in_utf8_where_the_server_can_take_it(mail_server):
    server = mail_server(utf8=True)
    result = mail(smtp(server), "jörg@example.test", text="x", subject="Grüße", subscriber={"firstName": "Jörg"})
    assert result.outcome == "sent", result.reason
    (got,) = server.mails
    assert got.to == ["jörg@example.test"] and "SMTPUTF8" in got.options
    assert "jörg@example.test".encode() in got.head  # not an encoded word, which would go nowhere
    assert got.message["Subject"] == "Grüße"


BAD_ADDRESSES = [
    "a@example.test, b@example.test", "a@example.test\nBcc: z@example.test", "a@b.test\r\nRCPT TO:<z@example.test>",
    " a@example.test ", "@", "a@@b", "a@", "@b", "a", "", "Ann <a@example.test>", "a@example.test>", "a b@example.test",
    "a@exa mple.test", "a@example.test;b@example.test", "a\x00@example.test", "a@example..test", "a@b." + "c" * 300,
]  # fmt: skip


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_a_bad_address_is_refused_at_the_door(live, address):
    w = live(mail_config(9))
    with pytest.raises(digestd.Rejected):
        w.trigger("comments", {"subscriberId": "s1", "email": address}, {"postId": 1})


@pytest.mark.parametrize("address", [address for address in BAD_ADDRESSES if "\x00" not in address])
def test_a_bad_address_in_the_database_never_reaches_the_server(live, mail_server, address):
    server = mail_server()
    w = live(mail_config(server.port))
    w.subscriber("s1")
    w.rows("UPDATE subscribers SET email = ? WHERE subscriber_id = 's1'", address)
    w.trigger("comments", "s1", {"postId": 1})
    w.trigger("comments", {"subscriberId": "s2", "email": "b@example.test"}, {"postId": 1})
    w.advance("1d")
    assert server.stages.count("CONNECT") == 1 and [one.to for one in server.mails] == [["b@example.test"]]
    state, reason = w.rows("SELECT state, reason FROM jobs WHERE sender = 'mail' AND state != 'completed'")[0]
    assert state in ("skipped", "failed") and "address" in reason


def test_a_subscriber_without_an_address_is_skipped_and_the_workflow_goes_on(live, receiver, mail_server):
    there, server = receiver(), mail_server()
    chat = '[[workflows.comments.steps]]\nid = "chat"\ntype = "chat"\nsender = "hook"\n'
    w = live(mail_config(server.port, more=chat).replace("http://127.0.0.1:9/hook", there.url()))
    w.trigger("comments", "s1", {"postId": 1})
    w.advance("10m")
    assert w.rows("SELECT state, reason FROM jobs WHERE sender = 'mail'") == [
        ("skipped", "the subscriber has no e-mail address")
    ]
    assert len(there.requests) == 1 and server.stages == []
    assert w.one("SELECT state FROM runs") == "completed"
    assert w.one("SELECT count(*) FROM v_trouble") == 0


@pytest.mark.parametrize(
    "text",
    [
        ".\n..\n.hidden\n\n.\n",
        ".",
        "From here\nFrom there\n",
        "x" * 5000,
        ("link http://example.test/" + "a" * 900 + " ") * 5,
        "  indented\n\ttab\ntrailing blanks  \n=3D=\n",
        "Ї" + "Ж" * 3000,
        "\x01\x07\x1b[31m\x0b\x0c\x1c\x1d\x1e\x7f\x85\u2028\u2029\U0001f600",
        "no end of line",
        "",
        "--=_job_1\n--=_job_1--\n",
    ],
    ids=[
        "dots",
        "one dot",
        "From",
        "5000",
        "long words",
        "blanks",
        "Cyrillic",
        "controls",
        "no end",
        "empty",
        "boundary",
    ],
)
@pytest.mark.parametrize("eight_bit", [True, False], ids=["8BITMIME", "7 bit"])
@pytest.mark.parametrize("html", [True, False], ids=["html", "plain"])
def test_a_text_arrives_unchanged(mail_server, text, eight_bit, html):
    server = mail_server(eight_bit=eight_bit)
    templates = {"text": "{{ payload.t }}", **({"html": "<pre>{{ payload.t }}</pre>"} if html else {})}
    result = mail(smtp(server), events=events_of({"t": text}), **templates)
    assert result.outcome == "sent", result.reason
    (got,) = server.mails
    assert got.text().removesuffix("\n") == text.removesuffix("\n")
    if html:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert got.text("html").removesuffix("\n") == f"<pre>{escaped}</pre>"
    assert not any(option.upper().startswith("BODY=8BIT") for option in ([] if eight_bit else got.options))
    wire_is_fit(got.data)


@pytest.mark.parametrize("break_", ["\r\n", "\r", "\n"])
def test_every_kind_of_line_end_is_crlf_on_the_wire(mail_server, break_):
    server = mail_server()
    mail(smtp(server), text="{{ payload.t }}", events=events_of({"t": f"a{break_}b{break_}"}))
    assert server.mails[0].text().removesuffix("\n") == "a\nb"
    wire_is_fit(server.mails[0].data)


def test_nul_in_a_payload_does_not_stop_the_mail(mail_server):
    server = mail_server()
    assert mail(smtp(server), text="{{ payload.t }}", events=events_of({"t": "x\x00y"})).outcome == "sent"
    assert server.mails[0].text().removesuffix("\n") in ("xy", "x y", "x\ufffdy")


# -- mail: the talk with the server ------------------------------------------------------------------------------------


def secure(server: MailServer, tls: str, **settings: Any) -> digestd.SmtpSettings:
    return smtp(server, **{"tls": tls, "ca_file": str(CA), **settings})


LOGIN = {"username": "digestd", "password": "s3cret"}


@pytest.mark.parametrize("tls", ["none", "starttls", "implicit"])
@pytest.mark.parametrize("with_login", [True, False], ids=["login", "no login"])
def test_mail_goes_out_under_each_kind_of_tls(mail_server, tls, with_login):
    server = mail_server(tls=tls, login=("digestd", "s3cret") if with_login else None)
    result = mail(secure(server, tls, **(LOGIN if with_login else {})), text="x")
    assert (result.outcome, result.status_code) == ("sent", 250)
    assert "4711" in result.reason  # what the server called it
    assert len(server.mails) == 1
    assert server.logins == ([("digestd", "s3cret")] if with_login else [])
    assert set(server.hello) == {"example.org"}


def test_the_name_in_the_greeting_can_be_set(mail_server):
    server = mail_server()
    mail(smtp(server, hello="box.example.net"), text="x")
    assert server.hello == ["box.example.net"]


def test_a_server_that_does_not_offer_starttls_gets_neither_mail_nor_password(mail_server):
    server = mail_server(login=("digestd", "s3cret"))
    result = mail(secure(server, "starttls", **LOGIN), text="x")
    assert result.outcome == "temporary" and "TLS" in result.reason
    assert server.logins == [] and server.mails == [] and "MAIL" not in server.stages


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
@pytest.mark.parametrize(
    ("certificate", "word"),
    [("selfsigned", "self.signed"), ("expired", "expired"), ("elsewhere", "mismatch|match|not valid for")],
)
def test_a_bad_certificate_is_tried_again_with_the_reason_and_nothing_is_sent(mail_server, tls, certificate, word):
    server = mail_server(tls=tls, certificate=certificate, login=("digestd", "s3cret"))
    result = mail(secure(server, tls, **LOGIN), text="x")
    assert result.outcome == "temporary"
    assert re.search(word, result.reason), result.reason
    assert server.logins == [] and server.mails == [] and "MAIL" not in server.stages


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
def test_an_authority_nobody_named_is_not_trusted(mail_server, tls):
    server = mail_server(tls=tls)
    result = mail(smtp(server, tls=tls), text="x")
    assert result.outcome == "temporary" and "certificate" in result.reason
    assert server.mails == []


def test_implicit_tls_with_a_server_that_speaks_plainly_is_tried_again(mail_server):
    server = mail_server()
    result = mail(secure(server, "implicit", timeout="2s"), text="x")
    assert result.outcome == "temporary" and result.reason
    assert server.mails == []


def test_a_ca_file_that_is_not_there_is_refused_with_its_name_when_the_config_is_read(mail_server):
    with pytest.raises(ValueError, match="there is no file nowhere.pem"):
        secure(mail_server(tls="starttls"), "starttls", ca_file="nowhere.pem")


def test_a_wrong_password_is_tried_again_and_the_reason_says_login(mail_server, caplog):
    caplog.set_level(logging.DEBUG)
    server = mail_server(tls="starttls", login=("digestd", "another"))
    result = mail(secure(server, "starttls", **LOGIN), text="x")
    assert (result.outcome, result.status_code) == ("temporary", 535)
    assert "login" in result.reason and "wrong name or password" in result.reason
    assert "s3cret" not in result.reason and server.mails == []
    said = sent_words(caplog)
    assert "s3cret" not in said and base64.b64encode(b"\0digestd\0s3cret").decode() not in said


def test_a_server_without_logins_is_tried_again_and_the_reason_says_so(mail_server):
    server = mail_server(tls="starttls")
    result = mail(secure(server, "starttls", **LOGIN), text="x")
    assert result.outcome == "temporary" and "AUTH" in result.reason
    assert server.mails == []


@pytest.mark.parametrize("stage", ["MAIL", "RCPT", "DATA", "DOT"])
@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ("421 4.7.0 try again later", "temporary"),
        ("450 4.2.1 mailbox busy", "temporary"),
        ("451 4.7.1 greylisted", "temporary"),
        ("452 4.3.1 full", "temporary"),
        ("550 5.1.1 no such user", "permanent"),
        ("552 5.3.4 message too big", "permanent"),
        ("554 5.7.1 not here", "permanent"),
    ],
)
def test_the_first_digit_of_a_reply_decides_at_every_stage(mail_server, stage, reply, outcome):
    server = mail_server(**{stage: reply})
    result = mail(smtp(server), text="x")
    code, _, words = reply.partition(" ")
    assert (result.outcome, result.status_code) == (outcome, int(code))
    assert code in result.reason and words in result.reason
    assert server.mails == []


@pytest.mark.parametrize(
    ("stage", "reply"),
    [("CONNECT", "421 4.3.2 shutting down"), ("CONNECT", "450 4.3.2 too busy"), ("EHLO", "421 4.3.2 shutting down")],
)
def test_a_server_that_is_busy_at_the_greeting_is_tried_again(mail_server, stage, reply):
    server = mail_server(**{stage: reply})
    result = mail(smtp(server), text="x")
    assert result.outcome == "temporary" and reply[:3] in result.reason
    assert server.mails == []


@pytest.mark.parametrize("stage", ["CONNECT", "EHLO", "AUTH", "MAIL", "RCPT", "DATA", "DOT"])
def test_a_connection_that_breaks_is_tried_again(mail_server, stage):
    server = mail_server(login=("digestd", "s3cret"), **{stage: DROP})
    result = mail(smtp(server, **LOGIN), text="x")
    assert result.outcome == "temporary"
    assert result.reason and "bug" not in result.reason
    assert server.mails == []


@pytest.mark.parametrize("stage", ["CONNECT", "EHLO", "MAIL"])
def test_a_break_before_the_text_was_sent_is_no_possible_duplicate(mail_server, stage):
    result = mail(smtp(mail_server(**{stage: DROP})), text="x")
    assert "twice" not in result.reason


def test_a_refused_connection_to_the_mail_server_is_tried_again():
    result = mail(smtp(free_port()), text="x")
    assert result.outcome == "temporary" and re.search("refused|connect", result.reason, re.IGNORECASE)


def test_a_mail_server_that_does_not_resolve_is_tried_again():
    result = mail(smtp(25, host="name.invalid"), text="x")
    assert result.outcome == "temporary" and result.reason and "bug" not in result.reason


@pytest.mark.parametrize("stage", ["CONNECT", "DOT"])
def test_a_mail_server_that_hangs_is_given_up_as_temporary(mail_server, stage):
    server = mail_server(**{stage: HANG})
    result = mail(smtp(server, timeout="300ms"), text="x")
    assert result.outcome == "temporary" and result.reason and "bug" not in result.reason


@pytest.mark.parametrize("reply", [DROP, "421 4.4.2 good bye", "500 what?"])
def test_an_error_at_quit_leaves_the_mail_sent(live, mail_server, reply):
    server = mail_server(QUIT=reply)
    w = live(mail_config(server.port))
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("1d")
    assert [result.outcome for _, _, result in w.sent] == ["sent"]
    assert len(server.mails) == 1


def test_a_server_that_hangs_at_quit_leaves_the_mail_sent(mail_server):
    """Also when the time of the try runs out there: a mail that was taken is not sent again."""
    server = mail_server(QUIT=HANG)
    result = mail(smtp(server, timeout="700ms"), text="x")
    assert len(server.mails) == 1
    assert result.outcome == "sent", result.reason


# -- mail: over several tries ------------------------------------------------------------------------------------------


def test_a_mail_that_was_put_off_twice_arrives_once_with_the_same_bytes(live, mail_server):
    server = mail_server(MAIL=["421 4.7.0 later"] * 2)
    config = mail_config(server.port, 'text = "first"').replace('retry = ["1m"]', 'retry = ["1m", "5m"]')
    w = live(config)
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("10m")
    w.use(config.replace("first", "edited"))
    w.advance("1h")
    assert [result.outcome for _, _, result in w.sent] == ["temporary", "temporary", "sent"]
    assert w.minutes == [10, 10, 11]  # once more at once, where a server says 421 before it takes anything
    (got,) = server.mails
    assert got.text().strip() == "first"
    assert w.rows("SELECT outcome, status_code FROM attempts ORDER BY id") == [
        ("temporary", 421),
        ("temporary", 421),
        ("sent", 250),
    ]


def test_a_greylist_of_six_minutes_is_outwaited_by_the_default_plan(live, mail_server):
    def until_six_minutes() -> str | None:
        return "451 4.7.1 greylisted" if w.now < START + 16 * digestd.MINUTE else None

    server = mail_server(RCPT=[until_six_minutes] * 50)
    w = live(mail_config(server.port).replace('retry = ["1m"]\njitter = 0\n', ""))
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("2d")
    assert len(server.mails) == 1
    assert w.minutes[1] - w.minutes[0] >= 1
    assert sum(smtp(server).retry) >= 6 * digestd.HOUR


def test_an_error_after_the_dot_is_not_taken_for_success(live, mail_server):
    server = mail_server(DOT="452 4.3.1 full")
    w = live(mail_config(server.port))
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("1h")
    assert [result.outcome for _, _, result in w.sent] == ["temporary", "sent"]
    assert len(server.mails) == 1


def test_a_connection_lost_after_the_dot_may_repeat_the_mail_with_the_same_id_and_says_so(live, mail_server):
    server = mail_server(DOT=DROP, keep_at_dot=True)
    w = live(mail_config(server.port))
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("1h")
    first, second = server.mails
    assert first.message["Message-ID"] == second.message["Message-ID"] and first.data == second.data
    assert [result.outcome for _, _, result in w.sent] == ["temporary", "sent"]
    assert "twice" in w.reasons[0]


def test_a_refused_recipient_fails_once_and_the_others_get_their_mail(live, mail_server):
    server = mail_server(RCPT="550 5.1.1 no such user")
    w = live(mail_config(server.port))
    w.trigger("comments", ANN, {"postId": 1})
    w.trigger("comments", {"subscriberId": "s2", "email": "b@example.test"}, {"postId": 1})
    w.advance("1d")
    failed = w.rows("SELECT id, reason FROM jobs WHERE state = 'failed'")
    assert len(failed) == 1 and "550" in failed[0][1] and "no such user" in failed[0][1]
    assert w.one("SELECT count(*) FROM attempts WHERE job_id = ?", failed[0][0]) == 1
    assert len(server.mails) == 1


def test_a_digest_too_big_for_the_mail_server_fails_for_good_and_the_others_go_out(live, mail_server):
    server = mail_server(DOT="552 5.3.4 message too big")
    w = live(mail_config(server.port, 'subject = "{{ steps.digest.eventCount }}"'))
    w.subscriber("s1", email="ann@example.test")
    w.rows(
        "INSERT INTO events (workflow, subscriber_id, payload, received_at) WITH RECURSIVE n(i) AS"
        " (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"
        " SELECT 'comments', 's1', json_object('postId', 1, 'n', i), ? FROM n", START
    )  # fmt: skip
    w.tick()
    w.trigger("comments", "s1", {"postId": 2})
    w.advance("1d")
    assert [result.outcome for _, _, result in w.sent] == ["permanent", "sent"]
    assert "552 5.3.4 message too big" in w.one("SELECT reason FROM jobs WHERE state = 'failed'")
    assert server.mails[0].message["Subject"] == "1"


def test_a_webhook_that_fails_does_not_repeat_the_mail_that_went_out(live, receiver, mail_server):
    there, server = receiver(500, 500, 200), mail_server()
    chat = '[[workflows.comments.steps]]\nid = "chat"\ntype = "chat"\nsender = "hook"\n'
    w = live(mail_config(server.port, more=chat).replace("http://127.0.0.1:9/hook", there.url()))
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("1d")
    assert (len(server.mails), len(there.requests)) == (1, 3)


# -- the log as a sender -----------------------------------------------------------------------------------------------


def test_no_text_of_an_event_can_forge_a_line_of_the_log(caplog):
    caplog.set_level(logging.INFO)
    breaks = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    text = "".join(f"a{char}<3>ERROR forged" for char in breaks) + "\x1b[2K\x00"
    settings = digestd.LogSettings(type="log")
    draft = draft_of(settings, events=events_of({"t": text}), subject="{{ payload.t }}", text="{{ payload.t }}")
    assert send(settings, digestd.compose(draft)).outcome == "sent"
    (record,) = [record for record in caplog.records if record.name == "digestd"]
    head, *body = record.getMessage().split("\n")
    assert head.startswith("message msg_1 by out to s1: ") and len(body) >= 2
    assert all(line.startswith("  | ") for line in body)
    assert all(line.isprintable() for line in (head, *body))


def test_an_id_of_another_program_cannot_forge_a_line_of_the_log(caplog):
    caplog.set_level(logging.INFO)
    settings = digestd.LogSettings(type="log")
    draft = draft_of(settings, subscriber={"subscriberId": "s1\n<3>ERROR forged"}, text="x")
    send(settings, digestd.compose(draft))
    (record,) = [record for record in caplog.records if record.name == "digestd"]
    assert all(line.startswith("  | ") for line in record.getMessage().split("\n")[1:])


def test_in_the_daemons_log_a_forged_line_stays_behind_its_bar(daemon):
    d = daemon(
        '[senders.out]\ntype = "log"\n[workflows.w]\n[[workflows.w.steps]]\nid = "say"\ntype = "chat"\nsender = "out"\n'
        'subject = "{{ payload.t }}"\ntext = "{{ payload.t }}"\n'
    )
    assert d.trigger("w", "s1", {"t": "one\r\n<3>ERROR forged\nend-of-it"})[0] == 201
    wait_for(lambda: d.query("SELECT count(*) FROM jobs WHERE state = 'completed'")[0][0], what="the message")
    d.stop()
    lines = [line for line in d.logged().splitlines() if "forged" in line]
    assert len(lines) == 2  # in the subject, and in the body
    assert all("  | <3>ERROR forged" in line or "message" in line for line in lines)


# -- templates ---------------------------------------------------------------------------------------------------------


def test_templates_see_payload_subscriber_workflow_and_steps():
    template = (
        "{{ payload.a.b }}|{{ subscriber.firstName }}|{{ subscriber.data.plan }}|{{ workflow.name }}|"
        "{{ steps.digest.eventCount }}|{{ steps.digest.countSummary }}|{{ steps.digest.sentenceSummary }}|"
        "{% for e in steps.digest.events %}{{ e.id }} {{ e.time }} {{ e.payload.name }};{% endfor %}"
    )
    events = events_of({"a": {"b": "x"}, "name": "Ada"}, {"name": "Grace"}, {"name": "Linus"})
    draft = draft_of(
        events=events, subscriber={"firstName": "Zoë", "data": {"plan": "gold"}}, subject=template, text=template
    )
    at = "2026-03-09T09:00:00Z"
    expected = f"x|Zoë|gold|news|3|3 notifications|Ada, Grace, and 1 other|1 {at} Ada;2 {at} Grace;3 {at} Linus;"
    rendered = digestd.render_content(draft)
    assert rendered["text"] == expected
    assert rendered["subject"].rstrip("…") == expected[: len(rendered["subject"].rstrip("…"))]


def test_a_step_without_templates_renders_nothing():
    assert digestd.render_content(draft_of()) == {}


TRICKY = "{{ config }} {0.__class__} ${x} {% raw %} <b>&\"'"


def test_text_of_an_event_is_never_a_template_and_is_escaped_in_html(mail_server):
    server = mail_server()
    mail(
        smtp(server), text="{{ payload.name }}", html="<p>{{ payload.name }}</p>", subject="{{ payload.name }}",
        events=events_of({"name": TRICKY}),
    )  # fmt: skip
    (got,) = server.mails
    assert got.text().strip() == TRICKY
    assert got.message["Subject"] == TRICKY
    html = got.text("html").strip()
    assert "&lt;b&gt;&amp;" in html and "{{ config }}" in html
    assert "<" not in html.removeprefix("<p>").removesuffix("</p>")


def test_html_that_the_template_asks_for_as_it_is_stays_as_it_is():
    draft = draft_of(events=events_of({"name": "<b>"}), html="{{ payload.name | safe }}")
    assert digestd.render_content(draft)["html"] == "<b>"


def test_a_template_that_fails_on_one_event_fails_that_job_alone(live, receiver):
    there = receiver()
    w = live(hook_config(there.url(), 'text = "{{ 100 | divided_by: payload.n }}"\n'))
    for number, n in enumerate((1, 0, 2), 1):
        w.trigger("comments", payload={"postId": number, "n": n})
    w.advance("1d")
    assert sorted(json.loads(request.body)["data"]["text"] for request in there.requests) == ["100", "50"]
    ((digest_id, reason, tries),) = w.rows(
        "SELECT r.digest_id, j.reason, (SELECT count(*) FROM attempts a WHERE a.job_id = j.id)"
        " FROM jobs j JOIN runs r ON r.id = j.run_id WHERE j.state = 'failed'"
    )
    assert digest_id == 2 and "template failed" in reason and tries == 1
    assert w.one("SELECT count(*) FROM v_trouble") == 1


@pytest.mark.parametrize("items", [None, [], "text", {}, 5], ids=repr)
def test_a_list_that_is_none_stops_no_digest(live, receiver, items):
    there = receiver()
    w = live(
        hook_config(
            there.url(), 'text = "{% for i in payload.items %}{{ i.name }}{% endfor %}{{ payload.items | size }}"\n'
        )
    )
    for number, value in enumerate(([{"name": "a"}], items, [{"name": "b"}]), 1):
        w.trigger("comments", payload={"postId": number, "items": value})
    w.advance("1d")
    texts = [json.loads(request.body)["data"]["text"] for request in there.requests]
    assert {"a1", "b1"} <= set(texts)
    assert w.one("SELECT count(*) FROM jobs WHERE state IN ('delayed', 'waiting', 'active')") == 0


@pytest.mark.parametrize(
    "sender", ["", 'sender = "hook"', 'sender = "mail"'], ids=["feed", "feed and webhook", "feed and mail"]
)
def test_a_template_that_fails_in_an_in_app_step_stops_only_itself(live, receiver, sender):
    """With a mail sender and nobody to send it to, the feed's row is rendered on another way."""
    there = receiver()
    more = (
        '[workflows.feed]\n[[workflows.feed.steps]]\nid = "feed"\ntype = "in_app"\n'
        f'text = "{{{{ 100 | divided_by: payload.n }}}}"\n{sender}\n'
    )
    w = live(hook_config(there.url(), more))
    w.trigger("feed", payload={"n": 0})
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    assert any(json.loads(request.body)["data"]["workflow"] == "comments" for request in there.requests)
    assert w.rows("SELECT state FROM jobs WHERE type = 'in_app'") == [("failed",)]
    assert "template failed" in w.one("SELECT reason FROM jobs WHERE type = 'in_app'")


HOSTILE = {
    "nested loops": "{% for a in (1..1000) %}{% for b in (1..1000) %}x{% endfor %}{% endfor %}",
    "one endless loop": "{% for a in (1..100000000) %}x{% endfor %}",
    "huge output": "{% for a in (1..90000) %}" + "0123456789" * 10 + "{% endfor %}",
    "doubling": '{% assign s = "0123456789" %}' + "{% assign s = s | append: s %}" * 23,
    "doubling by capture": '{% assign s = "0123456789" %}' + "{% capture s %}{{ s }}{{ s }}{% endcapture %}" * 23,
    "a long range as text": "{{ (1..1000000) | join: ',' }}",
    "a file": "{% include 'config.toml' %}",
    "a file by render": "{% render 'config.toml' %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped_and_the_others_go_out(live, receiver, template):
    there = receiver()
    more = '[workflows.bad]\n[[workflows.bad.steps]]\nid = "out"\ntype = "push"\nsender = "hook"\n'
    w = live(hook_config(there.url(), more + f"text = {json.dumps(template)}\n"))
    w.trigger("bad")
    w.trigger("comments", payload={"postId": 1})
    w.advance("10m")
    assert [json.loads(request.body)["data"]["workflow"] for request in there.requests] == ["comments"]
    state, reason = w.rows("SELECT state, reason FROM jobs WHERE type = 'push'")[0]
    assert state == "failed" and "template" in reason and "bug" not in reason


@pytest.mark.parametrize(
    "expression",
    [
        "payload.__class__", "payload.__class__.__mro__", "payload['__class__']", "workflow.__init__.__globals__",
        "steps.digest.events.__len__", "steps.digest.events[0].payload.keys", "subscriber.get", "payload.t.upper",
        "payload.t.__class__", "config", "environment", "self",
    ],
)  # fmt: skip
def test_a_template_cannot_reach_into_python(expression):
    draft = draft_of(events=events_of({"t": "x"}), text="[{{ " + expression + " }}]")
    assert digestd.render_content(draft)["text"] == "[]"


def test_composing_the_same_draft_twice_gives_the_same_message():
    settings = smtp(25)
    draft = draft_of(settings, "email", subscriber={"email": "a@example.test"}, text="x", html="<p>y</p>", subject="ä")
    assert digestd.compose(draft) == digestd.compose(draft)


def test_a_draft_that_nothing_foresaw_fails_for_good_and_not_with_a_traceback_upwards():
    draft = draft_of(events=[digestd.DigestedEvent(1, START, "no json", None)], text="{{ payload.x }}")
    with pytest.raises(digestd.PermanentFailure):
        digestd.compose(draft)


# -- more of webhooks: secrets that rotate, headers, addresses that data names, proxies ---------------------------------


def test_while_a_secret_rotates_both_verify(receiver):
    there = receiver()
    old = "whsec_" + base64.b64encode(bytes(range(32, 64))).decode()
    post(there.url(), secret=[SECRET, old], at=int(dt.datetime.now().timestamp() * 1000))
    [request] = there.requests
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, old):
        assert standardwebhooks.Webhook(secret).verify(request.body.decode(), dict(request.headers)) == {"a": 1}


def test_every_webhook_carries_its_id_as_an_idempotency_key_too(receiver):
    there = receiver()
    post(there.url())
    assert there.requests[0].headers["idempotency-key"] == there.requests[0].headers["webhook-id"] == "msg_1"


def test_headers_of_ones_own_are_sent_and_come_before_ours(receiver):
    there = receiver()
    post(there.url(), headers={"Authorization": "Bearer x", "content-type": "application/cloudevents+json"})
    headers = there.requests[0].headers
    assert headers["authorization"] == "Bearer x" and headers["content-type"] == "application/cloudevents+json"


def test_an_answer_that_repeats_our_headers_does_not_bring_their_secrets_into_the_reason(receiver):
    there = receiver(Answer(500, {}, b'{"authorization": "Bearer s3cret-token", "x": "other-key"}'))
    result = post(there.url(), headers={"Authorization": "Bearer s3cret-token", "X-Key": "other-key"})
    assert result.outcome == "temporary" and "s3cret" not in result.reason and "other-key" not in result.reason


def test_a_receiver_may_end_the_tries_of_one_message(receiver):
    there = receiver(Answer(503, {"webhook-delivery": "abort-message"}))
    result = post(there.url())
    assert result.outcome == "permanent" and "no more tries" in result.reason


def test_410_says_that_the_endpoint_is_gone(receiver):
    there = receiver(410, 404)
    assert (post(there.url()).cause, post(there.url()).cause) == ("gone", None)


@pytest.mark.parametrize(
    ("address", "config", "data"),
    [
        ("8.8.8.8", True, True), ("2001:4860:4860::8888", True, True),
        ("127.0.0.1", True, False), ("::1", True, False), ("10.1.2.3", True, False), ("192.168.1.1", True, False),
        ("172.16.0.1", True, False), ("100.64.0.1", True, False), ("0.0.0.0", True, False), ("fd00::1", True, False),
        ("::ffff:127.0.0.1", True, False), ("64:ff9b::7f00:1", True, False), ("2002:7f00:1::", True, False),
        ("224.0.0.1", True, False), ("::", True, False), ("255.255.255.255", True, False),
        ("169.254.169.254", False, False), ("::ffff:169.254.169.254", False, False), ("64:ff9b::a9fe:a9fe", False, False),
        ("fe80::1", False, False), ("fd00:ec2::254", False, False),
    ],
)  # fmt: skip
def test_which_addresses_are_reached_by_a_url_of_the_config_and_by_one_of_data(address, config, data):
    for allowed, fine in ((None, config), ([], data)):
        try:
            digestd.refuse_address(address, allowed)
        except digestd.PermanentFailure:
            assert not fine, (address, allowed)
        else:
            assert fine, (address, allowed)


def test_networks_that_are_allowed_are_reached_but_never_those_of_the_link():
    digestd.refuse_address("10.1.2.3", ["10.0.0.0/8"])
    digestd.refuse_address("::ffff:10.1.2.3", ["10.0.0.0/8"])
    with pytest.raises(digestd.PermanentFailure):
        digestd.refuse_address("169.254.169.254", ["0.0.0.0/0"])


PERSONAL = """
[senders.personal]
type = "webhook"
url_from = "subscriber.data.hookUrl"
allow_addresses = ["127.0.0.0/8"]
[workflows.w]
[[workflows.w.steps]]
id = "c"
type = "chat"
sender = "personal"
"""


def test_each_subscriber_has_a_url_of_its_own_and_a_retry_keeps_it(live, receiver):
    one, two = receiver(503), receiver()
    w = live(PERSONAL)
    for name, there in (("s1", one), ("s2", two)):
        w.subscriber(name, data={"hookUrl": there.url(f"/{name}")})
        w.trigger("w", name)
    w.tick()
    w.subscriber("s1", data={"hookUrl": two.url("/elsewhere")})
    w.advance("10s")
    assert [request.target for request in one.requests] == ["/s1", "/s1"]
    assert [request.target for request in two.requests] == ["/s2"]


@pytest.mark.parametrize(
    ("url", "state", "words"),
    [
        (None, "skipped", "nothing stands at subscriber.data.hookUrl"),
        (5, "failed", "no text"),
        ("ftp://example.org/", "failed", "http"),
        ("http://u:p@example.org/", "failed", "no name and password"),
        ("http://10.0.0.1/", "failed", "not a public address"),
        ("http://169.254.169.254/latest/meta-data", "failed", "link"),
        ("http://[::ffff:127.0.0.1]:9/", "failed", None),
        ("http://127.1:9/", "failed", "no address"),
        ("http://2130706433:9/", "failed", "no address"),
        ("http://0177.0.0.1:9/", "failed", "no address"),
        ("http://0x7f.1:9/", "failed", "not a public address"),
        ("http://0x7f000001:9/", "failed", "not a public address"),
        ("http://１２７.0.0.1:9/", "failed", "not a public address"),
        ("http://localtest.invalid/", "delayed", "resolved"),
    ],
)
def test_a_url_of_data_that_is_not_to_be_reached_stops_only_its_message(live, url, state, words):
    w = live(PERSONAL.replace('["127.0.0.0/8"]', '["192.0.2.0/24"]'))
    w.subscriber("s1", data={"hookUrl": url} if url is not None else {})
    w.trigger("w", "s1")
    w.tick()
    found, reason = w.one("SELECT state, coalesce(reason, (SELECT reason FROM attempts)) FROM jobs")
    assert found == state and (words is None or words in reason), reason
    assert w.rows("SELECT * FROM senders WHERE state = 'disabled'") == []


def test_a_name_that_leads_to_a_private_address_is_refused_when_data_names_it(live):
    w = live(PERSONAL.replace('["127.0.0.0/8"]', "[]"))
    w.subscriber("s1", data={"hookUrl": "http://localhost:9/"})
    w.trigger("w", "s1")
    w.tick()
    assert "not a public address" in w.one("SELECT reason FROM jobs WHERE state = 'failed'")


def test_a_url_may_stand_in_the_credentials_that_novus_clients_set(live, receiver):
    there = receiver()
    w = live(PERSONAL.replace("subscriber.data.hookUrl", "subscriber.credentials.slack.webhookUrl"))
    with digestd.transaction():
        digestd.upsert_subscriber("s1", {}, w.now)
        body = {"providerId": "slack", "credentials": {"webhookUrl": there.url("/mine")}}
        digestd.set_credentials("s1", body, False, w.now)
    w.trigger("w", "s1")
    w.tick()
    [request] = there.requests
    assert request.target == "/mine" and b"mine" not in request.body, "one provider's secret goes to no other"


def test_one_subscribers_dead_address_disables_nobody(live, receiver):
    there = receiver(410)
    w = live(PERSONAL)
    w.subscriber("s1", data={"hookUrl": there.url()})
    w.trigger("w", "s1")
    w.tick()
    assert w.one("SELECT state FROM jobs") == "failed" and w.rows("SELECT * FROM senders") == []


def test_a_proxy_is_asked_where_one_is_set_and_only_then(receiver, monkeypatch):
    proxy, there = receiver(), receiver()
    address = f"http://127.0.0.1:{proxy.port}"
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, address)
    post(there.url())
    assert len(there.requests) == 1 and proxy.requests == [], "the environment alone redirects nothing"
    post(there.url(), proxy=address)
    assert proxy.requests[0].target == there.url()
    post(there.url(), proxy="environment")
    assert len(proxy.requests) == 2
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    post(there.url(), proxy="environment")
    assert len(there.requests) == 2


def test_one_connection_serves_many_messages_and_senders(receiver):
    there = receiver()

    async def send_all() -> None:
        senders = digestd.Senders()
        for settings in [hook(there.url()), hook(there.url("/b"))] * 5:
            message = digestd.Message("{}", "application/json")
            await senders.send(digestd.Claim(1, 1, 1, START, "m", "out", settings, message=message))
        await senders.close()

    asyncio.run(send_all())
    assert len(there.requests) == 10 and there.accepted == 1


def test_an_authority_of_ones_own_is_trusted_by_its_sender_alone(receiver):
    there = receiver(certificate="localhost")
    url = there.url().replace("127.0.0.1", "localhost")
    assert post(url).outcome == "temporary" and there.requests == []
    assert post(url, ca_file=str(CA)).outcome == "sent"
    assert post(url).outcome == "temporary" and len(there.requests) == 1


# -- more of mail: connections that are kept, threads, the end of a mail, sendmail ---------------------------------------


def mail_many(settings: digestd.SmtpSettings, count: int, pause: float = 0) -> list[digestd.SendResult]:
    """Mails one after the other by the same senders."""
    message = digestd.compose(draft_of(settings, "email", subscriber={"email": "ann@example.test"}, text="x"))

    async def send_all() -> list[digestd.SendResult]:
        senders = digestd.Senders()
        results = []
        for number in range(count):
            claim = digestd.Claim(number, number, 1, START, f"m{number}", "out", settings, message=message)
            results.append(await senders.send(claim))
            await asyncio.sleep(pause)
        await senders.close()
        return results

    return asyncio.run(send_all())


def test_fifty_mails_share_a_connection_and_the_next_one_has_its_own(mail_server):
    server = mail_server(login=("digestd", "s3cret"))
    results = mail_many(smtp(server, **LOGIN), 51)
    assert {result.outcome for result in results} == {"sent"} and len(server.mails) == 51
    assert server.stages.count("CONNECT") == 2 and server.stages.count("AUTH") == 2
    assert server.stages[-1] == "QUIT", "the connection that was kept is ended properly"


def test_an_idle_connection_is_ended_after_a_while(mail_server, monkeypatch):
    monkeypatch.setattr(digestd, "MAIL_IDLE_S", 0.05)
    server = mail_server()
    mail_many(smtp(server), 2, pause=0.4)
    assert server.stages.count("CONNECT") == 2 and server.stages.count("QUIT") == 2


@pytest.mark.parametrize("reply", [DROP, "421 4.4.2 idle for too long"])
def test_a_connection_that_the_server_closed_meanwhile_is_no_failure(mail_server, reply):
    server = mail_server(MAIL=[None, reply])
    results = mail_many(smtp(server), 2)
    assert [result.outcome for result in results] == ["sent", "sent"] and len(server.mails) == 2
    assert server.stages.count("CONNECT") == 2


def test_a_refused_recipient_leaves_the_connection_to_the_next_mail(mail_server):
    server = mail_server(RCPT=["550 5.1.1 no such user"])
    results = mail_many(smtp(server), 3)
    assert [result.outcome for result in results] == ["permanent", "sent", "sent"]
    assert server.stages.count("CONNECT") == 1


def test_a_break_after_the_text_was_sent_is_not_tried_again_at_once(mail_server):
    server = mail_server(DOT=[None, DROP])
    results = mail_many(smtp(server), 2)
    assert [(result.outcome, result.at_once) for result in results] == [("sent", False), ("temporary", False)]


@pytest.mark.parametrize("stage", ["EHLO", "MAIL", "RCPT"])
def test_a_server_that_hangs_up_on_a_new_connection_asks_for_one_more_try_at_once(mail_server, stage):
    assert mail(smtp(mail_server(**{stage: DROP})), text="x").at_once
    assert mail(smtp(mail_server(**{stage: "421 4.7.0 later"})), text="x").at_once
    assert not mail(smtp(mail_server(**{stage: "451 4.7.1 greylisted"})), text="x").at_once


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("451 4.7.1 greylisted", "4.7.1"),
        ("550 5.1.1 no such user", "5.1.1"),
        ("450 busy", None),
        ("451 14.7.1 x", None),
    ],
)
def test_the_finer_code_of_a_mail_server_is_kept_beside_the_other(live, mail_server, reply, code):
    server = mail_server(RCPT=reply)
    w = live(mail_config(server.port))
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("10m")
    assert w.one("SELECT status_code, enhanced_code FROM attempts WHERE number = 1") == (int(reply[:3]), code)
    w.advance("1h")
    if code == "4.7.1":
        assert w.one("SELECT status_code, enhanced_code FROM v_attempts WHERE number = 2") == (250, "2.0.0")


def test_a_full_mailbox_is_given_its_time(mail_server):
    assert mail(smtp(mail_server(RCPT="552 5.2.2 mailbox full")), text="x").outcome == "temporary"
    assert mail(smtp(mail_server(RCPT="550 5.2.1 mailbox disabled")), text="x").outcome == "permanent"


def test_a_refused_login_disables_the_sender_and_the_mails_wait(live, mail_server):
    server = mail_server(tls="starttls", login=("digestd", "right"))
    secure_mail = f'tls = "starttls"\nusername = "digestd"\npassword = "wrong"\nca_file = "{CA}"\nhost = "localhost"'
    config = mail_config(server.port).replace('tls = "none"', secure_mail)
    w = live(config)
    for name in ("s1", "s2"):
        w.trigger("comments", {**ANN, "subscriberId": name}, {"postId": 1})
    w.advance("1d")
    assert len(server.logins) <= 2 and w.rows("SELECT name, state, cause FROM senders") == [
        ("mail", "disabled", "login")
    ]
    assert w.rows("SELECT DISTINCT state FROM jobs") == [("waiting",)]
    w.use(config.replace("wrong", "right"))
    with digestd.transaction():
        digestd.enable_mended(["mail"])
    w.tick()
    assert len(server.mails) == 2 and w.rows("SELECT DISTINCT state FROM jobs") == [("completed",)]


def test_a_login_that_cannot_be_checked_now_is_tried_again(mail_server):
    server = mail_server(login=("digestd", "s3cret"), AUTH="454 4.7.0 temporary authentication failure")
    result = mail(smtp(server, **LOGIN), text="x")
    assert (result.outcome, result.cause) == ("temporary", None)


def test_the_name_in_a_certificate_can_be_set(mail_server):
    server = mail_server(tls="starttls", certificate="elsewhere")
    settings = {"tls": "starttls", "ca_file": str(CA), "host": "localhost"}
    assert mail(smtp(server, **settings), text="x").outcome == "temporary"
    assert mail(smtp(server, **settings, server_name="elsewhere.example.org"), text="x").outcome == "sent"


def headers_of(draft: digestd.Draft) -> Any:
    import email
    import email.policy

    return email.message_from_bytes(digestd.compose(draft).body.encode(), policy=email.policy.default)


def mail_draft(settings: Any = None, **more: Any) -> digestd.Draft:
    return draft_of(settings or smtp(1), "email", subscriber={"email": "ann@example.test"}, text="x", **more)


def test_mails_of_one_workflow_and_subscriber_are_one_thread():
    first, second = headers_of(mail_draft()), headers_of(dataclasses.replace(mail_draft(), public_id="job_2"))
    assert (
        first["References"] == first["In-Reply-To"] == second["References"]
        and first["Message-ID"] != second["Message-ID"]
    )
    other = headers_of(mail_draft(workflow="other"))
    assert other["References"] != first["References"]


@pytest.mark.parametrize(("thread", "alike"), [("workflow", "kd"), ("key", "d"), ("day", "k"), ("none", None)])
def test_what_a_thread_goes_by_can_be_set(thread, alike):
    settings = smtp(1, thread=thread)
    one, key = headers_of(mail_draft(settings)), headers_of(dataclasses.replace(mail_draft(settings), digest_key='"x"'))
    day = headers_of(dataclasses.replace(mail_draft(settings), created_at=START + digestd.DAY))
    if alike is None:
        assert one["References"] is None and one["In-Reply-To"] is None
        return
    assert (one["References"] == key["References"]) == ("k" in alike)
    assert (one["References"] == day["References"]) == ("d" in alike)


def test_a_mail_tells_whom_to_answer(mail_server):
    found = headers_of(mail_draft(smtp(1, reply_to="Zoë <team@example.org>")))
    assert found["Reply-To"] == "Zoë <team@example.org>"


UNSUBSCRIBE = '[api]\npublic_url = "https://digest.example.org/x/"\n'


def test_a_mail_can_be_ended_at_one_click_where_the_config_has_a_public_url(live, mail_server):
    server = mail_server()
    w = live(mail_config(server.port, """text = "stop: {{ unsubscribe_url }}" """, UNSUBSCRIBE))
    w.trigger("comments", {**ANN, "subscriberId": "s" * 255}, {"postId": 1})
    w.advance("10m")
    [got] = server.mails
    url = got.message["List-Unsubscribe"].strip("<>")
    assert url.startswith("https://digest.example.org/x/u/") and len(url) < 100
    assert got.message["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    assert f"stop: {url}" in got.text()
    assert b"List-Unsubscribe: <https" in got.head, "not encoded, and not folded"
    found = digestd.find_subscription(w.config, url.rpartition("/")[2])
    assert found == ("s" * 255, "comments", "email")


@pytest.mark.parametrize("more", ["", UNSUBSCRIBE + "[workflows.comments]\ncritical = true\n"])
def test_no_link_is_promised_where_none_would_work(live, mail_server, more):
    server = mail_server()
    config = mail_config(server.port, more=more.partition("[workflows")[0])
    if "critical" in more:
        config = config.replace("[workflows.comments]\n", "[workflows.comments]\ncritical = true\n")
    w = live(config)
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("10m")
    assert server.mails[0].message["List-Unsubscribe"] is None


def test_a_token_that_was_changed_or_is_of_another_database_stands_for_nothing(live):
    w = live(mail_config(1))
    w.trigger("comments", ANN, {"postId": 1})
    token = digestd.unsubscribe_token(1, "s1", "comments", "email")
    assert digestd.find_subscription(w.config, token) is not None
    for wrong in (token[:-1], "2" + token[1:], token + "x", "", ".", "1.", "x.y", "1." + "\ud800", "9" * 40 + ".x"):
        assert digestd.find_subscription(w.config, wrong) is None, wrong


SENDMAIL = """#!/bin/sh
cat > "$(dirname "$0")/mail.txt"
echo "$0: told so" >&2
exit {code}
"""


def sendmail(folder: Any, script: str) -> digestd.SendmailSettings:
    program = folder / "sendmail"
    program.write_text(script)
    program.chmod(0o755)
    table = {"type": "sendmail", "command": [str(program), "-t", "-i"], "from": "d@example.org", "timeout": "5s"}
    return digestd.SendmailSettings.model_validate(table)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(0, "sent"), (64, "permanent"), (65, "permanent"), (67, "permanent"), (68, "permanent"), (77, "permanent"),
     (78, "permanent"), (69, "temporary"), (75, "temporary"), (1, "temporary"), (127, "temporary")],
)  # fmt: skip
def test_an_exit_code_of_sendmail_means(tmp_path, code, outcome):
    settings = sendmail(tmp_path, SENDMAIL.format(code=code))
    result = send(settings, digestd.compose(mail_draft(settings)))
    assert result.outcome == outcome and (code == 0 or (f"exit {code}" in result.reason and "told so" in result.reason))
    got = (tmp_path / "mail.txt").read_bytes()
    assert b"\r" not in got and b"\nTo: ann@example.test\n" in got


def test_a_sendmail_that_is_not_there_or_hangs_is_tried_again_and_leaves_nothing_behind(tmp_path):
    settings = sendmail(tmp_path, '#!/bin/sh\necho $$ > "$(dirname $0)/pid"\nsleep 60 & wait\n')
    gone = settings.model_copy(update={"command": [str(tmp_path / "nope")]})
    result = send(gone, digestd.compose(mail_draft(settings)))
    assert result.outcome == "temporary" and "cannot run" in result.reason
    hung = settings.model_copy(update={"timeout": 300})
    result = send(hung, digestd.compose(mail_draft(settings)))
    assert result.outcome == "temporary" and "no answer within" in result.reason
    group = (tmp_path / "pid").read_text().strip()
    left = subprocess.run(["ps", "-o", "stat=", "-g", group], capture_output=True, text=True).stdout.split()
    assert [state for state in left if not state.startswith("Z")] == []


def test_mail_by_sendmail_needs_an_address_as_any_mail_does(live, tmp_path):
    program = sendmail(tmp_path, SENDMAIL.format(code=0)).command[0]
    config = mail_config(1).replace(
        'type = "smtp"\ntls = "none"\nport = 1', f'type = "sendmail"\ncommand = ["{program}"]'
    )
    w = live(config)
    w.trigger("comments", "nobody", {"postId": 1})
    w.trigger("comments", ANN, {"postId": 1})
    w.advance("10m")
    assert w.rows("SELECT state, reason FROM jobs ORDER BY id") == [
        ("skipped", "the subscriber has no e-mail address"), ("completed", None)
    ]  # fmt: skip
