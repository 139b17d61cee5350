"""The headrace command: one file per command; each parses, composes rooms and prints."""

from headrace.cli.main import main

__all__ = ["main"]
