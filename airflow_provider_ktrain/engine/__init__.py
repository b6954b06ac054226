"""Requests to the cluster: submit, follow and release a job. Nothing here imports Airflow.

The rules in `core/end_rules.py` decide how a job ends, `decisions` finds the one that applies, and `release` carries it
out and counts the accelerators that it frees. While the API server is away, `watch/informer.py` opens the watches
again, `decisions` decides nothing, and `Following` moves the limits.
"""
