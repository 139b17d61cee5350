"""bench: load an OpenAI-compatible endpoint, measure what its users would see, compare two measurements.

It speaks HTTP only, so it measures any server alike. ``run.measure`` runs a whole measurement,
``result.read`` opens one that was kept, ``compare.compare`` tells two apart.
"""
