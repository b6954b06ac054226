"""What Kueue does with a job."""
