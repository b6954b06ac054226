"""The parameters of an operator that runs a training job, and what is made of them: request, manifest, options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.errors import ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.core.identity.names import OnFinishAction, Owner, Reattach, TaskKey
from airflow_provider_ktrain.core.kinds import Kind, Manifest
from airflow_provider_ktrain.core.kinds.form import POD_OVERRIDE
from airflow_provider_ktrain.core.logs.selection import LogChoice, check_choice
from airflow_provider_ktrain.core.manifest.volumes import Volume
from airflow_provider_ktrain.parse_checks import ParseChecks, is_literal

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.core.manifest.code import Code
    from airflow_provider_ktrain.core.manifest.job_request import JobRequest
    from airflow_provider_ktrain.core.manifest.overlay import JobOptions
    from airflow_provider_ktrain.core.prepare import Prepared
    from airflow_provider_ktrain.engine.follow.options import Options
    from airflow_provider_ktrain.engine.follow.outcome import Outcome

#: The parameters needed to follow and release the job of an earlier try, without a valid manifest.
FOLLOWING_PARAMETERS = (
    "deferrable", "on_finish_action", "reattach", "queue_timeout", "schedule_timeout", "startup_timeout",
    "partial_start_timeout", "log_stall_timeout", "progress_timeout", "max_restarts", "crash_loop_limit",
    "require", "fail_on_nan",
)  # fmt: skip


class JobParameters(ParseChecks, compat.StorableLog, BaseOperator):
    """The parameters that all kinds of jobs have. An operator documents its own in its docstring.

    An operator of another kind adds its parameters in `__init__`, `template_fields` and `_job_options`, and their valid
    values to `core/checks/parameters.py`. `scripts/signatures.py` copies the parameters of this class for editors, and
    the reference groups them by the comments in the signature.
    """

    kind: ClassVar[Kind]
    defer_padding: ClassVar[float] = 900.0  #: Seconds from the task's deadline to the timeout of the deferral.
    #: Seconds that the worker follows the job after the 1st, 2nd and 3rd failed trigger of a try; then to its end.
    seconds_in_worker: ClassVar[Sequence[float]] = (60.0, 300.0, 900.0)
    #: Seconds to retry an unreachable API server when neither a trigger nor a retry can take over.
    patience: ClassVar[float] = 900.0
    _manifest_file = ""  # its path; empty if it is not a file

    template_fields: Sequence[str] = (
        "manifest", "name", "namespace", "image", "command", "args", "code", "env", "gpus", "container_resources",
        "nproc_per_node", "hosts", "node_selector", "tolerations", "affinity", "priority_class_name", "queue_name",
        "workload_priority_class", "volumes", "pod_override", "checkpoint_dir", "labels", "annotations",
        "kubernetes_conn_id", "cluster_context", "require",
    )  # fmt: skip
    template_fields_renderers: ClassVar[dict[str, str]] = {"manifest": "yaml"}

    def __init__(
        self,
        *,
        # job
        manifest: Mapping[str, Any] | str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        deferrable: bool | None = None,
        reattach: Reattach = "always",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        pod_override: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        # program
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        code: str | os.PathLike[str] | None = None,
        env: Mapping[str, Any] | None = None,
        volumes: Sequence[Volume] = (),
        nproc_per_node: int | str | None = None,
        checkpoint_dir: str | None = None,
        resume_on_clear: bool = False,
        # placement
        gpus: int | str | None = None,
        container_resources: Mapping[str, str | int] | None = None,
        hosts: Sequence[str] = (),
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        affinity: Mapping[str, Any] | None = None,
        priority_class_name: str | None = None,
        queue_name: str | None = None,
        workload_priority_class: str | None = None,
        avoid_failed_nodes: bool = False,
        # limits
        queue_timeout: timedelta | float | None = None,
        schedule_timeout: timedelta | float | None = None,
        startup_timeout: timedelta | float | None = timedelta(hours=1),
        partial_start_timeout: timedelta | float | None = timedelta(hours=1),
        log_stall_timeout: timedelta | float | None = None,
        progress_timeout: timedelta | float | None = None,
        max_restarts: int | None = None,
        crash_loop_limit: int | None = 6,
        fail_on_nan: bool | str | Collection[str] = False,
        # logs
        logs: LogChoice = "auto",
        hang_traces: bool = True,
        # end
        on_finish_action: Literal["delete_job", "keep_job", "delete_succeeded_job"] = "delete_job",
        skip_on_exit_code: int | Collection[int] | None = None,
        require: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.manifest = manifest
        self.name = name
        self.namespace = namespace
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context
        self.deferrable = compat.default_deferrable() if deferrable is None else deferrable
        self.reattach = reattach
        self.labels = labels
        self.annotations = annotations
        self.pod_override = pod_override
        self.server_dry_run = dry_run  # `dry_run` is a method of every operator
        self.image = image
        self.command = command
        self.args = args
        self.code = code
        self.env = env
        self.volumes = volumes
        self.nproc_per_node = nproc_per_node
        self.checkpoint_dir = checkpoint_dir
        self.resume_on_clear = resume_on_clear
        self.gpus = gpus
        self.container_resources = container_resources
        self.hosts = hosts
        self.node_selector = node_selector
        self.tolerations = tolerations
        self.affinity = affinity
        self.priority_class_name = priority_class_name
        self.queue_name = queue_name
        self.workload_priority_class = workload_priority_class
        self.avoid_failed_nodes = avoid_failed_nodes
        self.queue_timeout = queue_timeout
        self.schedule_timeout = schedule_timeout
        self.startup_timeout = startup_timeout
        self.partial_start_timeout = partial_start_timeout
        self.log_stall_timeout = log_stall_timeout
        self.progress_timeout = progress_timeout
        self.max_restarts = max_restarts
        self.crash_loop_limit = crash_loop_limit
        self.fail_on_nan = fail_on_nan
        self.logs = logs
        self.hang_traces = hang_traces
        self.on_finish_action = on_finish_action
        self.skip_on_exit_code = skip_on_exit_code
        self.require = require

    # the manifest

    def resolve_template_files(self) -> None:
        """Read a manifest file, so that its text is templated and appears in the rendered fields.

        `template_ext` is not used: Airflow would also read every program argument that ends in `.yaml`.
        """
        if (path := _path_of(self.manifest)) and "{{" not in path:
            with contextlib.suppress(ManifestError):  # execute raises it: here it would break the whole DAG
                self.manifest, self._manifest_file = self._source(path), path
        super().resolve_template_files()

    def render_template(
        self, content: Any, context: Context, jinja_env: Any = None, seen_oids: set[int] | None = None
    ) -> Any:
        """Render as Airflow does, but copy volumes instead of changing them: several tasks may share one."""
        if is_dataclass(content) and not isinstance(content, type) and isinstance(content, Volume):
            return replace(content, **super().render_template(vars(content), context, jinja_env, seen_oids))
        return super().render_template(content, context, jinja_env, seen_oids)

    def _source(self, path: str) -> str:
        """The text of a manifest file, found as Airflow finds template files."""
        env = self.get_template_env()
        try:
            if os.path.isabs(path):
                with open(path, encoding="utf-8") as file:
                    return file.read()
            assert env.loader is not None
            return str(env.loader.get_source(env, path)[0])
        except Exception as e:
            searched = getattr(env.loader, "searchpath", [])
            raise ManifestUnreadableError(
                f"manifest: the file {path!r} can't be read ({type(e).__name__})",
                expected=f"a YAML file, absolute or below {' or '.join(map(str, searched)) or 'the DAG folder'}",
                remedy="correct the path, or pass the manifest as a dict or YAML text",
            ) from None

    def _read_code(self) -> Code | None:
        """Pack the files of `code`. A relative path is searched as Airflow searches template files."""
        from airflow_provider_ktrain.engine.submit.code_directory import is_missing, read_code

        if self.code is None:
            return None
        given = os.fspath(self.code)
        searched = getattr(self.get_template_env().loader, "searchpath", None) or ["."]
        found = [path for folder in searched if not is_missing(path := Path(folder, given))]
        if not found:
            raise ManifestUnreadableError(
                f"the code {given!r} does not exist",
                where="code",
                expected=f"a directory or file, absolute or below {' or '.join(map(str, searched))}",
                remedy="correct the path, or check that the DAG bundle contains it",
            )
        return read_code(found[0])

    def _rendered(self, context: Context) -> Mapping[str, Any] | str | None:
        """The manifest after templating. A file whose path is a template or mapped is only read now."""
        if path := _path_of(self.manifest):
            self._manifest_file = path
            return str(self.render_template(self._source(path), context))
        return self.manifest

    def _job_options(self) -> JobOptions:
        from airflow_provider_ktrain.core.manifest.overlay import JobOptions

        numbers = parameters.converted({"gpus": self.gpus, "nproc_per_node": self.nproc_per_node})
        options = JobOptions(
            image=self.image,
            command=self.command,
            args=self.args,
            env=self.env or {},
            gpus=numbers["gpus"],
            resources=self.container_resources or {},
            nproc_per_node=numbers["nproc_per_node"],
            hosts=self.hosts or (),
            node_selector=self.node_selector or {},
            tolerations=self.tolerations or (),
            affinity=self.affinity,
            priority_class=self.priority_class_name,
            queue=self.queue_name,
            workload_priority_class=self.workload_priority_class,
            volumes=self.volumes or (),
            pod_override=self.pod_override or {},
            labels=self.labels or {},
            annotations=self.annotations or {},
        )
        return options if options.gpus is None else replace(options, gpu_resource=compat.default_accelerator())

    def build_manifest(self, source: Mapping[str, Any] | str | None) -> Manifest:
        """Load or build the manifest, apply the options, check the result, and log warnings.

        :param source: the rendered manifest; None builds one from the options.
        """
        prepared = self._prepared(source)
        warnings = [*prepared.document.left_out, *(p.text for p in prepared.problems if p.level == "warning")]
        if warnings:
            self.log.warning("Manifest: %s", "\nManifest: ".join(warnings))
        if prepared.errors:
            raise ManifestError("the manifest is invalid: " + "\n".join(map(str, prepared.errors)))
        return prepared.manifest

    def _prepared(self, source: Mapping[str, Any] | str | None) -> Prepared:
        from airflow_provider_ktrain.core.manifest.loader import TEXT, load_documents, the_job
        from airflow_provider_ktrain.core.prepare import prepare

        document = None if source is None else the_job(load_documents(source, file=self._manifest_file or TEXT))
        return prepare(document, self._job_options(), self.kind.name)

    def _requested(self, *, with_code: bool) -> dict[str, Any]:
        """The job that the parameters describe, for OpenLineage; only a part of it if they are invalid.

        A manifest file whose path is a template is not read here, because only the task renders its content.
        """
        from airflow_provider_ktrain.core.reporting import lineage

        namespace = {"namespace": self.namespace} if self.namespace else {}
        found: dict[str, Any] = {"job": {"kind": self.kind.name, **namespace}}
        with contextlib.suppress(ManifestError):
            if not _path_of(self.manifest) and not (prepared := self._prepared(self.manifest)).errors:
                found |= lineage.of_manifest(self.kind, prepared.manifest)
            if with_code and (code := self._read_code()):
                found["codeHash"] = code.hash
        return found

    # what is submitted and followed

    def _request(self, context: Context) -> JobRequest:
        """The job that this try requests. It contains the error of an invalid parameter: see `JobRequest.invalid`."""
        from airflow_provider_ktrain.core.manifest.deadline import run_seconds
        from airflow_provider_ktrain.core.manifest.job_request import JobRequest

        source, manifest, code, invalid = None, None, None, None
        try:
            self._check_parameters()
            source = self._rendered(context)
            code = self._read_code()
            manifest = self.build_manifest(source)
        except ManifestError as e:
            invalid = e
        owner, first_try = self._owner(context)
        action = OnFinishAction.of(self.on_finish_action)
        # without a task store, the job is the only proof of its success and is kept for a while
        expires = action is OnFinishAction.DELETE_JOB and not compat.has_task_store(context)
        return JobRequest(
            kind=self.kind,
            owner=owner,
            first_try=first_try,
            manifest=manifest,
            generated=source is None,
            invalid=invalid,
            name_prefix=self.name,
            namespace=self.namespace,
            kubernetes_conn_id=self.kubernetes_conn_id,
            cluster_context=self.cluster_context,
            on_finish_action=action,
            reattach=self.reattach if invalid is None or self._can_follow() else "if_unchanged",
            run_seconds=run_seconds(self.execution_timeout),
            schedule_seconds=_seconds(self.schedule_timeout) if invalid is None else None,
            expire_seconds=compat.SUCCEEDED_JOB_TTL if expires else None,
            checkpoint_root=self.checkpoint_dir,
            resume_on_clear=self.resume_on_clear,
            dry_run=self.server_dry_run,
            avoid_nodes=self._nodes_to_avoid(context),
            code=code,
            hang_traces=self.hang_traces,
        )

    def _nodes_to_avoid(self, context: Context) -> Mapping[str, str]:
        """The nodes on which earlier tries failed, each with the reason; none without `avoid_failed_nodes`."""
        from airflow_provider_ktrain.operators import task_store

        if not self.avoid_failed_nodes:
            return {}
        if not compat.has_task_store(context):
            self.log.warning("avoid_failed_nodes has no effect: it needs Airflow 3.3 or newer.")
        return task_store.read_failed_nodes(context)

    def _owner(self, context: Context) -> tuple[Owner, int]:
        """This try as an owner, and the first try since the task was last cleared."""
        from airflow_provider_ktrain.core.identity.adoption import first_try_since_clear

        ti = context["ti"]
        index = -1 if ti.map_index is None else ti.map_index
        key = TaskKey(compat.deployment_id(), ti.dag_id, ti.task_id, ti.run_id, index)
        first = first_try_since_clear(ti.max_tries, self.retries or 0)
        return Owner(key, ti.try_number, str(ti.id), ti.max_tries), min(first, ti.try_number)

    def _check_literals(self, given: Mapping[str, Any]) -> None:
        self._check_parameters(given)
        if isinstance(self.require, Mapping):  # each bound may be a template
            parameters.validated({"require": {k: v for k, v in self.require.items() if is_literal(v)}})
        # a subclass of a user may set them when it is executed
        complete = type(self).__module__.startswith("airflow_provider_ktrain.")
        if complete and self.manifest is None and {"workers", "replicas"} & vars(self).keys() <= given.keys():
            from airflow_provider_ktrain.core.manifest.overlay import roles_without_manifest

            roles_without_manifest(self.kind, self._job_options())

    def _check_parameters(self, given: Mapping[str, Any] | None = None) -> None:
        """Check the parameters of the task."""
        given = vars(self) if given is None else given
        parameters.validated(given)
        if self.pod_override is not None and POD_OVERRIDE in given:
            from airflow_provider_ktrain.core.checks.pod_override import check_pod_override

            check_pod_override(self.pod_override, self.kind)
        if "logs" in given:
            check_choice(self.logs, self.kind)

    def _can_follow(self) -> bool:
        """Whether the job of an earlier try can be followed although the manifest or another parameter is invalid."""
        try:
            parameters.validated({name: getattr(self, name) for name in FOLLOWING_PARAMETERS})
            check_choice(self.logs, self.kind)
        except ManifestError:
            return False
        return True

    def function_arguments(self) -> Mapping[str, Any]:
        """The arguments of the function that is the program, by name; none if the program is not a function."""
        return {}

    def _options(self, job: Mapping[str, Any]) -> Options:
        """How the job is followed."""
        from airflow_provider_ktrain.core.manifest.deadline import deadline_of
        from airflow_provider_ktrain.core.state.limits import Limits
        from airflow_provider_ktrain.engine.follow.options import Options

        numbers = parameters.converted({"max_restarts": self.max_restarts, "crash_loop_limit": self.crash_loop_limit})
        return Options(
            logs=self.logs if isinstance(self.logs, str) else {role: list(at) for role, at in self.logs.items()},
            limits=Limits(
                queue=_seconds(self.queue_timeout),
                schedule=_seconds(self.schedule_timeout),
                startup=_seconds(self.startup_timeout),
                partial_start=_seconds(self.partial_start_timeout),
                log_stall=_seconds(self.log_stall_timeout),
                progress=_seconds(self.progress_timeout),
                max_restarts=numbers["max_restarts"],
                crash_loop=numbers["crash_loop_limit"],
            ),
            deadline=deadline_of(job),
            on_finish_action=OnFinishAction.of(self.on_finish_action),
            require=dict(self.require or {}),
            fail_on_nan=_names(self.fail_on_nan),
        )

    # what the task returns

    def _with_fit_result(self, outcome: Outcome) -> Outcome:
        from airflow_provider_ktrain.operators import task_outputs

        return task_outputs.fit(outcome, self)

    def _returned(self, outcome: Outcome) -> Any:
        """What the task returns after a training that succeeded."""
        return outcome.result

    # for other tasks

    @property
    def job_name(self) -> str:
        """A template of the job's name, for other tasks: `ScaleTrainingJobOperator(job_name=train.job_name)`.

        The name is known before the job exists, so such a task doesn't have to run after this one.
        """
        return f"{{{{ dag.get_task({self.task_id!r}).job_name_of(ti) }}}}"

    def job_name_of(self, ti: Any) -> str:
        """The job's name in the DAG run of `ti`. Not for mapped tasks.

        :param ti: a task instance of any task of this DAG.
        """
        prefix = self.render_template(self.name, ti.get_template_context())
        key = TaskKey(compat.deployment_id(), self.dag_id, self.task_id, ti.run_id)
        return key.job_name(prefix, self.kind.name_length)


def _path_of(manifest: Any) -> str | None:
    """The path in a manifest parameter; None if the parameter is the manifest itself."""
    if isinstance(manifest, str) and "\n" not in manifest and manifest.strip().endswith((".yaml", ".yml", ".json")):
        return manifest.strip()
    return None


def _names(metrics: bool | str | Collection[str]) -> bool | tuple[str, ...]:
    """The names of `fail_on_nan`; True: all metrics."""
    return metrics if isinstance(metrics, bool) else (metrics,) if isinstance(metrics, str) else tuple(metrics)


def _seconds(limit: timedelta | float | None) -> float | None:
    return limit.total_seconds() if isinstance(limit, timedelta) else limit
