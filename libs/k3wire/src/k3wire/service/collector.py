"""The garbage collector of a serving process: seldom, short, and never over what start-up made."""

import gc

YOUNG_OBJECTS = 20_000
"""Net new containers before a look at the young ones; Python's 700 means several a request."""

OLDER_EVERY = 20
"""Looks at the young between two at the middle-aged, and of those between two at all."""


def settle_memory() -> None:
    """Takes everything that exists now for permanent; called once, when a process is loaded.

    A look at all objects of a loaded process takes a tenth of a second, in which it neither beats
    nor answers. What start-up made stays anyway, so it is never looked at again; what requests
    make is freed by its counts, and cycles among it are few.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, OLDER_EVERY, OLDER_EVERY)
