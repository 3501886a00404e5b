"""Every command and every Python block of README.md, CONTRIBUTING.md and docs/*.md runs as written, in its
page's order.

A page's reader stands in a checkout after `make quickstart`, whose recipes take seconds here (conftest.py).
The default suite runs, in this process, all commands that start no rank, `megarl check` in place of jobs,
and the Python that needs no rank. The jobs are slow tests. What runs nowhere is in `NOT_RUN`, with a reason.
A new block that is in no table, and that no rule covers, fails the first test.

    pytest tests/docs                              # the quick ones
    pytest tests/docs -m nightly -k python_api        # the jobs of one page"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.mesh import role_meshes
from tests.tools.published import write_published
from tests.docs.blocks import PAGES, ROOT, Block, Command, blocks, blocks_of_all_pages, commands

NOT_RUN = {
    "make quickstart": "installs the environment and trains for minutes; tests/tools runs it small",
    "make quickstart-agent": "the same, in several turns",
    "make test": "is this suite",
    "make test-unit": "is a part of this suite",
    "make test-hostcuda": "continuous integration runs it",
    "make test-nightly": "is the rest of this suite, hours of it",
    "make test-stress": "takes days; tests/tools runs tools/stress_tests.py small",
    "make test-hostcuda ARGS=tests/hostcuda/test_streams.py": "builds for minutes; continuous integration runs all of it",
    "make docs": "continuous integration runs it",
    "megarl env-serve my_env.py:Env --host 0.0.0.0 --port 8100": "serves until it is ended; "
    "tests/episodes/test_remote_env.py plays it",
    "MEGARL_ENV_KEY=... megarl train @my_env.args --env http://that-host:8100 --train-iters 100 --save runs/remote": "the same",
    "python -m venv venvs/reasoning-gym && venvs/reasoning-gym/bin/pip install reasoning-gym": "downloads packages; "
    "tests/episodes/test_adapters.py plays the installed ones",
    "venvs/reasoning-gym/bin/python examples/reasoning_gym_rows.py leg_counting legs.jsonl --seed 0 --size 1000": "the "
    "same",
    "megarl train @my_env.args --train-data legs.jsonl --env reasoning-gym:leg_counting --env-python "
    "venvs/reasoning-gym/bin/python --train-iters 100 --save runs/legs": "the same",
    "python -m pytest tests/config -q -x": "is a part of this suite",
    "python -m pytest tests/docs -m nightly -k python_api": "is a part of this suite",
    "tools/nsys_train.sh --nproc-per-node 2 -- @configs/quickstart_grpo.args --save runs/nsys "
    "--profile-step-start 10 --profile-step-end 12 --profile-ranks 0 1": "needs GPUs; "
    "tests/tools/test_nsys_train.py runs it with a stand-in for nsys",
    "tools/gpu_session.sh runs/gpu-session '' build tests": "needs a GPU; tests/tools rehearses it",
    ". .venv/bin/activate": "only sets PATH, as every command here has it",
    "megarl convert --model M --load megatron/ --save out-4": "needs a checkpoint that Megatron-LM wrote; "
    "tests/checkpoint/test_convert.py reads some",
    'python -m pytest tests/faults/test_faults.py -m "" --write-table': "its cases are nightly tests",
    'python -m pytest tests/faults/test_faults.py tests/nodes/test_node_faults.py -m "" --write-table': "the same",
    'python -m pytest tests/faults/test_silent_faults.py -m "" --write-table': "its cases are nightly tests",
    'python -m pytest tests/faults/test_graded_faults.py -m "" --write-table': "its cases are nightly tests",
    "python -m megarl.runtime.torchrun_agent --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
    "HEAD:29500 --local-addr OWN_ADDRESS -m megarl.train @job.args --nnodes 2 --nproc-per-node 8": "needs two nodes",
    "megarl doctor --nnodes 2 --head node0 --folder /shared/runs": "needs two machines; tests/doctor/test_nodes.py "
    "runs it",
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...": "needs two machines; tests/nodes/ray_node.sh starts Ray so",
    "ray start --head --port 6379": "the same",
    "ray start --address HEAD:6379": "the same",
    "export MEGARL_JOB_SECRET=...": "tests/tools/test_launch_scripts.py runs the script on two nodes",
    "tools/launch/torchrun.sh --nnodes 2 --head node0 --nproc-per-node 8 -- @job.args": "needs two nodes; "
    "tests/tools/test_launch_scripts.py runs it",
    "sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --time 24:00:00 tools/launch/slurm.sh /shared/runs/a "
    "@job.args": "needs SLURM; tests/tools/test_launch_scripts.py has stand-ins",
    "megarl train @job.args --nnodes 2 --nproc-per-node 8 --executor ray --ray-address HEAD:6379": "needs a "
    "cluster; tests/nodes makes a small one",
    "ray job submit -- megarl train @/shared/job.args --nnodes 2 --nproc-per-node 8 --executor ray": "needs a "
    "cluster with Ray's job server; tests/nodes/test_ray_nodes.py runs the script below, which does the same",
    "tools/launch/ray_submit.sh --address http://127.0.0.1:8265 --nnodes 2 --nproc-per-node 8 -- @job.args": "the same",
    "megarl balance runs/sync": "tests/inspect/test_balance.py runs it on recorded rows",
    "(Pdb) import pdb; pdb.post_mortem(self.failure.__cause__.__traceback__)": "needs a role that raises; "
    "tests/runtime/test_inline.py stands there",
}
"""What no test runs: a command, or the first line of a block -> why."""

FILES = {
    ("docs/configuration.md", "# the quickstart's recipe, with changes"): "recipes/mine.args",
    (
        "docs/data_and_rewards.md",
        '{"prompt": [{"role": "user", "content": "Describe rain in one sentence."}]}',
    ): "mine.jsonl",
    ("docs/agents.md", "# my_env.args: GRPO over several turns"): "my_env.args",
    (
        "docs/agents.md",
        '{"data_source": "again", "prompt": [{"role": "user", "content": "12+3 ?"}], "reward_model": '
        '{"ground_truth": "15"}}',
    ): "again.jsonl",
    (
        "docs/agent_tools.md",
        '{"title": "France", "text": "Paris is the capital of France."}',
    ): "corpus.jsonl",
    ("docs/from_verl.md", "python3 -m verl.trainer.main_ppo \\"): "grpo.txt",
    ("docs/from_trl.md", "model_name_or_path: path/to/hf-model"): "grpo.yaml",
    (
        "docs/from_slime.md",
        "python3 train.py --actor-num-gpus-per-node 2 --colocate \\",
    ): "slime.txt",
}
"""(page, first line of a block) -> the reader's file that it is, as is Python that begins `# name.py`."""

