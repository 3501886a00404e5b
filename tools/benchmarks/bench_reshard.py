"""How long it takes to bring a trainer's weights into vLLM, in several ways, on the same weights and in one
go.

    python tools/benchmarks/bench_reshard.py --json out.json [--model FOLDER] [--threads 2] [--repeats 7]
                                             [--only-copies | --only-megarl] [--device cuda] [--model-shape
                                             0.5b|7b]

Megatron's layout with two tensor-parallel ranks becomes vLLM's with one. In turns, `--repeats` times, medians
are reported:

    copy          megarl's plan over both ranks' shards, in one address space (as shared memory and CUDA IPC give it)
    digest        sampled and full digests of what the copy writes
    sync          a whole sync of a real engine beside the trainer, equal parallelism, everything copied; and the digests in it
    aliased sync  the same with --qkv-layout stacked and --reshard-alias: no byte moves
    memcpy        as many bytes in one block: the C library's memcpy with as many threads, and PyTorch's copy_
    send/recv     megarl's Transfer between two processes over gloo, for what cannot be addressed
    reload        vLLM's own reload_weights from the model folder (in the page cache)
    gather + load the path of other trainers: two processes all-gather every full tensor over gloo, rename and
                  split it, copy it into buckets, clone the bucket on the receiving side, and call vLLM's
                  model.load_weights

Without --model, tools/make_random_model.py writes one to runs/random-0.5b. On --device cuda the copies are
compared with the device's own copy, on random weights of --model-shape. Extra memory is the growth of the
peak resident set during a sync."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the first is missing under PYTHONSAFEPATH
import make_random_model

ROLES = ("copies", "sync", "alias", "reload", "gather_0", "gather_1", "transfer_0", "transfer_1")
TARGETS = (  # what, of which ways the ratio is, in which range it should be
    ("copy / memcpy", "copy bf16->bf16", "memcpy bf16->bf16", (0, 1.3)),
    ("(gather + load) / copy", "gather + load bf16->bf16", "copy bf16->bf16", (10, float("inf"))),
    ("digests of both ends / sync", "digests of a sync bf16->bf16", "sync bf16->bf16", (0, 0.02)),
    ("aliased sync, ms", "aliased sync bf16", None, (0, 5)),
)


def main() -> int:
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    build = extension_build(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.device == "cpu" and arguments.model is None:
            arguments.model = ROOT / "runs" / "random-0.5b"
            if not (arguments.model / "model.safetensors").exists():
                make_random_model.write_model_folder(arguments.model, weights=True, seed=0)
        arguments.folder = Path(folder)
        result = run_phases(arguments)
    result |= {"command": sys.argv, "extension": build, "load_average": os.getloadavg()}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--model", type=Path, help="Hugging Face folder with bf16 weights, for --device cpu")
    parser.add_argument(
        "--model-shape",
        choices=("0.5b", "7b"),
        default="0.5b",
        help="of the random weights, for --device cuda",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--only-copies", action="store_true", help="without vLLM and without a second process"
    )
    parser.add_argument(
        "--only-megarl", action="store_true", help="without the ways of others and without send/recv"
    )
    return parser.parse_args()


def extension_build(device: str) -> str:
    """Return how the extension was built whose copies are measured.

    Raises: SystemExit if there is none that copies on `device`, where PyTorch's copies would be taken for
        megarl's."""
    from megarl.reshard.copier import extension_for

    extension = extension_for(device)
    if extension is None:
        advice = "MEGARL_CUDA=ON and nvcc" if device == "cuda" else "a C++ compiler"
        raise SystemExit(
            f"--device {device}: the extension megarl._C must be built for it, else PyTorch copies. "
            f"Reinstall with {advice}."
        )
    return extension.build_info


