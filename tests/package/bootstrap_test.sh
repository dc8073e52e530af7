#!/usr/bin/env bash
# bootstrap_test.sh: without libjpeg, and with an apt that fails, bootstrap.sh goes on, and asks for no password.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/bin"
for program in apt-get sudo; do
  printf '#!/bin/sh\necho "%s $*" >>"%s/calls"\nexit 1\n' $program "$scratch" >"$scratch/bin/$program"
done
chmod +x "$scratch"/bin/*
# bootstrap: as on a machine that has all but that header; the output is in $scratch/output, the exit code in $code.
bootstrap() {
  code=0
  : >"$scratch/calls"
  sed 's/have_header jpeglib.h/false/' bootstrap.sh >"$scratch/bootstrap.sh"
  env "$@" SIRTAKI_BOOTSTRAP_TORCH=none PATH="$scratch/bin:$PATH" bash "$scratch/bootstrap.sh" >"$scratch/output" 2>&1 || code=$?
  cat "$scratch/output"
}

bootstrap SIRTAKI_BOOTSTRAP_APT=no
if grep -q "missing Debian packages" "$scratch/output"; then
  echo "skipped: this machine lacks more than that"
  exit 77
fi
[ "$code" = 0 ] || { echo "without apt: exit code $code" >&2; exit 1; }
[ ! -s "$scratch/calls" ]

bootstrap
[ "$code" = 0 ] || { echo "apt fails: exit code $code" >&2; exit 1; }
grep -q "without libjpeg-dev" "$scratch/output"
[ "$(wc -l <"$scratch/calls")" -le 2 ]   # install, update: no more tries
if [ "$(id -u)" = 0 ]; then grep -q "apt-get .*install" "$scratch/calls"; else grep -q "sudo -n true" "$scratch/calls"; fi
