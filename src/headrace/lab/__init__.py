"""Measure, then optimise: bench, evaluate, and what builds on them."""
