"""Checking triggers and recording their events, once."""

from __future__ import annotations

import copy
import json

import pytest

import digestd
from conftest import BASIC, START, statements


def check(w, **body):
    return digestd.check_trigger(w.config, {"name": "comments", "to": "s1", **body}, w.now)


def test_the_same_transaction_again_records_nothing_and_answers_the_same(world):
    w = world()
    first = w.trigger("comments", payload={"n": 1, "x": 1.0}, id="t1")
    again = w.trigger("comments", payload={"x": 1, "n": 1}, id="t1")
    assert first == again == digestd.TriggerAnswer("processed", "t1")
    assert w.one("SELECT count(*) FROM events") == 1


def test_a_transaction_id_reused_with_other_content_is_an_error_and_never_swallowed(world):
    w = world()
    w.trigger("comments", payload={"n": 1}, id="t1")
    answer = w.trigger("comments", payload={"n": True}, id="t1")
    assert answer.status == "error" and "used before" in answer.errors[0]
    assert w.one("SELECT count(*) FROM events") == 1


def test_an_id_stays_used_after_its_cancel(world):
    w = world()
    w.trigger("comments", payload={"n": 1}, id="t1")
    assert w.cancel("t1")
    w.trigger("comments", payload={"n": 1}, id="t1")
    w.advance("1h")
    assert w.sent == []


def test_one_id_may_be_used_once_for_each_subscriber_and_workflow(world):
    w = world()
    for subscriber in ("a", "b"):
        assert w.trigger("comments", subscriber, {"n": 1}, "t1").status == "processed"
    assert w.one("SELECT count(*) FROM events") == 2


def test_without_an_id_each_trigger_gets_one_of_its_own(world):
    w = world()
    ids = {w.trigger("comments").transaction_id for _ in range(3)}
    assert len(ids) == 3 and all(w.cancel(one) for one in ids)


def test_a_row_without_a_transaction_id_gets_one_when_it_is_placed(world):
    w = world()
    w.rows("INSERT INTO events (workflow, subscriber_id, received_at) VALUES ('comments', 's1', ?)", START)
    w.tick()
    assert w.cancel(w.one("SELECT transaction_id FROM events"))


def test_recipients_are_taken_once_each_and_their_fields_kept(world):
    w = world()
    people = ["s1", "s1", {"subscriberId": "s2", "email": "a@example.org", "data": {"plan": "pro"}}]
    w.trigger("comments", people)
    w.trigger("comments", {"subscriberId": "s2", "firstName": "Ada", "email": None})
    assert w.rows("SELECT subscriber_id, first_name, email, data FROM subscribers ORDER BY id") == [
        ("s2", "Ada", None, '{"plan":"pro"}'),
        ("s1", None, None, None),
    ]
    assert w.one("SELECT count(*) FROM events") == 3


