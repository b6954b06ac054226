"""`@task.pytorchjob`: a Python function as a training job."""
