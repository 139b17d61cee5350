"""The gateway's own embeddings: short texts as vectors, asked of an upstream like everything else.

What decides about a request may not hold it up: whoever asks waits for a bounded time and does without a
vector when the upstream is slow or down. Texts of one tenant's requests that come within the declared window
share a request (:mod:`headrace.gateway.shaping.gather`); what one tenant has had embedded tells no other one
anything. A late answer is still kept for the next one who asks. The ledger has these requests as the tenant
``(gateway)``, which no key can be of; they count in no quota.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.errors import HeadraceError
from headrace.gateway.authenticate import OWN_TENANT
from headrace.gateway.config import EmbeddingsSettings
from headrace.gateway.context import RequestContext
from headrace.gateway.relay import relay
from headrace.gateway.reserve import reserve
from headrace.gateway.settle import settle
from headrace.gateway.shaping.settings import Batching
from headrace.gateway.usage import prompt_estimate
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway

Vectors = npt.NDArray[np.float32]

_MOST_PENDING = 512  # beyond, an answer would come too late anyway
_MOST_KNOWN = 4096  # texts whose vectors are kept: 6 MiB at 384 dimensions
_GIVE_UP_S = 10.0  # on an upstream that does not answer, long after whoever asked has gone on
_REST_S = 1.0  # after a failure: requests do not wait for what has just failed
_TRUNCATING = frozenset({"headrace", "vllm"})  # kinds that cut long texts when they are asked to


class Embedder:
    """Vectors of one model. ``timeout_s``: how long a request waits for them. For one event loop."""

    def __init__(self, gateway: Gateway, settings: EmbeddingsSettings) -> None:
        self._gateway = gateway
        self.timeout_s = settings.timeout_ms / 1000
        self._name = settings.model
        self._batching = Batching(window_ms=settings.window_ms, max_inputs=settings.max_inputs)
        self._known: OrderedDict[bytes, Vectors] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[Vectors | None]] = {}  # asked for
        self._asking: set[asyncio.Task[None]] = set()
        self._resting_until = float("-inf")

    @property
    def model(self) -> str:
        """The upstreams' model that is asked now."""
        return self._gateway.config.aliases.get(self._name, self._name)

    async def embed(
        self, texts: Sequence[str], tenant: str, *, timeout_s: float | None = None
    ) -> Vectors | None:
        """The texts' vectors, float32 [len(texts), dimensions], each of length one. ``tenant``: whose request
        they are for.

        None if they are not all here within ``timeout_s`` (the configured time if None), whatever the
        reason: this raises nothing but CancelledError. Long texts are cut by upstreams that can do that
        (headrace, vLLM) at the model's limit; others may refuse them.
        """
        found: dict[str, Vectors] = {}
        waited: dict[str, asyncio.Future[Vectors | None]] = {}
        for text in texts:
            key = _key(tenant, self.model, text)
            vector = self._known.get(key)
            if vector is not None:
                self._known.move_to_end(key)
                found[text] = vector
            elif text.strip() and (future := self._ask_for(key, tenant, text)) is not None:
                waited[text] = future
            else:
                return None
        if waited:
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            await asyncio.wait(waited.values(), timeout=max(limit_s, 0.0))
            for text, future in waited.items():
                vector = future.result() if future.done() else None
                if vector is None:
                    return None
                found[text] = vector
        rows = [found[text] for text in texts]
        if len({len(row) for row in rows}) != 1:  # nothing asked, or the model behind the name has changed
            self._known.clear()
            return None
        return np.stack(rows)

    async def aclose(self) -> None:
        """End what is under way; whoever waits gets None."""
        tasks = list(self._asking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._pending.values():  # of tasks that had not begun
            if not future.done():
                future.set_result(None)

    def _ask_for(self, key: bytes, tenant: str, text: str) -> asyncio.Future[Vectors | None] | None:
        """The text's vector to come; None while nothing is asked for."""
        future = self._pending.get(key)
        if future is not None:
            return future
        if len(self._pending) >= _MOST_PENDING or time.monotonic() < self._resting_until:
            return None
        future = self._pending[key] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._answer(key, tenant, text))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return future

    async def _answer(self, key: bytes, tenant: str, text: str) -> None:
        vector = None
        try:
            vector = self._known[key] = await self._request(tenant, text)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        except HeadraceError as error:
            self._failed(error, rests=error.status >= 500 or error.status == 429)
        except Exception as error:
            self._failed(error, rests=True)
        finally:
            self._pending.pop(key).set_result(vector)

    def _failed(self, error: Exception, *, rests: bool) -> None:
        now = time.monotonic()
        if now >= self._resting_until:  # else it is one of those that were under way then
            self._gateway.log.warning("no embeddings", model=self.model, error=str(error)[:500])
        if rests:
            self._resting_until = now + _REST_S

    async def _request(self, tenant: str, text: str) -> Vectors:
        """float32 [dimensions]. Raises HeadraceError, or ValueError for what is no answer to this."""
        gateway = self._gateway
        context = RequestContext(unique_id("embed"), "embeddings", {}, b"", time.monotonic() + _GIVE_UP_S)
        context.tenant, context.for_tenant, context.model = OWN_TENANT, tenant, self.model
        context.candidates = context.targets = gateway.targets[self.model]
        body: dict[str, Any] = {"model": self.model, "input": [text], "encoding_format": "float"}
        if all(target.upstream.config.kind in _TRUNCATING for target in context.targets):
            body["truncate_prompt_tokens"] = -1
        context.body = body
        context.prompt_tokens = prompt_estimate(body)
        try:
            await reserve(gateway, context)  # without limits: what is settled needs to have been reserved
            if gateway.batches.may_wait(context, self._batching):
                await gateway.batches.relay(context, self._batching)
            else:
                await relay(gateway, context)
            assert isinstance(context.answer, bytes)
            vector: Vectors = vectors_of(context.answer, 1)[0]
            context.outcome = "ok"
            return vector
        except asyncio.CancelledError:
            context.outcome = "cancelled"
            raise
        finally:
            await settle(gateway, context)


def vectors_of(answer: bytes, count: int) -> Vectors:
    """The vectors of an embeddings answer, float32 [count, dimensions], each brought to length one.

    Raises ValueError if it is not such an answer.
    """
    try:
        rows = sorted((item["index"], item["embedding"]) for item in orjson.loads(answer)["data"])
        vectors = np.array([row for _, row in rows], dtype=np.float32)
    except (KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise ValueError(f"no embeddings came: {error!r}") from None
    if [index for index, _ in rows] != list(range(count)) or vectors.ndim != 2:
        raise ValueError(f"{count} embeddings were asked for, and others came")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        raise ValueError("embeddings must be finite, and none may be zero")
    vectors /= lengths
    return vectors


def _key(tenant: str, model: str, text: str) -> bytes:
    return hashlib.blake2b(
        f"{tenant}\0{model}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
