"""Cases from the field: what went wrong elsewhere, and the tests that show that it does not here.

tests/data/cases.jsonl holds them: an id, the symptom, the input, what would be right. CASES names the tests of each;
those that had none stand here.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fcntl
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import Any

import pytest

import digestd
from conftest import BASIC, ROOT, START, wait_for
from peers import MailServer, Receiver
from test_process import knows, workflow
from test_senders import ANN, draft_of, live, mail, mail_config, mail_server, receiver, smtp  # noqa: F401

FOUND = [json.loads(line) for line in (ROOT / "tests" / "data" / "cases.jsonl").read_text("utf-8").splitlines()]

CASES: dict[str, list[str]] = {
    "case-097": ["test_the_same_call_again_has_the_same_answer_and_is_one_event"],
    "case-099": ["test_a_cancelled_transaction_id_stays_used"],
    "case-101": ["test_ids_that_differ_in_case_are_different_people"],
    "case-102": ["test_the_latest_address_of_a_subscriber_gets_the_digest"],
    "case-104": ["test_a_recipient_named_twice_gets_one_event", "test_one_bad_recipient_refuses_the_whole_call_and_nothing_is_stored"],
    "case-151": ["test_a_save_by_rename_is_seen_each_time"],
    "case-152": ["test_a_save_with_a_backup_in_two_halves_takes_only_the_whole_file"],
    "case-154": ["test_a_swapped_link_is_seen_each_time"],
    "case-156": ["test_a_broken_link_beside_the_config_is_no_trouble"],
    "case-157": ["test_sighup_takes_a_good_config_and_keeps_the_old_one_for_a_bad_one", "test_a_bad_edit_leaves_no_part_of_itself_behind"],
    "case-159": ["test_an_empty_file_is_refused_and_the_restored_one_taken"],
    "case-160": ["test_each_semantic_error_of_the_field_is_refused_with_its_key"],
    "case-161": ["test_a_file_that_is_written_slowly_deletes_nothing_on_the_way"],
    "case-163": ["test_a_mail_that_is_under_way_ends_where_it_began_and_the_next_goes_by_the_new_config"],
    "case-165": ["test_open_windows_of_a_workflow_that_is_gone_end_with_the_reason"],
    "case-166": ["test_toml_oddities_are_read_or_refused_with_the_key"],
    "case-167": ["test_a_mail_that_was_put_off_twice_arrives_once_with_the_same_bytes"],
    "case-168": ["test_a_greylist_of_six_minutes_is_outwaited_by_the_default_plan"],
    "case-169": ["test_the_first_digit_of_a_reply_decides_at_every_stage"],
    "case-170": ["test_a_refused_recipient_fails_once_and_the_others_get_their_mail"],
    "case-172": ["test_an_error_after_the_dot_is_not_taken_for_success"],
    "case-174": ["test_a_connection_that_the_server_closed_meanwhile_is_no_failure"],
    "case-175": ["test_a_connection_lost_after_the_dot_may_repeat_the_mail_with_the_same_id_and_says_so"],
    "case-177": ["test_an_error_at_quit_leaves_the_mail_sent"],
    "case-179": ["test_a_webhook_that_fails_does_not_repeat_the_mail_that_went_out"],
    "case-181": ["test_a_subject_arrives_as_it_was_written", "test_a_coded_line_break_starts_no_header"],
    "case-182": ["test_a_line_break_in_a_subject_becomes_a_blank"],
    "case-183": ["test_a_name_leaves_the_address_outside_the_encoded_word"],
    "case-184": ["test_only_ascii_is_on_the_wire_and_reads_as_it_was_written"],
    "case-185": ["test_a_subject_of_1100_characters_leaves_no_line_too_long"],
    "case-187": ["test_a_non_ascii_local_part_fails_for_good_where_the_server_cannot_take_it", "test_a_non_ascii_local_part_is_sent_in_utf8_where_the_server_can_take_it"],
    "case-189": ["test_a_bad_address_is_refused_at_the_door", "test_a_bad_address_in_the_database_never_reaches_the_server"],
    "case-190": ["test_mail_goes_out_under_each_kind_of_tls", "test_a_server_that_does_not_offer_starttls_gets_neither_mail_nor_password", "test_a_bad_certificate_is_tried_again_with_the_reason_and_nothing_is_sent"],
    "case-192": ["test_a_text_arrives_unchanged"],
    "case-193": ["test_the_next_try_waits_for_the_longer_of_plan_and_retry_after", "test_a_throttled_receiver_gets_its_next_try_not_before_it_asked"],
    "case-194": ["test_the_next_try_waits_for_the_longer_of_plan_and_retry_after"],
    "case-197": ["test_a_status_means", "test_a_redirect_is_not_followed_and_the_reason_names_where_it_leads", "test_a_sender_that_is_gone_is_disabled_and_its_message_waits_with_what_follows"],
    "case-198": ["test_two_timeouts_of_the_server_and_then_a_success_are_three_tries"],
    "case-199": ["test_a_redirect_to_the_same_host_does_not_tell_its_path"],
    "case-201": ["test_a_server_that_does_not_come_to_an_end_is_given_up_as_temporary"],
    "case-202": ["test_a_server_that_does_not_come_to_an_end_is_given_up_as_temporary", "test_an_endpoint_that_hangs_keeps_no_other_from_its_messages"],
    "case-204": ["test_a_dead_endpoint_sees_few_tries_at_growing_distances_and_then_the_message"],
    "case-205": ["test_a_crash_after_the_answer_sends_the_same_id_and_bytes_again"],
    "case-207": ["test_the_signature_verifies_with_the_public_library", "test_a_signing_secret_that_is_none_is_refused_when_the_config_is_read"],
    "case-210": ["test_an_endpoint_that_hangs_does_not_delay_the_messages_of_another", "test_a_receiver_that_hangs_delays_another_sender_by_less_than_100_ms"],
    "case-211": ["test_a_refusal_of_one_digest_leaves_the_others_alone"],
    "case-212": ["test_a_host_that_does_not_resolve_is_tried_again_with_a_reason", "test_a_resolver_that_never_answers_holds_up_nobody_else"],
    "case-214": ["test_an_ipv6_address_in_brackets_works", "test_a_url_that_is_none_is_refused_when_the_config_is_read"],
    "case-216": ["test_urls_of_the_field_are_taken_or_refused_with_the_key", "test_a_preset_that_lacks_or_has_too_much_is_told", "test_credentials_in_the_url_are_sent_as_a_header"],
    "case-217": ["test_a_proxy_is_asked_where_one_is_set_and_only_then"],
    "case-222": ["test_the_secret_in_a_url_is_in_no_reason_and_no_line_of_the_log"],
    "case-223": ["test_the_secret_in_a_url_is_in_no_reason_and_no_line_of_the_log", "test_an_answer_that_repeats_the_url_does_not_bring_its_secret_into_the_reason"],
    "case-225": ["test_at_debug_level_no_secret_is_in_the_log_the_database_or_the_status", "test_a_secret_in_the_wrong_place_is_not_repeated_in_the_error"],
    "case-226": ["test_only_a_known_key_opens_the_door", "test_bytes_that_are_no_text_are_no_key"],
    "case-227": ["test_without_a_listen_key_only_this_machine_reaches_the_api"],
    "case-228": ["test_a_trigger_is_acknowledged_as_novu_does_and_is_in_the_database", "test_a_trigger_without_name_or_recipient_is_400_and_says_which_is_missing", "test_an_unknown_workflow_is_told_in_the_words_that_the_clients_look_for"],
    "case-230": ["test_a_client_that_drips_its_head_was_let_go_after_ten_seconds", "test_pipelined_requests_are_answered_in_their_order", "test_head_has_no_body_and_the_connection_can_be_used_on", "test_two_hundred_idle_connections_do_not_block_new_calls", "test_a_client_that_asks_first_with_2_mb_gets_its_413", "test_a_method_that_the_path_does_not_have_is_405"],
    "case-232": ["test_a_port_in_use_is_told_and_ends_with_1", "test_a_port_of_a_moment_ago_is_had_at_once"],
    "case-233": ["test_sigterm_lets_the_post_end_records_it_and_begins_no_other"],
    "case-234": ["test_sigterm_while_a_mail_is_in_data_leaves_one_whole_mail"],
    "case-235": ["test_a_post_in_the_air_at_a_kill_is_sent_again_with_the_same_id"],
    "case-238": ["test_a_loop_that_hangs_pings_no_more", "test_a_reload_of_a_bad_file_fails_with_the_reason_and_changes_nothing"],
    "case-240": ["test_pings_come_about_twice_in_each_watchdog_interval"],
    "case-241": ["test_ready_is_said_once_and_only_when_the_port_listens", "test_a_notify_socket_that_is_gone_is_no_trouble"],
    "case-247": ["test_a_schedule_that_changes_during_a_wait_is_read_again_on_each_wake"],
    "case-249": ["test_the_latest_address_of_a_subscriber_gets_the_digest", "test_a_deleted_subscriber_gets_nothing_any_more_and_others_do"],
    "case-250": ["test_a_schedule_without_a_single_open_day_ends_the_window_at_once"],
    "case-252": ["test_hours_are_read_in_each_spelling", "test_hours_that_are_no_time_of_day_are_refused", "test_hours_until_24_end_with_the_day"],
    "case-254": ["test_a_lunch_hole_is_outside_whatever_the_order_of_the_hours"],
    "case-255": ["test_a_text_beyond_ascii_goes_through_a_server_of_seven_bits"],
    "case-257": ["test_an_endpoint_whose_certificate_is_not_trusted_gets_nothing_and_is_tried_again", "test_plain_http_on_an_https_url_is_tried_again_with_a_reason", "test_with_a_trusted_authority_only_the_right_and_valid_certificate_is_sent_to"],
}  # fmt: skip


def names_of_tests() -> set[str]:
    files = [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "tests" / "e2e").glob("test_*.py")]
    trees = [ast.parse(path.read_text("utf-8")) for path in files]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_names_tests_that_there_are():
    assert {case["id"] for case in FOUND} == set(CASES)
    known = names_of_tests()
    assert [(case, name) for case, names in CASES.items() for name in names if name not in known] == []


# -- people ------------------------------------------------------------------------------------------------------------


def test_the_latest_address_of_a_subscriber_gets_the_digest(live, mail_server):  # noqa: F811
    server = mail_server()
    w = live(mail_config(server.port))
    w.trigger("comments", {"subscriberId": "s1", "email": "a@example.test"}, {"postId": 1})
    w.advance("1m")
    w.trigger("comments", {"subscriberId": "s1", "email": "b@example.test"}, {"postId": 1})
    w.advance("1m")
    w.trigger("comments", "s1", {"postId": 1})  # brings no address, and takes none away
    w.advance("10m")
    assert [got.to for got in server.mails] == [["b@example.test"]]
    assert w.one("SELECT count(*) FROM subscribers") == 1


OFFICE = {"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": True, "hours": [
    {"start": "01:00 PM", "end": "05:00 PM"}, {"start": "09:00 AM", "end": "12:00 PM"}]}}}  # fmt: skip
HELD = BASIC.replace('window = "10m"', 'window = "3h30m"\nextend_to_schedule = true')


def test_a_lunch_hole_is_outside_whatever_the_order_of_the_hours(world):
    w = world(HELD)
    w.subscriber("s1", schedule=OFFICE)
    w.trigger("comments", "s1", {"postId": 1})
    w.run_until(digestd.parse_instant("2026-03-09T12:59:59Z"))
    assert w.sent == [] and w.rows("SELECT state FROM digests") == [("held",)]
    w.advance("1s")
    assert [digestd.iso_text(at) for at, _, _ in w.sent] == ["2026-03-09T13:00:00Z"]


def test_a_schedule_without_a_single_open_day_ends_the_window_at_once(world):
    w = world(HELD + '[[workflows.comments.steps]]\nid = "feed"\ntype = "in_app"\ntext = "x"\n')
    w.subscriber("s1", schedule={"isEnabled": True, "weeklySchedule": {"monday": {"isEnabled": False, "hours": []}}})
    w.trigger("comments", "s1", {"postId": 1})
    w.advance("3h30m")
    assert w.rows("SELECT state, waits FROM digests") == [("closed", 0)]
    assert w.rows("SELECT step, state FROM jobs ORDER BY id") == [("chat", "skipped"), ("feed", "completed")]


# -- the config while the daemon runs ----------------------------------------------------------------------------------


@pytest.fixture
def endpoint():
    made = Receiver()
    yield made
    made.stop()


def config_with(there: Receiver, *more: str) -> str:
    return "".join([f'[senders.hook]\ntype = "webhook"\nurl = "{there.url()}"\nretry = ["100ms"]\njitter = 0\n', *more])


def test_a_broken_link_beside_the_config_is_no_trouble(daemon, endpoint, tmp_path):
    process = daemon(config_with(endpoint, workflow("first")))
    (tmp_path / "junk").symlink_to(tmp_path / "nowhere" / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    process.config.write_text(process.config.read_text() + workflow("second"))
    wait_for(lambda: knows(process, "second"), what="the edit")
    assert " ERROR " not in process.logged() and "Traceback" not in process.logged()


def test_a_bad_edit_leaves_no_part_of_itself_behind(daemon, endpoint, tmp_path):
    other = Receiver()
    process = daemon(config_with(endpoint, workflow("first", window="1s")))
    good = process.config.read_text()
    process.config.write_text(good.replace(endpoint.url(), other.url()) + "\n[workflows\n")
    wait_for(lambda: "refused" in process.logged(), what="the refusal")
    assert process.trigger("first", "s1", {"n": 1})[0] == 201
    wait_for(lambda: endpoint.requests, what="the message, where the good config says")
    process.config.write_text(good.replace(endpoint.url(), other.url()))
    wait_for(lambda: "was read again" in process.logged(), what="the good edit")
    assert process.trigger("first", "s1", {"n": 2})[0] == 201
    wait_for(lambda: other.requests, what="the message, where the new config says")
    other.stop()


def test_a_file_that_is_written_slowly_deletes_nothing_on_the_way(daemon, endpoint):
    specs = "".join(f'[repeatables.r{number}]\nevery = "1h"\nlimit = 9\nsender = "hook"\n' for number in range(2000))
    process = daemon(config_with(endpoint, specs))
    wait_for(lambda: process.query("SELECT count(*) FROM repeatables WHERE state = 'active'") == [(2000,)], what="all")
    before = process.query("SELECT key, count, created_at FROM repeatables ORDER BY key")
    text = process.config.read_text() + workflow("late")
    with process.config.open("w") as file:
        for start in range(0, len(text), 4096):
            file.write(text[start : start + 4096])
            file.flush()
            threading.Event().wait(0.05)  # an editor's own slowness
    wait_for(lambda: knows(process, "late"), what="the whole file")
    assert process.query("SELECT key, count, created_at FROM repeatables ORDER BY key") == before
    assert process.query("SELECT count(*) FROM repeatables WHERE state <> 'active'") == [(0,)]


MAILS = """
[senders.mail]
type = "smtp"
tls = "none"
port = {port}
from = "d@example.org"
retry = ["200ms"]
[workflows.w]
steps = [{{ id = "mail", type = "email", sender = "mail", text = "{word}" }}]
"""


def test_a_mail_that_is_under_way_ends_where_it_began_and_the_next_goes_by_the_new_config(daemon):
    slow, other = MailServer(), MailServer()
    waits = threading.Event()
    slow.hold_at_dot = waits
    process = daemon(MAILS.format(port=slow.port, word="first"))
    assert process.trigger("w", ANN)[0] == 201
    wait_for(lambda: "DOT" in slow.stages, what="a mail in DATA")
    text = process.config.read_text().replace(f"port = {slow.port}", f"port = {other.port}")
    process.config.write_text(text.replace("first", "second"))
    wait_for(lambda: "was read again" in process.logged(), what="the reload")
    waits.set()
    wait_for(lambda: slow.mails, what="the mail under way")
    assert process.trigger("w", ANN)[0] == 201
    wait_for(lambda: other.mails, what="the next mail")
    assert slow.mails[0].text().strip() == "first" and other.mails[0].text().strip() == "second"
    assert len(slow.mails) == len(other.mails) == 1
    for server in (slow, other):
        server.stop()


def test_open_windows_of_a_workflow_that_is_gone_end_with_the_reason(world):
    w = world()
    for name in ("s1", "s2"):
        w.trigger("comments", name, {"postId": 1})
    w.use(BASIC.replace("workflows.comments", "workflows.others"))
    w.advance("1h")
    assert w.rows("SELECT DISTINCT state FROM digests") != [("open",)] and w.sent == []
    assert {reason for (reason,) in w.rows("SELECT reason FROM v_trouble")} == {"workflow removed"}
    w.use(BASIC)
    with digestd.transaction():
        for (job_id,) in w.rows("SELECT id FROM jobs WHERE state = 'failed'"):
            digestd.retry_job(job_id, w.now)
    w.tick()
    assert len(w.sent) == 2, "it comes back with the workflow"


# -- mail --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "coded", ["A =?UTF-8?Q?=0A?=Bcc: x@example.test", "=?utf-8?b?Cg==?= B", "=?utf-8?q?=0D=0ATo:_y?="]
)
@pytest.mark.parametrize("where", ["subject", "firstName"])
def test_a_coded_line_break_starts_no_header(mail_server, coded, where):  # noqa: F811
    server = mail_server()
    more = {"subject": "{{ payload.n }}"} if where == "subject" else {"subscriber": {"firstName": coded}}
    events = [digestd.DigestedEvent(1, START, json.dumps({"n": coded}), "t")]
    assert mail(smtp(server), events=events, **more).outcome == "sent"
    [got] = server.mails
    lines = got.head.split(b"\r\n")
    assert not [line for line in lines if line.lower().startswith((b"bcc:", b"to: y"))] and got.to == [
        "ann@example.test"
    ]
    assert sum(line.lower().startswith(b"subject:") for line in lines) == 1


def test_only_ascii_is_on_the_wire_and_reads_as_it_was_written(mail_server):  # noqa: F811
    server = mail_server()
    mail(smtp(server), text="ж" * 3000, subject="Ärger ☃", subscriber={"firstName": "Jörg"})
    [got] = server.mails
    assert max(got.data) < 128 and got.message["Subject"] == "Ärger ☃" and got.text().strip() == "ж" * 3000
    assert got.message["To"].addresses[0].display_name == "Jörg"


def test_a_text_beyond_ascii_goes_through_a_server_of_seven_bits(mail_server):  # noqa: F811
    server = mail_server(eight_bit=False)
    assert mail(smtp(server), text="Ї and " + "Ж" * 3000, html="<b>Ї</b>").outcome == "sent"
    [got] = server.mails
    assert (
        max(got.data) < 128 and got.text().strip() == "Ї and " + "Ж" * 3000 and got.text("html").strip() == "<b>Ї</b>"
    )
    assert got.options == []


def test_sigterm_while_a_mail_is_in_data_leaves_one_whole_mail(daemon):
    server = MailServer()
    waits = threading.Event()
    server.hold_at_dot = waits
    process = daemon(MAILS.format(port=server.port, word="hello"))
    assert process.trigger("w", ANN)[0] == 201
    wait_for(lambda: "DOT" in server.stages, what="a mail in DATA")
    process.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in process.logged(), what="the signal")
    waits.set()
    assert process.process.wait(20) == 0
    assert [got.text().strip() for got in server.mails] == ["hello"]
    assert process.query("SELECT state, tries FROM jobs") == [("completed", 1)]
    server.stop()


# -- webhooks ----------------------------------------------------------------------------------------------------------


def test_a_resolver_that_never_answers_holds_up_nobody_else(receiver, monkeypatch):  # noqa: F811
    there, answered = receiver(), threading.Event()
    ask = socket.getaddrinfo

    def sometimes(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "silent.example.test":
            answered.wait(20)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return ask(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", sometimes)

    def claim(url: str) -> digestd.Claim:
        table = {"type": "webhook", "url": url, "timeout": "1s"}
        settings = digestd.WebhookSettings.model_validate(table)
        return digestd.Claim(1, 1, 1, START, "m", "out", settings, message=digestd.Message("{}", "application/json"))

    async def all_at_once() -> list[digestd.SendResult]:
        senders = digestd.Senders()
        hanging = [asyncio.ensure_future(senders.send(claim("http://silent.example.test/"))) for _ in range(20)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        quick = await senders.send(claim(there.url().replace("127.0.0.1", "localhost")))
        assert quick.outcome == "sent" and time.monotonic() - began < 1
        results = await asyncio.gather(*hanging)
        answered.set()
        await senders.close()
        return results

    results = asyncio.run(all_at_once())
    assert {(one.outcome, one.reason) for one in results} == {("temporary", "no answer within 1s")}


# -- the process -------------------------------------------------------------------------------------------------------


def test_without_a_listen_key_only_this_machine_reaches_the_api(tmp_path):
    config = digestd.read_config("[daemon]\n", tmp_path / "config.toml")
    assert [digestd.parse_listen(text).host for text in config.api.listen] == ["127.0.0.1"]


def test_a_port_of_a_moment_ago_is_had_at_once(daemon, endpoint):
    process = daemon(config_with(endpoint, workflow("first")))
    for _ in range(3):
        with contextlib.closing(socket.create_connection(("127.0.0.1", process.port))) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            process.stop()  # it closes first, so its side stays in TIME_WAIT
        process.start()
    assert knows(process, "first")


class NotifySocket:
    """What systemd would listen on; when each datagram came, and what it said."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = str(folder / "n")
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.line.bind(self.path)
        self.said: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                text = self.line.recv(65536).decode()
                self.said.append((time.monotonic(), text))

    @property
    def pings(self) -> list[float]:
        return [at for at, text in self.said if "WATCHDOG=1" in text]


