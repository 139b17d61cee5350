"""Text to token ids and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, InvalidRequestError, ModelFormatError, ModelNotFoundError
from headrace.frontend.detokenizer import Detokenizer
from headrace.frontend.token_bytes import TokenSpelling, spelling_of

if TYPE_CHECKING:
    import tokenizers

_LONG_TEXT = 2048  # characters from which letting other threads run is worth encode_batch's overhead
_PROBE = "The quick brown fox: 12,345 naïve cafés\n\n\tif x == 'don''t': 日本語 🙂  </s>"


class Tokenizer:
    """A tokenizer with what generation needs to know about it. Immutable and thread-safe.

    ``bos_token_id``; ``eos_token_ids``: every token that ends a turn; ``chat_template``: jinja source or
    None; ``special_token_ids``: control tokens, which are no text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        decoder = backend.decoder
        self._spelling: TokenSpelling | None = (
            None if decoder is None else spelling_of(json.loads(decoder.__getstate__()))
        )
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(), 1 + max(added, default=-1))

    @property
    def strips_leading_space(self) -> bool:
        """Whether a decoded text's first space was put there by the tokenizer."""
        return self._spelling is not None and self._spelling.strip_leading_space

    @property
    def bos_token(self) -> str | None:
        """BOS as templates write it."""
        return None if self.bos_token_id is None else self._backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The model's main end token as templates write it."""
        return self._backend.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    def encode_truncated(self, text: str, max_tokens: int) -> list[int]:
        """:meth:`encode`, the text cut at its end to ``max_tokens``, special tokens included and kept.

        Raises InvalidRequestError if ``max_tokens`` leaves no room for the text.
        """
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return ids
        room = max_tokens - self._backend.num_special_tokens_to_add(is_pair=False)
        if room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {max_tokens}, which leaves no room beside the model's own "
                f"{max_tokens - room} special tokens.",
                param="truncate_prompt_tokens",
            )
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(room)
        return list(self._backend.post_process(encoding).ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds BOS and EOS as the model was trained.

        As in vLLM and transformers, a control token spelled out in the text (``<|im_end|>``) becomes that
        token: rendered chat templates depend on it. Text of untrusted origin can thus write control
        tokens, in prompts and in chat messages alike. Raises InvalidRequestError if the text can't be
        written as UTF-8 (lone surrogates).
        """
        try:
            if len(text) >= _LONG_TEXT:  # only the batch call releases the interpreter lock
                batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return list(batch[0].ids)
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                "The text is not valid Unicode (it holds half of a surrogate pair)."
            ) from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD, as in ``bytes.decode``."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; none for an id without a token (padding of the vocabulary).

        Raises ModelFormatError if the tokenizer is of a kind that can't generate (WordPiece, say).
        """
        known = self._bytes.get(token_id)
        if known is None:
            if self._spelling is None:
                raise ModelFormatError(
                    "This tokenizer's decoder is neither byte-level nor SentencePiece: it can encode but "
                    "not generate text."
                )
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            known = b"" if token is None else self._spelling.to_bytes(token)
            self._bytes[token_id] = known
        return known

    def token(self, token_id: int) -> str:
        """A token as the vocabulary spells it; empty for an id without one."""
        return self._backend.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def difference(self, other: Tokenizer) -> str | None:
        """The first thing that keeps ``other``'s ids from meaning the same as this one's; None: nothing.

        Compares what each id stands for and whether it is a control token. Which of them ends a turn, and
        how texts are cut into tokens, makes no difference to ids.
        """
        for token_id in range(max(self.vocab_size, other.vocab_size)):
            ours, theirs = self.token_bytes(token_id), other.token_bytes(token_id)
            if ours != theirs:
                return f"id {token_id} is {ours!r} in one and {theirs!r} in the other"
        special = sorted(self.special_token_ids ^ other.special_token_ids)
        return f"id {special[0]} is a control token in one of them only" if special else None

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids: hashes the vocabulary and a sample's encoding."""
        digest = hashlib.blake2b(digest_size=16)
        for token, index in sorted(self._backend.get_vocab().items(), key=lambda entry: entry[1]):
            digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
        digest.update(repr(self.encode(_PROBE)).encode())
        return digest.hexdigest()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder (or a weights file in one) with tokenizer.json.

    A GGUF file's tokenizer is converted the first time and cached. Raises ModelNotFoundError if there is
    no such path, ModelFormatError if it holds no usable tokenizer.
    """
    if not path.exists():
        raise ModelNotFoundError(f"There is no model at {path}.")
    if path.is_dir() or path.suffix == ".safetensors":
        return _from_folder(path if path.is_dir() else path.parent)

    from headrace.frontend.tokenizer_cache import convert_file, converted_folder, keep

    folder = converted_folder(path)
    if folder.is_dir():
        try:
            return _from_folder(folder)
        except HeadraceError:
            pass  # damaged: make it again
    files = convert_file(path)
    tokenizer = _build(files["tokenizer.json"], _parse(files["tokenizer_config.json"], path), [
        _parse(files["generation_config.json"], path)
    ], path)  # fmt: skip
    keep(files, folder)
    return tokenizer


def _from_folder(folder: Path) -> Tokenizer:
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ModelFormatError(
            f"{folder} has no readable tokenizer.json ({error.strerror}). Models that come with only "
            "tokenizer.model or vocab.json need to be saved with a fast tokenizer first."
        ) from None
    config = _read_object(folder / "tokenizer_config.json")
    if "chat_template" not in config:
        template = folder / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text("utf-8", "replace")
        else:
            config["chat_template"] = _read_object(folder / "chat_template.json").get("chat_template")
    generation = [_read_object(folder / name) for name in ("generation_config.json", "config.json")]
    return _build(content, config, generation, folder)


def _build(content: bytes, config: dict[str, Any], generation: list[dict[str, Any]], path: Path) -> Tokenizer:
    """``generation``: generation_config.json, then config.json for what the first does not say."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelFormatError(f"The tokenizer of {path} can't be read: {error}") from None
    backend.no_truncation()  # texts are never cut or filled up in silence
    backend.no_padding()

    def ids_of(key: str) -> list[int]:
        for source in generation:
            value = source.get(f"{key}_token_id")
            values = value if isinstance(value, list) else [value]
            ids = [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
            if ids:
                return ids
        return []

    def named(key: str) -> list[int]:
        value = config.get(f"{key}_token")
        text = value.get("content") if isinstance(value, dict) else value
        index = backend.token_to_id(text) if isinstance(text, str) else None
        return [] if index is None else [index]

    bos = [*named("bos"), *ids_of("bos")]
    return Tokenizer(
        backend,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=[*named("eos"), *ids_of("eos")],
        chat_template=_default_template(config.get("chat_template")),
    )


def _default_template(value: Any) -> str | None:
    """A folder may hold one template, or several by name, of which ``default`` is meant for chat."""
    if isinstance(value, list):
        value = next(
            (t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return value if isinstance(value, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFormatError(f"{path} can't be read: {error.strerror}.") from None
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} should hold a JSON object.")
    return value
