"""What a line costs that is made to cost much, beside an ordinary one of the same length.

    python benchmarks/hostile_lines.py

Each line passes what sees a followed line: the search for stacks, results and metrics, and what keeps the last lines
and those of causes (`inspect`). A line that is quoted in a message is cut and masked as well (`quote`). CPU of this
thread, least of five.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_provider_ktrain.core.diagnosis.cause_scanner import CauseScanner
from airflow_provider_ktrain.core.diagnosis.collectives import is_report
from airflow_provider_ktrain.core.diagnosis.log_lines import TRACEBACK
from airflow_provider_ktrain.core.logs.result import keep_result_line
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.state.steps.training_metrics import METRIC_MARKER, TrainingMetrics
from airflow_provider_ktrain.core.text.output import clipped, ends_of

SIZES = (2_000, 16_000, 200_000)
ORDINARY = "epoch 3 step 120: loss 0.31, 1432 samples/s, password=x "
HOSTILE = {
    "-u=": "-u=",
    "JWTs without an end": "eyJ-",
    "names": "password token key ",
    "an open quote": "password='",
    "results": "KTRAIN_RESULT {",
    "a deep result": "[",
    "metrics": 'KTRAIN_METRIC {"step": 1e300}',
    "timeouts of NCCL": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=A",
    "nrt_allocate": "nrt_allocate",
}

SCANNER = CauseScanner[str]()
SCANNER.see(TRACEBACK, TRACEBACK)


def inspect(line: str) -> None:
    own = own_text(line) or ""
    keep_result_line("", own)
    if METRIC_MARKER in own:
        TrainingMetrics().read_line("Master 0", own, 0.0)
    is_report(own)
    SCANNER.see(ends_of(own), own)


def quote(line: str) -> None:
    clipped(ends_of(line))


def seconds(call: Callable[[str], None], line: str) -> float:
    times = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(20):
            call(line)
        times.append((time.thread_time() - began) / 20)
    return min(times)


def main() -> None:
    print("| line | bytes | inspect, µs | beside ordinary | quote, µs | beside ordinary |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        usual: dict[Callable[[str], None], float] = {}
        for name, unit in {"ordinary": ORDINARY, **HOSTILE}.items():
            prefix = "KTRAIN_RESULT " if name == "a deep result" else ""
            line = (prefix + unit * (size // len(unit) + 1))[:size]
            cells = []
            for call in (inspect, quote):
                taken = seconds(call, line)
                cells.append(f"{taken * 1e6:,.1f} | {taken / usual.setdefault(call, taken):.1f}")
            print(f"| {name} | {size:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
