#!/usr/bin/env bash
# tests/fresh_machine.sh DIR [command...]: proves that nothing but a bare Debian 12 is needed. Makes one in DIR (about
# 200 MB, with debootstrap, once; to start afresh remove DIR), clones this project's committed state to /src in it, and
# runs the command there as root; without one, examples/quickstart.sh and then tests/run.sh.
#
# The new root has processes, mounts, /tmp, /dev/shm and a host name of its own. From this machine it is given only what a
# package client needs to reach its sources: apt's and pip's settings, certificates and proxies. Needs root and Debian's
# debootstrap. WORKTREE=1 takes the working tree as it is, uncommitted files too, rather than a clone.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,9p "$0" >&2; exit 2; }
root=$1
shift
[ $# -gt 0 ] || set -- bash -c 'bash examples/quickstart.sh && bash tests/run.sh'
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
die() { printf 'fresh_machine.sh: %s\n' "$*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "must be root: it makes mounts and changes root"
mkdir -p "$root"
root=$(cd "$root" && pwd)

archive() {   # the first Debian archive that this machine's apt uses; deb822 files first, then one-line ones
  cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
    grep -oE '^(URIs:|deb ).*' | grep -oE '(https?|file)://[^ ]+' | head -n 1
}

install_base() {
  command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install debootstrap"
  debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$(archive)" >"$root.log" 2>&1 ||
    { tail -n 5 "$root.log" >&2; die "debootstrap failed; see $root.log"; }
  touch "$root/.complete"
}

# Settings of package clients are copied each time: they may have changed since the root was made.
copy_client_settings() {
  local file
  rm -rf "$root/etc/apt/sources.list" "$root/etc/apt/sources.list.d"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/apt/keyrings /etc/apt/trusted.gpg.d \
    /etc/apt/auth.conf.d /usr/share/keyrings /etc/ssl/certs/ca-certificates.crt /usr/local/share/ca-certificates \
    /etc/resolv.conf /etc/hosts /etc/pip.conf; do
    [ -e "$file" ] || continue
    mkdir -p "$root$(dirname "$file")"
    cp -rLT "$file" "$root$file"
  done
  for file in .config/pip/pip.conf .pip/pip.conf; do
    [ -e "$HOME/$file" ] && install -D "$HOME/$file" "$root/root/$file"
  done
  # Sources that this machine has switched off, and a container's rules to throw downloads away.
  rm -f "$root"/etc/apt/sources.list.d/*disabled* "$root"/etc/apt/apt.conf.d/*docker*
}

copy_project() {
  rm -rf "$root/src"
  if [ -n "${WORKTREE:-}" ]; then
    mkdir "$root/src"
    (cd "$project" && git ls-files -co --exclude-standard -z | xargs -0 -I{} sh -c '[ ! -f "$1" ] || printf "%s\\0" "$1"' _ {} |
      tar --null -T - -cf -) | tar -C "$root/src" -xf -
  else
    git clone -q --no-hardlinks "$project" "$root/src"
  fi
}

[ -e "$root/.complete" ] || install_base
copy_client_settings
copy_project

environment=(HOME=/root TERM=dumb LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
while IFS= read -r -d '' entry; do
  # A folder of this machine's, which is not seen in there, would only break pip.
  case $entry in
    PIP_FIND_LINKS=*) ;;
    PIP_* | SSL_* | REQUESTS_* | CURL_* | SIRTAKI_* | [a-z]*_proxy=* | [A-Z]*_PROXY=*) environment+=("$entry") ;;
  esac
done </proc/self/environ

exec unshare --mount --pid --uts --fork --kill-child bash -c '
  set -e
  root=$1
  shift
  hostname fresh
  mount --make-rprivate /
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  mount -t sysfs -o ro sysfs "$root/sys" 2>/dev/null || true
  exec chroot "$root" env -i -C /src "$@"' _ "$root" "${environment[@]}" "$@" </dev/null
