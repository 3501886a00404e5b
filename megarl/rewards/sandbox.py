"""Run an untrusted Python program within limits of network, files, system calls, memory and time.

    outcome = run_confined(program, stdin="3 4", timeout_s=10.0, memory_limit_bytes=1 << 30)
    outcome.stdout if outcome.exit_code == 0 else ...

The kernel confines the program (Linux only; no privileges needed where users may create namespaces):

    network, other processes    separate namespaces (unshare: user, net, pid, ipc)
    files                       Landlock: the program reads its Python and system libraries, writes in its
                                empty folder, and sees no other files
    calls                       seccomp: denies calls that the first two leave open, above all sockets in the
                                file system and the mode of files
    memory, CPU, file size      rlimits; after the time limit the program and its children are killed

`missing()` names those of the first three that this machine lacks. The fourth is always available.

The processes, each a child of the one before:

    caller        whoever calls `run_confined`; kills all others after the time limit
    supervisor    this file as a script, outside the files' and calls' confinement; if the caller dies, it
                  ends the program and removes the program's folder
    first         the first process in the PID namespace, with which the kernel ends all others there
    program"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

_MAX_OUTPUT = 2**20  # bytes that a program may write into each of its files and streams
_MAX_OPEN_FILES, _MAX_PROCESSES = 64, 64

# linux/sched.h, linux/prctl.h, linux/landlock.h, asm-generic/unistd.h (the same numbers on x86-64 and Arm)
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWPID, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH, _LANDLOCK_CREATE_RULESET_VERSION = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SECCOMP_ALLOW, _SECCOMP_ERRNO, _SECCOMP_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_BPF_LOAD, _BPF_IF_EQUAL, _BPF_IF_AT_LEAST, _BPF_RETURN, _X32 = 0x20, 0x15, 0x35, 0x06, 0x40000000
_DENIED_CALLS = {
    "x86_64": (
        0xC000003E,
        (
            # socket, io_uring_setup: Landlock and a network namespace allow sockets in the file system
            41, 425,
            # chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown, fchownat: outside of Landlock
            90, 91, 268, 452, 92, 93, 94, 260,
            # utime, utimes, futimesat, utimensat, *setxattr*, *removexattr*
            132, 235, 261, 280, 188, 189, 190, 463, 197, 198, 199, 466,
            # add_key, request_key, keyctl, ptrace, perf_event_open, bpf, userfaultfd
            248, 249, 250, 101, 298, 321, 323,
        ),
    ),
    "aarch64": (  # the same calls; this architecture has fewer of some kinds
        0xC00000B7,
        (
            198, 425,
            52, 53, 452, 54, 55,
            88, 5, 6, 7, 463, 14, 15, 16, 466,
            217, 218, 219, 117, 241, 280, 282,
        ),
    ),
}  # fmt: skip
"""Architecture -> (its AUDIT_ARCH of linux/audit.h, numbers of calls)."""
_NOBODY = 65534
_RIGHTS_OF_ABI = {3: 15, 4: 15, 5: 16}
"""Version of Landlock -> number of kinds of file access that Landlock can forbid.

