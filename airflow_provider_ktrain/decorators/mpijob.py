"""`@task.mpijob` runs a Python function in every rank of an MPIJob."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ktrain.core.manifest.program import MPI, RETURNED, mpirun_command
from airflow_provider_ktrain.decorators.base import FUNCTION_FIELDS, FunctionOperator, function_task
from airflow_provider_ktrain.operators.training import MPIJobOperator

if TYPE_CHECKING:
    from airflow.sdk.bases.decorator import TaskDecorator

    from airflow_provider_ktrain.engine.follow.outcome import Outcome

POD_FIELDS = frozenset({"fieldRef", "resourceFieldRef"})  #: Sources of variables that differ between pods.


class _MPIJobDecoratedOperator(FunctionOperator, MPIJobOperator):
    custom_operator_name = "@task.mpijob"
    runner = MPI
    launch_environment: ClassVar[Mapping[str, str]] = {}
    lost_because = "the Launcher's log has no intact line of it"
    template_fields: Sequence[str] = (*FUNCTION_FIELDS, *MPIJobOperator.template_fields)

    def launch_command(self) -> list[str]:
        variables = (self.env or {}).items()
        shared = [name for name, value in variables if not (isinstance(value, Mapping) and POD_FIELDS & value.keys())]
        return mpirun_command(shared)

    def _with_fit_result(self, outcome: Outcome) -> Outcome:
        """The outcome with the return value that the result contains."""
        sent = outcome.result if isinstance(outcome.result, Mapping) else {}
        return super()._with_fit_result(replace(outcome, result=sent.get(RETURNED), has_result=RETURNED in sent))


def mpijob_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Run a function in every rank of an MPIJob under mpirun; rank 0's return value is the task's.

    The Launcher runs mpirun, which starts one process per slot (`nproc_per_node`) of each Worker. The function finds
    its rank in OMPI_COMM_WORLD_RANK (Open MPI) or PMI_RANK (MPICH, Intel MPI); mpi4py is not needed. Open MPI passes
    the variables of `env` to all ranks. What a function can use, and further errors: see `pytorchjob_task`.

    :param python_callable: the function.
    :param multiple_outputs: push each key of a returned dict as an XCom. Default: if the return annotation is a dict.
    :param kwargs: parameters of MPIJobOperator: `image`, `workers`, `nproc_per_node`, `gpus`, `manifest`, ...
    :raises TrainingJobError: when the task runs: the function succeeded, but its return value can't be read, because
        it has more than 48 KiB of JSON, or lines of the Launcher's log are missing or damaged.
    """
    return function_task(_MPIJobDecoratedOperator, python_callable, multiple_outputs=multiple_outputs, **kwargs)