PYTHON = {
    ("docs/algorithms.md", '"""REINFORCE whose baseline'): "stepmean",
    ("docs/algorithms.md", "from megarl.algorithms.stepmean import StepMean"): "stepmean",
    ("docs/asynchronous.md", "import megarl"): "plain",
    ("docs/dataflow.md", "import megarl"): "quick",
    ("docs/dataflow.md", "@dataflow"): "quick",
    ("docs/kernels.md", "import torch"): "quick",
    ("docs/python_api.md", "import megarl"): "plain",
    ("docs/python_api.md", "from megarl.flow import Role, method"): "quick",
    ("docs/python_api.md", "actor, critic, reference, reward ="): "in a trainer",
    ("docs/python_api.md", "sampling, roles ="): "in a trainer",
    ("docs/python_api.md", "config = megarl.load_config("): "plain",
    ("docs/python_api.md", "actor, student, critic,"): "in a trainer",
    ("docs/python_api.md", "from concurrent.futures"): "plain",
}
"""(page, beginning of a block) -> how it runs.

quick: in this process; plain, in a trainer: by run_page.py; stepmean: as files of a copied tree."""

TAKES_SECONDS = {"--train-iters 100": "--train-iters 2"}
"""Words of a page's commands -> those that are run."""
CHECKED = ("algorithms", "check", "graph", "reshard-plan", "translate", "new", "tiny-model")
"""Subcommands of megarl that start nothing."""
QUICK_SCRIPTS = (
    "python make_data.py",
    "python reward.py",
    "python examples/relay_env.py runs/relay/data",
)
"""Scripts of a task that `megarl new` lays out, or that write the data of one."""
STAND_INS = {
    "megarl train @sft.args": ("runs/sft/hf", "model"),
    "megarl train @configs/relay_sft.args": ("runs/relay/sft/hf", "runs/relay/data/model"),
}
"""A job that the quick tests do not run -> the folder that it leaves, and what stands for it there."""
JOBS = (
    "megarl train",
    "megarl eval",
    "megarl convert",
    "megarl doctor",
    "megarl show",
    "megarl plot",
    "megarl data",
    "megarl chat",
    "echo",
    "torchrun",
    "python -m pdb",
    "python examples/",
    "python tools/",
)


