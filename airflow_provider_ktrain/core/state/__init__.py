"""What a job's objects show over time: phase, limits, pod history, restarts and usage."""
