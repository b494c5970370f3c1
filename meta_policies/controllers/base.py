"""The contract of in-loop controllers, which lives with the rounds they act on: see `inner_trainers.control`."""

from ...inner_trainers.control import (
    Candidate,
    Controller,
    ControlState,
    Decision,
    catalogue_candidate,
    nothing,
)

__all__ = ["Candidate", "ControlState", "Controller", "Decision", "catalogue_candidate", "nothing"]
