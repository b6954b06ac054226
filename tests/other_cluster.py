"""Runs pytest as on a real cluster: `python -m tests.other_cluster [arguments of pytest]`.

The cluster is an embedded one in another process, reached by KTRAIN_TEST_KUBECONFIG alone. KUBECONFIG leads to it, too,
as for someone who works with it: what a test submits there would be in another namespace. It differs from the one that
tests start: its namespace, a client certificate instead of a token, its GPUs, Kueue, and no Trainer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from ktrain_embedded import EmbeddedCluster

IMAGE = "registry.example/train:1"
DIFFERENT: dict[str, Any] = {
    "namespace": "team-a", "client_certificate": True, "gpus_per_node": 40, "kueue": True, "trainer": False,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments; returns its exit code."""
    with EmbeddedCluster(images={IMAGE: None}, **DIFFERENT) as cluster:
        path = str(cluster.kubeconfig)
        reached = {"KTRAIN_TEST_KUBECONFIG": path, "KTRAIN_TEST_IMAGE": IMAGE, "KUBECONFIG": path}
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], env={**os.environ, **reached}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
