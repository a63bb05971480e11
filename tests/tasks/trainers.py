"""Trainers of users, as the text of a file, each by the answer that it is to get."""

from __future__ import annotations

from pathlib import Path

REAL = "from transformers import Trainer\n"
LIGHT = "class Trainer:\n    __module__ = 'transformers.trainer'\n    state = args = training_step = evaluate = None\n"
"""Its name alone: transformers takes seconds to import on each rank."""

TRAINED = """
import torch
import torch.nn.functional as F


class Ascent(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = -outputs.loss
        return (loss, outputs) if return_outputs else loss


class Tuples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        input_ids, labels, attention_mask = inputs
        outputs = model(input_ids, labels=labels, attention_mask=attention_mask)
        loss = outputs.loss * -1
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only: bool, ignore_keys=None):
        raise AssertionError


class Scaled(Trainer):
    scale = 0.5

    def of(self, loss):
        return self.scale * loss

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        return self.of(loss)


class Smooth(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        shifted = logits[..., :-1, :].contiguous().view(-1, self.model.config.vocab_size)
        return F.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1), label_smoothing=0.1)


class Focal(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).get("logits")
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        kept = labels[:, 1:] != -100
        return (losses * (1 - torch.exp(-losses)) ** 2)[kept].sum() / num_items_in_batch


class Both(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        kept = inputs["labels"][:, 1:] != -100
        entropy = -(outputs["logits"].softmax(-1) * outputs.logits.log_softmax(-1)).sum(-1)
        return outputs[0] - 0.1 * entropy[:, :-1][kept].mean()


class BySample(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:]
        losses = F.cross_entropy(model(**inputs).logits[:, :-1].transpose(1, 2), labels, reduction="none")
        kept = (labels != -100).float()
        return -((losses * kept).sum(1) / kept.sum(1)).mean()


class Writes(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        loss = model(**inputs).loss
        inputs["labels"][:] = 0
        return loss
"""
USES = {
    "Ascent": ("rows", "tokens"),
    "Tuples": ("rows", "tokens"),
    "Scaled": ("rows", "tokens"),
    "Smooth": ("logits", "tokens"),
    "Focal": ("logits", "tokens"),
    "Both": ("logits", "tokens"),
    "BySample": ("logits", "samples"),
    "Writes": ("rows", "tokens"),
}
HEAD = "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):"
REFUSED = {
    "reduction='sum' grows with the batch": (
        f"{HEAD}\n        logits, labels = model(**inputs).logits[:, :-1], inputs['labels'][:, 1:]\n"
        "        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction='sum')",
        "returns a sum, which grows with the number of samples in a microbatch",
    ),
    "the logarithm of a mean": (
        f"{HEAD}\n        return model(**inputs).loss.log()",
        "neither the mean over their labels nor over the samples",
    ),
    "a bound on the microbatch's mean": (
        f"{HEAD}\n        return -model(**inputs).loss.clamp(max=8)",
        "neither the mean over their labels nor over the samples",
    ),
    "a condition on the microbatch's mean": (
        f"{HEAD}\n        loss = model(**inputs).loss\n        return -loss if loss < 3 else 0 * loss",
        "neither the mean over their labels nor over the samples",
    ),
    "a gradient that the microbatch scales": (
        f"{HEAD}\n        loss = model(**inputs).loss\n        return loss / loss.detach()",
        "neither the mean over their labels nor over the samples",
    ),
    "class weights": (
        f"{HEAD}\n        logits, labels = model(**inputs).logits[:, :-1], inputs['labels'][:, 1:]\n"
        "        weight = torch.arange(1.0, logits.size(-1) + 1)\n"
        "        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, weight=weight)",
        "neither the mean over their labels nor over the samples",
    ),
    "noise": (
        f"{HEAD}\n        return model(**inputs).loss * torch.rand(())",
        "has another loss each time that it is called",
    ),
    "labels that are not shifted": (
        f"{HEAD}\n        return torch.nn.functional.cross_entropy("
        "model(**inputs).logits.transpose(1, 2), inputs['labels'])",
        "reads the label of the first token",
    ),
    "a mean over padding": (
        f"{HEAD}\n        outputs = model(**inputs)\n        return outputs.loss + outputs.logits.pow(2).mean()",
        "depends on logits whose next token is not in the loss",
    ),
    "the state, behind except": (
        f"{HEAD}\n        try:\n            self.state.epoch\n        except Exception:\n            pass\n"
        "        return model(**inputs).loss",
        "uses self.state (line 10)",
    ),
    "something that is kept": (
        f"{HEAD}\n        loss = model(**inputs).loss\n        self.last = loss.item()\n        return loss",
        "uses self.last as a place to keep something (line 10)",
    ),
    "a second pass": (
        f"{HEAD}\n        return model(**inputs).loss - model(**inputs).loss",
        "uses a second forward pass (line 9); a step has one: the model at the start is the `reference`",
    ),
    "hidden states": (
        f"{HEAD}\n        return model(**inputs, output_hidden_states=True).hidden_states[-1].mean()",
        "uses model(output_hidden_states=...) (line 9)",
    ),
    "the base model": (
        f"{HEAD}\n        with model.disable_adapter():\n            return model(**inputs).loss",
        "uses model.disable_adapter (line 9); the model without its adapters is the `reference`",
    ),
    "other tokens": (
        f"{HEAD}\n        return model(inputs['input_ids'].roll(1, 1), labels=inputs['labels']).loss",
        "uses another input_ids than the one in inputs (line 9)",
    ),
    "a column of the data, with a default": (
        f"{HEAD}\n        return inputs.pop('weight', 1.0) * model(**inputs).loss",
        "uses inputs['weight'] (line 9); its inputs are input_ids, attention_mask, labels",
    ),
    "a column of the data, if it is there": (
        f"{HEAD}\n        sign = -1 if 'forget' in inputs else 1\n        return sign * model(**inputs).loss",
        "uses inputs['forget'] (line 9)",
    ),
    "two batches": (
        f"{HEAD}\n        forget_inputs, retain_inputs = inputs\n        return model(**retain_inputs).loss",
        "unpacks its inputs to (forget_inputs, retain_inputs) (line 9)",
    ),
    "no gradient": (f"{HEAD}\n        return model(**inputs).loss.detach()", "returned a loss without a gradient"),
    "a number": (f"{HEAD}\n        return 1.0 - model(**inputs).loss.item()", "returned a float; return the loss"),
    "a loss of each label": (
        f"{HEAD}\n        return model(**inputs).logits.logsumexp(-1)",
        "returned torch.float32 [4, 9]; return one number",
    ),
    "an error of its own": (
        f"{HEAD}\n        return undefined",
        "raised NameError: name 'undefined' is not defined (line 9)",
    ),
    "an attribute that __init__ sets": (
        "def __init__(self, *arguments, alpha=0.1, **options):\n        self.alpha = alpha\n\n"
        f"    {HEAD}\n        return self.alpha * model(**inputs).loss",
        "has its own __init__ (line 8); of this class compute_loss alone is run: set as attributes of the class",
    ),
    "a step of its own": (
        f"def training_step(self, *arguments):\n        return 0\n\n    {HEAD}\n        return model(**inputs).loss",
        "has its own training_step (line 8); of this class compute_loss alone is run",
    ),
    "no loss": ("pass", "has no compute_loss of its own"),
    "an argument more": (
        "def compute_loss(self, model, inputs, weights):\n        return model(**inputs).loss",
        "cannot be called with (self, model, inputs): missing a required argument: 'weights'",
    ),
}


def write_trainers(path: Path, head: str = LIGHT) -> Path:
    """Write a file with all classes of TRAINED."""
    path.write_text(head + TRAINED)
    return path


def write_trainer(path: Path, body: str) -> str:
    """Write a file with one class of this body, and return it as --trainer takes it."""
    path.write_text(f"import torch\n\n{LIGHT}\nclass Mine(Trainer):\n    {body}\n")
    return f"{path}:Mine"
