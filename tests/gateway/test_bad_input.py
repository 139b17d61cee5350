"""What clients and upstreams may send to do harm: it is refused, goes nowhere, and holds up nobody."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from headrace.gateway.intents.features import features
from headrace.gateway.verifier import read, refusal
from tests import http
from tests.gateway.running import RunningGateway, Upstreams, decent, free_port, gateway
from tests.gateway.test_admin import ENV, KEY, listens
from tests.lab.streaming_server import Behaviour, Exchange, Streamer

READ_S = 1.0


class Attacked:
    """A gateway with an admin API, and its one upstream."""

    def __init__(self, made: RunningGateway, streamer: Streamer, admin: int) -> None:
        self.made, self.streamer, self.admin = made, streamer, admin
        self.headers = made.key("acme")

    def serves(self) -> None:
        """Others get their answers, and nothing is under way afterwards."""
        self.streamer.behaviour = decent
        assert self.made.chat(self.headers).status_code == 200
        self.made.wait_idle()

    def chat(self, behaviour: Behaviour, **body: Any) -> httpx.Response:
        """One that the upstream answers in its own way."""
        self.streamer.behaviour = behaviour
        return self.made.chat(self.headers, **body)


@pytest.fixture(scope="module")
def attacked(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    streamer, url = upstreams.start()
    admin = free_port()
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"acme": {}},
        "releases": {"r": {"versions": {"v1": {"model": "m"}}}},
        "admin": {"key_env": "ADMIN_KEY", "port": admin},
        "read_timeout_s": READ_S,
        "cache": {"enabled": False},
        "retries": {"attempts": 1},
        "health": {"eject_after": 1000},
    }
    with gateway(config, tmp_path_factory.mktemp("attacked"), ENV) as made:
        with http.client(f"http://127.0.0.1:{admin}", bearer()) as client:
            made.wait(lambda: listens(client))
        yield Attacked(made, streamer, admin)


def bearer() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def received(connection: socket.socket) -> bytes:
    out = b""
    while part := connection.recv(65536):
        out += part
    return out


# -- clients


@pytest.mark.parametrize("port", ["public", "admin"])
def test_heads_that_drip_are_given_up(attacked: Attacked, port: str) -> None:
    """Slowloris: many connections, each with half a head. Others are served meanwhile."""
    url = attacked.made.url if port == "public" else f"http://127.0.0.1:{attacked.admin}"
    slow = [connect(url) for _ in range(40)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
    attacked.serves()
    assert http.get(f"http://127.0.0.1:{attacked.admin}/health", headers=bearer()).status_code == 200
    for connection in slow:
        assert received(connection).startswith(b"HTTP/1.1 408")
        connection.close()


@pytest.mark.parametrize("port", ["public", "admin"])
def test_long_heads_are_refused(attacked: Attacked, port: str) -> None:
    url = attacked.made.url if port == "public" else f"http://127.0.0.1:{attacked.admin}"
    answer = http.get(f"{url}/health", headers={"a": "a" * 70_000})
    assert answer.status_code == 431
    attacked.serves()


@pytest.mark.parametrize(
    "line",
    [
        b"X-Headrace-Key: a\r\n\tx-injected: 1",
        b"X-Request-Id: a\rx-injected: 1",
        b"X-Request-Id: a\nx-injected: 1",
        b"X-Session-Id: \x00\xff\xfe",
        b"X-Headrace-Priority: 1\xb2",
        b"X-Headrace-Route: m\x85x-injected: 1",
        b"Authorization: Bearer \xff\xfe",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    ],
)
def test_headers_inject_nothing(attacked: Attacked, line: bytes) -> None:
    """Neither into the answer nor into what the upstream is asked; and no request hides behind another."""
    body = json.dumps(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    ).encode()
    own = f"Authorization: {attacked.headers['authorization']}\r\n".encode()
    own = b"" if line.startswith(b"Authorization") else own
    length = b"" if b"Content-Length" in line else b"Content-Length: %d\r\n" % len(body)
    before = len(attacked.streamer.asked)
    with connect(attacked.made.url) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            + own
            + length
            + line
            + b"\r\n\r\n"
            + body
        )
        answer = received(connection)
    assert re.match(rb"HTTP/1\.1 (200|400|401) ", answer), answer
    head, _, _ = answer.partition(b"\r\n\r\n")
    assert b"x-injected" not in head.lower()
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
    for asked in attacked.streamer.asked[before:]:
        assert not any("injected" in text for text in (*asked.headers, *asked.headers.values()))
    attacked.serves()


TRAVERSALS = (
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e",
    "....//",
    "r/../r",
    "\\..\\..",
    "%00",
)


@pytest.mark.parametrize("name", TRAVERSALS)
def test_names_lead_nowhere(attacked: Attacked, name: str) -> None:
    before = sorted(path.name for path in attacked.made.state.iterdir())
    assert attacked.made.chat(attacked.headers, model=name).status_code == 404
    raw = (
        f"GET /v1/models/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: {attacked.headers['authorization']}\r\n"
    )
    with connect(attacked.made.url) as connection:
        connection.sendall(f"{raw}Connection: close\r\n\r\n".encode())
        assert re.match(rb"HTTP/1\.1 40[04] ", received(connection))
    admin = f"http://127.0.0.1:{attacked.admin}"
    for method, path in (
        ("GET", f"/releases/{name}"),
        ("POST", f"/releases/{name}/rollback"),
        ("DELETE", f"/keys/{name}"),
        ("POST", f"/upstreams/{name}/drain"),
    ):
        with connect(admin) as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
            assert re.match(rb"HTTP/1\.1 4(00|04|05|09) ", received(connection))
    assert sorted(path.name for path in attacked.made.state.iterdir()) == before
    attacked.serves()


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml", "\x7f"])
def test_the_content_type_of_a_request_makes_no_difference(attacked: Attacked, kind: str) -> None:
    body = json.dumps({"model": "m", "prompt": "a"}).encode()
    answer = attacked.made.client.post(
        "/v1/completions", content=body, headers=attacked.headers | {"content-type": kind}
    )
    assert answer.status_code in (200, 400), "only a header that is no HTTP is refused"
    attacked.serves()


@pytest.mark.parametrize("field", ["base_url", "api_base", "url", "upstream", "api_key"])
def test_no_field_says_where_to_ask(attacked: Attacked, field: str) -> None:
    before = len(attacked.streamer.asked)
    address = f"http://127.0.0.1:{attacked.admin}/keys"
    answer = attacked.made.chat(attacked.headers | {"host": "169.254.169.254"}, **{field: address})
    assert answer.status_code == 200
    assert len(attacked.streamer.asked) == before + 1


HOSTILE = (
    "a" * 100_000,
    "((((" * 25_000,
    '"' * 100_000,
    "“" + "a" * 100_000,
    "1," * 50_000,
    "a/" * 50_000,
    "x = " * 25_000,
    "\n" * 100_000,
    "a-" * 50_000 + "!",
    "not " * 25_000,
)


@pytest.mark.timeout(20)  # an expression that backtracks would take hours
@pytest.mark.parametrize("text", HOSTILE, ids=[text[:5] for text in HOSTILE])
def test_hostile_texts_cost_our_expressions_nothing(text: str) -> None:
    """Those that tell intents, and those that compare questions."""
    assert len(features(text)) == len(features("Hello!"))
    refusal(read(text), read(f"{text}?"))
    refusal(read(text[:200]), read(f"{text[:199]}b"))


# -- upstreams


async def redirected(exchange: Exchange) -> None:
    """To where it should not be asked: a metadata service, or the upstream's own machine."""
    await exchange.whole(302, b"", extra="Location: http://127.0.0.1:9/latest/meta-data\r\n")


