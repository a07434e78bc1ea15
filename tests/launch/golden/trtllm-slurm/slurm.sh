#!/bin/bash
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# trtllm checks no API key: keep it behind a proxy that does.
#SBATCH --job-name=qwen3-32b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head
echo "serving on http://$head:8000"
srun trtllm-serve Qwen/Qwen3-32B \
  --host 0.0.0.0 \
  --port 8000 \
  --tp_size 2 \
  --config serve.yaml
