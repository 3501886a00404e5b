"""A process that is forked from the fork server behaves like one that is started. `pytest tests/test_launch.py`"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch import CONTROLLER, FOLDER, PRELOADED_ENGINES, preloaded_python, prepare, run

BOTH = pytest.mark.parametrize("preloaded", [False, True], ids=["anew", "preloaded"])


@BOTH
def test_arguments_environment_folder_and_streams(preloaded, tmp_path):
    code = "import os, sys; print(sys.argv, os.environ['OWN'], os.getcwd(), os.getppid()); print('e', file=sys.stderr)"
    done = run("-c", code, "a b", timeout=60, preloaded=preloaded, folder=tmp_path, environment={"OWN": "1"})
    assert (done.returncode, done.stderr) == (0, "e\n")
    assert done.stdout == f"['-c', 'a b'] 1 {tmp_path} {os.getpid()}\n"


@BOTH
def test_modules_and_scripts_are_main(preloaded, tmp_path):
    (tmp_path / "own.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for command in (["own.py", "x"], ["-u", "-P", "-m", "own", "x"]):
        done = run(
            *command,
            timeout=60,
            preloaded=preloaded,
            folder=tmp_path,
            environment={"PYTHONPATH": str(tmp_path)},
        )
        assert (done.returncode, done.stdout) == (0, "__main__ ['x']\n"), done.stderr


@BOTH
@pytest.mark.parametrize(
    "code, expected, says",
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('told')", 1, "told\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(lambda: print('last', file=sys.stderr))", 0, "last\n"),
        ("import threading, time, sys; threading.Thread(target=lambda: (time.sleep(0.2), print('t', file=sys.stderr))).start()", 0, "t\n"),
    ],
)  # fmt: skip
def test_exit_codes(preloaded, code, expected, says):
    done = run("-c", code, timeout=60, preloaded=preloaded)
    assert done.returncode == expected and says in done.stderr


@BOTH
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_arrive(preloaded, signum, tmp_path):
    # short sleeps: a handler does not run if its signal arrives between two bytecodes, just before a long one
    code = (
        "import signal, sys, time\nfor s in (2, 15): signal.signal(s, lambda n, f: sys.exit(40 + n))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.1)"
    )
    process = subprocess.Popen(
        [preloaded_python() if preloaded else sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signum)
    assert process.wait(30) == 40 + signum


@pytest.mark.parametrize("said", [b"", b"100\n", b'100\n[["-c", "pass'])
def test_a_client_that_is_killed_while_it_asks_ends_nothing_else(said):
    path = Path(preloaded_python()).with_name("socket")
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(said)
    assert run("-c", "print('up')", timeout=60, preloaded=True).stdout == "up\n"


def test_what_multiprocessing_spawns_is_preloaded_where_it_may_be():
    """Its start hands over a pipe by number, and asks for options of the interpreter."""
    code = (
        "import multiprocessing, sys\n"
        "sys.warnoptions.append('ignore:resource_tracker:UserWarning')\n"
        "here, there = (context := multiprocessing.get_context('spawn')).Pipe()\n"
        "what = \"__import__('os').write(1, b'vllm' if 'vllm' in __import__('sys').modules else b'nothing')\"\n"
        "for process in (context.Process(target=exec, args=(what,)), context.Process(target=there.send, args=(7,))):\n"
        "    process.start(); process.join(); assert process.exitcode == 0\n"
        "print('', here.recv())"
    )
    for environment, loaded in (({}, "nothing"), (PRELOADED_ENGINES, "vllm")):
        done = run("-c", code, timeout=100, preloaded=True, environment=environment)
        wanted = "nothing" if os.environ.get("MEGARL_TEST_PRELOADED") == "0" else loaded
        assert (done.stdout, done.stderr) == (f"{wanted} 7\n", "")


def test_a_child_ends_with_its_client(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    client = subprocess.Popen([preloaded_python(), "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(client.stdout.readline())
    client.kill()
    client.wait()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_preloaded_is_not_imported_again():
    done = run("-c", "import sys; print('vllm' in sys.modules)", timeout=60, preloaded=True)
    anew = run("-c", "import sys; print('vllm' in sys.modules)", timeout=60)
    preloaded = "False\n" if os.environ.get("MEGARL_TEST_PRELOADED") == "0" else "True\n"
    assert (done.stdout, anew.stdout) == (preloaded, "False\n")


def test_the_interpreter_may_be_in_a_folder_with_blanks(tmp_path, monkeypatch):
    """As in a clone at such a path. The first line of a script could not name it."""
    folder = tmp_path / "it's a b" / "ü"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (FOLDER, CONTROLLER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare()
    interpreter = Path(os.environ[FOLDER]) / "python"
    done = subprocess.run(
        [interpreter, "-I", "-c", "import sys; print(sys.executable, sys.argv[1:])", "x y"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (f"{folder}/python ['x y']\n", "")
