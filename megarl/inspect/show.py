"""Show samples of a run: prompt, response, reward and its parts, length and finish reason.

    megarl show runs/a                              the best and the worst samples of the newest step
    megarl show runs/a --step all --worst 5         the worst of all steps
    megarl show runs/a --step 10-20 --random 3      some of steps 10 to 20; --seed draws others
    megarl show runs/a --prompt 134                 one row of --train-data over the steps
    megarl show runs/a --prompt '73-3-4'            the same, found by its text
    megarl show runs/a --failed                     the step at which the job failed
    megarl show samples.jsonl --worst 5             samples of `megarl eval --out samples.jsonl`

The samples of a run are those that the job logged into rollouts/, by --num-rollouts-to-log. The run may still
be going."""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError, try_path
from megarl.inspect.arguments import Parser, whole
from megarl.inspect.runs import argument_of, is_run, read_rows, run_folder
from megarl.inspect.terminal import block, fold, width, write
from megarl.loggers.json_lines import FAILED_STEP, rollout_files

DEFAULT_BEST = DEFAULT_WORST = 2
NO_STEP = 0
"""Step of samples that belong to no step of a run."""
_MAX_ROWS_NAMED = 8
_SHOWN_ELSEWHERE = {
    "step",
    "error",
    "actor",
    "name",
    "sample_id",
    "row",
    "reward",
    "digest",
    "prompt",
    "response",
    "ground_truth",
    "response_length",
    "finish_reason",
    "data_source",
    "answer",
    "rollout_log_prob",
    "prompt_ids",
    "response_ids",
    "turns",
    "num_turns",
    "num_branches",
    "num_unreadable",
    "num_constrained",
    "branches",
    "holes",
    "cause",
}
"""Fields of a sample that are no parts of its reward."""

