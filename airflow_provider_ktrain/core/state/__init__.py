"""What a read of a job and its objects shows."""
