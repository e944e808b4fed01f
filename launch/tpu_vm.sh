#!/usr/bin/env bash
# Not run on a TPU yet: its tests use stand-ins for gcloud and the machine.
# Trains on an existing Cloud TPU VM with one or several hosts.
#
#   NAME=my-tpu ZONE=us-east5-b launch/tpu_vm.sh \
#     --config=configs/sudoku_utm.py:paper --workdir=/mnt/shared/run
#
# Installs the committed files on all hosts, starts the same command on all of
# them with --distributed, and follows it. Restarts it after exit status 4 or 5 or
# a lost connection. The run outlives this script: repeating the command saves and
# stops the run, and resumes it. All hosts must see --workdir.
#
#   NAME ZONE     of the TPU VM
#   PROJECT       gcloud's own if empty
#   SETUP         command for every host before each start, such as
#                 'mountpoint -q /mnt/x || sudo mount 10.0.0.2:/x /mnt/x'
#   MAX_RESTARTS  100
#   PAUSE         30, seconds before a restart
#   DRY_RUN=1     print the commands, do nothing
#
# With several hosts gcloud needs: ssh-add ~/.ssh/google_compute_engine
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
. launch/common.sh
. launch/tpu.sh
need_flags "--config --workdir" "$@"

ready() {
  local state
  [[ $DRY_RUN == 1 ]] && return
  while true; do
    state=$(machine)
    case $state in
      READY) return ;;
      UNKNOWN) ((restarts > 0)) || fail "gcloud knows no $NAME in $ZONE" ;;
      PREEMPTED | TERMINATED | STOPPED) fail "the TPU VM $NAME is $state" ;;
    esac
    sleep "$PAUSE"
  done
}

train "$@"
exit "$status"
