#!/usr/bin/env bash
# All that needs a GPU, in one run: build the extension, run tests/gpu, measure. For a machine with nvcc, PyTorch and no network.
#
#   tools/gpu_session.sh OUT [WHEELS [PART...]]
#
# OUT gets a log of each part and the JSON of each benchmark, eight files at most, to be kept under benchmarks/results/<date>-<commit>/.
# WHEELS is a folder with wheels of what the machine lacks (megatron-core, the kernel benchmark's contenders), installed beside its
# packages; "" for none. PARTs are some of build, tests, bench_kernels, bench_reshard: all of them may take 18 minutes, the first two 9.
# A part that fails does not stop the next: its line says how it went, and machine.log has all lines at its end.
set -uo pipefail
out=$(mkdir -p "${1:?usage: tools/gpu_session.sh OUT [WHEELS [PART...]]}" && cd "$1" && pwd)
wheels=${2:+$(cd "$2" && pwd)}
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=(build tests bench_kernels bench_reshard)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 MEGARL_CUDA=ON MEGARL_CUDA_ARCHS=${MEGARL_CUDA_ARCHS:-native}
unset MEGARL_KERNELS TRITON_INTERPRET

run() { # run NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  code=$?
  printf '%-14s exit %3d  %4d s  %s\n' "$name" "$code" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log" | cut -c 1-90)" | tee -a "$out/machine.log"
}

{ nvidia-smi; nvcc --version; "$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'; git log -1 --format='%H %ci'; } > "$out/machine.log" 2>&1
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  run wheels 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
for part in "${parts[@]}"; do
  case $part in
    build) run build 120 "$python" -m pip install --no-deps --no-build-isolation -e . ;;
    tests) run tests 400 "$python" -m pytest --import-mode=importlib -q --durations=10 tests/gpu ;;
    bench_kernels) run bench_kernels 420 "$python" tools/benchmarks/bench_kernels.py --json "$out/bench_kernels.json" ;;
    bench_reshard) run bench_reshard 120 "$python" tools/benchmarks/bench_reshard.py --device cuda --model-shape 7b --json "$out/bench_reshard.json" ;;
    *) echo "PART ($part) must be one of build, tests, bench_kernels, bench_reshard" >&2; exit 2 ;;
  esac
done
