"""The stand-in for horovodrun treats removed hosts as the real one does, and prints the same lines about ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

IMAGE = Path(__file__).resolve().parents[1] / "examples" / "horovod"
PROGRAM = IMAGE / "examples" / "elastic" / "tensorflow2_mnist_elastic.py"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def train(tmp_path: Path, sizes: str, *options: str) -> list[int]:
    """Train on two hosts, of which the second is removed and comes back. Returns the numbers of ranks in order."""
    both, first = script(tmp_path / "both", "echo a:1; echo b:1"), script(tmp_path / "first", "echo a:1")
    discover = tmp_path / "discover"
    discover.symlink_to(both)
    agent = script(tmp_path / "agent", '[ "$1" = b ] || sleep 1; shift; eval "exec $*"')  # the first host starts last
    launcher = subprocess.Popen(
        [
            sys.executable, str(IMAGE / "usr/local/bin/horovodrun"), "-np", "2", "--min-np", "1", "--max-np", "2",
            *options, "--host-discovery-script", str(discover), sys.executable, str(PROGRAM),
        ],
        env={**os.environ, "OMPI_MCA_plm_rsh_agent": str(agent), "ELASTIC_SIZES": sizes},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    end = threading.Timer(120.0, os.killpg, (launcher.pid, signal.SIGKILL))
    end.start()
    found: list[int] = []
    alone = 0
    with launcher:
        assert launcher.stdout
        for line in launcher.stdout:
            if match := re.match(r"\[\d+\]<stdout>:rank 0 of (\d): from batch", line):
                found.append(int(match[1]))
            alone += "]<stdout>:batch" in line and " on 1:" in line
            if (line.startswith("[0]<stdout>:batch 20 on 2") and not alone) or alone == 2:  # 20 batches of this size
                (tmp_path / "next").symlink_to(both if alone else first)
                (tmp_path / "next").rename(discover)
    end.cancel()
    assert launcher.returncode == 0
    return found


@pytest.mark.parametrize(
    ("options", "sizes", "ranks"),
    [((), "3 2 1 1 1 1", [2, 1]), (("--blacklist-cooldown-range", "0", "1"), "2 1 2", [2, 1, 2])],
    ids=["removed for good", "removed for a while"],
)
def test_removed_hosts_are_blacklisted(tmp_path: Path, options: tuple[str, ...], sizes: str, ranks: list[int]) -> None:
    assert train(tmp_path, sizes, *options) == ranks
