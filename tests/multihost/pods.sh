#!/usr/bin/env bash
# Pods of Kubernetes on one machine, for the scripts that source this after hosts.sh: hosts where no server runs yet, whose names
# nobody knows yet, and whose programs are not root's. The files of examples/docker and examples/kubernetes are those that are used.
#
#   pods_up SERVICE NAME...   a pod for each name, in a Service without an address of its own: pods 1, 2, ...
#   in_pod K COMMAND...       runs a command in pod K, as the user mpi; $pod_variables are what the pod is given, NAME=VALUE
#   publish K [AS]            from now on the name of pod K is known, or that of pod AS with the address of pod K
#   withdraw                  no name is known
#   asked_for K               succeeds if somebody has asked for the name since it was withdrawn
#   full_name K               its name as others call it
#   operator_up IMPLEMENTATION SLOTS K...   what the MPI Operator puts into pods: keys, and in pod 1 the hostfile of pods K
#   worker K                  starts the ssh server of pod K, as the image does, in $worker; $hosts_state/worker$K.log is its output

pods_up() {
  service=$1
  shift
  pod_names=("$@")
  pod_variables=()
  hosts_as=("$hosts_project/tests/multihost/pod.sh" "$service" "${pod_names[@]}")
  hosts_up $#
  : >"$hosts_state/names"
  nsenter --target "${hosts_started[0]}" --net ip addr add 10.77.0.254/24 dev bridge
  setpriv --pdeathsig KILL nsenter --target "${hosts_started[0]}" --net \
    python3 "$hosts_project/tests/multihost/dns.py" 10.77.0.254 "$hosts_state/names" "$hosts_state/dns.log" &
  hosts_started+=($!)
  hosts_wait 'no DNS' test -e "$hosts_state/dns.log"
}

in_pod() {
  local pod=$1
  shift
  on_host "$pod" setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=-all env -i -C / \
    PATH=/usr/local/bin:/usr/bin:/bin HOME=/run/mpi USER=mpi "${pod_variables[@]}" sh -c 'cd && exec "$@"' sh "$@"
}

full_name() { printf '%s.%s.default.svc' "${pod_names[$1 - 1]}" "$service"; }
# Others write the new file beside it: a reader has the old one or the new one.
publish() {
  local name
  name=$(full_name "${2:-$1}")
  { grep -vF " $name " "$hosts_state/names" || true
    printf '10.77.0.%s %s %s.cluster.local\n' "$1" "$name" "$name"; } >"$hosts_state/names.new"
  mv "$hosts_state/names.new" "$hosts_state/names"
}
withdraw() {
  : >"$hosts_state/names.new"
  mv "$hosts_state/names.new" "$hosts_state/names"
  : >"$hosts_state/dns.log"
}
asked_for() { grep -qxF "$(full_name "$1").cluster.local unknown" "$hosts_state/dns.log"; }

operator_up() {
  local implementation=$1 slots=$2 folder=$hosts_state/auth pod
  shift 2
  # A volume of a Secret: root's files that all may read, behind links, as id_rsa whatever the kind of the key is.
  mkdir -p "$folder/..data" "$hosts_state/mpi"
  ssh-keygen -q -t ecdsa -b 521 -N '' -f "$folder/..data/id_rsa" <<<y >/dev/null
  cp "$folder/..data/id_rsa.pub" "$folder/..data/authorized_keys"
  chmod 755 "$folder" "$folder/..data" "$hosts_state/mpi"
  chmod 644 "$folder/..data/"*
  for name in id_rsa id_rsa.pub authorized_keys; do ln -sf "..data/$name" "$folder/$name"; done
  printf '#!/bin/sh\n' >"$hosts_state/mpi/discover_hosts.sh"
  for pod in "$@"; do
    case $implementation in
      OpenMPI) printf '%s slots=%s\n' "$(full_name "$pod")" "$slots" ;;
      *) printf '%s:%s\n' "$(full_name "$pod")" "$slots" ;;
    esac
    printf 'echo %s\n' "$(full_name "$pod")" >>"$hosts_state/mpi/discover_hosts.sh"
  done >"$hosts_state/mpi/hostfile"
  chmod 755 "$hosts_state/mpi/discover_hosts.sh"
  for pod in "${!pod_names[@]}"; do
    on_host $((pod + 1)) sh -c 'mkdir -p /run/mpi/.ssh && mount --bind -o ro "$1" /run/mpi/.ssh' sh "$folder"
  done
  on_host 1 mount --bind -o ro "$hosts_state/mpi" /etc/mpi
  operator=(K_MPI_JOB_ROLE=launcher)
  case $implementation in
    OpenMPI) operator+=(OMPI_MCA_orte_keep_fqdn_hostnames=true OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile
      OMPI_MCA_plm_rsh_args='-o ConnectionAttempts=10' "OMPI_MCA_orte_set_default_slots=$slots") ;;
    MPICH) operator+=(HYDRA_HOST_FILE=/etc/mpi/hostfile HYDRA_LAUNCH_EXTRA_ARGS='-o ConnectionAttempts=10') ;;
  esac
  operator+=(NVIDIA_VISIBLE_DEVICES= NVIDIA_DRIVER_CAPABILITIES=)
}

worker() {
  in_pod "$1" env K_MPI_JOB_ROLE=worker sh "$hosts_project/examples/docker/worker.sh" >"$hosts_state/worker$1.log" 2>&1 </dev/null &
  worker=$!
}
