"""What runs a container's program: it unpacks the job's code, and prints stacks when the container is stopped.

`in_pod/starter.py` is sent as text before the container's own command. A pod's signals, exit code, arguments and
standard input are the command's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.task_variables import PROGRAM
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.manifest_fields import mapping_at
from airflow_provider_ktrain.core.logs.stacks import MARK
from airflow_provider_ktrain.core.manifest.code import ARCHIVE
from airflow_provider_ktrain.core.manifest.loader import plain

ARCHIVE_DIRECTORY = "/ktrain/archive"  #: Directory at which the pods mount the ConfigMap.
CODE_DIRECTORY = "/ktrain/code"  #: Directory to which the pods unpack the code, and in which the program runs.
CODE_VOLUMES = ("ktrain-archive", "ktrain-code")  #: Volumes of the pods.
GRACE_SECONDS = 30.0  #: Kubernetes' default of terminationGracePeriodSeconds.
_CODE = (f"{ARCHIVE_DIRECTORY}/{ARCHIVE}", CODE_DIRECTORY)
#: Isolated from PYTHONPATH, from modules in the image's working directory, and from the image's own sitecustomize.
_PYTHON = ("python3", "-I", "-S", "-c")
_START_WORDS = len(_PYTHON) + 1 + len(_CODE) + 3  #: Includes the starter, and its arguments about stacks.
_IN_POD = Path(__file__).with_name("in_pod")


def run_with_code(
    manifest: Mapping[str, Any],
    config_map: str | None,
    *,
    stacks: str = "",
    runtime: Mapping[str, Any] | None = None,
) -> Manifest:
    """A copy of the manifest whose program runs in the directory of the code, and prints stacks when it is stopped.

    :param config_map: name of the ConfigMap. None: the job has no code.
    :param stacks: name of the job's directory for stacks, the same in all pods: mpirun carries it from the Launcher to
        the Workers. Default: empty, no stacks are printed.
    :param runtime: of a TrainJob, whose pods have its grace period. Default: None, it isn't known.
    :raises ManifestError: the job has code, and a container has no command.
    """
    result: Manifest = plain(manifest)
    kind, spec = kind_of(result.get("kind")), mapping_at(result, "spec")
    peer_command = kind.operator_of(str(result.get("apiVersion"))).peer_command
    has_code = config_map is not None
    archive, code = CODE_VOLUMES
    volumes = ({"name": archive, "configMap": {"name": config_map}}, {"name": code, "emptyDir": {}})
    mounts = (
        {"name": archive, "mountPath": ARCHIVE_DIRECTORY, "readOnly": True},
        {"name": code, "mountPath": CODE_DIRECTORY},
    )
    # a runtime's program is outside of its pod templates, to which nothing has to be added without code
    templates = kind.form.option_templates(result) if has_code or not kind.runtimes else [("", {})]
    for role, template in templates:
        pod = mapping_at(template, "spec")
        program = kind.form.program(spec, pod, role)
        needs_command = program.get("args") or kind.runs_program(role)
        command = program.get("command") or ([] if needs_command else peer_command)
        if not command and not has_code:
            continue
        if not command:
            raise ManifestError(
                "code needs a command, because the image's own ENTRYPOINT isn't known",
                where=f"$.spec.{kind.form.replica_specs}.{role}" if kind.form.replica_specs else "$.spec.trainer",
                found="no command",
                expected='a command, such as ["python", "train.py"]',
                remedy="set command",
            )
        grace = kind.form.grace_seconds(result, pod, runtime)
        seconds = GRACE_SECONDS if grace is None else float(grace)
        holds = "1" if role in kind.launchers else "0"
        words = (*(_CODE if has_code else ("", "")), stacks, f"{seconds:g}", holds)
        program["command"] = [*_PYTHON, _starter(), *words, *command]
        if has_code:
            container = kind.form.main_container(spec, pod, role)
            pod["volumes"] = [*(pod.get("volumes") or ()), *plain(volumes)]
            container["volumeMounts"] = [*(container.get("volumeMounts") or ()), *plain(mounts)]
    return result


def runs_function(manifest: Mapping[str, Any]) -> bool:
    """Whether the program of the manifest is a function that was sent with it."""
    result: Manifest = plain(manifest)
    kind, spec = kind_of(result.get("kind")), mapping_at(result, "spec")
    templates = kind.form.templates(result) if not kind.runtimes else [("", {})]
    programs = [kind.form.program(spec, mapping_at(template, "spec"), role) for role, template in templates]
    return any(
        isinstance(variable, Mapping) and variable.get("name") == PROGRAM
        for program in programs
        for variable in program.get("env") or ()
    )


def without_start(command: list[Any]) -> list[Any]:
    """A container's own command, without the words of a task that start it."""
    if command[: len(_PYTHON)] == [*_PYTHON] and len(command) > _START_WORDS:
        at = len(_PYTHON) + 1
        if command[at : at + 2] in ([*_CODE], ["", ""]) and command[_START_WORDS - 1] in ("0", "1"):
            return command[_START_WORDS:]
    return command


def is_starter(text: str) -> bool:
    """Whether a text is the starter of this or another release."""
    return text.startswith("import os\n") and f'MARK = "{MARK}"' in text


@functools.cache
def _starter() -> str:
    """The text of the starter, with that of its sitecustomize, without comments."""
    starter, site = (
        "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")) + "\n"
        for text in (_IN_POD.joinpath(name).read_text(encoding="utf-8") for name in ("starter.py", "sitecustomize.py"))
    )
    empty = 'SITECUSTOMIZE = ""'
    place = next(line for line in starter.splitlines() if line.startswith(empty))
    return starter.replace(place, f"SITECUSTOMIZE = {site!r}")
