"""The table of accelerators, and what is counted by it: usage, release text and partial start for each row."""

from __future__ import annotations

import ast
import gc
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
from airflow_provider_ktrain.core.manifest.resources import accelerators_of_job, gpus_of
from airflow_provider_ktrain.core.reporting.announcement import describe_job
from airflow_provider_ktrain.core.reporting.lineage import of_manifest, of_outcome
from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus, replica_rows
from airflow_provider_ktrain.core.state import accelerators
from airflow_provider_ktrain.core.state.accelerators import (
    GPU,
    UNKNOWN,
    add_host_rows,
    configured_rows,
    described,
    is_gpu,
    parse_row,
    read_stored,
    stored,
    unit_of,
)
from airflow_provider_ktrain.core.state.pods.devices import Claim, amounts_of, claims_of, read_claim, requested_by
from airflow_provider_ktrain.core.state.pods.partial_start import find_partial_start
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups, partial_start_since
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.pods.usage import Usage, usage
from airflow_provider_ktrain.engine.release import describe_freed
from tests.factories import replica_pod

START = datetime(2026, 11, 21, 10, tzinfo=UTC)
NOW = START + timedelta(seconds=100)
PACKAGE = Path(airflow_provider_ktrain.__file__).parent
EXAMPLES = PACKAGE.parent / "example_dags" / "manifests"
#: limits of documented pods, and what 4 of them are called. Sources: beside the rows of the table
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
    "deviceclass.resource.kubernetes.io/gpu.nvidia.com": "4 GPUs",
    "deviceclass.resource.kubernetes.io/mig.nvidia.com": "4 MIG slices",
}
#: resources of the same vendors that are no devices
OTHERS = (
    "cpu", "memory", "rdma/hca", "nvidia.com/hostdev", "nvidia.com/gpumem", "huawei.com/Ascend910B-memory",
    "gpu.intel.com/i915_monitoring", "gpu.intel.com/tiles", "gpu.intel.com/millicores", "google.com/tpus",
    "nvidia/gpu", "deviceclass.resource.kubernetes.io/dra.cpu",
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


CLAIM = "job-worker-0-gpus-x7k2p"  #: which a template made
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


def claim(*devices: dict[str, Any], users: tuple[str, ...] = ("job-worker-0",)) -> dict[str, Any]:
    """A claim as the API server shows it: https://kubernetes.io/docs/reference/kubernetes-api/resource/."""
    results = [{"request": "gpu", "pool": "node-1", "driver": "gpu.nvidia.com", **device} for device in devices]
    return {
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": user, "uid": user} for user in users],
        },
    }


