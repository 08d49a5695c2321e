"""A tool that tests offer, and the calls in a reply."""

from __future__ import annotations

from typing import Any

from groupwise.tasks.tool_calls import ParsedReply

MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"enum": ["north", "south"]},
                "steps": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["to", "steps"],
        },
    },
}


def calls_of(reply: ParsedReply) -> list[tuple[str, Any]]:
    """The names and arguments."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in reply.calls]
