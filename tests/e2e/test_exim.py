"""Digests by mail to a real mail server: what arrives, and what becomes of what does not."""

from __future__ import annotations

import datetime as dt
import email.utils
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from exim import Exim

from conftest import ROOT, Process, wait_for
from peers import CA

# Three events end a window, so that no test waits for time to pass.
WORKFLOW = """
[[workflows.{name}.steps]]
id = "digest"
type = "digest"
window = "1h"
max_events = 3
[[workflows.{name}.steps]]
id = "mail"
type = "email"
sender = "mail"
subject = "{{{{ steps.digest.eventCount }}}} times {{{{ payload.about }}}}"
text = "{{% for e in steps.digest.events %}}{{{{ e.payload.says }}}}\\n{{% endfor %}}"
"""
HTML = 'html = "<ul>{% for e in steps.digest.events %}<li>{{ e.payload.says }}</li>{% endfor %}</ul>"\n'

SENDER = """
[senders.mail]
type = "smtp"
port = {port}
tls = "{tls}"
from = "Digest <digest@example.org>"
timeout = "10s"
retry = ["1s", "1h"]
jitter = 0
"""
LOGIN = f'username = "digestd"\npassword = "{{password}}"\nca_file = "{CA}"\n'

RETRIED = "SELECT status_code, reason FROM attempts WHERE outcome = 'temporary'"


@pytest.fixture(scope="module")
def server() -> Iterator[Exim]:
    made = Exim()
    yield made
    made.stop()


@pytest.fixture
def exim(server: Exim) -> Exim:
    """The server of all tests here, as if it had just been started."""
    server.empty()
    return server


@pytest.fixture
def mailer(daemon: Callable[..., Process], exim: Exim) -> Callable[..., Process]:
    """Starts daemons that mail digests to Exim; `more` goes to the sender, `api` to the API."""

    def start(
        tls: str = "none", more: str = "", api: str = "", workflows: str = WORKFLOW.format(name="news"), **env: str
    ) -> Process:
        port = exim.tls_port if tls == "implicit" else exim.port
        return daemon(api + SENDER.format(port=port, tls=tls) + more + workflows, **env)

    return start


def command(process: Process, *arguments: str) -> Any:
    """What a command of digestd prints as JSON, beside the daemon."""
    line = [sys.executable, str(ROOT / "digestd.py"), *arguments, "--config", str(process.config), "--json"]
    return json.loads(subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout)


def digest(process: Process, to: str, *says: str, workflow: str = "news", about: str = "birds", **person: Any) -> None:
    """Three events for a subscriber, by which their window ends."""
    says = says or ("robin", "wren", "tit")
    whom = {"subscriberId": to, "email": f"{to}@example.test", **person}
    events = [{"name": workflow, "to": whom, "payload": {"about": about, "says": one}} for one in says]
    events += [{"name": workflow, "to": whom, "payload": {"about": about, "says": ""}}] * (3 - len(says))
    status, answer = process.request("POST", "/v1/events/trigger/bulk", {"events": events})
    assert status == 201, answer


def job_of(process: Process, to: str) -> dict[str, Any]:
    """The latest mail job of a subscriber."""
    names = ("state", "reason", "public_id", "due_at", "finished_at", "tries")
    found = process.query(
        f"SELECT {', '.join('j.' + name for name in names)} FROM jobs j JOIN runs r ON r.id = j.run_id"
        f" WHERE r.subscriber_id = '{to}' AND j.type = 'email' ORDER BY j.id DESC LIMIT 1"
    )
    return dict(zip(names, found[0], strict=True)) if found else dict.fromkeys(names)


def wait_for_state(process: Process, to: str, state: str) -> dict[str, Any]:
    return wait_for(lambda: (job := job_of(process, to))["state"] == state and job, what=f"{state}\n{process.logged()}")


