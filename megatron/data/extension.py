"""The C++ extension, or an error with the remedy."""

from __future__ import annotations

try:
    from megatron.data import helpers as helpers
except ImportError as error:
    raise ImportError(
        f"the C++ extension megatron.data.helpers cannot be loaded ({error}); build it with `pip install -e .`"
    ) from None
