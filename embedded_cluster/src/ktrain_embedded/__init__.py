"""The embedded cluster: a Kubernetes API server, controllers and nodes on this machine, for tests and demos."""
