"""Smaller, faster models that are measured to be as good: recipes, calibration, quantisation, formats out."""
