#!/usr/bin/env bash
# Starts that fail, take too long, or are interrupted.
# shellcheck source=tests/launch/runs.sh
. "$(dirname "$0")/runs.sh"

# Launchers that are none.
cat >"$work/broken" <<'END'
#!/bin/bash
[ "${1:-}" = --version ] && { echo "mpirun (Open MPI) 4.1.4"; exit; }
echo "no way" >&2
exit "${BROKEN:-9}"
END
chmod +x "$work/broken"
cat >"$work/silent" <<'END'
#!/bin/bash
[ -z "${SIGNAL:-}" ] || { kill "-$SIGNAL" "$PPID" && exec sleep 412; }
exec sleep 411
END
chmod +x "$work/silent"

slow() {
  echo "--- a start that takes too long"
  cat >"$work/slow" <<'END'
#!/bin/bash
[ "${1:-}" = --version ] && { echo "mpirun (Open MPI) 4.1.4"; exit; }
exec sleep 408
END
  chmod +x "$work/slow"
  code=0
  timeout -k 5 100 "$sirtakirun" --launcher "$work/slow" --start-timeout 1 -H localhost:2 true >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = 1 ] || fail "slow start: code $code"
  ends "$errors" "sirtakirun: ranks 0-1 have not started within 1 s (hosts: localhost:2); --start-timeout sets how long it may take"
  gone "sleep 408"
}

# lose_a_rank's last argument tells its processes from those of other tests.
hangs_in_init() {
  echo "--- ranks that do not come out of MPI_Init"
  command -v cc >/dev/null || return 0
  cat >"$work/hang.c" <<'END'
#include <stdlib.h>
#include <unistd.h>
int PMPI_Init_thread(int *, char ***, int, int *);
int MPI_Init_thread(int *argc, char ***argv, int wanted, int *level) {
  const char *rank = getenv("RANK");
  while (rank != NULL && rank[0] == '1') pause();
  return PMPI_Init_thread(argc, argv, wanted, level);
}
END
  cc -shared -fPIC -o "$work/hang.so" "$work/hang.c"
  run 1 -np 2 --start-timeout 12 env LD_PRELOAD="$work/hang.so" "$programs/lose_a_rank" stopped 1 --sirtaki-ping-interval=12
  grep -qE '^sirtakirun: ranks? (0-)?1 ha(s|ve) not come out of MPI_Init within 12 s \(hosts: localhost:[0-9]+\); ' "$errors" || fail "it does not say so"
  gone "lose_a_rank stopped 1 --sirtaki-ping-interval=12"
}

waits_in_init() {
  echo "--- nor does one that waits there for a rank which has ended"
  # Open MPI itself ends rank 0 if that has called MPI_Init when the process around rank 1 ends.
  AROUND=$work/around run 1 -np 2 --start-timeout 12 bash -c '[ "$RANK" = 0 ] || { echo $PPID >"$AROUND"; exit 0; }
    until [ -s "$AROUND" ] && [ ! -e "/proc/$(cat "$AROUND")" ]; do sleep 0.1; done
    exec "$0" stopped 1 --sirtaki-ping-interval=13' "$programs/lose_a_rank"
  grep -qE '^sirtakirun: rank 0 has not come out of MPI_Init within 12 s ' "$errors" || fail "it does not say so"
  gone "lose_a_rank stopped 1 --sirtaki-ping-interval=13"
}

without_init() {
  echo "--- a program that never comes so far is not hurried"
  run 0 -np 2 --start-timeout 12 sleep 14
}

within_a_rank() {
  echo "--- a rank starts no ranks"
  run 2 -np 1 "$sirtakirun" --launcher "$mpirun" -np 1 echo begun
  grep -q "is set: this is a rank of another run already, and cannot start one" "$errors" || fail "it does not say why"
  [ ! -s "$output" ] || fail "it was started"
}

stranger() {
  echo "--- a stranger who says nothing is not kept"
  cat >"$work/stranger" <<'END'
#!/bin/bash
[ "${1:-}" = --version ] && { echo "mpirun (Open MPI) 4.1.4"; exit; }
exec 3<>"/dev/tcp/127.0.0.1/${SIRTAKI_LAUNCH_ADDRESS##*:}"
code=0
read -r -t 80 <&3 || code=$?
[ "$code" -gt 128 ] && exit 8   # the time has passed
exit 9
END
  chmod +x "$work/stranger"
  code=0
  timeout -k 5 100 "$sirtakirun" --launcher "$work/stranger" -H localhost:1 --start-timeout 90 true >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = 9 ] || fail "it was kept: code $code"
}

