#include "frameworks/torch/gradients/common_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "core/base/log.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/memory.h"

namespace sirtaki::detail {
namespace {

using ops::shm::CommonMemory;

// The memory that parameters had is given back to the system in pieces of this size.
constexpr std::int64_t kReleasedBytes = std::int64_t{16} << 20;

using Kept = std::shared_ptr<CommonMemory>;
void EndKept(void* kept) { delete static_cast<Kept*>(kept); }

// The memory is an allocator's or ours, and no other tensor is in it. What is a file's, pinned, an
// array's, or shared with processes that the program knows of has another context, and stays.
bool IsOfNobodyElse(const at::Storage& storage) {
  const at::DataPtr& data = storage.data_ptr();
  return storage.use_count() == 1 &&
         (data.get() == data.get_context() || data.get_deleter() == &EndKept);
}

// Whether the parameter may get other memory.
bool MayMove(const at::Tensor& parameter) {
  return parameter.is_cpu() && parameter.layout() == at::kStrided && parameter.numel() > 0 &&
         !parameter.is_inference() && !parameter.unsafeGetTensorImpl()->is_python_dispatch() &&
         parameter.is_non_overlapping_and_dense() && IsOfNobodyElse(parameter.storage());
}

at::Tensor TensorAt(const Kept& memory, std::byte* begin, const at::Tensor& like) {
  return at::for_blob(begin, like.sizes())
      .strides(like.strides())
      .context(new Kept(memory), &EndKept)
      .options(like.options().requires_grad(false))
      .make_tensor();
}

// A parameter begins so far within its first page. Gradients and state begin with a page, and an
// update that goes over all of them at once takes longer where they lie alike in their pages.
constexpr std::int64_t kIntoPage = 1152;

// Each parameter has pages of its own.
std::int64_t PagesOf(const at::Tensor& parameter) {
  return core::RoundUp(kIntoPage + static_cast<std::int64_t>(parameter.nbytes()),
                       ops::shm::PageSize());
}

// Calls `with(offset, bytes)` for each page of common memory in which what lies at `mine`, a parameter's
// `bytes` that begin there at `begin`, differs.
template <class With>
void ForEachDifferentPage(const CommonMemory& memory, std::int64_t begin, const std::byte* mine,
                          std::int64_t bytes, const With& with) {
  const std::int64_t page = ops::shm::PageSize();
  for (std::int64_t at = 0; at < bytes;) {
    const std::int64_t end = std::min(bytes, (begin + at) / page * page + page - begin);
    const auto size = static_cast<std::size_t>(end - at);
    if (std::memcmp(memory.common() + begin + at, mine + at, size) != 0) with(at, end - at);
    at = end;
  }
}

// Calls `with(candidate, pages)` for what this rank has written in the pages of common parameters.
template <class With>
void ForEachWritten(const std::vector<CommonCandidate>& candidates, const With& with) {
  std::map<const CommonMemory*, std::vector<CommonMemory::Range>> written;
  for (const CommonCandidate& candidate : candidates) {
    const CommonPlace& place = *candidate.place;
    if (!place.memory) continue;
    const auto [found, is_new] = written.try_emplace(place.memory.get());
    if (is_new) ThrowIfError(place.memory->FindWritten(&found->second));
    const std::int64_t first_page = place.begin - kIntoPage;
    const std::int64_t end = first_page + PagesOf(place.own);
    auto range = std::partition_point(found->second.begin(), found->second.end(),
                                      [&](const auto& of) { return of.end <= first_page; });
    for (; range != found->second.end() && range->begin < end; ++range) {
      with(candidate,
           CommonMemory::Range{std::max(first_page, range->begin), std::min(end, range->end)});
    }
  }
}

bool OnOneHost(const SessionSet& set) {
  const std::vector<int>& host_of_rank = set.session->topology().host_of_rank;
  const auto host = [&](int rank) { return host_of_rank[static_cast<std::size_t>(rank)]; };
  const std::vector<int> ranks = set.ranks();
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int rank) { return host(rank) == host(ranks.front()); });
}

}  // namespace

