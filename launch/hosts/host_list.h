// Hosts and how many ranks each may take, as people write them. Pure.
//
// All functions give kInvalidArgument for a text that they do not understand: what it came from (an
// option, or a file and its line), the text, and what is allowed. On error `*out` is as it was.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::launch {

inline constexpr int kMaxSlots = 65536;

struct Host {
  std::string name;
  int slots = 1;
  std::vector<int> devices;  // which of the host's GPUs its ranks see; empty: all
  bool operator==(const Host&) const = default;
};

using HostList = std::vector<Host>;

int SlotsOf(const HostList& hosts);
// "a:4,b:4"
std::string HostsText(const HostList& hosts);
// "0,2": the host's GPUs, as an order to start has them; empty for all.
std::string DevicesText(const Host& host);
// Takes the entries of these numbers, "0,2", out of what CUDA_VISIBLE_DEVICES is on the host, a list of
// numbers or of names. A list that shows no GPU stays as it is. Errors: it has too few.
core::Status ChooseDevices(std::string_view numbers, const std::string& visible, std::string* out);

// Adds the slots to those of the host, which comes last if it is new.
void AddSlots(std::string_view name, int slots, HostList* hosts);

// "a:4,b:4"; without a number one slot. `from` is for texts: "-H".
core::Status ParseHosts(std::string_view text, std::string_view from, HostList* out);

// Lines "host slots=4", "host:4" or "host"; # begins a comment. A host that stands there again has
// the slots of all its lines.
core::Status ParseHostFile(std::string_view text, std::string_view path, HostList* out);

// "a:0,2@b" leaves slots 0 and 2 of a and all of b if it is to include, and all but them if not.
// The order stays that of the hosts. `from`: "--include".
core::Status FilterHosts(std::string_view text, bool include, std::string_view from,
                         HostList* hosts);

}  // namespace sirtaki::launch
