"""The same engine under a virtual clock, and what it tells."""

from __future__ import annotations

import json

import pytest

import digestd
from conftest import BASIC, ROOT

TIMED = BASIC + '[repeatables.hourly]\ncron = "0 * * * *"\nlimit = 2\nsender = "hook"\n'


@pytest.fixture
def play(tmp_path):
    """Plays lines under a config; what was told."""

    def run(text: str, *lines: dict, until: str | None = None) -> list[dict]:
        config = digestd.read_config(text, tmp_path / "config.toml", secrets=False)
        digestd.open_store(":memory:", 0)
        timeline = digestd.read_timeline("\n".join(json.dumps(line) for line in lines))
        return list(digestd.Simulation(config).run(timeline, digestd.parse_instant(until) if until else None))

    yield run
    digestd.close_store()


def at(time: str, **what) -> dict:
    return {"at": f"2026-03-09T{time}Z", **what}


def trigger(time: str, id: str, to="s1", name="comments", **payload) -> dict:
    return at(time, trigger={"name": name, "to": to, "payload": payload, "transactionId": id})


def short(told: list[dict]) -> list[tuple]:
    return [(one["at"][11:19], one["what"], *one.get("transactionIds", [])) for one in told]


def test_a_digest_is_told_from_the_first_event_to_the_message(play):
    told = play(BASIC, trigger("09:00:00", "t1", postId="p"), trigger("09:01:00", "t2", postId="p"))
    assert short(told) == [
        ("09:00:00", "opened", "t1"),
        ("09:01:00", "joined", "t2"),
        ("09:10:00", "closed", "t1", "t2"),
        ("09:10:00", "sent", "t1", "t2"),
    ]
    sent = told[-1]
    assert {name: sent[name] for name in ("workflow", "step", "channel", "sender", "subscriberId", "key", "eventCount", "attempt")} == {
        "workflow": "comments", "step": "chat", "channel": "chat", "sender": "hook", "subscriberId": "s1", "key": "p", "eventCount": 2, "attempt": 1,
    }  # fmt: skip
    assert told[0]["closesAt"] == "2026-03-09T09:10:00Z"


def test_what_is_due_at_the_instant_of_a_line_settles_first(play):
    told = play(BASIC, trigger("09:00:00", "t1"), trigger("09:10:00", "t2"))
    assert short(told)[1:4] == [("09:10:00", "closed", "t1"), ("09:10:00", "sent", "t1"), ("09:10:00", "opened", "t2")]


def test_lines_of_one_instant_are_taken_in_the_order_of_the_file(play):
    told = play(BASIC, trigger("09:00:00", "t1"), at("09:00:00", cancel="t1"), trigger("09:00:00", "t2"))
    assert [one["what"] for one in told[:3]] == ["opened", "discarded", "opened"]
    assert told[1]["reason"] == "all its events were cancelled"


def test_a_reply_makes_a_try_fail_and_the_retry_is_told(play):
    told = play(
        BASIC,
        at("08:00:00", reply={"sender": "hook", "status": 503, "times": 2, "retry_after": "30s"}),
        trigger("09:00:00", "t1"),
    )
    assert [(one["at"][11:19], one["what"], one.get("attempt")) for one in told[2:]] == [
        ("09:10:00", "retrying", 1), ("09:10:30", "retrying", 2), ("09:11:30", "sent", 3),
    ]  # fmt: skip
    assert told[2]["until"] == "2026-03-09T09:10:30Z" and told[2]["reason"] == "HTTP 503"


@pytest.mark.parametrize("status", ["timeout", 404, "410"])
def test_replies_may_be_timeouts_and_refusals(play, status):
    told = play(BASIC, at("08:00:00", reply={"sender": "hook", "status": status}), trigger("09:00:00", "t1"))
    assert told[2]["what"] == ("retrying" if status == "timeout" else "failed")


@pytest.mark.parametrize(("sender", "status"), [("hook", 410), ("mail", "535")])
def test_a_sender_that_is_disabled_says_so_and_sends_no_more(play, sender, status):
    config = BASIC.replace('type = "chat"\nsender = "hook"', f'type = "email"\nsender = "{sender}"')
    person = {"subscriberId": "s1", "email": "a@example.org"}
    told = play(
        config,
        at("08:00:00", reply={"sender": sender, "status": status}),
        trigger("09:00:00", "t1", person),
        trigger("10:00:00", "t2", person),
        until="2026-03-10T00:00:00Z",
    )
    assert [one["what"] for one in told] == ["opened", "closed", "failed", "opened", "closed"]
    assert "disabled, and its messages wait" in told[2]["reason"] and "until" not in told[2]


