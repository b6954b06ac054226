"""A small client of the Kubernetes API for the drivers: requests by path, and a watch of jobs."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from kubernetes import client, config
from urllib3.exceptions import HTTPError

from .recording import RESOURCES, Obj

WATCH_SECONDS = 5  # timeout of one request of the watch
MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"


class Refused(Exception):
    """The API server rejected a request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """:param kubeconfig: of an administrator."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self._client = client.ApiClient(configuration)

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """The JSON of the response. Raises Refused if the status is 400 or more."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        data = None if body is None else json.dumps(body)
        url = self._client.configuration.host + path
        answer = self._client.rest_client.pool_manager.request(method, url, body=data, headers=headers, timeout=30)
        if answer.status >= 400:
            raise Refused(answer.status, answer.data.decode()[:500])
        return json.loads(answer.data)

    def find(self, path: str) -> Obj | None:
        """The object at a path, or None if it doesn't exist."""
        try:
            found: Obj = self.request("GET", path)
        except Refused as error:
            if error.status == 404:
                return None
            raise
        return found

    def stream(self, path: str) -> Any:
        """The response of a watch, to be read line by line."""
        headers = {"Accept": "application/json"}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        url = self._client.configuration.host + path
        return self._client.rest_client.pool_manager.request("GET", url, headers=headers, preload_content=False)


def path_of(plural: str, namespace: str, name: str = "") -> str:
    base, namespaced = RESOURCES[plural]
    place = f"{base}/namespaces/{namespace}/{plural}" if namespaced else f"{base}/{plural}"
    return f"{place}/{name}" if name else place


class JobHistory:
    """The marks that jobs of a namespace have shown since the watch began, in order: `Running True`, `ready`, ..."""

    def __init__(self, api: Api, plural: str, namespace: str) -> None:
        self._marks: dict[str, list[str]] = {}
        self._known: dict[str, set[str]] = {}
        self._taken: dict[str, int] = {}
        self.uids: dict[str, str] = {}
        self._api, self._path = api, path_of(plural, namespace)
        self._version: str = api.request("GET", self._path)["metadata"]["resourceVersion"]
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def take(self, name: str, mark: str) -> bool:
        """Whether the job shows the mark now, or has shown it since the previously taken mark."""
        marks = self._marks.get(name, [])
        for index in range(self._taken.get(name, 0), len(marks)):
            if marks[index] == mark:
                self._taken[name] = index + 1
                return True
        return mark in self._known.get(name, set())

    def has_ended(self, name: str) -> bool:
        """Whether the job has succeeded or failed."""
        return bool({"Complete True", "Succeeded True", "Failed True"} & self._known.get(name, set()))

    def close(self) -> None:
        """End the watch when the current request has ended."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            query = f"watch=1&timeoutSeconds={WATCH_SECONDS}&resourceVersion={self._version}"
            with contextlib.suppress(HTTPError, OSError):
                rest = b""
                for chunk in self._api.stream(f"{self._path}?{query}").stream(65536):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in filter(None, lines):
                        self._see(json.loads(line))

    def _see(self, change: Obj) -> None:
        obj = change["object"]
        self._version = obj["metadata"]["resourceVersion"]
        if change["type"] not in ("ADDED", "MODIFIED"):
            return
        name, status = obj["metadata"]["name"], obj.get("status") or {}
        self.uids[name] = obj["metadata"]["uid"]
        now = {f"{c['type']} {c['status']}" for c in status.get("conditions") or ()}
        now |= {"ready" for of in status.get("jobsStatus") or () if of["ready"]}
        self._marks.setdefault(name, []).extend(sorted(now - self._known.get(name, set())))
        self._known[name] = now
