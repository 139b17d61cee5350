"""Grammars: compiling them, walking them, and sequences that follow them whatever happens around them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.engine.config import SpeculativeConfig
from headrace.engine.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler, Matcher
from headrace.engine.request import EngineRequest, StructuredOutputs
from headrace.errors import InvalidRequestError
from tests.engine.grammars import SPECIAL, TOKENS, compiler, text_of, wanted
from tests.engine.small_engines import EOS, Answers, finish, request, run, small_engine, tokens

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 3, "maximum": 250},
        "kind": {"enum": ["the", "fox", 7, None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}
PHONE = r"\d{3}-\d{2}(a|b)*z"


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return compiler()


def allowed(matcher: Matcher, *, allow_end: bool = True) -> set[int]:
    mask = matcher.mask(allow_end=allow_end)
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(matcher: Matcher, text: str) -> None:
    """Feed ``text`` in the longest tokens that are allowed."""
    data = text.encode()
    while data:
        fits = [token for token in allowed(matcher) if TOKENS[token] and data.startswith(TOKENS[token])]
        assert fits, f"nothing allowed continues with {data!r}"
        token = max(fits, key=lambda token: len(TOKENS[token]))
        matcher.accept(token)
        data = data[len(TOKENS[token]) :]


def test_only_what_the_grammar_allows(grammars: GrammarCompiler) -> None:
    matcher = grammars.compile(wanted(choice=["the fox", "12"])).matcher()
    assert {TOKENS[token] for token in allowed(matcher)} == {b"the", b"t", b"1", b"12"}
    walk(matcher, "the")
    assert {TOKENS[token] for token in allowed(matcher)} == {b" "}
    assert not matcher.complete
    walk(matcher, " fox")
    assert matcher.complete
    assert allowed(matcher) == {EOS}


def test_the_end_is_allowed_where_the_grammar_may_end_and_only_if_asked(grammars: GrammarCompiler) -> None:
    matcher = grammars.compile(wanted(regex="a(bc)*")).matcher()
    assert EOS not in allowed(matcher)
    walk(matcher, "a")
    assert EOS in allowed(matcher)
    assert EOS not in allowed(matcher, allow_end=False)
    walk(matcher, "b")
    assert EOS not in allowed(matcher)


def test_control_tokens_are_no_text(grammars: GrammarCompiler) -> None:
    assert SPECIAL not in allowed(grammars.compile(wanted(regex="a*")).matcher())
    assert SPECIAL not in allowed(grammars.compile(wanted(json=True)).matcher())


def test_sequences_do_not_share_a_place(grammars: GrammarCompiler) -> None:
    first = grammars.compile(wanted(regex="abc")).matcher()
    walk(first, "ab")
    second = grammars.compile(wanted(regex="abc")).matcher()
    assert {TOKENS[token] for token in allowed(second)} == {b"ab"}


def test_white_space_is_bounded(grammars: GrammarCompiler) -> None:
    """A small model that may write white space in JSON writes nothing else until its tokens run out."""
    matcher = grammars.compile(wanted(json=SCHEMA)).matcher()
    walk(matcher, "{\n" + 32 * " ")
    assert not any(TOKENS[token].isspace() for token in allowed(matcher))


def test_a_token_against_the_grammar_is_an_error(grammars: GrammarCompiler) -> None:
    matcher = grammars.compile(wanted(regex="abc")).matcher()
    matcher.accept(TOKENS.index(b"x"))
    assert matcher.error is not None
    assert allowed(matcher) == set()
    assert not matcher.complete


def test_equal_grammars_are_compiled_once(grammars: GrammarCompiler) -> None:
    assert grammars.compile(wanted(json=SCHEMA)) is grammars.compile(wanted(json=json.dumps(SCHEMA)))
    assert grammars.compile(wanted(regex="a")) is not grammars.compile(wanted(choice=["a"]))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"json": {"not": {}}}, "not"),
        ({"json": {"type": "wibble"}}, "wibble"),
        ({"json": {"$ref": "#/$defs/missing"}}, "/$defs/missing"),
        ({"json": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
        ({"json": False}, "nothing can ever match"),
        ({"json": {"$ref": "#"}}, "nothing can ever match"),
        ({"json": "{"}, "JSON schema"),
        ({"json": "[" * 100_000}, "recursion"),
        ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
        ({"json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "at most"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "strat: /a/"}, "start"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'start: start "a"'}, "nothing can ever match"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"regex": 5}, "regex must be a string"),
        ({}, "none"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
    ],
)
def test_what_is_wrong_is_said(grammars: GrammarCompiler, kind: dict[str, Any], says: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequestError) as caught:
        grammars.compile(StructuredOutputs(**kind))
    assert says in caught.value.message
    assert len(caught.value.message) < 500
    assert time.process_time() - began < 2


def test_a_schema_that_is_no_json_is_refused_when_it_is_given() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema in (deep, {"const": object()}):
        with pytest.raises(InvalidRequestError, match="JSON"):
            StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    "kind",
    [
        {"regex": "((a{0,100}){0,100}){0,100}b"},
        {"regex": "(a|b)*a(a|b){25}"},
        {"regex": "(.*a){20}.{100}"},
        {"regex": "(a+)+"},
        {"json": {"enum": [f"value {i}" for i in range(5000)]}},
        {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}},
        {"json": {"type": "object", "properties": {f"k{i}": {"maxLength": 9} for i in range(2000)}}},
    ],
)
def test_hostile_grammars_take_bounded_time(grammars: GrammarCompiler, kind: dict[str, Any]) -> None:
    """An expression that explodes either is refused, or its masks stay cheap, or its sequence ends."""
    rng = np.random.default_rng(0)
    began = time.process_time()
    try:
        matcher = grammars.compile(StructuredOutputs(**kind)).matcher()
    except InvalidRequestError:
        assert time.process_time() - began < 3
        return
    for _ in range(60):
        choices = sorted(allowed(matcher) - {EOS})
        if not choices:
            break
        matcher.accept(int(rng.choice(choices)))
    assert time.process_time() - began < 5


# In the engine


def asks(name: str, prompt: list[int], kind: dict[str, Any], **params: Any) -> EngineRequest:
    params.setdefault("max_tokens", 200)
    return request(name, prompt, structured_outputs=StructuredOutputs(**kind), **params)


def fits(kind: dict[str, Any], text: str) -> None:
    if "json" in kind:
        jsonschema.validate(json.loads(text), kind["json"])
    elif "regex" in kind:
        assert re.fullmatch(kind["regex"], text)
    elif "choice" in kind:
        assert text in kind["choice"]


KINDS: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": PHONE}, {"choice": ["the fox", "a", "12345"]}]


def answer_text(answers: Answers, name: str, choice: int = 0) -> str:
    answer = answers[name, choice]
    assert answer.finish_reason == "stop"
    return text_of([token for token in answer.token_ids if token != EOS])


@pytest.mark.parametrize("kind", KINDS, ids=["json", "regex", "choice"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"n": 3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"top_k": 1},
        {"ignore_eos": True},
        {"min_tokens": 40},
        {"logit_bias": {EOS: 100.0, TOKENS.index(b"x"): 100.0}},
    ],
)
def test_outputs_match(grammars: GrammarCompiler, kind: dict[str, Any], params: dict[str, Any]) -> None:
    """A complete output ends though EOS is ignored or banned: nothing could follow it."""
    engine = small_engine()
    for seed in range(4):
        asked = asks(f"r{seed}", tokens(9, seed), kind, **params)
        engine.add(asked, grammars.compile(StructuredOutputs(**kind)))
    answers = Answers()
    finish(engine, answers)
    assert len(answers) == 4 * params.get("n", 1)
    for (name, choice), answer in answers.items():
        fits(kind, answer_text(answers, name, choice))
        assert answer.last is not None
        assert answer.last.stop_token_id in (None, EOS)


def test_min_tokens_keeps_a_grammar_going_that_may_end(grammars: GrammarCompiler) -> None:
    engine = small_engine()
    kind = {"regex": "(a|b|c)*"}
    engine.add(asks("r", [1, 2], kind, min_tokens=25), grammars.compile(StructuredOutputs(**kind)))
    answers = Answers()
    finish(engine, answers)
    assert len(answers["r", 0].token_ids) > 25


def test_logprobs_are_of_the_raw_distribution(grammars: GrammarCompiler) -> None:
    engine = small_engine()
    kind = {"regex": "[ab]{12}"}
    prompt = tokens(5, 3)
    engine.add(asks("masked", prompt, kind, logprobs=2), grammars.compile(StructuredOutputs(**kind)))
    answers = Answers()
    finish(engine, answers)
    masked = answers["masked", 0].logprobs[0]
    free = run(small_engine(), [request("free", prompt, logprobs=2, max_tokens=1)])["free", 0].logprobs[0]
    assert (masked.top_ids, masked.top_logprobs) == (free.top_ids, free.top_logprobs)
    assert masked.logprob <= masked.top_logprobs[0]


def everything(
    grammars: GrammarCompiler, *, only: str | None = None, **engine_settings: Any
) -> tuple[Answers, int]:
    """Sequences with and without grammars on one engine, and how often one was preempted."""
    engine = small_engine(**engine_settings)
    shared = tokens(40, 1)
    for index in range(12):
        kind = [*KINDS, None][index % 4]
        name, prompt, params = f"r{index}", shared + tokens(index, index), {"n": 1 + index % 2, "logprobs": 1}
        if only not in (None, name):
            continue
        if kind is None:
            engine.add(request(name, prompt, max_tokens=60, **params))
        else:
            compiled = grammars.compile(StructuredOutputs(**kind))
            engine.add(asks(name, prompt, kind, **params), compiled)
    answers = Answers()
    finish(engine, answers)
    return answers, engine.stats().num_preemptions


def test_the_same_alone_among_others_and_after_preemption(grammars: GrammarCompiler) -> None:
    together, _ = everything(grammars)
    other, preempted = everything(grammars, num_blocks=16)
    assert preempted > 0
    assert other.texts() == together.texts()
    for settings in ({"max_num_batched_tokens": 16}, {"prefix_caching": False, "max_num_seqs": 5}):
        other, _ = everything(grammars, **settings)
        assert other.texts() == together.texts()
    for name in ("r0", "r5", "r10"):
        alone, _ = everything(grammars, only=name)
        assert alone[name, 0].text() == together[name, 0].text()


SPECULATIVE = SpeculativeConfig(num_speculative_tokens=6, prompt_lookup_min=1, adaptive=False)
BY_MODEL = SpeculativeConfig(
    method="draft_model", model="simulated", num_speculative_tokens=6, adaptive=False
)


@pytest.mark.parametrize("speculative", [SPECULATIVE, BY_MODEL], ids=["ngram", "draft_model"])
def test_drafts_change_nothing(grammars: GrammarCompiler, speculative: SpeculativeConfig) -> None:
    """Behind a drafted token the mask is another one; behind a forbidden one there is none."""
    together, _ = everything(grammars)
    for settings in ({}, {"num_blocks": 16}, {"max_num_batched_tokens": 16}):
        drafted, _ = everything(grammars, speculative=speculative, **settings)
        assert drafted.texts() == together.texts()


def test_forced_tokens_are_not_computed_one_by_one(grammars: GrammarCompiler) -> None:
    kind = {"regex": "[ab]" + "x" * 40 + "[ab]" + "y" * 40}
    steps, texts = [], []
    for speculative in (None, SPECULATIVE, BY_MODEL):
        engine = small_engine(speculative=speculative)
        engine.add(asks("r", [1, 2, 3], kind), grammars.compile(StructuredOutputs(**kind)))
        answers = Answers()
        finish(engine, answers)
        steps.append(engine.stats().num_steps)
        texts.append(answers.texts())
    assert texts[0] == texts[1] == texts[2]
    assert steps[0] > 80 > 20 > max(steps[1:])


def test_a_dead_end_behind_drafts_is_the_same(grammars: GrammarCompiler) -> None:
    kind = {"regex": "[ab]xxxxé"}
    ends = []
    for speculative in (None, SPECULATIVE):
        engine = small_engine(speculative=speculative)
        engine.add(asks("r", [1, 2, 3], kind, ignore_eos=True), grammars.compile(StructuredOutputs(**kind)))
        answers = Answers()
        finish(engine, answers)
        last = answers["r", 0].last
        assert last is not None
        ends.append((answers["r", 0].token_ids, last.error_kind, last.error_message))
    assert ends[0] == ends[1]
    assert ends[0][1] == "GrammarError"


def test_allowed_tokens_and_a_grammar_both_hold(grammars: GrammarCompiler) -> None:
    engine = small_engine()
    kind = {"regex": "[a-f]{6}"}
    allowed = [TOKENS.index(b"c"), TOKENS.index(b"f"), TOKENS.index(b"x"), EOS]
    asked = asks("r", [1], kind, allowed_token_ids=allowed)
    engine.add(asked, grammars.compile(StructuredOutputs(**kind)))
    answers = Answers()
    finish(engine, answers)
    assert re.fullmatch("[cf]{6}", answer_text(answers, "r"))


def test_a_dead_end_ends_its_sequence_and_no_other(grammars: GrammarCompiler) -> None:
    """The vocabulary has no token for é: when the grammar insists on one, nothing is left."""
    engine = small_engine()
    kind = {"regex": "ab\u00e9"}
    engine.add(asks("dead", [1], kind), grammars.compile(StructuredOutputs(**kind)))
    engine.add(asks("fine", [1], KINDS[1]), grammars.compile(StructuredOutputs(**KINDS[1])))
    answers = Answers()
    finish(engine, answers)
    last = answers["dead", 0].last
    assert last is not None
    assert (last.finish_reason, last.error_kind) == ("error", "GrammarError")
    assert "grammar" in (last.error_message or "")
    fits(KINDS[1], answer_text(answers, "fine"))
