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
                digestd.do_to_repeatable(self.w.config, deed, key, self.w.now)
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

    def do_delete_pending(self) -> None:
        """Somebody deletes all pending runs in the database."""
        self.w.rows("DELETE FROM jobs WHERE run_id IN (SELECT id FROM runs WHERE taken_at IS NULL)")
        self.w.rows("DELETE FROM runs WHERE taken_at IS NULL")

    def do_rearm(self) -> None:
        """Specs that have lost their pending run get one again, as happens every minute."""
        with digestd.transaction():
            digestd.rearm_repeatables(self.w.now)

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


# What BullMQ's users complain of (facts on BullMQ, 5, by row) and what was to be better (8.2), and the tests that show it.
BEAT = {
    # open cases about repetition that are no script of one spec
    "case-022": ["test_what_was_muted_goes_out_when_the_hours_next_begin"],
    "case-030": ["test_a_second_daemon_on_the_same_database_is_refused_with_the_pid_of_the_first"],
    "case-036": ["test_a_window_that_ended_while_the_daemon_was_down_goes_out_once_and_alone"],
    "case-044": ["test_an_endpoint_that_hangs_does_not_delay_the_messages_of_another"],
    "case-242": ["test_a_bad_config_ends_with_78", "test_a_locked_database_is_told_at_start_and_left_as_it_is"],
    "case-243": ["test_a_message_that_the_process_dies_of_three_times_is_given_up_and_listed"],
    "8.2-1": ["test_a_broken_repeatable_is_told_by_check_and_status_and_their_exit_codes"],
    "8.2-2": ["test_a_daily_run_is_neither_lost_nor_doubled_when_the_clocks_change"],
    "8.2-3": ["test_cron_gives_the_times_of_the_table"],  # K112, K145
    "8.2-4": ["test_a_late_cron_run_survives_the_restart_and_comes_once"],
    "8.2-5": ["test_the_limit_is_exact_and_survives_restarts_and_reloads"],
    "8.2-6": ["test_nothing_runs_before_the_start_or_after_the_end_and_both_are_inside"],
    "8.2-7": ["test_nothing_runs_before_the_start_or_after_the_end_and_both_are_inside"],  # and E7 start
    "8.2-8": [
        "test_after_a_downtime_runs_come_as_the_spec_says", "test_a_run_is_due_while_the_one_before_is_still_going",
        "test_a_paused_spec_runs_no_more", "test_the_next_run_can_be_skipped", "test_one_more_run_now",
    ],
    "8.2-9": ["test_a_repeatable_is_paused_resumed_skipped_and_run_once_more_by_calls"],
    "8.2-10": ["test_what_is_perhaps_not_meant_is_told_with_its_place"],
    "8.2-11": ["test_a_repeatable_changed_in_the_config_keeps_its_count_and_a_removed_one_is_retired"],
    "8.2-12": ["test_a_removed_spec_ends_with_its_pending_run"],
    "8.2-13": ["test_group_identity_does_not_depend_on_separators", "test_a_repeatable_does_what_the_row_says"],  # RU45
    "8.2-14": ["test_next_knows_cron_intervals_and_plain_words"],
    "8.2-15": ["test_a_repeatable_is_added_listed_and_removed_by_its_key"],
    "8.2-16": ["test_the_list_is_ordered_by_the_next_time_and_then_the_key"],
    "5-1": ["test_a_crash_after_any_statement_leaves_each_spec_exactly_one_pending_run"],
    "5-2": ["test_a_spec_whose_next_run_the_database_refuses_is_broken_and_stops_no_other"],
    "5-3": ["test_what_was_removed_and_is_added_again_begins_anew_and_runs"],
    "5-4": ["test_a_change_of_what_a_run_does_leaves_the_pending_run_where_it_is"],
    "5-5": ["test_a_pending_run_that_somebody_deletes_skips_one_slot_and_ends_no_spec"],
    "5-6": ["test_restarts_leave_one_pending_run_and_its_slot"],
    "5-7": ["test_a_changed_interval_replaces_the_old_and_keeps_the_counter"],
    "5-8": ["test_the_database_itself_refuses_a_second_pending_run"],
    "5-9": ["test_changed_data_reaches_the_next_run_and_its_slot_stays"],
    "5-10": ["test_a_second_daemon_on_the_same_database_is_refused"],
    "5-14": ["test_the_first_run_at_once_is_only_the_first"],
    "5-15": ["test_retries_of_a_run_never_add_or_count_runs"],
    "5-16": ["test_the_limit_is_exact_and_survives_restarts_and_reloads"],
    "5-17": ["test_a_later_end_makes_a_finished_spec_run_again_and_an_earlier_one_ends_it"],
    "5-18": ["test_each_planned_local_time_gives_exactly_one_instant_around_every_clock_change"],
    "5-23": ["test_a_run_is_due_while_the_one_before_is_still_going"],
    "5-24": ["test_at_most_a_hundred_missed_runs_are_made_up_for"],
    "5-25": ["test_a_job_of_five_seconds_each_second_keeps_its_rate"],
    "5-28": ["test_a_message_that_the_process_dies_of_three_times_is_given_up_and_listed"],
    "5-30": ["test_two_of_one_name_and_rule_are_told_apart_by_their_job_ids"],
    "5-34": ["test_hashed_fields_depend_on_the_name_and_stay_the_same"],
    "5-37": ["test_jitter_spreads_runs_and_is_the_same_each_time"],
}  # fmt: skip


@pytest.mark.parametrize("case", BEAT)
def test_what_was_to_be_better_has_a_test(case):
    tests = "".join(path.read_text("utf-8") for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    assert [name for name in BEAT[case] if f"def {name}" not in tests] == []
