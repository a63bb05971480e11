"""Run a rank by Megatron's flags, under deepspeed, torchrun or mpirun: torchrun -m megatron.pretrain_gpt ARGS."""

from megatron.cli import entry

if __name__ == "__main__":
    entry.pretrain_gpt()
