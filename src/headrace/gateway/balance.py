"""Stage 7: which of the upstreams gets the request.

The one with the least outstanding tokens for its weight, less what its prefix cache would save: so a
conversation stays where it was, as long as that one is not busier by more than the work that staying saves.
In the manner of Preble (Srivatsa et al., 2024) and SGLang's cache-aware router.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target, Upstream

_BLOCK_BYTES = 256
_BLOCK_TOKENS = _BLOCK_BYTES // 4
_MOST_BLOCKS = 128
_MOST_KNOWN = 100_000


class Affinity:
    """Who has served which beginnings of prompts, and which sessions, last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def saved_tokens(self, context: RequestContext) -> dict[str, int]:
        """Tokens of the prompt that each upstream may have in its cache, by the upstream's name."""
        saved: dict[str, int] = {}
        for number, key in enumerate(_keys(context), 1):
            name = self._known.get(key)
            if name is None:
                break
            saved[name] = (
                context.prompt_tokens if context.headers.get("x-session-id") else number * _BLOCK_TOKENS
            )
        return saved

    def note(self, context: RequestContext, upstream: Upstream) -> None:
        """``upstream`` has served this prompt."""
        for key in _keys(context):
            self._known[key] = upstream.name
            self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


def _keys(context: RequestContext) -> Iterator[bytes]:
    """A chain of hashes over the prompt's blocks, or one of the session; never shared between tenants."""
    start = hashlib.blake2b(f"{context.tenant}\0{context.model}".encode(), digest_size=16)
    session = context.headers.get("x-session-id")
    if session:
        start.update(b"\0" + session.encode("utf-8", "surrogatepass"))
        yield start.digest()
        return
    prompt = context.prompt_key
    for begin in range(0, min(len(prompt) // _BLOCK_BYTES, _MOST_BLOCKS) * _BLOCK_BYTES, _BLOCK_BYTES):
        start.update(prompt[begin : begin + _BLOCK_BYTES])
        yield start.digest()


async def balance(gateway: Gateway, context: RequestContext, tried: Collection[Target]) -> Target | None:
    """The target to ask next; None if all were tried, are drained or at rest.

    Ejected ones are asked only where there are no others: trying beats refusing.
    """
    left = [
        target
        for target in context.targets
        if target not in tried and not target.upstream.drained and not target.upstream.health.resting()
    ]
    if not left:
        return None
    fit = [target for target in left if target.upstream.health.share() > 0] or left
    if len(fit) == 1:
        return fit[0]
    saved = gateway.affinity.saved_tokens(context)

    def score(target: Target) -> tuple[float, float]:
        upstream = target.upstream
        work = upstream.outstanding_tokens - saved.get(upstream.name, 0)
        # among idle ones, turns are taken by weight
        return work / upstream.power(), (upstream.chosen + 1) / upstream.config.weight

    return min(fit, key=score)
