"""Releases: versions of a model under one name, and the trials by which one takes another's place.

A canary gives a candidate a growing share of the requests and promotes it or rolls it back by what it
measures against the stable version; an A/B test splits by a routing key and only reports. What is decided is
pure (:mod:`state` over :mod:`evidence`); :mod:`book` keeps it in the store; :mod:`controller` is what
requests see.
"""
