from habana_frameworks.torch import hpu as hpu

from . import step_closure as step_closure
from .step_closure import mark_step as mark_step
