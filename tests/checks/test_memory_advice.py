"""What does not fit is an error with a change that does, for the jobs people plan; the table is there either
way.

pytest tests/checks/test_memory_advice.py"""

import re

import pytest

from megarl import cli
from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from tests.config.conftest import QWEN3, job, write_model  # noqa: F401

QWEN3_8B = QWEN3 | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
JOB_8B = (
    "--random-init --bf16 --nproc-per-node 8 --num-prompts 64 --num-samples-per-prompt 8 "
    "--global-batch-size 256 --max-prompt-length 512 "
    "--max-response-length 1024"
)
KEPT = " --no-rollout-release-kv-cache"
FULL = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def examined(job_file: str, flags: str, machine: Machine):
    config = load_config([job_file, *flags.split()], REGISTRY)
    return examine(config, config.placement.nproc_per_node, machine=machine)


def gpus(gigabytes: float) -> Machine:
    return Machine(None, has_gpu=True, gpu_bytes=int(gigabytes * 1e9), is_this=False)


def with_flags(flags: str, more: str) -> str:
    """Those of `more` in place of the same in `flags`."""
    by_name = {}
    for part in f" {flags} {more}".split(" --")[1:]:
        name, _, value = part.strip().partition(" ")
        by_name[name] = f"--{name} {value}".strip()
    return " ".join(by_name.values())


def advised(report) -> str:
    """The flags that the one finding or estimate proposes."""
    (finding,) = report.errors + report.estimates
    return re.search(r"Try (--.*?)\.( A job for GPUs|$)", finding)[1]


@pytest.fixture
def job_8b(write_model, job):  # noqa: F811
    write_model(QWEN3_8B)
    return job


def test_eight_billion_parameters_on_eight_gpus_of_80_gb(job_8b):
    """16.4 GB of weights, 32.8 of gradients, 12.3 of optimizer and 40 for the engine are too much before any
    activation, if the engine keeps its KV cache."""
    report = examined(job_8b, JOB_8B + KEPT + FULL, gpus(80))
    (finding,) = report.errors
    assert re.match(
        r"--model \(.*\): on its GPU rank 0 needs 102\.\d\d GB during an update, of 80\.00 GB\. Try "
        r"--rollout-gpu-memory-utilization 0\.27 --max-tokens-per-micro-batch 8192\.$",
        finding,
    )
    assert report.lines[0].startswith("not ok: ")
    (total,) = [line for line in report.lines if line.startswith("  ranks 0-7")]
    rollout, log_probs, update, sync = map(float, total.split()[2:])
    assert (rollout, sync) == (90.86, 89.38) and rollout < log_probs < update == pytest.approx(102.1, abs=0.1)
    fits = examined(job_8b, with_flags(JOB_8B + KEPT + FULL, advised(report)), gpus(80))
    assert fits.errors + fits.estimates == () and fits.lines[0].startswith("ok: ")


def test_a_cache_that_is_released_is_counted_in_the_rollout_only(job_8b):
    """Of 80 GB the cache gets nine tenths of what the rollout leaves, and an update has all of it."""
    report = examined(job_8b, JOB_8B + FULL + " --max-tokens-per-micro-batch 8192", gpus(80))
    assert report.errors + report.estimates == ()
    (total,) = [line for line in report.lines if line.startswith("  ranks 0-7")]
    rollout, _, update, sync = map(float, total.split()[2:])
    (engine,) = [line for line in report.lines if line.startswith("    rollout: ")]
    activations, graphs, cache = map(float, re.findall(r"(?:activations|graphs|cache) ([\d.]+)", engine))
    assert rollout == pytest.approx(sync + activations + cache, abs=0.02)
    assert cache == pytest.approx(0.9 * (80 - sync - activations), abs=0.02) and cache > 8
    assert sync < update < 80 and graphs == pytest.approx(2.16, abs=0.01)
    assert "    device: margin 4.00" in report.lines


CASES = [
    (JOB_8B, 80),
    (JOB_8B, 141),
    (JOB_8B, 40),
    (JOB_8B + " --kl-mode loss --kl-coef 0.01", 80),
    (JOB_8B.replace(" --bf16", ""), 141),
    (JOB_8B + " --rollout-kv-cache-memory-bytes 30000000000" + FULL, 80),
    (JOB_8B + " --tensor-model-parallel-size 4", 80),
    (JOB_8B + " --algorithm ppo --kl-mode none", 141),
    (JOB_8B.replace("response-length 1024", "response-length 16384") + FULL, 80),
    (JOB_8B + " --rollout-gpu-memory-utilization 0.2" + FULL + " --max-tokens-per-micro-batch 2048", 80),
    (JOB_8B + " --rollout-kv-cache-memory-bytes 1000000" + FULL, 141),
    (JOB_8B + " --algorithm sft", 40),
]


