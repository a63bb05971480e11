"""Options of checkpoints, exports, logs and profiles."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, NonNegative, Positive, PositiveFloat, Whole

NEVER = 1_000_000_000
"""A save_interval where only the end of an epoch, or of the run, is to be saved."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """Saving, loading and exporting."""

    save: str | None = None
    """Folder for checkpoints. Unset: none are saved. The same command, run again, resumes from the newest one there."""
    save_interval: Positive = 1000
    """Steps between two checkpoints."""
    save_interval_in_mins: PositiveFloat | None = None
    """Minutes between two checkpoints, in addition to save_interval."""
    save_failure_limit_in_mins: PositiveFloat = 60.0
    """Minutes for which saves may fail. The run ends with the first one that fails this long after the first failure
    since a good one."""
    async_save: bool = True
    """Write in the background: training waits only while its state is copied, which takes as much host memory."""
    peer_copy_interval: Positive | None = None
    """Steps between two copies of the state in the memory of the agents that restart the ranks (--max-restarts), on
    several hosts also in that of the next host: a restart loses at most so many steps. They take twice the size of a
    checkpoint, over several hosts four times the hosts' share; over three or more a restart needs room for one of the
    whole model on each. Unset: none are kept."""
    keep_healthy_ranks: bool = False
    """Let the ranks keep their process where another one ends: they leave the step, and go on from the newest copy or
    checkpoint with a new rank in its place (--max-restarts). On one host over gloo, with a device that is given (not
    auto), without code of your own and torch_compile; elsewhere, and where a rank hangs, had not begun a step or takes
    more than 10 s to leave it, all start again."""
    save_samples: Positive | None = None
    """Save at the first step that reaches or passes each multiple of this many samples, in addition to save_interval;
    also export if save_hf is given."""
    save_at_epoch: bool = False
    """sft: save at the end of each epoch; also export if save_hf is given."""
    save_hf: str | None = None
    """Folder for Hugging Face exports, made from the checkpoints of save_samples, of save_at_epoch and of the end of
    the run: `samples_<consumed samples>`, with the files of tokenizer_model, or of the Hugging Face model in load.
    Unset: no exports. With adapters (lora_rank) they are folders of PEFT, which hold the adapters alone."""
    save_hf_merged: bool = False
    """Export whole models, with the adapters merged into the weights of the base as its folder holds them."""
    save_hf_last_only: bool = False
    """Export to one folder, `last_epoch`, which replaces the previous export."""
    save_hf_keep_last: Positive | None = None
    """Number of newest exports to keep. Unset: keep all."""
    keep_last: Positive | None = None
    """Number of newest checkpoints to keep. Unset: all, or 1 with save_retain_interval."""
    keep_best: bool = False
    """Save at each validation that is the best so far by best_metric, keep that checkpoint whatever keep_last says, and
    export it at the end to `best` in save_hf."""
    save_retain_interval: Positive | None = None
    """Keep the checkpoints whose iteration is a multiple of this, besides the keep_last newest (unset: the newest), and
    remove the others. Unset: keep_last alone applies."""
    no_save_optim: bool = False
    """Save the weights only, without the optimizer state."""
    verify_checkpoint: bool = False
    """Before saving, check that all ranks' copies of a parameter are bitwise equal."""
    load: str | None = None
    """Folder to start from, until the run has saved a checkpoint of its own: checkpoints of a run, or a Hugging Face
    model, of which only the weights are loaded, or adapters in PEFT's format, with their options. Or the name of such
    a model or adapters on the hub, ORGANISATION/NAME[@REVISION]; a folder of that name comes first. A folder that
    holds none of these is an error; only the one in save may be missing or empty, as it is at a first start."""
    ckpt_step: NonNegative | None = None
    """Iteration of the checkpoint to load. Unset: the newest."""
    load_fallback: bool = True
    """If the newest checkpoint is damaged, load the newest one that is intact. Never with --skip-train, which would
    measure another model."""
    universal_checkpoint: bool = False
    """Read `load` as a folder in DeepSpeed's universal format, or as a checkpoint of DeepSpeed or Megatron-DeepSpeed;
    its `latest_universal` or `latest` file may name the folder."""
    finetune: bool = False
    """Load the weights only and start at iteration 0."""
    upcycle: bool = False
    """Start a model with experts from the dense one in load, weights only: each expert is a copy of its layer's MLP,
    and the routers are drawn. The model computes at first what the dense one does."""
    extend_context: bool = False
    """Let the model differ from the one in load, or in save, in its rotary positions: rope_scaling_*, rotary_base. All
    else is compared. rope_scaling_original_length and max_position_embeddings follow from that model where they are not
    given; with another seq_length the samples that a resumed run has consumed are counted in its own."""
    no_load_optim: bool = False
    """Start with a new optimizer state."""
    no_load_rng: bool = False
    """Seed dropout with this run's seed instead of the checkpoint's."""
    allow_data_change: bool = False
    """Resume even if the data, or the order of its samples, differs from that of the checkpoint."""
    allow_used_save: bool = False
    """Save even if `save` or `save_hf` holds what another run has saved. It is neither resumed nor removed, but
    replaced where this run saves the same iteration."""

    @property
    def loads_elsewhere(self) -> bool:
        """True if `load` is another folder than `save`, which is empty at a first start."""
        # without save nothing can be empty for being new
        if self.load is None or self.save is None:
            return self.load is not None
        # one folder may be named by a link, or relative to another one
        return os.path.realpath(self.load) != os.path.realpath(self.save)

    @property
    def needs_start(self) -> bool:
        """True if `load` must hold something; the folder that the run saves to is empty at a first start."""
        # each needs a model that exists, which a first start in an empty folder does not have
        names_one = self.finetune or self.upcycle or self.universal_checkpoint or self.ckpt_step is not None
        return self.loads_elsewhere or (names_one and self.load is not None)


