#include "frameworks/torch/state/equality.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <utility>

#include "core/base/digest.h"
#include "core/base/rank_ranges.h"
#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using Lists = std::vector<std::vector<std::string>>;  // by rank

std::string Quoted(const std::string& name, const at::Tensor& tensor) {
  return "\"" + name + "\" " + TypeAndShape(tensor) + SplitText(tensor);
}

std::string Hex(const void* data, std::size_t bytes) {
  // The most significant byte first, as one writes numbers.
  const auto* at = static_cast<const unsigned char*>(data);
  std::string text = "0x";
  for (std::size_t i = bytes; i-- > 0;) {
    char digits[3];
    (void)std::snprintf(digits, sizeof(digits), "%02x", at[i]);
    text += digits;
  }
  return text;
}

// Lying flat, for the host to read; of one on a GPU a copy, which waits for it.
at::Tensor OnHost(const at::Tensor& tensor) {
  const at::Tensor flat = Flat(tensor);
  return flat.is_cuda() ? flat.cpu() : flat;
}

std::string DigestText(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::Tensor flat = OnHost(tensor);
  const std::uint64_t digest = core::Digest(flat.const_data_ptr(), flat.nbytes());
  return Hex(&digest, sizeof(digest));
}

// Makes two entries for each tensor: one with its name, type and shape, and one with its digest.
std::vector<std::string> DescribeWithDigests(const NamedTensors& tensors, std::string* error) {
  std::vector<std::string> list;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) *error = WhyNotMovable(tensor);
    if (error->empty()) {
      try {
        list.push_back(Quoted(name, tensor));
        list.push_back(DigestText(tensor));
        continue;
      } catch (const std::exception& failure) {
        *error = WhyNoMemory(failure);
      }
    }
    *error = "\"" + name + "\": " + *error;
    return list;
  }
  return list;
}

// A Half is one of the two halves of DescribeWithDigests' entries, of every rank.
enum class Half { kDescriptions, kDigests };
Lists Take(const Lists& lists, Half half) {
  Lists taken(lists.size());
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (std::size_t i = half == Half::kDigests ? 1 : 0; i < lists[rank].size(); i += 2) {
      taken[rank].push_back(lists[rank][i]);
    }
  }
  return taken;
}

bool AllEqual(const Lists& lists) {
  for (const auto& list : lists) {
    if (list != lists[0]) return false;
  }
  return true;
}

// Which of the tensors differ. Precondition: the lists have the same length.
std::vector<std::size_t> Differing(const Lists& digests) {
  std::vector<std::size_t> differing;
  for (std::size_t i = 0; i < digests[0].size(); ++i) {
    for (const auto& list : digests) {
      if (list[i] == digests[0][i]) continue;
      differing.push_back(i);
      break;
    }
  }
  return differing;
}

// Writes as many digits as tell any two numbers of the type apart.
std::string ElementText(const at::Tensor& element) {
  std::ostringstream text;
  if (element.is_complex()) {
    const at::Tensor parts = at::view_as_real(element);
    return ElementText(parts[0]) + " + i " + ElementText(parts[1]);
  }
  if (element.is_floating_point()) {
    text.precision(element.scalar_type() == at::kDouble ? 17 : 9);
    text << element.item<double>();
  } else if (element.scalar_type() == at::kBool) {
    text << (element.item<bool>() ? "true" : "false");
  } else {
    text << element.item<std::int64_t>();
  }
  return text.str() + " (" + Hex(element.const_data_ptr(), element.element_size()) + ")";
}

// Two tensors that lie flat, of one type and shape. Empty if they are equal bit by bit.
std::string FirstDifferentElement(const at::Tensor& of_root, const at::Tensor& mine, int first,
                                  int rank) {
  const auto* a = static_cast<const char*>(of_root.const_data_ptr());
  const auto* b = static_cast<const char*>(mine.const_data_ptr());
  const std::size_t bytes = mine.element_size();
  for (std::int64_t i = 0; i < mine.numel(); ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * bytes;
    if (std::memcmp(a + at, b + at, bytes) == 0) continue;
    std::string index;
    std::int64_t rest = i;
    for (std::int64_t d = mine.dim() - 1; d >= 0; --d) {
      index = std::to_string(rest % mine.size(d)) + (index.empty() ? "" : ", ") + index;
      rest /= mine.size(d);
    }
    const at::Tensor x = of_root.reshape({-1})[i];
    const at::Tensor y = mine.reshape({-1})[i];
    std::string text = "the first different element, [" + index + "], is " + ElementText(x) +
                       " on rank " + std::to_string(first) + " and " + ElementText(y) +
                       " on rank " + std::to_string(rank);
    if (x.equal(y)) text += ", equal as numbers and different in their bits";
    return text;
  }
  return {};
}

// What to say of a tensor whose digests, those of these ranks, differ, the same on every rank.
std::string Locate(const std::string& what, const at::Tensor& tensor,
                   const std::vector<std::string>& digests, const std::vector<int>& ranks,
                   const SessionSet& set) {
  at::NoGradGuard no_grad;
  // A GPU's tensor is compared with a copy, so that ranks which have it elsewhere can tell, too.
  const at::Tensor mine_flat = OnHost(tensor);
  TensorCall call =
      OwnCall(core::OpKind::kBroadcast, mine_flat, "sirtaki/" + what + "/first different", set);
  call.root = ranks.front();
  const at::Tensor of_root = PendingTensor::Start(std::move(call), set.session)->Synchronize();
  std::string mine;
  std::string error;
  const auto own = std::find(ranks.begin(), ranks.end(), set.rank()) - ranks.begin();
  if (digests[static_cast<std::size_t>(own)] != digests[0]) {
    try {
      mine = FirstDifferentElement(of_root, mine_flat, ranks.front(), set.rank());
    } catch (const std::exception& failure) {
      error = WhyNoMemory(failure);
    }
  }
  for (const auto& of_rank : ExchangeLists(what + "/element", {mine}, error, set)) {
    if (!of_rank[0].empty()) return "; " + of_rank[0];
  }
  return {};  // somebody wrote to the tensor meanwhile
}

[[noreturn]] void ThrowMismatch(const std::string& text) {
  ThrowStatus(core::Status(core::StatusCode::kMismatch, text));
}

}  // namespace

void CheckEqual(const std::string& what, const NamedTensors& tensors, const SessionSet& set) {
  ThrowIfError(set.session->Check());
  if (set.size() == 1) return;
  std::string error;
  const std::vector<std::string> list = DescribeWithDigests(tensors, &error);
  std::vector<int> ranks;
  const Lists lists = ExchangeLists(what, list, error, set, {}, &ranks);
  if (lists.empty()) return;
  const Lists descriptions = Take(lists, Half::kDescriptions);
  if (!AllEqual(descriptions)) ThrowMismatch(what + ": " + FirstDifference(descriptions, ranks));

  const Lists digests = Take(lists, Half::kDigests);
  const std::vector<std::size_t> differing = Differing(digests);
  const std::size_t first = differing.front();
  const auto& [name, tensor] = tensors[first];
  std::vector<std::string> digest_of_rank;
  for (const auto& of_rank : digests) digest_of_rank.push_back(of_rank[first]);
  std::string text = what + ": " + Quoted(name, tensor) + " differs: digest " +
                     GroupsText(digest_of_rank, ranks) +
                     Locate(what, tensor, digest_of_rank, ranks, set);
  if (differing.size() > 1) {
    text += "; it is the first of " + std::to_string(differing.size()) + " tensors that differ";
  }
  ThrowMismatch(text);
}

}  // namespace sirtaki::detail
