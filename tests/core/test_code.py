"""The code of a job: how files are packed, what unpacks them in a pod, and what the manifest of each kind gets."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import find_startup_cause
from airflow_provider_ktrain.core.errors import ManifestError, RuntimeMismatchError
from airflow_provider_ktrain.core.identity.adoption import may_have_begun
from airflow_provider_ktrain.core.identity.names import CODE_ANNOTATION, MANIFEST_ANNOTATION, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.manifest.code import MAX_BYTES, Code, CodeFile, pack
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.loader import Document
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.start import ARCHIVE_DIRECTORY, CODE_DIRECTORY, run_with_code
from airflow_provider_ktrain.core.manifest.volumes import ClaimVolume
from airflow_provider_ktrain.core.prepare import CODE_HINT, Prepared, prepare

TRAIN = ["python", "train.py"]
NODE = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "node"}]}}}}}
TORCH: dict[str, Any] = {"spec": {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [NODE]}}}}
SERVED = Served(True, TORCH)
CODE = pack([CodeFile("train.py", b"print(1)"), CodeFile("lib/model.py", b"x = 1")])

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=120).filter(
    lambda name: name not in (".", "..")
)
files = st.builds(CodeFile, names, st.binary(max_size=200), st.booleans())


@given(st.lists(files, min_size=1, max_size=6, unique_by=lambda file: file.path), st.randoms())
def test_same_files_in_any_order_are_packed_alike(listed: list[CodeFile], random: Any) -> None:
    shuffled = list(listed)
    random.shuffle(shuffled)
    assert pack(shuffled) == pack(listed)


@given(st.lists(files, min_size=1, max_size=4, unique_by=lambda file: file.path), st.data())
def test_hash_depends_on_path_content_and_mode(listed: list[CodeFile], data: Any) -> None:
    at = data.draw(st.integers(0, len(listed) - 1))
    file = listed[at]
    others = {f.path for f in listed}
    change = data.draw(
        st.sampled_from(
            [
                replace(file, content=file.content + b"x"),
                replace(file, executable=not file.executable),
                replace(file, path=next(n for n in ("a", "b", "c", "d", "e") if n not in others)),
            ]
        )
    )
    assert pack([*listed[:at], change, *listed[at + 1 :]]).hash != pack(listed).hash


def test_hash_is_the_same_in_all_releases() -> None:
    """A retry of a newer release compares it with the annotation of a job of an older one."""
    assert CODE.hash == "9aa995aa444c91db"
    assert str(CODE) == f"2 files, 13 bytes ({len(CODE.archive)} bytes packed), hash {CODE.hash}"
    assert "archive" not in repr(CODE)


def test_too_large_code_names_the_largest_files() -> None:
    files = [CodeFile(f"data/{size}.bin", os.urandom(size * 1024)) for size in (400, 1, 500)]
    with pytest.raises(ManifestError) as error:
        pack(files)
    assert str(error.value).startswith("code: the code is too large: 901.")
    assert "at most 700.0 KiB packed" in str(error.value)
    assert "data/500.bin (500.0 KiB), data/400.bin (400.0 KiB), data/1.bin (1.0 KiB)" in str(error.value)
    assert ".ktrainignore" in error.value.remedy
    assert error.value.final


def test_code_that_just_fits_is_packed() -> None:
    assert len(pack([CodeFile("a", os.urandom(MAX_BYTES - 2048))]).archive) <= MAX_BYTES


def test_no_files_are_an_error() -> None:
    with pytest.raises(ManifestError, match="there are no files to send"):
        pack([])


# ---- in a pod


def start(
    tmp_path: Path, *command: str, code: Code = CODE, python: str = sys.executable, **options: Any
) -> subprocess.Popen[str]:
    """Run a command as a pod does: the manifest's command, with the pod's paths replaced."""
    built = run_with_code(build("PyTorchJob", JobOptions(image="i", command=command)), "config-map")
    words = built["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"]
    (tmp_path / "code.tar.gz").write_bytes(code.archive)
    (tmp_path / "code").mkdir(exist_ok=True)
    here = [w.replace(ARCHIVE_DIRECTORY, str(tmp_path)).replace(CODE_DIRECTORY, str(tmp_path / "code")) for w in words]
    assert here[0] == "python3"
    return subprocess.Popen(
        [python, *here[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


def test_program_runs_in_the_directory_with_its_arguments_and_input(tmp_path: Path) -> None:
    with start(tmp_path, "sh", "-c", 'echo "$0|$1"; ls; pwd; cat; exit 7', "a b", "$(x)") as run:
        out, err = run.communicate("given")
    assert out.splitlines() == ["a b|$(x)", "lib", "train.py", str(tmp_path / "code"), "given"]
    assert (run.returncode, err) == (7, "")


def test_program_keeps_the_process_and_its_signals(tmp_path: Path) -> None:
    """It has the process id of the container's command, and no signal is ignored."""
    script = "trap 'echo stopped; exit 3' TERM; echo $$; grep SigIgn /proc/$$/status; sleep 600 & wait"
    with start(tmp_path, "sh", "-c", script) as run:
        assert run.stdout is not None
        assert int(run.stdout.readline()) == run.pid
        if sys.platform == "linux":
            assert int(run.stdout.readline().split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0
        run.terminate()
        assert run.stdout.readline() == "stopped\n"
        subprocess.run(["pkill", "-P", str(run.pid)], check=False)
    assert run.returncode == 3


def test_code_is_importable_and_unpacked_again_after_a_restart(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import lib.model, train; open('lib/model.py', 'a').write('y = 2'); print('ok')"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "other")}
    for _ in range(2):
        with start(tmp_path, *program, env=environment) as run:
            assert run.communicate()[0] == "1\nok\n"
    assert (tmp_path / "code/lib/model.py").read_text() == "x = 1y = 2"


def test_unpacked_files_have_the_current_time(tmp_path: Path) -> None:
    """If all had one time, Python would run the bytecode of other files of the same size in a PYTHONPYCACHEPREFIX."""
    began = int(time.time())
    with start(tmp_path, "true") as run:
        assert run.wait() == 0
    assert all((tmp_path / "code" / name).stat().st_mtime >= began for name in ("train.py", "lib/model.py"))


def test_restart_writes_no_file_to_where_a_link_leads(tmp_path: Path) -> None:
    """The program replaced a file by a link, to its checkpoint for example."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("trained")
    for _ in range(2):
        with start(tmp_path, "ln", "-sf", str(checkpoint), "train.py") as run:
            assert run.wait() == 0
    assert checkpoint.read_text() == "trained"


def test_restart_writes_no_file_through_a_linked_directory(tmp_path: Path) -> None:
    """The program replaced a directory by a link to its data set."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "model.py").write_text("samples")
    for _ in range(2):
        with start(tmp_path, "sh", "-c", f"rm -r lib && ln -s {data} lib") as run:
            assert run.wait() == 0
    assert (data / "model.py").read_text() == "samples"


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8"])
def test_code_is_unpacked_by_an_old_python(tmp_path: Path, version: str) -> None:
    """Also over what is there, and with a locale that isn't UTF-8."""
    found = [f"python{version}", *glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python3"))]
    runs = (path for path in map(shutil.which, found) if path and not subprocess.run([path, "-c", ""]).returncode)
    python = next(runs, None)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    files = pack([CodeFile("é/model.py", b"x = 1"), CodeFile("link.py", link="é/model.py")])
    for _ in range(2):
        with start(tmp_path, "cat", "link.py", code=files, python=python, env={"PATH": os.environ["PATH"]}) as run:
            assert run.communicate() == ("x = 1", "")
    assert (tmp_path / "code" / "é" / "model.py").read_text() == "x = 1"


def test_modules_of_the_image_do_not_hide_those_of_python(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tarfile.py").write_text("raise SystemExit('hidden')")
    with start(tmp_path, "echo", "ok", cwd=tmp_path / "work", env={**os.environ, "PYTHONPATH": "."}) as run:
        assert run.communicate() == ("ok\n", "")


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("./train.py", 126)])
def test_command_that_cannot_be_executed_has_the_exit_code_of_a_shell(tmp_path: Path, command: str, code: int) -> None:
    with start(tmp_path, command) as run:
        _, err = run.communicate()
    assert run.returncode == code
    assert err.startswith(f"{command}: ")


# ---- in the manifest


def programs(manifest: Manifest) -> dict[str, Any]:
    """The words of each role's command after the part that unpacks the code."""
    kind = kind_of(manifest["kind"])
    found = {}
    for role, template in kind.form.templates(manifest):
        pod = template["spec"]
        program = kind.form.program(manifest["spec"], pod, role)
        assert program["command"][:4] == ["python3", "-I", "-S", "-c"]
        found[role] = program["command"][10:]
        assert [v["name"] for v in pod["volumes"]] == ["ktrain-archive", "ktrain-code"]
        mounts = kind.form.main_container(manifest["spec"], pod, role)["volumeMounts"]
        assert [(m["mountPath"], m.get("readOnly", False)) for m in mounts] == [
            (ARCHIVE_DIRECTORY, True), (CODE_DIRECTORY, False),
        ]  # fmt: skip
    return found


def test_all_replicas_of_a_pytorchjob_run_with_code() -> None:
    manifest = build("PyTorchJob", JobOptions(image="i", command=TRAIN, args=["--epochs", "3"], workers=2))
    made = run_with_code(manifest, "config-map")
    assert programs(made) == {"Master": TRAIN, "Worker": TRAIN}
    master = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert master["containers"][0]["args"] == ["--epochs", "3"]
    assert master["volumes"][0] == {"name": "ktrain-archive", "configMap": {"name": "config-map"}}
    assert "volumes" not in manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]


@pytest.mark.parametrize(("version", "worker"), [("v1", ["sleep", "365d"]), ("v2beta1", ["/usr/sbin/sshd", "-De"])])
def test_workers_of_an_mpijob_unpack_code_before_the_operators_command(version: str, worker: list[str]) -> None:
    command = ["mpirun", "python", "train.py"]
    manifest = build("MPIJob", JobOptions(image="i", command=command, workers=2), f"kubeflow.org/{version}")
    assert programs(run_with_code(manifest, "config-map")) == {"Launcher": command, "Worker": worker}
    containers = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    containers[0]["command"] = ["sshd", "-f", "mine"]
    assert programs(run_with_code(manifest, "config-map"))["Worker"] == ["sshd", "-f", "mine"]


@pytest.mark.parametrize("kind", ["PyTorchJob", "MPIJob", "TrainJob"])
def test_code_without_a_command_is_refused(kind: str) -> None:
    workers = None if kind == "TrainJob" else 1
    manifest = build(kind, JobOptions(image="i", args=["--epochs", "3"], workers=workers))
    with pytest.raises(ManifestError, match=r"\$\.spec\..*: code needs a command, because the image's own ENTRYPOINT"):
        run_with_code(manifest, "config-map")


def request(kind: str, **options: Any) -> JobRequest:
    manifest = build(kind, JobOptions(image="i", command=TRAIN, **options))
    return JobRequest(kind_of(kind), Owner(TaskKey("prod", "dag", "task", "run"), 1, "ti"), 1, manifest, code=CODE)


def stamped(asked: JobRequest, served: Served | None = None) -> Manifest:
    kind = asked.kind
    fitted = asked.fitted(kind.api_versions[0])
    return asked.stamped(fitted, "team", "s-1", attempt=1, now=1000.0, served=served)


def test_hash_is_an_annotation_and_part_of_the_manifests_hash() -> None:
    asked = request("PyTorchJob")
    annotations = stamped(asked)["metadata"]["annotations"]
    assert annotations[CODE_ANNOTATION] == CODE.hash
    others = (None, pack([CodeFile("train.py", b"print(2)")]))
    hashes = {stamped(replace(asked, code=code))["metadata"]["annotations"][MANIFEST_ANNOTATION] for code in others}
    assert annotations[MANIFEST_ANNOTATION] not in hashes
    assert len(hashes) == 2


def read(manifest: Manifest) -> Prepared:
    return prepare(Document(manifest), JobOptions())


@pytest.mark.parametrize("kind", ["PyTorchJob", "MPIJob", "TrainJob"])
def test_saved_manifest_of_a_job_with_code_becomes_the_authors(kind: str) -> None:
    options: dict[str, Any] = {} if kind == "TrainJob" else {"workers": 1}
    asked = request(kind, volumes=[ClaimVolume("scratch", "/scratch")], **options)
    served = SERVED if kind == "TrainJob" else None
    saved = stamped(asked, served)
    saved["metadata"]["annotations"][CODE_ANNOTATION] = "of another release"
    prepared = read(saved)
    (change,) = prepared.changes
    assert change.hint == CODE_HINT
    expected = read(stamped(replace(asked, code=None), served)).manifest
    if kind == "MPIJob":  # with code, a Worker needs the operator's command
        worker = expected["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
        worker["command"] = ["/usr/sbin/sshd", "-De"]
    assert prepared.manifest == expected
    assert read(expected).changes == []


def test_saved_manifest_can_be_used_with_other_code() -> None:
    saved = read(stamped(request("PyTorchJob"))).manifest
    again = stamped(replace(request("PyTorchJob"), manifest=saved))
    assert programs(again) == {"Master": TRAIN}
    pod = again["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["ktrain-archive", "ktrain-code"]


def test_volumes_of_a_manifest_without_code_are_kept() -> None:
    manifest = build("PyTorchJob", JobOptions(image="i"))
    pod = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["volumes"] = [{"name": "ktrain-code", "emptyDir": {}}]
    assert read(manifest).manifest == manifest


@pytest.mark.parametrize(
    ("metadata", "known"),
    [
        ({}, "4e11e15c36eb786b"),
        ({"metadata": None}, "4e4020b4dcd35e80"),
        ({"metadata": {"name": "a", "annotations": None}}, "1c8aec6c0fc5eba8"),
    ],
)
def test_hash_of_a_manifest_without_code_is_that_of_earlier_releases(metadata: Manifest, known: str) -> None:
    """Else a retry after an upgrade replaces a job that trains (`reattach="if_unchanged"`)."""
    container = {"name": "pytorch", "image": "i", "command": ["x"]}
    replicas = {"Master": {"template": {"spec": {"containers": [container]}}}}
    manifest = {"kind": "PyTorchJob", **metadata, "spec": {"pytorchReplicaSpecs": replicas}}
    asked = replace(request("PyTorchJob"), manifest=manifest, code=None)
    assert stamped(asked)["metadata"]["annotations"][MANIFEST_ANNOTATION] == known


def test_config_map_is_named_after_job_and_submission() -> None:
    made = stamped(request("PyTorchJob"))
    volumes = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["volumes"]
    assert volumes[0]["configMap"]["name"] == f"{made['metadata']['name']}-code-s-1"


def test_container_of_a_trainjob_gets_code_by_runtime_patches() -> None:
    asked = request("TrainJob", pod_override={"dataset-initializer": {"spec": {"serviceAccountName": "reader"}}})
    made = stamped(request("TrainJob"), SERVED)
    assert made["spec"]["trainer"]["command"][10:] == TRAIN
    (entry,) = made["spec"]["runtimePatches"]
    (job,) = entry["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert [v["name"] for v in pod["volumes"]] == ["ktrain-archive", "ktrain-code"]
    assert pod["containers"][0]["name"] == "node"
    fitted = run_with_code(asked.fitted(asked.kind.api_versions[0]), "config-map")
    others = [t for role, t in asked.kind.form.templates(fitted) if role == "dataset-initializer"]
    assert others == [{"spec": {"serviceAccountName": "reader"}}]


MPI_RUNTIME = {**TORCH, "spec": {**TORCH["spec"], "mlPolicy": {"mpi": {}}}}


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (replace(SERVED, runtime=None, unreadable="no right"), "code can't be applied, because the cluster doesn't"),
        (replace(SERVED, runtime=MPI_RUNTIME), "code can't be used with an MPI runtime"),
    ],
    ids=["unreadable runtime", "MPI runtime"],
)
def test_trainjob_whose_nodes_cannot_get_code_is_refused(served: Served, why: str) -> None:
    with pytest.raises(RuntimeMismatchError, match=why):
        stamped(request("TrainJob"), served)


# ---- adoption

JOB = {"kind": "PyTorchJob", "metadata": {}, "status": {"conditions": [{"type": "Created", "status": "True"}]}}


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {}, "status": {"phase": "Pending", **status}}


@pytest.mark.parametrize(
    ("job", "pods", "begun"),
    [
        (JOB, [], False),
        (JOB, [pod(containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}])], False),
        (JOB, [pod(), pod(initContainerStatuses=[{"state": {"running": {}}}])], True),
        (JOB, [pod(phase="Running")], True),
        (JOB, [pod(phase="Failed")], True),
        (JOB, [pod(containerStatuses=[{"state": {"waiting": {}}, "restartCount": 1}])], True),
        ({**JOB, "status": {"conditions": [{"type": "Running", "status": "False"}]}}, [], True),
        ({**JOB, "metadata": {"annotations": {"ktrain.airflow/suspended-by": "ti"}}}, [], True),
        ({"kind": "TrainJob", "status": {"jobsStatus": [{"name": "node", "ready": 1}]}}, [], True),
    ],
    ids=["no pods", "waits", "init", "runs", "failed", "restarted", "ran before", "suspended", "trainjob"],
)
def test_job_has_begun_if_a_container_may_have_started(job: Any, pods: list[Any], begun: bool) -> None:
    assert may_have_begun(job, pods) is begun


