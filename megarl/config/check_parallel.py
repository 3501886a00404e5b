"""Rules about one Megatron role: its ranks, its parallel sizes and the shape of its model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from megarl.config.flags import flag_name
from megarl.config.hf_config import ModelShape
from megarl.config.schema import ParallelConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class MegatronRole:
    """What the rules look at.

    Args:
        name: actor, critic, reference, or reward.
        ranks: None if their flag is wrong, which is reported elsewhere.
        shape: of its model, None if config.json could not be used.
        shared: names of flags whose value every Megatron role has: findings then name the flag of all
            roles."""

    name: str
    parallel: ParallelConfig
    ranks: tuple[int, ...] | None
    shape: ModelShape | None
    shared: frozenset[str]

    def flag(self, field: str) -> str:
        """--critic-tensor-model-parallel-size, or without the role where all agree."""
        return f"--{flag_name(field)}" if field in self.shared else f"--{self.name}-{flag_name(field)}"

    @property
    def tp(self) -> int:
        return self.parallel.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.parallel.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        return self.parallel.virtual_pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        return self.parallel.context_parallel_size


def agreed_fields(config: TrainConfig, roles: Iterable[str]) -> frozenset[str]:
    """Fields of ParallelConfig that have one value for all these roles."""
    nodes = [getattr(config, role) for role in roles]
    return frozenset(
        f.name for f in fields(ParallelConfig) if len({getattr(node, f.name) for node in nodes}) == 1
    )


def parallel_findings(role: MegatronRole) -> Iterator[str]:
    """Every rule that the role breaks."""
    yield from _recompute(role)
    yield from _ranks(role)
    yield from _virtual_pipeline(role)
    if role.shape is not None:
        yield from split_findings(
            role.shape,
            role.tp,
            role.pp,
            role.flag("tensor_model_parallel_size"),
            role.flag("pipeline_model_parallel_size"),
            len(role.ranks or ()) // role.cp,
        )
        yield from _experts(role)
        if role.parallel.qkv_layout == "stacked" and role.shape.is_mla:
            yield (
                f"{role.flag('qkv_layout')} (stacked): {role.shape.model_type} has latent "
                "attention, and no linear_qkv. Leave it out."
            )
        elif role.parallel.qkv_layout == "stacked" and role.shape.num_query_groups % role.tp:
            yield (
                f"{role.flag('qkv_layout')} (stacked): needs whole key-value heads on each rank: "
                f"{role.flag('tensor_model_parallel_size')} "
                f"({role.tp}) must divide the model's ({role.shape.num_query_groups}). Try "
                f"{role.flag('qkv_layout')} grouped."
            )


def _ranks(role: MegatronRole) -> Iterator[str]:
    if role.parallel.sequence_parallel and role.tp == 1:
        yield (
            f"{role.flag('sequence_parallel')}: needs {role.flag('tensor_model_parallel_size')} "
            "above 1. Leave it out, or try "
            f"{role.flag('tensor_model_parallel_size')} 2."
        )
    if role.shape is not None and any(split_findings(role.shape, role.tp, role.pp)):
        return  # no number of ranks would help; `split_findings` says what does
    size, ranks = role.tp * role.cp * role.pp, role.ranks
    sizes = {
        "tensor_model_parallel_size": role.tp,
        **({"context_parallel_size": role.cp} if role.cp > 1 else {}),
        "pipeline_model_parallel_size": role.pp,
    }
    product = " x ".join(f"{role.flag(field)} ({value})" for field, value in sizes.items()) + f" = {size}"
    if ranks and len(ranks) < size:
        yield (
            f"{product}: needs as many ranks, and the {role.name} has {len(ranks)}. Try "
            f"--nproc-per-node {size}."
        )
    elif ranks and len(ranks) % size:
        yield (
            f"{product}: must divide the {role.name}'s ranks ({len(ranks)}). Try --nproc-per-node "
            f"{len(ranks) // size * size}."
        )


def _virtual_pipeline(role: MegatronRole) -> Iterator[str]:
    flag, pp_flag = (
        role.flag("virtual_pipeline_model_parallel_size"),
        role.flag("pipeline_model_parallel_size"),
    )
    if role.vpp > 1 and role.pp == 1:
        halves = role.shape is None or role.shape.num_layers % (2 * role.vpp) == 0
        yield (
            f"{flag} ({role.vpp}): needs {pp_flag} above 1, stages that take turns. Leave it "
            f"out{f', or try {pp_flag} 2' if halves else ''}."
        )
    elif (
        role.shape is not None
        and role.shape.num_layers % role.pp == 0
        and role.shape.num_layers // role.pp % role.vpp
    ):
        stage = role.shape.num_layers // role.pp
        yield (
            f"{flag} ({role.vpp}): must divide the {role.name}'s layers per pipeline stage "
            f"({stage}).{try_(divisors(stage), role.vpp)}"
        )


def _recompute(role: MegatronRole) -> Iterator[str]:
    """As TransformerConfig.__post_init__ and TransformerBlock demand, and what they would silently ignore."""
    parallel, flag = role.parallel, role.flag
    granularity, layers = parallel.recompute_granularity, parallel.recompute_num_layers
    for field, value in {
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": layers,
    }.items():
        if granularity == "full" and value is None:
            yield (
                f"{flag('recompute_granularity')} (full): needs {flag(field)}. Try "
                f"{flag('recompute_method')} uniform "
                f"{flag('recompute_num_layers')} 1."
            )
        if granularity != "full" and value is not None:
            yield (
                f"{flag(field)} ({value}): has no effect without {flag('recompute_granularity')} "
                "full. Leave it out, or set that."
            )
    if parallel.recompute_modules is not None and granularity != "selective":
        modules = " ".join(parallel.recompute_modules)
        yield (
            f"{flag('recompute_modules')} ({modules}): has no effect without "
            f"{flag('recompute_granularity')} selective. Leave it out, or "
            "set that."
        )
    if role.shape is not None and granularity == "full" and layers is not None:
        held, what = (
            max(1, role.shape.num_layers // (role.pp * role.vpp)),
            "model chunk" if role.vpp > 1 else "pipeline stage",
        )
        if layers > held:
            yield (
                f"{flag('recompute_num_layers')} ({layers}): must be at most the {role.name}'s "
                f"layers per {what} ({held}). Try {held}."
            )


def _experts(role: MegatronRole) -> Iterator[str]:
    """How the role's mixture of experts is split, if it is one."""
    parallel, shape, ranks, flag = role.parallel, role.shape, role.ranks, role.flag
    tp, pp, ep = role.tp, role.pp, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if shape.is_dense:
        for field in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (value := getattr(parallel, field)) not in (None, 1):
                yield (
                    f"{flag(field)} ({value}): needs a mixture of experts, and {shape.model_type} "
                    "is none. Leave it out."
                )
        return
    ep_flag, etp_flag = flag("expert_model_parallel_size"), flag("expert_tensor_parallel_size")
    if shape.num_moe_experts % ep:
        yield (
            f"{ep_flag} ({ep}): must divide the model's num_experts "
            f"({shape.num_moe_experts}).{try_(divisors(shape.num_moe_experts), ep)}"
        )
    if shape.moe_ffn_hidden_size % etp:
        yield (
            f"{etp_flag} ({etp}): must divide the model's moe_intermediate_size "
            f"({shape.moe_ffn_hidden_size})."
            f"{try_(divisors(shape.moe_ffn_hidden_size), etp)}"
        )
    if ranks and len(ranks) % (tp * role.cp * pp) == 0 and len(ranks) // pp % (etp * ep):
        stage = len(ranks) // pp
        fits = [n for n in divisors(shape.num_moe_experts) if stage % (etp * n) == 0]
        yield (
            f"{ep_flag} ({ep}) x {etp_flag} ({etp}) = {ep * etp}: must divide the ranks of a "
            f"pipeline stage ({stage})."
            f"{try_(fits, ep) or f' Try {etp_flag} 1.'}"
        )
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"{flag('tensor_model_parallel_size')} ({tp}): Megatron trains a mixture of experts "
            "with tensor parallelism only together with "
            f"sequence parallelism. Try {flag('sequence_parallel')}."
        )


