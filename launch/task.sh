#!/usr/bin/env bash
# Started by slurm.sh for each task: runs a command and records its exit status.
#
#   launch/task.sh FOLDER COMMAND...   the status goes to FOLDER/NUMBER
set -uo pipefail
trap : TERM # SLURM signals the command as well, which ends when it has saved.
"${@:2}"
status=$?
echo "$status" >"$1/$SLURM_PROCID"
exit "$status"
