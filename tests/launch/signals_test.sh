#!/usr/bin/env bash
# Signals to sirtakirun, and what becomes of its ranks.
# shellcheck source=tests/launch/runs.sh
. "$(dirname "$0")/runs.sh"

echo "--- Ctrl-C, SIGTERM, and nobody left"
for signal in INT TERM HUP; do
  : >"$output"
  "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c "echo begun; exec sleep 406" >"$output" 2>"$errors" </dev/null &
  process=$!
  printed 2 begun
  began=$SECONDS code=0
  kill "-$signal" "$process"
  wait "$process" || code=$?
  [ "$code" = $((128 + $(kill -l "$signal"))) ] || fail "SIG$signal: code $code"
  [ $((SECONDS - began)) -le 60 ] || fail "SIG$signal: ended after $((SECONDS - began)) s"
  ends "$errors" "sirtakirun: ended by SIG$signal"
  gone "sleep 406"
done

echo "--- two signals at once are one: the ranks have their time to end, and what they say arrives"
: >"$output"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 \
  bash -c 'trap "echo going; echo goodbye; exit 0" TERM; echo begun; while true; do sleep 0.1; done' >"$output" 2>"$errors" </dev/null &
process=$!
printed 1 begun
code=0
kill -STOP "$process"   # so that it takes them together
kill -TERM "$process"
kill -INT "$process"
kill -CONT "$process"
wait "$process" || code=$?
[ "$code" = 143 ] || [ "$code" = 130 ] || fail "two signals: code $code"
says "$output" "[0] going"
says "$output" "[0] goodbye"

echo "--- SIGUSR1 goes on to the ranks"
: >"$output"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 \
  bash -c 'trap "echo asked; exit 0" USR1; echo begun; while true; do sleep 0.1; done' >"$output" 2>"$errors" </dev/null &
process=$!
printed 2 begun
code=0
kill -USR1 "$process"
wait "$process" || code=$?
[ "$code" = 0 ] || fail "SIGUSR1: code $code"
says "$output" "[0] asked"
says "$output" "[1] asked"

if [ -z "$own" ]; then
  echo "--- an elastic job whose standard error is full, and not read, goes on, and SIGTERM ends it"
  mkfifo "$work/full"
  exec 7<>"$work/full"
  timeout 2 yes >&7 || true   # it blocks when the pipe has no room left
  : >"$output"
  "$sirtakirun" --elastic -np 1 bash -c 'sleep 7; echo begun; exec sleep 407' >"$output" 2>&7 </dev/null &
  process=$!
  printed 1 begun   # after 5 s a line tells what the job waits for
  kill -TERM "$process"
  has_ended() { [ ! -e "/proc/$process" ] || grep -q ') Z ' "/proc/$process/stat"; }
  within 60 has_ended || { kill -KILL "$process"; fail "SIGTERM does not end it"; }
  code=0
  wait "$process" || code=$?
  [ "$code" = 143 ] || fail "full standard error: code $code"
  exec 7>&-
  gone "sleep 407"

  echo "--- two signals at once are one for an elastic job, too"
  : >"$output"
  "$sirtakirun" --elastic -np 1 \
    bash -c 'trap "echo going; echo goodbye; exit 0" TERM; echo begun; while true; do sleep 0.1; done' >"$output" 2>"$errors" </dev/null &
  process=$!
  printed 1 begun
  code=0
  kill -STOP "$process"
  kill -TERM "$process"
  kill -INT "$process"
  kill -CONT "$process"
  wait "$process" || code=$?
  [ "$code" = 143 ] || [ "$code" = 130 ] || fail "two signals: code $code"
  printed 1 goodbye
fi

echo "--- Ctrl-C on a terminal, where the launcher gets it too"
cat >"$work/ctrl_c.py" <<'END'
import os, pty, signal, sys

process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[1], sys.argv[1:])
signal.alarm(100)  # to start in
text = b""
pressed = False
while True:
    try:
        text += os.read(terminal, 4096)
    except OSError:  # nobody has the terminal open any more
        break
    if not pressed and text.count(b"] begun") == 2:
        os.write(terminal, b"\x03")
        pressed = True
        signal.alarm(60)  # to end in
sys.stdout.buffer.write(text.replace(b"\r", b"").replace(b"^C", b""))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
END
for ranks in 'exec sleep 418' "trap '' INT; sleep 418" "trap '' INT TERM; sleep 418; sleep 418"; do
  code=0
  NO_COLOR=1 python3 "$work/ctrl_c.py" "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c "echo begun; $ranks" \
    >"$output" 2>"$errors" || code=$?
  [ "$code" = 130 ] || fail "$ranks: code $code"
  ends "$output" "sirtakirun: ended by SIGINT"
  gone "sleep 418"
done

echo "--- nohup: a hangup does not end it"
: >"$output"
# shellcheck disable=SC2016  # for the other shell
nohup bash -c 'echo $$ >"$0"; exec "$@"' "$work/hung_up" "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 \
  bash -c "echo begun; read -r; echo on" >"$output" 2>"$errors" < <(
    printed 1 begun
    kill -HUP "$(cat "$work/hung_up")" && rm "$work/hung_up"
    echo
  ) || fail "ended by SIGHUP"
[ ! -e "$work/hung_up" ] || fail "no SIGHUP was sent"
says "$output" "[0] on"

echo "--- sirtakirun itself is killed"
: >"$output"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c "echo begun; trap '' TERM; sleep 407; sleep 407" >"$output" 2>"$errors" </dev/null &
process=$!
printed 2 begun
kill -KILL "$process"
{ wait "$process"; } 2>/dev/null || true
gone "sleep 407"
