"""Stage 2: what is asked. Only what the gateway needs is checked; the rest is the upstream's to judge."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from headrace.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, NotAllowedError
from headrace.gateway.intents.policy import Choice
from headrace.gateway.quotas import Scope
from headrace.gateway.shaping.documents import split
from headrace.gateway.shaping.templates import fill
from headrace.gateway.usage import prompt_estimate

if TYPE_CHECKING:
    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.intents.policy import Policy

PRIORITY = "x-headrace-priority"
_INPUTS = {"chat/completions": "messages", "completions": "prompt", "embeddings": "input"}
_MOST_CHOICES = 128
_MOST_TOKENS = 2**31


async def parse(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the body and what the gateway reads of it. Raises InvalidRequestError, ModelNotFoundError,
    NotAllowedError, or ContextLengthError where a limit of the tenant's or key's is passed.
    """
    try:
        body = orjson.loads(context.raw_body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    context.body = body
    asked = body.get("model")
    if not isinstance(asked, str) or not asked:
        raise InvalidRequestError("`model`: name the model, as a string", param="model")
    _model(gateway, context, asked)
    context.priority = _priority(gateway, context)
    name = _INPUTS[context.route]
    if context.route != "embeddings" and isinstance(body.get("prompt"), dict):
        chat, most = context.route == "chat/completions", gateway.config.max_body_mib * 2**20
        context.template = await fill(
            gateway.templates, body, chat=chat, tenant=context.tenant, most_bytes=most
        )
    if not isinstance(body.get(name), list if name == "messages" else (str, list)) or not body[name]:
        kinds = "a list of messages" if name == "messages" else "a string or a list"
        raise InvalidRequestError(f"`{name}`: {kinds} is needed, and it must not be empty", param=name)
    context.prompt_tokens = prompt_estimate(body)
    context.prompt_key = prompt_key(body, name)
    if context.route == "embeddings":
        _check_limits(context, 0, 0)
        return
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequestError("`stream`: true or false", param="stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequestError("`stream_options`: an object", param="stream_options")
    context.stream = bool(stream)
    context.wants_usage = bool((options or {}).get("include_usage"))
    await gateway.token_counts.count(context)
    context.split = split(gateway, context, asked)
    if context.split is not None:
        context.prompt_tokens = context.split.longest  # what limits of a context hold for
    read_output(gateway, context)
    if context.split is not None:
        context.prompt_tokens = context.split.prompt_tokens
        context.output_tokens += context.split.output_tokens


def _model(gateway: Gateway, context: RequestContext, asked: str) -> None:
    name = gateway.config.aliases.get(asked, asked)
    if name in gateway.routes:
        _enter(gateway, context, asked, gateway.routes[name])
        return
    if name not in gateway.targets and name not in gateway.releases:
        raise ModelNotFoundError(
            f"the model `{asked[:200]}` does not exist here; `GET /v1/models` lists those that do",
            param="model",
        )
    if not may_use(context, asked, name):
        raise NotAllowedError(f"this key may not use the model `{asked}`", param="model")
    serve_as(gateway, context, name)


def serve_as(gateway: Gateway, context: RequestContext, name: str) -> None:
    """Fill in the model that ``name`` stands for, a model of an upstream's or a release, and who has it."""
    model, upstreams = name, None
    if name in gateway.releases:
        version = gateway.releases.choose(context, name)
        model, upstreams = version.model, version.upstreams
    context.model = model
    context.model_scopes = _model_scopes(gateway.config, context.tenant, model)
    context.candidates = tuple(
        target for target in gateway.targets[model] if upstreams is None or target.upstream.name in upstreams
    )


def _model_scopes(config: GatewayConfig, tenant: str, model: str) -> tuple[Scope, ...]:
    found = []
    if limits := config.model_limits.get(model):
        found.append(Scope(f"model:{model}", limits))
    of_tenant = config.tenants.get(tenant)
    if of_tenant is not None and (limits := of_tenant.model_limits.get(model)):
        found.append(Scope(share_scope(tenant, model), limits))
    return tuple(found)


def share_scope(tenant: str, model: str) -> str:
    """The name under which a tenant's use of a model is counted."""
    return f"share:{tenant}|{model}"


def _enter(gateway: Gateway, context: RequestContext, asked: str, policy: Policy) -> None:
    """Begin a choice, or end it at once where the client has made it."""
    if context.route == "embeddings":
        raise InvalidRequestError(f"`{asked}` is a route between models that write text", param="model")
    options = options_of(context, asked, policy)
    wanted = policy.override(context.headers)
    if not options or (wanted is not None and wanted not in options):
        raise NotAllowedError(f"this key may not use the model `{wanted or asked}`", param="model")
    named = any(context.body.get(field) is not None for field in ("max_tokens", "max_completion_tokens"))
    context.choice = choice = Choice(policy, options, names_maximum=named)
    if wanted is not None:
        choice.model, choice.reason = wanted, "override"
        serve_as(gateway, context, wanted)
        return
    context.model = policy.name
    context.candidates = tuple(target for name in options for target in gateway.targets_behind(name))
    states = [gateway.releases[name][1] for name in options if name in gateway.releases]
    if all(state.trial is None for state in states):
        choice.cache_key = " ".join([policy.digest, *options, *(state.stable for state in states)])


def options_of(context: RequestContext, asked: str, policy: Policy) -> tuple[str, ...]:
    """The candidates of a route that tenant and key may use."""
    return tuple(name for name in policy.settings.candidates if may_use(context, asked, policy.name, name))


def may_use(context: RequestContext, *names: str) -> bool:
    """Whether tenant and key may use what goes by these names, under one of them."""
    every = [scope.limits.models for scope in context.scopes]
    return all(models is None or not models.isdisjoint(names) for models in every)


def _priority(gateway: Gateway, context: RequestContext) -> int:
    """What the header or the field asks for, within what the tenant may. The field is set to what holds."""
    asked = context.body.get("priority")
    given = context.headers.get(PRIORITY)
    if given is not None:
        if not re.fullmatch(r"-?[0-9]{1,9}", given):
            raise InvalidRequestError(f"`{PRIORITY}`: a whole number; lower is more urgent", param=PRIORITY)
        asked = int(given)
    if asked is not None and (type(asked) is not int or abs(asked) >= _MOST_TOKENS):
        raise InvalidRequestError("`priority`: a whole number; lower is more urgent", param="priority")
    tenant = gateway.config.tenants.get(context.tenant)
    priority: int = max(asked or 0, tenant.most_urgent if tenant is not None else 0)
    if "priority" in context.body:
        context.body["priority"] = priority
    return priority


def read_output(gateway: Gateway, context: RequestContext) -> None:
    """Fill in choices and output tokens, within what tenant, key and model may have.

    Raises InvalidRequestError, or ContextLengthError.
    """
    body = context.body
    choices = _count(body, "n", _MOST_CHOICES) or 1
    if context.route == "completions":
        prompt = body["prompt"]
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        choices *= len(prompt) if several else 1
        choices = max(choices, _count(body, "best_of", _MOST_CHOICES) or 1)
    longest = _count(body, "max_completion_tokens", _MOST_TOKENS) or _count(body, "max_tokens", _MOST_TOKENS)
    allowed = _least(context, "max_output")
    if longest is None and allowed is not None:
        longest = body["max_tokens"] = allowed
    each = gateway.config.default_output_tokens if longest is None else longest
    _check_limits(context, each, longest or 0)
    context.choices = choices
    context.output_tokens = each * choices


def _check_limits(context: RequestContext, output: int, asked: int) -> None:
    allowed = _least(context, "max_output")
    if allowed is not None and asked > allowed:
        raise InvalidRequestError(
            f"`max_tokens`: {asked}, but this key may ask for {allowed} at most", param="max_tokens"
        )
    context_limit = _least(context, "max_context")
    if context_limit is not None and context.prompt_tokens + output > context_limit:
        raise ContextLengthError(
            f"this key may use a context of {context_limit} tokens; the prompt has about "
            f"{context.prompt_tokens} and the answer up to {output}"
        )


def _least(context: RequestContext, name: str) -> int | None:
    scopes = (*context.scopes, *context.model_scopes)
    given = [value for scope in scopes if (value := getattr(scope.limits, name)) is not None]
    return min(given, default=None)


def _count(body: dict[str, Any], name: str, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidRequestError(f"`{name}`: a whole number from 1 to {most}", param=name)
    return value


def prompt_key(body: dict[str, Any], name: str) -> bytes:
    """Tools first, as templates have them; without the last brackets a longer chat begins with a shorter."""
    return orjson.dumps([body.get("tools"), body[name]])[:-2]
