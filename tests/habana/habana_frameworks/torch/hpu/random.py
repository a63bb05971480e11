"""Random numbers of the device: torch's own on the CPU."""

from torch.random import default_generator as default_generator
from torch.random import get_rng_state as get_rng_state
from torch.random import initial_seed as initial_seed
from torch.random import manual_seed as manual_seed
from torch.random import set_rng_state as set_rng_state

manual_seed_all = manual_seed
default_generators = (default_generator,)
