"""The recorded names of objects, and their names on the cluster of a test."""

from __future__ import annotations

import datetime
import re
from typing import Any

KINDS = "PyTorchJob|MPIJob|TrainJob"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Names:
    """Translates recorded objects: namespace, names of jobs and Workloads, uids and times.

    The first translation of a recorded time returns the current time. Later translations return the same value.

    :param namespace: as recorded, and the test's.
    """

    def __init__(self, namespace: tuple[str, str]) -> None:
        self._recorded_namespace, self.namespace = namespace
        self._jobs: dict[str, str] = {}
        self._workloads: dict[str, str] = {}
        self._uids: dict[str, str] = {}
        self._times: dict[str, str] = {}

    def add_job(self, recorded: str, name: str) -> None:
        self._jobs[recorded] = name

    def add_uid(self, recorded: str, uid: str) -> None:
        self._uids[recorded] = uid

    def job(self, recorded: str) -> str:
        return self._jobs.get(recorded, recorded)

    def workload(self, recorded: str) -> str:
        """The Workload's name: the recorded hash, and the name of the job on the test's cluster."""
        kind, _, rest = recorded.partition("-")
        job, _, suffix = rest.rpartition("-")
        return f"{kind}-{self.job(job)}-{suffix}"

    def pod(self, recorded: str) -> str:
        """The pod's name: that of its job on the test's cluster, and the recorded rest."""
        owner = max((job for job in self._jobs if recorded.startswith(f"{job}-")), key=len, default="")
        return self.job(owner) + recorded.removeprefix(owner)

    def name(self, plural: str, recorded: str) -> str:
        if plural == "workloads":
            self._workloads[recorded] = self.workload(recorded)
            return self._workloads[recorded]
        return self.job(recorded) if plural.endswith("jobs") else recorded

    def translate(self, value: Any) -> Any:
        """A recorded value with the names, uids and times of the test's cluster."""
        if isinstance(value, dict):
            return {key: self.translate(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.translate(item) for item in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        if TIME.fullmatch(text):
            return self._times.setdefault(text, _now(micro="." in text))
        text = UID.sub(lambda found: self._uids.get(found[0], found[0]), text)
        for recorded, name in self._workloads.items():
            text = text.replace(recorded, name)
        for recorded, name in self._jobs.items():
            places = rf"({KINDS}) (?:{re.escape(self._recorded_namespace)}/)?|{re.escape(self._recorded_namespace)}/"
            text = re.sub(rf"(?P<place>{places}){re.escape(recorded)}(?![\w-])", rf"\g<place>{name}", text)
        return text.replace(self._recorded_namespace, self.namespace)


def _now(*, micro: bool) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