def test_ids_that_differ_in_case_are_different_people(world):
    w = world()
    for name in ("Ann", "ann"):
        w.trigger("comments", name)
    assert w.one("SELECT count(*) FROM subscribers") == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": None}, 400), ({"name": ""}, 400), ({"name": "nothing"}, 422), ({"to": None}, 400), ({"to": ""}, 422),
        ({"to": []}, 422), ({"to": ["s1", ""]}, 422), ({"to": {"email": "x@example.org"}}, 422), ({"to": 7}, 422),
        ({"to": " s1"}, 422), ({"to": "a\x00b"}, 422), ({"to": "a\nb"}, 422), ({"to": "x" * 256}, 422),
        ({"to": {"subscriberId": "s1", "email": "a@b, c@d"}}, 422), ({"to": {"subscriberId": "s1", "email": "a@b\nBcc: z@z"}}, 422),
        ({"to": {"subscriberId": "s1", "timezone": "Mars/Phobos"}}, 422), ({"to": {"subscriberId": "s1", "data": [1]}}, 422),
        ({"payload": []}, 400), ({"payload": "x"}, 400), ({"payload": {"n": float("inf")}}, 400),
        ({"payload": {"t": "a\ud83d"}}, 400), ({"transactionId": ""}, 422), ({"transactionId": 5}, 422),
    ],
)  # fmt: skip
def test_a_bad_trigger_is_refused_as_a_whole(world, body, status):
    w = world()
    with pytest.raises(digestd.Rejected) as caught:
        check(w, **body)
    assert caught.value.status == status and caught.value.message
    assert w.one("SELECT count(*) FROM events") == w.one("SELECT count(*) FROM subscribers") == 0


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", '{"a":NaN}', '{"a":-Infinity}', b"\xe9", "[" * 20_000 + "]" * 20_000, "[" * 101 + "]" * 101,
     '{"n":' + "1" * 5000 + "}", '{"a":1}x'],
    ids=["empty", "no JSON", "NaN", "Infinity", "latin-1", "20,000 levels", "101 levels", "5,000 digits", "more behind it"],
)  # fmt: skip
def test_bytes_that_are_no_json_are_refused_with_a_reason(text):
    with pytest.raises(digestd.Rejected) as caught:
        digestd.parse_json(text if isinstance(text, bytes) else text.encode())
    assert caught.value.status == 400


def test_a_mark_in_front_doubled_keys_and_a_hundred_levels_are_taken():
    assert digestd.parse_json(b"\xef\xbb\xbf" + b'{"a":1,"a":2}') == {"a": 2}
    assert digestd.parse_json("[" * 100 + "]" * 100)


def test_big_numbers_and_odd_characters_arrive_whole(world):
    w = world()
    payload = {
        "id": 1285704473650888702,
        "big": 123456789012345678901234567890,
        "neg": -9223372036854775809,
        "t": "x\x00y\u2028",
    }
    w.trigger("comments", payload=payload)
    w.advance("10m")
    assert w.digested() == [[payload]]
    assert "1285704473650888702" in w.sent[0][1].message.body


def test_an_event_whose_window_is_known_is_written_once(world):
    """The hot path, counted: one statement for the event. The others are shared by all that come together."""
    w = world()
    w.trigger("comments", payload={"postId": 1})
    seen = statements(lambda: w.trigger("comments", payload={"postId": 1}))
    assert [sql.split()[0] for sql in seen] == ["BEGIN", "PRAGMA", "INSERT", "COMMIT"]
    assert w.rows("SELECT state, digest_id, placed_at FROM events") == [("placed", 1, START)] * 2


def test_an_event_that_opens_a_window_costs_a_handful_of_statements(world):
    w = world()
    seen = [sql.split()[0] for sql in statements(lambda: w.trigger("comments", payload={"postId": 1}))]
    assert seen.count("INSERT") <= 3 and seen.count("UPDATE") == 1 and len(seen) <= 11, seen


def test_text_that_is_not_utf8_in_a_row_fails_that_event_alone(world):
    w = world()
    w.rows(
        "INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', CAST(x'7b22ff227d' AS TEXT), ?)",
        START,
    )
    w.rows(
        "INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', ?, ?)",
        json.dumps({"n": 1}),
        START,
    )
    w.advance("10m")
    assert w.digested() == [[{"n": 1}]]
    assert "UTF-8" in w.one("SELECT reason FROM v_trouble")


def taken(w, *calls):
    """Triggers that came together; (status, whether something was wrong) of each."""
    with digestd.transaction():
        triggers = [digestd.check_trigger(w.config, {"name": "comments", "to": "s1", **one}, w.now) for one in calls]
        answers = digestd.take_triggers(w.config, triggers, w.now)
    return [(answer.status, len(answer.errors)) for answer in answers]


