"""Who can reach a job's store, and what he can do there: real ranks, a real second process. `pytest
tests/runtime/test_job_store.py`"""

import json
import os
import socket
import sys
import time

import pytest
import torch.distributed as dist

from megarl.runtime import signing
from megarl.runtime.channel import CHALLENGE_BYTES, CHILD, REFUSED, frame
from megarl.runtime.messages import Call, encode
from megarl.runtime.signing import ForgedMessage, SecretError, agree, check_secret, job_secret, sign, verify
from tests.runtime.jobs import START_WITHIN_S, preloaded

ONE_NODE = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.timeout(120)
def test_a_job_listens_on_loopback_only_and_runs_nobody_elses_commands(job):
    """Of the store, of gloo's pairs, and of the driver, which closes the connection of whoever has not signed
    in."""
    command = preloaded([sys.executable, "-P", "-m", "local_job", "attacked", str(job.folder)])
    process = job.start(command)
    job.wait_for("ready")
    seen = json.loads(job.read("ready"))
    assert len(seen["listening"]) >= 3 and {host for host, _ in seen["listening"]} == {"127.0.0.1"}, seen
    host, port = seen["address"].split(":")
    assert [host, int(port)] in seen["listening"]
    sleep = encode(Call("actor", (0, 1), "sleep", None, b""))
    with socket.create_connection((host, int(port)), timeout=30.0) as other:
        other.sendall(frame(bytes(32) + CHILD) + frame(bytes(32) + sleep))
        answer = b"".join(iter(lambda: other.recv(100), b""))
    assert answer[CHALLENGE_BYTES:] == REFUSED
    (job.folder / "attacked").touch()
    assert process.wait(START_WITHIN_S) == 0, job.stderr()
    assert json.loads(job.read("seen.json")) == [1.5, 1.5]
    assert "a connection that is not from a process of this job was closed" in job.stderr()
    job.wait_until_gone(10)


def test_what_was_changed_swapped_or_cut_is_not_read():
    data = sign(b"a message", "cmd/3")
    for forged in (data[:-1] + bytes([data[-1] ^ 1]), bytes(32) + data[32:], data[:20], b"", data[32:]):
        with pytest.raises(
            ForgedMessage,
            match="^cmd/3 is not signed with the job's secret and was not read",
        ):
            verify(forged, "cmd/3")
    with pytest.raises(ForgedMessage):
        verify(data, "cmd/4")
    assert verify(data, "cmd/3") == b"a message"


@pytest.fixture
def as_rank(tmp_path, monkeypatch):
    """A function that makes this process a fresh one, of a rank that was given no secret, and returns its
    environment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(signing.JOB_SECRET, raising=False)

    def become(rank: int, **env: str) -> dict[str, str]:
        monkeypatch.setattr(signing, "_secret", None)
        return ONE_NODE | {"RANK": str(rank)} | env

    return become


def test_ranks_on_one_node_agree_through_a_file_of_this_user(tmp_path, as_rank):
    """One after the other in this process; with processes: every job of test_torchrun.py."""
    store, folder, secrets = dist.HashStore(), tmp_path / f"megarl-{os.getuid()}", []
    folder.mkdir(mode=0o700)
    left = folder / f"secret-{2**22 + 1}-left"  # of a dead job: pids are smaller
    left.touch()
    os.utime(left, times=(0.0, time.time() - 2 * 3600.0))
    for rank in range(3):
        agree(store, as_rank(rank))
        secrets.append(job_secret())
        files = [(path.stat().st_mode & 0o777, path.read_text()) for path in folder.iterdir()]
        assert files == ([(0o600, secrets[0])] if rank < 2 else [])  # the last one that reads it removes it
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64
    assert secrets[0].encode() not in store.get("secret/file")


def test_the_file_of_a_job_in_another_container_stays(tmp_path, as_rank):
    """Its process ids are not those of this one, where none may have the number."""
    folder = tmp_path / f"megarl-{os.getuid()}"
    folder.mkdir(mode=0o700)
    other = folder / f"secret-{2**22 + 1}-of-another-job"
    other.touch()
    agree(dist.HashStore(), as_rank(0))
    assert other.exists()


def test_a_name_in_the_store_leads_to_no_other_folder(tmp_path, as_rank):
    store = dist.HashStore()
    (tmp_path / "known").write_text("k" * 64)
    store.set("secret/file", str(tmp_path / "known"))
    with pytest.raises(FileNotFoundError, match=f"megarl-{os.getuid()}/known"):
        agree(store, as_rank(1))


def test_a_folder_that_others_made_or_may_open_is_refused(tmp_path, as_rank):
    folder = tmp_path / f"megarl-{os.getuid()}"
    for make in (lambda: folder.mkdir(mode=0o755), lambda: folder.symlink_to(tmp_path)):
        make()
        with pytest.raises(SecretError, match="must be a folder of this user that nobody else may open"):
            agree(dist.HashStore(), as_rank(0))
        folder.rmdir() if not folder.is_symlink() else folder.unlink()


def test_where_ranks_cannot_agree_the_user_is_asked_for_a_secret(as_rank, monkeypatch):
    two_nodes = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    for env in (as_rank(0, **two_nodes), as_rank(0, TORCHELASTIC_USE_AGENT_STORE="False")):
        with pytest.raises(
            SecretError,
            match=r"^MEGARL_JOB_SECRET \(variable, not set\): must be set unless.*Try export "
            r"MEGARL_JOB_SECRET=",
        ):
            check_secret(env)
    check_secret(as_rank(0, WORLD_SIZE="1"))
    for secret, accepted in (("guess me", False), ("s" * 32, True)):
        env = as_rank(0, **two_nodes, MEGARL_JOB_SECRET=secret)
        monkeypatch.setenv("MEGARL_JOB_SECRET", secret)
        if accepted:
            agree(dist.HashStore(), env)
            assert job_secret() == secret and "MEGARL_JOB_SECRET" not in env
        else:
            with pytest.raises(
                SecretError,
                match=r"MEGARL_JOB_SECRET \(variable, 8 characters\): must have at least 32 characters",
            ):
                check_secret(env)