CommonParameters::CommonParameters(SessionSet set, const std::string& what, bool wanted)
    : set_(std::move(set)),
      name_("sirtaki/where the " + what + " lie"),
      on_(wanted && set_.size() > 1 && OnOneHost(set_) &&
          set_.session->session().config().shared_memory != core::SharedMemoryMode::kOff) {}

void CommonParameters::Meet(const std::vector<CommonCandidate>& candidates,
                            const std::string& error, bool in_step) {
  if (!on_) return;
  // A parameter that gets an inference tensor's memory becomes one.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  Positions adopted;
  Positions left;
  Ask(candidates, error, &adopted, &left);
  for (const std::size_t i : left) {
    const auto& [parameter, place, begin, count, stepped] = candidates[i];
    if (place->memory && place->memory->IsOwn(parameter.const_data_ptr())) {
      parameter.set_data(parameter.detach().clone());
    }
    *place = {};
  }
  if (!adopted.empty()) Adopt(candidates, adopted);
  for (const CommonCandidate& candidate : candidates) {
    const bool is_common = candidate.place->memory != nullptr;
    if (in_step || is_common) candidate.place->seen = candidate.parameter.const_data_ptr();
    has_common_ = has_common_ || is_common;
  }
  if (in_step && !(adopted.empty() && left.empty())) on_ = has_common_;
}

void CommonParameters::Ask(const std::vector<CommonCandidate>& candidates, const std::string& error,
                           Positions* adopted, Positions* left) const {
  std::vector<std::int64_t> moved;  // twice the position, and 1 where it may move
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const at::Tensor& parameter = candidates[i].parameter;
    if (parameter.numel() == 0 || parameter.const_data_ptr() == candidates[i].place->seen) continue;
    moved.push_back(static_cast<std::int64_t>(2 * i) + (MayMove(parameter) ? 1 : 0));
  }
  TensorCall call = OwnCall(core::OpKind::kAllGather, at::tensor(moved, at::kLong), name_, set_);
  if (!error.empty()) call.invalid = "the step of the optimizer has thrown: " + error;
  const auto gathered = PendingTensor::Start(std::move(call), set_.session);
  const at::Tensor of_all = gathered->Synchronize();
  if (gathered->joined() >= 0) ThrowJoined(gathered->joined());
  std::map<std::size_t, int> may_move;  // on how many ranks
  for (std::int64_t i = 0; i < of_all.numel(); ++i) {
    const std::int64_t told = of_all.const_data_ptr<std::int64_t>()[i];
    may_move[static_cast<std::size_t>(told / 2)] += static_cast<int>(told % 2);
  }
  for (const auto& [position, ranks] : may_move) {
    (ranks == set_.size() ? adopted : left)->push_back(position);
  }
}

void CommonParameters::Adopt(const std::vector<CommonCandidate>& candidates,
                             const Positions& adopted) {
  std::vector<std::int64_t> begins;
  std::int64_t bytes = 0;
  for (const std::size_t i : adopted) {
    begins.push_back(bytes + kIntoPage);
    bytes += PagesOf(candidates[i].parameter);
  }
  const std::shared_ptr<CommonMemory> memory = MakeMemory(bytes, [&](std::byte* common) {
    for (std::size_t a = 0; a < adopted.size(); ++a) {
      const at::Tensor& parameter = candidates[adopted[a]].parameter;
      std::memcpy(common + begins[a], parameter.const_data_ptr(), parameter.nbytes());
    }
  });
  std::int64_t freed = 0;
  for (std::size_t a = 0; a < adopted.size(); ++a) {
    const auto& [parameter, place, shard_begin, shard_count, stepped] = candidates[adopted[a]];
    *place = {};
    if (!memory) continue;
    place->memory = memory;
    place->begin = begins[a];
    place->own = TensorAt(memory, memory->own() + begins[a], parameter);
    place->common = TensorAt(memory, memory->common() + begins[a], parameter);
    // What this rank has otherwise than the first one stays its own.
    const auto* const had = static_cast<const std::byte*>(parameter.const_data_ptr());
    ForEachDifferentPage(*memory, begins[a], had, static_cast<std::int64_t>(parameter.nbytes()),
                         [&](std::int64_t at, std::int64_t size) {
                           std::memcpy(memory->own() + begins[a] + at, had + at,
                                       static_cast<std::size_t>(size));
                         });
    parameter.set_data(place->own);
    // The pool would keep it for some time, and at no time are all parameters to be there twice.
    freed += static_cast<std::int64_t>(parameter.nbytes());
    if (freed < kReleasedBytes && a + 1 < adopted.size()) continue;
    release_memory();
    freed = 0;
  }
}

