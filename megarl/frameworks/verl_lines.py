"""Make the lines of an args file that several of verl's settings decide together.

Each function is `lines` of rows of the table in verl.py."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.frameworks.rows import (
    KL_ESTIMATORS,
    TIMES,
    Line,
    Row,
    Settings,
    as_list,
    as_number,
    decaying,
    key_of,
    lora,
    model_folder,
    schedule,
    trackers,
)
from megarl.frameworks.verl_corrections import loss_mode

ACTOR, ROLLOUT, REF, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
)
OVERRIDE = f"{ACTOR}.optim.override_optimizer_config"
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "opo": "opo",
    "gdpo": "gdpo",
}
"""algorithm.adv_estimator -> --algorithm."""
LOSSES = {
    "vanilla": "ppo",
    "cispo": "cispo",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "gpg": "reinforce",
    "dppo_tv": "dppo-tv",
    "dppo_kl": "dppo-kl",
    "clip_cov": "clip-cov",
    "clip-cov": "clip-cov",
    "kl_cov": "kl-cov",
    "kl-cov": "kl-cov",
}
"""actor.policy_loss.loss_mode -> --policy-loss."""
SEQUENCE_MEAN = ("gspo", "gmpo", "sapo")
"""Values of --policy-loss whose loss verl averages over the sequences, whatever actor.loss_agg_mode says."""
AGGREGATIONS = {"seq-mean-token-sum-norm": "dr-grpo"}
"""actor.loss_agg_mode -> --loss-aggregation, where the names differ."""
CLIPPED = ("ppo", "cispo", "gspo", "gmpo", "clip-cov")
"""Values of --policy-loss that have --clip-eps-low and --clip-eps-high."""
PARAMETERS = {
    "clip-cov": {
        "cov-share": "policy_loss.clip_cov_ratio",
        "cov-low": "policy_loss.clip_cov_lb",
        "cov-high": "policy_loss.clip_cov_ub",
    },
    "kl-cov": {"cov-share": "policy_loss.kl_cov_ratio", "cov-kl-coef": "policy_loss.ppo_kl_coef"},
    "sapo": {"sapo-tau-pos": "tau_pos", "sapo-tau-neg": "tau_neg"},
}
"""Value of --policy-loss -> our flags that only it reads -> the settings of `actor` that they are."""
KL_IN_REWARD = KL_ESTIMATORS | {f"{name}+": ours for name, ours in KL_ESTIMATORS.items()}
"""algorithm.kl_penalty -> --kl-estimator."""
STYLE_NAMES = ("lr_scheduler_type", "lr_decay_style", "warmup_style")
"""Names that the schedule of the learning rate has had."""
NO_SCHEDULE = {"lr-warmup-iters": 0, "min-lr": 0.0, "lr-decay-iters": None}
"""Flag of a learning rate's schedule -> its value in a schedule without this part."""
OFFLOADED = {"param": "parameters", "grad": "gradients", "optimizer": "optimizer"}
"""Part that fsdp_config.*offload names -> its name for --offload."""
SIZES = tuple(
    f"{kind}_parallel_size"
    for kind in (
        "tensor_model",
        "pipeline_model",
        "virtual_pipeline_model",
        "context",
        "expert_model",
        "expert_tensor",
    )
)


def nearest_algorithm(estimator: object) -> str:
    """Return the --algorithm for an estimator of advantages, or grpo for an estimator that megarl lacks."""
    return ESTIMATORS.get(key_of(estimator), "grpo")


def algorithm(settings: Settings) -> Iterator[Line]:
    name = key_of(settings["algorithm.adv_estimator"])
    note = "" if name in ESTIMATORS else f"the nearest; for {name} write an algorithm: docs/algorithms.md"
    yield Line("algorithm", nearest_algorithm(name), note)
    if name == "gae":
        yield Line("gamma", settings["algorithm.gamma"])
        yield Line("gae-lambda", settings["algorithm.lam"])
        yield Line("value-clip-eps", settings["critic.cliprange_value"])
        yield Line("critic-warmup-iters", settings["trainer.critic_warmup"])
    elif nearest_algorithm(name) == "grpo" and not settings.is_on("algorithm.norm_adv_by_std_in_grpo"):
        yield Line("normalize-advantages-by-std", False)


def model(settings: Settings) -> Iterator[Line]:
    yield model_folder(settings[f"{MODEL}.path"])
    yield Line("bf16", note="verl computes in bfloat16 too")
    if key_of(settings["algorithm.adv_estimator"]) == "gae" and settings["critic.model.path"]:
        yield model_folder(settings["critic.model.path"])._replace(flag="critic-model")


