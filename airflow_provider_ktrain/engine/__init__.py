"""Requests to the cluster: submit, follow and release a job. Nothing here imports Airflow."""
