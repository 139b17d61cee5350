"""HTTP over one frontend: OpenAI-compatible routes, SSE, errors."""
