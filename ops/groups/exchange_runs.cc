// What members give to each other in parts of different sizes: gather, scatter and all-to-all. The
// rows of all tensors are told first, in one operation, then all tensors move in another one.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ops/base/bytes.h"
#include "ops/groups/exchange_slices.h"
#include "ops/groups/row_counts.h"
#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

using core::StatusCode;

// Rows by member, of each tensor.
using RowTable = std::vector<std::vector<std::int64_t>>;

class ExchangeRun : public GroupRun {
 public:
  explicit ExchangeRun(const RunContext& context) : GroupRun(context) {}

 protected:
  // Begins the operation that tells the rows.
  virtual void TellRows() = 0;
  // It has finished: what this rank gives to each member and gets from each, by tensor. A member
  // that has joined is given nothing whatever is in here.
  virtual void Learn(RowTable* giving, RowTable* getting) = 0;
  // Whether this rank has an output, even if nothing is put there.
  virtual bool HasOutput() const { return true; }

  std::size_t tensors() const { return task()->items.size(); }
  std::int64_t told_bytes() const {
    return static_cast<std::int64_t>(tensors() * sizeof(std::int64_t));
  }
  RowTable NoRows() const {
    return RowTable(tensors(), std::vector<std::int64_t>(static_cast<std::size_t>(members()), 0));
  }

 private:
  enum class Step : std::uint8_t { kTell, kMove, kOver };

  bool Next() override {
    if (step_ == Step::kOver) return false;
    if (step_ == Step::kTell) {
      step_ = Step::kMove;
      TellRows();
      return true;
    }
    step_ = Step::kOver;
    RowTable giving = NoRows();
    RowTable getting = NoRows();
    Learn(&giving, &getting);
    trace_.Pack();
    for (std::size_t t = 0; t < tensors(); ++t) {
      if (!Move(task()->items[t], giving[t], getting[t])) return false;
    }
    if (members() > 1) Begin([&] { return slices_.Exchange(backend_, channel()); });
    return true;
  }

  bool Move(const GroupItem& item, const std::vector<std::int64_t>& giving,
            const std::vector<std::int64_t>& getting) {
    const std::int64_t row_bytes = item.signature->ElementCount() * BytesOf(item.signature->dtype);
    std::int64_t given = 0;
    std::int64_t got = 0;
    if (!TotalBytes(giving, row_bytes, &given)) {
      return Fail(StatusCode::kBackend, WrongRows(task()->KeyOf(item), giving));
    }
    if (!TotalBytes(getting, row_bytes, &got)) {
      return Fail(StatusCode::kBackend, WrongRows(task()->KeyOf(item), getting));
    }
    if (item.work == nullptr) return true;
    std::byte* output = nullptr;
    if (HasOutput()) {
      output = static_cast<std::byte*>(item.work->allocate_output(getting));
      if (got > 0 && output == nullptr)
        return Fail(StatusCode::kBackend, NoMemoryFor(task()->KeyOf(item)));
    }
    const auto* input = static_cast<const std::byte*>(item.work->input);
    std::size_t next = 0;
    for (std::int64_t m = 0; m < members(); ++m) {
      const std::int64_t gives = giving[static_cast<std::size_t>(m)] * row_bytes;
      const std::int64_t gets = getting[static_cast<std::size_t>(m)] * row_bytes;
      const bool takes_part = next < active().size() && active()[next] == m;
      if (takes_part) {
        ++next;
        if (m == self()) {
          Copy(output, input, gets);
        } else {
          slices_.Send(m, input, gives);
          slices_.Receive(m, output, gets);
        }
      }
      if (gives > 0) input += gives;
      if (gets > 0) output += gets;
    }
    return true;
  }

  Slices slices_;
  Step step_ = Step::kTell;
};

// To the root alone.
class GatherRun : public ExchangeRun {
 public:
  explicit GatherRun(const RunContext& context) : ExchangeRun(context) {}

