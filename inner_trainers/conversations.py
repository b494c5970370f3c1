"""Carries sampled conversations on after a tool's answers, all of them at once at each turn.

Evaluations and rollouts both come through here: they differ in how a turn is sampled, not in what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .chat import ChatFormat
from .faults import ToolFault
from .messages import where_raised

SampleTurns = Callable[[list[list[int]]], Sequence[Sequence[int]]]
"""Samples one assistant turn, its end token included, after each of some token sequences."""


@dataclass
class Conversation:
    """One sampled conversation.

    Attributes:
        prompt: token ids up to where the assistant begins.
        tokens: token ids after the prompt.
        chosen: 1 for the tokens that the model sampled, 0 for a tool's turn and the template's; as long as ``tokens``.
        last_turn: the assistant's last turn.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    last_turn: list[int] = field(default_factory=list)

    def add_turn(self, turn: Sequence[int]) -> None:
        """Append a turn that the model sampled."""
        self.last_turn = list(turn)
        self.tokens += self.last_turn
        self.chosen += [1] * len(turn)

    def add_tool_turn(self, turn: Sequence[int]) -> None:
        """Append a turn that the model did not sample: a tool's, or the user's."""
        self.tokens += turn
        self.chosen += [0] * len(turn)


def carry_on(chat: ChatFormat, conversations: Sequence[Conversation], sample: SampleTurns) -> None:
    """Answer calls of the tool and sample the turns that follow, until nothing is called or the turns are used up.

    A turn that was cut at the length limit calls nothing.

    Args:
        chat: the task's format.
        conversations: each with its first assistant turn; changed in place.
        sample: samples the next turns; called once per turn, with the conversations that go on.

    Raises:
        ToolFault: the tool raised, or returned something that is neither text nor None.
    """
    if not chat.uses_tool:
        return
    going = list(conversations)
    for _ in range(chat.chat.max_turns - 1):
        called = []
        for conversation in going:
            answer = _tool_answer(chat, conversation.last_turn)
            if answer is not None:
                conversation.add_tool_turn(chat.tool_turn(answer))
                called.append(conversation)
        if not called:
            return
        for conversation, turn in zip(called, sample([c.prompt + c.tokens for c in called]), strict=True):
            conversation.add_turn(turn)
        going = called


def _tool_answer(chat: ChatFormat, turn: Sequence[int]) -> str | None:
    assert chat.chat.tool is not None
    if not chat.ended(turn):
        return None
    text = chat.text(turn)
    try:
        answer = chat.chat.tool(text)
    except (Exception, SystemExit) as error:
        raise ToolFault(f"the task's tool raised {where_raised(error)} for the assistant's turn {text!r}") from error
    if answer is not None and not isinstance(answer, str):
        raise ToolFault(f"the task's tool returned {answer!r} for {text!r}; expected text, or None for no call")
    return answer
