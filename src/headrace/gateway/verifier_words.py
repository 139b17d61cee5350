"""The words that :mod:`headrace.gateway.verifier` knows: English, and enough of others to tell them apart."""

from __future__ import annotations

import re


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _families(text: str) -> dict[str, str]:
    """Every word of a line to the line's first word."""
    out: dict[str, str] = {}
    for line in text.strip().splitlines():
        first, *others = line.split()
        out |= dict.fromkeys((first, *others), first)
    return out


def _pairs(text: str) -> frozenset[frozenset[str]]:
    """Lines such as ``open/close lend/borrow`` as unordered pairs."""
    return frozenset(frozenset(pair.split("/")) for pair in text.split())


NEGATIONS = _set(
    "not no never none nobody nothing nowhere neither nor without except excluding hardly unless lack "
    "prevent avoid non"
)
"""They count: two texts with different numbers of them do not say the same."""

NUMBERS = _families(
    """
    0 zero
    2 two
    3 three
    4 four
    5 five
    6 six
    7 seven
    8 eight
    9 nine
    10 ten
    11 eleven
    12 twelve dozen
    13 thirteen
    14 fourteen
    15 fifteen
    16 sixteen
    17 seventeen
    18 eighteen
    19 nineteen
    20 twenty
    30 thirty
    40 forty
    50 fifty
    60 sixty
    70 seventy
    80 eighty
    90 ninety
    100 hundred
    1000 thousand
    1000000 million
    1000000000 billion
    1st first
    2nd second
    3rd third
    4th fourth
    5th fifth
    6th sixth
    7th seventh
    8th eighth
    9th ninth
    10th tenth
    half halves
    quarter quarters
    double twice
    triple thrice
    """
)

UNITS = _families(
    """
    kilometre km kms kilometres kilometer kilometers
    metre metres meter meters
    centimetre cm centimetres centimeter centimeters
    millimetre mm millimetres millimeter millimeters
    mile miles
    foot ft feet
    inch inches
    yard yards
    kilogram kg kgs kilo kilos kilograms
    gram grams gramme grammes
    milligram mg milligrams
    pound lb lbs pounds
    ounce oz ounces
    tonne tonnes ton tons
    litre litres liter liters
    millilitre ml millilitres milliliter milliliters
    gallon gallons
    pint pints
    cup cups
    tablespoon tbsp tablespoons
    teaspoon tsp teaspoons
    celsius centigrade
    fahrenheit
    kelvin
    secs sec seconds
    minute minutes min mins
    hour hours hr hrs
    day days
    week weeks
    month months
    year years yr yrs
    decade decades
    century centuries
    percent % percentage
    dollar $ dollars usd
    euro € euros eur
    sterling £ gbp
    yen ¥ jpy
    kilobyte kb kilobytes
    megabyte mb megabytes
    gigabyte gb gigabytes
    terabyte tb terabytes
    bit bits
    byte bytes
    volt volts
    watt watts
    kilowatt kw kilowatts
    calorie calories kcal
    degree degrees °
    mph
    kmh kph
    """
)
LETTER_UNITS = {"g": "gram", "l": "litre", "h": "hour", "c": "celsius", "f": "fahrenheit", "m": "metre"}
"""Units only behind a number or behind "how many"."""

TIMES = _set(
    "monday tuesday wednesday thursday friday saturday sunday weekday weekend january february march april "
    "june july august september october november december spring summer autumn winter today tomorrow "
    "yesterday tonight now currently last next previous current latest upcoming morning noon afternoon "
    "evening night midnight before after within since until during ago"
)
"""Stems that say when: a text that has one and a text that does not ask for different things."""

LIMITING = _set(
    "all every each only both most few several always sometimes often usually atleast atmost lessthan "
    "morethan me"
)
"""Stems that say of how many, how often, or to whom: they count like the words of TIMES."""

DIRECTIONS = _families(
    "from\nto\ninto\nonto\nthan\nby via using through over\nagainst\ntowards\noff\nfor\nabout\nas"
)
"""Prepositions that say which role the next word has."""
STRICT_DIRECTIONS = frozenset({"from", "by", "than", "against", "off", "towards"})
"""Without them the next word has another role."""

SYNONYMS = _families(
    """
    buy purchase
    fix repair mend
    big large
    fast quick rapid speedy
    remove delete erase
    price cost fee
    car automobile
    movie film
    benefit advantage upside
    drawback disadvantage downside
    author writer
    defeat beat
    reduce lower decrease
    raise increase
    enable activate turnon
    disable deactivate turnoff
    leave depart
    allow permit
    tall high
    ocean sea
    autumn fallseason
    picture image photo photograph
    phone cellphone smartphone mobile
    email mail
    doctor physician
    begin start commence
    end finish
    show display
    child kid
    all every each
    sofa couch
    salary wage
    """
)
"""By stem. Only words that can stand for each other almost everywhere."""

