"""Add methods to vLLM's engine core, which run between two of its steps.

    front end       VllmEngine: requests, detokenizer, results
    engine core     scheduler and KV cache; it steps in this process, or by itself in a process of its own

vLLM calls a method of its engine core by name and offers no place for further ones. `register` therefore adds
them to the class, in every process of vLLM. They use internals of vLLM, as the scheduler does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore


def report(core: EngineCore) -> None:
    """Report to the front end the tokens that the scheduler has held back, labelled with the current version
    of the weights."""
    from vllm.v1.engine import EngineCoreOutputs

    if holds_back(core.scheduler) and (held := core.scheduler.take_unreported()):
        core.megarl_deliver(EngineCoreOutputs(outputs=held, weight_version=core.get_weight_version()))


def deliver(core: EngineCore, outputs: EngineCoreOutputs) -> None:
    """Queue outputs for the front end in another process. VllmEngine replaces this in its own process."""
    core.output_queue.put_nowait((0, outputs))


def label(core: EngineCore, version: str) -> None:
    """Set the version of the weights with which tokens that are sampled from now on are labelled.

    vLLM labels tokens when they are reported, so those that were held back are reported first."""
    report(core)
    core.set_weight_version(version)


def switch(core: EngineCore, version: str, recompute: bool, salt: str) -> str | None:
    """Sample with the transferred weights from now on. The engine is paused, or has no requests.

    No request may find a prefix in the cache that earlier weights computed. Without running requests the
    cache is emptied. Otherwise it keeps the prefixes of running requests, under the hashes of earlier salts,
    and all other requests get a new salt.

    Args:
        recompute: whether running requests lose their KV cache. They compute it anew with the new weights.
        salt: a salt that no earlier call had.
    Returns: the salt that later requests need; None if they need none."""
    from vllm.v1.request import RequestStatus

    while core.batch_queue:  # batches that an engine on a GPU has under way
        outputs, _ = core.step_fn()
        if outputs:
            core.megarl_deliver(outputs[0])
    report(core)
    core.collective_rpc("finish_weight_update")
    core.set_weight_version(version)
    is_empty = (recompute or not core.scheduler.running) and core.reset_prefix_cache(recompute)
    needed = None if is_empty else salt
    for request in core.scheduler.requests.values():
        if request.status != RequestStatus.RUNNING and request.cache_salt != needed:
            request.cache_salt = needed
            request.block_hashes.clear()
            request.update_block_hashes()
    return needed


def put_first(core: EngineCore, ids: list[str]) -> None:
    """Put waiting requests before all others that wait, in this order."""
    waiting = core.scheduler.waiting
    requests = [core.scheduler.requests[name] for name in ids]
    waiting.remove_requests(requests)
    waiting.prepend_requests(requests[::-1])


def num_steps(core: EngineCore) -> int:
    """Return the number of steps that computed something; with a scheduler of vLLM's own, all steps."""
    scheduler = core.scheduler
    return scheduler.num_steps if holds_back(scheduler) else scheduler.current_step


def hold(core: EngineCore, step: int | None) -> None:
    """Make an engine that steps by itself stop before a step; see `InferenceEngine.hold`."""
    if not holds_back(core.scheduler):
        raise RuntimeError("only the scheduler megarl.rollout.scheduler.DecodeScheduler can hold an engine")
    check_step(step, core.scheduler.num_steps)
    core.scheduler.held_at = step


def check_step(step: int | None, num_done: int) -> None:
    """Raise ValueError if an engine that has taken `num_done` steps can no longer stop before `step`."""
    if step is not None and step < num_done:
        raise ValueError(f"the engine cannot stand still before step {step}: it has taken {num_done} steps")


def free_kv_tokens(core: EngineCore) -> int:
    """Return for how many tokens the KV cache has blocks that no running request uses."""
    scheduler = core.scheduler
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * scheduler.block_size


def holds_back(scheduler: Scheduler) -> bool:
    """Return whether the scheduler is megarl's, which reports a request's tokens when it is complete."""
    return hasattr(scheduler, "take_unreported")


def register() -> None:
    """Add the methods to vLLM's class, as `megarl_<name>`. May be called again."""
    from vllm.v1.engine.core import EngineCore

    for method in (report, deliver, label, switch, put_first, num_steps, hold, free_kv_tokens):
        setattr(EngineCore, f"megarl_{method.__name__}", method)
