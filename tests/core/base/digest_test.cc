#include "core/base/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <unordered_set>
#include <vector>

namespace sirtaki::core {
namespace {

std::vector<unsigned char> Numbers(std::size_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(i * 37 + 11);
  return data;
}

TEST(DigestTest, EqualBytesAtAnyAddressAreEqual) {
  const auto data = Numbers(1000);
  std::vector<unsigned char> shifted(1001);
  std::copy(data.begin(), data.end(), shifted.begin() + 1);
  EXPECT_EQ(Digest(data.data(), 1000), Digest(shifted.data() + 1, 1000));
}

TEST(DigestTest, PiecesAreDigestedAsTheWhole) {
  const auto data = Numbers(100'000);
  RunningDigest pieces;
  for (std::size_t at = 0, size = 0; at < data.size(); at += size, size = size * 3 + 1) {
    pieces.Add(data.data() + at, std::min(size, data.size() - at));
  }
  EXPECT_EQ(pieces.Get(), Digest(data.data(), data.size()));
  EXPECT_EQ(RunningDigest().Get(), Digest(nullptr, 0));
}

// Every single bit, in whole rounds, in the words after them and in the last bytes.
TEST(DigestTest, EveryFlippedBitCounts) {
  for (const std::size_t bytes : {1, 7, 8, 63, 64, 65, 128, 203}) {
    auto data = Numbers(bytes);
    std::unordered_set<std::uint64_t> seen = {Digest(data.data(), bytes)};
    for (std::size_t bit = 0; bit < 8 * bytes; ++bit) {
      const auto mask = static_cast<unsigned char>(1u << (bit % 8));
      data[bit / 8] ^= mask;
      EXPECT_TRUE(seen.insert(Digest(data.data(), bytes)).second) << bit << " of " << bytes;
      data[bit / 8] ^= mask;
    }
  }
}

// What multiplying alone would miss: highest bits, which have nowhere to go, flipped in pairs.
TEST(DigestTest, TwoSignsFlippedCount) {
  constexpr std::size_t kNumbers = 64;
  std::vector<double> data(kNumbers, 1.0);
  std::unordered_set<std::uint64_t> seen = {Digest(data.data(), kNumbers * sizeof(double))};
  for (std::size_t i = 0; i < kNumbers; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      data[i] = data[j] = -1.0;
      EXPECT_TRUE(seen.insert(Digest(data.data(), kNumbers * sizeof(double))).second) << i << j;
      data[i] = data[j] = 1.0;
    }
  }
}

TEST(DigestTest, LengthAndOrderCount) {
  const std::vector<unsigned char> zeros(300, 0);
  std::unordered_set<std::uint64_t> seen;
  for (std::size_t bytes = 0; bytes <= zeros.size(); ++bytes) {
    EXPECT_TRUE(seen.insert(Digest(zeros.data(), bytes)).second) << bytes;
  }
  std::vector<std::uint64_t> words(20);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = i;
  const auto before = Digest(words.data(), 8 * words.size());
  std::swap(words[3], words[11]);  // one lane
  EXPECT_NE(Digest(words.data(), 8 * words.size()), before);
  std::swap(words[3], words[11]);
  std::swap(words[3], words[4]);  // two lanes
  EXPECT_NE(Digest(words.data(), 8 * words.size()), before);
}

}  // namespace
}  // namespace sirtaki::core
