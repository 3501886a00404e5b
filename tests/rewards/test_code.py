"""--reward code: programs are judged by their tests, and cannot get out.

pytest tests/rewards/test_code.py"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megarl.config.schema import DataConfig
from megarl.rewards import sandbox
from megarl.rewards.code import CodeReward, program_of, read_tests
from megarl.rewards.sandbox import run_confined
from tests.launch import run

confined = pytest.mark.skipif(
    bool(sandbox.missing()), reason=f"this machine has no {' and no '.join(sandbox.missing())}"
)
STDIN = json.dumps({"inputs": ["3 4\n", "1 1"], "outputs": ["7\n", "2"]})
CALL = json.dumps({"fn_name": "add", "inputs": [[3, 4], [1, 1]], "outputs": [7, 2]})
ASSERTS = json.dumps(
    {"asserts": ["assert add(3, 4) == 7", "import math\nassert math.isclose(add(0.1, 0.2), 0.3)"]}
)
ADD = "def add(a, b):\n    return a + b\n"
CLASS_VARIABLE = (
    "from dataclasses import dataclass\nfrom typing import ClassVar\n"
    "@dataclass\nclass P:\n    seen: ClassVar[list] = []\n    x: int = 0\n"
)
SUM = CLASS_VARIABLE + "print(P(sum(map(int, input().split()))).x)"
ANNOTATED = "def add(a: int, b: int): return a + b\nassert add.__annotations__['a'] is int\n"
LAZY = "from __future__ import annotations\n"
NODE = 'from dataclasses import dataclass\n@dataclass\nclass Node:\n    next: "Node" = None\n'
CASES = [
    ("print(sum(map(int, input().split())))", STDIN, 1),
    ("print(sum(map(int, input().split())), '  \\n\\n')", STDIN, 1),
    ("print(7)", STDIN, 0),
    ("print(sum(map(int, input().split()))); exit(1)", STDIN, 0),
    ("if __name__ == '__main__': print(sum(map(int, input().split())))", STDIN, 1),
    (f"Here it is:\n```python\n{ADD}```\nDone.", CALL, 1),
    (f"```\nwrong\n```\n```py\n{ADD}```", CALL, 1),
    ("class Solution:\n    def add(self, a, b): return a + b", CALL, 1),
    ("def add(a, b): return (a - b)", CALL, 0),
    ("def add(a, b): print('noise'); return a + b", CALL, 1),
    ("def add(a, b): return object()", CALL, 0),
    ("def sub(a, b): return a + b", CALL, 0),
    ("def add(a, b): raise SystemExit(0)", CALL, 0),
    ("import os\nos._exit(0)", CALL, 0),
    ("def f(): return (1, [2])", json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [[1, [2]]]}), 1),
    (ADD, ASSERTS, 1),
    *((NODE + ADD, tests, 1) for tests in (CALL, ASSERTS)),
    (SUM, STDIN, 1),
    (LAZY + SUM, STDIN, 1),
    *((ANNOTATED, tests, 1) for tests in (CALL, ASSERTS)),
    *((LAZY + CLASS_VARIABLE + ADD, tests, 1) for tests in (CALL, ASSERTS)),
    (LAZY + ANNOTATED, CALL, 0),
    ("def add(a, b): return 7", ASSERTS, 0),
    ("def add(a, b):\n    raise SystemExit(0)", ASSERTS, 0),
    ("```python\nno end, and no program", ASSERTS, 0),
    ("\x00\ud800", ASSERTS, 0),
    ("", STDIN, 0),
    (
        "import sys\nsys.setrecursionlimit(10**6)\ndef add(a, b):\n    for _ in range(5000): a = "
        "[a]\n    return a",
        CALL,
        0,
    ),
]


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(DataConfig(train_data=("x",), code_timeout_s=5.0))


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> Path:
    """Return a folder that only this test's sandboxes use."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@confined
@pytest.mark.parametrize(("response", "tests", "wanted"), CASES)
def test_programs_are_judged_by_their_tests(reward, response, tests, wanted):
    assert reward("x", response, tests, {}) == wanted


