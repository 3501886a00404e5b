"""Runs the Python blocks of one page in one namespace, in a process of its own.

    run_page.py BLOCKS.json SEEN.json

BLOCKS.json holds [how, code] pairs. "plain" code runs as it is. "in a trainer" code is a fragment that uses
`trainer`. Neighbours share one trainer, of the page's `config`, which has made an ordinary step before.
SEEN.json gets the metrics that each block left in `metrics`."""

import itertools
import json
import sys
from pathlib import Path

import megarl


def main(blocks_file: str, seen_file: str) -> None:
    seen: list[dict[str, float] | None] = []
    page: dict[str, object] = {"megarl": megarl}
    for number, (how, group) in enumerate(
        itertools.groupby(json.loads(Path(blocks_file).read_text()), key=lambda block: block[0])
    ):
        if how == "plain":
            for _, code in group:
                seen.append(run(code, page))
            continue
        config = page["config"]
        Path(config.run.save).rename(f"{config.run.save}_{number}")  # the run that the page has made with it
        with megarl.Trainer(config) as trainer:
            trainer.update(trainer.rollout())
            page["trainer"] = trainer
            for _, code in group:
                seen.append(run(code, page))
    Path(seen_file).write_text(json.dumps(seen))


def run(code: str, page: dict[str, object]) -> object:
    page.pop("metrics", None)
    exec(code, page)  # noqa: S102 - our own documentation
    return page.get("metrics")


if __name__ == "__main__":
    main(*sys.argv[1:])
