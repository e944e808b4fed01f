#!/usr/bin/env bash
# Not run on a TPU yet: its tests use stand-ins for gcloud and the machine.
# Trains on a Cloud TPU slice that it requests as a queued resource.
#
#   NAME=run1 ZONE=us-east5-b TYPE=v5litepod-64 SPOT=1 DELETE=1 \
#     launch/tpu_pod.sh --config=configs/sudoku_utm.py:paper --workdir=/mnt/shared/run
#
# Waits for the slice, then works like tpu_vm.sh. A preempted slice is requested
# again, and the run resumes.
#
#   TYPE          accelerator type, such as v4-32, v5litepod-64, v5p-32, v6e-64
#   RUNTIME       default for TYPE
#   SPOT=1        cheaper, may be preempted
#   DELETE=1      delete the slice when the run ends, for any reason
#   NAME ZONE PROJECT SETUP MAX_RESTARTS PAUSE DRY_RUN   as in tpu_vm.sh
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
. launch/common.sh
. launch/tpu.sh
need TYPE "accelerator type, such as v5litepod-64"
case $TYPE in
  v[234]-*) runtime=tpu-ubuntu2204-base ;;
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  *) need RUNTIME "none is known for TYPE=$TYPE" ;;
esac
need_flags "--config --workdir" "$@"

create() {
  local spot=
  [[ ${SPOT:-0} == 1 ]] && spot=--spot
  run gcloud compute tpus queued-resources create "$NAME" "${where[@]}" \
    "--node-id=$NAME" "--accelerator-type=$TYPE" \
    "--runtime-version=${RUNTIME:-$runtime}" ${spot:+"$spot"}
}

delete() {
  run gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" \
    --force --quiet
}

# The state of the request: NONE if there is none, UNKNOWN if gcloud fails after
# the first start, as when the connection is lost.
request() {
  local said # What gcloud reports as an error; the state is printed.
  { said=$(gcloud compute tpus queued-resources describe "$NAME" \
    "${where[@]}" --format='value(state.state)' 2>&1 >&3); } 3>&1 && return
  if [[ $said == *NOT_FOUND* ]]; then
    echo NONE
  elif ((restarts > 0)); then
    echo UNKNOWN
  else
    said=${said#*ERROR: }
    fail "gcloud cannot describe $NAME: ${said%%$'\n'*}"
  fi
}

ready() {
  local state
  if [[ $DRY_RUN == 1 ]]; then
    create
    echo "# waits until $NAME is ACTIVE"
    return
  fi
  while true; do
    state=$(request)
    [[ $state != ACTIVE ]] || state=$(machine) # Once granted.
    echo "$NAME is $state" >&2
    case $state in
      READY) return ;;
      NONE) create ;;
      SUSPENDED | PREEMPTED | TERMINATED) delete ;;
      FAILED) fail "the request $NAME has failed; see gcloud, then delete it" ;;
      *) sleep "$PAUSE" ;;
    esac
  done
}

train "$@"
if [[ ${DELETE:-0} == 1 ]]; then
  delete
fi
exit "$status"