 private:
  void TellRows() override {
    for (const GroupItem& item : task()->items) {
      own_.push_back(item.work == nullptr ? 0 : item.work->rows);
    }
    all_.resize(tensors() * static_cast<std::size_t>(members()));
    Begin([&] { return backend_.AllGather(channel(), own_.data(), all_.data(), told_bytes()); });
  }

  void Learn(RowTable* giving, RowTable* getting) override {
    for (std::size_t t = 0; t < tensors(); ++t) {
      (*giving)[t][static_cast<std::size_t>(root())] = own_[t];
      for (std::size_t m = 0; is_root() && m < (*getting)[t].size(); ++m) {
        (*getting)[t][m] = all_[m * tensors() + t];
      }
    }
  }

  bool HasOutput() const override { return is_root(); }

  std::vector<std::int64_t> own_;  // by tensor
  std::vector<std::int64_t> all_;  // by member, then tensor
};

// From the root, which tells everybody's rows to everybody.
class ScatterRun : public ExchangeRun {
 public:
  explicit ScatterRun(const RunContext& context) : ExchangeRun(context) {}

 private:
  void TellRows() override {
    all_.assign(tensors() * static_cast<std::size_t>(members()), 0);
    for (std::size_t t = 0; is_root() && t < tensors(); ++t) {
      const core::Work& work = *task()->items[t].work;
      for (std::int64_t m = 0; m < members(); ++m) {
        all_[t * static_cast<std::size_t>(members()) + static_cast<std::size_t>(m)] =
            work.splits.empty() ? core::RowsOf(work.rows, members(), m)
                                : work.splits[static_cast<std::size_t>(m)];
      }
    }
    Begin([&] {
      return backend_.Broadcast(channel(), all_.data(), told_bytes() * members(),
                                static_cast<int>(root()));
    });
  }

  void Learn(RowTable* giving, RowTable* getting) override {
    for (std::size_t t = 0; t < tensors(); ++t) {
      const auto rows = all_.begin() + static_cast<std::ptrdiff_t>(t) * members();
      (*getting)[t][static_cast<std::size_t>(root())] = rows[self()];
      if (is_root()) (*giving)[t].assign(rows, rows + members());
    }
  }

  std::vector<std::int64_t> all_;  // by tensor, then member
};

class AllToAllRun : public ExchangeRun {
 public:
  explicit AllToAllRun(const RunContext& context) : ExchangeRun(context) {}

 private:
  void TellRows() override {
    given_.assign(tensors() * static_cast<std::size_t>(members()), 0);
    got_.resize(given_.size());
    for (std::size_t t = 0; t < tensors(); ++t) {
      const core::WorkPtr& work = task()->items[t].work;
      for (std::size_t m = 0; work != nullptr && m < static_cast<std::size_t>(members()); ++m) {
        given_[m * tensors() + t] = work->splits.empty() ? work->rows / members() : work->splits[m];
      }
    }
    Begin([&] { return backend_.AllToAll(channel(), given_.data(), got_.data(), told_bytes()); });
  }

  void Learn(RowTable* giving, RowTable* getting) override {
    for (std::size_t t = 0; t < tensors(); ++t) {
      for (std::size_t m = 0; m < static_cast<std::size_t>(members()); ++m) {
        (*giving)[t][m] = given_[m * tensors() + t];
        (*getting)[t][m] = got_[m * tensors() + t];
      }
    }
  }

  std::vector<std::int64_t> given_;  // by member, then tensor
  std::vector<std::int64_t> got_;
};

}  // namespace

std::unique_ptr<GroupRun> MakeGatherRun(const RunContext& context) {
  return std::make_unique<GatherRun>(context);
}

std::unique_ptr<GroupRun> MakeScatterRun(const RunContext& context) {
  return std::make_unique<ScatterRun>(context);
}

std::unique_ptr<GroupRun> MakeAllToAllRun(const RunContext& context) {
  return std::make_unique<AllToAllRun>(context);
}

}  // namespace sirtaki::ops
