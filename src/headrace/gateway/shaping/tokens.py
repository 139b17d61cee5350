"""Prompts counted by the tokenizer of the upstream that will read them, where it has a route for that.

The estimate of :mod:`headrace.gateway.usage` is rather too high: exact counts reserve less, and let prompts
through that do fit. They are asked of ``/tokenize``, as vLLM and ours have it, with a bounded wait, and kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from headrace.gateway.ask import read_body

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target

_MOST_AT_ONCE = 64
_MOST_ANSWER_BYTES = 32 * 2**20
_KEPT_IDS_BYTES = 64 * 2**20  # of token ids, by their size in JSON
_CHAT_FIELDS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenCounts:
    """Counts, and ids where they are wanted, by model and prompt. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: OrderedDict[bytes, tuple[int, list[int] | None, int]] = OrderedDict()
        self._kept_bytes = 0
        self._asking = 0

    async def count(self, context: RequestContext) -> None:
        """Put the exact count of the prompt's tokens in the place of the estimate, if it is to be had."""
        settings = self._gateway.config.tokenization
        if settings is None or context.prompt_tokens < settings.min_tokens:
            return
        asked = _question(context)
        target = self._target(context)
        if asked is None or target is None or self._asking >= _MOST_AT_ONCE:
            return
        wants_ids = settings.send_ids and context.route == "completions" and not context.body.get("echo")
        key = _key(context, target, asked)
        found = self._known.get(key)
        if found is None or (wants_ids and found[1] is None):
            self._asking += 1
            try:
                async with asyncio.timeout(settings.timeout_ms / 1000):
                    found = await self._ask(target, asked, wants_ids=wants_ids)
            except Exception as error:  # a gateway that is asked to count does not refuse on that account
                self._gateway.metrics.token_counts.labels("failed").inc()
                self._gateway.log.debug("not counted", request_id=context.id, error=repr(error))
                return
            finally:
                self._asking -= 1
            self._gateway.metrics.token_counts.labels("asked").inc()
            self._keep(key, found, settings.cache_prompts)
        else:
            self._known.move_to_end(key)
            self._gateway.metrics.token_counts.labels("known").inc()
        context.prompt_tokens = found[0]
        if wants_ids:
            context.prompt_ids = found[1]

    def _target(self, context: RequestContext) -> Target | None:
        """Whom to ask: one that serves the model and is well. Of several models there is none."""
        if context.choice is not None and not context.choice.model:
            return None
        able = [target for target in context.candidates if target.upstream.kind.tokenizes]
        well = [target for target in able if target.upstream.health.share() > 0]
        return min(well, key=lambda target: target.upstream.in_flight, default=None)

    async def _ask(
        self, target: Target, asked: dict[str, Any], *, wants_ids: bool
    ) -> tuple[int, list[int] | None, int]:
        upstream = target.upstream
        parts = urlsplit(upstream.config.url)
        async with await (upstream.local or self._gateway.connections).post(
            f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}/tokenize",
            data=orjson.dumps({**asked, "model": target.name}),
            headers=upstream.headers,
            connect_s=upstream.config.timeouts.connect_s,
        ) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            page = await read_body(response, _MOST_ANSWER_BYTES)
        answer = orjson.loads(page)
        count, ids = answer["count"], answer["tokens"]
        if type(count) is not int or not isinstance(ids, list) or len(ids) != count or count < 1:
            raise ValueError("no count came")
        if not wants_ids:
            return count, None, 0
        if not all(type(number) is int for number in ids):
            raise ValueError("no token ids came")
        return count, ids, len(page)

    def _keep(self, key: bytes, found: tuple[int, list[int] | None, int], most: int) -> None:
        self._kept_bytes += found[2] - self._known.pop(key, (0, None, 0))[2]
        self._known[key] = found
        while len(self._known) > most or self._kept_bytes > _KEPT_IDS_BYTES:
            self._kept_bytes -= self._known.popitem(last=False)[1][2]


def _question(context: RequestContext) -> dict[str, Any] | None:
    """What to ask ``/tokenize``; None for prompts that it does not take, or that are token ids already."""
    body = context.body
    if context.route == "chat/completions":
        return {"messages": body["messages"], **{n: body[n] for n in _CHAT_FIELDS if body.get(n) is not None}}
    prompt = body.get("prompt")
    return {"prompt": prompt} if isinstance(prompt, str) else None


def _key(context: RequestContext, target: Target, asked: dict[str, Any]) -> bytes:
    parts = [context.tenant, context.model, context.version, target.name, target.served.version, asked]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