def blocks_of(page: str) -> list[Block]:
    return list(blocks(PAGES[page].read_text(encoding="utf-8"), page))


def commands_of(page: str) -> list[Command]:
    return [command for block in blocks_of(page) for command in commands(block)]


def how(block: Block) -> str | None:
    """How a Python block runs; None: no table says it."""
    return next(
        (
            way
            for (page, beginning), way in PYTHON.items()
            if page == block.page and block.text.startswith(beginning)
        ),
        None,
    )


def file_of(block: Block) -> str | None:
    """Name of the reader's file that the block is."""
    if block.language == "python" and block.first_line.startswith("# ") and block.first_line.endswith(".py"):
        return block.first_line.removeprefix("# ")
    return FILES.get((block.page, block.first_line))


def is_quick(command: Command) -> bool:
    is_megarl = command.words[0] == "megarl"
    return is_megarl and (command.words[1] in CHECKED or command.words[-1] == "--help")


def is_quick_script(command: Command) -> bool:
    return command.text in QUICK_SCRIPTS


def lays_out(command: Command) -> bool:
    """Whether a command writes files of the reader's own task, which jobs on the page read."""
    return command.words[:2] in (["megarl", "new"], ["megarl", "tiny-model"]) or is_quick_script(command)


def entered(command: Command) -> str | None:
    """The folder of a `cd`; the commands after it on the page run there."""
    return command.words[1] if command.words[0] == "cd" else None


def is_job(command: Command) -> bool:
    words = [
        word for word in command.words if not ("=" in word and word.split("=")[0].isupper())
    ]  # VARIABLE=value before a command
    return " ".join(words).startswith(JOBS) and not is_quick(command)


def pages_where(condition) -> list[str]:
    return [
        page
        for page in PAGES
        if any(condition(command) for command in commands_of(page) if command.text not in NOT_RUN)
    ]


# ------------------------------------------------------------------ nothing is forgotten


