"""Write a tiny model of any supported family, as `megarl tiny-model` does.

python tools/make_tiny_model.py --family qwen3 --hidden 64 --out model"""

from __future__ import annotations

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["tiny-model", *sys.argv[1:]]))
