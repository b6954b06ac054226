"""Trains one trial of a sweep by Optuna, and ends it early if the pruner says so: `trial.py '{"number": 3, ...}'`.

`example_dags/ktrain_optuna.py` has asked for the trial; this program continues it, also in a retry. Rank 0 reports to
OPTUNA_STORAGE and decides, and all ranks stop.
"""

import argparse
import datetime
import json
import os
import sys

import optuna
import torch
import torch.distributed as dist
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train import BATCH, data, mean_loss, network, say

PRUNED = 99  # the exit code that skip_on_exit_code names
EPOCHS = 4


def load_study():
    storage = os.environ["OPTUNA_STORAGE"]  # the URL of a database, or the path of a journal file
    if "://" not in storage:
        storage = optuna.storages.JournalStorage(JournalFileBackend(storage))
    name = f"{os.environ['KTRAIN_DAG_ID']}/{os.environ['KTRAIN_RUN_ID']}"
    return optuna.load_study(study_name=name, storage=storage, pruner=optuna.pruners.MedianPruner(n_startup_trials=3))


def print_result(number, params, loss):
    print("KTRAIN_RESULT " + json.dumps({"number": number, "params": params, "loss": round(loss, 5)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trial", type=json.loads)
    asked = parser.parse_args().trial
    number, params = asked["number"], asked["params"]

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        study = load_study()
        found = study.trials[number]
        if found.state is TrialState.PRUNED:  # by an earlier job of this task
            sys.exit(PRUNED)
        if found.state is TrialState.COMPLETE:
            return print_result(number, params, found.value)
        trial = optuna.trial.Trial(study, found._trial_id)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=params["learning_rate"])
    x, y = data(dist.get_rank(), dist.get_world_size())
    for epoch in range(1, EPOCHS + 1):
        for i in range(0, len(x), BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[i : i + BATCH]), y[i : i + BATCH]).backward()
            optimizer.step()
        loss = mean_loss(model, x, y)
        say(f"epoch {epoch} loss {loss:.4f}")
        stops = torch.zeros(1)
        if is_first:
            trial.report(loss, epoch)
            stops[0] = float(trial.should_prune())
        dist.broadcast(stops, 0)
        if stops.item():
            break
    dist.barrier()
    dist.destroy_process_group()
    if not is_first:
        return None
    if stops.item():
        study.tell(number, state=TrialState.PRUNED)
        sys.exit(PRUNED)
    study.tell(number, loss)
    return print_result(number, params, loss)


if __name__ == "__main__":
    main()
