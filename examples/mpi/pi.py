"""Compute pi by numerical integration over all ranks. The MPIJob example runs this program."""

import json
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size, steps = comm.Get_rank(), comm.Get_size(), int(sys.argv[1])
width = 1 / steps
mine = sum(4 / (1 + (width * (i + 0.5)) ** 2) for i in range(rank, steps, size)) * width
pi = comm.allreduce(mine)
print(f"rank {rank} of {size} on {MPI.Get_processor_name()}: {mine:.6f} of {pi:.6f}", flush=True)
if rank == 0:
    print("KTRAIN_RESULT " + json.dumps({"pi": round(pi, 6), "ranks": size}), flush=True)
