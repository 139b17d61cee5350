"""The headrace command: one file per command; each parses, composes rooms and prints."""
