"""The gateway's settings: one YAML file, every mistake named with its line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.errors import ConfigError
from headrace.gateway.fields import NAME, Count, Name, Positive, Strict, Variable
from headrace.gateway.intents.settings import Route
from headrace.gateway.kinds import Capability
from headrace.gateway.releases.settings import Release, Version
from headrace.gateway.shaping.settings import Batching, DocumentPlan, Template, Tokenization
from headrace.yaml_file import FieldError, read_yaml

KindName = Literal[
    "compatible",
    "headrace",
    "vllm",
    "sglang",
    "tgi",
    "trtllm",
    "llamacpp",
    "deepspeed",
    "onnxruntime",
    "ollama",
    "openai",
    "anthropic",
]
IN_PROCESS = "in-process:/v1"
"""The address of the server in whose process the gateway is; files write ``in-process``."""
_OURS = re.compile(r"[\x21-\x7e]+")  # what may stand in a header


def secret(variable: str, what: str) -> str:
    """What the environment holds. Raises ConfigError if that is nothing, or fits no header."""
    value = os.environ.get(variable, "")
    if not _OURS.fullmatch(value):
        raise ConfigError(f"{variable} must be set to {what}")
    return value


class Price(Strict):
    """US dollars for a million tokens. ``cached_input``: prompt tokens that the upstream had in its cache."""

    input: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    output: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cached_input: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ServedModel(Strict):
    """A model of an upstream's. ``name``: what that calls it. ``context``: tokens of prompt and answer; asked
    of the upstream where it is not given. ``serves``: what it can; by default all that the kind can.
    ``version``: any text that changes when the model behind the name does: kept answers count no more.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    version: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    context: Count | None = None
    serves: Annotated[frozenset[Capability], Field(min_length=1)] | None = None
    price: Price = Price()


class Timeouts(Strict):
    """``first_byte_s`` of a stream, ``answer_s`` of a whole answer, ``idle_s`` between two chunks."""

    connect_s: Positive = 3.0
    first_byte_s: Positive = 60.0
    answer_s: Positive = 300.0
    idle_s: Positive = 60.0


