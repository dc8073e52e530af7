// All-reduce, reduce and reduce-scatter. A tensor that travels as it is moves from its input to its
// output; the others are packed, scaled and converted by one kernel, and unpacked by another.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fusion/arena_layout.h"
#include "ops/base/bytes.h"
#include "ops/groups/reduction_terms.h"
#include "ops/nccl/group_launch.h"

namespace sirtaki::ops::nccl {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;
using core::Status;
using cuda::CopySegment;

// The limit is that of what all members give when it is gathered and combined here.
constexpr std::int64_t kGatheredBytes = std::int64_t{64} << 20;
// The limits of a group that is packed by shares: its staging memory, and the pieces that it is cut
// into, 112 of which one launch copies.
constexpr std::int64_t kScatteredBytes = std::int64_t{64} << 20;
constexpr std::int64_t kMostPieces = std::int64_t{16} * cuda::CopyTable::kMost;

// How the elements travel, and what is done to them before and afterwards.
struct Travel {
  DType element;  // of the tensors
  DType moved;    // on the way
  bool gathered;  // combined by us: NCCL has no such reduction
  ReduceOp op;    // if it is
  RedOp nccl_op;  // if it is not
  fusion::Scale load;
  fusion::Scale store;
};

RedOp RedOpOf(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kAverage:
      return core::IsFloating(dtype) ? RedOp::kAvg : RedOp::kSum;
    case ReduceOp::kMin:
      return RedOp::kMin;
    case ReduceOp::kMax:
      return RedOp::kMax;
    case ReduceOp::kProduct:
      return RedOp::kProd;
    default:
      return RedOp::kSum;
  }
}

Travel TravelOf(const GroupTask& task) {
  const core::Signature& signature = task.signature();
  const DType element = ElementsOf(signature).dtype;
  const ReduceOp op = signature.reduction;
  Travel travel{.element = element, .moved = element, .op = op};
  if (signature.wire && task.members->Count() > 1) {
    travel.moved = *signature.wire;
  } else if (element == DType::kI16 && !cuda::Kernels::Reduces(op, element)) {
    travel.moved = DType::kI32;  // NCCL has none of 16 bits; the low ones come out the same
  } else if (op == ReduceOp::kAverage && core::IsInteger(element)) {
    travel.moved = fusion::AccumulationType(element, op);
  }
  travel.gathered = cuda::Kernels::Reduces(op, travel.moved);
  travel.nccl_op = RedOpOf(op, travel.moved);
  travel.load.factor = signature.prescale;
  travel.store.factor = signature.postscale;
  if (op == ReduceOp::kAverage && !core::IsFloating(element)) {
    travel.store.divisor = task.members->Count();
  }
  return travel;
}

// Our kernels divide what they copy anyway, and NCCL adds: its own average, which rounds 1/n to the
// type and multiplies before it adds, takes neither symmetric kernels nor NVLink SHARP. In 16 bits
// that 1/n is up to 0.2 % wrong where n is no power of two, so there a copy is made for it.
// `copied`: the same on all members.
void AverageByCopy(const GroupTask& task, bool copied, Travel* travel) {
  if (travel->nccl_op != RedOp::kAvg) return;
  const std::int64_t members = task.members->Count();
  const bool is_biased =
      BytesOf(travel->moved) < 4 && !std::has_single_bit(static_cast<std::uint64_t>(members));
  if (!copied && !is_biased && travel->moved == travel->element && travel->load.identity()) return;
  travel->nccl_op = RedOp::kSum;
  travel->load.factor /= static_cast<double>(members);
}

Status Pack(const LaunchContext& context, const Travel& travel,
            const std::vector<CopySegment>& segments) {
  return context.kernels.Copy(travel.element, travel.moved, segments, travel.load,
                              IdentityOf(travel.op, travel.moved), context.stream.handle());
}

Status Unpack(const LaunchContext& context, const Travel& travel,
              const std::vector<CopySegment>& segments) {
  return context.kernels.Copy(travel.moved, travel.element, segments, travel.store, {},
                              context.stream.handle());
}

// Where tensors of these sizes begin when they are packed, in elements; the last is the end. The
// same on all members, and of one tensor exactly its size, so that a member that packs it and one
// that does not call the same.
std::vector<std::int64_t> Starts(const std::vector<std::int64_t>& counts, DType moved) {
  std::vector<std::int64_t> bytes;
  bytes.reserve(counts.size());
  for (const std::int64_t count : counts) bytes.push_back(count * BytesOf(moved));
  std::vector<std::int64_t> starts = fusion::PackedStarts(bytes);
  for (std::int64_t& start : starts) start /= BytesOf(moved);
  return starts;
}

