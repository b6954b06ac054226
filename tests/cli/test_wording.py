"""Messages of core and engine that `ktrain run` prints name its options, and no parameters of Airflow's operators."""

from __future__ import annotations

import inspect
import re

import pytest

from airflow_provider_ktrain.cli.wording import for_run
from airflow_provider_ktrain.core.diagnosis.crash_loop import CrashLoop
from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_crash_loop, diagnose_limit
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator
from scripts.message_texts import shown
from scripts.messages import Message, messages
from tests.core.test_diagnosis import recording

OPERATORS = (PyTorchJobOperator, MPIJobOperator, TrainJobOperator)
#: The names that aren't ordinary words.
PARAMETERS = {n for cls in OPERATORS for n in inspect.signature(cls).parameters if "_" in n} | {
    "execution_timeout", "retries", "default_args", "max_active_runs",
}  # fmt: skip
#: Words about parameters and features that `ktrain run` doesn't have: it sets no pod_override, nothing of its own
#: exists before it submits, and a run has one try.
NOT_OF_A_RUN = (
    "core/checks/parameters", "core/checks/pod_override", "core/identity", "core/kinds/mpijob",
    "core/kinds/trainjob/form", "core/manifest/overlay", "engine/job_control", "engine/conclusion_store",
    "engine/submit/create_or_adopt", "core/diagnosis/failure_patterns:110",
)  # fmt: skip


def parameters_in(text: str) -> set[str]:
    return PARAMETERS & set(re.findall(r"\w+", text))


def printed_messages() -> list[Message]:
    printed = (m for m in messages() if m.module.startswith(("core/", "engine/")))
    return [m for m in printed if not f"{m.module}:{m.line}".startswith(NOT_OF_A_RUN)]


def test_messages_name_no_parameters() -> None:
    found, named = printed_messages(), set()
    for message in found:
        for text in map(shown, (message.text, *message.details.values())):
            named |= parameters_in(text)
            assert not parameters_in(for_run(text)), f"{message.module}:{message.line}: {for_run(text)}"
    assert {"schedule_timeout", "retries", "queue_name", "execution_timeout"} <= named


# the others have causes of their own
@pytest.mark.parametrize("limit", sorted({*Limit} - {Limit.RESTARTS, Limit.CRASH_LOOP, Limit.NAN}))
def test_limits_name_no_parameters(limit: Limit) -> None:
    record = recording("13b-pt-activedeadline-quiet")
    cause = diagnose_limit(limit, 60, make_evidence(record["job"], record["pods"], record["events"], record["logs"]))
    assert parameters_in(str(cause)) == {str(limit)}
    assert not parameters_in(for_run(str(cause)))


def test_timeout_names_its_option() -> None:
    record = recording("13b-pt-activedeadline-quiet")
    cause = diagnose_limit(Limit.EXECUTION, 60, make_evidence(record["job"], record["pods"]))
    assert for_run(cause.summary).endswith("did not finish within 60 s of its creation (--timeout)")
    assert for_run(cause.resolution) == "Raise --timeout, or shorten the training."


def test_crash_loop_names_no_parameter() -> None:
    record = recording("32c-mpi-launcher-fails-default")
    cause = diagnose_crash_loop(CrashLoop("Launcher 0", 6), make_evidence(record["job"], record["pods"]))
    assert for_run(cause.summary).startswith(
        "Launcher 0 failed 6 times in a row, each within 10 minutes of its start: "
    )


def test_words_of_a_program_stay() -> None:
    quoted = "Master 0 failed: KeyError: 'queue_name' (execution_timeout=3, retries of the task)"
    assert for_run(quoted) == quoted
