"""StarCoder2: LayerNorm, GELU (tanh), biases, rotary positions, GQA, a window in every layer or none.

Source: Lozhkov et al. 2024 (arXiv:2402.19173); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import LLAMA_BUFFERS, LLAMA_MODULES, rotary_fields, rotary_only, rotary_options
from megatron.models.decoder import EVERY_BIAS, DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config

BLOCK = DecoderBlock(norm="layer_norm", activation="gelu_tanh", biases=EVERY_BIAS)


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "gelu_pytorch_tanh")
    fields.demand("use_bias", True)
    # of the code before transformers' class, which reads none of them
    fields.demand("activation_function", None, "gelu_pytorch_tanh")
    fields.demand("mlp_type", None, "default")
    fields.demand("norm_type", None, "layer_norm")
    fields.demand("scale_attn_weights", None, True)
    fields.demand("scale_attention_softmax_in_fp32", None, True)
    options, length = rotary_options(fields, length=4096, epsilon=1e-5, groups=2, tied=True)
    fields.take("layer_norm_epsilon", default=1e-5)
    dropout = fields.take("residual_dropout", default=0.0)
    fields.demand("embedding_dropout", dropout)  # one option for both
    return {
        **options,
        "norm_epsilon": fields.take("norm_epsilon", default=1e-5),
        "hidden_dropout": dropout,
        "attention_window": fields.take("sliding_window", default=None, kind=int),
    }, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    fields = {name: value for name, value in rotary_fields(config).items() if name != "rms_norm_eps"}
    return {
        **fields,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": model.norm_epsilon,
        "use_bias": True,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
        "sliding_window": model.attention_window,
    }


STARCODER2 = HuggingFaceForm(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    prefix="model.",
    modules={name: theirs for name, theirs in LLAMA_MODULES.items() if name != "layers.*.mlp.gate_up"}
    | {"layers.*.mlp.up": ("layers.*.mlp.c_fc",), "layers.*.mlp.down": ("layers.*.mlp.c_proj",)},
    options=_options,
    config_fields=_config_fields,
    unsupported=rotary_only,
    expresses=frozenset({"attention_window"}),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": STARCODER2})
