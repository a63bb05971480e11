"""Preference training beside TRL's DPOTrainer: tokenization, steps of DPO, the reference, and a million pairs.

    MEGATRON_TEST_DATA=... OMP_NUM_THREADS=2 python benchmarks/preference.py --peer-python peer/bin/python

The pairs are dpo_pairs.jsonl of MEGATRON_TEST_DATA (673 of texts). Sections:

- tokenize: the pairs `--repeat` times, by GPT-2's tokenizer. Ours is the whole job, from opening the files to the
  written dataset, in one process; TRL's the tokenization alone. Both must make the same ids.
- rate: a Llama of 34M parameters in float32 with rank-8 adapters on all linear layers, the reference with the adapters
  off before each step, at most 256 tokens, and the same pairs in turn: ours packed, ours padded, TRL's as it pads them
  (without gradient checkpointing, and without the Trainer around a step).
- reference: the log-probabilities of 32 pairs, computed and stored, beside a bare loop of the same forward passes.
- open: a million short pairs of which a third are cut, and the file of their reference.


Exit status 1 if tokenization is below 10 times TRL's, packed steps below 1.5 times TRL's or 1.3 times padded ones, the
reference below 0.9 of the bare loop, a million pairs take more than a second, or the ids differ. The peer's
environment: `python -m venv peer; peer/bin/pip install trl==1.16.0 peft==0.21.2`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.alternating import Peer, PeerError, alternate, positive, quotients, spread
from benchmarks.step import SHAPES
from benchmarks.tokenize_chats import write_model
from megatron.data.index.indexed import IndexedDataset
from megatron.data.preference.preprocessing import PreferenceJob, preprocess_preferences

PEER_HELP = "interpreter of an environment with TRL 1.16.0 and PEFT 0.21.2"
TOKENIZATION_AIM, PEER_AIM, PADDED_AIM, REFERENCE_AIM, OPEN_AIM_S = 10.0, 1.5, 1.3, 0.9, 1.0
SECTIONS = ("tokenize", "rate", "reference", "open")
REFERENCE_PAIRS, MANY_PAIRS = 32, 1_000_000
LR = 1e-5


class Sides:
    """Both sides over the same rows. Results are seconds of wall-clock time; those of the processor are in `cpu_s`."""

    def __init__(self, options: argparse.Namespace, peer: Peer, folder: Path):
        self._options, self._peer, self._folder = options, peer, folder
        data = Path(os.environ["MEGATRON_TEST_DATA"])
        self._tokenizer = str(data / "tokenizers" / "bloom_format_trained")
        self._large = folder / "gpt2"
        write_model(self._large, data)
        self._rows = data / "dpo_pairs.jsonl"
        self._repeated = folder / "repeated.jsonl"
        self._repeated.write_bytes(self._rows.read_bytes() * options.repeat)
        self._kept_there = 0
        self.cpu_s: dict[str, list[float]] = {}

    def _note(self, name: str, cpu_s: float, wall_s: float) -> float:
        self.cpu_s.setdefault(name, []).append(cpu_s)
        return wall_s

    def tokenize(self, rows: Path, prefix: str, tokenizer: str) -> float:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        job = PreferenceJob((str(rows),), str(self._folder / prefix), tokenizer, overwrite=True)
        preprocess_preferences(job)
        return self._note("ours", time.process_time() - began_cpu_s, time.perf_counter() - began_s)

    def _tokenize_there(self) -> float:
        taken = self._peer.ask(
            "tokenize",
            {"tokenizer": str(self._large), "rows": str(self._repeated), "ids": str(self._folder / "ids.npz")},
        )
        return self._note("trl", taken["cpu_s"], taken["wall_s"])

    def compare_tokenization(self) -> bool:
        """Print seconds and ratios; return True if the aim is reached and the ids are equal."""
        ours = partial(self.tokenize, self._repeated, "repeated", str(self._large))
        self.cpu_s.clear()
        times = alternate({"ours": ours, "trl": self._tokenize_there}, self._options.rounds, warm_up=False)
        data, found = IndexedDataset(self._folder / "repeated"), np.load(self._folder / "ids.npz")
        mine = np.concatenate([data.read(i) for i in range(len(data))])
        equal = np.array_equal(data.lengths, found["lengths"]) and np.array_equal(mine, found["ids"])
        print(f"tokenization of {len(data) // 3:,} pairs, {len(mine):,} ids: {'equal' if equal else 'they DIFFER'}")
        for name in ("ours", "trl"):
            print(f"  {name:5s} {spread(times[name])} s, {spread(self.cpu_s[name])} s of the processor")
        ratios, of_cpu = quotients(times["trl"], times["ours"]), quotients(self.cpu_s["trl"], self.cpu_s["ours"])
        print(f"  ours is {spread(ratios, 1)} times as fast; by processor time {spread(of_cpu, 1)}", flush=True)
        return equal and statistics.median(of_cpu) >= TOKENIZATION_AIM

    def compare_steps(self, threads: int) -> bool:
        """Print rates and ratios; return True if the aims are reached."""
        import torch

        torch.set_num_threads(threads)
        ours = {packing: self._ours(packing) for packing in ("packed", "padded")}
        task, dataset, plan = ours["packed"][1]
        if len(dataset) != self._kept_there:
            raise SystemExit(f"error: ours has {len(dataset)} pairs, TRL {self._kept_there}")
        size = self._options.pairs
        number, losses = dict.fromkeys((*ours, "trl"), 0), dict[str, list[float]]()

        def run(name: str) -> float:
            consumed = number[name] * size
            number[name] += 1
            if name == "trl":
                rows = [row for key in plan(consumed)[1] for row in task.data.samples_of(key)]
                taken = self._peer.ask("step", {"pairs": rows})
                losses.setdefault(name, []).append(taken["loss"])
                return self._note(name, taken["cpu_s"], taken["wall_s"])
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            losses.setdefault(name, []).append(ours[name][0](consumed))
            return self._note(name, time.process_time() - began_cpu_s, time.perf_counter() - began_s)

        self.cpu_s.clear()
        times = alternate({name: partial(run, name) for name in number}, self._options.rounds)
        for name in number:
            print(f"  {name:6s} {spread(times[name])} s a step of {size} pairs; first loss {losses[name][0]:.4f}")
        reached = True
        for name, aim in (("trl", PEER_AIM), ("padded", PADDED_AIM)):
            of_cpu = quotients(self.cpu_s[name], self.cpu_s["packed"])[1:]
            ratios = quotients(times[name], times["packed"])
            print(f"  packed / {name}: {spread(ratios, 2)} times the tokens/s; by processor time {spread(of_cpu, 2)}")
            reached &= statistics.median(ratios) >= aim
        return reached

    def _config(self, packing: str, data: str = "pairs", adapters: str = "--lora-rank 8 --lora-alpha 16") -> Any:
        from megatron.settings.command_line import parse_arguments

        options = self._options
        words = f"{SHAPES['llama', 'cpu']} --vocab-size 32000 --task preference --train-samples none --no-bf16 "
        words += f"--num-epochs 1 --train-iters none --data-path {self._folder / data} --split 1,0,0 --device cpu "
        words += f"--seq-length {options.seq_length - 1} --global-batch-size {options.pairs} {adapters} "
        if packing == "packed":
            words += "--packing step --micro-batch-size 1 --max-batch-len 4096"
        else:
            words += f"--packing none --micro-batch-size {options.pairs}"
        return parse_arguments(words.split())[0]

    def _ours(self, packing: str) -> tuple[Callable[[int], float], tuple[Any, Any, Any]]:
        from megatron.parallel.context import ParallelContext
        from megatron.tasks.packed import samples_of
        from megatron.tasks.preference import PreferenceTask
        from megatron.training.build import build_engine

        config = self._config(packing)
        ctx = ParallelContext.build(config.parallel, "cpu")
        task = PreferenceTask(config)
        dataset: Any = task.data.open(ctx)[0]
        plan = task.data.plan(dataset, lambda _: self._options.pairs, 0, 1)
        engine = build_engine(config, ctx, task)
        print(f"  {packing}: {task.data.facts(dataset).describe()}", flush=True)

        def step(consumed: int) -> float:
            batches = [task.read(dataset, key) for key in plan(consumed)[1]]
            return float(engine.train_step(batches, consumed_samples=consumed, lr=LR).loss)

        return step, (task, samples_of(dataset), plan)

    def compare_reference(self, threads: int) -> bool:
        """Print the rates of the stored reference and of a bare loop; return True if the aim is reached."""
        import torch

        from megatron.parallel.context import ParallelContext
        from megatron.tasks.objective import StartWeights
        from megatron.tasks.packed import samples_of
        from megatron.tasks.preference import PreferenceTask
        from megatron.tasks.preference_losses import answer_logps
        from megatron.training.build import build_engine

        torch.set_num_threads(threads)
        rows = self._folder / "few.jsonl"
        rows.write_bytes(b"".join(self._rows.read_bytes().splitlines(keepends=True)[:REFERENCE_PAIRS]))
        self.tokenize(rows, "few", self._tokenizer)
        config = self._config("packed", "few", "--no-pipeline-parallel")
        ctx = ParallelContext.build(config.parallel, "cpu")
        task = PreferenceTask(config)
        dataset: Any = task.data.open(ctx)[0]
        engine = build_engine(config, ctx, task)

        def stored() -> float:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            task.objective.before_training([dataset], engine.forward, StartWeights("benchmark", True), ctx)
            (path,) = self._folder.glob("few.reference-*")
            path.unlink()
            return self._note("stored", time.process_time() - began_cpu_s, time.perf_counter() - began_s)

        def bare() -> float:
            module = engine.module.eval()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            with torch.no_grad():
                for batch in batches:
                    module(batch.inputs, project=partial(answer_logps, targets=batch.targets, ctx=ctx))
            return self._note("bare", time.process_time() - began_cpu_s, time.perf_counter() - began_s)

        stored()  # without a reference no microbatch is read
        batches = [task.read(dataset, key) for key in task.data.plan(dataset, lambda _: len(dataset), 0, 1)(0)[1]]
        self.cpu_s.clear()
        times = alternate({"bare": bare, "stored": stored}, self._options.rounds)
        ratios = quotients(times["bare"], times["stored"])
        of_cpu = quotients(self.cpu_s["bare"], self.cpu_s["stored"])[1:]
        rate = int(samples_of(dataset).lengths.sum()) / statistics.median(times["stored"])
        print(f"reference of {len(dataset)} pairs: {rate:,.0f} tokens/s")
        print(f"  {spread(ratios, 2)} times the bare loop; by processor time {spread(of_cpu, 2)}", flush=True)
        return statistics.median(ratios) >= REFERENCE_AIM

    def open_many(self) -> bool:
        """Print the seconds to open a million pairs with their reference; return True if the aim is reached."""
        from megatron.data.index.indexed_builder import IndexedDatasetBuilder
        from megatron.data.label_file import label_path, open_reference
        from megatron.data.preference.dataset import open_pairs

        prefix, generator = self._folder / "many", np.random.default_rng(0)
        drawn = np.exp(generator.normal([2.2, 3.2, 3.0], 0.8, (MANY_PAIRS, 3))).astype(int)
        ids = generator.integers(0, 4000, 700).astype(np.uint16)
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for number, lengths in enumerate((1 + np.minimum(drawn, 199)).tolist()):
                builder.add_document(ids[number % 50 :][: sum(lengths)], lengths)
            builder.finalize()
        path = label_path(str(prefix), "reference", {})
        open_reference(path, MANY_PAIRS, {})
        config = self._config("packed", "many")
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, seq_length=32))

        def opened() -> float:
            began_s = time.perf_counter()
            pairs = open_pairs(config, needs_both=True)[0]
            values = np.asarray(open_reference(path, MANY_PAIRS, {}))[pairs.files[0].rows]
            assert len(values) == len(pairs)
            return time.perf_counter() - began_s

        times = [opened() for _ in range(self._options.rounds)]
        print(f"open {MANY_PAIRS:,} pairs with their reference: {spread(times, 2)} s", flush=True)
        return statistics.median(times) <= OPEN_AIM_S

    def build_peer(self, threads: int) -> None:
        model = self._config("packed").model
        shapes = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "tie_word_embeddings": True,
        }
        arguments = {"tokenizer": self._tokenizer, "shapes": shapes, "rows": str(self._rows), "threads": threads}
        self._kept_there = self._peer.ask("build", {**arguments, "max_length": self._options.seq_length, "lr": LR})
        self.tokenize(self._rows, "pairs", self._tokenizer)


def main() -> int:
    parser = argparse.ArgumentParser(description="Preference training beside TRL's.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, help=PEER_HELP)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--rounds", type=positive, default=3, help="alternations (default: 3)")
    parser.add_argument("--repeat", type=positive, default=8, help="times the pairs are tokenized (default: 8)")
    parser.add_argument("--pairs", type=positive, default=8, help="pairs of a step (default: 8)")
    parser.add_argument("--seq-length", type=positive, default=256, help="longest sequence (default: 256)")
    options = parser.parse_args()
    if "MEGATRON_TEST_DATA" not in os.environ:
        parser.error("set MEGATRON_TEST_DATA")
    os.environ["DS_ACCELERATOR"] = "cpu"
    threads, reached = int(os.environ.get("OMP_NUM_THREADS", "2")), True
    try:
        with Peer(options.peer_python, "preference_peer.py", PEER_HELP) as peer, tempfile.TemporaryDirectory() as name:
            print(f"{peer.versions}; {threads} threads", flush=True)
            sides = Sides(options, peer, Path(name))
            sides.build_peer(threads)
            if "tokenize" in options.sections:
                reached &= sides.compare_tokenization()
            if "rate" in options.sections:
                reached &= sides.compare_steps(threads)
            if "reference" in options.sections:
                reached &= sides.compare_reference(threads)
            if "open" in options.sections:
                reached &= sides.open_many()
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
