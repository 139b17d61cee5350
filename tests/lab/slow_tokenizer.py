"""The headrace command over a tokenizer that needs 0.2 s of the processor for each text.

``python -m tests.lab.slow_tokenizer serve smollm2-135m``: what a tokenizer in plain Python does to a server.
"""

from __future__ import annotations

import time

from headrace.cli import main
from headrace.frontend.tokenizer import Tokenizer

_CPU_S = 0.2
_encode = Tokenizer.encode


def _slow_encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    end = time.thread_time() + _CPU_S
    while time.thread_time() < end:
        pass
    return _encode(self, text, add_special_tokens)


if __name__ == "__main__":
    Tokenizer.encode = _slow_encode  # type: ignore[method-assign]
    main()
