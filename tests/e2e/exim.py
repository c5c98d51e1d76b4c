"""A real Exim in a folder of its own: takes mail for example.test on loopback, and puts it into one Maildir.

What it answers goes by the local part: `gone` is unknown (550); as long as `is_grey` is on, `grey` is deferred at RCPT
and `late` after the whole text (451). The login is digestd with the password s3cret, under TLS only. A mail has at most
200 KiB, a connection ten mails.
"""

from __future__ import annotations

import email.message
import email.policy
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from conftest import free_port, missing, program, wait_for
from peers import TLS

USER = "Debian-exim"  # who Exim becomes; the package makes it

CONFIG = """
primary_hostname = mx.example.test
spool_directory = {folder}/spool
log_file_path = {folder}/log/%slog
pid_file_path = {folder}/exim.pid
log_selector = +smtp_connection +smtp_incomplete_transaction +received_recipients
local_interfaces = 127.0.0.1
daemon_smtp_ports = {port} : {tls_port}
tls_on_connect_ports = {tls_port}
tls_certificate = {folder}/certificate.pem
tls_privatekey = {folder}/certificate.pem
tls_advertise_hosts = *
auth_advertise_hosts = ${{if eq{{$tls_in_cipher}}{{}}{{}}{{*}}}}
smtputf8_advertise_hosts = *
dsn_advertise_hosts = *
acl_smtp_rcpt = rcpt
acl_smtp_data = data
acl_not_smtp = accept
keep_environment =
message_size_limit = 200K
# what any server may do to a client that keeps its connection: 421 after ten mails, and after two idle seconds
smtp_accept_max_per_connection = 10
smtp_receive_timeout = 2s
# without look-ups of names, and without waiting for an ident of the client
host_lookup =
rfc1413_query_timeout = 0s

begin acl
rcpt:
  defer  local_parts = grey
         condition = ${{if exists{{{folder}/grey}}}}
         message = 451 4.7.1 greylisted, come again
  deny   local_parts = gone
         message = 550 5.1.1 no such user
  accept authenticated = *
         domains = example.test
  deny   condition = ${{if exists{{{folder}/login-needed}}}}
         message = 550 5.7.1 log in first
  accept domains = example.test
  deny   message = relay not permitted
data:
  warn   logwrite = :main: saw $h_message-id:
  defer  condition = ${{if match{{$recipients}}{{^late@}}}}
         condition = ${{if exists{{{folder}/grey}}}}
         message = 451 4.7.1 not now
  accept

begin routers
all:
  driver = accept
  domains = example.test
  transport = maildir

begin transports
maildir:
  driver = appendfile
  maildir_format
  directory = {folder}/mail
  create_directory
  envelope_to_add
  user = {user}

begin authenticators
plain:
  driver = plaintext
  public_name = PLAIN
  server_prompts = :
  server_condition = ${{if and{{{{eq{{$auth2}}{{digestd}}}}{{eq{{$auth3}}{{s3cret}}}}}}}}
  server_set_id = $auth2
"""


class Delivered:
    """A mail out of the Maildir: its bytes as they arrived, behind what Exim put in front (Received and Envelope-to)."""

    def __init__(self, data: bytes) -> None:
        own = re.match(rb"(?:(?:Received|Envelope-to): .*\n(?:[ \t].*\n)*)*", data)
        assert own
        self.data = data[own.end() :]
        self.envelope_to = re.findall("(?m)^Envelope-to: (.*)", own[0].decode())[0]

    @property
    def head(self) -> bytes:
        return self.data.partition(b"\n\n")[0]

    @property
    def message(self) -> email.message.EmailMessage:
        return email.message_from_bytes(self.data, policy=email.policy.default)  # type: ignore[return-value]

    def values(self, name: str) -> list[str]:
        """The values of a header, unfolded but not decoded."""
        found = re.findall(rf"(?im)^{re.escape(name)}:[ \t]*(.*(?:\n[ \t].*)*)", self.head.decode("utf-8"))
        return [re.sub(r"\n[ \t]+", " ", value).strip() for value in found]

    def value(self, name: str) -> str:
        """The value of a header that is there exactly once."""
        [value] = self.values(name)
        return value

    def text(self, kind: str = "plain") -> str:
        part = next(part for part in self.message.walk() if part.get_content_type() == f"text/{kind}")
        return part.get_payload(decode=True).decode("utf-8").replace("\r\n", "\n")  # type: ignore[union-attr]


class Exim:
    """The server's process, its mails and its log."""

    def __init__(self) -> None:
        self.program = program("exim4")
        if os.geteuid() != 0:
            missing("root, as whom Exim starts,")
        # not in pytest's folder: that one is root's alone, and Exim gives root's rights up
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="digestd-exim-"))
        self.port, self.tls_port = free_port(), free_port()
        self.config = self.folder / "exim.conf"
        self._fill_folder()
        self.process = subprocess.Popen(
            [self.program, "-bdf", "-q1m", "-C", str(self.config)], stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            stdout=(self.folder / "console").open("wb"),
        )  # fmt: skip
        try:
            wait_for(self._listens, what="Exim")
        except BaseException:
            self.stop()
            raise

    def _fill_folder(self) -> None:
        shutil.copy(TLS / "localhost.pem", self.folder / "certificate.pem")
        for name in ("spool", "log"):
            (self.folder / name).mkdir()
        for path in (self.folder, *self.folder.iterdir()):
            shutil.chown(path, USER, USER)
        # the config is root's: Exim trusts no other
        self.config.write_text(CONFIG.format(folder=self.folder, port=self.port, tls_port=self.tls_port, user=USER))

    def _listens(self) -> bool:
        said = (self.folder / "console").read_text()
        assert self.process.poll() is None, f"Exim ended: {said} {self.log()}"
        return "listening for SMTP" in self.log()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        shutil.rmtree(self.folder)

    def empty(self) -> None:
        """As at its start: no mails, no lines in the log, nobody greylisted."""
        shutil.rmtree(self.folder / "mail", ignore_errors=True)
        with (self.folder / "log" / "mainlog").open("a") as file:
            file.truncate(0)
        self.is_grey = self.needs_login = False

    @property
    def is_grey(self) -> bool:
        return (self.folder / "grey").exists()

    @is_grey.setter
    def is_grey(self, wanted: bool) -> None:
        self._switch("grey", wanted)

    @property
    def needs_login(self) -> bool:
        return (self.folder / "login-needed").exists()

    @needs_login.setter
    def needs_login(self, wanted: bool) -> None:
        self._switch("login-needed", wanted)

    def _switch(self, name: str, wanted: bool) -> None:
        if wanted:
            (self.folder / name).touch()
        else:
            (self.folder / name).unlink(missing_ok=True)

    def log(self) -> str:
        path = self.folder / "log" / "mainlog"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def mails(self) -> list[Delivered]:
        """What lies in the Maildir, in the order of arrival."""
        paths = sorted((self.folder / "mail" / "new").glob("*"), key=lambda path: path.stat().st_mtime_ns)
        return [Delivered(path.read_bytes()) for path in paths]

    def wait_for_mails(self, count: int = 1) -> list[Delivered]:
        found = wait_for(lambda: len(self.mails()) >= count and self.mails(), what=f"mail number {count}\n{self.log()}")
        assert len(found) == count, self.log()
        return found

    def connections(self) -> int:
        """How many times somebody connected."""
        return len(re.findall(r"SMTP connection from .*\(TCP/IP connection count", self.log()))
