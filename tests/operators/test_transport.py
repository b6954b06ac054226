"""What leaves for Airflow can be encoded by Airflow's own encoder, whatever the program has printed."""

from __future__ import annotations

import json
from typing import Any

from airflow.sdk.execution_time.comms import _RequestFrame
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.text.xcom_values import transportable
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from tests.core.test_hostile_input import JSON_VALUES


def encode(value: Any) -> bytes:
    """As the processes of Airflow do between each other."""
    return bytes(_RequestFrame(id=1, body={"value": value}).as_bytes())


@given(JSON_VALUES, st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3))
def test_anything_that_a_program_reports_can_be_encoded(value: Any, fields: dict[str, Any]) -> None:
    outcome = Outcome("Succeeded", True, result=value, usage=fields, training_metrics=fields, status=fields)
    event = event_of(outcome)
    for sent in (event, transportable(fields, "ktrain_status"), Handover(training_metrics=fields).to_dict()):
        encode(sent)
        json.dumps(sent, allow_nan=False)
