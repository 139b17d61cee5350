"""Short embedding requests that come at about the same time, asked of their upstream together.

Only requests of one tenant, for one model and with the same other fields share a request, and each gets its
own vectors back and nothing else. What the upstream refuses is asked again one by one, so that a bad text
fails alone. The gateway's own embeddings, from which it tells intents and finds what means the same, go this
way as well, apart for each tenant whose requests they are for.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from headrace.errors import HeadraceError, UpstreamError
from headrace.gateway.ask import may_try_again
from headrace.gateway.authenticate import OWN_TENANT
from headrace.gateway.context import RequestContext
from headrace.gateway.relay import relay
from headrace.gateway.usage import Usage, prompt_estimate
from headrace.gateway.vectors import inputs_of, tokens_by_input
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.shaping.settings import Batching


@dataclass(slots=True, eq=False)
class _Caller:
    """A request that waits. ``done``: its answer is filled in, or why there is none."""

    context: RequestContext
    inputs: list[Any]
    done: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Group:
    """Requests that go together. ``timer`` sends them, unless they are enough before."""

    callers: list[_Caller] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return sum(len(caller.inputs) for caller in self.callers)


class Batches:
    """Requests that wait for others of their kind. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: dict[bytes, _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def may_wait(self, context: RequestContext, settings: Batching) -> bool:
        """Whether the request is to wait for others: embeddings of a few short texts."""
        if context.route != "embeddings":
            return False
        inputs = inputs_of(context.body)
        return (
            len(inputs) < settings.max_inputs
            and all(_is_input(item) for item in inputs)
            and max(prompt_estimate({"input": item}) for item in inputs) <= settings.short_tokens
        )

    async def relay(self, context: RequestContext, settings: Batching) -> None:
        """Fill in target and answer as :func:`relay.relay` does, and raise what that raises.

        ``settings``: the same for all requests of a tenant's.
        """
        loop = asyncio.get_running_loop()
        caller = _Caller(context, inputs_of(context.body), loop.create_future())
        key = _key(context)
        group = self._open.get(key)
        if group is not None and group.size + len(caller.inputs) > settings.max_inputs:
            self._send(key, group)
            group = None
        if group is None:
            group = self._open[key] = _Group()
            group.timer = loop.call_later(settings.window_ms / 1000, self._send, key, group)
        group.callers.append(caller)
        if group.size >= settings.max_inputs:
            self._send(key, group)
        try:
            async with asyncio.timeout(max(context.deadline - time.monotonic(), 0.0)) as context.patience:
                await caller.done
        except TimeoutError:
            raise UpstreamError(f"no upstream of {context.model} gave an answer in time") from None
        finally:
            caller.done.cancel()  # if it leaves; else this does nothing
            self._end_if_left(key, group)

    async def aclose(self) -> None:
        """End what is under way; whoever waits is told."""
        for group in self._open.values():
            if group.timer is not None:
                group.timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_if_left(self, key: bytes, group: _Group) -> None:
        """Nobody waits any more: what is not sent yet is not sent, and what is, is given up."""
        if not all(caller.done.cancelled() for caller in group.callers):
            return
        if group.timer is not None:
            group.timer.cancel()
        if self._open.get(key) is group:
            del self._open[key]
        if group.task is not None:
            group.task.cancel()

    def _send(self, key: bytes, group: _Group) -> None:
        if group.timer is not None:
            group.timer.cancel()
        if self._open.get(key) is group:
            del self._open[key]
        if group.task is None:
            group.task = asyncio.create_task(self._answer(group))
            self._tasks.add(group.task)
            group.task.add_done_callback(self._tasks.discard)

    async def _answer(self, group: _Group) -> None:
        callers = [caller for caller in group.callers if not caller.done.done()]
        try:
            if len(callers) > 1:
                await self._together(callers)
        except HeadraceError as error:
            # a refusal is of one of them; a failure may be, and another attempt has its budget
            if error.status >= 500 and not self._may_part(callers[0].context):
                for caller in callers:
                    _end(caller, error)
        except Exception as error:
            self._gateway.log.error("unexpected error in a batch", exc_info=error)
        await asyncio.gather(*(self._alone(caller) for caller in callers if not caller.done.done()))

    def _may_part(self, context: RequestContext) -> bool:
        """Whether those of a failed batch may be asked alone; for the gateway's own that comes too late."""
        return context.tenant != OWN_TENANT and may_try_again(self._gateway, context)

    async def _alone(self, caller: _Caller) -> None:
        try:
            await relay(self._gateway, caller.context)
            _end(caller)
        except Exception as error:
            _end(caller, error)

    async def _together(self, callers: list[_Caller]) -> None:
        """Ask for all of them. Raises HeadraceError, and nobody has an answer then."""
        gateway, first = self._gateway, callers[0].context
        inputs = [item for caller in callers for item in caller.inputs]
        carrier = RequestContext(
            unique_id("batch"), "embeddings", {}, b"", max(caller.context.deadline for caller in callers)
        )
        carrier.tenant, carrier.weight, carrier.model = first.tenant, first.weight, first.model
        carrier.for_tenant = first.for_tenant
        carrier.priority = min(caller.context.priority for caller in callers)
        carrier.candidates, carrier.targets = first.candidates, first.targets
        carrier.body = {**first.body, "input": inputs}
        carrier.prompt_tokens = sum(caller.context.prompt_tokens for caller in callers)
        gateway.log.debug("batch", batch=carrier.id, requests=[caller.context.id for caller in callers])
        await relay(gateway, carrier)
        assert isinstance(carrier.answer, bytes)
        assert carrier.usage is not None
        items, usages, frame = _read(carrier.answer, inputs, carrier.usage)
        gateway.metrics.batches.inc()
        begin = 0
        for caller in callers:
            end = begin + len(caller.inputs)
            _give(caller.context, carrier, frame, items[begin:end], usages[begin:end])
            caller.context.shared_usd = carrier.hardware_usd * sum(usages[begin:end]) / max(sum(usages), 1)
            _end(caller)
            gateway.metrics.batched.inc()
            begin = end


def _give(
    context: RequestContext,
    carrier: RequestContext,
    frame: dict[str, Any],
    items: list[dict[str, Any]],
    tokens: list[int],
) -> None:
    """Fill in a request's own part of the answer."""
    own = sum(tokens)
    usage = {"prompt_tokens": own, "total_tokens": own, "prompt_tokens_by_input": tokens}
    data = [{**item, "index": place} for place, item in enumerate(items)]
    context.target, context.attempts = carrier.target, carrier.attempts
    context.usage = Usage(own, estimated=carrier.usage is None or carrier.usage.estimated)
    context.answer = orjson.dumps({**frame, "data": data, "usage": usage})
    if context.fingerprint is not None:
        context.recorded = context.answer


def _read(
    answer: bytes, inputs: list[Any], usage: Usage
) -> tuple[list[dict[str, Any]], list[int], dict[str, Any]]:
    """The vectors in order, the tokens of each input, and the rest. ``usage``: of all, which is an estimate
    where the answer tells none. Raises UpstreamError.
    """
    try:
        whole = orjson.loads(answer)
        items = sorted(whole.pop("data"), key=lambda item: item["index"])
        if [item["index"] for item in items] != list(range(len(inputs))):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UpstreamError(f"{len(inputs)} embeddings were asked for, and something else came") from None
    told_usage = whole.pop("usage", None)
    if usage.estimated:
        told_usage = {"prompt_tokens": usage.prompt}
    return items, tokens_by_input(told_usage, inputs), whole


def _end(caller: _Caller, error: Exception | None = None) -> None:
    if caller.done.done():  # it has left
        return
    if error is None:
        caller.done.set_result(None)
    else:
        caller.done.set_exception(error)


def _is_input(item: object) -> bool:
    return (isinstance(item, str) and bool(item)) or (
        isinstance(item, list) and bool(item) and all(type(number) is int for number in item)
    )


def _key(context: RequestContext) -> bytes:
    """Of all that must be equal for requests to go together."""
    body = context.body
    asked = {name: body[name] for name in body.keys() - {"input", "priority", "user"}}
    served = sorted((target.upstream.config.url, target.name) for target in context.targets)
    parts = [
        context.tenant,
        context.for_tenant,
        context.model,
        context.release,
        context.version,
        served,
        asked,
    ]
    return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
