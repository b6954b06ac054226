"""Training operators and kubelets in virtual time: they act on the store of the scripted API server.

As the recordings show them, as far as a task can see: pods of each kind, containers that run programs and are
restarted, conditions, suspension, and pods that end within their grace period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.kinds import KINDS, MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.state.queue.kueue_status import QUEUE_LABEL
from tests.apiserver import ApiServer, Object, stamp
from tests.apiserver.messages import Request, Response, failure
from tests.apiserver.resources import Resource
from tests.apiserver.store import copied
from tests.operators.programs import Exited, Program

SCHEDULED, STARTED, NOTICED = 0.05, 0.15, 0.05  #: Seconds until a pod is scheduled, runs, and until its end is noticed.
GPUS = 64  #: GPUs of the node.
JOBS = {kind.plural: kind for kind in KINDS.values()}
RUNTIME = {
    "metadata": {"name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"}},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{
            "name": "node", "groupName": "default", "replicas": 1,
            "template": {
                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                "spec": {"template": {"spec": {"containers": [{"name": "node", "image": "runtime"}]}}},
            },
        }]}},
    },
}  # fmt: skip


class Container:
    """The only container of a pod, which runs its program."""

    def __init__(self, cluster: Operators, pod: Object) -> None:
        self._cluster, self._name, self._uid = cluster, pod["metadata"]["name"], pod["metadata"]["uid"]
        (spec,) = pod["spec"]["containers"]
        self._words = [*(spec.get("command") or ["true"]), *(spec.get("args") or ())]
        self._environment = {one["name"]: str(one.get("value", "")) for one in spec.get("env") or ()}
        self._container, self._policy = spec["name"], pod["spec"].get("restartPolicy", "Never")
        self._restarts, self._last = 0, {}
        self._terminating = False
        self.start()

    _last: Object

    def start(self) -> None:
        """Run the program, for the first time or again."""
        if self._terminating or self._pod is None:
            return
        self._program = Program(self._words, self._environment)
        self._started = stamp(-self._cluster.node_ahead)
        self._cluster.event(self._name, self._container, "Started")
        self._show({"running": {"startedAt": self._started}}, "Running")
        self._go_on(self._program.steps())

    def terminate(self) -> None:
        """SIGTERM, for the deletion of the pod."""
        if not self._terminating and self._pod is not None:
            self._terminating = True
            self._cluster.event(self._name, self._container, "Killing")
            self._go_on(self._program.terminated())

    @property
    def _pod(self) -> Object | None:
        pod = self._cluster.pods.get(self._name)
        return pod if pod is not None and pod["metadata"]["uid"] == self._uid else None

    def _go_on(self, steps: Iterator[float | str]) -> None:
        """Execute steps until time must pass."""
        self._steps = steps
        try:
            for step in steps:
                if isinstance(step, float):
                    self._cluster.after(step, lambda: self._go_on(steps) if steps is self._steps else None)
                    return
                if self._pod is not None:
                    self._cluster.log(self._name).line(step, -self._cluster.node_ahead)
        except Exited as exited:
            self.ended(exited.code)

    def ended(self, code: int, reason: str = "") -> None:
        """The program has ended: restart it, or end the pod."""
        self._steps = iter(())
        if self._pod is None:
            return
        reason = reason or ("Completed" if code == 0 else "Error")
        ended = {"exitCode": code, "reason": reason, "startedAt": self._started}
        ended["finishedAt"] = stamp(-self._cluster.node_ahead)
        again = self._policy == "Always" or (self._policy == "OnFailure" and code != 0)
        if self._terminating or not again:
            self._show({"terminated": ended}, "Failed" if code else "Succeeded")
            if self._terminating:
                self._cluster.after(NOTICED, self._cluster.remove_pod, self._name, self._uid)
            return
        self._last = {"terminated": ended}
        wait = 0.0 if self._restarts == 0 else min(300.0, 10.0 * 2 ** (self._restarts - 1))
        if wait:
            self._show({"waiting": {"reason": "CrashLoopBackOff"}}, "Running")
        self._restarts += 1
        self._cluster.after(wait, self.start)

    def _show(self, state: Object, phase: str) -> None:
        status = {
            "name": self._container, "restartCount": self._restarts, "state": state, "lastState": self._last,
            "ready": "running" in state,
        }  # fmt: skip
        self._cluster.show(self._name, phase, status)


class Operators(ApiServer):
    """The API server with a training operator for each kind, a scheduler and a kubelet.

    :param after: calls a function after some seconds.
    :ivar created: number of jobs that were created.
    :ivar deleted_alive: number of jobs that were deleted before they had ended.
    :ivar mpi_version: the only version of MPIJobs that is served. None: all.
    :cvar container_class: of all containers.
    :ivar node_ahead: seconds by which the node's clock is ahead.
    """

    container_class = Container
    node_ahead = 0.0

    def __init__(self, after: Callable[..., None], namespace: str = "default") -> None:
        super().__init__(self._count, namespace=namespace)
        self.after = after
        self.created = self.deleted_alive = 0
        self.mpi_version: str | None = None
        self.trainer = ""  # the field of an older Trainer in place of runtimePatches, if there is one
        self.serves_schemas = True
        self._containers: dict[str, Container] = {}  # by the pod's uid
        self._completed: dict[tuple[str, str], Object] = {}  # pods that are gone, by replica and the uid of the job
        self._failed_pods: dict[str, int] = {}  # of a TrainJob, by its uid
        self.put("clustertrainingruntimes", copied(RUNTIME))
        self.put("nodes", {"metadata": {"name": "node-1"}, "status": {"allocatable": {"nvidia.com/gpu": str(GPUS)}}})
        self.put("namespaces", {"metadata": {"name": "kube-system"}})

    def _count(self, method: str, resource: str, obj: Object) -> None:
        if resource in JOBS:
            self.created += method == "POST"
            self.deleted_alive += method == "DELETE" and not has_ended(obj)

    @property
    def served(self) -> list[Resource]:
        """What discovery shows."""
        served = super().served
        if self.mpi_version is None:
            return served
        versions = (self.mpi_version,)
        return [replace(one, versions=versions) if one.plural == MPIJOB.plural else one for one in served]

    def _document(self, path: str) -> Object | None:
        """Also a schema of TrainJobs."""
        if path != f"/openapi/v3/apis/{TRAINJOB.group}/v1alpha1" or not self.serves_schemas:
            return super()._document(path)
        ours = (self.trainer,) if self.trainer else ("runtimePatches", "activeDeadlineSeconds")
        fields: Object = {name: {} for name in (*ours, "trainer", "runtimeRef", "suspend")}
        job = {
            "type": "object", "properties": {"spec": {"type": "object", "properties": fields}},
            "x-kubernetes-group-version-kind": [
                {"group": TRAINJOB.group, "version": "v1alpha1", "kind": TRAINJOB.name},
            ],
        }  # fmt: skip
        return {"openapi": "3.0.0", "components": {"schemas": {"TrainJob": job}}}

    def _create(self, request: Request, resource: Resource) -> Response:
        """Kueue suspends jobs that name a queue, where there is one; none is ever admitted."""
        body = request.body
        if (
            resource.plural in JOBS
            and self.objects["localqueues"]
            and QUEUE_LABEL in (body["metadata"].get("labels") or {})
        ):
            place = body["spec"] if resource.plural == TRAINJOB.plural else body["spec"].setdefault("runPolicy", {})
            place["suspend"] = True
        return super()._create(request, resource)

    def fail_verbs(self, verb: str | None, path: str, status: int, count: float) -> None:
        """Answer requests with an error status, chosen by verb: get, list, watch, delete, ... Default: all."""

        def answer(request: Request, _: Any) -> Any:
            return failure(status) if verb is None or request.verb == verb else None

        self.replace("", path, answer, count, processed=False)

    # the store tells the operators of each write

    def put(self, resource: str, obj: Object) -> Object:
        put = super().put(resource, obj)
        if resource in JOBS:
            self.after(0.0, self._reconcile, resource, put["metadata"]["name"])
        elif resource == "pods":
            container = self._containers.get(put["metadata"]["uid"])
            if container is not None and "deletionTimestamp" in put["metadata"]:
                self.after(0.0, container.terminate)
            elif "deletionTimestamp" in put["metadata"]:  # it has not started, and never will
                self.after(NOTICED, self.remove_pod, put["metadata"]["name"], put["metadata"]["uid"])
            self._notice(put)
        return put

    def remove(self, resource: str, name: str) -> Object:
        removed = super().remove(resource, name)
        if resource == "pods":
            if has_phase(removed, "Succeeded") and not self._is_suspended(removed):
                self._completed[removed["metadata"]["labels"]["test/replica"], _owner(removed)] = removed
            self._notice(removed)
        return removed

    def _is_suspended(self, pod: Object) -> bool:
        """Whether the job of a pod is suspended: a later resumption creates all its pods again."""
        (owner,) = pod["metadata"]["ownerReferences"]
        kind = KINDS[owner["kind"]]
        job = self.objects[kind.plural].get(owner["name"])
        return job is not None and is_suspended(kind, job)

    def _notice(self, pod: Object) -> None:
        """Let the operator of a pod's job look at its pods."""
        for owner in pod["metadata"].get("ownerReferences") or ():
            self.after(NOTICED, self._reconcile, KINDS[owner["kind"]].plural, owner["name"])

    def collect(self, uid: str) -> None:
        """Pods that run get their grace period."""
        for pod in [pod for pod in self.pods.values() if _owns(uid, pod)]:
            name = pod["metadata"]["name"]
            if pod["metadata"]["uid"] not in self._containers or has_phase(pod, "Succeeded", "Failed"):
                self.remove("pods", name)
            elif "deletionTimestamp" not in pod["metadata"]:
                self.delete_pod(name)
        for resource, objects in list(self.objects.items()):
            if resource != "pods":
                for owned in [one for one in objects.values() if _owns(uid, one)]:
                    self.remove(resource, owned["metadata"]["name"])

    def event(self, pod: str, container: str, reason: str) -> None:
        """An event of a kubelet about a container."""
        meta = self.pods[pod]["metadata"]
        self.put("events", {
            "metadata": {"name": f"{pod}.{self.version}"}, "type": "Normal", "reason": reason,
            "message": f"{reason} container {container}", "source": {"component": "kubelet", "host": "node-1"},
            "involvedObject": {
                "kind": "Pod", "namespace": self.namespace, "name": pod, "uid": meta["uid"],
                "fieldPath": f"spec.containers{{{container}}}",
            },
            "firstTimestamp": stamp(), "lastTimestamp": stamp(), "count": 1,
        })  # fmt: skip

    def remove_pod(self, name: str, uid: str) -> None:
        """Remove a pod that has ended, unless it is gone. Without a grace period, its deletionTimestamp is now."""
        if name in self.pods and self.pods[name]["metadata"]["uid"] == uid:
            gone = {"deletionTimestamp": stamp(), "deletionGracePeriodSeconds": 0}
            self.change("pods", name, lambda one: one["metadata"].update(gone))
            self.remove("pods", name)

    def delete_pod(self, name: str) -> None:
        """Delete a pod that runs, as the API does."""
        self.change("pods", name, lambda one: one["metadata"].update(_ending()))

    def evict(self, pod: str) -> None:
        """Evict a pod, as the API does. Called in any thread."""
        self.after(0.0, self._evict, pod)

    def _evict(self, pod: str) -> None:
        disrupted = {
            "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting", "lastTransitionTime": stamp(),
        }  # fmt: skip

        def change(one: Object) -> None:
            one["status"]["conditions"] = [*one["status"]["conditions"], disrupted]

        self.change("pods", pod, change)
        self.delete_pod(pod)

    # the operators

    def _reconcile(self, plural: str, name: str) -> None:
        kind, job = JOBS[plural], self.objects[plural].get(name)
        if job is None or "deletionTimestamp" in job["metadata"]:
            return
        uid = job["metadata"]["uid"]
        pods = {pod["metadata"]["labels"]["test/replica"]: pod for pod in self.pods.values() if _owns(uid, pod)}
        if has_ended(job):
            self._clean(job, list(pods.values()))
            return
        if is_suspended(kind, job):
            self._stop(list(pods.values()))
            self._conditions(kind, job, "Suspended")
            return
        if kind is not TRAINJOB and "status" not in job:
            self._conditions(kind, job, "Created")
        templates = self._templates(kind, job)
        self._stop([pod for key, pod in pods.items() if key not in templates])  # the job was scaled down
        for key, template in templates.items():
            if key not in pods and (key, uid) in self._completed:
                pods[key] = self._completed[key, uid]
            elif key not in pods:
                pods[key] = self._create_pod(kind, job, key, template)
        self._judge(kind, job, pods)

    def _judge(self, kind: Kind, job: Object, pods: Mapping[str, Object]) -> None:
        """Set the condition that follows from the pods."""
        failed = [
            pod for key, pod in pods.items() if has_phase(pod, "Failed") and (kind, key[:6]) != (MPIJOB, "Worker")
        ]
        primary = next(key for role in kind.primaries for key in pods if key.startswith(f"{role}-"))
        if kind is TRAINJOB:
            done = all(has_phase(pod, "Succeeded") for pod in pods.values())
        else:
            done = has_phase(pods[primary], "Succeeded")
        limit = (job["spec"].get("runPolicy") or {}).get("backoffLimit")
        restarts = sum(c["restartCount"] for pod in pods.values() for c in pod["status"].get("containerStatuses", ()))
        if limit is not None and (restarts > limit or (failed and limit == 0)):
            message = f"Job {job['metadata']['name']} has failed because it has reached the specified backoff limit"
            self._conditions(kind, job, "Failed", reason="BackoffLimitExceeded", message=message)
            self._stop(list(pods.values()))  # whatever cleanPodPolicy says
            return
        if failed and kind is TRAINJOB and self._retried(job, failed[0]):
            return
        if failed:
            names = ", ".join(pod["metadata"]["name"] for pod in failed)
            self._conditions(kind, job, "Failed", message=f"{kind.name} failed: {names}")
        elif done:
            self._conditions(kind, job, "Complete" if kind is TRAINJOB else "Succeeded")
        elif has_phase(pods[primary], "Running"):
            self._conditions(kind, job, "Running")

    def _retried(self, job: Object, failed: Object) -> bool:
        """Whether a batch Job creates the pod of a TrainJob again."""
        runtime = self.objects["clustertrainingruntimes"][job["spec"]["runtimeRef"]["name"]]
        (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        uid = job["metadata"]["uid"]
        count = self._failed_pods[uid] = self._failed_pods.get(uid, 0) + 1
        if count > node["template"]["spec"].get("backoffLimit", 6):
            return False
        self.after(10.0 * 2 ** (count - 1), self._recreate, failed)
        return True

    def _recreate(self, pod: Object) -> None:
        self.remove_pod(pod["metadata"]["name"], pod["metadata"]["uid"])

    def _conditions(self, kind: Kind, job: Object, type_: str, reason: str = "", message: str = "") -> None:
        """Make this the only true condition, besides Created."""
        old = (job.get("status") or {}).get("conditions") or []
        if any(one["type"] == type_ and one["status"] == "True" for one in old):
            return
        if kind is TRAINJOB and type_ in ("Running", "Created"):
            return
        kept = [one if one["type"] == "Created" else {**one, "status": "False"} for one in old if one["type"] != type_]
        new = {
            "type": type_, "status": "True", "lastTransitionTime": stamp(), "lastUpdateTime": stamp(),
            "reason": reason or f"{kind.name}{type_}", "message": message or f"{kind.name} has the condition {type_}",
        }  # fmt: skip
        status = {**(job.get("status") or {}), "conditions": [*kept, new]}
        if type_ in ("Succeeded", "Failed"):
            status["completionTime"] = stamp()
        self.change(kind.plural, job["metadata"]["name"], lambda one: one.update(status=status))

    def _clean(self, job: Object, pods: list[Object]) -> None:
        policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy")
        if policy in ("Running", "All"):
            self._stop([pod for pod in pods if policy == "All" or not has_phase(pod, "Succeeded", "Failed")])

    def _stop(self, pods: list[Object]) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            if pod["metadata"]["uid"] not in self._containers or has_phase(pod, "Succeeded", "Failed"):
                self.remove_pod(name, pod["metadata"]["uid"])
            elif "deletionTimestamp" not in pod["metadata"]:
                self.delete_pod(name)

    # pods

    def _templates(self, kind: Kind, job: Object) -> dict[str, Object]:
        """The templates of all pods, by role and index."""
        if kind is TRAINJOB:
            trainer = job["spec"].get("trainer") or {}
            runtime = self.objects["clustertrainingruntimes"][job["spec"]["runtimeRef"]["name"]]
            (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
            template = copied(node["template"]["spec"]["template"])
            (container,) = template["spec"]["containers"]
            container |= {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
            container["resources"] = trainer.get("resourcesPerNode") or {}
            return {f"node-{index}": template for index in range(trainer.get("numNodes") or 1)}
        field = "pytorchReplicaSpecs" if kind is PYTORCHJOB else "mpiReplicaSpecs"
        found: dict[str, Object] = {}
        for role, replica in sorted(job["spec"][field].items()):
            for index in range(replica.get("replicas", 1)):
                template = copied(replica["template"])
                if kind is MPIJOB and role == "Worker" and not template["spec"]["containers"][0].get("command"):
                    template["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 1000000"]
                template["spec"]["restartPolicy"] = replica.get("restartPolicy", "Never")
                rank = {"name": "RANK", "value": str(len(found))}  # the Master comes first
                container = template["spec"]["containers"][0]
                container["env"] = [*(container.get("env") or ()), rank]
                found[f"{role}-{index}"] = template
        return found

    def _create_pod(self, kind: Kind, job: Object, key: str, template: Object) -> Object:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        role, _, index = key.partition("-")
        of_job = {} if kind is TRAINJOB and self.trainer else job["metadata"].get("labels") or {}
        labels = {**of_job, **((template.get("metadata") or {}).get("labels") or {})}
        if kind is TRAINJOB:
            labels |= {
                kind.behavior.pod_name_label: name, "jobset.sigs.k8s.io/replicatedjob-name": role,
                "jobset.sigs.k8s.io/jobset-uid": f"jobset-of-{uid}", "batch.kubernetes.io/job-completion-index": index,
            }  # fmt: skip
        else:
            labels |= {
                kind.behavior.pod_name_label: name, "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": index, "training.kubeflow.org/job-role": role.lower(),
            }  # fmt: skip
        labels["test/replica"], pod_name = key, f"{name}-{role.lower()}-{index}"
        if kind is TRAINJOB:
            pod_name = f"{name}-{role}-0-{index}-{self.version:05}"
        elif role == "Launcher":
            pod_name = f"{name}-launcher" if job["apiVersion"].endswith("/v1") else f"{name}-launcher-{self.version:05}"
        spec = {"terminationGracePeriodSeconds": 30, **template["spec"]}
        pod = self.put("pods", {
            "metadata": {
                "name": pod_name, "labels": labels,
                "annotations": (template.get("metadata") or {}).get("annotations") or {},
                "ownerReferences": [{"kind": kind.name, "name": name, "uid": uid, "controller": True}],
            },
            "spec": spec, "status": {"phase": "Pending"},
        })  # fmt: skip
        self.after(SCHEDULED, self._schedule, copied(pod))
        return pod

    def _same(self, pod: Object) -> Object | None:
        """The pod as it is now, unless it is gone or being deleted."""
        now = self.pods.get(pod["metadata"]["name"])
        is_it = now is not None and now["metadata"]["uid"] == pod["metadata"]["uid"]
        return now if is_it and now is not None and "deletionTimestamp" not in now["metadata"] else None

    def _schedule(self, pod: Object) -> None:
        if self._same(pod) is None:
            return
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        fits = int(((container.get("resources") or {}).get("limits") or {}).get("nvidia.com/gpu", 0)) <= GPUS
        condition = {"type": "PodScheduled", "status": "True" if fits else "False", "lastTransitionTime": stamp()}
        if not fits:
            condition |= {
                "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            }
        self.change("pods", name, lambda one: one["status"].update(conditions=[condition]))
        if fits:
            self.change("pods", name, lambda one: one["spec"].update(nodeName="node-1"))
            reason = (
                "ImagePullBackOff" if str(container.get("image", "")).startswith("missing") else "ContainerCreating"
            )
            waiting = {"name": container["name"], "restartCount": 0, "state": {"waiting": {"reason": reason}}}
            self.show(name, "Pending", waiting)
            if reason == "ContainerCreating":
                self.after(STARTED - SCHEDULED, self._start, pod)

    def _start(self, pod: Object) -> None:
        if (now := self._same(pod)) is not None:
            uid = now["metadata"]["uid"]
            self._containers[uid] = self.container_class.__new__(self.container_class)
            self._containers[uid].__init__(self, now)  # type: ignore[misc]

    def show(self, name: str, phase: str, container: Object) -> None:
        """Set the status of a pod."""
        self.change("pods", name, lambda pod: pod["status"].update(phase=phase, containerStatuses=[container]))


def _ending() -> Object:
    """The metadata of a pod that was requested to end now: both fields, from which the time of the request follows."""
    return {"deletionTimestamp": stamp(-30), "deletionGracePeriodSeconds": 30}


def _owns(uid: str, obj: Object) -> bool:
    return any(owner["uid"] == uid for owner in obj["metadata"].get("ownerReferences") or ())


def _owner(obj: Object) -> str:
    """The uid of the owner."""
    return str(obj["metadata"]["ownerReferences"][0]["uid"])


def has_phase(pod: Object, *phases: str) -> bool:
    return pod["status"].get("phase") in phases


def has_ended(job: Object) -> bool:
    ends = ("Succeeded", "Complete", "Failed")
    return any(
        one["type"] in ends and one["status"] == "True" for one in (job.get("status") or {}).get("conditions") or ()
    )


def is_suspended(kind: Kind, job: Object) -> bool:
    place = job["spec"] if kind is TRAINJOB else job["spec"].get("runPolicy") or {}
    return bool(place.get("suspend"))
