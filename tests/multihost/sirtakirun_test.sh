#!/usr/bin/env bash
# sirtakirun over ssh: starts, and every way in which a run on several hosts can end.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
sirtakirun=$bindir/../../sirtakirun
[ -x "$sirtakirun" ] || hosts_skip 'sirtakirun is not built'
sirtakirun=$(realpath "$sirtakirun")

hosts_up 2
output=$hosts_state/output
errors=$hosts_state/errors
flags=(--launcher "${MPIEXEC:-$(command -v mpirun)}" --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 "${hosts_flags[@]}")

fail() {
  printf 'FAILED: %s\n--- standard output:\n' "$*"
  cat "$output"
  printf -- '--- standard error:\n'
  cat "$errors"
  exit 1
}

start() { on_host 1 timeout -k 5 60 "$sirtakirun" "${flags[@]}" "$@" >"$output" 2>"$errors" </dev/null; }

# run CODE ARGUMENT...: of sirtakirun on host 1, which must end with the code.
run() {
  local expected=$1 code=0
  shift
  start "$@" || code=$?
  [ "$code" = "$expected" ] || fail "sirtakirun $*: code $code, expected $expected"
}

# begin ARGUMENT...: does not wait for the end; when 4 ranks have printed "begun" it is $job.
begin() {
  start "$@" &
  job=$!
  hosts_wait 'the ranks do not begin' all_begun || fail "sirtakirun $*"
}
all_begun() { [ "$(grep -c begun "$output")" = 4 ]; }

# finish CODE SECONDS: of $job, which must end in this time.
finish() {
  local code=0 began=$SECONDS
  wait "$job" || code=$?
  [ "$code" = "$1" ] || fail "code $code, expected $1"
  [ $((SECONDS - began)) -le "$2" ] || fail "ended after $((SECONDS - began)) s"
}

