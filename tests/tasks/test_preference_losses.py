"""Every objective: loss, metrics and all gradients of packed pairs against transformers, each answer alone.

The objectives are written out by hand here, from the papers; where TRL is installed, against TRL's trainers too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.options.preference import OBJECTIVES, Objective, PreferenceConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters
from megatron.tasks.preference import PreferenceObjective, PreferenceTask
from megatron.tasks.preference_losses import PAIR_LOSSES, PairScores, divergence
from tests.models.outputs import build_model, config_of
from tests.models.test_adapters import their_model
from tests.models.test_hf_logits import CASES, VOCABULARY, to_ours
from tests.tasks import pairs

FLAGS = "--task preference --micro-batch-size 1 --global-batch-size 4 --max-batch-len 192 --split 1,0,0 --beta 0.3"
CASES_OF = {
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust --label-smoothing 0.2 --sft-weight 0.7",
    "orpo": "orpo",
    "simpo": "simpo --simpo-gamma 0.4",
}
"""Objectives with their options, by the name of a formula below."""
MORE = {
    "cdpo": "sigmoid --label-smoothing 0.2",
    "sigmoid_norm": "sigmoid_norm",
    "exo": "exo_pair --label-smoothing 0.001",
    "discopop": "discopop --discopop-tau 0.7",
    "nca": "nca_pair",
    "bco": "bco_pair",
    "sppo": "sppo_hard",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "cpo": "cpo --label-smoothing 0.2 --sft-weight 0.7",
    "smoothed_simpo": "simpo --simpo-gamma 0.4 --label-smoothing 0.2",
    "forward_kl": "sigmoid --f-divergence forward_kl",
    "js": "hinge --f-divergence js_divergence",
    "alpha": "ipo --f-divergence alpha_divergence --f-alpha 0.3",
    "alpha_above_1": "discopop --f-divergence alpha_divergence --f-alpha 1.2",
    "ld": "sigmoid --ld-alpha 0.4 --sft-weight 0.7",
    "ld_ipo": "ipo --ld-alpha 0",
}
LLAMA, BLOOM = "llama_gqa", "bloom_12_heads"
Result = tuple[float, dict[str, float], dict[str, Tensor]]
"""Loss, metrics, gradients by our names."""


@cache
def some_pairs() -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts of one token, of which TRL's ORPO has no further loss."""
    generator = np.random.default_rng(3)
    lengths = [(1, 9, 4), (1, 5, 12), (1, 1, 7), (1, 14, 14)]
    return [tuple(generator.integers(0, VOCABULARY, n).tolist() for n in triple) for triple in lengths]  # type: ignore[misc]


def reference_values() -> Tensor:
    """Log-probabilities [P, 2] under some other model, within some 8 of this one's, which no objective saturates."""
    return (
        -5.5
        * (0.9 + 0.2 * torch.rand(len(some_pairs()), 2, generator=torch.Generator().manual_seed(1)))
        * torch.tensor([[len(chosen), len(rejected)] for _, chosen, rejected in some_pairs()])
    )


def ours(folder: Path, case: str, objective: str, theirs: Any) -> Result:
    prefix = pairs.write_pairs(folder / "pairs", some_pairs())
    arguments = CASES[case]().arguments
    weights = to_ours({name: p.detach() for name, p in theirs.named_parameters()}, arguments)
    config = config_of(f"{arguments} {FLAGS} --data-path {prefix} --preference-loss {flags_of(objective)}")
    task, ctx = PreferenceTask(config), ParallelContext.single()
    dataset: Any = task.data.open_samples()[0]
    if config.preference.needs_reference:
        dataset.reference = reference_values().numpy()
    (key,) = task.data.keys_of_step(dataset, [[np.arange(len(some_pairs()))]])
    batch = task.read(dataset, key)
    targets = batch.targets
    model = build_model(config, ctx, {name: tensor.numpy() for name, tensor in weights.items()})
    result: Any = model(
        batch.inputs, project=lambda outputs: task.objective.loss(outputs, targets, 1 / batch.normaliser, ctx)
    )
    result.total.backward()
    metrics = {name: float(metric.sum / metric.weight) for name, metric in result.metrics.items()}
    gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
    return float(result.total.detach()), metrics, gradients


def flags_of(objective: str) -> str:
    return {**CASES_OF, **MORE}[objective]


