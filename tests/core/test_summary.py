"""The summary of a training: what counts as a parameter, and its limits."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.formats import json_size
from airflow_provider_ktrain.core.reporting.summary import MAX_BYTES, killed_summary, metrics_of, parameters_of, summary


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train.py", "--lr", "0.1", "--size=big", "--amp"], {"lr": "0.1", "size": "big", "amp": "true"}),
        (["train.py", "--offset", "-1", "--beta=-2", "-k", "-.5"], {"offset": "-1", "beta": "-2", "k": "-.5"}),
        (["train.py", "lr=0.1", "model.size=big", "+seed=1"], {"lr": "0.1", "model.size": "big", "seed": "1"}),
        (["torchrun", "--standalone", "train.py", "--lr", "1"], {"standalone": "true", "lr": "1"}),
        (["python3", "-u", "-c", "lr=1\nprint(lr)", "--lr", "2"], {"lr": "2"}),
        (["python3", "-m", "train", "--lr", "2"], {"lr": "2"}),
        (["sh", "-c", "LR=1 python3 train.py --lr 2"], {}),
        (["train.py", "0.1", "imagenet", "a b=c", "1=2", "=", "--", "-"], {}),
        (["train.py", "--token", "s3cret-value", "password=hunter2"], {"token": "***", "password": "***"}),
    ],
    ids=[
        "flags", "negative numbers", "names", "a flag before the script", "a program", "a module", "a shell's program",
        "no names", "secrets",
    ],
)  # fmt: skip
def test_parameters_are_what_has_a_name_and_a_value(words: list[str], found: dict[str, str]) -> None:
    assert parameters_of(words, {}, {}, lambda name: False) == found


def test_summary_has_at_most_twelve_parameters_and_eight_metrics() -> None:
    words = [f"--p{n}={n}" for n in range(20)]
    metrics = {f"m{n}": {"last": n, "best": n} for n in range(20)}
    document = summary(
        {}, parameters=parameters_of(words, {}, {"lr": 1}, lambda name: False), metrics=metrics_of(metrics)
    )
    assert [*document["parameters"]] == ["lr", *(f"p{n}" for n in range(11))]
    assert [*document["metrics"]] == [f"m{n}" for n in range(8)]


@pytest.mark.parametrize(
    "fields",
    [
        {"cause": "x" * 5000, "checkpoint": "s3://" + "c" * 5000, "model_uri": "s3://" + "m" * 5000},
        {"job": {"kind": "PyTorchJob", "namespace": "n" * 63, "name": "m" * 63, "cluster": "https://" + "c" * 5000}},
        {"parameters": {f"\u043f{n}" * 20: "\u0437" * 40 for n in range(12)}},
        {"metrics": {f"\u043c{n}" * 20: [1.0, 2.0] for n in range(8)}},
    ],
    ids=["texts", "the cluster", "parameters", "metrics"],
)
def test_summary_has_a_limit(fields: dict[str, Any]) -> None:
    document = summary({"parameters": {"lr": "0.1"}, "state": "running"}, **fields)
    assert json_size(document) <= MAX_BYTES
    assert document["state"] == "running"
    assert document.get("job", {}).get("name", "m" * 63) == "m" * 63


def test_summary_of_a_kill_has_the_usage_of_earlier_tries() -> None:
    before = {"state": "running", "usage": {"tries": 2, "held": 60.0, "wasted": 1.0}}
    ended = killed_summary(before, {"usage": {"held": 5.0, "wasted": 0.0}, "cause": {"summary": "killed"}})
    assert ended["usage"] == {"tries": 3, "held": 65.0, "wasted": 1.0}
