"""A substitute for Horovod's example of this name: elastic training, averaged over all workers.

It fits a line instead of MNIST. The state is committed after each batch, and a worker that joins starts from there.
ELASTIC_SIZES (`2 3 1`): train until these numbers of workers have run, in this order, for some batches each. A number
is left out if a later one runs before it.
"""

import json
import os
import random
import socket
import time

BATCHES, PAUSE, RATE = 20, 0.05, 0.1  # batches per size; seconds between batches; learning rate


def main():
    host, _, port = os.environ["STAND_IN_ADDRESS"].rpartition(":")
    sizes = [int(n) for n in os.environ.get("ELASTIC_SIZES", "").split()]
    driver = socket.create_connection((host, int(port))).makefile("rw")

    def exchange(**report):
        driver.write(json.dumps(report) + "\n")
        driver.flush()
        if not (line := driver.readline()):
            raise SystemExit("the launcher closed the connection to this worker")
        return json.loads(line)

    answer = exchange(slot=os.environ["STAND_IN_SLOT"])
    while True:
        if "rank" in answer:  # a new round
            rank, size = answer["rank"], answer["size"]
            state = answer["state"] or {"batch": 0, "weights": [0.0, 0.0], "sizes": sizes, "left": BATCHES}
            if size in state["sizes"][1:] and size != state["sizes"][0]:
                state["sizes"], state["left"] = state["sizes"][state["sizes"].index(size) :], BATCHES
            print(f"rank {rank} of {size}: from batch {state['batch']}", flush=True)
        else:
            step = [RATE * g / answer["size"] for g in answer["sum"]]
            state["weights"] = [w - s for w, s in zip(state["weights"], step, strict=True)]
            state["batch"] += 1
            if not state["sizes"] or state["sizes"][0] == size:
                state["left"] -= 1
            if state["batch"] % BATCHES == 0 and rank == 0:
                print(f"batch {state['batch']} on {size}: y = {state['weights'][0]:.2f} x + {state['weights'][1]:.2f}",
                      flush=True)  # fmt: skip
            if not state["left"]:
                state["sizes"], state["left"] = state["sizes"][1:], BATCHES
                if not state["sizes"]:
                    break
        time.sleep(PAUSE)
        x = [random.uniform(-1, 1) for _ in range(64)]
        errors = [state["weights"][0] * v + state["weights"][1] - (3 * v + 1) for v in x]
        gradient = [2 * sum(e * v for e, v in zip(errors, x, strict=True)) / 64, 2 * sum(errors) / 64]
        answer = exchange(gradient=gradient, state=state)
    if rank == 0:
        print(f"trained: y = {state['weights'][0]:.2f} x + {state['weights'][1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
