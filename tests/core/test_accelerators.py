"""The table of accelerators, and what is counted by it: usage, release text and partial start for each row."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

import airflow_provider_ktrain
from airflow_provider_ktrain.core.checks import check
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.reporting.announcement import describe_job
from airflow_provider_ktrain.core.reporting.lineage import of_manifest, of_outcome
from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus, replica_rows
from airflow_provider_ktrain.core.reporting.task_metrics import gauges
from airflow_provider_ktrain.core.state import accelerators
from airflow_provider_ktrain.core.state.accelerators import (
    CLAIMS,
    GPU,
    add_host_rows,
    configured_rows,
    described,
    is_gpu,
    parse_row,
    read_stored,
    stored,
    unit_of,
)
from airflow_provider_ktrain.core.state.pods.devices import accelerators_of_job, requested_by
from airflow_provider_ktrain.core.state.pods.partial_start import find_partial_start
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups, partial_start_since
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.pods.usage import Usage, usage
from airflow_provider_ktrain.engine.release import describe_freed
from airflow_provider_ktrain.manifests import gpus_of
from tests.factories import replica_pod

START = datetime(2026, 11, 21, 10, tzinfo=UTC)
NOW = START + timedelta(seconds=100)
PACKAGE = Path(airflow_provider_ktrain.__file__).parent
EXAMPLES = PACKAGE.parent / "example_dags" / "manifests"
#: Limits of documented pods, and what 4 of them are called. Sources: beside the rows of the table.
DOCUMENTED = {
    "nvidia.com/gpu": "4 GPUs",
    "nvidia.com/gpu-h100": "4 GPUs",
    "nvidia.com/pgpu": "4 GPUs",
    "nvidia.com/gpu.shared": "4 shared GPUs",
    "nvidia.com/mig-1g.5gb": "4 MIG 1g.5gb slices",
    "nvidia.com/mig-1g.10gb.me": "4 MIG 1g.10gb.me slices",
    "nvidia.com/mig-3g.20gb.shared": "4 shared MIG 3g.20gb slices",
    "amd.com/gpu": "4 GPUs",
    "amd.com/spx_nps1": "4 GPUs",
    "amd.com/cpx_nps4": "4 GPU partitions",
    "google.com/tpu": "4 TPUs",
    "aws.amazon.com/neuron": "4 Neuron devices",
    "aws.amazon.com/neurondevice": "4 Neuron devices",
    "aws.amazon.com/neuroncore": "4 Neuron cores",
    "habana.ai/gaudi": "4 Gaudi accelerators",
    "huawei.com/Ascend910": "4 NPUs",
    "huawei.com/Ascend310P": "4 NPUs",
    "huawei.com/Ascend910-16c": "4 vNPUs",
    "gpu.intel.com/i915": "4 GPUs",
    "gpu.intel.com/xe": "4 GPUs",
    "example.com/gpu": "4 GPUs",
}
#: Resources of the same vendors that are no devices.
OTHERS = (
    "cpu", "memory", "rdma/hca", "nvidia.com/hostdev", "nvidia.com/gpumem", "huawei.com/Ascend910B-memory",
    "gpu.intel.com/i915_monitoring", "gpu.intel.com/tiles", "gpu.intel.com/millicores", "google.com/tpus",
    "nvidia/gpu",
)  # fmt: skip


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def pod(
    name: str = "job-worker-0", *, node: bool = True, limits: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A pod that runs since its creation; without a node, one that waits for it."""
    job, role, index = name.rsplit("-", 2)
    container = {"name": "pytorch", "resources": {"limits": dict(limits)}}
    return replica_pod(
        role, index, job=job, meta={"creationTimestamp": at(0)},
        spec={"containers": [container], **({"nodeName": "n"} if node else {})}, phase="Running" if node else "Pending",
        conditions=[{"type": "PodScheduled", "status": str(node), "lastTransitionTime": at(0)}],
        containerStatuses=[{"name": "pytorch", "state": {"running": {"startedAt": at(0)}}}] if node else [],
    )  # fmt: skip


JOB = {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {}}}


