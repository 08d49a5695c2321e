"""The environment of tool-use-4b.yaml: word problems, with a calculator as a tool."""

import ast
import operator

from groupwise.rewards.math import number_match
from groupwise.tasks.tool_env import ToolEnv

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class WithCalculator(ToolEnv):
    """Worth 1 if the number in the last reply's box is the answer, and otherwise 0."""

    def first_message(self, case, seed):
        self.case = case
        return case["prompt"]

    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic: numbers, + - * / and parentheses."""
        if len(expression) > 200:
            raise ValueError("an expression of at most 200 characters, please")
        return f"{value(ast.parse(expression, mode='eval').body):.10g}"

    tools = (calculator,)

    def score(self, episode):
        return number_match([episode.answer], [self.case["answer"]], box=True)[0]


def value(node):
    """The value of a syntax tree. Raises ValueError for what is no arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError("only numbers, + - * / and parentheses, please")
