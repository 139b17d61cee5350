"""WHO is served, by which upstream, at what cost: one address in front of OpenAI-compatible endpoints.

A request is one :class:`~headrace.gateway.context.RequestContext` that passes the stages of
:mod:`headrace.gateway.pipeline`. The room knows upstreams by HTTP only, never an engine.
"""
