#!/usr/bin/env bash
# What tpu_vm.sh and tpu_pod.sh start on every host of a TPU.
#
#   launch/tpu_host.sh install             Python and loopjax, in this directory
#   launch/tpu_host.sh run ATTEMPT FLAGS   a run: its output and exit status
#
# A run outlives the connection. The same ATTEMPT again follows it, which gcloud
# does by itself when the connection is lost; another ATTEMPT first stops it.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${RUNS:-/tmp/loopjax} # A reboot empties it, and ends the runs.

install() {
  [[ -e .venv/installed ]] && return
  # Python of the TPU images is too old; uv brings another.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --clear --python=3.12 .venv
  python3 -m uv pip install --quiet --python=.venv/bin/python '.[tpu]'
  touch .venv/installed
}

# Tells process $1 when the metadata server says that the machine goes.
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

# Runs in the background and holds the lock as long as the run lives.
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
  : >"$runs/$attempt.log" # Now, so that it can be followed.
  supervise "$@" </dev/null >>"$runs/$attempt.log" 2>&1 &
  echo $! >"$runs/$attempt.pid"
  exec 9>&-
}

follow() {
  local attempt=$1 status
  mkdir -p "$runs"
  [[ -e $runs/$attempt.pid ]] || start "$@"
  tail --pid="$(cat "$runs/$attempt.pid")" -n +1 -f "$runs/$attempt.log"
  # Without a status all of it was killed.
  status=$(cat "$runs/$attempt.status" 2>/dev/null) || status=137
  exit "$status"
}

case ${1:-} in
  install) install ;;
  run)
    shift
    follow "$@"
    ;;
  *) echo "error: tpu_host.sh wants install or run" >&2 && exit 2 ;;
esac
