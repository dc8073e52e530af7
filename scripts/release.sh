#!/usr/bin/env bash
# scripts/release.sh [--yes] --index NAME --debs-to FOLDER FILE...: checks the wheels and debs of a release, and says where each
# would be put. With --yes it puts them there. docs/releasing.md tells what comes before.
#
#   --index NAME       the package index for wheels, as ~/.pypirc names it; twine uploads them there
#   --debs-to FOLDER   a folder that apt reads, here or as HOST:FOLDER by scp; an index of it is made anew
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { printf 'release.sh: %s\n' "$*" >&2; exit 2; }
do_it=no index='' debs_to='' files=()
while [ $# -gt 0 ]; do
  case $1 in
    --yes) do_it=yes && shift ;;
    --index | --debs-to)
      [ $# -ge 2 ] || die "$1 needs a value"
      if [ "$1" = --index ]; then index=$2; else debs_to=$2; fi
      shift 2 ;;
    -*) die "unknown option $1; the options are --yes, --index and --debs-to" ;;
    *) files+=("$1") && shift ;;
  esac
done
[ "${#files[@]}" -gt 0 ] || die 'name the wheels and debs: build/wheels/*.whl build/release/packages/*.deb'
version=$(sed -n 's/^ *VERSION \([0-9.]*\)$/\1/p' CMakeLists.txt | head -n 1)
problems=0
problem() { printf 'release.sh: %s\n' "$*" >&2; problems=$((problems + 1)); }

# A release can be made again.
[ -z "$(git status --porcelain)" ] || problem 'the working tree has changes: commit them, or build from a fresh clone'
[ "$(git tag --points-at HEAD --list "v$version")" = "v$version" ] ||
  problem "HEAD is not tagged v$version, the version of CMakeLists.txt: git tag v$version"
[ -e LICENSE ] || problem 'there is no file LICENSE, and nobody may use what has no licence'

wheels=() debs=()
readonly most_bytes=$((10 * 1024 * 1024))   # of a wheel
for file in "${files[@]}"; do
  [ -f "$file" ] || { problem "$file is not there" && continue; }
  name=$(basename "$file")
  case $name in
    "sirtaki-$version"[+-]*-manylinux_*.whl)
      wheels+=("$file")
      [ "$(stat -c %s "$file")" -le $most_bytes ] || problem "$name is larger than 10 MiB" ;;
    "libsirtaki_$version"[_-]*.deb | "libsirtaki-dev_$version"[_-]*.deb | "sirtakirun_$version"[_-]*.deb) debs+=("$file") ;;
    *.whl | *.deb) problem "$name is no wheel or deb of version $version" ;;
    *) problem "$name is neither a wheel nor a deb" ;;
  esac
done
[ "${#wheels[@]}" = 0 ] || [ -n "$index" ] || problem 'wheels are given, and no --index for them'
[ "${#debs[@]}" = 0 ] || [ -n "$debs_to" ] || problem 'debs are given, and no --debs-to for them'

say() { printf '%s  %s bytes, sha256 %s\n    to %s\n' "$(basename "$1")" "$(stat -c %s "$1")" "$(sha256sum <"$1" | cut -d' ' -f1)" "$2"; }
for file in "${wheels[@]}"; do say "$file" "the index ${index:-(none)}"; done
for file in "${debs[@]}"; do say "$file" "${debs_to:-(none)}"; done
[ "$problems" = 0 ] || die "$problems problems: nothing was put anywhere"
if [ "$do_it" = no ]; then
  echo 'A dry run: nothing was put anywhere. --yes does it.'
  exit 0
fi

if [ "${#wheels[@]}" -gt 0 ]; then
  command -v twine >/dev/null || die 'twine is not there: pip install twine'
  twine check --strict "${wheels[@]}"
  twine upload --non-interactive --repository "$index" "${wheels[@]}"
fi
if [ "${#debs[@]}" -gt 0 ]; then
  command -v dpkg-scanpackages >/dev/null || die 'dpkg-scanpackages is not there: apt-get install dpkg-dev'
  case $debs_to in
    *:*)
      scp -- "${debs[@]}" "$debs_to/"
      # shellcheck disable=SC2029  # the folder is known here
      ssh "${debs_to%%:*}" "cd '${debs_to#*:}' && dpkg-scanpackages --multiversion . >Packages.new && mv Packages.new Packages" ;;
    *)
      mkdir -p "$debs_to"
      cp -- "${debs[@]}" "$debs_to/"
      (cd "$debs_to" && dpkg-scanpackages --multiversion . >Packages.new && mv Packages.new Packages) ;;
  esac
fi
echo 'Released.'