def change(process: Process, old: str, new: str) -> None:
    """Edit the config as a person would, and ask for a reload."""
    text = process.config.read_text()
    assert old in text
    process.config.write_text(text.replace(old, new))
    process.process.send_signal(signal.SIGHUP)


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_a_digest_arrives_with_each_header_once_and_nothing_but_ascii(mailer, exim):
    process = mailer(workflows=WORKFLOW.format(name="news") + HTML)
    digest(process, "ada", firstName="Ada", lastName="Lovelace")
    [mail] = exim.wait_for_mails()
    assert email.utils.parseaddr(mail.value("From")) == ("Digest", "digest@example.org")
    assert email.utils.parseaddr(mail.value("To")) == ("Ada Lovelace", "ada@example.test")
    assert mail.envelope_to == "ada@example.test"
    assert mail.value("Subject") == "3 times birds"
    assert mail.text() == "robin\nwren\ntit\n"
    assert mail.text("html") == "<ul><li>robin</li><li>wren</li><li>tit</li></ul>"
    assert mail.message.get_content_type() == "multipart/alternative"
    age = dt.datetime.now(dt.UTC) - email.utils.parsedate_to_datetime(mail.value("Date"))
    assert dt.timedelta(0) <= age < dt.timedelta(minutes=1)
    job = wait_for_state(process, "ada", "completed")
    assert mail.value("Message-ID") == f"<{job['public_id']}@example.org>"
    assert re.fullmatch(r"<news\.[a-z0-9.-]*example\.org>", mail.value("List-Id"))
    assert mail.value("Auto-Submitted") == "auto-generated"
    assert mail.value("MIME-Version") == "1.0"
    assert mail.values("List-Unsubscribe") == []  # nobody said where the API is to be found
    assert mail.data.isascii()
    assert max(map(len, mail.data.split(b"\n"))) <= 998


def test_the_envelope_names_the_sender_and_the_greeting_its_domain(mailer, exim):
    process = mailer()
    digest(process, "ada")
    exim.wait_for_mails()
    assert re.search(
        r"<= digest@example\.org H=[^\n]*\(example\.org\) \[127\.0\.0\.1\][^\n]* for ada@example\.test", exim.log()
    )


def test_digests_of_one_subscriber_and_workflow_are_one_thread_and_others_are_not(mailer, exim):
    process = mailer(workflows=WORKFLOW.format(name="news") + WORKFLOW.format(name="other"))
    roots: dict[tuple[str, str], set[str]] = {}
    for number, (to, workflow) in enumerate((("ada", "news"), ("ada", "news"), ("bob", "news"), ("ada", "other")), 1):
        digest(process, to, workflow=workflow)
        mail = exim.wait_for_mails(number)[-1]
        assert mail.envelope_to == f"{to}@example.test"
        assert mail.value("In-Reply-To") == mail.value("References")
        assert re.fullmatch(r"<[^<>@\s]+@example\.org>", mail.value("References"))
        roots.setdefault((to, workflow), set()).add(mail.value("References"))
    assert [len(found) for found in roots.values()] == [1, 1, 1]
    assert len(set.union(*roots.values())) == 3
    assert len({mail.value("Message-ID") for mail in exim.mails()}) == 4


def test_a_body_with_lone_dots_and_very_long_lines_arrives_unchanged(mailer, exim):
    process = mailer()
    says = (
        ".\n..\n.dot\nFrom here\n\n.",
        "long " + "x" * 5_000 + " " + "ü" * 5_000,
        "  spaces \t\nand = signs =3D\ufeff",
    )
    digest(process, "ada", *says)
    [mail] = exim.wait_for_mails()
    assert mail.text() == "".join(f"{one}\n" for one in says)
    assert mail.data.isascii()
    assert max(map(len, mail.data.split(b"\n"))) <= 998


def test_a_subject_a_name_and_a_body_beyond_ascii_arrive_unchanged(mailer, exim):
    process = mailer(workflows=WORKFLOW.format(name="news") + HTML)
    about = "Vögel 🐦 und =?utf-8?q?Rätsel?= " + "größer " * 15
    digest(process, "ada", "Rotkehlchen trällert", "鶯", "🐦", about=about, firstName="Жанна", lastName='d\'Arc, "Ö"')
    [mail] = exim.wait_for_mails()
    assert mail.message["Subject"] == f"3 times {about}".strip()
    assert email.utils.parseaddr(mail.value("To"))[1] == "ada@example.test"
    assert mail.message["To"].addresses[0].display_name == 'Жанна d\'Arc, "Ö"'
    assert mail.text() == "Rotkehlchen trällert\n鶯\n🐦\n"
    assert mail.text("html") == "<ul><li>Rotkehlchen trällert</li><li>鶯</li><li>🐦</li></ul>"
    assert mail.data.isascii()
    assert max(map(len, mail.data.split(b"\n"))) <= 998


def test_line_ends_in_an_event_make_no_header(mailer, exim):
    process = mailer()
    digest(process, "ada", about="a\r\nBcc: eve@example.test\r\n\r\nbody", firstName="A\r\nBcc: eve@example.test")
    [mail] = exim.wait_for_mails()
    assert mail.values("Bcc") == []
    assert mail.envelope_to == "ada@example.test"


