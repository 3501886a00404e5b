"""One rank of test_log_probs_tensor_parallel.py: python run_tensor_parallel.py RANK WORLD_SIZE INIT_FILE.
Fails by traceback."""

import datetime
import itertools
import os
import sys

import torch
import torch.distributed as dist

from megarl.kernels import linear_head
from megarl.kernels.divergence import Divergence, TeacherHead, TeacherTopK, divergence_ref, teacher_top_k
from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss, fused_linear_policy_loss_ref
from megarl.kernels.linear_log_probs import linear_log_probs, linear_log_probs_ref
from megarl.kernels.log_probs import vocab_parallel_log_probs, vocab_parallel_log_probs_ref

WORDS = "real vocabulary of {} in {} columns per rank, entropy {}, {}"


def make_case(vocab_size, num_columns, num_ranks, dtype):
    """The whole logits, the same on every rank; targets include both ends of every rank's columns."""
    generator = torch.Generator().manual_seed(vocab_size)
    ends = [
        c
        for r in range(num_ranks)
        for c in (r * num_columns, (r + 1) * num_columns - 1, vocab_size - 1)
        if c < vocab_size
    ]
    targets = torch.cat([torch.tensor(ends), torch.randint(0, vocab_size, (20,), generator=generator)])
    logits = torch.randn(len(targets), num_columns * num_ranks, generator=generator) * 3
    logits[::4] -= 120
    logits[:, vocab_size:] = 1e4  # padding that would take all probability
    return logits.to(dtype), targets, torch.randn(2, len(targets), generator=generator).to(dtype)


def gradients(outputs, logits, cotangents):
    chosen = [(output, cotangent) for output, cotangent in zip(outputs, cotangents) if output is not None]
    return torch.autograd.grad([o for o, _ in chosen], logits, [c.to(o.dtype) for o, c in chosen])[0]


def check_equal_to_one_rank(group, vocab_size, num_columns, with_entropy, dtype):
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    logits, targets, cotangents = make_case(vocab_size, num_columns, num_ranks, dtype)
    mine = logits[:, rank * num_columns : (rank + 1) * num_columns].clone().requires_grad_()
    options = dict(vocab_size=vocab_size, temperature=0.8)
    outputs = vocab_parallel_log_probs(mine, targets, group=group, with_entropy=with_entropy, **options)
    whole = logits.double().requires_grad_()
    expected = vocab_parallel_log_probs_ref(whole, targets, **options)
    wanted = gradients(expected if with_entropy else expected[:1], whole, cotangents)
    # fp32 at logits of 120: half a unit in the last place of a logit is 4e-6, and the division by 0.8 adds
    # one more rounding.
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    for output, want in zip(outputs, expected):
        if output is not None:
            assert (output - want).abs().max() <= tolerance, (output - want).abs().max()
    difference = (
        gradients(outputs, mine, cotangents) - wanted[:, rank * num_columns : (rank + 1) * num_columns]
    )
    assert difference.abs().max() <= tolerance, difference.abs().max()
    gathered = [torch.empty_like(outputs[0]) for _ in range(num_ranks)]
    dist.all_gather(gathered, outputs[0].detach(), group=group)
    assert all(torch.equal(other, gathered[0]) for other in gathered), "ranks disagree on the log-probs"


def check_banned_shards(group, with_entropy, dtype):
    """Rows of which a rank has -inf logits alone: as if it had no columns there, whatever rank it is. Where
    all ranks have: NaN."""
    rank, num_ranks, num_columns = dist.get_rank(group), dist.get_world_size(group), 16
    logits, targets, cotangents = make_case(num_columns * num_ranks, num_columns, num_ranks, dtype)
    rows, columns = torch.arange(len(targets)), torch.arange(num_columns * num_ranks)
    of_rank = columns // num_columns
    logits[(rows[:, None] % num_ranks) == of_rank] = -torch.inf  # each row is dead on one rank
    logits[5] = -torch.inf
    mine = logits[:, rank * num_columns : (rank + 1) * num_columns].clone().requires_grad_()
    outputs = vocab_parallel_log_probs(
        mine, targets, vocab_size=num_columns * num_ranks, group=group, with_entropy=with_entropy
    )
    whole = logits.double().requires_grad_()
    log_p = torch.log_softmax(whole, -1)
    expected = log_p[rows, targets], -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)
    is_dead = rows == 5
    is_banned = expected[0].isneginf()
    assert is_banned.sum() > 3 and (~is_banned).sum() > 10
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    for output, want in zip(outputs, expected):
        if output is not None:
            assert output[is_dead].isnan().all(), output[is_dead]
            torch.testing.assert_close(output[~is_dead].double(), want[~is_dead], rtol=0, atol=tolerance)
    live = ~is_dead & ~is_banned  # the gradient of a log-prob of -inf is of no use to anybody
    outputs = [None if output is None else output[live] for output in outputs]
    found = gradients(outputs, mine, cotangents[:, live])[live]
    of_whole = torch.where(log_p > -torch.inf, log_p, 0.0)
    entropy = -(torch.where(log_p > -torch.inf, log_p.exp(), 0.0) * of_whole).sum(-1)
    wanted = gradients(
        (log_p[rows, targets][live], entropy[live] if with_entropy else None),
        whole,
        cotangents[:, live].double(),
    )
    wanted = wanted[live][:, rank * num_columns : (rank + 1) * num_columns].nan_to_num(
        0.0
    )  # autograd through -inf: 0 * inf
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


