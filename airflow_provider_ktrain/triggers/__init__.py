"""Triggers that follow jobs without a worker. Triggerers import them by classpath: don't rename.

`engine/follow/outcome.py` makes their event and reads it for `operators/base.py`, with which `task_run.py` resumes.
"""
