"""Memory of large bodies goes back to the system as soon as it is freed."""

import ctypes

MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD. Source: glibc, malloc.h."""

OWN_MAPPING_BYTES = 1024 * 1024


def give_back_large_blocks() -> bool:
    """Has the C library map each large block on its own; called once, at the start.

    By itself it learns from each large block that is freed to keep the next ones in its heap, from
    which little is given back: after a few bodies that were let go of, a gateway stays as large as
    they were together. A threshold that is set is never moved.

    Returns:
        whether there is such a thing here: not every C library has it, nor needs it.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(set_option(MMAP_THRESHOLD, OWN_MAPPING_BYTES))
