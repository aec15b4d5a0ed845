"""Guess the place: after each guess the policy is told how far away, and in which direction, the place is.

For rows of tasks/geospot.py whose truth has lat and lon. The episode ends with a guess that is near enough; the last
guess is graded like an answer of geospot: all parts, unless a curriculum has options for `guess_the_place`.

The toy: geospot's map, on which country and region can be seen and the city cannot: that is found by asking.
"""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

from envs import Environment, Observation, append_instruction, need_number
from errors import need
from prepare_data import IMAGE_PLACEHOLDER, Example
from reward import register
from tasks.geospot import (
    CITIES,
    COUNTRIES,
    REGIONS,
    TOY_INSTRUCTION,
    answerable,
    distance_km,
    draw_map,
    geospot,
    parse_answer,
    parse_place_truth,
    read_coordinates,
    toy_answer,
    toy_place,
)
from tasks.shapes import Scene, in_one_split, toy_of

INSTRUCTION = (
    "Where was this image taken? Answer with one JSON object, names in English: "
    '{"country": "...", "region": "...", "city": "...", "lat": 0.0, "lon": 0.0}. '
    "You will be told how far away the place is, and may guess again."
)
DISTANCE_HINT = "how far away"  # in the prompt: it says what there is to say
NO_GUESS = "That has no coordinates: give lat and lon in degrees, once."
COMPASS_POINTS = ("north", "northeast", "east", "southeast", "south", "southwest", "west", "northwest")


@register("guess_the_place", answerable=answerable)
def guess_the_place(response: str, example: Any, finish_reason: str = "stop", stage: Any = None) -> dict[str, float]:
    """Of the last guess."""
    return geospot(response, example, finish_reason, stage)


# --- environment --------------------------------------------------------------------------------------------------


def compass_direction(lat: float, lon: float, other_lat: float, other_lon: float) -> str:
    """In which of eight directions a great circle to the other point sets out."""
    phi, psi, across = math.radians(lat), math.radians(other_lat), math.radians(other_lon - lon)
    east = math.sin(across) * math.cos(psi)
    north = math.cos(phi) * math.sin(psi) - math.sin(phi) * math.cos(psi) * math.cos(across)
    return COMPASS_POINTS[round(math.degrees(math.atan2(east, north)) / 45) % 8]


class GuessThePlace(Environment):
    """tolerance_km: of a guess that ends the episode; directions: are they told, or distances alone?"""

    images_per_turn = 0

    def __init__(self, tolerance_km: float = 25.0, directions: bool = True):
        need_number("tolerance_km", tolerance_km, 20_000)
        need(isinstance(directions, bool), f"--env-settings directions={directions}: give true or false")
        self.tolerance_km, self.directions = tolerance_km, directions
        self.place = (0.0, 0.0)  # lat and lon, degrees

    def reset(self, example: Example) -> tuple[list[dict[str, str]], Sequence[bytes]]:
        place = parse_place_truth(example.ground_truth)
        need("coordinates" in place,
             f"row {example.uid!r}: its truth has no lat and lon, and --env guess_the_place tells distances")
        self.place = place["coordinates"]
        return append_instruction(example.messages, INSTRUCTION, DISTANCE_HINT), example.images

    def step(self, response: str) -> Observation:
        guess = read_coordinates(parse_answer(response))
        if guess is None:
            return Observation(NO_GUESS)
        away = distance_km(*guess, *self.place)
        if away <= self.tolerance_km:
            return Observation(done=True)
        where = f" {compass_direction(*guess, *self.place)}" if self.directions else ""
        return Observation(f"{away:.0f} km{where}.")


# --- toy ----------------------------------------------------------------------------------------------------------

ENV = {"max_turns": 2}  # of demo.py
DEMO = {"see_steps": 250, "habit_steps": 40, "images": 24, "questions": 1, "steps": 40}
TOY_INSTRUCTION = f"{TOY_INSTRUCTION} You are told {DISTANCE_HINT}."
FIRST_GUESS = 2  # which city to guess first: the one in the middle


@in_one_split("guess_the_place/")
def scenes(rng: random.Random) -> Scene:
    """An island with one mark, whatever the city."""
    where = rng.choice(list(COUNTRIES)), rng.choice(list(REGIONS))
    image, place = draw_map(rng, *where, 1), toy_place(*where, rng.randint(1, len(CITIES)))
    return [image], [("place", f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}", toy_answer(place), json.dumps(place))]


toy = toy_of("guess_the_place", scenes, ["place"])


def expert(example: Example, responses: Sequence[str], observations: Sequence[str]) -> str:
    """The perfect next response to a toy: what can be seen and the city in the middle, then the right one."""
    place = json.loads(example.ground_truth)
    if responses:
        return toy_answer(place)
    colour = {country: colour for colour, country in COUNTRIES.items()}[place["country"]]
    shape = {region: shape for shape, region in REGIONS.items()}[place["region"]]
    return toy_answer(toy_place(colour, shape, FIRST_GUESS))
