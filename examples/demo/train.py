"""Distributed data parallel training on generated data. The replicas of the demo run this program.

It reads the variables that training-operator sets (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE), resumes from
KTRAIN_CHECKPOINT_DIR if that is set, and prints its result as one line that starts with `KTRAIN_RESULT `.
"""

import argparse
import datetime
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, FEATURES, BATCH = 2048, 16, 64


def say(text):
    print(f"rank {dist.get_rank()}/{dist.get_world_size()}: {text}", flush=True)


def network():
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))


def data(rank, world_size, seed=7):
    """This rank's share of samples of a known function with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.01 * torch.randn(SAMPLES, 1, generator=generator)
    return x[rank::world_size], y[rank::world_size]


def check_all_reduce():
    """Compare the sum of (rank + 1) over all ranks with the known value, to check the communication between ranks."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if total.item() != expected:
        raise SystemExit(f"all-reduce gave {total.item()}, expected {expected}")
    say(f"all-reduce over {dist.get_world_size()} ranks is right: {total.item():.0f}")


def mean_loss(model, x, y):
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epoch-seconds", type=float, default=0.0, help="make an epoch take at least this long")
    parser.add_argument("--fail-at-epoch", type=int, help="exit 1 in this epoch, on the first attempt only")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(args.backend, timeout=datetime.timedelta(minutes=5))
    rank = dist.get_rank()
    say(f"MASTER_ADDR={os.environ['MASTER_ADDR']} WORLD_SIZE={os.environ['WORLD_SIZE']} RANK={os.environ['RANK']}")
    check_all_reduce()

    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = data(rank, dist.get_world_size())

    checkpoint = None
    if directory := os.environ.get("KTRAIN_CHECKPOINT_DIR"):
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        checkpoint = pathlib.Path(directory) / "last.pt"
    begin = 0
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]
        say(f"resumed after epoch {begin} from {checkpoint}")
    dist.barrier()

    first = mean_loss(model, x, y)
    say(f"initial loss {first:.4f}")
    for epoch in range(begin + 1, args.epochs + 1):
        started = time.monotonic()
        if epoch == args.fail_at_epoch and os.environ.get("KTRAIN_ATTEMPT", "1") == "1":
            raise SystemExit(f"fails in epoch {epoch}, as requested")
        for i in range(0, len(x), BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[i : i + BATCH]), y[i : i + BATCH]).backward()
            optimizer.step()
        loss = mean_loss(model, x, y)
        if checkpoint and rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(saved, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        time.sleep(max(0.0, args.epoch_seconds - (time.monotonic() - started)))
        say(f"epoch {epoch} loss {loss:.4f}")
    last = mean_loss(model, x, y)
    if args.epochs > begin and not last < first:
        raise SystemExit(f"the loss did not fall: {first} to {last}")
    if rank == 0:
        result = {"loss": round(last, 5), "first_loss": round(first, 5), "epochs": args.epochs, "resumed_from": begin}
        if checkpoint:
            result["model_uri"] = checkpoint.absolute().as_uri()
        print("KTRAIN_RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