def run_phases(arguments: argparse.Namespace) -> dict:
    """First bf16, with every way; then an fp32 trainer, copies only. Two phases, because both together need
    too much memory."""
    with_others = arguments.device == "cpu" and not arguments.only_copies
    roles = ROLES[:3] if arguments.only_megarl else ROLES
    phases = {"bfloat16": roles if with_others else ROLES[:1], "float32": ROLES[:1]}
    result: dict = {"arguments": {name: str(value) for name, value in vars(arguments).items()}, "ways": {}}
    for dtype, roles in phases.items():
        with Children(roles, arguments, dtype) as children:
            for _ in range(arguments.repeats + 1):
                for role, way in children.ways():
                    result["ways"].setdefault(way, []).append(children.measure(role, way))
            if with_others and dtype == "bfloat16":
                digests = {
                    role: children.ask(role, "digest")
                    for role in roles
                    if role != "reload" and not role.endswith("_1")
                }
                assert len({tuple(digest) for digest in digests.values()}) == 1, (
                    "the ways do not bring the same weights"
                )
    for way, runs in result["ways"].items():  # the first is a warm-up
        result["ways"][way] = {
            "seconds": median(run["seconds"] for run in runs[1:]),
            "bytes": runs[0]["bytes"],
            "extra_bytes": max(run["extra_bytes"] for run in runs[1:]),
            "first_extra_bytes": runs[0]["extra_bytes"],
            "all_seconds": [run["seconds"] for run in runs],
        }
    print_table(result)
    return result


class Children:
    """One process per role, told by turns what to run; the two halves of a pair run at once."""

    def __init__(self, roles: tuple[str, ...], arguments: argparse.Namespace, dtype: str) -> None:
        import reshard_roles

        context = multiprocessing.get_context("spawn")
        self._processes, self._pipes = {}, {}
        for role in roles:
            self._pipes[role], theirs = context.Pipe()
            self._processes[role] = context.Process(
                target=reshard_roles.play, args=(role, theirs, arguments, dtype), daemon=True
            )
            self._processes[role].start()
            theirs.close()
        self._ways = {role: self._receive(role) for role in roles}

    def ways(self) -> list[tuple[str, str]]:
        return [(role, way) for role, ways in self._ways.items() for way in ways]

    def measure(self, role: str, way: str) -> dict:
        partner = role.replace("_0", "_1")
        if partner != role:
            self._pipes[partner].send(way)
        result = self.ask(role, way)
        if partner != role:
            self._receive(partner)
        return result

    def ask(self, role: str, what: str) -> dict | list[int]:
        self._pipes[role].send(what)
        return self._receive(role)

    def _receive(self, role: str):
        try:
            answer = self._pipes[role].recv()
        except EOFError:
            raise RuntimeError(f"the process of {role} ended; its messages are above") from None
        return answer

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for role, pipe in self._pipes.items():
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes.values():
            process.join(30)
            if process.is_alive():
                process.terminate()


def print_table(result: dict) -> None:
    ways = result["ways"]
    print(f"{'':34}{'ms':>10}{'MB':>8}{'GB/s':>8}{'extra MB':>10}   ratio")
    ratios = result["ratios"] = {}
    for way, numbers in ways.items():
        kind, _, dtypes = way.partition(" ")
        reference = f"memcpy {dtypes}"
        ratio = ""
        if kind == "copy" and reference in ways:
            ratios[f"{way} / memcpy"] = numbers["seconds"] / ways[reference]["seconds"]
            ratio = f"{ratios[f'{way} / memcpy']:.2f} x {reference}"
            if result["arguments"]["device"] == "cuda":
                ratio += f" = {1 / ratios[f'{way} / memcpy']:.2f} of its speed"
        elif (
            "copy bf16->bf16" in ways
            and kind not in ("memcpy", "torch", "copy", "aliased")
            and "bf16->bf16" in way
        ):
            ratios[f"{way} / copy"] = numbers["seconds"] / ways["copy bf16->bf16"]["seconds"]
            ratio = f"{ratios[f'{way} / copy']:.3g} x copy bf16->bf16"
        speed, extra = (
            numbers["bytes"] / numbers["seconds"] / 1e9,
            max(numbers["extra_bytes"], numbers["first_extra_bytes"]),
        )
        print(
            f"{way:34}{1e3 * numbers['seconds']:10.2f}{numbers['bytes'] / 1e6:8.0f}{speed:8.2f}{extra / 1e6:10.1f}   {ratio}"
        )
    for what, way, reference, (least, most) in TARGETS:
        if way in ways and (reference is None or reference in ways):
            value = ways[way]["seconds"] / (ways[reference]["seconds"] if reference else 1e-3)
            result.setdefault("targets", {})[what] = {"value": value, "least": least, "most": most}
            print(
                f"{what:34}{value:10.3f}   target: "
                f"{f'>= {least}' if least else f'<= {most}'}{'' if least <= value <= most else ', MISSED'}"
            )


if __name__ == "__main__":
    sys.exit(main())
