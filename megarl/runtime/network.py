"""Find the network interface and the address by which the nodes of a job reach each other. Imports no torch."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class InterfaceError(ValueError):
    """Raised if the interface to the other nodes cannot be found out. The user must name it."""


def is_on_several_nodes(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank's job has ranks on other nodes."""
    return env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]) != env["WORLD_SIZE"]


def choose_interface(env: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL use the interface by which this node reaches the job's store, unless the user has
    named one.

    gloo by itself takes the interface that the host name resolves to, which is often the loopback one. Does
    nothing on one node.

    Raises: InterfaceError if that is the loopback interface, which the other nodes do not reach."""
    if not is_on_several_nodes(env):
        return
    if GLOO_INTERFACE not in env:
        address = own_address(env)
        if (name := interface_of(address)) is None:
            return  # an IPv6 address, or one that a gateway translates: gloo's own choice
        env[GLOO_INTERFACE] = name
    env.setdefault(NCCL_INTERFACE, env[GLOO_INTERFACE])


def own_address(env: Mapping[str, str] = os.environ) -> str:
    """Return the IP address by which other nodes reach this one: that of the interface in GLOO_SOCKET_IFNAME,
    else the one from which the job's store is reached.

    Raises: InterfaceError if that is a loopback address although the store is named otherwise."""
    given = env.get(GLOO_INTERFACE, "").split(",")[0]
    if given:
        if (address := address_of(given)) is None:
            raise InterfaceError(
                f"{GLOO_INTERFACE} (variable, {given}): must name an interface with an IPv4 address. Node "
                f"{socket.gethostname()} has {_interfaces()}."
            )
        return address
    host = env["MASTER_ADDR"]
    address = address_towards(host, int(env["MASTER_PORT"]))
    if ipaddress.ip_address(address).is_loopback and host != "localhost" and not host.startswith("127."):
        raise InterfaceError(
            f"{GLOO_INTERFACE} (variable, not set): must name the interface by which the other nodes reach node "
            f"{socket.gethostname()}, because {host} is the loopback address {address} there. It has "
            f"{_interfaces()}. Try export {GLOO_INTERFACE}={next(iter(_others()), 'eth0')}, or give torchrun "
            "the node's address as --local-addr."
        )
    return address


def address_towards(host: str, port: int) -> str:
    """Return the address from which this machine reaches a host. Sends nothing."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface of this machine that has an IPv4 address, or None."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface of this machine, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # no such interface, or it has no IPv4 address
            return None


def _interfaces() -> str:
    found = ((name, address_of(name)) for _, name in socket.if_nameindex())
    return ", ".join(f"{name} ({address})" for name, address in found if address is not None)


def _others() -> list[str]:
    names = (name for _, name in socket.if_nameindex())
    return [name for name in names if (address_of(name) or "127.").startswith("127.") is False]
