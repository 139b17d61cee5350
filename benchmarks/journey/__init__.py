"""The journey: what headrace's switches bring, one after the other, over a plain transformers server.

``python -m benchmarks.journey`` in a clone with the dev extra installed, or ``make journey``.
"""
