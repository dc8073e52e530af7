#!/usr/bin/env bash
# What ranks started by sirtakirun read and print, and what sirtakirun prints itself.
# shellcheck source=tests/launch/runs.sh
. "$(dirname "$0")/runs.sh"

slow_reader() {
  echo "--- a reader who takes his time loses nothing"
  code=0
  timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 bash -c 'seq 200000' 2>"$errors" </dev/null |
    (read -r line; echo "$line"; sleep 3; cat) >"$output" || code=$?
  [ "$code" = 0 ] || fail "code $code"
  [ "$(grep -c '^\[0\]' "$output")" = 200000 ] && [ "$(grep -c '^\[1\]' "$output")" = 200000 ] || fail "lines are lost"
}
slow_reader_of_a_failure() {
  echo "--- nor if a rank fails meanwhile"
  code=0
  timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 bash -c 'seq 11500; exit 3' 2>"$errors" </dev/null |
    (read -r line; echo "$line"; sleep 12; cat) >"$output" || code=$?
  [ "$code" = 3 ] || fail "code $code"
  [ "$(wc -l <"$output")" = 11500 ] || fail "lines are lost: there are $(wc -l <"$output")"
}
slow_reader_of_a_rank_that_is_held_up() {
  echo "--- nor if what stands around a rank is held up when he goes on"
  code=0
  # The program has ended, and there was no room for the rest of its lines.
  AROUND=$work/around timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 \
    bash -c 'echo $PPID >"$AROUND"; exec seq 18000' 2>"$errors" </dev/null |
    (read -r line; echo "$line"
      around=$(cat "$work/around")
      until [ -z "$(cat "/proc/$around/task/$around/children")" ]; do sleep 0.1; done
      kill -STOP "$around"
      (sleep 2; kill -CONT "$around") &   # longer than it waits for lines of what the program has left
      cat; wait) >"$output" || code=$?
  [ "$code" = 0 ] || fail "code $code"
  [ "$(wc -l <"$output")" = 18000 ] || fail "lines are lost: there are $(wc -l <"$output")"
}
leftover_that_prints_for_ever() {
  echo "--- what a rank leaves may print for ever and is not waited for; what the rank said is there"
  code=0
  timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 1 bash -c 'seq 2000; yes & exit 3' 2>"$errors" </dev/null |
    grep -v 'y$' >"$output" || code=$?
  [ "$code" = 3 ] || fail "code $code"
  [ "$(wc -l <"$output")" = 2000 ] || fail "lines are lost: there are $(wc -l <"$output")"
}
together leftover_that_prints_for_ever slow_reader slow_reader_of_a_failure slow_reader_of_a_rank_that_is_held_up &   # beside the others
slow=$!

