"""Tests of tasks/geospot.py: stages, names, the parser, distances, rows of files, and the invented map.

Names of places are those of ISO 3166 and of English usage. Distances are compared with a published example (Rosetta
Code's haversine task) and with the angle between vectors, which is another formula.
"""

import csv
import io
import json
import math
import random
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import cpu_limit
from PIL import Image
from scipy import ndimage

import reward
from errors import UserError
from prepare_data import ConvertConfig, ToyConfig, make_file, read_examples
from rewards.grade import check_tasks, grade
from tasks import geospot
from tasks._places import REGION_NAMES
from tasks.geospot import STAGES, GeospotStage, distance_km
from tasks.shapes import CELL

PARIS = {"country": "FR", "region": "Île-de-France", "city": "Paris", "lat": 48.8566, "lon": 2.3522}
PARTS = ("country", "region", "city", "coordinates")


def geospot_reward(response, truth, stage):
    """Return the parts and the reward, without the distance. `stage` is a stage or its index in STAGES."""
    stage = STAGES[stage] if isinstance(stage, int) else stage
    parts = geospot.geospot_reward(response, truth if isinstance(truth, str) else json.dumps(truth), stage)
    return {part: value for part, value in parts.items() if part != "km"}


def row(truth=PARIS, uid="row-7"):
    return SimpleNamespace(data_source="geospot", ground_truth=json.dumps(truth), extra={}, uid=uid)


def correct_parts(response, truth=PARIS, stage=4):
    """Return the names of the parts that are right; coordinates must be within a kilometre."""
    parts = geospot_reward(response, truth, stage)
    return " ".join(part for part in PARTS if parts[part] > 0.96)


# --- stages and weights -----------------------------------------------------------------------------------------------


def test_the_five_stages():
    first = [stage.first_step for stage in STAGES]
    assert first == [0, 100, 300, 600, 1000]
    assert [stage.tolerance_km for stage in STAGES] == [500, 200, 100, 50, 25]
    added = [set(stage.parts) - {"coordinates"} for stage in STAGES]
    assert added == [{"country"}, {"country"}, {"country", "region"}, set(PARTS[:3]), set(PARTS[:3])]
    assert ["coordinates" in stage.parts for stage in STAGES] == [False, False, False, False, True]
    assert sum(geospot.FIELD_WEIGHTS.values()) == pytest.approx(1)


@pytest.mark.parametrize("stage, maximum", list(enumerate([0.3, 0.3, 0.5, 0.7, 1.0])))
def test_a_perfect_answer_earns_the_weights_of_the_stage(stage, maximum):
    parts = geospot_reward(json.dumps(PARIS), PARIS, stage)
    assert parts == dict.fromkeys(PARTS, 1.0) | {"reward": pytest.approx(maximum)}
    assert geospot_reward(json.dumps(PARIS), json.dumps(PARIS), STAGES[stage]) == parts


def test_each_part_earns_its_weight():
    for part, weight in (("country", 0.3), ("region", 0.2), ("city", 0.2)):
        assert geospot_reward(json.dumps({part: PARIS[part]}), PARIS, 4)["reward"] == pytest.approx(weight)
    zero = {"country": "BR", "lat": 0.0, "lon": 0.0}
    degree = 6371.0088 * math.pi / 180  # km, one degree of longitude on the equator
    for stage, tolerance in enumerate([500, 200, 100, 50, 25]):
        parts = geospot_reward('{"country": "Chad", "lat": 0, "lon": 1}', zero, stage)
        assert parts["coordinates"] == pytest.approx(math.exp(-degree / tolerance), rel=1e-9) and parts["country"] == 0
    whole = PARIS | {"lat": 0.0, "lon": 0.0}
    answer = '{"country": "France", "lat": 0, "lon": 1}'
    assert geospot_reward(answer, whole, 0)["reward"] == pytest.approx(0.3)
    assert geospot_reward(answer, whole, 3)["reward"] == pytest.approx(0.3)
    assert geospot_reward(answer, whole, 4)["reward"] == pytest.approx(0.3 + 0.3 * math.exp(-degree / 25))
    city_stage = GeospotStage(0, ("city",), 1.0)
    assert geospot_reward('{"city": "Paris", "country": "Chad"}', PARIS, city_stage)["reward"] == pytest.approx(0.2)


def test_fields_that_the_truth_lacks_do_not_count():
    truth = {"country": "FR", "region": None, "city": "", "lat": 48.8566, "lon": 2.3522}
    answer = '{"country": "France", "region": "None", "city": "", "lat": 48.8566, "lon": 2.3522}'
    parts = geospot_reward(answer, truth, 4)
    assert parts == {"country": 1, "region": 0, "city": 0, "coordinates": 1, "reward": pytest.approx(1)}
    assert geospot_reward('{"country": "France"}', truth, 4)["reward"] == pytest.approx(0.5)
    # a row with no field that the stage pays for would never train, so all its fields count
    assert geospot_reward('{"city": "Paris"}', {"city": "Paris"}, 0)["reward"] == pytest.approx(0.3)
    near = geospot_reward("lat: 0; lon: 1", {"lat": 0, "lon": 0, "city": "Paris"}, 0)
    assert near["reward"] == pytest.approx(0.3 * 0.6 * near["coordinates"]) and near["reward"] > 0