def split_findings(
    shape: ModelShape,
    tp: int,
    pp: int,
    tp_flag: str = "--tensor-model-parallel-size",
    pp_flag: str = "--pipeline-model-parallel-size",
    num_ranks: int = 0,
) -> Iterator[str]:
    """Why Megatron cannot split the dense part of the model over `tp` x `pp` ranks. `num_ranks`: what is
    proposed divides it; 0: not known."""
    sizes, groups = split_sizes(shape), shape.num_query_groups
    fits = [
        n
        for n in divisors(shape.num_attention_heads)
        if _shares_heads(groups, n) and not any(size % n for size in sizes.values())
    ]
    fits = [n for n in fits if num_ranks % (n * pp) == 0] or fits
    for name, size in sizes.items():
        if size % tp:
            yield f"{tp_flag} ({tp}): must divide the model's {name} ({size}).{try_(fits, tp)}"
    if not _shares_heads(groups, tp):
        yield (
            f"{tp_flag} ({tp}): must divide the model's key-value heads ({groups}), or be a "
            f"multiple of them.{try_(fits, tp)}"
        )
    if shape.num_layers % pp:
        stages = [n for n in divisors(shape.num_layers) if num_ranks % (n * tp) == 0] or divisors(
            shape.num_layers
        )
        yield f"{pp_flag} ({pp}): must divide the model's layers ({shape.num_layers}).{try_(stages, pp)}"


def _shares_heads(groups: int, tp: int) -> bool:
    """Each rank has whole key-value heads, or as many ranks as any other share one."""
    return groups % tp == 0 or tp % groups == 0


def split_sizes(shape: ModelShape) -> dict[str, int]:
    """What every tensor-parallel split cuts into equal parts. Experts are split otherwise."""
    return {
        "attention heads": shape.num_attention_heads,
        **({"intermediate_size": shape.ffn_hidden_size} if shape.is_dense or shape.dense_layers else {}),
        **(
            {"shared experts' intermediate size": shape.moe_shared_expert_intermediate_size}
            if shape.is_moe and shape.moe_shared_expert_intermediate_size
            else {}
        ),
        "vocabulary, padded to a multiple of 64": shape.padded_vocab_size(),
    }


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def try_(values: Iterable[int], near: int) -> str:
    """' Try 64 or 128.': the two values nearest to the refused one."""
    nearest = sorted(sorted(set(values), key=lambda value: abs(value - near))[:2])
    return f" Try {' or '.join(map(str, nearest))}." if nearest else ""
