"""Manifests: loaded (`loader`), changed by options (`overlay`), compared with a schema, and made ready to submit."""
