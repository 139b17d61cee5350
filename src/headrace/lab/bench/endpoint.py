"""What is loaded: an endpoint's address, its model, and what it understands, found out by asking."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import orjson

from headrace.errors import AuthenticationError, ConfigError, HeadraceError, ModelNotFoundError
from headrace.lab.bench.client import ask
from headrace.lab.bench.records import Record

if TYPE_CHECKING:
    import aiohttp

Route = Literal["chat", "completions"]

_PROBE_TIMEOUT_S = 60.0
_BUSY_TRIES = 5


class EndpointError(HeadraceError):
    """The endpoint can't be measured: not there, not OpenAI-compatible, or failing every request."""

    code = "endpoint"


@dataclass(frozen=True)
class Endpoint:
    """An endpoint that answers. ``base_url`` ends where the routes begin (usually ``/v1``).

    ``extra`` goes into every body. ``token_limit`` is the field that bounds an answer. ``usage``: whether
    answers carry it. ``fixed_length``: whether the model can be made to write exactly as long as asked.
    ``first_answer_s``: how long the very first request took to its first content (its end, without a stream).
    """

    base_url: str
    model: str
    route: Route = "chat"
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    extra: dict[str, Any] = field(default_factory=dict)
    token_limit: str = "max_tokens"
    include_usage: bool = True
    streaming: bool = True
    usage: bool = True
    fixed_length: bool = False
    owner: str = ""
    max_model_len: int | None = None
    first_answer_s: float | None = None

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"{self.base_url}/{'chat/completions' if self.route == 'chat' else 'completions'}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus metrics are, if there are any."""
        return f"{self.base_url.removesuffix('/v1')}/metrics"

    def body(self, messages: list[dict[str, Any]], max_tokens: int) -> bytes:
        """A request that continues ``messages``; on the completions route their texts, line by line."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            self.token_limit: max_tokens,
            **self.extra,
        }
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        if self.route == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(str(message.get("content", "")) for message in messages)
        return orjson.dumps(body)


def looks_like_url(target: str) -> bool:
    """Whether ``target`` is an address rather than a model: ``http(s)://…`` or ``host:port``."""
    return re.match(r"(?i)https?://|[\w.\[\]:-]+:\d+(/|$)", target) is not None


def base_url(target: str) -> str:
    """``http://host:8000``, ``host:8000/v1`` or a route's whole address as the address of the API."""
    address = target if re.match(r"(?i)https?://", target) else f"http://{target}"
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{target!r} is not an address: {error}") from None
    if not parts.hostname:
        raise ConfigError(f"{target!r} names no host; write http://host:port")
    path = re.sub(r"/(chat/completions|completions|models)$", "", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


async def probe(
    session: aiohttp.ClientSession,
    target: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    route: Route | None = None,
    fixed_length: bool = True,
    extra: dict[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> Endpoint:
    """Ask the endpoint what it serves and what it understands.

    Raises EndpointError (down, not OpenAI's API), AuthenticationError (wrong key), ModelNotFoundError.
    """
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    address = base_url(target)
    card = await _model_card(session, address, headers, model)
    endpoint = Endpoint(
        base_url=address,
        model=str(card["id"]),
        headers=headers,
        timeout_s=timeout_s,
        extra=extra or {},
        owner=str(card.get("owned_by", "")),
        max_model_len=card.get("max_model_len") if isinstance(card.get("max_model_len"), int) else None,
    )
    last = Record(index=-1)
    for candidate in _candidates(endpoint, [route] if route else ["chat", "completions"], fixed_length):
        last = await _try(session, candidate)
        if last.ok:
            first_s = last.chunk_s[0] if last.chunk_s else last.end_s
            return replace(
                candidate,
                streaming=bool(last.chunk_s),
                usage=last.output_tokens is not None,
                first_answer_s=first_s - last.sent_s,
            )
        if last.error not in ("bad_request", "not_found", "stream_error"):
            break
    raise _refused(endpoint, last)


def _candidates(endpoint: Endpoint, routes: list[Any], fixed_length: bool) -> list[Endpoint]:
    """What to try, best first: servers differ in the fields that they refuse."""
    found = []
    for route in routes:
        plain = replace(endpoint, route=route)
        if fixed_length:
            extra = {**endpoint.extra, "ignore_eos": True}
            found.append(replace(plain, extra=extra, fixed_length=True))
        found.append(plain)
        if route == "chat":
            found.append(replace(plain, token_limit="max_completion_tokens"))
        found.append(replace(plain, include_usage=False))
    return found


async def _try(session: aiohttp.ClientSession, endpoint: Endpoint) -> Record:
    record = Record(index=-1)
    for attempt in range(_BUSY_TRIES):
        record = Record(index=-1)
        body = endpoint.body([{"role": "user", "content": "Count from one to ten."}], 4)
        timeout_s = min(endpoint.timeout_s, _PROBE_TIMEOUT_S)
        await ask(
            session,
            endpoint.url,
            body,
            endpoint.headers,
            timeout_s,
            record,
            time.perf_counter,
        )
        if record.error not in ("rate_limited", "overloaded"):
            break
        if attempt < _BUSY_TRIES - 1:
            await asyncio.sleep(0.5 * 2**attempt)
    return record


def _refused(endpoint: Endpoint, record: Record) -> HeadraceError:
    where, said = endpoint.url, record.detail
    if record.error == "auth":
        return AuthenticationError(f"{where} refuses the key ({said}); give the right one with --api-key")
    if record.error == "connection":
        return EndpointError(f"nothing answers at {where}: {said}")
    if record.error == "not_openai":
        return EndpointError(f"{where} does not speak OpenAI's API: {said}")
    if record.error == "not_found":
        return ModelNotFoundError(f"{where}: {said}; give the right address, and the model with --model")
    return EndpointError(f"{where} fails a first small request ({record.error}): {said}")


async def _model_card(
    session: aiohttp.ClientSession, address: str, headers: dict[str, str], wanted: str | None
) -> dict[str, Any]:
    """The entry of ``/models`` for the model to load; of its own making when ``wanted`` is all there is."""
    import aiohttp

    url = f"{address}/models"
    problem = ""
    cards: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(15), session.get(url, headers=headers, allow_redirects=False) as response:
            body = await response.read()
            if response.status in (401, 403):
                raise AuthenticationError(
                    f"{url} answers {response.status}: the key is missing or wrong; give it with --api-key"
                )
            if response.status == 200:
                value = orjson.loads(body)
                listed = value.get("data") if isinstance(value, dict) else None
                cards = [c for c in listed or [] if isinstance(c, dict) and isinstance(c.get("id"), str)]
                problem = "" if cards else f"{url} lists no model"
            else:
                problem = f"{url} answers {response.status}"
    except TimeoutError:
        problem = f"{url} does not answer within 15 s"
    except orjson.JSONDecodeError:
        problem = f"{url} answers something that is not JSON: this is not OpenAI's API"
    except aiohttp.ClientConnectorError as error:
        raise EndpointError(f"nothing answers at {address}: {error}") from None
    except (aiohttp.ClientError, ValueError) as error:
        problem = f"{url}: {error}"
    if wanted is None:
        if cards:
            return cards[0]
        raise EndpointError(f"{problem}; check the address, or name the model with --model")
    known = [card for card in cards if card["id"] == wanted]
    if cards and not known:
        names = ", ".join(card["id"] for card in cards[:8])
        raise ModelNotFoundError(f"{address} serves no {wanted!r}; it serves {names}")
    return known[0] if known else {"id": wanted}
