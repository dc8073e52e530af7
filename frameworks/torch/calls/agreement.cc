#include "frameworks/torch/calls/agreement.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/base/digest.h"
#include "core/base/rank_ranges.h"
#include "core/base/text.h"
#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

constexpr char kError = 'E';  // the first byte of a text that is an error
constexpr char kList = 'L';

// Strings with their lengths before them, so that a name may hold any character.
std::string Join(const std::vector<std::string>& list) {
  std::string text(1, kList);
  for (const std::string& item : list) text += std::to_string(item.size()) + ":" + item;
  return text;
}

// Precondition: text is from Join.
std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> list;
  std::size_t at = 1;
  while (at < text.size()) {
    const std::size_t colon = text.find(':', at);
    const std::size_t length = std::stoull(text.substr(at, colon - at));
    list.push_back(text.substr(colon + 1, length));
    at = colon + 1 + length;
  }
  return list;
}

[[noreturn]] void ThrowFirstError(const std::string& what, const std::vector<std::string>& texts,
                                  const std::vector<int>& members) {
  const auto is_error = [](const std::string& text) { return !text.empty() && text[0] == kError; };
  const auto first = std::find_if(texts.begin(), texts.end(), is_error);
  core::RankRanges ranks;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i] == *first) ranks.Add(members[i]);
  }
  core::Origin origin;
  origin.rank = ranks.First();
  ThrowInvalid(what + ": " + first->substr(1) + " (on " + core::RanksText(ranks) + ")", origin);
}

// Present has the ranks that take part, which are those of the set that have not joined, and a
// number of each.
struct Present {
  std::vector<int> ranks;
  std::vector<std::int64_t> numbers;
};

// Every rank of the set gives a text. Empty if all texts are equal, else those of all that are
// present, in their order. `name` must be free. `present` holds this rank's number.
std::vector<std::string> ExchangeTexts(const std::string& name, const std::string& text,
                                       const SessionSet& set, std::chrono::milliseconds timeout,
                                       Present* present) {
  enum Column : std::uint8_t { kDigest, kLength, kRank, kNumber, kColumns };
  std::int64_t row[kColumns];
  row[kDigest] = static_cast<std::int64_t>(core::Digest(text.data(), text.size()));
  row[kLength] = static_cast<std::int64_t>(text.size());
  row[kRank] = set.rank();
  row[kNumber] = present->numbers.front();
  const at::Tensor rows = AllGatherBlocking(
      at::tensor(at::IntArrayRef(row), at::kLong).view({1, kColumns}), name, set, timeout);
  const std::int64_t* values = rows.const_data_ptr<std::int64_t>();
  const auto size = static_cast<std::size_t>(rows.size(0));
  *present = {};
  bool equal = true;
  for (std::size_t i = 0; i < size; ++i) {
    const std::int64_t* of_rank = values + kColumns * i;
    equal &= of_rank[kDigest] == values[kDigest] && of_rank[kLength] == values[kLength];
    present->ranks.push_back(static_cast<int>(of_rank[kRank]));
    present->numbers.push_back(of_rank[kNumber]);
  }
  if (equal) return {};

  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor all = AllGatherBlocking(bytes, name + "/texts", set, timeout);
  const char* from = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const auto length = static_cast<std::size_t>(values[kColumns * rank + kLength]);
    texts.emplace_back(length == 0 ? std::string() : std::string(from, length));
    from += length;
  }
  return texts;
}

// ExchangeLists, by which each rank tells a number as well.
std::vector<std::vector<std::string>> ExchangeListsOf(
    const std::string& what, const std::vector<std::string>& list, const std::string& error,
    const SessionSet& set, std::chrono::milliseconds timeout, Present* present) {
  const std::string text = error.empty() ? Join(list) : kError + error;
  std::vector<std::string> texts;
  if (set.size() > 1) texts = ExchangeTexts("sirtaki/" + what, text, set, timeout, present);
  if (texts.empty()) {
    if (error.empty()) return {};
    texts.assign(1, text);
  }
  std::vector<std::vector<std::string>> lists;
  for (const std::string& of_rank : texts) {
    if (of_rank[0] == kError) ThrowFirstError(what, texts, present->ranks);
    lists.push_back(Split(of_rank));
  }
  return lists;
}

// The lists are those of these ranks and differ, or there are none.
void ThrowIfAny(const std::string& what, const std::vector<std::vector<std::string>>& lists,
                const std::vector<int>& ranks) {
  if (lists.empty()) return;
  const auto other = std::ranges::find_if(lists, [&](const auto& one) { return one != lists[0]; });
  core::Origin origin;
  origin.rank = ranks[static_cast<std::size_t>(other - lists.begin())];
  ThrowStatus(core::Status(core::StatusCode::kMismatch, what + ": " + FirstDifference(lists, ranks),
                           origin));
}

}  // namespace

void AgreeOnErrors(const std::string& what, const std::string& error, const SessionSet& set) {
  AgreeOnList(what, {}, error, set);
}

std::vector<std::vector<std::string>> ExchangeLists(const std::string& what,
                                                    const std::vector<std::string>& list,
                                                    const std::string& error, const SessionSet& set,
                                                    std::chrono::milliseconds timeout,
                                                    std::vector<int>* ranks) {
  Present present = {{set.rank()}, {0}};
  auto lists = ExchangeListsOf(what, list, error, set, timeout, &present);
  if (ranks != nullptr) *ranks = std::move(present.ranks);
  return lists;
}

std::vector<std::int64_t> AgreeAndGather(const std::string& what,
                                         const std::vector<std::string>& list,
                                         const std::string& error, std::int64_t mine,
                                         const SessionSet& set) {
  Present present = {{set.rank()}, {mine}};
  ThrowIfAny(what, ExchangeListsOf(what, list, error, set, {}, &present), present.ranks);
  return std::move(present.numbers);
}

void AgreeOnList(const std::string& what, const std::vector<std::string>& list,
                 const std::string& error, const SessionSet& set,
                 std::chrono::milliseconds timeout) {
  std::vector<int> ranks;
  const auto lists = ExchangeLists(what, list, error, set, timeout, &ranks);
  ThrowIfAny(what, lists, ranks);
}

std::string GroupsText(const std::vector<std::string>& items, const std::vector<int>& ranks) {
  std::vector<std::pair<std::string, core::RankRanges>> groups;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::string& item = items[i];
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&item](const auto& known) { return known.first == item; });
    if (group == groups.end()) group = groups.insert(group, {item, {}});
    group->second.Add(ranks[i]);
  }
  std::string text;
  const char* separator = "";
  for (const auto& [item, of] : groups) {
    text += separator + core::Escaped(item) + " on " + core::RanksText(of);
    separator = "; ";
  }
  return text;
}

std::string FirstDifference(const std::vector<std::vector<std::string>>& lists,
                            const std::vector<int>& ranks) {
  std::size_t longest = 0;
  for (const auto& list : lists) longest = std::max(longest, list.size());
  for (std::size_t i = 0; i < longest; ++i) {
    std::vector<std::string> items;
    for (const auto& list : lists) {
      items.push_back(i < list.size() ? list[i] : "nothing more");
    }
    if (std::all_of(items.begin(), items.end(), [&](const auto& it) { return it == items[0]; })) {
      continue;
    }
    return "the ranks differ, first in entry " + std::to_string(i) + ": " +
           GroupsText(items, ranks);
  }
  return "the ranks differ";
}

}  // namespace sirtaki::detail
