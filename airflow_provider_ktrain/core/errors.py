"""Errors that core raises: typed, with what was expected, what was found, what to do.

Faces to Airflow turn them into Airflow's exceptions (`operators/exceptions.py`).
"""

from __future__ import annotations


class KtrainError(Exception):
    """Base of every error of this project."""


class ManifestError(KtrainError):
    """A manifest that cannot be submitted as it is."""


class UnknownKindError(ManifestError):
    """A kind that is no training job that we know."""
