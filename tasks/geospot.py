"""The geospot task: where was this image taken? Country, region, city and coordinates are graded separately.

Coordinates earn exp(-distance / tolerance). A curriculum stage sets the tolerance and the parts that count:
{"pays": ["country", "coordinates"], "tolerance_km": 500}. Without these options all parts count, at 25 km. CURRICULUM
is this task's own curriculum, made from STAGES.
"""

import json
import math
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from errors import UserError, as_user_error, need
from prepare_data import IMAGE_PLACEHOLDER, RawRow, ToyConfig
from reward import SPECIAL_TOKEN_PATTERN, register
from tasks._grammar import NUMBER
from tasks._places import REGION_NAMES
from tasks._tables import any_rows, files_below, first_nonempty, make_row
from tasks.shapes import COLOURS, SIDE, Scene, draw_shapes, encode_png, in_one_split, toy_of

INSTRUCTION = (
    "Where was this image taken? Look at its signs, buildings, vegetation and roads, then answer on the last line with "
    'one JSON object, names in English: {"country": "...", "region": "...", "city": "...", "lat": 0.0, "lon": 0.0}'
)
MAX_GEOSPOT_CHARS = 2000  # the end of a response that is parsed; the text before it is reasoning
MAX_VALUE_CHARS = 100
EARTH_KM = 6371.0088  # mean radius (IUGG)

# --- stages -----------------------------------------------------------------------------------------------------------


class GeospotStage(NamedTuple):
    """The reward options of a curriculum stage, and the step from which it applies."""

    first_step: int
    parts: tuple[str, ...]  # parts that count in the reward; the others are only graded and logged
    tolerance_km: float  # distance at which coordinates earn 1/e


NAME_FIELDS = ("country", "region", "city")
FIELD_WEIGHTS = {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}
STAGES = (
    GeospotStage(0, ("country",), 500.0),
    GeospotStage(100, ("country",), 200.0),
    GeospotStage(300, ("country", "region"), 100.0),
    GeospotStage(600, NAME_FIELDS, 50.0),
    GeospotStage(1000, (*NAME_FIELDS, "coordinates"), 25.0),
)

CURRICULUM = [
    {
        "name": f"{', '.join(stage.parts)} at {stage.tolerance_km:g} km",
        "from": stage.first_step,
        "reward": {"geospot": {"pays": list(stage.parts), "tolerance_km": stage.tolerance_km}},
    }
    for stage in STAGES
]


def parse_stage_options(options: Mapping[str, Any]) -> GeospotStage:
    """Return the stage that a curriculum's options describe; missing options are those of the last of STAGES.

    Raise UserError if an option is unknown or invalid.
    """
    unknown = ", ".join(map(repr, options.keys() - {"pays", "tolerance_km"}))
    need(not unknown, f"a curriculum gives geospot unknown options: {unknown}; use 'pays' and 'tolerance_km'")
    pays, tolerance = options.get("pays", STAGES[-1].parts), options.get("tolerance_km", STAGES[-1].tolerance_km)
    need(isinstance(pays, list | tuple) and pays and set(map(str, pays)) <= FIELD_WEIGHTS.keys(),
         f"pays of geospot in a curriculum is {pays!r}; give a list of some of {', '.join(FIELD_WEIGHTS)}")
    need(isinstance(tolerance, int | float) and not isinstance(tolerance, bool) and 0 < tolerance <= 20_000,
         f"tolerance_km of geospot is {tolerance!r}; give more than 0, at most 20000")
    return GeospotStage(0, tuple(dict.fromkeys(pays)), float(tolerance))


# --- data -------------------------------------------------------------------------------------------------------------

FIELD_COLUMNS = {  # field -> columns of a file, OSV-5M's names included
    "country": ("country",),
    "region": ("region",),
    "city": ("city",),
    "lat": ("lat", "latitude"),
    "lon": ("lon", "lng", "longitude"),
}
GEOSPOT_IMAGE_COLUMNS = ("image", "image_url", "thumb_original_url")


