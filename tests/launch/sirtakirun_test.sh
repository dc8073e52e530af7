#!/usr/bin/env bash
# sirtakirun_test.sh SIRTAKIRUN MPI-PROGRAMS: real runs on this host, of two and three ranks. MPI-PROGRAMS: the folder of
# those in tests/faults.
set -euo pipefail

sirtakirun=${1:?usage: bash sirtakirun_test.sh SIRTAKIRUN MPI-PROGRAMS}
programs=${2:?usage: bash sirtakirun_test.sh SIRTAKIRUN MPI-PROGRAMS}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
output=$work/output
errors=$work/errors
mpirun=${MPIEXEC:-$(command -v mpirun)}
# Of the tests' own mpirun, if they run in one.
for variable in $(compgen -e | grep -E '^(OMPI|PMIX|PMI|PRTE)_' || true); do unset "$variable"; done

fail() {
  printf 'FAILED: %s\n--- standard output:\n' "$*"
  cat "$output"
  printf -- '--- standard error:\n'
  cat "$errors"
  exit 1
}

# run CODE ARGUMENT...: of sirtakirun, which must end with the code within 40 s.
run() {
  local expected=$1 code=0
  shift
  timeout -k 5 40 "$sirtakirun" --launcher "$mpirun" --oversubscribe "$@" >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = "$expected" ] || fail "sirtakirun $*: code $code, expected $expected"
}

# says FILE TEXT: a line of it is the text. ends FILE TEXT: its last line is.
says() { grep -qxF -- "$2" "$1" || fail "no line of $(basename "$1") is: $2"; }
ends() { [ "$(tail -n 1 "$1")" = "$2" ] || fail "the last line of $(basename "$1") is not: $2"; }

