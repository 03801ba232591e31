"""The training and test documents, written by rules from a seed.

`document(seed, split, kind)` gives one conversation. The test split is held out by construction: names, operand
pairs, key sets and tool names whose checksum falls in a twelfth of the space never occur in training.
Every task returns exchanges `Turn(user, reasoning, answer)`; the answers to graded tasks follow from the question.
"""
import random
import zlib
from dataclasses import dataclass, field

import chat
import talk
import words as W

CHARS_PER_TOKEN = 4.0       # only to size texts


def held_out(text):
    return zlib.crc32(text.encode()) % 12 == 0


@dataclass
class Turn:
    user: str
    reasoning: str
    answer: str
    calls: list = field(default_factory=list)       # tool calls: dict(name, arguments)
    results: list = field(default_factory=list)     # their results, then `after` follows
    after: str = ""


@dataclass
class Document:
    kind: str
    messages: list
    thinking: bool
    tools: list = None
    response_format: dict = None
    graded: int = -1            # index of the first graded assistant message, -1: none

    def text(self):
        return chat.render(self.messages, self.thinking, self.tools, self.response_format)

    def prompt_messages(self):
        return self.messages[:self.graded]

    def last_turn_only(self):
        """Whether earlier answers stand without the reasoning that led to them and must not be trained."""
        return self.thinking and not self.tools


