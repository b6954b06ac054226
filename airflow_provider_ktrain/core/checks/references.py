"""The objects of the job's namespace that a manifest names and its pods need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from airflow_provider_ktrain.core.checks.job import Field, Job

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # a DNS subdomain


@dataclass(frozen=True)
class Reference:
    """A name in a manifest.

    :param plural: the resource's path segment, in the core API group.
    :param pulls_images: whether only the pull of images needs it; the kubelet tries without it, too. Default: False.
    """

    kind: str
    plural: str
    at: Field
    pulls_images: bool = False

    @property
    def may_exist(self) -> bool:
        """Whether an object can have this name."""
        return _NAME.fullmatch(self.at.text) is not None


def references(job: Job) -> list[Reference]:
    """The objects without which the job's pods don't start, each once. What the manifest marks as optional is left out.

    Of a TrainJob only those that the manifest itself names, and not those of its runtime.
    """
    found: dict[tuple[str, str], Reference] = {}
    for reference in _of_job(job):
        if reference.at.text:
            found.setdefault((reference.plural, reference.at.text), reference)
    return list(found.values())


def _of_job(job: Job) -> Iterator[Reference]:
    pods = [template["spec"] for template in job.pod_templates]
    for pod in pods:
        yield Reference("ServiceAccount", "serviceaccounts", pod["serviceAccountName"])
        for volume in pod["volumes"]:
            claim = volume["persistentVolumeClaim"]["claimName"]
            yield Reference("PersistentVolumeClaim", "persistentvolumeclaims", claim)
            yield from _required(volume["secret"], "secret", "secretName")
            for source in (volume, *volume["projected"]["sources"]):
                yield from _required(source["configMap"], "configMap")
            for source in volume["projected"]["sources"]:
                yield from _required(source["secret"], "secret")
    initializers = [job.spec["initializer"][name] for name in ("dataset", "model")]
    for initializer in initializers:
        yield from _required(initializer["secretRef"], "secret")
    of_pods = (container for pod in pods for key in ("initContainers", "containers") for container in pod[key])
    for container in (*of_pods, *(c for _, c in job.containers if job.kind.runtimes), *initializers):
        for source in (*container["envFrom"], *(env["valueFrom"] for env in container["env"])):
            for key in ("secretRef", "secretKeyRef", "configMapRef", "configMapKeyRef"):
                yield from _required(source[key], key.removesuffix("Ref").removesuffix("Key"))
    for secret in (secret for pod in pods for secret in pod["imagePullSecrets"]):
        yield Reference("Secret", "secrets", secret["name"], pulls_images=True)


def _required(source: Field, kind: str, name: str = "name") -> Iterator[Reference]:
    """The Secret or ConfigMap of a source, unless it is optional."""
    if source["optional"].value is not True:
        yield Reference(kind[0].upper() + kind[1:], f"{kind.lower()}s", source[name])
