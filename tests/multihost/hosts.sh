#!/usr/bin/env bash
# Several hosts on one machine, for the scripts that source this: each has a network, a host name, processes, /tmp and
# /dev/shm of its own and an sshd; a bridge connects them. All of it hangs on processes of the script, none of it has a
# name outside, so nothing is left when the script ends, however that happens.
#
#   hosts_up N [RATE BURST]  N hosts, h1 to hN; what each can send, and how much at once, as tc takes it (1gbit 256kb)
#   on_host K COMMAND...     runs a command on host K
#   across HOSTS COMMAND...  mpirun from host 1 on "h1:2,h2:2"; gives SIRTAKI_* along. SIRTAKI_MPIRUN_FLAGS: more flags.
#                            SIRTAKI_TEST_MEDIUM=tcp: the ranks that it starts join their job over TCP
#
# hosts_up ends the script with code 77, and the reason, where hosts cannot be made.

hosts_state=
hosts_project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
hosts_mpi=
hosts_flags=()   # of sirtakirun, if this MPI needs any here
hosts_as=        # what each host does instead of serving ssh: a file for `.`, and its words from $5 on

hosts_skip() {
  printf 'SKIPPED: %s\n' "$*" >&2
  exit 77
}

hosts_need() {
  local program
  [ "$(id -u)" = 0 ] || hosts_skip 'network namespaces need root'
  PATH=$PATH:/usr/sbin:/sbin
  for program in ip tc sshd ssh ssh-keygen unshare nsenter setpriv; do
    command -v "$program" >/dev/null || hosts_skip "$program is not here (bootstrap.sh installs it)"
  done
  unshare --net --uts --mount --pid --fork --mount-proc sh -c 'mount -t tmpfs tmpfs /tmp && hostname probe' 2>/dev/null ||
    hosts_skip 'namespaces are not allowed here'
  hosts_mpi=$("${MPIEXEC:-mpirun}" --version 2>&1)
  case $hosts_mpi in
    *"Open MPI"* | *OpenRTE* | *PRRTE*) ;;
    *HYDRA*) hosts_flags=(-x MPIR_CVAR_CH4_NETMOD=ofi -x FI_PROVIDER=tcp) ;;   # UCX looks for interfaces in /sys
    *) hosts_skip 'written for the mpirun of Open MPI and of MPICH' ;;
  esac
}

# hosts_not_under WORDS WHY: skips the script where mpirun's version has these words.
hosts_not_under() {
  [[ $("${MPIEXEC:-mpirun}" --version 2>&1) != *"$1"* ]] || hosts_skip "$2"
}

hosts_down() {
  local process
  [ -n "$hosts_state" ] || return 0
  for process in "${hosts_started[@]}"; do kill -KILL "$process" 2>/dev/null || true; done
  wait "${hosts_started[@]}" 2>/dev/null || true
  # What was killed may be writing still.
  for _ in 1 2 3 4 5; do rm -rf "$hosts_state" 2>/dev/null && break || sleep 1; done
  hosts_state=
}

# hosts_wait WHAT COMMAND...: until the command succeeds.
hosts_wait() {
  local what=$1 end=$((SECONDS + 100))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ "$SECONDS" -ge "$end" ]; then
      printf 'FAILED: %s after 100 s\n' "$what" >&2
      return 1
    fi
    sleep 0.02
  done
}

# The process that is the first one of a host, as it is called outside.
hosts_first() { tr -d ' ' <"/proc/$1/task/$1/children"; }
hosts_is_up() { [ -n "$(hosts_first "$1")" ] && [ -e "$hosts_state/ready$2" ]; }

on_host() {
  local first
  first=$(hosts_first "${hosts_started[$1]}")
  shift
  nsenter --target "$first" --net --uts --mount --pid --wd="$PWD" "$@"
}

