"""Requests to the cluster: submit, follow and release a job. Nothing here imports Airflow.

The rules in `core/end_rules.py` decide how a job ends, `decisions` finds the one that applies, and `release` carries it
out and counts the accelerators that it frees.
"""
