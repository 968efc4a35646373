"""A host of a Slurm cluster: ``slurm_host.py KEEPER HOST FOLDER WORDS...`` enters a network namespace and runs words.

The host has a name, ``node0`` or ``node1``, and its own /etc/hosts, which names all of them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

from helpers import hosts

NEW_MOUNTS, NEW_NAME = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS
CONFIG = """\
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def write_config(folder: Path, num_hosts: int) -> None:
    """The files that all hosts share."""
    nodes = "\n".join(f"NodeName=node{host} NodeAddr={hosts.address(host)} CPUs=1" for host in range(num_hosts))
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, nodes=nodes))
    names = [f"{hosts.address(host)} node{host}" for host in range(num_hosts)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    (folder / "state").mkdir()


def main() -> None:
    keeper, host, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    hosts.enter(keeper, host)
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS | NEW_NAME):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"node{host}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", folder / "hosts", "/etc/hosts"], check=True)
    # Without GLOO_SOCKET_IFNAME, which a job would inherit on both hosts: gloo takes the address of the host's name.
    os.execvpe(sys.argv[4], sys.argv[4:], os.environ | {"SLURM_CONF": str(folder / "slurm.conf")})


if __name__ == "__main__":
    main()
