#!/usr/bin/env bash
# All that needs a GPU, in parts: build the extension, run tests/gpu, train the quickstart, measure.
# For a machine with nvcc, PyTorch and no network.
#
#   tools/gpu_session.sh OUT [WHEELS [PART...]]
#
# OUT gets the log of each part, the JSON of each benchmark, the metrics and curves of each quickstart, and
# summary.json, which grows as parts end; to be kept under benchmarks/results/<date>-<commit>/. Run folders of
# the quickstarts are in build/gpu_session_runs/. WHEELS is a folder with wheels of what the machine lacks
# (megatron-core, transformers, the kernel benchmark's contenders), installed beside its packages within 90 s;
# "" for none. The PARTs, the most telling first, and the seconds that each may take:
#
#   build 150          the extension, for this machine's architecture
#   tests 300          tests/gpu: copies, IPC between two processes, compiled kernels, offload, side streams;
#                      policy and critic against the CPU
#   quickstart 420     SFT, then GRPO, with --rollout-backend transformers (vLLM's wheel may not be there)
#   quickstart_vllm 420  the same with vLLM, where it is installed
#   bench_jobs 560     GRPO and PPO of a 0.5B model in bf16 with vLLM, in the trainer's process and its own
#   bench_step 300     a Megatron step of 0.5B and 1.5B, with MFU
#   bench_kernels 420  kernels beside Liger's, cut-cross-entropy's and torch.compile's, and the floors
#   bench_reshard 150  the copier beside the device's own copy
#   sanitizer 200      compute-sanitizer over the copier's tests, where it is installed; without PyTorch's
#                      cache of memory, within which it sees no access out of bounds
#   two_gpus 300       peer access and NCCL between two GPUs, skipped on one
#
# Without PARTs all of them run, in at most an hour. A call for `build tests` ends within ten minutes, wheels
# included. So do, after it on the same machine, calls for `quickstart`, `quickstart_vllm`, `bench_jobs`,
# `bench_kernels` and `bench_step bench_reshard`. Each of these calls leaves at most eight files in OUT, and
# no folder. Where megarl is not installed, `build` runs first, named or not. All other parts are skipped
# where PyTorch sees no GPU. A part that fails does not stop the next. Where git does not know the commit,
# MEGARL_COMMIT names it for summary.json.
#
# MEGARL_GPU_REHEARSAL=cpu runs every part on a machine without a GPU, small; its numbers say nothing.
# MEGARL_GPU_REHEARSAL=hostcuda does so on the emulated device (docs/emulated_gpu.md), where CUDA's own
# branches of the code run; kernels are skipped. summary.json says so.
set -uo pipefail
out=$(mkdir -p "${1:?usage: tools/gpu_session.sh OUT [WHEELS [PART...]]}" && cd "$1" && pwd)
wheels=${2:+$(cd "$2" && pwd)}
all=(build tests quickstart quickstart_vllm bench_jobs bench_step bench_kernels bench_reshard)
all+=(sanitizer two_gpus)
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
  [[ " ${all[*]} " == *" $part "* ]] || { echo "PART ($part) must be one of ${all[*]}" >&2; exit 2; }
done
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rehearsal=${MEGARL_GPU_REHEARSAL:-}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
[ -n "$rehearsal" ] || export MEGARL_CUDA=ON MEGARL_CUDA_ARCHS=${MEGARL_CUDA_ARCHS:-native}
unset MEGARL_KERNELS TRITON_INTERPRET
case $rehearsal in
  "" | cpu) ;;
  hostcuda)
    export MEGARL_KERNELS=torch HOSTCUDA_DEVICES=${HOSTCUDA_DEVICES:-2}
    # Build the device, and start again with it.
    [ -n "${HOSTCUDA:-}" ] ||
      exec "$python" tests/hostcuda/build.py bash tools/gpu_session.sh "$out" "$wheels" "${parts[@]}" ;;
  *)
    echo "MEGARL_GPU_REHEARSAL ($rehearsal) must be cpu or hostcuda, or unset on a machine with a GPU" >&2
    exit 2 ;;
esac

