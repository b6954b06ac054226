"""The steps of a training that its logs or its status report."""
