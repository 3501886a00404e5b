"""`megarl doctor` as a command, on this machine as it is and with parts that are broken. `pytest
tests/doctor`"""

import importlib.metadata
import json
import re

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.doctor import facts, probe, report
from megarl.megatron import libraries
from tests.launch import run

TESTS = [
    "two ranks add over gloo",
    "the extension copies",
    "a kernel and its reference agree",
    "Megatron updates a model",
]


def doctor(*argv, **env):
    return run("-P", "-m", "megarl.cli", "doctor", *argv, environment=env, timeout=280)


@pytest.mark.timeout(300)
def test_a_part_that_kills_its_process_is_named_and_the_others_are_still_tried(tmp_path):
    """A package that is broken as a wrong build is: it ends the process that imports it."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    done = doctor("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    seen = json.loads(done.stdout)
    verdicts = {test["test"]: (test["ok"], test["text"]) for test in seen["tests"]}
    assert verdicts["vLLM imports"] == (False, "rank 1 of the test died of SIGSEGV")
    assert [name for name in verdicts if name != "vLLM imports"] == TESTS and all(
        verdicts[name][0] for name in TESTS
    ), verdicts
    assert (
        seen["versions"]["torch"] == importlib.metadata.version("torch")
        and seen["errors"] == []
        and not seen["ok"]
    )
    assert seen["features"]["optimizer"][0] and len(seen["features"]) == 11
    assert done.stderr == ""


def test_a_torch_that_does_not_import_is_told(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so: cannot open shared object file')\n")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout.endswith("\nnot ok\n"), done.stdout + done.stderr
    assert (
        "  FAILED rank 0 starts: rank 0 of the test ended with exit code 1: ImportError: libc10.so: "
        "cannot open shared object file (0.0 s)\n" in done.stdout
    )


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_whole_machine_fits_on_one_screen():
    done = doctor()
    assert done.returncode == 0 and done.stdout.endswith("\nok\n"), done.stdout + done.stderr
    assert (
        all(f"  ok     {name}: " in done.stdout for name in [*TESTS, "vLLM imports"])
        and len(done.stdout.splitlines()) <= 32
    )


def test_what_a_part_raises_is_its_result(capsys):
    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    probe.attempt("the extension copies", broken)
    begins, result = map(json.loads, capsys.readouterr().out.splitlines())
    assert begins == {"begins": "the extension copies"}
    assert result | {"seconds": 0} == {
        "test": "the extension copies",
        "ok": False,
        "text": "OSError: libcudart.so.13: cannot open shared object file",
        "seconds": 0,
    }


def test_versions_are_held_against_the_pins(monkeypatch):
    right = facts.versions()
    assert facts.version_errors(right) == []
    wrong = right | {"transformers": "4.0.0", "torch": right["torch"].partition("+")[0] + ".post1"}
    found = facts.version_errors(
        {name: version for name, version in wrong.items() if not name.startswith("vllm")}
    )
    assert [finding.split(" ", 1)[0] for finding in found] == ["torch", "transformers", "vllm"]
    assert f"Run pip install torch=={right['torch'].partition('+')[0]}." in found[0]


def test_the_text_names_what_failed():
    verdict = {"test": "vLLM imports", "ok": False, "text": "ImportError: no", "seconds": 0.5}
    said = report.text(
        {
            "versions": {"torch": ""},
            "machine": {"cores": "2 of 2"},
            "devices": [],
            "features": {"apex": [False, "not installed"]},
            "tests": [verdict],
            "errors": ["torch (not installed): ..."],
            "ok": False,
        }
    )
    assert said.splitlines()[-5:] == [
        "  off apex: not installed",
        "tests",
        "  FAILED vLLM imports: ImportError: no (0.5 s)",
        "wrong: torch (not installed): ...",
        "not ok",
    ]
    assert "no GPU: everything runs on the CPU" in said


def test_the_triton_of_pytorchs_build_for_cuda_is_the_right_one(monkeypatch):
    """Its own metadata asks for it; another one breaks torch.compile."""
    right = facts.versions()
    requires = importlib.metadata.requires
    of_cuda = {"torch": ["nvidia-nccl-cu13==2.29.7", 'triton==3.7.1; platform_system == "Linux"']}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: of_cuda.get(name) or requires(name))
    assert facts.version_errors(right | {"triton": "3.7.1"}) == []
    (found,) = facts.version_errors(right | {"triton": "3.9.0"})
    assert "pip install triton==3.7.1" in found


NO_DRIVER, OLD_DRIVER = "", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"
OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n"
)


@pytest.mark.parametrize(
    ("text", "available", "built_for", "says"),
    [
        (NO_DRIVER, False, None, None),
        (NO_DRIVER, False, "13.0", None),
        (OLD_DRIVER, True, "13.0", None),
        (OLD_DRIVER, False, "13.0", r"driver \(535\.104\.05\).*CUDA 13\.0.*driver 580 or later"),
        (OPEN_DRIVER, False, None, r"driver \(580\.159\.04\).*built for the CPU"),
        (OLD_DRIVER, False, None, r"driver \(535\.104\.05\).*built for the CPU"),
    ],
)
def test_a_driver_that_gives_pytorch_no_gpu_is_told(text, available, built_for, says, tmp_path, monkeypatch):
    """Otherwise a job would train on the CPU of a machine with GPUs."""
    file = tmp_path / "version"
    if text:
        file.write_text(text)
    monkeypatch.setattr(facts, "DRIVER_FILE", file)
    error = facts.driver_error(available, built_for)
    assert error is None if says is None else re.search(says, error)


@pytest.mark.parametrize(
    ("apex", "expected"),
    [
        ("none", (False, "not installed")),
        ("NVIDIA's", (True, "NVIDIA's")),
        ("another project's", (False, "another project's")),
    ],
)
def test_apex_is_used_if_it_is_nvidias(apex, expected, monkeypatch):
    used = libraries.libraries() | {"apex": apex}
    monkeypatch.setattr(libraries, "libraries", lambda: used)
    assert facts.features()["apex"] == expected


@pytest.mark.parametrize(
    ("count", "blocked", "expected"),
    [
        (1, set(), (False, "no second GPU")),
        (3, set(), (True, "between all 3 GPUs")),
        (3, {(0, 2)}, (False, "not between GPUs 0 and 2: give jobs --reshard-transport messages")),
    ],
)
def test_pairs_of_gpus_without_peer_access_are_named(count, blocked, expected, monkeypatch):
    """A stand-in answers for the driver."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in blocked)
    assert facts.peer_access() == expected


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--head node0", "--head: has no effect without --nnodes 2 or more. Leave it out."),
        ("--nnodes 1 --wait-s 5", "--wait-s: has no effect without --nnodes 2 or more. Leave it out."),
        ("--nnodes 2", "--head (not given): must name one of the machines"),
        ("--nnodes 0", "--nnodes (0): must be a whole number of at least 1. Try 2."),
        (
            "--nnodes 2 --head a --port 70000",
            "--port (70000): must be a whole number of at least 1 and at most 65535",
        ),
        ("--nnodes 2 --head a --wait-s -1", "--wait-s (-1): must be a number of at least 1. Try 60."),
        ("--nodes 2", "--nodes: no such flag of megarl doctor. Did you mean --nnodes?"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_a_probe_starts(flags, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        report.main(flags.split())
