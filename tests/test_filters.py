"""Novu's three Liquid filters and the summaries of a digest step, so that templates can be carried over unchanged."""

from __future__ import annotations

import contextlib
import html
from typing import Any

import pytest

import digestd
from conftest import START

NAMES = ["John", "Josh", "Sarah", "Alex", "Emma"]
PEOPLE = [{"payload": {"name": name}} for name in ("Ada", "Grace", "Linus", "Ken", "Dennis")]


def rendered(template: str, kind: str = "text", **context: Any) -> str:
    return digestd.render_template(template, context, kind)


# -- toSentence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[], "text", None, 123, {}], ids=repr)
def test_a_sentence_of_what_is_no_list_is_empty(value):
    assert digestd.filter_to_sentence(value) == ""
    assert rendered("[{{ value | toSentence }}]", value=value) == "[]"


def test_a_sentence_of_something_that_is_not_there_is_empty():
    assert rendered("[{{ payload.nothing | toSentence: 'name' }}]", payload={}) == "[]"


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (NAMES[:1], (), "John"),
        (NAMES[:2], (), "John and Josh"),
        (NAMES[:2], ("", 1), "John and Josh"),
        (NAMES[:3], ("", 3), "John, Josh, and Sarah"),
        (NAMES[:4], (), "John, Josh, and 2 others"),
        (NAMES, (), "John, Josh, and 3 others"),
        (NAMES[:3], ("", 2, "other"), "John, Josh, and 1 other"),
        (NAMES[:2], ("", 2, "other", " + ", " or ", " & "), "John or Josh"),
        (NAMES[:3], ("", 2, "other", " + ", " or ", " & "), "John + Josh & 1 other"),
        (NAMES, ("", 1), "John and 4 others"),
        (NAMES, ("", 3), "John, Josh, Sarah, and 2 others"),
        (NAMES, ("", 5), "John, Josh, Sarah, Alex, and Emma"),
        (NAMES[:4], ("", 0), ", and 4 others"),
    ],
)
def test_names_become_a_sentence(names, arguments, expected):
    assert digestd.filter_to_sentence(names, *arguments) == expected


@pytest.mark.parametrize(
    ("items", "key", "expected"),
    [
        ([{"name": "John"}, {"name": "Josh"}, {"name": "Sarah"}], "name", "John, Josh, and Sarah"),
        ([{"id": 1}, {"id": 2}, {"id": 3}], "id", "1, 2, and 3"),
        ([{"profile": {"name": name}} for name in NAMES[:3]], "profile.name", "John, Josh, and Sarah"),
        ([{"name": "John"}, {"name": None}, {}], "name", "John, , and "),
        ([{"name": "John"}, "Josh", {"name": {"a": 1}}], "name.a", ", , and 1"),
        ([{"on": True}, {"on": False}, {"on": 1.5}], "on", "true, false, and 1.5"),
    ],
)
def test_names_are_found_at_a_path(items, key, expected):
    assert digestd.filter_to_sentence(items, key, 3) == expected


def test_an_object_in_a_sentence_is_json_as_novu_writes_it_and_an_empty_one_is_nothing():
    items = [{"who": {"a": 1, "b": [1, 2]}}, {"who": {}}]
    assert digestd.filter_to_sentence(items, "who") == '{"a":1,"b":[1,2]} and '


