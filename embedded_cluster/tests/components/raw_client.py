"""A small raw client for tests of the embedded cluster: requests as they were recorded, answers as they come."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ktrain_embedded.cluster import EmbeddedCluster

Json = Any


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    data: bytes

    @property
    def json(self) -> Json:
        return json.loads(self.data)

    @property
    def body(self) -> Json:
        """JSON parsed, else text."""
        try:
            return self.json
        except ValueError:
            return self.data.decode()

    def header(self, name: str) -> str:
        return next((v for k, v in self.headers if k.lower() == name.lower()), "")


class Client:
    """Raw requests with one bearer token ("" for none)."""

    def __init__(self, cluster: EmbeddedCluster, token: str | None = None) -> None:
        self._address = urlsplit(cluster.url).netloc
        self._tls = ssl.create_default_context(cafile=str(cluster.ca_file))
        self._token = cluster.token if token is None else token

    @contextmanager
    def open(
        self, method: str, path: str, body: Json = None, headers: dict[str, str] | None = None, timeout: float = 240
    ) -> Iterator[http.client.HTTPResponse]:
        """The response, unread. A body that is text or bytes is sent as it is."""
        connection = http.client.HTTPSConnection(self._address, context=self._tls, timeout=timeout)
        sent = dict(headers or {})
        if self._token:
            sent.setdefault("Authorization", f"Bearer {self._token}")
        data = body if isinstance(body, str | bytes | None) else json.dumps(body)
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, data.encode() if isinstance(data, str) else data, sent)
            yield connection.getresponse()
        finally:
            connection.close()

    def __call__(self, method: str, path: str, body: Json = None, headers: dict[str, str] | None = None) -> Answer:
        with self.open(method, path, body, headers) as response:
            return Answer(response.status, response.getheaders(), response.read())

    def lines(self, path: str, headers: dict[str, str] | None = None) -> Iterator[Json]:
        """Lines of a stream of JSON as they come, to its end."""
        with self.open("GET", path, None, headers) as response:
            for line in response:
                yield json.loads(line)


def eventually(check: Callable[..., Any], timeout: float = 240) -> Any:
    """What `check` returns as soon as that is true; its last failure where it never is."""
    until = time.monotonic() + timeout
    while True:
        try:
            found = check()
            if found:
                return found
            failure: AssertionError | None = None
        except AssertionError as e:
            failure = e
        if time.monotonic() > until:
            raise failure or AssertionError(f"{check} never came true")
        time.sleep(0.05)