bool KeepsResult(const GroupTask& task, const GroupItem& item) {
  return ops::KeepsResult(task) && item.work != nullptr;
}

// `count` elements as they travel.
Status Combine(const LaunchContext& context, const GroupTask& task, const Travel& travel,
               const void* from, void* to, std::int64_t count) {
  const auto elements = static_cast<std::size_t>(count);
  const DataType type = DataTypeOf(travel.moved);
  if (task.signature().kind == OpKind::kAllReduce) {
    return context.Call("ncclAllReduce", &Api::AllReduce, from, to, elements, type, travel.nccl_op);
  }
  const auto root = static_cast<int>(task.members->IndexOf(task.signature().root));
  return context.Call("ncclReduce", &Api::Reduce, from, to, elements, type, travel.nccl_op, root);
}

// Every member gets what all give, a window at a time, and combines it. `own`: what this one gives,
// and then the result; `all`: for the windows of all.
Status CombineGathered(const LaunchContext& context, const Travel& travel, std::byte* own,
                       std::byte* all, std::int64_t count, std::int64_t window) {
  const int members = context.communicator.size();
  for (std::int64_t begin = 0; begin < count; begin += window) {
    const std::int64_t elements = std::min(window, count - begin);
    std::byte* const part = own + begin * BytesOf(travel.moved);
    Status status =
        context.Call("ncclAllGather", &Api::AllGather, part, all,
                     static_cast<std::size_t>(elements * BytesOf(travel.moved)), DataType::kUint8);
    if (status.ok()) {
      status = context.kernels.Reduce(travel.op, travel.moved, all, members, elements, part,
                                      context.stream.handle());
    }
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

// Straight from the input to the output.
Status ReduceWhereItLies(const LaunchContext& context, const GroupTask& task,
                         const Travel& travel) {
  const GroupItem& item = task.items.front();
  const std::int64_t count = item.signature->ElementCount() * ElementsOf(task.signature()).of_each;
  const void* from = ReducedInput(item);
  void* const to = item.work->output;
  if (from == nullptr || !travel.load.identity()) {
    if (Status status = Pack(context, travel, {{from, to, count}}); !status.ok()) return status;
    from = to;
  }
  Status status = Combine(context, task, travel, from, to, count);
  if (!status.ok() || travel.store.identity() || !KeepsResult(task, item)) return status;
  return Unpack(context, travel, {{to, to, count}});
}

// Where the group is in the arena of its bucket: all of it side by side. Null if it is not, on all
// ranks. `starts`: of it as it would be packed.
std::byte* PlaceInArena(const GroupTask& task, const Travel& travel,
                        const std::vector<std::int64_t>& starts) {
  // A rank that has joined has nothing there, and NCCL wants the memory of all ranks to be of one
  // kind.
  const GroupItem& first = task.items.front();
  if (first.work == nullptr || !task.silent.empty()) return nullptr;
  if (travel.gathered || travel.moved != travel.element) return nullptr;
  const cuda::DeviceWork& head = cuda::AsDeviceWork(*first.work);
  if (head.arena == nullptr) return nullptr;
  for (std::size_t i = 0; i < task.items.size(); ++i) {
    const cuda::DeviceWork& work = cuda::AsDeviceWork(*task.items[i].work);
    // A gradient before it that no rank has leaves a hole.
    if (work.arena != head.arena || work.place != head.place + starts[i] * BytesOf(travel.moved)) {
      return nullptr;
    }
  }
  return head.place;
}

// ReduceInArena reduces in place, except what lies elsewhere or is scaled.
Status ReduceInArena(const LaunchContext& context, const GroupTask& task, const Travel& travel,
                     const std::vector<std::int64_t>& counts, std::byte* begin,
                     std::int64_t total) {
  std::vector<CopySegment> in;
  std::vector<CopySegment> out;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const GroupItem& item = task.items[i];
    std::byte* const place = cuda::AsDeviceWork(*item.work).place;
    const void* const input = ReducedInput(item);
    if (input != place || !travel.load.identity()) in.push_back({input, place, counts[i]});
    if (item.work->output != place || !travel.store.identity()) {
      out.push_back({place, item.work->output, counts[i]});
    }
  }
  Status status = in.empty() ? Status::Ok() : Pack(context, travel, in);
  if (status.ok()) status = Combine(context, task, travel, begin, begin, total);
  return status.ok() && !out.empty() ? Unpack(context, travel, out) : status;
}

std::vector<std::int64_t> CountsOf(const GroupTask& task) {
  const std::int64_t of_each = ElementsOf(task.signature()).of_each;
  std::vector<std::int64_t> counts;
  counts.reserve(task.items.size());
  for (const GroupItem& item : task.items) {
    counts.push_back(item.signature->ElementCount() * of_each);
  }
  return counts;
}

bool LiesWell(const GroupTask& task, const Travel& travel) {
  if (task.items.size() != 1 || travel.gathered || travel.moved != travel.element) return false;
  const GroupItem& item = task.items.front();
  if (item.work == nullptr) return false;
  // A rank that has joined packs, and NCCL wants the memory of all ranks to be of one kind.
  if (!task.silent.empty() && cuda::AsDeviceWork(*item.work).arena != nullptr) return false;
  // A member that is not the root has nowhere to scale to.
  return KeepsResult(task, item) || (travel.load.identity() && ReducedInput(item) != nullptr);
}

// The shares of a group's members, packed: each member's side by side, in as much memory as the
// largest of them takes.
struct PackedShares {
  std::vector<std::vector<std::int64_t>> starts;  // by member: of the tensors, and the end
  std::int64_t each = 0;                          // elements
  bool are_even = true;                           // one tensor is cut into equal shares
};

PackedShares SharesOf(const GroupTask& task, DType moved) {
  const std::int64_t members = task.members->Count();
  PackedShares shares{.are_even = task.items.size() == 1};
  for (std::int64_t m = 0; m < members; ++m) {
    std::vector<std::int64_t> counts;
    counts.reserve(task.items.size());
    for (const GroupItem& item : task.items) counts.push_back(ShareOf(item, members, m).count);
    const std::int64_t end = shares.starts.emplace_back(Starts(counts, moved)).back();
    shares.are_even &= m == 0 || end == shares.each;
    shares.each = std::max(shares.each, end);
  }
  return shares;
}

// Where this rank gets its share.
void* ShareOutput(const GroupItem& item) {
  return AllKeepParts(item) ? item.work->kept->memory : item.work->output;
}

Status ScatterReduced(const LaunchContext& context, const Travel& travel, const void* from,
                      void* to, std::int64_t share) {
  return context.Call("ncclReduceScatter", &Api::ReduceScatter, from, to,
                      static_cast<std::size_t>(share), DataTypeOf(travel.moved), travel.nccl_op);
}

// Each member gets what the others give it of its share, and combines it.
Status ScatterGathered(const LaunchContext& context, const Travel& travel, std::byte* packed,
                       std::byte* parts, std::byte* result, std::int64_t share) {
  const Status status = context.ExchangeParts(packed, parts, share * BytesOf(travel.moved));
  if (!status.ok()) return status;
  return context.kernels.Reduce(travel.op, travel.moved, parts, context.communicator.size(), share,
                                result, context.stream.handle());
}

Status ScatterPacked(const LaunchContext& context, const GroupTask& task, const Travel& travel,
                     const PackedShares& shares) {
  const std::int64_t members = context.communicator.size();
  const std::int64_t self = context.communicator.rank();
  const std::int64_t size = BytesOf(travel.moved);
  const std::int64_t bytes = shares.each * size;
  std::byte* packed = nullptr;
  Status status = context.staging.Reserve((travel.gathered ? 2 : 1) * members * bytes, &packed);
  if (!status.ok()) return status;
  std::vector<CopySegment> in;
  std::vector<CopySegment> out;
  for (std::size_t i = 0; i < task.items.size(); ++i) {
    const GroupItem& item = task.items[i];
    const auto* from = static_cast<const std::byte*>(ReducedInput(item));
    for (std::int64_t m = 0; m < members; ++m) {
      const Part of = ShareOf(item, members, m);
      std::byte* const place =
          packed + m * bytes + shares.starts[static_cast<std::size_t>(m)][i] * size;
      in.push_back(
          {from == nullptr ? nullptr : from + of.begin * BytesOf(travel.element), place, of.count});
      if (m == self && item.work != nullptr) out.push_back({place, ShareOutput(item), of.count});
    }
  }
  status = Pack(context, travel, in);
  if (!status.ok()) return status;
  std::byte* const own = packed + self * bytes;
  status = travel.gathered ? ScatterGathered(context, travel, packed, packed + members * bytes, own,
                                             shares.each)
                           : ScatterReduced(context, travel, packed, own, shares.each);
  return status.ok() ? Unpack(context, travel, out) : status;
}

Status ReduceToShares(const LaunchContext& context, const GroupTask& task, Travel travel,
                      const PackedShares& shares) {
  AverageByCopy(task, !shares.are_even, &travel);
  const GroupItem& first = task.items.front();
  if (!shares.are_even || travel.gathered || travel.moved != travel.element ||
      first.work == nullptr) {
    return ScatterPacked(context, task, travel, shares);
  }
  const void* from = ReducedInput(first);
  if (from == nullptr || !travel.load.identity()) {
    if (!AllKeepParts(first)) return ScatterPacked(context, task, travel, shares);
    // The output is as large as the input, and nobody needs the whole of it.
    const std::int64_t all = context.communicator.size() * shares.each;
    const Status status = Pack(context, travel, {{from, first.work->output, all}});
    if (!status.ok()) return status;
    from = first.work->output;
  }
  void* const to = ShareOutput(first);
  const Status status = ScatterReduced(context, travel, from, to, shares.each);
  if (!status.ok() || travel.store.identity()) return status;
  return Unpack(context, travel, {{to, to, shares.each}});
}

// Whether a group of which each member keeps a part goes as a reduce-scatter: not where its padding
// would move as much as an all-reduce does, nor where cutting it would take a long time, nor where it
// would take much staging memory. The same on all members.
bool GoesInShares(const GroupTask& task, const Travel& travel, const PackedShares& shares,
                  std::int64_t total) {
  if (shares.are_even) return true;
  const std::int64_t members = task.members->Count();
  const std::int64_t packed = members * shares.each;
  return packed < 2 * total && packed * BytesOf(travel.moved) <= kScatteredBytes &&
         static_cast<std::int64_t>(task.items.size()) * members <= kMostPieces;
}

}  // namespace