Versions before 3 (Linux 6.2) cannot forbid truncating files."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and output of a program that ran in the sandbox.

    exit_code: negative if a signal killed the program; None if the program exceeded the time limit and was
    killed."""

    exit_code: int | None
    stdout: str
    stderr: str


def run_confined(
    program: str, stdin: str, timeout_s: float, memory_limit_bytes: int, allow_missing: bool = False
) -> Outcome:
    """Run Python source confined to an empty folder, which is removed afterwards. Returns the exit code and
    the output, of which all beyond 1 MiB is cut.

    Raises: RuntimeError if this machine cannot confine the program and `allow_missing` is False."""
    if (lacking := missing()) and not allow_missing:
        raise RuntimeError(refusal(lacking))
    watched, held = os.pipe()  # the kernel closes `held` when this process dies, which tells the supervisor
    with open(held, "wb"), open(watched, "rb"), _empty_folder() as folder:
        limits = {
            "folder": folder,
            "caller": watched,
            "timeout_s": timeout_s,
            "memory_limit_bytes": memory_limit_bytes,
            "unshare": "namespaces" not in lacking,
            "landlock": "Landlock" not in lacking,
            "seccomp": "seccomp" not in lacking,
        }
        command = [sys.executable, "-I", __file__, json.dumps(limits)]
        with open(os.path.join(folder, ".program"), "w", encoding="utf-8", errors="replace") as file:
            file.write(program)
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=folder,
                pass_fds=(watched,),
                env={"PATH": os.defpath, "HOME": folder},
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ends children, if no namespace does
                process.wait()
            return Outcome(code, _text(out), _text(err))


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    """Create a folder, and remove it with all that a program has put there."""
    folder = tempfile.TemporaryDirectory(prefix="megarl_code_")
    try:
        yield folder.name
    finally:
        try:
            folder.cleanup()
        except RecursionError:  # folders in folders
            subprocess.run(["rm", "-rf", folder.name], check=False)


def _text(file) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT).decode(errors="replace")


def refusal(lacking: tuple[str, ...]) -> str:
    return (
        f"--reward code: this machine cannot confine programs: {' and '.join(lacking)} missing. Run where "
        "they are allowed (a container may need other seccomp settings), or, if nothing within reach of "
        "this user matters, add --allow-unsandboxed-code."
    )


@functools.cache
def missing() -> tuple[str, ...]:
    """Return the kinds of confinement that this machine lacks, () if it has all.

    The names are "namespaces" (network), "Landlock" (files) and "seccomp" (calls). Each is tried in a child
    that ends at once."""
    found = []
    for name, attempt in (
        ("namespaces", _unshare),
        ("Landlock", lambda: _confine_files("/")),
        ("seccomp", _confine_calls),
    ):
        if (child := os.fork()) == 0:
            try:
                attempt()
            except BaseException:  # any error means that it does not work
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            found.append(name)
    return tuple(found)


# ------------------------------------------- functions in the processes of the supervisor and the program


def _main(limits: dict) -> None:
    """Start a process, confine it, and run the program in it."""
    if limits["unshare"]:
        _unshare()
    _start_program(limits)
    with open(".program", encoding="utf-8") as file:
        source = file.read()
    os.remove(".program")
    seconds = math.ceil(limits["timeout_s"])
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory_limit_bytes"]),
        (resource.RLIMIT_FSIZE, _MAX_OUTPUT),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, _MAX_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))
    if limits["landlock"]:
        _confine_files(limits["folder"])
    if limits["seccomp"]:
        _confine_calls()
    # The program gets a separate module, so that it finds nothing of this file by chance, and dataclasses
    # find its names; and none of this file's __future__ imports, which would make its annotations strings.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)


def _start_program(limits: dict) -> None:
    """Start two processes, and return in the second; the first waits for it, and this process for the first.

    Both are in the new PID namespace, if there is one. When the first one ends, by itself or because the
    caller ends it, the kernel ends all others. So the program must not be the first: a process may leave its
    group, and take back that it dies with its parent. The first cannot end by the program's signal, because
    the kernel keeps signals of its own namespace from it, so this process gets the exit code through a pipe
    and ends with it."""
    told, tell = os.pipe()
    if first := os.fork():
        os.close(tell)
        _supervise(first, told, limits)
    _die_with_parent()
    os.close(told)
    os.close(limits["caller"])
    if second := os.fork():
        while (ended := os.wait())[0] != second:  # orphans of the program come to the first process too
            pass
        os.write(tell, str(os.waitstatus_to_exitcode(ended[1])).encode())
        os._exit(0)
    _die_with_parent()
    os.close(tell)


def _supervise(first: int, told: int, limits: dict) -> NoReturn:
    """End with the program's exit code. If the caller dies before, end the program and remove its folder."""
    events = select.poll()
    for pipe in (told, limits["caller"]):
        events.register(pipe, select.POLLIN)
    if limits["caller"] in dict(events.poll()):
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        # In place of this process: one whose PID namespace has ended can start no others.
        os.execvp("rm", ["rm", "-rf", limits["folder"]])
    os.waitpid(first, 0)
    code = int(os.read(told, 16) or -signal.SIGKILL)
    os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
    os._exit(1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _die_with_parent() -> None:
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _unshare() -> None:
    if os.getuid() == 0:
        # The kernel does not count root's processes. Files are opened as the effective user, who stays.
        os.setresuid(_NOBODY, -1, -1)
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC))


def _confine_files(folder: str) -> None:
    """Restrict this process and its children to the program's files, by Landlock. Raises: OSError where that
    is not possible."""
    libc = _libc()
    abi = _check(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION))
    if abi < min(_RIGHTS_OF_ABI):
        raise OSError(
            errno.ENOSYS, f"Landlock has version {abi}, which cannot keep a program from emptying files"
        )
    every = (1 << _RIGHTS_OF_ABI.get(abi, 16)) - 1
    handled = struct.pack("=Q", every)
    rules = _check(libc.syscall(_LANDLOCK_CREATE_RULESET, handled, len(handled), 0))
    read = _EXECUTE | _READ_FILE | _READ_DIR
    allowed = dict.fromkeys(
        {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), "/usr", "/lib", "/lib64", "/bin"}, read
    )
    allowed |= {
        "/dev/null": _READ_FILE | _WRITE_FILE,
        "/dev/urandom": _READ_FILE,
        "/etc/ld.so.cache": _READ_FILE,
        folder: every,
    }
    for path, rights in allowed.items():
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights, handle)
            _check(libc.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_RULE_PATH_BENEATH, rule, 0))
            os.close(handle)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0))
    os.close(rules)


class _Filter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.POINTER(_Filter)))


def _confine_calls() -> None:
    """Make the system calls in `_DENIED_CALLS` fail with EPERM in this process and its children, by seccomp.

    Calls of other ABIs have other numbers, so the filter kills the process."""
    architecture, denied = _DENIED_CALLS[os.uname().machine]
    checks = [(_BPF_IF_AT_LEAST, _X32), *((_BPF_IF_EQUAL, number) for number in denied)]
    filters = [
        (_BPF_LOAD, 0, 0, 4),
        (_BPF_IF_EQUAL, 1, 0, architecture),
        (_BPF_RETURN, 0, 0, _SECCOMP_KILL),
        (_BPF_LOAD, 0, 0, 0),
    ]
    filters += [(code, len(checks) - index, 0, number) for index, (code, number) in enumerate(checks)]
    filters += [(_BPF_RETURN, 0, 0, _SECCOMP_ALLOW), (_BPF_RETURN, 0, 0, _SECCOMP_ERRNO | errno.EPERM)]
    program = _Program(len(filters), (_Filter * len(filters))(*filters))
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
