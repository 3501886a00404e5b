"""Stand in for the interpreter: have tests/fork_server.py run this command line, and end as it ends.

It imports little, so that it starts in some 20 ms."""

import array
import ctypes
import json
import os
import select
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INTERPRETER = "@INTERPRETER@"  # tests/launch.py writes it here
PR_SET_PDEATHSIG = 1
LIGHT = ("megarl.rewards.pool_worker", "megarl.doctor.probe")
"""Modules that import little, and look at process ids."""
TRACKER = "from multiprocessing.resource_tracker import main"
"""Beginning of the program of a process that multiprocessing starts beside its own, and which imports little."""


def open_files() -> list[int]:
    """Descriptors that this process has inherited: standard streams, and what multiprocessing hands over."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(entry))
        except OSError:  # of the listing itself
            continue
        found.append(int(entry))
    return sorted(found)


def main() -> None:
    is_tracker = any(word.startswith(TRACKER) for word in sys.argv)
    if "-I" in sys.argv[1:2] or set(LIGHT) & set(sys.argv[1:4]) or is_tracker:
        os.execv(INTERPRETER, [INTERPRETER, *sys.argv[1:]])
    parent, files = os.getppid(), open_files()
    # the child ends with this process, and this process with the one that started it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), parent, files]).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    connection.sendmsg([b"%d\n" % len(request)], [rights])
    connection.sendall(request)
    replies = connection.makefile("rb", buffering=0)
    child = int(replies.readline())
    # A handler of Python's runs between two bytecodes: a signal just before a read that blocks would wait for
    # the read's end. The byte of its number in a pipe does not.
    arrived, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for signum in FORWARDED:
        signal.signal(signum, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    for number in filter(
        lambda number: number > 2, files
    ):  # whoever waits for the other end of a pipe waits for the child alone
        os.close(number)
    while connection not in select.select([arrived, connection], [], [])[0]:
        for signum in os.read(arrived, 64):
            os.kill(child, signum)
    status = int(replies.readline() or signal.SIGKILL)  # a server that was killed has taken the child along
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in FORWARDED:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


main()
