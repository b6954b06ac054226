"""Tests pass on a cluster that they don't start: another namespace, other credentials, GPUs and APIs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import REAL

ROOT = Path(__file__).parents[1]
#: Tests by their folder, from which their fixtures come.
TESTS = {
    "engine": [
        "test_release_cluster.py::test_delete_waits_until_job_and_pods_are_gone",
        "test_follow_cluster.py::test_patched_node_is_named_by_the_warning_and_the_cause",
    ],
    "job_control": [
        "test_preflight.py::test_printed_role_is_enough",
        "test_preflight_trainjob.py::test_unknown_fields_are_refused",
    ],
    "operators": [
        "test_bad_input.py::test_rejected_token_is_a_cluster_error",
        "test_bad_input.py::test_without_a_connection_and_a_kubeconfig_nothing_is_submitted",
        "test_kill.py::test_error_keeps_the_job_for_the_retry",
        "test_submission.py::test_retry_keeps_the_attempt",
    ],
}


@pytest.mark.thorough
@pytest.mark.skipif(bool(REAL), reason="it starts a cluster of its own")
@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("engine", ["1 passed, 3 skipped", "embedded cluster only: its program sees the files of this machine"]),
        ("job_control", ["1 passed", "the cluster doesn't serve trainjobs of trainer.kubeflow.org/v1alpha1"]),
        ("operators", ["4 passed"]),
    ],
)
def test_tests_pass_on_another_cluster(folder: str, expected: list[str]) -> None:
    names = [f"tests/{folder}/{name}" for name in TESTS[folder]]
    command = [sys.executable, "-m", "tests.other_cluster", "-q", "-rs", "-p", "no:xdist", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(text in done.stdout for text in expected), done.stdout
