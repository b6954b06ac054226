"""A Python function in every rank of an MPIJob, which computes pi with mpi4py."""

import os

import pendulum
from airflow.sdk import dag, task

IMAGE = os.environ.get("KTRAIN_MPI_IMAGE", "mpi-pi:latest")  # examples/mpi/Dockerfile: mpirun, python3, mpi4py


@dag(schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), doc_md=__doc__, tags=["ktrain"])
def ktrain_mpi_function():
    @task.mpijob(image=IMAGE, workers=2, nproc_per_node=2, namespace="default", retries=1)
    def pi(steps: int) -> dict:
        """Runs in every rank. Imports must be inside the function."""
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank, size, width = comm.Get_rank(), comm.Get_size(), 1 / steps
        mine = sum(4 / (1 + (width * (i + 0.5)) ** 2) for i in range(rank, steps, size)) * width
        print(f"rank {rank} of {size}: {mine:.6f}", flush=True)
        return {"pi": round(comm.allreduce(mine), 6), "ranks": size}

    @task
    def report(result: dict) -> str:
        return f"pi is about {result['pi']}, computed by {result['ranks']} ranks"

    report(pi(1_000_000))


ktrain_mpi_function()