def rows(cfg: ToyConfig) -> Iterator[RawRow]:
    """Yield rows of CSV, JSONL or parquet files with columns image or image_url, country, region, city, lat and lon.

    A row needs an image and at least one part of the place. OSV-5M's CSV has no column of image files: its images are
    found by `id` below --image-root.
    """
    return any_rows(cfg, GEOSPOT_IMAGE_COLUMNS, lambda record, root: geo_record(record, root, cfg))


def read_place(record: dict) -> dict[str, Any]:
    """Return for each field the value of the first of its columns that is not empty, or None."""
    return {field: first_nonempty([record.get(name) for name in columns]) for field, columns in FIELD_COLUMNS.items()}


def geo_record(record: dict, root: Path, cfg: ToyConfig) -> dict:
    """Return a row in the on-disk format that keeps its other columns."""
    place = read_place(record)
    fields = {field: place[field] for field in NAME_FIELDS if place[field] is not None}
    for field, name in fields.items():
        need(isinstance(name, str) and normalize_name(name) and len(name) <= MAX_VALUE_CHARS,
             f"{field} is {name!r:.80}, expected a name of at most {MAX_VALUE_CHARS} characters, or nothing")
    lat, lon = place["lat"], place["lon"]
    if (lat, lon) != (None, None):
        coordinates = read_coordinates(place)
        need(coordinates, f"lat {lat!r} and lon {lon!r}: expected degrees from -90 to 90 and from -180 to 180")
        fields |= {"lat": coordinates[0], "lon": coordinates[1]}
    need(fields, "no country, region, city, lat or lon; fill at least one of these columns")
    image_cell = first_nonempty([record.get(name) for name in (cfg.image_key, "image")])
    by_id = files_below(root, "*.jpg").get(f"{record['id']}.jpg") if image_cell is None and "id" in record else None
    image = first_nonempty([image_cell, by_id, *(record.get(name) for name in GEOSPOT_IMAGE_COLUMNS)])
    need(image is not None,
         f"no image: looked for columns {', '.join((cfg.image_key, *GEOSPOT_IMAGE_COLUMNS))}, "
         f"and for id.jpg below {root}")
    truth = json.dumps(fields, ensure_ascii=False)
    return make_row(
        "geospot", record, (*GEOSPOT_IMAGE_COLUMNS, *chain(*FIELD_COLUMNS.values())), image, truth, cfg, INSTRUCTION
    )


# --- names ------------------------------------------------------------------------------------------------------------

LETTER_REPLACEMENTS = str.maketrans(
    {"ł": "l", "ø": "o", "đ": "d", "ð": "d", "æ": "ae", "œ": "oe", "ı": "i", "þ": "th", "&": " and "}
)
ABBREVIATIONS = {"st": "saint", "ste": "sainte", "mt": "mount", "ft": "fort"}
REGION_KINDS = """
state province region county prefecture district oblast department governorate autonomous community of canton
voivodeship krai kray kraj lan republic respublika emirate territory comune regione wojewodztwo regiao autonoma
bundesland freistaat avtonomnyy okrug departement fylke land commonwealth
""".split()
# Endings of names, also in Korea, Japan and China: Suwon-si
NAME_TAIL_PATTERN = re.compile("(?<=[a-z]) (?:city|metropolis|do|si|ken|fu|sheng|shi)$")
COUNTRY_ALIASES = """
GB uk|britain|great britain|england|scotland|wales|northern ireland
US america|united states of america
RU russia
TR turkey|turkiye
CZ czech republic
CI ivory coast
KR korea|south korea|republic of korea
MM burma
NL holland
AE uae|emirates
SZ swaziland
MK macedonia|republic of macedonia
VA vatican|vatican city|holy see
CV cape verde
MO macau|macau sar|macao sar china
BN brunei
TL east timor
FM micronesia
PS palestine|palestinian territory|palestinian territories
XK xk|xkx|kosovo
BA bosnia
CD dr congo|drc|congo kinshasa|congo dr
CG congo brazzaville|congo republic
FK falkland islands
TT trinidad
AG antigua
CN prc|mainland china
LY state of libya
SH saint helena
VI united states virgin islands
HK hong kong sar|hong kong sar china
BQ caribbean netherlands|bonaire|bonaire saint eustatius and saba
CC cocos islands
PN pitcairn islands
HM heard and mcdonald islands
IE republic of ireland|eire
DE deutschland|federal republic of germany
TW taiwan|roc|chinese taipei
VN vietnam|viet nam
SY syria
LA laos
IR iran|persia
BO bolivia
VE venezuela
MD moldova
TZ tanzania
GR hellas
HR hrvatska
PL polska
SE sverige
NO norge
FI suomi
CH schweiz|suisse
AT osterreich
HU magyarorszag
MX mejico
LK ceylon
KH cambodia|kampuchea
KP dprk
ST sao tome
GM gambia
BS bahamas
DK danmark
BE belgique|belgie
ES espana
IT italia
BR brasil
JP nippon
"""  # common names that are not in ISO 3166


