// What the members of a set tell each other through the host: before they make a communicator on
// their GPUs, and of the rows of a group that only they know.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/work.h"
#include "ops/groups/row_exchange.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::ops::nccl {

// One member's word. Travels as it is: the ranks of a job run on machines of one kind.
struct Introduction {
  std::int32_t failed = 0;   // then `text` says why this member cannot take part
  std::int32_t version = 0;  // of its NCCL
  UniqueId id;               // of the communicator, from the first member
  std::array<char, 240> text{};

  static Introduction Of(int version, const UniqueId& id);
  static Introduction Failure(const core::Status& why);
  std::string Why() const;  // the text
};

// Shared by whoever tells and whoever waits; changed until `told` is done.
struct Rendezvous {
  core::HandlePtr told;
  Introduction own;
  std::vector<Introduction> all;  // by member
};
using RendezvousPtr = std::shared_ptr<Rendezvous>;

// The rows of a group of tensors on GPUs. Likewise shared, and changed until `told` is done.
struct ToldRows {
  explicit ToldRows(std::shared_ptr<const GroupTask> of);

  const std::shared_ptr<const GroupTask> group;
  RowExchange exchange;
  std::vector<std::int64_t> all;  // by member: its exchange.own()
  const core::HandlePtr told;
};
using ToldRowsPtr = std::shared_ptr<ToldRows>;

// Ok if they can make a communicator; else the same error at all: kUnsupported naming the member
// that cannot (its rank), or the versions that differ.
core::Status Judge(const std::vector<Introduction>& all, const core::RankRanges& members);

}  // namespace sirtaki::ops::nccl
