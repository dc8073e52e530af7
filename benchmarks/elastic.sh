#!/usr/bin/env bash
# elastic.sh [--build FOLDER] SYSTEM FAULT PROGRAM...: trains on two hosts of two ranks each, made as for hosts.sh, does that to one
# of the hosts, and writes how long it took until the ranks that are left, or all, made their next step. driver/faults.py says which
# systems and faults there are. PROGRAM is what each rank runs; it gets a folder for its events as its last argument.
# Exit code 77: hosts cannot be made here, for the reason on standard error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/multihost/hosts.sh
. tests/multihost/hosts.sh
hosts_up 2
for host in 1 2; do printf "%s\n" "$(hosts_first "${hosts_started[host]}")"; done >"$hosts_state/firsts"
python3 benchmarks/driver/faults.py "$hosts_state" "$@"