record() { # record NAME EXIT SECONDS: into summary.json, with the last line of the part's log or pytest's
  "$python" - "$out" "$@" <<'PYTHON'
import json, os, re, sys, time
out, name, code, seconds = sys.argv[1:]
path = f"{out}/summary.json"
summary = json.load(open(path)) if os.path.exists(path) else {"parts": {}}
log = f"{out}/{name}.log"
lines = open(log, errors="replace").read().strip().splitlines() if os.path.exists(log) else []
if name == "machine":
    summary["machine"] = json.loads(lines[-1])
else:
    says = lines[-1] if lines else ""
    # compute-sanitizer's last line follows pytest's, and tells a pass from a failure but not from a skip.
    counts = re.compile(r"=* ?\d+ (passed|skipped)\b.* in [\d.]+s\b")
    if int(code) == 0:
        says = next((line for line in reversed(lines) if counts.match(line)), says)
    says = says.strip("= ")[:200]
    skipped = re.match(r"(\d+ )?skipped\b", says)  # all tests of a part, or the part itself
    passed = "skipped" if skipped else "passed"
    result = {0: passed, 124: "timed out", 137: "timed out"}.get(int(code), "failed")
    summary["parts"][name] = {
        "result": result, "exit": int(code), "seconds": int(seconds), "says": says,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
with open(path + ".new", "w") as file:
    json.dump(summary, file, indent=1)
os.replace(path + ".new", path)
PYTHON
}

run() { # run NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout -k 10 "$limit" "$@" > "$out/$name.log" 2>&1
  code=$?
  printf '%-14s exit %3d  %4d s  %s\n' "$name" "$code" $((SECONDS - start)) \
    "$(tail -n 1 "$out/$name.log" | cut -c 1-90)"
  record "$name" "$code" $((SECONDS - start))
}

describe_machine() { # versions of what is there, "" for what is not; the last line is JSON
  nvidia-smi 2>&1
  nvcc --version 2>&1
  "$python" - <<'PYTHON'
import importlib.metadata, json, os, platform, subprocess

def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

packages = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm", "liger-kernel")
packages += ("cut-cross-entropy",)
facts = {"python": platform.python_version()} | {package: version(package) for package in packages}
try:
    import torch

    # PyTorch counts the GPUs of a driver that is too old for it, too.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
    facts["cuda"] = torch.version.cuda or ""
except ImportError:
    facts["gpus"] = []
facts["rehearsal"] = os.environ.get("MEGARL_GPU_REHEARSAL", "")
here = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
facts["commit"] = os.environ.get("MEGARL_COMMIT") or here
print(json.dumps(facts))
PYTHON
}

skip() { # skip NAME WHY
  run "$1" 10 echo "skipped: $2"
}

quickstart() { # quickstart NAME BACKEND: metrics and curves of GRPO go to OUT, also if it fails
  local folder=build/gpu_session_runs/$1
  rm -rf "$folder"
  run "$1" 420 "$python" tools/quickstart.py --out "$folder" ${rehearsal:+--small} --rollout-backend "$2"
  [ ! -e "$folder/grpo/metrics.jsonl" ] || cp "$folder/grpo/metrics.jsonl" "$out/$1.jsonl"
  [ ! -e "$folder/curves.png" ] || cp "$folder/curves.png" "$out/$1.png"
}

sees_gpu() {
  tail -n 1 "$out/machine.log" | grep -q '"gpus": \["'
}

has_vllm() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
}

if [ -n "$wheels" ]; then
  site=$PWD/build/gpu_session_site # between calls on the same machine
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  # Renamed when pip is done: a later call must not take what one that failed or timed out has left for all.
  [ -d "$site" ] || run wheels 90 bash -c 'rm -rf "$1.new" &&
    "$0" -m pip install --quiet --no-index --no-deps --no-compile --target "$1.new" "${@:2}" &&
    mv "$1.new" "$1"' "$python" "$site" "$wheels"/*.whl
fi
describe_machine > "$out/machine.log" 2>&1
record machine 0 0
if [ "${parts[0]}" != build ] && ! "$python" -c 'import megarl' 2> /dev/null; then
  echo "megarl is not installed for $python: build runs first"
  others=()
  for part in "${parts[@]}"; do
    [ "$part" = build ] || others+=("$part")
  done
  parts=(build "${others[@]}")
fi
pytest=("$python" -m pytest --import-mode=importlib -v) # -v names a test before it runs, also one that hangs
# So that a test that hangs leaves time for the others. The emulated device is slower.
[ -n "$rehearsal" ] || pytest+=(-o timeout=120)
for part in "${parts[@]}"; do
  # Most parts would run on the CPU, and pass.
  [ "$part" = build ] || [ -n "$rehearsal" ] || sees_gpu || { skip "$part" "PyTorch sees no GPU"; continue; }
  case $part in
    quickstart_vllm | bench_jobs) has_vllm || { skip "$part" "vLLM is not installed"; continue; } ;;
  esac
  case $part in
    build) run build 150 "$python" -m pip install --no-deps --no-build-isolation -e . ;;
    # With the cases that are nightly because Triton's interpreter is slow: compiled, they are quick.
    tests) run tests 300 "${pytest[@]}" --durations=10 tests/gpu -m "not two_gpus" ;;
    # GRPO after the short fine-tuning learns in about a hundred steps; on one GPU both stages are one rank.
    quickstart) quickstart quickstart transformers ;;
    quickstart_vllm) quickstart quickstart_vllm vllm ;;
    bench_jobs) run bench_jobs 560 "$python" tools/benchmarks/bench_jobs.py \
      ${rehearsal:+--small --train-iters 3} --json "$out/bench_jobs.json" ;;
    bench_step) run bench_step 300 "$python" tools/benchmarks/bench_step.py \
      ${rehearsal:+--small} --json "$out/bench_step.json" ;;
    bench_kernels)
      [ "$rehearsal" != hostcuda ] ||
        { skip bench_kernels "Triton's kernels do not run on the emulated device"; continue; }
      run bench_kernels 420 "$python" tools/benchmarks/bench_kernels.py \
        $([ -n "$rehearsal" ] && echo --small --repeats 1 || echo --repeats 15) \
        --json "$out/bench_kernels.json" ;;
    bench_reshard)
      [ "$rehearsal" != hostcuda ] ||
        { skip bench_reshard "the emulated copies are loops, which take minutes"; continue; }
      run bench_reshard 150 "$python" tools/benchmarks/bench_reshard.py \
        $([ -n "$rehearsal" ] && echo --only-copies --repeats 1 || echo --device cuda --model-shape 7b) \
        --json "$out/bench_reshard.json" ;;
    sanitizer)
      [ "$rehearsal" != hostcuda ] || { skip sanitizer "compute-sanitizer needs a GPU"; continue; }
      command -v compute-sanitizer > /dev/null ||
        { skip sanitizer "compute-sanitizer is not installed"; continue; }
      run sanitizer 200 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --error-exitcode 9 --target-processes all \
        "${pytest[@]}" tests/gpu/test_copier.py -k "not speed and not 32_bits" ;;
    two_gpus) run two_gpus 300 "${pytest[@]}" -rs tests/gpu -m two_gpus ;;
  esac
done