# Processes with these words in their command line, of all hosts. gone WORDS: none is left.
running() {
  local process
  for process in /proc/[0-9]*; do
    { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -F -- "$1" || true
  done
}
none_runs() { [ -z "$(running "$1")" ]; }
gone() { hosts_wait "left running" none_runs "$1" || fail "$(running "$1")"; }

says() { grep -qxF -- "$2" "$1" || fail "no line of $(basename "$1") is: $2"; }

echo "--- four ranks on two hosts"
export NCCL_TEST_OF_OURS=travels OTHER_TEST_OF_OURS=stays
run 0 -H h1:2,h2:2 -x WORD=given --tree-arity 3 bash -c \
  'echo "$RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $(hostname) $MASTER_ADDR $SIRTAKI_TREE_ARITY $WORD $NCCL_TEST_OF_OURS $NCCL_SOCKET_IFNAME"; [ "$RANK" = 0 ] || echo "other: $OTHER_TEST_OF_OURS"'
for rank in 0 1 2 3; do
  says "$output" "[$rank] $rank $((rank % 2))/2 h$((rank / 2 + 1)) 10.77.0.1 3 given travels =veth0"
done
says "$output" "[1] other: stays"   # this host's ranks have all
says "$output" "[3] other: "

echo "--- a program of ours reduces over both"
run 0 -H h1:2,h2:2 "$bindir/reductions" --gtest_filter='*TheLog*'

echo "--- only some slots of a host"
run 0 -H h1:2,h2:4 --include h1:1@h2:1,3 bash -c 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"'
[ "$(sort "$output")" = "$(printf '[0] h1 1\n[1] h2 1,3\n[2] h2 1,3')" ] || fail 'wrong slots'

echo "--- a rank that fails on the other host"
run 3 -H h1:2,h2:2 bash -c 'if [ "$RANK" = 3 ]; then echo "the reason" >&2; exit 3; fi; exec sleep 311'
says "$errors" "sirtakirun: rank 3 on host h2 ended with exit code 3"
[ "$(tail -n 1 "$errors")" = "sirtakirun:   the reason" ] || fail 'its last line is not the last'
gone "sleep 311"
run 137 -H h1:2,h2:2 bash -c 'if [ "$RANK" = 2 ]; then kill -KILL $$; fi; exec sleep 312'
grep -q '^sirtakirun: rank 2 on host h2 died of SIGKILL' "$errors" || fail 'it does not say who died'
gone "sleep 312"

echo "--- a program that one host has not"
# unfit PATTERN ARGUMENT...: nothing is started, and the line that says why is so.
unfit() {
  local pattern=$1
  shift
  run 2 "$@"
  grep -qE "^sirtakirun: $pattern\$" "$errors" || fail "no line is: sirtakirun: $pattern"
  [ "$(tail -n 1 "$errors")" = "sirtakirun: nothing was started (--check-hosts=false asks no host)" ] || fail 'it does not say what follows'
}
on_host 1 sh -c 'printf "#!/bin/sh\nexec sleep 313\n" >/tmp/only_here && chmod +x /tmp/only_here'
unfit 'host h2: program "/tmp/only_here" cannot be started there \(No such file or directory\): put it under the same path on every host' \
  -H h1:2,h2:2 /tmp/only_here
run 127 --check-hosts=false -H h1:2,h2:2 /tmp/only_here
grep -qE '^sirtakirun: rank [23] on host h2: "/tmp/only_here" cannot be started: No such file' "$errors" || fail 'it does not say where'
gone "sleep 313"

echo "--- a failure is not kept, and nothing but a fit host is"
on_host 1 sh -c 'printf "#!/bin/sh\necho ran\n" >/tmp/only_here'
on_host 2 sh -c 'printf "#!/bin/sh\necho ran\n" >/tmp/only_here && chmod +x /tmp/only_here'
run 0 -H h1:1,h2:1 /tmp/only_here
says "$output" "[1] ran"

echo "--- a library that one host has not"
if command -v cc >/dev/null; then
  printf 'int F(void) { return 0; }\n' >"$hosts_state/half.c"
  printf 'int F(void);\nint main(void) { return F(); }\n' >"$hosts_state/whole.c"
  cc -shared -fPIC -Wl,-soname,libhalf.so.1 -o "$hosts_state/libhalf.so.1" "$hosts_state/half.c"
  cc -o "$hosts_state/whole" "$hosts_state/whole.c" "$hosts_state/libhalf.so.1" -Wl,-rpath,/tmp
  on_host 1 cp "$hosts_state/libhalf.so.1" /tmp
  unfit "host h2: program \"$hosts_state/whole\" does not find libhalf\\.so\\.1 there: .*" -H h1:2,h2:2 "$hosts_state/whole"
  on_host 2 cp /dev/null /tmp/libhalf.so.1
  unfit "host h2: program \"$hosts_state/whole\" cannot be started there \\(.*libhalf\\.so\\.1: file too short\\): .*" \
    -H h1:2,h2:2 "$hosts_state/whole"
  on_host 2 cp "$hosts_state/libhalf.so.1" /tmp
  run 0 -H h1:2,h2:2 "$hosts_state/whole"
fi

echo "--- hosts that are not fit"
ssh-keygen -q -t ed25519 -N '' -f "$hosts_state/wrong"
sed "s,$hosts_state/key,$hosts_state/wrong," "$hosts_state/ssh_config" >"$hosts_state/wrong_config"
unfit 'host h2: ssh does not get in without a password \(.*Permission denied \(publickey\)\.\): put .*' \
  -H h1:2,h2:2 --ssh-args "-F $hosts_state/wrong_config" true
unfit 'host h2: no ssh server listens there \(.*port 2223: Connection refused\): .*' -H h1:2,h2:2 -p 2223 true
unfit 'host h9: no host of this name is known here \(ssh: Could not resolve hostname h9: .*\): .*' -H h1:2,h9:2 true
unfit 'host 10\.77\.0\.9: it does not answer \(.*\): .*' -H h1:2,10.77.0.9:2 true
sed "s,^UserKnownHostsFile .*,," "$hosts_state/ssh_config" | sed 's,UserKnownHostsFile .*,UserKnownHostsFile /dev/null,' >"$hosts_state/strange_config"
unfit 'host h2: its host key is not known here \(Host key verification failed\.\): .*' \
  -H h1:2,h2:2 --ssh-args "-F $hosts_state/strange_config" true
on_host 1 cp "$sirtakirun" /tmp/sirtakirun
code=0
on_host 1 timeout -k 5 60 /tmp/sirtakirun "${flags[@]}" -H h1:2,h2:2 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 2 ] || fail "code $code"
grep -q '^sirtakirun: host h2: "/tmp/sirtakirun" is not there (.*): install Sirtaki under the same path on every host$' "$errors" ||
  fail 'it does not say what is missing'
