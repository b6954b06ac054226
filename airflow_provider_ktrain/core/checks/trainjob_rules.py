"""Rules for TrainJobs only."""

from __future__ import annotations
