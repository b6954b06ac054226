"""Requests to the API server: connections, paths, errors."""