Status LaunchReduce(const LaunchContext& context, const GroupTask& task) {
  Travel travel = TravelOf(task);
  const std::vector<std::int64_t> counts = CountsOf(task);
  const std::vector<std::int64_t> starts = Starts(counts, travel.moved);
  const std::int64_t total = starts.back();
  if (total == 0) return Status::Ok();
  if (OnlyPartsAreKept(task)) {
    const PackedShares shares = SharesOf(task, travel.moved);
    if (GoesInShares(task, travel, shares, total)) {
      const Status status = ReduceToShares(context, task, travel, shares);
      for (const GroupItem& item : task.items) item.work->kept->is_there = status.ok();
      return status;
    }
  }
  std::byte* const in_arena = PlaceInArena(task, travel, starts);
  AverageByCopy(task, in_arena != nullptr || task.items.size() > 1, &travel);
  if (in_arena != nullptr) {
    return ReduceInArena(context, task, travel, counts, in_arena, total);
  }
  if (LiesWell(task, travel)) return ReduceWhereItLies(context, task, travel);

  const std::int64_t size = BytesOf(travel.moved);
  const std::int64_t members = context.communicator.size();
  const std::int64_t window =
      std::min(total, std::max<std::int64_t>(1, kGatheredBytes / (members * size)));
  const std::int64_t own_bytes = (total * size + fusion::kPackedAlignment - 1) /
                                 fusion::kPackedAlignment * fusion::kPackedAlignment;
  std::byte* packed = nullptr;
  Status status =
      context.staging.Reserve(own_bytes + (travel.gathered ? members * window * size : 0), &packed);
  if (!status.ok()) return status;

  std::vector<CopySegment> in;
  std::vector<CopySegment> out;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::byte* const place = packed + starts[i] * size;
    in.push_back({ReducedInput(task.items[i]), place, counts[i]});
    if (KeepsResult(task, task.items[i])) {
      out.push_back({place, task.items[i].work->output, counts[i]});
    }
  }
  status = Pack(context, travel, in);
  if (!status.ok()) return status;
  status = travel.gathered
               ? CombineGathered(context, travel, packed, packed + own_bytes, total, window)
               : Combine(context, task, travel, packed, packed, total);
  return status.ok() ? Unpack(context, travel, out) : status;
}

Status LaunchReduceScatter(const LaunchContext& context, const GroupTask& task) {
  const Travel travel = TravelOf(task);
  const PackedShares shares = SharesOf(task, travel.moved);
  return shares.each == 0 ? Status::Ok() : ReduceToShares(context, task, travel, shares);
}

}  // namespace sirtaki::ops::nccl