// The first rank makes it, and tells the others where; null on all ranks if one of them cannot see it.
std::shared_ptr<CommonMemory> CommonParameters::MakeMemory(
    std::int64_t bytes, const std::function<void(std::byte* memory)>& fill) {
  std::shared_ptr<CommonMemory> memory;
  CommonMemory::Name name;
  core::Status status;
  const bool first = set_.rank() == set_.first();
  if (first) {
    status = CommonMemory::Create(bytes, &memory);
    if (status.ok()) name = memory->name();
  }
  const at::Tensor told =
      AllGatherBlocking(at::tensor({name.process, name.descriptor, name.token, bytes}, at::kLong),
                        name_ + "/name", set_);
  const auto* const numbers = told.const_data_ptr<std::int64_t>();
  name = {numbers[0], numbers[1], numbers[2]};
  if (numbers[3] != bytes) {
    status = {core::StatusCode::kUnsupported, "its size differs between the ranks"};
    memory = nullptr;
  } else if (!first && name.descriptor < 0) {
    status = {core::StatusCode::kUnsupported, "the first rank could not make it"};
  } else if (!first) {
    status = CommonMemory::Open(name, numbers[3], &memory);
  }
  if (first && memory) fill(memory->common());
  const at::Tensor seen =
      AllGatherBlocking(at::tensor({memory ? 1 : 0}, at::kLong), name_ + "/seen", set_);
  if (seen.sum().item<std::int64_t>() == set_.size()) return memory;
  if (!status.ok()) {
    SIRTAKI_LOG(kInfo,
                "each rank has its own copy of the parameters, as the ranks cannot share "
                "memory for them: "
                    << status.message());
  }
  return nullptr;
}

void CommonParameters::LetGoOfEqual(const std::vector<CommonCandidate>& candidates) {
  ForEachWritten(candidates, [](const CommonCandidate& of, const CommonMemory::Range& pages) {
    const CommonPlace& place = *of.place;
    CommonMemory& memory = *place.memory;
    const std::int64_t begin = std::max(place.begin, pages.begin);
    const std::int64_t end =
        std::min(pages.end, place.begin + static_cast<std::int64_t>(place.own.nbytes()));
    std::int64_t equal_from = pages.begin;
    const auto let_go_until = [&](std::int64_t until) {
      if (equal_from < until) memory.LetGo({equal_from, until});
    };
    ForEachDifferentPage(
        memory, begin, memory.own() + begin, end - begin, [&](std::int64_t at, auto) {
          const std::int64_t page = (begin + at) / ops::shm::PageSize() * ops::shm::PageSize();
          let_go_until(page);
          equal_from = page + ops::shm::PageSize();
        });
    let_go_until(pages.end);
  });
}

void CommonParameters::TakeWritten(const std::vector<CommonCandidate>& candidates) {
  ForEachWritten(candidates, [](const CommonCandidate& of, const CommonMemory::Range& pages) {
    if (!of.is_stepped) return;
    CommonMemory& memory = *of.place->memory;
    const auto size = static_cast<std::int64_t>(of.parameter.element_size());
    const std::int64_t begin_of_shard = of.place->begin + of.shard_begin * size;
    const std::int64_t from = std::max(begin_of_shard, pages.begin);
    const std::int64_t to = std::min(begin_of_shard + of.shard_count * size, pages.end);
    if (from < to) {
      std::memcpy(memory.common() + from, memory.own() + from, static_cast<std::size_t>(to - from));
    }
    memory.LetGo(pages);
  });
}

}  // namespace sirtaki::detail
