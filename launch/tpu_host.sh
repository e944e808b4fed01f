#!/usr/bin/env bash
# Not run on a TPU yet: its tests use stand-ins for gcloud and the machine.
# Started by tpu_vm.sh and tpu_pod.sh on every host of a TPU.
#
#   launch/tpu_host.sh install             Python and loopjax, in this directory
#   launch/tpu_host.sh run ATTEMPT FLAGS   a run: its output and exit status
#   launch/tpu_host.sh status ATTEMPT      prints the exit status of a run
#
# A run outlives the connection. Repeating an ATTEMPT follows its run, as gcloud
# does when the connection is lost; a new ATTEMPT first stops the old run.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
runs=${RUNS:-/tmp/loopjax} # Emptied by a reboot, which also ends runs.

install() {
  [[ -e .venv/installed ]] && return
  # The TPU images' Python is too old; uv installs another.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --clear --python=3.12 .venv
  python3 -m uv pip install --quiet --python=.venv/bin/python '.[tpu]'
  touch .venv/installed
}

# Signals process $1 when the metadata server announces a preemption.
watch_preemption() {
  local instance=http://metadata.google.internal/computeMetadata/v1/instance
  local ask=(curl --silent --max-time 2 --header 'Metadata-Flavor: Google')
  while kill -0 "$1" 2>/dev/null; do
    if [[ $("${ask[@]}" "$instance/preempted") == TRUE ]]; then
      kill -TERM "$1"
      return
    fi
    sleep "${PAUSE:-5}"
  done
}

# Runs in the background and holds the lock during the run.
supervise() {
  local attempt=$1 pid status=0
  shift
  trap '' HUP
  .venv/bin/python -u -m loopjax.main --distributed "$@" &
  pid=$!
  echo "$pid" >"$runs/pid"
  watch_preemption "$pid" 9>&- &
  wait "$pid" || status=$?
  kill $! 2>/dev/null || true
  echo "$status" >"$runs/$attempt.status"
}

start() {
  local attempt=$1
  exec 9>"$runs/lock"
  if ! flock --nonblock 9; then
    kill -TERM "$(cat "$runs/pid")" || true # The older run saves.
    if ! flock --timeout 300 9; then
      kill -KILL "$(cat "$runs/pid")" || true
      flock 9
    fi
  fi
  : >"$runs/$attempt.log" # Created first, for followers.
  supervise "$@" </dev/null >>"$runs/$attempt.log" 2>&1 &
  echo $! >"$runs/$attempt.pid"
  exec 9>&-
}

follow() {
  local attempt=$1 status
  mkdir -p "$runs"
  [[ -e $runs/$attempt.pid ]] || start "$@"
  tail --pid="$(cat "$runs/$attempt.pid")" -n +1 -f "$runs/$attempt.log"
  # No status: everything was killed.
  status=$(cat "$runs/$attempt.status" 2>/dev/null) || status=137
  exit "$status"
}

case ${1:-} in
  install) install ;;
  status) cat "$runs/$2.status" ;;
  run)
    shift
    follow "$@"
    ;;
  *) echo "error: tpu_host.sh wants install, run or status" >&2 && exit 2 ;;
esac