def _roles(settings: Settings) -> dict[str, str]:
    """Return prefix of our flags -> section of the settings, for the roles with an optimizer.

    Our flags without a prefix set both roles."""
    has_critic = key_of(settings["algorithm.adv_estimator"]) == "gae"
    return {"": ACTOR} | ({"critic-": "critic"} if has_critic else {})


def rates(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the learning rates. The schedules of verl and megarl both count steps.

    The actor's flags set the critic's schedule too, so what the critic lacks is turned off for it."""
    found = {
        prefix: {
            line.flag.removeprefix(prefix): line for line in decaying(prefix, _rate(settings, prefix, there))
        }
        for prefix, there in _roles(settings).items()
    }
    for prefix, lines in found.items():
        yield from lines.values()
        for name, nothing in NO_SCHEDULE.items():
            if name in found[""] and name not in lines:
                yield Line(f"{prefix}{name}", nothing)


def _rate(settings: Settings, prefix: str, there: str) -> Iterator[Line]:
    optim = f"{there}.optim"
    warmup = settings.number(f"{optim}.lr_warmup_steps")
    ratio = settings.number(f"{optim}.lr_warmup_steps_ratio")
    total = settings.ours.get("train-iters")
    if (warmup is None or warmup < 0) and ratio and isinstance(total, int):
        warmup = int(ratio * total)
    styles = [settings[f"{optim}.{name}"] for name in STYLE_NAMES]
    style = next((style for style in styles if style is not None), "constant")
    min_ratio, lowest = settings[f"{optim}.min_lr_ratio"], settings[f"{optim}.min_lr"]
    yield from schedule(prefix, settings[f"{optim}.lr"], style, warmup, min_ratio)
    if lowest is not None and not as_number(min_ratio):
        yield Line(f"{prefix}min-lr", lowest)
    if (decay := settings[f"{optim}.lr_decay_steps"]) is not None:
        yield Line(f"{prefix}lr-decay-iters", decay)
    if (warmup is None or warmup < 0) and ratio:
        yield Line(f"{prefix}lr-warmup-iters", f"{ratio}{TIMES}train-iters")


def rows_per_role(flag: str, names: str, default: float) -> Iterator[Row]:
    """Yield the rows of a setting that actor and critic have each.

    The actor's flag sets both roles, so with gae the critic's is written if its value differs.

    Args:
        names: the setting's names in the section of a role; the first that is given counts."""

    def lines(settings: Settings) -> Iterator[Line]:
        of_actor: object = None
        for prefix, there in _roles(settings).items():
            keys = [key for key in _in(there, names) if key in settings.given]
            given = [settings.given[key] for key in keys if settings.given[key] is not None]
            value = given[0] if given else default
            of_actor = of_actor if prefix else value
            if not prefix or given or key_of(value) != key_of(of_actor):
                yield Line(f"{prefix}{flag}", value)

    for prefix, there in (("", ACTOR), ("critic-", "critic")):
        yield Row(" ".join(_in(there, names)), f"--{prefix}{flag} {{}}", default=default, lines=lines)


def _in(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


def betas(settings: Settings) -> Iterator[Line]:
    """Yield Adam's betas of the actor, and of the critic where they differ."""
    of_actor = as_list(settings[f"{ACTOR}.optim.betas"])
    for prefix, there in _roles(settings).items():
        values = as_list(settings[f"{there}.optim.betas"])
        if not prefix or values != of_actor:
            for flag, beta in zip(("adam-beta1", "adam-beta2"), values, strict=False):
                yield Line(f"{prefix}{flag}", as_number(beta))


def kl(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the KL penalty, of its reference and of its estimator."""
    in_loss, in_reward = settings.is_on(f"{ACTOR}.use_kl_loss"), settings.is_on("algorithm.use_kl_in_reward")
    mode = "loss" if in_loss else "reward"
    factor = settings[f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"]
    estimator = key_of(settings[f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"])
    if not (in_loss or in_reward) or not as_number(factor):
        old = settings.given.get("algorithm.kl_ctrl.kl_coef")
        why = (
            f"verl without algorithm.use_kl_in_reward always subtracted it: --kl-mode reward --kl-coef {old}"
        )
        asked = in_loss or as_number(old) is None or "algorithm.use_kl_in_reward" in settings.given
        yield Line("kl-mode", "none", "" if asked or not as_number(old) else f"an old {why}")
        return
    yield Line("kl-mode", mode)
    yield Line("kl-coef", factor)
    if path := settings[f"{REF}.model.path"]:
        yield model_folder(path)._replace(flag="reference-model")
    name = estimator.rstrip("+")
    note = "" if name in KL_ESTIMATORS else f"the nearest to {name}"
    yield Line("kl-estimator", KL_ESTIMATORS.get(name, "k3"), note)
    if estimator.endswith("+") and in_loss:  # in the reward it has no gradient
        yield Line("kl-straight-through")
    if in_loss and in_reward:
        yield Line("", note="algorithm.use_kl_in_reward: the KL is counted in one place here, the loss")
    if key_of(settings["algorithm.kl_ctrl.type"]) == "adaptive" and not in_loss:
        target = settings["algorithm.kl_ctrl.target_kl"]
        yield Line("kl-controller", "adaptive")
        yield Line(
            "", note=f"--kl-target is per response: algorithm.kl_ctrl.target_kl ({target}) is per token"
        )
        yield Line("kl-horizon", settings["algorithm.kl_ctrl.horizon"])


def clip(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the policy loss and of its clip ranges."""
    mode = loss_mode(settings)
    loss = LOSSES.get(mode, "ppo")
    note = "" if mode in LOSSES else f"the nearest to {mode}; docs/algorithms.md says how to add a loss"
    if mode != (given := key_of(settings[f"{ACTOR}.policy_loss.loss_mode"])):
        note = f"bypass_mode puts it in the place of {given}"
    yield Line("policy-loss", loss, note)
    both, low, high = (settings[f"{ACTOR}.clip_ratio{side}"] for side in ("", "_low", "_high"))
    is_read = low is None or high is None or {as_number(low), as_number(high)} == {as_number(both)}
    if f"{ACTOR}.clip_ratio" in settings.given and not is_read:
        why = f"clip_ratio_low ({low}) and clip_ratio_high ({high}) come before it"
        yield Line("", note=f"clip_ratio={both} has no effect in verl: {why}")
    low, high = both if low is None else low, both if high is None else high
    if loss.startswith("dppo"):
        note = "" if as_number(low) == as_number(high) else f"clip_ratio_low={low} has no counterpart"
        yield Line("dppo-threshold", high, note)
    elif loss in CLIPPED:
        below_zero = (as_number(low) or 0) > 1
        note = f"{low} there: a ratio is never below 0" if below_zero else ""
        yield Line("clip-eps-low", 1.0 if below_zero else low, note)
        yield Line("clip-eps-high", high)
    if loss == "ppo":
        yield Line("clip-ratio-c", settings[f"{ACTOR}.clip_ratio_c"])
    for flag, name in PARAMETERS.get(loss, {}).items():
        yield Line(flag, settings[f"{ACTOR}.{name}"])


def aggregation(settings: Settings) -> Iterator[Line]:
    """Yield how the losses of tokens become one number."""
    mode = loss_mode(settings)
    given, old = settings[f"{ACTOR}.loss_agg_mode"], settings[f"{ACTOR}.use_token_level_loss"]
    if LOSSES.get(mode) in SEQUENCE_MEAN:
        note = f"verl's {mode} takes this mean, whatever loss_agg_mode says"
        yield Line("loss-aggregation", "seq-mean-token-mean", note)
    elif old is not None and f"{ACTOR}.loss_agg_mode" not in settings.given:
        is_token = settings.is_on(f"{ACTOR}.use_token_level_loss")
        yield Line("loss-aggregation", "token-mean" if is_token else "seq-mean-token-mean")
    else:
        yield Line("loss-aggregation", AGGREGATIONS.get(key_of(given), given))


def adapters(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the adapters of each role. verl's names differ between FSDP and Megatron."""
    roles = {"actor-": MODEL, "critic-": "critic.model"} if len(_roles(settings)) > 1 else {"": MODEL}
    for prefix, there in roles.items():
        is_megatron = bool(settings.number(f"{there}.lora.rank"))
        names = ("lora.rank", "lora.alpha", "lora.target_modules")
        names = names if is_megatron else ("lora_rank", "lora_alpha", "target_modules")
        yield from lora(prefix, *(settings[f"{there}.{name}"] for name in names))


def sizes(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the actor's parallel sizes, and of those of other roles where they differ."""
    roles = {"": ACTOR}
    if settings.ours.get("kl-mode", "none") != "none":
        roles["reference-"] = REF
    if key_of(settings["algorithm.adv_estimator"]) == "gae":
        roles["critic-"] = "critic"
    for role, there in roles.items():
        for size in SIZES:
            value, actors = settings[f"{there}.megatron.{size}"], settings[f"{ACTOR}.megatron.{size}"]
            if value is not None and (not role or value != actors):
                yield Line(f"{role}{size.replace('_', '-')}", value)
    is_split = (settings.number(f"{ACTOR}.megatron.tensor_model_parallel_size") or 1) > 1
    if is_split and settings.is_on(f"{ACTOR}.megatron.sequence_parallel"):
        yield Line("sequence-parallel")


def engine_size(settings: Settings) -> Iterator[Line]:
    """Yield --rollout-tensor-parallel-size; nothing for rollout.name=hf, which never splits a model."""
    if key_of(settings[f"{ROLLOUT}.name"]) != "hf":
        yield Line("rollout-tensor-parallel-size", settings[f"{ROLLOUT}.tensor_model_parallel_size"])


def groups(settings: Settings) -> Iterator[Line]:
    """Yield the flags of dynamic sampling, which replaces groups whose rewards are all equal."""
    if not settings.is_on("algorithm.filter_groups.enable"):
        return
    yield Line("dynamic-sampling")
    rounds = settings.number("algorithm.filter_groups.max_num_gen_batches")
    if rounds is not None:
        is_limited = rounds > 0
        yield Line(
            "max-sampling-rounds", rounds if is_limited else 1000, "" if is_limited else "no limit in verl"
        )


def kv_cache(settings: Settings) -> Iterator[Line]:
    """Yield the flag by which the engine keeps its KV cache while roles train, if verl's setting says so.
    Both frameworks release the cache by default."""
    if not settings.is_on(f"{ROLLOUT}.free_cache_engine"):
        yield Line("rollout-release-kv-cache", False)


def offload(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the parts that leave the device while other roles compute."""
    on_cpu, is_saved = settings.is_on(f"{OVERRIDE}.optimizer_cpu_offload"), _is_saved(settings)
    parts = [part for part in OFFLOADED if _is_offloaded(settings, ACTOR, part)]
    if on_cpu and not is_saved:  # it is in host memory all the time
        yield Line("optimizer-cpu-offload")
        yield Line("optimizer-offload-fraction", settings[f"{OVERRIDE}.optimizer_offload_fraction"])
        parts = [part for part in parts if part != "optimizer"]
    elif on_cpu:
        parts = list(dict.fromkeys([*parts, "optimizer"]))
    if parts:
        near = "optimizer between updates only: --optimizer-cpu-offload cannot be saved yet"
        names = [OFFLOADED[part] for part in parts]
        yield Line("actor-offload", names, near if on_cpu and is_saved else "")
    if "param" in parts:
        yield Line("reshard-alias", False, "the engine keeps weights of its own")
    if _is_offloaded(settings, REF, "param") and settings.ours.get("kl-mode", "none") != "none":
        yield Line("reference-offload", ["parameters"])


def _is_saved(settings: Settings) -> bool:
    return (settings.number("trainer.save_freq") or 0) > 0


def _is_offloaded(settings: Settings, role: str, part: str) -> bool:
    return any(settings.is_on(f"{role}.{engine}.{part}offload") for engine in ("fsdp_config", "megatron"))


def folder(settings: Settings) -> Iterator[Line]:
    name, folder = settings["trainer.experiment_name"], settings["trainer.default_local_dir"]
    if not folder and not name:
        yield Line(
            "", note="--save FOLDER: neither trainer.default_local_dir nor experiment_name has a value"
        )
        return
    folder = folder or f"runs/{name}"
    yield Line("save", folder)
    mode = key_of(settings["trainer.resume_mode"])
    if mode == "resume_path":
        yield Line("load", settings["trainer.resume_from_path"], "a megarl run folder or checkpoint")
    elif mode == "auto" and (_is_saved(settings) or not settings.is_on(f"{OVERRIDE}.optimizer_cpu_offload")):
        yield Line("load", folder, "goes on where this run stopped, as verl does; begins if there is none")


def intervals(settings: Settings) -> Iterator[Line]:
    yield Line("save-interval", max(settings.number("trainer.save_freq") or 0, 0))
    interval = max(settings.number("trainer.test_freq") or 0, 0)
    if interval and settings.ours.get("reward-model") and not settings.ours.get("reward-function"):
        yield Line("", note=f"--eval-interval {interval} needs --reward, which then counts in training too")
    elif interval and not settings["data.val_files"]:
        yield Line("", note=f"--eval-interval {interval} needs --eval-data")
    else:
        yield Line("eval-interval", interval)
    if (kept := settings.number("trainer.max_actor_ckpt_to_keep") or 0) > 0:
        yield Line("keep", kept)


def files(settings: Settings) -> Iterator[Line]:
    for flag, name in (("train-data", "data.train_files"), ("eval-data", "data.val_files")):
        files = as_list(settings[name])
        yield Line(flag, files) if files else Line("", note=f"--{flag} FILE ...: {name} is not given")


def rewards(settings: Settings) -> Iterator[Line]:
    if settings.is_on("reward_model.enable") and settings["reward_model.model.path"]:
        yield Line("reward-model", [settings["reward_model.model.path"]])
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        if path := settings[f"{section}.path"]:
            yield Line("reward-function", f"{path}:{settings[f'{section}.name']}")
            return


def loggers(settings: Settings) -> Iterator[Line]:
    yield from trackers(settings["trainer.logger"])
