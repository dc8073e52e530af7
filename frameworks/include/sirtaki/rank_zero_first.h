// run_rank_zero_first() lets one rank go first: it downloads or prepares what the others then find
// in place.
#pragma once

#include <torch/arg.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "sirtaki/export.h"

namespace sirtaki {

enum class FirstScope : unsigned char {
  Job,   // rank 0 goes first: for a file system that all hosts share
  Host,  // local rank 0 of every host goes first: for each host's own disk
};

struct RankZeroFirstOptions {
  TORCH_ARG(FirstScope, scope) = FirstScope::Job;
  // The name stands in stall warnings and errors for what the ranks wait for. Two such calls that
  // are under way at the same time need different names.
  TORCH_ARG(std::string, name);
};

namespace detail {
// Runs a function without a result.
SIRTAKI_API void RunRankZeroFirst(const std::function<void()>& run,
                                  const RankZeroFirstOptions& options);
}  // namespace detail

// Calls `fn` on the first rank (or on the first of every host), then on the others, and returns
// what it returned here when all of them have finished:
//
//   auto data = sirtaki::run_rank_zero_first([&] { return Mnist(download("mnist")); });
//
// Collective over all ranks of the job, which shares its disks whatever its process sets are. `fn`
// must not be collective: it runs while other ranks wait. If it throws on a first rank, the others
// do not call it; if it throws on a later one, they have called it. Either way that rank throws
// what `fn` threw, and all others throw InvalidArgument with its rank and text, so that none goes
// on without what the rest has. Ranks wait here as long as in any collective operation: raise the
// option `stall_limit` (30 min) for work that takes longer.
template <class Fn>
std::invoke_result_t<Fn&> run_rank_zero_first(Fn&& fn, const RankZeroFirstOptions& options = {}) {
  using Result = std::invoke_result_t<Fn&>;
  static_assert(!std::is_reference_v<Result>, "the function returns a value or nothing");
  if constexpr (std::is_void_v<Result>) {
    detail::RunRankZeroFirst([&fn] { fn(); }, options);
  } else {
    std::optional<Result> result;
    detail::RunRankZeroFirst([&] { result.emplace(fn()); }, options);
    return std::move(*result);
  }
}

}  // namespace sirtaki
