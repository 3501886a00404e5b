"""One engine whose weights change while requests run. Writes FOLDER/<kind>.json.

    python tests/rollout/run_running_commits.py FOLDER vllm|vllm-process|vllm-processes|transformers|... ...

Three models take turns, whose log-probs differ by more than 1. Each check compares what the engine says of a
token with the models themselves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import jobs

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import hf_atlas
from megarl.rollout.draws import draw_key
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.out_of_process import OutOfProcessEngine
from megarl.rollout.requests import Output, Request

MODELS = [jobs.reference_model("qwen3", seed, 0.08) for seed in (1, 2, 3)]
SEATS, BLOCK, STEPS = 8, 32, 13
GROUP, ONE = jobs.prompts(2, 150, seed=1, length=(90, 91))
PROMPTS = [GROUP] * 3 + jobs.prompts(6, 150, seed=2, length=(40, 90)) + [GROUP] * 3  # the last four wait
KEYS = [draw_key(7, "train", number) for number in range(len(PROMPTS))]


def requests(max_tokens: int = 40) -> list[Request]:
    pairs = enumerate(zip(PROMPTS, KEYS))
    return [Request(str(i), prompt, key, max_tokens + i % 5) for i, (prompt, key) in pairs]


class Story:
    """An engine, its trainer's weights, and what the checks found."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.is_outside, backend = "process" in kind, kind.split("-")[0]
        self.steps_by_itself = self.is_outside and backend == "vllm"
        tp = 2 if kind.endswith("processes") else 1
        model = jobs.make_folder(folder / "qwen3", "qwen3")
        config = jobs.job(
            model,
            backend=backend,
            block_size=BLOCK if backend == "vllm" else None,
            max_num_seqs=SEATS,
            tensor_parallel_size=tp,
            sampling={"max_prompt_length": 100, "max_response_length": 64},
        )
        shape, self.report, self.models, self.version = ModelShape.load(model), {}, [], 0
        live = jobs.reference_model("qwen3", 1, 0.08)
        self.live = jobs.full_tensors(live)
        if self.is_outside:
            self.engine = OutOfProcessEngine(config, shape, range(tp), range(tp))
            self.engine.connect({0: hf_atlas(shape)}, self.live)
        else:
            self.engine = RolloutEngine(config, shape, [0], {0: hf_atlas(shape)}, self.live)
        self.inference = self.engine.inference
        self.outputs: dict[str, Output] = {}
        self.model = 0

    def commit(self, model: int, running: str) -> None:
        """Write the weights of another model, and commit them as the next version."""
        for name, tensor in jobs.full_tensors(MODELS[model]).items():
            self.live[name].copy_(tensor)
        self.engine.commit = lambda version: self.inference.commit(version, running)
        self.engine.begin_sync(self.inference.version + 1 if self.inference.version else 1)
        begin = time.perf_counter()
        self.engine.finish_sync()
        self.report[f"ms to commit, {running}"] = 1e3 * (time.perf_counter() - begin)

    def take(self) -> None:
        self.outputs |= {output.id: output for output in self.inference.take()}

    def steps(self, number: int, wanted: list[Request]) -> None:
        """Let an engine that stands still take so many steps more, with new requests.

        Its scheduler holds back the tokens that it has sampled: nobody asks for them."""
        begin = self.inference.num_steps
        self.inference.hold(begin)
        self.inference.add(wanted)
        self.inference.hold(begin + number)
        while self.inference.num_steps < begin + number:
            self.inference.step()
        for _ in range(3):
            self.inference.step()
        assert self.inference.num_steps == begin + number

    def finish(self) -> dict[str, Output]:
        self.inference.hold(None)
        while self.inference.has_unfinished():
            self.inference.step()
        self.take()
        outputs, self.outputs = self.outputs, {}
        return outputs

    # ------------------------------------------------------------------ checks

    def undisturbed(self) -> None:
        """The same requests undisturbed, with many looks at them, and with a stop and a new label."""
        self.inference.add(requests())
        expected = self.finish()
        self.inference.reset_cache()
        self.inference.add(requests())
        seen, looks = {}, 0
        while self.inference.has_unfinished():
            self.inference.step()
            for output in self.inference.progress():
                looks += 0 < len(output.token_ids)
                before = seen.get(output.id, [])
                assert output.token_ids[: len(before)] == before and output.finish_reason is None
                assert len(output.log_probs) == len(output.versions) == len(output.token_ids)
                seen[output.id] = output.token_ids
        watched = self.finish()
        self.inference.reset_cache()
        version = self.inference.version
        self.steps(STEPS, requests())
        self.inference.set_version(version + 1)
        labelled = self.finish()
        self.report["undisturbed"] = {
            "looks": looks,
            "watched": [self.same(watched[i], expected[i]) for i in expected],
            "held": [self.same(labelled[i], expected[i]) for i in expected],
            "labels": [self.is_labelled(output, version) for output in labelled.values()],
        }

    @staticmethod
    def same(one: Output, other: Output) -> list[bool]:
        return [one.token_ids == other.token_ids, one.log_probs == other.log_probs]

    @staticmethod
    def is_labelled(output: Output, version: int) -> bool:
        """Whether `version` sampled what the first steps could, and the next version the rest."""
        has_run, length = int(output.id) < SEATS, len(output.token_ids)
        num_old = min(STEPS, length) if has_run else 0
        return output.versions == [version] * num_old + [version + 1] * (length - num_old)

    def switched(self, running: str, old: int, new: int) -> None:
        """Some requests run and some wait while the weights change. More requests enter afterwards."""
        version = self.inference.version
        self.steps(STEPS, requests())
        self.commit(new, running)
        late = [Request(f"late{i}", GROUP, 900 + i, 20) for i in range(2)]
        self.inference.add(late)
        outputs = self.finish()
        gaps: dict[str, list[float]] = {"before": [], "after": [], "later": [], "if unlabelled": []}
        labels = []
        for number, output in outputs.items():
            prompt = GROUP if number.startswith("late") else PROMPTS[int(number)]
            if number.startswith("late"):
                labels.append(set(output.versions) == {version + 1})
            else:
                labels.append(self.is_labelled(output, version))
            num_old = output.versions.count(version)
            told = torch.tensor(output.log_probs)
            if num_old == 0:
                gaps["later"].append(self.gap(MODELS[new], prompt, output, told, 0))
                continue
            expected = jobs.sampled_log_probs(MODELS[old], prompt, output.token_ids)
            gaps["before"].append((expected - told)[:num_old].abs().max().item())
            if num_old < len(told):
                gaps["if unlabelled"].append((expected - told)[num_old:].abs().max().item())
                if running == "recompute":
                    gaps["after"].append(self.gap(MODELS[new], prompt, output, told, num_old))
                else:
                    mixed = kept_log_probs(MODELS[old], MODELS[new], prompt, output.token_ids, num_old)
                    gaps["after"].append((mixed - told)[num_old:].abs().max().item())
        self.report[running] = {
            "labels": labels,
            "numbers": {name: len(values) for name, values in gaps.items()},
            "gaps": {name: max(values) for name, values in gaps.items()},
            "least": min(gaps["if unlabelled"]),
            "next turn": self.next_turn(outputs["0"], MODELS[new]),
        }

    def next_turn(self, answer: Output, model) -> float:
        """The turn after an answer that had run when the weights changed, whose blocks are still cached."""
        prompt = [*GROUP, *answer.token_ids, *ONE[:5]]
        self.inference.add([Request("turn", prompt, 77, 9)])
        output = self.finish()["turn"]
        return self.gap(model, prompt, output, torch.tensor(output.log_probs), 0)

    @staticmethod
    def gap(model, prompt, output: Output, told: torch.Tensor, first: int) -> float:
        return (jobs.sampled_log_probs(model, prompt, output.token_ids) - told)[first:].abs().max().item()

    def refused(self) -> None:
        """A commit that refuses unfinished requests changes nothing for them."""
        version = self.inference.version
        self.steps(3, requests(10))
        try:
            self.inference.commit(99)
        except RuntimeError as error:
            self.report["refused"] = str(error)
        assert self.inference.version == version or not self.is_outside
        outputs = self.finish()
        self.report["after refusal"] = [len(outputs), *{v for o in outputs.values() for v in o.versions}]
        past = self.inference.num_steps - 1
        try:
            self.inference.hold(past)
        except ValueError as error:
            self.report["past"] = str(error)

    def shares(self) -> None:
        """A group shares the blocks of its prompt, also while requests of an earlier version run."""
        free, found = self.inference.free_kv_tokens(), []
        for running in (False, True):
            if running:
                self.steps(2, [Request("old", ONE, 5, 60)])
                self.commit(1, "keep")
            before = self.inference.free_kv_tokens()
            self.steps(4, [Request(f"g{i}", GROUP, 50 + i, 8) for i in range(4)])
            found.append(before - self.inference.free_kv_tokens())
            self.finish()
        self.report["group's tokens"] = found
        self.report["leaked"] = free - self.inference.free_kv_tokens()

    def aborted(self) -> None:
        """Requests are aborted that run, wait, or have finished without being taken."""
        free = self.inference.free_kv_tokens()
        self.steps(2, requests())
        self.inference.abort(["0", "11"])
        left = [output.id for output in self.inference.progress()]
        self.inference.abort(left)
        self.inference.hold(None)
        self.inference.step()
        begin = self.inference.num_steps
        self.inference.add([Request("short", ONE, 5, 1)])
        while self.inference.num_steps == begin:
            if self.steps_by_itself:  # nobody looks while it finishes
                time.sleep(0.01)
            else:
                self.inference.step()
        self.inference.abort(["short", "never seen"])
        for _ in range(3):
            self.inference.step()
        outputs = self.finish()
        self.report["aborted"] = [len(left), len(outputs), free - self.inference.free_kv_tokens()]

    def aborted_within_a_step(self) -> None:
        """In this process: a request is aborted while the step runs that samples its last token."""
        core = self.inference.llm.llm_engine.engine_core.engine_core
        self.steps(4, [Request("ends", ONE, 5, 5), Request("other", ONE, 6, 9)])
        ends = [number for number, request in core.scheduler.requests.items() if request.max_tokens == 5]
        core.aborts_queue.put(ends)
        self.inference.hold(None)
        self.inference.step()
        self.inference.abort(["ends"])
        outputs = self.finish()
        self.report["aborted within a step"] = [len(ends), [*outputs], len(outputs["other"].token_ids)]

    def prompt_steps(self) -> None:
        """Number of steps while the engine runs, and what steps cost while it stands still."""
        self.inference.add([Request(str(i), ONE, i, 60) for i in range(SEATS)])
        number = 0
        while self.inference.has_unfinished():
            self.inference.step()
            number += 1
        self.finish()
        self.steps(2, [Request("x", ONE, 1, 30)])
        begin, cpu, still = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < begin + 0.3:
            self.inference.step()
            still += 1
        self.report["steps"] = {
            "number": number,
            "still": still,
            "cpu": time.process_time() - cpu,
        }
        begin = time.perf_counter()
        self.inference.progress()
        self.report["ms of progress"] = 1e3 * (time.perf_counter() - begin)
        self.finish()


