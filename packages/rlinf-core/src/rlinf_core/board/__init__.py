"""The channels of a run as one pure state machine; ``board`` has the guarantees, ``events`` the words."""

from rlinf_core.board import events
from rlinf_core.board.board import Board, describe_lost
from rlinf_core.board.events import ANY, DEALS, FULL, PLAN, Deal, Event, Instruction, Item

__all__ = ["ANY", "DEALS", "FULL", "PLAN", "Board", "Deal", "Event", "Instruction", "Item", "describe_lost", "events"]
