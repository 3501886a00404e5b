#!/usr/bin/env bash
# All that needs a GPU, in parts: build the extension, run tests/gpu, train the quickstart, measure. For a machine with nvcc, PyTorch and no network.
#
#   tools/gpu_session.sh OUT [WHEELS [PART...]]
#
# OUT gets the log of each part, the JSON of each benchmark and summary.json, which grows as parts end; to be kept under
# benchmarks/results/<date>-<commit>/. WHEELS is a folder with wheels of what the machine lacks (megatron-core, transformers, the kernel
# benchmark's contenders), installed beside its packages; "" for none. The PARTs, the most telling first, and the seconds that each may take:
#
#   build 150          the extension, for this machine's architecture
#   tests 300          tests/gpu: copies, IPC between two processes, CUDA graphs, offload, side streams; policy and critic against the CPU
#   quickstart 420     SFT, then GRPO, with the engine of --rollout-backend transformers (vLLM's wheel may not be there)
#   quickstart_vllm 420  the same with vLLM, where it is installed
#   bench_jobs 600     GRPO and PPO of a 0.5B model in bf16 with vLLM, in the trainer's process and in one of its own
#   bench_step 300     a Megatron step of 0.5B and 1.5B, with MFU
#   bench_kernels 420  kernels beside Liger's, cut-cross-entropy's and torch.compile's, and the floors
#   bench_reshard 150  the copier beside the device's own copy
#   sanitizer 200      compute-sanitizer over the copier's tests, where it is installed
#   two_gpus 300       peer access and NCCL between two GPUs, skipped on one
#
# Without PARTs all of them run, in at most 54 minutes; `build tests`, `quickstart`, `bench_step bench_reshard` and `bench_kernels` each end
# within ten. Where git does not know it, MEGARL_COMMIT names the commit for summary.json. A part that fails does not stop the next.
#
# MEGARL_GPU_REHEARSAL=cpu runs every part on a machine without a GPU, small; its numbers say nothing. MEGARL_GPU_REHEARSAL=hostcuda does so on
# the emulated device (docs/emulated_gpu.md), where CUDA's own branches of the code run; kernels are skipped. summary.json says so.
set -uo pipefail
out=$(mkdir -p "${1:?usage: tools/gpu_session.sh OUT [WHEELS [PART...]]}" && cd "$1" && pwd)
wheels=${2:+$(cd "$2" && pwd)}
all=(build tests quickstart quickstart_vllm bench_jobs bench_step bench_kernels bench_reshard sanitizer two_gpus)
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
    [ -n "${HOSTCUDA:-}" ] || exec "$python" tests/hostcuda/build.py bash tools/gpu_session.sh "$out" "$wheels" "${parts[@]}" ;;
  *) echo "MEGARL_GPU_REHEARSAL ($rehearsal) must be cpu or hostcuda, or unset on a machine with a GPU" >&2; exit 2 ;;
esac

record() { # record NAME EXIT SECONDS: into summary.json, with the last line of the part's log
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
    says = lines[-1][:200] if lines else ""
    skipped = re.match(r"(\d+ )?skipped\b", says)  # all tests of a part, or the part itself
    result = {0: "skipped" if skipped else "passed", 124: "timed out", 137: "timed out"}.get(int(code), "failed")
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
  printf '%-14s exit %3d  %4d s  %s\n' "$name" "$code" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log" | cut -c 1-90)"
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

packages = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm", "liger-kernel", "cut-cross-entropy")
facts = {"python": platform.python_version()} | {package: version(package) for package in packages}
try:
    import torch

    facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
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

quickstart() {
  # The GRPO that follows the short fine-tuning learns in about a hundred steps; on one GPU both stages are one rank.
  "$python" tools/quickstart.py --out "$out/$1" ${rehearsal:+--small} --rollout-backend "$2"
}

has_vllm() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
}

if [ -n "$wheels" ]; then
  site=$PWD/build/gpu_session_site # between calls on the same machine
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  # Renamed when pip is done: a later call must not take what one that failed or timed out has left for the whole.
  [ -d "$site" ] || run wheels 90 bash -c 'rm -rf "$1.new" && "$0" -m pip install --quiet --no-index --no-deps --no-compile --target "$1.new" "${@:2}" &&
    mv "$1.new" "$1"' "$python" "$site" "$wheels"/*.whl
fi
describe_machine > "$out/machine.log" 2>&1
record machine 0 0
for part in "${parts[@]}"; do
  case $part in
    build) run build 150 "$python" -m pip install --no-deps --no-build-isolation -e . ;;
    tests) run tests 300 "$python" -m pytest --import-mode=importlib -q --durations=10 tests/gpu ;;
    quickstart) export -f quickstart; export out python rehearsal; run quickstart 420 bash -c "quickstart quickstart transformers" ;;
    quickstart_vllm) has_vllm || { skip "$part" "vLLM is not installed"; continue; }
      export -f quickstart; export out python rehearsal; run "$part" 420 bash -c "quickstart $part vllm" ;;
    bench_jobs) has_vllm || { skip "$part" "vLLM is not installed"; continue; }
      run "$part" 600 "$python" tools/benchmarks/bench_jobs.py ${rehearsal:+--small --train-iters 3} --json "$out/bench_jobs.json" ;;
    bench_step) run bench_step 300 "$python" tools/benchmarks/bench_step.py ${rehearsal:+--small} --json "$out/bench_step.json" ;;
    bench_kernels) [ "$rehearsal" != hostcuda ] || { skip bench_kernels "Triton's kernels do not run on the emulated device"; continue; }
      run bench_kernels 420 "$python" tools/benchmarks/bench_kernels.py ${rehearsal:+--small --repeats 1} --json "$out/bench_kernels.json" ;;
    bench_reshard) [ "$rehearsal" != hostcuda ] || { skip bench_reshard "the emulated copies are loops, which take minutes"; continue; }
      run bench_reshard 150 "$python" tools/benchmarks/bench_reshard.py \
      $([ -n "$rehearsal" ] && echo --only-copies --repeats 1 || echo --device cuda --model-shape 7b) --json "$out/bench_reshard.json" ;;
    sanitizer) [ "$rehearsal" != hostcuda ] || { skip sanitizer "compute-sanitizer needs a GPU"; continue; }
      run sanitizer 200 bash -c 'command -v compute-sanitizer > /dev/null || { echo "skipped: compute-sanitizer is not installed"; exit 0; }
      exec compute-sanitizer --error-exitcode 9 --target-processes all "$0" -m pytest --import-mode=importlib -q tests/gpu/test_copier.py -k "not speed and not 32_bits"' "$python" ;;
    two_gpus) run two_gpus 300 "$python" -m pytest --import-mode=importlib -q -rs tests/gpu -m two_gpus ;;
  esac
done
