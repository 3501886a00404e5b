"""A Python process that has imported torch, Megatron-Core and vLLM, and forks itself instead of being started anew.

Importing them takes a rank about 8 s of a core, often longer than the few steps that a test trains. Tests
whose subject is not how processes start ask `tests.launch` for this server; a child of it behaves like the
command that it was asked for: the same arguments, environment, working directory, standard streams, signals
and exit code.

    pytest                starts the server in the background, and ends it (tests/launch.py)
    fork_client.py        takes the place of the interpreter: passes its command line on, waits, forwards signals
    fork_server.py        forks a child per request, which runs the module or script as `__main__`

What differs from a process of its own: the parent's process id (reported as if it were the client's parent),
the process group, and what libraries read from the environment when they are imported."""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

PRELOADED = (
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "transformers.models.qwen3",
    "megarl.megatron.policy",
    "megarl.megatron.value_model",
    "megarl.trainer.__main__",
    "megarl.trainer.loop",
    "megarl.workers.worker",
    "megarl.workers.actor",
    "megarl.workers.critic",
    "megarl.workers.reference",
    "megarl.workers.reward",
    "megarl.workers.rollout",
)
OPTIONS = {"-u", "-P", "-B"}
"""Options of the interpreter that a child may be asked for, beside -W. The server has their effect."""
MAX_FILES = 253
"""Descriptors that the kernel lets a message have."""


@dataclass
class Request:
    """What a child runs: `arguments` of the interpreter, in a folder and an environment, with open files.

    `numbers` are the client's numbers of the files: 0, 1, 2, and others that it has inherited."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    parent: int
    numbers: list[int]
    files: list[int] = field(default_factory=list)


def main(folder: str, controller: int) -> None:
    """Serve until the process `controller` ends."""
    until = os.pidfd_open(controller)
    gc.disable()  # imports leave little garbage, and looking for it takes 2 s
    for name in PRELOADED:
        # vLLM for the CPU replaces streams and events of torch.cuda, which tests/hostcuda are about
        if not (os.environ.get("HOSTCUDA") and name.startswith("vllm.")):
            importlib.import_module(name)
    if not os.environ.get("HOSTCUDA"):
        prepare_vllm()
    gc.collect()
    gc.freeze()  # children share the memory of what is loaded
    # vLLM thaws everything when an engine ends, and then looks at every object twice, 1.3 s of a core each time.
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{folder}/socket.new")
    server.listen(64)
    os.rename(f"{folder}/socket.new", f"{folder}/socket")  # whoever finds it can connect
    request = serve(server, until)
    if request is not None:
        end_with(run, request)


def prepare_vllm() -> None:
    """Do once what takes vLLM 0.7 s of a core at the start of an engine where all of this is imported: it sets
    the level of each of its loggers, and looks for its Triton kernels in every module.

    Where its cache does not have a class of models yet, vLLM asks what the class can do in a new process, which
    imports vLLM for 10 s; here it asks in this one."""
    from megarl.rollout.environment import prepare_environment

    prepare_environment()
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    configure_logging_if_needed(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    assert registry._run_in_subprocess  # fails where another vLLM does this another way
    registry._run_in_subprocess = lambda function: function()


def serve(server: socket.socket, until: int) -> Request | None:
    """Fork a child per connection. Returns the request in a child, and None in the server when it ends."""
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ, "server")
    selector.register(until, selectors.EVENT_READ, "controller")
    children: dict[socket.socket, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.data == "controller":
                for pid, _ in children.values():
                    _kill_group(pid)
                return None
            if key.data == "server":
                connection, _ = server.accept()
                try:
                    request = receive(connection)
                except ConnectionError:  # a test has killed the client
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for descriptor in (server, connection, *children):
                        descriptor.close()
                    for pidfd in (until, *(pidfd for _, pidfd in children.values())):
                        os.close(pidfd)
                    os.setsid()
                    return request
                for file in request.files:
                    os.close(file)
                children[connection] = pid, os.pidfd_open(pid)
                selector.register(connection, selectors.EVENT_READ, connection)
                selector.register(children[connection][1], selectors.EVENT_READ, connection)
                with contextlib.suppress(ConnectionError):  # if the client has ended, its child ends next
                    connection.sendall(b"%d\n" % pid)
            elif key.data in children:  # the child has ended, or its client has: then the child ends too
                pid, pidfd = children.pop(key.data)
                if key.fileobj is key.data:
                    _kill_group(pid)
                status = os.waitpid(pid, 0)[1]
                for descriptor in (key.data, pidfd):
                    selector.unregister(descriptor)
                os.close(pidfd)
                try:
                    key.data.sendall(b"%d\n" % status)
                except OSError:
                    pass
                key.data.close()


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group is not there until the child has called setsid
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def receive(connection: socket.socket) -> Request:
    """Return the request of a client, with its open files. Raises: ConnectionError if the client ends before it has
    said everything."""
    files = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(MAX_FILES * files.itemsize))
    for _, _, content in ancillary:
        files.frombytes(content)
    size, _, more = data.partition(b"\n")
    while data and len(more) < int(size):
        more += (data := connection.recv(1 << 20))
    if not data:
        for file in files:
            os.close(file)
        raise ConnectionError("the client has ended")
    return Request(*json.loads(more), files.tolist())


def end_with(function: Callable[[Request], None], request: Request) -> None:
    """End this process after `function` as an interpreter does, without freeing all that is imported (6 s)."""
    try:
        function(request)
        code = 0
    except SystemExit as exit:
        code = exit.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run(request: Request) -> None:
    """Become the process that was asked for."""
    beyond = max(request.numbers) + 1  # first out of the way: a number may be that of another file here
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, beyond) for file in request.files]
    for file in request.files:
        os.close(file)
    for number, file in zip(request.numbers, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.getppid = lambda: request.parent
    sys.stdout.reconfigure(write_through=True)
    sys.stderr.reconfigure(write_through=True)
    arguments = list(request.arguments)
    while arguments[0] in OPTIONS or arguments[0].startswith("-W"):
        if (option := arguments.pop(0)) not in OPTIONS:
            sys.warnoptions.append(option[2:])  # for the processes that it starts; here only -Wignore occurs
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "PYTHONPATH" in os.environ:  # as the interpreter does at its start
        sys.modules.pop("sitecustomize", None)  # a distribution's own, which the server has imported
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    sys.executable = os.path.join(os.environ["MEGARL_TEST_FORK_FOLDER"], "python")
    if os.environ.get("MEGARL_TEST_PRELOADED_ENGINES") == "1":
        multiprocessing.set_executable(sys.executable)
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0].startswith("-"):
        raise SystemExit(f"fork_server.py: the option {arguments[0]} is none of {sorted(OPTIONS)}, -m, -c")
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
