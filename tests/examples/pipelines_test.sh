#!/usr/bin/env bash
# pipelines_test.sh RESNET_UNSPLIT RESNET_PIPELINE TWO_LAYERS_UNSPLIT TWO_LAYERS_PIPELINE: a program and its pipeline on 2 ranks
# train alike, and differ in few lines. One of them by seed, with SIRTAKI_TEST_SCALE=full both.
set -euo pipefail
programs=("$@")
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
# shellcheck source=tests/support/two_versions.sh
. "$top/tests/support/two_versions.sh"

# both UNSPLIT PIPELINE ARGUMENT...
both() {
  local name=${2##*/} pipeline=$2
  few_changes "$top/examples/${1##*/}.cc" "$top/examples/$name.cc"
  program=$1
  shift 2
  run 0 "$@"
  expect 0 "$name unsplit" "step"
  mv "$scratch/output" "$scratch/unsplit"
  program=$pipeline
  run 2 "$@"
  expect 0 "$name" "step"
  same_training "$scratch/unsplit" "$scratch/output" "$name"
}

resnet() { both "${programs[@]:0:2}" --batch-size 8 --image-size 32 --micro-batches 2 --steps 4; }
two_layers() { both "${programs[@]:2:2}" --steps 100; }
for check in $(sample 1 resnet two_layers); do "$check"; done
done_with pipelines
