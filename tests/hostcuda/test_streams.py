"""Copies run as late as the program allows, and accesses that nothing orders are reported.

make test-hostcuda ARGS=tests/hostcuda/test_streams.py"""

from __future__ import annotations

import pytest
import torch

from tests.launch import run


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def test_a_copy_to_the_device_reads_pinned_memory_late():
    """Planted: the host changes the source before the copy is over."""
    host = pinned(1.0, 2.0)
    copied = host.to("cuda", non_blocking=True)
    host.fill_(7)
    assert copied.tolist() == [7, 7]
    copied = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host.fill_(8)
    assert copied.tolist() == [7, 7]


def test_a_copy_from_pageable_memory_is_over_when_it_returns():
    host = torch.tensor([1.0, 2.0])
    copied = host.to("cuda", non_blocking=True)
    host.fill_(7)
    assert copied.tolist() == [1, 2]


def test_a_copy_to_the_host_arrives_late():
    """Planted: the host reads before it has waited."""
    host = torch.zeros(2).pin_memory()
    host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    assert host.isnan().all()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert host.tolist() == [1, 1]
    assert torch.ones(2, device="cuda").cpu().tolist() == [1, 1], "a blocking copy"


@pytest.mark.parametrize("wait", ["stream", "event", "host"])
def test_work_that_waits_for_a_copy_sees_it(side, wait):
    target, event = torch.zeros(2, device="cuda"), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(pinned(3.0, 4.0), non_blocking=True)
        event.record()
    if wait == "stream":
        torch.cuda.current_stream().wait_stream(side)
    elif wait == "event":
        event.wait()
    else:
        side.synchronize()
    assert (target + 1).tolist() == [4, 5]


def test_a_copy_that_nobody_waits_for_is_a_race(side):
    target = torch.zeros(2, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(pinned(3.0, 4.0), non_blocking=True)
    with pytest.raises(
        RuntimeError, match=r"race: aten::add[.]?\w* on stream 0 .*reads memory that aten::copy_ .*wrote"
    ):
        target + 1


def test_a_copy_that_nobody_waits_for_changes_the_numbers(side, no_race_reports):
    target = torch.zeros(2, device="cuda")
    with torch.cuda.stream(side):
        target.copy_(pinned(3.0, 4.0), non_blocking=True)
    assert (target + 1).isnan().all()
    torch.cuda.synchronize()
    assert (target + 1).tolist() == [4, 5]


def test_a_copy_must_wait_for_the_kernel_that_makes_its_source(side):
    source, host = torch.zeros(2, device="cuda"), torch.empty(2).pin_memory()
    source.add_(1)
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="race: aten::copy_ .* reads memory"):
        host.copy_(source, non_blocking=True)


def test_a_kernel_must_not_overwrite_what_a_copy_reads(side):
    source, host = torch.ones(2, device="cuda"), torch.empty(2).pin_memory()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError, match="race: aten::zero_ .* writes memory that aten::copy_ .* read"):
        source.zero_()
    assert (source * 2).tolist() == [2, 2], "reading is no race"
    torch.cuda.current_stream().wait_stream(side)
    source.zero_()
    assert host.tolist() == [1, 1]


def copy_out_and_free(side: torch.cuda.Stream, recorded: bool) -> tuple[torch.Tensor, int]:
    source, host = torch.ones(4096, device="cuda"), torch.empty(4096).pin_memory()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(side)
    return host, source.data_ptr()


def test_freed_memory_is_used_again_before_a_side_stream_is_done(side):
    """Planted: record_stream is missing."""
    copy_out_and_free(side, recorded=False)
    with pytest.raises(
        RuntimeError, match="race: the allocation of a tensor .* memory that aten::copy_ .*record_stream"
    ):
        torch.full((4096,), 5.0, device="cuda")


def test_without_record_stream_a_copy_reads_the_next_tensor(side, no_race_reports):
    host, address = copy_out_and_free(side, recorded=False)
    following = torch.full((4096,), 5.0, device="cuda")
    assert following.data_ptr() == address
    torch.cuda.synchronize()
    assert host.unique().tolist() == [5]


def test_record_stream_keeps_memory_until_the_stream_is_done(side):
    host, address = copy_out_and_free(side, recorded=True)
    following = torch.full((4096,), 5.0, device="cuda")
    assert following.data_ptr() != address
    side.synchronize()
    assert host.unique().tolist() == [1] and torch.empty(4096, device="cuda").data_ptr() == address


def test_memory_of_a_stream_that_was_waited_for_needs_no_record(side):
    host, address = copy_out_and_free(side, recorded=False)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.full((4096,), 5.0, device="cuda").data_ptr() == address and host.unique().tolist() == [1]


def test_copies_within_the_device_are_late_on_side_streams(side, no_race_reports):
    source, target = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    with torch.cuda.stream(side):
        target.copy_(source)
    source.fill_(9)
    torch.cuda.synchronize()
    assert target.tolist() == [9, 9]


def test_copies_between_devices_are_ordered_on_both():
    source = torch.ones(2, device="cuda:0")
    target = torch.zeros(2, device="cuda:1")
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert (target + 1).tolist() == [2, 2]


def test_events_are_over_when_their_stream_is(side):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    assert start.query(), "an event that was never recorded"
    with torch.cuda.stream(side):
        start.record()
        torch.zeros(2).pin_memory().copy_(torch.ones(2, device="cuda"), non_blocking=True)
        end.record()
    assert start.query() and not side.query()
    with pytest.raises((RuntimeError, ValueError), match="not ready|must be recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(end)
    while not end.query():  # polling ends
        pass
    assert start.elapsed_time(end) >= 0 and side.query()


def test_a_sleeping_kernel_occupies_its_stream():
    torch.cuda._sleep(1000)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.cuda.current_stream().query()


def test_a_raw_handle_follows_what_is_queued(side):
    """Extensions launch their kernels on it, behind PyTorch's back."""
    host = torch.zeros(2).pin_memory()
    with torch.cuda.stream(side):
        host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    assert side.cuda_stream == side.stream_id and host.tolist() == [1, 1]
    assert torch.cuda.default_stream().cuda_stream == 0


def test_streams_belong_to_threads_and_devices(side):
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        with torch.cuda.device(1):
            assert torch.cuda.current_stream() == torch.cuda.default_stream(1)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_gradients_of_a_side_stream_are_waited_for(side):
    """The autograd engine runs on the streams of the forward pass, and orders them."""
    weight = torch.ones(2, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weight * 3).sum()
    loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    assert weight.grad.tolist() == [3, 3]


def test_races_can_be_left_unreported():
    script = """
import torch
side = torch.cuda.Stream()
target = torch.zeros(2, device="cuda")
with torch.cuda.stream(side):
    target.copy_(torch.ones(2).pin_memory(), non_blocking=True)
print((target + 1).isnan().all().item())
"""
    found, left = (run("-P", "-c", script, timeout=120, environment={"HOSTCUDA_RACES": r}) for r in "10")
    assert found.returncode and "race" in found.stderr and left.stdout == "True\n"