def test_every_block_runs_somewhere_or_has_a_reason():
    unknown, used = [], set()
    for block in blocks_of_all_pages():
        used.add(block.first_line)
        if block.language == "python":
            unknown += [str(block)] * (how(block) is None and file_of(block) is None)
        elif block.language in ("sh", "") and (found := commands(block)):
            unknown += [
                str(command)
                for command in found
                if not (command.text in NOT_RUN or is_quick(command) or is_job(command))
                and not (is_quick_script(command) or entered(command))
            ]
            used |= {command.text for command in found}
        elif block.language == "":  # a picture, or text; nothing that one would type
            typed = [
                line
                for line in block.text.splitlines()
                if line.startswith(("(Pdb)", "$ ", "megarl check", "python ", "make "))
            ]
            unknown += [f"{block.page}:{block.line}: {line}" for line in typed if line not in NOT_RUN]
        elif block.language != "json":
            unknown.append(f"{block} is a block of {block.language}")
    assert not unknown, (
        f"add to a table of {__file__}, or write the block as `sh` or `python`:\n" + "\n".join(unknown)
    )
    assert used >= NOT_RUN.keys(), f"not on any page any more: {NOT_RUN.keys() - used}"
    pages = blocks_of_all_pages()
    for page, beginning in (*FILES, *PYTHON):
        assert any(block.page == page and block.text.startswith(beginning) for block in pages), (
            f"not on {page} any more: {beginning}"
        )


def test_a_new_block_is_seen():
    text = (
        "text\n```sh\nmegarl train @a \\\n    --save b   # why\nFOO=1 megarl check x\npython -m pdb x\n"
        "(Pdb) c\n(Pdb) p a\n```\n```\n$ megarl check y\nok\n```\n"
    )
    shell, session = blocks(text, "new.md")
    assert [(c.text, c.typed) for c in commands(shell)] == [
        ("megarl train @a --save b", ""),
        ("FOO=1 megarl check x", ""),
        ("python -m pdb x", "c\np a"),
    ]
    assert [(c.text, c.output) for c in commands(session)] == [("megarl check y", "ok")]
    assert how(Block("README.md", 1, "python", "import new")) is None
    with pytest.raises(ValueError, match="new.md:1: the fence has no end"):
        list(blocks("```sh\nmegarl check", "new.md"))


# ------------------------------------------------------------------ quick: in this process


