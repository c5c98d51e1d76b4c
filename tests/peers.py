"""Small real servers on loopback for the tests: one that takes webhooks, one that takes mail, both by a script.

They live on a loop in a thread of their own. `tests/data/tls` holds certificates of 2020 to 2120, each with its key:
localhost.pem and elsewhere.pem (another host's) by the authority in ca.pem, expired.pem (by the same authority), and
selfsigned.pem. They guard nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import email.message
import email.policy
import functools
import pathlib
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from aiosmtpd.smtp import SMTP, AuthResult

TLS = pathlib.Path(__file__).resolve().parent / "data" / "tls"
CA = TLS / "ca.pem"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="peers", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Do something on the servers' loop and wait for what it gives."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(20)


def tls_context(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{certificate}.pem")
    return context


# -- webhooks ----------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What arrived: names of headers in small letters."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """A proper answer; the length is added."""

    status: int = 200
    headers: dict[str, str] = {}
    body: bytes = b""


class Raw(NamedTuple):
    """Bytes as they are, and then: close the connection, hang, or drip one byte after the other."""

    data: bytes = b""
    then: str = "close"


SILENCE = Raw(b"", "hang")
HANG_UP = Raw(b"", "close")
DRIP = Raw(b"HTTP/1.1 200 OK\r\nX-Drip: ", "drip")


class Receiver:
    """Takes requests and answers each with the next of `answers`, and with 200 when there is none left.

    An answer is a status, an Answer, a Raw, or a function from the request to one of these.
    """

    def __init__(self, *answers: Any, host: str = "127.0.0.1", port: int = 0, certificate: str | None = None) -> None:
        self.answers = collections.deque(answers)
        self.requests: list[Request] = []
        self.accepted = 0
        self.connections: set[asyncio.StreamWriter] = set()
        self.scheme = "https" if certificate else "http"
        self.host = host
        context = tls_context(certificate) if certificate else None
        self.server = _run(asyncio.start_server(self._serve, host, port, ssl=context))
        self.port: int = self.server.sockets[0].getsockname()[1]

    def url(self, path: str = "/hook", scheme: str | None = None, user: str = "") -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme or self.scheme}://{user}{host}:{self.port}{path}"

    def stop(self) -> None:
        _run(self._stop())

    async def _stop(self) -> None:
        self.server.close()
        for writer in list(self.connections):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        self.accepted += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ssl.SSLError):
            while await self._exchange(reader, writer):
                pass
        self.connections.discard(writer)
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection lives on."""
        first = await reader.readexactly(1)
        if not first.isalpha():  # no HTTP at all, such as the start of a TLS handshake
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return False
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        request = Request(method, target, headers, await reader.readexactly(int(headers.get("content-length", 0))))
        self.requests.append(request)
        answer = self.answers.popleft() if self.answers else 200
        answer = answer(request) if callable(answer) else answer
        return await self._answer(writer, Answer(answer) if isinstance(answer, int) else answer)

    async def _answer(self, writer: asyncio.StreamWriter, answer: Answer | Raw) -> bool:
        if isinstance(answer, Answer):
            lines = [f"HTTP/1.1 {answer.status} Scripted", f"Content-Length: {len(answer.body)}"]
            lines += [f"{name}: {value}" for name, value in answer.headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body)
            await writer.drain()
            return True
        writer.write(answer.data)
        await writer.drain()
        if answer.then == "hang":
            await asyncio.Event().wait()
        for _ in range(3000 if answer.then == "drip" else 0):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
        return False


# -- mail --------------------------------------------------------------------------------------------------------------

DROP = "drop"  # the connection is cut instead of a reply
HANG = "hang"  # no reply ever comes


