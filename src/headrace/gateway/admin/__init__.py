"""The admin API: keys, use, releases, upstreams and the configuration of a running gateway.

It has an address and a key of its own, and describes itself at ``/openapi.json``.
"""
