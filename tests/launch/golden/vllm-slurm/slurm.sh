#!/bin/bash
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# It needs an API key in VLLM_API_KEY.
#SBATCH --job-name=qwen3-6-27b-fp8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
: "${VLLM_API_KEY:?set an API key}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head
echo "serving on http://$head:8000"
srun vllm serve Qwen/Qwen3.6-27B-FP8 \
  --host 0.0.0.0 \
  --port 8000 \
  --max-model-len 32768 \
  --max-num-seqs 256 \
  --kv-cache-dtype fp8 \
  --reasoning-parser qwen3 \
  --tool-call-parser qwen3_coder \
  --enable-auto-tool-choice \
  --no-enable-prefix-caching \
  --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
