#!/usr/bin/env bash
# A Slurm on the hosts of hosts.sh, which is to be sourced before this, without a service manager.
#
#   slurm_up N    a controller on h1, and h1 to hN as nodes of two processors; ends the script with code 77, and the
#                 reason, where there is no Slurm. Its programs then find it by SLURM_CONF.

slurm_need() {
  local program
  PATH=$PATH:/usr/sbin:/sbin
  for program in munged slurmctld slurmd srun salloc sbatch scontrol; do
    command -v "$program" >/dev/null ||
      hosts_skip "$program is not here (SIRTAKI_BOOTSTRAP_WITH='slurm-wlm munge' bash bootstrap.sh installs it)"
  done
}

# slurm_start NAME HOST COMMAND...: in the background, as long as the hosts live.
slurm_start() {
  local name=$1 host=$2
  shift 2
  on_host "$host" "$@" >"$slurm/$name.log" 2>&1 </dev/null &
  hosts_started+=($!)
}

slurm_all_idle() { [ "$(on_host 1 sinfo -h -t idle -o %D)" = "$1" ]; }

slurm_up() {
  local count=$1 i
  slurm_need
  slurm=$hosts_state/slurm
  mkdir -p "$slurm/state"
  chmod 755 "$hosts_state" "$slurm"
  dd if=/dev/urandom of="$slurm/key" bs=1024 count=1 status=none
  chmod 600 "$slurm/key"
  cat >"$slurm/slurm.conf" <<CONFIG
ClusterName=test
SlurmctldHost=h1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$slurm/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/slurmd.%n.pid
SlurmdSpoolDir=$slurm/spool.%n
StateSaveLocation=$slurm/state
SwitchType=switch/none
SlurmdParameters=config_overrides
NodeName=h[1-$count] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONFIG
  printf 'CgroupPlugin=cgroup/v1\n' >"$slurm/cgroup.conf"
  export SLURM_CONF=$slurm/slurm.conf
  slurm_start munged 1 munged --foreground --force --key-file="$slurm/key" --socket="$slurm/munge.socket" \
    --pid-file="$slurm/munged.pid" --log-file="$slurm/munged.own.log" --seed-file="$slurm/munge.seed"
  hosts_wait "munged does not start: $(cat "$slurm/munged.log")" test -S "$slurm/munge.socket"
  slurm_start slurmctld 1 slurmctld -D -i
  for i in $(seq "$count"); do
    mkdir -p "$slurm/spool.h$i"
    slurm_start "slurmd$i" "$i" slurmd -D -N "h$i"
  done
  hosts_wait 'not every node is idle' slurm_all_idle "$count" || {
    tail -n 5 "$slurm"/*.log
    exit 1
  }
}
