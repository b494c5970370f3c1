"""What every worker process of an experiment does first."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings


def end_with_parent() -> None:
    """End this process when its parent is gone, so that no orphan goes on writing to a run folder.

    What it was writing may be cut; journals set cut bytes aside.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    warnings.simplefilter("ignore")  # said once by the parent, not once per worker

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
