"""Watch the objects of a cluster: one list and watch for many subscriptions; its outages don't count for limits."""
