"""The demo: an embedded cluster, a distributed training as an Airflow task, and the GPUs free again.

With KUBECONFIG set it runs on that cluster instead; the image then is KTRAIN_DEMO_IMAGE (see README).
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
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPUS = 4
#: a line of Airflow's log that the provider wrote: its operator in the worker, its trigger in the triggerer
OURS = re.compile(r"\S+T(\d\d:\d\d:\d\d\.\d{3})\S* \[(\w+) *\] (.*\S) +\[[\w.]*airflow_provider_ktrain\.[\w.]+\]")
begun = time.monotonic()


def say(text: str) -> None:
    print(f"[demo {time.monotonic() - begun:5.1f} s] {text}", flush=True)


def airflow_environment(home: pathlib.Path, kubeconfig: pathlib.Path) -> dict[str, str]:
    """An Airflow of its own: nothing of the user's is read or written."""
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
    from airflow_provider_ktrain.local.cluster import EmbeddedCluster

    say(f"starting the embedded cluster: one node with {GPUS} pretended nvidia.com/gpu")
    with EmbeddedCluster(images={"pytorch-demo": ROOT / "examples" / "demo"}, gpus_per_node=GPUS) as embedded:
        say(f"it answers at {embedded.url}; kubeconfig: {embedded.kubeconfig}")
        yield embedded.kubeconfig
        say("stopping the embedded cluster")


def shown(line: str) -> str | None:
    """A line of Airflow's log as the demo shows it, or None where it is not the provider's."""
    if not (ours := OURS.match(line)):
        return None
    time_of_day, level, text = ours.groups()
    return f"  {time_of_day} {'' if level == 'info' else level + ': '}{text}"


def run_dag(command: list[str], env: dict[str, str]) -> None:
    """Run it and show the task's own log lines as they come; everything where it fails."""
    everything = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
        for line in ran.stdout or ():
            everything.append(line)
            if text := shown(line):
                print(text, flush=True)
    if ran.returncode:
        sys.exit("".join(everything) + f"\nthe DAG failed (exit {ran.returncode}); all that it printed is above")


def main() -> None:
    if os.environ.get("KUBECONFIG") and not os.environ.get("KTRAIN_DEMO_IMAGE"):
        sys.exit(
            "KUBECONFIG is set, KTRAIN_DEMO_IMAGE is not. Build examples/demo/Dockerfile, push it to where the cluster "
            "pulls from, and name it: KTRAIN_DEMO_IMAGE=REGISTRY/pytorch-demo:1 (KTRAIN_DEMO_GPUS=0 without GPUs)"
        )
    with tempfile.TemporaryDirectory(prefix="ktrain-demo-") as home, cluster() as kubeconfig:
        env = airflow_environment(pathlib.Path(home), kubeconfig)
        say("making a temporary Airflow (sqlite)")
        airflow = [sys.executable, "-m", "airflow"]
        made = subprocess.run([*airflow, "db", "migrate"], env=env, capture_output=True, text=True)
        if made.returncode:
            sys.exit(f"airflow db migrate failed:\n{made.stdout}\n{made.stderr}")
        gpus = os.environ.get("KTRAIN_DEMO_GPUS", "1")
        asked = {"0": "no GPUs", "1": "a GPU each"}.get(gpus, f"{gpus} GPUs each")
        say(f"running the DAG ktrain_demo through Airflow: 1 Master, 2 Workers, {asked}")
        run_dag([*airflow, "dags", "test", "ktrain_demo"], env)
        say("the DAG succeeded")
    say("done; nothing is left running")


if __name__ == "__main__":
    main()
