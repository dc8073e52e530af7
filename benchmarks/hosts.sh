#!/usr/bin/env bash
# hosts.sh HOSTS RANKS RATE PROGRAM [ARGUMENT...]: runs a program on RANKS ranks on each of HOSTS hosts of this machine's, which
# are joined by links of that many Mbit a second, or with 0 by links without a limit.
# Exit code 77: hosts cannot be made here, for the reason on standard error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/multihost/hosts.sh
. tests/multihost/hosts.sh
hosts=$1 ranks=$2 rate=$3
shift 3
if [ "$rate" = 0 ]; then
  hosts_up "$hosts"
else
  hosts_up "$hosts" "${rate}mbit" "$((rate / 4))kb"   # the burst: 2 ms
fi
across "$(seq -s, -f "h%g:$ranks" "$hosts")" "$@"
