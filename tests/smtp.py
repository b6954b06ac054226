"""A mail server on loopback for tests: it keeps what it receives."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import socketserver
import threading
from collections.abc import Iterator
from email.message import EmailMessage


class Mailbox(socketserver.ThreadingTCPServer):
    """The messages that were received, in `messages`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.messages: list[EmailMessage] = []

    @property
    def connection(self) -> str:
        """The value of the environment variable that makes this server one of Airflow's connections."""
        host, port = self.server_address[:2]
        extra = {"disable_ssl": True, "disable_tls": True}
        return json.dumps({"conn_type": "smtp", "host": host, "port": port, "extra": extra})

    def subjects(self, about: str) -> list[str]:
        """The subjects of the messages whose subject begins with a text, without this text."""
        found = (str(message["Subject"]) for message in list(self.messages))
        return [subject.removeprefix(about) for subject in found if subject.startswith(about)]


class _Session(socketserver.StreamRequestHandler):
    server: Mailbox

    def handle(self) -> None:
        self._answer("220 ready")
        while line := self.rfile.readline():
            command = line.split()[0].upper()
            if command == b"QUIT":
                self._answer("221 bye")
                return
            if command == b"DATA":
                self._answer("354 go on")
                self._receive()
            self._answer("250 ok")

    def _receive(self) -> None:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b"."))
        message = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
        assert isinstance(message, EmailMessage)
        self.server.messages.append(message)

    def _answer(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextlib.contextmanager
def mailbox() -> Iterator[Mailbox]:
    """A context manager: a mail server."""
    with Mailbox() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
