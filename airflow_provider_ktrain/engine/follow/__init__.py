"""Follow a job to its end: `following.Following` runs in workers and in triggerers."""
