#!/usr/bin/env bash
# tests/full.sh [part...]: the second tier of the tests, which tests/run.sh has samples of. Run it whole before a release. A part
# that has passed with these sources is not run again unless it is named; so an interrupted run goes on where it was.
#   jobs     tests of whole jobs that are too long for every change: all ends on several hosts and under Slurm, three ranks of Python
#   tables   the whole conformance tables, random tests at ten times their length, and messages of more than 2 GiB (10 GB of memory)
#   soak     training on two and three hosts whose cores are busy, 60 and 20 times (tests/multihost/soak.sh, which alone makes 200 and 50)
#   tsan     unit and inproc, with all that the first tier takes samples of there
#   asan     the same under the sanitizers for addresses and undefined behaviour, and LibTorch's part
#   headers  every source and every header compiled by itself
#   openmpi5, mpich   the tests labelled mpi under these (tests/other_mpi.sh)
#   mpis     one build under every MPI that can be had (tests/every_mpi.sh)
#   pip      `pip install .` and what it puts there (tests/pip_install.sh)
#   wheel    the wheel, and what it does where no compiler is (tests/wheel.sh)
#   deb      Debian packages in a bare Debian 12 (tests/deb.sh; needs root and debootstrap)
#   rehearsal   the bundle for a machine with a GPU and no network, and all that is run there, in a bare root without a GPU
#            (tests/benchmarks/gpu_rehearsal.sh; needs root and nvcc)
#   bench    benchmarks/run.sh makes every figure that it promises (small ones)
#   fresh    the README's two commands on a bare Debian 12 (tests/fresh_machine.sh; needs root and debootstrap)
# SIRTAKI_JOBS: how many compilers at once (default: the cores).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. tests/support/may_skip.sh
export SIRTAKI_BOOTSTRAP_WITH=${SIRTAKI_BOOTSTRAP_WITH-clang-format slurm-wlm munge python3-yaml python3-jsonschema}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
jobs=${SIRTAKI_JOBS:-$(nproc)}
all=(jobs tables soak tsan asan headers openmpi5 mpich mpis pip wheel deb rehearsal bench fresh)
state=build/full
mkdir -p "$state"
# What is in the working tree, by git's name for it; empty without git, and then every part is run.
sources=$(export GIT_INDEX_FILE="$PWD/$state/index"; { git add -A . && git write-tree; } 2>/dev/null)

build() {   # build PRESET [CMAKE-ARGUMENT...]
  local preset=$1
  shift
  bash bootstrap.sh --quiet --python && cmake --preset "$preset" "$@" && cmake --build --preset "$preset" -j "$jobs"
}
released() { build release -DSIRTAKI_PYTHON=ON -DSIRTAKI_UNITY="${SIRTAKI_UNITY:-ON}" -DSIRTAKI_BENCHMARKS=ON; }
tests() {   # tests PRESET CTEST-ARGUMENT...: a test that is skipped and should not be has failed
  local log=$state/ctest.log unexpected
  ctest --preset "$@" | tee "$log"
  [ "${PIPESTATUS[0]}" = 0 ] || return 1
  unexpected=$(sed -nE 's/^[[:space:]]*[0-9]+ - (.*) \((Skipped|Disabled|Not Run.*)\)[[:space:]]*$/\1/p' "$log" | grep -vE "$may_skip") || return 0
  printf 'tests/full.sh: skipped, which counts as failed (tests/support/may_skip.sh): %s\n' "$unexpected"
  return 1
}
part_jobs() { released && SIRTAKI_TEST_SCALE=full tests release -C Full -j $((jobs + 1)) -R '^(faults|launch|multihost|example|python)\.'; }
part_tables() {
  released && SIRTAKI_TEST_SCALE=full SIRTAKI_TEST_SECONDS=2800 SIRTAKI_TEST_WATCHDOG=1400 tests release -j "$jobs" -R '^conformance\.' &&
    SIRTAKI_TEST_SCALE=10 tests release -j "$jobs" -L '^(unit|inproc)$' &&
    SIRTAKI_TEST_SCALE=full tests release -R '^(mpi\.(random_programs|huge)_test|torch\.state_mpi_test)\.|^Random(Training|Pipeline)Test$'
}
part_soak() { released && bash tests/multihost/soak.sh build/release/tests/multihost 60 20; }
part_tsan() { build tsan -DSIRTAKI_UNITY=ON && tests tsan -j "$jobs"; }
part_asan() { build asan -DSIRTAKI_UNITY=ON -DSIRTAKI_TORCH=ON && tests asan -j "$jobs"; }
part_bench() { released && tests release -C Full -R '^bench\.run$'; }
part_headers() {
  SIRTAKI_UNITY=ON released && SIRTAKI_JOBS=$jobs python3 -B tests/lint/alone.py . build/release all &&
    tests release -C Full -R '^lint\.headers$'
}
part_openmpi5() { bash tests/other_mpi.sh openmpi5; }
part_mpich() { bash tests/other_mpi.sh mpich; }
part_mpis() { bash tests/every_mpi.sh; }
part_pip() { rm -rf "$state/pip" && bash tests/pip_install.sh "$state/pip"; }
part_rehearsal() { bash bootstrap.sh --quiet --benchmarks && SIRTAKI_JOBS=$jobs bash tests/benchmarks/gpu_rehearsal.sh; }
get_debootstrap() { command -v debootstrap >/dev/null || { apt-get -q update && apt-get install -y --no-install-recommends debootstrap; } >/dev/null; }
part_wheel() { bash tests/wheel.sh; }
part_deb() { get_debootstrap && bash tests/deb.sh "$state/debian-packages"; }
part_fresh() { get_debootstrap && bash tests/fresh_machine.sh "$state/debian"; }

named=$#
[ $# -gt 0 ] || set -- "${all[@]}"
for part in "$@"; do
  declare -F "part_$part" >/dev/null || { printf 'full.sh: unknown part "%s"; the parts are %s\n' "$part" "${all[*]}" >&2; exit 2; }
done
failed=()
lines=()
for part in "$@"; do
  if [ "$named" = 0 ] && [ -n "$sources" ] && [ "$(cat "$state/$part.passed" 2>/dev/null)" = "$sources" ]; then
    lines+=("$part: passed before with these sources")
    continue
  fi
  printf '\n=== %s\n' "$part"
  begin=$SECONDS
  if "part_$part" </dev/null; then
    printf '%s\n' "$sources" >"$state/$part.passed"
    lines+=("$part: passed in $((SECONDS - begin)) s")
  else
    rm -f "$state/$part.passed"
    failed+=("$part")
    lines+=("$part: FAILED after $((SECONDS - begin)) s")
  fi
done
printf '\n'
printf '%s\n' "${lines[@]}"
printf 'tests/full.sh: %d parts, %d failed%s, %d s\n' $# "${#failed[@]}" "${failed:+ (${failed[*]})}" $SECONDS
[ "${#failed[@]}" = 0 ]
