"""The rows of BullMQ's own tests (facts on BullMQ, 1.6 and 3), under their ids, against the engine with a fake clock.

A row is a script: what is added, how time goes on, what is then to be seen. One that `differs` says why digestd does
something else on purpose, and is a script of what it does; one with `skip` states nothing about a repeatable.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

import digestd
from conftest import World

FOLDER = pathlib.Path(__file__).parent / "data"
T0 = "2017-02-07T09:24:00Z"


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines() if line.strip()]


ROWS = [row for name in sorted(path.stem for path in FOLDER.glob("repeat_*.jsonl")) for row in load(name)]


def config_text(row: dict) -> str:
    daemon = "".join(f"{name} = {json.dumps(value)}\n" for name, value in row.get("daemon", {}).items())
    sender = "".join(f"{name} = {json.dumps(value)}\n" for name, value in row.get("sender", {}).items())
    return (
        f'[daemon]\n{daemon}[senders.hook]\ntype = "webhook"\nurl = "http://127.0.0.1:9/hook"\njitter = 0.0\n{sender}'
        '[workflows.w]\n[[workflows.w.steps]]\nid = "feed"\ntype = "in_app"\ntext = "x"\n'
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)


class Script:
    """Plays a row. Each step is [word, arguments …]; see the methods named do_*."""

    def __init__(self, world: Any, row: dict) -> None:
        self.row = row
        self.w: World = world(config_text(row))
        self.w.crash()  # the row's time may lie before that of other tests
        self.w.path.unlink()
        self.w.clock.at = digestd.parse_instant(row.get("at", T0))
        self.w.open()

    def play(self, steps: list[list[Any]]) -> None:
        for number, (word, *arguments) in enumerate(steps, 1):
            try:
                getattr(self, f"do_{word.replace('-', '_')}")(*arguments)
            except Exception as error:
                error.add_note(f"step {number}: {word} {arguments}")
                raise

    # -- what is done

    def do_add(self, body: dict, refused: str | None = None) -> None:
        """Add a repeatable, as POST /v1/repeatables does; `refused` is a part of the reason why it is not taken."""
        body = body if "sender" in body or "trigger" in body else {**body, "sender": "hook"}
        if refused is None:
            with digestd.transaction():
                digestd.add_repeatable(digestd.spec_from(self.w.config, body), "api", self.w.now)
            return
        with pytest.raises(digestd.Rejected) as error, digestd.transaction():
            digestd.add_repeatable(digestd.spec_from(self.w.config, body), "api", self.w.now)
        assert refused in error.value.message

    def do_config(self, *bodies: dict) -> None:
        """The config is edited, so that it holds these repeatables and no others, and is read again."""
        text = config_text(self.row)
        for body in bodies:
            body = body if "sender" in body or "trigger" in body else {**body, "sender": "hook"}
            lines = (f"{name} = {_toml(value)}\n" for name, value in body.items() if name != "name")
            text += f"[repeatables.{json.dumps(body['name'])}]\n{''.join(lines)}"
        self.w.use(text)

    def _deed(self, deed: str, key: str, done: bool) -> None:
        try:
            with digestd.transaction():
                digestd.do_to_repeatable(deed, key, self.w.now)
        except digestd.Rejected:
            assert not done
        else:
            assert done

    def do_remove(self, key: str, done: bool = True) -> None:
        """Remove by key or name; `done` says whether there was one."""
        self._deed("remove", key, done)

    def do_pause(self, key: str, done: bool = True) -> None:
        self._deed("pause", key, done)

    def do_resume(self, key: str, done: bool = True) -> None:
        self._deed("resume", key, done)

    def do_run_now(self, key: str, done: bool = True) -> None:
        self._deed("run-now", key, done)

    def do_skip_next(self, key: str, done: bool = True) -> None:
        self._deed("skip-next", key, done)

    def do_bring_forward(self, key: str | None = None) -> None:
        """The pending runs (of one spec) are due now, by hand; nothing is there yet to take them."""
        spec = "" if key is None else " AND r.repeatable_id = (SELECT id FROM repeatables WHERE key = ? OR name = ?)"
        self.w.rows(
            "UPDATE jobs SET due_at = ? WHERE state = 'delayed' AND run_id IN"
            f" (SELECT r.id FROM runs r WHERE r.taken_at IS NULL AND r.state = 'active'{spec})",
            self.w.now, *([key, key] if key is not None else []),
        )  # fmt: skip

    def do_promote(self, key: str | None = None) -> None:
        """The pending runs (of one spec) are due now, by hand, and taken, as BullMQ's promote does."""
        self.do_bring_forward(key)
        self.w.tick()

    def do_advance(self, span: str) -> None:
        """Time goes on, and everything due happens at its time."""
        self.w.advance(span)

    def do_tick(self) -> None:
        """What is due now happens; time stands still."""
        self.w.tick()

    def do_jump(self, span: str) -> None:
        """The clock goes on with nothing there to run anything; then the daemon is back."""
        self.w.crash()
        self.w.clock.at += digestd.parse_duration(span)
        self.w.open()
        self.w.tick()

    def do_idle(self, span: str) -> None:
        """The clock goes on, and nothing takes what is due meanwhile."""
        self.w.clock.at += digestd.parse_duration(span)

    def do_work(self, number: int, span: str = "1ms", *inside: list[Any]) -> None:
        """So many tries, one after the other, each of which takes so long, and waits for what is not due yet; the steps
        `inside` happen while the last of them is under way."""
        last = len(self.w.sent) + number
        while len(self.w.sent) < last:
            with digestd.transaction():
                report = digestd.tick(self.w.config, self.w.now, self.w.room)
            for claim in report.claims:
                begun_at = self.w.now
                self.play(inside if len(self.w.sent) == last - 1 else [])
                self.w.clock.at += digestd.parse_duration(span)
                self.w._try(claim)
                self.w.sent[-1] = (begun_at, *self.w.sent[-1][1:])
            if not report.moved:
                wake_at = self.w._wake_at()
                assert wake_at is not None, "there is nothing left to do"
                self.w.clock.at = max(self.w.clock.at, wake_at)

    def do_purge(self) -> None:
        """What the specs' own retention does not keep is deleted."""
        with digestd.transaction():
            digestd.purge_by_spec(self.w.now)

    def do_store(self, takes_runs: bool) -> None:
        """Whether the database takes new runs from now on."""
        refuse = "CREATE TRIGGER refuse BEFORE INSERT ON runs BEGIN SELECT RAISE(ABORT, 'refused'); END"
        self.w.rows("DROP TRIGGER refuse" if takes_runs else refuse)

    def do_revive(self) -> None:
        """Specs that are broken are looked at again, as happens every day."""
        with digestd.transaction():
            digestd.revive_broken(self.w.now)

    def do_restart(self) -> None:
        self.w.crash()
        self.w.open()

    def do_reply(self, *outcomes: str) -> None:
        """What the next tries come to: sent, temporary, permanent."""
        self.w.reply("hook", *outcomes)

    # -- what is seen

    def do_runs(self, *instants: str) -> None:
        """When the runs so far were sent: all of them, in order."""
        assert [digestd.iso_text(at) for at, _, _ in self.w.sent] == list(instants)

    def do_slots(self, *instants: str) -> None:
        """The slots of the runs that were sent so far, in order."""
        assert [body["data"]["slot"] for body in self.w.bodies()] == list(instants)

    def do_times(self, number: int) -> None:
        """How many tries were made so far."""
        assert len(self.w.sent) == number

    def do_apart(self, least_ms: int, most_ms: int | None = None) -> None:
        """How far apart the runs are, each from the one before."""
        gaps = [later - sooner for (sooner, *_), (later, *_) in zip(self.w.sent, self.w.sent[1:], strict=False)]
        assert gaps and all(least_ms <= gap <= (most_ms or gap) for gap in gaps), gaps

    def do_names(self, *names: str) -> None:
        assert [body["data"]["name"] for body in self.w.bodies()] == list(names)

    def do_data(self, *values: Any) -> None:
        assert [body["data"]["data"] for body in self.w.bodies()] == list(values)

    def do_counts(self, *numbers: int) -> None:
        """Which of its spec's runs each one said it was."""
        assert [body["data"]["count"] for body in self.w.bodies()] == list(numbers)

    def do_pending(self, number: int) -> None:
        """How many runs are pending, of all specs."""
        sql = "SELECT count(*) FROM runs WHERE repeatable_id IS NOT NULL AND taken_at IS NULL AND state = 'active'"
        assert self.w.one(sql) == number

    def do_listed(self, *keys: str) -> None:
        """The keys of the listing, in its order: by the next time, then the key."""
        assert [facts["key"] for facts in digestd.repeatable_facts(self.w.now)] == list(keys)

    def do_spec(self, key: str, wanted: dict) -> None:
        """Facts of one spec, as the listing has them; `next` may be one instant, the first."""
        facts = digestd.repeatable_facts(self.w.now, digestd.find_repeatable(key).key)[0]
        found = {name: facts[name] for name in wanted}
        if isinstance(wanted.get("next"), str):
            found["next"] = facts["next"][0]
        assert found == wanted

    def do_kept(self, number: int) -> None:
        """How many runs are still there of those that were taken."""
        assert self.w.one("SELECT count(*) FROM runs WHERE taken_at IS NOT NULL") == number

    def do_failed(self, number: int) -> None:
        assert self.w.one("SELECT count(*) FROM jobs WHERE state = 'failed'") == number

    def do_retry(self) -> None:
        """All failed jobs are tried again, by hand."""
        with digestd.transaction():
            for (job_id,) in self.w.rows("SELECT id FROM jobs WHERE state = 'failed'"):
                assert digestd.retry_job(job_id, self.w.now)
        self.w.tick()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row["id"], marks=[pytest.mark.skip(reason=row["skip"])] if "skip" in row else [])
        for row in ROWS
    ],
)
def test_a_repeatable_does_what_the_row_says(row, world):
    Script(world, row).play(row["script"])


def test_a_row_that_differs_says_why_and_each_has_a_script_or_a_reason():
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    assert [row["id"] for row in ROWS if ("script" in row) == ("skip" in row)] == []
    assert [row["id"] for row in ROWS if len(row.get("differs", "long enough, or none")) < 15] == []
