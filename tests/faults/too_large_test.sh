#!/usr/bin/env bash
# A model that takes more memory than a rank may take trains as a pipeline of 2 ranks, each of which is in a control group
# with that limit. The same model in one process, under the same limit, is killed; without the limit it trains.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
[ -x "$bindir/too_large" ] || { echo 'SKIPPED: built without LibTorch' >&2; exit 77; }
skip() { printf 'SKIPPED: %s\n' "$1" >&2; exit 77; }

layers=64                        # 32 MiB each, with the gradient: 2048 MiB
most=1200                        # MiB that a rank may take: half of that, and what LibTorch and MPI take in a process
export SIRTAKI_POOL_BYTES=${most}M  # the limit is of each rank, where the pool takes it for that of all
available=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
[ "$available" -gt $((4096 * 1024)) ] || skip "the test needs 4 GiB of memory, and $((available / 1024)) MiB are available"

# --- a group for each rank, by the first or the second version of control groups ---
if [ -d /sys/fs/cgroup/memory ]; then
  parent=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)
  memory=memory.limit_in_bytes swap=memory.memsw.limit_in_bytes swapped=$most
else
  parent=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
  memory=memory.max swap=memory.swap.max swapped=0
  grep -qw memory "$parent/cgroup.subtree_control" 2>/dev/null || skip "memory cannot be limited in control groups below $parent"
fi
groups=$parent/sirtaki-test.$$
mkdir "$groups" 2>/dev/null || skip "no control group can be made below $parent"
end_groups() {
  rmdir "$groups"/rank-* "$groups" 2>/dev/null || true
  clean_up
}
trap end_groups EXIT
if [ "$memory" = memory.max ]; then echo +memory >"$groups/cgroup.subtree_control" || skip "memory cannot be limited below $groups"; fi
for rank in 0 1; do
  mkdir "$groups/rank-$rank"
  echo $((most * 1024 * 1024)) >"$groups/rank-$rank/$memory" || skip "memory cannot be limited in $groups"
  # Where there is no swap, there may be no file for it.
  if [ -e "$groups/rank-$rank/$swap" ]; then echo $((swapped * 1024 * 1024)) >"$groups/rank-$rank/$swap"; fi
done
cat >"$runs/in_group.sh" <<'END'
echo $$ >"$1/rank-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}/cgroup.procs"
shift
exec "$@"
END
limited() { bash "$here/../support/mpirun.sh" "$1" bash "$runs/in_group.sh" "$groups" "${@:2}" >"$output" 2>&1; }

code=0
limited 2 "$bindir/too_large" pipeline $layers || code=$?
[ $code = 0 ] || fail "a pipeline of 2 ranks with $most MiB each: exit code $code"
expect_training() {
  awk '/^trained:/ { good = $4 < $2 } END { exit !good }' "$output" || fail "$1: it does not train"
}
expect_training "a pipeline of 2 ranks"

code=0
limited 1 "$bindir/too_large" whole $layers || code=$?
[ $code != 0 ] || fail "the whole model in $most MiB: it is not killed"
! grep -q '^trained' "$output" || fail "the whole model in $most MiB: it has trained"

"$bindir/too_large" whole $layers >"$output" 2>&1 || fail "the whole model without a limit: exit code $?"
expect_training "the whole model"
took=$(sed -n 's/^rank 0 took \([0-9]*\) MiB/\1/p' "$output")
[ "$took" -ge 2048 ] || fail "the whole model took $took MiB"
echo "a model of $took MiB trained on 2 ranks with $most MiB each"