OPPOSITES = _pairs(
    "open/close open/shut raise/reduce rise/fall enable/disable buy/sell rent/buy lend/borrow begin/end "
    "begin/stop stop/continue big/small tall/low tall/short long/short best/worst good/bad better/worse "
    "more/less old/new old/young oldest/newest early/late early/latest hot/cold warm/cool left/right up/down "
    "add/remove create/remove allow/forbid allow/block include/exclude inside/outside indoor/outdoor "
    "above/below over/under win/lose gain/lose find/lose benefit/drawback benefit/risk pro/con accept/reject "
    "accept/decline push/pull upload/download leave/arrive send/receive teach/learn hire/fire expand/shrink "
    "north/south east/west male/female man/woman husband/wife mother/father son/daughter brother/sister "
    "light/dark light/heavy soft/hard easy/difficult easy/hard cheap/expensive rich/poor strong/weak "
    "fast/slow hot/slow wet/dry clean/dirty full/empty near/far thick/thin wide/narrow deep/shallow "
    "raw/cook fresh/frozen boil/freeze melt/freeze build/fall build/destroy import/export encode/decode "
    "compress/extract ascend/descend minimum/maximum atleast/atmost lessthan/morethan increment/decrement "
    "front/back top/bottom first/last join/leave enter/exit arrive/go cancel/renew cancel/book keep/remove "
    "public/private internal/external local/remote positive/negative true/false love/hate like/dislike "
    "safe/danger alive/dead birth/death born/die cause/prevent day/night question/answer read/write "
    "input/output row/column rent/sell marry/divorce save/spend debit/credit asset/liability"
)
"""By stem, after SYNONYMS."""

PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "mis", "de")
"""Of opposites: ``happy`` and ``unhappy``."""

IRREGULAR = _families(
    """
    eat ate eaten
    write wrote written
    beat beaten
    fall fell fallen
    build built
    keep kept
    leave left
    run ran
    drink drank drunk
    buy bought
    sell sold
    lose lost
    win won
    go went gone
    take took taken
    give gave given
    pay paid
    send sent
    spend spent
    teach taught
    fly flew flown
    make made
    get got gotten
    see saw seen
    find found
    begin began begun
    break broke broken
    choose chose chosen
    grow grew grown
    know knew known
    lead led
    person people
    child children
    man men
    woman women
    tooth teeth
    colour color colors colours colored coloured
    favour favor favors favours
    centre center centers centres
    neighbour neighbor neighbors neighbours
    organise organize
    grey gray
    program programme programmes programs
    """
)

FILLERS = _set(
    # articles, pronouns and what refers to the one who asks
    "a an the this that these those it its i we you my our your mine ours yours myself there here "
    # auxiliaries: tense and modality are read on their own
    "is are was were be been being am do does did doing done has have had having can could may might shall "
    "should will would must ought better allowed permitted legal possible able ok okay need needed needs "
    "require requires required necessary "
    # question words: read on their own
    "what which who whom whose when where why how "
    # joints
    "and or vs versus but if then so of in on at with also just very really too please kindly "
    "mean means meaning want like know some any exactly actually basically"
)
"""Words whose presence does not change what is asked."""

OPENERS = _set("name list explain define describe calculate compute translate tell")
"""Fillers where a text begins with them."""

ANSWERING = _set("answer question sure certainly course yes here following as")
"""Words of an answer that are about the answering."""

DEGREES = _set("long far often old much many come else")
"""Fillers behind "how"."""

MODES = {
    "permission": _set("can could may allowed permitted legal possible able ok okay"),
    "duty": _set("must need needed needs require requires required necessary"),
    "advice": _set("should ought better"),
}
"""Whether a thing may, must or should be done."""

FOREIGN = {
    "German": _set("der die das und ist nicht wie ich ein eine man auf zu wer wo warum für mit"),
    "French": _set("le la les est et comment je un une pas que qui pourquoi dans où pour des"),
    "Spanish": _set("el la los es y cómo como yo un una qué que quién por dónde para del no"),
    "Italian": _set("il lo la è e come io un una non che chi perché dove per di del"),
    "Portuguese": _set("o a os é e como eu um uma não que quem por onde para do da"),
    "Dutch": _set("de het een en is niet hoe ik wie waar waarom voor met op van"),
}
"""Common words, to tell languages apart; only what is not English too counts."""

