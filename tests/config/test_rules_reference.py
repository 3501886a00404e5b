"""Where --reference-update-interval is refused. `pytest tests/config/test_rules_reference.py`"""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.rules_layout import Job
from megarl.config.rules_reference import reference_updates
from tests.algorithms.test_listing import load

HEAD = "--reference-update-interval 5"
REFUSED = {
    f"--algorithm dpo {HEAD}": "--algorithm dpo compares the policy with the model that training starts from",
    f"--kl-mode loss --kl-coef 0.1 --reference-model m {HEAD}": "the reference is another model, --reference-model m",
    f"--algorithm distill --reference-model m {HEAD}": "the reference is another model, --reference-model m",
    f"--kl-mode loss --kl-coef 0.1 --lora-rank 4 {HEAD}": "has no weights of its own",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    (error,) = reference_updates(Job(load(flags), None, None, 1, {}))
    assert REFUSED[flags] in error and error.startswith("--reference-update-interval (5): ")
    assert "Leave" in error


def test_without_a_reference():
    with pytest.raises(ConfigError, match=r"interval \(5\): no KL to it is counted .* Leave it out"):
        load(HEAD)


@pytest.mark.parametrize(
    "flags", ["", f"--kl-mode loss --kl-coef 0.1 {HEAD}", f"--kl-mode reward --kl-coef 0.1 {HEAD}"]
)
def test_allowed(flags):
    assert [*reference_updates(Job(load(flags), None, None, 1, {}))] == []
