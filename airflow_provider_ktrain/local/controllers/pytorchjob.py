"""PyTorchJob as training-operator 1.9 runs it: a pod and a headless service for each replica, torch's environment."""

from __future__ import annotations

import contextlib
from typing import Any

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import common as c
from airflow_provider_ktrain.local.controllers.runtime import ReconcileError
from airflow_provider_ktrain.local.controllers.training_operator import TrainingOperator
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.store import Obj, Objects

CONTAINER, PORT = "pytorch", {"name": "pytorchjob-port", "containerPort": 23456}
NO_EXIT_CODE = 0xBEEF  # of a pod whose container has no terminated state: retryable
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
    resource = r.PYTORCHJOB
    owns = (r.POD, r.SERVICE)
    component = "pytorchjob-controller"
    replica_types = ("Master", "Worker")
    specs_field = "pytorchReplicaSpecs"
    restart_policy = "OnFailure"
    restarting = ("OnFailure", "Always", "ExitCode")
    deleted_reason = "SuccessfulDeletePod"

    def defaulted(self, job: Obj) -> Obj:
        spec, elastic, specs = job["spec"], job["spec"].get("elasticPolicy"), self.specs(super().defaulted(job))
        for replica in specs.values():
            for container in replica["template"]["spec"]["containers"]:
                named = {port.get("name") for port in container.get("ports") or ()}
                if container["name"] == CONTAINER and PORT["name"] not in named:
                    c.append(container, "ports", PORT)
        if not (elastic and elastic.get("nProcPerNode") is not None):
            spec["nprocPerNode"] = spec.get("nprocPerNode") or "auto"
        if elastic is not None and "Worker" in specs:
            given = [elastic[k] for k in ("minReplicas", "maxReplicas") if elastic.get(k) is not None]
            given = given or [specs["Worker"]["replicas"]]
            elastic["minReplicas"], elastic["maxReplicas"] = given[0], given[-1]
        return job

    def reconcile_job(self, job: Obj, status: Obj) -> None:
        elastic, meta = job["spec"].get("elasticPolicy") or {}, job["metadata"]
        if elastic.get("metrics") and self.store.find(r.HPA, meta["namespace"], meta["name"]) is None:
            target = {"kind": job["kind"], "name": meta["name"], "apiVersion": job["apiVersion"]}
            spec = {"scaleTargetRef": target, **{k: elastic[k] for k in ("minReplicas", "maxReplicas", "metrics")}}
            scaler = {"spec": spec, "status": {"desiredReplicas": 0, "currentMetrics": None}}
            self.store.create(r.HPA, c.child(job, meta["name"], scaler))
        super().reconcile_job(job, status)

    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        services = self.store.list(r.SERVICE, job["metadata"]["namespace"], self.labels(job))
        errors = []
        for type_ in self.specs(job):
            try:
                self.sync_pods(job, status, type_, by_index(pods, type_))
                self.sync_services(job, type_, by_index(services, type_))
            except ApiError as error:  # the other type gets its pods all the same, as by Go's random order
                errors.append(error)
        if errors:
            raise errors[0]

    def sync_pods(self, job: Obj, status: Obj, type_: str, pods: dict[int, Obj]) -> None:
        name, spec = job["metadata"]["name"], self.specs(job)[type_]
        status.setdefault("replicaStatuses", {})[type_] = c.tally(pods.values(), deleted="failed")
        for index in sorted({*range(spec["replicas"]), *pods}):
            pod = pods.get(index)
            if pod is None:
                self.create(job, r.POD, self.replica(job, type_, index))
                continue
            if index >= spec["replicas"]:
                self.delete(job, r.POD, pod["metadata"]["name"])
            retried = self.exit_code(job, pod) >= 128 or spec["restartPolicy"] in ("OnFailure", "Always")
            if c.phase(pod) == "Failed" and spec["restartPolicy"] != "Never":
                if retried:
                    self.delete(job, r.POD, pod["metadata"]["name"])
                    message = f"job {name} is restarting because {type_} replica(s) failed."
                else:  # no completionTime: the recordings have none either
                    message = f'job "{name}" is failing because "{type_}" replica(s) failed.'
                outcome = "Restarting" if retried else "Failed"
                self.event(job, "Warning", outcome, message)
                self.condition(status, outcome, message)

    def exit_code(self, job: Obj, pod: Obj) -> int:
        """The exit code of the pod's `pytorch` container, told in an event."""
        code, meta = NO_EXIT_CODE, pod["metadata"]
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = container.get("state", {}).get("terminated")
            if container["name"] == CONTAINER and ended:
                code = ended["exitCode"]
                message = f"Pod: {meta['namespace']}.{meta['name']} exited with code {code}"
                self.recorder.event(job, "Normal", "ExitedWithCode", message)
        return code

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
        """The variables that the operator appends to every container, in its order."""
        specs, name, spec = self.specs(job), job["metadata"]["name"], job["spec"]
        total, per_node = sum(s["replicas"] for s in specs.values()), spec.get("nprocPerNode")
        variables: dict[str, Any] = {"PYTHONUNBUFFERED": "1"}
        if "Master" in specs:
            port, address = self.port_number(specs["Master"]), f"{name}-master-0"
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
        port = elastic.get("rdzvPort") or self.port_number(specs["Worker"])
        variables |= {
            "PET_RDZV_ENDPOINT": f"{elastic.get('rdzvHost') or f'{name}-worker-0'}:{port}",
            "PET_RDZV_BACKEND": elastic.get("rdzvBackend") or "c10d",
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            **{variable: elastic[field] for field, variable in ELASTIC_ENV.items() if elastic.get(field) is not None},
        }  # fmt: skip
        if elastic.get("rdzvConf"):
            variables["PET_RDZV_CONF"] = ",".join(f"{pair['key']}={pair['value']}" for pair in elastic["rdzvConf"])
        return {**variables, **({"PET_STANDALONE": ""} if elastic.get("standalone") else {})}

    def ports(self, spec: Obj) -> Objects:
        """The ports of the `pytorch` container."""
        containers = spec["template"]["spec"]["containers"]
        return next((x.get("ports") or [] for x in containers if x.get("name") == CONTAINER), [])

    def port_number(self, spec: Obj) -> int:
        for port in self.ports(spec):
            if port.get("name") == PORT["name"]:
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
                service = {"clusterIP": "None", "selector": labels, "ports": ports}
                name = f"{job['metadata']['name']}-{type_.lower()}-{index}"
                self.create(job, r.SERVICE, c.child(job, name, {"metadata": {"labels": labels}, "spec": service}))


def by_index(objects: Objects, type_: str) -> dict[int, Obj]:
    """Objects of one replica type by their replica-index label."""
    labelled = [(obj["metadata"]["labels"], obj) for obj in objects]
    return {int(labels[c.REPLICA_INDEX]): obj for labels, obj in labelled if labels[c.REPLICA_TYPE] == type_.lower()}
