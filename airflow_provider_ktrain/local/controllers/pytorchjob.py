"""PyTorchJob as training-operator 1.9 runs it: a pod and a headless service for each replica, torch's environment."""

from __future__ import annotations

import contextlib
from typing import Any

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers.owners import child
from airflow_provider_ktrain.local.controllers.runtime import ReconcileError
from airflow_provider_ktrain.local.controllers.training_operator import TrainingOperator
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.store import Obj, Objects

NO_EXIT_CODE = 0xBEEF  # of a pod whose container has no terminated state: retryable
INIT_IMAGE = "alpine:3.10"  # training-operator's default for --pytorch-init-container-image
INIT_SCRIPT = (
    "err=1;for i in $(seq 100); do if nslookup {master}; then err=0 && break; fi;"
    "echo waiting for master; sleep 2; done; exit $err"
)
ELASTIC_ENV = {  # elasticPolicy field -> variable, in the order in which they are appended
    "maxRestarts": "PET_MAX_RESTARTS",
    "nProcPerNode": "PET_NPROC_PER_NODE",
    "rdzvId": "PET_RDZV_ID",
}


class PyTorchJobController(TrainingOperator):
    resource = r.PYTORCHJOB
    replica_types = ("Master", "Worker")
    specs_field = "pytorchReplicaSpecs"
    container = "pytorch"
    port = ("pytorchjob-port", 23456)
    restart_policy = "OnFailure"
    deleted_reason = "SuccessfulDeletePod"
    owns = (r.POD, r.SERVICE)

    def defaulted(self, job: Obj) -> Obj:
        super().defaulted(job)
        spec, elastic = job["spec"], job["spec"].get("elasticPolicy")
        if not (elastic and elastic.get("nProcPerNode") is not None):
            spec["nprocPerNode"] = spec.get("nprocPerNode") or "auto"
        if elastic is not None and "Worker" in self.specs(job):
            workers = self.specs(job)["Worker"]["replicas"]
            low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
            elastic["minReplicas"] = low if low is not None else (workers if high is None else high)
            elastic["maxReplicas"] = high if high is not None else (workers if low is None else low)
        return job

    def reconcile_job(self, job: Obj, status: Obj) -> None:
        self.sync_autoscaler(job)
        super().reconcile_job(job, status)

    def sync_autoscaler(self, job: Obj) -> None:
        """Keep a HorizontalPodAutoscaler for an elasticPolicy that has metrics."""
        elastic = job["spec"].get("elasticPolicy") or {}
        if not elastic.get("metrics"):
            return
        meta = job["metadata"]
        target = {"kind": self.kind, "name": meta["name"], "apiVersion": self.resource.api_version}
        spec = {
            "scaleTargetRef": target, "minReplicas": elastic["minReplicas"], "maxReplicas": elastic["maxReplicas"],
            "metrics": elastic["metrics"],
        }  # fmt: skip
        known = self.store.find(r.HPA, meta["namespace"], meta["name"])
        if known is None:
            status = {"desiredReplicas": 0, "currentMetrics": None}
            wanted = child(job, meta["name"], {}, spec=spec, status=status)
            del wanted["metadata"]["labels"]
            self.store.create(r.HPA, wanted)
        elif known["spec"] != spec:
            self.store.update(r.HPA, {**known, "spec": spec})

    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        services = self.store.list(r.SERVICE, job["metadata"]["namespace"], self.labels(job))
        errors = []
        for type_ in [t for t in self.replica_types if t in self.specs(job)]:
            try:
                self.sync_pods(job, status, type_, by_index(pods, type_))
                self.sync_services(job, type_, by_index(services, type_))
            except ApiError as error:  # the other type gets its pods all the same, as by Go's random order
                errors.append(error)
        if errors:
            raise errors[0]

    def sync_pods(self, job: Obj, status: Obj, type_: str, pods: dict[int, Obj]) -> None:
        name, spec = job["metadata"]["name"], self.specs(job)[type_]
        status.setdefault("replicaStatuses", {})[type_] = {}
        for index in sorted({*range(spec["replicas"]), *pods}):
            pod = pods.get(index)
            if pod is None:
                self.create(job, r.POD, self.replica(job, type_, index))
                continue
            pod_name = pod["metadata"]["name"]
            if index >= spec["replicas"]:
                self.delete(job, r.POD, pod_name)
            code = self.exit_code(job, pod)
            retried = spec["restartPolicy"] in ("OnFailure", "Always") or code >= 128
            if c.phase(pod) == "Failed" and spec["restartPolicy"] != "Never":
                if retried:
                    self.delete(job, r.POD, pod_name)
                    message = f"job {name} is restarting because {type_} replica(s) failed."
                else:  # no completionTime: the recordings have none either
                    message = f'job "{name}" is failing because "{type_}" replica(s) failed.'
                outcome = "Restarting" if retried else "Failed"
                self.event(job, "Warning", outcome, message)
                self.condition(status, outcome, message)
            self.count(status, type_, pod)

    def exit_code(self, job: Obj, pod: Obj) -> int:
        """The exit code of the pod's `pytorch` container, told in an event."""
        code, meta = NO_EXIT_CODE, pod["metadata"]
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = container.get("state", {}).get("terminated")
            if container["name"] == self.container and ended:
                code = ended["exitCode"]
                message = f"Pod: {meta['namespace']}.{meta['name']} exited with code {code}"
                self.recorder.event(job, "Normal", "ExitedWithCode", message)
        return code

    def replica(self, job: Obj, type_: str, index: int) -> Obj:
        """The pod of one replica."""
        specs, name = self.specs(job), job["metadata"]["name"]
        labels = self.labels(job, type_, index)
        if type_ == "Master" or (index == 0 and "Master" not in specs):
            labels[c.JOB_ROLE] = "master"
        pod = self.pod(job, f"{name}-{type_.lower()}-{index}", specs[type_], labels)
        variables = self.environment(job, type_, index)
        for container in pod["spec"]["containers"]:
            c.add_env(container, variables)
        if type_ == "Worker" and "Master" in specs:
            wait = {
                "name": "init-pytorch", "image": INIT_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", INIT_SCRIPT.format(master=f"{name}-master-0")],
                "resources": {
                    "limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"},
                },
            }  # fmt: skip
            pod["spec"]["initContainers"] = [*(pod["spec"].get("initContainers") or ()), wait]
        return pod

    def environment(self, job: Obj, type_: str, index: int) -> list[tuple[str, Any]]:
        """The variables that the operator appends to every container, in its order."""
        specs, name, spec = self.specs(job), job["metadata"]["name"], job["spec"]
        total = sum(s["replicas"] for s in specs.values())
        per_node = spec.get("nprocPerNode")
        variables: list[tuple[str, Any]] = [("PYTHONUNBUFFERED", "1")]
        if "Master" in specs:
            port, address = self.port_number(specs["Master"]), f"{name}-master-0"
            rank = index + (type_ == "Worker")
            processes = 1
            with contextlib.suppress(TypeError, ValueError):  # auto, cpu, gpu
                processes = int(per_node)
            variables += [
                ("MASTER_PORT", port), ("PET_MASTER_PORT", port), ("MASTER_ADDR", address),
                ("PET_MASTER_ADDR", address), ("WORLD_SIZE", total * processes), ("RANK", rank),
                ("PET_NODE_RANK", rank),
            ]  # fmt: skip
        if per_node is not None:
            variables.append(("PET_NPROC_PER_NODE", per_node))
        elastic = spec.get("elasticPolicy")
        if elastic is None:
            return [*variables, ("PET_NNODES", total)]
        port = elastic.get("rdzvPort") or self.port_number(specs["Worker"])
        variables += [
            ("PET_RDZV_ENDPOINT", f"{elastic.get('rdzvHost') or f'{name}-worker-0'}:{port}"),
            ("PET_RDZV_BACKEND", elastic.get("rdzvBackend") or "c10d"),
            ("PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}"),
        ]
        variables += [(variable, elastic[f]) for f, variable in ELASTIC_ENV.items() if elastic.get(f) is not None]
        if elastic.get("rdzvConf"):
            pairs = ",".join(f"{pair['key']}={pair['value']}" for pair in elastic["rdzvConf"])
            variables.append(("PET_RDZV_CONF", pairs))
        if elastic.get("standalone"):
            variables.append(("PET_STANDALONE", ""))
        return variables

    def ports(self, spec: Obj) -> Objects:
        """The ports of the `pytorch` container."""
        containers = spec["template"]["spec"]["containers"]
        return next((x.get("ports") or [] for x in containers if x.get("name") == self.container), [])

    def port_number(self, spec: Obj) -> int:
        for port in self.ports(spec):
            if port.get("name") == self.port[0]:
                return int(port["containerPort"])
        raise ReconcileError("port not found")

    def sync_services(self, job: Obj, type_: str, services: dict[int, Obj]) -> None:
        spec = self.specs(job)[type_]
        for index in sorted({*range(spec["replicas"]), *services}):
            if index >= spec["replicas"]:
                self.delete(job, r.SERVICE, services[index]["metadata"]["name"])
            elif index not in services:
                labels = self.labels(job, type_, index)
                ports = [{"name": p.get("name", ""), "port": p["containerPort"]} for p in self.ports(spec)]
                name = f"{job['metadata']['name']}-{type_.lower()}-{index}"
                self.create_service(job, name, labels, {"clusterIP": "None", "selector": labels, "ports": ports})

    def create_service(self, job: Obj, name: str, labels: dict[str, str], spec: Obj) -> None:
        """Create a headless service. Names over 63 characters are refused: such a job never gets a status."""
        if len(name) > 63:
            message = (
                f'Service "{name}" is invalid: metadata.name: Invalid value: "{name}": '
                "must be no more than 63 characters"
            )
            self.recorder.event(job, "Warning", "FailedCreateService", f"Error creating: {message}")
            raise ApiError(422, message)
        self.create(job, r.SERVICE, child(job, name, labels, spec=spec))

    def update_status(self, job: Obj, status: Obj) -> None:
        specs, meta = self.specs(job), job["metadata"]
        status.setdefault("startTime", c.timestamp(self.clock()))
        full_name = f"{meta['namespace']}/{meta['name']}"
        for type_ in [t for t in self.replica_types if t in specs]:
            counts, replicas = status["replicaStatuses"][type_], specs[type_]["replicas"]
            counts["selector"] = ",".join(f"{k}={v}" for k, v in sorted(self.labels(job, type_).items()))
            active, succeeded, failed = (counts.get(k, 0) for k in ("active", "succeeded", "failed"))
            if type_ == "Master":
                if active:
                    self.condition(status, "Running", f"PyTorchJob {meta['name']} is running.")
                if succeeded == replicas:
                    return self.succeed(job, status, f"PyTorchJob {meta['name']} is successfully completed.")
            elif "Master" not in specs:
                if succeeded == replicas or (succeeded and job["spec"].get("elasticPolicy") is not None):
                    self.succeed(job, status, f"PyTorchJob {full_name} successfully completed.")
                elif active:
                    self.condition(status, "Running", f"PyTorchJob {full_name} is running.")
            if failed and replicas > succeeded + active:
                self.replicas_failed(job, status, type_, failed)
        return None

    def replicas_failed(self, job: Obj, status: Obj, type_: str, failed: int) -> None:
        restarting = self.specs(job)[type_]["restartPolicy"] != "Never"
        what = "restarting" if restarting else "failed"
        message = f"PyTorchJob {job['metadata']['name']} is {what} because {failed} {type_} replica(s) failed."
        if restarting:
            self.event(job, "Warning", "Restarting", message)
            self.condition(status, "Restarting", message)
        else:
            self.event(job, "Normal", "Failed", message)
            status.setdefault("completionTime", c.timestamp(self.clock()))
            self.condition(status, "Failed", message)


def by_index(objects: Objects, type_: str) -> dict[int, Obj]:
    """Objects of one replica type by their replica-index label."""
    indexed = {}
    for obj in objects:
        labels = obj["metadata"].get("labels") or {}
        if labels.get(c.REPLICA_TYPE) == type_.lower() and labels.get(c.REPLICA_INDEX, "").isdigit():
            indexed[int(labels[c.REPLICA_INDEX])] = obj
    return indexed
