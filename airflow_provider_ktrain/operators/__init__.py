"""Operators that submit jobs, change them, and release those that no task owns any more."""