ENGLISH = _set(
    "the a an is are was were do does did how what which who why when where can could should i my you your "
    "of in on at to for with from and or not it"
)


def _rules(text: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    out = []
    for line in text.strip().splitlines():
        pattern, _, replacement = line.strip().rpartition(" -> ")
        out.append((re.compile(pattern), replacement.replace("''", "")))
    return tuple(out)


PHRASES = _rules(
    r"""
    \b(what|who|how|where|when|why|that|it|there|here)'s\b -> \1 is
    \bcan't\b|\bcannot\b -> can not
    \bwon't\b -> will not
    \b(\w+)n't\b -> \1 not
    \b(\w+)'(?:re|m)\b -> \1 are
    \b(\w+)'ve\b -> \1 have
    \b(\w+)'ll\b -> \1 will
    \b(\w+)'d\b -> \1 would
    \b(\w+)'s?(?!\w) -> \1
    & -> and
    (?<![^\W_])(\d+)(?=(?:km|cm|mm|kg|mg|g|ml|l|lbs?|oz|mph|h|hrs?|mins?|[kmgt]b)\b) -> \1 ''
    \bno (?:more|greater|later) than\b|\bat (?:the )?most\b|\bup to\b|\bmaximum\b|\bmax\b -> atmost
    \bno (?:less|fewer|earlier) than\b|\bat (?:the )?least\b|\bminimum\b|(?<!\d )\bmin\b -> atleast
    \b(?:less|fewer) than\b|\bunder(?= \d)|\bbelow(?= \d) -> lessthan
    \b(?:more|greater) than\b|\bover(?= \d)|\babove(?= \d) -> morethan
    \b(?:turn|switch)(?:ed|ing|s)? on\b -> turnon
    \b(?:turn|switch)(?:ed|ing|s)? off\b -> turnoff
    \bin (?:the )?fall\b -> in fallseason
    \b(?:next to|share a border)\b -> border
    \b(write|give|show|tell|send|make|get) me\b -> \1
    \bhelp me(?: to)?\b -> ''
    \bhow (?:do|would|can) (?:you|i|we) say\b -> translate
    \bwhat (?:is|are) the (\w+ )?(?:number|amount) of\b -> how many \1
    \b(?:way|method|procedure|process|command)s? (?:to|of|for)\b|\bsteps (?:to|of|for)\b -> wayto
    \bwhat (?:is|are) (?:the|a|some) (?:best |easiest )?(\w+ )?wayto\b -> how \1
    \bwhat (?:do|can|should|must|could) i (?:need to |have to )?do to\b -> how
    \b(?:what is the|for what) reasons?(?: that| why| for)?\b|\bhow come\b -> why
    \bhave to\b -> must
    """
)
"""Turns of phrase, on lower-case text, each in the form that the reader knows."""

PRELUDE = re.compile(
    r"^(?:please|kindly|hi|hello|hey|(?:can|could|would|will) you|are you able|tell(?! about)|"
    r"let me know|do you know|i (?:want|need|would like) to(?: know)?|i wonder|give|show|so|well|to|if|"
    r"whether)(?: |$)"
)
"""What people say before they ask; taken away as long as there is some."""

_AUXILIARY = r"(?:is|are|was|were|do|does|did|can|could|may|might|should|must|will|would|has|have|had|am)"
QUESTIONS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("why", r"\bwhy\b|\b(?:what|which) causes?\b|\bwhat caused\b"),
        ("how long", r"\bhow long\b"),
        ("how far", r"\bhow far\b|\bwhat is the distance\b"),
        ("how often", r"\bhow often\b"),
        ("how old", r"\bhow old\b|\bwhat is the age\b|\bwhat age\b"),
        ("how much", r"\bhow (?:many|much)\b|\bwhat is the (?:price|cost|fee)\b"),
        ("how much", r"\bwhat (?:do|does|did|would) .* cost\b"),
        ("when", r"\bwhen\b|\b(?:what|which) (?:time|year|date|day|month)\b"),
        ("where", r"\bwhere\b|\bin (?:what|which) (?:city|country|place|town|region|state)\b"),
        ("whose", r"\bwhose\b"),
        ("who", r"\bwhom?\b|\b(?:what|which) (?:person|people|author|team|man|woman|company)\b"),
        ("how", r"\bhow\b"),
        ("what", r"\bwhat\b|\bwhich\b|^(?:name|list|explain|define|describe|tell about)\b"),
    )
)
"""What is asked for. The earliest in a text counts, and of those at one place the first here."""

AUXILIARY = re.compile(
    r"^(?:is|are|was|were|do|does|did|can|could|may|might|should|must|will|would|has|have|had|am)\b"
)
"""How a question that is answered by yes or no begins."""