@pytest.mark.parametrize("known", [True, False])
def test_a_repeat_among_triggers_that_come_together_is_told_as_if_they_came_alone(world, known):
    w = world()
    if known:
        w.trigger("comments", payload={"postId": 1})
    one, other = {"postId": 1, "n": 1}, {"postId": 1, "n": 2}
    answers = taken(
        w,
        {"payload": one, "transactionId": "a"},
        {"payload": {"n": 1.0, "postId": 1}, "transactionId": "a"},
        {"payload": other, "transactionId": "a"},
        {"payload": other, "transactionId": "b", "to": ["s1", "s2"]},
        {"payload": one, "transactionId": "b", "to": ["s1", "s2"]},
    )
    assert answers == [("processed", 0), ("processed", 0), ("error", 1), ("processed", 0), ("error", 2)]
    stored = w.rows("SELECT transaction_id, subscriber_id, payload FROM events WHERE transaction_id IN ('a', 'b')")
    assert stored == [
        ("a", "s1", digestd.json_text(one)),
        ("b", "s1", digestd.json_text(other)),
        ("b", "s2", digestd.json_text(other)),
    ]


def test_triggers_that_come_together_keep_their_order_whatever_is_known_of_them(world):
    w = world()
    w.trigger("comments", payload={"postId": 1, "n": 0})
    calls = [{"payload": {"postId": 1, "n": 1}}, {"payload": {"postId": 2, "n": 2}}]
    calls += [{"payload": {"postId": 1, "n": 3}, "to": {"subscriberId": "s1", "firstName": "Ada"}}]
    calls += [{"payload": {"postId": 2, "n": 4}}, {"payload": {"postId": 1, "n": 5}}]
    assert taken(w, *calls) == [("processed", 0)] * 5
    numbers = [w.rows("SELECT json_extract(payload, '$.n') FROM events ORDER BY id")]
    assert numbers == [[(n,) for n in range(6)]]
    w.advance("10m")
    assert sorted([event["n"] for event in digest] for digest in w.digested()) == [[0, 1, 3, 5], [2, 4]]


# -- payload schemas ---------------------------------------------------------------------------------------------------

SCHEMA = BASIC.replace(
    "[workflows.comments]",
    """[workflows.comments]
payload_schema = { type = "object", required = ["postId"], properties = { postId = { type = "integer", minimum = 1 }, \
lang = { type = "string", default = "en" }, by = { type = "object", properties = { name = { default = "nobody" } } }, \
tags = { type = "array", items = { type = "string" } } } }""",
)


def test_a_payload_that_its_schema_does_not_allow_is_refused_with_all_that_is_wrong(world):
    w = world(SCHEMA)
    with pytest.raises(digestd.Rejected) as refused:
        check(w, payload={"postId": 0, "lang": 1, "tags": ["a", 2, None]})
    assert refused.value.status == 400
    assert [where for where, _ in refused.value.problems] == [
        "payload.lang", "payload.postId", "payload.tags.1", "payload.tags.2"
    ]  # fmt: skip
    with pytest.raises(digestd.Rejected, match='payload: "postId" is a required property'):
        check(w, payload={})


def test_what_a_payload_lacks_is_filled_in_as_its_schema_says(world):
    w = world(SCHEMA)
    w.trigger("comments", payload={"postId": 1, "by": {}})
    w.trigger("comments", payload={"postId": 2, "lang": "de"})
    assert [json.loads(text) for (text,) in w.rows("SELECT payload FROM events ORDER BY id")] == [
        {"postId": 1, "by": {"name": "nobody"}, "lang": "en"}, {"postId": 2, "lang": "de"}
    ]  # fmt: skip


def test_a_row_is_held_to_its_schema_when_it_is_placed(world):
    w = world(SCHEMA)
    insert = "INSERT INTO events (workflow, subscriber_id, payload, received_at) VALUES ('comments', 's1', ?, ?)"
    for text in ('{"postId":1}', '{"postId":"one"}', '{"postId":1,"n":2}'):
        w.rows(insert, text, w.now)
    w.advance("10m")
    assert w.digested() == [[{"postId": 1, "lang": "en"}, {"postId": 1, "n": 2, "lang": "en"}]]
    state, reason = w.one("SELECT state, reason FROM events WHERE id = 2")
    assert state == "failed" and 'payload.postId: "one" is not of type "integer"' in reason