def test_an_address_beyond_ascii_is_reached_by_smtputf8(mailer, exim):
    process = mailer()
    digest(process, "joerg", email="jörg@example.test")
    [mail] = exim.wait_for_mails()
    assert mail.envelope_to == "jörg@example.test"
    assert email.utils.parseaddr(mail.value("To"))[1] == "jörg@example.test"
    assert wait_for_state(process, "joerg", "completed")["tries"] == 1


def test_ten_mails_take_one_connection(mailer, exim):
    process = mailer(more="concurrency = 1\n")
    for number in range(10):
        digest(process, f"s{number}")
    mails = exim.wait_for_mails(10)
    assert {mail.envelope_to for mail in mails} == {f"s{number}@example.test" for number in range(10)}
    assert exim.connections() == 1, exim.log()
    assert process.stop() == 0
    wait_for(lambda: "closed by QUIT" in exim.log(), what="the goodbye at the end")


def test_mails_beyond_the_tenth_of_a_connection_take_another_one_without_a_wait(mailer, exim):
    process = mailer(more="concurrency = 1\n")
    for number in range(12):
        digest(process, f"s{number}")
    exim.wait_for_mails(12)
    assert exim.connections() == 2, exim.log()
    assert process.query("SELECT count(*) FROM jobs WHERE type = 'email' AND state = 'failed' OR tries > 1") == [(0,)]


def test_a_connection_that_the_server_ends_while_it_rests_costs_no_wait(mailer, exim):
    process = mailer()
    digest(process, "ada")
    exim.wait_for_mails()
    wait_for(lambda: "SMTP command timeout" in exim.log(), what="the end of the idle connection")
    digest(process, "bob")
    exim.wait_for_mails(2)
    assert wait_for_state(process, "bob", "completed")["tries"] == 1


# -- the way there -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
def test_a_login_under_tls_is_taken(mailer, exim, tls):
    exim.needs_login = True
    process = mailer(tls, LOGIN.format(password="s3cret"))
    digest(process, "ada")
    exim.wait_for_mails()
    assert re.search(r" P=esmtpsa X=TLS1\.[23]\S* .*A=plain:digestd ", exim.log())


def test_a_server_that_wants_a_login_refuses_mails_without_one_for_good(mailer, exim):
    exim.needs_login = True
    process = mailer()
    digest(process, "ada")
    job = wait_for_state(process, "ada", "failed")
    assert "550" in job["reason"] and "5.7.1" in job["reason"] and "log in first" in job["reason"]


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
def test_a_certificate_that_nobody_vouches_for_sends_nothing_and_is_tried_again(mailer, exim, tls):
    process = mailer(tls)
    digest(process, "ada")
    wait_for(lambda: len(process.query(RETRIED)) == 2, what="the second try")
    for status, reason in process.query(RETRIED):
        assert status is None and "certificate" in reason.lower()
    job = job_of(process, "ada")
    assert (job["state"], job["tries"]) == ("delayed", 2)
    assert exim.mails() == []

    change(process, 'tls = "', f'ca_file = "{CA}"\ntls = "')  # and by hand, what would happen in an hour
    wait_for(lambda: "read again" in process.logged(), what="the reload")
    digest(process, "bob")
    assert exim.wait_for_mails()[0].envelope_to == "bob@example.test"


def test_a_wrong_password_disables_the_sender_until_the_right_one_is_in_the_config(mailer, exim):
    exim.needs_login = True
    process = mailer("starttls", LOGIN.format(password="wr0ng-password"))
    digest(process, "ada")
    wait_for(lambda: sender_of(process)["state"] == "disabled", what="the end of the sender")
    assert "535" in sender_of(process)["reason"]
    digest(process, "bob")
    wait_for_state(process, "ada", "waiting")
    wait_for_state(process, "bob", "waiting")
    trouble = process.query("SELECT * FROM v_trouble")
    assert any("mail" in map(str, row) or "535" in str(row) for row in trouble), trouble
    assert exim.log().count("535 Incorrect authentication data") == 1  # each more could lock the account
    assert exim.mails() == [] and "wr0ng" not in process.logged()

    change(process, "wr0ng-password", "s3cret")
    mails = exim.wait_for_mails(2)
    assert sorted(mail.envelope_to for mail in mails) == ["ada@example.test", "bob@example.test"]
    wait_for_state(process, "ada", "completed")
    assert sender_of(process)["state"] == "ok"


def sender_of(process: Process) -> dict[str, Any]:
    """What `digestd sender list` tells of the one sender."""
    told = command(process, "sender", "list")
    senders = told if isinstance(told, list) else told["senders"]
    return next(one for one in senders if one["name"] == "mail")


