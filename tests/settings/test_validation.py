"""Rules between options: each names the value, the rule and the remedy."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.options.config import Config, broken, on_device
from megatron.options.dependents import slow_mode
from megatron.options.flags import divisors
from megatron.options.stored import from_dict
from megatron.settings import command_line, validation
from megatron.settings import rules as rules_of_devices
from megatron.settings.command_line import load_config, read_command_line
from megatron.settings.validation import check, idle
from tests.settings.faults import VALID, faults_of

# One case breaks exactly one rule: (flags, ranks, what is wrong with its value, the remedy)
INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
BROKEN_RULES: dict[str, tuple[str, int, str, str]] = {
    "ranks": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        "2 x pipeline_model",
        "multiple of 4",
    ),
    "an account in an address": (
        "--mlflow-experiment a --mlflow-tracking-uri http://name:secret@localhost",
        1,
        "mlflow_tracking_uri",
        "MLFLOW_TRACKING",
    ),
    "tags": ("--mlflow-experiment a --mlflow-tags plain", 1, "mlflow_tags=plain is not NAME=VALUE", "write it so"),
    "edited code of ranks that stay": (
        "--save s --keep-healthy-ranks --loss tests.tasks.test_task_page:with_gamma",
        1,
        "loss=tests.tasks.test_task_page:with_gamma is code of your own, of which ranks that",
        "leave keep_healthy_ranks out",
    ),
    "compilers of ranks that stay": (
        "--save s --keep-healthy-ranks --torch-compile",
        1,
        "keep_healthy_ranks keeps no process that has threads at work, and the compiler of torch_compile",
        "leave one of the two out",
    ),
    "replicas": (
        "--tensor-model-parallel-size 2 --zero-stage 1 --num-replicas 3",
        8,
        "num_replicas=3 does not divide the 4 data-parallel ranks",
        "use 1, 2 or 4",
    ),
    "replicas of experts": (
        "--architecture llama --position-embedding-type rope --num-experts 4 --expert-model-parallel-size 2 "
        "--zero-stage 1 --num-replicas 4",
        4,
        "num_replicas=4 does not divide the 2 ranks with the same experts",
        "use 1 or 2",
    ),
    "label smoothing of a loss of one's own": (
        "--loss tests.tasks.test_task_page:with_gamma --label-smoothing-factor 0.1",
        1,
        "label_smoothing_factor=0.1 is not read by loss=tests.tasks.test_task_page:with_gamma",
        "leave it out",
    ),
    "label smoothing of pairs": (
        "--task preference --label-smoothing-factor 0.1",
        1,
        "label_smoothing_factor=0.1 is not read by the loss of task=preference",
        "leave it out; its pairs have label_smoothing",
    ),
    "upcycled adapters": (
        "--num-experts 4 --load dense --upcycle --lora-rank 4",
        1,
        "upcycle makes a new model, and lora_rank=4 trains adapters",
        "upcycle first",
    ),
    "an extension of experts' start": (
        "--num-experts 4 --load dense --upcycle --extend-context --position-embedding-type rope",
        1,
        "upcycle and extend_context each start from another model",
        "one after the other",
    ),
    "an extension of learned positions": (
        "--load runs --extend-context --position-embedding-type learned",
        1,
        "position_embedding_type=learned: a learned table has no rows for longer texts",
        "leave it out",
    ),
    "a stage without iterations": (
        "--seq-length-stages 8 2 16",
        1,
        "seq_length_stages=8 2 16 has a length without its iterations",
        "give pairs of LENGTH and ITERATIONS",
    ),
    "a stage that is no part": (
        "--seq-length 64 --seq-length-stages 24 2",
        1,
        "rows of 24, which must divide seq_length=64, the last",
        "use 1, 2, 4, 8, 16 or 32",
    ),
    "a stage that ranks cannot share": (
        "--seq-length 64 --seq-length-stages 1 2 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "to divide a length of seq_length_stages=1",
        "turn it off",
    ),
    "stages of chats": (
        "--task sft --seq-length 64 --seq-length-stages 32 2",
        1,
        "seq_length_stages=32 2 cuts samples of running text, but task=sft",
        "train in several runs",
    ),
    "stages of a teacher": (
        "--seq-length 64 --seq-length-stages 32 2 --teacher README.md "
        "--loss examples/distillation/losses.py:forward_kl",
        1,
        "seq_length_stages=32 2 cuts samples, but a teacher has numbers for whole ones",
        "leave one out",
    ),
    "decoupled end": (
        "--lr 1e-3 --decoupled-lr 1e-4 --decoupled-min-lr 2e-4",
        1,
        "decoupled_min_lr=0.0002 is above decoupled_lr=0.0001",
        "lower it",
    ),
    "muP of two factors": (
        "--mup-base-hidden-size 16 --mup-base-head-size 4 --attention-multiplier 0.1",
        1,
        "mup_base_head_size=4 and attention_multiplier=0.1 both set the factor of the scores",
        "keep one",
    ),
    "muP of SGD": (
        "--mup-base-hidden-size 16 --optimizer sgd",
        1,
        "mup_base_hidden_size=16 scales the learning rates and weight decay of AdamW alone, not those of optimizer=sgd",
        "use adamw",
    ),
    "muP of adapters": (
        "--mup-base-hidden-size 16 --lora-rank 2",
        1,
        "of a model's own matrices, not of adapters",
        "give logits_scaling=4",
    ),
    "paged decay": (
        "--optimizer paged_adamw_32bit --no-decoupled-weight-decay",
        1,
        "paged_adamw_32bit has decoupled weight decay only",
        "use adam",
    ),
    "Muon of pieces": ("--optimizer muon --zero-stage 3", 2, "needs whole matrices", "use zero_stage 0, 1 or 2"),
    "Muon on the host": (
        "--optimizer muon --zero-stage 2 --offload-optimizer",
        2,
        "offload_optimizer does not support optimizer=muon",
        "use adamw",
    ),
    "Muon of factors": ("--optimizer muon --lora-rank 4", 1, "an adapter's factors are not", "leave out lora_rank"),
    "clip behind norms": (
        "--architecture qwen3 --position-embedding-type rope --kv-channels 16 --qk-clip",
        1,
        "which the norms of architecture=qwen3 bring back to their size",
        "leave qk_clip out",
    ),
    "clip of frozen weights": ("--qk-clip --lora-rank 4", 1, "weights that lora_rank=4 freezes", "leave one"),
    "clip of a frozen layer": (
        "--qk-clip --freeze layers.0.*",
        1,
        "weights that freeze=layers.0.* freezes",
        "leave one",
    ),
    "flex heads": (
        "--attention-backend flex --attention-dropout 0 --kv-channels 8 --device cuda",
        1,
        "attention_backend=flex takes heads of 16 channels or more, but these have 8",
        "use sdpa",
    ),
    "plain kernels": (
        "--kernels plain --attention-backend flex --device cuda --attention-dropout 0",
        1,
        "kernels=plain attends by torch's SDPA, but attention_backend=flex",
        "use kernels=auto, or sdpa",
    ),
    "recompute modules": (
        "--recompute-granularity selective --recompute-modules mlp,mlpact",
        1,
        "recompute_modules=mlpact does not name a part of a layer",
        "use core_attn, layernorm, mlp, mlp_act",
    ),
    "evaluations' engine": (
        "--eval-graphs --zero-stage 2",
        1,
        "the passes of DeepSpeed's pipeline",
        "use zero_stage 0 or 1",
    ),
    "evaluations' device": ("--eval-graphs --device cpu", 1, "replays HPU graphs, but device=cpu", "leave it out"),
    "weights of no folder": ("--finetune", 1, "finetune=True is about the weights in load", "give a folder"),
    "a step of no folder": ("--ckpt-step 0", 1, "ckpt_step=0 is about the weights in load", "give a folder"),
    "a format of no folder": ("--universal-checkpoint", 1, "universal_checkpoint=True is about", "give a folder"),
    "stages": ("--pipeline-model-parallel-size 4 --num-layers 3", 4, "larger than num_layers=3", "use at most 3"),
    "partition's name": (
        "--pipeline-model-parallel-size 2 --num-layers 5 --pipeline-partition-method 3;2",
        2,
        "pipeline_partition_method='3;2' is unknown",
        "or a number of layers for each stage, such as 3,2",
    ),
    "partition's sum": (
        "--pipeline-model-parallel-size 2 --num-layers 5 --pipeline-partition-method 3,1",
        2,
        "pipeline_partition_method=3,1 adds up to 4; 2 stages need a number",
        "use 3,2, or cost",
    ),
    "partition's length": (
        "--pipeline-model-parallel-size 4 --num-layers 4 --pipeline-partition-method 4",
        4,
        "pipeline_partition_method=4 has 1 number; 4 stages need a number",
        "use 1,1,1,1, or cost",
    ),
    "partition of chunks": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--pipeline-partition-method 2,2",
        2,
        "2,2 has 2 numbers; 4 chunks (2 stages x num_virtual_stages_per_pipeline_rank=2) need a number",
        "use 1,1,1,1, or cost",
    ),
    "partition's empty stage": (
        "--pipeline-model-parallel-size 4 --num-layers 4 --pipeline-partition-method 2,0,0,3",
        4,
        "pipeline_partition_method=2,0,0,3 adds up to 5 and leaves stage 1 without a layer",
        "use 1,1,1,1, or cost",
    ),
    "heads": (
        "--tensor-model-parallel-size 3 --num-query-groups 1 --kv-channels 48 --ffn-hidden-size 96",
        3,
        "tensor_model_parallel_size=3 does not divide num_attention_heads=4",
        "use 1, 2 or 4",
    ),
    "kv heads": (
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --num-query-groups 6 --hidden-size 96",
        4,
        "neither divides num_query_groups=6",
        "use 1, 2, 3 or 6, or a multiple of 6",
    ),
    "kv channels": (
        "--tensor-model-parallel-size 4 --num-query-groups 2 --kv-channels 3",
        4,
        "does not divide num_query_groups x head size = 6",
        "use 1, 2, 3 or 6",
    ),
    "ffn": (
        "--tensor-model-parallel-size 4 --ffn-hidden-size 90",
        4,
        "does not divide ffn_hidden_size=90",
        "use 1, 2, 3, 5, 6, 9,",
    ),
    "sequence parallel": (
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 126",
        4,
        "to divide seq_length=126",
        "or turn it off",
    ),
    "shared rows": (
        "--context-parallel-size 4 --seq-length 126",
        4,
        "context_parallel_size=4 needs seq_length=126 to be a multiple of 8",
        "use 120 or 128",
    ),
    "shared rows with sequence parallel": (
        "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 60 "
        "--attention-dropout 0",
        8,
        "context_parallel_size=2 and sequence_parallel with tensor_model_parallel_size=4 need seq_length=60",
        "use 56 or 64",
    ),
    "ranks of shared rows": (
        "--context-parallel-size 3 --seq-length 60 --attention-dropout 0",
        4,
        "x context_parallel_size=3 x pipeline_model_parallel_size=1 = 3 does not divide the 4 ranks",
        "start a multiple of 3 ranks",
    ),
    "experts over shared rows": (
        "--context-parallel-size 2 --num-experts 4 --expert-model-parallel-size 4 --attention-dropout 0",
        2,
        "does not divide the 2 context x data-parallel ranks",
        "use 1 or 2",
    ),
    "pipeline without engine": (
        "--pipeline-model-parallel-size 2 --no-pipeline-parallel",
        2,
        "no_pipeline_parallel runs without a pipeline, but pipeline_model_parallel_size=2",
        "set it to 1",
    ),
    "pipeline with zero 2": ("--pipeline-model-parallel-size 2 --zero-stage 2", 2, "zero_stage=2 runs", "set it to 1"),
    "pipeline with offload": (
        "--pipeline-model-parallel-size 2 --zero-stage 1 --offload-optimizer",
        2,
        "offload_optimizer runs",
        "set it to 1",
    ),
    "offload param": ("--offload-param --zero-stage 2", 1, "needs zero_stage=3, not 2", "turn it off"),
    "offload optimizer": ("--offload-optimizer", 1, "needs zero_stage 1, 2 or 3, not 0", "turn it off"),
    "offload sgd": ("--offload-optimizer --zero-stage 1 --optimizer sgd", 1, "optimizer=sgd", "use adamw or adam"),
    "head size": ("--hidden-size 66", 1, "num_attention_heads=4 does not divide hidden_size=66", "or set kv_channels"),
    "query groups": ("--num-query-groups 3", 1, "num_query_groups=3 does not divide", "use 1, 2 or 4"),
    "rope pairs": (
        "--position-embedding-type rope --kv-channels 15",
        1,
        "even head size, not 15",
        "change hidden_size or kv_channels",
    ),
    "nothing rotated": (
        "--position-embedding-type rope --kv-channels 12 --rotary-percent 0.05",
        1,
        "rotates none of the 12 channels",
        "raise it",
    ),
    "yarn's bounds": (
        "--position-embedding-type rope --rope-scaling-factor 8 --rope-scaling-type yarn --rope-scaling-beta-slow 32",
        1,
        "rope_scaling_beta_slow=32.0 must be below",
        "lower it",
    ),
    "longrope's factors": (
        "--position-embedding-type rope --rope-scaling-factor 8 --rope-scaling-type longrope "
        "--rope-scaling-short-factors 1 1 1 1 1 1 1 1 --rope-scaling-long-factors 2",
        1,
        "rope_scaling_long_factors has 1 numbers",
        "one for each of 8 frequencies",
    ),
    "shared norm": ("--architecture llama --shared-norm", 1, "shared_norm=True needs", "not architecture=llama"),
    "rope factors": (
        "--position-embedding-type rope --rope-scaling-factor 8 --rope-scaling-low-freq-factor 4",
        1,
        "rope_scaling_low_freq_factor=4.0 must be below",
        "lower it",
    ),
    "positions": (
        "--max-position-embeddings 64",
        1,
        "seq_length=128 is larger than max_position_embeddings=64",
        "enlarge",
    ),
    "precisions": ("--bf16 --fp16", 1, "bf16 and fp16 are both on", "turn one of them off"),
    "accumulation": ("--grad-accum-dtype bf16", 1, "the precision is fp32", "set fp32"),
    "reduction": ("--bf16 --grad-reduce-dtype fp16", 1, "grad_reduce_dtype=fp16 must be fp32 or", "unset it"),
    "loss scale": ("--fp16 --min-loss-scale 100000", 1, "min_loss_scale=100000.0 is above", "lower it"),
    "flex": (
        "--attention-backend flex --attention-dropout 0 --device cpu",
        1,
        "runs on cuda only, but device=cpu",
        "use auto or sdpa",
    ),
    "offload to the same memory": (
        "--offload-activations --device cpu",
        1,
        "which that of device=cpu is",
        "leave it out",
    ),
    "fused sdpa": ("--attention-backend fused_hpu --device cuda", 1, "runs on hpu only, but device=cuda", "use auto"),
    "global batch": ("--micro-batch-size 3", 2, "global_batch_size=8 is not a multiple of", "use a multiple of 6"),
    "ramp-up start": (
        "--train-iters none --train-samples 999 --rampup-batch-size 16 8 100",
        1,
        "16 8 100 starts above global_batch_size=8",
        "start lower",
    ),
    "ramp-up end": (
        "--train-iters none --train-samples 999 --rampup-batch-size 2 4 100",
        1,
        "never reaches global_batch_size=8: the difference 6",
        "change one of the three",
    ),
    "ramp-up steps": (
        "--train-iters none --train-samples 999 --rampup-batch-size 2 2 100",
        4,
        "passes through 2, which is not a multiple of micro_batch_size x data-parallel size = 1 x 4",
        "use multiples of 4 for start and increment, or a data-parallel size of 1 or 2",
    ),
    "odd loss scale": (
        "--fp16 --initial-loss-scale 1000",
        1,
        "initial_loss_scale=1000.0 must be a power of two",
        "change",
    ),
    "fast softmax with a bias": (
        "--device hpu --use-fast-softmax --position-embedding-type alibi",
        1,
        "with the causal mask alone, but position_embedding_type=alibi",
        "turn it off",
    ),
    "fast softmax under a window": (
        "--device hpu --use-fast-softmax --attention-window 4",
        1,
        "with the causal mask alone, but attention_window=4",
        "turn it off",
    ),
    "capped scores in FusedSDPA": (
        "--device hpu --attention-backend fused_hpu --attention-softcap 50",
        1,
        "attention_backend=fused_hpu has no soft cap",
        "use auto",
    ),
    "windows of layers": (
        "--attention-window 4 --attention-window-pattern 2 0",
        1,
        "attention_window_pattern=2 0 must be 1 (a window) or 0",
        "correct it",
    ),
    "fast softmax of documents": (
        "--device hpu --use-fast-softmax --reset-attention-mask --eod-token-id 0",
        1,
        "with the causal mask alone, but documents or chats packed",
        "turn it off",
    ),
    "length twice": ("--train-samples 900", 1, "train_samples=900 and train_iters=100 are both given", "keep one"),
    "no length": ("--train-iters none", 1, "neither train_samples nor train_iters is given", "give one"),
    "no length of sft": (
        "--task sft --train-iters none",
        1,
        "none of train_samples, train_iters, num_epochs is given",
        "give one",
    ),
    "length of sft thrice": (
        "--task sft --train-samples 9 --num-epochs 2",
        1,
        "train_samples=9 and train_iters=100 and num_epochs=2 are all given",
        "keep one",
    ),
    "few chats": (
        "--task sft --global-batch-size 2",
        4,
        "global_batch_size=2 is less than the data-parallel",
        "4 or more",
    ),
    "short rows": ("--task sft --max-batch-len 64", 1, "max_batch_len=64 is less than seq_length=128", "raise it"),
    "rows of a step": ("--task sft --micro-batch-size 2", 1, "packing=step makes each microbatch one row", "use 1"),
    "rows cut": (
        "--task sft --max-batch-len 129 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "to divide max_batch_len=129",
        "use 1, 3 or 43",
    ),
    "ramp of chats": (
        "--task sft --rampup-batch-size 2 2 100 --train-samples 100 --train-iters none",
        1,
        "rampup_batch_size is for task=pretrain",
        "leave it out",
    ),
    "short training": ("--train-iters none --train-samples 7", 1, "train_samples=7 is less than", "train longer"),
    "warm-up twice": ("--lr-warmup-samples 8 --lr-warmup-iters 1", 1, "lr_warmup_samples=8 and", "keep one"),
    "decay twice": ("--lr-decay-samples 80 --lr-decay-iters 10", 1, "lr_decay_samples=80 and", "keep one"),
    "wsd twice": (
        "--lr-decay-style WSD --lr-wsd-decay-samples 80 --lr-wsd-decay-iters 10",
        1,
        "lr_wsd_decay_samples=80 and lr_wsd_decay_iters=10",
        "keep one",
    ),
    "warm-up twice in steps": ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", 1, "lr_warmup_iters=1 and", "keep one"),
    "warm-up init": ("--lr-warmup-init 1", 1, "lr_warmup_init=1.0 is above lr=0.0001", "lower it"),
    "evaluation of nothing": ("--skip-train --load runs --eval-iters 0", 1, "but eval_iters=0", "set the number"),
    "evaluation of no model": ("--skip-train", 1, "skip_train evaluates a checkpoint, but load", "give its folder"),
    "answers of an evaluation": (
        "--generate-prompts p.txt --skip-train --load runs",
        1,
        "p.txt is for a training",
        "leave one out",
    ),
    "answers of an interleaved pipeline": (
        f"--generate-prompts p.txt {INTERLEAVED}",
        2,
        "num_virtual_stages_per_pipeline_rank=2",
        "leave one out",
    ),
    "tasks in an interleaved pipeline": (
        f"--lm-eval-tasks quiz {INTERLEAVED}",
        2,
        "lm_eval_tasks=quiz needs a pipeline stage in one piece",
        "or evaluate the run's checkpoints",
    ),
    "best of nothing": (
        "--keep-best --save runs --eval-iters 0",
        1,
        "keep_best compares validations",
        "set the number",
    ),
    "best of an evaluation": (
        "--early-stopping-patience 1 --skip-train --load runs",
        1,
        "patience=1 is for a training",
        "leave one out",
    ),
    "best by an unknown metric": (
        "--keep-best --save runs --best-metric ppl",
        1,
        "best_metric=ppl is not a metric of task=pretrain",
        "one of loss",
    ),
    "best without direction": (
        "--early-stopping-patience 1 --task preference --best-metric rewards/accuracies",
        1,
        "best_metric=rewards/accuracies does not say which direction is better",
        "min or max",
    ),
    "two schedules": (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        1,
        "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both on",
        "turn one of them off",
    ),
    "constant weight decay": (
        "--end-weight-decay 1",
        1,
        "end_weight_decay=1.0 needs weight_decay_incr_style",
        "choose",
    ),
    "start of a constant weight decay": (
        "--start-weight-decay 1",
        1,
        "start_weight_decay=1.0 needs weight_decay_incr_style",
        "choose",
    ),
    "memory of another device": (
        "--device-memory h100 --device cpu",
        1,
        "device_memory=h100 is that of a cuda device, but device=cpu",
        "or give GiB",
    ),
    "unknown memory": ("--device-memory much", 1, "'much' is neither a known device", "such as 80"),
    "weight decay from nowhere": (
        "--weight-decay-incr-style linear --end-weight-decay 1",
        1,
        "weight_decay_incr_style=linear needs start_weight_decay and end_weight_decay",
        "give both",
    ),
    "falling weight decay": (
        "--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0",
        1,
        "start_weight_decay=1.0 is above end_weight_decay=0.0",
        "lower it",
    ),
    "warm-up of the ramp-up": (
        "--train-iters none --train-samples 999 --rampup-batch-size 2 2 100 --lr-warmup-iters 200",
        1,
        "warm-up of 1452 samples must be shorter than the decay of 999",
        "lower lr_warmup_iters=200",
    ),
    "min lr": ("--min-lr 1", 1, "min_lr=1.0 is above lr=0.0001", "lower it"),
    "long warm-up": (
        "--lr-warmup-iters 100",
        1,
        "warm-up of 800 samples must be shorter than the decay of 800",
        "lower lr_warmup_iters=100",
    ),
    "wsd part": ("--lr-decay-style WSD", 1, "lr_decay_style=WSD needs", "give one"),
    "long wsd part": (
        "--lr-decay-style WSD --lr-wsd-decay-iters 60 --lr-warmup-iters 50",
        1,
        "the warm-up of 400 samples and WSD's last part of 480 do not fit into 800",
        "shorten lr_wsd_decay_*",
    ),
    "split": ("--split 0,0", 1, "split='0,0'", "such as 949,50,1"),
    "split of four": ("--split 1,1,1,1", 1, "split='1,1,1,1'", "such as 949,50,1"),
    "split of nothing": ("--split nan", 1, "split='nan'", "such as 949,50,1"),
    "no data": ("--data-path", 1, "data_path is not given", "tools/preprocess_data.py"),
    "odd blend": ("--data-path 1 a 2", 1, "data_path='1 a 2'", "WEIGHT PREFIX pairs"),
    "weights for some": ("--data-path 1 a b c", 1, "data_path='1 a b c'", "weights above 0"),
    "a split's odd blend": ("--train-data-path 1 a 2", 1, "train_data_path='1 a 2'", "WEIGHT PREFIX"),
    "two kinds of paths": (
        "--data-path d --valid-data-path v",
        1,
        "data_path and valid_data_path are both given",
        "keep data_path and split",
    ),
    "no training data": ("--test-data-path t", 1, "is given without train_data_path", "give it"),
    "weight of nothing": ("--data-path 0 a 1 b", 1, "data_path='0 a 1 b'", "weights above 0"),
    "no end of document": ("--reset-attention-mask", 1, "reset_attention_mask needs", "give eod_token_id"),
    "gpt2 files": (
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        1,
        "tokenizer_type=GPT2BPETokenizer needs vocab_file and merge_file",
        "give both",
    ),
    "hf file": ("--tokenizer-type HFTokenizer", 1, "tokenizer_type=HFTokenizer needs tokenizer_model", "give the file"),
    "eod of nothing": ("--eod-token E", 1, "eod_token=E needs a tokenizer", "give tokenizer_type"),
    "eod twice": (
        "--tokenizer-type Llama2Tokenizer --tokenizer-model m --eod-token E --eod-token-id 2",
        1,
        "eod_token=E and eod_token_id=2",
        "give one of them",
    ),
    "eod": ("--eod-token-id 50257", 1, "eod_token_id=50257 is outside vocab_size=50257", "below 50257"),
    "profile": ("--profile", 1, "results_dir, which is not given", "turn profile off"),
    "universal step": (
        "--load runs --universal-checkpoint --ckpt-step 20",
        1,
        "ckpt_step=20 selects one of our own checkpoints",
        "set load to the folder of that iteration",
    ),
    "exports alone": (
        "--save-hf models",
        1,
        "save_hf=models is exported from the checkpoints in save",
        "give a folder",
    ),
    "exports among checkpoints": (
        "--save runs --save-hf ./runs/",
        1,
        "save_hf=./runs/ is the same folder as save",
        "use another",
    ),
    "profile steps": (
        "--profile --results-dir out --profile-step-start 4 --profile-step-end 4",
        1,
        "profile_step_end=4, the step before which the trace ends",
        "must be above profile_step_start=4",
    ),
    "profile ranks": (
        "--profile --results-dir r --profile-ranks 0 2",
        2,
        "profile_ranks=0 2 must name ranks of this",
        "use 0 to 1",
    ),
    "rollback unsaved": ("--spike-action rollback", 1, "but save is not given", "give a folder"),
    "rollback of weights": (
        "--spike-action rollback --save runs --no-save-optim",
        1,
        "needs the optimizer's state",
        "turn one of them off",
    ),
    "long watch": (
        "--watchdog-timeout-s 90 --distributed-timeout-minutes 1",
        1,
        "watchdog_timeout_s=90 is above distributed_timeout_minutes=1 (60 s)",
        "lower it, or raise",
    ),
    "short watch": ("--watchdog-timeout-s 0.5", 1, "watchdog_timeout_s=0.5 leaves no time", "use 1 or more"),
    "no such rates": ("--rates b200", 1, "rates 'b200' not found", "the machines are"),
    "rates of another device": (
        "--rates gaudi2 --device cuda",
        1,
        "those of hpu, but the run is for cuda",
        "give rates",
    ),
    "recheck of zero 3": (
        "--recheck-interval 9 --zero-stage 3",
        2,
        "recheck_interval=9 does not run with",
        "leave one",
    ),
    "graphs of layers that draw": (
        "--device cuda --cuda-graph-impl local --attention-dropout 0",
        1,
        "cuda_graph_impl=local does not run with hidden_dropout=0.1",
        "leave one of them out",
    ),
    "graphs of layers on a CPU": (
        "--device cpu --cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0",
        1,
        "cuda_graph_impl=local replays CUDA graphs, but device=cpu",
        "leave it out",
    ),
    "recheck of one rank": ("--recheck-interval 9", 1, "recheck_interval=9 compares data-parallel ranks", "use more"),
    "straggler of zero 3": ("--log-straggler --zero-stage 3", 1, "with zero_stage=3 every layer waits", "turn it off"),
    "compiled straggler": (
        "--log-straggler --torch-compile --tensor-model-parallel-size 2 --context-parallel-size 2",
        4,
        "waits of tensor_model_parallel_size=2 and context_parallel_size=2 within a layer, which it cannot see",
        "turn one of the two off",
    ),
}


def faults_of_case(name: str) -> list[str]:
    words, world_size, _, _ = BROKEN_RULES[name]
    if words == "--data-path":
        return command_line.check(from_dict({"training": {"train_iters": 100}}), world_size)
    given = VALID if "data-path" not in words else VALID[2:]
    return faults_of([*given, *words.split()], world_size)


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_a_broken_rule_is_named_with_value_and_remedy(name: str) -> None:
    _, _, wrong, remedy = BROKEN_RULES[name]
    faults = faults_of_case(name)
    assert len(faults) == 1, faults
    assert wrong in faults[0]
    assert remedy in faults[0]


# flags that do nothing alone -> what they need, and the flags that give it
IDLE: dict[str, tuple[str, str]] = {
    "--no-fused-sdpa-recompute --device cpu": ("device=hpu", "--device hpu"),
    "--seq-length 64 --seq-length-stages 32 2 --train-iters 2": ("more than 16 samples", "--train-iters 3"),
    "--save-interval-in-mins 5": ("save", "--save runs"),
    "--no-async-save": ("save", "--save runs"),
    "--keep-last 3": ("save", "--save runs"),
    "--save-samples 100": ("save", "--save runs"),
    "--save-at-epoch": ("save", "--save runs --task sft"),
    "--save runs --save-at-epoch": ("a task that counts epochs, such as task=sft", "--task sft"),
    "--save-hf-keep-last 2": ("exports in folders of their own", "--save runs --save-hf models"),
    "--save runs --save-hf models --save-hf-last-only --save-hf-keep-last 2": (
        "exports in folders of their own",
        "--no-save-hf-last-only",
    ),
    "--save-hf-last-only": ("save_hf", "--save runs --save-hf models"),
    "--no-save-optim": ("save", "--save runs"),
    "--verify-checkpoint": ("save", "--save runs"),
    "--save-retain-interval 500": ("save", "--save runs"),
    "--no-load-fallback": ("load or save", "--save runs"),
    "--no-load-optim": ("load", "--load runs"),
    "--no-load-rng": ("load", "--load runs"),
    "--allow-data-change": ("load or save", "--save runs"),
    "--initial-loss-scale 1024": ("fp16", "--fp16"),
    "--min-loss-scale 2": ("fp16", "--fp16"),
    "--loss-scale-window 100": ("fp16", "--fp16"),
    "--hysteresis 1": ("fp16", "--fp16"),
    "--lr-wsd-decay-samples 80": ("lr_decay_style=WSD", "--lr-decay-style WSD"),
    "--lr-wsd-decay-iters 10": ("lr_decay_style=WSD", "--lr-decay-style WSD"),
    "--lr-wsd-decay-style linear": ("lr_decay_style=WSD", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    "--mup-base-head-size 8": ("mup_base_hidden_size", "--mup-base-hidden-size 32"),
    "--decoupled-min-lr 1e-5": ("decoupled_lr", "--decoupled-lr 1e-3"),
    "--sgd-momentum 0.5": ("optimizer=sgd", "--optimizer sgd"),
    "--muon-lr 0.02": ("optimizer=muon", "--optimizer muon"),
    "--muon-momentum 0.9": ("optimizer=muon", "--optimizer muon"),
    "--no-muon-nesterov": ("optimizer=muon", "--optimizer muon"),
    "--muon-scale-mode shape_scaling": ("optimizer=muon", "--optimizer muon"),
    "--muon-extra-scale-factor 1.0": ("optimizer=muon", "--optimizer muon"),
    "--muon-num-ns-steps 6": ("optimizer=muon", "--optimizer muon"),
    "--muon-coefficient-type quintic": ("optimizer=muon", "--optimizer muon"),
    "--muon-ns-dtype fp32": ("optimizer=muon", "--optimizer muon"),
    "--qk-clip-alpha 0.3": ("qk_clip", "--qk-clip"),
    "--qk-clip-threshold 50": ("qk_clip", "--qk-clip"),
    "--optimizer sgd --no-decoupled-weight-decay": ("an Adam", "--optimizer adam"),
    "--rotary-base 500000": ("position_embedding_type=rope", "--position-embedding-type rope"),
    "--rope-scaling-low-freq-factor 2": (
        "rope_scaling_factor",
        "--position-embedding-type rope --rope-scaling-factor 8",
    ),
    "--rope-scaling-high-freq-factor 8": (
        "rope_scaling_factor",
        "--position-embedding-type rope --rope-scaling-factor 8",
    ),
    "--rope-scaling-original-length 64": (
        "rope_scaling_factor",
        "--position-embedding-type rope --rope-scaling-factor 8",
    ),
    "--rope-scaling-type yarn": ("rope_scaling_factor", "--position-embedding-type rope --rope-scaling-factor 8"),
    "--position-embedding-type rope --rope-scaling-factor 8 --rope-scaling-beta-fast 16": (
        "rope_scaling_type=yarn",
        "--rope-scaling-type yarn",
    ),
    "--position-embedding-type rope --rope-scaling-factor 8 --rope-scaling-attention-factor 1.5": (
        "rope_scaling_type=yarn or longrope",
        "--rope-scaling-type yarn",
    ),
    "--vocab-file v": ("tokenizer_type=GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer --merge-file m"),
    "--merge-file m": ("tokenizer_type=GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer --vocab-file v"),
    "--tokenizer-model m": ("tokenizer_type", "--tokenizer-type HFTokenizer"),
    "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m --tokenizer-model m": (
        "a tokenizer_type that reads it",
        "--save runs --save-hf models",
    ),
    "--tokenizer-type NullTokenizer --tokenizer-model m": (
        "a tokenizer_type that reads it",
        "--tokenizer-type HFTokenizer",
    ),
    "--task sft --data-cache-path c": ("index arrays, which task=sft does not write", "--task pretrain"),
    "--moe-z-loss-coeff 0.1": ("num_experts", "--num-experts 2 --architecture mixtral --position-embedding-type rope"),
    "--num-epochs 2": ("a task that counts epochs, such as task=sft", "--task sft --train-iters none"),
    "--packing none": ("task=sft", "--task sft"),
    "--max-batch-len 256": ("task=sft", "--task sft"),
    "--task sft --packing none --max-batch-len 256": ("packing=step", "--packing step"),
    "--task sft --packing dataset --bucketing octave": ("packing=step or none", "--packing step"),
    "--task sft --packing dataset --compile-ahead": ("packing=step or none", "--packing step"),
    "--task sft --bucketing off --buckets-per-octave 4": ("bucketing=octave", "--bucketing octave"),
    "--task sft --num-buckets 4": ("bucketing=optimal", "--bucketing optimal"),
    "--profile-step-start 9": ("profile", "--profile --results-dir out"),
    "--profile-step-end 13": ("profile", "--profile --results-dir out"),
    "--profile-ranks 0 1": ("profile", "--profile --results-dir out"),
    "--pytorch-profiler-collect-callstack": ("profile", "--profile --results-dir out"),
    "--profile --results-dir out --profile-step-start 101 --profile-step-end 102": (
        "so many steps",
        "--train-iters 101",
    ),
    "--loss-options gamma=2": ("loss", "--loss tests.tasks.test_task_page:with_gamma"),
    "--wandb-exp-name n": ("wandb_project", "--wandb-project p"),
    "--mlflow-run-name n": ("mlflow_experiment", "--mlflow-experiment p"),
    "--mlflow-tags a=b": ("mlflow_experiment", "--mlflow-experiment p"),
    "--mlflow-tracking-uri http://h": ("mlflow_experiment", "--mlflow-experiment p"),
    "--rope-scaling-factor 8": ("position_embedding_type=rope", "--position-embedding-type rope"),
    "--device cpu --use-fast-softmax": ("device=hpu", "--device hpu"),
    "--device hpu --attention-backend sdpa --no-fused-sdpa-recompute": (
        "attention_backend=fused_hpu",
        "--attention-backend auto",
    ),
    "--device hpu --kernels plain --no-fused-sdpa-recompute": ("attention_backend=fused_hpu", "--kernels auto"),
    "--no-fp8-wgrad": ("fp8_format", "--fp8-format hybrid --device hpu --bf16"),
    "--fp8-format hybrid --device cuda --bf16 --fp8-interval 2": ("fp8_recipe=delayed", "--device hpu"),
    "--fp8-format e4m3 --fp8-recipe rowwise --device cuda --bf16 --no-fp8-amax-reduce": (
        "fp8_recipe=delayed or tensorwise",
        "--fp8-recipe tensorwise",
    ),
    "--num-replicas 2": ("ZeRO's shards", "--zero-stage 1"),
    "--recheck-action log": ("recheck_interval", "--recheck-interval 100"),
    "--tiktoken-pattern r50k": ("tokenizer_type=TikTokenizer", "--tokenizer-type TikTokenizer --tokenizer-model m"),
    "--task sft --reset-position-ids --eod-token-id 0": ("documents", "--task pretrain"),
    "--skip-train --load runs --device cuda --cuda-graph-impl local": (
        "a training",
        "--no-skip-train --hidden-dropout 0 --attention-dropout 0 --position-embedding-type learned",
    ),
    "--blend-weights documents": ("weights in the data's path", "--data-path 1 x 2 y"),
    "--task sft --data-path 1 x 2 y --blend-weights documents": ("documents", "--task pretrain"),
}


@pytest.mark.parametrize("flags", IDLE)
def test_an_option_that_would_do_nothing_is_named_in_a_warning(flags: str) -> None:
    needed, given = IDLE[flags]
    of_two_ranks = ("--profile-ranks", "--num-replicas", "--recheck-action")
    world_size = 2 if any(flag in flags for flag in of_two_ranks) else 1
    (warning,) = idle(load_config([*VALID, *flags.split()], world_size))
    assert f" has no effect without {needed}" in warning
    assert idle(load_config([*VALID, *flags.split(), *given.split()], world_size)) == []


def test_a_rate_of_embedding_and_head_that_are_frozen_is_named() -> None:
    flags = "--architecture llama --position-embedding-type rope --decoupled-lr 1e-3".split()
    assert idle(load_config([*VALID, *flags], 1)) == []
    for frozen in ("--freeze embedding.*", "--lora-rank 4"):
        (warning,) = idle(load_config([*VALID, *flags, *frozen.split()], 1))
        assert warning.startswith("decoupled_lr=0.001 has no effect, as word embedding and output layer are not")


def test_validations_without_data_are_named_and_the_presets_interval_goes_with_them() -> None:
    (warning,) = idle(load_config([*VALID, "--split", "1,0,0", "--eval-iters", "3"], 1))
    assert warning.startswith("eval_iters=3 has no effect, as split=1,0,0 holds out nothing; hold out a share")
    (warning,) = idle(load_config("--config tiny_llama --train-data-path x --train-samples 6400".split(), 1))
    assert warning == "eval_iters=4 has no effect, as there is no valid_data_path; give it, or set eval_iters=0"
    command = read_command_line("--config tiny_llama --data-path x --eval-iters 0".split())
    assert command.notes == ["eval_iters=0 replaces the preset's eval_interval=50"]
    assert idle(command.config) == []


@pytest.mark.parametrize(
    ("device", "flags", "lazy", "is_slow"),
    [
        ("hpu", "", False, False),
        ("hpu", "--no-torch-compile", False, True),
        ("hpu", "--no-torch-compile", True, False),
        ("hpu", "--fp8-format hybrid --bf16", False, True),
        ("cpu", "--no-torch-compile", False, False),
    ],
)
def test_an_hpu_that_compiles_nothing_is_warned_of(device: str, flags: str, lazy: bool, is_slow: bool) -> None:
    config = on_device(load_config([*VALID, *flags.split(), "--device", device]), device, lazy=lazy)
    assert [line.split(",")[0] for line in slow_mode(config, lazy=lazy)] == (
        ["HPU runs each operator by itself"] if is_slow else []
    )


def test_every_rule_is_broken_by_a_case() -> None:
    """A rule is a `yield` of its message, or a row of `broken`; its place is (file, line)."""
    rules: set[tuple[str, int]] = set()
    rows: dict[tuple[str, int], list[int]] = {}
    for module in (validation, rules_of_devices):
        file = str(module.__file__)
        for node in nodes_of_checks(file):
            if isinstance(node, ast.Yield):
                rules.add((file, node.lineno))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "broken":
                rows[file, node.lineno] = [row.lineno for row in node.args]
                rules |= {(file, row.lineno) for row in node.args}
    reached: set[tuple[str, int]] = set()
    reached_rows: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/megatron/settings/" not in frame.f_code.co_filename:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    def noted(*given: tuple[object, str]) -> list[str]:
        caller = sys._getframe(1)
        file = caller.f_code.co_filename
        for line, (is_broken, _) in zip(rows.get((file, caller.f_lineno), ()), given, strict=False):
            if is_broken:
                reached_rows.add((file, line))
        return broken(*given)

    def traced(config: Config, world_size: int) -> list[str]:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return check(config, world_size)
        finally:
            sys.settrace(before)

    with pytest.MonkeyPatch.context() as patch:
        for module in (validation, rules_of_devices):
            patch.setattr(module, "broken", noted)
        patch.setattr(command_line, "check", traced)
        for name in BROKEN_RULES:
            faults_of_case(name)
    of_tables = {(file, line) for (file, _), lines in rows.items() for line in lines}
    assert len(rules) > 60
    # the trace sees each line of a table, broken or not
    assert sorted(of_tables - reached_rows) == [], "rows of `broken` that no case of BROKEN_RULES breaks"
    assert sorted(rules - of_tables - reached) == [], "rules that no case of BROKEN_RULES reaches"


TESTED_ELSEWHERE = {
    "check_fp8": "tests/training/test_fp8_runs.py",
    "check_fp8_device": "tests/training/test_fp8_runs.py",
    "_check_delayed": "tests/training/test_fp8_runs.py",
    "_check_fp8_products": "tests/training/test_fp8_scaled_runs.py",
    "check_schedule": "tests/training/test_schedules.py",
}


def nodes_of_checks(file: str) -> Iterator[ast.AST]:
    for function in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef) or function.name in TESTED_ELSEWHERE:
            continue
        if function.name.removeprefix("_").startswith("check_"):
            yield from ast.walk(function)


@given(
    st.fixed_dictionaries(
        {
            "num_layers": st.integers(1, 12),
            "num_attention_heads": st.integers(1, 16),
            "num_query_groups": st.none() | st.integers(1, 16),
            "ffn_hidden_size": st.none() | st.integers(1, 300),
        }
    ),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 64),
)
def test_check_accepts_exactly_the_layouts_that_divide(
    model: dict[str, Any], tp: int, pp: int, world_size: int
) -> None:
    config = from_dict(
        {
            "model": {"hidden_size": 16 * model["num_attention_heads"], **model},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "training": {"global_batch_size": 64 * 63 * 61, "train_samples": 10**9},
            "data": {"data_path": ["corpus"]},
        }
    )
    heads, kv = config.model.num_attention_heads, config.model.num_kv_heads
    fits = world_size % (tp * pp) == 0 and pp <= config.model.num_layers
    fits &= heads % kv == 0 and heads % tp == 0 and config.model.ffn_size % tp == 0
    fits &= kv % tp == 0 or (tp % kv == 0 and kv * 16 % tp == 0)
    fits &= config.training.global_batch_size % max(1, world_size // (tp * pp)) == 0
    assert (check(config, world_size) == []) == fits


@given(st.integers(1, 2000), st.integers(1, 64))
def test_divisors_divide(number: int, up_to: int) -> None:
    offered = [int(word) for word in re.findall(r"\d+", divisors(number, up_to))]
    assert offered == [d for d in range(1, up_to + 1) if number % d == 0 and d <= number]
