"""Stage 7: which upstreams can serve the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import InvalidRequestError
from headrace.gateway.kinds import Capability, asks

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target


async def route(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the targets: those that can do what is asked and whose context holds prompt and answer, else
    those with the longest one.

    The prompt's tokens are an estimate, rather too many, so that a context too short by it may do. Raises
    InvalidRequestError if nobody can.
    """
    targets = _able(context.candidates, context)
    needed = context.prompt_tokens + context.output_tokens
    roomy = [target for target in targets if (target.context or needed) >= needed]
    if not roomy:
        longest = max(target.context or 0 for target in targets)
        roomy = [target for target in targets if target.context == longest]
    context.targets = tuple(roomy)


_CAPABILITY: dict[str, Capability] = {
    "chat/completions": "chat",
    "completions": "completions",
    "embeddings": "embeddings",
}


def needed_capabilities(context: RequestContext) -> set[Capability]:
    """What a target must be able to do for the request."""
    needed = {_CAPABILITY[context.route]}
    return needed | {"tools"} if asks(context.body, "tools") else needed


def _able(targets: tuple[Target, ...], context: RequestContext) -> list[Target]:
    needed = needed_capabilities(context)
    able = [target for target in targets if target.can(needed, context.body)]
    if not able:
        fields = {name for target in targets for name in target.upstream.kind.lacks}
        asked = sorted(needed | {f"`{name}`" for name in fields if asks(context.body, name)})
        raise InvalidRequestError(
            f"no upstream of {context.model} can do what is asked ({', '.join(asked)}); ask for less, or "
            "another model",
            param="model",
        )
    return able
