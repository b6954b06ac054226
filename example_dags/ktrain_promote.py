"""Compare an evaluated model with the promoted one, and promote it if it is as good and a person approves it.

The request is in Airflow's UI under "Required Actions".
"""

import pendulum
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Asset, task
from airflow.sdk.exceptions import AirflowSkipException

evaluation = Asset("ktrain_example_evaluation")  # of ktrain_evaluate.py
promoted = Asset("ktrain_example_promoted_model")

with DAG(
    "ktrain_promote",
    schedule=[evaluation],
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    max_active_runs=1,  # the next model is compared after this one has been approved or rejected
    doc_md=__doc__,
    tags=["ktrain"],
):

    @task(inlets=[promoted])
    def compare(triggering_asset_events: dict, inlet_events: dict) -> dict:
        """The event's extra is what the evaluation returned."""
        extra = triggering_asset_events[evaluation][-1].extra
        new = {"model_uri": extra["model_uri"], "loss": extra["result"]["loss"]}
        earlier = inlet_events[promoted]
        if not earlier:
            return {**new, "summary": f"Loss: {new['loss']}. No model has been promoted yet."}
        last = earlier[-1].extra["loss"]
        summary = f"Loss: {new['loss']}. Loss of the promoted model: {last}."
        if new["loss"] > last:
            raise AirflowSkipException(summary)
        return {**new, "summary": summary}

    approve = ApprovalOperator(
        task_id="approve",
        subject="Promote {{ ti.xcom_pull(task_ids='compare')['model_uri'] }}?",
        body="{{ ti.xcom_pull(task_ids='compare')['summary'] }}",
    )

    @task(outlets=[promoted])
    def promote(new: dict, outlet_events: dict) -> None:
        """Replace this by what makes the model the one that is served."""
        outlet_events[promoted].extra = {"model_uri": new["model_uri"], "loss": new["loss"]}

    compared = compare()
    compared >> approve >> promote(compared)
