"""Stage 8: which of the upstreams gets the request.

The one with the least outstanding tokens for its weight, less what its prefix cache would save: so a
conversation stays where it was, as long as that one is not busier by more than the work that staying saves.
In the manner of Preble (Srivatsa et al., 2024) and SGLang's cache-aware router. Several gateways that all
know the same would run to the same upstream: ``balancing: {among: two}`` has each take the better of two
that it draws (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target, Upstream

_BLOCK_BYTES = 256
_BLOCK_TOKENS = _BLOCK_BYTES // 4
_MOST_BLOCKS = 128
_MOST_KNOWN = 100_000
_LOADING_TOKENS = 20_000  # what a model that is to be loaded first takes, as work


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
    alive = [target for target in left if target.upstream.health.share() > 0]
    fit = [target for target in alive if not target.upstream.away] or alive or left
    if len(fit) == 1:
        return fit[0]
    saved = gateway.affinity.saved_tokens(context)
    if gateway.config.balancing.among == "two":
        fit = _drawn(fit, saved)

    def score(target: Target) -> tuple[float, float]:
        upstream = target.upstream
        work = upstream.busy_tokens() - saved.get(upstream.name, 0)
        if upstream.must_load(target.name):
            work += _LOADING_TOKENS
        # among idle ones, turns are taken by weight
        return work / upstream.power(), (upstream.chosen + 1) / upstream.config.weight

    return min(fit, key=score)


def _drawn(targets: list[Target], saved: Mapping[str, int]) -> list[Target]:
    """Two of them by weight, and the one that knows most of the prompt, so that conversations stay."""
    left, knows = [*targets], max(saved, key=lambda name: saved[name], default="")
    drawn = [target for target in targets if target.upstream.name == knows]
    for _ in range(2):
        if left:
            [one] = random.choices(left, [target.upstream.power() for target in left])
            left.remove(one)
            drawn.append(one)
    return drawn
