#!/usr/bin/env bash
# A job over TCP that cannot start: each rank ends with one line that says why and what to do, long before start_timeout where
# nothing can be waited for.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
program=$(realpath "${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}/../faults/lose_a_rank")

hosts_up 3
output=$hosts_state/output

# started TIMEOUT RANKS [VARIABLE=VALUE...]: these ranks of three, each on its host, all of which have to end with an error.
started() {
  local timeout=$1 rank ranks=() job code
  began=$SECONDS
  read -ra ranks <<<"$2"
  shift 2
  : >"$output"
  jobs_of_ranks=()
  for rank in "${ranks[@]}"; do
    on_host $((rank + 1)) timeout 150 env SIRTAKI_SECRET=0123456789abcdef SIRTAKI_MEDIUM=tcp WORLD_SIZE=3 MASTER_ADDR=10.77.0.1 \
      SIRTAKI_START_TIMEOUT="$timeout" RANK="$rank" "$@" "$program" killed 9 2>&1 </dev/null | sed "s/^/$rank: /" >>"$output" &
    jobs_of_ranks+=($!)
  done
  for job in "${jobs_of_ranks[@]}"; do
    code=0
    wait "$job" || code=$?
    [ "$code" = 2 ] || fail "a rank ends with code $code, where init fails with 2"
  done
  cat "$output"
}
# soon SECONDS: that took less.
soon() { [ $((SECONDS - began)) -lt "$1" ] || fail "that took $((SECONDS - began)) s"; }
# say RANKS TEXT: each of these has said one line, with this text in it.
say() {
  local rank
  for rank in $1; do
    [ "$(grep -c "^$rank: " "$output")" = 1 ] || fail "rank $rank does not say one line"
    grep "^$rank: init: " "$output" | grep -qF -- "$2" || fail "rank $rank does not say: $2"
  done
}

echo '== no secret'
started 60 '0 1' SIRTAKI_SECRET=
say '0 1' 'SIRTAKI_SECRET is not set, by which the ranks know each other. sirtakirun makes one for each job'
say '0 1' 'openssl rand -hex 32'
soon 40

echo '== a port in use, by the sshd of each host'
started 60 '0 1' SIRTAKI_PORT=2222
say 0 'rank 0 cannot listen at port 2222 for the other ranks: Address already in use; SIRTAKI_PORT, the same on all ranks'
say 1 'was refused by what listens at 10.77.0.1:2222: it does not know this job'
soon 40

echo '== a name that does not resolve'
started 3 1 MASTER_ADDR=nowhere
say 1 'MASTER_ADDR="nowhere" does not resolve: '
say 1 '; give rank 0'

echo '== no way from host 3 to host 2'
on_host 3 ip route add unreachable 10.77.0.2/32
started 120 '0 1 2'
say '0 1 2' 'rank 2 on host h3 cannot connect to rank 1 on host h2 at 10.77.0.2:'
say '0 1 2' 'No route to host; a firewall may be between'
soon 60