async def gzip_bomb(exchange: Exchange) -> None:
    await exchange.whole(200, BOMB, extra="Content-Encoding: gzip\r\n")


async def deflate_bomb_of_a_stream(exchange: Exchange) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: deflate\r\n"
    exchange.writer.write(f"{head}Content-Length: {len(DEFLATED)}\r\n\r\n".encode() + DEFLATED)
    await exchange.writer.drain()


async def page(exchange: Exchange) -> None:
    await exchange.whole(200, b"<html>200 OK</html>", kind="text/html")


async def endless_head(exchange: Exchange) -> None:
    exchange.writer.write(b"HTTP/1.1 200 OK\r\n" + b"X-A: %s\r\n" % (b"a" * 60_000) * 20 + b"\r\n")
    await exchange.writer.drain()


async def injected(exchange: Exchange) -> None:
    error = {"message": "no\r\nx-injected: 1", "type": "a\r\nb: c", "code": "x\r\ny: z"}
    await exchange.whole(400, json.dumps({"error": error}).encode())


BOMB = gzip.compress(b" " * 200_000_000, 9)
DEFLATED = zlib.compress(b": a comment\n\n" * 10_000_000, 9)


@pytest.mark.parametrize("behaviour", [redirected, gzip_bomb, deflate_bomb_of_a_stream, page, endless_head])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_bad_upstream_sends_is_no_answer(
    attacked: Attacked, behaviour: Behaviour, stream: bool
) -> None:
    """It is not followed, not unpacked, not passed on; the client gets one clear error."""
    process = psutil.Process(attacked.made.process.pid)
    attacked.serves()
    before = process.memory_info().rss
    answer = attacked.chat(behaviour, stream=stream)
    assert answer.status_code == 502
    assert "no upstream of m gave an answer" in answer.json()["error"]["message"]
    attacked.serves()
    assert process.memory_info().rss - before < 20 * 2**20


