"""DAGs of the browser tests and of scripts/screenshots.py."""

import datetime
import os
import pathlib
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

# Arguments: seconds to train, and the step at which replica 2 runs out of memory; 0 for never.
PROGRAM = r"""
import json, math, os, random, signal, sys, time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
seconds, failing_step = float(sys.argv[1]), int(sys.argv[2])
rank, end, step = int(os.environ.get("RANK", "0")), time.monotonic() + seconds, 0
noise = random.Random(7)
while time.monotonic() < end:
    loss = 0.35 + 6.5 * math.exp(-step / 900) + noise.uniform(-0.06, 0.06)
    report = {"step": step, "loss": round(loss, 4), "lr": round(3e-4 * (1 + math.cos(step / 1500)) / 2, 8)}
    if step % 100 == 0:
        report["val_accuracy"] = round(0.91 * (1 - math.exp(-step / 700)) + noise.uniform(-0.008, 0.008), 4)
    report["images_per_second"] = round(10240 + noise.uniform(-260, 260), 1)
    if step == 200:
        report["grad_norm"] = float("nan")
    elif step % 100 == 0:
        report["grad_norm"] = round(1 + 9 * math.exp(-step / 300) + noise.uniform(0, 0.8), 3)
    if rank == 0:
        print("KTRAIN_METRIC", json.dumps(report), flush=True)
    print(f"epoch {step // 500}  step {step}  loss {loss:.4f}", flush=True)
    if rank == 2 and step == failing_step > 0:
        print(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
            "79.15 GiB of which 1.12 GiB is free.", file=sys.stderr, flush=True,
        )
        sys.exit(1)
    step += 20
    time.sleep(0.25)
print('<script>document.title = "injected"</script><img src=x onerror=alert(1)> \x1b[31mred\x1b[0m', flush=True)
"""
# Fails after metrics and lines that are hard to show.
ODD_PROGRAM = r"""
import json, sys

for step in range(60):
    report = {"step": step, "tiny": 10.0 ** (-5 * step), "negative": -step, "\x1b[31mred": 1.5 * step}
    report["huge"] = 1e300 if step == 30 else step
    print("KTRAIN_METRIC", json.dumps(report), flush=True)
sys.stdout.buffer.write(b"\xff caf\xe9 \x1b[1mbold\x1b[0m " + b"x" * 1_000_000 + b"\n")
sys.stdout.flush()
sys.exit(1)
"""
# Opens a group of Airflow's log view and never ends it.
GROUP_PROGRAM = "print('before the group'); print('::gr' + 'oup::of the program'); print('in the group')"
# Its first try fails at step 300. The second one begins at step 200, as from a checkpoint.
RETRIED_PROGRAM = r"""
import json, os, sys, time

first, last = (0, 300) if os.environ["KTRAIN_TRY"] == "1" else (200, 500)
for step in range(first, last + 1, 10):
    print("KTRAIN_METRIC", json.dumps({"step": step, "loss": round(5 / (step + 1) ** 0.5, 4)}), flush=True)
    time.sleep(0.05)
if last == 300:
    sys.exit("ValueError: the data set has a damaged file")
"""
# With the highest rate, the loss becomes infinite.
RATES_PROGRAM = r"""
import json, math, random, sys, time

rate, noise = float(sys.argv[sys.argv.index("--lr") + 1]), random.Random(7)
for step in range(0, 3000, 50):
    loss = 0.4 + 40 * rate + 6 * math.exp(-step * rate / 3) + noise.uniform(-0.05, 0.05)
    if rate > 0.01 and step == 1000:
        sys.exit(f"FloatingPointError: the loss is infinite at step {step}")
    report = {"step": step, "loss": round(loss, 4), "val_accuracy": round(1 - loss / 8, 4)}
    print("KTRAIN_METRIC", json.dumps(report), flush=True)
    time.sleep(0.2)
"""
JOB: dict[str, Any] = {"image": os.environ.get("TEST_IMAGE", "scratch"), "on_finish_action": "delete_job"}
EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "hang"
LONG = 3600  # seconds: until the cluster is stopped
START = pendulum.datetime(2026, 1, 1, tz="UTC")


def command(seconds: int, failing_step: int = 0) -> list[str]:
    return ["python3", "-u", "-c", PROGRAM, str(seconds), str(failing_step)]


with DAG("image_classifier", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="train", command=command(LONG), gpus=4, workers=3)

with DAG("text_embeddings", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="finetune", command=command(LONG), gpus=1, workers=1)

with DAG("short_training", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="train", command=command(5), gpus=1)

with DAG("large_batch", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="train", command=command(LONG, failing_step=6000), gpus=2, workers=3)

with DAG("hanging_training", schedule=None, start_date=START):
    PyTorchJobOperator(
        **JOB, task_id="train", code=str(EXAMPLE), command=["torchrun", "--nproc-per-node", "2", "train.py"], gpus=2,
        workers=3, progress_timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip

with DAG("retried_training", schedule=None, start_date=START):
    PyTorchJobOperator(
        **JOB, task_id="train", command=["python3", "-u", "-c", RETRIED_PROGRAM], gpus=1,
        retries=1, retry_delay=datetime.timedelta(seconds=1),
    )  # fmt: skip

with DAG("learning_rates", schedule=None, start_date=START):
    PyTorchJobOperator.partial(**JOB, task_id="train", gpus=4, workers=1).expand(
        command=[["python3", "-u", "-c", RATES_PROGRAM, "--lr", rate] for rate in ("0.0003", "0.001", "0.003", "0.03")]
    )

with DAG("odd_values", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="train", command=["python3", "-u", "-c", ODD_PROGRAM], gpus=1)

with DAG("group_without_end", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="train", command=["python3", "-u", "-c", GROUP_PROGRAM], gpus=1)

with DAG("queued_training", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, task_id="train", command=command(60), gpus=8, workers=3, queue_name="team-vision")
