// The cache says for how long a host is believed to be fit. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "launch/checks/host_checks.h"

namespace sirtaki::launch {

// Hosts that were found to be fit within the last hour, by what they were asked.
class HostCache {
 public:
  // `now`: seconds of the calendar. Lines that are old, of the future or no lines of ours are
  // passed over.
  HostCache(std::string_view text, std::int64_t now);

  static std::string KeyOf(const HostWish& wish, const std::string& host);
  bool Knows(const std::string& key) const { return seen_.contains(key); }
  void Add(const std::string& key) { seen_[key] = now_; }
  std::string Text() const;

 private:
  std::int64_t now_;
  std::map<std::string, std::int64_t> seen_;
};

}  // namespace sirtaki::launch
