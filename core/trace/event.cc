#include "core/trace/event.h"

#include <algorithm>

namespace sirtaki::core::trace {
namespace {

constexpr std::array<std::string_view, kEventKindCount> kNames = {
    "submit", "negotiate", "refuse", "queue",    "begin", "wait",  "pack", "move",
    "unpack", "finish",    "step",   "wait_for", "mark",  "batch", "pass", "bubble",
    "reduce", "join",      "leave",  "stall",    "fault", "lost"};

bool Continues(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

}  // namespace

std::string_view EventKindName(EventKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

void Event::SetText(std::string_view text) {
  constexpr std::string_view kGap = "…";
  if (text.size() <= kTextBytes) {
    std::copy(text.begin(), text.end(), letters.begin());
    text_bytes = static_cast<std::uint8_t>(text.size());
    return;
  }
  // The end of a name says more than its beginning: "….attention.weight".
  std::size_t head = (kTextBytes - kGap.size()) / 3;
  std::size_t tail = text.size() - (kTextBytes - kGap.size() - head);
  while (head > 0 && Continues(text[head])) --head;
  while (tail < text.size() && Continues(text[tail])) ++tail;
  auto to = std::copy_n(text.begin(), head, letters.begin());
  to = std::copy(kGap.begin(), kGap.end(), to);
  to = std::copy(text.begin() + static_cast<std::ptrdiff_t>(tail), text.end(), to);
  text_bytes = static_cast<std::uint8_t>(to - letters.begin());
}

}  // namespace sirtaki::core::trace