def test_an_upstreams_error_injects_no_header(attacked: Attacked) -> None:
    answer = attacked.chat(injected)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "no\r\nx-injected: 1"
    assert "x-injected" not in answer.headers
    attacked.serves()


# -- the file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("upstreams: {a: {url: http://x/v1, models: {m: {}}}", "is not YAML"),
        ("a: &a [1]\nb: *c", "is not YAML"),
        ("upstreams: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("[" * 5_000, "is not YAML"),
        ("upstreams:\n\ta: 1", "is not YAML"),
        ("\x00", "is not YAML"),
        ("just text", "gateway.yaml:1"),
        ("- 1\n- 2", "gateway.yaml:1"),
        ("upstreams: {a: {url: 'gopher://x/v1', models: {m: {}}}}", "gateway.yaml:1: upstreams.a.url"),
        ("upstreams: {a: {url: 'http://x/v1?a=b', models: {m: {}}}}", "gateway.yaml:1: upstreams.a.url"),
        (
            'upstreams: {a: {url: "http://x/v1\\r\\nX: y", models: {m: {}}}}',
            "gateway.yaml:1: upstreams.a.url",
        ),
        ("upstreams: {../a: {url: http://x/v1, models: {m: {}}}}", "gateway.yaml:1: upstreams"),
        ("upstreams: {a: {url: http://x/v1, models: {'m\\n': {}}}}", "gateway.yaml:1: upstreams.a.models"),
        ("upstreams: {a: {url: http://x/v1, kind: vllm, models: {}}}", "gateway.yaml:1: upstreams.a.models"),
        ("port: 1e999", "gateway.yaml:1: port"),
        ("max_body_mib: .nan", "gateway.yaml:1: max_body_mib"),
    ],
)
def test_a_malformed_file_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert said in error.value.message


def test_a_file_that_grows_by_its_aliases_is_told_quickly(tmp_path: Path) -> None:
    """A billion laughs, in the place of a list of models."""
    lines = ["tenants:", "  a:", "    limits:", "      models: &l0 [x, x, x, x, x, x, x, x, x]"]
    path = tmp_path / "gateway.yaml"
    lines += [f"  b{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert len(error.value.message) < 1000
