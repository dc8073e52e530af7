// The entry of the order that makes an arena. All members of the set come to it and tell each other
// whether they have the memory, and how NCCL knows it; what one of them lacks, none uses. There
// they also give up the arenas that none of them has a use for.
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "ops/nccl/group_launch.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;

// Each word becomes the least that any member says, when the device has come here.
Status AgreeOnLeast(const LaunchContext& context, std::vector<std::int32_t>* words) {
  return context.Ask(*words, words, [&](const std::byte* from, std::byte* to) {
    return context.Call("ncclAllReduce", &Api::AllReduce, from, to, words->size(), DataType::kInt32,
                        RedOp::kMin);
  });
}

// Before the memory of an arena is taken, which may be the last that there is.
Status ReserveForAgreement(const LaunchContext& context, std::size_t words) {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  return context.ReserveToAsk(2 * words * sizeof(std::int32_t), &host, &device);
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
  constexpr std::array<const char*, 4> kTexts = {
      "not registered with NCCL", "registered with NCCL",
      "registered with NCCL, as a symmetric window where the machines can",
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
  words[1] = arena != nullptr && arena->of_nccl() && context.registers_arenas ? 1 : 0;
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
