"""A substitute for Kubeflow's mnist.py: the same arguments, network and log lines, without a download.

The digits are generated from a font of 5 x 7 dots, which are shifted and get noise.
"""

import argparse
import datetime
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

FONT = """
01110 00100 01110 11110 00010 11111 00110 11111 01110 01110
10001 01100 10001 00001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00010 01110 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 00001 00010 10001 10001 01000 10001 00010
01110 01110 11111 11110 00010 01110 01110 01000 01110 01100
"""
SIDE = 12


def digits(count, seed):
    """Images of SIDE x SIDE and their labels."""
    rows = [row.split() for row in FONT.split("\n") if row]
    font = torch.tensor([[[float(dot) for dot in row[digit]] for row in rows] for digit in range(10)])
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    pictures = 0.3 * torch.rand(count, 1, SIDE, SIDE, generator=generator)
    for picture, label in zip(pictures, labels, strict=True):
        top, left = (int(torch.randint(n, (1,), generator=generator)) for n in (SIDE - 7, SIDE - 5))
        picture[0, top : top + 7, left : left + 5] += font[label]
    return pictures, labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def train(args, model, device, data, optimizer, epoch):
    model.train()
    pictures, labels = data
    for batch, start in enumerate(range(0, len(pictures), args.batch_size)):
        x, y = (t[start : start + args.batch_size].to(device) for t in (pictures, labels))
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            done = f"{start}/{len(pictures)} ({100 * start / len(pictures):.0f}%)"
            print(f"Train Epoch: {epoch} [{done}]\tloss={loss.item():.4f}", flush=True)


def test(args, model, device, data):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in zip(*(t.split(args.test_batch_size) for t in data), strict=True):
            right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
    print(f"\naccuracy={right / len(data[0]):.4f}\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl", "mpi"])
    args = parser.parse_args()

    use_cuda = not args.no_cuda and torch.cuda.is_available()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = torch.device("cuda" if use_cuda else "cpu")
    print("Using CUDA" if use_cuda else "Using the CPU")
    print(f"Using distributed PyTorch with {args.backend} backend", flush=True)
    dist.init_process_group(args.backend, timeout=datetime.timedelta(minutes=5))
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size}, master {os.environ['MASTER_ADDR']}", flush=True)

    pictures, labels = digits(2048, seed=args.seed)
    model = DistributedDataParallel(Net().to(device))
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, (pictures[rank::size], labels[rank::size]), optimizer, epoch)
        test(args, model, device, digits(500, seed=args.seed + 1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
