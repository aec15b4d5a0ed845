"""Guess the place: the observation after each guess is the distance and the direction to the place.

For rows of tasks/geospot.py whose truth has lat and lon. The episode ends with a guess that is near enough. The last
guess is graded like an answer of geospot: all parts, unless a curriculum has options for `guess_the_place`.

The toy: geospot's map, which shows country and region but not the city, so the policy has to find it by guessing.
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
DISTANCE_HINT = "how far away"  # a prompt that contains this has its instruction already
NO_GUESS = "That has no coordinates: give lat and lon in degrees, once."
COMPASS_POINTS = ("north", "northeast", "east", "southeast", "south", "southwest", "west", "northwest")


@register("guess_the_place", answerable=answerable)
def guess_the_place(response: str, example: Any, finish_reason: str = "stop", stage: Any = None) -> dict[str, float]:
    """Return the reward of the last guess, graded as geospot grades an answer."""
    return geospot(response, example, finish_reason, stage)


# --- environment --------------------------------------------------------------------------------------------------


def compass_direction(lat: float, lon: float, other_lat: float, other_lon: float) -> str:
    """Return the compass point, one of eight, in which the great circle to the other point starts."""
    phi, psi, across = math.radians(lat), math.radians(other_lat), math.radians(other_lon - lon)
    east = math.sin(across) * math.cos(psi)
    north = math.cos(phi) * math.sin(psi) - math.sin(phi) * math.cos(psi) * math.cos(across)
    return COMPASS_POINTS[round(math.degrees(math.atan2(east, north)) / 45) % 8]


class GuessThePlace(Environment):
    """The environment of `--env guess_the_place`. `tolerance_km`: a guess within this distance ends the episode;
    `directions`: whether observations give the direction besides the distance."""

    images_per_turn = 0

    def __init__(self, tolerance_km: float = 25.0, directions: bool = True):
        need_number("tolerance_km", tolerance_km, 20_000)
        need(isinstance(directions, bool), f"--env-settings directions={directions}: give true or false")
        self.tolerance_km, self.directions = tolerance_km, directions
        self.place = (0.0, 0.0)  # lat and lon, degrees

    def reset(self, example: Example) -> tuple[list[dict[str, str]], Sequence[bytes]]:
        place = parse_place_truth(example.ground_truth)
        need("coordinates" in place,
             f"row {example.uid!r}: the truth has no lat and lon, which --env guess_the_place needs; add them")
        self.place = place["coordinates"]
        return append_instruction(example.messages, INSTRUCTION, DISTANCE_HINT), example.images

    def step(self, response: str) -> Observation:
        guess = read_coordinates(parse_answer(response))
        if guess is None:
            return Observation(NO_GUESS)
        distance = distance_km(*guess, *self.place)
        if distance <= self.tolerance_km:
            return Observation(done=True)
        direction = f" {compass_direction(*guess, *self.place)}" if self.directions else ""
        return Observation(f"{distance:.0f} km{direction}.")


# --- toy ----------------------------------------------------------------------------------------------------------

ENV = {"max_turns": 2}  # settings of demo.py
DEMO = {"see_steps": 250, "habit_steps": 40, "images": 24, "questions": 1, "steps": 40}
TOY_INSTRUCTION = f"{TOY_INSTRUCTION} You are told {DISTANCE_HINT}."
FIRST_GUESS = 2  # number of the city that `expert` guesses first: the one in the middle


@in_one_split("guess_the_place/")
def scenes(rng: random.Random) -> Scene:
    """Draw a scene: an island with one mark, whatever the city is."""
    colour_shape = rng.choice(list(COUNTRIES)), rng.choice(list(REGIONS))
    image, place = draw_map(rng, *colour_shape, 1), toy_place(*colour_shape, rng.randint(1, len(CITIES)))
    return [image], [("place", f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}", toy_answer(place), json.dumps(place))]


toy = toy_of("guess_the_place", scenes, ["place"])


def expert(example: Example, responses: Sequence[str], observations: Sequence[str]) -> str:
    """Return the perfect next response to a toy: first the visible country and region with the city in the middle, then
    the right city."""
    place = json.loads(example.ground_truth)
    if responses:
        return toy_answer(place)
    colour = {country: colour for colour, country in COUNTRIES.items()}[place["country"]]
    shape = {region: shape for shape, region in REGIONS.items()}[place["region"]]
    return toy_answer(toy_place(colour, shape, FIRST_GUESS))
