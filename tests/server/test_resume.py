"""An answer that broke off at one server goes on at another one, as if it had been one answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.frontend.frontend import Frontend
from tests.server.small_server import connected, events, idle, small_app, small_frontend, until

pytestmark = pytest.mark.anyio
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "once", "max_tokens": 24, "seed": 5}
MESSAGES = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 24, "seed": 5}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    """Two servers with equal fingerprints have equal engines: one stands for both."""
    made = small_frontend(num_blocks=64, step_s=0.002)
    yield made
    made.close()


async def streamed(frontend: Frontend, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a whole stream."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with connected(small_app(frontend)) as client:
        response = await client.post(path, json=asked)
    assert response.status_code == 200, response.text
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return list(chunks)


def told(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of chunks: all that can differ, ids of calls left out."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", {}) for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "text": "".join(delta.get("content", "") for delta in deltas)
        + "".join(choice.get("text", "") for choice in choices),
        "tokens": [token for choice in choices for token in choice.get("token_ids", ())],
        "names": [(c["index"], c["function"]["name"]) for c in calls if "name" in c["function"]],
        "arguments": "".join(call["function"]["arguments"] for call in calls),
        "logprobs": [entry for each in logprobs for entry in each.get("content", ())],
        "offsets": [offset for each in logprobs for offset in each.get("text_offset", ())],
        "ends": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
        "usage": [
            {name: count for name, count in chunk["usage"].items() if name != "prompt_tokens_details"}
            for chunk in chunks
            if chunk["usage"]
        ],
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, PROMPT | {"temperature": 0}),
        (TEXT, PROMPT),
        (TEXT, PROMPT | {"top_k": 20, "top_p": 0.9, "min_p": 0.01}),
        (TEXT, PROMPT | {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}),
        (TEXT, PROMPT | {"logprobs": 2}),
        (TEXT, PROMPT | {"min_tokens": 20, "logit_bias": {"256": 100}}),
        (TEXT, PROMPT | {"bad_words": ["a", "b", "ab"], "logit_bias": {"64": 5}}),
        (TEXT, PROMPT | {"structured_outputs": {"regex": "[a-f]{3}(-[0-9]{4}){3}"}}),
        (TEXT, PROMPT | {"allowed_token_ids": [65, 66, 67], "stop": ["ABABAB", "bca", "CAB"]}),
        (TEXT, PROMPT | {"allowed_token_ids": [172, 222, 226, 239], "ignore_eos": True}),
        (TEXT, PROMPT | {"prompt": [7, 8, 9], "truncate_prompt_tokens": 2}),
        (CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 1}),
        (CHAT, MESSAGES | {"response_format": {"type": "json_object"}}),
        (CHAT, MESSAGES | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
        (CHAT, MESSAGES | {"tools": [TOOL]}),
    ],
)
async def test_wherever_it_breaks_nothing_shows(frontend: Frontend, path: str, body: dict[str, Any]) -> None:
    whole = await streamed(frontend, path, body | {"resumable": True})
    expected = told(whole)
    fingerprint = whole[0]["system_fingerprint"]
    ended = next(n for n, chunk in enumerate(whole) if chunk["choices"][0]["finish_reason"])
    cuts = [cut for cut in range(1, ended) if told(whole[:cut])["tokens"]]
    for cut in cuts[:: len(cuts) // 5 + 1]:
        before = told(whole[:cut])
        resume = {"token_ids": before["tokens"], "system_fingerprint": fingerprint}
        after = await streamed(frontend, path, body | {"resume": resume})
        assert told(whole[:cut] + after) == expected, (cut, before)
    for cut in (1, len(expected["tokens"]) // 2, len(expected["tokens"]) - 1):  # however chunks were cut
        resume = {"token_ids": expected["tokens"][:cut], "system_fingerprint": fingerprint}
        after = told(await streamed(frontend, path, body | {"resume": resume}))
        assert after["tokens"] == expected["tokens"][cut:]
        assert expected["text"].endswith(after["text"])
        assert (after["ends"], after["usage"]) == (expected["ends"], expected["usage"])
    plain = await streamed(frontend, path, body)
    assert all("token_ids" not in choice for chunk in plain for choice in chunk["choices"])
    assert told(plain) | {"tokens": expected["tokens"]} == expected
    await until(lambda: idle(frontend))


async def test_what_cannot_be_resumed_is_told_so(frontend: Frontend) -> None:
    [first, *_] = await streamed(frontend, TEXT, PROMPT)
    good = {"token_ids": [97, 98], "system_fingerprint": first["system_fingerprint"]}
    wrong: list[tuple[int, str, dict[str, Any]]] = [
        (409, "fingerprint", {"resume": good | {"system_fingerprint": "another"}}),
        (400, "resume", {"resume": good | {"token_ids": []}}),
        (400, "vocabulary", {"resume": good | {"token_ids": [97, 300]}}),
        (400, "max_tokens", {"resume": good, "max_tokens": 2}),
        (400, "stop string", {"resume": good, "stop": "ab", "prompt": "x", "allowed_token_ids": [97]}),
        (400, "one choice", {"resume": good, "n": 2}),
        (400, "one choice", {"resumable": True, "stream": False}),
        (400, "one prompt", {"resumable": True, "prompt": ["a", "b"]}),
        (400, "echo", {"resumable": True, "echo": True}),
    ]
    alphabet = frontend.encode_prompt("ab")
    async with connected(small_app(frontend)) as client:
        for status, word, more in wrong:
            if "stop" in more:
                more["resume"] = good | {"token_ids": alphabet}
            response = await client.post(TEXT, json=PROMPT | {"stream": True} | more)
            assert response.status_code == status, response.text
            assert word in response.json()["error"]["message"], response.text
    await until(lambda: idle(frontend))


async def test_a_last_message_can_be_left_open(frontend: Frontend) -> None:
    """Whatever the template writes behind a message, and trims of it, the prompt ends with its text."""
    begun = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two, "}]
    ids = frontend.encode_chat(begun, continue_final_message=True)
    assert frontend.tokenizer.decode(ids) == "<user>count\n<assistant>one, two, "
    async with connected(small_app(frontend)) as client:
        body = {"messages": begun, "max_tokens": 8, "temperature": 0, "continue_final_message": True}
        whole = await client.post(CHAT, json=body)
        text = {"prompt": "<user>count\n<assistant>one, two, ", "max_tokens": 8, "temperature": 0}
        raw = await client.post(TEXT, json=text)
        assert whole.json()["choices"][0]["message"]["content"] == raw.json()["choices"][0]["text"]
        for more in ({"messages": begun[:1]}, {"add_generation_prompt": True}):
            refused = await client.post(CHAT, json=body | more)
            assert refused.status_code == 400
            assert "continue_final_message" in refused.json()["error"]["message"]