_GIVE_A_RUN = "Give a folder that a job was told to --save."
Sample = dict[str, object]
"""A row of rollouts/step_*.jsonl with its step, without the token ids."""


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    path = Path(arguments.run)
    num_sampled, reason = None, ""
    if arguments.failed:
        samples, reason = _samples_of_failed_step(path, arguments.step)
        num_sampled = _num_sampled(path, samples)
    elif path.is_file():
        samples = _samples_of_file(path, arguments.step)
    else:
        path = _run_folder(arguments.run)
        files = _files_of_steps(path, arguments.step, arguments.prompt is not None)
        samples = [sample for step, file in files.items() for sample in _read(step, file)]
        if not samples:
            raise ConfigError([f"--step ({arguments.step}): no sample is written yet. Try --step all."])
        num_sampled = _num_sampled(path, samples)
    if arguments.prompt is not None:
        samples, num_sampled = _of_prompt(samples, arguments.prompt), None
    header = f"{path}: {_summary(samples, num_sampled)}{reason}"
    write(_lines(header, samples, arguments, width()))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("show", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder, or a file of `megarl eval --out`")
    for name, text in (("best", "highest"), ("worst", "lowest")):
        parser.add_argument(
            f"--{name}", type=whole(1, 5), metavar="N", help=f"the N samples with the {text} reward"
        )
    parser.add_argument("--random", type=whole(1, 5), metavar="N", help="N samples drawn by --seed")
    parser.add_argument("--seed", type=whole(0, 1), default=0, metavar="S", help="default: 0")
    parser.add_argument(
        "--prompt",
        metavar="ROW_OR_TEXT",
        help="samples of one prompt only: its row of the data, or a part of its text",
    )
    parser.add_argument(
        "--step", metavar="STEPS", help="12, 10-20 or all; default: the newest, with --prompt all"
    )
    parser.add_argument("--failed", action="store_true", help="the samples of the last step that failed")
    arguments = parser.parse(argv)
    if arguments.prompt is None and not (arguments.best or arguments.worst or arguments.random):
        arguments.best, arguments.worst = DEFAULT_BEST, DEFAULT_WORST
    return arguments


def _run_folder(name: str) -> Path:
    """Return the folder of a run. Raises: ConfigError, with --failed as advice if the run failed in its first
    step."""
    try:
        return run_folder(name)
    except ConfigError:
        if not (Path(name) / FAILED_STEP).is_file():
            raise
        rule = "no step was completed, and there are samples of the step that failed. Add --failed."
        raise ConfigError([f"RUN ({name}): {rule}"]) from None


def _samples_of_failed_step(folder: Path, steps: str | None) -> tuple[list[Sample], str]:
    """Return the samples of the last step of a run that failed, and a sentence with the error.

    Raises: ConfigError."""
    if steps is not None:
        raise ConfigError([f"--step ({steps}): --failed shows one step, the last that failed. Leave it out."])
    if not folder.is_dir():
        rule = "there is no such folder. A job that fails before it has completed a step or scored one leaves none"
        raise ConfigError([f"RUN ({folder}): {rule}.{try_path(folder, is_run, _GIVE_A_RUN)}"])
    path = folder / FAILED_STEP
    samples = list(_read(NO_STEP, path)) if path.is_file() else []
    if not samples:
        rule = f"holds no {FAILED_STEP}: no step failed after its samples were scored. Leave --failed out."
        raise ConfigError([f"RUN ({folder}): {rule}"])
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return samples, f". The step failed ({written}): {samples[0].get('error')}"


def _files_of_steps(folder: Path, steps: str | None, whole_run: bool) -> dict[int, Path]:
    files = rollout_files(folder)
    if not files:
        raise ConfigError(
            [
                f"RUN ({folder}): has no samples in rollouts/: it has not completed a step, or its "
                "--num-rollouts-to-log is 0. "
                + (
                    "Add --failed for the step that failed."
                    if (folder / FAILED_STEP).is_file()
                    else "Give another run."
                )
            ]
        )
    first, newest = min(files), max(files)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps or "")
    if steps == "all" or steps is None and whole_run:
        return files
    if steps is None:
        return {newest: files[newest]}
    low = int(match[1]) if match else 0
    chosen = range(low, (int(match[2]) if match[2] else low) + 1) if match else ()
    found = {step: path for step, path in files.items() if step in chosen}
    if not found:
        rule = f"must be a step, a range or all, and there are samples of steps {first} to {newest}"
        raise ConfigError([f"--step ({steps}): {rule}. Try {newest}."])
    return found


def _read(step: int, path: Path) -> Iterator[Sample]:
    for row in read_rows(path):
        yield {"step": step} | {key: row[key] for key in row if key not in ("prompt_ids", "response_ids")}


def _num_sampled(folder: Path, samples: Sequence[Sample]) -> int | None:
    """Return how many samples were sampled in the steps of these logged samples, by the run's resolved.args;
    None if the flags do not say.

    Several actors may have numbers of their own, and an algorithm in a user's file may sample further
    responses. The steps before a resume count as those after it."""
    num_prompts, group_size = (
        argument_of(folder, name) for name in ("num-prompts", "num-samples-per-prompt")
    )
    algorithm = REGISTRY.get(argument_of(folder, "algorithm") or "")
    if any("actor" in sample for sample in samples) or algorithm is None:
        return None
    if not all(text and text.isdecimal() for text in (num_prompts, group_size)):
        return None
    num_steps = len({sample["step"] for sample in samples})
    num_sampled = num_steps * int(num_prompts) * (int(group_size) + algorithm.greedy_samples)
    return num_sampled if num_sampled >= len(samples) else None


def _samples_of_file(path: Path, steps: str | None) -> list[Sample]:
    """Return the samples of a file that is no run's, which have no steps. Raises: ConfigError."""
    if steps is not None:
        raise ConfigError(
            [f"--step ({steps}): {path} is of no run, so its samples have no steps. Leave it out."]
        )
    if path.suffix != ".jsonl":
        rule = "a file of samples ends in .jsonl. Give a run folder, or the file of `megarl eval --out`."
        raise ConfigError([f"RUN ({path}): {rule}"])
    samples = list(_read(NO_STEP, path))
    if not samples or any("response" not in sample or "row" not in sample for sample in samples):
        rule = "holds no samples. Give a run folder, or the file of `megarl eval --out`."
        raise ConfigError([f"RUN ({path}): {rule}"])
    return samples


