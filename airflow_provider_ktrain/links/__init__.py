"""A link from a task to its job in your dashboard."""
