"""Make the tables of algorithms, policy losses, corrections and settings of papers, for `megarl algorithms`
and docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megarl.algorithms import REGISTRY
from megarl.algorithms.ratio_transforms import TRANSFORMS

_INSTRUCT_GPT = "--kl-mode reward --kl-estimator k1 --kl-coef 0.02"


class Correction(NamedTuple):
    """One off-policy correction, with the flags that choose it."""

    name: str
    flags: str
    paper: str
    summary: str


CORRECTIONS: tuple[Correction, ...] = (
    Correction("TIS", "--tis-clip 2", "1802.01561", "a token is weighted by min(w, 2)"),
    Correction(
        "sequence TIS",
        "--tis-clip 2 --tis-level sequence",
        "",
        "a response is weighted by min(product of w, 2)",
    ),
    Correction(
        "IcePop",
        "--mis-level token --mis-low 0.5 --mis-high 5 --tis-clip 5",
        "2510.18855",
        "a token is weighted by w, and by 0 where w is outside 0.5 to 5",
    ),
    Correction(
        "sequence mask (MIS)",
        "--mis-level sequence",
        "",
        "a response has no gradient where its product of w is outside 0.5 to 2",
    ),
    Correction(
        "geometric mask",
        "--mis-level geometric",
        "",
        "the same by the geometric mean of w, outside 0.99 to 1.01: does not depend on the length",
    ),
    Correction(
        "token veto",
        "--token-veto 1e-4",
        "",
        "a response has no gradient if one of its tokens has w below 1e-4",
    ),
)
"""Corrections with their flags; w is the trainer's probability of a token divided by the engine's."""


class Recipe(NamedTuple):
    """The flags that select the method of a paper."""

    name: str
    paper: str
    flags: str


RECIPES: tuple[Recipe, ...] = (
    Recipe("GRPO", "2402.03300", "--loss-aggregation seq-mean-token-mean --kl-mode loss --kl-coef 0.04"),
    Recipe("Dr. GRPO", "2503.20783", "--loss-aggregation dr-grpo --no-normalize-advantages-by-std"),
    Recipe("DAPO", "2503.14476", "--clip-eps-high 0.28 --overlong-buffer 4096 --dynamic-sampling"),
    Recipe("GSPO", "2507.18071", "--policy-loss gspo --loss-aggregation seq-mean-token-mean"),
    Recipe("GMPO", "2507.20673", "--policy-loss gmpo --loss-aggregation seq-mean-token-mean"),
    Recipe("CISPO", "2506.13585", "--policy-loss cispo --clip-eps-low 1"),
    Recipe("SAPO", "2511.20347", "--policy-loss sapo --loss-aggregation seq-mean-token-mean"),
    Recipe("Clip-Cov", "2505.22617", "--policy-loss clip-cov"),
    Recipe("KL-Cov", "2505.22617", "--policy-loss kl-cov"),
    Recipe("DPPO-Binary-TV", "2602.04879", "--policy-loss dppo-tv"),
    Recipe("DPPO-Binary-KL", "2602.04879", "--policy-loss dppo-kl"),
    Recipe(
        "RLOO",
        "2402.14740",
        "--algorithm rloo --policy-loss reinforce --loss-aggregation seq-mean-token-sum --kl-mode reward "
        "--kl-estimator k1 --kl-coef 0.03",
    ),
    Recipe(
        "REINFORCE++",
        "2501.03262",
        "--algorithm reinforce++ --kl-mode reward --kl-estimator k1 --kl-coef 0.01",
    ),
    Recipe(
        "REINFORCE++ with baseline",
        "2501.03262",
        "--algorithm reinforce++-baseline --kl-mode loss --kl-estimator k2 --kl-coef 0.01",
    ),
    Recipe(
        "ReMax",
        "2310.10505",
        "--algorithm remax --policy-loss reinforce --loss-aggregation seq-mean-token-sum --kl-mode reward "
        "--kl-estimator k1 --kl-coef 0.1",
    ),
    Recipe("OPO", "2505.23585", "--algorithm opo --policy-loss reinforce"),
    Recipe("MaxRL", "2602.02710", "--algorithm maxrl --policy-loss reinforce"),
    Recipe("PPO, as InstructGPT", "2203.02155", f"--algorithm ppo {_INSTRUCT_GPT}"),
    Recipe("IPPO", "2011.09533", "--algorithm ppo --num-actors 2 --env my_env.py:Env --share-episodes"),
    Recipe(
        "VAPO",
        "2504.05118",
        "--algorithm ppo --critic-gae-lambda 1 --gae-lambda-alpha 0.05 --clip-eps-high 0.28 --critic-warmup-iters 50 "
        "--positive-nll-coef 0.1",
    ),
    Recipe("A-3PO", "2512.06547", "--old-log-probs interpolated --staleness 1"),
    Recipe("cDPO", "2305.18290", "--algorithm dpo --label-smoothing 0.1"),
    Recipe("DPO + NLL, iterative RPO", "2404.19733", "--algorithm dpo --nll-coef 1"),
    Recipe("IPO, as TRL", "2310.12036", "--algorithm ipo --average-log-probs"),
    Recipe("IcePop", "2510.18855", next(c.flags for c in CORRECTIONS if c.name == "IcePop")),
)
"""Papers as flags. Without --algorithm it is grpo. With --policy-loss reinforce: one update per step."""


class Way(NamedTuple):
    """A way to train: answers of one turn or episodes of several, and --staleness."""

    turns: str
    staleness: int


WAYS = tuple(Way(turns, staleness) for turns in ("one turn", "several turns") for staleness in (0, 1))
"""Every way, whether or not an algorithm trains so."""


def ways(name: str) -> tuple[Way, ...]:
    """Return the ways in which an algorithm trains. `megarl check` refuses the others with the reason."""
    if not REGISTRY[name].needs_rollout:
        return (Way("one turn", 0),)  # rows of the data set
    return WAYS


class Table(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables() -> Iterator[Table]:
    """Yield the tables of algorithms, losses, corrections and settings of papers. Each row begins with the
    entry's name."""
    yield Table(
        "Algorithms (--algorithm)",
        ("name", "what", "advantage", "needs", "several turns", "staleness", "paper"),
        [
            (
                name,
                (cls.__doc__ or "").splitlines()[0],
                cls.advantage_formula,
                _needs(name),
                "yes" if Way("several turns", 0) in ways(name) else "no",
                "yes" if Way("one turn", 1) in ways(name) else "no",
                cls.paper,
            )
            for name, cls in REGISTRY.items()
        ],
    )
    yield Table(
        "Ratio transforms (--policy-loss)",
        ("name", "what", "its flags", "sees", "paper"),
        [
            (
                name,
                transform.summary,
                ", ".join(
                    f"--{field.replace('_', '-')}" for field in (*transform.defaults, *transform.optional)
                ),
                "token" if transform.token_level else "response",
                transform.paper,
            )
            for name, transform in TRANSFORMS.items()
        ],
    )
    yield Table("Off-policy corrections", Correction._fields, CORRECTIONS)
    yield Table("Papers as flags", Recipe._fields, RECIPES)


