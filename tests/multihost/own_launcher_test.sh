#!/usr/bin/env bash
# sirtakirun as its own launcher, over ssh: what no MPI's launcher does alike.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
set -- "$1" own
# shellcheck source=tests/multihost/runs.sh
. "$(dirname "$0")/runs.sh"

# kill_one SIGNAL HOST WORDS: the process of the host that begins with the words.
kill_one() {
  local process
  for process in /proc/[0-9]*; do
    { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -q "^$3" || continue
    [ "$(readlink "$process/ns/net")" = "$(on_host "$2" readlink /proc/self/ns/net)" ] || continue
    kill "-$1" "${process#/proc/}" && return
  done
  fail "no process of host $2 is $3"
}

# launchers_gone: waits until no process of sirtakirun's is left on these hosts. Other tests have theirs elsewhere.
launchers_gone() { within 100 no_launchers || fail "left running: $(running "$sirtakirun" --as-)"; }
no_launchers() {
  local process _
  while read -r process _; do
    [[ $nets != *"$(readlink "/proc/$process/ns/net" || echo ended)"* ]] || return 1
  done < <(running "$sirtakirun" --as-)
}
nets="$(on_host 1 readlink /proc/self/ns/net) $(on_host 2 readlink /proc/self/ns/net)"

echo "--- hosts in the order in which they are named, this one by two names, and its ranks count on"
run 0 -H h2:1,h1:1,localhost:2 bash -c 'echo "$(hostname) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $SIRTAKI_MEDIUM ${#SIRTAKI_SECRET}"'
says "$output" "[0] h2 0/4 0/1 tcp 64"
says "$output" "[1] h1 1/4 0/3 tcp 64"
says "$output" "[3] h1 3/4 2/3 tcp 64"

echo "--- all ranks have one secret, another run another, and a user's own stays"
secrets() { run 0 "$@" -H h1:1,h2:1 bash -c 'echo "$SIRTAKI_SECRET $SIRTAKI_MEDIUM"' && cut -d ' ' -f 2- "$output" | sort -u; }
first=$(secrets)
second=$(secrets)
[ "$(wc -l <<<"$first")" = 1 ] && [ "$(wc -l <<<"$second")" = 1 ] && [ "$first" != "$second" ] || fail "secrets: $first; $second"
[ "$(secrets -x SIRTAKI_SECRET=mine -x SIRTAKI_MEDIUM=mpi)" = "mine mpi" ] || fail 'it is not the user'"'"'s'

echo "--- no value of a variable stands on a command line while ranks run, and any value arrives"
export HARD="it's \"\$HOME\" \\ and \`needle\`
end"
run 0 -H h1:1,h2:1 -x HARD bash -c \
  'tail -n 1 <<<"$HARD"; echo "${#HARD} letters"; cat /proc/[0-9]*/cmdline | tr "\0" "\n" | grep -c "needl[e]"; true'
for rank in 0 1; do
  says "$output" "[$rank] end"
  says "$output" "[$rank] 31 letters"
  says "$output" "[$rank] 0"
done

echo "--- rank 0 reads the input on another host as well"
code=0
seq 20000 | on_host 1 timeout -k 5 100 "$sirtakirun" "${flags[@]}" -H h2:2 \
  bash -c 'if [ "$RANK" = 0 ]; then sum=0; while read -r n; do sum=$((sum + n)); done; echo "sum $sum"; else cat; echo end; fi' \
  >"$output" 2>"$errors" || code=$?
[ "$code" = 0 ] || fail "code $code"
says "$output" "[0] sum 200010000"
says "$output" "[1] end"

echo "--- SIGUSR1 goes on to the ranks of all hosts"
begin -H h1:2,h2:2 bash -c 'trap "echo asked; exit 0" USR1; echo begun; while true; do sleep 0.1; done'
kill_one USR1 1 "$sirtakirun --launcher"
finish 0
for rank in 0 1 2 3; do says "$output" "[$rank] asked"; done

echo "--- an ssh that ends while ranks run, its ranks' starter, what starts them here"
begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 321'
kill_one TERM 1 "ssh "
finish 1
[[ $(tail -n 1 "$errors") == 'sirtakirun: host h2: '* ]] || fail 'it does not name the host'
gone "sleep 321"
begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 322'
kill_one KILL 2 "$sirtakirun --as-daemon"
finish 1
[[ $(tail -n 1 "$errors") == 'sirtakirun: host h2: its ssh ended without a word: '* ]] || fail 'it does not name the host'
gone "sleep 322"
begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 323'
kill_one KILL 1 "$sirtakirun --as-launcher"
finish 137
[ "$(tail -n 1 "$errors")" = "sirtakirun: $sirtakirun died of SIGKILL, and the ranks with it" ] || fail 'it does not say what died'
gone "sleep 323"
launchers_gone

echo "--- what stands around a rank is killed on the other host"
begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 324'
kill_one KILL 2 "$sirtakirun --as-rank"
finish 1
grep -qE '^sirtakirun: rank [23] on host h2 was lost: its connection closed without a message$' "$errors" || fail 'it does not say who was lost'
gone "sleep 324"

echo "--- a host where no ssh server listens, and one that has no sirtakirun, or another version"
# unfit LINE ARGUMENT...: ends the run with this line, without a check before it.
unfit() {
  local line=$1
  shift
  run 1 --check-hosts=false "$@" -H h1:2,h2:2 sleep 325
  [ "$(tail -n 1 "$errors")" = "sirtakirun: host h2: $line" ] || fail "its last line is not: $line"
  gone "sleep 325"
}
unfit 'no ssh server listens there (ssh: connect to host h2 port 2223: Connection refused): start sshd on it, or name its port with -p' -p 2223
printf '#!/bin/sh\necho other >&2\nexit 9\n' >"$hosts_state/sirtakirun"
chmod +x "$hosts_state/sirtakirun"
on_host 2 mount --bind "$hosts_state/sirtakirun" "$sirtakirun"
unfit "\"$sirtakirun\" gives no report there but exit code 9 (other): install the same version under the same path on every host"
on_host 2 umount "$sirtakirun"
on_host 2 mount -t tmpfs tmpfs "$(dirname "$sirtakirun")"
run 1 --check-hosts=false -H h1:2,h2:2 sleep 325
grep -qE "^sirtakirun: host h2: \"$sirtakirun\" is not there \(.*\): install Sirtaki under the same path on every host$" "$errors" || fail 'it does not say why'
on_host 2 umount "$(dirname "$sirtakirun")"
code=0
printf 'sirtakirun 99.0 3\nabc' | "$sirtakirun" --as-daemon 0 1 1 >"$output" 2>"$errors" || code=$?
[ "$code" = 3 ] || fail "another version: code $code"
grep -qE 'Sirtaki is [0-9.]+ here and 99\.0 where the run was started: install the same version on every host$' "$errors" || fail 'it does not name them'

echo "--- ranks that do not reach sirtakirun, while others do"
on_host 1 sh -c 'ip link add nowhere type bridge && ip addr add 10.99.0.1/32 dev nowhere && ip link set nowhere up'
began=$SECONDS
usual=("${flags[@]}")
flags=("${flags[@]/veth0/nowhere}")
run 1 -H h1:2,h2:2 sleep 326
flags=("${usual[@]}")
tail -n 1 "$errors" |
  grep -qE '^sirtakirun: h2: rank [23] does not reach sirtakirun: 10\.99\.0\.1:[0-9]+: Network is unreachable; --network-interfaces chooses where it listens$' ||
  fail 'it does not say which'
[ $((SECONDS - began)) -le 15 ] || fail "it took $((SECONDS - began)) s"
gone "sleep 326"
launchers_gone