# -- pluralize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        ([], ""), (["a"], "1 item"), (["a", "b"], "2 items"), (["a", "b", "c"], "3 items"),
        ("0", ""), ("1", "1 item"), ("2", "2 items"), ("10", "10 items"), ("asdf", ""), ("1_000", ""),
        (0, ""), (1, "1 item"), (2, "2 items"), (10, "10 items"),
        (True, "1 item"), (False, ""), (float("nan"), ""),
        (-1, ""), (-2, ""), (-10, ""), ("-5", ""), ({}, ""), ("invalid", ""),
        ({"a": 1}, "1 item"), ({"a": 1, "b": 2}, "2 items"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_count_and_its_noun(value, expected):
    assert digestd.filter_pluralize(value, "item", "items") == expected
    assert rendered("{{ value | pluralize: 'item', 'items' }}", value=value) == expected


def test_a_count_of_something_that_is_not_there_is_empty():
    assert rendered("[{{ payload.nothing | pluralize: 'item' }}]", payload={}) == "[]"


@pytest.mark.parametrize("count", [999_999, 1_000_000, 1_234_567, 123_456_789_012], ids=str)
def test_a_large_count_keeps_its_digits(count):
    assert digestd.filter_pluralize(count, "byte", "bytes") == f"{count} bytes"


@pytest.mark.parametrize(("one", "many"), [("child", "children"), ("person", "people")])
def test_a_plural_that_is_given_is_used(one, many):
    assert [digestd.filter_pluralize(count, one, many) for count in (0, 1, 2)] == ["", f"1 {one}", f"2 {many}"]


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("apple", "apples"), ("berry", "berries"), ("leaf", "leaves"), ("child", "children"), ("person", "people"),
        ("property", "properties"), ("reply", "replies"), ("day", "days"), ("box", "boxes"), ("match", "matches"),
        ("notification", "notifications"),
    ],
)  # fmt: skip
def test_a_plural_that_is_not_given_follows_english(one, many):
    assert digestd.filter_pluralize(2, one) == f"2 {many}"
    assert digestd.filter_pluralize(1, one) == f"1 {one}"


@pytest.mark.parametrize(("count", "one", "expected"), [(1.5, "apple", "1.5 apples"), (0.5, "portion", "0.5 portions")])
def test_a_fraction_takes_the_plural(count, one, expected):
    assert digestd.filter_pluralize(count, one) == expected


@pytest.mark.parametrize(
    ("one", "many"), [("item", "items"), ("child", "children"), ("apple", "apples")]
)  # fmt: skip
def test_the_number_can_be_left_out(one, many):
    assert [digestd.filter_pluralize(count, one, many, "false") for count in (-1, 0, 1, 2)] == ["", "", one, many]


def test_only_the_text_true_shows_the_number():
    template = (
        "{{ 2 | pluralize: 'item' }}/{{ 2 | pluralize: 'item', '', 'true' }}/{{ 2 | pluralize: 'item', '', true }}"
    )
    assert rendered(template) == "2 items/2 items/items"


# -- digest ------------------------------------------------------------------------------------------------------------

FOUR = ["John", "Josh", "Sarah", "Mike"]


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (None, (), ""),
        ([], (), ""),
        ("text", (), ""),
        (FOUR[:1], (), "John"),
        (FOUR[:2], (), "John and Josh"),
        (FOUR[:2], (2, "", " • "), "John and Josh"),
        (FOUR[:3], (3,), "John, Josh and Sarah"),
        (FOUR[:3], (3, "", " • "), "John • Josh and Sarah"),
        (FOUR, (), "John, Josh and 2 others"),
        (FOUR, (3,), "John, Josh, Sarah and 1 other"),
        (FOUR, (4,), "John, Josh, Sarah and Mike"),
        (NAMES, (10,), "John, Josh, Sarah, Alex and Emma"),
        (FOUR, (4, "", " • "), "John • Josh • Sarah and Mike"),
    ],
)
def test_the_older_filter_lists_names(names, arguments, expected):
    assert digestd.filter_digest(names, *arguments) == expected


def test_the_older_filter_of_something_that_is_not_there_is_empty():
    assert rendered("[{{ payload.nothing | digest: 2, 'name' }}]", payload={}) == "[]"


