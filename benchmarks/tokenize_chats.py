"""Chats to tokens and masks, the whole command: tools/preprocess_chat.py against InstructLab's data_process.

    MEGATRON_TEST_DATA=... python benchmarks/tokenize_chats.py --peer-python peer/bin/python
        [--repeat 8] [--rounds 3] [--workers 2]

The chats are sft_messages.jsonl of MEGATRON_TEST_DATA as it is (1,298 conversations, 1.6 MB), and again with all of it
`--repeat` times. The tokenizer is GPT-2's with the two markers of the ChatML template, the same folder for both sides,
and so is the template. Both are timed as commands, from start to exit, in turn, with as many processes: theirs is
`python -m instructlab.training.data_process`, which shows samples too. The steady state is what each further
conversation takes: the long file's time without the short one's. Processor time is that of the command and all its
children.

The ids and the masks must be equal, conversation by conversation. Exit status 1 if they are not, or if a ratio of the
long file is below 10.

The peer's environment: `python -m venv peer; peer/bin/pip install instructlab-training torch`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tokenizers

from benchmarks.alternating import alternate, peer_environment, positive, quotients, spread
from megatron.data.chat.template_presets import PRESETS
from megatron.data.index.indexed import IndexedDataset

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 10.0
LONGEST = 1 << 20
"""Tokens that the peer keeps of a conversation at most: all."""

Side = Callable[[Path], float]


def write_model(folder: Path, data: Path) -> None:
    """GPT-2's tokenizer with ChatML's markers, as both sides load it; the peer also needs a config.json."""
    preset = PRESETS["chatml"]
    tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizers" / "gpt2" / "tokenizer.json"))
    tokenizer.add_special_tokens(list(preset.special_tokens))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": preset.template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))


class Commands:
    """Both commands on a file of chats, timed."""

    def __init__(self, folder: Path, peer_python: str, workers: int):
        self._folder, self._workers = folder, workers
        self._model = folder / "model"
        # a link stays one: it is what makes an environment
        self._peer = os.path.abspath(peer_python)
        self.processor_s: dict[tuple[str, str], list[float]] = {}

    def ours(self, chats: Path) -> float:
        command = [sys.executable, str(ROOT / "tools" / "preprocess_chat.py"), "--input", str(chats)]
        command += ["--tokenizer-model", str(self._model), "--output-prefix", str(self._folder / f"ours_{chats.stem}")]
        return self._time("ours", chats, [*command, "--workers", str(self._workers)], dict(os.environ))

    def theirs(self, chats: Path) -> float:
        command = [self._peer, "-I", "-m", "instructlab.training.data_process", "--data_path", str(chats)]
        command += ["--data_output_path", str(self._folder / f"theirs_{chats.stem}"), "--max_seq_len", str(LONGEST)]
        command += ["--model_name_or_path", str(self._model), "--num_cpu_procs", str(self._workers)]
        # a cache of its own each time: what an earlier round tokenized must not be found again
        with tempfile.TemporaryDirectory(dir=self._folder) as cache:
            environment = {**peer_environment(), "HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
            return self._time("theirs", chats, command, environment)

    def _time(self, side: str, chats: Path, command: list[str], environment: dict[str, str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began_s = time.perf_counter()
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True)
        elapsed_s = time.perf_counter() - began_s
        if done.returncode:
            raise SystemExit(f"error: {' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.processor_s.setdefault((side, chats.stem), []).append(used_s)
        return elapsed_s

    def num_different(self, chats: Path) -> tuple[int, int]:
        """Conversations that both kept, and how many of them differ in an id or in what is trained."""
        tokens = IndexedDataset(self._folder / f"ours_{chats.stem}")
        mask = IndexedDataset(self._folder / f"ours_{chats.stem}_loss_mask")
        with (self._folder / f"theirs_{chats.stem}" / "data.jsonl").open() as lines:
            rows = [json.loads(line) for line in lines]
        if len(rows) != len(tokens):
            raise SystemExit(f"error: ours has {len(tokens)} conversations, theirs {len(rows)}")
        different = 0
        for i, row in enumerate(rows):
            trained = [int(label != -100) for label in row["labels"]]
            different += (row["input_ids"], trained) != (tokens.read(i).tolist(), mask.read(i).tolist())
        return len(rows), different


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with InstructLab's data_process.")
    parser.add_argument("--peer-python", required=True, help="interpreter with instructlab-training")
    parser.add_argument("--repeat", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--workers", type=positive, default=2)
    options = parser.parse_args()
    if options.repeat < 2:
        parser.error("--repeat must be at least 2: the steady state is what the repetitions take")
    data = Path(os.environ.get("MEGATRON_TEST_DATA") or parser.error("set MEGATRON_TEST_DATA"))
    is_good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", data)
        content = (data / "sft_messages.jsonl").read_bytes()
        commands = Commands(folder, options.peer_python, options.workers)
        walls: dict[tuple[str, str], list[float]] = {}
        for stem, times in (("once", 1), ("repeated", options.repeat)):
            chats = folder / f"{stem}.jsonl"
            chats.write_bytes(content * times)
            sides = {"ours": partial(commands.ours, chats), "theirs": partial(commands.theirs, chats)}
            measured = alternate(sides, options.rounds, warm_up=False)
            walls |= {(side, stem): seconds for side, seconds in measured.items()}
            total, different = commands.num_different(chats)
            is_good &= not different
            print(f"{total} conversations, {len(content) * times / 1e6:.1f} MB: {different} differ", flush=True)
            for kind, seconds in (("wall", walls), ("processor", commands.processor_s)):
                ours, theirs = seconds["ours", stem], seconds["theirs", stem]
                ratios = quotients(theirs, ours)
                print(f"  {kind}: {spread(ours)} s against {spread(theirs)} s, ratio {spread(ratios, 1)}", flush=True)
                is_good &= stem == "once" or statistics.median(ratios) >= LIMIT
    for kind, seconds in (("wall", walls), ("processor", commands.processor_s)):
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        each = {side: medians[side, "repeated"] - medians[side, "once"] for side in ("ours", "theirs")}
        per_chat = {side: 1e3 * value / (total * (1 - 1 / options.repeat)) for side, value in each.items()}
        print(
            f"steady state, {kind}: {per_chat['ours']:.3f} ms a conversation against {per_chat['theirs']:.3f} ms, "
            f"ratio {each['theirs'] / each['ours']:.1f}"
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
