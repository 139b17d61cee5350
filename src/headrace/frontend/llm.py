"""LLM: generate for a batch of prompts, in this process, in vLLM's shape."""

from __future__ import annotations

import dataclasses
import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.closing import Closing
from headrace.engine.config import (
    CacheConfig,
    CheckpointConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from headrace.engine.request import EngineStats, SamplingParams
from headrace.errors import ConfigError, InvalidRequestError
from headrace.frontend.batch import BatchRequest, embed_batch, generate_batch
from headrace.frontend.beam_search import BeamSearch, BeamSearchParams, beam_text
from headrace.frontend.embedding import check_dimensions
from headrace.frontend.frontend import Frontend
from headrace.frontend.llm_inputs import listed, params_of, priorities_of, say_which, text_or_ids
from headrace.frontend.open import open_frontend
from headrace.frontend.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from headrace.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import Self

    from headrace.engine.journal import Journal
    from headrace.model.store import Progress

__all__ = ["LLM", "Message", "Prompt", "SamplingParams"]

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": [ids]}``."""

Message: TypeAlias = Mapping[str, Any]
"""``{"role": …, "content": …}``."""

_NO_QUEUE_LIMIT_S = 1e9  # an offline batch waits for as long as it takes


class LLM(Closing):
    """A model, loaded and ready to generate or, if it is an encoder, to embed.

    Settings come as config objects or as plain arguments, which fill in what the object leaves at its
    default; where both say something different, ConfigError is raised. ``speculative_config`` is a
    :class:`SpeculativeConfig` or a dict of its fields. ``checkpoint_path`` is a folder: prompts under way are
    kept there, and another process goes on with them by :meth:`resume`. ``progress`` is told how the model's
    download advances. Not for use by several threads at once.

    Other arguments of vLLM's LLM are taken with values that change nothing here (``tensor_parallel_size=1``,
    ``dtype="auto"``) and refused by name with others.

    Raises ConfigError, ModelNotFoundError, DownloadError, ModelFormatError or OutOfMemoryError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        quantization: str | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
        block_size: int | None = None,
        swap_space: float | None = None,
        kv_tier_path: str | os.PathLike[str] | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        priority_aging_s: float | None = None,
        tpot_target_ms: float | None = None,
        backend: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        seed: int | None = None,
        model_config: ModelConfig | None = None,
        cache_config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        checkpoint_path: str | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        progress: Progress | None = None,
        **vllm: Any,
    ) -> None:
        if vllm:
            from headrace.frontend.vllm_arguments import check_vllm_arguments

            check_vllm_arguments(vllm, _argument_names(type(self)))
        self.model_config = _with_arguments(
            model_config or ModelConfig(),
            model=model,
            quantization=quantization,
            max_model_len=max_model_len,
            backend=backend,
            device=device,
            threads=threads,
            seed=seed,
        )
        self.cache_config = _with_arguments(
            cache_config or CacheConfig(),
            block_size=block_size,
            swap_space=swap_space,
            kv_tier_path=None if kv_tier_path is None else os.fspath(kv_tier_path),
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler_config = _with_arguments(
            scheduler_config or SchedulerConfig(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            speculative=SpeculativeConfig.of(speculative_config),
            priority_aging_s=priority_aging_s,
            tpot_target_ms=tpot_target_ms,
        )
        self._frontend = open_frontend(
            self.model_config,
            self.cache_config,
            dataclasses.replace(self.scheduler_config, max_queue_time_s=_NO_QUEUE_LIMIT_S),
            progress=progress,
            checkpoint=_checkpoint(checkpoint_path, checkpoint_config),
        )
        self._close_at_the_end()

    @classmethod
    def from_frontend(cls, frontend: Frontend, scheduler_config: SchedulerConfig | None = None) -> Self:
        """An LLM over a frontend that is open already, and that it closes; the configs are informative."""
        llm = cls.__new__(cls)
        llm.model_config = ModelConfig(model=frontend.model_name, max_model_len=frontend.max_model_len)
        llm.cache_config = CacheConfig()
        llm.scheduler_config = scheduler_config or SchedulerConfig()
        llm._frontend = frontend
        llm._close_at_the_end()
        return llm

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with ``encode`` and ``decode``."""
        return self._frontend.tokenizer

    @property
    def frontend(self) -> Frontend:
        """Tokenizer, chat template and engine client."""
        return self._frontend

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order.

        ``sampling_params``: one for all, or one per prompt. ``use_tqdm``: show a progress bar on a terminal.
        ``priority``: one number per prompt, lower runs first.
        All prompts are checked before any runs: InvalidRequestError or ContextLengthError say which one is
        wrong. If a sequence fails on the way the others finish first; then BatchError is raised, whose
        ``outputs`` hold everything.
        """
        return self._run(listed(prompts), self._prompt, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to a list of them, through the model's chat template.

        ``priority``: one number per conversation, lower runs first.
        Raises as :meth:`generate`, and InvalidRequestError for a model without a template.
        """
        if not isinstance(messages, Sequence):
            raise InvalidRequestError("messages must be a conversation or a list of them.", param="messages")
        one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if one else list(messages)

        def encode(conversation: Any) -> tuple[str | None, list[int]]:
            text = self._frontend.render_chat(
                conversation, tools, add_generation_prompt, **(chat_template_kwargs or {})
            )
            return text, self._frontend.tokenizer.encode(text, add_special_tokens=False)

        return self._run(conversations, encode, sampling_params, use_tqdm, priority)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """The ``beam_width`` best answers to each prompt, best first.

        ``cumulative_logprob`` is without length penalty. Raises as :meth:`generate`.
        """
        params.validate()
        frontend = self._frontend
        encoded = [self._prompt(prompt) for prompt in listed(prompts)]
        for _, ids in encoded:
            frontend.check(ids, SamplingParams())
        searches = [
            BeamSearch(params, frontend.eos_token_ids, frontend.max_model_len - len(ids))
            for _, ids in encoded
        ]
        while running := [search for search in searches if not search.done]:
            requests = [
                BatchRequest(None, [*ids, *beam.token_ids], search.step_params)
                for search, (_, ids) in zip(searches, encoded, strict=True)
                if not search.done
                for beam in search.running
            ]
            answers = iter(self._batch(requests, show_progress=use_tqdm))
            for search in running:
                search.advance([_likeliest(next(answers)) for _ in search.running])
        return [
            RequestOutput(
                request_id=f"beam-{number}",
                prompt=text,
                prompt_token_ids=ids,
                outputs=[
                    CompletionOutput(
                        index=index,
                        text=beam_text(beam, frontend.tokenizer, ids),
                        token_ids=list(beam.token_ids),
                        cumulative_logprob=beam.logprob,
                        finish_reason="stop" if beam.stopped else "length",
                    )
                    for index, beam in enumerate(search.ended)
                ],
            )
            for number, (search, (text, ids)) in enumerate(zip(searches, encoded, strict=True))
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of all texts, in their order; the model must be an encoder (``minilm-l6``).

        ``dimensions``: only the first so many, brought to length one again. ``truncate_prompt_tokens``: cut
        longer texts, -1 = to the model's limit; without it they raise ContextLengthError. All texts are
        checked before any runs: InvalidRequestError says which one is wrong.
        """
        frontend = self._frontend
        frontend.check_kind(embeds=True)
        inputs = listed(prompts)
        check_dimensions(dimensions, frontend.client.architecture.hidden_size)

        def encode(prompt: Any) -> tuple[str | None, list[int]]:
            given = text_or_ids(prompt)
            ids = frontend.encode_input(given, truncate_prompt_tokens)
            return (given if isinstance(given, str) else None), ids

        encoded = [say_which(encode, prompt, at, len(inputs)) for at, prompt in enumerate(inputs)]
        return embed_batch(frontend, encoded, dimensions=dimensions, show_progress=use_tqdm)

    def resume(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answers to the prompts that an earlier process did not return from ``checkpoint_path``.

        In their order of arrival; those that were complete already are among them. Prompts of that process
        which had not reached the engine yet are not: compare ``prompt`` with yours. What this returns is
        forgotten there, so that a second call returns nothing. Raises ConfigError without a
        ``checkpoint_path``, and as :meth:`generate`.
        """
        self._journal()
        from headrace.frontend.resume import resume_batch

        return resume_batch(self._frontend, show_progress=use_tqdm)

    def checkpoint(self) -> None:
        """Wait until the disk holds all that prompts under way have had; any thread.

        Without it that is so a second later at most, and a killed process loses nothing that matters. Raises
        CheckpointError if the disk refuses, ConfigError without a ``checkpoint_path``.
        """
        self._journal().sync()

    def stats(self) -> EngineStats:
        """A snapshot: ``prefix_cache_hit_rate``, ``num_running_seqs``, ``kv_cache_usage`` and the rest."""
        return self._frontend.client.stats()

    def close(self) -> None:
        """Free the model's memory. Closing twice is fine; generating afterwards raises EngineDeadError."""
        self._frontend.close()

    def _journal(self) -> Journal:
        if self._frontend.journal is None:
            raise ConfigError(
                "This LLM keeps no requests: give it a checkpoint_path.", param="checkpoint_path"
            )
        return self._frontend.journal

    def _close_at_the_end(self) -> None:
        """Close when this object goes or the program ends: no engine may outlive the interpreter."""
        weakref.finalize(self, self._frontend.close)

    def _run(
        self,
        inputs: Sequence[Any],
        encode: Callable[[Any], tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        priorities = priorities_of(priority, len(inputs))
        params = params_of(sampling_params, len(inputs))
        requests = []
        for index, (item, its_params) in enumerate(zip(inputs, params, strict=True)):

            def checked(item: Any, its_params: SamplingParams = its_params) -> tuple[str | None, list[int]]:
                text, ids = encode(item)
                ids = self._frontend.truncate(ids, its_params)
                self._frontend.check(ids, its_params)
                return text, ids

            found = say_which(checked, item, index, len(inputs))
            requests.append(BatchRequest(*found, its_params, priorities[index], self._note(found[0])))
        return self._batch(requests, show_progress)

    def _note(self, text: str | None) -> bytes:
        """What a journal keeps of a prompt."""
        if self._frontend.journal is None:
            return b""
        from headrace.frontend.resume import prompt_note

        return prompt_note(text)

    def _batch(self, requests: Sequence[BatchRequest], show_progress: bool) -> list[RequestOutput]:
        return generate_batch(
            self._frontend,
            requests,
            # Enough to keep the engine's queue from running dry, and never so many that it refuses one.
            max_sequences=min(2 * self.scheduler_config.max_num_seqs, self.scheduler_config.max_waiting),
            show_progress=show_progress,
        )

    def _prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        given = text_or_ids(prompt)
        return (given if isinstance(given, str) else None), self._frontend.encode_prompt(given)


def _likeliest(answer: RequestOutput) -> list[tuple[int, float]]:
    """The candidates for the only token of an answer, likeliest first."""
    [candidates] = answer.outputs[0].logprobs or [{}]
    return [(token, found.logprob) for token, found in candidates.items() if found.rank is not None]


def _argument_names(kind: type[LLM]) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _with_arguments(config: Any, **arguments: Any) -> Any:
    """A copy of ``config`` with the arguments that were given. ConfigError where both chose, differently."""
    given = {name: value for name, value in arguments.items() if value is not None}
    defaults = type(config)()
    for name, value in given.items():
        chosen = getattr(config, name)
        if chosen not in (getattr(defaults, name), value):
            raise ConfigError(
                f"{name} is {chosen!r} in {type(config).__name__}, {value!r} as an argument; give it once.",
                param=name,
            )
    return dataclasses.replace(config, **given)


def _checkpoint(path: str | None, config: CheckpointConfig | None) -> CheckpointConfig | None:
    """Whichever was given. Answers wait for as long as it takes: nobody else comes for them."""
    if path is None:
        return config
    if config is not None and config.path != path:
        raise ConfigError(
            f"checkpoint_path is {path!r}, and {config.path!r} in CheckpointConfig; give it once.",
            param="checkpoint_path",
        )
    return config or CheckpointConfig(path, grace_s=_NO_QUEUE_LIMIT_S)
