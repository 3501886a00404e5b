#!/usr/bin/env bash
# All that needs a GPU, in one run: build the extension, run tests/gpu, measure. For a machine with nvcc, PyTorch and no network.
#
#   tools/gpu_session.sh OUT [WHEELS]
#
# OUT gets a log of each part and the JSON of each benchmark, to be kept under benchmarks/results/<date>-<commit>/. WHEELS is a folder
# with wheels of what the machine lacks (megatron-core, the kernel benchmark's contenders); they are installed beside its packages.
# A part that fails does not stop the next: the table at the end says how each went.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: tools/gpu_session.sh OUT [WHEELS]}" && cd "$1" && pwd)
python=${PYTHON:-python3}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 MEGARL_CUDA=ON MEGARL_CUDA_ARCHS=${MEGARL_CUDA_ARCHS:-native}
summary=()

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  local code=$?
  summary+=("$(printf '%-16s exit %3d  %4d s  %s' "$name" "$code" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log" | cut -c 1-90)")")
}

if [ -n "${2:-}" ]; then
  site=$(mktemp -d)
  part wheels 120 "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$2"/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
{ nvidia-smi; nvcc --version; "$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'; git log -1 --format='%H %ci'; } > "$out/machine.log" 2>&1
part build 180 "$python" -m pip install --no-deps --no-build-isolation -e .
part tests 240 "$python" -m pytest --import-mode=importlib -q tests/gpu
part bench_kernels 240 "$python" tools/benchmarks/bench_kernels.py --json "$out/bench_kernels.json"
part bench_reshard 180 "$python" tools/benchmarks/bench_reshard.py --json "$out/bench_reshard.json"
printf '%s\n' "${summary[@]}" | tee "$out/summary.log"