# -- together, as templates use them -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "sentence", "longer", "counted", "digest"),
    [
        (0, "", "", "", ""),
        (1, "Ada", "Ada", "1 notification", "Ada"),
        (2, "Ada and Grace", "Ada and Grace", "2 notifications", "Ada and Grace"),
        (3, "Ada, Grace, and 1 other", "Ada, Grace, and Linus", "3 notifications", "Ada, Grace and 1 other"),
        (4, "Ada, Grace, and 2 others", "Ada, Grace, Linus, and 1 other", "4 notifications", "Ada, Grace and 2 others"),
        (
            5, "Ada, Grace, and 3 others", "Ada, Grace, Linus, and 2 others", "5 notifications",
            "Ada, Grace and 3 others",
        ),
    ],
)  # fmt: skip
def test_a_template_of_novu_reads_the_same(count, sentence, longer, counted, digest):
    template = (
        "{{ events | toSentence: 'payload.name', 2, 'other' }}|{{ events | toSentence: 'payload.name', 3, 'others' }}|"
        "{{ events | pluralize: 'notification', 'notifications' }}|{{ events | digest: 2, 'payload.name' }}"
    )
    assert rendered(template, events=PEOPLE[:count]) == f"{sentence}|{longer}|{counted}|{digest}"


@pytest.mark.parametrize(
    "call",
    [
        "toSentence: 'payload.name', 2, 'other'",
        "toSentence: 'payload.name', 2, 'other', ', ', ' and ', ', and '",
        "toSentence: 'payload.name', 5, 'other', ', ', ' and ', ', and '",
        "toSentence: 'payload.name', 1, 'other', ', ', ' and ', ', and '",
        "digest: 2, 'payload.name', ', '",
        "digest: 5, 'payload.name', ', '",
        "digest: 2, 'payload.name'",
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_names_in_html_are_escaped_exactly_once(call, count):
    events = [{"payload": {"name": "<b>Tom & Ann"}}] * count
    plain = rendered("{{ events | " + call + " }}", events=events)
    escaped = rendered("{{ events | " + call + " }}", kind="html", events=events)
    assert escaped == plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@pytest.mark.parametrize("call", ["toSentence: 'a', 'many'", "digest: 'many'"])
def test_an_argument_that_is_no_number_fails_with_a_reason(call):
    with pytest.raises(digestd.PermanentFailure, match="template failed"):
        rendered("{{ events | " + call + " }}", events=NAMES)


# -- what a digest step leaves behind ----------------------------------------------------------------------------------


def values_of(*payloads: str, template: str) -> str:
    events = [digestd.DigestedEvent(number, START, text, None) for number, text in enumerate(payloads, 1)]
    step = digestd.ChannelStep.model_validate({"id": "send", "type": "chat", "sender": "out", "text": template})
    draft = digestd.Draft(
        1, "msg_1", "chat", None, step, START, START, workflow="w", step="send", digest_id=1, has_digest=True,
        events=events, steps={"collect": events},
    )  # fmt: skip
    return digestd.render_content(draft)["text"]


SUMMARIES = "{{ steps.collect.eventCount }}|{{ steps.collect.countSummary }}|{{ steps.collect.sentenceSummary }}"


def test_two_events_are_summed_up_in_words():
    assert values_of('{"name":"Ada"}', '{"name":"Grace"}', template=SUMMARIES) == "2|2 notifications|Ada and Grace"


def test_an_event_without_a_name_has_an_empty_sentence():
    assert values_of("{}", template=SUMMARIES) == "1|1 notification|"


def test_a_step_that_is_no_digest_has_no_summaries():
    assert values_of("{}", template="[{{ steps.send.countSummary }}{{ steps.nothing.eventCount }}]") == "[]"


def test_events_of_a_step_are_listed_oldest_first_with_id_time_and_payload():
    template = "{% for e in steps.collect.events %}{{ e.id }} {{ e.time }} {{ e.payload.n }};{% endfor %}"
    assert values_of('{"n":1}', '{"n":2}', template=template) == "1 2026-03-09T09:00:00Z 1;2 2026-03-09T09:00:00Z 2;"


# -- what stands alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": [True, None, 'x"y']}, r"{'a':1,'b':[true,null,'x\'y']}"),
        ([1, "two", {"z": 1.5}], "[1,'two',{'z':1.5}]"),
        ({}, "{}"), ([], "[]"), (None, ""), (True, "true"), (False, "false"), (1.0, "1"), (1.5, "1.5"), ("ä<b>", "ä<b>"),
    ],
)  # fmt: skip
def test_objects_and_lists_print_as_novu_prints_them(value, text):
    assert rendered("{{ value }}", value=value) == text
    assert digestd.render_template("{{ value }}", {"value": value}, kind="html") == str(html.escape(text)).replace(
        "&#x27;", "&#39;"
    ).replace("&quot;", "&#34;")