def test_the_same_transaction_again_is_the_same_with_its_defaults(world):
    w = world(SCHEMA)
    answers = [
        w.trigger("comments", payload=payload, id="t1") for payload in ({"postId": 1}, {"postId": 1, "lang": "en"})
    ]
    assert answers[0] == answers[1] and not answers[0].errors


def test_a_schema_in_a_file_of_its_own_is_read_with_the_config_and_watched(tmp_path):
    (tmp_path / "comments.json").write_text('{"properties": {"postId": {"type": "integer"}}}', "utf-8")
    text = BASIC.replace("[workflows.comments]", '[workflows.comments]\npayload_schema = "comments.json"')
    config = digestd.read_config(text, tmp_path / "config.toml")
    assert tmp_path / "comments.json" in config.files
    with pytest.raises(digestd.Rejected):
        digestd.check_trigger(config, {"name": "comments", "to": "s1", "payload": {"postId": "x"}}, START)


OBJECT = {"properties": {"lang": {"default": "en"}}}


@pytest.mark.parametrize(
    ("schema", "payload", "filled"),
    [
        (OBJECT, {}, {"lang": "en"}),
        (OBJECT, {"lang": None}, {"lang": None}),
        ({"properties": {"who": OBJECT}}, {}, {}),
        ({"properties": {"who": {**OBJECT, "default": {}}}}, {}, {"who": {"lang": "en"}}),
        ({"properties": {"who": OBJECT}}, {"who": {"id": 1}}, {"who": {"id": 1, "lang": "en"}}),
        (
            {"properties": {"all": {"items": OBJECT}}},
            {"all": [{}, {"lang": "de"}, 1]},
            {"all": [{"lang": "en"}, {"lang": "de"}, 1]},
        ),
        ({"allOf": [OBJECT, {"properties": {"n": {"default": 0}}}]}, {}, {"lang": "en", "n": 0}),
        ({"anyOf": [OBJECT]}, {}, {}),
        (
            {"properties": {"who": {"$ref": "#/$defs/who"}}, "$defs": {"who": OBJECT}},
            {"who": {}},
            {"who": {"lang": "en"}},
        ),
        ({"properties": {"next": {"$ref": "#", "default": {}}}}, {}, {"next": {"next": {}}}),
    ],
    ids=["top", "null", "absent", "default", "inside", "items", "allOf", "anyOf", "$ref", "itself"],
)
def test_defaults_are_filled_in_wherever_the_schema_says_so(schema, payload, filled):
    before = copy.deepcopy(payload)
    assert digestd.payload_rule(schema).with_defaults(payload) == filled
    assert payload == before


def test_a_payload_that_lacks_nothing_is_the_same_object():
    payload = {"all": [{"lang": "de"}], "lang": "fr"}
    schema = {"properties": {"all": {"items": OBJECT}, "lang": {"default": "en"}}}
    assert digestd.payload_rule(schema).with_defaults(payload) is payload


@pytest.mark.parametrize(
    ("schema", "known"),
    [
        ({"properties": {"a": {"properties": {"b": {}}}}}, True),
        ({"properties": {"a": {}}}, False),
        ({"allOf": [{"properties": {"x": {}}}, {"properties": {"a": {"anyOf": [{"properties": {"b": {}}}]}}}]}, True),
        (
            {
                "$ref": "#/$defs/all",
                "$defs": {"all": {"properties": {"a": {"$ref": "#/$defs/a"}}}, "a": {"properties": {"b": {}}}},
            },
            True,
        ),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"$ref": "#/$defs/all"}}}, False),
        ({}, False),
    ],
)
def test_a_digest_key_is_looked_for_in_all_that_a_schema_is_made_of(schema, known):
    assert digestd.payload_rule(schema).knows(["a", "b"]) is known
