"""Manifests: loaded (`loader`), changed by options (`overlay`), compared with a schema, and made ready to submit.

`start` lets the replicas run the job's code, and tells `in_pod/starter.py` the grace period of their pods.
`core/prepare.py` removes from a saved manifest what an earlier task has added, such as our annotations.
"""