# --- distances --------------------------------------------------------------------------------------------------------


def test_distances():
    assert distance_km(36.12, -86.67, 33.94, -118.40) == pytest.approx(2887.2599506 * 6371.0088 / 6372.8)
    assert distance_km(90, 0, -90, 77) == pytest.approx(math.pi * 6371.0088)
    assert distance_km(0, 179.5, 0, -179.5) == pytest.approx(distance_km(0, 0, 0, 1))  # across the date line
    rng = random.Random(0)
    for _ in range(1000):
        a, b = ((rng.uniform(-90, 90), rng.uniform(-180, 180)) for _ in range(2))
        x, y = (vector(*place) for place in (a, b))
        cross = math.hypot(x[1] * y[2] - x[2] * y[1], x[2] * y[0] - x[0] * y[2], x[0] * y[1] - x[1] * y[0])
        angle = math.atan2(cross, math.sumprod(x, y) if hasattr(math, "sumprod") else sum(map(float.__mul__, x, y)))
        assert distance_km(*a, *b) == pytest.approx(6371.0088 * angle, rel=1e-9)


def vector(lat, lon):
    phi, theta = math.radians(lat), math.radians(lon)
    return [math.cos(phi) * math.cos(theta), math.cos(phi) * math.sin(theta), math.sin(phi)]


# --- names ------------------------------------------------------------------------------------------------------------

COUNTRIES = """
FR | France; france; FRANCE; FR; fra; French Republic; the French Republic; France (FR); FR / France
US | USA; U.S.A.; us; U.S.; United States; the United States of America; United States (US); America
GB | UK; U.K.; Great Britain; United Kingdom; GBR; England; United Kingdom (UK)
KR | South Korea; Korea, Republic of; Republic of Korea; KOR
KP | North Korea; Democratic People's Republic of Korea; Democratic People’s Republic of Korea
CD | DR Congo; Democratic Republic of the Congo; The Democratic Republic of the Congo; COD; DRC
CG | Congo; Republic of the Congo; Congo-Brazzaville
CZ | Czechia; Czech Republic
CI | Ivory Coast; Côte d'Ivoire; Cote d’Ivoire; COTE DIVOIRE
TR | Turkey; Türkiye; Turkiye; TURKIYE
RU | Russia; Russian Federation
VN | Vietnam; Viet Nam
TW | Taiwan
LA | Laos; Lao People's Democratic Republic
NL | Netherlands; The Netherlands; Holland
AE | UAE; United Arab Emirates
LC | St. Lucia; Saint Lucia
BA | Bosnia and Herzegovina; Bosnia & Herzegovina
MM | Burma; Myanmar
SZ | Swaziland; Eswatini
MK | North Macedonia
BO | Bolivia
IR | Iran
SY | Syria
TZ | Tanzania
VE | Venezuela
MD | Moldova
CV | Cape Verde; Cabo Verde
XK | Kosovo; XK
GW | Guinea-Bissau
RE | Réunion; Reunion
BS | The Bahamas; Bahamas
PS | Palestine; Palestinian Territories; State of Palestine
HK | Hong Kong; Hong Kong SAR
BQ | Caribbean Netherlands
IE | Ireland; Republic of Ireland
BR | Brazil; Brasil
"""


@pytest.mark.parametrize("line", COUNTRIES.strip().splitlines())
def test_names_and_codes_of_countries(line):
    code, names = line.split(" | ")
    for name in names.split("; "):
        assert geospot.normalize_country(name) == code, name
        assert correct_parts(json.dumps({"country": name}), {"country": code}) == "country"
        assert correct_parts(json.dumps({"country": code}), {"country": name}) == "country"


def test_every_country_of_iso_3166_is_one_country():
    import pycountry

    for country in pycountry.countries:
        for name in (country.alpha_2, country.alpha_3, country.name, country.alpha_2.lower()):
            assert geospot.normalize_country(name) == country.alpha_2


def test_similar_names_are_different_countries():
    pairs = [("Niger", "Nigeria"), ("Guinea", "Guinea-Bissau"), ("Dominica", "Dominican Republic"), ("Austria", "AU")]
    pairs += [("Ireland", "Northern Ireland"), ("Iran", "Iraq"), ("Congo", "DR Congo"), ("Georgia", "GA"), ("Chad", "")]
    for name, other in pairs:
        assert geospot.normalize_country(name) != geospot.normalize_country(other)
    assert (
        geospot.normalize_country("Ardan") == "ardan" and geospot.normalize_country("") == ""
    )  # a name on the invented map stays a name