def in_process(arguments: list[str], capsys) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `megarl ARGUMENTS`."""
    capsys.readouterr()
    try:
        code = cli.main(arguments)
    except SystemExit as exited:  # argparse's --help
        code = exited.code or 0
    return code, *capsys.readouterr()


def partition(words: list[str], word: str) -> tuple[list[str], list[str], list[str]]:
    """The words before a word, this word, and those after it; as str.partition."""
    at = words.index(word) if word in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


def checked_instead(command: Command) -> list[str] | None:
    """`megarl check` with the arguments of a job; None for what is no job of a configuration."""
    words = command.words
    if "megarl.train" in words:
        return ["check", *words[words.index("megarl.train") + 1 :]]
    if "megarl" in words and words[words.index("megarl") + 1] == "train":
        return ["check", *words[words.index("megarl") + 2 :]]
    return ["check", *words[2:]] if words[:1] == ["python"] and "--save" in words else None


def reads_what_a_job_wrote(command: Command, saved: set[str]) -> bool:
    words = [word.removeprefix("@") for word in command.words]
    paths = [word for before, word in zip(["", *words], words) if before != "--save"]
    return any(path == folder or path.startswith(f"{folder}/") for path in paths for folder in saved)


def write_files(page: str, folder: Path) -> None:
    """The files that the page tells its reader to write."""
    for block in blocks_of(page):
        if name := file_of(block):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block.text + "\n")


def shown(output: str, found: str) -> bool:
    """Whether what a page shows is what came, but for line breaks; "..." stands for anything."""
    parts = [re.escape(" ".join(part.split())) for part in output.split("...")]
    return re.fullmatch(".*".join(parts), " ".join(found.split())) is not None


@pytest.mark.parametrize("page", pages_where(lambda command: is_quick(command) or checked_instead(command)))
def test_quick_commands_and_arguments_of_jobs(page, checkout, qwen_7b, capsys, monkeypatch):
    """Commands that start nothing do what the page says; the arguments of jobs pass `megarl check`."""
    (checkout / "models").mkdir()
    (checkout / "models" / "Qwen2.5-7B").symlink_to(qwen_7b)
    (checkout / "rows.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    write_files(page, checkout)
    saved: set[str] = set()
    for command in commands_of(page):
        if command.text in NOT_RUN:
            continue
        if folder := entered(command):
            monkeypatch.chdir(folder)
        elif is_quick_script(command):
            assert len(run(command.text, Path.cwd()).splitlines()) >= 1, command
        elif is_quick(command):
            words, _, target = partition(command.words, ">")
            code, out, err = in_process(words[1:], capsys)
            for file in target:
                Path(file).write_text(out)
            if command.output:
                assert shown(command.output, out + err), (
                    f"{command}\nprinted\n{out}{err}\nand the page shows\n{command.output}"
                )
            else:
                assert (code, err) == (0, ""), f"{command}\n{err}"
                assert len(out.splitlines()) > 1, command
        elif (arguments := checked_instead(command)) and not reads_what_a_job_wrote(command, saved):
            code, out, err = in_process(arguments, capsys)
            assert (code, err) == (0, ""), f"{command}\n{err}"
        if command.text in STAND_INS:
            left, instead = map(Path, STAND_INS[command.text])
            left.parent.mkdir(parents=True)
            left.symlink_to(instead.absolute())
        if "--save" in command.words and is_job(command):
            saved.add(command.words[command.words.index("--save") + 1])


def test_rows_are_json():
    rows = [
        line
        for block in blocks_of_all_pages()
        if block.language == "json"
        for line in block.text.splitlines()
    ]
    assert len(rows) >= 8 and all(isinstance(json.loads(row), dict) for row in rows)


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_flows_and_configurations_of_the_python_api(checkout):
    """The statements that need no trainer run, and every flow fits the job of the configuration before it."""
    names: dict[str, object] = {}
    seen = []
    for block in blocks_of("docs/python_api.md"):
        if block.language == "python":
            tree = ast.parse(block.text, str(block))
            tree.body = [line for line in tree.body if "rainer" not in ast.unparse(line)]
            names.pop("flow", None)
            exec(compile(tree, str(block), "exec"), names)  # noqa: S102 - our own documentation
            if flow := names.get("flow"):
                flow.validate(role_meshes(names["config"], names["config"].placement.nproc_per_node))
                seen.append(len(flow.nodes))
    assert seen == [9, 12] and names["second"].batch.seed == 1


def test_quick_python(checkout, one_rank):
    for page in ("docs/dataflow.md", "docs/kernels.md"):
        names: dict[str, object] = {"data_parallel_group": one_rank}
        for block in blocks_of(page):
            if block.language == "python" and how(block) == "quick":
                exec(block.text, names)  # noqa: S102 - our own documentation
        assert page == "docs/kernels.md" or len(names["flow"].nodes) == 9
    assert names["result"].stats.tolist()[2] == 5  # tokens
    assert abs(float(names["advantages"].mean())) < 1e-6  # whitened: 0 but for rounding in fp32


# ------------------------------------------------------------------ jobs: as processes


def run(command: str, folder: Path, typed: str = "") -> str:
    """Run a command as its reader would, in a shell in the checkout. Returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    print(f"$ {command}", flush=True)  # for `pytest -s`: a page takes minutes
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert typed or done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def run_python(page: str, folder: Path) -> dict[str, dict[str, float] | None]:
    """Run a page's Python that needs ranks. Returns the metrics that each block leaves, by its first line."""
    found = [
        block
        for block in blocks_of(page)
        if block.language == "python" and how(block) in ("plain", "in a trainer")
    ]
    (folder / "blocks.json").write_text(json.dumps([[how(block), block.text] for block in found]))
    run(f"python {ROOT / 'tests' / 'docs' / 'run_page.py'} blocks.json seen.json", folder)
    return dict(
        zip(
            [block.first_line for block in found], json.loads((folder / "seen.json").read_text()), strict=True
        )
    )


