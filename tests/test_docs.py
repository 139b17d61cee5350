"""Every code block of README.md and docs/ runs as printed; see doc_blocks.py for how a block is marked."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_blocks import DocError, blocks, reader_environment, run_page

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])


@pytest.fixture
def one_core() -> Iterator[None]:
    """Where each core has a worker with tests, a page has one: threads on all would wait for the others."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[int(worker) % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_page_runs(page: Path, tmp_path: Path, one_core: None) -> None:
    if not any(block.not_run is None for block in blocks(page)):
        return
    environment = reader_environment(tmp_path)
    assert shutil.which("headrace", path=str(Path(sys.executable).parent)), (
        "install headrace first: make test"
    )
    run_page(page, tmp_path, environment)


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text.replace("~~~", "```"))
    return page


def run(tmp_path: Path, text: str) -> int:
    return len(run_page(page_of(tmp_path, text), tmp_path, reader_environment(tmp_path)))


def test_blocks_run_in_order_in_one_folder(tmp_path: Path) -> None:
    text = (
        "~~~bash\necho one > file\n~~~\n"
        "words\n\n- an item:\n\n  ~~~console\n  $ cat file\n  one\n  $ echo two \\\n  > >> file\n  ~~~\n"
        "~~~python\nassert open('file').read() == 'one\\ntwo\\n'\n~~~\n"
        "~~~json\n{not run}\n~~~\n"
        "~~~bash {not-run: needs docker}\nfalse\n~~~\n"
    )
    assert run(tmp_path, text) == 3


@pytest.mark.parametrize(
    "text",
    [
        "~~~bash\nfalse\ntrue\n~~~\n",
        "~~~bash\ncat nothing | wc -l\n~~~\n",
        "~~~bash\necho $UNSET_VARIABLE\n~~~\n",
        "~~~python\nraise SystemExit(3)\n~~~\n",
        "~~~console\n$ echo one\ntwo\n~~~\n",
        "~~~console\nno prompt\n~~~\n",
        "~~~bash {not-run:}\ntrue\n~~~\n",
        "~~~bash {later}\ntrue\n~~~\n",
        "~~~bash a b\ntrue\n~~~\n",
        "~~~bash\nnever closed\n",
        "~~~bash {background}\necho gone --port 47113\n~~~\n",
    ],
)
def test_a_block_that_does_not_hold_is_reported(tmp_path: Path, text: str) -> None:
    with pytest.raises(DocError, match=r"page\.md:1"):
        run(tmp_path, text)


def test_console_output_may_be_shortened(tmp_path: Path) -> None:
    assert run(tmp_path, "~~~console\n$ seq 1 9\n1\n...\n8\n...\n~~~\n") == 1


def test_a_server_is_started_waited_for_and_stopped(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = (
        f"~~~bash\npython -m http.server {port} --bind 127.0.0.1 &\n~~~\n"
        f"~~~bash\ncurl -sf http://127.0.0.1:{port}/page.md | grep -q server\n~~~\n"
    )
    assert run(tmp_path, text) == 2
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(DocError, match=str(port)):
            run(tmp_path, f"~~~bash {{background}}\nheadrace serve --port {port}\n~~~\n")