hosts_up() {
  local count=$1 rate=${2:-} burst=${3:-} i key net=10.77.0
  hosts_need
  hosts_state=$(mktemp -d /var/tmp/sirtaki-hosts.XXXXXX) # not in /tmp: each host has one of its own
  hosts_started=()
  export XDG_CACHE_HOME=$hosts_state/cache
  [ -z "${SIRTAKI_TEST_MEDIUM:-}" ] || export SIRTAKI_MEDIUM=$SIRTAKI_TEST_MEDIUM   # which sirtakirun passes on
  trap hosts_down EXIT
  trap 'exit 130' INT TERM HUP
  ssh-keygen -q -t ed25519 -N '' -f "$hosts_state/key"
  key=$(cut -d' ' -f1,2 "$hosts_state/key.pub")
  printf '%s\n' "$key" >"$hosts_state/authorized_keys"
  printf '127.0.0.1 localhost\n' >"$hosts_state/hosts"
  for i in $(seq "$count"); do
    printf '%s.%d h%d\n' "$net" "$i" "$i" >>"$hosts_state/hosts"
    printf '[%s.%d]:2222,[h%d]:2222 %s\n' "$net" "$i" "$i" "$key" >>"$hosts_state/known_hosts"
  done
  cat >"$hosts_state/ssh_config" <<CONFIG
Host *
  Port 2222
  IdentityFile $hosts_state/key
  IdentitiesOnly yes
  UserKnownHostsFile $hosts_state/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  LogLevel ERROR
CONFIG
  # A shell that is not the first one, by its SHLVL, reads no .bashrc: what this machine's user has there may take its time, and a
  # test that kills it there may leave a lock.
  cat >"$hosts_state/sshd_config" <<CONFIG
Port 2222
HostKey $hosts_state/key
AuthorizedKeysFile $hosts_state/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
SetEnv SHLVL=1
CONFIG
  # What host $1 does: $2 is the folder of this run, $3 that of the project, which may be in a folder that is the host's own, $4 and the rest
  # are hosts_as.
  cat >"$hosts_state/host.sh" <<'HOST'
set -e
hostname "h$1"
kept=$2/project$1
mkdir "$kept"
mount --bind "$3" "$kept"
for folder in /tmp /dev/shm /run; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
[ -d "$3" ] || { mkdir -p "$3" && mount --bind "$kept" "$3"; }
umount "$kept"
mkdir -m 755 /run/sshd
[ -z "$4" ] || . "$4"   # and there it stays
mount --bind "$2/hosts" /etc/hosts
touch "$2/ready$1"
exec "$(command -v sshd)" -D -e -f "$2/sshd_config" 2>"$2/sshd$1.log"
HOST

  setpriv --pdeathsig KILL unshare --net sleep infinity &
  hosts_started+=($!)
  hosts_wait 'no network for the bridge' hosts_has_own_net "${hosts_started[0]}"
  nsenter --target "${hosts_started[0]}" --net sh -c 'ip link add bridge type bridge && ip link set bridge up'
  for i in $(seq "$count"); do
    setpriv --pdeathsig KILL unshare --net --uts --mount --pid --fork --kill-child --mount-proc \
      bash "$hosts_state/host.sh" "$i" "$hosts_state" "$hosts_project" "${hosts_as[@]}" &
    hosts_started+=($!)
  done
  for i in $(seq "$count"); do
    hosts_wait "host $i is not up" hosts_is_up "${hosts_started[i]}" "$i"
    nsenter --target "${hosts_started[0]}" --net sh -c "ip link add port$i type veth peer name veth0 \
      netns $(hosts_first "${hosts_started[i]}") && ip link set port$i master bridge up"
    on_host "$i" sh -c "ip link set lo up && ip addr add $net.$i/24 dev veth0 && ip link set veth0 up"
    [ -z "$rate" ] || on_host "$i" tc qdisc add dev veth0 root tbf rate "$rate" burst "$burst" latency 50ms
  done
  [ -z "${hosts_as[0]}" ] || return 0
  for i in $(seq "$count"); do
    hosts_wait "host $i does not answer: $(cat "$hosts_state/sshd$i.log")" \
      on_host 1 ssh -F "$hosts_state/ssh_config" "h$i" true
  done
}

hosts_has_own_net() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }

across() {
  local hosts=$1 mpirun=${MPIEXEC:-mpirun} flags name over=()
  shift
  if [ "${SIRTAKI_TEST_MEDIUM:-mpi}" = tcp ]; then
    over=(bash "$hosts_project/tests/support/tcp_rank.sh")
    export SIRTAKI_SECRET=0123456789abcdef SIRTAKI_TEST_MASTER=10.77.0.1
  fi
  flags=(-H "$hosts" --bind-to none --mca btl_tcp_if_include veth0)
  while read -r name; do flags+=(-x "$name"); done < <(compgen -e SIRTAKI_ | grep -vx SIRTAKI_MPIRUN_FLAGS)
  case $hosts_mpi in
    *') 4.'*)
      flags+=(--oversubscribe --mca plm_rsh_args "-F $hosts_state/ssh_config" --mca oob_tcp_if_include veth0) ;;
    *HYDRA*)   # gives the whole environment along
      flags=(-n "$(tr , '\n' <<<"$hosts" | awk -F: '{ranks += $2} END {print ranks}')" -hosts "$hosts" -bind-to none
        -launcher ssh -iface veth0) ;;
    *)
      flags+=(--map-by :oversubscribe --prtemca plm_ssh_args "-F $hosts_state/ssh_config" --prtemca prte_if_include veth0) ;;
  esac
  # shellcheck disable=SC2086  # flags are words
  on_host 1 env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    HYDRA_LAUNCHER_EXTRA_ARGS="-F $hosts_state/ssh_config" MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp FI_TCP_IFACE=veth0 \
    timeout -k 5 "${SIRTAKI_TEST_SECONDS:-280}" "$mpirun" "${flags[@]}" ${SIRTAKI_MPIRUN_FLAGS:-} "${over[@]}" "$@" </dev/null
}