def claiming(
    name: str = "job-worker-0", *, template: bool = True, limits: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A pod with a claim of a template, which is named in its status; or with one that others may use, too."""
    made = pod(name, limits=limits)
    source = {"resourceClaimTemplateName": "gpus"} if template else {"resourceClaimName": "gpus"}
    made["spec"]["resourceClaims"] = [{"name": "gpus", **source}]
    if template:
        made["status"]["resourceClaimStatuses"] = [{"name": "gpus", "resourceClaimName": f"{name}-gpus-x7k2p"}]
    return made


def test_devices_of_claims_are_counted_as_what_they_are() -> None:
    read = read_claim(claim({"device": "gpu-0"}, {"device": "gpu-1"}, {"device": "gpu-2-mig-1g5gb-19-0"}))
    claims = {CLAIM: read}
    one = claiming()
    assert list(claims_of(one)) == [CLAIM]
    assert describe_freed([one], True, claims) == "2 GPUs and 1 MIG slice released, 1 pod deleted."
    used = usage([one], NOW, claims=claims)
    assert (used.resource, used.gpus, used.held) == (GPU, 2, 200)
    assert [(other.resource, other.gpus) for other in used.others] == [("nvidia.com/mig", 1)]
    waiting = pod("job-worker-1", node=False)
    partial = find_partial_start(JOB, [one, waiting], claims)
    assert partial is not None
    assert "These are 2 GPUs and 1 MIG slice." in partial.describe_partial_start("The job", None)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ({"driver": "tpu.google.com", "device": "accel1"}, "1 TPU"),
        ({"driver": "neuron.aws.com", "device": "neuron-device-0"}, "1 Neuron device"),
        ({"driver": "gaudi.intel.com", "device": "0000-00-02-0-0x1020"}, "1 Gaudi accelerator"),
        ({"driver": "gpu.amd.com", "device": "gpu-1-129"}, "1 device of gpu.amd.com"),
        ({"driver": "dra.net", "device": "eth1"}, "1 device of dra.net"),
        ({"device": "gpu-0", "shareID": "8c2c"}, "1 shared GPU"),
        ({"driver": "gpu.amd.com", "device": "gpu-1-129", "shareID": "8c2c"}, "1 shared device of gpu.amd.com"),
    ],
)
def test_devices_are_named_by_their_driver(device: dict[str, Any], text: str) -> None:
    claims = {CLAIM: read_claim(claim(device))}
    assert describe_freed([claiming()], True, claims) == f"{text} released, 1 pod deleted."


def test_devices_for_administrators_are_not_held() -> None:
    claims = {CLAIM: read_claim(claim({"device": "gpu-0", "adminAccess": True}))}
    assert describe_freed([claiming()], True, claims) == "No GPUs were held, 1 pod deleted."


@pytest.mark.parametrize("claims", [{}, {CLAIM: read_claim({"status": {}})}], ids=["unread", "freed"])
def test_devices_that_are_not_known_are_never_none(claims: dict[str, Claim]) -> None:
    one = claiming()
    text = "An unknown number of devices of 1 ResourceClaim"
    assert describe_freed([one], True, claims) == f"{text} released, 1 pod deleted."
    assert describe_freed([one], False, claims) == f"{text} will be released when 1 pod terminates."
    used = usage([one], NOW, claims=claims)
    assert str(used) == (
        "Accelerator time: unknown. The devices of 1 ResourceClaim were not read. If the right is missing, see "
        "`ktrain rbac --dra`."
    )
    assert used.as_dict() == {"unknown_claims": 1}
    both = claiming(limits={"google.com/tpu": 4})
    assert describe_freed([both], True, claims).startswith("4 TPUs and an unknown number of devices of 1 ResourceClaim")
    assert str(usage([both], NOW, claims=claims)).splitlines()[1].startswith("The devices of 1 ResourceClaim were not")
    assert find_partial_start(JOB, [one, pod("job-worker-1", node=False)], claims) is None, "nothing is known to wait"


def test_a_pod_without_a_node_holds_no_devices_of_claims() -> None:
    waiting = claiming()
    del waiting["spec"]["nodeName"]
    assert describe_freed([waiting], True) == "No GPUs were held, 1 pod deleted."


def test_a_claim_that_pods_share_counts_once() -> None:
    users = ("job-worker-0", "job-worker-1")
    claims = {"gpus": read_claim(claim({"device": "gpu-0"}, {"device": "gpu-1"}, users=users))}
    pods = [claiming(name, template=False) for name in users]
    assert describe_freed(pods, True, claims) == "2 GPUs released, 2 pods deleted."
    assert usage(pods, NOW, claims=claims).gpus == 2
    assert [row[4] for row in replica_rows(PYTORCHJOB, pods, claims)] == [2, 0]


def ended(pod: dict[str, Any], begin: float, end: float | None, uid: str) -> dict[str, Any]:
    """The same pod with another lifetime."""
    meta = {**pod["metadata"], "uid": uid, "creationTimestamp": at(begin)}
    status = json.loads(json.dumps(pod["status"]))
    status["conditions"][0]["lastTransitionTime"] = at(begin)
    run = {"startedAt": at(begin), **({} if end is None else {"finishedAt": at(end)})}
    status["containerStatuses"][0]["state"] = {"running" if end is None else "terminated": run}
    return {**pod, "metadata": meta, "status": status | ({} if end is None else {"phase": "Failed"})}


def test_a_claim_that_pods_share_is_used_as_long_as_one_of_them_exists() -> None:
    """2 GPUs: the Master fails after 30 s and is replaced at 50 s, the Worker runs from 20 s to 60 s."""
    claims = {"gpus": read_claim(claim({"device": "gpu-0"}, {"device": "gpu-1"}, users=("a", "b", "c")))}
    failed, later = (ended(claiming("job-master-0", template=False), *life) for life in ((0, 30, "a"), (50, None, "c")))
    worker = ended(claiming("job-worker-0", template=False), 20, 60, "b")
    used = usage([failed, worker, later], NOW, claims=claims)
    assert (used.gpus, used.held, used.requested) == (2, 200, 200)
    assert usage([failed, worker], NOW, claims=claims).held == 120
    assert usage([failed, later], NOW, claims=claims).held == 2 * (30 + 50), "it is free in between"
    assert usage([failed], NOW, claims={}, counted_with=[worker]).unknown_claims == 0

    history = PodHistory(PYTORCHJOB)
    history.claims |= claims
    history.update({"a": failed, "b": worker, "c": later}, (), NOW)
    history.update({}, ["a"], NOW)
    assert history.usage(NOW, None).held == 200
    following = PodHistory(PYTORCHJOB, json.loads(json.dumps(history.handover({}, NOW))))
    following.claims |= claims
    following.update({"b": worker, "c": later}, (), NOW)
    assert following.usage(NOW, None).held == 200, "what the other process counted isn't counted again"


def test_usage_of_shared_claims_survives_the_removal_of_old_pods() -> None:
    """The Master fails 60 times while the Worker runs."""
    history = PodHistory(PYTORCHJOB)
    history.claims["gpus"] = read_claim(claim({"device": "gpu-0"}))
    history.update({"w": ended(claiming("job-worker-0", template=False), 5, None, "w")}, (), NOW)
    for number in range(60):
        uid = f"m{number}"
        history.update({uid: ended(claiming("job-master-0", template=False), number, number + 1, uid)}, (), NOW)
        history.update({}, [uid], NOW)
    assert len(history.all) < 60
    assert history.usage(NOW, None).held == 100


def test_devices_that_other_pods_use_are_not_released() -> None:
    claims = {"gpus": read_claim(claim({"device": "gpu-0"}, users=("job-worker-0", "notebook")))}
    one = claiming(template=False)
    assert describe_freed([one], True, claims) == "No GPUs were held, 1 pod deleted."
    tpus = claiming(template=False, limits={"google.com/tpu": 4})
    assert describe_freed([tpus], True, claims) == "4 TPUs released, 1 pod deleted."


def test_extended_resources_that_a_claim_serves_count_once() -> None:
    """KEP-5004: the scheduler creates a claim for `nvidia.com/gpu: 2`, and names it in the pod's status only."""
    one = pod(limits={"nvidia.com/gpu": 2})
    mapping = {"containerName": "pytorch", "resourceName": "nvidia.com/gpu", "requestName": "container-0-request-0"}
    status = {"resourceClaimName": "job-worker-0-extended-resources-x", "requestMappings": [mapping]}
    one["status"]["extendedResourceClaimStatus"] = status
    assert claims_of(one) == {}
    assert describe_freed([one], True) == "2 GPUs released, 1 pod deleted."
    other = {"containerName": "pytorch", "resourceName": "example.com/gold", "requestName": "container-0-request-1"}
    status["requestMappings"] = [mapping, other]
    devices = [
        {"device": f"gpu-{number}", "request": f"container-0-request-{request}"}
        for number, request in enumerate((0, 0, 1))
    ]
    claims = {"job-worker-0-extended-resources-x": read_claim(claim(*devices))}
    assert [amounts for _, amounts in amounts_of([one], claims)] == [{GPU: 3}]


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
        ({UNKNOWN: 2}, {"gpus": 0, "unknown_claims": 2}),
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
    assert "1 Master x an unknown number of devices of 1 ResourceClaim" in describe_job(
        ref, PYTORCHJOB, claims, created=True
    )


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


def parsed(code: str) -> ast.Module:
    """The syntax tree. Python 3.11 raises SystemError if a finalizer of other tests' garbage parses code meanwhile."""
    gc.collect()
    gc.disable()
    try:
        return ast.parse(code)
    finally:
        gc.enable()


def test_only_the_table_names_resources() -> None:
    """Comments, docstrings and the conditions of nodes aside: what decides or is shown uses the table."""
    found = {}
    for file in {*PACKAGE.rglob("*.py")} - {PACKAGE / "core/diagnosis/node_conditions.py"}:
        tree = parsed(file.read_text())
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


def test_a_claim_that_pods_share_is_one_for_all_of_them() -> None:
    def template(*claims: dict[str, str]) -> dict[str, Any]:
        named = [{"name": f"c{n}", **claim} for n, claim in enumerate(claims)]
        container = {"name": "pytorch", "image": "i:1", "resources": {"limits": {"google.com/tpu": 4}}}
        return {"template": {"spec": {"containers": [container], "resourceClaims": named}}}

    shared, own = {"resourceClaimName": "ring"}, {"resourceClaimTemplateName": "gpus"}
    replicas = {"Master": {"replicas": 1, **template(shared)}, "Worker": {"replicas": 7, **template(shared, own)}}
    job = {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "train"},
        "spec": {"pytorchReplicaSpecs": replicas},
    }  # fmt: skip
    assert accelerators_of_job(job) == {"google.com/tpu": 32, accelerators.UNKNOWN: 8}
    replicas["Master"]["template"]["spec"]["resourceClaims"] = ["ring"]  # the API server refuses it
    assert accelerators_of_job(job) == {"google.com/tpu": 32, accelerators.UNKNOWN: 8}
