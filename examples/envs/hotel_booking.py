"""Book a hotel for a customer: the policy searches, reads details if necessary, books, and confirms.

    groupwise run examples/envs/hotel_booking.yaml

A customer wants a room in a city between two dates, under a price, with one required feature ("pool"). Only the case
determines the hotels, so the same case and replies give the same episode. The reward of an episode is the sum of

    0.1  a call that can be parsed            0.2  a search in the right city           0.2  for the right dates
    0.2  under the right price                0.1  booking a hotel that was offered     0.2  with the required feature

`HotelEnv` is the environment in Groupwise's form, `HotelThreeMethods` the same in the three-method form of other
trainers. The starter model must first learn the form of such calls from examples: `hotel_form.py`.
"""

import json
import random
import re

from groupwise.tasks.tool_env import ToolEnv
from groupwise.tasks.tools import ToolError

CITIES = ("Paris", "Rome", "Oslo", "Bern", "Lima", "Cairo", "Tokyo", "Delhi")
MUSTS = ("pool", "gym", "bar", "sauna")
TURNS = 4


def draw_case(number):
    """The customer's wishes."""
    draw = random.Random(number)
    day = draw.randrange(1, 20)
    return {
        "case_idx": number,
        "city": draw.choice(CITIES),
        "check_in": day,
        "check_out": day + draw.randrange(1, 9),
        "max_price": 10 * draw.randrange(5, 20),
        "must": draw.choice(MUSTS),
    }


def wish(case):
    """What the customer says."""
    return "Hotel in {city}, {check_in} to {check_out}, up to {max_price}, with {must}.".format(**case)


class World:
    """The hotels of one case, and what was done in it."""

    def __init__(self, case):
        self.case, self.parts, self.offered, self.booked = case, dict.fromkeys(PARTS, False), set(), None
        draw = random.Random(f"world {case['case_idx']}")
        self.hotels = {}
        for city in CITIES:
            for must in draw.sample(MUSTS, 3 if city != case["city"] else 4):
                price = 10 * draw.randrange(4, 20)
                if city == case["city"] and must == case["must"]:
                    price = min(price, case["max_price"])  # there is always one that will do
                self.hotels[len(self.hotels) + 1] = {"city": city, "price": price, "has": must}

    def search_hotels(self, city, check_in, check_out, max_price):
        case = self.case
        self.parts |= {
            "city": city == case["city"],
            "dates": (check_in, check_out) == (case["check_in"], case["check_out"]),
            "price": max_price == case["max_price"],
        }
        found = [id for id, hotel in self.hotels.items() if hotel["city"] == city and hotel["price"] <= max_price]
        self.offered |= set(found)
        return [{"id": id, "has": self.hotels[id]["has"]} for id in found[:4]]

    def get_details(self, hotel_id):
        if hotel_id not in self.hotels:
            raise ToolError(f"there is no hotel {hotel_id}")
        return self.hotels[hotel_id]

    def book_hotel(self, hotel_id):
        if self.booked is not None:
            raise ToolError("there is a booking already")
        if hotel_id not in self.offered:
            raise ToolError(f"hotel {hotel_id} was not offered")
        hotel = self.booked = self.hotels[hotel_id]
        right = hotel["city"] == self.case["city"] and hotel["price"] <= self.case["max_price"]
        self.parts |= {"booked": True, "must": right and hotel["has"] == self.case["must"]}
        return "booked"

    def score(self):
        return round(sum(PARTS[part] for part, reached in self.parts.items() if reached), 3)


PARTS = {"call": 0.1, "city": 0.2, "dates": 0.2, "price": 0.2, "booked": 0.1, "must": 0.2}


class HotelEnv(ToolEnv):
    """The environment: tools, a customer who waits for a booking, and partial credit."""

    def __init__(self, train: int = 2000, held_out: int = 128):
        self.train, self.held_out = train, held_out

    def cases(self):
        return [draw_case(number) for number in range(self.train)]

    def eval_cases(self):
        return [draw_case(-1 - number) for number in range(self.held_out)]

    def first_message(self, case, seed):
        self.world = World(case)
        return wish(case)

    def search_hotels(self, city: str, check_in: int, check_out: int, max_price: int) -> list[dict]:
        """Find hotels."""
        return self.world.search_hotels(city, check_in, check_out, max_price)

    def get_details(self, hotel_id: int) -> dict:
        """Look at a hotel."""
        return self.world.get_details(hotel_id)

    def book_hotel(self, hotel_id: int) -> str:
        """Book a hotel."""
        return self.world.book_hotel(hotel_id)

    tools = (search_hotels, get_details, book_hotel)

    async def step(self, message):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        self.world.parts["call"] |= any(hasattr(self.world, name) for name in names)
        return await super().step(message)

    def score(self, episode):
        return self.world.score()


class HotelThreeMethods:
    """The same in the three-method form: the environment asks the model for every turn after the first itself."""

    def __init__(self, train: int = 2000):
        self.train = train

    def build_dataset(self, tokenizer):
        cases = [draw_case(number) for number in range(self.train)]
        return [{"prompt": [{"role": "user", "content": wish(case)}], "case_idx": case["case_idx"]} for case in cases]

    def build_eval_dataset(self, tokenizer):
        cases = [draw_case(-1 - number) for number in range(128)]
        return [{"prompt": [{"role": "user", "content": wish(case)}], "case_idx": case["case_idx"]} for case in cases]

    def get_tools(self):
        return list(HotelEnv().offer("").tools)

    def score_episode(self, model, tokenizer, completion, case_idx):
        case = draw_case(case_idx)
        world = World(case)
        messages = [{"role": "user", "content": wish(case)}]
        said = completion[-1]["content"]
        for turn in range(TURNS):
            calls = [json_of(text) for text in re.findall(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)]
            messages.append({"role": "assistant", "content": said})
            if not calls:
                break
            for call in calls:
                messages.append({"role": "tool", "content": answer(world, call)})
            if turn < TURNS - 1:
                said = model.chat(messages, tools=self.get_tools())
        return world.score()


def json_of(text):
    """The call in a tag, or None."""
    try:
        call = json.loads(text)
        return call if isinstance(call["arguments"], dict) else None
    except (ValueError, KeyError, TypeError):
        return None


def answer(world, call):
    """What a tool answers to a call."""
    if call is None:
        return "Error: that is no call"
    try:
        tools = {"search_hotels": world.search_hotels, "get_details": world.get_details, "book_hotel": world.book_hotel}
        tool = tools[call["name"]]
        world.parts["call"] = True
        result = tool(**call["arguments"])
    except (ToolError, TypeError, KeyError) as error:
        return f"Error: {error}"
    return result if isinstance(result, str) else json.dumps(result)