@pytest.mark.parametrize(
    "truth, given",
    [
        ({"country": "US", "region": "California"}, "CA"),
        ({"country": "US", "region": "California"}, "US-CA"),
        ({"country": "USA", "region": "CA"}, "State of California"),
        ({"country": "US", "region": "California"}, "california, USA"),
        ({"country": "JP", "region": "Tōkyō"}, "Tokyo Prefecture"),
        ({"country": "FR", "region": "Île-de-France"}, "Ile de France"),
        ({"country": "DE", "region": "Baden-Württemberg"}, "Baden Wurttemberg"),
    ],
)
def test_regions(truth, given):
    assert correct_parts(json.dumps({"region": given}), truth) == "region"


@pytest.mark.parametrize(
    "truth, given",
    [
        ("São Paulo", "Sao Paulo"),
        ("St. Louis", "Saint Louis"),
        ("New York City", "New York"),
        ("Suwon", "Suwon-si"),
        ("Łódź", "Lodz"),
        ("Washington, D.C.", "Washington DC"),
        ("Paris", "Paris, France"),
        ("Paris", "Paris, Île-de-France, FR"),
        ("'s-Hertogenbosch", "s Hertogenbosch"),
    ],
)
def test_cities(truth, given):
    assert correct_parts(json.dumps({"city": given}), PARIS | {"city": truth}) == "city"


SAME_REGIONS = """
JP Osaka, Osaka-fu | KR Gyeonggi-do, Gyeonggi Province | CN Beijing, Beijing Shi | JP Tokyo, Tokyo Metropolis
DE Bavaria, Bayern, BY, DE-BY | DE Lower Saxony, Niedersachsen | DE Hesse, Hessen
IT Tuscany, Toscana | IT Lombardy, Lombardia | IT Sicily, Sicilia | ES Catalonia, Catalunya, Cataluña, CT
ES Andalusia, Andalucía | ES Basque Country, País Vasco, Euskadi | ES Principality of Asturias, Asturias
PL Masovian Voivodeship, Mazowieckie | CZ Prague, Praha | SE Skåne County, Scania, Skåne län | GR Crete, Kríti
AT Vienna, Wien | FR Brittany, Bretagne | BE Flanders, Vlaams Gewest | US NY, New York, US-NY, State of New York
US Virginia, Commonwealth of Virginia, State of Virginia, VA | RU Moscow Oblast, Moskovskaya oblast', Moscow Region
US Washington DC, District of Columbia, DC, US-DC | UA Kyiv, Kiev | AR Buenos Aires, Provincia de Buenos Aires
AR Ciudad Autónoma de Buenos Aires, Autonomous City of Buenos Aires, CABA, Buenos Aires City | RU Moscow, Moskva, MOW
CH Canton of Zürich, Zurich, ZH | PT Lisbon, Lisboa | MX Mexico City, CDMX | NL North Holland, Noord-Holland
"""


@pytest.mark.parametrize("line", re.split(r"[|\n]", SAME_REGIONS.strip()))
def test_regions_have_several_names(line):
    country, names = line.split()[0], [name.strip() for name in line.strip()[3:].split(",")]
    for truth in names:
        for given in names:
            assert correct_parts(json.dumps({"region": given}), {"country": country, "region": truth}) == "region"


def test_regions_of_a_truth_without_a_country():
    assert correct_parts('{"region": "Bavaria"}', {"region": "Bayern"}) == "region"
    assert correct_parts('{"region": "Bavaria"}', {"region": "Sachsen"}) == ""
    assert correct_parts('{"region": "DC"}', {"region": "District of Columbia"}) == "region"
    assert correct_parts('{"region": "Moscow Oblast"}', {"region": "Moscow"}) == ""


def test_names_of_regions_are_those_of_iso_3166():
    """Each name to which REGION_NAMES maps another is a region of that country in pycountry, so none has a typo."""
    import pycountry

    lines = [(country, name) for country, pairs in REGION_NAMES.items() for _, name in pairs]
    assert len(lines) > 120
    missing = []
    for country, name in lines:
        regions = [geospot.normalize_name(region.name) for region in pycountry.subdivisions.get(country_code=country)]
        is_known = any(set(name.split()) <= set(region.split()) for region in regions)
        missing += [] if is_known else [f"{country} {name}"]
    assert not missing


def test_different_regions_stay_different():
    for country, name, other in (
        ("DE", "Saxony", "Lower Saxony"), ("DE", "Saxony", "Saxony-Anhalt"), ("DE", "BY", "BW"),
        ("US", "Virginia", "West Virginia"), ("AT", "Upper Austria", "Lower Austria"),
        ("US", "Washington", "Washington, D.C."), ("ES", "Catalonia", "Aragon"),
        ("RU", "Moscow Oblast", "Moscow"), ("UA", "Kyiv Oblast", "Kyiv"),
        ("AR", "Buenos Aires", "Ciudad Autónoma de Buenos Aires"),
    ):  # fmt: skip
        assert correct_parts(json.dumps({"region": name}), {"country": country, "region": other}) == ""


