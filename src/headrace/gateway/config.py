"""The gateway's settings: one YAML file, every mistake named with its line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.errors import ConfigError
from headrace.gateway.fields import Count, Name, Positive, Strict, Variable
from headrace.gateway.intents.settings import Route
from headrace.gateway.releases.settings import Release, Version
from headrace.yaml_file import read_yaml

_OURS = re.compile(r"[\x21-\x7e]+")  # what may stand in a header


class Price(Strict):
    """US dollars for a million tokens. ``cached_input``: prompt tokens that the upstream had in its cache."""

    input: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    output: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cached_input: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ServedModel(Strict):
    """A model of an upstream's. ``name``: what that calls it. ``context``: tokens of prompt and answer."""

    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    context: Count | None = None
    price: Price = Price()


class Timeouts(Strict):
    """``first_byte_s`` of a stream, ``answer_s`` of a whole answer, ``idle_s`` between two chunks."""

    connect_s: Positive = 3.0
    first_byte_s: Positive = 60.0
    answer_s: Positive = 300.0
    idle_s: Positive = 60.0


class UpstreamConfig(Strict):
    """One OpenAI-compatible endpoint. ``url`` ends where OpenAI's would: in ``/v1``.

    ``credential_env``: the variable with what a server of ours shares with its gateway, so that it knows
    tenants apart.
    """

    url: str
    kind: Literal["compatible", "headrace", "vllm", "llamacpp", "tgi", "openai"] = "compatible"
    models: Annotated[dict[Name, ServedModel], Field(min_length=1)]
    api_key_env: Variable | None = None
    credential_env: Variable | None = None
    weight: Positive = 1.0
    max_connections: Count = 1000
    timeouts: Timeouts = Timeouts()

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write the address like http://127.0.0.1:8001/v1")
        if parts.username is not None or parts.password is not None:
            raise ValueError("keys do not belong into addresses: name an environment variable as api_key_env")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _credential_is_for_ours(self) -> Self:
        if self.credential_env is not None and self.kind != "headrace":
            raise ValueError("credential_env is for upstreams of kind headrace")
        return self

    def secret(self, variable: str | None) -> str | None:
        """What the environment holds. Raises ConfigError if that is nothing, or fits no header."""
        if variable is None:
            return None
        value = os.environ.get(variable, "")
        if not _OURS.fullmatch(value):
            raise ConfigError(f"{variable} must be set to the secret of {self.url}")
        return value


