"""The errors that are told in one line. Everything else is a fault of the program and is shown with its traceback."""


class UserError(Exception):
    """A mistake in a config, a path or an argument: what is wrong and how to mend it; exit code 2."""


class RunError(Exception):
    """A run that cannot go on, through no mistake in its config: what happened and what is intact; exit code 1."""
