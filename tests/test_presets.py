"""Chat services: what each preset sends, how much of it, and that no event writes markup or calls people there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import digestd
from peers import Answer
from test_senders import draft_of, events_of, live, receiver, send  # noqa: F401

OPTIONS = {"telegram": {"token": "12:ab", "chat_id": -100}, "ntfy": {"topic": "t"}}
NASTY = '<!channel> @everyone <b>x</b> & *bold* [a](http://x) `code` <users/all> | ~s~ \\ "q"'


def preset(name: str, url: str = "http://127.0.0.1:9/h", **settings: Any) -> digestd.WebhookSettings:
    table = {"type": "webhook", "preset": name, "url": url, **OPTIONS.get(name, {}), **settings}
    return digestd.WebhookSettings.model_validate(table)


def body_of(name: str, text: str | None = None, payloads: Any = ({"n": 1},), settings: Any = None, **more: Any) -> Any:
    given = {"text": text} if text is not None else {}
    draft = draft_of(settings or preset(name), events=events_of(*payloads), **given, **more)
    return json.loads(digestd.compose(draft).body)


def words_of(name: str, body: Any) -> str:
    """The text that people read."""
    return {
        "slack": lambda: "\n".join(block["text"]["text"] for block in body["blocks"][1:]),
        "discord": lambda: body["embeds"][0]["description"],
        "teams": lambda: body["attachments"][0]["content"]["body"][1]["text"],
        "telegram": lambda: body["text"].partition("\n\n")[2],
        "ntfy": lambda: body["message"],
        "mattermost": lambda: body["text"].partition("\n\n")[2],
        "googlechat": lambda: body["text"].partition("\n")[2],
        "apprise": lambda: body["body"],
    }[name]()


def test_every_preset_of_the_config_has_a_composer_and_an_escape():
    assert set(digestd.PRESETS) == set(digestd._CHATS)
    assert all(one.escape in digestd.ESCAPES for one in digestd.PRESETS.values())


def test_slack_gets_a_fallback_and_sections():
    assert body_of("slack", "hello", subject="Two & more") == {
        "text": "Two &amp; more",
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": "*Two &amp; more*"}},
            {"type": "section", "text": {"type": "mrkdwn", "text": "hello"}},
        ],
    }


def test_discord_pings_nobody():
    assert body_of("discord", "hello", subject="S") == {
        "content": "**S**", "allowed_mentions": {"parse": []}, "embeds": [{"description": "hello"}],
    }  # fmt: skip


def test_teams_gets_an_adaptive_card():
    card = body_of("teams", "a\nb", subject="S")["attachments"][0]
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert card["content"]["type"] == "AdaptiveCard" and card["content"]["body"][1]["wrap"] is True
    assert card["content"]["body"][1]["text"] == "a\n\nb"


def test_telegram_gets_html_for_a_chat_at_the_bots_address(receiver):  # noqa: F811
    there = receiver()
    settings = preset("telegram", there.url(""))
    send(settings, digestd.compose(draft_of(settings, text="<i>{{ payload.n }}</i>", subject="S")))
    [request] = there.requests
    assert request.target == "/bot12:ab/sendMessage"
    assert json.loads(request.body) == {
        "chat_id": "-100", "text": "<b>S</b>\n\n<i>1</i>", "parse_mode": "HTML",
        "link_preview_options": {"is_disabled": True},
    }  # fmt: skip


def test_ntfy_is_posted_to_the_root_with_its_topic_and_token(receiver):  # noqa: F811
    there = receiver()
    settings = preset("ntfy", there.url("/"), token="tk_1", priority=4, tags=["bird"])
    send(settings, digestd.compose(draft_of(settings, text="hello", subject="S")))
    [request] = there.requests
    assert request.headers["authorization"] == "Bearer tk_1" and request.target == "/"
    wanted = {"topic": "t", "title": "S", "message": "hello", "priority": 4, "tags": ["bird"]}
    assert json.loads(request.body) == wanted


def test_mattermost_apprise_and_google_chat_get_their_options(receiver):  # noqa: F811
    mattermost = preset("mattermost", username="digest", icon_url="https://example.org/i.png")
    body = body_of("mattermost", "hello", settings=mattermost, subject="S")
    assert body == {"text": "**S**\n\nhello", "username": "digest", "icon_url": "https://example.org/i.png"}
    body = body_of("apprise", "hello", settings=preset("apprise", tag="ops"), subject="S")
    assert body == {"title": "S", "body": "hello", "type": "info", "format": "text", "tag": "ops"}
    there = receiver()
    settings = preset("googlechat", there.url("/v1/spaces/x/messages?key=k"))
    send(settings, digestd.compose(draft_of(settings, text="hello", subject="S")))
    assert there.requests[0].target.endswith("?key=k&messageReplyOption=REPLY_MESSAGE_FALLBACK_TO_NEW_THREAD")
    told = json.loads(there.requests[0].body)
    assert told["text"] == "*S*\nhello" and re.fullmatch("[0-9a-f]{24}", told["thread"]["threadKey"])


@pytest.mark.parametrize("name", digestd.PRESETS)
def test_without_a_text_of_its_own_each_event_is_a_line(name):
    body = body_of(name, payloads=({"n": 1}, {"n": 2}))
    assert words_of(name, body).replace("\n\n", "\n").strip().count("\n") == 1


@pytest.mark.parametrize("name", digestd.PRESETS)
def test_what_an_event_says_is_no_markup_and_no_mention(name):
    body = body_of(name, "{{ payload.said }}", payloads=({"said": NASTY},), subject="{{ payload.said }}")
    words = words_of(name, body)
    if name in ("slack", "telegram"):
        assert "<" not in words and "&lt;!channel&gt;" in words and "&amp; *" in words
    elif name in ("discord", "teams", "mattermost"):
        assert r"\*bold\*" in words and r"\[a\]" in words and r"\`code\`" in words and r"\<b\>" in words
        assert name != "mattermost" or "@everyone" not in words
    elif name == "googlechat":
        assert "<users/all>" not in words and "users/all" in words
    else:
        assert words.strip() == NASTY  # plain text there


@pytest.mark.parametrize("name", digestd.PRESETS)
def test_markup_of_the_template_itself_stays(name):
    assert words_of(name, body_of(name, "<b>*{{ payload.n }}*</b>")) == "<b>*1*</b>"


LIMITS = {
    "slack": lambda body: max(len(b["text"]["text"]) for b in body["blocks"]) <= 3000 and len(body["blocks"]) <= 50
    and sum(len(b["text"]["text"]) for b in body["blocks"]) <= 12_000,
    "discord": lambda body: len(body["content"]) <= 2000
    and digestd.utf16_size(body["embeds"][0]["description"]) <= 4096,
    "teams": lambda body: len(json.dumps(body, ensure_ascii=False).encode()) <= 28_000,
    "telegram": lambda body: digestd.utf16_size(body["text"]) <= 4096,
    "ntfy": lambda body: len(body["message"].encode()) <= 4096,
    "mattermost": lambda body: len(body["text"]) <= 16_383,
    "googlechat": lambda body: len(body["text"].encode()) <= 4096,
    "apprise": lambda body: len(body["body"]) <= 1_000_000,
}  # fmt: skip


@pytest.mark.parametrize("letter", ["a", "é", "😀", "<", "&", "\\", "\n"])
@pytest.mark.parametrize("name", digestd.PRESETS)
def test_no_message_is_longer_than_the_service_takes(name, letter):
    for size in (100, 3000, 30_000):
        one = {"said": letter * size}
        template = "{% for e in steps.digest.events %}- {{ e.payload.said }}\n{% endfor %}"
        body = body_of(name, template, payloads=[one] * 3, subject=letter * 300)
        assert LIMITS[name](body), (name, letter, size)
        json.dumps(body).encode()  # no half of a surrogate pair


@pytest.mark.parametrize("name", ["slack", "discord", "telegram", "ntfy", "mattermost", "googlechat"])
def test_whole_items_go_first_and_how_many_is_told(name):
    template = "{% for e in steps.digest.events %}- item {{ e.payload.n }} {{ e.payload.fill }}\n{% endfor %}"
    payloads = [{"n": number, "fill": "x" * 90} for number in range(1, 301)]
    words = words_of(name, body_of(name, template, payloads=payloads)).strip()
    *kept, last = words.split("\n")
    whole = [line for line in kept if line]
    assert all(re.fullmatch(r"- item \d+ x{90}", line) for line in whole)
    assert last == f"… and {300 - len(whole)} more" and whole[0].startswith("- item 1 ")


def test_a_tag_that_a_cut_would_leave_open_is_no_tag_any_more():
    text = "<b>" + "x\n" * 4000 + "</b>"
    words = words_of("telegram", body_of("telegram", text))
    assert "<" not in words and "more" in words


@pytest.mark.parametrize("line", ["&", "&amp", "&\n", "x&", "<&"])
@pytest.mark.parametrize("name", digestd.PRESETS)
def test_a_template_full_of_odd_signs_comes_to_an_end(name, line):
    body = body_of(name, f"{line}\n" * 9000)
    assert LIMITS[name](body)


def test_a_text_that_is_cut_never_ends_in_the_middle_of_what_was_escaped():
    for size in range(50, 70):
        cut = digestd.fit("x" * 45 + "&amp;&lt;" * 5, size)
        assert re.fullmatch(r"x*(?:&amp;|&lt;)*…?", cut), cut


@pytest.mark.parametrize(
    ("name", "answer", "outcome", "cause", "wait"),
    [
        ("slack", Answer(200, {}, b"ok"), "sent", None, None),
        ("slack", Answer(404, {}, b"no_service"), "permanent", "gone", None),
        ("slack", Answer(429, {"Retry-After": "3"}), "temporary", None, 3000),
        ("discord", Answer(204), "sent", None, None),
        ("discord", Answer(429, {}, b'{"message": "slow", "retry_after": 0.75}'), "temporary", None, 750),
        ("discord", Answer(429, {"Retry-After": "2"}, b'{"retry_after": 1.5}'), "temporary", None, 2000),
        ("discord", Answer(404, {}, b'{"message": "Unknown Webhook"}'), "permanent", "gone", None),
        ("teams", Answer(202), "sent", None, None),
        ("telegram", Answer(200, {}, b'{"ok": true}'), "sent", None, None),
        ("telegram", Answer(200, {}, b'{"ok": false}'), "permanent", None, None),
        ("telegram", Answer(429, {}, b'{"parameters": {"retry_after": 35}}'), "temporary", None, 35_000),
        ("telegram", Answer(429, {}, b'{"parameters": {"retry_after": "x"}}'), "temporary", None, None),
        ("telegram", Answer(403, {}, b'{"description": "blocked"}'), "permanent", None, None),
        ("telegram", Answer(401, {}, b'{"description": "Unauthorized"}'), "permanent", "gone", None),
        ("ntfy", Answer(200), "sent", None, None),
        ("ntfy", Answer(429), "temporary", None, None),
        ("apprise", Answer(200), "sent", None, None),
        ("apprise", Answer(204), "permanent", None, None),
        ("apprise", Answer(424), "temporary", None, None),
        ("mattermost", Answer(200, {}, b"ok"), "sent", None, None),
        ("googlechat", Answer(410), "permanent", "gone", None),
    ],
)
def test_a_services_answer_means(receiver, name, answer, outcome, cause, wait):  # noqa: F811
    there = receiver(answer)
    settings = preset(name, there.url(""))
    result = send(settings, digestd.compose(draft_of(settings, text="x")))
    assert (result.outcome, result.cause, result.retry_after_ms) == (outcome, cause, wait)


def test_a_token_in_the_url_is_told_nowhere(receiver):  # noqa: F811
    there = receiver(Answer(400, {}, b"no chat for bot12:ab/sendMessage"))
    settings = preset("telegram", there.url(""))
    result = send(settings, digestd.compose(draft_of(settings, text="x")))
    assert "12:ab" not in (result.reason or "") and "12:ab" not in repr(settings)


# -- bodies of one's own -----------------------------------------------------------------------------------------------


def test_a_json_template_makes_the_whole_body():
    template = '{"said": "{{ payload.said }}", "n": {{ payload.n }}, "all": {{ steps.digest.events | json }}}'
    payload = {"said": 'a "quote"\n\\ é 😀 </script>', "n": 5}
    body = json.loads(digestd.compose(draft_of(json=template, events=events_of(payload))).body)
    assert body["said"] == payload["said"] and body["n"] == 5 and body["all"][0]["payload"] == payload


def test_a_missing_value_is_null_by_the_json_filter_and_empty_inside_quotes():
    template = '{"a": {{ payload.nope | json }}, "b": "{{ payload.nope }}", "c": {{ payload.t | json }}}'
    body = json.loads(digestd.compose(draft_of(json=template, events=events_of({"t": True}))).body)
    assert body == {"a": None, "b": "", "c": True}


def test_a_json_template_by_a_preset_goes_out_as_it_is():
    body = body_of("slack", json='{"text": "{{ payload.n }} < 2"}')
    assert body == {"text": "1 < 2"}


def test_a_body_that_is_no_json_with_this_payload_fails_with_the_reason():
    with pytest.raises(digestd.PermanentFailure, match="does not make JSON.*filter json"):
        digestd.compose(draft_of(json='{"n": {{ payload.n }}}', events=events_of({"n": "x y"})))


CONFIG = """
[senders.hook]
type = "webhook"
url = "http://127.0.0.1:9/"
[senders.log]
type = "log"
[workflows.w]
[[workflows.w.steps]]
id = "d"
type = "digest"
window = "1m"
[[workflows.w.steps]]
id = "c"
type = "chat"
sender = "{sender}"
json = '''{json}'''
"""


@pytest.mark.parametrize(
    ("sender", "template", "words"),
    [
        ("hook", '{"n": {{ payload.n }}}', "does not make JSON"),
        ("hook", '{"n": "{{ payload.n }}"', "does not make JSON"),
        ("hook", '{"n": {{ payload.n | nope }}}', "template"),
        ("log", '{"n": 1}', "goes with a webhook"),
    ],
)
def test_a_json_template_that_cannot_work_is_told_at_check(tmp_path, sender, template, words):
    text = CONFIG.replace("{sender}", sender).replace("{json}", template)
    with pytest.raises(digestd.ConfigError) as caught:
        digestd.read_config(text, tmp_path / "config.toml")
    [problem] = caught.value.problems
    assert problem.path == "workflows.w.steps.1.json" and problem.line == 16 and words in problem.text


@pytest.mark.parametrize(
    "template",
    [
        '{"n": {{ payload.n | json }}}',
        '{"n": "{{ payload.n }}"}',
        '["{{ steps.d.countSummary }}", {{ steps.d.eventCount }}]',
    ],
)
def test_a_json_template_that_works_with_samples_is_taken(tmp_path, template):
    digestd.read_config(CONFIG.replace("{sender}", "hook").replace("{json}", template), tmp_path / "config.toml")


def test_samples_are_as_the_payload_schema_has_them(tmp_path):
    schema = 'payload_schema = { type = "object", properties = { n = { type = "integer" } } }'
    text = CONFIG.replace("[workflows.w]\n", f"[workflows.w]\n{schema}\n").replace("{sender}", "hook")
    digestd.read_config(text.replace("{json}", '{"n": {{ payload.n }}}'), tmp_path / "config.toml")


def test_a_repeatables_body_can_be_ones_own(live, receiver):  # noqa: F811
    there = receiver()
    template = """json = '{"run": {{ count }}, "color": "{{ data.color }}"}'"""
    w = live(
        f'[senders.hook]\ntype = "webhook"\nurl = "{there.url()}"\n'
        f'[repeatables.r]\nevery = "1m"\nsender = "hook"\ndata = {{ color = "red" }}\n{template}\n'
    )
    w.advance("1m")
    assert json.loads(there.requests[0].body) == {"run": 1, "color": "red"}


# -- presets in the config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "path", "words"),
    [
        ('preset = "slak"\nurl = "http://x/"', "senders.a.preset", "slack"),
        ('preset = "slack"', "senders.a.url", "is missing"),
        ('preset = "telegram"\ntoken = "t"', "senders.a.chat_id", "is missing"),
        ('preset = "ntfy"', "senders.a.topic", "is missing"),
        ('preset = "slack"\nurl = "http://x/"\ntopic = "t"', "senders.a.topic", 'goes with preset = "ntfy"'),
        ('type = "webhook"\nurl = "http://x/"\nchat_id = "1"', "senders.a.chat_id", "telegram"),
        ('type = "webhook"\nurl = "http://x/"\nurl_from = "payload.x"', "senders.a.url_from", "exclude"),
        ('type = "webhook"\nurl_from = "data.x"', "senders.a.url_from", "subscriber.data.hookUrl"),
        ('type = "webhook"\nurl_from = "payload.x"\nproxy = "http://p:1"', "senders.a.proxy", "straight"),
        (
            'type = "webhook"\nurl = "http://x/"\nallow_addresses = ["10.0.0.0/8"]',
            "senders.a.allow_addresses",
            "url_from",
        ),
        (
            'type = "webhook"\nurl_from = "payload.x"\nallow_addresses = ["10.0.0.0/33"]',
            "senders.a.allow_addresses.0",
            "network",
        ),
        ('type = "webhook"\nurl = "http://x/"\nproxy = "socks5://p:1"', "senders.a.proxy", "http"),
        (
            'type = "webhook"\nurl = "http://x/"\nheaders = { "X Y" = "1" }',
            'senders.a.headers."X Y"',
            "no name of a header",
        ),
        (
            'type = "webhook"\nurl = "http://x/"\nheaders = { webhook-id = "1" }',
            "senders.a.headers.webhook-id",
            "by digestd",
        ),
        ('type = "webhook"\nurl = "http://x/"\nheaders = { X = "a\\nb" }', "senders.a.headers.X", "one line"),
    ],
)
def test_a_preset_that_lacks_or_has_too_much_is_told(tmp_path, table, path, words):
    with pytest.raises(digestd.ConfigError) as caught:
        digestd.read_config(f"[senders.a]\n{table}\n", tmp_path / "config.toml")
    assert [(problem.path, words in problem.text) for problem in caught.value.problems] == [(path, True)], caught.value


def test_five_lines_make_a_digest_for_slack(live, receiver):  # noqa: F811
    there = receiver()
    w = live(
        f'[senders.chat]\npreset = "slack"\nurl = "{there.url()}"\n[workflows.w]\n'
        '[[workflows.w.steps]]\nid = "d"\ntype = "digest"\nwindow = "1m"\n'
        '[[workflows.w.steps]]\nid = "c"\ntype = "chat"\nsender = "chat"\n'
    )
    w.trigger("w", payload={"n": 1})
    w.trigger("w", payload={"n": 2})
    w.advance("1m")
    assert json.loads(there.requests[0].body)["blocks"][1]["text"]["text"].count("\n") == 1
