#include "launch/checks/host_cache.h"

#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <limits>
#include <vector>

#include "core/base/digest.h"
#include "launch/base/build_facts.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

namespace {

constexpr std::int64_t kFresh = std::chrono::seconds(std::chrono::hours(1)).count();

}  // namespace

HostCache::HostCache(std::string_view text, std::int64_t now) : now_(now) {
  for (const std::string_view line : Split(text, '\n')) {
    const std::vector<std::string_view> words = Words(line);
    if (words.size() != 2) continue;
    const auto seen =
        NumberFrom<std::int64_t>(words[0], 0, std::numeric_limits<std::int64_t>::max());
    if (seen && *seen <= now && now - *seen < kFresh) seen_[std::string(words[1])] = *seen;
  }
}

std::string HostCache::KeyOf(const HostWish& wish, const std::string& host) {
  std::string all = wish.launcher.ToString() + "\n" + std::string(FactsOfBuild().version);
  for (const std::string& word : AskingWords(wish, host)) all += "\n" + word;
  std::array<char, 24> digest{};
  std::snprintf(digest.data(), digest.size(), "%016" PRIx64, core::Digest(all.data(), all.size()));
  return host + ":" + digest.data();
}

std::string HostCache::Text() const {
  std::string text;
  for (const auto& [key, seen] : seen_) text += std::to_string(seen) + " " + key + "\n";
  return text;
}

}  // namespace sirtaki::launch
