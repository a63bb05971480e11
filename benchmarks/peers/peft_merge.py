"""PEFT's side of benchmarks/merge_adapter.py: load a base and an adapter, merge, and save.

    python benchmarks/peers/peft_merge.py BASE ADAPTER SAVE

Runs in an interpreter with PEFT and transformers, and without this project.
"""

from __future__ import annotations

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, save = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(save, max_shard_size="1GB")
