"""Base of the errors that a user can remedy: their message is enough, and a restart would fail in the same way."""


class UserError(Exception):
    """Something given to the program is wrong. The message says what, the rule, and the remedy."""
