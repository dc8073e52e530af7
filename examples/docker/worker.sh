#!/bin/sh
# Makes the container a place to start ranks in: runs sshd on port 2222, with its own host key, until it is stopped.
set -e
key=/tmp/sirtaki_host_key
[ -e "$key" ] || ssh-keygen -q -t ed25519 -N '' -f "$key"
exec /usr/sbin/sshd -D -e -f "$(dirname "$0")/sshd_config"
