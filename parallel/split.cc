#include "parallel/split.h"

#include <algorithm>
#include <utility>

#include "core/base/words.h"

namespace sirtaki::parallel {
namespace {

core::Status Refuse(const std::string& text) {
  return core::Status(core::StatusCode::kInvalidArgument, text);
}

std::string Number(std::int64_t number) { return std::to_string(number); }

}  // namespace

core::Status CheckSplit(const Split& split, const std::string& what) {
  for (const auto& [name, number] :
       {std::pair(what.c_str(), split.size), std::pair("blocks", split.blocks),
        std::pair("unit", split.unit)}) {
    if (number > 0) continue;
    return Refuse(std::string(name) + " is " + Number(number) + "; it has to be at least 1");
  }
  const std::int64_t block = split.size / split.blocks;
  if (split.size % split.blocks != 0 || block % split.unit != 0) {
    return Refuse(what + " is " + Number(split.size) + ", which is not " + Number(split.blocks) +
                  " equal blocks of whole units of " + Number(split.unit) +
                  ": it has to be a multiple of " + Number(split.blocks) + " times " +
                  Number(split.unit));
  }
  const std::int64_t units = block / split.unit;
  if (units >= split.ranks) return {};
  std::string why = what + " is " + Number(split.size);
  if (split.blocks > 1) why += " in " + Number(split.blocks) + " blocks";
  if (split.unit > 1) why += " in units of " + Number(split.unit);
  return Refuse(why + ", which " + Number(split.ranks) +
                " ranks cannot share: split it over at most " + core::CountText(units, "rank"));
}

std::vector<SplitRange> RangesOf(const Split& split, int index) {
  const std::int64_t block = split.size / split.blocks;
  const std::int64_t units = block / split.unit;
  const std::int64_t least = units / split.ranks;
  const std::int64_t more = units % split.ranks;  // ranks that have one more
  const std::int64_t first = least * index + std::min<std::int64_t>(index, more);
  const std::int64_t count = (least + (index < more ? 1 : 0)) * split.unit;
  std::vector<SplitRange> ranges;
  for (std::int64_t i = 0; i < split.blocks; ++i) {
    ranges.push_back({i * block + first * split.unit, count});
  }
  return ranges;
}

std::int64_t PartSize(const Split& split, int index) {
  return split.blocks * RangesOf(split, index).front().count;
}

}  // namespace sirtaki::parallel
