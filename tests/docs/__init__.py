"""The documentation of the repository."""
