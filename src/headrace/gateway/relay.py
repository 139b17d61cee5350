"""Stage 9: ask upstreams until one answers. Once a client has seen a byte, its stream sees to itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.errors import LimitError, OverloadedError, UpstreamError
from headrace.gateway.ask import AttemptError, TooLongError, may_try_again
from headrace.gateway.attempt import attempt
from headrace.gateway.rounds import Rounds

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target

_RESERVE = 10.0


class RetryBudget:
    """Retries may be a share of requests, and a few more: an outage must not double the load."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._left = _RESERVE

    def earn(self) -> None:
        """A request came."""
        self._left = min(self._left + self.share, max(_RESERVE, 100 * self.share))

    def spend(self) -> bool:
        """Whether one more retry is in the budget; if so, it is spent."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


async def relay(gateway: Gateway, context: RequestContext) -> None:
    """Fill in target and answer. Raises UpstreamError or LimitError when nobody answers, and whatever an
    upstream says is wrong with the request. Of that, only a prompt that is too long for one is tried again,
    where another one has more room.
    """
    gateway.retry_budget.earn()
    rounds = Rounds(gateway, context)
    dropped: list[Target] = []
    failure: AttemptError | None = None
    refusal: TooLongError | None = None
    free = True  # a first attempt, or one after what was no failure, is not in the budget
    for number in range(gateway.config.retries.attempts):
        target = await rounds.next()
        if target is None or (not free and not may_try_again(gateway, context)):
            break
        free = False
        context.target, context.attempts = target, number + 1
        work = target.upstream.begin(context.prompt_tokens + context.output_tokens)
        context.works.append(work)
        try:
            await attempt(gateway, context, target, work)
        except TooLongError as error:
            work.end()
            refusal, free = error, True
            rounds.unfit += [each for each in context.targets if not _has_more_room(each, target)]
            continue
        except AttemptError as error:
            work.end()
            failure = error
            gateway.failed(target, error.reason, passing=error.rested)
            # A pooled connection may be closed just when it is used: one more chance for the same upstream.
            again = error.reason == "dropped" and target not in dropped
            (dropped if again else rounds.unfit if error.rested else rounds.tried).append(target)
            continue
        except BaseException:
            work.end()
            raise
        gateway.affinity.note(context, target.upstream)
        if not context.stream:
            work.end()
            target.upstream.health.succeeded()
        return
    raise refusal or _nobody(context, failure)


def _has_more_room(one: Target, other: Target) -> bool:
    """Whether a prompt that is too long for ``other`` may fit into ``one``."""
    if one is other:
        return False
    return one.context is None or other.context is None or one.context > other.context


def _nobody(context: RequestContext, failure: AttemptError | None) -> Exception:
    """Why there is no answer: of the last upstream that was asked, or that all of them are at rest."""
    if failure is not None and not failure.rested:
        return UpstreamError(f"no upstream of {context.model} gave an answer; the last one: {failure}")
    if failure is None and all(target.upstream.drained for target in context.targets):
        return OverloadedError(f"all upstreams of {context.model} are drained; try again later")
    now = time.monotonic()
    wait_s = max(min(target.upstream.health.resting_until for target in context.targets) - now, 1.0)
    if failure is not None and failure.reason == "overloaded":
        return OverloadedError(f"no upstream of {context.model} has room: {failure}", retry_after_s=wait_s)
    return LimitError(
        f"all upstreams of {context.model} ask to be left alone for a while", retry_after_s=wait_s
    )
