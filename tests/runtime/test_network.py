"""The interface to the other nodes is chosen, or asked for by name."""

import socket

import pytest

from megarl.runtime.network import (
    InterfaceError,
    address_of,
    choose_interface,
    interface_of,
    is_on_several_nodes,
    own_address,
)

SEVERAL = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


def test_addresses_and_interfaces_belong_together():
    assert interface_of("127.0.0.1") == "lo" and address_of("lo") == "127.0.0.1"
    assert interface_of("192.0.2.1") is None and address_of("no_such") is None


def test_one_node_is_left_alone():
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = dict(env)
    choose_interface(env)
    assert env == before and not is_on_several_nodes(env) and not is_on_several_nodes({"WORLD_SIZE": "2"})


def test_the_interface_towards_the_store_is_chosen():
    env = {**SEVERAL, "MASTER_ADDR": "127.0.0.1"}
    choose_interface(env)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert own_address(env) == "127.0.0.1"


def test_what_the_user_has_set_stays():
    env = {**SEVERAL, "MASTER_ADDR": "192.0.2.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    choose_interface(env)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")


def test_a_store_that_is_named_but_lies_on_loopback_is_asked_about():
    # 0.0.0.0 is reached from 127.0.0.1, as is a host name that /etc/hosts maps to 127.0.1.1
    with pytest.raises(InterfaceError) as refused:
        choose_interface({**SEVERAL, "MASTER_ADDR": "0.0.0.0"})
    text = str(refused.value)
    assert text.startswith(
        "GLOO_SOCKET_IFNAME (variable, not set): must name the interface by which the other"
    )
    assert f"node {socket.gethostname()}" in text and "lo (127.0.0.1)" in text and "--local-addr" in text


def test_an_interface_that_does_not_exist_is_told():
    with pytest.raises(InterfaceError, match=r"GLOO_SOCKET_IFNAME \(variable, no_such\): must name .* lo \("):
        own_address({**SEVERAL, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "no_such"})
