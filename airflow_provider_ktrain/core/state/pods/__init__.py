"""What the pods of a job show."""
