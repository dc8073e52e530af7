#!/usr/bin/env bash
# tcp_rank.sh PROGRAM [ARGUMENT...]: a rank that mpirun has started joins its job over TCP, at
# MASTER_ADDR or SIRTAKI_TEST_MASTER.
set -euo pipefail
export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:?no rank of an MPI}}}
export WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:?no number of ranks}}
export SIRTAKI_MEDIUM=tcp MASTER_ADDR=${MASTER_ADDR:-$SIRTAKI_TEST_MASTER}
exec "$@"
