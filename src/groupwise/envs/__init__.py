"""Environments: episodes of several turns, with tools. The contract is in `base`; users import from here."""

from groupwise.envs.base import Episode, Observation, StepResult
from groupwise.envs.tool_env import ToolEnv
from groupwise.envs.tools import Tool, ToolBox, ToolError

__all__ = ["Episode", "Observation", "StepResult", "Tool", "ToolBox", "ToolEnv", "ToolError"]
