"""A Python function as a distributed training, with arguments and a return value."""

import os

import pendulum
from airflow.sdk import dag, task

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")  # any image with the training's libraries


@dag(schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), doc_md=__doc__, tags=["ktrain"])
def ktrain_taskflow():
    @task.pytorchjob(image=IMAGE, workers=1, namespace="default")
    def mean_over_ranks(numbers: list[float]) -> dict:
        """Runs in every replica. Imports must be inside the function."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        share = torch.tensor(numbers[dist.get_rank() :: dist.get_world_size()])
        total = torch.tensor([share.sum(), float(len(share))])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return {"mean": (total[0] / total[1]).item(), "count": int(total[1])}

    @task
    def report(result: dict) -> str:
        return f"the mean of {result['count']} numbers is {result['mean']}"

    report(mean_over_ranks([1.0, 2.0, 3.0, 6.0]))


ktrain_taskflow()
