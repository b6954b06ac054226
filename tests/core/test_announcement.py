"""What the log shows of a submitted job."""

from __future__ import annotations

import pytest
import yaml

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.reporting.announcement import MAX_MANIFEST_CHARS, describe_job, manifest_text


def ref(kind: Kind) -> JobRef:
    return JobRef(kind.name, kind.versions[0], "ml", "train-1", "uid", "ti-1", submission="abc")


def test_replicas_image_and_commands() -> None:
    job = build(PYTORCHJOB.name, JobOptions(image="repo/train:1", gpus=2, workers=3))
    assert describe_job(ref(PYTORCHJOB), PYTORCHJOB, job, created=True).splitlines() == [
        "Submitted PyTorchJob ml/train-1: 1 Master x 2 GPUs, 3 Workers x 2 GPUs",
        "image: repo/train:1",
        "kubectl get pytorchjobs.kubeflow.org/train-1 -n ml",
        "kubectl get pods -n ml -l ktrain.airflow/submission=abc",
        "kubectl logs -n ml -l ktrain.airflow/submission=abc --all-containers --prefix --follow",
        "kubectl describe pytorchjobs.kubeflow.org/train-1 -n ml",
    ]


def test_a_trainjob_may_have_the_image_of_its_runtime() -> None:
    trainer = {"numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/gpu": "8"}}}
    job = {"kind": "TrainJob", "spec": {"trainer": trainer}}
    lines = describe_job(ref(TRAINJOB), TRAINJOB, job, created=False).splitlines()
    assert lines[:2] == ["Following TrainJob ml/train-1: 2 nodes x 8 GPUs", "image: that of the runtime"]
    assert "jobset.sigs.k8s.io/jobset-name=train-1" in lines[3]


def test_texts_of_the_manifest_are_not_folded() -> None:
    command = "python train.py " + "--option value " * 50
    assert command.strip() in manifest_text({"args": [command.strip()]})


def test_programs_keep_their_lines() -> None:
    assert manifest_text({"args": ["echo 1\necho 2\n"]}) == "args:\n- |\n  echo 1\n  echo 2"


@pytest.mark.parametrize("size", [10, 5000])
def test_the_manifest_is_limited(size: int) -> None:
    text = manifest_text({"kind": "PyTorchJob", "data": ["x" * 50] * size})
    assert len(text) <= MAX_MANIFEST_CHARS
    assert yaml.safe_load(text.splitlines()[0]) == {"kind": "PyTorchJob"}
