"""Metrics and logs; may be imported by every room and imports none."""
