#!/bin/bash
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# It needs an API key in VLLM_API_KEY.
#SBATCH --job-name=qwen3-6-27b-fp8
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
: "${VLLM_API_KEY:?set an API key}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head
echo "serving on http://$head:8000"
# the first task serves HTTP, the others join it
srun bash -c '
if [ "$SLURM_PROCID" -eq 0 ]; then
  exec vllm serve Qwen/Qwen3.6-27B-FP8 --host 0.0.0.0 --port 8000 --tensor-parallel-size 8 --pipeline-parallel-size 2 --max-model-len 32768 --max-num-seqs 256 --kv-cache-dtype fp8 --reasoning-parser qwen3 --tool-call-parser qwen3_coder --enable-auto-tool-choice --no-enable-prefix-caching --speculative-config '\''{"method":"mtp","num_speculative_tokens":3}'\'' --nnodes 2 --node-rank "$SLURM_PROCID" --master-addr "$head" --master-port 29500
else
  exec vllm serve Qwen/Qwen3.6-27B-FP8 --host 0.0.0.0 --port 8000 --tensor-parallel-size 8 --pipeline-parallel-size 2 --max-model-len 32768 --max-num-seqs 256 --kv-cache-dtype fp8 --reasoning-parser qwen3 --tool-call-parser qwen3_coder --enable-auto-tool-choice --no-enable-prefix-caching --speculative-config '\''{"method":"mtp","num_speculative_tokens":3}'\'' --nnodes 2 --node-rank "$SLURM_PROCID" --master-addr "$head" --master-port 29500 --headless
fi'
