"""Invalid parameters are reported by name, with what was found, what was expected and what to write."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.client import V1Toleration

from airflow_provider_ktrain.core.checks.parameters import PARAMETERS, REQUIRED, validated
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.volumes import SharedMemory

NATIVE = "render_template_as_native_obj=True"
DURATION = "seconds or a timedelta, 0 or more"
COUNT = "a whole number, 0 or more"
INVALID_PARAMETERS: list[tuple[str, Any, list[str]]] = [
    ("hosts", "node1", ["hosts: ", "found 'node1'", "a list of node names", "write ['node1']"]),
    ("hosts", "['a', 'b']", ["found \"['a', 'b']\"", NATIVE]),
    ("hosts", ["a", ""], ["hosts[1]: ", "found ''"]),
    ("command", "python3 train.py", ["found 'python3 train.py'", "a list of words", "write ['python3', 'train.py']"]),
    ("args", '--name "a b"', ["write ['--name', 'a b']"]),
    ("args", ["--epochs", None], ["args[1]: ", "found None"]),
    ("labels", ["a"], ["labels: ", "found ['a']", "a mapping of text to text", 'write {"name": "value"}']),
    ("labels", {"a": None}, ["labels['a']: ", "found None"]),
    ("node_selector", "{'a': 'b'}", [NATIVE]),
    ("container_resources", ["memory"], ["found ['memory']", 'write {"memory": "64Gi"}']),
    ("volumes", SharedMemory(), ["found SharedMemory(size=None)", "write volumes=[SharedMemory()]"]),
    ("volumes", [{"name": "shm"}], ["volumes[0]: ", "ClaimVolume, HostPath and SharedMemory"]),
    ("volumes", [SharedMemory], ["volumes[0]: "]),
    ("env", [{"name": "A", "value": "b"}], ["env: ", "found list", 'write {"NAME": "value"}']),
    ("env", {"A": None}, ["env['A']: ", "found None", "remove variables without a value"]),
    ("env", {"A": ["b"]}, ["env['A']: ", "found list"]),
    ("schedule_timeout", "10m", ["found '10m'", DURATION, "write timedelta(minutes=10)"]),
    ("queue_timeout", -5, ["found -5", DURATION]),
    ("startup_timeout", timedelta(seconds=-1), [DURATION]),
    ("timeout", math.inf, [DURATION]),
    ("max_restarts", "three", ["found 'three'", COUNT]),
    ("workers", -1, ["found -1", COUNT]),
    ("workers", "", ["found ''", COUNT]),
    ("gpus", True, ["found True", COUNT]),
    ("gpus", 0.5, ["found 0.5", COUNT]),
    ("replicas", {"Worker": -3}, ["replicas['Worker']: ", "found -3"]),
    ("replicas", 3, ["found 3", 'write {"Worker": 2}']),
    ("nproc_per_node", 0, ["found 0", "a whole number from 1, or auto, gpu or cpu"]),
    ("nproc_per_node", "all", ["found 'all'"]),
    ("namespace", "Not A NS", ["found 'Not A NS'", "lower-case letters, digits and -"]),
    ("job_name", "", ["found ''", "the name of a job"]),
    ("job_name", "../pods", ["found '../pods'"]),
    ("tolerations", [{"kee": "a"}], ["tolerations[0]: ", "found {'kee': 'a'}", "key, operator, value, effect"]),
    ("tolerations", {"key": "a"}, ["tolerations: "]),
    ("affinity", {"foo": {}}, ["found {'foo': {}}", "nodeAffinity"]),
    ("affinity", object, ["affinity: "]),
    ("deferrable", "False", ["found 'False'", "True or False"]),
    ("image", 3, ["found 3", "text"]),
    ("on_finish_action", "keep", ["found 'keep'", "delete_job, keep_job"]),
    ("reattach", "Always", ["did you mean 'always'?"]),
    ("skip_on_exit_code", 0, ["an exit code from 1 to 255"]),
    ("skip_on_exit_code", [99, 256], ["[99, 256]"]),
    ("code", "", ["the path of a directory or file", 'write "training"']),
    ("code", ["train.py"], ["code: ", "['train.py']"]),
    ("conditions", ["running"], ["conditions[0]: ", "some of Created, Running", "did you mean 'Running'?"]),
]


@pytest.mark.parametrize(
    ("name", "value", "words"), INVALID_PARAMETERS, ids=[f"{name}={value!r}" for name, value, _ in INVALID_PARAMETERS]
)
def test_invalid_values_are_refused_with_a_remedy(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ManifestError) as error:
        validated({name: value})
    remedy = "did you mean " if error.value.remedy.startswith("did you mean ") else "remedy: "
    assert [word for word in (name, remedy, *words) if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("workers", "3", 3),
        ("workers", " -1 ", ManifestError),
        ("gpus", "0", 0),
        ("replicas", {"Worker": "2"}, {"Worker": 2}),
        ("nproc_per_node", "4", 4),
        ("nproc_per_node", "auto", "auto"),
        ("max_restarts", "3", 3),
        ("name", "3", "3"),
    ],
)
def test_number_as_text_is_converted(name: str, value: Any, expected: Any) -> None:
    if expected is ManifestError:
        with pytest.raises(ManifestError, match="found -1"):
            validated({name: value})
    else:
        assert validated({name: value}) == {name: expected}


VALID_PARAMETERS: dict[str, Any] = {
    "hosts": ("a", "b"),
    "command": ["python3", "train.py", 3, 0.1],
    "env": {"A": "1", "B": 2, "C": True, "D": {"secretKeyRef": {"name": "s", "key": "k"}}},
    "labels": {"team": "a", "run": 3},
    "container_resources": {"memory": "64Gi", "rdma/hca": 1},
    "volumes": [SharedMemory()],
    "tolerations": [{"key": "a", "operator": "Exists"}, V1Toleration(key="b", effect="NoSchedule")],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    "queue_timeout": timedelta(hours=1),
    "code": Path("training"),
    "skip_on_exit_code": [3, 99],
    "schedule_timeout": 0.5,
    "partial_start_timeout": timedelta(minutes=30),
    "progress_timeout": 600,
    "namespace": "",
    "conditions": ["Running", "Succeeded"],
}


def test_valid_values_are_unchanged() -> None:
    assert validated(VALID_PARAMETERS) == VALID_PARAMETERS
    nothing = dict.fromkeys(PARAMETERS.keys() - REQUIRED)
    assert validated(nothing) == nothing
    assert validated({"task_id": object()}) == {}


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_required_values_cannot_be_none(name: str) -> None:
    with pytest.raises(ManifestError, match=f"^{name}: .*found None"):
        validated({name: None})


def test_additional_values_can_be_required() -> None:
    assert validated({"workers": None}) == {"workers": None}
    with pytest.raises(ManifestError, match=r"^workers: .*found None"):
        validated({"workers": None}, "workers")


def test_all_errors_are_in_one_message() -> None:
    with pytest.raises(ManifestError) as error:
        validated({"hosts": "node1", "gpus": -1, "env": {"TOKEN": ["a-secret"]}})
    text = str(error.value)
    assert [name for name in ("hosts: ", "gpus: ", "env['TOKEN']: ") if name not in text] == [], text
    assert "a-secret" not in text