def test_the_json_filter_has_single_quotes_as_in_novu():
    assert rendered("{{ value | json }}", value={"a": ["x"]}) == "{'a':['x']}"


def test_now_is_when_the_message_is_composed_and_not_what_the_machine_says():
    assert digestd.render_template("{{ 'now' | date: '%Y-%m-%d %H:%M' }}", {}, now=START) == "2026-03-09 09:00"


# -- templates and payloads that mean harm -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ (1..30000000) | join: ',' }}",
        "{{ (1..30000000) | size }}",
        "{% for a in (1..1000) %}{% for b in (1..1000) %}x{% endfor %}{% endfor %}",
        "{% for a in (1..300) %}{% for b in (1..300) %}{{ value | upcase | size }}{% endfor %}{% endfor %}",
        "{{ value | replace: 'a', value }}",
        "{% for i in (1..99999) %}{% if value contains 'aaaaaaab' %}{% endif %}{% endfor %}",
        "{% assign list = value | split: '' %}{% for i in (1..99999) %}{% if list contains 'b' %}{% endif %}{% endfor %}",
        "{% assign w = value | append: 'b' %}{% for i in (1..99999) %}{% if value == w %}{% endif %}{% endfor %}",
        "{% assign list = value | split: '' %}{{ list | join: value }}",
        "{% assign x = 3 %}{% for i in (1..40) %}{% assign x = x | times: x %}{% endfor %}",
        "{% assign x = 'aa' %}{% for i in (1..60) %}{% assign x = x | append: x %}{% endfor %}",
        "{% capture x %}{% for i in (1..99999) %}{{ value }}{% endfor %}{% endcapture %}",
        "{% tablerow i in (1..99999) %}{{ value }}{% endtablerow %}",
        "{% include 'x' %}",
        "{% render '/etc/passwd' %}",
        "{{ value | no_such_filter }}",
        "{% if (1..999999999999) contains 'x' %}{% endif %}",
        "{% for i in (1..999999999999) reversed %}{% break %}{% endfor %}",
        "{% for i in (1..999999999999) offset: 99999999999 limit: 1 %}{% endfor %}",
        "{% for i in (1..90000) %}{% if (1..90000) contains 'x' %}{% endif %}{% endfor %}",
        "{{ 'now' | date: value }}",
        "{{ value | split: '' | toSentence: '', 200000, value }}",
        "{{ value | split: '' | digest: 200000, '', value }}",
    ],
)
def test_a_template_that_asks_too_much_fails_with_a_reason(template):
    with pytest.raises(digestd.DigestdError, match="template"):
        rendered(template, value="a" * 200_000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "body",
    [
        "{% if one == other %}{% endif %}",
        "{% if one contains other %}{% endif %}",
        "{% if one contains 'x' %}{% endif %}",
        "{{ one | uniq | size }}",
        "{{ one | json | size }}",
        "{% capture x %}{{ one }}{% endcapture %}",
        "{% for item in one %}{% endfor %}",
        "{% if true %}{% endif %}" * 20_000,
        "{% for item in one limit: 1 %}{% endfor %}" * 2_000,
    ],
    ids=["equal", "contains", "contains text", "uniq", "json", "printed", "walked", "tags", "loops"],
)
def test_a_loop_over_little_that_holds_much_comes_to_an_end(body):
    """What is inside counts, not only what is on top: these took minutes, or hours."""
    one, other = ([[[] for _ in range(100_000)]] for _ in range(2))
    with pytest.raises(digestd.DigestdError, match="goes through"):
        digestd.render_template("{% for i in (1..90000) %}" + body + "{% endfor %}", {"one": one, "other": other})


