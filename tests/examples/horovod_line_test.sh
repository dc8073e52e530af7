#!/usr/bin/env bash
# horovod_line_test.sh PROGRAM: the mpirun line that Horovod's documentation gives starts train_digits. Its flags are
# those of Open MPI 4.
set -euo pipefail
program=$1
mpirun=${MPIEXEC:-mpirun}
version=$("$mpirun" --version 2>&1)
case $version in
  *"Open MPI) 4."* | *"OpenRTE) 4."*) ;;
  *) echo "skipped: the line is for Open MPI 4, here is: ${version%%$'\n'*}"; exit 77 ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Where processes may not read each other's memory, Open MPI 4 would print an error for every large message.
if [ "$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || echo 0)" -ge 2 ]; then
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
fi
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}  # -x wants it to be there
code=0
timeout -k 5 "${SIRTAKI_TEST_SECONDS:-110}" "$mpirun" --allow-run-as-root -oversubscribe -np 2 -H localhost:2 \
  -bind-to none -map-by slot -x LD_LIBRARY_PATH -x PATH -mca pml ob1 -mca btl ^openib \
  "$program" --epochs 1 >"$scratch/output" 2>&1 </dev/null || code=$?
for text in "2 ranks" "epoch   1/1: loss" "parameters identical on all ranks"; do
  if [ "$code" != 0 ] || ! grep -qF "$text" "$scratch/output"; then
    printf "FAILED: exit code %s, '%s' expected in:\n" "$code" "$text"
    cat "$scratch/output"
    exit 1
  fi
done
echo "Horovod's line: as expected"
