"""Numbers and units in answers, for geo3k and geospot. The file name begins with _ because this is no task."""

import re
import unicodedata
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

# --- numbers ------------------------------------------------------------------------------------------------------

# A number in digits without its sign: 3, 0.5, .5, 6.02e23, 1e-7
NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9.]))?"
# A number that stands alone, with thousands separators too. 48 characters bound the time; it is no sentence's end: `3.`
NUMERAL = re.compile(rf"(?=.{{1,48}}$)[+-]?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?|{NUMBER})(?<!\.)")
# `3 \times 10^{-4}`, `10⁻³`
SCIENTIFIC = re.compile(
    rf"(?<![\w.,^])(?:({NUMBER}) ?(?:\\times|\\cdot|[×·⋅∙*x]) ?)?10 ?"
    r"(?:\^ ?(?:([+-]?[0-9]{1,3})|\{ ?([+-]?[0-9]{1,3}) ?\})|([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,3}))(?![0-9])"
)


def with_exponents(text: str) -> str:
    r"""Return a text in which products with a power of ten are written with e: `3 \times 10^{-4}` -> `3e-4`."""

    def number(match: re.Match) -> str:
        exponent = unicodedata.normalize("NFKC", match[2] or match[3] or match[4]).replace("−", "-")
        return f"{match[1] or 1}e{exponent}"

    return SCIENTIFIC.sub(number, text) if "10" in text else text


def parse_numeral(text: str) -> Decimal | None:
    """Return the value of a number in digits (`-2.5`, `1,000`, `5e-05`, `3×10^-4`), or None for any other text."""
    text = with_exponents(text.strip().removesuffix(".").replace("−", "-"))
    return Decimal(text.replace(",", "")) if NUMERAL.fullmatch(text) else None


# --- units --------------------------------------------------------------------------------------------------------

# Size of a unit in mm, g and s; its kind, as M for mass or LT-1 for a speed; its names. Units of one kind are converted
UNIT_TABLE = """
0.001 L μm micrometer micrometers micrometre micrometres micron microns
0.000001 L nm nanometer nanometers nanometre nanometres
1 L mm MM millimeter millimeters millimetre millimetres
10 L cm CM Cm centimeter centimeters centimetre centimetres
100 L dm decimeter decimeters decimetre decimetres
25.4 L in inch inches
304.8 L ft foot feet
914.4 L yd yard yards
1000 L m meter meters metre metres
1000000 L km KM Km kilometer kilometers kilometre kilometres
1609344 L mi mile miles
0.001 M mg milligram milligrams
1 M g gram grams
1000 M kg KG Kg kilogram kilograms kilo kilos
1000000 M tonne tonnes
453.59237 M lb lbs pound pounds
28.349523125 M oz ounce ounces
0.001 T ms millisecond milliseconds
1 T s sec secs second seconds
60 T min mins minute minutes
3600 T h hr hrs hour hours
86400 T day days
604800 T week weeks
1000 L3 mL ml ML cc milliliter milliliters millilitre millilitres
1000000 L3 L liter liters litre litres
1000000/3.6 LT-1 kmh kph
1609344/3600 LT-1 mph
1000000 MLT-2 N newton newtons
1000000000 MLT-2 kN kilonewton kilonewtons
1000000000 ML2T-2 J joule joules
1000000000000 ML2T-2 kJ kilojoule kilojoules
4184000000 ML2T-2 cal calorie calories
4184000000000 ML2T-2 kcal kilocalorie kilocalories
3600000000000000 ML2T-2 kWh
1000000 ML2T-3 mW milliwatt milliwatts
1000000000 ML2T-3 W watt watts
1000000000000 ML2T-3 kW KW kilowatt kilowatts
1000000000000000 ML2T-3 MW megawatt megawatts
1 ML-1T-2 Pa pascal pascals
1000 ML-1T-2 kPa kilopascal kilopascals
1000000 ML-1T-2 MPa megapascal megapascals
101325 ML-1T-2 atm atmosphere atmospheres
1 T-1 Hz hertz
1000 T-1 kHz kilohertz
1000000 T-1 MHz megahertz
1 volt V volt volts
1000 volt kV kilovolt kilovolts
1 ampere A amp amps ampere amperes
0.001 ampere mA milliamp milliamps
1 ohm Ω ohm ohms
1000 ohm kΩ kilohm kilohms
1 kelvin K kelvin kelvins
1 ° celsius
1 fahrenheit fahrenheit
1 radian rad rads radian radians
1 mole mol mols mole moles
1 cent cent cents
100 cent dollar dollars usd
1 euro euro euros eur
1 yuan yuan rmb
1 month month months
1 year yr yrs year years
1 person person people persons
1 any unit units
"""
COUNTED_NOUNS = """
students apples oranges bananas boys girls children men women teachers workers players books pages cars trucks buses
bikes balls marbles coins cards tickets pencils pens eggs cups bottles boxes bags sides vertices corners edges faces
points dots triangles squares rectangles circles cubes blocks tiles ways steps moves games votes flowers plates dogs
cats birds houses rooms items pieces stars sticks shapes objects lines segments angles regions digits letters words
electrons protons neutrons atoms molecules bonds
"""  # nouns that are counted are units too, each of its own kind
# Words after a number that change its value, so that they are no unit
VALUE_WORDS = set(
    """
squared cubed root half halves third thirds quarter quarters percent plus minus times over less more tenths hundredths
hundred hundreds thousand thousands million billion trillion dozen dozens pair pairs couple factorial and
""".split()
)
Unit = tuple[Fraction, frozenset[tuple[str, int]]]  # its size, and the powers of its kinds


