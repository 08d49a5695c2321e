"""A judge that needs no network and no model: it serves OpenAI's chat API on this machine, and grades with a program.

    python my_judge.py           # http://127.0.0.1:8431/v1; leave it running

It replaces a language model. If a program can grade, as here, a reward function is better than a judge. To use a real
judge, put its `base_url`, `model` and `api_key_env` into my_run.yaml and delete this file.
"""

import json
import re
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def grade(reply: str, reference: str) -> tuple[str, int]:
    """Return a reason and 0 to 10 points by the rubric in my_run.yaml, as far as a program can apply it."""
    thought, closed, rest = reply.partition("</think>")
    numbers = re.findall(r"-?\d+", rest if closed else reply)
    if not numbers or numbers[-1] != reference.strip():
        return "the final number is not the reference answer", 0
    if closed and re.search(r"\d", thought):
        return "right, and the working is shown", 10
    return "right, but no working is shown", 5


def part(text: str, name: str) -> str:
    """Return a part of the text that the judge is sent: each part stands between marked lines."""
    found = re.search(rf"^--- {name} (\w+)\n(.*?)\n--- end of {name} \1$", text, re.MULTILINE | re.DOTALL)
    return found[2] if found else ""


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of an answer are sent as one

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][-1]["content"]
        reason, score = grade(part(asked, "reply"), part(asked, "reference answer"))
        content = json.dumps({"reason": reason, "score": score})
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8431
    with ThreadingHTTPServer(("127.0.0.1", port), Judge) as server:
        print(f"a judge on http://127.0.0.1:{server.server_address[1]}/v1; Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
