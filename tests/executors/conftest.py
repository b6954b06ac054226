"""`make test-executors`: the CeleryExecutor and the KubernetesExecutor, each with an Airflow of its own."""

from __future__ import annotations

from tests.e2e.chaos import begin

__all__ = ["begin"]
