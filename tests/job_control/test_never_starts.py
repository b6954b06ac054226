"""A command that doesn't exist, under OnFailure: the job stays Running, and the task ends it."""

from __future__ import annotations

from tests.job_control.following import Lines, follow_to_the_end, owned
from tests.job_control.jobs import Jobs


async def test_missing_command_ends_the_job_at_once(jobs: Jobs) -> None:
    manifest = jobs.build(command=["/no/such/program"])
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] = "OnFailure"
    job, ref = owned(jobs, manifest)
    outcome = await follow_to_the_end(jobs, ref, Lines())
    assert outcome.cause
    assert (outcome.phase, outcome.cause["category"]) == ("Running", "image")
    assert outcome.cause["summary"].startswith('Master 0 can\'t start its command: exec: "/no/such/program"')
    assert jobs.read(job) is None
