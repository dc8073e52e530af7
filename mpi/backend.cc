#include "mpi/backend.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

namespace sirtaki::mpi {
namespace {

using core::DType;
using core::OpKind;
using core::Status;
using core::StatusCode;
using ops::Channel;

// Of an exchange, on the communicator of its lane. Not those with which sets are made on the
// world's (mpi/communicators).
constexpr int kExchangeTag = 3;

std::string ChannelName(Channel channel) {
  return "process set " + std::to_string(channel.set) +
         (channel.lane == fusion::Lane::kSmall ? ", small lane" : ", large lane");
}

std::unique_ptr<ops::Completion> Refused(StatusCode code, std::string text) {
  return std::make_unique<Operation>(Status(code, std::move(text)));
}

std::byte* At(void* base, std::int64_t offset) { return static_cast<std::byte*>(base) + offset; }

}  // namespace

Backend::Backend(Communicators& communicators, BackendOptions options)
    : communicators_(communicators), options_(options), stop_(std::make_shared<StopSign>()) {}

Status Backend::AddSet(core::SetNumber set, const core::RankRanges& members) {
  const Status stopped = stop_->Get();
  return stopped.ok() ? communicators_.AddSet(set, members) : stopped;
}

Status Backend::RemoveSet(core::SetNumber set) {
  const Status stopped = stop_->Get();
  return stopped.ok() ? communicators_.RemoveSet(set) : stopped;
}

Mode Backend::ModeOf(Channel channel) const {
  const bool blocking = channel.lane == fusion::Lane::kLarge && !options_.serialized;
  return blocking ? Mode::kBlocking : Mode::kPolled;
}

std::unique_ptr<ops::Completion> Backend::Run(Channel channel, std::vector<Call> calls) {
  const Line line = communicators_.For(channel);
  if (line.comm == MPI_COMM_NULL) {
    return Refused(StatusCode::kBackend,
                   "there is no MPI communicator for " + ChannelName(channel));
  }
  return std::make_unique<Operation>(line.comm, ModeOf(channel), stop_, std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::RunReduction(Channel channel, const Call& whole,
                                                       std::int64_t count, DType dtype,
                                                       core::ReduceOp op) {
  const Reduction reduction = reductions_.For(op, dtype);
  if (reduction.op == MPI_OP_NULL) {
    return Refused(StatusCode::kUnsupported, "MPI cannot reduce " +
                                                 std::string(core::DTypeName(dtype)) + " by " +
                                                 std::string(core::ReduceOpName(op)));
  }
  const auto size = static_cast<std::int64_t>(core::SizeOf(dtype));
  const std::int64_t step = std::max<std::int64_t>(options_.max_call_bytes / size, 1);
  std::vector<Call> calls;
  for (std::int64_t first = 0; first < count; first += step) {
    Call& call = calls.emplace_back(whole);
    call.output = At(whole.output, first * size);
    call.input = whole.kind == Call::Kind::kReduce && communicators_.For(channel).rank != whole.root
                     ? call.output
                     : MPI_IN_PLACE;
    call.count = static_cast<int>(std::min(step, count - first));
    call.type = reduction.type;
    call.op = reduction.op;
  }
  return Run(channel, std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::AllReduce(Channel channel, void* buffer,
                                                    std::int64_t count, DType dtype,
                                                    core::ReduceOp op) {
  Call whole;
  whole.kind = Call::Kind::kAllReduce;
  whole.output = buffer;
  return RunReduction(channel, whole, count, dtype, op);
}

std::unique_ptr<ops::Completion> Backend::Reduce(Channel channel, void* buffer, std::int64_t count,
                                                 DType dtype, core::ReduceOp op, int root) {
  Call whole;
  whole.kind = Call::Kind::kReduce;
  whole.output = buffer;
  whole.root = root;
  return RunReduction(channel, whole, count, dtype, op);
}

void Backend::AddBroadcasts(void* buffer, std::int64_t bytes, int root,
                            std::vector<Call>* calls) const {
  for (std::int64_t first = 0; first < bytes; first += options_.max_call_bytes) {
    Call& call = calls->emplace_back();
    call.kind = Call::Kind::kBroadcast;
    call.output = At(buffer, first);
    call.count = static_cast<int>(std::min(options_.max_call_bytes, bytes - first));
    call.root = root;
  }
}

std::unique_ptr<ops::Completion> Backend::Broadcast(Channel channel, void* buffer,
                                                    std::int64_t bytes, int root) {
  std::vector<Call> calls;
  AddBroadcasts(buffer, bytes, root, &calls);
  return Run(channel, std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::AllGather(Channel channel, const void* input,
                                                    void* output, std::int64_t bytes) {
  const int size = communicators_.For(channel).size;
  if (bytes * size > options_.max_call_bytes) {
    return AllGatherV(channel, input, output,
                      std::vector<std::int64_t>(static_cast<std::size_t>(size), bytes));
  }
  std::vector<Call> calls;
  if (bytes > 0) {
    Call& call = calls.emplace_back();
    call.kind = Call::Kind::kAllGather;
    call.input = input;
    call.output = output;
    call.count = static_cast<int>(bytes);
  }
  return Run(channel, std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::AllGatherV(Channel channel, const void* input,
                                                     void* output,
                                                     std::span<const std::int64_t> bytes) {
  const int rank = communicators_.For(channel).rank;
  std::vector<Call> calls;
  if (std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}) <= options_.max_call_bytes) {
    Call& call = calls.emplace_back();
    call.kind = Call::Kind::kAllGatherV;
    call.input = input;
    call.output = output;
    int displacement = 0;
    for (const std::int64_t part : bytes) {
      call.counts.push_back(static_cast<int>(part));
      call.displacements.push_back(displacement);
      displacement += static_cast<int>(part);
    }
    if (rank >= 0) call.count = call.counts[static_cast<std::size_t>(rank)];
    if (displacement == 0) calls.clear();  // nobody has anything
    return Run(channel, std::move(calls));
  }

  // Too much for one call: each member's part is broadcast straight into its place.
  std::byte* place = static_cast<std::byte*>(output);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (static_cast<int>(i) == rank && place != input) {
      std::memcpy(place, input, static_cast<std::size_t>(bytes[i]));
    }
    AddBroadcasts(place, bytes[i], static_cast<int>(i), &calls);
    place += bytes[i];
  }
  return Run(channel, std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::AllToAll(Channel channel, const void* input, void* output,
                                                   std::int64_t bytes) {
  const std::int64_t size = std::max(communicators_.For(channel).size, 1);
  const std::int64_t step = std::max<std::int64_t>(options_.max_call_bytes / size, 1);
  std::vector<Call> calls;
  std::shared_ptr<const SliceType> slice;
  for (std::int64_t first = 0; first < bytes; first += step) {
    const std::int64_t part = std::min(step, bytes - first);
    Call& call = calls.emplace_back();
    call.kind = Call::Kind::kAllToAll;
    call.input = static_cast<const std::byte*>(input) + first;
    call.output = At(output, first);
    call.count = static_cast<int>(part);
    if (part == bytes) break;  // the parts as they lie
    if (part < step || slice == nullptr) slice = std::make_shared<const SliceType>(part, bytes);
    if (!slice->status().ok()) return std::make_unique<Operation>(slice->status());
    call.count = 1;
    call.type = slice->get();
    call.slice = slice;
  }
  return Run(channel, std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::Exchange(Channel channel,
                                                   std::span<const ops::OutgoingSlice> outgoing,
                                                   std::span<const ops::IncomingSlice> incoming) {
  const Line line = communicators_.For(channel);
  if (line.comm == MPI_COMM_NULL) {
    return Refused(StatusCode::kBackend,
                   "there is no MPI communicator for " + ChannelName(channel));
  }
  std::vector<Transfer> transfers;
  for (const ops::IncomingSlice& slice : incoming) {
    if (slice.bytes == 0) continue;
    transfers.push_back({.peer = slice.member, .taken = slice.memory, .bytes = slice.bytes});
  }
  for (const ops::OutgoingSlice& slice : outgoing) {
    if (slice.bytes == 0) continue;
    transfers.push_back(
        {.sends = true, .peer = slice.member, .given = slice.memory, .bytes = slice.bytes});
  }
  const TransferOptions options{.comm = line.comm,
                                .tag = kExchangeTag,
                                .mode = ModeOf(channel),
                                .max_call_bytes = options_.max_call_bytes};
  return std::make_unique<Transfers>(options, transfers, *stop_);
}

std::unique_ptr<ops::Completion> Backend::RunMessage(const Transfer& message, int tag) {
  const TransferOptions options{.comm = communicators_.messages(),
                                .tag = communicators_.MessageTag(tag),
                                .mode = Mode::kPolled,
                                .is_message = true,
                                .max_call_bytes = options_.max_call_bytes};
  return std::make_unique<Transfers>(options, std::vector<Transfer>{message}, *stop_);
}

std::unique_ptr<ops::Completion> Backend::SendMessage(int to, int tag, const void* memory,
                                                      std::int64_t bytes) {
  return RunMessage({.sends = true, .peer = to, .given = memory, .bytes = bytes}, tag);
}

std::unique_ptr<ops::Completion> Backend::ReceiveMessage(int from, int tag, void* memory,
                                                         std::int64_t bytes) {
  return RunMessage({.peer = from, .taken = memory, .bytes = bytes}, tag);
}

}  // namespace sirtaki::mpi