def test_a_city_with_its_state():
    place = {"country": "US", "region": "New York", "city": "New York City"}
    for given in ("New York, NY", "New York", "New York City, New York", "New York, NY, USA"):
        assert correct_parts(json.dumps({"city": given}), place) == "city"
    for given in ("Albany, NY", "New York, Texas", "York", "New York, Buffalo"):
        assert correct_parts(json.dumps({"city": given}), place) == ""


# --- a curriculum -----------------------------------------------------------------------------------------------------


def stage_with(**options):
    return SimpleNamespace(name="", number=0, options=options)


def test_a_stage_of_a_curriculum_decides_what_pays():
    near = PARIS | {"lat": PARIS["lat"] + 1}  # a degree of latitude: 111.2 km
    response, example = json.dumps(near), row()
    stage = stage_with(pays=["country", "coordinates"], tolerance_km=500)
    parts = geospot.geospot(response, example, "stop", stage)
    assert parts["reward"] == pytest.approx(0.3 + 0.3 * math.exp(-111.195 / 500), abs=1e-4)
    assert parts["km"] == pytest.approx(111.195, abs=1e-3)
    only = geospot.geospot(response, example, stage=stage_with(pays=["city"], tolerance_km=1))
    assert only["reward"] == pytest.approx(0.2)
    full = geospot_reward(response, PARIS, 4) | {"km": parts["km"]}  # without options, as in the last stage
    assert geospot.geospot(response, example) == geospot.geospot(response, example, stage=stage_with()) == full
    assert "km" not in geospot.geospot('{"country": "France"}', example)


def test_the_curriculum_equals_the_stages():
    assert [line["from"] for line in geospot.CURRICULUM] == [0, 100, 300, 600, 1000]
    assert json.loads(json.dumps(geospot.CURRICULUM)) == geospot.CURRICULUM
    assert len({line["name"] for line in geospot.CURRICULUM}) == 5
    for line in geospot.CURRICULUM:
        options = SimpleNamespace(options=line["reward"]["geospot"])
        for given in (PARIS, PARIS | {"lat": 48}, {"country": "FR"}):
            with_options = geospot.geospot(json.dumps(given), row(), stage=options)
            with_options.pop("km", None)
            stage = next(stage for stage in STAGES if stage.first_step == line["from"])
            assert with_options == geospot_reward(json.dumps(given), PARIS, stage)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pay": ["city"]}, "unknown options: 'pay'; use 'pays' and 'tolerance_km'"),
        ({"pays": ["town"]}, r"pays .* is \['town'\]; give a list of some of country, region, city, coordinates"),
        ({"pays": []}, "give a list"),
        ({"pays": "city"}, "give a list"),
        ({"tolerance_km": 0}, "tolerance_km of geospot is 0; give more than 0"),
        ({"tolerance_km": "25"}, "is '25'"),
        ({"tolerance_km": math.nan}, "is nan"),
        ({"tolerance_km": True}, "is True"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        geospot.geospot("", row(), stage=stage_with(**options))


# --- coordinates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lat, lon, share",
    [
        (-48.8566, -177.6478, 0.0),  # antipodal: half of the Earth's circumference away
        (2.3522, 48.8566, 0.0),  # swapped
        (0, 0, 0.0),
        ("NaN", "NaN", 0.0),
        ("inf", "-inf", 0.0),
        (1e999, 0, 0.0),
        ("1" * 400, 0, 0.0),
        (10**400, 10**400, 0.0),
        (91, 2.3522, 0.0),
        (48.8566, 362.3522, 0.0),
        (None, 2.3522, 0.0),
        ([48.8566], 2.3522, 0.0),
        (True, True, 0.0),
        ("٤٨.٨٥٦٦", "٢.٣٥٢٢", 0.0),  # Arabic digits: the prompt asks for JSON, which has only 0 to 9
        ("48°51'23.8\"N", "2°21'7.9\"E", 0.0),  # degrees, minutes and seconds are not read
        ("4.88566e1", "2.3522E0", 1.0),
        ("48.8566 N", "2.3522 W", None),
        (48.8566, 2.3522, 1.0),
    ],
)
def test_unusual_and_invalid_coordinates(lat, lon, share):
    earned = geospot_reward(json.dumps({"lat": lat, "lon": lon}), PARIS, 4)["coordinates"]
    assert earned == pytest.approx(share, abs=2e-3) if share is not None else earned < 0.01


@pytest.mark.parametrize(
    "text, read",
    [
        ("90, 180", (90, 180)),
        ("-90, -180", (-90, -180)),
        ("90.01, 0", None),
        ("0, -180.01", None),
    ],
)
def test_the_largest_degrees(text, read):
    coordinates = geospot.read_coordinates({"coordinates": text})
    assert coordinates is None if read is None else coordinates == pytest.approx(read, rel=1e-12)
    if read == (90, 180):
        assert geospot.read_coordinates({"lat": 90.0, "lon": 180}) == read


def test_a_truth_at_0_0_is_a_place():
    assert geospot_reward('{"lat": 0, "lon": 0}', {"lat": 0, "lon": 0}, 4)["coordinates"] == 1.0
    assert geospot.distance_km(10, 20, -10, -160) == pytest.approx(math.pi * geospot.EARTH_KM)