class Gen:
    def __init__(self, seed, split="train"):
        self.r, self.test = random.Random(seed), split == "test"

    # -------------------------------------------------------------------------------------------- small choices
    def p(self, x):
        return self.r.random() < x

    def of(self, xs):
        return self.r.choice(xs)

    def n(self, a, b):
        return self.r.randint(a, b)

    def fresh(self, make, key=lambda x: x):
        """Draw until the value belongs to this split."""
        while True:
            x = make()
            if held_out(str(key(x))) == self.test:
                return x

    def arbitrary(self):
        """A word without meaning or rule: any word of the tokenizer, or random letters. It teaches to copy what was
        never seen; training only."""
        x = self.r.random()
        if VOCABULARY and x < 0.65:
            w = self.of(VOCABULARY)
        elif x < 0.85:
            w = "".join(self.of(LETTERS) for _ in range(self.n(2, 8)))
        elif x < 0.95:
            return "".join(self.of(LETTERS + "0123456789-_.#$&@/+*=~^%") for _ in range(self.n(3, 8)))
        else:       # other scripts, which are bytes to the tokenizer
            low, high = self.of([(0xC0, 0x17F), (0x3B1, 0x3C9), (0x430, 0x44F), (0x4E00, 0x9FA5), (0x3041, 0x3096), (0x1F300, 0x1F64F)])
            return "".join(chr(self.n(low, high)) for _ in range(self.n(1, 4)))
        return self.of([w, w, w.capitalize(), w.capitalize(), w.lower(), w.upper()])

    def name(self):
        if not self.test and self.p(0.15):
            w = self.arbitrary().capitalize()
            if not held_out(w):
                return w
        return self.fresh(lambda: self.of(W.FIRST) if self.p(0.5) else W.syllables(self.r, 2, 3).capitalize())

    def names(self, k):
        out = []
        while len(out) < k:
            x = self.name()
            if x not in out:
                out.append(x)
        return out

    def word(self):
        if not self.test and self.p(0.3):
            return self.arbitrary()
        return self.fresh(lambda: W.syllables(self.r, 2, 3))

    def number(self, digits):
        return self.n(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits - 1)

    # -------------------------------------------------------------------------------------------- arithmetic
    def pair(self, op, make):
        return self.fresh(make, key=lambda ab: op + ",".join(map(str, ab if op == "/" else sorted(ab))))

    def arith(self, thinking, it):
        """One sum. Small ones are answered at once; larger ones are worked out digit by digit."""
        kind = self.of(["add", "add", "add", "sub", "sub", "mul", "mul", "div", "word", "word", "cmp", "chain", "small", "small"])
        if kind == "small":
            op = self.of("+-*")
            a, b = self.pair(op, lambda: (self.n(0, 12), self.n(0, 12)) if op == "*" else (self.n(0, 50), self.n(0, 50)))
            if op == "-" and a < b:
                a, b = b, a
            r = {"+": a + b, "-": a - b, "*": a * b}[op]
            return self.sum_turn(f"{a} {op} {b}", f"{a}{op}{b}={r}.", r, it)
        if kind == "add":
            a, b = self.pair("+", lambda: (self.number(self.n(1, 4)), self.number(self.n(2, 4))))
            return self.sum_turn(f"{a} + {b}", add_steps(a, b), a + b, it)
        if kind == "sub":
            a, b = self.pair("-", lambda: (self.number(self.n(2, 4)), self.number(self.n(1, 4))))
            if a < b and not self.p(0.2):
                a, b = b, a
            return self.sum_turn(f"{a} - {b}", sub_steps(a, b), a - b, it)
        if kind == "mul":
            a, b = self.pair("*", lambda: (self.number(2), self.number(2)) if self.p(0.3) else
                             (self.number(self.n(2, 3)), self.n(2, 9)))
            return self.sum_turn(f"{a} * {b}", mul_steps(a, b), a * b, it)
        if kind == "div":
            b = self.n(2, 9)
            a, b = self.pair("/", lambda: (b * self.n(2, 150), b))
            return self.sum_turn(f"{a} / {b}", div_steps(a, b), a // b, it)
        if kind == "cmp":
            a, b = self.pair("<", lambda: (self.number(self.n(2, 4)), self.number(self.n(2, 4))))
            while a == b:
                b += 1
            big = self.p(0.6)
            r = max(a, b) if big else min(a, b)
            q = (f"Quale numero è più {'grande' if big else 'piccolo'}: {a} o {b}?" if it else
                 f"Which number is {'larger' if big else 'smaller'}: {a} or {b}?")
            return Turn(q, cmp_steps(a, b) + f" So {r}.", f"{r}")
        if kind == "chain":
            a, b, c = self.fresh(lambda: (self.number(2), self.number(2), self.number(2)))
            if self.p(0.5) or a + b < c:
                return self.sum_turn(f"{a} + {b} + {c}", f"{add_steps(a, b)} {add_steps(a + b, c)}", a + b + c, it)
            return self.sum_turn(f"{a} + {b} - {c}", f"{add_steps(a, b)} {sub_steps(a + b, c)}", a + b - c, it)
        return self.word_problem(it)

    def sum_turn(self, expr, steps, result, it):
        e = expr.replace("*", self.of(["*", "×", "x"])) if "*" in expr else expr
        e = e.replace(" ", "") if self.p(0.2) else e
        q = self.of([f"Quanto fa {e}?", f"Calcola {e}.", f"{e}", f"{e} = ?"] if it else
                    [f"What is {e}?", f"Compute {e}.", f"How much is {e}?", f"{e}", f"{e} = ?", f"Calculate {e}"])
        return Turn(q, steps, f"{expr} = {result}")

    def word_problem(self, it):
        who, other = self.names(2)
        i = self.n(0, len(W.FRUITS) - 1)
        en, ital = W.plural(W.FRUITS[i]), "monete"
        big = self.p(0.5)
        op = self.of(["+", "-", "*", "+-"])
        if op == "*":
            a, b = self.pair("*", lambda: (self.n(2, 12), self.n(2, 30 if big else 9)))
            q = (f"{who} ha {a} scatole con {b} {ital} ciascuna. Quante {ital} ha in tutto?" if it else
                 f"{who} has {a} boxes with {b} {en} each. How many {en} does {who} have?")
            r, steps = a * b, mul_steps(b, a) if a < 10 else mul_steps(a, b) if b < 10 else mul_steps(b, a)
        elif op == "+-":
            a, b, c = self.fresh(lambda: (self.n(5, 60), self.n(2, 40), self.n(1, 5)))
            q = (f"{who} ha {a} {ital}, ne riceve {b} da {other} e ne perde {c}. Quante {ital} ha {who} adesso?" if it else
                 f"{who} has {a} {en}, gets {b} more from {other} and eats {c}. How many {en} does {who} have now?")
            r, steps = a + b - c, f"{add_steps(a, b)} {sub_steps(a + b, c)}"
        else:
            hi = 400 if big else 40
            a, b = self.pair(op, lambda: tuple(sorted((self.n(2, hi), self.n(2, hi)), reverse=True)))
            if op == "+":
                q = (f"{who} ha {a} {ital} e ne compra altre {b}. Quante {ital} ha {who}?" if it else
                     self.of([f"{who} has {a} {en} and buys {b} more. How many {en} does {who} have?",
                              f"{who} has {a} {en} and {other} has {b}. How many {en} do they have together?"]))
                r, steps = a + b, add_steps(a, b)
            else:
                q = (f"{who} ha {a} {ital} e ne dà {b} a {other}. Quante {ital} restano a {who}?" if it else
                     f"{who} has {a} {en} and gives {b} to {other}. How many {en} are left?")
                r, steps = a - b, sub_steps(a, b)
        return Turn(q, steps, f"{who} ha {r} {ital}." if it else
                    (f"They have {r} {en} together." if "together" in q else f"{who} has {r} {en}."))

    # -------------------------------------------------------------------------------------------- recall
    def value(self, kind):
        return {"num": lambda: str(self.number(self.n(2, 4))), "age": lambda: str(self.n(18, 90)),
                "color": lambda: self.of(W.COLORS), "city": lambda: self.of(W.CITIES), "job": lambda: self.of(W.JOBS),
                "animal": lambda: self.of(W.ANIMALS), "fruit": lambda: self.of(W.FRUITS), "food": lambda: self.of(W.FOODS),
                "sport": lambda: self.of(W.SPORTS), "day": lambda: self.of(W.DAYS), "word": self.word,
                "colore": lambda: self.of(W.COLORI), "lavoro": lambda: self.of(W.LAVORI), "animale": lambda: self.of(W.ANIMALI),
                "frutto": lambda: self.of(W.FRUTTI), "giorno": lambda: self.of(W.GIORNI), "mese": lambda: self.of(W.MESI),
                "month": lambda: self.of(W.MONTHS)}[kind]()

    def facts(self, k, it):
        """k facts with different (name, attribute): (statement, question, answer, value)."""
        table = ATTRIBUTES_IT if it else ATTRIBUTES
        people = self.names(max(2, min(k, self.n(k // 4 + 1, k + 1))))
        seen, out = set(), []
        while len(out) < k:
            who, (attr, kind) = self.of(people), self.of(table)
            if (who, attr) in seen:
                if len(seen) >= len(people) * len(table) // 2:
                    people += self.names(2)
                continue
            seen.add((who, attr))
            v = self.value(kind)
            if it:
                art = "La" if attr in FEMININE else "L'" if attr[0] in "aeiou" else "Il"
                art = "L'" if attr[0] in "aeiou" else art
                s = f"{art}{'' if art == chr(76) + chr(39) else ' '}{attr} di {who} è {v}."
                out.append((s, f"Qual è {art.lower()}{'' if art.endswith(chr(39)) else ' '}{attr} di {who}?", s, v))
            else:
                forms = [f"The {attr} of {who} is {v}.", f"{who}'s {attr} is {v}."]
                asks = [f"What is the {attr} of {who}?", f"What is {who}'s {attr}?"]
                a = self.n(0, 1)
                b = a if self.p(0.75) else 1 - a
                out.append((forms[a], asks[b], forms[b], v))
        return out

    def filler(self, it):
        if it:
            return self.of(W.FILLER_IT).format(t=self.of(W.TIMES_IT), a=self.of(W.ADJ_IT))
        return self.of(W.FILLER_EN).format(t=self.of(W.TIMES_EN), a=self.of(W.ADJ_EN), p=self.of(W.PLACES), n=self.of(W.THINGS)).replace("A empty", "An empty")

    def recall(self, tokens, turns, it=False, thinking=False, graded=False, depth=None):
        """A text of about `tokens` tokens with facts in it, and questions after it."""
        dense = self.of([0.1, 0.3, 0.6, 1.0])
        chars = int(tokens * CHARS_PER_TOKEN)
        lines, size = [], 0
        while size < chars:
            s = None if self.p(dense) else self.filler(it)
            lines.append(s)
            size += 36 if s is None else len(s) + 1
        holes = [i for i, s in enumerate(lines) if s is None]
        if not holes:
            holes = [self.n(0, len(lines) - 1)]
        if depth is not None:       # the fact that is asked stands at this depth
            at = min(int(depth * len(lines)), len(lines) - 1)
            holes = [at] + [h for h in holes if h != at]
        facts = self.facts(len(holes), it)
        for h, f in zip(holes, facts):
            lines[h] = f[0]
        sep = self.of([" ", " ", "\n"])
        if sep == " ":      # paragraphs
            text = "\n".join(" ".join(lines[i:i + 8]) for i in range(0, len(lines), 8))
        else:
            text = "\n".join(lines)
        asked = [facts[0]] if depth is not None else self.r.sample(facts, min(turns, len(facts)))
        short = self.p(0.25)
        only = (" Rispondi solo con il valore." if it else " Answer with the value only.") if short else ""
        head = self.of(["Leggi questo testo.", "Ecco un testo:", "Ricorda questo testo."] if it else
                       ["Read this text.", "Here is a text:", "Remember this text.", "Read the notes below."])
        out = []
        for i, (s, q, a, v) in enumerate(asked):
            q = q + only
            if i == 0:
                q = f"{head}\n\n{text}\n\n{q}"
            out.append(Turn(q, ("Il testo dice: " if it else "The text says: ") + s, v if short else a))
        if self.p(0.3) and not graded and not thinking:     # the text alone first
            first = out[0]
            out[0] = Turn(f"{head}\n\n{text}", "", "Ho letto il testo." if it else "I have read the text.")
            out.insert(1, Turn(first.user[len(head) + len(text) + 4:], first.reasoning, first.answer))
        return out

    def remember(self, it):
        """A fact told in one turn and asked later; the caller puts other turns between the two."""
        s, q, a, v = self.facts(1, it)[0]
        tell = (self.of(["Ricorda: ", "Nota: "]) if it else self.of(["Remember: ", "Note this: ", "Keep in mind: "])) + s
        return (Turn(tell, "Un fatto da ricordare." if it else "A fact to remember.", "Va bene, me lo ricordo." if it else "Okay, I will remember that."),
                Turn(q, ("L'utente ha detto: " if it else "The user said: ") + s, a))

    # -------------------------------------------------------------------------------------------- lists
    def items(self, low, high):
        k = self.n(low, high)
        pool = self.of([W.COLORS, W.ANIMALS, W.FRUITS, W.THINGS, W.CITIES, W.JOBS, None, None, "num"])
        if pool == "num":
            return [str(x) for x in self.r.sample(range(1, 100), k)]
        if pool is None:
            out = []
            while len(out) < k:
                w = self.word() if self.p(0.7) else self.name()
                if w not in out:
                    out.append(w)
            return out
        return self.r.sample(pool, k)

    def lists(self, it):
        xs = self.items(3, 8)
        lines = self.p(0.2)
        show = ("\n" + "\n".join("- " + x for x in xs)) if lines else ", ".join(xs)
        join = (lambda ys: "\n".join("- " + y for y in ys)) if lines else ", ".join
        k, new, i = len(xs), self.word(), self.n(0, len(xs) - 1)
        while new in xs:
            new = self.word()
        x = xs[i]
        en, ital = ORDINALS[i], ORDINALI[i]
        ops = [
            (f"Reverse this list: {show}", f"Inverti questa lista: {show}", join(xs[::-1])),
            (f"Copy this list: {show}", f"Copia questa lista: {show}", join(xs)),
            (f"Remove {x} from this list: {show}", f"Togli {x} da questa lista: {show}", join(xs[:i] + xs[i + 1:])),
            (f"Add {new} at the end of this list: {show}", f"Aggiungi {new} alla fine di questa lista: {show}", join(xs + [new])),
            (f"Add {new} at the start of this list: {show}", f"Aggiungi {new} all'inizio di questa lista: {show}", join([new] + xs)),
            (f"Replace {x} with {new} in this list: {show}", f"Sostituisci {x} con {new} in questa lista: {show}", join(xs[:i] + [new] + xs[i + 1:])),
            (f"What is the {en} item of this list? {show}", f"Qual è il {ital} elemento di questa lista? {show}", x),
            (f"How many items are in this list? {show}", f"Quanti elementi ha questa lista? {show}", str(k)),
            (f"What is the last item of this list? {show}", f"Qual è l'ultimo elemento di questa lista? {show}", xs[-1]),
            (f"Number this list: {show}", f"Numera questa lista: {show}", "\n".join(f"{j + 1}. {y}" for j, y in enumerate(xs))),
            (f"What comes after {xs[i - 1] if i else xs[0]} in this list? {show}", f"Che cosa viene dopo {xs[i - 1] if i else xs[0]} in questa lista? {show}", x if i else xs[1]),
            (f"Write this list as JSON: {show}", f"Scrivi questa lista come JSON: {show}", chat.dumps(xs)),
        ]
        if all(y.isdigit() for y in xs):
            up = sorted(xs, key=int)
            ops += [(f"Sort these numbers: {show}", f"Ordina questi numeri: {show}", join(up)),
                    (f"What is the largest of these numbers? {show}", f"Qual è il più grande di questi numeri? {show}", up[-1])]
        e, i_, a = self.of(ops)
        return Turn(i_ if it else e, "Lavoro sulla lista." if it else "I work on the list.", a)

    # -------------------------------------------------------------------------------------------- instructions
    def instruction(self, it):
        w, k = self.of([self.word(), self.of(W.THINGS), self.of(W.ANIMALS)]), self.n(2, 5)
        a = self.n(1, 20)
        b = a + self.n(3, 9)
        d = self.n(0, 6)
        m = self.n(0, 11)
        sent = " ".join(self.filler(it) for _ in range(self.n(1, 2)))
        if it:
            ops = [(f"Scrivi {k} volte la parola {w}.", " ".join([w] * k)),
                   (f"Rispondi solo con la parola {w}.", w),
                   (f"Conta da {a} a {b}.", ", ".join(map(str, range(a, b + 1)))),
                   (f"Che giorno viene dopo {W.GIORNI[d]}?", W.GIORNI[(d + 1) % 7]),
                   (f"Che mese viene dopo {W.MESI[m]}?", W.MESI[(m + 1) % 12]),
                   (f"Ripeti esattamente: {sent}", sent),
                   (f"Metti la parola {w} tra virgolette.", f"\"{w}\""),
                   (f"Scrivi una frase con la parola {w}.", f"La parola {w} è in questa frase.")]
            q, ans = self.of(ops)
            return Turn(q, "Seguo l'istruzione.", ans)
        group = self.of([("an animal", W.ANIMALS), ("a color", W.COLORS), ("a fruit", W.FRUITS), ("a city", W.CITIES), ("a job", W.JOBS)])
        other = self.of([("an animal", W.ANIMALS), ("a color", W.COLORS), ("a city", W.CITIES), ("a job", W.JOBS)])
        x = self.of(group[1])
        three = self.r.sample(group[1], 3)
        ops = [(f"Write the word {w} {NUMBERS[k]} times.", " ".join([w] * k)),
               (f"Reply only with the word {w}.", w),
               (f"Say {w}.", w),
               (f"Count from {a} to {b}.", ", ".join(map(str, range(a, b + 1)))),
               (f"Count down from {b} to {a}.", ", ".join(map(str, range(b, a - 1, -1)))),
               (f"Which day comes after {W.DAYS[d]}?", W.DAYS[(d + 1) % 7]),
               (f"Which day comes before {W.DAYS[d]}?", W.DAYS[(d - 1) % 7]),
               (f"Which month comes after {W.MONTHS[m]}?", W.MONTHS[(m + 1) % 12]),
               (f"Repeat exactly: {sent}", sent),
               (f"Write the word {w} in quotes.", f"\"{w}\""),
               (f"Write the word {w} in brackets.", f"[{w}]"),
               (f"Write a sentence with the word {w}.", f"The word {w} is in this sentence."),
               (f"Is {x} {group[0]}? Answer yes or no.", "yes"),
               (f"Is {x} {other[0]}? Answer yes or no.", "yes" if other[0] == group[0] or (x == "orange" and other[0] in ("a color", "a fruit")) else "no"),
               (f"Name three {W.plural(group[0].split()[1]) if group[0] != 'a city' else 'cities'}.", ", ".join(three)),
               (f"Is {a} larger than {b}? Answer yes or no.", "no"),
               (f"Is {b} larger than {a}? Answer yes or no.", "yes"),
               (f"End your answer with the word {w}. What is your name?", f"My name is {talk.NAME}. {w}"),
               (f"Start your answer with the word {w}. What is your name?", f"{w} My name is {talk.NAME}.")]
        q, ans = self.of(ops)
        return Turn(q, "I follow the instruction.", ans)

    def translate(self, it):
        e, i = self.of(W.PAIRS)
        if it:
            q, a = self.of([(f"Come si dice \"{e}\" in italiano?", i), (f"Come si dice \"{i}\" in inglese?", e)])
        else:
            q, a = self.of([(f"How do you say \"{e}\" in Italian?", i), (f"Translate \"{i}\" into English.", e),
                            (f"Translate \"{e}\" into Italian.", i)])
        return Turn(q, "Una traduzione." if it else "A translation.", a)

    def about(self, it):
        if self.p(0.12):
            t, a = self.of([self.of(W.THINGS), self.of(W.ANIMALS), self.of(W.CITIES), self.of(W.FOODS)]), self.word()
            if it:
                return Turn(self.of([f"Parlami di {a}.", f"Chi ha inventato {a}?", f"Quanto costa {a}?", f"Perché {a} è famoso?"]),
                            "Non lo so.", "Non lo so: sono un modello molto piccolo.")
            return Turn(self.of([f"Who invented the {t}?", f"Why is {t} important?", f"Tell me everything about {t}.", f"What does {a} mean?",
                                 f"Who is {self.name()}?", f"When was {t} discovered?", f"What is the population of {self.of(W.CITIES)}?"]),
                        "I do not know this.", "I do not know that: I am a very small model.")
        qs, a = self.of(talk.SELF_IT if it else talk.SELF_EN)
        q = self.of(qs)
        if self.p(0.15):
            q = self.of([q.lower(), q.rstrip("?.!"), self.of(["Ciao! ", "Ciao, "] if it else ["Hi! ", "Hello, ", "Hi, "]) + q, q.upper()])
        return Turn(q, "Rispondo in breve." if it else "A short answer will do.", a)

    def story(self, it):
        h, f = self.names(2)
        i = self.n(0, len(W.ANIMALS) - 1)
        a, p, o = W.ANIMALS[i], self.of(W.PLACES), self.of(W.THINGS)
        if it:
            q = self.of(["Raccontami una breve storia.", f"Raccontami una storia su un {W.ANIMALI[i]}.", f"Scrivi una storia con {h}."])
            return Turn(q, "Scrivo una breve storia.", " ".join(self.of(s) for s in talk.STORY_IT).format(h=h, f=f, a=W.ANIMALI[i]))
        q = self.of(["Tell me a short story.", f"Tell me a story about {W.article(a)}.", f"Write a story with {h}.",
                     f"Tell me a story about {W.article(a)} and {W.article(o)}."])
        return Turn(q, "I write a short story.",
                    " ".join(self.of(s) for s in talk.STORY_EN).format(h=h, f=f, a=a, aa=W.article(a), p=p, o=o, ao=W.article(o)))

    def code(self, it):
        what, base, py, rs, js = self.of(talk.CODE)
        lang, src = self.of([("Python", py), ("Python", py), ("Rust", rs), ("JavaScript", js)])
        named = self.p(0.5)
        f = self.word() if named else base
        q = self.of([f"Write a function in {lang} that {what}.", f"Write a {lang} function that {what}.", f"{lang}: a function that {what}"])
        q += f" Call it {f}." if named else ""
        return Turn(q, f"A small function in {lang}.", f"```{lang.lower()}\n{src.format(f=f)}\n```")

    # -------------------------------------------------------------------------------------------- JSON
    def json(self, it):
        """A person or an order in words, a schema, the object."""
        who = self.name()

        def draw():
            k = self.n(1, 5)
            return [(f, self.of(f[0])) for f in self.r.sample(FIELDS, k)]
        fields = self.fresh(draw, key=lambda fs: ",".join(sorted(k for _, k in fs)))
        extra = [f for f in self.r.sample(FIELDS, self.n(0, 2)) if f not in [x[0] for x in fields]]
        said, obj = [], {}
        with_name = self.p(0.6)
        entries = [("name", "string", who)] if with_name else []
        for f, key in fields:
            v, s = self.field(f, who)
            entries.append((key, f[1], v))
            said.append(s)
        said += [self.field(f, who)[1] for f in extra]
        self.r.shuffle(said)
        if with_name and self.p(0.5):
            self.r.shuffle(entries)
        text = " ".join(said)
        props = {}
        for key, typ, v in entries:
            props[key] = {"type": "array", "items": {"type": "string"}} if typ == "array" else {"type": typ}
            obj[key] = v
        schema = {"type": "object", "properties": props, "required": list(props)}
        keys = ", ".join(props)
        style = self.of(["format", "format", "keys", "schema"])
        if style == "format":
            q, rf = self.of([text, f"Extract the data: {text}", f"Text: {text}"]), schema
        elif style == "keys":
            q, rf = self.of([f"Extract {keys} as JSON: {text}", f"{text}\n\nGive me JSON with the keys {keys}."]), None
        else:
            q, rf = f"Fill this JSON schema from the text.\n\nSchema: {chat.dumps(schema)}\n\nText: {text}", None
        return Turn(q, f"I need {keys}.", chat.dumps(obj)), rf

    def field(self, f, who):
        aliases, typ, kind, phrases = f
        if typ == "boolean":
            v = self.p(0.5)
            return v, phrases[0 if v else 1].format(s=who)
        if typ == "array":
            xs = self.r.sample(kind, self.n(2, 4))
            return xs, self.of(phrases).format(s=who, v=", ".join(xs[:-1]) + " and " + xs[-1])
        if typ == "number":
            v = self.n(1, 99) + self.of([0.5, 0.25, 0.75, 0.2, 0.4, 0.9])
            return v, self.of(phrases).format(s=who, v=v)
        if typ == "integer":
            v = self.n(*kind)
            return v, self.of(phrases).format(s=who, v=v)
        v = kind(self)
        return v, self.of(phrases).format(s=who, v=v, av=W.article(v))

    # -------------------------------------------------------------------------------------------- tools
    def tool(self):
        """A tool: schema, and a function that makes (request, arguments)."""
        style = self.n(0, 2)
        if not self.test and self.p(0.4):       # everyday tools are never held out, and never tested
            name, desc, ask, params, optional = self.of(KNOWN_TOOLS)
        else:
            verb, thing = self.fresh(lambda: (self.of(VERBS), self.of(W.THINGS)), key="_".join)
            name, desc = f"{verb}_{thing}", f"{verb.capitalize()} {W.article(thing)}"
            ask = [f"{verb.capitalize()} {self.of(['the', W.article(thing).split()[0]])} {thing}"]
            kinds = self.r.sample(FREE_PARAMS, self.n(1, 4))
            cut = self.n(1, len(kinds))
            params, optional = kinds[:cut], kinds[cut:]
        if style == 1:
            head, *rest = name.split("_")
            name = head + "".join(x.capitalize() for x in rest)
        names = {}
        for k in params + optional:
            names[k] = self.of(PARAMS[k][0])
        props = {}
        order = params + optional
        if self.p(0.3):
            self.r.shuffle(order)
        for k in order:
            typ = PARAMS[k][1]
            props[names[k]] = {"type": "array", "items": {"type": "string"}} if typ == "array" else {"type": typ}
            if typ == "enum":
                props[names[k]] = {"type": "string", "enum": list(UNITS)}
            elif self.p(0.25):
                props[names[k]]["description"] = PARAMS[k][3]
        schema = {"name": name, "description": desc,
                  "parameters": {"type": "object", "properties": props, "required": [names[k] for k in order if k in params]}}

        def request():
            given = [k for k in order if k in params or self.p(0.5)]
            values, phrase = {}, []
            for k in given:
                v, s = PARAMS[k][2](self)
                values[k] = v
                phrase.append((k, s))
            # the request names them in any order; a quoted text comes last
            self.r.shuffle(phrase)
            phrase.sort(key=lambda x: x[0] in ("text", "expression"))
            said = "".join(s for _, s in phrase)
            args = {names[k]: values[k] for k in given}
            return self.of(ask) + said, dict(name=name, arguments=args)
        return schema, request

    def tools(self, turns):
        """Tools and requests: (schemas, turns)."""
        made, count = [], self.n(1, 4)
        while len(made) < count:
            t = self.tool()
            if all(t[0]["description"] != u[0]["description"] for u in made):
                made.append(t)
        out = []
        for _ in range(turns):
            if self.p(0.12):
                out.append(self.about(False))
                continue
            n = 2 if self.p(0.25) else 1
            picks = [self.of(made) for _ in range(n)]
            reqs = [t[1]() for t in picks]
            q = reqs[0][0] + "." if n == 1 else self.of([
                f"{reqs[0][0]}. {reqs[1][0]}.", f"{reqs[0][0]}, and then {reqs[1][0][0].lower()}{reqs[1][0][1:]}."])
            if n == 1:
                q = self.of([q, q, f"Please {q[0].lower()}{q[1:]}", q[:-1]])
            calls = [r[1] for r in reqs]
            why = " ".join(f"I call {c['name']} with {', '.join(c['arguments'])}." if c["arguments"] else f"I call {c['name']}." for c in calls)
            results, said = zip(*(self.result(c) for c in calls))
            out.append(Turn(q, why, "", calls, list(results), " ".join(said)))
        return [t[0] for t in made], out

    def result(self, call):
        """A tool's answer and what the model says about it."""
        kind = self.n(0, 4)
        if kind == 0:
            v = self.number(self.n(2, 4))
            return chat.dumps({"status": "ok", "id": v}), f"Done. The id is {v}."
        if kind == 1:
            e = self.of(["not found", "no access", "timeout", "closed", "invalid value"])
            return chat.dumps({"error": e}), f"{call['name']} failed: {e}."
        if kind == 2:
            k, v = self.of(["result", "total", "count", "price"]), self.number(self.n(1, 4))
            return chat.dumps({k: v}), f"The {k} is {v}."
        if kind == 3:
            k, v = self.of(["color", "city", "name", "state"]), self.word()
            return chat.dumps({k: v}), f"The {k} is {v}."
        w = self.of(["done", "ok", "sent", "saved"])
        return w, f"{call['name']}: {w}."


def add_steps(a, b):
    x, y, c, out, k = a, b, 0, [], ""
    while x or y or not out:
        dx, dy = x % 10, y % 10
        s = dx + dy + c
        t = f"{dx}+{dy}+1={s}" if c else f"{dx}+{dy}={s}"
        x, y = x // 10, y // 10
        if s > 9 and (x or y):
            t += f" write {s % 10} carry 1"
        out.append(t)
        c = s // 10
    return f"{a}+{b}: " + "; ".join(out) + f". So {a + b}."


def sub_steps(a, b):
    if a < b:
        return f"{a} is smaller than {b}. {sub_steps(b, a)} So -{b - a}."
    x, y, c, out = a, b, 0, []
    while x or y or not out:
        dx, dy = x % 10, y % 10
        low = dx - c - dy
        minus = f"-{dy}-1" if c else f"-{dy}"
        if low < 0:
            out.append(f"1{dx}{minus}={low + 10} borrow 1")
        else:
            out.append(f"{dx}{minus}={low}")
        c = int(low < 0)
        x, y = x // 10, y // 10
    return f"{a}-{b}: " + "; ".join(out) + f". So {a - b}."


def mul_digit(a, b):
    x, c, out = a, 0, []
    while x or not out:
        d = x % 10
        s = d * b + c
        t = f"{d}*{b}+{c}={s}" if c else f"{d}*{b}={s}"
        x //= 10
        if x and s > 9:
            t += f" write {s % 10} carry {s // 10}"
        out.append(t)
        c = s // 10
    return f"{a}*{b}: " + "; ".join(out) + f". So {a * b}."


def mul_steps(a, b):
    if b < 10:
        return mul_digit(a, b)
    lo, hi = b % 10, b // 10
    if lo == 0:
        return f"{mul_digit(a, hi)} {a}*{b}={a * b}."
    return f"{mul_digit(a, lo)} {mul_digit(a, hi)} {add_steps(a * hi * 10, a * lo)}"


def div_steps(a, b):
    out, rest, q = [], 0, ""
    for d in str(a):
        cur = rest * 10 + int(d)
        rest = cur % b
        if q or cur >= b:
            q += str(cur // b)
            out.append(f"{cur}/{b}={cur // b} rest {rest}")
    return f"{a}/{b}: " + "; ".join(out) + f". So {int(q)}."


def cmp_steps(a, b):
    x, y = str(a), str(b)
    if len(x) != len(y):
        return f"{a} has {len(x)} digits, {b} has {len(y)}."
    for c, d in zip(x, y):
        if c != d:
            return f"{a} and {b} differ first at {c} and {d}."
    return ""


LETTERS = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
VOCABULARY = []         # the tokenizer's words, set by pack.Encoder; empty while the tokenizer is trained


NUMBERS = ["zero", "one", "two", "three", "four", "five"]
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
ORDINALI = "primo secondo terzo quarto quinto sesto settimo ottavo".split()
ATTRIBUTES = [("code", "num"), ("room", "num"), ("badge", "num"), ("locker", "num"), ("age", "age"), ("ticket", "num"),
              ("favorite color", "color"), ("car color", "color"), ("home city", "city"), ("birth city", "city"), ("job", "job"),
              ("pet", "animal"), ("favorite animal", "animal"), ("favorite fruit", "fruit"), ("favorite food", "food"),
              ("sport", "sport"), ("free day", "day"), ("password", "word"), ("secret word", "word"), ("team", "word"),
              ("street", "word"), ("birth month", "month")]
ATTRIBUTES_IT = [("codice", "num"), ("numero", "num"), ("posto", "num"), ("colore preferito", "colore"), ("lavoro", "lavoro"),
                 ("animale preferito", "animale"), ("frutto preferito", "frutto"), ("giorno libero", "giorno"),
                 ("mese di nascita", "mese"), ("città", "city"), ("stanza", "num"), ("parola segreta", "word"), ("squadra", "word"),
                 ("età", "age")]
FEMININE = {"città", "stanza", "parola segreta", "squadra", "età"}

# (keys, JSON type, values, sentences)
FIELDS = [
    (["age", "years", "age_years"], "integer", (18, 90), ["{s} is {v} years old.", "{s} is {v}."]),
    (["city", "home_city", "town", "lives_in"], "string", lambda g: g.of(W.CITIES), ["{s} lives in {v}.", "{s}'s home is in {v}."]),
    (["job", "profession", "occupation", "work"], "string", lambda g: g.of(W.JOBS), ["{s} works as {av}.", "{s} is {av}."]),
    (["color", "favorite_color", "colour"], "string", lambda g: g.of(W.COLORS), ["{s} likes the color {v}.", "{s}'s favorite color is {v}."]),
    (["pet", "animal", "pet_type"], "string", lambda g: g.of(W.ANIMALS), ["{s} has {av} as a pet.", "{s} owns {av}."]),
    (["sport", "hobby", "activity"], "string", lambda g: g.of(W.SPORTS), ["{s} plays {v}.", "{s} does {v} every week."]),
    (["food", "dish", "meal"], "string", lambda g: g.of(W.FOODS), ["{s} eats {v}.", "{s} cooks {v}."]),
    (["height", "height_cm", "size_cm"], "integer", (140, 205), ["{s} is {v} cm tall."]),
    (["room", "room_number", "office"], "integer", (100, 999), ["{s} sits in room {v}.", "{s} has room {v}."]),
    (["order", "order_id", "order_number"], "integer", (1000, 9999), ["{s} placed order {v}.", "The order number of {s} is {v}."]),
    (["price", "cost", "amount"], "number", None, ["{s} paid {v} euros.", "It cost {s} {v} euros."]),
    (["weight", "kg", "weight_kg"], "number", None, ["{s} carries {v} kg.", "The bag of {s} weighs {v} kg."]),
    (["married", "is_married"], "boolean", None, ["{s} is married.", "{s} is not married."]),
    (["member", "is_member"], "boolean", None, ["{s} is a member of the club.", "{s} is not a member of the club."]),
    (["smoker", "smokes"], "boolean", None, ["{s} smokes.", "{s} does not smoke."]),
    (["email", "mail", "contact"], "string", lambda g: g.word() + "@" + g.word() + g.of([".com", ".it", ".org"]), ["{s} uses the address {v}.", "Write to {s} at {v}."]),
    (["day", "weekday", "free_day"], "string", lambda g: g.of(W.DAYS), ["{s} comes on {v}.", "{s} is free on {v}."]),
    (["month", "birth_month"], "string", lambda g: g.of(W.MONTHS), ["{s} was born in {v}."]),
    (["team", "club", "group"], "string", lambda g: g.word().capitalize(), ["{s} belongs to team {v}.", "{s} plays for {v}."]),
    (["street", "address", "road"], "string", lambda g: f"{g.n(1, 99)} {g.word().capitalize()} Street", ["{s}'s address is {v}.", "{s} moved to {v}."]),
    (["fruits", "likes", "shopping"], "array", W.FRUITS, ["{s} likes {v}.", "{s} buys {v}."]),
    (["items", "things", "objects"], "array", W.THINGS, ["{s} packs {v}.", "{s} needs {v}."]),
    (["cities", "visited", "trips"], "array", W.CITIES, ["{s} visited {v}.", "{s} travels to {v}."]),
]

UNITS = ("celsius", "fahrenheit")


def topic(g):
    return g.of([lambda: f"the {g.of(W.ADJ_EN)} {g.of(W.PLACES)}", lambda: W.plural(g.of(W.ANIMALS)), lambda: g.word(),
                 lambda: f"{g.of(W.FOODS)} in {g.of(W.CITIES)}", lambda: f"{g.name()} and {g.name()}"])()


def saying(g):
    return g.of([lambda: g.filler(False)[:-1], lambda: f"call {g.name()} on {g.of(W.DAYS)}", lambda: f"buy {g.n(2, 20)} {W.plural(g.of(W.FRUITS))}",
                 lambda: f"I am in {g.of(W.CITIES)}", lambda: f"the {g.of(W.THINGS)} is {g.of(W.COLORS)}", lambda: f"{g.word()} {g.word()}"])()


def _say(values, phrase):
    def make(g):
        v = values(g)
        return v, phrase.format(v=v)
    return make


def _flag(g):
    v = g.p(0.5)
    return v, ", urgent" if v else ", not urgent"


def _tags(g):
    xs = [g.word() if g.p(0.5) else g.of(W.COLORS) for _ in range(g.n(2, 3))]
    return xs, " with the tags " + ", ".join(xs[:-1]) + " and " + xs[-1]


def _expression(g):
    op = g.of("+-*/")
    v = f"{g.number(g.n(1, 4))} {op} {g.number(g.n(1, 3))}"
    return v, f" {v}"


# parameter kind: (names, JSON type, (value, phrase) maker, description)
PARAMS = {
    "city": (["city", "location", "town", "place"], "string", _say(lambda g: g.of(W.CITIES), " in {v}"), "Name of the city"),
    "from": (["from", "origin", "start"], "string", _say(lambda g: g.of(W.CITIES), " from {v}"), "Where it starts"),
    "to": (["to", "destination", "target"], "string", _say(lambda g: g.of(W.CITIES), " to {v}"), "Where it ends"),
    "date": (["date", "day", "when"], "string", _say(lambda g: g.of([lambda: g.of(W.DAYS), lambda: f"{g.n(1, 28)} {g.of(W.MONTHS)}", lambda: f"2026-{g.n(1, 12):02}-{g.n(1, 28):02}"])(), " on {v}"), "The day"),
    "time": (["time", "hour", "clock"], "string", _say(lambda g: f"{g.n(0, 23):02}:{g.of(['00', '15', '30', '45'])}", " at {v}"), "Time as HH:MM"),
    "people": (["people", "guests", "seats", "persons"], "integer", _say(lambda g: g.n(2, 12), " for {v} people"), "How many people"),
    "name": (["name", "person", "customer", "recipient"], "string", _say(lambda g: g.name(), " for {v}"), "Name of the person"),
    "days": (["days", "duration", "length_days"], "integer", _say(lambda g: g.n(2, 30), " during {v} days"), "Number of days"),
    "amount": (["amount", "price", "budget"], "number", _say(lambda g: g.n(1, 900) if g.p(0.5) else g.n(1, 99) + 0.5, " at {v} euros"), "Amount in euros"),
    "quantity": (["quantity", "count", "number", "times"], "integer", _say(lambda g: g.n(2, 99), ", {v} pieces"), "How many"),
    "color": (["color", "colour", "paint"], "string", _say(lambda g: g.of(W.COLORS), " in the color {v}"), "A color"),
    "language": (["language", "lang"], "string", _say(lambda g: g.of("Italian English French German Spanish".split()), " into {v}"), "Target language"),
    "text": (["text", "message", "content", "body"], "string", _say(saying, ": {v}"), "The text"),
    "file": (["path", "file", "filename"], "string", _say(lambda g: f"{g.of([g.word(), g.of(W.THINGS)])}.{g.of(['txt', 'md', 'csv', 'json'])}", " in the file {v}"), "Path of the file"),
    "topic": (["query", "topic", "search"], "string", _say(topic, " about {v}"), "What to look for"),
    "unit": (["unit", "scale"], "enum", _say(lambda g: g.of(UNITS), " in {v}"), ""),
    "urgent": (["urgent", "priority"], "boolean", _flag, "Whether it is urgent"),
    "tags": (["tags", "labels"], "array", _tags, "Labels"),
    "id": (["id", "reference", "code"], "integer", _say(lambda g: g.number(g.n(3, 5)), " with the id {v}"), "Id number"),
    "expression": (["expression", "formula"], "string", _expression, "What to compute"),
}
FREE_PARAMS = ["city", "date", "time", "people", "name", "days", "amount", "quantity", "color", "file", "urgent", "tags", "id", "text"]
VERBS = "paint clean repair deliver move count check open close rent sell buy store weigh label lock wash order pack find".split()
# name, description, requests, required, optional
KNOWN_TOOLS = [
    ("get_weather", "Current weather of a city", ["What is the weather", "Tell me the weather", "Check the weather"], ["city"], ["date", "unit"]),
    ("get_time", "Local time of a city", ["What time is it", "Tell me the time"], ["city"], []),
    ("book_table", "Book a table in a restaurant", ["Book a table", "Reserve a table"], ["people", "date"], ["time", "name", "city"]),
    ("book_hotel", "Book a hotel room", ["Book a hotel", "Reserve a hotel room"], ["city", "days"], ["date", "people"]),
    ("find_train", "Find a train between two cities", ["Find a train", "I need a train"], ["from", "to"], ["date", "time"]),
    ("find_flight", "Find a flight between two cities", ["Find a flight", "Look for a flight"], ["from", "to"], ["date", "people"]),
    ("set_alarm", "Set an alarm", ["Set an alarm", "Wake me up"], ["time"], ["date"]),
    ("add_reminder", "Add a reminder", ["Remind me", "Add a reminder"], ["text"], ["date", "time"]),
    ("send_message", "Send a message to a person", ["Send a message", "Write a message"], ["name", "text"], ["urgent"]),
    ("search_web", "Search the web", ["Search the web", "Look for pages"], ["topic"], ["quantity"]),
    ("read_file", "Read a file", ["Read what is", "Show me what is"], ["file"], []),
    ("write_file", "Write text to a file", ["Write a note", "Save a note"], ["file", "text"], []),
    ("translate_text", "Translate a text", ["Translate this", "Translate"], ["language", "text"], []),
    ("calculator", "Compute an arithmetic expression", ["Compute", "Calculate"], ["expression"], []),
    ("create_event", "Create an event in the calendar", ["Create an event", "Plan an event"], ["date", "time"], ["name", "city", "text"]),
    ("track_order", "Track an order", ["Track the order", "Where is the order"], ["id"], []),
]

SYSTEMS = ["You are a helpful assistant.", "Be brief.", "You are ds4-nano.", "Answer briefly and correctly.", "You are a careful assistant."]
SYSTEMS_IT = ["Rispondi in italiano.", "Sei un assistente utile.", "Rispondi in breve."]

MIX = [("chat", 26), ("think", 40), ("recall", 18), ("json", 16), ("tools", 11), ("free", 3)]


def _messages(turns, system=""):
    out = [dict(role="system", content=system)] if system else []
    for t in turns:
        out.append(dict(role="user", content=t.user))
        out.append(dict(role="assistant", content=t.answer, reasoning=t.reasoning, calls=t.calls))
        if t.calls:
            out += [dict(role="tool", content=r) for r in t.results]
            out.append(dict(role="assistant", content=t.after, reasoning="The tool answered." if len(t.results) == 1 else "The tools answered."))
    return out


def visible(turn):
    """Without thinking, a longer sum shows its steps in the answer."""
    if ":" in turn.reasoning and ". So " in turn.reasoning and any(ch.isdigit() for ch in turn.reasoning):
        return Turn(turn.user, "", turn.reasoning + "\n" + turn.answer)
    return turn


def document(seed, split="train", kind=None, tokens=None):
    """One conversation. `tokens`: size of the text of a recall document."""
    g = Gen(f"{seed}:{split}", split)
    kind = kind or g.r.choices([k for k, _ in MIX], [w for _, w in MIX])[0]
    it = g.p(0.25)
    system = "" if g.p(0.6) else g.of(SYSTEMS_IT if it else SYSTEMS)
    if kind == "chat":
        turns, later = [], []
        for _ in range(g.n(1, 7)):
            if later and g.p(0.35):
                turns.append(later.pop(0))
            task = g.r.choices(["about", "arith", "lists", "instruction", "translate", "story", "code", "remember"],
                               [20, 20, 22, 18, 8, 3, 4, 10])[0]
            if task == "remember":
                tell, ask = g.remember(it)
                turns.append(tell)
                later.append(ask)
            elif task == "arith":
                turns.append(visible(g.arith(False, it)))
            else:
                turns.append(getattr(g, task)(it))
        return Document(kind, _messages(turns + later, system), False)
    if kind == "think":
        before = [visible(g.arith(False, it)) if g.p(0.5) else g.about(it) for _ in range(g.n(1, 2))] if g.p(0.2) else []
        task = g.r.choices(["arith", "lists", "about", "instruction", "translate", "story", "code"], [64, 10, 12, 8, 4, 1, 1])[0]
        t = g.arith(True, it) if task == "arith" else getattr(g, task)(it)
        return Document(kind, _messages(before + [t], system), True)
    if kind == "recall":
        thinking = g.p(0.15)
        tokens = tokens or int(40 * (1500 / 40) ** g.r.random())
        turns = g.recall(tokens, 1 if thinking else g.n(3, 14), it, thinking)
        return Document(kind, _messages(turns, system), thinking)
    if kind == "json":
        thinking = g.p(0.3)
        t, rf = g.json(it)
        turns = [t]
        if not thinking and rf is None:
            for _ in range(g.n(0, 2)):
                u, rf2 = g.json(it)
                while rf2 is not None:
                    u, rf2 = g.json(it)
                turns.append(u)
        return Document(kind, _messages(turns, system), thinking, None, rf)
    if kind == "tools":
        schemas, turns = g.tools(g.n(2, 5))
        return Document(kind, _messages(turns, system), g.p(0.5), schemas)
    t = g.of([g.story, g.code])(it)
    return Document(kind, _messages([t], system), g.p(0.3))


# ------------------------------------------------------------------------------------------------ held-out tests
def test_document(seed, kind, tokens=0):
    """A graded document of the test split: the last request's answer must be exactly as given."""
    g = Gen(f"test:{seed}:{kind}", "test")
    it = kind == "italian"
    tools = rf = None
    thinking = False
    if kind == "arithmetic":
        thinking, turns = True, [g.arith(True, False)]
    elif kind == "arithmetic_chat":
        turns = [visible(g.arith(False, False))]
    elif kind == "recall":
        turns = g.recall(tokens, 1, False, False, True, depth=g.r.random())
    elif kind == "json":
        t, rf = g.json(False)
        turns = [t]
    elif kind == "tool":
        thinking = g.p(0.5)
        tools, turns = g.tools(1)
        while not turns[0].calls:
            tools, turns = g.tools(1)
    elif kind == "lists":
        turns = [g.lists(False)]
    elif kind == "instruction":
        turns = [g.instruction(False)]
        while turns[0].user.startswith("Name three"):
            turns = [g.instruction(False)]
    elif kind == "italian":
        turns = [g.of([lambda: visible(g.arith(False, True)), lambda: g.lists(True), lambda: g.translate(True), lambda: g.about(True),
                       lambda: g.recall(200, 1, True, False, True)[0], lambda: g.instruction(True)])()]
    else:
        raise ValueError(kind)
    messages = _messages(turns)
    if tools:
        messages = messages[:2]
    return Document(kind, messages, thinking, tools, rf, graded=len(messages) - 1)