def read_unit_table() -> dict[str, Unit]:
    """Return the units by name: each line of UNIT_TABLE, and the words of COUNTED_NOUNS and their singulars."""
    units = {}
    for size, kind, *names in map(str.split, UNIT_TABLE.strip().splitlines()):
        size, _, divisor = size.partition("/")
        kinds = frozenset((k, int(power or 1)) for k, power in re.findall("([A-Z]|[a-z°]+)(-?[0-9]?)", kind))
        units |= dict.fromkeys(names, (Fraction(size) / Fraction(divisor or 1), kinds))
    for noun in COUNTED_NOUNS.split():
        units |= dict.fromkeys((noun, noun.removesuffix("s")), (Fraction(1), frozenset({(noun, 1)})))
    return units


UNITS = read_unit_table()
SYMBOLS = [name for name in UNITS if len(name) == 1 and name != "m"]  # `5 s` is a time, `5s` is a product
NAMES = sorted(UNITS.keys() - SYMBOLS, key=len, reverse=True)
LONG_NAMES = "|".join(name for name in NAMES if len(name) > 2 and name.islower())
SHORT_NAMES = "|".join(name for name in NAMES if len(name) <= 2 or not name.islower())
FACTOR = rf"(?:(?i:{LONG_NAMES})|{SHORT_NAMES}|(?<![0-9.)}}\]])[{''.join(SYMBOLS)}])"
FACTOR += r"(?![A-Za-z])\.?(?: ?\^ ?(?:-?[1-9]|\{ ?-?[1-9] ?\})| (?:squared|cubed))?"
UNIT = re.compile(
    rf"(?<![A-Za-z\\])(?:(square|sq|cubic|cu)\.? )?"
    rf"({FACTOR}(?:(?: ?[/*] ?| per | (?=[A-Za-z]+ ?\^ ?\{{? ?-)){FACTOR})*)"
    "(?: (?:tall|long|wide|high|deep|old))?$"
)
LAST_WORD = re.compile(r"([A-Za-zμΩ]+)[. ]*(?:\^[ {]*-?[1-9][ }]*)?$")
PART = re.compile(r"(/|per |)[ *]*(?!per )([A-Za-zμΩ]+)\.?(?: ?\^[ {]*(-?[1-9])[ }]*| (squared|cubed))?")
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
LAST_WORDS = {name.lower() for name in UNITS} | {"squared", "cubed", "tall", "long", "wide", "high", "deep", "old"}


@lru_cache(4096)
def split_unit(text: str) -> tuple[str, Unit | None]:
    """Return (value, unit) of a quantity such as `9.8 m/s^2` or `5 sq. units`, or (text, None) if it has no unit, no
    value, or two powers that contradict each other."""
    last = LAST_WORD.search(text)  # UNIT is slow, and few answers end in a word
    match = UNIT.search(text) if last and last[1].lower() in LAST_WORDS else None
    value = text[: match.start()].strip() if match else ""
    if not value or value[-1] in "+-*/^=<>≤≥≠≈" or re.fullmatch("[0-9-]+-[0-9]+", value):  # `30-60-90 triangle`
        return text, None
    size, kinds = Fraction(1), Counter()
    power = POWERS.get(match[1])
    for sign, name, exponent, word in PART.findall(match[2]):
        given = int(exponent) if exponent else POWERS.get(word)
        if power and given and power != given:
            return text, None
        total = (-1 if sign else 1) * (given or power or 1)
        unit_size, unit_kinds = UNITS.get(name) or UNITS[name.lower()]
        size *= unit_size**total
        kinds.update({kind: n * total for kind, n in unit_kinds})
        power = None
    powers = frozenset((kind, n) for kind, n in kinds.items() if n)
    return (value, (size, powers)) if powers else (text, None)  # `s/s` is no unit


def table(text: str) -> list[tuple[str, str]]:
    """Return the pairs of a table with lines `old -> new`; ~ in `new` is a space."""
    pairs = (line.partition(" ->") for line in text.strip("\n").splitlines())
    return [(old, new.removeprefix(" ").replace("~", " ")) for old, _, new in pairs]