@lru_cache(65536)
def normalize_name(text: str) -> str:
    """Return a name in lower case, without accents, punctuation and articles: `St. Étienne` -> `saint etienne`."""
    text = unicodedata.normalize("NFKD", text.casefold()).translate(LETTER_REPLACEMENTS)
    text = re.sub(r"[\u0300-\u036f\u200b-\u200f\u2060\ufeff.'’‘ʼ`´]", "", text)
    words = re.sub(r"[\W_]+", " ", text).split()
    return " ".join(ABBREVIATIONS.get(word, word) for word in words if word != "the")


@cache
def country_codes() -> dict[str, str]:
    """Return the ISO 3166 alpha-2 codes of countries by normalized name or code."""
    with as_user_error(ImportError, "geospot grading needs pycountry; pip install -r requirements.txt"):
        import pycountry
    codes = {}
    for country in pycountry.countries:
        fields = ("alpha_2", "alpha_3", "name", "official_name", "common_name")
        names = [getattr(country, field) for field in fields if hasattr(country, field)]
        head, _, tail = country.name.partition(", ")  # "Korea, Republic of"
        names += [f"{tail} {head}", country.name.partition(" (")[0]]
        codes |= {normalize_name(name): country.alpha_2 for name in names}
    for line in COUNTRY_ALIASES.strip().splitlines():
        codes |= dict.fromkeys(map(normalize_name, line[3:].split("|")), line[:2])
    return codes


def normalize_country(text: str) -> str:
    """Return the ISO code of a country, or the normalized text if there is none, as for the toy map's countries."""
    codes = country_codes()
    if code := codes.get(normalize_name(text)):
        return code
    # "France (FR)" names one country twice
    part_codes = {codes.get(normalize_name(part)) for part in re.split(r"[()/,–-]", text) if normalize_name(part)}
    return part_codes.pop() if len(part_codes) == 1 and None not in part_codes else normalize_name(text)


def without_kind(name: str) -> str:
    """Return a region's name without words such as `state` or `province`, unless they are all of it."""
    words = NAME_TAIL_PATTERN.sub("", name).split()
    return " ".join([word for word in words if word not in REGION_KINDS] or words)


@cache
def region_names(country: str) -> dict[str, str]:
    """Return normalized name -> standard name for a country's regions.

    The names are ISO 3166-2's variants, such as `Catalunya [Cataluña]`, and those of REGION_NAMES, or all of
    REGION_NAMES if the country is unknown.
    """
    import pycountry

    names = {}
    for region in pycountry.subdivisions.get(country_code=country) or ():
        variants = [
            normalize_name(part.partition(",")[0]) for part in re.split(r"[\[\]/]", region.name) if normalize_name(part)
        ]
        names |= {without_kind(name): without_kind(variants[0]) for name in variants}
    others = REGION_NAMES.get(country, ()) if len(country) == 2 else chain(*REGION_NAMES.values())
    for other, name in others:
        names[other] = names.get(without_kind(name), without_kind(name))
    return names