class UpstreamConfig(Strict):
    """One endpoint. ``url`` ends where OpenAI's would: in ``/v1``; or it is ``in-process``.

    ``credential_env``: the variable with what a server of ours shares with its gateway, so that it knows
    tenants apart. ``usd_per_hour``: what its hardware costs while it works on anything; requests share it.
    """

    url: str
    kind: KindName = "compatible"
    models: Annotated[dict[Name, ServedModel], Field(min_length=1)]
    api_key_env: Variable | None = None
    credential_env: Variable | None = None
    usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    weight: Positive = 1.0
    max_connections: Count = 1000
    timeouts: Timeouts = Timeouts()

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if url in ("in-process", IN_PROCESS):
            return IN_PROCESS
        parts = urlsplit(url)
        plain = (
            parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        )
        if not plain or not _OURS.fullmatch(url):  # urlsplit() passes over line breaks
            raise ValueError("write the address like http://127.0.0.1:8001/v1")
        if parts.username is not None or parts.password is not None:
            raise ValueError("keys do not belong into addresses: name an environment variable as api_key_env")
        return url.rstrip("/")

    @model_validator(mode="before")
    @classmethod
    def _ours_in_process(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("url") in ("in-process", IN_PROCESS):
            return {"kind": "headrace", **given}
        return given

    @model_validator(mode="after")
    def _credential_is_for_ours(self) -> Self:
        if self.credential_env is not None and self.kind != "headrace":
            raise ValueError("credential_env is for upstreams of kind headrace")
        if self.url == IN_PROCESS and self.kind != "headrace":
            raise ValueError("what is in-process is of kind headrace")
        if self.url == IN_PROCESS and (self.api_key_env or self.credential_env):
            raise ValueError("what is in-process needs neither api_key_env nor credential_env")
        return self

    def secret(self, variable: str | None) -> str | None:
        """What the environment holds for this endpoint. Raises ConfigError as :func:`secret` does."""
        return None if variable is None else secret(variable, f"the secret of {self.url}")


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


class App(Strict):
    """Keys of a tenant that belong together. ``key_limits``, if given, take the place of the tenant's."""

    limits: Limits = Limits()
    key_limits: Limits | None = None


class Tenant(Strict):
    """``limits`` hold for all of its keys together, ``key_limits`` for each of them, ``model_limits`` for
    what it uses of a model. ``weight``: its share of what is served where tenants wait for each other.
    ``most_urgent``: the lowest priority that its requests may ask for. ``max_waiting``: most that wait.
    """

    limits: Limits = Limits()
    key_limits: Limits = Limits()
    model_limits: dict[Name, Limits] = Field(default_factory=dict)
    apps: dict[Name, App] = Field(default_factory=dict)
    weight: Annotated[float, Field(ge=0.001, le=1_000_000)] = 1.0
    most_urgent: Annotated[int, Field(ge=-1000, le=1000)] = 0
    max_waiting: Annotated[int, Field(ge=0)] | None = None


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


class Balancing(Strict):
    """Of which upstreams the least busy one gets a request: ``all`` that have the model, or ``two`` that are
    drawn by weight, for several gateways before the same upstreams.
    """

    among: Literal["all", "two"] = "all"


class Admission(Strict):
    """``max_running`` requests at a time; ``max_waiting`` more wait up to ``max_wait_s``."""

    max_running: Count = 1000
    max_waiting: Annotated[int, Field(ge=0)] = 1000
    max_wait_s: Positive = 10.0


class Admin(Strict):
    """The admin API's own address, and the variable with the key that it asks for."""

    key_env: Variable
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8081


class SemanticSettings(Strict):
    """Answers of questions that mean the same, at most ``max_false_hit_rate`` of them wrong.

    ``by_default``: for every request that may be cached, not only for those that ask for it. ``explore``: the
    share of safe ones that are asked anyway, to see how often they are wrong. ``max_entries``: questions.
    """

    max_false_hit_rate: Annotated[float, Field(gt=0, lt=1)] = 0.02
    by_default: bool = False
    explore: Annotated[float, Field(ge=0, le=1)] = 0.05
    max_entries: Count = 20_000


class CacheSettings(Strict):
    """Kept answers. ``sampled``: those of requests with a temperature above 0 as well."""

    enabled: bool = True
    max_mib: Count = 256
    ttl_s: Positive = 86_400.0
    sampled: bool = False
    semantic: SemanticSettings | None = None


class EmbeddingsSettings(Strict):
    """Whom the gateway asks for embeddings of its own: a ``model`` of the upstreams', or an alias. A request
    waits for ``timeout_ms`` and then does without. Texts of a tenant's requests that come within
    ``window_ms`` are asked for together, up to ``max_inputs``.
    """

    model: Name
    timeout_ms: Positive = 50.0
    window_ms: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    max_inputs: Annotated[int, Field(ge=2, le=2048)] = 64

    @model_validator(mode="after")
    def _comes_in_time(self) -> Self:
        if self.window_ms >= self.timeout_ms:
            raise ValueError(f"window_ms must be less than timeout_ms, which is {self.timeout_ms:g}")
        return self


class GatewayConfig(Strict):
    """The whole file. ``default_output_tokens`` is reserved for requests that name no maximum.

    Without ``upstreams`` it is for `headrace serve --gateway`, which is one itself. ``store``: a Redis that
    several gateways share, in the place of a file in ``state``, where the caches stay; its password is in the
    variable ``store_password_env``. ``classifier``: a file of `headrace gateway route train`, which tells
    intents in place of the shipped one. ``documents``: plans by name. ``templates``: each becomes a new
    version of what is stored under its name, if it says something else.
    """

    upstreams: dict[Name, UpstreamConfig] = Field(default_factory=dict)
    aliases: dict[Name, Name] = Field(default_factory=dict)
    releases: dict[Name, Release] = Field(default_factory=dict)
    routes: dict[Name, Route] = Field(default_factory=dict)
    classifier: Path | None = None
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    model_limits: dict[Name, Limits] = Field(default_factory=dict)
    admin: Admin | None = None
    authentication: Literal["keys", "none"] = "keys"
    state: Path = Path("gateway-state")
    store: str | None = None
    store_password_env: Variable | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    request_timeout_s: Positive = 600.0
    max_body_mib: Count = 8
    read_timeout_s: Positive = 60.0
    write_timeout_s: Positive = 60.0
    default_output_tokens: Count = 1024
    health: Health = Health()
    retries: Retries = Retries()
    balancing: Balancing = Balancing()
    admission: Admission = Admission()
    cache: CacheSettings = CacheSettings()
    embeddings: EmbeddingsSettings | None = None
    templates: dict[Name, Template] = Field(default_factory=dict)
    documents: dict[Name, DocumentPlan] = Field(default_factory=dict)
    batching: Batching | None = None
    tokenization: Tokenization | None = None

    @field_validator("store")
    @classmethod
    def _redis(cls, store: str | None) -> str | None:
        parts = urlsplit(store or "redis://localhost")
        if parts.password is not None:
            raise ValueError("a password does not belong here: name its variable as store_password_env")
        number = parts.path.removeprefix("/")
        if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write the store's address like redis://127.0.0.1:6379/0, or rediss:// with TLS")
        if number and not re.fullmatch(r"[0-9]{1,4}", number):
            raise ValueError(f"{number} is no number of a Redis database, such as 0")
        _ = parts.port  # raises ValueError for what is none
        return store

    @property
    def store_password(self) -> str | None:
        """Of the Redis. Raises ConfigError as :func:`secret` does."""
        if self.store is None or self.store_password_env is None:
            return None
        return secret(self.store_password_env, f"the password of {self.store}")

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        if not self.upstreams:  # what models there are, only `headrace serve` knows
            return self
        known = self.models
        for name, release in self.releases.items():
            if name in known:
                raise FieldError(f"{name} is the name of a model already", "releases", name)
            for version, settings in release.versions.items():
                self._served(settings, "releases", name, "versions", version)
        known |= self.releases.keys()
        self._check_routes(known)
        known |= self.routes.keys()
        for alias, target in self.aliases.items():
            if alias in known:
                raise FieldError(f"{alias} is the name of a model, release or route", "aliases", alias)
            if target not in known:
                raise FieldError(f"{alias} stands for {target}, which no upstream has", "aliases", alias)
        if self.embeddings is not None:
            embedder = self.aliases.get(self.embeddings.model, self.embeddings.model)
            if embedder not in self.models:
                raise FieldError(f"{embedder} is no model of an upstream's", "embeddings", "model")
        elif self.cache.semantic is not None:
            raise FieldError(
                "it needs embeddings: name their model as `embeddings: {model: …}`", "cache", "semantic"
            )
        self._check_documents()
        self._check_model_limits(self.model_limits)
        for name, tenant in self.tenants.items():
            at = "tenants", name
            self._check_model_limits(tenant.model_limits, *at)
            self._check_models(name, tenant.limits, *at, "limits")
            self._check_models(name, tenant.key_limits, *at, "key_limits")
            for name_of_app, app in tenant.apps.items():
                where = *at, "apps", name_of_app
                self._check_models(name_of_app, app.limits, *where, "limits")
                self._check_models(name_of_app, app.key_limits or Limits(), *where, "key_limits")
        return self

    def _check_routes(self, known: frozenset[str]) -> None:
        for name, route in self.routes.items():
            if name in known:
                raise FieldError(f"{name} is the name of a model or release already", "routes", name)
            for model in sorted(route.candidates.keys() - known):
                raise FieldError(
                    f"{model} is a model that no upstream has", "routes", name, "candidates", model
                )

    def _check_documents(self) -> None:
        known = self.models | self.aliases.keys() | self.releases.keys() | self.routes.keys()
        owners: dict[str, str] = {}
        for name, plan in self.documents.items():
            at = "documents", name
            if name == "off":
                raise FieldError("`off` is what requests say to do without a plan", *at)
            for model in sorted(plan.models):
                if model not in known:
                    raise FieldError(f"{model} is a model that no upstream has", *at, "models")
                if owners.setdefault(model, name) != name:
                    raise FieldError(f"{model} has the plan {owners[model]} already", *at, "models")

    def _check_models(self, who: str, limits: Limits, *at: str) -> None:
        known = self.models | self.aliases.keys() | self.releases.keys() | self.routes.keys()
        for model in sorted((limits.models or frozenset()) - known):
            raise FieldError(f"{who} may use {model}, which no upstream has", *at, "models")

    def _check_model_limits(self, models: dict[str, Limits], *at: str) -> None:
        for model, limits in models.items():
            if model not in self.models:
                raise FieldError(f"{model} is no model of an upstream's", *at, "model_limits", model)
            if limits.models is not None:
                raise FieldError("a model has no models", *at, "model_limits", model, "models")

    def _served(self, version: Version, *at: str) -> None:
        for name in sorted(version.upstreams or ()):
            if name not in self.upstreams:
                raise FieldError(f"{at[-1]} is to be served by {name}, which is no upstream", *at)
            if version.model not in self.upstreams[name].models:
                raise FieldError(f"{at[-1]} is to be served by {name}, which has no {version.model}", *at)
        if version.model not in self.models:
            raise FieldError(f"{at[-1]} is the model {version.model}, which no upstream has", *at)

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


def read_config(path: Path, served: Sequence[str] = ()) -> GatewayConfig:
    """The file, its relative ``state`` and ``classifier`` taken from where the file lies.

    ``served``: the names of the models of a server in this process: the upstream, where the file names
    none. Raises ConfigError that names the line of a mistake.
    """
    for name in served:
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"{name} is no name for a gateway's model: give it one by --served-model-name")
    own = {"local": {"url": "in-process", "models": {name: {} for name in served}}}
    config = read_yaml(path, GatewayConfig, {"upstreams": own} if served else {})
    _check_served(path, config, served)
    folder = path.absolute().parent
    classifier = None if config.classifier is None else folder / config.classifier
    return config.model_copy(update={"state": folder / config.state, "classifier": classifier})


def _check_served(path: Path, config: GatewayConfig, served: Sequence[str]) -> None:
    """What is in-process has to be served in this process, if anything is."""
    for upstream, settings in config.upstreams.items():
        if settings.url != IN_PROCESS or not served:
            continue
        for name, model in settings.models.items():
            if (model.name or name) not in served:
                raise ConfigError(
                    f"{path}: upstreams.{upstream}: {model.name or name} is not served in this process, but "
                    f"{', '.join(served)}: see --served-model-name"
                )