# Processes with these words in their command line.
running() {
  local process
  for process in /proc/[0-9]*; do
    { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -qF -- "$1" && echo "${process#/proc/}"
  done
  true
}

# gone WORDS: none is left, after 10 s at most.
gone() {
  for _ in $(seq 100); do
    [ -n "$(running "$1")" ] || return 0
    sleep 0.1
  done
  fail "left running: $(running "$1")"
}

host=$(hostname)

echo "--- every rank has torchrun's variables, and its lines its number"
run 0 -np 3 bash -c 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"; echo "at $MASTER_ADDR:${MASTER_PORT//[0-9]/}" >&2'
for rank in 0 1 2; do
  says "$output" "[$rank] $rank of 3, $rank of 3"
  says "$errors" "[$rank] at 127.0.0.1:"
done

echo "--- the ranks do not see how sirtakirun is reached, and the user's MASTER_ADDR stays"
MASTER_ADDR=there MASTER_PORT=7 run 0 -np 2 bash -c 'echo "$MASTER_ADDR:$MASTER_PORT"; env | grep ^SIRTAKI_LAUNCH && exit 9; true'
says "$output" "[1] there:7"

echo "--- without a standard output, or a standard error"
run 0 -np 2 true   # so that $output is there
timeout -k 5 40 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 echo hi >&- 2>"$errors" </dev/null || fail "without output: code $?"
timeout -k 5 40 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 sh -c 'echo hi; echo there >&2' >"$output" 2>&- </dev/null ||
  fail "without errors: code $?"
says "$output" "[1] hi"

echo "--- a folder where a file should be"
run 2 --hostfile "$work" true
says "$errors" "sirtakirun: --hostfile: \"$work\" cannot be read"
run 2 --config-file "$work" -np 1 true
says "$errors" "sirtakirun: --config-file: \"$work\" cannot be read"

echo "--- mpirun is killed"
run 137 -np 2 bash -c 'sleep 0.5; [ "$RANK" = 1 ] || kill -KILL "$(awk "/^PPid:/ { print \$2 }" "/proc/$PPID/status")"; exec sleep 318'
ends "$errors" "sirtakirun: $mpirun died of SIGKILL, and the ranks with it"
gone "sleep 318"

echo "--- the ranks have the limit of open files as it was"
(ulimit -Sn 500 && run 0 -np 1 bash -c 'ulimit -Sn')
says "$output" "[0] 500"

echo "--- options of the library arrive"
run 0 -np 2 --fusion-threshold-mb 32 --tree-arity=3 bash -c 'echo "$SIRTAKI_FUSION_BYTES $SIRTAKI_TREE_ARITY"'
says "$output" "[0] 32M 3"

echo "--- rank 0 reads the input"
code=0
echo "from the input" | timeout -k 5 40 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 \
  bash -c 'if [ "$RANK" = 0 ]; then read -r line; echo "read: $line"; fi' >"$output" 2>"$errors" || code=$?
[ "$code" = 0 ] || fail "code $code"
says "$output" "[0] read: from the input"

echo "--- lines of several ranks do not mix, and all arrive"
run 0 -np 3 bash -c 'for i in $(seq 3000); do echo "line $i of $RANK, long enough to be cut where a buffer of a pipe or a socket ends"; done'
for rank in 0 1 2; do
  grep "^\[$rank\]" "$output" | sed "s/^\[$rank\] line \([0-9]*\) of $rank, long enough to be cut where a buffer of a pipe or a socket ends\$/\1/" >"$work/lines"
  cmp -s "$work/lines" <(seq 3000) || fail "rank $rank: lines are lost or mixed"
done
[ "$(wc -l <"$output")" = 9000 ] || fail "there are lines of nobody"

echo "--- a reader who takes his time loses nothing"
code=0
timeout -k 5 60 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c 'seq 200000' 2>"$errors" </dev/null |
  (sleep 3; cat) >"$output" || code=$?
[ "$code" = 0 ] || fail "code $code"
[ "$(grep -c '^\[0\]' "$output")" = 200000 ] && [ "$(grep -c '^\[1\]' "$output")" = 200000 ] || fail "lines are lost"

echo "--- nor if a rank fails meanwhile"
code=0
timeout -k 5 60 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 bash -c 'seq 11500; exit 3' 2>"$errors" </dev/null |
  (read -r line; echo "$line"; sleep 12; cat) >"$output" || code=$?
[ "$code" = 3 ] || fail "code $code"
[ "$(wc -l <"$output")" = 11500 ] || fail "lines are lost: there are $(wc -l <"$output")"

echo "--- lines of both streams in one place do not cut each other"
code=0
timeout -k 5 60 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 \
  bash -c 'for i in $(seq 2000); do echo "output $i, of some length to be cut"; echo "error $i, of some length to be cut" >&2; done' \
  2>&1 </dev/null | (sleep 1; cat) >"$output" || code=$?
[ "$code" = 0 ] || fail "code $code"
[ "$(grep -cxE '\[[01]\] (output|error) [0-9]+, of some length to be cut' "$output")" = 8000 ] || fail "lines are cut"
[ "$(wc -l <"$output")" = 8000 ] || fail "there are lines of nobody"

echo "--- rank files"
run 0 -np 2 --output-filename "$work/ranks" bash -c 'printf "out %s" "$RANK"; echo "err $RANK" >&2'
[ ! -s "$output" ] || fail "what goes to files goes to the terminal too"
[ "$(cat "$work/ranks/rank.1/stdout")" = "out 1" ] || fail "rank.1/stdout is wrong"
[ "$(cat "$work/ranks/rank.0/stderr")" = "err 0" ] || fail "rank.0/stderr is wrong"
touch "$work/file"
run 2 -np 2 --output-filename "$work/file" true
grep -q -- '--output-filename: .*/file/rank.0.* cannot be made' "$errors" || fail "it does not say why"

echo "--- a full disk is told, and a reader who has enough is none"
mkdir -p "$work/full/rank.0"
ln -s /dev/full "$work/full/rank.0/stdout"
run 1 -np 2 --output-filename "$work/full" seq 20000
ends "$errors" "sirtakirun: --output-filename: writing failed: No space left on device; later output is lost"
: >"$output"
for words in "seq 20000" "--dry-run hostname" "--help" "--version" "-cb"; do
  code=0
  # shellcheck disable=SC2086
  timeout -k 5 40 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 $words >/dev/full 2>"$errors" </dev/null || code=$?
  [ "$code" = 1 ] || fail "full disk: $words: code $code"
  [ "$words" != "seq 20000" ] || [ "$(cat "$errors")" = "sirtakirun: standard output: No space left on device; later output is lost" ] || fail "it is not told once"
done
code=0
timeout -k 5 40 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 seq 20000 2>"$errors" </dev/null | head -n 1 >"$output" || code=$?
[ "$code" = 0 ] && [ ! -s "$errors" ] || fail "closed output: code $code"

echo "--- time stamps"
run 0 -np 1 --prefix-timestamp echo hello
grep -qxE '[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3} \[0\] hello' "$output" || fail "no time"

echo "--- a rank that fails ends the others; the last words and the code are its own"
run 3 -np 3 bash -c 'if [ "$RANK" = 1 ]; then echo "first" >&2; echo "the reason" >&2; exit 3; fi; exec sleep 301'
says "$errors" "sirtakirun: rank 1 on host $host ended with exit code 3"
says "$errors" "sirtakirun: its last lines on standard error:"
ends "$errors" "sirtakirun:   the reason"
gone "sleep 301"

echo "--- a rank that is killed"
run 137 -np 2 bash -c 'if [ "$RANK" = 1 ]; then kill -KILL $$; fi; exec sleep 302'
grep -q "^sirtakirun: rank 1 on host $host died of SIGKILL" "$errors" || fail "it does not say who died of what"
gone "sleep 302"
run 139 -np 2 bash -c 'if [ "$RANK" = 0 ]; then kill -SEGV $$; fi; exec sleep 303'
says "$errors" "sirtakirun: rank 0 on host $host died of SIGSEGV"
gone "sleep 303"

echo "--- what a rank has started and left ends with it, if it ends badly"
run 139 -np 2 bash -c 'if [ "$RANK" = 0 ]; then (trap "" TERM; exec sleep 309 >/dev/null 2>&1) & kill -SEGV $$; fi; exec sleep 309'
gone "sleep 309"

echo "--- ranks that do not want to end are ended"
run 5 -np 2 bash -c 'trap "" TERM INT HUP; if [ "$RANK" = 1 ]; then exit 5; fi; sleep 304; sleep 304'
gone "sleep 304"
run 6 -np 2 bash -c 'if [ "$RANK" = 1 ]; then sleep 1; exit 6; fi; kill -STOP $$; exec sleep 305'
gone "sleep 305"

echo "--- what fails is started again, as often as allowed"
run 0 -np 2 --max-restarts 2 --output-filename "$work/again" bash -c \
  'echo "attempt ${TORCHELASTIC_RESTART_COUNT:-0}"; [ "$RANK" = 0 ] || exit $((2 - ${TORCHELASTIC_RESTART_COUNT:-0}))'
[ "$(cat "$work/again/rank.1/stdout")" = "$(printf 'attempt %d\n' 0 1 2)" ] || fail "rank.1/stdout is wrong"
says "$errors" "sirtakirun: rank 1 on host $host ended with exit code 2"
says "$errors" "sirtakirun: starting again, 1 of 2"
ends "$errors" "sirtakirun: starting again, 2 of 2"
run 4 -np 2 --max-restarts 1 bash -c 'exit 4'
[ "$(grep -c "ended with exit code 4" "$errors")" = 2 ] || fail "not two attempts"
# What stands around the rank is killed: this machine is not gone.
run 0 -np 1 --max-restarts 1 bash -c '[ -n "${TORCHELASTIC_RESTART_COUNT:-}" ] || { kill -KILL $PPID; exec sleep 310; }'
ends "$errors" "sirtakirun: starting again, 1 of 1"
gone "sleep 310"
run 127 -np 1 --max-restarts 3 "$work/no/such/program"
! grep -q "starting again" "$errors" || fail "what cannot go well is started again"

echo "--- a program that is not there"
run 127 -np 2 "$work/no/such/program"
grep -qE '^sirtakirun: rank [01] on host .*no/such/program.* cannot be started: No such file or directory$' "$errors" || fail "it does not say why"

echo "--- Ctrl-C, SIGTERM, and nobody left"
for signal in INT TERM HUP; do
  : >"$output"
  "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c "echo begun; exec sleep 306" >"$output" 2>"$errors" </dev/null &
  process=$!
  for _ in $(seq 300); do
    [ "$(grep -c begun "$output")" = 2 ] && break
    sleep 0.1
  done
  began=$SECONDS code=0
  kill "-$signal" "$process"
  wait "$process" || code=$?
  [ "$code" = $((128 + $(kill -l "$signal"))) ] || fail "SIG$signal: code $code"
  [ $((SECONDS - began)) -le 10 ] || fail "SIG$signal: ended after $((SECONDS - began)) s"
  ends "$errors" "sirtakirun: ended by SIG$signal"
  gone "sleep 306"
done

echo "--- two signals at once are one: the ranks have their time to end, and what they say arrives"
: >"$output"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 \
  bash -c 'trap "sleep 0.5; echo goodbye; exit 0" TERM; echo begun; while true; do sleep 0.1; done' >"$output" 2>"$errors" </dev/null &
process=$!
for _ in $(seq 300); do
  grep -q begun "$output" && break
  sleep 0.1
done
code=0
kill -STOP "$process"   # so that it takes them together
kill -TERM "$process"
kill -INT "$process"
kill -CONT "$process"
wait "$process" || code=$?
[ "$code" = 143 ] || [ "$code" = 130 ] || fail "two signals: code $code"
says "$output" "[0] goodbye"

echo "--- who was killed is the cause, also where that is seen after the launcher has begun to end the ranks"
run 137 -np 2 bash -c '
  if [ "$RANK" = 1 ]; then
    trap "kill -KILL $$" TERM
    while true; do sleep 0.1; done
  fi
  sleep 1
  echo "peer lost: rank 1 is lost: its process has ended" >&2
  exit 1'
grep -q "^sirtakirun: rank 1 on host $host died of SIGKILL" "$errors" || fail "rank 1 is not named"

echo "--- SIGUSR1 goes on to the ranks"
: >"$output"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 \
  bash -c 'trap "echo asked; exit 0" USR1; echo begun; while true; do sleep 0.1; done' >"$output" 2>"$errors" </dev/null &
process=$!
for _ in $(seq 300); do
  [ "$(grep -c begun "$output")" = 2 ] && break
  sleep 0.1
done
code=0
kill -USR1 "$process"
wait "$process" || code=$?
[ "$code" = 0 ] || fail "SIGUSR1: code $code"
says "$output" "[0] asked"
says "$output" "[1] asked"

echo "--- Ctrl-C on a terminal, where the launcher gets it too"
cat >"$work/ctrl_c.py" <<'END'
import os, pty, signal, sys

process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[1], sys.argv[1:])
signal.alarm(40)  # to start in
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
        signal.alarm(15)  # to end in
sys.stdout.buffer.write(text.replace(b"\r", b"").replace(b"^C", b""))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
END
for ranks in 'exec sleep 318' "trap '' INT; sleep 318" "trap '' INT TERM; sleep 318; sleep 318"; do
  code=0
  NO_COLOR=1 python3 "$work/ctrl_c.py" "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c "echo begun; $ranks" \
    >"$output" 2>"$errors" || code=$?
  [ "$code" = 130 ] || fail "$ranks: code $code"
  ends "$output" "sirtakirun: ended by SIGINT"
  gone "sleep 318"
done

echo "--- nohup: a hangup does not end it"
nohup "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 bash -c "echo begun; read -r; echo on" >"$output" 2>"$errors" < <(
  for _ in $(seq 300); do
    grep -q begun "$output" && break
    sleep 0.1
  done
  kill -HUP $(running "--oversubscribe -np 1 bash -c echo begun; read -r; echo on")
  echo
) || fail "ended by SIGHUP"
says "$output" "[0] on"

