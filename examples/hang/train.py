"""A training in which one rank stops in its data loader, and all others wait for it in a collective operation.

ktrain run --local --code examples/hang --workers 3 --timeout 60s -- torchrun --nproc-per-node 2 train.py
"""

import time

import torch
import torch.distributed as dist

STUCK_RANK, STUCK_STEP = 2, 5  # of two ranks, the last one


def load_batch(rank, step):
    """The next batch. On one rank, the storage never answers."""
    while rank == min(STUCK_RANK, dist.get_world_size() - 1) and step == STUCK_STEP:
        time.sleep(1)
    return torch.full((1,), float(step))


def train(rank):
    """Train for ever."""
    step = 0
    while True:
        step += 1
        batch = load_batch(rank, step)
        dist.all_reduce(batch)
        if rank == 0:
            print(f'KTRAIN_METRIC {{"step": {step}, "loss": {1 / step:.3f}}}', flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
