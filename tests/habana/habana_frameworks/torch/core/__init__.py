from habana_frameworks.torch import hpu as hpu

from . import step_closure as step_closure
from . import torch_overwrites as torch_overwrites
from .step_closure import mark_step as mark_step

torch_overwrites.overwrite_torch_functions()
