#!/usr/bin/env bash
# An elastic job on two hosts of two ranks: ranks are killed and stopped, a host loses all its processes or its link, ranks are taken
# away and come back, by seed (SIRTAKI_TEST_SEED), 5 times, with SIRTAKI_TEST_SCALE=full 300 times. Nothing hangs, the parameters of
# all ranks are the same after each change, and every sample is trained once in each epoch. In Python, where that is built, the losses
# are those of one process that makes the same steps. A second job has a sharded optimizer, and its parameters and state are, to the
# bit, those of one process.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS [PYTHON]}
build=$(realpath "$bindir/../..")
tests=$(realpath "$(dirname "$0")/..")
program=${2:-$build/tests/python/sirtaki_elastic_twin}
for needed in "$build/sirtakirun" "$program"; do
  [ -x "$needed" ] || hosts_skip "$(basename "$needed") is not built"
done
hosts_up 2
for host in 1 2; do printf '%s\n' "$(hosts_first "${hosts_started[host]}")"; done >"$hosts_state/firsts"
job=(python3)
[ $# -lt 2 ] || job=(bash "$tests/python/python.sh" "$2" "$build" with python3)
ELASTIC_HOSTS=$hosts_state "${job[@]}" "$tests/python/elastic_job.py" "$build/sirtakirun" "$program"
