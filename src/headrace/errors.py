"""The one exception tree. Each class carries the HTTP status, OpenAI error type and code it maps to."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose.

    ``message`` says what was wrong and what would be right; it is shown to users as it stands.
    ``param`` names the offending request field, when there is one.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(HeadraceError):
    """The request can never succeed as it stands."""

    status = 400
    type = "invalid_request_error"
    code: str | None = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output does not fit the model's context or the KV pool."""

    code = "context_length_exceeded"


class PayloadTooLargeError(InvalidRequestError):
    """The request body is over the server's limit."""

    status = 413
    code = "payload_too_large"


class AuthenticationError(HeadraceError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotAllowedError(HeadraceError):
    """The API key is right, but what was asked is not among what it may do."""

    status = 403
    type = "invalid_request_error"
    code = "not_allowed"


class LimitError(HeadraceError):
    """A limit of the tenant's or key's is reached; ``retry_after_s`` says when to try again."""

    status = 429
    type = "rate_limit_error"
    code: str | None = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BudgetError(LimitError):
    """The tenant's or key's budget is spent."""

    type = "insufficient_quota"
    code: str | None = "insufficient_quota"


class UpstreamError(HeadraceError):
    """No upstream gave a good answer: the last one's failure is told."""

    status = 502
    code = "upstream_failed"


class ModelNotFoundError(HeadraceError):
    """No model of that name is served, or can be found by the model store."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFoundError(HeadraceError):
    """What was named (a key, a request, a release) is not here."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelFormatError(HeadraceError):
    """A model file is corrupt, truncated, lying, or of a kind that is refused (pickle)."""

    code = "model_format"


class OverloadedError(HeadraceError):
    """Queue full, queue time exceeded, or the server is draining: try again after ``retry_after_s``."""

    status = 503
    type = "server_error"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(HeadraceError):
    """The request's own ``timeout_s`` passed, or cannot be kept at the present load."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class StateError(HeadraceError):
    """The gateway's keys, quotas and ledger cannot be reached or written; nothing is served without them."""

    status = 503
    code = "state_unavailable"
    retry_after_s = 1.0


class OutOfMemoryError(HeadraceError):
    """The estimate says that the model and its KV pool do not fit; refused before loading."""

    code = "out_of_memory"


class EngineDeadError(HeadraceError):
    """The engine's thread or process ended; no request can be served any more."""

    status = 503
    code = "engine_dead"


class GenerationError(HeadraceError):
    """One sequence failed during generation (for example non-finite logits); others go on."""

    code = "generation_failed"


class GrammarError(GenerationError):
    """A grammar that compiled led one sequence to where no token can follow; others go on."""

    status = 400
    type = "invalid_request_error"
    code = "grammar_failed"


class ConfigError(HeadraceError):
    """A setting, flag or file of settings is wrong."""

    code = "config"


class CheckpointError(HeadraceError):
    """What requests have had cannot be written to the journal: a full disk, or one that is gone."""

    code = "checkpoint_failed"


class RequestNotFoundError(HeadraceError):
    """No answer of that name is kept for whoever asks."""

    status = 404
    type = "invalid_request_error"
    code = "request_not_found"


class NotResumableError(InvalidRequestError):
    """The request cannot go on from where its client is: ask anew."""

    status = 409
    code = "not_resumable"


class DownloadError(HeadraceError):
    """A model could not be fetched: network, hash mismatch, full disk. Pulling again resumes."""

    code = "download_failed"
