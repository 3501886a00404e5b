#!/usr/bin/env bash
# Submit a job to a Ray cluster; its driver runs there.
set -euo pipefail

usage() {
  cat <<'END'
usage: tools/launch/ray_submit.sh --address URL --nnodes N --nproc-per-node N [OPTION...] -- ARGUMENT OF megarl train...

  tools/launch/ray_submit.sh --address http://head:8265 --nnodes 2 --nproc-per-node 8 -- @/shared/job.args --save /shared/runs/a

  --address URL       Ray's job server (port 8265 of the head)
  --nnodes N          nodes of the job; the cluster must have as many
  --nproc-per-node N  ranks of each node, each with a CPU and, if the cluster has GPUs, a GPU
  --folder FOLDER     folder of the driver and the ranks, which all nodes share (default: this one)
  --dry-run           print the command and end
  --help              this text

The nodes have megarl installed and see the same files under the same paths. Environment: PYTHON (default: python), of
this machine and the same path on the cluster; RAY_AUTH_MODE and RAY_AUTH_TOKEN if the cluster has a token.
END
}

fail() {
  echo "tools/launch/ray_submit.sh: $1" >&2
  exit 2
}

address='' nnodes='' nproc='' folder=$PWD dry=''
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --address) address=${2:?--address needs a URL}; shift 2 ;;
    --nnodes) nnodes=${2:?--nnodes needs a number}; shift 2 ;;
    --nproc-per-node) nproc=${2:?--nproc-per-node needs a number}; shift 2 ;;
    --folder) folder=${2:?--folder needs a folder}; shift 2 ;;
    --dry-run) dry=yes; shift ;;
    --) shift; break ;;
    *) fail "$1 is no option. Options of megarl train come after --; --help shows the others." ;;
  esac
done
[ $# -gt 0 ] || { usage >&2; fail "there are no arguments of megarl train. Write them after --."; }
[ -n "$address" ] || fail "--address (not given): must be the URL of Ray's job server. Try --address http://HEAD:8265."
[ -n "$nnodes" ] && [ -n "$nproc" ] || fail "--nnodes and --nproc-per-node: must both be given. Try --nnodes 1 --nproc-per-node 1."
python=${PYTHON:-python}
# The job's entry point is one shell line on the cluster; %q keeps the words apart.
job=$(printf '%q ' "$python" -m megarl.cli train "$@" --executor ray --nnodes "$nnodes" --nproc-per-node "$nproc")
entry=(bash -c "cd $(printf %q "$folder") && exec $job")
command=("$python" -m ray.scripts.scripts job submit --address "$address" -- "${entry[@]}")
if [ -n "$dry" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