@lru_cache(65536)
def normalize_region(text: str, country: str) -> str:
    """Return a region's standard name, without "state of" and the like; ISO codes, `CA` or `US-CA`, become names."""
    import pycountry

    name = normalize_name(text)
    if len(name) <= 6 and len(country) == 2:
        code = name.upper().replace(" ", "-").removeprefix(f"{country}-")
        subdivision = pycountry.subdivisions.get(code=f"{country}-{code}")
        name = normalize_name(re.split(r"[\[/,]", subdivision.name)[0]) if subdivision else name
    names, short = region_names(country), without_kind(name)
    return names.get(name) or names.get(short, short)  # `moscow oblast` is not `moscow`


def normalize_city(text: str) -> str:
    """Return a city's normalized name, without `city of` and endings such as `city`."""
    return NAME_TAIL_PATTERN.sub("", normalize_name(text).removeprefix("city of "))


# --- reading an answer ------------------------------------------------------------------------------------------------

LABELS = {
    "country": "country",
    "region": "region state province",
    "city": "city town village municipality",
    "lat": "lat latitude",
    "lon": "lon lng long longitude",
    "coordinates": "coordinates coordinate coords gps",
}
FIELDS = {label: field for field, labels in LABELS.items() for label in labels.split()}
ANSWER_FILLERS = "name code or and approximate estimated decimal degrees".split()
LABEL = re.compile(r"(?<!\w)([A-Za-z][A-Za-z/ _()]{1,30}?)[*_`\"' ]{0,4}[:=：]")
ANGLE = rf" ?([+-]?) ?({NUMBER}) ?(?:°|deg|degrees)? ?([A-Z]?) ?"
PAIR = re.compile(rf"{ANGLE}[,; ]{ANGLE}", re.I)
SIGNS = str.maketrans("−–º", "--°")


def field_name(label: str) -> str | None:
    """Return the field that a label names, such as `Latitude`, `state/province` or `country_code`, or None."""
    words = normalize_name(label).split()
    fields = {FIELDS[word] for word in words if word in FIELDS}
    if fields == {"lat", "lon"} or "coordinates" in fields:
        fields = {"coordinates"}
    return fields.pop() if len(fields) == 1 and all(w in FIELDS or w in ANSWER_FILLERS for w in words) else None


def json_pairs(text: str) -> list[tuple[str, Any]]:
    """Return the names and values of all JSON objects in a text, nested ones included."""
    pairs: list[tuple[str, Any]] = []
    start = text.find("{")
    while start >= 0:
        object_pairs: list[tuple[str, Any]] = []
        try:
            end = json.JSONDecoder(object_pairs_hook=object_pairs.extend).raw_decode(text, start)[1]
            pairs += object_pairs
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return pairs


def line_pairs(text: str) -> list[tuple[str, str]]:
    """Return the names and values of `name: value`, of which a line may have several.

    A value ends at the end of its line or before the next name.
    """
    _, *parts = LABEL.split(text)
    values = (value.partition("\n")[0].strip(" \t\r*_`\"'|,;.") for value in parts[1::2])
    return list(zip(parts[::2], values, strict=True))


def parse_answer(response: str) -> dict[str, Any]:
    """Return field -> value as written, from JSON objects, or else from `name: value`.

    Reasoning in `<think>` does not count. A field with two different values is left out.
    """
    text = response.rpartition("</think>")[2]
    if "<think>" in text or SPECIAL_TOKEN_PATTERN.search(text):
        return {}
    text = text[-MAX_GEOSPOT_CHARS:]
    field_values: dict[str, list] = {}
    for pairs in (json_pairs(text), line_pairs(text)):
        for label, value in pairs:
            if field := field_name(label[:MAX_VALUE_CHARS]):
                field_values.setdefault(field, []).append(value)
        if field_values:
            break
    return {field: values[0] for field, values in field_values.items() if all(value == values[0] for value in values)}


def parse_degrees(sign: str, number: str, letter: str, axis: str) -> float | None:
    """Return an angle in degrees, or None if it is contradictory or out of range.

    `axis` has the letters of the positive and the negative direction: "NS" or "EW".
    """
    value, letter = float(number), letter.upper()
    contradiction = letter and (letter not in axis or (sign == "-" and letter == axis[0]))
    if contradiction or value > (90 if axis == "NS" else 180):
        return None
    return -value if sign == "-" or letter == axis[1] else value


