"""The questions of calculator.py, answered by an unchanged agent of OpenAI's Agents SDK (pip install openai-agents).

    groupwise run openai_agents_calculator.yaml

`solve` is an ordinary program: an Agent with a function tool, which the SDK's Runner runs. Its client is
the episode's, so the policy answers the requests and trains on its answers.
"""

import re

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from calculator import Calculator

set_tracing_disabled(True)  # it would send traces to OpenAI


@function_tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic."""
    return Calculator().calculator(expression)


async def solve(question, *, client, model):
    """The agent's answer; None where it found none: no turn was left, or it called a tool that does not exist."""
    policy = OpenAIChatCompletionsModel(model=model, openai_client=client)
    agent = Agent(name="solver", model=policy, tools=[calculator])
    try:
        return (await Runner.run(agent, question, max_turns=4)).final_output
    except AgentsException:
        return None


class Solver:
    """Called once for each episode: its reward is whether the answer is right."""

    def cases(self):
        return Calculator().cases()

    def eval_cases(self):
        return Calculator().eval_cases()

    async def __call__(self, case, *, client, model):
        environment = Calculator()
        question = environment.first_message(case, seed=0)
        said = await solve(question, client=client, model=model)
        return float(said is not None and re.sub(r"[^\d-]", "", said) == environment.answer)
