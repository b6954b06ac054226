"""How training operators behave: those of one kind, and each of their versions; and how far jobs can be scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPERATOR_LABEL = "training.kubeflow.org"
JOB_NAME_LABEL = f"{OPERATOR_LABEL}/job-name"


@dataclass(frozen=True)
class OperatorVersion:
    """The operator that serves one API version of a kind, and how it behaves.

    :param default_restart_policy: the restartPolicy of a replica spec that sets none. Default: OnFailure.
    :param restart_policies: the values of a replica's restartPolicy with which it runs and ends a job. Default: all.
    :param run_policy: of a job that is built without a manifest. Default: cleanPodPolicy Running.
    :param ignored: fields of the run policy that it ignores at the top of `spec`, where an older operator reads them.
    :param defaults: fields of `spec` that are sent unless the manifest sets them.
    :param peer_command: the command that it sets in a container without command and args whose role doesn't run the
        program.
    :param limits_restarts: whether it limits restarts where the job sets no backoffLimit.
    :param rejects_after_creation: whether it validates a job itself, after the API server accepted it: the job then
        never starts.
    :param recreates_pods: whether it recreates deleted pods of a failed job without a completionTime, and goes on with
        one whose Workers were evicted.
    :param expires: whether it deletes the job and its pods after ttlSecondsAfterFinished.
    :param rewrite_hint: what to change in a manifest that was written for another version. Default: the apiVersion.
    """

    version: str
    name: str
    default_restart_policy: str = "OnFailure"
    restart_policies: tuple[str, ...] = ("Always", "OnFailure", "Never", "ExitCode")
    run_policy: Mapping[str, Any] = field(default_factory=lambda: {"cleanPodPolicy": "Running"}, compare=False)
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    peer_command: tuple[str, ...] = ()
    limits_restarts: bool = False
    rejects_after_creation: bool = False
    recreates_pods: bool = False
    expires: bool = False
    rewrite_hint: str = ""


@dataclass(frozen=True)
class OperatorBehavior:
    """What every version of a kind's operator does with jobs and pods.

    :param propagation: the propagationPolicy with which a job is deleted. After `Background` the name is free before
        the pods are gone.
    :param pod_name_label: the label of pods that the operator sets to the job's name.
    :param labels_pods: whether the pods certainly have the labels of the manifest that we send.
    :param reports_phases: whether the operator sets the conditions Created, Running, Restarting and Succeeded.
    :param restarts_failed_jobs: whether a failed job may train again, unless it is suspended: its condition Failed then
        vanishes.
    :param failure_deletes_peers: whether the operator deletes the pods of all replicas when one fails for good.
    :param failed_role: regular expression of the message of the condition Failed; its group is the role that failed.
    :param always_cleans_up: whether the operator deletes the running pods of every job that has ended. Default: only
        where cleanPodPolicy is Running or All.
    :param renamed_roles: roles whose pods get another name when they are replaced; None: all.
    :param launcher_job: end of the name of a batch Job that owns a pod, after the job's name. Default: empty, the job
        owns its pods.
    :param pod_owner: `group/version/plural` of the object between the job and its pods, which has the job's name; empty
        if the job owns its pods.
    :param pod_owner_label: the label of pods with the uid of that object.
    :param owners_with_events: kind and name of the objects between the job and its pods whose events show why there are
        no pods; `{job}` stands for the name of the job, and `{role}` for that of each role.
    :param waiting_container: the init container in which a pod waits for another replica. As PID 1 it ignores SIGTERM.
    :param webhooks: end of the names of the operator's own webhooks.
    """

    propagation: str = "Foreground"
    pod_name_label: str = JOB_NAME_LABEL
    labels_pods: bool = True
    reports_phases: bool = True
    restarts_failed_jobs: bool = False
    failure_deletes_peers: bool = False
    failed_role: str = r"(\w+) replica\(s\) failed"
    always_cleans_up: bool = False
    renamed_roles: tuple[str, ...] | None = ()
    launcher_job: str = ""
    pod_owner: str = ""
    pod_owner_label: str = ""
    owners_with_events: tuple[tuple[str, str], ...] = ()
    waiting_container: str = ""
    webhooks: str = ".training-operator.kubeflow.org"

    @property
    def pods_outlive_job(self) -> bool:
        """Whether a deleted job is gone before its pods are."""
        return self.propagation == "Background"

    def cleans_up_pods(self, job: Mapping[str, Any]) -> bool:
        """Whether the operator deletes the running pods of a job that has ended."""
        policy = ((job.get("spec") or {}).get("runPolicy") or {}).get("cleanPodPolicy")
        return self.always_cleans_up or policy in ("Running", "All")

    def may_create_pods_late(self, job: Mapping[str, Any]) -> bool:
        """Whether the operator may create a pod just after the job has ended, in place of one that it has lost."""
        return False

    def renames_pods(self, role: str) -> bool:
        """Whether a pod that replaces another of this role has another name."""
        return self.renamed_roles is None or role in self.renamed_roles

    def owns_pod(self, pod: Mapping[str, Any], name: str, uid: str) -> bool | None:
        """Whether a pod with the label of the job's name belongs to the job. None: its owners must be read."""
        if self.pod_owner:
            return None
        owners = pod["metadata"].get("ownerReferences") or ()
        batch_job = f"{name}{self.launcher_job}" if self.launcher_job else None
        return any(o["uid"] == uid or (o["kind"] == "Job" and o["name"] == batch_job) for o in owners)


@dataclass(frozen=True)
class Scaling:
    """Scaling of a kind whose trainings stop when a Worker is removed.

    :param fixed_size_reason: why a job can't be scaled. Default: empty, it can.
    """

    fixed_size_reason: str = ""

    def is_elastic(self, job: Mapping[str, Any]) -> bool:
        """Whether the training continues with fewer Workers."""
        return False

    def worker_bounds(self, job: Mapping[str, Any]) -> tuple[int, int | None]:
        """The least and the greatest number of Workers that the job may be scaled to; None: no upper bound."""
        return 1, None