def read_coordinates(answer: dict[str, Any]) -> tuple[float, float] | None:
    """Return (latitude, longitude) from `coordinates`, text or a list of two, else from `lat` and `lon`; or None."""
    value = answer.get("coordinates")
    if isinstance(value, list) and len(value) != 2:
        return None
    lat_value, lon_value = value if isinstance(value, list) else (answer.get("lat"), answer.get("lon"))
    text = as_text(value if isinstance(value, str) else None) or f"{as_text(lat_value)},{as_text(lon_value)}"
    match = PAIR.fullmatch(" ".join(text.translate(SIGNS).strip("()[]{} ").split()))
    if match is None:
        return None
    lat, lon = parse_degrees(*match.groups()[:3], "NS"), parse_degrees(*match.groups()[3:], "EW")
    return None if lat is None or lon is None else (lat, lon)


def as_text(value: Any) -> str:
    """Return a short text or a number as text, and "" for anything else."""
    if isinstance(value, float):
        return f"{value:.9f}" if abs(value) <= 180 else ""  # never in the form 1e-05
    text = str(value) if isinstance(value, str) or (type(value) is int and abs(value) <= 180) else ""
    return text if len(text) <= MAX_VALUE_CHARS else ""


# --- reward -----------------------------------------------------------------------------------------------------------


def distance_km(lat: float, lon: float, other_lat: float, other_lon: float) -> float:
    """Return the great-circle distance by the haversine formula, on a sphere: within 0.6% of the ellipsoid's."""
    phi, psi = math.radians(lat), math.radians(other_lat)
    half = math.sin((psi - phi) / 2) ** 2
    half += math.cos(phi) * math.cos(psi) * math.sin(math.radians(other_lon - lon) / 2) ** 2
    return 2 * EARTH_KM * math.asin(min(1.0, math.sqrt(half)))


@lru_cache(4096)  # every response of a group has the same truth
def parse_place_truth(truth: str) -> dict[str, Any]:
    """Return the truth by field, without empty fields. Raise UserError if there is nothing to grade."""
    message = f"the truth {truth[:200]!r} is not a JSON object with country, region, city, lat and lon"
    with as_user_error((ValueError, RecursionError), message):
        fields = json.loads(truth)
    need(isinstance(fields, dict), f"{message}; make the file with `python prepare_data.py geospot`")
    fields = fields | read_place(fields)
    place = {field: as_text(fields[field]) for field in NAME_FIELDS}
    place = {field: text for field, text in place.items() if normalize_name(text)}
    if coordinates := read_coordinates(fields):
        place["coordinates"] = coordinates
    need(place, f"{message}; make the file with `python prepare_data.py geospot`")
    return place


def matching_names(answer: dict[str, Any], truth: dict[str, str]) -> dict[str, float]:
    """Return 1 for each of country, region and city that is right, else 0.

    A city may be followed by its region and country, and a region by its country.
    """
    country = normalize_country(truth.get("country", ""))
    normalizers = {
        "country": normalize_country,
        "region": lambda text: normalize_region(text, country),
        "city": normalize_city,
    }
    names = {field: normalizers[field](truth[field]) for field in normalizers if field in truth}

    def is_right(field: str) -> bool:
        text = as_text(answer.get(field))
        if field not in names or not normalize_name(text):
            return False
        head, *tail = text.split(",")
        enclosing = [other for other in ("region", "country") if other in names and other != field]
        tail_matches = field != "country" and all(any(normalizers[o](m) == names[o] for o in enclosing) for m in tail)
        return normalizers[field](text) == names[field] or (tail_matches and normalizers[field](head) == names[field])

    return {field: float(is_right(field)) for field in normalizers}


