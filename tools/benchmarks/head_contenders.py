"""From hidden states to a policy loss and back, forward and backward of the output layer, as everybody does
it (bench_kernels.py)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from turns import CUDA, DEVICE, Case, Contender

from megarl.algorithms.base import LossInputs
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.ratio_transforms import TRANSFORMS
from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss
from megarl.kernels.linear_log_probs import linear_log_probs
from megarl.kernels.policy_loss import PolicyLossOptions, policy_loss

DTYPE = torch.bfloat16 if CUDA else torch.float32
CLIPS = dict(clip_eps_low=0.2, clip_eps_high=0.28)


def eager_policy_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """PPO's clipped loss in plain PyTorch, in the dtype of log_probs."""
    ratio = (log_probs - old.to(log_probs.dtype)).exp()
    clipped = ratio.clamp(1 - CLIPS["clip_eps_low"], 1 + CLIPS["clip_eps_high"])
    return (torch.maximum(-advantages * ratio, -advantages * clipped) * weights).sum()


def sizes(small: bool) -> tuple[int, int, int]:
    """Return the numbers of tokens and hidden values, and the vocabulary size, of a case."""
    if small:
        return 128, 64, 1000
    return (32768, 4096, 152064) if CUDA else (2048, 1024, 32000)


def head_case(small: bool, entropy_coef: float = 0.0, idle: float = 0.0) -> Case:
    """The case "output layer". A share `idle` of the sequences has no advantage, as groups of equal rewards
    have not."""
    num_tokens, num_hidden, vocab_size = sizes(small)
    head = Head.random(num_tokens, num_hidden, vocab_size, entropy_coef, idle)
    contenders = [
        Contender("fused_linear_policy_loss", head.fused, is_megarl=True),
        Contender("linear_log_probs", head.recompute, is_megarl=True),
        Contender("naive", head.naive),
        Contender("torch.compile", head.compiled()),
    ]
    if entropy_coef == 0:  # these have none
        contenders += [
            Contender("cut-cross-entropy", head.cut_cross_entropy),
            Contender("liger grpo", head.liger),
        ]
    contenders.append(Contender("three matrix products", head.matrix_products))
    title = f"output layer, forward and backward: T={num_tokens} H={num_hidden} V={vocab_size} {DTYPE}"
    more = (", with entropy" if entropy_coef else "") + (
        f", {idle:.0%} of the sequences without advantage" if idle else ""
    )
    return Case(title + more, contenders, head.float64)


def losses_case(small: bool) -> Case:
    """The case "output layer" with every policy loss of `grpo` that looks at tokens alone, by itself and with
    truncated importance weights: the same layer, so the same memory and time."""
    num_tokens, num_hidden, vocab_size = sizes(small)
    head = Head.random(num_tokens, num_hidden, vocab_size, entropy_coef=0.0, idle=0.0)
    contenders = [
        Contender(
            name + (", tis" if tis_clip else ""),
            functools.partial(head.fused_with, name, tis_clip),
            is_megarl=True,
        )
        for tis_clip in (None, 2.0)
        for name, transform in TRANSFORMS.items()
        if transform.token_level
    ]
    title = f"policy losses in the fused output layer: T={num_tokens} H={num_hidden} V={vocab_size} {DTYPE}"
    return Case(title, contenders, head.float64)