# -- what the server refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["grey", "late"], ids=["at the recipient", "after the text"])
def test_a_greylisted_mail_comes_again_after_the_wait_and_arrives_once(mailer, exim, to):
    exim.is_grey = True
    process = mailer()
    digest(process, to)
    digest(process, "ada")  # others are not held up
    job = wait_for_state(process, to, "delayed")
    [(status, reason)] = process.query(RETRIED)
    assert status == 451 and "4.7.1" in reason
    [(ended,)] = process.query("SELECT finished_at FROM attempts WHERE outcome = 'temporary'")
    assert job["due_at"] - ended == 1000
    exim.is_grey = False
    job = wait_for_state(process, to, "completed")
    mails = exim.wait_for_mails(2)
    [mail] = [mail for mail in mails if mail.envelope_to == f"{to}@example.test"]
    assert mail.value("Message-ID") == f"<{job['public_id']}@example.org>"
    assert exim.log().count(f"saw {mail.value('Message-ID')}") == (2 if to == "late" else 1)
    assert job["tries"] == 2


def test_an_unknown_recipient_fails_at_once_and_no_other_does(mailer, exim):
    process = mailer()
    for to in ("gone", "ada", "bob"):
        digest(process, to)
    job = wait_for_state(process, "gone", "failed")
    assert "550" in job["reason"] and "5.1.1" in job["reason"] and "no such user" in job["reason"]
    assert job["tries"] == 1
    mails = exim.wait_for_mails(2)
    assert {mail.envelope_to for mail in mails} == {"ada@example.test", "bob@example.test"}
    assert [row[0] for row in process.query("SELECT status_code FROM attempts WHERE outcome = 'permanent'")] == [550]


def test_a_mail_that_is_too_large_fails_at_once_and_no_other_does(mailer, exim):
    process = mailer()
    digest(process, "ada", "x" * 90_000, "y" * 90_000, "z" * 90_000)
    digest(process, "bob")
    job = wait_for_state(process, "ada", "failed")
    assert "552" in job["reason"] and "size" in job["reason"] and job["tries"] == 1
    assert exim.wait_for_mails()[0].envelope_to == "bob@example.test"


def test_a_server_that_is_away_is_waited_for(daemon, exim):
    nowhere = SENDER.format(port=9, tls="none")
    process = daemon(nowhere + WORKFLOW.format(name="news"))
    digest(process, "ada")
    wait_for_state(process, "ada", "delayed")
    change(process, "port = 9", f"port = {exim.port}")
    [mail] = exim.wait_for_mails()
    assert mail.envelope_to == "ada@example.test"


# -- the end of it at one click ----------------------------------------------------------------------------------------

PUBLIC = 'public_url = "https://digest.example.org/base"\nkeys = ["a-key-that-no-mail-program-has"]\n'
KEY = {"Authorization": "ApiKey a-key-that-no-mail-program-has"}


def click(process: Process, url: str, body: str | None) -> tuple[int, str]:
    """What a mail program does with a List-Unsubscribe, through the proxy that `public_url` stands for."""
    path = url.removeprefix("https://digest.example.org/base")
    data = body.encode() if body is not None else None
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if body is not None else {}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{process.port}{path}", data, headers)
    ) as answer:
        return answer.status, answer.read().decode()


def digest_with_key(process: Process, to: str) -> None:
    event = {"name": "news", "to": {"subscriberId": to, "email": f"{to}@example.test"}, "payload": {"about": "birds"}}
    assert process.request("POST", "/v1/events/trigger/bulk", {"events": [event] * 3}, KEY)[0] == 201


def test_one_click_ends_the_mails_of_a_workflow_and_looking_at_the_page_does_not(mailer, exim):
    process = mailer(api=PUBLIC)
    digest_with_key(process, "ada")
    [mail] = exim.wait_for_mails()
    assert mail.value("List-Unsubscribe-Post") == "List-Unsubscribe=One-Click"
    url = mail.value("List-Unsubscribe").strip("<>")
    assert mail.value("List-Unsubscribe") == f"<{url}>" and url.startswith("https://digest.example.org/base/u/")

    status, page = click(process, url, None)
    assert status == 200 and "<form" in page and "post" in page.lower()
    assert process.query("SELECT * FROM preferences") == []
    digest_with_key(process, "ada")
    exim.wait_for_mails(2)

    assert click(process, url, "List-Unsubscribe=One-Click")[0] == 200
    digest_with_key(process, "ada")
    job = wait_for_state(process, "ada", "skipped")
    assert job["reason"] == "the subscriber turned email off"
    digest_with_key(process, "bob")  # others still get theirs
    assert exim.wait_for_mails(3)[-1].envelope_to == "bob@example.test"