def test_a_mail_server_answers_with_its_own_codes(play):
    config = BASIC.replace('type = "chat"\nsender = "hook"', 'type = "email"\nsender = "mail"')
    told = play(
        config,
        at("08:00:00", reply={"sender": "mail", "status": "451"}),
        trigger("09:00:00", "t1", {"subscriberId": "s1", "email": "a@example.org"}),
    )
    assert [one["what"] for one in told] == ["opened", "closed", "retrying", "sent"]
    assert told[-1]["message"]["to"] == "a@example.org"


def test_the_schedule_holds_and_says_until_when(play):
    config = BASIC.replace('window = "10m"', 'window = "10m"\nextend_to_schedule = true')
    monday = {
        "isEnabled": True,
        "weeklySchedule": {"monday": {"isEnabled": True, "hours": [{"start": "09:00 AM", "end": "05:00 PM"}]}},
    }
    told = play(
        config,
        at("08:00:00", subscriber={"subscriberId": "s1", "schedule": monday}),
        trigger("16:55:00", "t1"),
        trigger("18:00:00", "t2"),
    )
    assert [(one["at"], one["what"]) for one in told[1:]] == [
        ("2026-03-09T17:05:00Z", "held"), ("2026-03-09T18:00:00Z", "joined"),
        ("2026-03-16T09:00:00Z", "closed"), ("2026-03-16T09:00:00Z", "sent"),
    ]  # fmt: skip
    assert (told[1]["until"], told[1]["waits"]) == ("2026-03-16T09:00:00Z", 1)


WEEKDAYS = {
    "isEnabled": True,
    "weeklySchedule": {
        day: {"isEnabled": True, "hours": [{"start": "09:00 AM", "end": "05:00 PM"}]}
        for day in ("monday", "tuesday", "wednesday", "thursday", "friday")
    },
}
MONDAY_AT_9 = {
    "isEnabled": True,
    "weeklySchedule": {"monday": {"isEnabled": True, "hours": [{"start": "09:00 AM", "end": "10:00 AM"}]}},
}
EXTENDED = BASIC.replace('window = "10m"', 'window = "1h"\nextend_to_schedule = true')


def lines_for(schedule, moment):
    """A subscriber with hours, and one event of theirs."""
    to = {"subscriberId": "s1", "email": "a@example.org"}
    return [
        {"at": moment, "subscriber": {**to, "schedule": schedule}},
        {"at": moment, "trigger": {"name": "comments", "to": to, "payload": {"postId": 1}, "transactionId": "t1"}},
    ]


@pytest.mark.parametrize(
    ("schedule", "came", "sent"),
    [
        (WEEKDAYS, "2026-03-06T16:30:00Z", "2026-03-09T09:00:00Z"),  # Friday: the window ends at 17:30
        (MONDAY_AT_9, "2026-03-09T09:01:00Z", "2026-03-16T09:00:00Z"),  # Monday: it ends at 10:01
        (MONDAY_AT_9, "2026-03-09T09:00:00Z", "2026-03-09T10:00:00Z"),  # and at 10:00, which is inside
    ],
)
def test_a_window_that_ends_outside_the_hours_goes_out_when_they_next_begin(play, schedule, came, sent):
    told = play(EXTENDED, *lines_for(schedule, came))
    assert [one["at"] for one in told if one["what"] == "sent"] == [sent]
    assert [one["waits"] for one in told if one["what"] == "held"] == ([] if sent == "2026-03-09T10:00:00Z" else [1])


FEED = '[[workflows.comments.steps]]\nid = "feed"\ntype = "in_app"\n'


def test_with_the_toggle_off_mail_is_skipped_and_the_feed_has_its_message(play):
    config = EXTENDED.replace("extend_to_schedule = true", "extend_to_schedule = false")
    config = config.replace('type = "chat"\nsender = "hook"', 'type = "email"\nsender = "mail"') + FEED
    told = play(config, *lines_for(WEEKDAYS, "2026-03-06T16:30:00Z"))
    assert [(one["at"], one["what"], one.get("channel")) for one in told[2:]] == [
        ("2026-03-06T17:30:00Z", "skipped", "email"), ("2026-03-06T17:30:00Z", "sent", "in_app")
    ]  # fmt: skip


def test_a_message_that_waits_for_the_hours_is_told_as_held(play):
    config = BASIC.replace('sender = "hook"', 'sender = "hook"\noutside = "hold"')
    told = play(config, *lines_for(WEEKDAYS, "2026-03-07T12:00:00Z"))
    assert [(one["at"], one["what"], one.get("until")) for one in told[2:]] == [
        ("2026-03-07T12:10:00Z", "held", "2026-03-09T09:00:00Z"), ("2026-03-09T09:00:00Z", "sent", None)
    ]  # fmt: skip


