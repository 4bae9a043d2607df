"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """A mistake in a config, a path or an argument: one line that says what is wrong and how to mend it; exit code 2."""
