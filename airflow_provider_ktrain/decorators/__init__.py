"""`@task.pytorchjob`, `@task.mpijob` and `@task.trainjob`: a Python function as a training job."""