# A host that takes the connection and says nothing.
on_host 2 python3 -c 'import socket; s = socket.create_server(("", 2224)); open("/run/listens", "w"); c = s.accept(); s.accept()' &
hosts_wait 'nobody listens' on_host 2 test -e /run/listens
began=$SECONDS
unfit 'host h2: (it does not answer \(.*timed out.*\)|no answer within 2 s \(--start-timeout\)): .*' -H h1:2,h2:2 -p 2224 --start-timeout 2 true
[ $((SECONDS - began)) -le 10 ] || fail "noticed after $((SECONDS - began)) s"
kill $!
{ wait $!; } 2>/dev/null || true

echo "--- what was found is believed for a while"
mkdir "$hosts_state/bin"
printf '#!/bin/sh\necho called >>%s/calls\nexec %s "$@"\n' "$hosts_state" "$(command -v ssh)" >"$hosts_state/bin/ssh"
chmod +x "$hosts_state/bin/ssh"
# called COUNT ARGUMENT...: so often, by sirtakirun and by mpirun.
called() {
  local count=$1
  shift
  : >"$hosts_state/calls"
  PATH=$hosts_state/bin:$PATH run 0 -H h1:1,h2:1 "$@" true
  [ "$(wc -l <"$hosts_state/calls")" = "$count" ] || fail "ssh was called $(wc -l <"$hosts_state/calls") times, not $count"
}
called 2
called 1
called 2 --disable-cache
called 1 --check-hosts=false
XDG_CACHE_HOME=/proc/none called 2
XDG_CACHE_HOME=/proc/none called 2

# signal SIGNAL: sirtakirun on host 1 gets it.
signal() {
  local process
  for process in /proc/[0-9]*; do
    { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -q "^$sirtakirun --launcher" || continue
    kill "-$1" "${process#/proc/}"
  done
}

for name in INT TERM; do
  echo "--- SIG$name"
  begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 314'
  signal "$name"
  finish $((128 + $(kill -l "$name"))) 10
  gone "sleep 314"
done

echo "--- sirtakirun itself is killed"
begin -H h1:2,h2:2 bash -c "echo begun; trap '' TERM; sleep 315; sleep 315"
signal KILL
finish 137 10
gone "sleep 315"

echo "--- the link of a host goes down"
begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 316'
on_host 2 ip link set veth0 down
finish 1 40
grep -qE '^sirtakirun: rank [23] on host h2 was lost: ' "$errors" || fail 'it does not say who was lost'
gone "sleep 316"
on_host 2 ip link set veth0 up

echo "--- a host is lost, and the others start again"
begin -H h1:2,h2:2 --max-restarts 1 bash -c \
  'echo begun; if [ -n "${TORCHELASTIC_RESTART_COUNT:-}" ]; then echo "again $WORLD_SIZE"; exit; fi; exec sleep 317'
kill -KILL "$(hosts_first "${hosts_started[2]}")"
finish 0 40
grep -qE '^sirtakirun: rank [23] on host h2 was lost: ' "$errors" || fail 'it does not say who was lost'
says "$errors" "sirtakirun: starting again, 1 of 1, without h2"
says "$output" "[0] again 2"
says "$output" "[1] again 2"
gone "sleep 317"
