"""Elastic training with Horovod and PyTorch. It has the name of the program in the guide's manifest.

It fits a line instead of MNIST. The state is committed after each batch, and a rank that joins starts from there.
ELASTIC_SIZES (`2 3 1`): train until these numbers of ranks have run, in this order, for some batches each. A number is
left out if a later one runs before it.
"""

import os
import time

import horovod.torch as hvd
import torch

BATCHES, PAUSE, RATE = 20, 0.05, 0.1  # batches per size; seconds between batches; learning rate


@hvd.elastic.run
def train(state):
    size = hvd.size()
    if size in state.sizes[1:] and size != state.sizes[0]:
        state.sizes, state.left = state.sizes[state.sizes.index(size) :], BATCHES
    print(f"rank {hvd.rank()} of {size}: from batch {state.batch}", flush=True)
    while state.left:
        x = torch.rand(64, 1) * 2 - 1
        state.optimizer.zero_grad()
        torch.nn.functional.mse_loss(state.model(x), 3 * x + 1).backward()
        state.optimizer.step()
        state.batch += 1
        if not state.sizes or state.sizes[0] == size:
            state.left -= 1
        if not state.left and len(state.sizes) > 1:
            state.sizes, state.left = state.sizes[1:], BATCHES
        if state.batch % BATCHES == 0 and hvd.rank() == 0:
            print(f"batch {state.batch} on {size}: {line(state.model)}", flush=True)
        time.sleep(PAUSE)
        if state.left:
            state.commit()


def line(model):
    return f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}"


def main():
    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sizes = [int(n) for n in os.environ.get("ELASTIC_SIZES", "").split()]
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, sizes=sizes, left=BATCHES)
    train(state)
    if hvd.rank() == 0:
        print(f"trained: {line(model)}", flush=True)


if __name__ == "__main__":
    main()
