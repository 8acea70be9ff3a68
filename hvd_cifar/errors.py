"""The errors that are the user's to mend: one line each, and exit code 2."""


class UserError(Exception):
    """Something that the user can put right.

    The message is one line that says what is wrong, where, and what to do. The command line prints it once,
    without a traceback, and ends with exit code 2. Any other exception is an error of the program and keeps
    its traceback.
    """


class TrainingError(Exception):
    """A run that cannot go on as a right one: the loss is not finite, ranks disagree, a rank is lost.

    The message is one line. The command line prints it once, without a traceback, and ends with exit code 1.
    """