@pytest.mark.parametrize(("resource", "text"), DOCUMENTED.items())
def test_each_row_has_its_own_words(resource: str, text: str) -> None:
    one = pod(limits={resource: "4"})
    assert describe_freed([one], True) == f"{text} released, 1 pod deleted."
    assert describe_freed([one], False) == f"{text} will be released when 1 pod terminates."
    used = usage([one], NOW)
    assert (used.held, used.gpus, used.others) == (400, 4, ())
    noun, unit = unit_of(used.resource)[0], text.removeprefix("4 ")
    per = f"{noun.replace(' ', '-')}-minutes"
    assert str(used) == f"{noun} time: 6.7 {per} on 4 {unit} (0.0 {per} wasted)."
    partial = find_partial_start(JOB, [one, pod("job-worker-1", node=False, limits={resource: "4"})])
    assert partial is not None
    lines = partial.describe_partial_start("The job", None).splitlines()
    assert lines[0] == f"The job holds {text} in 1 pod, but Worker 1 has no node."
    assert lines[1].startswith(f"The {unit} are idle")
    groups = PodGroups(PYTORCHJOB, [one, pod("job-worker-1", node=False)])
    assert partial_start_since(JOB, groups) == START.timestamp()


@pytest.mark.parametrize("resource", OTHERS)
def test_other_resources_are_not_counted(resource: str) -> None:
    one = pod(limits={resource: "4"})
    assert describe_freed([one], True) == "No GPUs were held, 1 pod deleted."
    assert str(usage([one], NOW)) == "GPU time: none."
    assert find_partial_start(JOB, [one, pod("job-worker-1", node=False)]) is None


def test_parts_are_never_added_to_whole_devices() -> None:
    """A MIG node (`mig.strategy: mixed`) beside one with whole GPUs, and Neuron cores beside devices."""
    pods = [
        pod("job-master-0", limits={"nvidia.com/gpu": 8}),
        pod("job-worker-0", limits={"nvidia.com/mig-1g.5gb": "2", "nvidia.com/mig-3g.20gb": "1"}),
    ]
    assert describe_freed(pods, True) == (
        "8 GPUs, 2 MIG 1g.5gb slices and 1 MIG 3g.20gb slice released, 2 pods deleted."
    )
    used = usage(pods, NOW)
    assert (used.resource, used.gpus, used.held) == (GPU, 8, 800)
    assert {one.resource: (one.gpus, one.held) for one in used.others} == {
        "nvidia.com/mig-1g.5gb": (2, 200), "nvidia.com/mig-3g.20gb": (1, 100),
    }  # fmt: skip
    assert str(used).splitlines()[1].startswith("MIG 1g.5gb slice time: 3.3 MIG-1g.5gb-slice-minutes on 2 MIG")
    partial = find_partial_start(JOB, [*pods, pod("job-worker-1", node=False)])
    assert partial is not None
    assert partial.describe_partial_start("The job", None) == (
        "The job holds accelerators in 2 pods, but Worker 1 has no node.\n"
        "These are 8 GPUs, 2 MIG 1g.5gb slices and 1 MIG 3g.20gb slice.\n"
        "The accelerators are idle until all pods have nodes. Free nodes, or use a queue."
    )
    neuron = pod(limits={"aws.amazon.com/neuron": 1, "aws.amazon.com/neuroncore": 2})
    assert describe_freed([neuron], True) == "1 Neuron device and 2 Neuron cores released, 1 pod deleted."


def test_kinds_with_the_same_unit_are_told_apart() -> None:
    amounts = {"huawei.com/Ascend910": 8, "huawei.com/Ascend310P": 2}
    assert described(amounts, "") == "2 NPUs (huawei.com/Ascend310P) and 8 NPUs (huawei.com/Ascend910)"


def test_sidecars_hold_devices_beside_the_containers() -> None:
    spec = {
        "containers": [{"resources": {"limits": {"google.com/tpu": 4}}}],
        "initContainers": [
            {"resources": {"limits": {"google.com/tpu": 4}}},
            {"restartPolicy": "Always", "resources": {"limits": {"google.com/tpu": 1}}},
            {"resources": {"limits": {"google.com/tpu": 2}}},
        ],
    }
    assert requested_by(spec) == {"google.com/tpu": 5}


