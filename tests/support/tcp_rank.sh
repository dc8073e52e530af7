#!/usr/bin/env bash
# tcp_rank.sh PROGRAM [ARGUMENT...]: a rank that mpirun has started joins its job over TCP, at
# MASTER_ADDR or SIRTAKI_TEST_MASTER. SIRTAKI_TEST_HOSTS: the ranks believe in turn that they are on so many hosts, for
# which this has to be root.
set -euo pipefail
export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:?no rank of an MPI}}}
export WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:?no number of ranks}}
export SIRTAKI_MEDIUM=tcp MASTER_ADDR=${MASTER_ADDR:-$SIRTAKI_TEST_MASTER}
if [ -n "${SIRTAKI_TEST_HOSTS:-}" ]; then
  # shellcheck disable=SC2016  # the inner shell's
  exec unshare --uts bash -c 'hostname "h$((RANK % SIRTAKI_TEST_HOSTS))"; exec "$@"' bash "$@"
fi
exec "$@"
