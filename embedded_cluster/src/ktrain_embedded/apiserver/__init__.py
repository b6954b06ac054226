"""The API server: HTTP, authentication, schemas, storage and watches."""
