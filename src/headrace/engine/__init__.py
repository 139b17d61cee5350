"""HOW tokens come, ids only: request, scheduler, KV blocks, loop, EngineClient."""