echo "--- sirtakirun itself is killed"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c "echo begun; trap '' TERM; sleep 307; sleep 307" >"$output" 2>"$errors" </dev/null &
process=$!
for _ in $(seq 300); do
  [ "$(grep -c begun "$output")" = 2 ] && break
  sleep 0.1
done
kill -KILL "$process"
{ wait "$process"; } 2>/dev/null || true
gone "sleep 307"

echo "--- ranks that talk over MPI: killed, and with sirtakirun"
run 137 -np 3 "$programs/lose_a_rank" killed 1
grep -q "^sirtakirun: rank 1 on host $host died of SIGKILL" "$errors" || fail "it does not say who died"
"$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 "$programs/lose_a_rank" stopped 1 >"$output" 2>"$errors" </dev/null &
process=$!
for _ in $(seq 300); do
  [ "$(grep -c "is process" "$output")" = 2 ] && break
  sleep 0.1
done
segments=
for rank in $(sed -n 's/.*is process //p' "$output"); do
  segments+=" $(grep -oE '/dev/shm/[^ ]+' "/proc/$rank/maps" | sort -u | tr '\n' ' ')"
done
kill -KILL "$process"
{ wait "$process"; } 2>/dev/null || true
gone "lose_a_rank stopped 1"
for segment in $segments; do
  case $segment in */mpich_shm_*)   # MPICH's name does not tell the job: what it leaves stays
    rm -f "$segment"
    continue ;;
  esac
  for _ in $(seq 100); do
    [ -e "$segment" ] || continue 2
    sleep 0.1
  done
  fail "left: $segment"
