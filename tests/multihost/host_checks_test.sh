#!/usr/bin/env bash
# What sirtakirun asks hosts before it starts ranks there, and what it says of those that are not fit.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/multihost/runs.sh
. "$(dirname "$0")/runs.sh"

# unfit PATTERN ARGUMENT...: nothing is started, and the line that says why is so.
unfit() {
  local pattern=$1
  shift
  run 2 "$@"
  grep -qE "^sirtakirun: $pattern\$" "$errors" || fail "no line is: sirtakirun: $pattern"
  [ "$(tail -n 1 "$errors")" = "sirtakirun: nothing was started (--check-hosts=false skips these checks)" ] || fail 'it does not say what follows'
}

echo "--- a program that one host has not"
on_host 1 sh -c 'printf "#!/bin/sh\necho ran\n" >/tmp/only_here && chmod +x /tmp/only_here'
unfit 'host h2: program "/tmp/only_here" cannot be started there \(No such file or directory\): put it under the same path on every host' \
  -H h1:2,h2:2 /tmp/only_here

echo "--- a failure is not kept, and nothing but a fit host is"
on_host 2 sh -c 'printf "#!/bin/sh\necho ran\n" >/tmp/only_here && chmod +x /tmp/only_here'
run 0 -H h1:1,h2:1 /tmp/only_here
says "$output" "[1] ran"

echo "--- a library that one host has not"
if command -v cc >/dev/null; then
  printf 'int F(void) { return 0; }\n' >"$hosts_state/half.c"
  printf 'int F(void);\nint main(void) { return F(); }\n' >"$hosts_state/whole.c"
  cc -shared -fPIC -Wl,-soname,libhalf.so.1 -o "$hosts_state/libhalf.so.1" "$hosts_state/half.c"
  cc -o "$hosts_state/whole" "$hosts_state/whole.c" "$hosts_state/libhalf.so.1" -Wl,-rpath,/tmp
  on_host 1 cp "$hosts_state/libhalf.so.1" /tmp
  unfit "host h2: program \"$hosts_state/whole\" does not find libhalf\\.so\\.1 there: .*" -H h1:2,h2:2 "$hosts_state/whole"
  on_host 2 cp /dev/null /tmp/libhalf.so.1
  unfit "host h2: program \"$hosts_state/whole\" cannot be started there \\(.*libhalf\\.so\\.1: file too short\\): .*" \
    -H h1:2,h2:2 "$hosts_state/whole"
  on_host 2 cp "$hosts_state/libhalf.so.1" /tmp
  run 0 -H h1:2,h2:2 "$hosts_state/whole"
fi

echo "--- hosts that are not fit"
ssh-keygen -q -t ed25519 -N '' -f "$hosts_state/wrong"
sed "s,$hosts_state/key,$hosts_state/wrong," "$hosts_state/ssh_config" >"$hosts_state/wrong_config"
unfit 'host h2: ssh does not get in without a password \(.*Permission denied \(publickey\)\.\): put .*' \
  -H h1:2,h2:2 --ssh-args "-F $hosts_state/wrong_config" true
unfit 'host h2: no ssh server listens there \(.*port 2223: Connection refused\): .*' -H h1:2,h2:2 -p 2223 true
unfit 'host h9: no host of this name is known here \(ssh: Could not resolve hostname h9: .*\): .*' -H h1:2,h9:2 true
unfit 'host 10\.77\.0\.9: it does not answer \(.*\): .*' -H h1:2,10.77.0.9:2 true
sed "s,^UserKnownHostsFile .*,," "$hosts_state/ssh_config" | sed 's,UserKnownHostsFile .*,UserKnownHostsFile /dev/null,' >"$hosts_state/strange_config"
unfit 'host h2: its host key is not known here \(Host key verification failed\.\): .*' \
  -H h1:2,h2:2 --ssh-args "-F $hosts_state/strange_config" true
on_host 1 cp "$sirtakirun" /tmp/sirtakirun
code=0
on_host 1 timeout -k 5 150 /tmp/sirtakirun "${flags[@]}" -H h1:2,h2:2 true >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 2 ] || fail "code $code"
grep -q '^sirtakirun: host h2: "/tmp/sirtakirun" is not there (.*): install Sirtaki under the same path on every host$' "$errors" ||
  fail 'it does not say what is missing'
# A host that takes the connection and says nothing.
on_host 2 python3 -c 'import socket; s = socket.create_server(("", 2224)); open("/run/listens", "w"); c = s.accept(); s.accept()' &
hosts_wait 'nobody listens' on_host 2 test -e /run/listens
began=$SECONDS
unfit 'host h2: (it does not answer \(.*timed out.*\)|no answer within 2 s \(--start-timeout\)): .*' -H h1:2,h2:2 -p 2224 --start-timeout 2 true
[ $((SECONDS - began)) -le 60 ] || fail "noticed after $((SECONDS - began)) s"
kill $!
{ wait $!; } 2>/dev/null || true

echo "--- what was found is believed for a while"
mkdir "$hosts_state/bin"
printf '#!/bin/sh\necho called >>%s/calls\nexec %s "$@"\n' "$hosts_state" "$(command -v ssh)" >"$hosts_state/bin/ssh"
chmod +x "$hosts_state/bin/ssh"
# called COUNT ARGUMENT...: so often, by sirtakirun and by mpirun.
called() {
  local count=$1
  shift
  : >"$hosts_state/calls"
  PATH=$hosts_state/bin:$PATH run 0 -H h1:1,h2:1 "$@" -- true
  [ "$(wc -l <"$hosts_state/calls")" = "$count" ] || fail "ssh was called $(wc -l <"$hosts_state/calls") times, not $count"
}
called 2
called 1
called 2 --disable-cache
called 1 --check-hosts=false
XDG_CACHE_HOME=/proc/none called 2
XDG_CACHE_HOME=/proc/none called 2