# --- the parser -------------------------------------------------------------------------------------------------------

ALL = " ".join(PARTS)
READABLE = [
    '{"country": "France", "region": "Ile-de-France", "city": "Paris", "lat": 48.8566, "lon": 2.3522}',
    '```json\n{"country": "FR", "region": "Île-de-France", "city": "Paris", "lat": "48.8566", "lon": "2.3522"}\n```',
    '<think>London? {"country": "GB"}</think> {"Country": "fra", "State/Province": "Île-de-France", "City": "PARIS", '
    '"coordinates": [48.8566, 2.3522]}',
    '{"location": {"country": "France", "region": "Île-de-France", "city": "Paris"}, '
    '"coordinates": {"latitude": 48.8566, "longitude": 2.3522}, "confidence": 0.9}',
    "{'country': 'France', 'region': 'Île-de-France', 'city': 'Paris', 'lat': 48.8566, 'lon': 2.3522}",
    "Country: France\nRegion: Île-de-France\nCity: Paris\nCoordinates: 48.8566, 2.3522",
    "- **Country**: France\n- **Region:** Île-de-France\n- **City**: *Paris*\n- **Coordinates**: (48.8566°, 2.3522°)",
    "country: France; region: Île-de-France; city: Paris; coordinates: 48.8566° N, 2.3522° E",
    "Country: France, Region: Île-de-France, City: Paris, Latitude: 48.8566, Longitude: 2.3522.",
    "1. Country = France\n2. Region = Île-de-France\n3. City = Paris\n4. Coordinates = 48.8566°N 2.3522°E",
    "Country：France\nRegion：Île-de-France\nCity：Paris\nLatitude/Longitude：48.8566, 2.3522",
    "The signs are in French.\n\ncountry: France\nregion: Île-de-France\ncity: Paris\nlat: 48.8566\nlng: 2.3522\n",
    "Reasons. " * 9000 + '{"country": "FR", "region": "Île-de-France", "city": "Paris", "lat": 48.8566, "lon": 2.3522}',
    "\\boxed{" + json.dumps(PARIS) + "}",
]
SOUTH = {"country": "AU", "lat": -33.8688, "lon": 151.2093}


@pytest.mark.parametrize("response", READABLE, ids=lambda text: text[:40])
def test_readable_forms(response):
    assert correct_parts(response) == ALL


@pytest.mark.parametrize(
    "text",
    ["-33.8688, 151.2093", "33.8688 S, 151.2093 E", "33.8688° S 151.2093° E", "[-33.8688; 151.2093]"]
    + ["−33.8688,151.2093", "-33.8688° S, +151.2093° E"],
)
def test_readable_forms_of_coordinates(text):
    assert correct_parts(f"coordinates: {text}", SOUTH) == "coordinates"
    assert correct_parts(json.dumps({"coordinates": text}), SOUTH) == "coordinates"


WRONG = [
    "", " ", "{}", "France", "I do not know", "country:", "country: ?", '{"country": ""}', '{"country": null}',
    "country: France or Spain", "country: France, Spain", "country: France/Spain", "country: France and Spain",
    '{"country": "France"} {"country": "Spain"}', '[{"country": "France"}, {"country": "Spain"}]',
    '{"country": "France", "country": "Spain"}', '{"country": ["France", "Spain"]}', "country: France\ncountry: Spain",
    '{"country": ["France"]}', '{"country": {"name": "Spain", "other": "France"}}', '{"country": true}',
    "country: not France", "country: Frances", "country: selgeuzF ecnarF", "country: Fr4nce", "country: Frаnce",
    "city: Paris, Lyon", "city: Paris, Texas", "city: Paris or Lyon", "city: Lyon, Paris", "city: Par",
    "region: France", "city: any of Paris London Rome", "region: Île-de-France, Bretagne", "city: Paris<|im_end|>",
    "<think>country: France", "<think>country: France</think>", "country: France</think> I cannot say",
    geospot.INSTRUCTION, "coordinates: 48.8566", "coordinates: 2.3522, 48.8566", "coordinates: 48.8566, 2.3522, 3",
    "coordinates: 48.8566 S, 2.3522 E", "coordinates: -48.8566 N, 2.3522 E", "coordinates: 48.8566 E, 2.3522 N",
    "coordinates: 408.8566, 2.3522", "coordinates: 48.8566, 362.3522", "coordinates: nan, nan", "coordinates: inf, 2",
    '{"lat": NaN, "lon": NaN}', '{"lat": Infinity, "lon": 2}', '{"lat": 1e400, "lon": 2}', '{"lat": 48.8566}',
    '{"lat": [48.8566], "lon": [2.3522]}', '{"lat": "48.8566, 2.3522", "lon": ""}', '{"lat": true, "lon": false}',
    '{"lat": 48.8566, "lon": 2.3522, "lat": 10}', '{"coordinates": [48.8566, 2.3522, 0]}', '{"coordinates": []}',
    '{"lat": ' + "9" * 1500 + ', "lon": 2}', "coordinates: 48.8566, 2.3522 or 51.5, 0",
    '{"country": "France' + "e" * 200, "coordinates: 48°99'23.8\"N 2°21'7.9\"E",
    "country: F\nrance", "country France",
]  # fmt: skip


