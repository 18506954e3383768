"""Sandbox process: runs programs that nobody has read, each in namespaces of its own, for its parent.

It is run by itself as ``python -I -S _sandbox.py``, and answers each request, a line of JSON, with another. A program
sees a read-only system and Python, an empty ``/tmp`` and its own processes: no network, no ``/proc``, no other file. As
root it runs as nobody, else as the user, in either case without any capability.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import threading
import time
from typing import Any

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x20000, 0x4000000, 0x8000000, 1 << 28, 1 << 29, 1 << 30
READ_ONLY, NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
PIVOT_ROOT, MOUNT_SETATTR, RECURSIVELY = {"x86_64": 155, "aarch64": 41}, 442, 0x8000
DEATH_SIGNAL, NO_NEW_PRIVILEGES, CAPABILITIES = 1, 38, 0x20080522
KEYCTL = {"x86_64": 250, "aarch64": 219}
NOTHING = {"user/max_user_namespaces": "0", "kernel/shmall": "0", "kernel/msgmni": "0", "kernel/sem": "0 0 0 0"}
"""What programs may not have: namespaces, and memory that outlives them."""
NOBODY = 65534
IS_ROOT = os.getuid() == 0

PROCESSES = 8
"""Most of one program, threads included."""
FILE_BYTES = 16 << 20
OUTPUT_BYTES = 4 << 20
"""A program that prints more is stopped."""

libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """A function of libc that returns 0; raises OSError."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _protect(folder: str, flags: int, within: int) -> None:
    """Make a mount read-only and more, and with RECURSIVELY those within it too."""
    attributes = struct.pack("QQQQ", READ_ONLY | NO_SUID | flags, 0, 0, 0)
    _call("syscall", MOUNT_SETATTR, ctypes.c_long(-100), folder.encode(), ctypes.c_long(within), attributes, 32)


def _leave(flags: int) -> None:
    """Make namespaces in which the users are this one and, where root makes them, nobody."""
    ids = {"uid_map": f"0 {os.getuid()} 1\n", "gid_map": f"0 {os.getgid()} 1\n"}
    if IS_ROOT:
        ids = {name: f"{text}{NOBODY} {NOBODY} 1\n" for name, text in ids.items()}
    else:
        ids = {"setgroups": "deny", **ids}
    # Only a process that stays outside may let others in than itself.
    ready, begin = os.pipe()
    outside, helper = os.getpid(), os.fork()
    if helper == 0:
        os.close(begin)
        os.read(ready, 1)
        for name, text in ids.items():
            with open(f"/proc/{outside}/{name}", "w") as file:
                file.write(text)
        os._exit(0)
    _call("unshare", flags)
    os.write(begin, b"x")
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError("its users cannot be named")
    os.close(ready)
    os.close(begin)


def enter() -> None:
    """Leave the machine's files, network and the rest behind.

    Raises:
        OSError: the kernel gives this user no namespaces.
    """
    _leave(NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_UTS)
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    for name, most in NOTHING.items():  # of what was just made, not of the machine
        with open(f"/proc/sys/{name}", "w") as file:
            file.write(most)
    links = {name: os.readlink(f"/{name}") for name in ("lib", "lib64") if os.path.islink(f"/{name}")}
    shown = {"usr": "/usr", **{name: f"/{name}" for name in ("lib", "lib64") if name not in links}}
    shown |= {"python": sys.base_prefix, **{f"dev/{name}": f"/dev/{name}" for name in ("null", "zero", "urandom")}}
    sources = {name: os.open(path, os.O_PATH) for name, path in shown.items() if os.path.exists(path)}
    _mount("tmpfs", "/tmp", "tmpfs", NO_SUID | NO_DEVICES, "size=1m,mode=755")
    for name, source in sources.items():
        target = f"/tmp/{name}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(shown[name]):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT))
        _mount(f"/proc/self/fd/{source}", target, None, BIND | RECURSIVE)
        _protect(target, 0 if name.startswith("dev/") else NO_DEVICES, RECURSIVELY)
    for name, text in links.items():
        os.symlink(text, f"/tmp/{name}")
    os.mkdir("/tmp/tmp")
    os.chdir("/tmp")
    _call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", 2)
    os.chdir("/")
    _protect("/", NO_DEVICES, 0)
    library = [path for path in sys.path if path.startswith(sys.base_prefix)]
    sys.path[:] = [f"/python/{os.path.relpath(path, sys.base_prefix)}" for path in library]


