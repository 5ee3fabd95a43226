"""Decisions about a run as pure functions: neither torch nor Ray is imported here."""
