"""The CPU time to import the operators in a DAG file, beside a peer and what Airflow itself needs.

    python benchmarks/imports.py [--rounds 15]

Each round starts a process for each contender, in turn. A process imports what each DAG file imports (`DAG`, `task` and
`BaseOperator` of `airflow.sdk`), and then measures the contender. The first round, which may compile modules, doesn't
count. Prints a table.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys

from harness import machine, table

CONTENDERS = {
    "operators.training": "import airflow_provider_ktrain.operators.training",
    "operators.training, and an operator is created": (
        "from airflow_provider_ktrain.operators.training import PyTorchJobOperator as O;"
        "O(task_id='t', image='train:1', workers=2, gpus=1)"
    ),
    "sensors.training": "import airflow_provider_ktrain.sensors.training",
    "KubernetesPodOperator": "import airflow.providers.cncf.kubernetes.operators.pod",
    "airflow.sdk itself": "",
}
#: The environment without the variable that makes each process compile all modules again.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
MEASURE = """
import json, sys, time
started = time.process_time()
from airflow.sdk import DAG, BaseOperator, task
known, began = set(sys.modules), time.process_time()
{}
ended = time.process_time()
new = sys.modules.keys() - known
ours = sum(name.startswith("airflow_provider_ktrain.") for name in new)
print(json.dumps([ended - (began if {!r} else started), len(new) if {!r} else len(sys.modules), ours]))
"""


def measured(code: str) -> tuple[float, int, int]:
    """CPU seconds, imported modules, and those that are this provider's."""
    command = [sys.executable, "-c", MEASURE.format(code, code, code)]
    done = subprocess.run(command, capture_output=True, check=True, env=ENV)
    seconds, modules, ours = json.loads(done.stdout.splitlines()[-1])
    return seconds, modules, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        for name, code in CONTENDERS.items():
            run = measured(code)
            if number:
                found[name].append(run)
    head = ["import", "CPU ms, least", "CPU ms, median", "modules", "of this provider"]
    rows = []
    for name, runs in found.items():
        milliseconds = [1000 * seconds for seconds, _, _ in runs]
        rows.append([name, min(milliseconds), statistics.median(milliseconds), runs[-1][1], runs[-1][2]])
    print(f"{datetime.date.today()}, {machine()}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
