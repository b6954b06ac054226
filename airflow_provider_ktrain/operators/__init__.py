"""Operators that submit jobs (`training`, whose constructors name what `default_args` may set), and that change them.

Airflow passes `default_args` by the names in a constructor, so each constructor lists those of its base classes, which
`scripts/signatures.py` copies. `base` is what Airflow calls, `job_parameters` has the parameters, and `task_run` does
the work through `worker_host`. `reaper` releases jobs that no task owns any more.
"""
