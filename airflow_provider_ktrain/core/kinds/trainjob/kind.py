"""TrainJob: trainer.kubeflow.org/v1alpha1, run by Kubeflow Trainer through a JobSet that it makes of a runtime.

Facts are Kubeflow Trainer's (2.0 to 2.3) and JobSet's (0.12), read from their sources and from recordings 50 to 61 of a
real cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.kinds.training_operators import OperatorBehavior, OperatorVersion, Scaling
from airflow_provider_ktrain.core.kinds.trainjob.form import FORM
from airflow_provider_ktrain.core.kinds.trainjob.patches import (
    NODE,
    ROLES_ANNOTATION,
    SUCCESS_POLICY_ANNOTATION,
    TRAINING_RUNTIMES,
)

JOBSET = "jobset.sigs.k8s.io"
JOBSET_NAME_LABEL = f"{JOBSET}/jobset-name"  #: Label of pods: the JobSet's name, which is the TrainJob's.
ROLE_LABEL = f"{JOBSET}/replicatedjob-name"
ATTEMPT_LABEL = f"{JOBSET}/restart-attempt"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
LAUNCHER = "launcher"
INITIALIZERS = ("dataset-initializer", "model-initializer")


class TrainJob(Kind):
    """Nodes that run one program, which the runtime's torchrun or mpirun distributes; before them, initializers.

    What a role is comes from the runtime: `node`, `launcher`, the initializers, or names of its author's own. The
    manifest only has the trainer, so a job's roles are those that its status lists; before, those of our annotation, or
    `node`.
    """

    # ---- the job and its pods

    def replicas(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The roles, each with a replica spec such as the trainer implies; initializers request no GPUs."""
        trainer = _trainer(job)
        container = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
        container |= {"name": NODE, "resources": trainer.get("resourcesPerNode") or {}}
        spec = {"template": {"spec": {"containers": [container]}}}
        return {role: {} if role in INITIALIZERS else spec for role in self._roles(job)}

    def count(self, job: Mapping[str, Any], role: str) -> int:
        """How many pods of a role the job requests. The launcher is one of the nodes, and at least one other runs.

        A job without numNodes has the number of its runtime, which is not known here: 1 is assumed. Tasks set it
        if they can read the runtime (`patches.expand`).
        """
        roles = self._roles(job)
        if role not in roles:
            return 0
        if role in self.single_roles:
            return 1
        nodes = _trainer(job).get("numNodes")
        nodes = nodes if isinstance(nodes, int) else 1
        return max(nodes - 1, 1) if LAUNCHER in roles else nodes

    def primary(self, job: Mapping[str, Any]) -> str:
        """The launcher, else `node`, else the first role that initializes nothing."""
        roles = self._roles(job)
        known = [role for role in self.primaries if role in roles]
        return [*known, *(role for role in roles if role not in INITIALIZERS), NODE][0]

    def completes(self, job: Mapping[str, Any], role: str, index: int) -> bool:
        """All ranks do; only rank 0 if the runtime's Job has a successPolicy: it deletes the pods of the others."""
        all_complete = role not in _annotated(job, SUCCESS_POLICY_ANNOTATION)
        return super().completes(job, role, index) and (index == 0 or all_complete)

    def pod_role(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """The replicated job's name and the completion index, which is the node's rank."""
        index = labels.get(INDEX_LABEL) or "0"
        return labels.get(ROLE_LABEL) or "pod", int(index) if index.isdigit() else 0

    def has_role(self, role: str) -> bool:
        """A runtime may name its replicated jobs as it likes."""
        return re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", role) is not None

    def _roles(self, job: Mapping[str, Any]) -> list[str]:
        """The status lists all from the start, though not in the runtime's order (recording 50d).

        Before that, and on Trainer 2.0, the annotation of our tasks does.
        """
        listed = [str(entry.get("name")) for entry in _jobs_status(job)] or _annotated(job, ROLES_ANNOTATION)
        given = (job.get("spec") or {}).get("initializer") or {}
        initializers = [role for role in INITIALIZERS if role.partition("-")[0] in given]
        return sorted(listed, key=self.rank) if listed else [NODE, *initializers]

    # ---- status

    def is_running(self, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether a pod of the program (of the launcher if there is one) runs or has run. No condition shows this.

        The nodes of an MPI runtime run an SSH server before (recording 57). `jobsStatus` counts Jobs: `ready` is 1 only
        while all pods of one are ready. It decides where no pods are given.
        """
        known, by_launcher = list(pods), LAUNCHER in self._roles(job)

        def starts(role: str) -> bool:
            return role == LAUNCHER if by_launcher else role not in INITIALIZERS

        if not known:
            return any(entry.get("ready") for entry in _jobs_status(job) if starts(str(entry.get("name"))))
        return any(
            (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")
            and starts(self.role_of(pod)[0])
            for pod in known
        )

    def is_restarting(self, pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether JobSet has recreated all Jobs (failurePolicy of the runtime), and no pod runs yet."""
        labels = ((pod.get("metadata") or {}).get("labels") or {} for pod in pods)
        return any(at.get(ATTEMPT_LABEL, "0") != "0" for at in labels)


def _annotated(job: Mapping[str, Any], annotation: str) -> list[str]:
    """The roles that an annotation of the job names."""
    annotations = (job.get("metadata") or {}).get("annotations") or {}
    return [role for role in str(annotations.get(annotation) or "").split(",") if role]


def _trainer(job: Mapping[str, Any]) -> Mapping[str, Any]:
    trainer = (job.get("spec") or {}).get("trainer")
    return trainer if isinstance(trainer, Mapping) else {}


def _jobs_status(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in (job.get("status") or {}).get("jobsStatus") or () if isinstance(entry, Mapping)]


_TRAINER = OperatorVersion(
    version="v1alpha1",
    name="Kubeflow Trainer 2",
    defaults={"trainer": {}},  # without it the Trainer sets no PET_* variables (recording 50b)
    limits_restarts=True,  # by the backoffLimit of the batch Jobs, 6 by default
    recreates_pods=True,  # if its JobSet is deleted, the job trains again (recordings 53e, 60b)
)

TRAINJOB = TrainJob(
    name="TrainJob",
    plural="trainjobs",
    group="trainer.kubeflow.org",
    operators=(_TRAINER,),
    form=FORM,
    runtimes=TRAINING_RUNTIMES,
    roles=(NODE, LAUNCHER, *INITIALIZERS),
    primaries=(LAUNCHER, NODE),
    # the pods' names are `<job>-dataset-initializer-0-<index>-xxxxx`, of at most 63 characters (recording 55b)
    name_length=33,
    launchers=(LAUNCHER,),
    auxiliary_roles=INITIALIZERS,
    single_roles=(LAUNCHER, *INITIALIZERS),
    main_containers=(NODE, *INITIALIZERS),
    behavior=OperatorBehavior(
        # in the foreground, Kubeflow Trainer recreates the JobSet until the TrainJob is gone (recordings 53b, 53e)
        propagation="Background",
        pod_name_label=JOBSET_NAME_LABEL,
        labels_pods=False,
        reports_phases=False,
        failure_deletes_peers=True,  # and with maxRestarts of the runtime recreates them
        restarts_failed_jobs=True,  # when its JobSet is deleted, for example by a TTL of the runtime (recording 60b)
        # by the name of the batch Job: `jobset failed due to ... (first failed job: train-node-0)`
        failed_role=rf"first failed job: \S+?-({'|'.join((NODE, LAUNCHER, *INITIALIZERS))})-0\)",
        always_cleans_up=True,  # JobSet deletes the Jobs that are active at its end, in the foreground (recording 57)
        renamed_roles=None,  # JobSet creates the pods of a restart under new names
        pod_owner="jobset.x-k8s.io/v1alpha2/jobsets",
        pod_owner_label=f"{JOBSET}/jobset-uid",  # JobSet 0.10 and newer
        # their failures to create pods do not reach the TrainJob (recording 55d)
        owners_with_events=(("JobSet", "{job}"), ("Job", "{job}-{role}-0")),
        webhooks=".trainer.kubeflow.org",
    ),
    scaling=Scaling("Kubeflow Trainer can't change the number of nodes of a TrainJob (KEP-2903 plans it)"),
)
