"""Triggers that follow jobs without a worker. Triggerers import them by classpath: don't rename."""
