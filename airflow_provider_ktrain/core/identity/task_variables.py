"""The environment variables that a task sets in its pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VARIABLE_PREFIX = "KTRAIN_"  #: Prefix of these variables, which users can't set.
DAG_ID, RUN_ID, TASK_ID = "KTRAIN_DAG_ID", "KTRAIN_RUN_ID", "KTRAIN_TASK_ID"
MAP_INDEX, TRY, ATTEMPT = "KTRAIN_MAP_INDEX", "KTRAIN_TRY", "KTRAIN_ATTEMPT"
CHECKPOINT_DIR = "KTRAIN_CHECKPOINT_DIR"
PROGRAM = "KTRAIN_PROGRAM"
TERMINATION_LOG = "KTRAIN_TERMINATION_LOG"  #: Path of the file whose content becomes the termination message.
#: Identify the program's task, for experiment trackers.
TASK_VARIABLES = (DAG_ID, RUN_ID, TASK_ID, MAP_INDEX, TRY)
#: Set after the hash of the manifest was computed: they don't count as a change of the manifest.
UNHASHED_VARIABLES = (*TASK_VARIABLES, ATTEMPT)


def task_variables(dag_id: str, run_id: str, task_id: str, map_index: int, try_number: int) -> dict[str, str]:
    """The TASK_VARIABLES of a job, by name.

    :param map_index: index of a mapped task; -1 if the task isn't mapped.
    :param try_number: of the try that creates the job. A later try that adopts the job can't change it.
    """
    return {DAG_ID: dag_id, RUN_ID: run_id, TASK_ID: task_id, MAP_INDEX: str(map_index), TRY: str(try_number)}


def without_variables(manifest: Any) -> Any:
    """A copy of a manifest, or of a part of one, that doesn't set the UNHASHED_VARIABLES."""
    if isinstance(manifest, Mapping):
        return {key: without_variables(value) for key, value in manifest.items()}
    if isinstance(manifest, list):
        kept = (i for i in manifest if not (isinstance(i, Mapping) and i.get("name") in UNHASHED_VARIABLES))
        return [without_variables(item) for item in kept]
    return manifest