def _needs(name: str) -> str:
    """Return a list in words of what an algorithm needs besides the actor, such as "a critic, one update per
    step"."""
    cls = REGISTRY[name]()
    needs = {
        "responses in the data": not cls.needs_rollout and cls.row_needs == "response",
        "pairs in the data": cls.row_needs in ("pair", "scored_pair"),
        "labels in the data": cls.row_needs == "labelled",
        "scores of both answers": cls.row_needs == "scored_pair",
        "a critic": cls.needs_critic and not cls.needs_cost_critic,
        "a critic, a critic of costs, a score that is the cost": cls.needs_cost_critic,
        "a teacher": cls.is_taught,
        "several responses per prompt": cls.relative_to_group and not cls.greedy_samples,
        "a greedy response per prompt": cls.greedy_samples > 0,
        "one update per step": cls.is_on_policy or cls.needs_rollout and cls.one_update,
    }
    return ", ".join(what for what, is_needed in needs.items() if is_needed)


def as_text() -> str:
    """Return the tables of `megarl algorithms` as text for a terminal."""
    lines = []
    for table in tables():
        widths = [max(len(row[i]) for row in (table.head, *table.rows)) for i in range(len(table.head))]
        lines += [table.title, ""]
        for row in (table.head, *table.rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths))
            lines.append("  " + "  ".join(cells).rstrip())
        lines.append("")
    return "\n".join(
        [*lines, "Any algorithm that samples takes any ratio transform with any corrections.", ""]
    )


def as_markdown() -> str:
    """Return the tables of `megarl algorithms` as Markdown for docs/algorithms.md."""
    lines = []
    for table in tables():
        lines += [f"### {table.title.replace('--', '`--').replace(')', '`)')}", ""]
        lines += [f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|"]
        for row in table.rows:
            lines.append(f"| {' | '.join(map(_markdown, table.head, row))} |")
        lines.append("")
    return "\n".join(lines)


def _markdown(head: str, cell: str) -> str:
    if head == "paper" and cell:
        return f"[{cell}](https://arxiv.org/abs/{cell})"
    is_code = head in ("flags", "its flags") or (head == "name" and cell in {*REGISTRY, *TRANSFORMS})
    return f"`{cell}`" if cell and is_code else cell
