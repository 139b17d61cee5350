"""What the admin API takes and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.gateway.fields import Name
from headrace.gateway.told import State


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewKey(_Asked):
    """Whose key to make. ``name`` is to tell it from others."""

    tenant: Name
    app: Annotated[str, Field(max_length=128)] = ""
    name: Annotated[str, Field(max_length=200)] = ""


class Start(_Asked):
    """A trial: a canary, or an A/B test where ``ab`` says the candidate's percent."""

    version: Name
    ab: Annotated[float, Field(ge=0.1, le=99.9)] | None = None


class Promote(_Asked):
    """Which version; the candidate, where none is named."""

    version: Name | None = None


class ErrorDetail(BaseModel):
    """``param`` names the field that is wrong, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Answer of every request that is refused."""

    error: ErrorDetail


class KeyInfo(BaseModel):
    """A key without its secret. Times are seconds since 1970."""

    id: str
    tenant: str
    app: str
    name: str
    created_at: float
    rotated_at: float | None
    revoked_at: float | None


class KeySecret(BaseModel):
    """A key's secret, which nobody can read again."""

    id: str
    secret: str


class ScopeUse(BaseModel):
    """What is used and reserved now, in the last 60 seconds, and in UTC's day and month.

    Counted from when there is a limit: without one, all are 0. ``limits`` are those that are set.
    """

    scope: str
    limits: dict[str, object]
    running: int
    requests_in_minute: int
    tokens_in_minute: int
    tokens_today: int
    usd_today: float
    usd_this_month: float


class TenantUse(BaseModel):
    """A tenant, its apps and its models' shares."""

    tenant: str
    weight: float
    waiting: int
    use: ScopeUse
    apps: list[ScopeUse]
    models: list[ScopeUse]


class UsageSum(BaseModel):
    """Sums over the ledger of a group of requests."""

    group: str
    requests: int
    failed: int
    cache_hits: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float
    baseline_usd: float
    saved_by_cache_usd: float
    saved_by_routing_usd: float


class ReleaseInfo(BaseModel):
    """What serves a release, and what is on trial with how many percent."""

    release: str
    stable: str
    previous: str | None
    versions: list[str]
    trial: Literal["canary", "ab"] | None
    candidate: str | None
    weight: float | None


class ReleaseEvent(BaseModel):
    """What was done."""

    release: str
    what: str
    version: str
    detail: str


class UpstreamInfo(BaseModel):
    """An upstream now. ``share``: of its weight that its health lets it have; 0 is ejected. ``state``: as it
    told when it was probed last; ``others``: requests that it has in hand from elsewhere, as it told then.
    """

    name: str
    url: str
    kind: str
    models: list[str]
    weight: float
    share: float
    state: State
    others: int
    resting: bool
    drained: bool
    in_flight: int
    outstanding_tokens: int


class Reloaded(BaseModel):
    """What the gateway has after reading its file again."""

    upstreams: list[str]
    tenants: list[str]
    releases: list[str]


class CacheHeld(BaseModel):
    """What is kept of a tenant's and model's. ``questions``: of the entries, those found by meaning."""

    kind: Literal["answer", "embedding"]
    tenant: str
    model: str
    entries: int
    questions: int
    size_bytes: int


class Cleared(BaseModel):
    """How many answers were forgotten."""

    answers: int


class TemplateInfo(BaseModel):
    """A version of a template. ``stable_share``: of its text, before the first variable."""

    name: str
    version: int
    created_at: float
    kind: Literal["chat", "completion"]
    variables: list[str]
    tenants: list[str] | None
    stable_share: float


class TemplateWhole(TemplateInfo):
    """A version of a template with its text, as it may be put again."""

    template: dict[str, object]


class Removed(BaseModel):
    """How many versions were forgotten."""

    versions: int


class Health(BaseModel):
    """``ok`` or ``draining``."""

    status: str
    requests_running: int
    requests_waiting: int
