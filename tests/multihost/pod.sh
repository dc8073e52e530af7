# A host of hosts.sh as a pod, for `.` in it: $1 is its number, $2 the folder of the run, $3 the project's, $5 the Service's name, the
# rest are the pods' names. It knows only its own name, asks pods.sh's DNS for others, and no server runs in it. An ordinary user, mpi,
# can read the project.
name=${*:$((5 + $1)):1}
service=$5
hostname "$name"
cp -a /etc /run/etc
umount /etc/hosts 2>/dev/null || true
mount --bind /run/etc /etc
rm -f /etc/hosts /etc/resolv.conf
printf '127.0.0.1 localhost\n10.77.0.%s %s.%s.default.svc.cluster.local %s\n' "$1" "$name" "$service" "$name" >/etc/hosts
printf 'nameserver 10.77.0.254\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n' >/etc/resolv.conf
printf 'hosts: files dns\npasswd: files\ngroup: files\n' >/etc/nsswitch.conf
printf 'mpi:x:1000:1000::/run/mpi:/bin/sh\n' | cat - /run/etc/passwd >/run/passwd && mv /run/passwd /etc/passwd
mkdir -p /etc/mpi /etc/ssh/ssh_config.d
cp "$3/examples/docker/ssh_config" /etc/ssh/ssh_config.d/sirtaki.conf
install -d -o 1000 -g 1000 /run/mpi
closed=   # the highest folder above the project's that is closed to others
for part in $(tr / ' ' <<<"${3%/*}"); do
  at=${at:-}/$part
  [ $((0$(stat -c %a "$at") & 1)) = 1 ] || { closed=$at && break; }
done
if [ -n "$closed" ]; then
  mkdir /run/kept
  mount --rbind "$3" /run/kept
  mount -t tmpfs -o mode=755 tmpfs "$closed"
  mkdir -p "$3"
  mount --rbind /run/kept "$3"
fi
touch "$2/ready$1"
exec sleep infinity