class Limits(Strict):
    """What a tenant or a key may use. What is not named is not limited."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    concurrency: Count | None = None
    budget_usd: Positive | None = None
    budget_period: Literal["day", "month"] = "month"
    max_context: Count | None = None
    max_output: Count | None = None
    models: frozenset[Name] | None = None

    @property
    def count_anything(self) -> bool:
        """Whether use must be counted to keep them."""
        counting = (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.concurrency)
        return self.budget_usd is not None or any(limit is not None for limit in counting)


class Tenant(Strict):
    """``limits`` hold for all of its keys together, ``key_limits`` for each of them."""

    limits: Limits = Limits()
    key_limits: Limits = Limits()


class Health(Strict):
    """``eject_after`` failures in a row take an upstream out for ``eject_s``, twice as long every further
    time, up to ``eject_max_s``; then its share of the load grows back over ``recover_s``.
    """

    probe_every_s: Positive = 5.0
    eject_after: Count = 3
    eject_s: Positive = 5.0
    eject_max_s: Positive = 60.0
    recover_s: Positive = 20.0


class Retries(Strict):
    """``attempts``: most upstreams asked for a request. ``budget``: retries, as a share of requests."""

    attempts: Count = 3
    budget: Annotated[float, Field(ge=0, le=1)] = 0.2


class Admission(Strict):
    """``max_running`` requests at a time; ``max_waiting`` more wait up to ``max_wait_s``."""

    max_running: Count = 1000
    max_waiting: Annotated[int, Field(ge=0)] = 1000
    max_wait_s: Positive = 10.0


class CacheSettings(Strict):
    """The exact cache. ``sampled``: keep answers of requests with a temperature above 0 as well."""

    enabled: bool = True
    max_mib: Count = 256
    ttl_s: Positive = 86_400.0
    sampled: bool = False


class EmbeddingsSettings(Strict):
    """Whom the gateway asks for embeddings of its own: a ``model`` of the upstreams', or an alias. A request
    waits for ``timeout_ms`` and then does without.
    """

    model: Name
    timeout_ms: Positive = 50.0


class GatewayConfig(Strict):
    """The whole file. ``default_output_tokens`` is reserved for requests that name no maximum.

    ``classifier``: a file of `headrace gateway route train`, which tells intents in place of the shipped one.
    """

    upstreams: Annotated[dict[Name, UpstreamConfig], Field(min_length=1)]
    aliases: dict[Name, Name] = Field(default_factory=dict)
    releases: dict[Name, Release] = Field(default_factory=dict)
    routes: dict[Name, Route] = Field(default_factory=dict)
    classifier: Path | None = None
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    authentication: Literal["keys", "none"] = "keys"
    state: Path = Path("gateway-state")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    request_timeout_s: Positive = 600.0
    max_body_mib: Count = 8
    read_timeout_s: Positive = 60.0
    write_timeout_s: Positive = 60.0
    default_output_tokens: Count = 1024
    health: Health = Health()
    retries: Retries = Retries()
    admission: Admission = Admission()
    cache: CacheSettings = CacheSettings()
    embeddings: EmbeddingsSettings | None = None

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        known = self.models
        for name, release in self.releases.items():
            if name in known:
                raise ValueError(f"releases: {name} is the name of a model already")
            for version, settings in release.versions.items():
                self._served(f"releases: {name}: {version}", settings)
        known |= self.releases.keys()
        for name, route in self.routes.items():
            if name in known:
                raise ValueError(f"routes: {name} is the name of a model or release already")
            for candidate in route.candidates.keys() - known:
                raise ValueError(f"routes: {name} has the candidate {candidate}, which no upstream has")
        known |= self.routes.keys()
        for alias, target in self.aliases.items():
            if alias in known:
                raise ValueError(f"aliases: {alias} is the name of a model, release or route already")
            if target not in known:
                raise ValueError(f"aliases: {alias} stands for {target}, which no upstream has")
        if self.embeddings is not None:
            embedder = self.embeddings.model
            if self.aliases.get(embedder, embedder) not in self.models:
                raise ValueError(f"embeddings: {embedder} is a model that no upstream has")
        for name, tenant in self.tenants.items():
            for limits in (tenant.limits, tenant.key_limits):
                for model in (limits.models or frozenset()) - known - self.aliases.keys():
                    raise ValueError(f"tenants: {name} may use {model}, which no upstream has")
        return self

    def _served(self, where: str, version: Version) -> None:
        names = self.upstreams.keys() if version.upstreams is None else version.upstreams
        for name in sorted(names):
            if name not in self.upstreams:
                raise ValueError(f"{where} is to be served by {name}, which is no upstream")
            if version.upstreams is not None and version.model not in self.upstreams[name].models:
                raise ValueError(f"{where} is to be served by {name}, which has no {version.model}")
        if version.model not in self.models:
            raise ValueError(f"{where} is the model {version.model}, which no upstream has")

    @property
    def models(self) -> frozenset[str]:
        """Names of all models, aliases left out."""
        return frozenset(name for upstream in self.upstreams.values() for name in upstream.models)

    def prices(self, name: str, version: str | None = None) -> list[Price]:
        """Of a model, or of a release's version (its first by default), wherever it is served."""
        release = self.releases.get(name)
        serving = Version(model=name) if release is None else release.versions[version or release.first]
        return [
            upstream.models[serving.model].price
            for where, upstream in self.upstreams.items()
            if serving.model in upstream.models and (serving.upstreams is None or where in serving.upstreams)
        ]


def read_config(path: Path) -> GatewayConfig:
    """The file, its relative ``state`` and ``classifier`` taken from where the file lies.

    Raises ConfigError that names the line of a mistake.
    """
    config = read_yaml(path, GatewayConfig)
    folder = path.absolute().parent
    classifier = None if config.classifier is None else folder / config.classifier
    return config.model_copy(update={"state": folder / config.state, "classifier": classifier})