@confined
def test_a_program_does_not_pass_by_printing_what_it_saw(reward):
    """It prints the mark that it found in its caller's variables, and an answer that it cannot know."""
    forger = (
        "import sys\ndef add(a, b):\n    mark = sys._getframe(1).f_globals['_mark']\n    "
        "print('\\n' + mark + '0')\n"
        "    sys.stdout.flush()\n    import os; os._exit(0)"
    )
    assert reward("x", forger, CALL, {}) == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "",
        "17",
        "[]",
        "{}",
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [1], "outputs": ["1"]}',
        '{"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}',
        '{"asserts": []}',
        '{"asserts": "assert 1"}',
        "[" * 100_000,
    ],
)
def test_ground_truth_of_another_form_is_refused(truth):
    with pytest.raises(ValueError, match=r'ground_truth is .*"asserts".*at least one test'):
        read_tests(truth)


def test_the_last_block_is_the_program():
    assert program_of("a ```python\none\n``` b ```c++ \ntwo\n``` c") == "two\n"
    assert program_of("no block") == "no block"
    inline = "First ```print(0)```\nthen:\n```python\nprint(1)\n```\n"
    titled = "```python title=a.py\r\nprint(1)\r\n```\r\nThis prints 1.\r\n```print(2)```"
    assert program_of(inline) == program_of(titled) == "print(1)\n"
    quoting = 'print("```")\n'
    assert program_of(f"```python\n{quoting}```") == quoting


ESCAPES = {
    "connects to this machine": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "PermissionError",
    ),
    "sends datagrams": (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        "PermissionError",
    ),
    "reads a file of the user": ("print(open('{secret}').read())", "PermissionError"),
    "reads accounts": ("print(open('/etc/passwd').read())", "PermissionError"),
    "lists processes": ("import os; os.listdir('/proc')", "PermissionError"),
    "writes elsewhere": ("open('{folder}/evil', 'w')", "PermissionError"),
    "writes too much": ("open('big', 'wb').write(b'x' * (3 << 20))", "File too large"),
    "takes memory": ("bytearray(2 << 30)", "MemoryError"),
    "signals the rank": ("import os; os.kill({pid}, 9)", "ProcessLookupError"),
    "connects to a socket in the file system": (
        "import socket; socket.socket(socket.AF_UNIX).connect('{unix}')",
        "PermissionError",
    ),
    "opens a file for all": ("import os; os.chmod('{secret}', 0o777)", "PermissionError"),
    "changes the time of a file": ("import os; os.utime('{secret}', (0, 0))", "PermissionError"),
    "marks a file": ("import os; os.setxattr('{secret}', 'user.a', b'1')", "PermissionError"),
    "links to a file": ("import os; os.link('{secret}', 'secret'); print(open('secret').read())", "OSError"),
    "reads the environment of the rank": ("print(open('/proc/{pid}/environ').read())", "PermissionError"),
    "reads its own first environment": ("print(open('/proc/self/environ').read())", "PermissionError"),
    "asks for keys": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall({keyctl}, 0, -3, "
        "0, 0) < 0 and os.strerror({{}}"
        "[ctypes.get_errno()])",
        "KeyError: 1",
    ),
    "forks without end": (
        "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(1000)",
        "BlockingIOError",
    ),
    "reads the environment": ("import os; print(os.environ['MEGARL_SECRET'])", "KeyError"),
}


@confined
@pytest.mark.parametrize("escape", ESCAPES)
def test_programs_cannot_get_out(escape, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_SECRET", "told")
    (tmp_path / "secret").write_text("told")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        program, words = ESCAPES[escape]
        program = program.format(
            port=server.getsockname()[1],
            secret=tmp_path / "secret",
            folder=tmp_path,
            pid=os.getpid(),
            unix=tmp_path / "socket",
            keyctl={"x86_64": 250, "aarch64": 219}[os.uname().machine],
        )
        outcome = run_confined(program, "", timeout_s=5.0, memory_limit_bytes=2**30)
    assert outcome.exit_code == 1 and words in outcome.stderr and "told" not in outcome.stdout
    assert not (tmp_path / "evil").exists()


@confined
def test_time_is_limited_and_nothing_goes_on_after_it(own_folder):
    before = time.monotonic()
    program = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n   "
        "     time.sleep(1000)\ntime.sleep(1000)"
    )
    assert run_confined(program, "", timeout_s=0.5, memory_limit_bytes=2**30).exit_code is None
    assert time.monotonic() - before < 30
    assert becomes_true(lambda: not children_of_sandboxes(own_folder))


@confined
def test_a_program_cannot_leave_its_time_limit(own_folder):
    """It takes back that it dies with its parent, and leaves the process group."""
    program = "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.setsid()\ntime.sleep(1000)"
    assert run_confined(program, "", timeout_s=0.5, memory_limit_bytes=2**30).exit_code is None
    assert becomes_true(lambda: not children_of_sandboxes(own_folder))


