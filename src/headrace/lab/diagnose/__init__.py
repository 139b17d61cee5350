"""diagnose: why is this endpoint slow? Load it gently, then hard; split its times; name the bottleneck.

``measure.measure`` loads an endpoint, ``verdict.diagnose`` decides from what was measured (pure, so that
recorded measurements can be judged again), ``prompts`` looks at logged prompts or a template.
"""
