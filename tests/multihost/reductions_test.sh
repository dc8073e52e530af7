#!/usr/bin/env bash
# Reductions between hosts: as many ranks on each, unequal numbers, three hosts, and sets of them.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"   # a seed that all ranks have
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}

hosts_up 3
for hosts in h1:2,h2:2 h1:2,h2:1 h1:1,h2:2,h3:1; do
  printf '== %s\n' "$hosts"
  across "$hosts" "$bindir/reductions"
done
