"""Inputs and bounds for the ops that take hidden states and the output layer."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def make_case(num_tokens, num_hidden, vocab_size, num_columns=None, dtype=torch.float32, shift=0.0, seed=0):
    """(hidden [N, H], weight [columns, H], targets [N], cotangents [2, N]). `shift` moves all logits of the
    vocabulary; targets hit both its ends, so also the last, partly filled tile; padding rows would take all
    probability."""
    generator = torch.Generator().manual_seed(seed + num_tokens * 7919 + vocab_size)
    num_columns = num_columns or vocab_size
    hidden = torch.randn(num_tokens, num_hidden, generator=generator)
    weight = torch.randn(num_columns, num_hidden, generator=generator) * 3 / num_hidden**0.5
    hidden[:, 0], weight[:, 0] = 1, shift
    weight[vocab_size:, 0] = 1e4
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets[:1], targets[-1:] = 0, vocab_size - 1
    cotangents = torch.randn(2, num_tokens, generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, cotangents


def assert_at_most_twice_the_error(actual, of_torch, expected, slack):
    """`of_torch` is plain PyTorch in the dtype of the inputs; `slack`: units in the last place, since its
    error may be 0 by luck."""
    error, torch_error = (
        (x.detach().double() - expected.detach()).abs().max().item() if x.numel() else 0.0
        for x in (actual, of_torch)
    )
    assert error <= 2 * torch_error + slack, (
        f"error {error:.3g}, PyTorch's {torch_error:.3g}, slack {slack:.3g}"
    )


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


class PeakBytes(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive at one time, at the worst moment. Counted, not
    measured: always the same."""

    peak = 0

    def __enter__(self):
        self.sizes = {}
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(
                tensor, torch.Tensor
            ):  # one that no operation in here has returned was there before
                self.sizes.setdefault(StorageWeakRef(tensor.untyped_storage()), 0)
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out
