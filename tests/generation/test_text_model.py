"""megatron.api.load: the texts, stop strings and chats are those of transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.api
from megatron.data.index.indexed import DataError
from megatron.generation.text_model import TextModel
from megatron.options.config import ConfigError
from tests.generation.commands import write_model
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

TEXTS = ["The quick", "é 東京", "x" * 40]
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return megatron.api.load(folder)


def expected(folder: Path, prompt: Any, num_new: int = 20, **options: Any) -> list[str]:
    """The texts of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = [256]
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        ends.append(tokenizer.convert_tokens_to_ids("<|end|>"))
    found = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=ends, **options
    )
    return [tokenizer.decode(each[ids.shape[1] :], skip_special_tokens=True) for each in found]


def test_texts_and_chats_are_those_of_transformers(folder: Path, model: TextModel) -> None:
    texts = [expected(folder, prompt)[0] for prompt in [*TEXTS, CHAT]]
    assert len(set(texts)) == 4
    assert model.generate(TEXTS[0], max_new_tokens=20) == texts[0]
    assert model.generate(CHAT, max_new_tokens=20) == texts[3]
    assert model.generate([*TEXTS, CHAT], max_new_tokens=20, batch_size=2) == texts
    assert model.generate("Hello", as_chat=True, system="Be brief.", max_new_tokens=20) == texts[3]
    assert model.generate([], max_new_tokens=20) == []


def test_a_stop_string_ends_a_text_and_is_not_part_of_it(folder: Path, model: TextModel) -> None:
    text = expected(folder, TEXTS[0])[0]
    stop = text[5:7]
    assert text.index(stop) == 5
    for given in (stop, [stop], ("nowhere", stop)):
        assert model.generate(TEXTS[0], max_new_tokens=20, stop=given) == text[:5]


def test_beams_give_all_their_texts(folder: Path, model: TextModel) -> None:
    beams = expected(folder, TEXTS[0], 8, num_beams=3, num_return_sequences=3)
    assert len(set(beams)) == 3
    assert model.generate(TEXTS[0], max_new_tokens=8, num_beams=3, num_samples=3) == beams
    assert model.generate(TEXTS[:1], max_new_tokens=8, num_beams=3) == beams[:1]


def texts_of(folder: str, **options: Any) -> Any:
    """In a rank."""
    return megatron.api.load(folder, device="cpu", **options).generate([*TEXTS, CHAT], max_new_tokens=20)


@pytest.mark.parametrize("options", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}])
def test_every_rank_has_the_texts(ranks: RankPools, folder: Path, options: dict[str, Any]) -> None:
    texts = [expected(folder, prompt)[0] for prompt in [*TEXTS, CHAT]]
    assert ranks(2)(texts_of, str(folder), **options) == [texts, texts]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_new": 3}, "max_new is not an option here; did you mean max_new_tokens"),
        ({"logprobs": 3}, "logprobs is not an option here"),
        ({"max_new_tokens": 0, "top_k": -1}, r"(?s)max_new_tokens=0: input should be greater than 0.*top_k=-1: "),
        ({"top_k": 5}, "top_k=5 has no effect on the most probable token"),
        ({"system": "Be brief."}, "system is for chats, and the prompt is a text"),
        ({"stop_token_ids": [300]}, "stop_token_ids has the id 300, but the model's vocabulary has the ids 0 to 263"),
    ],
)
def test_wrong_options_are_named(model: TextModel, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        model.generate("a", **options)


def test_wrong_prompts_and_folders_are_named(model: TextModel, folder: Path) -> None:
    with pytest.raises(DataError, match=r"^the prompt is empty"):
        model.generate("")
    with pytest.raises(DataError, match=r"^prompt 1: the prompt is empty"):
        model.generate(["a", ""])
    with pytest.raises(DataError, match="messages end with the assistant's"):
        model.generate([{"role": "assistant", "content": "a"}])
    with pytest.raises(DataError, match=r"^prompt 0: prompt is int"):
        model.generate([3])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="precision=bf17: input should be 'auto', 'fp32'"):
        megatron.api.load(folder, precision="bf17")
    with pytest.raises(ConfigError, match="ckpt_stp is not an option here; did you mean ckpt_step"):
        megatron.api.load(folder, ckpt_stp=3)


@pytest.mark.parametrize("wrong", ["</s>", [256, "2"], True, -1, 2.0])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_that_is_not_an_id_is_named(tmp_path: Path, wrong: Any, file: str) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / file).write_text(json.dumps(({} if file[0] == "g" else config) | {"eos_token_id": wrong}))
    with pytest.raises(DataError, match=r"has eos_token_id=.* is not an id; write the number of the token"):
        megatron.api.load(tmp_path).generate("a")


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_each_of_the_models_final_ids_ends_a_text(tmp_path: Path, folder: Path, file: str) -> None:
    """Those of config.json where there is no generation_config.json, as in transformers."""
    write_model(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = expected(folder, "The quick", 8)[0]
    last = tokenizer(text).input_ids[4]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    content = config if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(content | {"eos_token_id": [256, last]}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokenizer("The quick", return_tensors="pt").input_ids
    found = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert 0 < len(found) < 8
    assert megatron.api.load(tmp_path).generate("The quick", max_new_tokens=8) == tokenizer.decode(found)
