"""Manifests: loaded (`loader`), changed by options (`overlay`), compared with a schema, and made ready to submit.

`job_request` sets the checkpoint directory. `start` lets the replicas run the job's code by `in_pod/starter.py`, which
also prints the stacks of a hang, and tells it the grace period of their pods.
`core/prepare.py` removes from a saved manifest what an earlier task has added, such as our annotations.
"""
