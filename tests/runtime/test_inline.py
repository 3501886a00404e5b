"""The inline executor, and what both executors share. That they answer alike is tested in
test_torchrun.py."""

import subprocess
import sys

import pytest

from megarl.runtime.executor import CallTimeout, RemoteError
from megarl.runtime.inline_executor import InlineExecutor


class Critic:
    def values(self, n, scale=1.0):
        return [scale * i for i in range(n)]

    def broken(self):
        return {}["loss"]

    def generator(self):
        return (i for i in range(3))


def test_a_call_runs_at_once_and_keeps_its_time():
    executor = InlineExecutor({"critic": Critic()})
    future = executor.call("critic", "values", 3, scale=2.0)
    assert future.done() and future.result() == [[0.0, 2.0, 4.0]] and future.first() == [0.0, 2.0, 4.0]
    executor.call("critic", "values", 1)
    seconds = executor.take_seconds()
    assert list(seconds) == [("critic", "values")] and seconds["critic", "values"] > future.seconds > 0.0
    assert executor.take_seconds() == {}
    executor.shutdown()
    with pytest.raises(ValueError, match="not placed"):
        executor.call("critic", "values", 1)


def test_the_original_error_is_the_cause_so_a_debugger_stands_there():
    executor = InlineExecutor({"critic": Critic()})
    executor.label = "step 4"
    with pytest.raises(RemoteError) as raised:
        executor.call("critic", "broken")
    error = raised.value
    assert str(error).startswith("[critic rank 0] broken failed at step 4: KeyError: 'loss'\nTraceback")
    assert isinstance(error.__cause__, KeyError)
    frames, tb = [], error.__cause__.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert frames[-1] == "broken"  # pdb.post_mortem starts at the last one


def test_what_could_not_cross_a_process_border_is_an_error_here_too():
    executor = InlineExecutor({"critic": Critic()})
    with pytest.raises(
        RemoteError,
        match=r"\[critic rank 0\] generator failed: .*CannotSend: its result \(generator\) cannot be sent: "
        r"generator is no plain value",
    ):
        executor.call("critic", "generator")


def test_an_unknown_role_names_the_known_ones():
    executor = InlineExecutor({"critic": Critic(), "actor": Critic()})
    with pytest.raises(
        ValueError, match=r"role \('critik'\) is not placed on any rank. Placed roles: actor, critic."
    ):
        executor.call("critik", "values", 1)


def test_a_timeout_names_exactly_who_is_missing():
    one = CallTimeout("actor", "update", "step 3", ranks=[1], answered=[0, 2], timeout_s=1800.0)
    assert str(one).startswith(
        "[actor] update timed out at step 3: no answer from rank 1 (answered: 0, 2) within "
        "call_timeout_s (1800 s)."
    )
    both = CallTimeout("actor", "setup", None, ranks=[0, 1], answered=[], timeout_s=0.5)
    assert str(both).startswith(
        "[actor] setup timed out: no answer from ranks 0, 1 within call_timeout_s (0.5 s)."
    )


@pytest.mark.parametrize(
    "ranks, message",
    [
        ({"actor": [0, 1, 2]}, r"placed on ranks \[2\], but the job has 2 ranks \(0 to 1\). Start more."),
        ({"actor": [1]}, r"no role is placed on ranks \[0\] of the 2 that were started"),
    ],
)
def test_every_rank_needs_a_role(ranks, message):
    from megarl.runtime.store_executor import StoreExecutor

    with pytest.raises(ValueError, match=message):
        StoreExecutor(ranks, 2, 1.0, store=None)


def test_peak_memory_is_this_process_alone():
    """A child of a large parent: getrusage would report the parent's size at the fork."""
    code = (
        "from megarl.runtime.process import peak_rss_bytes as peak; a = peak(); x = bytearray(100 << 20); "
        "x[::4096] = bytes(len(x[::4096])); b = peak(); del x; print(a, b, peak())"
    )
    ballast = bytearray(300 << 20)
    ballast[::4096] = bytes(len(ballast[::4096]))
    before, with_100_mib, after = map(
        int, subprocess.check_output([sys.executable, "-P", "-c", code], timeout=60).split()
    )
    assert before < 100 << 20
    assert 95 << 20 < with_100_mib - before < 110 << 20
    assert after > with_100_mib - (
        1 << 20
    )  # a peak: 100 MiB less are resident by then (the kernel counts in batches of pages)
