#include "ops/inproc/meeting.h"

#include <algorithm>
#include <cstring>

#include "ops/base/kernels.h"

namespace sirtaki::ops {
namespace {

using Call = Deposit::Call;

void Copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// Reduces in the order of the ranks, block by block so that the result is still in the cache when
// it is copied: to the root alone, or to all.
void Reduce(const std::vector<Deposit>& members) {
  constexpr std::int64_t kBlock = 4096;
  const Deposit& first = members.front();
  const auto element = static_cast<std::int64_t>(core::SizeOf(first.dtype));
  const auto at = [&](const Deposit& member, std::int64_t i) {
    return static_cast<std::byte*>(member.output) + i * element;
  };
  for (std::int64_t i = 0; i < first.count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, first.count - i);
    for (std::size_t m = 1; m < members.size(); ++m) {
      ReduceInto(first.op, first.dtype, at(first, i), at(members[m], i), n);
    }
    if (first.call == Call::kReduce) {
      Copy(at(members[static_cast<std::size_t>(first.root)], i), at(first, i), n * element);
      continue;
    }
    for (std::size_t m = 1; m < members.size(); ++m) {
      Copy(at(members[m], i), at(first, i), n * element);
    }
  }
}

// The slices of one pair that move anything, in the order in which they are listed.
template <typename Slice>
std::vector<Slice> SlicesOf(const std::vector<Slice>& slices, std::size_t member) {
  std::vector<Slice> chosen;
  for (const Slice& slice : slices) {
    if (slice.bytes > 0 && static_cast<std::size_t>(slice.member) == member) {
      chosen.push_back(slice);
    }
  }
  return chosen;
}

template <typename Slice>
std::string SizesOf(const std::vector<Slice>& slices) {
  std::string text = "[";
  for (const Slice& slice : slices) {
    text += (text.size() == 1 ? "" : ", ") + std::to_string(slice.bytes);
  }
  return text + "]";
}

core::Status Exchange(const std::vector<Deposit>& deposits, const core::RankRanges& members) {
  struct Move {
    void* to;
    const void* from;
    std::int64_t bytes;
  };
  std::vector<Move> moves;
  const std::vector<int> ranks = members.ToVector();
  for (std::size_t from = 0; from < deposits.size(); ++from) {
    for (std::size_t to = 0; to < deposits.size(); ++to) {
      const std::vector<OutgoingSlice> given = SlicesOf(deposits[from].outgoing, to);
      const std::vector<IncomingSlice> taken = SlicesOf(deposits[to].incoming, from);
      const bool agree = std::equal(
          given.begin(), given.end(), taken.begin(), taken.end(),
          [](const OutgoingSlice& out, const IncomingSlice& in) { return out.bytes == in.bytes; });
      if (!agree) {
        return {core::StatusCode::kBackend,
                "members disagree: rank " + std::to_string(ranks[from]) + " gives slices of " +
                    SizesOf(given) + " bytes to rank " + std::to_string(ranks[to]) +
                    ", which expects " + SizesOf(taken)};
      }
      for (std::size_t i = 0; i < given.size(); ++i) {
        moves.push_back({taken[i].memory, given[i].memory, given[i].bytes});
      }
    }
  }
  for (const Move& move : moves) Copy(move.to, move.from, move.bytes);
  return core::Status::Ok();
}

std::string Reduction(const Deposit& deposit) {
  return std::to_string(deposit.count) + " " + std::string(core::DTypeName(deposit.dtype)) + " (" +
         std::string(core::ReduceOpName(deposit.op)) + ")";
}

}  // namespace

bool Deposit::IsPossible(std::size_t index, std::size_t members) const {
  const auto negative = [](std::int64_t size) { return size < 0; };
  const auto wrong = [&](const auto& slice) {
    return slice.bytes < 0 || slice.member < 0 ||
           static_cast<std::size_t>(slice.member) >= members ||
           static_cast<std::size_t>(slice.member) == index;
  };
  const bool rooted = call == Call::kBroadcast || call == Call::kReduce;
  const bool wrong_root = rooted && (root < 0 || static_cast<std::size_t>(root) >= members);
  const bool wrong_sizes = call == Call::kAllGatherV && bytes.size() != members;
  return !wrong_root && !wrong_sizes && count >= 0 &&
         std::none_of(bytes.begin(), bytes.end(), negative) &&
         std::none_of(outgoing.begin(), outgoing.end(), wrong) &&
         std::none_of(incoming.begin(), incoming.end(), wrong);
}

bool Deposit::AgreesWith(const Deposit& other) const {
  return call == other.call && count == other.count && dtype == other.dtype && op == other.op &&
         root == other.root && bytes == other.bytes;
}

std::string Deposit::ToString() const {
  switch (call) {
    case Call::kAllReduce:
      return "all-reduce of " + Reduction(*this);
    case Call::kReduce:
      return "reduce of " + Reduction(*this) + " to member " + std::to_string(root);
    case Call::kBroadcast:
      return "broadcast of " + std::to_string(count) + " bytes from member " + std::to_string(root);
    case Call::kAllGather:
      return "all-gather of " + std::to_string(count) + " bytes each";
    case Call::kAllGatherV: {
      std::string text = "all-gather of bytes [";
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(bytes[i]);
      }
      return text + "]";
    }
    case Call::kExchange:
      return "exchange of " + std::to_string(outgoing.size()) + " slices out and " +
             std::to_string(incoming.size()) + " in";
  }
  return "unknown call";
}

core::Status CarryOut(const std::vector<Deposit>& deposits, const core::RankRanges& members) {
  const Deposit& first = deposits.front();
  switch (first.call) {
    case Call::kAllReduce:
    case Call::kReduce:
      Reduce(deposits);
      break;
    case Call::kBroadcast:
      for (const Deposit& member : deposits) {
        Copy(member.output, deposits[static_cast<std::size_t>(first.root)].output, first.count);
      }
      break;
    case Call::kAllGather:
    case Call::kAllGatherV:
      for (const Deposit& receiver : deposits) {
        auto* to = static_cast<std::byte*>(receiver.output);
        for (std::size_t m = 0; m < deposits.size(); ++m) {
          const std::int64_t bytes = first.call == Call::kAllGather ? first.count : first.bytes[m];
          Copy(to, deposits[m].input, bytes);
          if (bytes > 0) to += bytes;
        }
      }
      break;
    case Call::kExchange:
      return Exchange(deposits, members);
  }
  return core::Status::Ok();
}

}  // namespace sirtaki::ops