def test_a_link_that_was_tampered_with_ends_nothing(mailer, exim):
    process = mailer(api=PUBLIC)
    digest_with_key(process, "ada")
    url = exim.wait_for_mails()[0].value("List-Unsubscribe").strip("<>")
    for wrong in (url[:-1] + ("A" if url[-1] != "A" else "B"), url[:-4], url.rpartition("/")[0] + "/1"):
        try:
            click(process, wrong, "List-Unsubscribe=One-Click")
        except urllib.error.HTTPError as error:
            assert error.code in (404, 410)
    assert process.query("SELECT * FROM preferences WHERE enabled = 0") == []


def test_mails_of_critical_workflows_have_no_such_link(mailer, exim):
    process = mailer(api=PUBLIC, workflows="[workflows.news]\ncritical = true\n" + WORKFLOW.format(name="news"))
    digest_with_key(process, "ada")
    [mail] = exim.wait_for_mails()
    assert mail.values("List-Unsubscribe") == [] and mail.values("List-Unsubscribe-Post") == []


# -- by a program ------------------------------------------------------------------------------------------------------


def by_program(line: list[str]) -> str:
    sender = ('[senders.mail]\ntype = "sendmail"\nfrom = "Digest <digest@example.org>"\n'
              f'retry = ["1s", "1h"]\njitter = 0\ncommand = {json.dumps(line)}\n')  # fmt: skip
    return sender + WORKFLOW.format(name="news")


def test_a_digest_goes_out_by_sendmail(daemon, exim):
    """Exim in the place of sendmail: one program for both, as a Debian machine has it."""
    process = daemon(by_program([exim.program, "-C", str(exim.config), "-t", "-i"]))
    says = ("robin", ".", "鶯 " + "x" * 5_000)
    digest(process, "ada", *says, about="Vögel", firstName="Ada")
    [mail] = exim.wait_for_mails()
    assert mail.envelope_to == "ada@example.test"
    assert mail.text() == "".join(f"{one}\n" for one in says)
    assert mail.message["Subject"] == "3 times Vögel"
    job = wait_for_state(process, "ada", "completed")
    assert mail.value("Message-ID") == f"<{job['public_id']}@example.org>"
    for name in ("From", "To", "Date", "List-Id", "Auto-Submitted", "References"):
        mail.value(name)


@pytest.fixture
def script(tmp_path) -> Callable[[int], list[str]]:
    """A program in the place of sendmail, which keeps what it reads and ends with the code in the file `code`."""
    path = tmp_path / "sendmail"
    path.write_text(
        f"#!/bin/sh\ncat > {tmp_path}/mail.$$\necho 'a word of explanation' >&2\nexit $(cat {tmp_path}/code)\n"
    )
    path.chmod(0o755)

    def script(code: int) -> list[str]:
        (tmp_path / "code").write_text(str(code))
        return [str(path), "-t", "-i"]

    return script


@pytest.mark.parametrize("code", [65, 67])
def test_a_program_that_ends_with_a_final_code_is_not_run_again(daemon, script, tmp_path, code):
    process = daemon(by_program(script(code)))
    digest(process, "ada")
    job = wait_for_state(process, "ada", "failed")
    assert str(code) in job["reason"] and "a word of explanation" in job["reason"] and job["tries"] == 1
    assert len(list(tmp_path.glob("mail.*"))) == 1


@pytest.mark.parametrize("code", [69, 75])
def test_a_program_that_ends_with_another_code_is_run_again_with_the_same_mail(daemon, script, tmp_path, code):
    process = daemon(by_program(script(code)))
    digest(process, "ada")
    wait_for_state(process, "ada", "delayed")
    [(status, reason)] = process.query(RETRIED)
    assert status == code and "a word of explanation" in reason
    script(0)
    assert wait_for_state(process, "ada", "completed")["tries"] == 2
    first, second = (path.read_bytes() for path in tmp_path.glob("mail.*"))
    assert first == second and b"Message-ID: " in first


def test_a_program_that_is_not_there_is_told_and_waited_for(daemon, script, tmp_path):
    process = daemon(by_program([str(tmp_path / "missing"), "-t"]))
    digest(process, "ada")
    wait_for_state(process, "ada", "delayed")
    assert "missing" in process.query(RETRIED)[0][1]
    (tmp_path / "missing").symlink_to(script(0)[0])
    wait_for_state(process, "ada", "completed")
