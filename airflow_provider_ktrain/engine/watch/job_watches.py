"""Which watches show a job and its pods."""

from __future__ import annotations

from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, JobRef, label_value
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.watch.informer import SharedInformer, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_label, by_name, by_uid


def watches_of(api: Api, ref: JobRef, *, shared: bool) -> list[tuple[SharedInformer, Key]]:
    """The watches of a job and of its pods, each with the key by which to subscribe.

    :param shared: use one watch for all jobs of the deployment, if the job has its label.
    """
    kind = kind_of(ref.kind)
    jobs, pods = api_paths.jobs(kind, ref.version, ref.namespace), api_paths.core(ref.namespace, "pods")
    selector, of_pods, field_selector = "", ref.pod_selector, f"metadata.name={ref.name}"
    if shared and ref.submission:
        selector, field_selector = f"{DEPLOYMENT_LABEL}={label_value(ref.deployment)}", ""
        # pods that may lack our labels are selected by the operator's label, whatever its value
        of_pods = selector if kind.behavior.labels_pods else kind.behavior.pod_name_label
    label, _, value = ref.pod_selector.partition("=")
    job = shared_informer(api, jobs, label_selector=selector, field_selector=field_selector)
    return [
        (job, by_uid(ref.uid) if ref.uid else by_name(ref.name)),
        (shared_informer(api, pods, label_selector=of_pods), by_label(label, value)),
    ]