def prepare(page: str, folder: Path) -> None:
    """What the page's reader has before the first command."""
    write_files(page, folder)
    match page:
        case "docs/checkpoints.md" | "docs/restarts.md":
            (folder / "job.args").write_text(
                "@configs/quickstart_grpo.args\n--train-iters 12\n"
            )  # past the checkpoint of step 10
        case "docs/quickstart_agent.md":
            run("python tools/quickstart.py --agent --small", folder)
        case "docs/data_and_rewards.md":
            write_published(folder / "published")
        case "docs/convert.md":
            (folder / "M").symlink_to(folder / "path" / "to" / "hf-model")
            checkpoint = folder / "runs" / "a" / "checkpoints" / "step_000010" / "actor"
            checkpoint.parent.mkdir(parents=True)
            run(f"megarl convert --model M --save {checkpoint} --to checkpoint", folder)


JOB_PAGES = [page for page in PAGES if any(is_job(c) and c.text not in NOT_RUN for c in commands_of(page))]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", JOB_PAGES)
def test_jobs_of_a_page(page, checkout):
    prepare(page, checkout)
    folder = checkout
    for command in commands_of(page):
        folder /= entered(command) or ""
        if command.text in NOT_RUN or not (is_job(command) or lays_out(command)):
            continue
        text = command.text
        for words, others in TAKES_SECONDS.items():
            text = text.replace(words, others)
        told = run(text, folder, f"{command.typed}\nq\n" if command.typed else "")
        if command.typed:  # stopped where the page says, with what it says
            assert "loop.py(23)" in told and "-> trainer.update(batch)" in told, told
            assert "p trainer.step" not in command.typed or (
                "(1, RolloutBatch(step 1, 16 samples" in told and "Batch(sample_ids=tensor(" in told
            ), told
    if any(
        how(block) in ("plain", "in a trainer") for block in blocks_of(page) if block.language == "python"
    ):
        seen = run_python(page, checkout)
        if page == "docs/python_api.md":
            check_two_actors(seen)


def check_two_actors(seen: dict[str, dict[str, float] | None]) -> None:
    """actor_2 has learnt from the samples of an actor that it differs from by more than any gate's limit."""
    [metrics] = [found for first_line, found in seen.items() if first_line.startswith("actor, student")]
    assert metrics["off_policy_2/max_abs"] > 1e-3 and "mismatch_2/max_abs" not in metrics
    assert metrics["policy_2/grad_norm"] > 0 and metrics["policy_2/loss"] != metrics["policy/loss"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_algorithm_of_the_page_trains(checkout):
    """Both blocks as files of a copied tree, with the flags that the page promises."""
    module, registry = [block for block in blocks_of("docs/algorithms.md") if how(block) == "stepmean"]
    tree = checkout / "tree"
    shutil.copytree(ROOT / "megarl", tree / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "megarl" / "algorithms" / "stepmean.py").write_text(module.text + "\n")
    with open(tree / "megarl" / "algorithms" / "__init__.py", "a") as package:
        package.write(f"\n{registry.text}\n")
    megarl = f"PYTHONPATH={tree} PYTHONSAFEPATH=1 python -m megarl.cli"
    job = "@configs/quickstart_grpo.args --algorithm stepmean --max-ratio 5 --save runs/stepmean"
    assert "--max-ratio" in run(f"{megarl} train --algorithm stepmean --help", checkout)
    run(f"{megarl} train {job}", checkout)
    assert "--max-ratio 5" in (checkout / "runs" / "stepmean" / "resolved.args").read_text()
    rows = [
        json.loads(line)
        for line in (checkout / "runs" / "stepmean" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "policy/grad_norm" in row] == [1, 2] and rows[-1][
        "advantage/max_abs"
    ] > 0
    refused = run(f"{megarl} check {job.replace('--max-ratio 5', '--max-ratio 0.5')} || true", checkout)
    assert "--max-ratio (0.5): must be above 1" in refused, refused