def loss_of_tokens(log_probs, entropy, rows):
    """A sum over tokens; every third one has no gradient, and is left out of the backward products."""
    weights = torch.arange(rows.start, rows.stop).remainder(3).to(log_probs.dtype)
    return -(weights * log_probs).sum() if entropy is None else (weights * (entropy - log_probs)).sum(), {}


def check_linear_heads(group, vocab_size, num_columns, with_entropy, dtype, num_hidden=8):
    """Both ways through the output layer, whose rows are split: values, gradient of all hidden states, of
    this rank's rows."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    _, targets, cotangents = make_case(vocab_size, num_columns, num_ranks, dtype)
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(len(targets), num_hidden, generator=generator).to(dtype)
    weight = torch.randn(num_columns * num_ranks, num_hidden, generator=generator).to(dtype)
    hidden[:, 0], weight[:vocab_size, 0], weight[vocab_size:, 0] = 1, -120, 1e4
    options = dict(vocab_size=vocab_size, temperature=0.8, with_entropy=with_entropy)
    part = slice(rank * num_columns, (rank + 1) * num_columns)
    mine = [hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()]
    whole = [hidden.double().requires_grad_(), weight.double().requires_grad_()]

    def compare(outputs, expected, cotangents):
        chosen = [(o, e, c) for o, e, c in zip(outputs, expected, cotangents) if o is not None]
        grads = torch.autograd.grad([o for o, _, _ in chosen], mine, [c.to(o.dtype) for o, _, c in chosen])
        wanted = torch.autograd.grad(
            [e for _, e, _ in chosen], whole, [c.double() for _, _, c in chosen], retain_graph=True
        )
        # fp32: a logit of 120 / 0.8 is exact to 8e-6. A gradient of a hidden state is a sum of p times
        # weights of 120, whose terms cancel up to the rounding of p and of the entropy, some 1e-6.
        for got, want, bound in [(o, e, 3e-5) for o, e, _ in chosen] + [
            (grads[0], wanted[0], 1e-3),
            (grads[1], wanted[1][part], 3e-5),
        ]:
            tolerance = (bound if dtype == torch.float32 else 1e-10) * max(1, want.abs().max().item())
            assert (got - want).abs().max() <= tolerance, (got - want).abs().max()

    for method in ("fastest", "chunked"):
        with torch.no_grad():  # "fastest" has tiles here, if all ranks can
            for got, want in zip(
                linear_log_probs(*mine, targets, group=group, method=method, **options),
                linear_log_probs_ref(*whole, targets, vocab_size=vocab_size, temperature=0.8),
            ):
                assert got is None or (got - want).abs().max() <= (
                    6e-5 if dtype == torch.float32 else 1e-11
                ), (got - want).abs().max()
        outputs = linear_log_probs(*mine, targets, group=group, method=method, **options)
        compare(
            outputs, linear_log_probs_ref(*whole, targets, vocab_size=vocab_size, temperature=0.8), cotangents
        )
    old = outputs[0].detach()
    expected = fused_linear_policy_loss_ref(*whole, targets, loss_of_tokens, **options).loss
    fused = fused_linear_policy_loss(*mine, targets, loss_of_tokens, group=group, **options)
    assert torch.equal(fused.log_probs, old), "fused and chunked log-probs differ"
    compare([fused.loss], [expected], [torch.ones(())])
    gathered = [torch.empty_like(old) for _ in range(num_ranks)]
    dist.all_gather(gathered, old, group=group)
    assert all(torch.equal(other, gathered[0]) for other in gathered), "ranks disagree on the log-probs"


def check_divergence(group, vocab_size, num_columns, dtype, num_hidden=8):
    """Divergences from a teacher whose output layer is split, and from its most likely tokens of all
    ranks."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(vocab_size)
    draw = lambda *size: torch.randn(*size, generator=generator).to(dtype)
    hidden, weight = draw(25, num_hidden), 0.4 * draw(num_columns * num_ranks, num_hidden)
    of_teacher = draw(25, 12), 0.4 * draw(num_columns * num_ranks, 12)
    targets = torch.randint(0, vocab_size, (25,), generator=generator)
    part, factors = slice(rank * num_columns, (rank + 1) * num_columns), torch.linspace(0.1, 1, 25).to(dtype)
    options = dict(vocab_size=vocab_size, temperature=0.8)
    for kind, top_k in itertools.product(("reverse-kl", "forward-kl", "jsd"), (None, 3)):
        if top_k is not None and vocab_size <= top_k:
            continue
        divergence, mine = Divergence(kind, 0.3), (of_teacher[0], of_teacher[1][part], targets)
        if top_k is None:
            teacher = TeacherHead(*mine, divergence, group=group, **options)
        else:
            ids, log_probs = teacher_top_k(*mine, top_k, group=group, **options)
            teacher = TeacherTopK(ids - rank * num_columns, log_probs, divergence)
        inputs = hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()
        loss = lambda _, values, rows: ((values * factors[rows]).sum(), {})
        fused = fused_linear_policy_loss(*inputs, targets, loss, group=group, teacher=teacher, **options)
        found = torch.autograd.grad(fused.loss, inputs)
        whole = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logits = whole[0] @ whole[1].T, of_teacher[0].double() @ of_teacher[1].double().T
        values = divergence_ref(*logits, divergence=divergence, top_k=top_k, **options)
        expected = (values * factors.double()).sum()
        of_hidden, of_weight = torch.autograd.grad(expected, whole)
        # logits of some units: fp32 is right to 1e-6, and a gradient is a sum of some tens of such numbers
        tolerance = 2e-5 if dtype == torch.float32 else 1e-11
        for got, want in ((fused.loss, expected), (found[0], of_hidden), (found[1], of_weight[part])):
            assert (got - want).abs().max() <= tolerance * max(1, want.abs().max().item()), (kind, top_k)