class Mail(NamedTuple):
    """A mail as it arrived: envelope, options of MAIL, and the bytes without the dots of the transport."""

    sender: str
    to: list[str]
    options: list[str]
    data: bytes

    @property
    def message(self) -> email.message.EmailMessage:
        return email.message_from_bytes(self.data, policy=email.policy.default)  # type: ignore[return-value]

    @property
    def head(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[0]

    def text(self, kind: str = "plain") -> str:
        """The decoded text of the first part of a kind, with the line ends of Unix."""
        part = next(part for part in self.message.walk() if part.get_content_type() == f"text/{kind}")
        return part.get_payload(decode=True).decode("utf-8").replace("\r\n", "\n")  # type: ignore[union-attr]


class _Session(SMTP):
    """aiosmtpd's session, with a script for the two places that have no hook: the greeting and the DATA command."""

    async def _handle_client(self) -> None:
        reply = await self.event_handler.play("CONNECT", self)
        if reply is not None:
            await self.push(reply)
            self.transport.close()
            return
        await super()._handle_client()

    async def smtp_DATA(self, arg: str) -> None:
        reply = await self.event_handler.play("DATA", self)
        if reply is not None:
            await self.push(reply)
            return
        await super().smtp_DATA(arg)


class MailServer:
    """Takes mail. `replies` holds for a stage what the next times are answered: a line, DROP, HANG, a function that
    gives one of these, or None to go on as usual.

    The stages: CONNECT, EHLO, AUTH, MAIL, RCPT, DATA (the command), DOT (after the text), QUIT. `tls` is none,
    starttls (offered) or implicit; `login` is the right name and password.
    """

    def __init__(
        self, *, tls: str = "none", certificate: str = "localhost", login: tuple[str, str] | None = None,
        utf8: bool = False, eight_bit: bool = True, keep_at_dot: bool = False, **replies: Any,
    ) -> None:  # fmt: skip
        self.replies = {
            stage: collections.deque(found if isinstance(found, list) else [found]) for stage, found in replies.items()
        }
        self.mails: list[Mail] = []
        self.hold_at_dot: threading.Event | None = None  # the reply to the dot waits for it
        self.stages: list[str] = []  # every stage that was reached, in order
        self.logins: list[tuple[str, str]] = []
        self.hello: list[str] = []
        self.login, self.eight_bit, self.keep_at_dot = login, eight_bit, keep_at_dot
        self.sessions: set[_Session] = set()
        context = None if tls == "none" else tls_context(certificate)

        def session() -> _Session:
            made = _Session(
                self, hostname="mx.example.test", enable_SMTPUTF8=utf8, loop=_loop(),
                tls_context=context if tls == "starttls" else None, auth_require_tls=tls == "starttls",
                authenticator=self._check_login,
            )  # fmt: skip
            self.sessions.add(made)
            return made

        implicit = context if tls == "implicit" else None
        self.server = _run(_listen(session, implicit))
        self.port: int = self.server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        _run(self._stop())

    async def _stop(self) -> None:
        self.server.close()
        for session in self.sessions:
            if session.transport is not None:
                session.transport.abort()

    async def play(self, stage: str, session: Any) -> str | None:
        """Note the stage, and do what the script says for it."""
        self.stages.append(stage)
        left = self.replies.get(stage)
        reply = left.popleft() if left else None
        reply = reply() if callable(reply) else reply
        if reply == DROP:
            session.transport.abort()
        if reply in (DROP, HANG):
            await asyncio.Event().wait()  # ends with the connection
        return reply

    def _check_login(self, server: Any, session: Any, envelope: Any, mechanism: str, given: Any) -> AuthResult:
        pair = (given.login.decode(), given.password.decode())
        self.logins.append(pair)
        if pair == self.login:
            return AuthResult(success=True)
        return AuthResult(success=False, handled=False, message="535 5.7.8 wrong name or password")

    async def handle_EHLO(self, server: Any, session: Any, envelope: Any, hostname: str, lines: list[str]) -> list[str]:
        session.host_name = hostname
        self.hello.append(hostname)
        reply = await self.play("EHLO", server)
        if reply is not None:
            return [reply]
        hidden = ([] if self.eight_bit else ["8BITMIME"]) + ([] if self.login else ["AUTH"])
        return [line for line in lines if not any(word in line for word in hidden)]

    async def handle_AUTH(self, server: Any, session: Any, envelope: Any, words: list[str]) -> Any:
        from aiosmtpd.smtp import MISSING

        reply = await self.play("AUTH", server)
        return MISSING if reply is None else reply

    async def handle_MAIL(self, server: Any, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        reply = await self.play("MAIL", server)
        if reply is None:
            envelope.mail_from, envelope.mail_options = address, options
        return reply or "250 2.1.0 sender ok"

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        reply = await self.play("RCPT", server)
        if reply is None:
            envelope.rcpt_tos.append(address)
        return reply or "250 2.1.5 recipient ok"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        mail = Mail(envelope.mail_from, list(envelope.rcpt_tos), list(envelope.mail_options), envelope.content)
        if self.keep_at_dot:  # the mail is taken, whatever happens to the reply
            self.mails.append(mail)
        reply = await self.play("DOT", server)
        if self.hold_at_dot is not None:
            await asyncio.to_thread(self.hold_at_dot.wait, 20)
        if reply is None and not self.keep_at_dot:
            self.mails.append(mail)
        return reply or "250 2.0.0 taken as 4711"

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:
        return await self.play("QUIT", server) or "221 2.0.0 bye"


async def _listen(session: Callable[[], _Session], context: ssl.SSLContext | None) -> asyncio.Server:
    return await _loop().create_server(session, "127.0.0.1", 0, ssl=context)