# ResourceClaims


def claiming(
    name: str = "job-worker-0", *, node: bool = True, limits: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A pod with a claim of a template."""
    made = pod(name, node=node, limits=limits)
    made["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
    return made


def extended(*resources: str) -> dict[str, Any]:
    """A pod whose resources a claim serves, which the scheduler names in the pod's status only (KEP-5004)."""
    made = pod(limits=dict.fromkeys(resources, 2))
    mappings = [{"containerName": "pytorch", "resourceName": name, "requestName": "r"} for name in resources]
    status = {"resourceClaimName": "job-worker-0-extended-resources-x", "requestMappings": mappings}
    made["status"]["extendedResourceClaimStatus"] = status
    return made


@pytest.mark.parametrize(
    "one",
    [
        claiming(),
        extended("example.com/gold"),
        pod(limits={"deviceclass.resource.kubernetes.io/gpu.nvidia.com": 4}),
    ],
    ids=["claim", "extended resource", "device class"],
)
def test_devices_of_claims_are_not_counted_and_never_none(one: dict[str, Any]) -> None:
    assert describe_freed([one], True) == "1 pod deleted; devices of ResourceClaims not counted."
    assert describe_freed([one], False) == (
        "Accelerators will be released when 1 pod terminates; devices of ResourceClaims not counted."
    )
    used = usage([one], NOW)
    assert str(used) == "Accelerator time: devices of ResourceClaims not counted."
    assert used.as_dict() == {"unknown_claims": 1}
    assert replica_rows(PYTORCHJOB, [one])[0][4] == {CLAIMS: 1}
    assert find_partial_start(JOB, [one, pod("job-worker-1", node=False)]) is None, "nothing is known to wait"


def test_other_accelerators_of_a_pod_with_claims_are_counted() -> None:
    both = claiming(limits={"google.com/tpu": 4})
    assert describe_freed([both], True) == ("4 TPUs released, 1 pod deleted; devices of ResourceClaims not counted.")
    lines = str(usage([both], NOW)).splitlines()
    assert lines[0].startswith("TPU time: 6.7 TPU-minutes on 4 TPUs")
    assert lines[1] == "Devices of ResourceClaims not counted."


def test_a_pod_without_a_node_holds_no_devices_of_claims() -> None:
    assert describe_freed([claiming(node=False)], True) == "No GPUs were held, 1 pod deleted."


def test_extended_resources_of_the_table_are_counted_as_resources() -> None:
    assert describe_freed([extended("nvidia.com/gpu")], True) == "2 GPUs released, 1 pod deleted."


# what is stored and reported


def test_usage_of_several_kinds_survives_a_handover() -> None:
    history = PodHistory(PYTORCHJOB)
    pods = {
        "a": pod("job-master-0", limits={"google.com/tpu": 4}),
        "b": pod("job-worker-0", limits={"nvidia.com/mig-1g.5gb": 2}),
        "c": claiming("job-worker-1"),
    }
    pods = {uid: {**one, "metadata": {**one["metadata"], "uid": uid}} for uid, one in pods.items()}
    history.update(pods, (), NOW)
    whole = history.usage(NOW, None, {"google.com/tpu": 7.0})
    assert (whole.resource, whole.queued, whole.unknown_claims) == ("nvidia.com/mig-1g.5gb", 0, 1)
    assert {one.resource: (one.held, one.queued) for one in whole.others} == {"google.com/tpu": (400, 7)}
    for one in pods.values():
        history.mark_deleted({**one, "metadata": {**one["metadata"], "deletionTimestamp": at(100)}})
    given = json.loads(json.dumps(history.handover({}, NOW)))
    later = PodHistory(PYTORCHJOB, given).usage(NOW, None, {"google.com/tpu": 7.0})
    seconds = {name: (one.held, one.queued, one.requested) for name, one in whole.each.items()}
    assert {name: (one.held, one.queued, one.requested) for name, one in later.each.items()} == seconds
    assert later.unknown_claims == 1
    assert Usage.from_dict(json.loads(json.dumps(whole.as_dict()))) == whole


@pytest.mark.parametrize(
    ("used", "text"),
    [
        (Usage(120.0, 0.0, 120.0, 60.0, 2, at_least=True),
         "GPU time: at least 2.0 GPU-minutes on 2 GPUs (1.0 GPU-minutes wasted)."),
        (Usage(at_least=True), "GPU time: not known."),
        (Usage(100.0, 100.0, at_least=True), "GPU time: not known, plus 100.0 GPU-seconds queued."),
    ],
)  # fmt: skip
def test_usage_that_is_a_bound_says_so_and_survives_a_handover(used: Usage, text: str) -> None:
    assert str(used) == text
    assert Usage.from_dict(json.loads(json.dumps(used.as_dict()))) == used
    for total in (used + Usage(held=1.0), Usage(held=1.0) + used, used.beyond(Usage(held=60.0))):
        assert total.at_least
    assert not {sample.name for sample in gauges(used.as_dict(), {}, {})} & {"at_least", "gpu_seconds.at_least"}


def test_usage_beyond_another_one_is_never_negative() -> None:
    mine = Usage(held=5.0, wasted=3.0, gpus=2, others=(Usage(held=2.0, resource="google.com/tpu"),))
    other = Usage(held=2.0, wasted=4.0, gpus=2)
    assert mine.beyond(other) == Usage(held=3.0, gpus=2, others=(Usage(held=2.0, resource="google.com/tpu"),))
    assert other.beyond(mine) == Usage(wasted=1.0, gpus=2)
    assert Usage(unknown_claims=3).beyond(Usage(unknown_claims=1)).unknown_claims == 2


def test_gpus_of_an_older_release_are_read_as_gpus() -> None:
    assert Usage.from_dict({"requested": 2.0, "held": 2.0}) == Usage(requested=2.0, held=2.0)
    assert read_stored({"gpus": 8}) == {GPU: 8}
    assert read_stored({"gpus": None}) == read_stored({}) == {}


@pytest.mark.parametrize(
    ("amounts", "fields"),
    [
        ({}, {"gpus": 0}),
        ({GPU: 8}, {"gpus": 8}),
        ({"google.com/tpu": 16}, {"gpus": 16, "resource": "google.com/tpu"}),
        ({GPU: 8, "nvidia.com/mig-1g.5gb": 2}, {"gpus": 8, "others": {"nvidia.com/mig-1g.5gb": 2}}),
        ({CLAIMS: 2}, {"gpus": 0, "unknown_claims": 2}),
    ],
)
def test_stored_amounts_keep_the_field_of_gpus(amounts: dict[str, int], fields: dict[str, Any]) -> None:
    assert stored(Counter(amounts)) == fields
    assert read_stored(fields) == amounts


def test_status_names_what_is_not_a_gpu() -> None:
    rows = replica_rows(PYTORCHJOB, [pod("job-master-0", limits={"google.com/tpu": 4}), pod("job-worker-0")])
    status = TrainingStatus({}, 1, 0.0, "worker", [], rows, requested={"google.com/tpu": 8}).to_dict()
    assert (status["replicas"]["gpus"], status["replicas"]["resource"]) == (4, "google.com/tpu")
    assert (status["requested_gpus"], status["requested_resource"]) == (8, "google.com/tpu")
    assert [row[4] for row in status["replicas"]["rows"]] == ["4 TPUs", 0]


def tpu_job() -> dict[str, Any]:
    return build("PyTorchJob", JobOptions(image="i:1", gpus=4, gpu_resource="google.com/tpu", workers=3))


def test_requested_accelerators_are_announced_and_in_the_lineage() -> None:
    job = tpu_job()
    job["metadata"]["name"] = "j"
    ref = JobRef("PyTorchJob", "v1", "ns", "j", "u")
    assert "1 Master x 4 TPUs, 3 Workers x 4 TPUs" in describe_job(ref, PYTORCHJOB, job, created=True)
    assert gpus_of(job) == 16
    found = of_manifest(PYTORCHJOB, job)
    assert (found["gpus"], found["resource"]) == (16, "google.com/tpu")
    other = Usage(requested=2, held=2, gpus=1, resource="nvidia.com/mig-1g.5gb")
    ended = of_outcome({"usage": Usage(8, 0, 8, 0, 4, "google.com/tpu", (other,), 2).as_dict()}, {})
    assert (ended["gpus"], ended["resource"], ended["gpuSeconds"]["held"]) == (4, "google.com/tpu", 8)
    assert ended["otherAccelerators"]["nvidia.com/mig-1g.5gb"]["gpus"] == 1
    assert ended["unknownClaims"] == 2
    claims = tpu_job()
    for replica in claims["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["resourceClaims"] = [{"name": "c", "resourceClaimTemplateName": "t"}]
        del replica["template"]["spec"]["containers"][0]["resources"]
    assert "1 Master x devices of ResourceClaims (not counted)" in describe_job(ref, PYTORCHJOB, claims, created=True)


def test_an_example_on_tpus_has_no_problems() -> None:
    manifest = yaml.safe_load((EXAMPLES / "tpu.yaml").read_text())
    assert check(manifest) == []
    assert gpus_of(manifest) == 16


# configuration


@pytest.fixture
def host_rows() -> Iterator[None]:
    before = accelerators._host_rows
    rows = configured_rows("example.com/npu=NPU, example.com/die-*=die|dice", "example.com/wafer", pytest.fail)
    add_host_rows(lambda: rows)
    yield
    add_host_rows(before)


@pytest.mark.usefixtures("host_rows")
def test_configuration_adds_rows() -> None:
    one = pod(limits={"example.com/npu": 1, "example.com/die-2": 2, "nvidia.com/gpu": 4, "example.com/wafer": 3})
    assert describe_freed([one], True) == "4 GPUs, 1 NPU, 2 dice and 3 wafers released, 1 pod deleted."


@pytest.mark.parametrize("entry", ["example.com/npu", "=NPU", "npu=NPU", "example.com/npu="])
def test_invalid_row_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=UNIT"):
        parse_row(entry)


def test_unit_of_a_row_may_be_any_text() -> None:
    assert parse_row("a/b=X; c/d=Y=|").unit == "X; c/d=Y="


def test_only_gpus_and_their_parts_are_gpus() -> None:
    gpus = {name for name in DOCUMENTED if is_gpu(name)}
    assert gpus == {name for name, text in DOCUMENTED.items() if "GPU" in text or "MIG" in text}


# one table


def resource_names(text: str) -> list[str]:
    """What looks like the name of an accelerator's resource: vendor or domain, slash, name."""
    return re.findall(
        r"\b(?:[\w.-]*(?:nvidia|amd|google|amazon|habana|huawei|intel)[\w-]*(?:\.\w+)?|[\w-]+(?:\.[\w-]+)+)"
        r"/(?:gpu|mig|tpu|neuron|gaudi|npu|Ascend|i915|xe)[\w.-]*",
        text,
    )


@pytest.mark.usefixtures("no_garbage_collection")
def test_only_the_table_names_resources() -> None:
    """Comments, docstrings and the conditions of nodes aside: what decides or is shown uses the table."""
    found = {}
    for file in {*PACKAGE.rglob("*.py")} - {PACKAGE / "core/diagnosis/node_conditions.py"}:
        tree = ast.parse(file.read_text())
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        texts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        ]
        if names := [name for text in texts for name in resource_names(text)]:
            found[str(file.relative_to(PACKAGE))] = names
    assert found.keys() == {"core/state/accelerators.py"}
    assert set(accelerators.COMMON_NAMES) <= {*found["core/state/accelerators.py"]}


def test_claims_of_a_manifest_are_not_counted() -> None:
    job = tpu_job()
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    worker["resourceClaims"] = [{"name": "c", "resourceClaimTemplateName": "t"}]
    assert accelerators_of_job(job) == {"google.com/tpu": 16, CLAIMS: 3}
    worker["resourceClaims"] = ["ring"]  # the API server refuses it
    assert accelerators_of_job(job) == {"google.com/tpu": 16, CLAIMS: 3}
