"""The tests of `totals.py`: print FAILED and the name of each wrong value, and last the share of right values."""

import ast
import re
from pathlib import Path

source = Path("totals.py").read_text()
found = {node.targets[0].id: node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)}
wanted = dict(re.findall(r"^(\w+) = .*  # (.+)$", Path("wanted.txt").read_text(), re.MULTILINE))
right = 0
for name, terms in wanted.items():
    value = found.get(name)
    is_right = isinstance(value, ast.Constant) and value.value == sum(map(int, terms.split("+")))
    right += is_right
    if not is_right:
        print("FAILED", name)
print(right / len(wanted))
