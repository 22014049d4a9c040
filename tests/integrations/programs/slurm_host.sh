#!/bin/bash
# slurm_host.sh HOST FOLDER: one of the two hosts of a Slurm cluster, in namespaces of its own (tests/programs/distributed/hosts.sh
# and `unshare --pid --mount-proc`). host-a is the controller, too, and runs all FOLDER/*.sbatch, one after another; the output
# of each is in NAME.out, and each writes NAME.status. FOLDER/why has the reason if the cluster does not start.
set -u
host=$1 folder=$2
export SLURM_CONF=$folder/slurm.conf
# hosts.sh sets these for one host, and Slurm would take them to the other one.
unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME
# slurmd wants to see a file system here, even if it limits nothing.
mount -t tmpfs none /sys/fs/cgroup
mkdir -p "$folder/spool-$host"

controller() {
    mkdir -p "$folder/state" "$folder/munge"
    head -c 1024 /dev/urandom >"$folder/munge/key"
    chmod 400 "$folder/munge/key"
    munged --foreground --force --key-file "$folder/munge/key" --socket "$folder/munge/socket" --pid-file "$folder/munge/pid" \
        --seed-file "$folder/munge/seed" >"$folder/munge.log" 2>&1 &
    echo CgroupPlugin=cgroup/v1 >"$folder/cgroup.conf"
    cat >"$folder/slurm.conf" <<TEXT
ClusterName=test
SlurmctldHost=host-a(10.77.0.1)
AuthInfo=socket=$folder/munge/socket
SlurmUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
NodeName=host-a NodeAddr=10.77.0.1 CPUs=4
NodeName=host-b NodeAddr=10.77.0.2 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
TEXT
    until [ -S "$folder/munge/socket" ]; do kill -0 $! || return 1; sleep 0.1; done
    slurmctld -D >"$folder/slurmctld.out" 2>&1 &
}

jobs_of_folder() {
    local job limit=$((SECONDS + 60))
    until [ "$(sinfo --noheader --format %T 2>/dev/null)" = idle ]; do
        [ $SECONDS -lt $limit ] || { tail -n 5 "$folder"/*.log >"$folder/why"; return; }
        sleep 0.2
    done
    # `sbatch --wait` looks rarely whether a job has ended, so each job writes its exit status itself.
    for job in "$folder"/*.sbatch; do
        sbatch --output "${job%.sbatch}.out" --time 3 "$job" || continue
        limit=$((SECONDS + 200))
        until [ -e "${job%.sbatch}.status" ] || [ $SECONDS -ge $limit ]; do sleep 0.1; done
    done
}

if [ "$host" = host-a ]; then
    controller || cp "$folder/munge.log" "$folder/why"
    touch "$folder/begun"
fi
until [ -e "$folder/begun" ]; do sleep 0.1; done
if [ ! -e "$folder/why" ]; then
    slurmd -D -N "$host" >"$folder/slurmd-$host.out" 2>&1 &
    [ "$host" = host-b ] || jobs_of_folder
fi
[ "$host" = host-b ] || touch "$folder/ended"
# The other processes of this host end with its first one.
until [ -e "$folder/ended" ]; do sleep 0.1; done