def limit(seconds: float, memory: int) -> None:
    """Resources of this process and of all that it starts."""
    for name, most in (
        ("AS", memory), ("CPU", int(seconds) + 1), ("NPROC", PROCESSES), ("FSIZE", FILE_BYTES), ("NOFILE", 32),
        ("CORE", 0), ("MSGQUEUE", 0), ("MEMLOCK", 0),
    ):  # fmt: skip
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def become(code: str, pipes: tuple[int, int], parent: tuple[int, int], seconds: float, memory: int) -> None:
    """Turn this process into the program; it never returns. ``parent`` is a pipe of which it holds an end open."""
    os.setsid()
    os.close(parent[1])
    for place, handle in enumerate((*pipes, os.open("/dev/null", os.O_WRONLY))):
        os.dup2(handle, place)
    os.closerange(3, parent[0])
    os.closerange(parent[0] + 1, 4096)
    limit(seconds, memory)
    if IS_ROOT:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.syscall(KEYCTL[platform.machine()], 1, None)  # a keyring of its own, where there are keyrings
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("capset", struct.pack("Ii", CAPABILITIES, 0), bytes(24))
    _call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if select.select([parent[0]], [], [], 0)[0]:
        os._exit(1)  # it had ended before
    os.close(parent[0])
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115 - they are the program's
    status = 1
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
        threading._shutdown()  # type: ignore[attr-defined]
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status & 255)


def run(isolated: bool, code: str, input: str, seconds: float, memory: int) -> dict[str, Any]:
    """Run a program in a process of this one's, which ends with all that it has started."""
    _call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    stdin = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    with open(stdin, "wb", closefd=False) as file:
        file.write(input.encode())
    fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(stdin, 0, os.SEEK_SET)
    # After the input, since what becomes the program takes 0 to 2 from the first two.
    from_program, parent = os.pipe(), os.pipe()
    if isolated:
        _call("unshare", NEW_PIDS | NEW_MOUNTS)
        _mount("tmpfs", "/tmp", "tmpfs", NO_SUID | NO_DEVICES, "size=32m,nr_inodes=1024,mode=777")
        os.chdir("/tmp")
    process = os.fork()
    if process == 0:
        try:
            become(code, (stdin, from_program[1]), parent, seconds, memory)
        finally:
            os._exit(127)
    os.close(from_program[1])
    deadline = time.monotonic() + seconds
    output, ended = _printed(from_program[0], deadline)
    rest = max(0.0, deadline - time.monotonic())  # it may have closed its output and gone on
    late = not (ended and select.select([os.pidfd_open(process)], [], [], rest)[0])
    # The first process of its namespace takes all others along; without one, its session is all that is known.
    if late or not isolated:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    ended_with = None if late else os.waitstatus_to_exitcode(status)
    return {"output": output.decode(errors="replace"), "status": ended_with}


def _printed(from_program: int, deadline: float) -> tuple[bytes, bool]:
    """What it prints, and whether it closed its output before the deadline and within its bound."""
    output = bytearray()
    while (rest := deadline - time.monotonic()) > 0 and len(output) <= OUTPUT_BYTES:
        if select.select([from_program], [], [], rest)[0]:
            if not (more := os.read(from_program, 1 << 16)):
                return bytes(output), True
            output += more
    return bytes(output[:OUTPUT_BYTES]), False


def main() -> None:
    """Say whether programs are isolated, then serve until stdin ends."""
    # Tried first: what failed halfway is no place to go on from.
    trial = os.fork()
    if trial == 0:
        try:
            enter()
        except (OSError, KeyError) as error:
            sys.stderr.write(f"{error}\n")
            os._exit(1)
        os._exit(0)
    if isolated := os.waitpid(trial, 0)[1] == 0:
        enter()
    _answer({"isolated": isolated})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        worker = os.fork()
        if worker == 0:
            try:
                _answer(run(isolated, **request))
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(worker, 0)[1] != 0:
            _answer({"output": "", "status": None, "failed": True})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
