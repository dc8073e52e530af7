#!/usr/bin/env bash
# scripts/release.sh: what it refuses, what its dry run says, and what it puts where, with a stand-in for twine.
set -euo pipefail
[ -n "$(command -v git)" ] || { echo "skipped: no git, without which nobody makes a release"; exit 77; }
project=$(realpath "$(dirname "$0")/../..")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { printf 'FAILED: %s\n--- output:\n' "$*" && cat "$scratch/output" && exit 1; }
says() { grep -qF -- "$1" "$scratch/output" || fail "it does not say: $1"; }

tree=$scratch/tree
mkdir -p "$tree/scripts" "$scratch/bin"
cp "$project/scripts/release.sh" "$tree/scripts/"
printf 'project(Sirtaki\n  VERSION 1.2.3\n)\n' >"$tree/CMakeLists.txt"
wheel=$scratch/sirtaki-1.2.3+torch2.11-cp311-cp311-manylinux_2_34_x86_64.whl
echo wheel >"$wheel"
mkdir -p "$scratch/deb/DEBIAN"
printf 'Package: sirtakirun\nVersion: 1.2.3\nArchitecture: amd64\nMaintainer: nobody <nobody@example.com>\nDescription: a test\n' \
  >"$scratch/deb/DEBIAN/control"
deb=$scratch/sirtakirun_1.2.3_amd64.deb
dpkg-deb --build "$scratch/deb" "$deb" >/dev/null
printf '#!/bin/sh\necho "$@" >>"%s/twine"\n' "$scratch" >"$scratch/bin/twine"
chmod +x "$scratch/bin/twine"

# release CODE ARGUMENT...
release() {
  local expected=$1 code=0
  shift
  PATH=$scratch/bin:$PATH bash "$tree/scripts/release.sh" "$@" >"$scratch/output" 2>&1 || code=$?
  [ "$code" = "$expected" ] || fail "release.sh $*: code $code, expected $expected"
}
in_tree() { git -C "$tree" -c user.name=test -c user.email=test@example.com "$@" >/dev/null; }
in_tree init -q
in_tree add -A
in_tree commit -qm first

release 2 --yes --index there --debs-to "$scratch/apt" "$wheel" "$deb" "$scratch/sirtaki-1.2.2-cp311-cp311-manylinux_2_34_x86_64.whl"
says 'HEAD is not tagged v1.2.3'
says 'there is no file LICENSE'
says 'sirtaki-1.2.2-cp311-cp311-manylinux_2_34_x86_64.whl is not there'
release 2 "$wheel" "$deb"
says 'no --index'
says 'no --debs-to'
release 2 --where x
says 'unknown option --where'

echo 'You may.' >"$tree/LICENSE"
in_tree add -A
in_tree commit -qm licence
in_tree tag v1.2.3
truncate -s 11M "$scratch/sirtaki-1.2.3-cp312-cp312-manylinux_2_34_x86_64.whl"
release 2 --index there "$scratch/sirtaki-1.2.3-cp312-cp312-manylinux_2_34_x86_64.whl"
says 'is larger than 10 MiB'

release 0 --index there --debs-to "$scratch/apt" "$wheel" "$deb"
says "sha256 $(sha256sum <"$wheel" | cut -d' ' -f1)"
says 'to the index there'
says 'A dry run: nothing was put anywhere.'
[ ! -e "$scratch/twine" ] && [ ! -e "$scratch/apt" ] || fail 'a dry run did something'

release 0 --yes --index there --debs-to "$scratch/apt" "$wheel" "$deb"
says 'Released.'
grep -qF "upload --non-interactive --repository there $wheel" "$scratch/twine" || fail "twine was asked: $(cat "$scratch/twine")"
grep -qF 'Filename: ./sirtakirun_1.2.3_amd64.deb' "$scratch/apt/Packages" || fail 'the index of debs does not have it'
