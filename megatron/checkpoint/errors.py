"""Errors of checkpoints, apart from the code that needs torch: a launcher reports them without loading it."""

from megatron.runtime.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged, of another model, or cannot be written. The message names the file."""


class SaveError(CheckpointError):
    """A checkpoint or an export could not be written; earlier ones are as they were. Another attempt may succeed."""
