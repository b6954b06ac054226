"""The embedded cluster's controllers: the Kubernetes controllers that jobs need, JobSet, and Kubeflow's operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from ktrain_embedded.controllers.batchjob import JobController
from ktrain_embedded.controllers.budgets import DisruptionController
from ktrain_embedded.controllers.claims import ClaimController
from ktrain_embedded.controllers.gc import GarbageCollector
from ktrain_embedded.controllers.jobset import JobSetController
from ktrain_embedded.controllers.mpijob_v1 import MPIJobV1Controller
from ktrain_embedded.controllers.mpijob_v2beta1 import MPIJobV2Controller
from ktrain_embedded.controllers.namespace import NamespaceController
from ktrain_embedded.controllers.nodes import NodeController, NodeTimes, PodGarbageCollector, TaintController
from ktrain_embedded.controllers.pytorchjob import PyTorchJobController
from ktrain_embedded.controllers.trainjob import TrainJobController
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Store


def all_controllers(
    store: Store,
    served: tuple[Resource, ...],
    volumes: Path,
    root_ca: str = "",
    status_ca: str = "",
    times: NodeTimes | None = None,
) -> list[Callable[[], Awaitable[None]]]:
    """The main loops of all controllers of a cluster.

    :param served: the resource types of the cluster.
    :param volumes: the directory of PersistentVolumes.
    :param root_ca: the CA of the API server as PEM, for the ConfigMap kube-root-ca.crt of each namespace.
    :param status_ca: the CA of the Trainer's status server as PEM; "" if the feature gate TrainJobStatus is off.
    :param times: when pods of failed nodes are deleted; None for the times of a real cluster.
    """
    times = times or NodeTimes()
    train_jobs = TrainJobController(store, status_ca=status_ca)
    return [
        PyTorchJobController(store).run,
        (MPIJobV1Controller(store) if r.MPIJOB_V1 in served else MPIJobV2Controller(store)).run,
        *([train_jobs.run, JobSetController(store).run] if r.TRAINJOB in served else []),
        JobController(store).run,
        ClaimController(store, volumes).run,
        NamespaceController(store, served, root_ca).run,
        GarbageCollector(store, served).run,
        DisruptionController(store).run,
        NodeController(store).run,
        TaintController(store, times).run,
        PodGarbageCollector(store, times).run,
    ]
