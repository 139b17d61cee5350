"""Programs that attack: whatever they do, the machine stays as it was, and they do not pass."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headrace.errors import HeadraceError
from headrace.lab.evaluate import sandbox_program
from headrace.lab.evaluate.sandbox import Limits, execute, require

LIMITS = Limits(wall_s=20.0, memory_bytes=256 * 2**20, folder_bytes=2**20, output_bytes=2**16)
IMPATIENT = replace(LIMITS, wall_s=0.7)


def possible() -> bool:
    try:
        require("isolated")
    except HeadraceError:
        return False
    return True


isolated = pytest.mark.skipif(not possible(), reason="this kernel, or this container, allows no namespaces")


def run(program: str, limits: Limits = LIMITS) -> str:
    """How the program ended; "passed" if it did."""
    return execute(program, "isolated", limits).outcome


@isolated
def test_a_decent_program_passes() -> None:
    program = "import collections, hashlib, math, re\nprint('noise' * 100)\nassert math.gcd(4, 6) == 2\n"
    assert run(program) == "passed"
    assert run(program + "open('own', 'w').write('x')\nassert open('own').read() == 'x'") == "passed"


@isolated
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("assert 1 == 2, 'wrong'", "AssertionError: wrong"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "ended before its last line"),
        ("import os; os._exit(77)", "ended before its last line"),
        ("print('0' * 32 + ' refused')\nimport os; os._exit(77)", "ended before its last line"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "timeout"),
        ("while True: print('x' * 1000)", "too much output"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
        ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)", "OSError"),
        ("for n in range(10**6): open(str(n), 'wb').write(b'x' * 9999)", "No space left on device"),
        ("x = [open('/tmp/x', 'w') for _ in range(1000)]", "Too many open files"),
        ("open('/usr/written', 'w')", "OSError"),
        ("open('/etc/passwd')", "No such file"),
        ("open('/proc/1/environ')", "No such file"),
        ("import os; os.kill(-1, 9)", "No such process"),
        ("import os; os.execv('/usr/bin/env', ['env'])", "ended before its last line"),
        ("input()", "EOFError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (99, 99))", "not allowed to raise"),
    ],
)
def test_a_program_that_does_not_reach_its_end_does_not_pass(program: str, outcome: str) -> None:
    assert outcome in run(program, IMPATIENT if outcome == "timeout" else LIMITS)


@isolated
def test_nothing_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    assert run("import os\nassert not set(os.environ) - {'LC_CTYPE'}, dict(os.environ)") == "passed"


@isolated
def test_neither_the_network_nor_a_socket_in_the_files_is_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        local.bind(str(tmp_path / "socket"))
        local.listen()
        assert "unreachable" in run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        program = f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})"
        assert "No such file" in run(program)
        with pytest.raises(TimeoutError):
            listener.accept()


@isolated
def test_no_file_of_ours_is_seen_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folders").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    assert "No such file" in run(f"open({str(secret)!r}).read()")
    assert "No such file" in run(f"open({str(secret)!r}, 'w').write('gone')")
    assert secret.read_text() == "secret"
    assert run("open('/tmp/left', 'w').write('x')") == "passed"
    assert not Path("/tmp/left").exists()
    assert list((tmp_path / "folders").iterdir()) == []


@isolated
def test_no_other_process_is_killed() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = (
            f"import os\nfor pid in (0, os.getppid(), {os.getpid()}, {bystander.pid}):\n"
            "    try: os.kill(pid, 9)\n    except OSError: pass\n"
        )
        run(program)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@isolated
@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",  # a user namespace, in which it would have every capability
        "mount(b'none', b'/usr', None, 32 | 4096, None)",  # the libraries, writable
        "mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)",  # as much memory as it likes
        "umount2(b'/usr', 2)",
        "setuid(0)",
        "sethostname(b'mine', 4)",
    ],
)
def test_no_right_can_be_won(call: str) -> None:
    assert run(f"import ctypes\nassert ctypes.CDLL(None).{call} == -1") == "passed"


@isolated
def test_children_are_gone_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shutil.copy(sandbox_program.__file__, tmp_path)  # other tests may run programs at the same time
    monkeypatch.setattr(sandbox_program, "__file__", ours)
    assert run("import time\ntime.sleep(60)", IMPATIENT) == "timeout"
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if ours in command]


@pytest.mark.skipif(sys.platform != "linux", reason="code is executed on Linux only")
def test_where_the_kernel_forbids_isolation_code_is_refused() -> None:
    """A process without the right to make namespaces, as in most containers, and what it is told."""
    code = (
        "from headrace.lab.evaluate.sandbox import execute\n"
        "from headrace.errors import HeadraceError\n"
        "try: print(execute('pass', 'isolated'))\n"
        "except HeadraceError as error: print(error.message)\n"
    )
    if os.geteuid() == 0:
        without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    else:
        shell = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
        without = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
        without += ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    done = subprocess.run(without, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "setpriv" in done.stderr:
        pytest.skip(f"no such process can be made here: {done.stderr}")
    assert "cannot be isolated on this machine" in done.stdout, done.stderr
    assert "--unsafe-without-isolation" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="code is executed on Linux only")
def test_without_isolation_the_limits_remain() -> None:
    for program, outcome in (
        ("pass", "passed"),
        ("while True: pass", "timeout"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
        ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
        ("import os; assert not set(os.environ) - {'LC_CTYPE'}", "passed"),
    ):
        limits = IMPATIENT if outcome == "timeout" else LIMITS
        assert outcome in execute(program, "unsafe", limits).outcome
