"""Kubernetes objects as data: resources, schemas, names, patches, quantities, and the store."""
