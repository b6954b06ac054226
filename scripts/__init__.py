"""Scripts for development: see CONTRIBUTING.md."""
