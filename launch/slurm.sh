#!/usr/bin/env bash
# Not run on a cluster yet: its tests use stand-ins for SLURM.
#SBATCH --job-name=loopjax
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#
# Trains on GPUs of one or several nodes of a SLURM cluster.
#
#   NODES=4 GPUS=8 launch/slurm.sh \
#     --config=configs/sudoku_utm.py:paper --workdir=/shared/run
#
# Submits itself. 120 seconds before the time limit the run is told to save;
# then, or if it loses a process, it is requeued under the same number. All nodes
# must see --workdir, this folder and the Python environment of the submitting
# shell.
# Partition, account and time limit: SBATCH_PARTITION, SBATCH_ACCOUNT,
# SBATCH_TIMELIMIT and sbatch's other variables.
#
#   NODES         1
#   GPUS          8, per node
#   CPUS          8, per GPU
#   PYTHON        python
#   MAX_RESTARTS  100
#   DRY_RUN=1     print the commands, do nothing
set -euo pipefail
# SLURM runs a copy of this file in the directory of submission.
[[ -n ${SLURM_JOB_ID:-} ]] || CDPATH='' cd "$(dirname "$0")/.."
. launch/common.sh
NODES=${NODES:-1} GPUS=${GPUS:-8} CPUS=${CPUS:-8} PYTHON=${PYTHON:-python}
need_number NODES
need_number GPUS
need_number CPUS
need_flags "--config --workdir" "$@"

# One task per GPU. Each task must see all GPUs of its node, because JAX selects
# one by the task's number: no --gpus-per-task, which hides the others.
# Other tasks end by themselves when one has failed.
step=(srun --kill-on-bad-exit=0 "--cpus-per-task=$CPUS")
program=("$PYTHON" -m loopjax.main "$@")

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  run sbatch "--nodes=$NODES" "--gpus-per-node=$GPUS" \
    "--ntasks-per-node=$GPUS" "--cpus-per-task=$CPUS" launch/slurm.sh "$@"
  if [[ $DRY_RUN == 1 ]]; then
    echo "# in the job:"
    quoted "${step[@]}" launch/task.sh FOLDER "${program[@]}"
  fi
  exit
fi

status=0 ended=$(mktemp -d "$PWD/loopjax-$SLURM_JOB_ID.XXXXXX")
"${step[@]}" launch/task.sh "$ended" "${program[@]}" || status=$?
if ((status)); then
  status=$(cause "$status" < <(cat "$ended"/* 2>/dev/null))
fi
rm -r "$ended"
if again "$status" && ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
  echo "exit status $status; queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
