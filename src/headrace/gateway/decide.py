"""Stage 6: which model of a route answers, by what the request wants.

The embedding is waited for as long as the gateway's settings say, and what is under way is never held up for
longer: then the cheap features decide alone, or the large model answers, as the route's settings have it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelNotFoundError
from headrace.gateway.parse import read_output, serve_as
from headrace.gateway.route import needed_capabilities
from headrace.gateway.usage import Usage, cost

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.intents.classifier import Classifier, Judgement
    from headrace.gateway.upstream import Target

_MOST_SYSTEM = 300  # characters of a system prompt, which says what is wanted in its beginning


async def decide(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the model, where a route was asked for; its intent's decoding goes into the body.

    What was reserved for the dearest candidate is also reserved of the chosen model's own limits. Raises
    LimitError, or InvalidRequestError, if these have no room for it.
    """
    choice = context.choice
    if choice is None or choice.model:
        return
    began = time.perf_counter()
    judgement = choice.judgement = await _judge(gateway, context, choice.policy.classifier)
    options = _able(gateway, context, choice.options)
    if not options:  # the configuration was reloaded while it waited
        raise ModelNotFoundError(f"the route `{choice.policy.name}` has other models now; ask again")
    most = Usage(context.prompt_tokens, context.output_tokens)
    costs = {name: max(cost(price, most) for price in gateway.prices(name)) for name in options}
    choice.model, choice.reason = choice.policy.choose(options, judgement, costs)
    choice.policy.add_decoding(context.body, judgement.intent)
    serve_as(gateway, context, choice.model)
    if context.model_scopes:
        if not choice.names_maximum:
            context.body.pop("max_tokens", None)  # it is our own, and the model's may be lower
        read_output(gateway, context)
        assert context.reservation is not None
        await gateway.quotas.extend(context.reservation, context.model_scopes)
    gateway.metrics.intent_seconds.observe(time.perf_counter() - began)


async def _judge(gateway: Gateway, context: RequestContext, classifier: Classifier) -> Judgement:
    from headrace.gateway.intents.features import embedded

    text, vector = text_of(context.body), None
    embeddings = gateway.config.embeddings
    if gateway.embedder is not None and embeddings is not None and (short := embedded(text)):
        wait_s = min(embeddings.timeout_ms / 1000, context.deadline - time.monotonic())
        found = await gateway.embedder.embed([short], context.tenant, timeout_s=wait_s)
        vector = None if found is None else found[0]
    judgement = classifier.judge(text, vector)
    if vector is not None and judgement.seen == "features":
        gateway.log.error(
            "the embeddings are not those that the classifier was trained on",
            dimensions=len(vector),
            trained_on=classifier.dimensions,
            embedder=classifier.embedder,
        )
    return judgement


def text_of(body: dict[str, Any]) -> str:
    """What of a request tells what it wants: its last user message behind the system prompt's beginning, or
    the prompt (the first of several).
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt = body.get("prompt")
        first = prompt[0] if isinstance(prompt, list) and prompt else prompt
        return first if isinstance(first, str) else ""
    by_role: dict[str, str] = {}
    for message in messages:
        if isinstance(message, dict):
            role = "system" if message.get("role") in ("system", "developer") else message.get("role")
            if isinstance(role, str) and (role != "system" or role not in by_role):
                by_role[role] = "\n".join(_texts(message.get("content")))
    system, user = by_role.get("system", "").strip(), by_role.get("user", "").strip()
    return f"{system[:_MOST_SYSTEM]}\n\n{user}" if system else user


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]


def _able(gateway: Gateway, context: RequestContext, options: tuple[str, ...]) -> tuple[str, ...]:
    """Those that can do what is asked, are up and have room for it. Where none is all that, up counts least,
    then room.
    """
    needed = context.prompt_tokens + context.output_tokens
    capabilities = needed_capabilities(context)

    def roomy(target: Target) -> bool:
        return (target.served.context or needed) >= needed

    def up(target: Target) -> bool:
        upstream = target.upstream
        well = upstream.health.share() > 0 and not upstream.health.resting() and not upstream.away
        return well and not upstream.drained

    def able(target: Target) -> bool:
        return target.can(capabilities, context.body)

    options = tuple(name for name in options if gateway.targets_behind(name))
    options = tuple(name for name in options if any(map(able, gateway.targets_behind(name)))) or options
    fit = tuple(name for name in options if any(map(roomy, gateway.targets_behind(name))))
    now = tuple(
        name for name in fit if any(roomy(target) and up(target) for target in gateway.targets_behind(name))
    )
    return now or fit or options