done

echo "--- a start that takes too long"
cat >"$work/slow" <<'END'
#!/bin/bash
[ "${1:-}" = --version ] && { echo "mpirun (Open MPI) 4.1.4"; exit; }
exec sleep 308
END
chmod +x "$work/slow"
code=0
timeout -k 5 40 "$sirtakirun" --launcher "$work/slow" --start-timeout 1 -H localhost:2 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 1 ] || fail "slow start: code $code"
ends "$errors" "sirtakirun: ranks 0-1 have not started within 1 s (hosts: localhost:2); --start-timeout sets how long it may take"
gone "sleep 308"

echo "--- ranks that do not come out of MPI_Init"
if command -v cc >/dev/null; then
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
  run 1 -np 2 --start-timeout 12 env LD_PRELOAD="$work/hang.so" "$programs/lose_a_rank" stopped 1
  grep -qE '^sirtakirun: ranks? (0-)?1 ha(s|ve) not come out of MPI_Init within 12 s \(hosts: localhost:[0-9]+\); ' "$errors" || fail "it does not say so"
  gone "lose_a_rank stopped 1"
fi
# Nor does one that waits there for a rank which has ended.
run 1 -np 2 --start-timeout 12 bash -c '[ "$RANK" = 0 ] || exit 0; exec "$0" stopped 1' "$programs/lose_a_rank"
grep -qE '^sirtakirun: rank 0 has not come out of MPI_Init within 12 s ' "$errors" || fail "it does not say so"
gone "lose_a_rank stopped 1"
# A program that never comes so far is not hurried.
run 0 -np 2 --start-timeout 12 sleep 14

