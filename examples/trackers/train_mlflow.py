"""Fit a line by gradient descent and report it to MLflow: a run that is named after the Airflow task and links to it.

Rank 0 reports. MLFLOW_TRACKING_URI is the tracking server, AIRFLOW_TASK_URL the task in Airflow's UI. Without the
provider's variables, for example on your own machine, the run has MLflow's own name.
"""

import argparse
import json
import os

import mlflow

VARIABLES = ("DAG_ID", "RUN_ID", "TASK_ID", "MAP_INDEX", "TRY", "ATTEMPT")


def start_run():
    """One run for each job: a retry that submits a new job starts a new run with the same name."""
    task = {name: os.environ[f"KTRAIN_{name}"] for name in VARIABLES if f"KTRAIN_{name}" in os.environ}
    mlflow.set_experiment(task.get("DAG_ID", "without-airflow"))
    url = os.environ.get("AIRFLOW_TASK_URL")
    return mlflow.start_run(
        run_name=f"{task['TASK_ID']} {task['RUN_ID']}" if "RUN_ID" in task else None,
        tags={f"airflow.{name.lower()}": value for name, value in task.items()},
        description=f"[Task in Airflow]({url})" if url else None,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fail-at-step", type=int, help="exit 1 after this step, on the first attempt only")
    args = parser.parse_args()

    if os.environ.get("RANK", "0") != "0":
        return
    points = [(x / 10, 3 * x / 10 + 1) for x in range(20)]
    slope = intercept = 0.0
    with start_run() as run:
        mlflow.log_params({"steps": args.steps, "learning_rate": 0.2})
        for step in range(1, args.steps + 1):
            errors = [(x, slope * x + intercept - y) for x, y in points]
            slope -= 0.2 * sum(error * x for x, error in errors) / len(points)
            intercept -= 0.2 * sum(error for _, error in errors) / len(points)
            loss = sum(error * error for _, error in errors) / len(points)
            mlflow.log_metric("loss", loss, step=step)
            print("KTRAIN_METRIC", json.dumps({"step": step, "loss": loss}), flush=True)
            if step == args.fail_at_step and os.environ.get("KTRAIN_ATTEMPT", "1") == "1":
                raise SystemExit(f"fails after step {step}, as requested")
    server = mlflow.get_tracking_uri().rstrip("/")
    url = f"{server}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    print("KTRAIN_RESULT", json.dumps({"loss": loss, "mlflow_run": url}), flush=True)


if __name__ == "__main__":
    main()
