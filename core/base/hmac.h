// HMAC with SHA-256: with it two that share a key show each other that they know it. Pure.
//
// Written here and not taken from a library: it is needed once a connection, of messages of 100
// bytes, and is fixed by FIPS 180-4 and RFC 2104. OpenSSL's libcrypto or libsodium would have to be
// installed on every host that a rank starts on.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace sirtaki::core {

inline constexpr std::size_t kHashBytes = 32;
using Hash = std::array<std::uint8_t, kHashBytes>;

Hash Sha256(std::string_view message);                            // FIPS 180-4
Hash HmacSha256(std::string_view key, std::string_view message);  // RFC 2104

std::string HexText(const Hash& hash);  // 64 digits

// Fresh random bytes; empty if the system has none to give.
std::string RandomBytes(std::size_t count);

// Takes as long wherever the texts differ, so that nobody learns where.
bool IsSame(std::string_view one, std::string_view other);

}  // namespace sirtaki::core
