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

// MPI_DATATYPE_NULL: MPI has no arithmetic for it. Signed integers go as unsigned ones: the bits of
// the sum are the same, and those of MPI's C code wrap by definition.
MPI_Datatype SumType(DType dtype) {
  switch (dtype) {
    case DType::kU8:
    case DType::kI8:
      return MPI_UINT8_T;
    case DType::kI16:
      return MPI_UINT16_T;
    case DType::kI32:
      return MPI_UINT32_T;
    case DType::kI64:
      return MPI_UINT64_T;
    case DType::kF32:
      return MPI_FLOAT;
    case DType::kF64:
      return MPI_DOUBLE;
    default:
      break;
  }
  return MPI_DATATYPE_NULL;
}

// Open MPI's MPI_SUM saturates 8- and 16-bit integers where it has AVX (128 + 128 is 255 as uint8),
// which its makers will not change: github.com/open-mpi/ompi/issues/8045. So these sums are ours.
template <typename T>
void WrappingSum(void* in, void* in_out, int* count, MPI_Datatype*) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) to[i] = static_cast<T>(to[i] + from[i]);
}

std::string ChannelName(Channel channel) {
  return "process set " + std::to_string(channel.set) +
         (channel.lane == fusion::Lane::kSmall ? ", small lane" : ", large lane");
}

std::byte* At(void* base, std::int64_t offset) { return static_cast<std::byte*>(base) + offset; }

}  // namespace

Backend::Backend(Communicators& communicators, BackendOptions options)
    : communicators_(communicators), options_(options), stop_(std::make_shared<StopSign>()) {
  MPI_Op_create(WrappingSum<std::uint8_t>, /*commute=*/1, &sum_u8_);
  MPI_Op_create(WrappingSum<std::uint16_t>, /*commute=*/1, &sum_u16_);
}

Backend::~Backend() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (Environment::HasFault() || finalized != 0) return;
  for (MPI_Op* op : {&sum_u8_, &sum_u16_}) {
    if (*op != MPI_OP_NULL) MPI_Op_free(op);
  }
}

Status Backend::AddSet(core::SetNumber set, const core::RankRanges& members) {
  return communicators_.AddSet(set, members);
}

std::unique_ptr<ops::Completion> Backend::Run(Channel channel, std::vector<Call> calls) {
  const Line line = communicators_.For(channel);
  if (line.comm == MPI_COMM_NULL) {
    return std::make_unique<Operation>(
        Status(StatusCode::kBackend, "there is no MPI communicator for " + ChannelName(channel)));
  }
  const bool blocking = channel.lane == fusion::Lane::kLarge && !options_.serialized;
  return std::make_unique<Operation>(line.comm, blocking ? Mode::kBlocking : Mode::kPolled, stop_,
                                     std::move(calls));
}

std::unique_ptr<ops::Completion> Backend::AllReduce(Channel channel, void* buffer,
                                                    std::int64_t count, DType dtype,
                                                    core::ReduceOp op) {
  const MPI_Datatype type = SumType(dtype);
  if (type == MPI_DATATYPE_NULL || op != core::ReduceOp::kSum) {
    return std::make_unique<Operation>(
        Status(StatusCode::kUnsupported,
               "MPI cannot sum " + std::string(core::DTypeName(dtype)) + " by itself"));
  }
  const auto size = static_cast<std::int64_t>(core::SizeOf(dtype));
  const std::int64_t step = std::max<std::int64_t>(options_.max_call_bytes / size, 1);
  std::vector<Call> calls;
  for (std::int64_t first = 0; first < count; first += step) {
    Call& call = calls.emplace_back();
    call.kind = Call::Kind::kAllReduce;
    call.output = At(buffer, first * size);
    call.count = static_cast<int>(std::min(step, count - first));
    call.type = type;
    if (type == MPI_UINT8_T) call.op = sum_u8_;
    if (type == MPI_UINT16_T) call.op = sum_u16_;
  }
  return Run(channel, std::move(calls));
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

}  // namespace sirtaki::mpi
