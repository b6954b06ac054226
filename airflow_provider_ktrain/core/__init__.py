"""Decisions: pure functions and frozen data, without I/O, clock or Airflow."""