@torch.no_grad()
def kept_log_probs(old, new, prompt: list[int], response: list[int], num_old: int) -> torch.Tensor:
    """[len(response)] log-probs if the old model computed the KV cache of all but the last old token."""
    tokens, cut = torch.tensor([prompt + response]), len(prompt) + num_old - 1
    first = old(tokens[:, :cut], use_cache=True)
    second = new(tokens[:, cut:-1], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits[0, len(prompt) - 1 :], second.logits[0]]).float()
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def tell(folder: Path, kind: str) -> dict:
    """Run all checks on one engine. Returns the report."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    begin = time.perf_counter()
    story = Story(folder, kind)
    story.commit(0, "refuse")
    begun = time.perf_counter()
    story.undisturbed()
    story.switched("keep", 0, 1)
    story.switched("recompute", 1, 2)
    story.refused()
    story.commit(0, "refuse")
    if kind.startswith("vllm"):
        story.shares()
    story.aborted()
    if kind == "vllm":
        story.aborted_within_a_step()
    story.prompt_steps()
    story.report["seconds"] = [begun - begin, time.perf_counter() - begun]
    story.engine.shutdown()
    if dist.is_initialized():  # an engine in this process has ended it
        dist.destroy_process_group()
    return story.report


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for kind in sys.argv[2:]:
        (folder / f"{kind}.json").write_text(json.dumps(tell(folder, kind)))


if __name__ == "__main__":
    main()
