#!/usr/bin/env bash
# sirtakirun within jobs of Slurm, by mpirun and by srun, and a program that srun starts itself.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/multihost/slurm.sh
. "$(dirname "$0")/slurm.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
sirtakirun=$bindir/../../sirtakirun
[ -x "$sirtakirun" ] || hosts_skip 'sirtakirun is not built'
sirtakirun=$(realpath "$sirtakirun")
reductions=$(realpath "$bindir/reductions")

hosts_not_under HYDRA "PyPI's MPICH has no PMIx, which srun is asked for"
slurm_need
hosts_up 2
slurm_up 2
output=$hosts_state/output
errors=$hosts_state/errors

# job CODE COMMAND...: in an allocation of two nodes with two tasks each; must end with the code.
job() {
  local expected=$1 code=0
  shift
  on_host 1 timeout -k 5 200 salloc -N 2 -n 4 "$@" >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = "$expected" ] || fail "$*: code $code, expected $expected"
}

# shellcheck disable=SC2016  # the ranks expand it
tell='echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $(hostname), $MASTER_ADDR"'
for launcher in "${MPIEXEC:-$(command -v mpirun)}" srun sirtakirun; do
  by=(--launcher "$launcher")
  [ "$launcher" != sirtakirun ] || by+=(--ssh-args "-F $hosts_state/ssh_config")
  echo "--- $launcher: the job's hosts and tasks are taken"
  job 0 "$sirtakirun" "${by[@]}" bash -c "$tell"
  for rank in 0 1 2 3; do
    says "$output" "[$rank] $rank of 4, $((rank % 2)) of 2, h$((rank / 2 + 1)), 10.77.0.1"
  done
  echo "--- $launcher: fewer ranks, more ranks, one host"
  job 0 "$sirtakirun" "${by[@]}" -np 3 bash -c "$tell"
  says "$output" "[2] 2 of 3, 0 of 1, h2, 10.77.0.1"
  job 2 "$sirtakirun" "${by[@]}" -np 6 bash -c "$tell"
  says "$errors" "sirtakirun: 6 ranks are more than the 4 slots of h1:2,h2:2 (SLURM_JOB_NODELIST); --oversubscribe allows it"
  job 0 "$sirtakirun" "${by[@]}" -np 6 --oversubscribe bash -c "$tell"
  [ "$(wc -l <"$output")" = 6 ] || fail 'there are not six ranks'
  job 0 "$sirtakirun" "${by[@]}" --exclude h1 bash -c "$tell"
  says "$output" "[1] 1 of 2, 1 of 2, h2, 10.77.0.2"
  if [ "$launcher" != sirtakirun ]; then
    echo "--- $launcher: MPI"
    job 0 "$sirtakirun" "${by[@]}" "$reductions" --gtest_filter='*TheLog*'
  fi
  echo "--- $launcher: a rank fails"
  job 3 "$sirtakirun" "${by[@]}" bash -c \
    'if [ "$RANK" = 3 ]; then echo "the reason" >&2; exit 3; fi; exec sleep 321'
  says "$errors" "sirtakirun: rank 3 on host h2 ended with exit code 3"
  says "$errors" "sirtakirun:   the reason"
  gone "sleep 321"
  job 137 "$sirtakirun" "${by[@]}" bash -c 'if [ "$RANK" = 2 ]; then kill -KILL $$; fi; exec sleep 322'
  grep -q '^sirtakirun: rank 2 on host h2 died of SIGKILL' "$errors" || fail 'it does not say who died'
  gone "sleep 322"
done

echo "--- sirtakirun: a job whose hosts cannot be reached by ssh"
job 2 "$sirtakirun" --no-mpi -np 4 true
says "$errors" "sirtakirun: nothing was started (--check-hosts=false skips these checks)"
grep -q '^sirtakirun: host h2: no ssh server listens there ' "$errors" || fail 'it does not say why'

echo "--- srun: fewer slots than the job has, alike on all hosts; others are refused"
job 0 "$sirtakirun" --launcher srun -H h1:1,h2:1 bash -c "$tell"
says "$output" "[0] 0 of 2, 0 of 1, h1, 10.77.0.1"
says "$output" "[1] 1 of 2, 0 of 1, h2, 10.77.0.1"
job 2 "$sirtakirun" --launcher srun -H h1:1,h2:2 true
says "$errors" "sirtakirun: srun cannot start h1:1,h2:2 in a job of h1:2,h2:2: give all hosts equally many slots, or choose another --launcher"

# trains: the last run of train_digits did, as every other one here, to the bit.
trained=
trains() {
  local accuracy result
  accuracy=$(sed -nE 's/^(\[0\] )?test accuracy: ([0-9.]+) %$/\2/p' "$output")
  result="$accuracy $(sed -nE 's/^(\[0\] )?parameters identical on all ranks, digest //p' "$output")"
  awk -v accuracy="$accuracy" 'BEGIN { exit !(accuracy >= 95) }' || fail "the accuracy is $accuracy %"
  grep -qE '^(\[0\] )?1433 training and 364 test samples; 4 ranks' "$output" || fail 'there are not four ranks'
  [ "$result" = "${trained:=$result}" ] || fail "$result, but before $trained"
}
examples=$bindir/../../examples
if [ -x "$examples/train_digits" ]; then
  examples=$(realpath "$examples")
  digits=("$examples/train_digits" --epochs 12 --sirtaki-deterministic=true --sirtaki-intra-op-threads=1)
  echo "--- train_digits over ssh"
  on_host 1 timeout -k 5 200 "$sirtakirun" --launcher "${MPIEXEC:-$(command -v mpirun)}" -H h1:2,h2:2 \
    --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 "${digits[@]}" >"$output" 2>"$errors" </dev/null ||
    fail 'sirtakirun failed'
  trains
  # Against one by seed, or with SIRTAKI_TEST_SCALE=full all, of the ways within Slurm.
  for way in $(sample 1 mpirun srun alone sbatch); do
    case $way in
      mpirun)
        echo "--- train_digits by sirtakirun and mpirun in salloc"
        job 0 "$sirtakirun" --launcher "${MPIEXEC:-$(command -v mpirun)}" "${digits[@]}" ;;
      srun)
        echo "--- train_digits by sirtakirun and srun in salloc"
        job 0 "$sirtakirun" --launcher srun "${digits[@]}" ;;
      alone)
        echo "--- train_digits by srun"
        on_host 1 timeout -k 5 200 srun -N 2 -n 4 --mpi=pmix "${digits[@]}" >"$output" 2>"$errors" </dev/null || fail 'srun failed' ;;
      sbatch)
        echo "--- the example for sbatch"
        PATH=$examples:$(dirname "$sirtakirun"):$PATH on_host 1 timeout -k 5 200 sbatch -W -o "$output" \
          examples/train_digits.sbatch "${digits[@]:1}" >"$errors" 2>&1 || fail 'the batch job failed' ;;
    esac
    trains
  done
fi

echo "--- srun without sirtakirun"
on_host 1 timeout -k 5 200 srun -N 2 -n 4 --mpi=pmix "$reductions" --gtest_filter='*TheLog*' >"$output" 2>"$errors" </dev/null ||
  fail 'srun failed'

echo "--- srun outside of a job"
code=0
on_host 1 "$sirtakirun" --launcher srun -np 2 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 2 ] || fail "code $code"
grep -q '^sirtakirun: srun needs a job of Slurm, and this is not one' "$errors" || fail 'it does not say why'