@pytest.mark.parametrize("response", WRONG, ids=lambda text: text[:50])
def test_wrong_and_ambiguous_responses_earn_nothing(response):
    assert correct_parts(response) == ""


def test_a_contradiction_affects_only_its_own_field():
    assert correct_parts('{"country": "France"} {"city": "Lyon"} {"city": "Paris"}') == "country"
    assert correct_parts('{"country": "France"} {"country": "France", "city": "Paris"}') == "country city"
    assert correct_parts('{"country": "France"') == "country"  # truncated after a complete field


# --- bad truths -------------------------------------------------------------------------------------------------------


NO_PLACE = ["", "Paris", "[]", "{}", "null", "NaN", "[" * 5000, '{"country": ""}', '{"lat": 91, "lon": 0}']


@pytest.mark.parametrize("truth", NO_PLACE)
def test_a_truth_without_a_place_is_refused(truth):
    with pytest.raises(UserError, match="is not a JSON object with country.*|make the file with"):
        geospot_reward("country: France", truth, 4)
    bad = SimpleNamespace(data_source="geospot", ground_truth=truth, extra={}, uid="row-7")
    with pytest.raises(UserError, match="row 'row-7'"):
        check_tasks([bad])


def test_valid_truths_are_accepted_and_the_default_is_the_last_stage():
    truths = [
        PARIS,
        SOUTH,
        {"city": "Paris"},
        {"latitude": 1, "longitude": 2},
        {"coordinates": [1.5, -2.5]},
        {"country": "Korea (South)"},
        {"lat": 0, "lon": -180},
    ]
    truths += [{"country": "A" * 100, "lat": "1.5", "lon": "2.5"}]
    assert check_tasks(row(truth, str(i)) for i, truth in enumerate(truths)) == {"geospot": len(truths)}
    assert grade(json.dumps(PARIS), row())["reward"] == pytest.approx(1.0)  # no step is given: the last stage
    assert geospot.geospot(json.dumps(PARIS), row())["reward"] == pytest.approx(1.0)
    assert reward.task_name("osv5m/osv5m") == "geospot"


# --- any text ---------------------------------------------------------------------------------------------------------


def generate_texts(n, seed=0):
    rng = random.Random(seed)
    pieces = ['{"country": ', "France", "country:", "city =", "lat", "lon:", "48.85", "<think>", "</think>", "1e9"]
    pieces += list(" °'\"N,{}[]:\n\\-٤\u200b\ud800ﬁİ𝟒")
    for _ in range(n):
        if rng.random() < 0.5:
            yield "".join(rng.choices(pieces, k=rng.randint(0, 60)))
        else:
            text = list(rng.choice(READABLE)[-300:])
            for _ in range(rng.randint(1, 8)):
                text[rng.randrange(len(text))] = rng.choice(pieces)
            yield "".join(text)


def test_ten_thousand_random_texts():
    texts = list(generate_texts(10_000))
    with cpu_limit(100):
        for text in texts:
            parts = geospot_reward(text, PARIS, 4)
            assert set(parts) == {*PARTS, "reward"} and all(0 <= value <= 1.0000001 for value in parts.values())


HOSTILE = ['{"a":', "[", "{", "{[", '{"country":"', "country:", "country: : ", "a" * 30 + " ", "<think>", "</think>"]
HOSTILE += ["lat: 1, lon: 1\n", "48.8566, ", " ", "9", "°", '"', "(", "<|", "<", "İ", "\u0301", "{}"]
HOSTILE += ["country" + " " * 28]


@pytest.mark.parametrize("piece", HOSTILE)
def test_long_texts_are_quick(piece):
    for before in ("", "coordinates: ", '{"country": "'):
        text = before + piece * (100_000 // len(piece))
        with cpu_limit():
            geospot_reward(text, PARIS, 4)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (30, 20), (9, 90, 200)).save(tmp_path / "a.jpg")
    return tmp_path / "a.jpg"


def convert_files(folder, *files, **options):
    make_file("geospot", ToyConfig(input=tuple(map(str, files)), out=str(folder / "out.parquet"), **options))
    return read_examples(folder / "out.parquet", ConvertConfig(out=""))[0]


