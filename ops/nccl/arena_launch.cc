// The entry of the order that makes an arena. All members of the set come to it and tell each other
// whether they have the memory, and how NCCL knows it; what one of them lacks, none uses. There
// they also give up the arenas that none of them has a use for.
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "ops/nccl/group_launch.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;

// Each word becomes the least that any member says, when the device has come here.
Status AgreeOnLeast(const LaunchContext& context, std::vector<std::int32_t>* words) {
  const std::size_t bytes = words->size() * sizeof(std::int32_t);
  void* host = nullptr;
  Status status = context.host.Reserve(static_cast<std::int64_t>(bytes), &host);
  std::byte* device = nullptr;
  if (status.ok()) status = context.staging.Reserve(static_cast<std::int64_t>(bytes), &device);
  if (!status.ok()) return status;
  std::memcpy(host, words->data(), bytes);
  const cuda::Api& cuda = context.stream.device().api();
  const cuda::StreamHandle stream = context.stream.handle();
  status = cuda::Check(cuda,
                       cuda.MemcpyAsync(device, host, bytes, cuda::CopyKind::kHostToDevice, stream),
                       "cudaMemcpyAsync");
  if (status.ok()) {
    status = context.communicator.Run(
        "ncclAllReduce",
        [&](CommHandle comm) {
          return context.communicator.api().AllReduce(device, device, words->size(),
                                                      DataType::kInt32, RedOp::kMin, comm, stream);
        },
        context.patience);
  }
  if (status.ok()) {
    status = cuda::Check(
        cuda, cuda.MemcpyAsync(host, device, bytes, cuda::CopyKind::kDeviceToHost, stream),
        "cudaMemcpyAsync");
  }
  cuda::EventPtr event;
  if (status.ok()) status = context.events.Take(&event);
  if (status.ok()) status = event->Record(stream);
  if (status.ok()) status = context.await(*event);
  if (status.ok()) std::memcpy(words->data(), host, bytes);
  return status;
}

// Before the memory of an arena is taken, which may be the last that there is.
Status ReserveForAgreement(const LaunchContext& context, std::size_t words) {
  const auto bytes = static_cast<std::int64_t>(words * sizeof(std::int32_t));
  void* host = nullptr;
  std::byte* device = nullptr;
  Status status = context.host.Reserve(bytes, &host);
  return status.ok() ? context.staging.Reserve(bytes, &device) : status;
}

// Those that all members have retired.
Status GiveUp(const LaunchContext& context, const std::int32_t* all_retired, std::size_t count) {
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) any |= all_retired[i] != 0;
  if (!any) return Status::Ok();
  Status status = context.drained();
  for (std::size_t i = count; i > 0 && status.ok(); --i) {
    if (all_retired[i - 1] == 0) continue;
    status = context.arenas.Remove(i - 1, context.communicator, context.patience);
  }
  return status;
}

// Which is the same at all of them, or none.
Status AgreeOnForm(const LaunchContext& context, Arenas::Form* form) {
  const auto mine = static_cast<std::int32_t>(*form);
  std::vector<std::int32_t> least_and_most = {mine, -mine};
  Status status = AgreeOnLeast(context, &least_and_most);
  if (!status.ok() || least_and_most[0] == -least_and_most[1]) return status;
  *form = Arenas::Form::kPlain;
  return context.arenas.Unregister(context.communicator, context.patience);
}

void LogArena(const GroupTask& task, std::int64_t bytes, const char* how) {
  SIRTAKI_LOG(kInfo, "an arena of " << bytes << " bytes for gradients on GPU slot "
                                    << task.signature().slot << ": " << how);
}

const char* TextOf(Arenas::Form form) {
  constexpr std::array<const char*, 3> kTexts = {"not registered with NCCL", "registered with NCCL",
                                                 "a symmetric window of NCCL"};
  return kTexts[static_cast<std::size_t>(form)];
}

}  // namespace

Status LaunchArena(const LaunchContext& context, const GroupTask& task) {
  // A rank that has joined has no work here, and no memory for it.
  const core::WorkPtr& work = task.items.front().work;
  cuda::DeviceWork* const on_gpu = work != nullptr ? &cuda::AsDeviceWork(*work) : nullptr;
  ArenaRequest* const request = on_gpu != nullptr ? on_gpu->arena_request.get() : nullptr;
  const std::size_t before = context.arenas.count();
  constexpr std::size_t kOwnWords = 2;  // there is memory; it is NCCL's
  std::vector<std::int32_t> words(kOwnWords, 0);
  for (std::size_t i = 0; i < before; ++i) words.push_back(context.arenas.retired(i) ? 1 : 0);
  Status status = ReserveForAgreement(context, words.size());
  if (!status.ok()) return status;
  ArenaPtr arena;
  if (request != nullptr) {
    arena = Arena::Make(on_gpu->device, context.api, context.arenas.frees(), request->bytes);
  }
  words[0] = arena != nullptr ? 1 : 0;
  words[1] = arena != nullptr && arena->of_nccl() ? 1 : 0;
  const bool has_memory = arena != nullptr;
  status = AgreeOnLeast(context, &words);
  if (status.ok()) status = GiveUp(context, words.data() + kOwnWords, before);
  if (!status.ok()) return status;
  if (words[0] == 0) {
    if (request != nullptr) {
      LogArena(task, request->bytes,
               has_memory ? "another rank has no memory for it; buckets are packed"
                          : "this rank has no memory for it; buckets are packed");
    }
    return status;
  }
  auto form = Arenas::Form::kPlain;
  const bool registers = words[1] != 0;
  status = context.arenas.Add(arena, registers, context.communicator, context.patience, &form);
  if (status.ok() && registers) status = AgreeOnForm(context, &form);
  if (!status.ok()) return status;
  LogArena(task, arena->bytes(), TextOf(form));
  request->arena = std::move(arena);
  return status;
}

}  // namespace sirtaki::ops::nccl
