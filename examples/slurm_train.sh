#!/bin/bash
# A training run on the nodes of a Slurm job, which goes on after Slurm has requeued it:
#
#   sbatch --nodes 4 --gpus-per-node 8 examples/slurm_train.sh --out runs/first model=mlp data=digits run.epochs=20
#
# Words after the script are those of `ddpcore train`, and flags of sbatch replace the lines below. On nodes without
# GPUs, set RANKS to the number of ranks of a node. PORT must be free on the first node.
#SBATCH --job-name=ddpcore
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-gpu}" --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-endpoint "$head:${PORT:-29400}" \
    -m ddpcore train --resume "$@"
