#!/usr/bin/env bash
# hosts.sh HOSTS RANKS PROGRAM [ARGUMENT...]: runs a program on RANKS ranks on each of HOSTS hosts of this machine's, which are
# joined by 1 Gbit links.
# Exit code 77: hosts cannot be made here, for the reason on standard error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/multihost/hosts.sh
. tests/multihost/hosts.sh
hosts=$1 ranks=$2
shift 2
hosts_up "$hosts" 1gbit
across "$(seq -s, -f "h%g:$ranks" "$hosts")" "$@"
