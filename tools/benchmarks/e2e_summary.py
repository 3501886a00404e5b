"""Summarise the runs of bench_e2e.py and print them as a table."""

from __future__ import annotations

from statistics import median

PHASES = ("rollout", "reward", "log_probs", "update", "reshard")
TARGET = 0.90
SKIPPED_STEPS = 2


def describe(configuration: tuple[int, int, str | None]) -> str:
    processes, threads, cache = configuration
    return f"{processes} process(es) x {threads} thread(s), {cache or 'dynamic'} cache"


def step_time(run: dict) -> float:
    """Median seconds of a step in the steady state."""
    return median(step["step_s"] for step in run["steps"][SKIPPED_STEPS:])


def seconds_to_target(run: dict) -> float | None:
    """Seconds of training until the first evaluation at or above the target; None if there is none."""
    reached = [step for step, accuracy in run["evaluations"].items() if accuracy >= TARGET]
    return sum(step["step_s"] for step in run["steps"] if step["step"] <= min(reached)) if reached else None


def summarize(runs: list[dict], recipe: dict) -> dict:
    sides = {}
    for side in dict.fromkeys(run["side"] for run in runs):
        speed = [run for run in runs if run["side"] == side and run["kind"] == "speed"]
        learning = [run for run in runs if run["side"] == side and run["kind"] == "learning"]
        steps = [step for run in speed for step in run["steps"][SKIPPED_STEPS:]]
        phases = {name: median(step.get(f"{name}_s", 0.0) for step in steps) for name in PHASES}
        phases["rest"] = median(
            step["step_s"] - sum(step.get(f"{name}_s", 0.0) for name in PHASES) for step in steps
        )
        seconds = median(step["step_s"] for step in steps)
        undisturbed = [
            min(step["step_s"] for step in same)
            for same in zip(*(run["steps"] for run in speed), strict=True)
        ]
        sides[side] = {
            "samples_per_s": recipe["num_prompts"] * recipe["num_samples_per_prompt"] / seconds,
            "step_s": seconds,
            "phases_s": phases,
            "step_s_best_of_repeats": median(undisturbed[SKIPPED_STEPS:]),
            "step_s_of_each_repeat": [step_time(run) for run in speed],
            "response_length": sum(step["response_length"] for step in steps) / len(steps),
            "seconds_to_target": [seconds_to_target(run) for run in learning],
            "accuracy_before": learning[0]["evaluations"][0],
            "accuracy_after": [list(run["evaluations"].values())[-1] for run in learning],
            "startup_s": median(run["startup_s"] for run in speed),
            "wall_s": median(run["wall_s"] for run in speed),
            "peak_memory_bytes": max(run["peak_memory_bytes"] for run in speed),
        }
    if "trl" not in sides:
        return sides
    pairs = zip(sides["megarl"]["step_s_of_each_repeat"], sides["trl"]["step_s_of_each_repeat"], strict=True)
    return sides | {
        "step_time_ratio": sides["megarl"]["step_s"] / sides["trl"]["step_s"],
        "step_time_ratio_of_each_repeat": [m / t for m, t in pairs],
    }


def table(result: dict) -> str:
    """The summary for people, one row per quantity."""
    summary = result["summary"]
    sides = [summary[side] for side in ("megarl", "trl") if side in summary]

    def row(name: str, *values: str) -> str:
        return f"{name:34s}" + "".join(f"{value:>16s}" for value in values)

    def several(values: list[float | None], form: str) -> str:
        return " ".join("never" if value is None else form.format(value) for value in values)

    lines = [
        "",
        row("", "megarl", *([f"TRL {result['versions']['trl']['trl']}"] if "trl" in summary else [])),
        row("samples/s", *(f"{s['samples_per_s']:.0f}" for s in sides)),
        row("seconds per step (median)", *(f"{s['step_s']:.3f}" for s in sides)),
        *(
            row(f"  {name.replace('_', '-')}", *(f"{s['phases_s'][name]:.3f}" for s in sides))
            for name in (*PHASES, "rest")
        ),
        row("  if each step's best repeat counts", *(f"{s['step_s_best_of_repeats']:.3f}" for s in sides)),
        row("response length, tokens", *(f"{s['response_length']:.1f}" for s in sides)),
        row(
            f"training seconds to {TARGET:.2f} held-out",
            *(several(s["seconds_to_target"], "{:.1f}") for s in sides),
        ),
        row("held-out accuracy before", *(f"{s['accuracy_before']:.3f}" for s in sides)),
        row(
            f"held-out accuracy after {result['steps']} steps",
            *(several(s["accuracy_after"], "{:.3f}") for s in sides),
        ),
        row("start-up, seconds", *(f"{s['startup_s']:.1f}" for s in sides)),
        row("whole run, seconds", *(f"{s['wall_s']:.1f}" for s in sides)),
        row("peak memory, GiB", *(f"{s['peak_memory_bytes'] / 2**30:.2f}" for s in sides)),
        "",
    ]
    if "trl" in summary:
        each = several(summary["step_time_ratio_of_each_repeat"], "{:.2f}")
        lines.append(f"step time megarl / TRL: {summary['step_time_ratio']:.2f} (each repeat: {each})")
        lines.append("TRL ran in the fastest of:")
    lines += [
        *(
            f"  {describe(tuple(c.values())[:3])}: {several(c['step_s'], '{:.3f}')} s per step"
            for c in result["trl_configurations"]
        ),
        f"{result['machine']['cores']} cores of {result['machine']['cpu']}; load average at the end "
        f"{result['machine']['load_average_at_end'][0]:.1f}",
    ]
    return "\n".join(lines) + "\n"
