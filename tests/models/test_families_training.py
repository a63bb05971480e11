"""Every family trains as transformers' class of it does, with PEFT's adapters too, and alike on every layout."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F

from megatron.data.chat.preprocessing import ChatJob, preprocess_chats
from megatron.data.chat.template import MARKER
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, IndexedDataset
from megatron.weights.huggingface import name_map
from tests import runs
from tests.data.chat.chat_oracle import Oracle
from tests.data.chat.test_conversation import bytes_json
from tests.models.test_families import (
    ROWS,
    VOCABULARY,
    WITH_EXPERTS,
    Fields,
    our_config,
    their_model,
)
from tests.parallel.test_nf4 import quantized
from tests.ranks import RankPools
from tests.tasks import chats

transformers = pytest.importorskip("transformers")

Curve = tuple[list[float], list[float]]
"""Loss and norm of the gradient, step by step."""
# Adam divides a gradient by its size: of a number near zero float32's rounding would be an update of its own
COMMON = (
    "--finetune --eval-iters 0 --split 1,0,0 --lr 3e-4 --lr-decay-style constant --adam-eps 1e-5 --weight-decay 0 "
    "--device cpu --log-interval 1 --attention-dropout 0 --hidden-dropout 0"
)
PP2 = "--pipeline-model-parallel-size 2"


def fields_of(kind: str, **changed: Any) -> Fields:
    """The second row of a family, of a size that two ranks can cut."""
    fields = {**ROWS[kind][1], "num_attention_heads": 4, "hidden_size": 48}
    # a class has names of its own for them
    sizes = {"intermediate_size": 56, "ffn_hidden_size": 56, "num_key_value_heads": 2, "num_kv_heads": 2}
    fields |= {name: size for name, size in sizes.items() if name in fields}
    return {**fields, **changed}


@torch.no_grad()
def start_of(kind: str, fields: Fields) -> Any:
    """transformers' model, whose gradient float32 can follow over ten steps.

    Gemma's norms multiply by 1 + weight. Were that 2, as their_model draws it, a change of every weight by its last
    bit would change the norm of Gemma 3's gradient by 5e-5 within ten steps, in float64 too; so it is 7e-8.
    """
    theirs = their_model(kind, fields)
    for name, parameter in theirs.named_parameters():
        if kind.startswith("gemma") and "norm" in name:
            parameter -= 1.0
    return theirs


def trained(ranks: RankPools, size: int, arguments: str, results: Path) -> Curve:
    assert set(ranks(size)(runs.train_loaded, f"{COMMON} {arguments} --results-dir {results}")) == {""}
    rows = runs.rows(results)
    return [row["lm_loss"] for row in rows], [row["grad_norm"] for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Chats, packed, against transformers' model of each chat alone

DENSE = [kind for kind in ROWS if kind not in WITH_EXPERTS]


def every_second(kinds: Sequence[str]) -> list[Any]:
    """Return parameters of every family, of which -m slow alone has every second one."""
    return [pytest.param(kind, marks=pytest.mark.slow if place % 2 else ()) for place, kind in enumerate(kinds)]


Chat = tuple[Sequence[int], Sequence[int]]
"""Tokens, and 1 for those that are trained."""


def of_chats_alone(model: Any, samples: Sequence[Chat], steps: int) -> Curve:
    """Train transformers' model on all chats a step, one after another."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, eps=1e-5, weight_decay=0.0)
    count = sum(sum(mask[1:]) for _, mask in samples)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = 0.0
        for ids, mask in samples:
            tokens, is_trained = torch.tensor(ids), torch.tensor(mask[1:], dtype=torch.float64)
            logits = model(tokens[None, :-1], use_cache=False).logits[0]
            part = (F.cross_entropy(logits, tokens[1:], reduction="none") @ is_trained.to(logits.dtype)) / count
            part.backward()
            loss += float(part.detach())
        losses.append(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
    return losses, norms


def assert_same(found: Curve, expected: Curve) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    # a square root of many squares, each side in float32: up to 1.3e-6 apart
    assert found[1] == pytest.approx(expected[1], rel=5e-6)
    assert found[0][-1] < found[0][0]


@pytest.fixture(scope="module")
def few_chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Chat]]:
    prefix = chats.write_chats(tmp_path_factory.mktemp("few") / "chats", [5, 30, 11, 2, 19, 8])
    tokens, mask = IndexedDataset(prefix), IndexedDataset(f"{prefix}{LOSS_MASK_SUFFIX}")
    return prefix, [(tokens.read(chat).tolist(), mask.read(chat).tolist()) for chat in range(len(tokens))]