@confined
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 11)", -11), ("os._exit(7)", 7)])
def test_the_exit_code_is_the_programs(end, code):
    """Also where an orphan of the program ends before it."""
    program = f"import os, time\nif os.fork() == 0:\n    os.fork()\n    os._exit(3)\ntime.sleep(0.1)\n{end}"
    assert run_confined(program, "", timeout_s=20.0, memory_limit_bytes=2**30).exit_code == code


@confined
def test_a_program_that_ends_takes_its_children_with_it(own_folder):
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint('done')"
    outcome = run_confined(program, "", timeout_s=20.0, memory_limit_bytes=2**30)
    assert (outcome.exit_code, outcome.stdout) == (0, "done\n")
    assert not children_of_sandboxes(own_folder)


@confined
@pytest.mark.parametrize(
    ("moment", "lacking"),
    [("it starts", ()), ("the program runs", ()), ("the program runs", ("namespaces",))],
)
def test_nothing_is_left_when_the_caller_is_killed(tmp_path, moment, lacking):
    """Neither processes nor the folder; without a namespace a program's children may go on."""
    leave = "" if lacking else "if os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    program = f"import os, time\n{leave}os.makedirs('a/b')\ntime.sleep(1000)"
    code = (
        f"from megarl.rewards import sandbox\nsandbox.missing = lambda: {lacking}\n"
        f"sandbox.run_confined({program!r}, '', 1000.0, 2**30, True)"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as caller:
        try:
            is_there = {
                "it starts": lambda: children_of_sandboxes(tmp_path),
                "the program runs": lambda: list(tmp_path.glob("megarl_code_*/a/b")),
            }[moment]
            assert becomes_true(is_there)
            caller.kill()
            caller.wait()
            assert becomes_true(lambda: not [*tmp_path.iterdir(), *children_of_sandboxes(tmp_path)])
        finally:
            caller.kill()
            for pid in children_of_sandboxes(tmp_path):
                os.kill(int(pid), signal.SIGKILL)


def becomes_true(condition) -> bool:
    for _ in range(1200):
        if condition():
            return True
        time.sleep(0.05)
    return False


@confined
def test_the_limit_of_cpu_seconds_is_not_below_the_time_limit():
    program = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))"
    assert run_confined(program, "", timeout_s=20.4, memory_limit_bytes=2**30).stdout == "(21, 21)\n"


def children_of_sandboxes(folder: Path) -> list[str]:
    """Return the ids of sandboxes' processes whose programs have their folders in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"{folder}/megarl_code_".encode() in (entry / "cmdline").read_bytes()
                and (entry / "stat").read_text().split()[2] != "Z"
            ):
                found.append(entry.name)
        except OSError:
            continue
    return found


@confined
def test_output_is_cut_and_folders_are_removed():
    outcome = run_confined(
        "import os\nprint(os.getcwd())\nopen('a', 'w').write('x')\nprint('y' * (3 << 20))", "", 10.0, 2**30
    )
    folder = outcome.stdout.split("\n")[0]
    assert len(outcome.stdout) <= 2**20 and "megarl_code_" in folder and not Path(folder).exists()
    deep = "import os\nprint(os.getcwd())\nfor _ in range(2000):\n    os.mkdir('a')\n    os.chdir('a')"
    outcome = run_confined(deep, "", 20.0, 2**30)
    assert outcome.exit_code == 0 and not Path(outcome.stdout.strip()).exists()


def test_a_machine_that_cannot_confine_is_refused_unless_told(monkeypatch):
    monkeypatch.setattr("megarl.rewards.code.missing", lambda: ("namespaces",))
    monkeypatch.setattr(sandbox, "missing", lambda: ("namespaces",))
    with pytest.raises(
        ValueError,
        match=r"--reward code: this machine cannot confine programs: namespaces "
        r"missing.*--allow-unsandboxed-code",
    ):
        CodeReward(DataConfig(train_data=("x",)))
    with pytest.raises(RuntimeError, match="cannot confine"):
        run_confined("print(1)", "", 5.0, 2**30)
    allowed = CodeReward(DataConfig(train_data=("x",), allow_unsandboxed_code=True))
    assert allowed("x", ADD, CALL, {}) == 1.0


def test_what_is_missing_is_found_in_a_child():
    program = "from megarl.rewards import sandbox; sandbox._unshare = lambda: 1 / 0; print(sandbox.missing())"
    done = run("-P", "-c", program, timeout=60)
    assert done.stdout.startswith("('namespaces',"), done.stderr
