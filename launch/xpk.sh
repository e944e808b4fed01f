#!/usr/bin/env bash
# Not run on a cluster yet; `xpk --dry-run` 1.16.0 accepts what it says.
# Trains on TPUs of a GKE cluster by xpk (github.com/AI-Hypercomputer/xpk).
#
#   NAME=run1 CLUSTER=tpus TYPE=v5litepod-64 IMAGE=example.com/loopjax-tpu \
#     launch/xpk.sh --config=configs/sudoku_utm.py:paper --workdir=/shared/run1
#
# Queues a workload, which xpk restarts after a preemption or exit status 4 or 5;
# the run resumes. The image comes from launch/Dockerfile with EXTRA=tpu; xpk runs
# it as the image's user, which is root there.
#
#   CLUSTER       of `xpk cluster create`
#   TYPE          accelerator type, such as v4-32, v5litepod-64, v5p-32, v6e-64
#   SLICES        1
#   STORAGE       of `xpk storage`, mounted where --workdir is
#   PROJECT ZONE  xpk's own if empty
#   NAME IMAGE MAX_RESTARTS DRY_RUN   as elsewhere
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
. launch/common.sh
need NAME "of the workload"
need CLUSTER "of xpk cluster create"
need TYPE "accelerator type, such as v5litepod-64"
need IMAGE "of launch/Dockerfile, with EXTRA=tpu"
SLICES=${SLICES:-1}
need_number SLICES
need_flags "--config --workdir" "$@"

run xpk workload create "--workload=$NAME" "--cluster=$CLUSTER" \
  "--tpu-type=$TYPE" "--num-slices=$SLICES" "--docker-image=$IMAGE" \
  ${STORAGE:+"--storage=$STORAGE"} ${PROJECT:+"--project=$PROJECT"} \
  ${ZONE:+"--zone=$ZONE"} "--max-restarts=$MAX_RESTARTS" \
  --restart-on-exit-codes=4,5 --termination-grace-period-seconds=120 \
  "--command=python -m loopjax.main --distributed $(quoted "$@")"
