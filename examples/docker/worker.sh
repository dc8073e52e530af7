#!/bin/sh
# A container that ranks are started in: an sshd on port 2222 with a host key of its own, until the container is stopped.
set -e
key=/tmp/sirtaki_host_key
[ -e "$key" ] || ssh-keygen -q -t ed25519 -N '' -f "$key"
exec /usr/sbin/sshd -D -e -f /opt/sirtaki/share/sshd_config
