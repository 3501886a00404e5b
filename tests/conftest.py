"""The environment of every test, set before anything is imported, so that plain `pytest` and `make test` run the same."""

import os
import secrets
import sys
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # many processes on few cores; also makes sums repeatable
    "PYTHONSAFEPATH": "1",  # children do not find the folder triton_kernels/ as a package when they start in the checkout
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" refuses two ranks on one NUMA node
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler's log-prob counter would be compiled for 9 s
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "MEGARL_JOB_SECRET": secrets.token_hex(32),  # of worlds that no launcher of ours starts
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# `python -m pytest` puts the working directory on the path; see PYTHONSAFEPATH above for why that must not be the checkout.
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != CHECKOUT]

# Triton decides at its import whether it compiles or interprets. Without a GPU there is nothing to compile for in this process, so it
# is imported here to interpret, before anything else imports it. Children decide for themselves. Sandboxes may show only the device.
HAS_GPU = any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))
if os.environ.get("MEGARL_KERNELS") == "interpret" or not HAS_GPU:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language  # noqa: F401
    finally:
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