echo "--- every rank has torchrun's variables, and its lines its number"
run 0 -np 3 bash -c 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"; echo "at $MASTER_ADDR:${MASTER_PORT//[0-9]/}" >&2'
for rank in 0 1 2; do
  says "$output" "[$rank] $rank of 3, $rank of 3"
  says "$errors" "[$rank] at 127.0.0.1:"
done

echo "--- what Python prints is seen at once, unless the user wants otherwise"
(unset PYTHONUNBUFFERED && run 137 -np 1 python3 -c 'import os; print("printed"); os.kill(os.getpid(), 9)')
says "$output" "[0] printed"
PYTHONUNBUFFERED="" run 0 -np 1 bash -c 'echo "set to: ${PYTHONUNBUFFERED-no}."'
says "$output" "[0] set to: ."

echo "--- the ranks do not see how sirtakirun is reached, and the user's MASTER_ADDR stays"
MASTER_ADDR=there MASTER_PORT=7 run 0 -np 2 bash -c 'echo "$MASTER_ADDR:$MASTER_PORT"; env | grep ^SIRTAKI_LAUNCH && exit 9; true'
says "$output" "[1] there:7"

echo "--- slots of this host are those GPUs that its ranks may see"
CUDA_VISIBLE_DEVICES=4,GPU-5,6 run 0 -np 1 -H localhost:4 --include localhost:1,2 bash -c 'echo "$CUDA_VISIBLE_DEVICES"'
says "$output" "[0] GPU-5,6"
CUDA_VISIBLE_DEVICES="" run 0 -np 1 -H localhost:4 --include localhost:1 bash -c 'echo "none: $CUDA_VISIBLE_DEVICES."'
says "$output" "[0] none: ."
CUDA_VISIBLE_DEVICES=4 run 127 -np 1 -H localhost:4 --include localhost:1 true
ends "$errors" "sirtakirun: rank 0 on host $host: slot 1 is to be used, but CUDA_VISIBLE_DEVICES=4 names only 1 GPU there"

echo "--- without a standard output, or a standard error"
run 0 -np 2 true   # so that $output is there
timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 echo hi >&- 2>"$errors" </dev/null || fail "without output: code $?"
timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 sh -c 'echo hi; echo there >&2' >"$output" 2>&- </dev/null ||
  fail "without errors: code $?"
says "$output" "[1] hi"

echo "--- a folder where a file should be"
run 2 --hostfile "$work" true
says "$errors" "sirtakirun: --hostfile: \"$work\" cannot be read"
run 2 --config-file "$work" -np 1 true
says "$errors" "sirtakirun: --config-file: \"$work\" cannot be read"

echo "--- the ranks have the limit of open files as it was"
(ulimit -Sn 500 && run 0 -np 1 bash -c 'ulimit -Sn')
says "$output" "[0] 500"

echo "--- options of the library arrive"
run 0 -np 2 --fusion-threshold-mb 32 --tree-arity=3 bash -c 'echo "$SIRTAKI_FUSION_BYTES $SIRTAKI_TREE_ARITY"'
says "$output" "[0] 32M 3"

echo "--- rank 0 reads the input"
code=0
echo "from the input" | timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 \
  bash -c 'if [ "$RANK" = 0 ]; then read -r line; echo "read: $line"; fi' >"$output" 2>"$errors" || code=$?
[ "$code" = 0 ] || fail "code $code"
says "$output" "[0] read: from the input"

echo "--- from a terminal as well"
if [ -n "$own" ]; then
  python3 - "$sirtakirun" >"$output" <<'END'
import os, pty, signal, sys

process, terminal = pty.fork()
if process == 0:
    os.environ["NO_COLOR"] = "1"
    os.execv(sys.argv[1], [sys.argv[1], "--no-mpi", "-np", "2", "bash", "-c",
                           '[ "$RANK" = 0 ] || exit 0; echo asks; read -r line; echo "read: $line"'])
signal.alarm(100)
text = b""
typed = False
while True:
    try:
        text += os.read(terminal, 4096)
    except OSError:  # nobody has the terminal open any more
        break
    if not typed and b"asks" in text:
        os.write(terminal, b"a line\n")
        typed = True
sys.stdout.buffer.write(text.replace(b"\r", b""))
END
  says "$output" "[0] read: a line"
fi

echo "--- lines of several ranks do not mix, and all arrive"
run 0 -np 3 bash -c 'for i in $(seq 3000); do echo "line $i of $RANK, long enough to be cut where a buffer of a pipe or a socket ends"; done'
for rank in 0 1 2; do
  grep "^\[$rank\]" "$output" | sed "s/^\[$rank\] line \([0-9]*\) of $rank, long enough to be cut where a buffer of a pipe or a socket ends\$/\1/" >"$work/lines"
  cmp -s "$work/lines" <(seq 3000) || fail "rank $rank: lines are lost or mixed"
done
[ "$(wc -l <"$output")" = 9000 ] || fail "there are lines of nobody"

echo "--- lines of both streams in one place do not cut each other"
code=0
timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 \
  bash -c 'for i in $(seq 2000); do echo "output $i, of some length to be cut"; echo "error $i, of some length to be cut" >&2; done' \
  2>&1 </dev/null | (read -r line; echo "$line"; sleep 1; cat) >"$output" || code=$?
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
  timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 $words >/dev/full 2>"$errors" </dev/null || code=$?
  [ "$code" = 1 ] || fail "full disk: $words: code $code"
  [ "$words" != "seq 20000" ] || [ "$(cat "$errors")" = "sirtakirun: standard output: No space left on device; later output is lost" ] || fail "it is not told once"
done
code=0
timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 seq 20000 2>"$errors" </dev/null | head -n 1 >"$output" || code=$?
[ "$code" = 0 ] && [ ! -s "$errors" ] || fail "closed output: code $code"

echo "--- time stamps"
run 0 -np 1 --prefix-timestamp echo hello
grep -qxE '[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3} \[0\] hello' "$output" || fail "no time"

echo "--- a program that is not there is told before anything is started, with what may have been meant"
run 127 -np 2 "$work/no/such/program"
says "$errors" "sirtakirun: program \"$work/no/such/program\" cannot be started (No such file or directory)"
ends "$errors" "sirtakirun: nothing was started (--check-hosts=false skips this check)"
printf '#!/bin/sh\necho hi\n' >"$work/u"
chmod +x "$work/u"
(cd "$work" && run 127 -np 2 u && says "$errors" 'sirtakirun: program "u" cannot be started (is not on PATH); did you mean ./u?')
(cd "$work" && run 0 -np 2 -x PATH="$work:$PATH" u && says "$output" "[0] hi")
[ -n "$own" ] || (cd / && run 0 -np 2 --mpi-args "-wdir $work" ./u && says "$output" "[0] hi")
run 127 -np 2 --check-hosts=false "$work/no/such/program"
grep -qE '^sirtakirun: rank [01] on host .*no/such/program.* cannot be started: No such file or directory$' "$errors" || fail "it does not say why"

echo "--- a plan is printed, and nothing started"
run 0 -np 2 --dry-run touch "$work/started"
grep -q -- "sirtakirun --as-rank -- touch $work/started" "$output" || fail "no plan"
[ ! -e "$work/started" ] || fail "it was started"

echo "--- Horovod's time to start in is ours, unless there is one of ours"
HOROVOD_START_TIMEOUT=7 run 0 -np 2 -H a:2 --dry-run hostname
grep -qE -- 'ConnectTimeout=7 |--ssh-timeout 6 ' "$output" || fail "not 7 s"
HOROVOD_START_TIMEOUT=7 run 0 -np 2 -H a:2 --start-timeout 9 --dry-run hostname
grep -qE -- 'ConnectTimeout=9 |--ssh-timeout 8 ' "$output" || fail "not 9 s"
HOROVOD_START_TIMEOUT=x run 2 -np 2 hostname
grep -q '^sirtakirun: HOROVOD_START_TIMEOUT=x: allowed is ' "$errors" || fail "it does not say what is wrong"

echo "--- values of -x are for the ranks, and printed nowhere"
run 0 -np 1 -x "TOKEN=se cret" --verbose sh -c 'echo "arrived: ${#TOKEN}"'
says "$output" "[0] arrived: 7"
grep -q '^TOKEN=\.\.\. ' "$errors" || fail "the variable is not there"
! grep -q 'cret' "$errors" || fail "the value is there"
run 0 -np 1 -x "TOKEN=se cret" --dry-run hostname
! grep -q 'cret' "$output" || fail "the value is in the plan"
if [ -z "$own" ]; then
  run 0 -np 1 --mpi-args "-x TOKEN=secret" --dry-run echo -x TOKEN=kept
  ! grep -q 'secret' "$output" || fail "the value is in the plan"
  grep -q -- '-x TOKEN=\.\.\. ' "$output" || fail "the variable is not in the plan"
fi
run 0 -np 1 --dry-run echo -x TOKEN=kept
grep -q -- 'echo -x TOKEN=kept$' "$output" || fail "the program's own words are changed"

echo "--- what was built in and what is here"
run 0 -cb
grep -qE '^  \[X\] MPI +.*/' "$output" || fail "no MPI"
if [ -e "$(dirname "$sirtakirun")/libsirtaki.so" ]; then
  library=$(realpath "$(dirname "$sirtakirun")/libsirtaki.so")
  says "$output" "  [X] libsirtaki.so  $library"
  for module in "$(dirname "$library")"/libsirtaki_mpi_*.so; do
    family=${module##*_}
    grep -qE "^  \[.\] MPI: ${family%.so} +(.*[0-9]\.[0-9].*, /|the dynamic linker finds none$)" "$output" || fail "nothing of $module"
  done
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

wait "$slow"