def geospot_reward(response: str, truth: str, stage: GeospotStage = STAGES[-1]) -> dict[str, float]:
    """Return each part from 0 to 1, the weighted sum of the stage's parts as "reward", and the distance as "km".

    "km" is there only if response and truth have coordinates. If the truth lacks a part of the stage, its weight goes
    to the stage's other parts, or to all parts of the truth if it has none of the stage's. Raise UserError if the truth
    has nothing to grade; no response raises an error.
    """
    place = parse_place_truth(truth)
    answer = parse_answer(response)
    parts = matching_names(answer, place)
    coordinates = read_coordinates(answer) if "coordinates" in place else None
    km = {"km": distance_km(*coordinates, *place["coordinates"])} if coordinates else {}
    parts["coordinates"] = math.exp(-km["km"] / stage.tolerance_km) if km else 0.0
    paid = [part for part in stage.parts if part in place] or list(place)
    stage_weight, paid_weight = (sum(map(FIELD_WEIGHTS.get, names)) for names in (stage.parts, paid))
    return parts | km | {"reward": sum(FIELD_WEIGHTS[part] * parts[part] for part in paid) * stage_weight / paid_weight}


def answerable(truth: str, grade: Callable[[str], dict[str, float]]) -> bool:
    """Return whether a truth, given as the answer, earns all of its parts."""
    rewards = grade(truth)
    return all(rewards[part] > 0.999 for part in parse_place_truth(truth))


@register("geospot", "osv5m", answerable=answerable)
def geospot(response: str, example: Any, finish_reason: str = "stop", stage: Any = None) -> dict[str, float]:
    """Grade with the options of a reward.CurriculumStage; without options all parts count, at 25 km."""
    with as_user_error(UserError, f"row {example.uid!r}"):
        return geospot_reward(response, example.ground_truth, parse_stage_options(stage.options if stage else {}))


# --- an invented map --------------------------------------------------------------------------------------------------

TOY_INSTRUCTION = "Name country, region, city, coordinates."
COUNTRIES = dict(zip(COLOURS, ("Ardan", "Belmor", "Corvia", "Dunmar"), strict=True))  # by the colour of the coast
REGIONS = {"circle": "Northmark", "square": "Midmark", "triangle": "Southmark"}  # by the shape of the marks
INK = (20, 20, 20)
CITIES = ("Onewell", "Twowell", "Threewell")  # by the number of the marks


DEMO = {"see_steps": 300, "habit_steps": 60, "steps": 30}  # settings of demo.py


def toy_place(colour: str, shape: str, marks: int) -> dict[str, Any]:
    """Return a place of the toy map.

    Countries are at least 2,200 km apart, regions 222 km, cities 55 km, so that each stage asks for one thing more.
    """
    country, region = list(COLOURS).index(colour), list(REGIONS).index(shape)
    place = {"country": COUNTRIES[colour], "region": REGIONS[shape], "city": CITIES[marks - 1]}
    return place | {"lat": 60 - 20 * country - 2 * region, "lon": 20 * country + marks}


def toy_answer(place: dict[str, Any]) -> str:
    """Return the short answer that the toy policy has to write."""
    names = "; ".join(f"{field}: {place[field]}" for field in NAME_FIELDS)
    return f"{names}; coordinates: {place['lat']}, {place['lon']}"


def draw_map(rng: random.Random, colour: str, shape: str, marks: int) -> bytes:
    """Draw a pale island with a coloured coast and black marks in different cells."""
    image = Image.new("RGB", (SIDE, SIDE), (*(rng.randint(205, 225) for _ in range(2)), rng.randint(235, 255)))
    draw = ImageDraw.Draw(image)
    reaches = [(i * math.pi / 9, SIDE / 2 * rng.uniform(0.85, 1.0)) for i in range(18)]
    coast = [(SIDE / 2 + reach * math.cos(angle), SIDE / 2 + reach * math.sin(angle)) for angle, reach in reaches]
    draw.polygon(coast, fill=(245, 245, 240), outline=COLOURS[colour], width=6)
    draw_shapes(draw, rng, INK, shape, marks)
    return encode_png(image)


@in_one_split("geospot/")
def scenes(rng: random.Random) -> Scene:
    """Draw an island, and ask for its place."""
    look = rng.choice(list(COLOURS)), rng.choice(list(REGIONS)), rng.randint(1, len(CITIES))
    data, place = draw_map(rng, *look), toy_place(*look)
    return [data], [("place", f"{IMAGE_PLACEHOLDER}{TOY_INSTRUCTION}", toy_answer(place), json.dumps(place))]


toy = toy_of("geospot", scenes, ["place"])
