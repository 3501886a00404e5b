"""The environment of every test, set before anything is imported, so that plain `pytest` and `make test` run
the same."""

import gc
import importlib.util
import os
import secrets
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # many processes on few cores; also makes sums repeatable
    # children do not find the folder triton_kernels/ as a package when they start in the checkout
    "PYTHONSAFEPATH": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" refuses two ranks on one NUMA node
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler's log-prob counter would be compiled for 9 s
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "MEGARL_JOB_SECRET": secrets.token_hex(32),  # of worlds that no launcher of ours starts
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
# Containers often forbid Python to write bytecode. Then every process that a test starts compiles megarl, and
# every worker of pytest-xdist rewrites the assertions of 350 files: 30 s of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Importing the tests and what they test makes a million objects that stay. Looking for garbage among them again
# and again takes each worker 8 s.
gc.disable()
# A shell script starts `pytest &` with Ctrl-C ignored, and so would be all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# `python -m pytest` puts the working directory on the path; see PYTHONSAFEPATH above for why that must not be
# the checkout.
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != CHECKOUT]
sys.path.append(str(CHECKOUT / "examples"))  # the quickstart's task: `from sums.files import make_sums`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help="put what the tests of tests/faults and tests/nodes measure into the tables of docs/",
    )


def pytest_configure(config: pytest.Config) -> None:
    refuse_other_trees()
    from tests import launch  # of this tree

    launch.prepare()
    is_whole = CHECKOUT / "tests" in (Path(argument).resolve() for argument in config.args)
    if is_whole and config.getoption("numprocesses", None) and "unit" not in config.getoption("markexpr"):
        launch.start_early()


def pytest_unconfigure() -> None:
    if launch := sys.modules.get("tests.launch"):
        launch.clean_up()
    gc.unfreeze()  # else extension modules complain at exit of objects that were not freed


def refuse_other_trees() -> None:
    """Refuse to test another tree's megarl, which an editable install of that tree would bring.

    Processes that tests start find what this one finds: the same interpreter and PYTHONPATH, and with
    PYTHONSAFEPATH no working directory."""
    folders = {
        "megarl": CHECKOUT / "megarl",
        "megarl.kernels": CHECKOUT / "triton_kernels",
        "megarl._C": Path(os.environ.get("HOSTCUDA", CHECKOUT / "megarl")),  # tests/hostcuda builds its own
    }
    for name, folder in folders.items():
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of the parent
            spec = None
        if spec is None and name == "megarl._C":  # may be left out
            continue
        found = (
            "nothing"
            if spec is None
            else Path(spec.origin or next(iter(spec.submodule_search_locations))).resolve()
        )
        if spec is None or found.parent != folder:
            own = CHECKOUT / ".venv" / "bin" / "python"
            use = (
                f"Use {own} -m pytest, or install"
                if own.exists() and own != Path(sys.executable)
                else "Install"
            )
            raise pytest.UsageError(
                f"`import {name}` finds {found}, but these tests are of {folder}: another tree "
                f"would be tested. {use} this one: "
                f"{sys.executable} -m pip install --no-deps --no-build-isolation -e {CHECKOUT}"
            )


# Triton decides at its import whether it compiles or interprets. Without a GPU there is nothing to compile
# for in this process, so it is imported here to interpret, before anything else imports it. Children decide
# for themselves. Sandboxes may show only the device.
HAS_GPU = any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))
if os.environ.get("MEGARL_KERNELS") == "interpret" or not HAS_GPU:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language  # noqa: F401
    finally:
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)


@pytest.fixture(autouse=True)
def no_rank_stays() -> Iterator[None]:
    """A job of --executor inline makes this process a rank, and `megarl train` and `check` refuse to run on one."""
    yield
    os.environ.pop("RANK", None)


@pytest.fixture(scope="session")
def sums_paths(tmp_path_factory) -> dict[str, str]:
    """Path by name of the quickstart's data and its untrained model, written once. No test changes them."""
    from sums.files import make_sums
    from tests.shared import made_once

    return made_once(
        tmp_path_factory,
        "sums",
        lambda folder: {name: str(path) for name, path in make_sums(folder, seed=0).items()},
    )


FEW_ROWS = 512
"""More than any job of the tests reads in a pass."""


@pytest.fixture(scope="session")
def sums_data(sums_paths, tmp_path_factory) -> Path:
    """A folder with the quickstart's model and the first rows of its files, for jobs of a few steps.

    The driver and each rank read all rows: 1 s of a core per job with all training rows, 10 s with those of
    stage A."""
    from tests.shared import made_once

    def make(folder: Path) -> str:
        for path in map(Path, sums_paths.values()):
            if path.suffix == ".jsonl":
                lines = path.read_bytes().splitlines(keepends=True)
                (folder / path.name).write_bytes(b"".join(lines[:FEW_ROWS]))
            else:
                (folder / path.name).symlink_to(path)
        return str(folder)

    return Path(made_once(tmp_path_factory, "few_sums", make))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


JOBS = {CHECKOUT / "tests" / name for name in ("docs", "e2e", "faults")}
"""Folders whose tests run whole jobs."""
TIERS = ("e2e", "dist", "unit")
WITHOUT_SERVER = [CHECKOUT / "tests" / name for name in ("faults/test_faults.py", "runtime/test_contract.py")]
"""Test files that start processes instead of forking them. They run first, while the fork server still imports."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier, and those that start processes, send signals or depend on time.

    Files of whole jobs come before others, so that no worker of pytest-xdist is left alone with them at the end."""
    from tests.processes import kind_of

    longest: dict[Path, int] = {}
    for item in items:
        but_one_in = item.get_closest_marker("nightly_but_one_in")
        if but_one_in and zlib.crc32(item.name.encode()) % but_one_in.args[0]:
            item.add_marker("nightly")
        kind = kind_of(item.path, getattr(item, "originalname", item.name))
        if kind is not None and item.get_closest_marker("processes") is None:
            item.add_marker(pytest.mark.processes(kind))
        is_alone = item.get_closest_marker("processes") is None
        tier = "unit" if is_alone else "e2e" if JOBS & {*item.path.parents} else "dist"
        item.add_marker(tier)
        longest[item.path] = min(longest.get(item.path, len(TIERS)), TIERS.index(tier))
    items.sort(key=lambda item: (item.path not in WITHOUT_SERVER, longest[item.path]))