def answer_logps(theirs: Any, ld_alpha: float = 1.0) -> Tensor:
    """Log-probabilities [P, 2] of the answers, each alone. `ld_alpha` times those beyond the shorter one's length."""

    def of(prompt: list[int], answer: list[int], shared: int) -> Tensor:
        ids = torch.tensor([prompt + answer])
        of_tokens = theirs(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = of_tokens.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        return own[:shared].sum() + ld_alpha * own[shared:].sum()

    return torch.stack(
        [
            torch.stack([of(prompt, answer, min(map(len, answers))) for answer in answers])
            for prompt, *answers in some_pairs()
        ]
    )


def by_hand(theirs: Any, objective: str, folder: Path) -> tuple[Tensor, dict[str, float]]:
    beta, wholes, lengths = 0.3, answer_logps(theirs), answer_lengths()
    sums = answer_logps(theirs, {"ld": 0.4, "ld_ipo": 0.0}[objective]) if objective.startswith("ld") else wholes
    ratios, means = sums - reference_values(), sums / lengths
    h, (w, r) = ratios[:, 0] - ratios[:, 1], (beta * ratios).unbind(1)
    p, q = 1 / (1 + torch.exp(-beta * h)), 1 / (1 + torch.exp(beta * h))
    odds = torch.log(means.exp() / (1 - means.exp()))
    nll = -wholes[:, 0].sum() / lengths[:, 0].sum()
    d, m = sums[:, 0] - sums[:, 1], means[:, 0] - means[:, 1]
    blend, u = torch.sigmoid(beta * h / 0.7), ratios.exp()
    slopes = (u**-0.7 - 1) / -0.7 / lengths
    powers = (u**0.2 - 1) / 0.2
    leads = beta * (powers[:, 0] - powers[:, 1])
    js = torch.log(2 * u / (1 + u))

    def soft(x: Tensor) -> Tensor:
        return torch.log(1 + torch.exp(x))

    loss = {
        "cdpo": lambda: 0.8 * soft(-beta * h) + 0.2 * soft(beta * h),
        "sigmoid_norm": lambda: soft(-beta * ((ratios / lengths)[:, 0] - (ratios / lengths)[:, 1])),
        "exo": lambda: p * (p.log() - math.log(0.999)) + q * (q.log() - math.log(0.001)),
        "discopop": lambda: (1 - blend) * soft(-beta * h) + blend * torch.exp(-beta * h),
        "nca": lambda: soft(-w) + 0.5 * soft(w) + 0.5 * soft(r),
        "bco": lambda: soft(-w) + soft(r),
        "sppo": lambda: (ratios[:, 0] - 1 / (2 * beta)) ** 2 + (ratios[:, 1] + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - 1 / (1 + torch.exp(-w)) + 1 / (1 + torch.exp(-r)),
        "apo_down": lambda: 1 / (1 + torch.exp(-w)) + 1 - 1 / (1 + torch.exp(r - w)),
        "cpo": lambda: 0.8 * soft(-beta * d) + 0.2 * soft(beta * d) + 0.7 * nll,
        "smoothed_simpo": lambda: 0.8 * soft(0.4 - beta * m) + 0.2 * soft(beta * m - 0.4),
        "forward_kl": lambda: soft(-beta * (1 / u[:, 1] - 1 / u[:, 0])),
        "js": lambda: torch.clamp(1 - beta * (js[:, 0] - js[:, 1]), min=0),
        "alpha": lambda: (slopes[:, 0] - slopes[:, 1] - 1 / (2 * beta)) ** 2,
        "alpha_above_1": lambda: (
            (1 - torch.sigmoid(leads / 0.05)) * soft(-leads) + torch.sigmoid(leads / 0.05) * torch.exp(-leads)
        ),
        "ld": lambda: soft(-beta * h) + 0.7 * nll,
        "ld_ipo": lambda: ((ratios / lengths)[:, 0] - (ratios / lengths)[:, 1] - 1 / (2 * beta)) ** 2,
        "sigmoid": lambda: torch.log(1 + torch.exp(-beta * h)),
        "hinge": lambda: torch.clamp(1 - beta * h, min=0),
        "ipo": lambda: ((ratios / lengths)[:, 0] - (ratios / lengths)[:, 1] - 1 / (2 * beta)) ** 2,
        "robust": lambda: (
            (0.8 * torch.log(1 + torch.exp(-beta * h)) - 0.2 * torch.log(1 + torch.exp(beta * h))) / 0.6 + 0.7 * nll
        ),
        "orpo": lambda: nll + beta * torch.log(1 + torch.exp(odds[:, 1] - odds[:, 0])),
        "simpo": lambda: torch.log(1 + torch.exp(0.4 - beta * (means[:, 0] - means[:, 1]))),
    }[objective]()
    if "simpo" in objective or objective == "orpo":
        return loss.mean(), metrics_of(beta * means, means)
    return loss.mean(), metrics_of(beta * (sums if objective == "cpo" else ratios), sums)


def answer_lengths() -> Tensor:
    return torch.tensor([[len(chosen), len(rejected)] for _, chosen, rejected in some_pairs()])


def metrics_of(rewards: Tensor, logps: Tensor) -> dict[str, float]:
    chosen, rejected = rewards.unbind(1)
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    return {name: float(value.detach().mean()) for name, value in values.items()}


def trainer_folder(theirs: Any, folder: Path) -> Any:
    """Write the model, of which a trainer of TRL makes a reference that is not used here, and return a tokenizer."""
    from transformers import AutoTokenizer

    from tests.data.chat.test_conversation import bytes_json

    (folder / "tokenizer.json").write_text(bytes_json(("<s>", "</s>")))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs.save_pretrained(folder)
    theirs.config._name_or_path = str(folder)
    return AutoTokenizer.from_pretrained(folder)


def by_trl(theirs: Any, objective: str, folder: Path) -> tuple[Tensor, dict[str, float]]:
    trl = pytest.importorskip("trl")
    flags = f"{CASES['llama_gqa']().arguments} {FLAGS} --preference-loss {flags_of(objective)}"
    config = config_of(flags).preference
    if objective == "cdpo":
        return by_trl_cdpo(theirs)
    if objective in ("orpo", "cpo") or "simpo" in objective:
        return by_trl_without_reference(theirs, objective)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
    kinds, weights = [str(config.preference_loss)], None
    if config.sft_weight:
        kinds, weights = [*kinds, "sft"], [1.0, config.sft_weight]
    trainer = trl.DPOTrainer(
        theirs,
        args=trl.DPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            report_to=[],
            bf16=False,
            beta=0.3,
            loss_type=kinds,
            loss_weights=weights,
            label_smoothing=config.label_smoothing,
            discopop_tau=config.discopop_tau,
            f_divergence_type=config.f_divergence,
            f_alpha_divergence_coef=config.f_alpha,
            ld_alpha=config.ld_alpha,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
        ),
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(rows),
        processing_class=trainer_folder(theirs, folder),
    )
    trainer.precompute_ref_logps = True
    trainer.data_collator.pad_token_id = 0  # the tokenizer has more tokens than the model
    reference = reference_values().tolist()
    batch = trainer.data_collator(
        [
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            | {"ref_chosen_logps": of_chosen, "ref_rejected_logps": of_rejected}
            for (prompt, chosen, rejected), (of_chosen, of_rejected) in zip(some_pairs(), reference, strict=True)
        ]
    )
    theirs.train()
    loss = trainer.compute_loss(theirs, batch)
    found = trainer._metrics["train"]
    return loss, {name: float(found[name][-1]) for name in PreferenceObjective.metrics}


def by_trl_without_reference(theirs: Any, objective: str) -> tuple[Tensor, dict[str, float]]:
    """TRL's formulas over transformers' log-probabilities."""
    device = SimpleNamespace(device=torch.device("cpu"))
    means = answer_logps(theirs) / answer_lengths()
    if objective == "orpo":
        ORPOTrainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
        losses, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(
            SimpleNamespace(beta=0.3, accelerator=device), *means.unbind(1)
        )  # type: ignore[arg-type]
        nll = -(means * answer_lengths())[:, 0].sum() / answer_lengths()[:, 0].sum()
        return nll - losses.mean(), metrics_of(torch.stack(rewards, 1), means)
    CPOTrainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    options = {"beta": 0.3, "loss_type": "simpo" if "simpo" in objective else "sigmoid", "simpo_gamma": 0.4}
    options |= {"label_smoothing": 0.0 if objective == "simpo" else 0.2, "alpha": 0.0}
    trainer = SimpleNamespace(accelerator=device, **options)
    logps = means if "simpo" in objective else means * answer_lengths()
    losses, *rewards = CPOTrainer.cpo_loss(trainer, *logps.unbind(1))
    nll = -(means * answer_lengths())[:, 0].sum() / answer_lengths()[:, 0].sum()
    return losses.mean() + (0.7 * nll if objective == "cpo" else 0.0), metrics_of(torch.stack(rewards, 1), logps)


def by_trl_cdpo(theirs: Any) -> tuple[Tensor, dict[str, float]]:
    """TRL 1.16 ignores label_smoothing with sigmoid; its CPO smooths margins of any log-probabilities."""
    CPOTrainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    options = {"beta": 0.3, "loss_type": "sigmoid", "label_smoothing": 0.2, "alpha": 0.0}
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")), **options)
    sums = answer_logps(theirs)
    losses, *rewards = CPOTrainer.cpo_loss(trainer, *(sums - reference_values()).unbind(1))
    return losses.mean(), metrics_of(torch.stack(rewards, 1), sums)


def is_plain(case: str, objective: str) -> bool:
    return case == LLAMA and objective in CASES_OF


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "objective", "oracle"),
    [
        # TRL's for the plain objectives over one model; -m slow: for their options and over another model too
        pytest.param(case, objective, oracle, marks=() if oracle is by_hand or is_plain(case, objective) else SLOW)
        for case, objectives in ((LLAMA, {**CASES_OF, **MORE}), (BLOOM, CASES_OF))
        for objective in objectives
        for oracle in (by_hand, by_trl)
    ],
)
def test_loss_metrics_and_gradients(
    tmp_path: Path, case: str, objective: str, oracle: Callable[..., tuple[Tensor, dict[str, float]]]
) -> None:
    theirs = their_model(case)
    expected, metrics = oracle(theirs, objective, tmp_path)
    compare(case, theirs, expected, metrics, ours(tmp_path, case, objective, theirs))