def write_csv(path, *rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


PLACE = {"country": "FR", "region": "Île-de-France", "city": "Paris", "lat": "48.8566", "lon": "2.3522"}


def test_rows_of_csv_jsonl_and_parquet(tmp_path, image):
    csv_file = write_csv(tmp_path / "one.csv", {"image": "a.jpg", **PLACE, "camera": "x"})
    (tmp_path / "two.jsonl").write_text(json.dumps({"image": "a.jpg", **PARIS}) + "\n")
    cell = {"bytes": image.read_bytes(), "path": None}
    pq.write_table(pa.Table.from_pylist([{"image": cell, **PARIS}]), tmp_path / "three.parquet")
    examples = convert_files(tmp_path, csv_file, tmp_path / "two.jsonl", tmp_path / "three.parquet")
    assert len(examples) == 3 and len({e.uid for e in examples}) == 3
    for example in examples:
        assert example.ground_truth == json.dumps(PARIS, ensure_ascii=False)  # not escaped, so readable
        assert example.images == [image.read_bytes()]
        assert example.messages == [{"role": "user", "content": f"<image>{geospot.INSTRUCTION}"}]
        assert example.data_source == "geospot"
    assert examples[0].extra["camera"] == "x"
    assert check_tasks(examples) == {"geospot": 3}
    [example] = convert_files(tmp_path, tmp_path / "two.jsonl", instruction="Where is it?")
    assert example.messages[0]["content"] == "<image> Where is it?"


def test_rows_of_osv_5m(tmp_path, image):
    names = {"latitude": "48.8566", "longitude": "2.3522", "sub-region": "Paris"}
    place = {key: PLACE[key] for key in ("country", "region", "city")} | names
    (tmp_path / "images" / "07").mkdir(parents=True)
    image.rename(tmp_path / "images" / "07" / "123456789.jpg")
    metadata = {"id": "123456789", "thumb_original_url": "https://gone.invalid/"}
    table = write_csv(tmp_path / "test.csv", metadata | place)
    [example] = convert_files(tmp_path, table, image_root=str(tmp_path / "images"), split="test")
    assert json.loads(example.ground_truth) == PARIS and example.extra["sub-region"] == "Paris"
    row = {"image": {"bytes": example.images[0], "path": "x.jpg"}, **place, "latitude": 48.8566, "longitude": 2.3522}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "osv.parquet")
    [example] = convert_files(tmp_path, tmp_path / "osv.parquet")
    assert json.loads(example.ground_truth) == PARIS


@pytest.mark.parametrize("lat, lon", [("46.1234567890123456", "-1.23456789012345678"), ("4.2e-05", "-7E-05")])
def test_all_digits_of_coordinates_are_kept(tmp_path, image, lat, lon):
    (tmp_path / "osv.csv").write_text(f"image,latitude,longitude,country\na.jpg,{lat},{lon},FR\n")
    [example] = convert_files(tmp_path, tmp_path / "osv.csv")
    assert geospot_reward(f'{{"lat": {lat}, "lon": {lon}}}', example.ground_truth, 4)["coordinates"] == 1.0
    assert json.loads(example.ground_truth)["lat"] == float(lat)


def test_wrong_rows_are_refused_with_a_reason(tmp_path, image):
    for change, message in [
        ({"lat": "148"}, "lat '148' and lon '2.3522': expected degrees"),
        ({"lon": ""}, "lat '48.8566' and lon None: expected degrees"),
        ({"city": "?"}, "city is '\\?', expected a name of at most 100 characters"),
        ({"region": "x" * 101}, "region is 'xxx"),
        ({"image": ""}, "no image: looked for columns images, image, image_url"),
        ({"image": "b.jpg"}, "b.jpg"),
        (dict.fromkeys(PLACE, ""), "no country, region, city, lat or lon"),
    ]:
        table = write_csv(tmp_path / "bad.csv", {"image": "a.jpg", **PLACE}, {"image": "a.jpg", **PLACE, **change})
        with pytest.raises(UserError, match=f"bad.csv line 3: .*{message}"):
            convert_files(tmp_path, table)
    with pytest.raises(UserError, match="--input: give CSV"):
        convert_files(tmp_path)
    (tmp_path / "x.xml").write_text("x")
    with pytest.raises(UserError, match="ends in .json, .jsonl, .csv, .parquet"):
        convert_files(tmp_path, tmp_path / "x.xml")
    (tmp_path / "x.parquet").write_text("x")
    with pytest.raises(UserError, match="x.parquet is not a parquet file"):
        convert_files(tmp_path, tmp_path / "x.parquet")