def account_fault(option: str, address: str) -> str | None:
    """Describe an address that holds a user and a password, without them: a run stores its options and prints them."""
    if "@" not in address.partition("://")[2].partition("/")[0]:
        return None
    return (
        f"{option} holds an account, which the run would store; leave it out of the address, and set "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    )


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """Logs, metrics and profiles."""

    results_dir: str | None = None
    """Folder of the run: `metrics.jsonl`, `train.log`, `config.yaml`, `run.json`, `summary.txt`. Unset: not written."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events. Unset: `tensorboard/` in results_dir."""
    log_interval: Positive = 10
    """Steps between two log lines."""
    log_format: Literal["auto", "full", "compact"] = "auto"
    """Format of stdout. `full`: Megatron's log lines. `compact`: a short row for each of them. `auto`: `compact` on a
    terminal, else `full`. `train.log` in results_dir always holds the full lines."""
    rates: str | None = None
    """Machine whose rates predict the time of a step in the log: a100, h100, h200, gaudi2 or gaudi3, by published
    figures, or a .yaml file of measured ones. Unset: that of the devices, where it is one of these; otherwise nothing
    is predicted."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device, for the MFU. Unset: taken from a table of known devices."""
    profile: bool = False
    """Write a torch.profiler trace to results_dir, with marked steps and phases, for each rank in profile_ranks."""
    profile_instructions: bool = False
    """Write a trace of what every rank ran when to results_dir: forward and backward passes, messages, reductions and
    update. Says how long each pipeline stage was idle."""
    profile_step_start: NonNegative = 10
    """First iteration of the traces."""
    profile_step_end: Positive = 12
    """Iteration before which the traces end."""
    profile_ranks: tuple[NonNegative, ...] = (0,)
    """profile: ranks that write a trace."""
    pytorch_profiler_collect_shapes: bool = False
    """Record the input shapes of every operator in the trace."""
    pytorch_profiler_collect_callstack: bool = False
    """Record the Python stack and the allocations of every operator in the trace."""
    log_memory_interval: NonNegative = 100
    """Steps between two reports of every rank's memory; startup and the first step are always reported. 0: no
    reports."""
    timing_log_level: Annotated[Whole, Field(ge=0, le=2)] = 0
    """Time the phases of a step. 1: data, forward, backward, communication, optimizer, saves and evaluations. 2: also
    each kind of communication. 0: no timing."""
    wandb_project: str | None = None
    """Weights & Biases project to log to, from rank 0. Unset: no wandb."""
    wandb_entity: str | None = None
    """wandb: owner of the project. Unset: the account's default."""
    wandb_exp_name: str | None = None
    """wandb: name of the run. Unset: the name of the results folder."""
    wandb_save_dir: str | None = None
    """wandb: folder of its own files. Unset: results_dir."""
    mlflow_experiment: str | None = None
    """MLflow experiment to log to, from rank 0. Unset: no MLflow."""
    mlflow_tracking_uri: str | None = None
    """mlflow: address of the server, without an account. Unset: the variable MLFLOW_TRACKING_URI."""
    mlflow_run_name: str | None = None
    """mlflow: name of the run. Unset: the name of the results folder."""
    mlflow_tags: tuple[str, ...] = ()
    """mlflow: NAME=VALUE ...: tags of the run."""
    trackers: tuple[str, ...] = ()
    """package.module:CLASS or FILE.py:CLASS ...: subclasses of megatron.observability.trackers.tracker.Tracker, to log
    to from rank 0."""
    prometheus_file: str | None = None
    """File in Prometheus's text format, NAME.prom, for the textfile collector of node_exporter: step, loss, rates,
    memory, restarts and the newest save at each log line, from rank 0. Unset: none."""
    alert_command: str | None = None
    """Command, run without a shell, that gets a JSON object on stdin when the run ends by an error or hangs, at a bad
    step, at a slow link, at a rank that computes wrongly and when saves fail. The launcher's agent starts it. Unset:
    none."""
    alert_webhook: str | None = None
    """http(s) address that the same is posted to, or a file that holds the address, so that no secret in it is stored.
    Unset: none."""
    generate_prompts: str | None = None
    """File of prompts for which the model of now generates answers at the start, every generate_interval steps and at
    the end: one a line, or JSON lines with `prompt` or `messages`. They go to the log, to answers.jsonl in results_dir
    and to TensorBoard."""
    generate_interval: Positive | None = None
    """generate_prompts: steps between two generations. Unset: eval_interval."""
    generate_max_new_tokens: Positive = 64
    """generate_prompts: largest number of tokens of an answer."""
    lm_eval_tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, YAML files or names, that measure the model of now at the start, every lm_eval_interval steps
    and at the end. The results go to the log, to metrics.jsonl and to TensorBoard."""
    lm_eval_task_path: tuple[str, ...] = ()
    """lm_eval_tasks: folders with YAML files of tasks."""
    lm_eval_interval: Positive | None = None
    """lm_eval_tasks: steps between two evaluations. Unset: eval_interval."""
    lm_eval_limit: PositiveFloat | None = None
    """lm_eval_tasks: samples of each task; below 1, a share of them. Unset: all."""
    callbacks: tuple[str, ...] = ()
    """package.module:CLASS or FILE.py:CLASS ...: subclasses of megatron.training.callbacks.TrainerCallback, whose hooks
    are called at each step, evaluation, export and epoch."""
    callback_errors: Literal["abort", "log"] = "abort"
    """callbacks: a hook that raises ends the run on all ranks after the step, once it is saved (`abort`), or is only
    logged (`log`)."""
    log_straggler: bool = False
    """Measure the time that each rank spends on its own work in forward, backward, update and data, and log the spread
    and the rank that holds up the others."""
    link_probe_interval: NonNegative | None = None
    """Steps between two probes of the links between ranks, rounded up to tens, beside those where steps take longer
    than before; a link that two of them find slow is named. Unset: the latter alone, and over several hosts of CPUs
    alone. 0: none."""
    log_max_attention_logit: bool = False
    """Log the largest attention logit of the steps since the last log line: of q and k alone, scaled as the softmax has
    it, of what each query sees. A step takes half a forward pass of the attention more, once with qk_clip."""
    moe_collapse_share: PositiveFloat = 0.9
    """num_experts: warn once where one expert of a layer has had more than this share of the tokens in each log line of
    100 steps."""

    def traces(self, iteration: int) -> bool:
        """Return whether a trace is written of the step of this iteration."""
        is_inside = self.profile_step_start <= iteration <= self.profile_step_end
        return (self.profile or self.profile_instructions) and is_inside
