"""The text of train_transformer.py: the made-up sentences of ../transformer_text.h, letter by letter."""

ONE, MANY = ("a", "the", "every", "this"), ("two", "the", "many", "these")
ADJECTIVES = ("old", "small", "red", "quiet", "happy", "clever")
NOUNS = ("sailor", "bird", "teacher", "river", "horse", "dog", "garden", "friend")
VERBS = ("sing", "sleep", "wait", "listen", "swim")
TRANSITIVE = ("see", "follow", "help", "find", "like")
ADVERBS = ("often", "never", "always")


class Writer:
    """Makes sentences by a small grammar, in which a verb agrees with a subject that may stand many words before it."""

    def __init__(self):
        self.state = 1

    def text(self, letters):
        text = ""
        while len(text) < letters:
            text += self.sentence()
        return text[:letters]

    def sentence(self):
        plural = self.below(2) == 1
        words = self.noun_phrase(plural, 0) + self.verb_phrase(plural, 0)
        return " ".join(words) + "." + ("\n" if self.below(8) == 0 else " ")

    def noun_phrase(self, plural, depth):
        words = [self.word(MANY if plural else ONE)]
        while self.below(3) == 0:
            words.append(self.word(ADJECTIVES))
        words.append(self.word(NOUNS) + ("s" if plural else ""))
        if depth == 2 or self.below(4) != 0:
            return words
        words.append("that")
        if self.below(2) == 0:
            return words + self.verb_phrase(plural, depth + 1)
        other_plural = self.below(2) == 1
        words += self.noun_phrase(other_plural, depth + 1)
        return words + self.transitive_verb(other_plural)

    def verb_phrase(self, plural, depth):
        if self.below(2) == 0:
            return [self.word(VERBS) + ("" if plural else "s")]
        words = self.transitive_verb(plural)
        return words + self.noun_phrase(self.below(2) == 1, min(depth + 1, 2))

    def transitive_verb(self, plural):
        words = [self.word(ADVERBS)] if self.below(4) == 0 else []
        return words + [self.word(TRANSITIVE) + ("" if plural else "s")]

    def word(self, words):
        return words[self.below(len(words))]

    def below(self, count):
        """A number below count, by Knuth's linear congruential generator."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % count