def _of_prompt(samples: Sequence[Sample], prompt: str) -> list[Sample]:
    """Return the samples of one prompt. Raises: ConfigError if none has it, or if several prompts have."""
    rows = {sample["row"] for sample in samples}
    if prompt.isdecimal() and int(prompt) in rows:
        return [sample for sample in samples if sample["row"] == int(prompt)]
    texts = {sample["row"]: _text(sample["prompt"]) for sample in samples}
    found = sorted(row for row, text in texts.items() if prompt in text)
    # a text that is a whole message means that prompt, also if longer prompts contain it
    exact = [row for row in found if prompt in (texts[row], texts[row].rpartition(": ")[2])]
    found = exact if len(exact) == 1 else found
    if len(found) == 1:
        return [sample for sample in samples if sample["row"] == found[0]]
    if found:
        named = ", ".join(map(str, found[:_MAX_ROWS_NAMED])) + (", ..." if found[_MAX_ROWS_NAMED:] else "")
        rule = f"is in the prompts of {len(found)} rows: {named}. Try --prompt {found[0]}."
    else:
        rule = f"is neither a row nor in a prompt of the logged samples. Try --prompt {min(rows)}."
    raise ConfigError([f"--prompt ({prompt}): {rule}"])


def _lines(
    header: str, samples: Sequence[Sample], arguments: argparse.Namespace, columns: int
) -> Iterator[str]:
    yield from fold(header, columns)
    best, worst = _best_and_worst(samples, arguments.best or 0, arguments.worst or 0)
    blocks = {"best": best, "worst": worst}
    if arguments.failed and (lost := [one for one in samples if one.get("reward") is None]):
        blocks = {"without a reward": lost[:DEFAULT_WORST], **blocks}
    if arguments.random:
        blocks["random"] = random.Random(arguments.seed).sample(samples, min(arguments.random, len(samples)))
    if not (arguments.best or arguments.worst or arguments.random):
        distinct: dict[object, Sample] = {}
        for sample in samples:
            distinct.setdefault((sample["step"], _content(sample)), sample)
        blocks["all"] = list(distinct.values())
    copies = Counter(map(_content, samples))
    copies_in_step = Counter((sample["step"], _content(sample)) for sample in samples)
    for title, chosen in blocks.items():
        for number, sample in enumerate(chosen, start=1):
            num_equal = 1
            if title in ("best", "worst"):
                num_equal = copies[_content(sample)]
            elif title == "all":  # one prompt over the steps: each step keeps its own
                num_equal = copies_in_step[sample["step"], _content(sample)]
            yield ""
            yield from _sample_lines(f"{title} {number} of {len(chosen)}", sample, num_equal, columns)


