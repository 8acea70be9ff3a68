"""The error of ranks that cannot go on together. Standard library only."""


class TrainingError(Exception):
    """The run cannot continue correctly: the loss is not finite, ranks are out of sync, or a rank is lost.

    The message is one line. The command line prints it once, without a traceback, and ends with `code`.

    Attributes:
        of_one_rank: whether other ranks may not have it: the command line then prints it on this rank.
        code: the exit code.
        crosses_ranks: set in a class whose errors every rank raises where one rank does (`collectives.on_every_rank`).
    """

    of_one_rank = False
    crosses_ranks = True
    code = 1
