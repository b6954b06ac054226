"""Log lines as data: which containers to follow, positions to resume from, and result markers."""
