"""PyTorchJob of training-operator 1.9: a pod and a headless service for each replica, and torchrun's environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers.training_operator import TrainingOperator
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Objects

CONTAINER, PORT_NAME, PORT = "pytorch", "pytorchjob-port", 23456
NO_EXIT_CODE = 0xBEEF  # for a pod whose container has no terminated state. It is retryable
INIT_SCRIPT = (
    "err=1;for i in $(seq 100); do if nslookup {master}; then err=0 && break; fi;"
    "echo waiting for master; sleep 2; done; exit $err"
)
INIT_CONTAINER = {
    "name": "init-pytorch", "imagePullPolicy": "IfNotPresent",
    "image": "alpine:3.10",  # training-operator's default for --pytorch-init-container-image
    "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
}  # fmt: skip
ELASTIC_ENV = {  # elasticPolicy field -> variable, in the order in which they are appended
    "maxRestarts": "PET_MAX_RESTARTS",
    "nProcPerNode": "PET_NPROC_PER_NODE",
    "rdzvId": "PET_RDZV_ID",
}


class PyTorchJobController(TrainingOperator):
    """Reconciles PyTorchJobs like training-operator."""

    resource = r.PYTORCHJOB
    owns = (r.POD, r.SERVICE)
    component = "pytorchjob-controller"
    specs_field = "pytorchReplicaSpecs"
    defaults: ClassVar = {"Master": (1, "OnFailure"), "Worker": (1, "OnFailure")}
    restarting = ("OnFailure", "Always", "ExitCode")
    deleted_reason = "SuccessfulDeletePod"

    def defaulted(self, job: Obj) -> Obj:
        """The job with the operator's defaults, such as the container's port and nprocPerNode."""
        spec, elastic, specs = job["spec"], job["spec"].get("elasticPolicy"), self.specs(super().defaulted(job))
        for replica in specs.values():
            for container in replica["template"]["spec"]["containers"]:
                if container["name"] == CONTAINER and PORT_NAME not in self.ports(replica):
                    c.append(container, "ports", {"name": PORT_NAME, "containerPort": PORT})
        if not (elastic and elastic.get("nProcPerNode") is not None):
            spec["nprocPerNode"] = spec.get("nprocPerNode") or "auto"
        if elastic is not None and "Worker" in specs:
            given = [elastic[k] for k in ("minReplicas", "maxReplicas") if elastic.get(k) is not None]
            given = given or [specs["Worker"]["replicas"]]
            elastic["minReplicas"], elastic["maxReplicas"] = given[0], given[-1]
        return job

    def reconcile_job(self, job: Obj, status: Obj) -> None:
        """Reconcile the job, and create the HorizontalPodAutoscaler of an elastic job with metrics."""
        elastic, meta = job["spec"].get("elasticPolicy") or {}, job["metadata"]
        if elastic.get("metrics") and self.store.find(r.HPA, meta["namespace"], meta["name"]) is None:
            target = {"kind": job["kind"], "name": meta["name"], "apiVersion": job["apiVersion"]}
            spec = {"scaleTargetRef": target, **{k: elastic[k] for k in ("minReplicas", "maxReplicas", "metrics")}}
            scaler = {"spec": spec, "status": {"desiredReplicas": 0, "currentMetrics": None}}
            self.store.create(r.HPA, c.child(job, meta["name"], scaler))
        super().reconcile_job(job, status)

    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        """Create missing pods and services of each replica type, and count its pods."""
        services, errors = self.store.owned(r.SERVICE, job), []
        for type_, spec in self.specs(job).items():
            of_type = by_index(pods, type_)
            status.setdefault("replicaStatuses", {})[type_] = c.tally(of_type.values(), deleted="failed")
            try:
                self.sync(job, type_, r.POD, of_type, self.replica)
                for pod in of_type.values():
                    self.restart(job, status, type_, spec["restartPolicy"], pod)
                self.sync(job, type_, r.SERVICE, by_index(services, type_), self.service)
            except ApiError as error:  # continue with the other type, because Go's order of types is random
                errors.append(error)
        if errors:
            raise errors[0]

    def sync(
        self, job: Obj, type_: str, resource: Resource, found: dict[int, Obj], make: Callable[[Obj, str, int], Obj]
    ) -> None:
        """Create the missing objects of a replica type, and delete those with an index beyond its replicas."""
        replicas = self.specs(job)[type_]["replicas"]
        for index in sorted({*range(replicas), *found}):
            if index not in found:
                self.create(job, resource, make(job, type_, index))
            elif index >= replicas:
                self.delete(job, resource, found[index]["metadata"]["name"])

    def restart(self, job: Obj, status: Obj, type_: str, policy: str, pod: Obj) -> None:
        """If the pod has failed, delete it so that it is recreated, or fail the job."""
        name, retried = job["metadata"]["name"], self.exit_code(job, pod) >= 128 or policy in ("OnFailure", "Always")
        if c.phase(pod) == "Failed" and policy != "Never":
            if retried:
                self.delete(job, r.POD, pod["metadata"]["name"])
                message = f"job {name} is restarting because {type_} replica(s) failed."
            else:  # no completionTime, as in the recordings
                message = f'job "{name}" is failing because "{type_}" replica(s) failed.'
            outcome = "Restarting" if retried else "Failed"
            self.event(job, "Warning", outcome, message)
            self.condition(status, outcome, message)

    def exit_code(self, job: Obj, pod: Obj) -> int:
        """The exit code of the pod's `pytorch` container. Records an event with it."""
        meta, statuses = pod["metadata"], pod["status"].get("containerStatuses") or ()
        ended = next((x["state"].get("terminated") for x in statuses if x["name"] == CONTAINER), None)
        if not ended:
            return NO_EXIT_CODE
        message = f"Pod: {meta['namespace']}.{meta['name']} exited with code {ended['exitCode']}"
        self.recorder.event(job, "Normal", "ExitedWithCode", message)
        return int(ended["exitCode"])

    def replica(self, job: Obj, type_: str, index: int) -> Obj:
        """The pod of one replica."""
        specs, name, labels = self.specs(job), job["metadata"]["name"], self.labels(job, type_, index)
        if type_ == "Master" or (index == 0 and "Master" not in specs):
            labels[c.JOB_ROLE] = "master"
        pod = self.pod(job, f"{name}-{type_.lower()}-{index}", specs[type_], labels)
        variables = self.environment(job, type_, index)
        for container in pod["spec"]["containers"]:
            c.add_env(container, variables)
        if type_ == "Worker" and "Master" in specs:
            script = INIT_SCRIPT.format(master=f"{name}-master-0")
            c.append(pod["spec"], "initContainers", {**INIT_CONTAINER, "command": ["sh", "-c", script]})
        return pod

    def environment(self, job: Obj, type_: str, index: int) -> dict[str, Any]:
        """The variables that the operator appends to each container, in the operator's order."""
        specs, name, spec = self.specs(job), job["metadata"]["name"], job["spec"]
        total, per_node = sum(s["replicas"] for s in specs.values()), spec.get("nprocPerNode")
        variables: dict[str, Any] = {"PYTHONUNBUFFERED": "1"}
        if "Master" in specs:
            port, address = self.ports(specs["Master"])[PORT_NAME], f"{name}-master-0"
            rank = index + (type_ == "Worker")
            processes = 1
            with contextlib.suppress(TypeError, ValueError):  # auto, cpu, gpu
                processes = int(per_node)
            variables |= {
                "MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": address, "PET_MASTER_ADDR": address,
                "WORLD_SIZE": total * processes, "RANK": rank, "PET_NODE_RANK": rank,
            }  # fmt: skip
        if per_node is not None:
            variables["PET_NPROC_PER_NODE"] = per_node
        elastic = spec.get("elasticPolicy")
        if elastic is None:
            return {**variables, "PET_NNODES": total}
        port = elastic.get("rdzvPort") or self.ports(specs["Worker"])[PORT_NAME]
        variables |= {
            "PET_RDZV_ENDPOINT": f"{elastic.get('rdzvHost') or f'{name}-worker-0'}:{port}",
            "PET_RDZV_BACKEND": elastic.get("rdzvBackend") or "c10d",
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            **{variable: elastic[field] for field, variable in ELASTIC_ENV.items() if elastic.get(field) is not None},
        }  # fmt: skip
        if elastic.get("rdzvConf"):
            variables["PET_RDZV_CONF"] = ",".join(f"{pair['key']}={pair['value']}" for pair in elastic["rdzvConf"])
        return {**variables, **({"PET_STANDALONE": ""} if elastic.get("standalone") else {})}

    def ports(self, spec: Obj) -> dict[str, int]:
        """The ports of the `pytorch` container by name."""
        ports = next((x.get("ports") for x in spec["template"]["spec"]["containers"] if x["name"] == CONTAINER), None)
        return {port.get("name", ""): port["containerPort"] for port in ports or ()}

    def service(self, job: Obj, type_: str, index: int) -> Obj:
        """The headless service of one replica."""
        labels, ports = self.labels(job, type_, index), self.ports(self.specs(job)[type_])
        service_ports = [{"name": name, "port": number} for name, number in ports.items()]
        spec = {"clusterIP": "None", "selector": labels, "ports": service_ports}
        name = f"{job['metadata']['name']}-{type_.lower()}-{index}"
        return c.child(job, name, {"metadata": {"labels": labels}, "spec": spec})


def by_index(objects: Objects, type_: str) -> dict[int, Obj]:
    """Objects of one replica type by the label replica-index."""
    labelled = [(obj["metadata"]["labels"], obj) for obj in objects]
    return {int(labels[c.REPLICA_INDEX]): obj for labels, obj in labelled if labels[c.REPLICA_TYPE] == type_.lower()}
