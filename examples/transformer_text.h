// The text of train_transformer: made-up sentences, the same on every machine and in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace transformer {

// A Writer makes sentences by a small grammar. There is something to learn at every distance: how
// words are spelled, which kinds follow each other, and that a verb agrees with a subject that may
// stand many words before it ("the birds that a sailor often sees sing.").
class Writer {
 public:
  static std::string text(std::size_t letters) {
    Writer writer;
    while (writer.text_.size() < letters) writer.sentence();
    writer.text_.resize(letters);
    return std::move(writer.text_);
  }

 private:
  using Words = std::vector<std::string>;

  void sentence() {
    const bool plural = below(2) == 1;
    noun_phrase(plural, /*depth=*/0);
    verb_phrase(plural, /*depth=*/0);
    text_.back() = '.';
    text_ += below(8) == 0 ? '\n' : ' ';
  }

  void noun_phrase(bool plural, int depth) {
    static const Words one{"a", "the", "every", "this"};
    static const Words many{"two", "the", "many", "these"};
    static const Words adjectives{"old", "small", "red", "quiet", "happy", "clever"};
    static const Words nouns{"sailor", "bird", "teacher", "river",
                             "horse",  "dog",  "garden",  "friend"};
    word(plural ? many : one);
    while (below(3) == 0) word(adjectives);
    word(nouns, plural ? "s" : "");
    if (depth == 2 || below(4) != 0) return;
    text_ += "that ";
    if (below(2) == 0) {
      verb_phrase(plural, depth + 1);
    } else {
      const bool other_plural = below(2) == 1;
      noun_phrase(other_plural, depth + 1);
      transitive_verb(other_plural);
    }
  }

  void verb_phrase(bool plural, int depth) {
    static const Words verbs{"sing", "sleep", "wait", "listen", "swim"};
    if (below(2) == 0) {
      word(verbs, plural ? "" : "s");
    } else {
      transitive_verb(plural);
      noun_phrase(below(2) == 1, depth + 1 < 2 ? depth + 1 : 2);
    }
  }

  void transitive_verb(bool plural) {
    static const Words adverbs{"often", "never", "always"};
    static const Words verbs{"see", "follow", "help", "find", "like"};
    if (below(4) == 0) word(adverbs);
    word(verbs, plural ? "" : "s");
  }

  void word(const Words& words, const char* ending = "") {
    text_ += words[below(words.size())] + ending + ' ';
  }

  // A number below `count`, by Knuth's linear congruential generator.
  std::size_t below(std::size_t count) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>((state_ >> 33) % count);
  }

  std::uint64_t state_ = 1;
  std::string text_;
};

}  // namespace transformer
