"""The two stores of :mod:`headrace.gateway.store`: one file of SQLite's, or a Redis that gateways share."""
