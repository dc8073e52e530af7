#!/usr/bin/env bash
# mpirun.sh RANKS PROGRAM [ARGUMENT...]: runs a program on RANKS processes of this machine under whichever MPI is here
# (Open MPI 4 and 5, MPICH), also as root and with more ranks than cores. Ends the ranks after SIRTAKI_TEST_SECONDS
# (280): a killed mpirun would leave them behind, one that is told to stop takes them along.
# MPIEXEC names the mpirun to use; SIRTAKI_MPIRUN_FLAGS are given to it as they are. SIRTAKI_TEST_MEDIUM=tcp: the ranks that it
# starts join their job over TCP.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,6p "$0" >&2; exit 2; }
ranks=$1
shift
mpirun=${MPIEXEC:-mpirun}
version=$("$mpirun" --version 2>&1)   # whole: an MPICH whose lines nobody reads fails
flags=(-np "$ranks")
case $version in
  *"Open MPI"* | *OpenRTE* | *PRRTE*)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
    flags+=(--oversubscribe --bind-to none)
    # Where processes may not read each other's memory, Open MPI 4 would print an error for every large message.
    if [ "$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || echo 0)" -ge 2 ]; then
      export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
    fi
    ;;
  *HYDRA* | *MPICH*) flags+=(-bind-to none) ;;
  *) printf 'mpirun.sh: %s is no MPI known here; trying it with -np alone\n' "$mpirun" >&2 ;;
esac
over=()
if [ "${SIRTAKI_TEST_MEDIUM:-mpi}" = tcp ]; then
  over=(bash "$(dirname "${BASH_SOURCE[0]}")/tcp_rank.sh")
  export MASTER_ADDR=127.0.0.1 SIRTAKI_SECRET=0123456789abcdef
  # Not of the ephemeral ports, one of which another process may get before rank 0 listens.
  MASTER_PORT=$(python3 -c 'import random, socket
while True:
    port = random.randrange(20000, 32000)
    try:
        socket.socket().bind(("127.0.0.1", port))
        break
    except OSError:
        pass
print(port)')
  export MASTER_PORT
fi
export SIRTAKI_TEST_SECONDS=${SIRTAKI_TEST_SECONDS:-280}   # the ranks say what hangs a little earlier
# shellcheck disable=SC2086  # flags are words
exec timeout -k 5 "$SIRTAKI_TEST_SECONDS" "$mpirun" "${flags[@]}" ${SIRTAKI_MPIRUN_FLAGS:-} "${over[@]}" "$@" </dev/null
