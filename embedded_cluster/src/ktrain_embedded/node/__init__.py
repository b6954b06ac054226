"""The node: a kubelet that runs each container as a local process group."""
