"""From text to a model that chats: pretrained as in the quickstart, fine-tuned on real chats, given to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.data import preprocess_data, train_tokenizer
from megatron.data.chat.preprocessing import ChatJob, preprocess_chats
from tests import runs
from tests.ranks import RankPools
from tests.tasks import chats

MODEL = (
    "--architecture llama --position-embedding-type rope --num-layers 2 --hidden-size 64 --ffn-hidden-size 172 "
    "--num-attention-heads 4 --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --adam-beta2 0.95 --weight-decay 0.1"
)
ANSWER_TOKENS = 24


def make_base_model(ranks: RankPools, corpus: Path, folder: Path) -> Path:
    """The quickstart's recipe: a tokenizer, a dataset, a pretrained model, for transformers."""
    words = ["--input", str(corpus), "--vocab-size", "512", "--output-dir", str(folder / "tokenizer")]
    assert train_tokenizer.main(words) in (None, 0)
    words = ["--input", str(corpus), "--output-prefix", str(folder / "text"), "--append-eod", "--workers", "1"]
    words += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    assert preprocess_data.main(words) == 0
    flags = (
        f"{MODEL} --data-path {folder / 'text_text_document'} --seq-length 128 --micro-batch-size 8 --vocab-size 512 "
        f"--global-batch-size 16 --train-iters 60 --lr 5e-3 --eval-iters 0 --save {folder / 'pretrained'} "
        f"--save-hf {folder / 'base'} --tokenizer-type HFTokenizer --tokenizer-model {folder / 'tokenizer'}"
    )
    assert set(ranks(2)(runs.train, flags)) == {""}
    return folder / "base" / "samples_960"


def test_a_pretrained_model_learns_to_chat(ranks: RankPools, test_data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    base = make_base_model(ranks, test_data / "quickstart.jsonl", tmp_path)
    tokenizer = tmp_path / "chat_tokenizer"
    totals = preprocess_chats(
        ChatJob(
            inputs=(str(test_data / "sft_messages.jsonl"),),
            output_prefix=str(tmp_path / "chats"),
            tokenizer=str(base),
            chat_template="chatml",
            max_length=257,
            add_special_tokens=True,
            tokenizer_output=str(tokenizer),
        )
    )
    assert totals.vocab_size == 514  # <|im_start|> and <|im_end|> are new
    saved, models = tmp_path / "saved", tmp_path / "models"
    model = f"{MODEL} --vocab-size 514 --seq-length 256 --micro-batch-size 1"
    flags = (
        f"{model} --task sft --num-epochs 2 --load {base} --data-path {tmp_path / 'chats'} --split 9,1,0 "
        f"--max-batch-len 1024 --global-batch-size 16 --lr 3e-3 --lr-warmup-iters 3 --eval-interval 1000 "
        f"--eval-iters 9 --save {saved} --save-at-epoch --save-hf {models} --tokenizer-type HFTokenizer "
        f"--tokenizer-model {tokenizer} --results-dir {tmp_path / 'results'}"
    )
    assert set(ranks(2)(runs.train, flags)) == {""}
    first, *_, last = [row["lm_loss"] for row in runs.rows(tmp_path / "results", "valid")]
    assert last < 0.75 * first  # on the answers of held-out chats

    exports = sorted(models.glob("samples_*"), key=lambda path: int(path.name.removeprefix("samples_")))
    assert len(exports) == 2  # one an epoch
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exports[-1])
    theirs.generation_config.eos_token_id = None  # as many tokens from each
    encoder = transformers.AutoTokenizer.from_pretrained(exports[-1])
    with (test_data / "sft_messages.jsonl").open(encoding="utf-8") as file:
        messages = [json.loads(next(file))["messages"] for _ in range(3)]
    prompts: list[list[int]] = []
    for asked in messages:
        rendered: Any = encoder.apply_chat_template(asked[:1], add_generation_prompt=True, return_dict=True)
        prompts.append(rendered["input_ids"])
    (answers,) = ranks(1)(
        chats.greedy, f"{model} --data-path none --train-iters 1 --load {saved} --finetune", prompts, ANSWER_TOKENS
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
        assert answer == expected[len(prompt) :].tolist()
