"""Write the quickstart's data, tokenizer and initial model.

python tools/make_sums.py --out data/sums --seed 0"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from sums.files import make_sums

logger = logging.getLogger("make_sums")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write; files of an earlier call are replaced")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the training rows and of the initial weights"
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        paths = make_sums(arguments.out, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    for name, path in paths.items():
        logger.info("%-12s %s", name, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