def test_an_event_that_goes_on_alone_says_why(play):
    config = BASIC.replace('window = "10m"', 'window = "10m"\nstart = "when_repeated"\nwhen = "payload.postId == 1"')
    told = play(config, trigger("09:00:00", "t1", postId=1), trigger("09:01:00", "t2", postId=1))
    assert [(one["what"], one.get("step"), one.get("reason")) for one in told] == [
        ("skipped", "digest", "the first within 5m"), ("sent", "chat", None),
        ("opened", "digest", None), ("closed", "digest", None), ("sent", "chat", None),
    ]  # fmt: skip
    assert [one["key"] for one in told] == [1] * 5 and [one.get("eventCount") for one in told] == [1, 1, None, 1, 1]


def test_a_timeline_reads_as_words(play, tmp_path, cli):
    (tmp_path / "config.toml").write_text(EXTENDED)
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps(line) for line in lines_for(WEEKDAYS, "2026-03-06T16:30:00Z"))
    )
    found = cli("simulate", "t.jsonl")
    assert found.returncode == 0 and found.stdout.splitlines() == [
        "2026-03-06T16:30:00Z  opened     comments/digest  for s1 key 1  closes 2026-03-06T17:30:00Z",
        "2026-03-06T17:30:00Z  held       comments/digest  for s1 key 1  1 event  until 2026-03-09T09:00:00Z",
        "2026-03-09T09:00:00Z  closed     comments/digest  for s1 key 1  1 event",
        "2026-03-09T09:00:00Z  sent       comments/chat  for s1 key 1  [chat by hook]  1 event",
    ]


def test_triggers_wait_while_the_daemon_is_down(play):
    told = play(BASIC, trigger("09:00:00", "t1"), at("09:05:00", down="2h"), trigger("10:00:00", "t2"))
    assert short(told) == [("09:00:00", "opened", "t1"), ("11:05:00", "closed", "t1"), ("11:05:00", "opened", "t2"), ("11:05:00", "sent", "t1"),
                           ("11:15:00", "closed", "t2"), ("11:15:00", "sent", "t2")]  # fmt: skip


def test_repeatables_run_until_the_end_is_named_and_finish(play):
    told = play(TIMED, at("09:30:00", subscriber={"subscriberId": "s1"}), until="2026-03-09T13:00:00Z")
    assert [(one["at"][11:19], one["what"]) for one in told] == [
        ("10:00:00", "run"), ("10:00:00", "sent"), ("11:00:00", "run"), ("11:00:00", "finished"), ("11:00:00", "sent"),
    ] or [(one["at"][11:19], one["what"]) for one in told] == [
        ("10:00:00", "run"), ("10:00:00", "sent"), ("11:00:00", "run"), ("11:00:00", "sent"), ("11:00:00", "finished"),
    ]  # fmt: skip
    assert told[0]["repeatable"] == "hourly" and told[0]["slot"] == "2026-03-09T10:00:00Z"


def test_repeatables_do_not_keep_it_alive(play):
    busy = BASIC + '[repeatables.t]\nevery = "1m"\ntrigger = { workflow = "comments", to = "x" }\n'
    told = play(busy, trigger("09:00:00", "t1"))
    assert told[-1]["at"] < "2026-03-09T09:21:00Z"


def test_a_repeatable_is_added_and_removed_by_lines(play):
    told = play(
        BASIC,
        at("09:00:30", repeatable={"name": "r", "every": "1m", "sender": "hook"}),
        at("09:02:30", remove_repeatable="r"),
        until="2026-03-09T09:10:00Z",
    )
    assert [one["at"][11:19] for one in told if one["what"] == "run"] == ["09:01:00", "09:02:00"]