@pytest.mark.parametrize(("waited", "failed"), [(150, False), (301, True)])
def test_pods_may_wait_for_the_config_map_while_its_create_is_repeated(waited: float, failed: bool) -> None:
    """For 120 seconds, then another try may create it."""
    meta = {"name": "train-master-0", "uid": "p", "labels": {"training.kubeflow.org/replica-type": "master"}}
    waiting = {"name": "pytorch", "state": {"waiting": {"reason": "ContainerCreating"}}}
    message = 'MountVolume.SetUp failed for volume "ktrain-archive" : configmap "train-code-s" not found'
    event = {"reason": "FailedMount", "message": message, "involvedObject": {"kind": "Pod", "name": meta["name"]}}
    pods = [{"metadata": meta, "status": {"phase": "Pending", "containerStatuses": [waiting]}}]
    cause = find_startup_cause(make_evidence(JOB, pods, [event]), waited)
    assert (cause is not None and "train-code-s" in cause.summary) is failed


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({}, "Pulling"),
        ({"conditions": [{"type": "PodReadyToStartContainers", "status": "True"}]}, "Scheduled"),
        ({"initContainerStatuses": [{"name": "init-pytorch", "state": {"running": {}}}]}, "Scheduled"),
    ],
    ids=["pulls its image", "has its network", "runs an init container"],
)
def test_pod_that_found_its_config_map_late_may_pull_its_image_for_long(status: dict[str, Any], reason: str) -> None:
    """As in recording 31: the kubelet tried to mount the volume before the ConfigMap existed."""
    meta = {"name": "train-worker-0", "uid": "p", "labels": {"training.kubeflow.org/replica-type": "worker"}}
    waiting = {"name": "pytorch", "state": {"waiting": {"reason": "PodInitializing"}}}
    message = 'MountVolume.SetUp failed for volume "ktrain-archive" : configmap "train-code-s" not found'
    about = {"kind": "Pod", "name": meta["name"]}
    events = [
        {"reason": "FailedMount", "message": message, "involvedObject": about},
        {"reason": reason, "message": "", "involvedObject": about},
    ]
    pods = [{"metadata": meta, "status": {"phase": "Pending", "containerStatuses": [waiting], **status}}]
    assert find_startup_cause(make_evidence(JOB, pods, events), 1200) is None
