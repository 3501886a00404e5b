"""A job with --policy-loss of a file trains as the built-in loss of the same formula does, and a resume names
the file once it has changed.

    pytest tests/e2e/test_user_policy_loss.py -m nightly"""

from __future__ import annotations

import re

import pytest

from tests.algorithms.test_user_policy_loss import PAGE
from tests.e2e.jobs import train
from tests.e2e.test_resume import check_equal

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
CLIP = ("--clip-eps-low", "3e-4", "--clip-eps-high", "4e-4")


def test_gspo_of_the_page_is_gspo(sums_data, tmp_path):
    file = tmp_path / "gspo.py"
    file.write_text(re.search(r"```python\n(# gspo.py.*?)```", PAGE.read_text(), re.DOTALL)[1])
    builtin = train(sums_data, tmp_path / "builtin", "--policy-loss", "gspo", *CLIP)
    own_flags = ("--policy-loss", f"{file}:gspo", *CLIP, "--save-interval", "1")
    own = train(sums_data, tmp_path / "own", *own_flags)
    assert builtin.returncode == own.returncode == 0, own.output
    assert own.steps[-1]["policy/clip_fraction"] > 0
    check_equal(builtin, own, after=0)
    file.write_text(file.read_text() + "\n# another byte\n")
    resumed = train(sums_data, tmp_path / "own", *own_flags, "--train-iters", "4", "--load", str(own.folder))
    assert resumed.returncode == 0, resumed.output
    assert f"--policy-loss ({file}): the file has changed" in resumed.output
