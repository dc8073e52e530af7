#!/usr/bin/env bash
# checkpoint_tool_test.sh PROGRAM TOOL PYTHON: checkpoints of optimizers that are sharded over ranks, made by PROGRAM, go on in
# Python from the files that TOOL (sirtaki-checkpoint) makes of them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$1 tool=$2 python=$3
# shellcheck source=tests/support/sample.sh
. "$here/../support/sample.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for ranks in $(sample 1 1 2 3); do
  mkdir "$scratch/$ranks"
  bash "$here/../support/mpirun.sh" "$ranks" "$program" "$scratch/$ranks"
  names=(Adam AdamW SGD RMSprop Adagrad)
  for name in "${names[@]}"; do
    "$tool" verify "$scratch/$ranks/$name"
    for file in "$name" "$name.after"; do "$tool" consolidate --python "$scratch/$ranks/$file" "$scratch/$ranks/$file.py.pt"; done
  done
  "$python" -W ignore "$here/checkpoint_tool.py" "$scratch/$ranks" "${names[@]}" | tee "$scratch/output"
  [ "$(wc -l <"$scratch/output")" = ${#names[@]} ]
done
