"""Which watches show a job and its pods."""

from __future__ import annotations

from typing import NamedTuple

from airflow_provider_ktrain.core.identity import DEPLOYMENT_LABEL, JobRef, label_value
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api
from airflow_provider_ktrain.engine.watch.informer import SharedInformer, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_label, by_name, by_uid


class Watched(NamedTuple):
    """What a shared informer watches: see `watch.shared_informer`."""

    path: str
    label_selector: str = ""
    field_selector: str = ""

    def informer(self, api: Api) -> SharedInformer:
        """The informer of this watch."""
        return shared_informer(api, self.path, label_selector=self.label_selector, field_selector=self.field_selector)


def watches_of(ref: JobRef, *, shared: bool) -> tuple[Watched, Watched]:
    """What to watch for a job and for its pods.

    :param shared: one watch for all jobs of the deployment, if the job has its label.
    """
    kind = kind_of(ref.kind)
    jobs, pods = api_paths.jobs(kind, ref.version, ref.namespace), api_paths.core(ref.namespace, "pods")
    if shared and ref.submission:
        selector = f"{DEPLOYMENT_LABEL}={label_value(ref.deployment)}"
        # pods that may lack our labels are selected by the operator's label, whatever its value
        return Watched(jobs, selector), Watched(pods, selector if kind.labels_pods else kind.pod_name_label)
    return Watched(jobs, field_selector=f"metadata.name={ref.name}"), Watched(pods, ref.pod_selector)


def watch_keys(ref: JobRef) -> tuple[Key, Key]:
    """Keys by which to subscribe to the job and to its pods."""
    label, _, value = ref.pod_selector.partition("=")
    return by_uid(ref.uid) if ref.uid else by_name(ref.name), by_label(label, value)
