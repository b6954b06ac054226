"""`make test-gpu`: run the NCCL job of the first guide with as many ranks as this machine has GPUs.

It runs `ktrain run --local` on the manifest of the guide, with the number of Workers changed, and checks that all ranks
took part and that the network learned something.
"""

import argparse
import pathlib
import re
import subprocess
import sys
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ktrain_embedded import devices  # noqa: E402

MANIFEST = ROOT / "example_dags" / "manifests" / "pytorch_job_mnist_nccl.yaml"
IMAGE, DIRECTORY = "pytorch-mnist", ROOT / "examples" / "mnist"
TIMEOUT = "15m"
ACCURACY = 0.5  # guessing reaches 0.1


def manifest(ranks: int, backend: str) -> dict[str, Any]:
    """The manifest of the guide, with one Master and the other ranks as Workers."""
    job: dict[str, Any] = yaml.safe_load(MANIFEST.read_text().replace("{{ params.image }}", IMAGE))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    for replica in replicas.values():
        replica["template"]["spec"]["containers"][0]["args"] = ["--backend", backend]
    replicas["Worker"]["replicas"] = ranks - 1
    if ranks == 1:
        del replicas["Worker"]
    return job


def problems(output: str, ranks: int, backend: str) -> list[str]:
    """What is missing in the output of a successful run."""
    took_part = {int(rank) for rank in re.findall(rf"rank (\d+) of {ranks}\b", output)}
    missing = sorted(set(range(ranks)) - took_part)
    found = [f"rank {rank} did not take part" for rank in missing]
    if backend == "nccl" and "Using CUDA" not in output:
        found.append("the program did not use CUDA: PyTorch sees no GPU")
    best = max((float(value) for value in re.findall(r"accuracy=([\d.]+)", output)), default=0.0)
    if best < ACCURACY:
        found.append(f"the accuracy is {best}, expected at least {ACCURACY}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nccl", help="gloo runs the same ranks on the CPU (default: nccl)")
    backend = parser.parse_args().backend
    ranks = len(devices())
    if not ranks:
        sys.exit("nvidia-smi lists no GPUs: `make test-gpu` needs a machine with NVIDIA GPUs and their driver")
    print(f"{ranks} GPUs: running {MANIFEST.name} with {ranks} ranks and {backend}", flush=True)
    command = [sys.executable, "-m", "airflow_provider_ktrain.cli", "run", "--local", "-"]
    command += ["--image", f"{IMAGE}={DIRECTORY}", "--timeout", TIMEOUT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.write(yaml.safe_dump(manifest(ranks, backend)))
        run.stdin.close()
        lines = []
        for line in run.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    found = [f"ktrain run ended with status {run.returncode}"] if run.returncode else []
    found += problems("".join(lines), ranks, backend)
    if found:
        sys.exit("failed: " + "; ".join(found))
    print(f"passed: {ranks} ranks with {backend}")


if __name__ == "__main__":
    main()
