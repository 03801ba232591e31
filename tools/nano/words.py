"""Word lists and the syllable names of the data generator."""

FIRST = """Anna Marco Lucia Paolo Giulia Luca Sara Davide Elena Matteo Chiara Andrea Laura Stefano Irene Fabio Marta
Simone Alice Pietro Nina Oscar Emma Leo Clara Hugo Ruth Peter Maria John Susan Robert Helen George Diana Victor Rose
Thomas Julia Martin Olga Felix Greta Samuel Ines Bruno Vera Adam Nora Carlo Livia Edgar Sofia Ivan Teresa Walter
Bianca Oliver Gemma Arthur Dora Philip Tina Ernest Lena Ralph Mia Jacob Eva Simon Agnes Daniel Flora Victoria Henry
Isabel Claudio Rita Ettore Silvia Giorgio Monica Alberto Cecilia Franco Noemi Tommaso Viola Ugo Zoe""".split()

COLORS = "red blue green yellow black white orange purple brown pink grey silver golden".split()
COLORI = "rosso blu verde giallo nero bianco arancione viola marrone rosa grigio argento dorato".split()
CITIES = """Rome Milan Turin Naples Paris Lyon London Leeds Berlin Bonn Madrid Lisbon Porto Vienna Prague Oslo Dublin
Athens Warsaw Zurich Geneva Helsinki Bergen Boston Denver Chicago Austin Seattle Toronto Kyoto Osaka Lima Quito Cairo
Tunis Nairobi Delhi Sydney""".split()
ANIMALS = "cat dog horse rabbit fox owl bear wolf goat sheep duck mouse turtle parrot frog hen pig crow deer otter".split()
ANIMALI = "gatto cane cavallo coniglio volpe gufo orso lupo capra pecora anatra topo tartaruga pappagallo rana gallina maiale corvo cervo lontra".split()
JOBS = "teacher doctor baker painter driver farmer lawyer nurse pilot singer writer cook tailor sailor judge gardener".split()
LAVORI = "insegnante medico panettiere pittore autista contadino avvocato infermiere pilota cantante scrittore cuoco sarto marinaio giudice giardiniere".split()
FRUITS = "apple pear plum cherry lemon peach grape melon banana orange fig lime mango kiwi apricot".split()
FRUTTI = "mela pera prugna ciliegia limone pesca uva melone banana arancia fico lime mango kiwi albicocca".split()
THINGS = """lamp chair table book pen cup plate knife spoon key coat hat shoe bag box door window clock radio phone
bottle brush candle carpet coin drum flag glass hammer ladder map mirror needle pillow ring rope saw shirt stone
ticket towel umbrella vase wheel""".split()
COSE = """lampada sedia tavolo libro penna tazza piatto coltello cucchiaio chiave cappotto cappello scarpa borsa
scatola porta finestra orologio radio telefono bottiglia candela tappeto moneta tamburo bandiera bicchiere martello
scala mappa specchio ago cuscino anello corda sega camicia pietra biglietto""".split()
FOODS = "bread rice pasta soup salad cheese fish cake pizza honey butter eggs beans pie".split()
SPORTS = "tennis football chess rowing running skiing boxing golf hockey cycling".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
GIORNI = "lunedì martedì mercoledì giovedì venerdì sabato domenica".split()
MONTHS = "January February March April May June July August September October November December".split()
MESI = "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre".split()

PLURAL = {"mouse": "mice", "sheep": "sheep", "deer": "deer", "fox": "foxes", "wolf": "wolves", "knife": "knives",
          "brush": "brushes", "glass": "glasses", "box": "boxes", "peach": "peaches", "cherry": "cherries",
          "mango": "mangoes", "radio": "radios"}


def plural(w):
    return PLURAL.get(w, w + "s")


def article(w):
    return ("an " if w[0].lower() in "aeiou" else "a ") + w


ONSETS = "b c d f g l m n p r s t v z br cr dr fr gr pr tr st sp fl gl cl".split()
VOWELS = "a e i o u".split()
CODAS = ["", "", "", "", "n", "r", "l", "s"]


def syllables(rng, low, high):
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randint(low, high)))


# English and Italian pairs for small translations
PAIRS = list(zip(COLORS, COLORI)) + list(zip(ANIMALS, ANIMALI)) + list(zip(JOBS, LAVORI)) + list(zip(FRUITS, FRUTTI)) + \
    list(zip(THINGS, COSE)) + list(zip(DAYS, GIORNI)) + list(zip(MONTHS, MESI)) + [
    ("house", "casa"), ("water", "acqua"), ("fire", "fuoco"), ("sun", "sole"), ("moon", "luna"), ("sea", "mare"),
    ("bread", "pane"), ("milk", "latte"), ("street", "strada"), ("school", "scuola"), ("friend", "amico"),
    ("night", "notte"), ("day", "giorno"), ("tree", "albero"), ("flower", "fiore"), ("river", "fiume"),
    ("mountain", "montagna"), ("garden", "giardino"), ("good", "buono"), ("big", "grande"), ("small", "piccolo"),
    ("one", "uno"), ("two", "due"), ("three", "tre"), ("four", "quattro"), ("five", "cinque"), ("six", "sei"),
    ("seven", "sette"), ("eight", "otto"), ("nine", "nove"), ("ten", "dieci"), ("yes", "sì"), ("thank you", "grazie"),
    ("good morning", "buongiorno"), ("good night", "buonanotte"), ("hello", "ciao"), ("please", "per favore")]

# neutral sentences between the facts of a long text; {a} an adjective, {p} a place, {t} a time, {n} a thing
FILLER_EN = [
    "The {p} was {a} {t}.", "People walked slowly through the {p}.", "A {a} wind came from the {p} {t}.",
    "Nobody noticed the {n} near the {p}.", "The {n} was {a} and very old.", "They sat by the {p} and talked.",
    "It rained {t}, and the {p} stayed {a}.", "Somebody left a {n} in the {p}.", "The light over the {p} was {a}.",
    "Children played near the {p} {t}.", "A {a} {n} stood in the corner.", "The road to the {p} is long and {a}.",
    "The {p} opens early and closes late.", "There was a {a} smell of coffee in the {p}.",
    "Birds gathered above the {p} {t}.", "A clock rang in the {p}, and then it was {a} again.",
    "The old {n} needed some repair.", "Visitors like the {a} {p} best {t}."]
FILLER_IT = [
    "Il paese era tranquillo {t}.", "La gente camminava piano lungo il fiume.", "Un vento leggero veniva dal mare {t}.",
    "Nessuno guardava la vecchia porta.", "La strada per il lago è lunga e {a}.", "I bambini giocavano in piazza {t}.",
    "Pioveva {t}, e il giardino era {a}.", "Qualcuno ha lasciato un libro sul tavolo.",
    "La luce sopra la torre era {a}.", "Il mercato apre presto e chiude tardi.", "C'era profumo di caffè nella via.",
    "Gli uccelli volavano sopra il tetto {t}.", "La campana suonava, poi tutto era {a}."]
ADJ_EN = "quiet bright cold warm empty busy narrow calm grey soft heavy clean dusty green strange".split()
ADJ_IT = "quieto silenzioso chiaro freddo vuoto calmo grigio pulito strano".split()
PLACES = "market square garden harbor station library valley bridge tower kitchen museum field river hill shop".split()
TIMES_EN = ["in the morning", "at noon", "in the evening", "all day", "at night", "last week", "in spring", "in winter"]
TIMES_IT = ["al mattino", "a mezzogiorno", "di sera", "tutto il giorno", "di notte", "in primavera", "in inverno"]