@dataclass(frozen=True)
class Head:
    hidden: Tensor
    """[T, H], and `weight` [V, H]: require gradients, which every contender makes anew."""
    weight: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    """[T] fp32, the same for all tokens of a sequence: Liger takes one per sequence."""
    tokens_per_sequence: int
    entropy_coef: float

    @classmethod
    def random(
        cls, num_tokens: int, num_hidden: int, vocab_size: int, entropy_coef: float, idle: float
    ) -> Head:
        options = dict(generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
        hidden = (torch.randn(num_tokens, num_hidden, **options) * 0.5).to(DTYPE)
        weight = (torch.randn(vocab_size, num_hidden, **options) * 0.05).to(DTYPE)
        targets = torch.randint(0, vocab_size, (num_tokens,), **options)
        tokens_per_sequence = min(1024, num_tokens // 2)
        advantages = torch.randn(num_tokens // tokens_per_sequence, **options)
        advantages[: int(idle * len(advantages))] = 0
        old, _ = linear_log_probs(hidden, weight, targets, vocab_size=vocab_size)
        return cls(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            targets,
            old,
            advantages.repeat_interleave(tokens_per_sequence),
            tokens_per_sequence,
            entropy_coef,
        )

    @property
    def options(self) -> dict:
        return dict(vocab_size=len(self.weight), with_entropy=self.entropy_coef != 0)

    @property
    def weights(self) -> Tensor:
        return torch.full_like(self.advantages, 1 / len(self.advantages))

    def loss(self, log_probs: Tensor, entropy: Tensor | None, rows: slice) -> tuple[Tensor, dict]:
        """Of some of the T rows; a `TokenLoss`."""
        options = PolicyLossOptions(**CLIPS, entropy_coef=self.entropy_coef)
        columns = (log_probs.float(), self.old[rows], self.advantages[rows], self.weights[rows])
        return policy_loss(*columns, options, entropy=entropy)[0], {}

    def backward(self, value: Tensor, log_probs: Tensor | None = None) -> dict[str, Tensor]:
        value.backward()
        out = {"dhidden": self.hidden.grad, "dweight": self.weight.grad}
        self.hidden.grad = self.weight.grad = None
        return out if log_probs is None else out | {"log_probs": log_probs.detach()}

    def through_log_probs(self, log_probs: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
        return self.backward(self.loss(log_probs, entropy, slice(None))[0], log_probs)

    def fused(self) -> dict[str, Tensor]:
        out = fused_linear_policy_loss(self.hidden, self.weight, self.targets, self.loss, **self.options)
        return self.backward(out.loss, out.log_probs)

    def fused_with(self, policy_loss: str, tis_clip: float | None) -> dict[str, Tensor]:
        """Run the fused head with the loss of a training job. On policy all have the gradient of PPO's, unless
        importance weights change it; what is compared with float64 leaves it out then."""
        algorithm = GRPO(
            policy_loss=policy_loss, tis_clip=tis_clip, kl_coef=0.0, loss_aggregation="token-mean"
        )
        length = torch.full_like(self.targets, self.tokens_per_sequence)
        ids = torch.arange(len(length), device=DEVICE) // self.tokens_per_sequence
        columns = dict(
            old_log_probs=self.old,
            rollout_log_probs=self.old + 0.1 * torch.sin(self.targets),
            advantages=self.advantages,
            selected_tokens=torch.zeros_like(self.old),
            response_lengths=length,
            sequence_ids=ids,
        )

        def loss(log_probs: Tensor, entropy: Tensor | None, rows: slice) -> tuple[Tensor, dict]:
            own = {name: column[rows] for name, column in columns.items()}
            sizes = dict(num_tokens=len(length), num_sequences=int(ids[-1]) + 1)
            limits = dict(max_response_length=self.tokens_per_sequence, kl_coef=0.0)
            return algorithm.loss(LossInputs(log_probs=log_probs, **own, **sizes, **limits))

        out = fused_linear_policy_loss(self.hidden, self.weight, self.targets, loss, **self.options)
        values = self.backward(out.loss, out.log_probs)
        return values if tis_clip is None else {"log_probs": values["log_probs"]}

    def recompute(self) -> dict[str, Tensor]:
        return self.through_log_probs(
            *linear_log_probs(self.hidden, self.weight, self.targets, **self.options)
        )

    def naive_log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        log_p = torch.log_softmax(
            (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)), -1
        )
        entropy = -(log_p.exp() * log_p).sum(-1) if self.entropy_coef else None
        return log_p.gather(1, targets[:, None])[:, 0], entropy

    def naive(self) -> dict[str, Tensor]:
        return self.through_log_probs(*self.naive_log_probs(self.hidden, self.weight, self.targets))

    def compiled(self) -> Callable[[], dict[str, Tensor]]:
        log_probs = torch.compile(self.naive_log_probs, dynamic=False)
        return lambda: self.through_log_probs(*log_probs(self.hidden, self.weight, self.targets))

    def cut_cross_entropy(self) -> dict[str, Tensor]:
        linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        impl = dict(impl="cce", filter_eps=None) if CUDA else dict(impl="torch_compile")
        return self.through_log_probs(
            -linear_cross_entropy(self.hidden, self.weight, self.targets, reduction="none", **impl), None
        )

    def liger(self) -> dict[str, Tensor]:
        """Its mean over all tokens; it walks over sequences, which have no padding here. Its log-probs stay
        inside."""
        module = importlib.import_module("liger_kernel.chunked_loss")
        shape = (-1, self.tokens_per_sequence)
        clips = dict(epsilon_low=CLIPS["clip_eps_low"], epsilon_high=CLIPS["clip_eps_high"])
        head = module.LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=CUDA, use_ref_model=False, loss_type="bnpo", **clips
        )
        targets, advantages = self.targets.view(shape), self.advantages.view(shape)
        value, _ = head(
            self.hidden.view(*targets.shape, -1),
            self.weight,
            targets,
            torch.ones_like(advantages),
            advantages[:, 0],
            old_per_token_logps=self.old.view(shape),
        )
        return self.backward(value)

    @torch.no_grad()
    def matrix_products(self) -> dict[str, Tensor]:
        logits = self.hidden @ self.weight.t()
        logits @ self.weight, logits.t() @ self.hidden
        return {}

    def float64(self) -> dict[str, Tensor]:
        """512 rows at a time, by autograd, with a loss in plain PyTorch."""
        wide = [x.detach().double().requires_grad_() for x in (self.hidden, self.weight)]
        log_probs, gradients = (
            torch.empty(len(self.hidden), dtype=torch.float64, device=DEVICE),
            [torch.zeros_like(x) for x in wide],
        )
        for first in range(0, len(self.hidden), 512):
            rows = slice(first, first + 512)
            out, entropy = self.naive_log_probs(wide[0][rows], wide[1], self.targets[rows])
            loss = eager_policy_loss(out, self.old[rows], self.advantages[rows], self.weights[rows])
            if entropy is not None:
                loss = loss - self.entropy_coef * (self.weights[rows] * entropy).sum()
            log_probs[rows] = out.detach()
            for total, gradient in zip(gradients, torch.autograd.grad(loss, wide)):
                total += gradient
        return {"log_probs": log_probs, "dhidden": gradients[0], "dweight": gradients[1]}
