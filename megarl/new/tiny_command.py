"""Write a tiny model of any supported family, with a tokenizer and random weights, to try a task on.

    megarl tiny-model --out model                                   a Qwen3 that trains on a laptop
    megarl tiny-model --family deepseek_v3 --hidden 128 --layers 3 --out model
    megarl tiny-model --tokenizer-from data/sft.jsonl --vocab-size 2000 --out model
    megarl tiny-model --family llama --no-weights --out model       for training with --random-init

Nothing is downloaded. By default a token of the tokenizer is a byte, so that a letter of English is a token;
with --tokenizer-from frequent words and syllables of these rows are tokens too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config.errors import ConfigError, Errors, raise_errors
from megarl.config.hf_families import FAMILIES
from megarl.data.columns import text_of
from megarl.data.prompts import read_prompts
from megarl.data.readers import UnreadableFile
from megarl.files.writing import obstacle
from megarl.inspect.arguments import Parser, whole
from megarl.new.tiny_config import TinySizes, size_errors
from megarl.new.tiny_model import NUM_BYTE_TOKENS, write_tiny_model
from megarl.reshard.atlas import hf_sizes

_MOST_TOKENS = 2000
"""Default of --vocab-size with --tokenizer-from."""
_LARGEST_SEED = 2**32 - 1


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    sizes = TinySizes(
        family=arguments.family,
        hidden=arguments.hidden,
        layers=arguments.layers,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        ffn=arguments.ffn,
        experts=arguments.experts,
        experts_per_token=arguments.experts_per_token,
        context=arguments.context,
        dtype=arguments.dtype,
    )
    raise_errors([*size_errors(sizes), *_other_errors(arguments)])
    texts = [text for path in arguments.tokenizer_from or () for text in _texts(path)]
    vocab_size = arguments.vocab_size or (_MOST_TOKENS if texts else NUM_BYTE_TOKENS)
    shape = write_tiny_model(
        arguments.out, sizes, texts, vocab_size, arguments.seed, weights=not arguments.no_weights
    )
    num_parameters = sum(rows * columns for rows, columns in hf_sizes(shape).values())
    weights = "no weights (train it with --random-init)" if arguments.no_weights else "random weights"
    sys.stdout.write(
        f"{arguments.out}: {shape.architecture} with {num_parameters:,} parameters, {weights}\n"
        f"tokenizer: {shape.vocab_size} tokens\n"
    )
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("tiny-model", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; a model in it is replaced")
    parser.add_argument("--family", default="qwen3", help=f"{', '.join(FAMILIES)}; default: qwen3")
    parser.add_argument("--hidden", type=whole(1, 128), default=128, help="hidden size; default: 128")
    parser.add_argument("--layers", type=whole(1, 2), default=2, help="default: 2")
    parser.add_argument("--heads", type=whole(1, 4), help="default: as many as have a size of 32")
    parser.add_argument("--kv-heads", type=whole(1, 2), help="default: half of --heads")
    parser.add_argument(
        "--ffn", type=whole(1, 256), help="width of the MLP and of each expert; default: twice --hidden"
    )
    parser.add_argument("--experts", type=whole(1, 4), help="of mixtures of experts; default: 4")
    parser.add_argument("--experts-per-token", type=whole(1, 2), help="default: 2")
    parser.add_argument(
        "--context", type=whole(1, 512), default=512, help="longest prompt and response; default: 512 tokens"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument(
        "--tokenizer-from",
        nargs="+",
        metavar="FILE",
        help="*.jsonl or *.parquet whose rows teach the tokenizer",
    )
    parser.add_argument(
        "--vocab-size",
        type=whole(NUM_BYTE_TOKENS, _MOST_TOKENS),
        help=f"most tokens; default: {_MOST_TOKENS} with --tokenizer-from, else {NUM_BYTE_TOKENS}",
    )
    parser.add_argument("--no-weights", action="store_true", help="leave out model.safetensors")
    parser.add_argument("--seed", type=whole(0, 0), default=0, help="seed of the weights; default: 0")
    return parser.parse(argv)


def _other_errors(arguments: argparse.Namespace) -> Errors:
    if arguments.seed > _LARGEST_SEED:
        yield f"--seed ({arguments.seed}): must be at most {_LARGEST_SEED}. Try 0."
    if arguments.vocab_size and not arguments.tokenizer_from:
        yield (
            f"--vocab-size ({arguments.vocab_size}): needs --tokenizer-from, rows that tokens are made of. "
            "Add it, or leave --vocab-size out."
        )
    config = arguments.out / "config.json"
    if (why := obstacle(arguments.out)) is not None:
        yield f"--out ({arguments.out}): cannot be written: {why}. Name another folder."
    elif arguments.out.is_dir() and any(arguments.out.iterdir()) and not config.exists():
        yield f"--out ({arguments.out}): exists and holds no model. Try {arguments.out / 'model'}."


def _texts(path: str) -> Iterator[str]:
    """Yield the text of every message and response in a file of rows."""
    try:
        for place, prompt, problems in read_prompts(Path(path), "prompt", None):
            if problems:
                raise ConfigError([f"--tokenizer-from ({path}): {place}: {'; '.join(problems)}"])
            if isinstance(prompt.messages, str):
                yield prompt.messages
            else:
                yield from map(text_of, prompt.messages)
            if prompt.response is not None:
                yield text_of(prompt.response)
    except UnreadableFile as error:
        raise ConfigError([f"--tokenizer-from ({path}): {error}"]) from error