@pytest.mark.nightly_but_one_in(2)
@pytest.mark.parametrize(
    "flags, gigabytes", CASES, ids=[f"{flags.replace(JOB_8B, '8B')} {size}" for flags, size in CASES]
)
def test_what_is_proposed_fits(job_8b, flags, gigabytes):
    report = examined(job_8b, flags, gpus(gigabytes))
    assert any(line.startswith("GPU of each rank, GB:") for line in report.lines) and report.lines[
        0
    ].startswith("not ok: ")
    fits = examined(job_8b, with_flags(flags, advised(report)), gpus(gigabytes))
    assert fits.errors + fits.estimates == () and fits.lines[0].startswith("ok: ")


def test_no_layout_is_proposed_that_does_not_divide_the_ranks(job):  # noqa: F811
    """Four ranks in two pipeline stages hold no four tensor-parallel ranks."""
    report = examined(job, "--nproc-per-node 4 --pipeline-model-parallel-size 2", gpus(0.0001))
    (finding,) = report.errors + report.estimates
    assert "--tensor-model-parallel-size 4" not in finding and finding.endswith("more or larger machines.")


@pytest.mark.nightly_but_one_in(2)
@pytest.mark.parametrize("share", (0.97, 0.8, 0.6, 0.4))
@pytest.mark.parametrize(
    "flags", ("", "--algorithm ppo --kl-mode reward --kl-coef 0.1", "--rollout-kv-cache-memory-bytes 8000000")
)
def test_on_a_cpu(job, flags, share):  # noqa: F811
    """Of the memory that the job would need, this share is there."""
    (line,) = [line for line in examined(job, flags, Machine(10**12)).lines if line.startswith("  ranks 0-1")]
    machine = Machine(int(2e9 * share * max(map(float, line.split()[2:]))))
    report = examined(job, flags, machine)
    (finding,) = report.errors + report.estimates
    assert "on this machine 2 ranks need" in finding and finding.endswith(
        "A job for GPUs: megarl check --gpu-memory GB."
    )
    if "Use a smaller model" not in finding:
        assert examined(job, with_flags(flags, advised(report)), machine).lines[0].startswith("ok: ")
    else:
        assert share < 0.8


def test_what_does_not_fit_by_an_estimate_is_an_error_of_check_and_no_error_of_train(job_8b):
    """Without activations 86.86 GB are needed of 100: whether the rest suffices for them, no GPU has
    shown."""
    report = examined(job_8b, with_flags(JOB_8B, "--rollout-gpu-memory-utilization 0.4"), gpus(100))
    assert report.errors == () and len(report.estimates) == 1 and report.lines[0].startswith("not ok: ")
    assert "during an update, of 100.00 GB" in report.estimates[0]


def test_the_command(job_8b, capsys):
    """Exit code 2, what is wrong on stderr, the table on stdout in any case."""
    argv = [job_8b, *JOB_8B.split(), *FULL.split(), "--gpu-memory", "80"]
    assert cli.main(["check", *argv]) == 2
    told = capsys.readouterr()
    assert (
        told.out.startswith("not ok: ")
        and "    rollout: engine 1.81, activations 1.48 (rollout), CUDA graphs 2.16, KV cache 8.21 (rollout)"
        in told.out.splitlines()
    )
    assert told.err.startswith("--model (") and told.err.endswith("Try --max-tokens-per-micro-batch 8192.\n")
    assert cli.main(["check", *argv, "--max-tokens-per-micro-batch", "8192"]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_this_machines_disk_is_a_note_where_another_machine_is_planned_for(job, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("megarl.checks.job.free_bytes", lambda folder: 1000)
    (finding,) = examined(job, "", Machine(10**12)).errors
    assert finding.startswith("--save (") and "0.00000 GB are free" in finding
    report = examined(job, "", gpus(80))
    assert report.errors == () and f"note: on this machine {finding}" in report.lines
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    assert len(examined(job, "", Machine(10**12)).errors) == 2 and examined(job, "", gpus(80)).errors == ()


def test_what_a_new_run_writes_is_told(job):  # noqa: F811
    config = load_config([job], REGISTRY)
    new, resumed = (examine(config, 2, new_run, machine=gpus(80)).lines for new_run in (True, False))
    assert [line[:15] for line in (*new, *resumed) if line.startswith("--save")] == ["--save: writes "]


def test_train_refuses_the_same(job, monkeypatch):  # noqa: F811
    monkeypatch.setattr("megarl.checks.job.this_machine", lambda: Machine(10**5))
    with pytest.raises(ConfigError, match="on this machine 2 ranks need"):
        cli.train([job])
