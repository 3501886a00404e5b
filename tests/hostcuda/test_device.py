"""The emulated device answers and computes as a GPU does, and refuses what a GPU refuses. Its streams are
tested by test_streams.py.

make test-hostcuda ARGS=tests/hostcuda/test_device.py"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from tests.launch import run, succeed

CUDA = torch.device("cuda", 0)


@pytest.fixture
def second() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.fail("make test-hostcuda sets HOSTCUDA_DEVICES=4")
    return torch.device("cuda", 1)


def ones(*shape: int, device: torch.device | str = CUDA) -> torch.Tensor:
    return torch.ones(shape, device=device)


def test_tensors_are_cuda_tensors():
    tensor = torch.randn(3, 4, device="cuda")
    assert tensor.is_cuda and tensor.device == CUDA and tensor.type() == "torch.cuda.FloatTensor"
    assert isinstance(tensor, torch.cuda.FloatTensor)
    assert (
        (tensor.t() @ tensor).device
        == tensor[1:].clone().device
        == torch.arange(3, device="cuda").device
        == CUDA
    )
    assert tensor.cpu().device.type == tensor.new_zeros(2, device="cpu").device.type == "cpu"
    assert torch.ones(2).cuda().is_cuda and torch.nn.Linear(2, 2).cuda().weight.is_cuda
    assert torch.ones(2).to("cuda", torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"


MIXED = {
    "add": lambda: ones(3) + torch.ones(3),
    "add_ in place": lambda: torch.ones(3).add_(ones(3)),
    "result on the CPU": lambda: torch.tensor(1.0).add_(ones(1)[0]),
    "matrix product": lambda: ones(3, 3) @ torch.ones(3, 3),
    "cat": lambda: torch.cat([ones(3), torch.ones(3)]),
    "stack of a scalar": lambda: torch.stack([ones(1)[0], torch.tensor(1.0)]),
    "where": lambda: torch.where(torch.ones(3) > 0, ones(3), ones(3)),
    "embedding": lambda: F.embedding(torch.tensor([1]), ones(3, 2)),
    "cuda index of a CPU tensor": lambda: torch.ones(3)[torch.tensor([1], device="cuda")],
    "gather": lambda: ones(3).gather(0, torch.tensor([1])),
    "cross entropy": lambda: F.cross_entropy(ones(2, 3), torch.tensor([0, 1])),
    "out": lambda: torch.add(ones(3), ones(3), out=torch.empty(3)),
    "list of an operator": lambda: torch._foreach_add([ones(3)], [torch.ones(3)]),
    "fused Adam with steps on the CPU": lambda: fused_adam("cpu"),
    "generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
}


def fused_adam(device: str) -> None:
    state = [[ones(3)] for _ in range(4)]
    torch._fused_adam_(
        *state,
        [],
        [torch.tensor(1.0, device=device)],
        lr=1e-3,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_operators_refuse_tensors_of_two_devices(mix):
    with pytest.raises(RuntimeError, match="on the same device|two devices|device type for generator"):
        mix()


def test_operators_take_scalars_and_indices_of_the_cpu():
    assert (ones(3) * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert torch.arange(3, device="cuda")[torch.tensor([2, 0])].tolist() == [2, 0]
    changed = ones(3)
    changed[torch.tensor([True, False, True])] = 5
    assert changed.tolist() == [5, 1, 5]
    fused_adam("cuda")


def test_several_devices(second):
    there = ones(3, device=second)
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cuda:1"):
        ones(3) + there
    assert (ones(3) + there.to(CUDA)).device == CUDA and there.clone().device == second
    with torch.cuda.device(second):
        assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").device == second
        assert (there + 1).device == second and ones(2).device == CUDA
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(second)
    try:
        assert torch.ones(1).cuda().device == second and torch.cuda.current_stream().device == second
    finally:
        torch.cuda.set_device(0)
    last = torch.cuda.device_count()
    for use in (
        torch.cuda.set_device,
        torch.cuda.get_device_properties,
        lambda number: ones(1, device=f"cuda:{number}"),
    ):
        with pytest.raises((RuntimeError, AssertionError), match="[Ii]nvalid device"):
            use(last)
    uuids = [torch.cuda.get_device_properties(device).uuid for device in range(last)]
    assert len({*map(str, uuids)}) == last


def test_gradients_are_those_of_the_cpu(second):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )
    inputs, targets = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])

    def gradients(device) -> list[torch.Tensor]:
        copy = torch.nn.Sequential(*[type(m)(*a) for m, a in zip(model, ((8, 16), (), (16,), (16, 4)))])
        copy.load_state_dict(model.state_dict())
        copy.to(device)
        F.cross_entropy(copy(inputs.to(device)), targets.to(device)).backward()
        return [p.grad.cpu() for p in copy.parameters()]

    for device in (CUDA, second):  # the CPU's kernels, called another way: not the last bit
        torch.testing.assert_close(gradients(device), gradients("cpu"), rtol=1e-5, atol=1e-6)


def test_autocast_rounds_to_bf16():
    factors = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cuda", torch.bfloat16):
        product = factors.cuda() @ factors.cuda()
        assert product.dtype == torch.bfloat16 and F.softmax(product, -1).dtype == torch.float32
    assert torch.equal(product.cpu(), factors.bfloat16() @ factors.bfloat16())
    assert torch.cuda.is_bf16_supported()
    both = torch.mm(factors.bfloat16().cuda(), factors.bfloat16().cuda(), out_dtype=torch.float32)
    assert torch.equal(both.cpu(), factors.bfloat16().float() @ factors.bfloat16().float())


def test_random_numbers_have_a_state_per_device(second):
    torch.cuda.manual_seed_all(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(first.cpu(), torch.rand(3, device=second).cpu()), "each device has the seed"
    following = torch.rand(3, device="cuda")
    assert not torch.equal(first, following)
    torch.rand(3)  # of the CPU: changes nothing
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first) and torch.equal(
        torch.rand(3, device="cuda"), following
    )
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(9)
    generator = torch.Generator("cuda").manual_seed(1)
    drawn = [torch.randn(2, device="cuda", generator=generator) for _ in range(2)]
    assert generator.device == CUDA and not torch.equal(*drawn)
    assert torch.equal(torch.randn(2, device="cuda", generator=generator.manual_seed(1)), drawn[0])
    assert 0 < F.dropout(ones(1000), 0.5).count_nonzero() < 1000


def test_memory_is_counted():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1 << 20
    free, total = torch.cuda.mem_get_info()
    assert total == torch.cuda.get_device_properties(0).total_memory == 80 << 30
    assert total - free == torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    pointer = tensor.data_ptr()
    del tensor
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() == before + (1 << 20)
    again = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert again.data_ptr() == pointer, "the allocator gives freed memory to the next tensor of the stream"
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] >= 1 << 20
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(81 << 30, dtype=torch.uint8, device="cuda")


def test_a_storage_changes_its_size_and_keeps_its_tensors():
    tensor = torch.arange(4.0, device="cuda")
    before = torch.cuda.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() < before and tensor.untyped_storage().nbytes() == 0
    tensor.untyped_storage().resize_(16)
    assert tensor.isnan().all(), "nobody may rely on memory that was not written"
    assert tensor.fill_(2).tolist() == [2] * 4
    grown = torch.arange(3, device="cuda").resize_(5)
    assert grown[:3].tolist() == [0, 1, 2]


def test_pinned_memory_is_told_from_pageable():
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and pinned[1:].is_pinned() and torch.ones(4).pin_memory().is_pinned()
    assert not torch.empty(4).is_pinned() and not ones(4).is_pinned()
    assert ones(4).to("cpu", non_blocking=True).is_pinned()


def test_attention_has_the_numbers_of_the_cpu():
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    got = F.scaled_dot_product_attention(query.cuda(), key.cuda(), value.cuda(), is_causal=True)
    assert torch.equal(got.cpu(), wanted)


READER = """
import sys, torch
handle = eval(sys.argv[1])
storage = torch.UntypedStorage._new_shared_cuda(1, *handle[1:])
tensor = torch.empty(0, device=storage.device).set_(storage)
assert tensor.device == torch.device("cuda", 1) and tensor.tolist() == [0.0, 1.0, 2.0], tensor
tensor.mul_(10)
"""


def test_another_process_opens_the_memory(second):
    """As with CUDA's inter-process handles; a process cannot open its own."""
    tensor = torch.arange(3.0, device="cuda")
    handle = tensor.untyped_storage()._share_cuda_()
    succeed("-P", "-c", READER, repr(handle), timeout=120)
    assert tensor.tolist() == [0, 10, 20]
    with pytest.raises(RuntimeError, match="its own IPC handle"):
        torch.UntypedStorage._new_shared_cuda(0, *handle[1:])


FORKED = """
import os, torch
torch.ones(1).cuda()
if os.fork() == 0:
    try:
        torch.ones(1).cuda()
    except RuntimeError as error:
        os._exit(0 if "re-initialize CUDA in forked subprocess" in str(error) else 2)
    os._exit(1)
assert os.waitpid(-1, 0)[1] == 0
"""


def test_a_forked_process_cannot_use_the_device():
    succeed("-P", "-c", FORKED, timeout=120)


def test_a_machine_without_devices_has_no_cuda():
    told = run(
        "-c",
        "import torch; print(torch.cuda.is_available())",
        timeout=120,
        environment={"HOSTCUDA_DEVICES": "0"},
    )
    assert told.stdout == "False\n", told.stderr
    assert os.environ["HOSTCUDA"]


@pytest.mark.parametrize("visible, count", [("", 0), ("2,0,9,1", 2)])
def test_fewer_devices_are_visible(visible, count):
    """The numbers before the first one without a device count, as with CUDA. An empty value leaves none."""
    script = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"
    done = run("-P", "-c", script, timeout=120, environment={"CUDA_VISIBLE_DEVICES": visible})
    assert done.stdout == f"{count} {count > 0}\n", done.stderr
