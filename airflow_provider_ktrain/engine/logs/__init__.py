"""Follow the logs of many containers, within a budget of streams, memory and lines."""
