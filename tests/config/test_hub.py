"""Models and data files that flags name on the Hugging Face hub, from a small hub of the test's own and from
its cache.

pytest tests/config/test_hub.py"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.config.conftest import QWEN3, ROW, job, write_model  # noqa: F401

OLD, NEW = "1" * 40, "2" * 40
ASK = """
import json, sys
from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.render import write_args
try:
    config = load_config(sys.argv[2:], REGISTRY, download=sys.argv[1] == "train")
except ValueError as error:
    print(json.dumps({"error": str(error)}))
else:
    algorithm, models = config.algorithm, config.model
    print(json.dumps({
        "model": models.model, "tokenizer": models.tokenizer_model, "critic": models.critic_model,
        "reward": config.reward_models.reward_model, "teachers": getattr(algorithm, "teachers", None),
        "data": config.data.train_data, "args": write_args(config),
    }))
"""


class Hub(ThreadingHTTPServer):
    """A hub with these repositories: path -> commit -> file -> bytes. The newest commit is main."""

    def __init__(self, repositories: dict[str, dict[str, dict[str, bytes]]]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories, self.asked = repositories, []
        self.token: str | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded since the last call."""
        found = [
            path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path
        ]
        self.asked.clear()
        return sorted(found)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.server.asked.append((self.command, path))
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        for name, commits in self.server.repositories.items():
            of = name if name.startswith("datasets/") else f"models/{name}"
            if path.startswith((f"api/{of}/revision/", f"api/{of}/tree/")):
                revision = path.rpartition("/")[2]
            elif path.startswith(f"{name}/resolve/"):
                revision, _, file = path.removeprefix(f"{name}/resolve/").partition("/")
            else:
                continue
            commit = NEW if revision == "main" else revision
            if commit not in commits:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = commits[commit]
            if "/resolve/" in path:
                content = files[file]
                tag = hashlib.sha1(content).hexdigest()
                return self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})
            if "/tree/" in path:
                listed = [
                    {"type": "file", "path": path, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                    for path, text in files.items()
                ]
                return self._send(200, json.dumps(listed).encode())
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self._send(200, json.dumps(info).encode())
        self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD

    def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(write_model, tmp_path):  # noqa: F811
    files = {path.name: path.read_bytes() for path in write_model(QWEN3, name="of_hub").iterdir()}
    shutil.rmtree(tmp_path / "of_hub")
    more = {
        "README.md": b"# tiny",
        "pytorch_model.bin": b"x",
        "original/params.json": b"{}",
        "consolidated.safetensors": b"x",
    }
    old = files | {"generation_config.json": b'{"eos_token_id": 1}'}
    rows = json.dumps(ROW).encode()
    server = Hub(
        {
            "org/tiny": {NEW: files | more, OLD: old},
            "datasets/org/sums": {NEW: {"data/train.jsonl": rows + b"\n"}},
        }
    )
    yield server
    server.shutdown()


@pytest.fixture
def ask(hub, job, tmp_path):  # noqa: F811
    """ask("train", *flags, HF_TOKEN="x") -> what load_config makes of the flags in a process of its own."""

    def run(mode: str, *flags: str, **environment: str) -> dict:
        environment = {
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-c", ASK, mode, job, *flags],
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) | {"stderr": done.stderr}

    return run


def snapshot(tmp_path: Path, commit: str, repository: str = "models--org--tiny") -> Path:
    return tmp_path / "hf" / "hub" / repository / "snapshots" / commit


WEIGHTLESS = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_model_is_downloaded_once_and_then_in_the_cache(hub, ask, tmp_path):
    found = ask("train", "--model", "org/tiny")
    folder = snapshot(tmp_path, NEW)
    assert found["model"] == str(folder)
    assert hub.downloads() == sorted([*WEIGHTLESS, "model.safetensors"])  # no README, no *.bin, no original/
    assert f"--model org/tiny@{NEW}\n" in found["args"]
    (tmp_path / "again.args").write_text(found["args"])
    assert ask("train", f"@{tmp_path / 'again.args'}")["args"] == found["args"]
    assert ask("train", "--model", "org/tiny", HF_HUB_OFFLINE="1")["model"] == str(folder)
    assert hub.asked == []  # the cache answers
    assert ask("train", "--model", f"org/tiny@{OLD}")["model"] == str(snapshot(tmp_path, OLD))
    assert hub.downloads() == ["generation_config.json"]  # other files are the same


def test_a_check_downloads_no_weights_and_says_so(hub, ask, tmp_path):
    found = ask("check", "--model", "org/tiny")
    assert found["model"] == str(snapshot(tmp_path, NEW)) and hub.downloads() == WEIGHTLESS
    assert "org/tiny: its weights are not on this machine; training will download them" in found["stderr"]
    assert ask("train", "--model", "org/tiny", "--random-init")["model"] == found["model"]
    assert hub.downloads() == []
    assert "error" not in ask("train", "--model", "org/tiny") and hub.downloads() == ["model.safetensors"]
    assert "its weights" not in ask("check", "--model", "org/tiny")["stderr"]


def test_every_flag_that_names_a_model_or_data(hub, ask, tmp_path):
    folder, data = (
        snapshot(tmp_path, NEW),
        snapshot(tmp_path, NEW, "datasets--org--sums") / "data/train.jsonl",
    )
    flags = ["--tokenizer-model", "org/tiny", "--algorithm", "ppo", "--critic-model", "org/tiny"]
    flags += ["--reward-model", "org/tiny", "--train-data", "hf://datasets/org/sums/data/train.jsonl"]
    found = ask("train", "--random-init", "--model", "org/tiny", *flags)
    assert {found[name] for name in ("model", "tokenizer", "critic")} == {str(folder)}, found
    assert found["reward"] == [str(folder)] and found["data"] == [str(data)]
    assert json.loads(data.read_text()) == ROW
    assert f"--train-data hf://datasets/org/sums@{NEW}/data/train.jsonl\n" in found["args"]
    found = ask("train", "--algorithm", "distill", "--teachers", "megarl/sums=org/tiny")
    assert found["teachers"] == [f"megarl/sums={folder}"]
    assert f"--teachers megarl/sums=org/tiny@{NEW}\n" in found["args"]


def test_a_local_folder_wins(hub, ask, tmp_path):
    (tmp_path / "org").mkdir()
    found = ask("train", "--model", "org/tiny")  # a folder org is here: a path that is wrong, no name
    assert found["model"] == "org/tiny" and hub.asked == []


@pytest.mark.parametrize(
    "name, environment, words",
    [
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, ["--model (org/tiny): org/tiny is not on", "HF_HUB_OFFLINE=0"]),
        ("org/other", {}, ["org/other is not on this machine", "RepositoryNotFoundError"]),
        ("org/tiny@v9", {}, ["org/tiny@v9 is not on this machine", "RevisionNotFoundError"]),
        (
            "org/tiny",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            ["is not on this machine", "check your internet"],
        ),
        ("org/tiny", {"GROUP_WORLD_SIZE": "2"}, ["name the commit", f"Try org/tiny@{NEW}."]),
    ],
)
def test_what_the_hub_does_not_give(name, environment, words, ask):
    found = ask("train", "--model", name, **environment)
    assert all(word in found["error"] for word in words), found["error"]


def test_a_private_model_needs_the_token(hub, ask):
    hub.token = "hf_secret"
    assert "RepositoryNotFoundError" in ask("train", "--model", "org/tiny")["error"]
    assert "error" not in ask("train", "--model", "org/tiny", HF_TOKEN="hf_secret")


def test_a_cache_that_others_have_filled(hub, ask, tmp_path, write_model):  # noqa: F811
    """Other tools leave no list of a repository's files in the cache: what is missing is downloaded."""
    folder = snapshot(tmp_path, NEW)
    shutil.copytree(write_model(QWEN3, name="whole"), folder)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(NEW)
    assert ask("check", "--model", "org/tiny", HF_HUB_OFFLINE="1")["model"] == str(folder)
    assert ask("train", "--model", "org/tiny", HF_HUB_OFFLINE="1")["model"] == str(folder)
    (folder / "tokenizer.json").unlink()
    assert (
        ask("train", "--model", "org/tiny")["model"] == str(folder) and (folder / "tokenizer.json").exists()
    )