echo "--- a stranger who says nothing is not kept"
cat >"$work/stranger" <<'END'
#!/bin/bash
[ "${1:-}" = --version ] && { echo "mpirun (Open MPI) 4.1.4"; exit; }
exec 3<>"/dev/tcp/127.0.0.1/${SIRTAKI_LAUNCH_ADDRESS##*:}"
code=0
read -r -t 30 <&3 || code=$?
[ "$code" -gt 128 ] && exit 8   # the time has passed
exit 9
END
chmod +x "$work/stranger"
code=0
timeout -k 5 60 "$sirtakirun" --launcher "$work/stranger" -H localhost:1 --start-timeout 60 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 9 ] || fail "it was kept: code $code"

echo "--- a launcher that fails, and one that is none"
cat >"$work/broken" <<'END'
#!/bin/bash
[ "${1:-}" = --version ] && { echo "mpirun (Open MPI) 4.1.4"; exit; }
echo "no way" >&2
exit "${BROKEN:-9}"
END
chmod +x "$work/broken"
for status in 9 0; do
  code=0
  BROKEN=$status timeout -k 5 40 "$sirtakirun" --launcher "$work/broken" -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = $((status > 0 ? status : 1)) ] || fail "broken launcher: code $code"
  ends "$errors" "sirtakirun: $work/broken ended with exit code $status before all ranks had started: what it printed says why"