def count_collectives(group, num_tokens, with_entropy):
    """Calls of all_reduce, forward and backward, which go through to the real one."""
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, op, group: (
        calls.append((op, tensor.numel())),
        all_reduce(tensor, op, group=group),
    )
    try:
        logits = torch.zeros(num_tokens, 4, requires_grad=True)
        targets = torch.zeros(num_tokens, dtype=torch.int64)
        outputs = vocab_parallel_log_probs(
            logits, targets, vocab_size=4, group=group, with_entropy=with_entropy
        )
        gradients(outputs, logits, torch.ones(2, num_tokens))
    finally:
        dist.all_reduce = all_reduce
    return calls


def interpret_quickly():
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from quick_interpreter import adapt_once
    from triton.runtime import interpreter

    interpreter._patch_lang = adapt_once


def main(rank, world_size, init_file):
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size, timeout=timeout
    )
    pair = dist.new_group(list(range(world_size)))
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    linear_head._CHUNK_ELEMENTS_CPU, linear_head._MIN_ROWS_CPU = 1, 10
    # Real columns per rank: equal, last rank with fewer, last rank with one, last rank with none, first rank
    # with one only.
    sizes = [16 * world_size, 16 * world_size - 5, 16 * (world_size - 1) + 1, 16 * (world_size - 1), 1]
    dtypes = [torch.float32, torch.float64]
    if os.environ["MEGARL_KERNELS"] == "interpret":  # slow, and float64 is PyTorch's anyway
        interpret_quickly()
        sizes, dtypes = sizes[1:4] if world_size == 2 else sizes[1:2], dtypes[:1]
    for vocab_size, with_entropy, dtype in itertools.product(sizes, [False, True], dtypes):
        try:
            check_equal_to_one_rank(pair, vocab_size, 16, with_entropy, dtype)
            check_linear_heads(pair, vocab_size, 16, with_entropy, dtype)
            if not with_entropy:
                check_divergence(pair, vocab_size, 16, dtype)
        except AssertionError as error:
            raise AssertionError(WORDS.format(vocab_size, 16, with_entropy, dtype)) from error
    for with_entropy, dtype in itertools.product([False, True], dtypes):
        check_banned_shards(pair, with_entropy, dtype)
    check_equal_to_one_rank(alone, 13, 16, True, torch.float32)
    for num_stats, with_entropy in ((2, False), (3, True)):
        expected = [(dist.ReduceOp.MAX, 5), (dist.ReduceOp.SUM, num_stats * 5)]
        assert count_collectives(pair, 5, with_entropy) == expected
        assert count_collectives(pair, 0, with_entropy) == count_collectives(alone, 5, with_entropy) == []
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
