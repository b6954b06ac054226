"""Lineage of a training for Airflow's OpenLineage provider.

Only that provider calls these functions. They import its packages themselves, because it may not be installed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain import __version__
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.reporting import lineage as facts
from airflow_provider_ktrain.core.text.output import masked
from airflow_provider_ktrain.engine.follow.outcome import Outcome

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.facet_v2 import RunFacet

FACET = "ktrain_training"  #: Key of the run facet: `prefix_name`, as OpenLineage's rules for custom facets require.
#: Identifies this release, whose source distribution contains the schema.
PRODUCER = f"https://pypi.org/project/airflow-provider-ktrain/{__version__}/"
SCHEMA_URL = f"{PRODUCER}#/$defs/KtrainTrainingRunFacet"


def at_end(
    requested: Mapping[str, Any], job: Mapping[str, str], outcome: Outcome | None, *, declares_datasets: bool
) -> OperatorLineage:
    """The lineage of a try that has ended.

    :param job: the XCom `job`, if this process has pushed it, else empty.
    :param outcome: of the training; None if the task failed without one.
    :param declares_datasets: whether the task has inlets or outlets. The OpenLineage provider takes its datasets from
        them, but only if an operator returns none.
    """
    ended = {} if outcome is None else outcome.to_dict()
    found = facts.of_outcome(ended, job)
    found = {**requested, **found, "job": {**requested["job"], **found.get("job", {})}}
    if outcome is None or not outcome.succeeded or declares_datasets:
        return lineage(found)
    return lineage(found, facts.dataset(mapping(outcome.result).get("model_uri")))


def lineage(found: Mapping[str, Any], output: tuple[str, str] | None = None) -> OperatorLineage:
    """The lineage with these fields of the facet, without secrets.

    The provider masks an event too, but only secrets that this process knew when it loaded the provider.

    :param found: fields of the facet: at the start, what the task's parameters request.
    :param output: namespace and name of the dataset that the training wrote. Default: None, not known.
    """
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import OutputDataset

    facet = _facet_class()(producer=PRODUCER, **masked(dict(found)))
    namespace, name = masked(output or ("", ""))
    outputs = [OutputDataset(namespace=namespace, name=name)] if output else []
    return OperatorLineage(run_facets={FACET: facet}, outputs=outputs)


@functools.cache
def _facet_class() -> type[RunFacet]:
    """The class of the facet. It is made when it is needed, because its base is OpenLineage's."""
    from attrs import define
    from openlineage.client.facet_v2 import RunFacet

    @define
    class KtrainTrainingRunFacet(RunFacet):
        """See docs/reference/openlineage/KtrainTrainingRunFacet.json. A value of None isn't sent."""

        job: dict[str, str]
        replicas: dict[str, int] | None = None
        images: dict[str, str] | None = None
        gpus: int | None = None
        codeHash: str | None = None
        phase: str | None = None
        gpuSeconds: dict[str, float] | None = None
        resource: str | None = None
        otherAccelerators: dict[str, dict[str, Any]] | None = None
        unknownClaims: int | None = None
        cause: dict[str, Any] | None = None

        @staticmethod
        def _get_schema() -> str:
            return SCHEMA_URL

    return KtrainTrainingRunFacet
