"""The atlas of Transformer Engine's layers has the names, shapes and splits of the real layers.

Transformer Engine's Python code is installed from its wheel. Its extension is not, so models are built on the
emulated device, and no layer runs. One job of two ranks (run_te_layers.py) does the work.

    make test-hostcuda ARGS=tests/hostcuda/test_te_layers.py"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.hostcuda.build import transformer_engine
from tests.launch import succeed
from tests.megatron.families import CASES

SCRIPT = Path(__file__).with_name("run_te_layers.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("te_layers")
    try:
        sources = transformer_engine()
    except RuntimeError as error:
        pytest.skip(str(error))
    path = os.pathsep.join([str(sources), os.environ["PYTHONPATH"]])
    launcher = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    succeed(*launcher, SCRIPT, out, timeout=250, environment={"PYTHONPATH": path})
    return [json.loads((out / f"report_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family, layout", CASES)
def test_parameters_are_those_of_the_atlas(reports, family, layout):
    """Marks decide how often the gradient norm counts a parameter. The job itself fails if it does not find a
    mark and a shape that are planted."""
    parts = [report[f"{family}/{layout}"] for report in reports if f"{family}/{layout}" in report]
    assert len(parts) == (1 if layout == "one" else 2)
    for part in parts:
        assert part["different"] == [] and part["of Transformer Engine"] > 4
