#!/usr/bin/env bash
# Train under Nsight Systems: torchrun starts each rank under `nsys profile`, which records the steps of --profile.
set -euo pipefail

usage() {
  cat <<'END'
usage: tools/nsys_train.sh [--out FOLDER] [TORCHRUN OPTION...] -- ARGUMENT OF megarl train...

  tools/nsys_train.sh --nproc-per-node 2 -- @configs/quickstart_grpo.args --save runs/nsys \
      --profile-step-start 10 --profile-step-end 12 --profile-ranks 0 1

Each rank runs under `nsys profile`. Recording begins and ends with the profiled steps, so every rank of --profile-ranks
writes its report, FOLDER/rank_<rank>.nsys-rep, while the job goes on. The other ranks write none. --profile nsys is added.

  --out FOLDER     folder of the reports (default: nsys_reports)
  TORCHRUN OPTION  such as --nproc-per-node 8, --nnodes 2, --rdzv-endpoint HOST:PORT; default: --standalone
  --help           this text

Environment: PYTHON (default: python), and NSYS_OPTIONS, further options of `nsys profile` such as --gpu-metrics-device=0.
END
}

fail() {
  echo "tools/nsys_train.sh: $1" >&2
  exit 2
}

if [ "${1:-}" = --as-rank ]; then # torchrun calls this script again on each rank: --as-rank FOLDER ARGUMENT...
  out=$2
  shift 2
  # node: the kernels inside a CUDA graph, such as those of vLLM, are shown one by one.
  # shellcheck disable=SC2086  # NSYS_OPTIONS holds several words
  exec nsys profile --output="$out/rank_$RANK" --force-overwrite=true \
    --capture-range=cudaProfilerApi --capture-range-end=stop \
    --trace=cuda,nvtx,cublas,cudnn --cuda-graph-trace=node \
    --sample=none --cpuctxsw=none ${NSYS_OPTIONS:-} \
    "${PYTHON:-python}" -u -P -m megarl.train "$@"
fi

out=nsys_reports torchrun_options=() has_rendezvous=
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --) shift; break ;;
    *)
      case $1 in --standalone | --rdzv* | --master* | --nnodes*) has_rendezvous=yes ;; esac
      torchrun_options+=("$1")
      shift
      ;;
  esac
done
[ $# -gt 0 ] || { usage >&2; fail "there are no arguments of megarl train. Write them after --."; }
[ -n "$has_rendezvous" ] || torchrun_options=(--standalone "${torchrun_options[@]}")
command -v nsys > /dev/null || fail "nsys is not on PATH. Install Nsight Systems (Debian's and NVIDIA's packages call it \
nsight-systems), or profile without it: megarl train ... --profile torch."
mkdir -p "$out"
exec "${PYTHON:-python}" -m torch.distributed.run "${torchrun_options[@]}" --no-python \
  "$(realpath "$0")" --as-rank "$(realpath "$out")" "$@" --profile nsys