def test_repeatables_do_in_the_simulator_what_they_are_asked_for(play):
    told = play(
        BASIC,
        at("04:07:00", repeatable={"name": "x", "every": "15m", "align": "start", "limit": 4}),
        at(
            "04:07:00",
            repeatable={"name": "y", "cron": "*/10 * * * *", "missed": "skip", "endDate": "2026-03-09T04:40:00Z"},
        ),
        at("04:15:00", down="20m"),
        at("04:41:00", reply={"sender": "hook", "status": 503, "times": 2}),
        at("04:41:00", repeatable={"name": "z", "every": "15m", "immediately": True, "attempts": 2, "backoff": "1s"}),
        at("04:42:00", remove_repeatable="z"),
        until="2026-03-09T05:20:00Z",
    )
    seen = [(one["at"][11:19], one["what"], one["repeatable"], one.get("slot", "-")[11:16]) for one in told]
    assert [one for one in seen if one[2] == "x" and one[1] != "sent"] == [
        ("04:07:00", "run", "x", "04:07"), ("04:35:00", "run", "x", "04:22"), ("04:37:00", "run", "x", "04:37"),
        ("04:52:00", "run", "x", "04:52"), ("04:52:00", "finished", "x", ""),
    ]  # fmt: skip
    assert [one for one in seen if one[2] == "y" and one[1] != "sent"] == [
        ("04:10:00", "run", "y", "04:10"), ("04:35:00", "skipped", "y", "04:20"), ("04:40:00", "run", "y", "04:40"),
        ("04:40:00", "finished", "y", ""),
    ]  # fmt: skip
    assert [one[:2] for one in seen if one[2] == "z"] == [
        ("04:41:00", "run"), ("04:41:00", "retrying"), ("04:41:01", "failed")
    ]  # fmt: skip
    assert [one["count"] for one in told if one["what"] == "run" and one["repeatable"] == "x"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line",
    [
        {"trigger": {"name": "nothing", "to": "s1"}}, {"trigger": {"name": "comments"}}, {"cancel": "unknown"}, {"cancel": 5},
        {"subscriber": {"email": "a@example.org"}}, {"subscriber": {"subscriberId": "s1", "schedule": {"isEnabled": "yes"}}},
        {"repeatable": {"name": "r"}}, {"repeatable": {"name": "r", "every": "1m", "cron": "* * * * *"}},
        {"repeatable": {"name": "r", "cron": "61 * * * *"}}, {"repeatable": []}, {"remove_repeatable": "r"}, {"down": "soon"},
        {"reply": {"sender": "nobody", "status": 500}}, {"reply": {"sender": "hook", "status": "odd"}}, {}, {"trigger": {}, "down": "1h"},
    ],
)  # fmt: skip
def test_a_refused_line_gives_an_error_and_the_others_go_on(play, line):
    told = play(BASIC, at("09:00:00", **line), trigger("09:00:01", "t1"))
    assert [one["what"] for one in told] == ["error", "opened", "closed", "sent"]
    assert told[0]["reason"] and "Traceback" not in told[0]["reason"]


def test_lines_that_cannot_be_read_are_told_in_their_place():
    lines = digestd.read_timeline(
        'nonsense\n{"at":"2026-03-09T09:00:00Z","cancel":"x"}\n[1]\n{"at":"no time","cancel":"x"}\n# a comment\n'
    )
    assert [isinstance(what, str) for _, what in lines] == [True, False, True, True]
    assert len({moment for moment, _ in lines}) == 1


def test_the_simulator_and_the_tick_make_the_same_digests(play, world):
    """The same storm through both: the simulator is not another engine."""
    import random

    dice = random.Random(7)
    events = sorted((dice.randrange(3600), dice.choice("ab"), dice.randrange(3), number) for number in range(300))
    told = play(
        BASIC, *[trigger(f"09:{s // 60:02d}:{s % 60:02d}", f"t{n}", to, postId=key) for s, to, key, n in events]
    )
    simulated = sorted((one["at"], tuple(one["transactionIds"])) for one in told if one["what"] == "sent")
    digestd.close_store()
    w = world()
    for second, to, key, number in events:
        w.run_until(digestd.parse_instant("2026-03-09T09:00:00Z") + second * 1000)
        w.trigger("comments", to, {"postId": key}, f"t{number}")
    w.advance("1h")
    real = sorted(
        (digestd.iso_text(at_), tuple(event.transaction_id for event in claim.draft.events)) for at_, claim, _ in w.sent
    )
    assert simulated == real and sum(len(ids) for _, ids in real) == 300


def test_weeks_pass_in_a_moment(play):
    lines = [
        {"at": f"2026-03-{day:02d}T{hour:02d}:00:00Z", "trigger": {"name": "comments", "to": "s1", "payload": {}}}
        for day in range(1, 29)
        for hour in range(24)
    ]
    assert sum(one["what"] == "sent" for one in play(BASIC, *lines)) == 28 * 24


def test_the_example_config_plays(tmp_path, cli):
    timeline = tmp_path / "timeline.jsonl"
    timeline.write_text(json.dumps(at("09:00:00", trigger={"name": "demo", "to": "you", "payload": {"text": "hi"}})))
    done = cli("simulate", "--config", str(ROOT / "config.example.toml"), str(timeline), "--json")
    assert done.returncode == 0 and "sent" in [json.loads(line)["what"] for line in done.stdout.splitlines()]
