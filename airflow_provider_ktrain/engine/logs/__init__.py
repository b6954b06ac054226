"""Follow the logs of many containers, within a budget of streams, memory and lines.

Single reads of a log, which answer one question, are in `engine/follow`: `activity`, `divergence`,
`evidence_collector`, `primary_result` and `stacks`.
"""