@pytest.fixture
def notified(tmp_path):
    made = NotifySocket(tmp_path)
    yield made
    made.line.close()


def test_pings_come_about_twice_in_each_watchdog_interval(daemon, endpoint, notified):
    daemon(config_with(endpoint), NOTIFY_SOCKET=notified.path, WATCHDOG_USEC="4000000")
    wait_for(lambda: len(notified.pings) >= 5, 30, "five pings")
    gaps = [later - sooner for sooner, later in zip(notified.pings, notified.pings[1:], strict=False)]
    assert 1.0 < sum(gaps) / len(gaps) < 3.0 and max(gaps) < 4.0


def test_a_loop_that_hangs_pings_no_more(daemon, endpoint, notified):
    """The loop alone is blocked, by a full pipe in the place of its log that nobody reads; other threads live on."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = daemon(config_with(endpoint, workflow("first")))
    process.stop()
    process.process = subprocess.Popen(
        [sys.executable, str(ROOT / "digestd.py"), "run", "--config", str(process.config)],
        cwd=process.folder, stdout=writer, stderr=writer,
        env={**os.environ, "NOTIFY_SOCKET": notified.path, "WATCHDOG_USEC": "2000000"},
    )  # fmt: skip
    wait_for(lambda: len(notified.pings) >= 2, what="pings")
    [said] = struct.unpack("i", fcntl.ioctl(writer, termios.FIONREAD, b"\0" * 4))
    os.write(writer, b"x" * (4096 - said))
    process.process.send_signal(signal.SIGHUP)  # after which it has something to say
    threading.Event().wait(2)
    before = len(notified.pings)
    threading.Event().wait(4)
    assert len(notified.pings) == before
    process.kill()
    for end in (reader, writer):
        os.close(end)
