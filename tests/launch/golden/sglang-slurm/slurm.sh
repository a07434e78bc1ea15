#!/bin/bash
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# It needs an API key in SGLANG_API_KEY.
#SBATCH --job-name=qwen3-6-27b-fp8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
: "${SGLANG_API_KEY:?set an API key}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head
echo "serving on http://$head:8000"
srun sglang serve \
  --model-path Qwen/Qwen3.6-27B-FP8 \
  --host 0.0.0.0 \
  --port 8000 \
  --context-length 32768 \
  --max-running-requests 256 \
  --kv-cache-dtype fp8_e4m3 \
  --reasoning-parser qwen3 \
  --tool-call-parser qwen3_coder \
  --speculative-algorithm EAGLE \
  --speculative-num-steps 3 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 4 \
  --enable-metrics \
  --api-key "$SGLANG_API_KEY"
