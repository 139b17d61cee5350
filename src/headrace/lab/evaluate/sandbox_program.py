"""Runs one untrusted program; started by :mod:`.sandbox` as a script, which imports nothing of ours.

Standard input: a JSON line of settings, then as many bytes of program as it says, then a token. The token is
read and printed only after the program has run to its end. With ``isolated`` the program first loses, in
Linux namespaces of its own, the network, all other processes, and every file but the interpreter's (read
only) and a small empty folder in memory; and with or without it all capabilities and the limits' worth of
everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

REFUSED = 77
"""Exit status if the kernel refuses what is needed; the token and the reason are what was printed."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 4096, 16384, 1 << 18, 2, 4
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD = 442, 0x8000, -100  # one number on every architecture
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534
_SPARE_UID = 2_000_000_000
"""Plus our process id: a user whom nobody else is, so that limits per user are ours alone."""
_LIBRARIES = ("/usr", "/lib", "/lib64", "/nix/store")


class RefusedError(Exception):
    """The kernel does not permit what isolation needs."""


def main() -> None:
    settings = json.loads(_read_line())
    program = _read(int(settings["size"]))
    try:
        if settings["isolated"]:
            _leave(settings["folder"], settings["folder_bytes"])
        else:
            _count_as_nobody()
    except (RefusedError, OSError) as error:
        _end(f"{os.read(0, 64).decode()} {error}", REFUSED)  # the token: no program has run yet
    _drop_capabilities()
    _limit(settings["limits"])
    _run(program)


def _run(program: str) -> NoReturn:
    token_fd = os.dup(0)
    os.close(0)
    sys.stdin = io.StringIO("")
    sys.argv = ["program.py"]
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # SystemExit and KeyboardInterrupt are ways to fail, too
        _end(f"{type(error).__name__}: {error}"[:300], 1)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the program may have closed it
        sys.stdout.flush()
    _end(os.read(token_fd, 64).decode(), 0)


def _end(last_line: str, status: int) -> NoReturn:
    """Our own last line behind whatever the program printed; no exit handlers of the program's run."""
    os.write(1, f"\n{last_line.splitlines()[0] if last_line else ''}".encode(errors="replace"))
    os._exit(status)


def _leave(folder: str, folder_bytes: int) -> None:
    """Into namespaces of our own; returns in their first process. The one outside waits for it."""
    root = os.geteuid() == 0
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    _call("unshare", ctypes.c_int(flags if root else flags | _CLONE_NEWUSER))
    if not root:
        _map_ids(uid, gid)
    child = os.fork()
    if child:
        os.close(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    os.setsid()
    sysctl = os.open("/proc/sys/user", os.O_PATH | os.O_DIRECTORY)
    _new_root(folder, folder_bytes)
    may_nest = True
    if root:
        _become_nobody("/tmp")
        try:
            _call("unshare", ctypes.c_int(_CLONE_NEWUSER))
        except RefusedError:
            may_nest = False
    if may_nest:  # in a user namespace of its own the program would have every capability again
        limit = os.open("max_user_namespaces", os.O_WRONLY, dir_fd=sysctl)
        os.write(limit, b"0")
        os.close(limit)
    os.close(sysctl)
    # last: changing users clears it. If the one outside is killed, this and all within go with it.
    _call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL))


def _map_ids(uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {uid} 1"),
        ("gid_map", f"{_NOBODY} {gid} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)


def _new_root(folder: str, folder_bytes: int) -> None:
    """A root of our own in memory: the interpreter and its libraries, read only, and an empty ``/tmp``."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={folder_bytes},mode=755")
    shown = {os.path.realpath(path) for path in (*_LIBRARIES, sys.base_prefix) if Path(path).is_dir()}
    shown = {path for path in shown if not any(path.startswith(f"{other}/") for other in shown)}
    for path in sorted(shown):
        target = folder + path
        Path(target).mkdir(parents=True)
        _mount(path, target, None, _MS_BIND | _MS_REC)
        attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
        _call(
            "syscall",
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(target.encode()),
            ctypes.c_uint(_AT_RECURSIVE),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )
    for path in _LIBRARIES:
        if Path(path).is_symlink():
            Path(folder + path).symlink_to(os.path.realpath(path))
    Path(f"{folder}/tmp").mkdir()
    Path(f"{folder}/tmp").chmod(0o1777)
    os.chdir(folder)
    _call("pivot_root", ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _call("umount2", ctypes.c_char_p(b"."), ctypes.c_int(_MNT_DETACH))
    os.chdir("/tmp")


def _become_nobody(folder: str) -> None:
    """Root is bound by no limit of processes, and may write everywhere: be someone else."""
    if os.geteuid() != 0:
        return
    for uid in (_SPARE_UID + os.getpid(), _NOBODY):
        try:
            os.chown(folder, uid, uid)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return
        except OSError:
            continue
    raise RefusedError("the user root cannot become another one here")


def _count_as_nobody() -> None:
    """Root still opens what root owns, but its processes are counted as someone's whom limits bind."""
    if os.geteuid() != 0:
        return
    for uid in (_SPARE_UID + os.getpid(), _NOBODY):
        with contextlib.suppress(OSError):
            os.setresuid(uid, 0, uid)
            return
    raise RefusedError("the user root cannot become another one here")


def _drop_capabilities() -> None:
    """None are left, and none can be won by running another program."""
    libc = _libc()
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) == 0:
        number += 1
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    libc.capset(ctypes.byref(header), ctypes.byref(none))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    def text(value: str | None) -> ctypes.c_char_p:
        return ctypes.c_char_p(None if value is None else value.encode())

    _call("mount", text(source), text(target), text(kind), ctypes.c_ulong(flags), text(options))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc(), name)(*arguments) == -1:
        raise RefusedError(f"{name}: {os.strerror(ctypes.get_errno())}")


def _read_line() -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # one at a time: nothing behind the line may be taken
        if not byte:
            os._exit(1)
        line += byte
    return line.decode()


def _read(size: int) -> str:
    data = b""
    while len(data) < size and (more := os.read(0, size - len(data))):
        data += more
    return data.decode()


if __name__ == "__main__":
    main()