def test_a_place_on_the_equator_or_without_a_name(tmp_path, image):
    rows = [{"image": "a.jpg", "lat": 0, "lon": 0.0}, {"image": "a.jpg", "country": "Gabon", "lat": 0.0, "lon": 9.5}]
    (tmp_path / "zero.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    truths = [json.loads(example.ground_truth) for example in convert_files(tmp_path, tmp_path / "zero.jsonl")]
    assert truths == [{"lat": 0.0, "lon": 0.0}, {"country": "Gabon", "lat": 0.0, "lon": 9.5}]
    pq.write_table(
        pa.Table.from_pylist([{"image_url": None, "image": None, "city": "Rome"}]), tmp_path / "none.parquet"
    )
    with pytest.raises(UserError, match="none.parquet row 0: no image"):
        convert_files(tmp_path, tmp_path / "none.parquet")


def test_an_image_url_must_be_public(tmp_path):
    table = write_csv(tmp_path / "urls.csv", {"image_url": "http://127.0.0.1:9/a.jpg", **PLACE})
    with pytest.raises(UserError, match="127.0.0.1.*not public"):
        convert_files(tmp_path, table)


# --- the invented map -------------------------------------------------------------------------------------------------


def test_toy_is_deterministic_and_its_splits_share_no_image():
    train, again = list(geospot.toy(200, "train", 0)), list(geospot.toy(20, "train", 0))
    test, other = list(geospot.toy(100, "test", 0)), list(geospot.toy(100, "train", 1))
    assert train[:20] == again
    images = [row["images"][0]["bytes"] for row in train + test + other]
    assert len(set(images)) == 400
    for row in train[:20]:
        with Image.open(io.BytesIO(row["images"][0]["bytes"])) as image:
            assert image.size == (84, 84)
    truths = {row["reward_model"]["ground_truth"] for row in train}
    assert len(truths) == 4 * 3 * 3  # each place of the map


def test_a_map_shows_its_place():
    """The pixels have the right colours, coast radii and width, and number, form, size and place of the marks."""
    reach, width, jitter, forms = [], [], [], {shape: [] for shape in geospot.REGIONS}
    middle = geospot.SIDE / 2
    for n, (colour, shape, marks) in enumerate(3 * list(product(geospot.COLOURS, geospot.REGIONS, (1, 2, 3)))):
        data = geospot.draw_map(random.Random(n), colour, shape, marks)
        pixels = np.asarray(Image.open(io.BytesIO(data)))
        coast, ink, land = ((pixels == c).all(-1) for c in (geospot.COLOURS[colour], geospot.INK, (245, 245, 240)))
        [sea] = np.unique(pixels[~(coast | ink | land)], axis=0)
        assert (sea >= (205, 205, 235)).all() and (sea <= (225, 225, 255)).all() and land.sum() > 2000
        labels, n_marks = ndimage.label(ink)
        boxes = ndimage.find_objects(labels)
        cells = [tuple((side.start + side.stop) / 2 / CELL - 0.5 for side in box) for box in boxes]
        assert n_marks == marks == len({(round(y), round(x)) for y, x in cells})
        jitter += [CELL * (place - round(place)) for cell in cells for place in cell]
        forms[shape] += [(*ink[box].shape, ink[box].mean()) for box in boxes]
        for i in range(18):
            distances = np.arange(0, middle - 0.5, 0.25)
            angle = i * np.pi / 9
            x, y = (np.rint(middle + distances * f(angle)).astype(int) for f in (np.cos, np.sin))
            if not ink[y, x].any():
                on_coast = distances[coast[y, x]]
                reach.append(on_coast.max())
                width.append(np.ptp(on_coast))
    assert 0.82 * middle < min(reach) < 0.87 * middle and max(reach) > 0.98 * middle
    assert 5.3 < np.mean(width) < 6.2
    assert -3 <= min(jitter) < -1.5 and 1.5 < max(jitter) <= 3
    for shape, share in (("circle", math.pi / 4), ("square", 1.0), ("triangle", 0.5)):
        heights, widths, shares = zip(*forms[shape], strict=True)
        assert {min(heights), min(widths)} == {18} and {max(heights), max(widths)} == {22}
        assert shares == pytest.approx([share] * len(shares), abs=0.03)


def test_toy_answers_earn_the_full_reward_and_places_are_far_apart():
    places = [geospot.toy_place(c, s, n) for c in geospot.COLOURS for s in geospot.REGIONS for n in (1, 2, 3)]
    for place in places:
        assert correct_parts(geospot.toy_answer(place), place) == ALL
    distances = {"country": [], "region": [], "city": []}
    for a in places:
        for b in places:
            if first := next((part for part in distances if a[part] != b[part]), None):
                distances[first].append(distance_km(a["lat"], a["lon"], b["lat"], b["lon"]))
                parts = geospot_reward(geospot.toy_answer(a), b, 4)
                assert parts["reward"] < 0.75 and parts[first] == 0
    assert min(distances["country"]) > 2200 and min(distances["region"]) > 222 and min(distances["city"]) > 55
    assert not {geospot.normalize_country(name) for name in geospot.COUNTRIES.values()} & set(
        geospot.country_codes().values()
    )


def test_toy_becomes_a_file(tmp_path):
    make_file("geospot", ToyConfig(toy=True, n=12, split="test", out=str(tmp_path / "toy.parquet")))
    examples, bad = read_examples(tmp_path / "toy.parquet", ConvertConfig(out=""))
    assert len(examples) == 12 and not bad and check_tasks(examples) == {"geospot": 12}
    with pytest.raises(UserError, match="--split 'val': toys have warm, train, test"):
        list(geospot.toy(1, "val", 0))


def test_the_documented_example():
    import doctest

    [page] = [p for p in Path(__file__).parent.parent.glob("docs/*.md") if "## geospot" in p.read_text()]
    section = page.read_text().partition("## geospot")[2].partition("\n## ")[0]
    test = doctest.DocTestParser().get_doctest(section, {}, "geospot", str(page), 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted == 5 and result.failed == 0
