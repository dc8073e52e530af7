#!/usr/bin/env bash
# hosts.sh PROGRAM [ARGUMENT...]: runs a program on 2 x 2 ranks: two hosts of this machine's, joined by 1 Gbit links.
# Exit code 77: hosts cannot be made here, for the reason on standard error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/multihost/hosts.sh
. tests/multihost/hosts.sh
hosts_up 2 1gbit
across h1:2,h2:2 "$@"
