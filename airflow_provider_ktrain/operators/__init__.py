"""Operators that submit jobs, change them, and release those that no task owns any more.

`job_parameters` has the parameters of all that submit a job. Airflow passes `default_args` by the names in a
constructor, so each constructor lists those of its base classes, which `scripts/signatures.py` copies.
"""
