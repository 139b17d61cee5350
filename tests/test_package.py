"""What is shipped: the installed distribution, and the container file that builds from the same wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def installed() -> metadata.Distribution:
    try:
        return metadata.distribution("headrace")
    except metadata.PackageNotFoundError:
        pytest.skip("headrace is not installed here (make test installs it)")


def test_the_version_is_the_same_everywhere() -> None:
    assert headrace.__version__ == PROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{headrace.__version__}]" in changelog or "## [Unreleased]" in changelog
    assert installed().version == headrace.__version__


def test_the_installed_package_is_whole_and_holds_nothing_else() -> None:
    files = {str(file) for file in installed().files or ()}
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix in {".py", ".toml", ".typed", ".json", ".html", ".jinja"}
    }
    assert sources <= files, sources - files
    natives = [file for file in files if re.fullmatch(r"headrace/backend/cpu/_native[\w.-]*\.(so|pyd)", file)]
    assert len(natives) == 1
    tops = {file.split("/")[0] for file in files if not file.startswith("..")}
    assert tops == {"headrace", f"headrace-{headrace.__version__}.dist-info"}


@pytest.mark.native
def test_every_isa_path_is_in_the_one_native_module() -> None:
    installed()
    from headrace.backend.cpu import _native

    paths = list(_native.supported_isas())
    assert "portable" in paths
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("avx2" in paths) == bool(re.search(r"\bavx2\b", flags))
    if wanted := os.environ.get("HEADRACE_ISA"):
        assert wanted in paths


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: name and the rest, continuation lines joined."""
    text = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in pairs]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


def values(name: str) -> list[str]:
    return [rest for word, rest in stages()[-1] if word == name]


def test_the_image_is_built_in_stages_and_runs_as_nobody_special() -> None:
    known = {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in instructions()} <= known
    build, final = stages()
    assert build[0][1].endswith(" AS build")
    assert not any("g++" in rest for _, rest in final)
    [user] = values("USER")
    assert user.isdigit()
    assert int(user) > 0
    order = [name for name, _ in final]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN")
    assert re.fullmatch(r"HEADRACE_CACHE=(/\S+)", values("ENV")[0])
    assert values("VOLUME")[0] == values("ENV")[0].partition("=")[2]


def test_what_the_build_stage_copies_is_all_that_a_wheel_needs(tmp_path: Path) -> None:
    build = stages()[0]
    for name, rest in build:
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                path = ROOT / source
                if path.is_dir():
                    shutil.copytree(path, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(path, tmp_path / target)
    assert any(name == "RUN" and rest.startswith("pip wheel") for name, rest in build)
    named = re.findall(r"native/[\w.]+", (tmp_path / "CMakeLists.txt").read_text("utf-8"))
    assert named
    assert all((tmp_path / file).is_file() for file in named)
    pytest.importorskip("scikit_build_core", reason="make test installs the build tools")
    code = "from scikit_build_core.build import prepare_metadata_for_build_wheel as f; print(f('out'))"
    (tmp_path / "out").mkdir()
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [written] = (tmp_path / "out").glob("*.dist-info/METADATA")
    assert "Name: headrace" in written.read_text("utf-8")


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_asks_for_readiness(status: int, healthy: bool) -> None:
    command: list[str] = json.loads(values("HEALTHCHECK")[0].partition("CMD ")[2])
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        port = f":{server.server_address[1]}/"
        words = [word.replace(f":{values('EXPOSE')[0]}/", port) for word in command]
        environment = os.environ | {
            "NO_PROXY": "*",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        run = subprocess.run(words, capture_output=True, timeout=30, env=environment)
        thread.join()
    assert asked == ["/health/readiness"]
    assert (run.returncode == 0) == healthy


def test_the_image_starts_a_command_that_exists() -> None:
    installed()
    [program] = json.loads(values("ENTRYPOINT")[0])
    command, *arguments = json.loads(values("CMD")[0])
    path = shutil.which(program, path=str(Path(sys.executable).parent))
    assert path is not None
    shown = subprocess.run(
        [path, command, "--help"], capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    assert shown.returncode == 0, shown.stderr
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in shown.stdout
    assert arguments[arguments.index("--port") + 1] == values("EXPOSE")[0]
