"""Watch the objects of a cluster: one list and watch for many subscriptions."""
