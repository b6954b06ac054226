"""Clusters of tests that say the same on a scripted API server, in virtual time, and on a cluster: `cluster`, `task`.

A module takes both fixtures, and its tests have the mark `scripted`: `make test` runs them on the scripted server
alone, `make test-all` on a cluster, too.
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import KINDS, TRAINJOB
from airflow_provider_ktrain.core.manifest.code import ARCHIVE, config_map_name
from airflow_provider_ktrain.core.state.status import phase_of
from tests import clusters
from tests.apiserver import NAMESPACE, ApiServer, Object, Refused, Request, served
from tests.clusters import TestCluster
from tests.engine.staged import Staged
from tests.engine.tasks import Task, api_of
from tests.virtual import VirtualLoop

START_SECONDS = 0.2  #: Time from the creation of a job until its pods run.
METHODS = {"create": "POST", "delete": "DELETE", "list": "GET", "watch": "GET", "get": "GET", "patch": "PATCH"}
BY_PLURAL = {kind.plural: kind for kind in KINDS.values()}


@dataclass
class ScriptedCluster:
    """A scripted API server whose jobs run. Of their programs, `echo` and `exit` are carried out; `sleep` never ends.

    :ivar jobs: the jobs that were created, by uid.
    """

    url: str = ""
    namespace: str = NAMESPACE
    jobs: dict[str, Staged] = field(default_factory=dict)
    embedded = None

    def __post_init__(self) -> None:
        self.api = ApiServer(self._written, self._admit)

    def _written(self, method: str, resource: str, obj: Object) -> None:
        if method == "POST" and resource in BY_PLURAL:
            job = Staged(self.api, BY_PLURAL[resource], job_of=obj)
            self.jobs[job.ref.uid] = job
            job.after(START_SECONDS, self._run, job)

    def _admit(self, request: Request, obj: Object | None) -> None:
        if obj is None and "backofLimit" in str(request.body):
            raise Refused(400, 'strict decoding error: unknown field "spec.runPolicy.backofLimit"')
        for job in self.jobs.values():
            if obj is not None and obj["metadata"]["uid"] == job.ref.uid and request.method == "PATCH":
                job.after(START_SECONDS, self._run, job)  # if it is resumed
            job.admit(request, obj)

    def _run(self, job: Staged) -> None:
        """Create the pods of a job that isn't suspended, and run its program."""
        if not job.exists or "deletionTimestamp" in job.job["metadata"] or phase_of(job.job).ended:
            return
        spec = job.job["spec"]
        if spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"):
            job.condition("Suspended")
            return
        if job.holding:
            return
        program, grace = self._program(job)
        if program is None:  # its volume with the code can't be mounted yet
            job.after(START_SECONDS, self._run, job)
            return
        job.attempt += 1
        for role in job.roles:
            for index in range(job.kind.count(job.job, role)):
                job.pod(index, role=role, grace=grace, since=0.0)
        job.running()
        for text in re.findall(r"echo ([^;&>]*)", program):
            job.line(text.strip().strip("'\""))
        if "sleep" not in program:
            code = re.search(r"exit (\d+)", program)
            job.end(int(code[1]) if code else 0, grace=grace)

    def _program(self, job: Staged) -> tuple[str | None, int]:
        """The program of a job, and the grace period of its pods. It may be a file of the job's code."""
        if job.kind is TRAINJOB:
            runtime = self.api.objects["trainingruntimes"][job.job["spec"]["runtimeRef"]["name"]]
            (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
            pod, program = node["template"]["spec"]["template"]["spec"], job.job["spec"]["trainer"]["command"]
        else:
            pod = job.kind.replicas(job.job)[job.role]["template"]["spec"]
            program = pod["containers"][0]["command"]
        grace, name = pod.get("terminationGracePeriodSeconds", 0), config_map_name(job.name, job.submission)
        if not program[-1].endswith(".sh"):
            return program[-1], grace
        if name not in self.api.objects["configmaps"]:
            return None, grace
        packed = base64.b64decode(self.api.objects["configmaps"][name]["binaryData"][ARCHIVE])
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            file = files.extractfile(program[-1])
            assert file is not None
            return file.read().decode().replace("$0", program[-1]), grace

    def admin(self, fault: str, *, verb: str = "", path: str = "", status: int = 503, **how: Any) -> None:
        """Set the faults of the embedded cluster that have one here."""
        if fault == "clear":
            self.api.clear_failures()
            return
        assert fault == "status", fault
        methods = "|".join(METHODS[one] for one in verb.split(",")) if verb else ".*"
        message = 'x is forbidden: User "u" cannot create resource "x" in API group ""' if status == 403 else ""
        self.api.fail(methods, path, status, how.get("count", float("inf")), message=message)
        if "seconds" in how:
            asyncio.get_running_loop().call_later(how["seconds"], self.api.clear_failures)


@pytest.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[ScriptedCluster | TestCluster]:
    """A scripted one in virtual time, and else the one of all tests."""
    if not isinstance(asyncio.get_running_loop(), VirtualLoop):
        yield request.getfixturevalue("cluster")
        return
    scripted = ScriptedCluster()
    async with served(scripted.api) as scripted.url:
        yield scripted


@pytest.fixture
async def task(cluster: ScriptedCluster | TestCluster, request: pytest.FixtureRequest) -> AsyncIterator[Task]:
    """A task with a unique job name. `of_each_kind`, or `TASK` in the test's module, sets its class."""
    of_module = getattr(request.module, "TASK", Task)
    async with api_of(cluster) as api:
        task = getattr(request, "param", of_module)(api, cluster.namespace)
        if isinstance(cluster, TestCluster):
            clusters.require(cluster, task.kind, task.version)
        try:
            yield task
        finally:
            await task.delete()
