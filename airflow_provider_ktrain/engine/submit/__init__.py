"""Creates or adopts a job: checks before, code, waiting for pods of an earlier job."""
