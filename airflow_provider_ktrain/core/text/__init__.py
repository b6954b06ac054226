"""Text before it leaves the process: without secrets and what can't be stored, short enough to read."""