def _summary(samples: Sequence[Sample], num_sampled: int | None) -> str:
    """Return one line that sums the samples up: steps, counts, rewards and lengths.

    Args:
        num_sampled: number of samples that the steps had. None: unknown."""
    steps = sorted({sample["step"] for sample in samples})
    rewards = [sample["reward"] for sample in samples if sample.get("reward") is not None]
    lengths = [sample["response_length"] for sample in samples if "response_length" in sample]
    parts = [f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"]
    count = str(len(samples)) if num_sampled in (None, len(samples)) else f"{len(samples)} of {num_sampled}"
    num_prompts = len({sample["row"] for sample in samples})
    prompts = f"of {num_prompts} prompt{'s' if num_prompts > 1 else ''}"
    parts = [*(parts if steps != [NO_STEP] else []), f"{count} sample{'s' if count != '1' else ''}", prompts]
    num_failed = len(samples) - len(rewards)
    if num_failed:
        parts.append(f"{num_failed} without a reward")
    if rewards and min(rewards) == max(rewards):
        parts.append(f"every {'other ' if num_failed else ''}reward {rewards[0]:.4g}")
    elif rewards:
        mean = sum(rewards) / len(rewards)
        parts.append(f"reward {mean:.4g} ({min(rewards):.4g} to {max(rewards):.4g})")
    if lengths:
        parts.append(f"{sum(lengths) / len(lengths):.1f} tokens a response")
    partly = num_sampled is not None and num_sampled > len(samples)
    return ", ".join(parts) + ("; --num-rollouts-to-log -1 logs all" if partly else "")


def _best_and_worst(
    samples: Sequence[Sample], num_best: int, num_worst: int
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples with the highest and with the lowest rewards. No sample is in both, and of samples
    with equal content only the newest is in one of them.

    If there are too few samples for both, each gets its share of them."""
    distinct: dict[object, Sample] = {}
    for sample in sorted(samples, key=lambda s: (-s["step"], s["sample_id"])):
        if sample.get("reward") is not None:
            distinct.setdefault(_content(sample), sample)
    scored = list(distinct.values())
    if num_best and num_worst and num_best + num_worst > len(scored):
        num_best = math.ceil(len(scored) * num_best / (num_best + num_worst))
    best = _ranked(scored, highest=True)[:num_best]
    others = [sample for sample in scored if not any(sample is one for one in best)]
    return best, _ranked(others, highest=False)[:num_worst]


def _ranked(samples: Sequence[Sample], highest: bool) -> list[Sample]:
    """Return samples by their reward. Of equal rewards one sample of each prompt comes first, and otherwise
    the order stays."""
    sign = -1 if highest else 1
    seen: Counter[object] = Counter()
    ranked = []
    for sample in samples:
        prompt = sample["reward"], sample["row"]
        ranked.append((sign * sample["reward"], seen[prompt], sample))
        seen[prompt] += 1
    return [sample for *_, sample in sorted(ranked, key=lambda one: one[:2])]


def _content(sample: Sample) -> object:
    """Return a key that is equal for two samples if a reader sees no difference between them."""
    return tuple(sample.get(name) for name in ("actor", "name", "row", "response", "reward"))


def _sample_lines(title: str, sample: Sample, num_equal: int, columns: int) -> Iterator[str]:
    reward = sample.get("reward")
    facts = [
        title,
        *([f"step {sample['step']}"] if sample["step"] != NO_STEP else []),
        *([str(sample["name"])] if "name" in sample else []),
        *([str(sample["actor"])] if "actor" in sample else []),
        f"sample {sample.get('sample_id', '?')}",
        f"row {sample.get('row', '?')}",
        "no reward" if reward is None else f"reward {reward:.4g}",
        f"{sample.get('response_length', '?')} tokens",
        f"finish {sample.get('finish_reason', 'unknown')}",
        *([f"{num_equal} samples are equal"] if num_equal > 1 else []),
    ]
    yield from fold("-- " + " | ".join(facts), columns)
    yield from block("prompt", _text(sample.get("prompt", "")), columns)
    if sample.get("turns"):
        yield from block(f"{sample.get('num_turns', '?')} turns", _text(sample["turns"]), columns)
        further = sample.get("branches")
        for number, branch in enumerate(further if isinstance(further, list) else [], 2):
            yield from block(f"branch {number}", _text(branch.get("turns", "")), columns)
    else:
        yield from block("response", str(sample.get("response", "")), columns)
    if sample.get("ground_truth") is not None:
        yield from block("ground truth", str(sample["ground_truth"]), columns)
    if sample.get("answer") is not None:
        yield from block("answer that was found in it", str(sample["answer"]), columns)
    parts = _reward_parts({key: sample[key] for key in sample.keys() - _SHOWN_ELSEWHERE})
    if parts:
        yield from block("parts of the reward", "\n".join(sorted(parts)), columns)


def _reward_parts(fields: Mapping[str, object]) -> list[str]:
    """Return a line per score, failure or answer of the rule and of each reward model."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, dict):
            lines += [f"{name}.{line}" for line in _reward_parts(value)]
        else:
            lines.append(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    return lines


def _text(prompt: object) -> str:
    """Return a prompt as text, one paragraph `role: content` per message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
