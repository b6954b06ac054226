"""Whose job it is: names, owners, adoption of a job by a later try, jobs without an owner."""
