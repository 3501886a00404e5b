#!/usr/bin/env bash
#SBATCH --job-name=megarl
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
# Train in a SLURM allocation: torchrun on every node, and again in the queue when the time is over.
set -euo pipefail

usage() {
  cat <<'END'
usage: sbatch --nodes N [SBATCH OPTION...] tools/launch/slurm.sh RUN ARGUMENT OF megarl train...

  sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --time 24:00:00 tools/launch/slurm.sh /shared/runs/a @job.args

RUN is the run folder, on a file system that all nodes share. The script adds --save RUN, and --load RUN once there is a
run. SLURM starts torchrun once per node; the number of ranks is that of the GPUs, or NPROC_PER_NODE.

120 s before the time limit, and on preemption, the job gets SIGTERM: it saves its last completed step, ends, and is
queued again (sbatch --no-requeue prevents that). A failure ends the job; scontrol requeue JOB continues it.

Environment: NPROC_PER_NODE, PORT (default: by the job's number), PYTHON (default: python), MAX_RESTARTS (default 0).
Submit the job in the folder of megarl's checkout, or set MEGARL_LAUNCH to the folder of this script.
END
}

fail() {
  echo "tools/launch/slurm.sh: $1" >&2
  exit 2
}

case ${1:-} in --help | -h) usage; exit 0 ;; esac
[ -n "${SLURM_JOB_ID:-}" ] || fail "there is no SLURM job. Start it with sbatch --nodes N tools/launch/slurm.sh RUN @job.args."
[ $# -ge 2 ] || { usage >&2; fail "the run folder and the arguments of megarl train are missing."; }
run=$1
shift
case $run in @* | -*) fail "RUN ($run): must be the run folder, before the arguments of megarl train." ;; esac
launch=${MEGARL_LAUNCH:-$SLURM_SUBMIT_DIR/tools/launch} # SLURM runs a copy of this script from its spool folder
[ -f "$launch/torchrun.sh" ] || fail "$launch has no torchrun.sh. Set MEGARL_LAUNCH to the folder of this script."

where=(--save "$run")
[ ! -e "$run/resolved.args" ] || where+=(--load "$run")
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MEGARL_JOB_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
MEGARL_RDZV_ID="slurm_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}"
export MEGARL_JOB_SECRET MEGARL_RDZV_ID
options=(--nnodes "$SLURM_JOB_NUM_NODES" --head "$head" --port "${PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
  --max-restarts "${MAX_RESTARTS:-0}")
[ -z "${NPROC_PER_NODE:-}" ] || options+=(--nproc-per-node "$NPROC_PER_NODE")

stopped=
# shellcheck disable=SC2317  # called by the trap
stop() {
  stopped=yes
  scancel --signal=TERM "$SLURM_JOB_ID.0" || true # to torchrun on every node; srun would kill them at its own SIGTERM
}
srun --kill-on-bad-exit=1 bash "$launch/torchrun.sh" "${options[@]}" -- "$@" "${where[@]}" &
step=$!
trap stop TERM
code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do # the first wait ends with the signal, the step later
  code=0
  wait "$step" || code=$?
done
if [ -n "$stopped" ]; then
  echo "tools/launch/slurm.sh: stopped by SIGTERM (time limit or preemption); job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID" || echo "tools/launch/slurm.sh: it cannot be queued again; submit the same line" >&2
fi
exit "$code"
