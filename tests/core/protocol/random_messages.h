// Messages for tests of the wire format: any that Encode accepts, by seed, and a text with every
// field.
#pragma once

#include <random>
#include <string>

#include "core/protocol/message.h"

namespace sirtaki::core {

class RandomMessages {
 public:
  explicit RandomMessages(std::uint64_t seed) : random_(seed) {}
  Message Next();

  // 0 <= result < limit
  std::uint64_t Below(std::uint64_t limit) { return random_() % limit; }

 private:
  bool Coin() { return Below(2) == 0; }
  std::uint64_t Number();  // small ones often, large ones too
  std::string Text();
  std::string Name();
  RankRanges Ranks();
  RankRanges SomeRanks();
  SetNumber Set();
  int Member();
  StatusCode Failure();
  Key AnyKey(SetNumber set);
  SignaturePtr AnySignature(bool is_part = false);
  Limits AnyLimits();
  Asked AnythingAsked();
  std::vector<bool> Absent();
  ReportItem Item();
  Entry AnyEntry(SetNumber set);
  MessageBody Body();

  std::mt19937_64 random_;
};

std::string Dump(const Message& message);

}  // namespace sirtaki::core
