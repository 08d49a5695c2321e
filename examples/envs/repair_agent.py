"""A small coding agent: it runs the tests of a repository, asks for missing values, edits a file and runs them again.

    env.harness starts it in a copy of repair_repo; it reads its environment variables and the working directory.

The module `totals.py` has lines `NAME = None  # 4 + 7`. For each line that a test finds wrong, the agent asks for the
value in a separate conversation and writes the reply into the line, unless the reply is not valid Python and would
break the module. It needs only Python's standard library, and works with any OpenAI-compatible endpoint.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

LINE = re.compile(r"^(\w+) = (.+?)  # (.+)$", re.MULTILINE)
ATTEMPTS = 2


def ask(messages: list) -> str:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    head = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def failing() -> list[str]:
    """The names that the repository's tests find wrong."""
    done = subprocess.run([sys.executable, "-S", "check.py"], capture_output=True, text=True)
    return re.findall(r"^FAILED (\w+)", done.stdout, re.MULTILINE)


def edit(name: str, value: str) -> bool:
    """Set a value of the module; False, and no change, if that is no Python."""
    path = Path("totals.py")
    old = path.read_text()
    new = LINE.sub(lambda line: f"{name} = {value}  # {line[3]}" if line[1] == name else line[0], old)
    try:
        compile(new, "totals.py", "exec")
    except (SyntaxError, ValueError):
        return False
    path.write_text(new)
    return True


def main() -> None:
    todo = failing()
    wanted = {name: what for name, _, what in LINE.findall(Path("totals.py").read_text())}
    for name in todo:
        messages = [{"role": "user", "content": f"What is {wanted[name]}?"}]
        for _ in range(ATTEMPTS):
            said = ask(messages)
            if edit(name, " ".join(said.split())) and name not in failing():
                break
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "The test fails."}]


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:  # the episode is at a limit: what is done is done
        print(error.read().decode(), file=sys.stderr)
