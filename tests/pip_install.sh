#!/usr/bin/env bash
# tests/pip_install.sh DIR: `pip install .` into a new virtual environment, DIR, and with what that has put there the
# examples of examples/python, by its sirtakirun and by mpirun, and the tests of the module on 1 to 4 ranks. Says how long
# the installation took: 6 to 9 minutes on 2 cores, in which nothing of a build folder or a compiler's cache is used.
# SIRTAKI_PYTHON: the Python that makes the environment (default: python3).
set -euo pipefail
[ $# = 1 ] || { sed -n 2,5p "${BASH_SOURCE[0]}" >&2; exit 2; }
[ ! -e "$1" ] || { printf 'pip_install.sh: %s is there already\n' "$1" >&2; exit 2; }
environment=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

SIRTAKI_BOOTSTRAP_TORCH=none bash "$here/../bootstrap.sh" --python
"${SIRTAKI_PYTHON:-python3}" -m venv "$environment"
environment=$(cd "$environment" && pwd)
python=$environment/bin/python
# The sources as they are, without what this folder has besides them: a build folder of pip's would be used again.
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
(cd "$here/.." && git ls-files -z | xargs -0 cp --parents -t "$sources")
begin=$SECONDS
CCACHE_DISABLE=1 "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir "$sources"
printf 'pip_install: pip install . took %d s\n' $((SECONDS - begin))
"$python" -m pip install --quiet --disable-pip-version-check --no-input pytest mpi4py cloudpickle

cd "$environment"   # nothing of the sources' folder is to be imported
tests=$sources/tests   # of the same moment as what was installed
"$python" -c 'import sirtaki.torch, sys; assert sirtaki.torch.__file__.startswith(sys.prefix), sirtaki.torch.__file__'
"$environment/bin/sirtaki-checkpoint" --help | diff "$tests/torch/checkpoint/tool/help.txt" -
bash "$tests/python/examples_test.sh" "$environment/bin/sirtakirun" "$python"
for ranks in 1 2 3 4; do
  SIRTAKI_TEST_SECONDS=1200 bash "$tests/support/mpirun.sh" "$ranks" "$python" -m pytest -q -p no:cacheprovider "$tests/python"
done
echo "pip_install: all as expected"
