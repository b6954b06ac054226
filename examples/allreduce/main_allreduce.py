"""A substitute for the practitioner's main_allreduce.py: the same arguments, and an all-reduce over plain TCP.

Sixteen ranks run on a laptop. The program checks that every rank finds the Master by the variables that
training-operator or torchrun sets, and that the sum over all ranks is correct in every iteration.
"""

import argparse
import os
import socket
import struct
import time

VALUE = struct.Struct("!d")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-a", "--arch", default="resnet50")
    parser.add_argument("-j", "--workers", type=int, default=4, help="number of data loading processes; ignored")
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="images of all ranks in total")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--iter", type=int, default=100)
    parser.add_argument("--bucket", type=int, default=200, help="iterations between two log lines")
    return parser.parse_args()


def receive(peer):
    data = b""
    while len(data) < VALUE.size:
        if not (more := peer.recv(VALUE.size - len(data))):
            raise SystemExit("lost the connection to a rank")
        data += more
    return VALUE.unpack(data)[0]


def connect(address, patience=60.0):
    """Connect to the Master, which may still be starting."""
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(address)
        except OSError as e:
            if time.monotonic() > end:
                raise SystemExit(f"no Master at {address[0]}:{address[1]} after {patience:.0f} s: {e}") from e
            time.sleep(0.05)


def main():
    args = arguments()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens on the port
        port += 1
    address = os.environ["MASTER_ADDR"], port
    if rank == 0:
        with socket.create_server(address, backlog=size) as server:
            peers = [server.accept()[0] for _ in range(size - 1)]
    else:
        peers = [connect(address)]
    for peer in peers:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(f"rank {rank} of {size}: {args.arch}, {args.batch_size // size} images a batch", flush=True)

    def all_reduce(value):
        if rank:
            peers[0].sendall(VALUE.pack(value))
            return receive(peers[0])
        total = value + sum(receive(peer) for peer in peers)
        for peer in peers:
            peer.sendall(VALUE.pack(total))
        return total

    for epoch in range(args.epochs):
        for i in range(1, args.iter + 1):
            total = all_reduce(float(rank + i))
            if total != (expected := size * (size - 1) / 2 + size * i):
                raise SystemExit(f"all-reduce gave {total}, expected {expected}")
            if rank == 0 and i % args.bucket == 0:
                print(f"epoch {epoch} iteration {i}: the sum over {size} ranks is right", flush=True)
    print(f"rank {rank} of {size}: done", flush=True)


if __name__ == "__main__":
    main()
