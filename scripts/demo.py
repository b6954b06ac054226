"""The demo: start an embedded cluster, run a distributed training as an Airflow task, release its GPUs.

KIND chooses the kind of job: pytorchjob (default), mpijob or trainjob. If KUBECONFIG is set, the demo runs on that
cluster instead, with the image KTRAIN_DEMO_IMAGE, or KTRAIN_MPI_IMAGE for an MPIJob (see docs/tutorial.md).
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPUS = 4
IMAGES = {"pytorch-demo": ROOT / "examples" / "demo", "mpi-pi": ROOT / "examples" / "mpi"}


class Demo(NamedTuple):
    """The demo of a kind of job.

    `dag` runs `replicas`. On a real cluster the image that is built from `dockerfile` is in `image_variable`.
    """

    dag: str
    replicas: str
    image_variable: str
    dockerfile: str
    has_gpus: bool


DEMOS = {
    "pytorchjob": Demo("ktrain_demo", "1 Master, 2 Workers", "KTRAIN_DEMO_IMAGE", "examples/demo/Dockerfile", True),
    "mpijob": Demo("ktrain_mpi_function", "2 Workers", "KTRAIN_MPI_IMAGE", "examples/mpi/Dockerfile", False),
    "trainjob": Demo("ktrain_trainjob", "2 nodes", "KTRAIN_DEMO_IMAGE", "examples/demo/Dockerfile", True),
}
#: The first line of a record in Airflow's log.
RECORD = re.compile(r"\S+T\d\d:\d\d:\d\d\S* \[\w+ *\] ")
#: A record that the provider wrote, about the job or from one of its replicas.
SOURCE = r"job|(?:Master|Worker|node) \d+|[Ll]auncher|\w+-initializer"
OURS = re.compile(rf"\S+T(\d\d:\d\d:\d\d\.\d{{3}})\S* \[(\w+) *\] (?!::)(.*\S) +\[(?:{SOURCE})\]", re.DOTALL)
begun = time.monotonic()


def say(text: str) -> None:
    print(f"[demo {time.monotonic() - begun:5.1f} s] {text}", flush=True)


def airflow_environment(home: pathlib.Path, kubeconfig: pathlib.Path) -> dict[str, str]:
    """The environment of a temporary Airflow. Nothing of the user's Airflow is read or written."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")}
    return {
        **inherited,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "example_dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
        "AIRFLOW__KTRAIN__DEPLOYMENT_ID": home.name,
        "NO_COLOR": "1",
        "AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(
            {"conn_type": "kubernetes", "extra": {"kube_config_path": str(kubeconfig)}}
        ),
        "PYTHONWARNINGS": "ignore",
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


@contextlib.contextmanager
def cluster() -> Iterator[pathlib.Path]:
    """The kubeconfig of the cluster to run on."""
    if given := os.environ.get("KUBECONFIG"):
        say(f"using the cluster of KUBECONFIG={given}")
        yield pathlib.Path(given).absolute()
        return
    from ktrain_embedded import EmbeddedCluster

    say(f"starting the embedded cluster: one node with {GPUS} simulated GPUs")
    with EmbeddedCluster(images=IMAGES, gpus_per_node=GPUS) as embedded:
        say(f"the cluster is running: {embedded.url}, kubeconfig {embedded.kubeconfig}")
        yield embedded.kubeconfig
        say("stopping the embedded cluster")


def shown(record: str) -> str | None:
    """A record of Airflow's log as the demo shows it; None if the provider didn't write it."""
    if not (ours := OURS.match(record)):
        return None
    time_of_day, level, text = ours.groups()
    indented = text.replace("\n", "\n" + " " * (len(time_of_day) + 3))
    return f"  {time_of_day} {'' if level == 'info' else level + ': '}{indented}"


def shown_records(lines: Iterable[str]) -> Iterator[str]:
    """The records as the demo shows them, without groups such as the manifest: `::group::` to `::endgroup::`."""
    record, in_group = "", False
    for line in lines:
        record = line if RECORD.match(line) else record + line
        if " ::group::" in record or " ::endgroup::" in record:
            in_group, record = " ::group::" in record, ""
        elif (text := shown(record)) is not None:
            if not in_group:
                yield text
            record = ""


def kept(lines: Iterable[str], everything: list[str]) -> Iterator[str]:
    """The lines, which are added to a list as well."""
    for line in lines:
        everything.append(line)
        yield line


def run_dag(command: list[str], env: dict[str, str]) -> None:
    """Run a command and show the provider's log lines; if it fails, everything that it printed."""
    everything: list[str] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
        for text in shown_records(kept(ran.stdout or (), everything)):
            print(text, flush=True)
    if ran.returncode:
        sys.exit("".join(everything) + f"\nthe DAG failed (exit code {ran.returncode}); its whole output is above")


def chosen(kind: str) -> Demo:
    """The demo of a kind; the process ends if it can't run."""
    if kind not in DEMOS:
        sys.exit(f"KIND={kind} is unknown: set KIND to {', '.join(DEMOS)}")
    demo = DEMOS[kind]
    if os.environ.get("KUBECONFIG") and not os.environ.get(demo.image_variable):
        sys.exit(
            f"KUBECONFIG is set, but {demo.image_variable} is not. Build {demo.dockerfile}, push it to a registry of "
            f"the cluster, and set {demo.image_variable}=REGISTRY/NAME:TAG (without GPUs, also KTRAIN_DEMO_GPUS=0)"
        )
    return demo


def main() -> None:
    demo = chosen(os.environ.get("KIND") or "pytorchjob")
    with tempfile.TemporaryDirectory(prefix="ktrain-demo-") as home, cluster() as kubeconfig:
        env = airflow_environment(pathlib.Path(home), kubeconfig)
        say("creating a temporary Airflow (SQLite)")
        airflow = [sys.executable, "-m", "airflow"]
        made = subprocess.run([*airflow, "db", "migrate"], env=env, capture_output=True, text=True)
        if made.returncode:
            sys.exit(f"airflow db migrate failed:\n{made.stdout}\n{made.stderr}")
        gpus = os.environ.get("KTRAIN_DEMO_GPUS", "1") if demo.has_gpus else "0"
        asked = {"0": "no GPUs", "1": "1 GPU each"}.get(gpus, f"{gpus} GPUs each")
        say(f"running the DAG {demo.dag}: {demo.replicas}, {asked}")
        run_dag([*airflow, "dags", "test", demo.dag], env)
        say("the DAG succeeded")
    say("done; nothing is left running")


if __name__ == "__main__":
    main()
