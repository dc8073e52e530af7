#include "core/base/hmac.h"

#include <sys/random.h>

#include <bit>
#include <cstddef>

namespace sirtaki::core {
namespace {

constexpr std::size_t kBlock = 64;

// FIPS 180-4, 4.2.2: of the first 64 primes' cube roots.
constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<std::uint32_t, 8>;

std::uint32_t At(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24U | std::uint32_t{bytes[1]} << 16U |
         std::uint32_t{bytes[2]} << 8U | std::uint32_t{bytes[3]};
}

// 6.2.2
void Absorb(const std::uint8_t* block, State* state) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t t = 0; t < 16; ++t) w[t] = At(block + 4 * t);
  for (std::size_t t = 16; t < w.size(); ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3U);
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10U);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = *state;
  for (std::size_t t = 0; t < w.size(); ++t) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const State worked = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < worked.size(); ++i) (*state)[i] += worked[i];
}

std::string_view TextOf(const Hash& hash) {
  return {reinterpret_cast<const char*>(hash.data()), hash.size()};
}

}  // namespace

Hash Sha256(std::string_view message) {
  // 5.1.1: a bit, zeros to the last 8 bytes of a block, and the length in bits, highest first.
  std::string padded(message);
  padded += '\x80';
  padded.append((2 * kBlock - 8 - padded.size() % kBlock) % kBlock, '\0');
  const std::uint64_t bits = std::uint64_t{message.size()} * 8;
  for (unsigned shift = 64; shift > 0; shift -= 8) {
    padded += static_cast<char>((bits >> (shift - 8)) & 0xFFU);
  }
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  for (std::size_t at = 0; at < padded.size(); at += kBlock) {
    Absorb(reinterpret_cast<const std::uint8_t*>(padded.data()) + at, &state);
  }
  Hash hash{};
  for (std::size_t i = 0; i < hash.size(); ++i) {
    hash[i] = static_cast<std::uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return hash;
}

Hash HmacSha256(std::string_view key, std::string_view message) {
  std::string block(key);
  if (block.size() > kBlock) block = TextOf(Sha256(key));
  block.resize(kBlock, '\0');
  std::string inner = block;
  std::string outer = block;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  const Hash hash = Sha256(inner.append(message));
  return Sha256(outer.append(TextOf(hash)));
}

std::string HexText(const Hash& hash) {
  std::string text;
  for (const std::uint8_t byte : hash) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[(byte >> shift) & 0xF];
  }
  return text;
}

std::string RandomBytes(std::size_t count) {
  std::string bytes(count, '\0');
  const ssize_t got = getrandom(bytes.data(), count, 0);
  return got == static_cast<ssize_t>(count) ? bytes : "";
}

bool IsSame(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  unsigned differs = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    differs |= static_cast<unsigned char>(one[i]) ^ static_cast<unsigned char>(other[i]);
  }
  return differs == 0;
}

}  // namespace sirtaki::core
