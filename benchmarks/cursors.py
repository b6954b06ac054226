"""The size of the log positions in a trigger's arguments, by the number of containers.

    python benchmarks/cursors.py

Each container has logged for an hour, at its own rate, with the kubelet's timestamps in nanoseconds. Prints a table.
"""

from __future__ import annotations

import datetime
import json
import random
import time

from harness import machine, table

from airflow_provider_ktrain.core.logs.cursor import MAX_SIZE, Cursor

SIZES = (1, 16, 100, 1000, 2000, 4000)
#: How many of the last lines of each container, in an hour, are kept: a position depends only on the latest lines.
LINES = 20


def cursor_of(containers: int) -> Cursor:
    rng, cursor = random.Random(containers), Cursor()
    for number in range(containers):
        uid = f"{rng.getrandbits(128):032x}"
        position = cursor.position(uid, "pytorch")
        cursor.names[Cursor.key(uid, "pytorch")] = f"train-worker-{number}/pytorch"
        moment = 3600 - rng.expovariate(1 / 5)
        for _ in range(LINES):
            moment += rng.expovariate(4)
            minutes, seconds = divmod(moment, 60)
            position.advance(f"2026-11-22T{10 + int(minutes) // 60}:{int(minutes) % 60:02}:{seconds:012.9f}Z")
    return cursor


def main() -> None:
    rows = []
    for size in SIZES:
        cursor = cursor_of(size)
        began = time.process_time()
        packed = cursor.to_dict()
        milliseconds = 1000 * (time.process_time() - began)
        exact = len(Cursor.from_dict(packed).positions)
        rows.append([size, len(json.dumps(packed)), MAX_SIZE, exact, packed.get("omitted", 0), milliseconds])
    print(f"{datetime.date.today()}, {machine()}\n")
    print(
        table(["containers", "bytes", "limit", "exact positions", "read again from one time", "CPU ms to pack"], rows)
    )


if __name__ == "__main__":
    main()
