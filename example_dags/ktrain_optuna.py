"""A sweep by Optuna: ask for trials, train a job for each, stop bad ones early, and take the best.

A pruned trial ends with an exit code that skips its task, so that its GPUs are free at once.
"""

import json
import os
import tempfile

import pendulum
from airflow.sdk import DAG, task

from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.volumes import ClaimVolume, HostPath

TRIALS, PRUNED = 9, 99  # PRUNED: the exit code of trial.py
IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")  # with optuna
CLAIM = os.environ.get("KTRAIN_SWEEPS_CLAIM")  # a ReadWriteMany PersistentVolumeClaim
# a directory that Airflow's workers and the pods have at the same path
SWEEPS = os.environ.get("KTRAIN_SWEEPS", f"{tempfile.gettempdir()}/ktrain-sweeps")
VOLUME = ClaimVolume(CLAIM, SWEEPS) if CLAIM else HostPath(SWEEPS, SWEEPS, type="DirectoryOrCreate")
JOURNAL = f"{SWEEPS}/optuna.journal"


def study(run_id: str):
    """The study of a DAG run, which trial.py loads by the same name."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    os.makedirs(SWEEPS, exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(JOURNAL))
    sampler = optuna.samplers.RandomSampler(seed=0)  # another one would learn nothing within a batch
    return optuna.create_study(
        study_name=f"ktrain_optuna/{run_id}", storage=storage, sampler=sampler, load_if_exists=True
    )


with DAG(
    "ktrain_optuna",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    doc_md=__doc__,
    tags=["ktrain"],
):

    @task
    def ask(run_id: str) -> list[dict]:
        from optuna.distributions import FloatDistribution

        sweep = study(run_id)
        while len(sweep.trials) < TRIALS:  # a retry asks for the rest
            sweep.ask({"learning_rate": FloatDistribution(1e-4, 0.3, log=True)})
        return [{"number": trial.number, "params": trial.params} for trial in sweep.trials]

    def arguments(trial: dict) -> list[str]:
        return [json.dumps(trial)]

    trained = PyTorchJobOperator.partial(
        task_id="train",
        namespace="default",
        image=IMAGE,
        command=["python3", "trial.py"],
        env={"OPTUNA_STORAGE": JOURNAL},
        workers=1,
        volumes=[VOLUME],
        skip_on_exit_code=PRUNED,
        max_active_tis_per_dagrun=3,
    ).expand(args=ask().map(arguments))

    @task(trigger_rule="all_done")  # a trial that fails doesn't fail the sweep
    def best(run_id: str) -> dict:
        trial = study(run_id).best_trial  # raises ValueError if no trial succeeded
        return {"number": trial.number, "loss": trial.value, **trial.params}

    trained >> best()