done
code=0
"$sirtakirun" --launcher /bin/true -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 2 ] || fail "no launcher: code $code"
grep -q '^sirtakirun: --launcher /bin/true: no launcher was found that can start ranks' "$errors" || fail "it does not say why"
cat >"$work/silent" <<'END'
#!/bin/bash
[ -z "${SIGNAL:-}" ] || kill "-$SIGNAL" "$PPID"
exec sleep 311
END
chmod +x "$work/silent"
code=0
"$sirtakirun" --launcher "$work/silent" -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 2 ] || fail "silent launcher: code $code"
grep -qF "$work/silent: gives no answer within 10 s" "$errors" || fail "it does not say why"

echo "--- a signal before anything was started, here and on a host that is asked"
ln -s silent "$work/ldd"
for signal in INT TERM; do
  for words in "--launcher $work/silent -np 1 --dry-run hostname" "--check-host / $work/silent true" "--check-host / $work/broken sh"; do
    code=0
    # shellcheck disable=SC2086
    { SIGNAL=$signal PATH=$work:$PATH timeout -k 5 40 "$sirtakirun" $words >"$output" 2>"$errors" </dev/null; } 2>/dev/null || code=$?
    [ "$code" = $((128 + $(kill -l "$signal"))) ] || fail "SIG$signal: sirtakirun $words: code $code"
    [ ! -s "$output" ] || fail "SIG$signal: sirtakirun $words goes on"
  done
done
gone "sleep 311"

echo "--- a plan is printed, and nothing started"
run 0 -np 2 --dry-run touch "$work/started"
grep -q -- "sirtakirun --as-rank -- touch $work/started" "$output" || fail "no plan"
[ ! -e "$work/started" ] || fail "it was started"

echo "--- what was built in and what is here"
run 0 -cb
grep -qE '^  \[X\] MPI +.*/' "$output" || fail "no MPI"
if [ -e "$(dirname "$sirtakirun")/libsirtaki.so" ]; then
  library=$(realpath "$(dirname "$sirtakirun")/libsirtaki.so")
  says "$output" "  [X] libsirtaki.so  $library"
  mpi=$(ldd "$library" | sed -n 's/^\tlibmpi[^ ]* => \([^ ]*\) .*/\1/p')
  grep -qE "^  \[X\] its MPI +.*[0-9]\.[0-9].*, $(realpath "$mpi")\$" "$output" || fail "not the MPI of the library"
fi
grep -qE "^  \[.\] (Open MPI|MPICH) +[0-9.]+, $(command -v mpirun)\$" "$output" || fail "no mpirun"

echo "--- what the ranks of a run have left is read, and nothing started"
run 2 --explain "$work/none"
ends "$errors" "sirtakirun: $work/none: No such file or directory"
mkdir "$work/left"
run 2 --explain "$work/left"
ends "$errors" "sirtakirun: $work/left: holds no flight-<number>.json"
run 2 --merge-timelines "$work/left" touch "$work/started"
ends "$errors" "sirtakirun: $work/left: holds no rank-<number>.json"
[ ! -e "$work/started" ] || fail "the program was started"
for rank in 0 1; do printf '[\n{"ph":"i","ts":%s,"pid":%s}\n]\n' "$rank" "$rank" >"$work/left/rank-$rank.json"; done
run 0 --merge-timelines "$work/left"
says "$output" "2 ranks in $work/left/timeline.json"
python3 -c 'import json, sys; assert [e["pid"] for e in json.load(open(sys.argv[1]))] == [0, 1]' "$work/left/timeline.json" || fail "not merged"

echo "--- a rank cannot start a run"
code=0
OMPI_COMM_WORLD_RANK=0 "$sirtakirun" -np 1 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 2 ] || fail "nested: code $code"
ends "$errors" "sirtakirun: OMPI_COMM_WORLD_RANK=0 is set: this is a rank of another run already, and cannot start one"
