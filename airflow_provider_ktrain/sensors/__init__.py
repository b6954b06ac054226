"""Sensors that wait for jobs which other DAGs or other tools submit."""
