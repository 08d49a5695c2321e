"""Train the starter model on the form of a booking: well-formed calls in a sensible order, with random arguments.

    python examples/envs/hotel_form.py        a few minutes; writes the model runs/hotel-form

Half of the arguments are the customer's and half are not, and the examples book any offered hotel: the model learns to
call the tools, but not which arguments to give. All parameters are trained, because the starter has never seen some of
the letters. `hotel_booking.yaml` starts from this model.
"""

import json
import random
import sys
from pathlib import Path

from hotel_booking import HotelEnv, World, draw_case, wish

from groupwise.model.load import load_model
from groupwise.model.supervised import encode_supervised
from groupwise.train.learner import Learner

STEPS, BATCH, RATE = 200, 16, 1e-3


def shown(number: int, draw: random.Random) -> list[dict]:
    """One booking, with half of its arguments wrong."""
    case = draw_case(1_000_000 + number)
    world = World(case)
    other = draw_case(2_000_000 + number)
    asked = {key: draw.choice((case, other))[key] for key in ("city", "check_in", "check_out", "max_price")}
    found = world.search_hotels(**asked)
    messages = [{"role": "user", "content": wish(case)}, call("search_hotels", asked), told(found)]
    if found:
        chosen = draw.choice(found)["id"]
        messages += [call("book_hotel", {"hotel_id": chosen}), told(world.book_hotel(chosen))]
    return [*messages, {"role": "assistant", "content": "Done." if found else "Sorry."}]


def call(name: str, arguments: dict) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def told(result) -> dict:
    return {"role": "tool", "content": result if isinstance(result, str) else json.dumps(result)}


def main(out: Path) -> None:
    base, draw = load_model("starter", dtype="float32"), random.Random(0)
    tools = [dict(tool) for tool in HotelEnv().offer("").tools]
    learner = Learner(base, lora=None)
    for step in range(STEPS):
        batch = [
            encode_supervised(shown(step * BATCH + row, draw), base.tokenizer, tools=tools) for row in range(BATCH)
        ]
        loss = learner.forward_backward_supervised(batch)["loss/cross_entropy"]
        learner.optim_step(learning_rate=RATE * min(1.0, (step + 1) / 20, 2 * (STEPS - step) / STEPS))
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step + 1}/{STEPS}  cross-entropy {loss:.3f}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    learner.save_adapter(out)
    print(f"the model is in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/hotel-form"))
