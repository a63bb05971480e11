"""Tasks of lm-eval over local data, and a small model with a tokenizer, as transformers writes both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

SENTENCES = (
    "The river runs down from the mountain and into the sea.",
    "A small boat lies on the sand, and the boy sleeps in it.",
    "Snow fell all night, so the road to the village was closed.",
    "Bread, butter and a cup of tea stood on the table by the window.",
    "The old teacher read the letter twice and put it into the fire.",
    "Rain is likely in the north; the south stays warm and dry.",
)
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
num_fewshot: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/rolling.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
ANSWERS = """
task: local_answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/choice.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12, do_sample: false}
num_fewshot: 0
metric_list: [{metric: exact_match}]
"""
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TASKS = {"local_choice": CHOICE, "local_rolling": ROLLING, "local_answers": ANSWERS}


def write_tasks(folder: Path) -> list[str]:
    """Write the tasks and their data; return the paths of the tasks."""
    words = [sentence.split() for sentence in SENTENCES]
    choices = [
        {
            "question": " ".join(sentence[:5]),
            "choices": [" ".join(other[index % 3 : index % 3 + 3]) for other in words[:4]],
            "answer": index % 4,
        }
        for index, sentence in enumerate(words * 2)
    ]
    rolling = [{"text": " ".join(SENTENCES[: count + 1])} for count in range(4)]
    for name, rows in (("choice", choices), ("rolling", rolling)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder)))
    return [str(folder / f"{name}.yaml") for name in TASKS]


def write_model(folder: Path, num_layers: int = 2) -> Path:
    """Write a Llama with a byte-level tokenizer that begins each text with <s>."""
    transformers: Any = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder
