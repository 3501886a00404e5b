"""`megarl doctor --nnodes 2`: two processes of this machine meet as two machines would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from megarl.doctor.nodes import _clocks, _versions


def start(port: int, *flags: str, **env: str) -> subprocess.Popen:
    arguments = ("doctor", "--nnodes", "2", "--head", "127.0.0.1", "--port", str(port), "--json", *flags)
    secret = {"MEGARL_JOB_SECRET": "0123456789abcdef" * 4}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "megarl.cli", *arguments],
        env={**os.environ, **secret, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def meet(port: int, *folders: str) -> list[subprocess.Popen]:
    """Start two machines; the first one, which becomes the head, listens before the second one starts."""
    first, deadline = start(port, "--folder", folders[0]), time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return [first, start(port, "--folder", folders[1])]
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(120)
def test_two_machines_that_fit(tmp_path):
    nodes = meet(free_port(), str(tmp_path), str(tmp_path))
    for node in nodes:
        said, errors = node.communicate(timeout=100)
        report = json.loads(said)
        assert node.returncode == 0 and report["ok"], (said, errors)
        tests = {test["test"]: test["text"] for test in report["tests"]}
        assert [*tests] == ["rendezvous and interfaces", "clocks", "versions", "shared folder", "bandwidth"]
        assert tests["rendezvous and interfaces"].count("(127.0.0.1 on lo)") == 2
        assert tests["shared folder"] == f"{tmp_path} is seen by all"
    assert not any(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_folders_of_the_same_name_that_are_not_one(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    nodes = meet(free_port(), str(tmp_path / "a"), str(tmp_path / "b"))
    reports = [json.loads(node.communicate(timeout=100)[0]) for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    for report in reports:
        (failed,) = [test for test in report["tests"] if not test["ok"]]
        assert (
            failed["test"] == "shared folder" and f"is not shared by {socket.gethostname()}" in failed["text"]
        )
    assert not any((tmp_path / "a").iterdir()) and not any((tmp_path / "b").iterdir())


@pytest.mark.nightly
@pytest.mark.timeout(60)
def test_a_machine_that_does_not_come_is_told():
    node = start(free_port(), "--wait-s", "2")
    said, errors = node.communicate(timeout=50)
    (failed,) = json.loads(said)["tests"]
    assert node.returncode == 1 and failed["test"] == "rendezvous" and not errors, errors
    assert failed["text"].startswith(f"1 of 2 machines came within 2 s: {socket.gethostname()}. Start this")


@pytest.mark.nightly
@pytest.mark.timeout(60)
def test_a_head_that_does_not_listen_is_told():
    port = free_port()
    node = start(port, "--wait-s", "2", "--head", "192.0.2.1", GLOO_SOCKET_IFNAME="lo")  # RFC 5737: nobody's
    said, errors = node.communicate(timeout=50)
    (failed,) = json.loads(said)["tests"]
    assert node.returncode == 1 and not errors, errors
    assert failed["text"].startswith(
        f"port {port} of --head (192.0.2.1, 192.0.2.1) was not reached within 2 s"
    )


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_head_whose_name_is_127_0_1_1_meets_the_others():
    """Debian maps a machine's own name to this address, which is no interface's."""
    port = free_port()
    nodes = [start(port, "--head", "127.0.1.1") for _ in range(2)]
    for node in nodes:
        said, errors = node.communicate(timeout=100)
        assert node.returncode == 0 and json.loads(said)["ok"], (said, errors)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_every_machine_says_that_a_secret_differs():
    port = free_port()
    nodes = [start(port), start(port, MEGARL_JOB_SECRET="f" * 64)]
    for node in nodes:
        said, errors = node.communicate(timeout=100)
        (failed,) = json.loads(said)["tests"]
        assert node.returncode == 1 and failed["test"] == "rendezvous" and not errors, errors
        assert failed["text"].startswith("MEGARL_JOB_SECRET is not the same on all machines. Try export")


def test_a_short_secret_is_asked_for():
    node = start(1, MEGARL_JOB_SECRET="short")
    _, errors = node.communicate(timeout=50)
    assert node.returncode == 2 and errors.startswith("MEGARL_JOB_SECRET (variable, 5 characters)")


def test_clocks_and_versions_that_differ_are_named():
    nodes = [
        {
            "node": name,
            "address": address,
            "time": time,
            "versions": {"torch": torch, "tokenizers": tokenizers},
        }
        for name, address, time, torch, tokenizers in (
            ("a", "10.0.0.1", 100.0, "2.13.0", "1"),
            ("b", "10.0.0.2", 102.5, "2.12.0", "2"),
        )
    ]
    clocks, versions = _clocks(nodes), _versions(nodes)
    assert not clocks["ok"] and clocks["text"].startswith("2500 ms apart: must be within 1 s")
    found = "torch: 2.13.0 on a (10.0.0.1), 2.12.0 on b (10.0.0.2)"
    assert versions["text"] == f"must be the same everywhere: {found}"
    assert _clocks(nodes[:1] * 2)["ok"] and _versions(nodes[:1] * 2)["ok"] and not versions["ok"]


def test_versions_of_machines_with_the_same_host_name_are_compared():
    nodes = [
        {"node": "localhost", "address": address, "versions": {"torch": torch}}
        for address, torch in (("10.0.0.1", "2.13.0"), ("10.0.0.2", "2.11.0"), ("10.0.0.3", "2.11.0"))
    ]
    versions = _versions(nodes)
    first, *others = (f"localhost (10.0.0.{number})" for number in (1, 2, 3))
    found = ", ".join([f"2.13.0 on {first}", *(f"2.11.0 on {other}" for other in others)])
    assert not versions["ok"] and versions["text"].endswith(f"torch: {found}")
