"""The simulation of large jobs: real processes at two small sizes, and the arithmetic that goes beyond."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "simulate_scale.py"


def run(*arguments: str, timeout: float = 1500.0) -> dict:
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_what_the_driver_sends_does_not_grow_with_the_nodes_below_its_children():
    """16 nodes are the driver's children; the 17th and 18th hang below them."""
    small, large = (run("--nodes", n, "--samples", "576", "--length", "1024") for n in ("16", "18"))
    assert small["ranks"] == 128 and large["ranks"] == 144
    assert small["commands"] == large["commands"] > 10
    # only the lists of ranks in the commands grow: 16 numbers of at most 3 bytes, for each command and child
    most = 16 * 16 * 3 * large["commands"]
    assert 0 <= large["bytes_sent"] - small["bytes_sent"] <= most + 0.02 * small["bytes_sent"]
    assert large["bytes_received"] > 1.05 * small["bytes_received"]
    for result in (small, large):
        assert result["driver_s"] > 0 and result["grown_bytes"] < 100e6
        assert result["raise_to_failure_s"] > 0 and result["kill_to_failure_s"] > 0


def test_a_law_that_holds_is_found_again(tmp_path):
    files = []
    for ranks, samples in ((128, 4096), (512, 4096), (1024, 4096), (128, 100_000)):
        values = {
            name: 2.0 + 3.0 * ranks + 0.5 * samples for name in ("driver_s", "grown_bytes", "bytes_received")
        }
        files.append(tmp_path / f"{ranks}_{samples}.json")
        files[-1].write_text(json.dumps({"ranks": ranks, "samples": samples} | values))
    for found in run("--fit", *map(str, files)).values():
        assert found["fit"] == pytest.approx([2.0, 3.0, 0.5], rel=1e-6)
        assert found["largest_error"] < 1e-9
        assert found["4096 ranks, 100000 samples"] == pytest.approx(2 + 3 * 4096 + 50_000)
