"""Published training runs, predicted from published rates of their machines.

    python benchmarks/published_runs.py [--only TEXT] [--notes]

Each run is a config of this project on as many devices as it had. Prints its published seconds of a step (from its
FLOP/s where those are published), the predicted ones, their ratio, and the largest parts of the prediction. The figures
of a machine are others' (megatron/plan/machines says whose); the share of the cores that exchanges take, Calculon's,
was added after a first look at the ratios. Exit status 1 if one of the promised runs is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.options.config import Config
from megatron.plan.flops import flops_per_token
from megatron.plan.rates.files import MACHINES, rates_of
from megatron.plan.rates.rates import Rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import StepTime, step_time
from megatron.settings.command_line import load_config

LIMIT = 0.15
"""Largest error of a promised run."""
NODE = 8
"""Devices of a node, of every machine here."""

# Scores in memory, 2 bytes each: by the memory's bandwidth and the products' rate of a100.yaml. Forward writes or reads
# them six times (scores, softmax, dropout, values), backward eight, and half of what is multiplied is masked: 28 and 47
# TFLOP/s of the causal half at a head size of 128. FlashAttention-3's figure 5 has 34 forward for such kernels on H100.
SCORES_IN_MEMORY = {"attention": {"forward_share": 0.09, "backward_share": 0.15, "half_tokens": 0}}
# Four links of 100 Gb/s for eight devices (bigscience, train/tr11-176B-ml/README.md), of which 135 Gb/s were to be had
# (stas00/ml-engineering, network, Omni-Path).
JEAN_ZAY = {**SCORES_IN_MEMORY, "across_nodes": {"bytes_per_s": 6.25e9, "share": 0.34}}

GPT = "--train-iters 1000 --architecture bloom --position-embedding-type learned --seq-length 2048"
NEOX = "--train-iters 1000 --architecture gpt_neox --position-embedding-type rope --seq-length 2048"
UNIFORM = "--pipeline-partition-method type:TransformerLayer"
COMMON = "--data-path DATASET --lr 1e-4"


@dataclass(frozen=True)
class Run:
    """A published run: its config as flags, and what was published of it."""

    name: str
    flags: str
    devices: int
    seconds: float | None = None
    """Published seconds of a step."""
    tflops: float | None = None
    """TFLOP/s a device, as published instead; model FLOPs of PaLM, attention's whole square among them."""
    hardware_tflops: float | None = None
    """TFLOP/s a device of Narayanan et al.'s formula, which counts a recomputed forward pass."""
    machine: str = "a100"
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Figures in place of those of the machine's file."""
    note: str = ""
    """Things that our options, or the plan, do not express."""
    is_promised: bool = False


