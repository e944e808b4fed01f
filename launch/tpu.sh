# shellcheck shell=bash
# Sourced by tpu_vm.sh and tpu_pod.sh.

need NAME "of the TPU"
need ZONE "of the TPU, such as us-east5-b"
PAUSE=${PAUSE:-30} # Seconds between polls and before a restart.
where=("--zone=$ZONE" ${PROJECT:+"--project=$PROJECT"})
revision=$(git rev-parse --short HEAD)
directory=loopjax-$revision # In the home directory of every host.
restarts=0

# State of the machine, such as READY or PREEMPTED.
machine() {
  gcloud compute tpus tpu-vm describe "$NAME" "${where[@]}" \
    --format='value(state)' 2>/dev/null || echo UNKNOWN
}

# Runs a command on every host; returns the first exit status that is not zero.
on_hosts() {
  run gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all \
    --quiet "--command=$1"
}

# Copies the committed files to every host that lacks them.
install() {
  local archive=${TMPDIR:-/tmp}/$directory.tar.gz setup=${SETUP:-true}
  git diff --quiet HEAD || echo "what is not committed stays here" >&2
  run git archive --format=tar.gz --output="$archive" HEAD &&
    run gcloud compute tpus tpu-vm scp "$archive" "$NAME:" "${where[@]}" \
      --worker=all --quiet &&
    on_hosts "{ $setup; } && mkdir -p $directory &&
      tar -xzf $directory.tar.gz -C $directory &&
      $directory/launch/tpu_host.sh install"
}

# Starts a run with these flags on all hosts, and restarts it where useful. Sets
# `status` to its exit status. `ready` returns when the TPU is available.
train() {
  local attempt flags
  flags=$(quoted "$@")
  while true; do
    ready
    attempt=$(date +%s)
    [[ $DRY_RUN == 1 ]] && attempt=ATTEMPT
    status=0
    install || status=$?
    if ((status == 0)); then
      on_hosts "$directory/launch/tpu_host.sh run $attempt $flags" || status=$?
      if ((status)); then
        status=$(cause "$status" < <(
          on_hosts "$directory/launch/tpu_host.sh status $attempt" 2>/dev/null
        ))
      fi
    fi
    # gcloud's own failures also return 1.
    if ((status == 1)) && [[ $(machine) != READY ]]; then
      status=255
    fi
    if ! again "$status" || ((restarts >= MAX_RESTARTS)); then
      return
    fi
    restarts=$((restarts + 1))
    echo "exit status $status; new start $restarts of $MAX_RESTARTS" >&2
    sleep "$PAUSE"
  done
}
