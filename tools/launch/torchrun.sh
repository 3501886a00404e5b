#!/usr/bin/env bash
# Train under torchrun, on this machine or as one of several nodes.
set -euo pipefail

usage() {
  cat <<'END'
usage: tools/launch/torchrun.sh [OPTION...] -- ARGUMENT OF megarl train...

  tools/launch/torchrun.sh --nproc-per-node 8 -- @job.args                                 one machine
  tools/launch/torchrun.sh --nnodes 2 --head node0 --nproc-per-node 8 -- @job.args         the same line on each node

  --nproc-per-node N  ranks of each node (default: the GPUs of this machine, or 1)
  --nnodes N          nodes of the job (default 1)
  --head HOST         with --nnodes above 1: a node that all others reach, the same for all; torchrun's rendezvous is there
  --port PORT         port of the rendezvous (default 29500)
  --max-restarts N    how often torchrun starts the job again after a failure (default 0)
  --dry-run           print the command of this node and end
  --help              this text

Several nodes need MEGARL_JOB_SECRET, the same on all: export MEGARL_JOB_SECRET=$(openssl rand -hex 32), once. The interface
is the one by which this node reaches --head, unless GLOO_SOCKET_IFNAME names another one. Environment: PYTHON (default: python).
END
}

fail() {
  echo "tools/launch/torchrun.sh: $1" >&2
  exit 2
}

nnodes=1 nproc='' head='' port=29500 restarts=0 dry=''
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --nnodes) nnodes=${2:?--nnodes needs a number}; shift 2 ;;
    --nproc-per-node) nproc=${2:?--nproc-per-node needs a number}; shift 2 ;;
    --head) head=${2:?--head needs a host}; shift 2 ;;
    --port) port=${2:?--port needs a number}; shift 2 ;;
    --max-restarts) restarts=${2:?--max-restarts needs a number}; shift 2 ;;
    --dry-run) dry=yes; shift ;;
    --) shift; break ;;
    *) fail "$1 is no option. Options of megarl train come after --; --help shows the others." ;;
  esac
done
[ $# -gt 0 ] || { usage >&2; fail "there are no arguments of megarl train. Write them after --."; }
python=${PYTHON:-python}
if [ -z "$nproc" ]; then
  nproc=$({ nvidia-smi --list-gpus 2> /dev/null || true; } | grep -c '^GPU' || true)
  [ "$nproc" -gt 0 ] || nproc=1
fi
launcher=(torch.distributed.run --standalone)
if [ "$nnodes" != 1 ]; then
  [ -n "$head" ] || fail "--head (not given): must name a node of the job that all others reach. Try --head $(hostname)."
  [ -n "${MEGARL_JOB_SECRET:-}" ] || fail "MEGARL_JOB_SECRET (variable, not set): must be the same on all nodes. Try \
export MEGARL_JOB_SECRET=\$(openssl rand -hex 32) once, and give every node the value."
  # The others reach this node by the address from which it reaches the head, or by GLOO_SOCKET_IFNAME's.
  own=$("$python" -c '
import os, socket, sys
from megarl.runtime.network import InterfaceError, own_address
try:
    print(own_address({**os.environ, "MASTER_ADDR": sys.argv[1], "MASTER_PORT": sys.argv[2]}))
except InterfaceError as error:
    sys.exit(str(error))
except socket.gaierror:
    sys.exit(f"--head ({sys.argv[1]}): cannot be resolved here. Try its address.")' "$head" "$port") || exit 2
  # torchrun, but a node may take the place of one that was lost
  launcher=(megarl.runtime.torchrun_agent --nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$head:$port" --local-addr "$own"
    --rdzv-id "${MEGARL_RDZV_ID:-megarl}")
fi
command=("$python" -m "${launcher[@]}" --nproc-per-node "$nproc" --max-restarts "$restarts"
  -m megarl.train "$@")
if [ -n "$dry" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${command[@]}"
