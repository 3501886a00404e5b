"""Which flags are warned of because another flag leaves them without effect.

pytest tests/config/test_unused_flags.py"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.check import job_errors
from megarl.config.loader import load_config
from megarl.config.render import write_args
from megarl.config.unused_flags import unused_flags

PPO = "--algorithm ppo --lr 1e-5"
WARNED = {
    "--profile-step-start 9 --profile-ranks 0 1": [
        "--profile-step-start (9): has no effect without --profile. Leave it out, or add --profile torch.",
        "--profile-ranks (0 1): has no effect without --profile. Leave it out, or add --profile torch.",
    ],
    "--best-metric-mode min": [
        "--best-metric-mode (min): has no effect without --best-metric. Leave it out, or set that."
    ],
    "--kl-mode loss --kl-coef 0.1 --kl-target 3": [
        "--kl-target (3): has no effect without --kl-controller adaptive. Leave it out, or set that."
    ],
    "--overlong-penalty 2": [
        "--overlong-penalty (2): has no effect without --overlong-buffer. Leave it out, or set that."
    ],
    "--lr 1e-5 --min-lr 1e-6": [
        "--min-lr (1e-06): has no effect with --lr-decay-style constant. Leave it out, or try "
        "--lr-decay-style cosine."
    ],
    f"{PPO} --critic-lr-decay-iters 9 --actor-lr-decay-style linear": [
        "--critic-lr-decay-iters (9): has no effect with --critic-lr-decay-style constant. Leave it out, or "
        "try --critic-lr-decay-style cosine."
    ],
    "--num-actors 2 --actor-2-overlong-penalty 2": [
        "actor_2: --actor-2-overlong-penalty (2): has no effect without --actor-2-overlong-buffer. Leave it "
        "out, or set that."
    ],
    # Of all roles or actors, and with an effect in one of them.
    f"{PPO} --lr-decay-style cosine --min-lr 1e-6 --critic-lr-decay-style constant": [],
    f"{PPO} --actor-lr-decay-style cosine --min-lr 1e-6": [],
    "--num-actors 2 --overlong-buffer 4 --overlong-penalty 2 --actor-2-overlong-buffer none": [],
    "--num-actors 2 --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --actor-2-lr-decay-style constant": [],
    f"{PPO} --actor-lora-rank 8 --lora-alpha 16": [],
    f"{PPO} --actor-optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-distributed-optimizer": [],
    "": [],
    "--algorithm sft": [],
}


@pytest.mark.parametrize("flags", WARNED)
def test_a_flag_without_effect_is_warned_of_and_no_error(flags, job, tmp_path):
    expected = WARNED[flags]
    config = load_config([job, *flags.split()], REGISTRY)
    assert unused_flags(config) == expected
    assert not any("has no effect" in error for error in job_errors(config, 2, True))
    (tmp_path / "resolved.args").write_text(write_args(config))
    again = load_config([f"@{tmp_path / 'resolved.args'}"], REGISTRY)
    assert again == config and unused_flags(again) == expected
