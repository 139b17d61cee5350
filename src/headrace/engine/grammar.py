"""Grammars: what an output may still say, token by token. The one place that knows llguidance.

A grammar is compiled once per text (:class:`GrammarCompiler`, on a client's thread, never on the engine's),
and every sequence walks its own :class:`Matcher` over it: a mask before each token, then the token.
llguidance works on bytes (derivatives of regular expressions and an Earley parser over a token trie), so all
that it needs of a tokenizer is the :class:`Vocabulary`; the engine still knows no text.
"""

from __future__ import annotations

import json
import re
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.request import EngineRequest, StructuredOutputs
from headrace.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMAR_BYTES = 128 * 1024
"""Of a schema, expression, grammar or list of choices: bounds compiling to a few hundred milliseconds."""

WHITESPACE = r"\x20|\n[\x20\t]{0,32}"
"""Between the tokens of JSON: a space, or a line break and an indentation. No model can idle in it."""

_CACHED_GRAMMARS = 64
_DUMP = re.compile(r"\n<|\n +\d+ \| ")
_SHOWN = 300  # characters of an error of the library's


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, tag="vocabulary"):
    """The bytes of every token, by id: plain data, sent once to an engine in another process.

    ``special_ids``: control tokens, which match no text. ``eos_token_ids``: allowed where a grammar may end.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]


class Matcher:
    """Where one sequence stands in its grammar."""

    __slots__ = ("_eos_token_ids", "_grammar", "_matcher", "_words", "error")

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._grammar = grammar  # keeps alive what the library calls back
        self._matcher = matcher
        self._eos_token_ids = vocabulary.eos_token_ids
        self._words = -(-len(vocabulary.tokens) // 32)
        self.error: str | None = None  # why no token is allowed any more

    @property
    def complete(self) -> bool:
        """Whether the output satisfies the grammar and nothing can follow."""
        return self.error is None and self._matcher.is_stopped()

    def mask(self, *, allow_end: bool, after: Sequence[int] = ()) -> NDArray[np.uint32] | None:
        """The next token's mask, ``[ceil(vocab / 32)]``: bit ``i % 32`` of word ``i // 32`` allows ``i``.

        End tokens are allowed where the grammar may end, unless ``allow_end`` is False. If no token is left,
        the mask is empty and ``error`` says why. With ``after``: the mask behind these drafted tokens, which
        leave no trace; None if the grammar does not allow them.
        """
        mask = np.zeros(self._words, np.uint32)
        if self.error is not None:
            return mask
        matcher = self._matcher
        if after:
            matcher = matcher.deep_copy()
            if not matcher.consume_tokens(list(after)):
                return None
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            mask[:] = 0  # the library allows the end after an error
            if not after:
                self._fail()
        elif not allow_end:
            for token in self._eos_token_ids:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
        if self.error is None and not after and not mask.any():
            self.error = "No token of the vocabulary can continue the output as its grammar demands."
        return mask

    def dead_end(self) -> str | None:
        """Why no token can follow; None if one can."""
        self.mask(allow_end=True)
        return self.error

    def forced(self) -> list[int]:
        """The tokens that have to come next, as many as the grammar leaves no choice about."""
        return [] if self.error is not None else self._matcher.compute_ff_tokens()

    def num_allowed(self, drafted: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows."""
        return 0 if self.error is not None else self._matcher.validate_tokens(list(drafted))

    def accept(self, token: int) -> None:
        """Take in the sampled token; ``error`` is set if the grammar does not allow it."""
        if self.error is None and not self._matcher.consume_token(token):
            self._fail()

    def _fail(self) -> None:
        self.error = f"The output's grammar cannot go on: {_first_lines(self._matcher.get_error())}"


class Grammar:
    """A compiled grammar. Immutable and thread-safe."""

    __slots__ = ("_compiler", "_matcher")

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher) -> None:
        self._compiler = compiler
        self._matcher = matcher

    def matcher(self) -> Matcher:
        """A matcher at the beginning, for one sequence. Costs microseconds."""
        return Matcher(self, self._matcher.deep_copy(), self._compiler.vocabulary)


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the latest. Thread-safe.

    Making one indexes the vocabulary (tens of milliseconds and more): do it off the engine's thread.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self.vocabulary = vocabulary
        self._limits = LLParserLimits(verbose_errors=False)
        self._lock = Lock()
        self._cache: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None  # the library asks _Greedy while it makes one
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Greedy(self, vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos_token_ids),
        )

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar of ``wanted``, from the cache if it was compiled lately.

        Raises InvalidRequestError saying what is wrong with it. Takes a few milliseconds for usual grammars
        and a bounded time for any.
        """
        key = wanted.source()
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known
        made = self._compile(*key)
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return made

    def greedy_tokens(self, text: str) -> list[int]:
        """``text`` as the longest tokens from its start: how text that a grammar forces is spelled."""
        return [] if self._tokenizer is None else self._tokenizer.greedy_tokenize(text)

    def _compile(self, kind: str, text: str) -> Grammar:
        from llguidance import LLMatcher

        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise _wrong(kind, "it is not valid Unicode (it holds half of a surrogate pair)") from None
        if size > MAX_GRAMMAR_BYTES:
            raise _wrong(kind, f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are possible")
        try:
            source = _library_source(kind, text)
        except (ValueError, RecursionError) as error:
            raise _wrong(kind, _first_lines(str(error))) from None
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _wrong(kind, _first_lines(matcher.get_error()))
        first = matcher.deep_copy()  # a first mask is the test that anything matches
        first.compute_bitmask()
        if first.is_error() or (first.is_stopped() and not first.is_accepting()):
            raise _wrong(kind, "nothing can ever match it")
        return Grammar(self, matcher)


def compiled(request: EngineRequest, compiler: GrammarCompiler | None) -> Grammar | None:
    """The grammar that ``request`` asks for, if any. Raises InvalidRequestError if it can't be had."""
    wanted = request.params.structured_outputs
    if wanted is None:
        return None
    if compiler is None:
        raise InvalidRequestError(
            "This engine has no vocabulary, so it can't compile grammars.", param="structured_outputs"
        )
    return compiler.compile(wanted)


class _Greedy:
    """The tokenizer as llguidance wants it. It must not own the compiler: the library would never let go."""

    def __init__(self, compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
        self._compiler = weakref.ref(compiler)
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        compiler = self._compiler()
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return [] if compiler is None else compiler.greedy_tokens(text)


def _library_source(kind: str, text: str) -> str:
    """``text`` in llguidance's own form. Raises ValueError if it can't be read."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    if kind == "json":
        if text.strip() == "false":
            raise ValueError("nothing can ever match it")
        text = "{}" if text.strip() == "true" else text  # options need an object to go to
        overrides: Any = {"whitespace_pattern": WHITESPACE}
        return LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    if kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text)}/")  # its \d is 0 to 9
    if kind == "choice":
        choices = json.loads(text)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_string, choices)))
    if "::=" in text:  # GBNF, llama.cpp's dialect of EBNF
        return grammar_from("gbnf", text)
    return LLMatcher.grammar_from_lark(text)


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrong(kind: str, why: str) -> InvalidRequestError:
    what = {
        "json": "JSON schema",
        "regex": "regular expression",
        "choice": "list of choices",
        "grammar": "grammar",
    }[kind]
    return InvalidRequestError(f"The {what} cannot be used: {why.rstrip('. ')}.", param="structured_outputs")


def _first_lines(text: str) -> str:
    """The library's message without its dumps of the source and of the parser, short enough to show."""
    return _DUMP.split(text, maxsplit=1)[0].strip()[:_SHOWN]