many_strangers() {
  echo "--- nor do a hundred strangers keep ranks out, or sirtakirun busy, where it may open 64 files"
  for tool in python3 prlimit; do
    command -v "$tool" >/dev/null || { echo "skipped: no $tool here"; return 0; }
  done
  export STRANGERS=$work/strangers
  cat >"$work/besieged" <<END
#!/bin/bash
[ "\${1:-}" = --version ] && exec "$mpirun" --version
prlimit --pid "\$PPID" --nofile=7:   # it has as many open: no room for any
echo "\${SIRTAKI_LAUNCH_ADDRESS##*:}" >"\$STRANGERS.new" && mv "\$STRANGERS.new" "\$STRANGERS.port"
until [ -e "\$STRANGERS.there" ]; do sleep 0.1; done
ticks() { awk '{ print \$14 + \$15 }' "/proc/\$PPID/stat"; }   # of processor time, 100 a second
before=\$(ticks)
sleep 5
echo \$((\$(ticks) - before)) >"\$STRANGERS.ticks"
prlimit --pid "\$PPID" --nofile=64:
before=\$(ticks)
sleep 5
echo \$((\$(ticks) - before)) >>"\$STRANGERS.ticks"
exec "$mpirun" "\$@"
END
  chmod +x "$work/besieged"
  python3 - <<'END' &
import os, socket, time
name = os.environ["STRANGERS"]
until = time.monotonic() + 90
while not os.path.exists(name + ".port") and time.monotonic() < until:
    time.sleep(0.1)
port = int(open(name + ".port").read())
strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
open(name + ".there", "w").close()
while not os.path.exists(name + ".end") and time.monotonic() < until:
    time.sleep(0.1)
END
  local strangers=$! code=0
  (ulimit -n 64 && exec timeout -k 5 100 "$sirtakirun" --launcher "$work/besieged" --oversubscribe -np 2 --start-timeout 60 \
    bash -c 'echo here' >"$output" 2>"$errors" </dev/null) || code=$?
  touch "$STRANGERS.end"
  wait "$strangers"
  [ "$code" = 0 ] || fail "code $code"
  says "$output" "[1] here"
  local ticks
  while read -r ticks; do
    [ "$ticks" -lt 50 ] || fail "in 5 s sirtakirun was busy for ${ticks}0 ms"
  done <"$STRANGERS.ticks"
  [ "$(wc -l <"$STRANGERS.ticks")" = 2 ] || fail "it was not measured twice"
}

launcher() {
  echo "--- a launcher that fails, and one that is none"
  for status in 9 0; do
    code=0
    BROKEN=$status timeout -k 5 100 "$sirtakirun" --launcher "$work/broken" -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
    [ "$code" = $((status > 0 ? status : 1)) ] || fail "broken launcher: code $code"
    ends "$errors" "sirtakirun: $work/broken ended with exit code $status before all ranks had started: what it printed says why"
  done
  code=0
  "$sirtakirun" --launcher /bin/true -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = 2 ] || fail "no launcher: code $code"
  grep -q '^sirtakirun: --launcher /bin/true: no launcher was found that can start ranks' "$errors" || fail "it does not say why"
  code=0
  "$sirtakirun" --launcher "$work/silent" -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = 2 ] || fail "silent launcher: code $code"
  grep -qF "$work/silent: gives no answer within 10 s" "$errors" || fail "it does not say why"
}

# Not among those that are run together: SIGINT is not ignored here.
early_signal() {
  echo "--- a signal before anything was started, here and on a host that is asked"
  ln -s silent "$work/ldd"
  for signal in INT TERM; do
    for words in "--launcher $work/silent -np 1 --dry-run hostname" "--check-host / $work/silent true" "--check-host / $work/broken sh"; do
      code=0
      # shellcheck disable=SC2086
      { SIGNAL=$signal PATH=$work:$PATH timeout -k 5 100 "$sirtakirun" $words >"$output" 2>"$errors" </dev/null; } 2>/dev/null || code=$?
      [ "$code" = $((128 + $(kill -l "$signal"))) ] || fail "SIG$signal: sirtakirun $words: code $code"
      [ ! -s "$output" ] || fail "SIG$signal: sirtakirun $words goes on"
    done
  done
  gone "sleep 412"
}

together slow hangs_in_init waits_in_init without_init within_a_rank stranger many_strangers launcher &
others=$!
early_signal
wait "$others"