def test_a_digest_of_many_events_may_be_gone_through_in_full():
    """What one rendering may go through grows with what it is given, or a table of a large digest would be refused."""
    events = [{"payload": {"name": f"Ada {n}", "n": n, "at": 1_700_000_000 + n}} for n in range(10_000)]
    row = "{{ e.payload.name | upcase | append: '!' }}{% if e.payload.n > 3 %}{{ e.payload.at | date: '%H:%M' }}{% endif %}"
    template = "{% for e in events %}" + row * 4 + "{% endfor %}"
    assert digestd.render_template(template, {"events": events}).startswith("ADA 0!")


@pytest.mark.parametrize(
    "condition",
    ["(1..payload.n) contains 'x'", " or ".join(["payload.text contains payload.other"] * 100)],
    ids=["range", "many"],
)
def test_a_condition_that_asks_too_much_fails_with_a_reason(condition):
    payload = {"n": 10**12, "text": "x" * 400_000, "other": "x" * 200_000 + "y"}
    with pytest.raises(digestd.PermanentFailure, match="goes through"):
        digestd.condition_holds(condition, {"payload": payload})


@pytest.mark.parametrize("compile_it", [digestd.compile_template, digestd.compile_condition])
@pytest.mark.parametrize("depth", [300, 5_000])
def test_brackets_in_brackets_without_end_are_refused_or_read(compile_it, depth):
    text = "payload" + "[payload" * depth + "]" * depth
    text = "{{ " + text + " }}" if compile_it is digestd.compile_template else "(" * depth + text + ")" * depth
    with contextlib.suppress(digestd.RuleError):
        compile_it(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", sorted(digestd._liquid().filters))
@pytest.mark.parametrize(
    "value",
    [
        "<" * 500_000,
        "<!--" * 120_000,
        "\n" * 500_000,
        "%41" * 160_000,
        [[n] for n in range(80_000)],
        list(range(120_000)),
    ],
    ids=["<", "<!--", "breaks", "percent", "lists", "numbers"],
)
def test_no_filter_takes_more_than_its_share_of_time_over_a_large_payload(name, value):
    """Some of the library's compared each item with all before it, or read half a megabyte as a date."""
    arguments = {"replace": ": 'a', 'b'", "where": ": 'n'", "map": ": 'n'", "slice": ": 1, 5", "date": ": '%Y'"}
    try:
        digestd.render_template("{{ value | " + name + arguments.get(name, "") + " | size }}", {"value": value})
    except digestd.DigestdError:
        pass  # a wrong kind of value: refused is fine


@pytest.mark.parametrize(
    "template", ["{{ value.__class__ }}", "{{ value['__class__'] }}", "{{ value.keys }}", "{{ value.items }}"]
)
def test_a_template_cannot_reach_python(template):
    try:
        assert rendered(template, value={"a": 1}) == ""
    except digestd.RuleError:
        pass  # it is no template at all


def test_items_that_are_alike_are_kept_once_in_their_order():
    items = [{"n": 2}, {"n": 1}, {"n": 2}, 1, 1.0, "1", [1], [1], "[1]", None, None]
    assert digestd.filter_uniq(items) == [{"n": 2}, {"n": 1}, 1, "1", [1], "[1]", None]
    assert digestd.filter_uniq([{"n": 1, "m": 1}, {"n": 1, "m": 2}, {"n": 2}], "n") == [{"n": 1, "m": 1}, {"n": 2}]
