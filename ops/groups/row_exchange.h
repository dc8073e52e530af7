// The calls whose rows only the ranks know: what a rank tells of its rows, and, from what all have
// told, which bytes go from whom to whom. The host's runs and the lanes of GPUs tell and move each
// in their own way; the host's all-gather has a run of its own while nobody has joined
// (gather_runs.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "ops/groups/exchange_slices.h"
#include "ops/groups/group_task.h"

namespace sirtaki::ops {

// The sum of `rows`, each not negative, times `row_bytes`; false if that is not so or does not fit.
bool TotalBytes(const std::vector<std::int64_t>& rows, std::int64_t row_bytes, std::int64_t* total);
// The text of that; and of an allocate_output that gives nothing.
std::string WrongRows(const core::Key& key, const std::vector<std::int64_t>& rows);
std::string NoMemoryFor(const core::Key& key);

// The rows that are told are in the order of the members, and of each member in that of the
// tensors.
class RowExchange {
 public:
  // `task`: an all-gather, gather, scatter or all-to-all, which must outlive this.
  explicit RowExchange(const GroupTask& task);

  // What this rank tells. All-gather and gather: its rows. All-to-all, and scatter at its root:
  // those for each member. Scatter elsewhere: that many zeros.
  const std::vector<std::int64_t>& own() const { return own_; }
  // Where the rows go that are told to this rank: by each member, to it; scatter: by the root, to
  // all.
  std::vector<std::int64_t>& told() { return told_; }
  // Takes them from what all members have told, each its own(), in their order.
  void TakeFrom(const std::vector<std::int64_t>& all);
  core::OpKind kind() const { return kind_; }

  using Moves = std::function<void(const void* from, void* to, std::int64_t bytes)>;
  // Once `told` is there: has the outputs allocated, and notes what this rank gives to the others
  // and takes from them; `keep` is called for what it gives to itself. A member that has joined is
  // given nothing. `gather`: called in place of both for a tensor of which several members, who are
  // all there, give `bytes` each to `to`; null: never. kBackend if the rows are wrong or there is no
  // memory.
  core::Status Place(const Moves& keep, Slices* slices, const Moves& gather = nullptr) const;

 private:
  bool is_root() const { return self_ == root_; }
  std::int64_t Giving(std::size_t tensor, std::size_t member) const;
  std::int64_t Getting(std::size_t tensor, std::size_t member) const;
  core::Status PlaceTensor(std::size_t tensor, const Moves& keep, Slices* slices,
                           const Moves& gather) const;

  const GroupTask& task_;
  const core::OpKind kind_;
  const std::size_t tensors_;
  const std::size_t members_;
  const std::size_t self_;
  const std::size_t root_;  // 0 where there is none
  std::vector<std::int64_t> own_;
  std::vector<std::int64_t> told_;
};

}  // namespace sirtaki::ops
