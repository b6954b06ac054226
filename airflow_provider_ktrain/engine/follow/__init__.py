"""Follow a job to its end: `loop.follow` runs in workers and in triggerers."""
