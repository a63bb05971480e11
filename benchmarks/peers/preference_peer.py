"""TRL's side of benchmarks/preference.py: requests and answers, one JSON line each.

Runs in an interpreter with TRL, PEFT and transformers and without this project (see benchmarks/alternating.py), so it
imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

STATE: dict[str, Any] = {}
"""The trainer and its optimizer, between requests."""


def versions() -> str:
    return f"trl {version('trl')}, peft {version('peft')}, transformers {version('transformers')}"


def build(tokenizer: str, shapes: dict[str, Any], rows: str, max_length: int, threads: int, lr: float) -> int:
    """Make a DPOTrainer with adapters over these rows, and return the number that it keeps."""
    import datasets  # type: ignore[import-not-found]
    from peft import LoraConfig
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    if theirs.pad_token_id is None or theirs.pad_token_id >= shapes["vocab_size"]:
        theirs.pad_token = theirs.eos_token
    LlamaForCausalLM(LlamaConfig(**shapes)).save_pretrained(folder)
    arguments = DPOConfig(
        output_dir=folder, max_length=max_length, use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False
    )
    adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = LlamaForCausalLM.from_pretrained(folder)
    data = _read(rows)
    trainer = DPOTrainer(model, args=arguments, train_dataset=data, processing_class=theirs, peft_config=adapters)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    STATE.update(trainer=trainer, trained=trained, optimizer=torch.optim.AdamW(trained, lr=lr, fused=True))
    return len(trainer.train_dataset)


def _read(rows: str) -> Any:
    import datasets

    with open(rows, encoding="utf-8") as lines:
        return datasets.Dataset.from_list([json.loads(line) for line in lines])


def tokenize(tokenizer: str, rows: str, ids: str) -> dict[str, float]:
    """Tokenize rows as the trainer does before training, and write the ids. Seconds of the tokenization alone."""
    from transformers import AutoTokenizer

    trainer, data, theirs = STATE["trainer"], _read(rows), AutoTokenizer.from_pretrained(tokenizer)
    trainer._tokenizer = theirs
    trainer.args.max_length = None  # or it would leave out long prompts
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = trainer._prepare_dataset(data, theirs, trainer.args, "train")
    taken = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    parts = [row[f"{part}_ids"] for row in found for part in ("prompt", "chosen", "rejected")]
    np.savez(ids, ids=np.concatenate(parts), lengths=[len(part) for part in parts])
    return taken


def step(pairs: list[int]) -> dict[str, float]:
    """Train on these pairs, padded, in one microbatch: forward, reference, backward, clipping and AdamW."""
    trainer = STATE["trainer"]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    batch = trainer.data_collator([trainer.train_dataset[pair] for pair in pairs])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(STATE["trained"], 1.0)
    STATE["optimizer"].step()
    STATE["optimizer"].zero_grad()
    cpu_s = time.process_time() - began_cpu_s
    return {"loss": float(loss.detach()), "wall_s": time.perf_counter() - began_s, "cpu_s": cpu_s}


REQUESTS = {function.__name__: function for function in (versions, build, tokenize, step)}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": REQUESTS[request["request"]](**request["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
