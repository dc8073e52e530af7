#!/usr/bin/env bash
# Ends of a run of real ranks within a job of Slurm, by mpirun and by srun, on two hosts of two: one of each by seed, or
# with SIRTAKI_TEST_SCALE=full every one. See ends.sh.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/multihost/slurm.sh
. "$(dirname "$0")/slurm.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
# shellcheck source=tests/multihost/ends.sh
. "$(dirname "$0")/ends.sh"

ends_need "${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}"
hosts_not_under HYDRA "PyPI's MPICH has no PMIx, which srun is asked for"
slurm_need
ends_up
slurm_up 2

# What cleans up behind ranks of srun is killed, and Open MPI ends those whose PMIx is gone.
step_killed() {
  begin "$program" waits -1
  kill -KILL "$(parent_of "$(parent_of "$(ours end_badly "RANK=$victim")")")"
  finish 195
  says "rank [0-3] on host $host ended with exit code 195"
}
parent_of() { awk '/^PPid:/ { print $2 }' "/proc/$1/status"; }

around=(salloc -N 2 -n 4)
# shellcheck disable=SC2046  # several
trials 'mpirun in salloc' $(sample 1 killed stopped throws exits interrupted terminated)
launcher=srun
# shellcheck disable=SC2046  # several
trials 'srun in salloc' $(sample 1 step_killed terminated interrupted exits throws stopped killed)
exit "$failed"