def layout(tensor: int, stages: int, chunks: int = 1) -> str:
    """Return the flags of a layout."""
    words = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages}"
    return f"{words} --num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else words


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, micro: int) -> str:
    """Return the flags of a GPT model."""
    return (
        f"{GPT} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --vocab-size {vocabulary} "
        f"--micro-batch-size {micro}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Runs


# Grattafiori et al. 2024 (arXiv:2407.21783), table 4 and section 3.3.2: 128 places of layers on 16 stages, the first of
# the embedding, the last of the head; rows of 8,192 without recomputation. Its TFLOP/s, counted as PaLM's MFU, are
# rounded to tens, 430, 400 and 380, its MFU to percents, 43, 41 and 38: here the middle of what both columns allow.
LLAMA = "--bf16 --micro-batch-size 1 --sequence-parallel --zero-stage 1"
LLAMA_CUTS = f"--pipeline-partition-method {','.join(['1', *['2'] * 62, '1'])}"
LLAMA_405B = f"--config llama31_405b {LLAMA} {LLAMA_CUTS} {layout(8, 16, 4)}"
LLAMA_NOTE = (
    "4 virtual stages of two layers, which wait longer than their 8 of one layer, of which the first has the embedding "
    "alone and our rules refuse it; gradients are not sharded, as theirs are"
)
LLAMA_RUNS = (
    Run("Llama 3 405B", f"{LLAMA_405B} --global-batch-size 2048", 8192, tflops=427.6, machine="h100",
        note=LLAMA_NOTE),
    Run("Llama 3 405B", f"{LLAMA_405B} --global-batch-size 2048", 16384, tflops=402.8, machine="h100",
        note=LLAMA_NOTE, is_promised=True),
    Run("Llama 3 405B, rows of 131,072, CP 16",
        f"{LLAMA_405B} --global-batch-size 128 --seq-length 131072 --context-parallel-size 16", 16384, tflops=377.9,
        machine="h100", note=f"{LLAMA_NOTE}; a ring where theirs gathers keys and values; documents are not masked"),
)  # fmt: skip

# NVIDIA/dgxc-benchmarking, recipe of Llama 3.1 of 2025, "Expected Performance": BF16, H100, NeMo, rows of 8,192.
NEMO_RUNS = tuple(
    Run(f"NeMo Llama 3.1 {size}",
        f"--config llama31_{size.lower()} {flags} {split} --context-parallel-size 2 --global-batch-size {batch}",
        devices, seconds, machine="h100", note="it hides exchanges of tensor-parallel ranks in forward passes too")
    for size, devices, batch, flags, split, seconds in (
        ("8B", 8, 128, LLAMA.replace("--sequence-parallel ", ""), layout(1, 1), 12.27),
        ("70B", 64, 128, LLAMA, layout(4, 4, 5), 14.66),
        ("405B", 512, 256, f"{LLAMA} {LLAMA_CUTS}", layout(8, 8, 8), 19.78),
        ("405B", 2048, 1024, f"{LLAMA} {LLAMA_CUTS}", layout(8, 8, 8), 19.87),
    )
)  # fmt: skip

# Jiang et al. 2024 (arXiv:2402.15627), tables 1 and 2, section 6.1: 128 heads, vocabulary 64,000, TP 8, PP 8, 6 virtual
# stages, batches of 768 sequences up to 1,024 devices and of 6,144 above.
MEGASCALE_LAYOUT = f"--bf16 --sequence-parallel --zero-stage 1 {UNIFORM} {layout(8, 8, 6)}"
MEGATRON_175B = gpt(96, 12288, 128, 64000, 1) + " " + MEGASCALE_LAYOUT
MEGASCALE_175B = MEGATRON_175B.replace(GPT, NEOX)
"""Attention and MLP in parallel, as theirs; positions are rotary."""
MEGASCALE_NOTE = (
    "of its ablation (table 3) we have the parallel block; not the sliding window, and not what it overlaps in tensor "
    "and pipeline parallelism beyond ours"
)
MEGASCALE_SECONDS = {
    # devices: batch, seconds of Megatron-LM, of MegaScale
    256: (768, 40.0, 32.0), 512: (768, 21.2, 16.5), 768: (768, 15.2, 11.5), 1024: (768, 11.9, 8.9),
    3072: (6144, 29.02, 23.66), 6144: (6144, 14.78, 12.21), 8192: (6144, 12.24, 9.56), 12288: (6144, 8.57, 6.34),
}  # fmt: skip
MEGATRON_RUNS = tuple(
    Run("Megatron-LM 175B, of MegaScale", f"{MEGATRON_175B} --global-batch-size {batch}", devices, seconds,
        note="its version and its kernels of attention are not published; here FlashAttention-2")
    for devices, (batch, seconds, _) in MEGASCALE_SECONDS.items()
)  # fmt: skip
MEGASCALE_RUNS = tuple(
    Run("MegaScale 175B", f"{MEGASCALE_175B} --global-batch-size {batch}", devices, seconds, note=MEGASCALE_NOTE,
        is_promised=devices == 12288)
    for devices, (batch, _, seconds) in MEGASCALE_SECONDS.items()
)  # fmt: skip

# bigscience, train/tr11-176B-ml: tr11-176B-ml.slurm, chronicles.md (105.22 s at iteration 12,695, 149 to 150 TFLOP/s);
# chronicles-prequel.md, tables of 02-25 and 02-26 for the other two.
BLOOM = f"--zero-stage 1 --recompute-granularity full --bf16 --global-batch-size 2048 {layout(4, 12)}"
BLOOM_CUTS = "--pipeline-partition-method 5,6,6,6,6,6,6,6,6,6,6,5"
TRIALS = (
    "--architecture bloom --position-embedding-type alibi --embed-layernorm --vocab-size 250880 --seq-length 2048 "
    "--train-iters 1000"
)
BLOOM_RUNS = (
    Run("BLOOM 176B, TP 4, PP 12", f"--config bloom_176b --micro-batch-size 2 {BLOOM} {BLOOM_CUTS}", 384, 105.2,
        figures=JEAN_ZAY, is_promised=True),
    Run("its trial of 78 layers of 13824",
        f"{TRIALS} --num-layers 78 --hidden-size 13824 --num-attention-heads 64 --micro-batch-size 2 {BLOOM} {UNIFORM}",
        384, 103.51, figures=JEAN_ZAY),
    Run("its trial with TP 8, PP 6",
        f"{TRIALS} --num-layers 72 --hidden-size 14336 --num-attention-heads 64 --micro-batch-size 4 {UNIFORM} "
        + BLOOM.replace(layout(4, 12), layout(8, 6)), 384, 113.95, figures=JEAN_ZAY),
)  # fmt: skip

# Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5: one replica; sequence parallelism with selective
# recomputation, and full recomputation without the former.
KORTHIKANTI = {
    # size: layers, hidden, heads, micro batch, batch, PP, virtual stages, seconds selective, seconds full
    "22B": (48, 6144, 64, 4, 4, 1, 1, 1.10, 1.42), "175B": (96, 12288, 96, 1, 64, 8, 3, 13.75, 18.13),
    "530B": (105, 20480, 128, 1, 280, 35, 3, 37.83, 49.05), "1T": (128, 25600, 160, 1, 512, 64, 1, 71.49, 94.42),
}  # fmt: skip
SELECTIVE, FULL = "--sequence-parallel --recompute-granularity selective", "--recompute-granularity full"
KORTHIKANTI_RUNS = tuple(
    Run(f"Megatron-LM {size}, {name}",
        f"{gpt(layers, hidden, heads, 51200, micro)} --global-batch-size {batch} --fp16 {UNIFORM} {flags} "
        + layout(8, pp, v),
        8 * pp, seconds, figures=SCORES_IN_MEMORY)
    for size, (layers, hidden, heads, micro, batch, pp, v, *both) in KORTHIKANTI.items()
    for name, flags, seconds in (("selective, SP", SELECTIVE, both[0]), ("full", FULL, both[1]))
)  # fmt: skip

# Narayanan et al. 2021 (arXiv:2104.04473), table 1, as Megatron-LM's examples/sc21/run_table_1.sh runs it.
NARAYANAN = {
    # size: layers, hidden, heads, micro batch, batch, TP, PP, virtual stages, devices, TFLOP/s
    "1.7B": (24, 2304, 24, 16, 512, 1, 1, 1, 32, 137), "3.6B": (30, 3072, 32, 16, 512, 2, 1, 1, 64, 138),
    "7.5B": (36, 4096, 32, 16, 512, 4, 1, 1, 128, 142), "18B": (40, 6144, 48, 8, 1024, 8, 1, 1, 256, 135),
    "39B": (48, 8192, 64, 4, 1536, 8, 2, 1, 512, 138), "76B": (60, 10240, 80, 2, 1792, 8, 4, 3, 1024, 140),
    "145B": (80, 12288, 96, 2, 2304, 8, 8, 2, 1536, 148), "310B": (96, 16384, 128, 1, 2160, 8, 16, 2, 1920, 155),
    "530B": (105, 20480, 128, 1, 2520, 8, 35, 3, 2520, 163), "1T": (128, 25600, 160, 1, 3072, 8, 64, 1, 3072, 163),
}  # fmt: skip
NARAYANAN_RUNS = tuple(
    Run(f"Megatron-LM {size}, 2021",
        f"{gpt(layers, hidden, heads, 51200, micro)} --global-batch-size {batch} --fp16 {UNIFORM} {FULL} "
        + layout(tp, pp, v),
        devices, hardware_tflops=tflops, figures=SCORES_IN_MEMORY)
    for size, (layers, hidden, heads, micro, batch, tp, pp, v, devices, tflops) in NARAYANAN.items()
)  # fmt: skip

# docs/internals/benchmarks.md, benchmarks/step.py --device cuda: MFU 55.4 and 51.5 % on one H100 of another operator.
OWN_RUNS = (
    Run("our Llama 3.2 1B, one device",
        "--config llama32_1b --seq-length 4096 --micro-batch-size 2 --global-batch-size 8", 1, tflops=548,
        machine="h100"),
    Run("our BLOOM 1.7B, one device",
        "--config bloom_1b7 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0 "
        "--attention-dropout 0", 1, tflops=509, machine="h100"),
)  # fmt: skip

RUNS = (
    *LLAMA_RUNS,
    *NEMO_RUNS,
    *MEGASCALE_RUNS,
    *MEGATRON_RUNS,
    *BLOOM_RUNS,
    *KORTHIKANTI_RUNS,
    *NARAYANAN_RUNS,
    *OWN_RUNS,
)


# ---------------------------------------------------------------------------------------------------------------------
# Predictions


@dataclass(frozen=True)
class Prediction:
    run: Run
    published: float
    """Seconds of a step."""
    time: StepTime

    @property
    def ratio(self) -> float:
        return self.time.seconds / self.published

    @property
    def is_within(self) -> bool:
        return abs(self.ratio - 1) <= LIMIT


def rates_of_run(run: Run) -> Rates:
    """Return the rates of the machine of the package, with the figures of the run's own machine in their place."""
    tree = yaml.safe_load((MACHINES / f"{run.machine}.yaml").read_text(encoding="utf-8"))
    for key, value in run.figures.items():
        tree[key] = {**tree[key], **value}
    return rates_of(tree, run.machine)


def config_of(run: Run) -> Config:
    """Return the run's config; all rules hold."""
    return load_config([*COMMON.split(), *run.flags.split(), "--device", rates_of_run(run).device], run.devices)


def published_seconds(run: Run, config: Config) -> float:
    """Return the seconds of a step that were published, or follow from the published FLOP/s."""
    if run.seconds is not None:
        return run.seconds
    tokens = config.training.global_batch_size * config.training.seq_length
    if run.tflops is not None:
        return flops_per_token(config) * tokens / (run.devices * run.tflops * 1e12)
    assert run.hardware_tflops is not None
    # equation 3 of Narayanan et al. 2021
    hidden, layers, length = config.model.hidden_size, config.model.num_layers, config.training.seq_length
    share = 1 + length / (6 * hidden) + config.model.vocab_size / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * share / (run.devices * run.hardware_tflops * 1e12)


def predict(run: Run) -> Prediction:
    """Return the prediction of a run."""
    config = config_of(run)
    node = min(run.devices, NODE)
    time = step_time(config, Cluster.of(run.devices // node, node), rates_of_run(run))
    return Prediction(run, published_seconds(run, config), time)


def largest_parts(time: StepTime, count: int = 4) -> str:
    """Return the largest parts of a step as text: `compute 61%, wait 13%`."""
    return ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in time.parts.largest()[:count])


def line_of(prediction: Prediction) -> str:
    """Return a prediction as a line of the table."""
    run, seconds = prediction.run, prediction.time.seconds
    mark = "" if prediction.is_within else "  misses"
    sizes = f"{run.devices:7,} {prediction.published:9.2f} {seconds:9.2f} {prediction.ratio:6.2f}"
    return f"{run.name:40} {sizes}  {largest_parts(prediction.time)}{mark}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name contains it")
    parser.add_argument("--notes", action="store_true", help="print what of each run is not expressed")
    options = parser.parse_args(argv)
    print(f"{'run':40} {'devices':>7} {'published':>9} {'predicted':>9} {'ratio':>6}  largest parts", flush=True)
    is_fulfilled = True
    for run in RUNS:
        if options.only.lower() not in run.name.lower():
            continue
        prediction = predict(run)
        print(line_of(prediction), flush=True)
        if options.notes and run.note:
            print(f"    {run.note}")
        is_fulfilled = is_fulfilled and (prediction.is_within or not run.is_promised)
    return 0 if is_fulfilled else 1


if __name__ == "__main__":
    sys.exit(main())
