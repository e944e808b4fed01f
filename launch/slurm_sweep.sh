#!/usr/bin/env bash
# Not run on a cluster yet: its tests use stand-ins for SLURM.
#SBATCH --job-name=loopjax-sweep
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#
# Runs a sweep on a SLURM cluster, one item per task of a job array.
#
#   PARALLEL=16 launch/slurm_sweep.sh --config=configs/sudoku_utm.py \
#     --sweep=memory_curve --workdir=/shared/memory_curve
#
# Submits itself. A complete item ends at once; a stopped item is requeued. For
# nodes and sbatch, see slurm.sh.
#
#   PARALLEL      8, items at the same time
#   GPUS          1, per item
#   CPUS          8, per item
#   PYTHON MAX_RESTARTS DRY_RUN   as in slurm.sh
set -euo pipefail
# SLURM runs a copy of this file in the directory of submission.
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || CDPATH='' cd "$(dirname "$0")/.."
. launch/common.sh
PARALLEL=${PARALLEL:-8} GPUS=${GPUS:-1} CPUS=${CPUS:-8} PYTHON=${PYTHON:-python}
need_number PARALLEL
need_number GPUS
need_number CPUS
need_flags "--config --sweep --workdir" "$@"

step=(srun --ntasks=1 "--cpus-per-task=$CPUS"
  "$PYTHON" -m loopjax.sweep "$@" "--item=${SLURM_ARRAY_TASK_ID:-INDEX}")

if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
  count=$("$PYTHON" -m loopjax.sweep "$@" --count)
  run sbatch "--array=0-$((count - 1))%$PARALLEL" --ntasks=1 \
    "--gpus-per-node=$GPUS" "--cpus-per-task=$CPUS" launch/slurm_sweep.sh "$@"
  if [[ $DRY_RUN == 1 ]]; then
    echo "# in the job:"
    quoted "${step[@]}"
  fi
  exit
fi

status=0
"${step[@]}" || status=$?
if again "$status" && ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
  echo "exit status $status; queued again"
  # Array and task number: the job number alone may mean all tasks.
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$status"
