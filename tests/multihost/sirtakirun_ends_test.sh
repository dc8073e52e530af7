#!/usr/bin/env bash
# sirtakirun over ssh: every way in which a run on several hosts can end.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
# shellcheck source=tests/multihost/runs.sh
. "$(dirname "$0")/runs.sh"

# signal SIGNAL: sirtakirun on host 1 gets it.
signal() {
  local process
  for process in /proc/[0-9]*; do
    { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -q "^$sirtakirun --launcher .*$hosts_state" || continue
    kill "-$1" "${process#/proc/}"
  done
}

echo "--- a rank that fails on the other host"
run 3 -H h1:2,h2:2 bash -c 'if [ "$RANK" = 3 ]; then echo "the reason" >&2; exit 3; fi; exec sleep 311'
says "$errors" "sirtakirun: rank 3 on host h2 ended with exit code 3"
[ "$(tail -n 1 "$errors")" = "sirtakirun:   the reason" ] || fail 'its last line is not the last'
gone "sleep 311"
run 137 -H h1:2,h2:2 bash -c 'if [ "$RANK" = 2 ]; then kill -KILL $$; fi; exec sleep 312'
grep -q '^sirtakirun: rank 2 on host h2 died of SIGKILL' "$errors" || fail 'it does not say who died'
gone "sleep 312"

echo "--- a program that one host has not, which nobody has asked"
on_host 1 sh -c 'printf "#!/bin/sh\nexec sleep 313\n" >/tmp/only_here && chmod +x /tmp/only_here'
run 127 --check-hosts=false -H h1:2,h2:2 /tmp/only_here
grep -qE '^sirtakirun: rank [23] on host h2: "/tmp/only_here" cannot be started: No such file' "$errors" || fail 'it does not say where'
gone "sleep 313"

for name in INT TERM; do
  echo "--- SIG$name"
  begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 314'
  signal "$name"
  finish $((128 + $(kill -l "$name")))
  gone "sleep 314"
done

echo "--- sirtakirun itself is killed"
begin -H h1:2,h2:2 bash -c "echo begun; trap '' TERM; sleep 315; sleep 315"
signal KILL
finish 137
gone "sleep 315"

echo "--- a host whose login hangs: its ssh, which would wait for ever, does not outlive the run"
login_hangs() { on_host 2 pgrep -fx 'sleep 318' >/dev/null; }
on_host 2 sh -c 'mount -t tmpfs tmpfs /etc/ssh && echo "exec sleep 318" >/etc/ssh/sshrc'
start --check-hosts=false -H h1:1,h2:1 hostname &
job=$!
hosts_wait 'the login does not hang' login_hangs || fail 'the login does not hang'
signal TERM
finish 143
gone "$hosts_state/ssh_config" " h2 "
on_host 2 umount /etc/ssh

# digits_test.sh and ends_test.sh have more of these.
if full; then
  echo "--- the link of a host goes down"
  begin -H h1:2,h2:2 bash -c 'echo begun; exec sleep 316'
  on_host 2 ip link set veth0 down
  finish 1
  grep -qE '^sirtakirun: rank [23] on host h2 was lost: ' "$errors" || fail 'it does not say who was lost'
  gone "sleep 316"
  on_host 2 ip link set veth0 up
fi

echo "--- a host is lost, and the others start again"
begin -H h2:2,h1:2 --max-restarts 1 bash -c \
  'echo begun; if [ -n "${TORCHELASTIC_RESTART_COUNT:-}" ]; then echo "again $WORLD_SIZE"; exit; fi; exec sleep 317'
kill -KILL "$(hosts_first "${hosts_started[2]}")"
finish 0
grep -qE '^sirtakirun: rank [0-3] on host h2 was lost: ' "$errors" || fail 'it does not say who was lost'
says "$errors" "sirtakirun: starting again, 1 of 1, without h2"
says "$output" "[0] again 2"
says "$output" "[1] again 2"
gone "sleep 317"
