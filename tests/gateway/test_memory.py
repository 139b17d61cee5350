"""What a gateway holds after its requests have ended: nothing of them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.gateway.running import Upstreams, gateway, text_of

TEXT = "a" * 200_000
MOST_GROWTH = 10 * 2**20  # bytes a round


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_have_ended_are_kept_by_nobody(
    upstreams: Upstreams, tmp_path: Path, stream: bool
) -> None:
    """Each has a long prompt, so that it would show (an exception's traceback once kept every stream)."""
    _, url = upstreams.start()
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "authentication": "none",
        "cache": {"enabled": False},
    }
    with gateway(config, tmp_path) as made:
        process = psutil.Process(made.process.pid)

        def ask(times: int) -> int:
            for _ in range(times):
                answer = made.chat(stream=stream, messages=[{"role": "user", "content": TEXT}])
                assert not stream or text_of(answer) == "word0 word1 word2 "
            made.wait_idle()
            return process.memory_info().rss

        # What an allocator holds for later stops growing; what is kept, 32 MB of prompts a round, does not.
        sizes = [ask(40), ask(160)]
        while sizes[-1] - sizes[-2] >= MOST_GROWTH:
            assert len(sizes) < 5, sizes
            sizes.append(ask(160))
