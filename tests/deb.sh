#!/usr/bin/env bash
# tests/deb.sh DIR: makes Debian packages of the release build and installs them in a bare Debian 12, made in DIR by
# tests/fresh_machine.sh, beside a LibTorch that stands elsewhere than that of the build. There a C++ project is built with them and
# trains on 2 ranks. Needs root and debootstrap.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ "${1:-}" = --inside ]; then   # in the bare Debian
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 DEBIAN_FRONTEND=noninteractive OMP_NUM_THREADS=1
  apt-get -q update >/dev/null
  apt-get -q install -y --no-install-recommends /opt/deb/*.deb g++ cmake make libopenmpi-dev openmpi-bin >/tmp/apt.log 2>&1 ||
    { tail -n 20 /tmp/apt.log; exit 1; }
  dpkg -i /opt/deb/*.deb   # by itself, once what they depend on is there
  echo /opt/site/torch/lib >/etc/ld.so.conf.d/libtorch.conf
  ldconfig
  sirtakirun --check-build
  sirtaki-checkpoint --help | diff /src/tests/torch/checkpoint/tool/help.txt -
  cp -r /src/tests/package /tmp/project
  cmake -S /tmp/project -B /tmp/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=/opt/site/torch
  cmake --build /tmp/build
  ldd /tmp/build/outside | grep -E '=> (/usr)?/lib/libsirtaki.so'
  sirtakirun -np 2 --oversubscribe /tmp/build/outside
  sirtakirun -np 2 --oversubscribe /tmp/build/outside_mpi
  dpkg -r libsirtaki-dev sirtakirun libsirtaki
  left=$(ls -d /usr/lib/libsirtaki* /usr/include/sirtaki /usr/bin/sirtaki* 2>/dev/null || true)
  [ -z "$left" ] || { printf 'deb.sh: left behind: %s\n' "$left" >&2; exit 1; }
  exit
fi

[ $# = 1 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$here/.."
build=build/release
bash bootstrap.sh --quiet
cmake --preset release >/dev/null
cmake --build "$build" -j "${SIRTAKI_JOBS:-$(nproc)}" --target sirtaki sirtakirun sirtaki-checkpoint
bash tests/fresh_machine.sh "$1" true
rm -rf "$1/opt/deb" "$1/opt/site"
cpack --config "$build/CPackConfig.cmake" -B "$PWD/$build/packages"
cuda=nvidia/cu13/lib
mkdir -p "$1/opt/deb" "$1/opt/site/$cuda"
cp "$build"/packages/*.deb "$1/opt/deb/"
torch=$(sed -n 's/^set(LibTorch_FALLBACKS "\(.*\)")/\1/p' "$build/SirtakiConfig.cmake")
cp -r "$torch" "$1/opt/site/"
cp "$(dirname "$torch")/$cuda"/libcu{dart,pti}.so.* "$1/opt/site/$cuda/"   # PyPI's needs them
bash tests/fresh_machine.sh "$1" bash tests/deb.sh --inside
echo "deb: all as expected"