SFT = "--task sft --packing step --micro-batch-size 1 --max-batch-len 64 --seq-length 32"


def some_linear(theirs: Any) -> list[str]:
    """Every second of the names that transformers has for the linear layers of a block."""
    output = theirs.get_output_embeddings()
    linear = (name for name, part in theirs.named_modules() if isinstance(part, torch.nn.Linear) and part is not output)
    return sorted({name.rpartition(".")[2] for name in linear})[::2]


def write_adapted(theirs: Any, folder: Path) -> Any:
    """Save PEFT's adapters of random A and B over a model; return the adapted model."""
    peft = importlib.import_module("peft")
    torch.manual_seed(5)
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules=some_linear(theirs), init_lora_weights=False)
    adapted = peft.get_peft_model(theirs, options)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("kind", every_second(DENSE))
def test_adapters_by_name_train_as_pefts_do(
    kind: str, few_chats: tuple[Path, list[Chat]], ranks: RankPools, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    data, samples = few_chats
    theirs = start_of(kind, fields_of(kind, vocab_size=chats.VOCABULARY))
    theirs.save_pretrained(tmp_path / "base")
    adapted = write_adapted(theirs, tmp_path / "adapter")
    flags = f"{SFT} --load {tmp_path / 'adapter'} --lora-base {tmp_path / 'base'} --data-path {data}"
    flags += " --train-iters 10 --global-batch-size 6"
    assert_same(trained(ranks, 1, flags, tmp_path / "run"), of_chats_alone(adapted, samples, 10))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_neox"])
def test_adapters_of_a_4_bit_base_train_as_pefts_over_its_weights(
    kind: str, few_chats: tuple[Path, list[Chat]], ranks: RankPools, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    data, samples = few_chats
    # whole blocks of 64 weights
    sizes = {"vocab_size": chats.VOCABULARY, "hidden_size": 64, "intermediate_size": 128}
    fields = fields_of(kind, **sizes)
    if "head_dim" in fields:
        fields["head_dim"] = 16
    theirs = start_of(kind, fields)
    theirs.save_pretrained(tmp_path / "base")
    rounded = round_to_4_bits(theirs)
    adapted = write_adapted(theirs, tmp_path / "adapter")
    flags = f"{SFT} --load {tmp_path / 'adapter'} --lora-base {tmp_path / 'base'} --data-path {data}"
    flags += " --train-iters 10 --global-batch-size 6 --quantize-base nf4"
    assert rounded == 3 * (4 if kind == "gpt_neox" else 7)
    assert_same(trained(ranks, 1, flags, tmp_path / "run"), of_chats_alone(adapted, samples, 10))


@torch.no_grad()
def round_to_4_bits(theirs: Any) -> int:
    """Give the linear layers of transformers' model the weights that nf4 makes of them; return their number."""
    mapped, parameters, count = name_map(our_config(theirs)), dict(theirs.named_parameters()), 0
    for name, parts in mapped.parts.items():
        shard = mapped.shards[name]
        if not name.startswith("layers.") or len(shard.shape) != 2:
            continue
        full = torch.empty(shard.shape)
        chunks = [(parameters[part.name][begin:end], view) for part in parts for begin, end, view in part.chunks(full)]
        for rows, view in chunks:
            view.copy_(rows.reshape(view.shape))
        rounded = quantized(shard, full.clone()).dense(torch.float32)
        assert not torch.equal(rounded, full)
        full.copy_(rounded)
        for rows, view in chunks:
            rows.copy_(view.reshape(rows.shape))
        count += len(parts)
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Chats as the templates of these families write them

TEMPLATES = {
    "mistral": (
        "mistral_common_apache2/v7", "mistral_common_apache2/v1_spm", "mistral_common_apache2/v3_spm",
        "axolotl_apache2/mistral_v1", "axolotl_apache2/mistral_v2v3", "chujiezheng_mit/mistral-instruct",
        "instructlab_apache2/mistral_tmpl",
    ),
    "qwen2": ("chujiezheng_mit/qwen2.5-instruct", "axolotl_apache2/qwen_25"),
    "qwen3": ("axolotl_apache2/qwen3",),
    "granite": (
        "chujiezheng_mit/granite-3.0-instruct", "instructlab_apache2/ibm_generic_tmpl",
        "instructlab_apache2/ibm_legacy_tmpl",
    ),
    "phi3": ("chujiezheng_mit/phi-3", "axolotl_apache2/phi_4"),
    "gemma2": ("axolotl_apache2/gemma",),
    "gemma3_text": ("chujiezheng_mit/gemma-it",),
    "falcon": ("chujiezheng_mit/falcon-instruct",),
}  # fmt: skip
OFTEN = ("mistral", "qwen3", "granite", "gemma2")
PAIRS = [(kind, name) for kind, names in TEMPLATES.items() for name in names]


def messages_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]


CHATS = [
    messages_of("What is two plus two?", "It is 4."),
    messages_of("Hi", "Hello!", "Name a colour.", "Blue, or green."),
    messages_of("Say nothing.", "\u2026"),
]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*pair, marks=() if pair[1] == TEMPLATES[pair[0]][0] and pair[0] in OFTEN else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_packed_chats_on_a_pipeline_train_what_transformers_template_says(
    kind: str, name: str, ranks: RankPools, test_data: Path, tmp_path: Path
) -> None:
    """Losses are those of transformers' model on each chat alone, written and masked by transformers' rendering."""
    path = test_data / "chat_templates" / f"{name}.jinja"
    template, special = path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}
    markers = dict.fromkeys([*special.values(), *(found[0] for found in MARKER.finditer(template))])
    content = bytes_json(tuple(markers))
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    job = ChatJob(
        inputs=(str(tmp_path / "chats.jsonl"),), output_prefix=str(tmp_path / "data" / "chats"),
        tokenizer=str(tmp_path), chat_template=str(path),
    )  # fmt: skip
    preprocess_chats(job)

    tokenizer = tokenizers.Tokenizer.from_str(content)
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    samples: list[Chat] = []
    for chat in CHATS:
        text, spans = Oracle(template, special).trained(chat, special["eos_token"])
        read = reader(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [int(any(a < end and start < b for start, end in spans)) for a, b in read["offset_mapping"]]
        samples.append((read["input_ids"], [0, *mask[1:]]))
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        said = [text[start:end] for start, end in spans]
        assert len(said) == len(answers)
        assert all(answer in span for answer, span in zip(answers, said, strict=True))
    fields = fields_of(kind, vocab_size=tokenizer.get_vocab_size())
    theirs = start_of(kind, fields)
    theirs.save_pretrained(tmp_path / "theirs")
    length = max(len(ids) for ids, _ in samples)
    flags = f"--task sft --packing step --micro-batch-size 1 --max-batch-len {2 * length} --seq-length {length}"
    flags += f" --data-path {job.output_prefix} --load {tmp_path / 'theirs'} --train-iters 3 --global-batch-size 3"
    assert_same(trained(ranks, 2, f"{flags} {PP2}", tmp_path / "run"), of_chats_alone(theirs, samples, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Layouts

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp zero1": (2, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
    "pp2": (2, PP2),
    "tp2 pp2": (4, f"--tensor-model-parallel-size 2 {PP2}"),
    # one sample a rank: a router's balance is that of one microbatch of all data-parallel ranks
    "zero1": (2, "--zero-stage 1 --micro-batch-size 1"),
    "zero3": (2, "--zero-stage 3 --micro-batch-size 1"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "text", vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def single(
    dataset: Path, ranks: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, Curve]]:
    """Of a family: the flags of a run over its weights, and its curve on one process."""

    @functools.cache
    def run(kind: str) -> tuple[str, Curve]:
        folder = tmp_path_factory.mktemp(kind)
        start_of(kind, fields_of(kind)).save_pretrained(folder / "theirs")
        flags = f"--load {folder / 'theirs'} --data-path {dataset} --train-iters 6 --seq-length 24"
        flags += " --micro-batch-size 2 --global-batch-size 4"
        return flags, trained(ranks, 1, flags, folder / "one")

    return run


def every_family_on_a_layout() -> list[Any]:
    """Of two layouts each family's in turn; -m slow: every family on every layout."""
    in_turn = ("tp2 sp zero1", "tp2 pp2")
    return [
        pytest.param(kind, layout, marks=() if layout == in_turn[place % 2] else pytest.mark.slow)
        for place, kind in enumerate(ROWS)
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("kind", "layout"), every_family_on_a_layout())
def test_layouts_train_as_one_process_does(
    kind: str, layout: str, single: Callable[[str], tuple[str, Curve]], ranks: RankPools, tmp_path: Path
) -> None:
    (flags, expected), (size, more) = single(kind), LAYOUTS[layout]
    losses, norms = trained(ranks, size, f"{flags} {more}", tmp_path / "run")
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norms == pytest.approx(expected[1], rel=1e-5 if kind in WITH_EXPERTS else 1e-6)
