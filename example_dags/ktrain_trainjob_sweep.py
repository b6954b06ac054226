"""A sweep over learning rates: a function as a TrainJob, mapped to one job for each rate, then the best result."""

import os

import pendulum
from airflow.sdk import dag, task

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")  # any image with torch


@dag(schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), doc_md=__doc__, tags=["ktrain"])
def ktrain_trainjob_sweep():
    @task.trainjob(image=IMAGE, nodes=2, nproc_per_node=1, namespace="default", max_active_tis_per_dagrun=2)
    def train(learning_rate: float, epochs: int) -> dict:
        """Runs under torchrun on every node. Imports must be inside the function."""
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        x = torch.randn(256, 1)
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        for _ in range(epochs):
            loss = torch.nn.functional.mse_loss(model(x), 3 * x + 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.destroy_process_group()
        return {"learning_rate": learning_rate, "loss": loss.item()}

    @task
    def best(results: list[dict]) -> dict:
        return min(results, key=lambda result: result["loss"])

    best(train.partial(epochs=20).expand(learning_rate=[0.0001, 0.1]))


ktrain_trainjob_sweep()