def compare(case: str, theirs: Any, expected: Tensor, metrics: dict[str, float], found: Result) -> None:
    """Fail unless loss, metrics and every gradient are equal within 1e-5."""
    expected.backward()
    loss, own_metrics, gradients = found
    assert math.isclose(loss, float(expected.detach()), rel_tol=1e-5)
    assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    there = to_ours({name: p.grad for name, p in theirs.named_parameters()}, CASES[case]().arguments)
    assert set(there) == set(gradients)
    for name, gradient in gradients.items():
        apart = (gradient[: len(there[name])] - there[name]).abs().max()
        assert float(apart) < 1e-5 * max(1.0, float(there[name].abs().max())), name


def some_scores(seed: int = 0) -> PairScores:
    ratios = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
    return PairScores(ratios, ratios, torch.tensor([[3.0, 5.0]] * 3))


class Recorded:
    """Options that note which of them are read."""

    def __init__(self, options: PreferenceConfig):
        self.options, self.read = options, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.options, name)


def test_every_objective_reads_the_options_that_it_declares_and_no_others() -> None:
    assert set(PAIR_LOSSES) == {name for name, needs in OBJECTIVES.items() if not needs.is_unpaired}
    assert set(OBJECTIVES) == set(get_args(Objective))
    before, after = {"ld_alpha"}, {"f_divergence", "f_alpha"}
    for name, function in PAIR_LOSSES.items():
        recorded: Any = Recorded(PreferenceConfig(label_smoothing=0.1))
        scores, needs = some_scores(), OBJECTIVES[name]  # type: ignore[index]
        losses = function(scores, recorded)
        assert recorded.read == {"beta", *needs.options} - before - after, name
        others = replace(scores, scores_P2=2 * scores.scores_P2)
        if needs.reference:
            assert torch.equal(function(others, recorded), losses) == (not after <= set(needs.options)), name


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("size", [0.0, 1.0, 300.0, 3e4])
def test_losses_and_gradients_are_finite_wherever_the_formula_is(name: str, size: float) -> None:
    """DiscoPOP's is 0 times infinity in TRL, from margins of -88 / beta on."""
    ratios = size * torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    if not OBJECTIVES[name].reference:  # type: ignore[index]
        ratios = -ratios.abs() - 1e-3
    ratios.requires_grad_()
    losses = PAIR_LOSSES[name](PairScores(ratios, ratios, torch.ones(3, 2)), PreferenceConfig(label_smoothing=0.1))
    (gradient,) = torch.autograd.grad(losses.sum(), ratios)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("divergence_name", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_a_divergence_is_that_of_float64_and_finite_in_float32(divergence_name: Any) -> None:
    options = PreferenceConfig(f_divergence=divergence_name, f_alpha=0.5)
    ratios = torch.tensor([-1e4, -30.0, -1e-4, 0.0, 1e-4, 3.0, 1e4], requires_grad=True)
    found = divergence(ratios, options)
    (gradient,) = torch.autograd.grad(found.sum(), ratios)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    with np.errstate(over="ignore"):
        u = np.exp(ratios.detach().double().numpy())
        expected = {
            "forward_kl": 1 - 1 / u[1:-1],
            "js_divergence": np.log(2 * u / (1 + u))[1:-1],
            "alpha_divergence": (u[1:-1] ** -0.5 - 1) / -0.5,
        }[divergence_name]
    assert found.detach().numpy()[1:-1] == pytest.approx(expected, rel=2e-6, abs=1e-7)
